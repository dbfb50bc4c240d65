"""From a checkpoint folder to a model with its parameters on the device.

Nothing is read before the headers have been checked against the model (`plan_weights`). Then, file
by file, the tensors go to the device in slabs, where they are transposed, cast and written in place
into their (possibly fused) parameter. A file is mapped for one slab at a time. So the host holds a
few slabs, however large a file or a parameter is and wherever the pieces of a fused one lie. Where
devices share the model, each is given its own part of every slab.

A tied output head that the file holds all the same is compared with the embedding, as transformers
does: a head of other values is kept, and the model is not tied.
"""

import math
import re
import warnings
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jpaged.errors import format_count
from jpaged.models.checkpoint import (
    FILE_DTYPES,
    SUPPORTED_DTYPES,
    CheckpointError,
    TensorInfo,
    WeightRule,
    WeightRules,
    format_names,
    read_rows,
    read_tensor_infos,
    resolve_checkpoint,
)
from jpaged.models.config import ModelConfig
from jpaged.models.decoder import Decoder
from jpaged.models.linear import parameter_part_sizes
from jpaged.models.registry import weight_rules
from jpaged.models.sharding import (
    ShardSlice,
    global_shape_struct,
    per_device_shape,
    shard_slices,
    sharded_axis,
)
from pallas_kernels import FP8_MAX, FP8_MIN_ABSMAX, to_fp8

SUPPORTED_LOAD_FORMATS = ("auto", "safetensors", "dummy")
SLAB_BYTES = 64 << 20

COMPARE_CHUNK_BYTES = 4 << 20
"""Of two tensors at a time: larger pieces are new memory each, which takes thrice as long."""

_DUMMY_STD = 0.02

_DUMMY_SCALE = 2.0**-8
"""Scale of quantized weights, whose largest numbers then are a quarter of FP8's, and of rows."""

_KV_SCALE_PATH = re.compile(r"layers\.\d+\.attention\.[kv]_scale")
"""Paths of parameters that a checkpoint may lack for both the keys and the values of a layer, which
are ones then; each may come by one of several rules."""

_COUNTERPART_SCALE = {"k_scale": "v_scale", "v_scale": "k_scale"}

_SCALE_SUFFIXES = (".weight_scale", ".input_scale", ".k_scale", ".v_scale")
"""Ends of the paths of parameters that numbers in FP8 are multiplied by."""

_LAYER_NUMBER = re.compile(r"(?<=\.)\d{1,9}(?=\.)")

ParameterSpecs = Mapping[str, jax.ShapeDtypeStruct]
"""Shape and dtype of each parameter by its path."""


@dataclass(frozen=True)
class TensorPlacement:
    """One tensor and its place: a piece of the parameter at `path`, where its rule says.

    `shape` is the tensor's in the parameter's layout; `axis_order` names its axes as they lie in the
    file, the slowest first. Of a tensor that is brought to FP8, the first `num_output_axes` axes there
    have a scale for each of their places.
    """

    tensor: TensorInfo
    rule: WeightRule
    path: str
    shape: tuple[int, ...]
    axis_order: tuple[int, ...]
    num_output_axes: int = 0

    @property
    def is_read_whole(self) -> bool:
        """Whether the tensor is read in one: a single number, or one that is brought to FP8 and
        lies as [in, out] (GPT-2's; the largest has 41 MB), so that no slab has all of an output."""
        return self.rule.is_scalar or self.axis_order[0] >= self.num_output_axes > 0


@dataclass(frozen=True)
class ModelPlan:
    """A model before its parameters are on the device: all that can be known without them.

    Attributes:
        config: the model's; with an output head of its own where the checkpoint has one.
        mesh: the devices that share the model; None for one.
        shapes: the model as each device computes it, with shapes in its parameters' places: those
            of the arrays over all devices.
    """

    config: ModelConfig
    mesh: Mesh | None
    abstract_model: nnx.Module
    _unsharded_specs: ParameterSpecs  # of the whole model, as one device would have it
    _placements: Sequence[TensorPlacement] | None  # None: random weights
    _seed: int

    def load(self) -> nnx.Module:
        """The model with its parameters on the devices.

        Raises:
            CheckpointError: a file cannot be read any more.
        """
        global_specs = model_parameters(self.abstract_model)
        own = {
            path: jax.ShapeDtypeStruct(per_device_shape(it), it.dtype)
            for path, it in global_specs.items()
        }
        devices = [None] if self.mesh is None else self.mesh.devices.ravel().tolist()
        shards = [
            DeviceShard(
                device,
                own,
                {
                    path: self._shard_slices(path, it.shape, device_index)
                    for path, it in own.items()
                },
            )
            for device_index, device in enumerate(devices)
        ]
        if self._placements is not None:
            _load_tensors(self._placements, shards)
            for shard in shards:
                shard.fill_missing()
        else:
            for shard in shards:
                shard.fill_random(self._unsharded_specs, self._seed)
        arrays = {path: _assemble_array(it, shards, path) for path, it in global_specs.items()}
        return with_parameters(self.abstract_model, arrays)

    def _shard_slices(self, path: str, own: tuple[int, ...], device_index: int) -> list[ShardSlice]:
        """What a device has of the parameter."""
        count = 1 if self.mesh is None else self.mesh.size
        whole, parts = self._unsharded_specs[path].shape, ()
        module_path, _, name = path.rpartition(".")
        projection, shard_projection = (
            it.projection(module_path) for it in (self.config, self.config.shard(count))
        )
        axis = sharded_axis(whole, own)
        if projection is not None and shard_projection is not None and axis is not None:
            sizes, own_sizes = (
                parameter_part_sizes(it, name, axis) for it in (projection, shard_projection)
            )
            parts = list(zip(sizes, own_sizes, strict=True))
        return shard_slices(whole, own, device_index, count, parts)


@dataclass
class DeviceShard:
    """What a device has of a model while it is loaded.

    Attributes:
        device: which one; None for JAX's default.
        specs: shapes of its parameters by path.
        held: what of each they are.
        arrays: those that are there.
    """

    device: Any
    specs: ParameterSpecs
    slices: Mapping[str, Sequence[ShardSlice]]
    arrays: dict[str, jax.Array] = field(default_factory=dict)

    def write_slab(
        self,
        path: str,
        slab: np.ndarray,
        start: np.ndarray,
        axis_order: tuple[int, ...],
        addend: float = 0.0,
        scale: np.ndarray | None = None,
    ) -> jax.Array:
        """Write what it has of a slab, whose axes lie in the file in that order, and which begins
        at `start` in the whole parameter; returns the parameter, which may not be there yet.

        `addend` is added to every value; by `scale` [*outputs] the slab is brought to FP8.
        """
        if path not in self.arrays:
            spec = self.specs[path]
            self.arrays[path] = jnp.zeros(spec.shape, spec.dtype, device=self.device)
        for piece, cut in self.slab_slices(path, slab, start, axis_order):
            part, first = slab[tuple(cut[axis] for axis in axis_order)], [it.start for it in cut]
            own = np.add(start, first) - piece.global_start + piece.local_start
            scale_part = None if scale is None else scale[tuple(cut[: scale.ndim])]
            self.arrays[path] = _update_parameter(
                self.arrays[path], part, own.astype(np.int32), scale_part, axis_order, addend
            )
        return self.arrays[path]

    def slab_slices(
        self, path: str, slab: np.ndarray, start: np.ndarray, axis_order: tuple[int, ...]
    ) -> Iterator[tuple[ShardSlice, list[slice]]]:
        """What it has of a slab: of which piece, and where in the slab, by the parameter's axes."""
        end = start.copy()
        end[list(axis_order)] += slab.shape
        for piece in self.slices[path]:
            low = np.maximum(piece.global_start, start)
            high = np.minimum(np.add(piece.global_start, piece.shape), end)
            if (low < high).all():
                yield piece, [slice(*ends) for ends in zip(low - start, high - start, strict=True)]

    def fill_missing(self) -> None:
        """The parameters that the checkpoint lacks."""
        for path in self.specs.keys() - self.arrays.keys():
            spec = self.specs[path]
            self.arrays[path] = jnp.ones(spec.shape, spec.dtype, device=self.device)

    def fill_random(self, whole: ParameterSpecs, seed: int) -> None:
        """Random parameters; `whole` has the shapes of the whole model's."""
        with nullcontext() if self.device is None else jax.default_device(self.device):
            for path, spec in self.specs.items():
                pieces = self.slices[path]
                self.arrays[path] = _dummy_array(path, spec, whole[path].shape, pieces, seed)


def _assemble_array(
    spec: jax.ShapeDtypeStruct, shards: Sequence[DeviceShard], path: str
) -> jax.Array:
    """The array over all devices of a parameter."""
    own = [shard.arrays[path] for shard in shards]
    if spec.sharding is None:
        return own[0]
    return jax.make_array_from_single_device_arrays(spec.shape, spec.sharding, own)


def with_parameters(model: nnx.Module, values: Mapping[str, Any]) -> nnx.Module:
    """Return the model with other values of its parameters, by path."""
    definition, state = nnx.split(model)
    flat = nnx.to_flat_state(state)
    filled = [(path, leaf.replace(values[_parameter_path(path)])) for path, leaf in flat]
    return nnx.merge(definition, nnx.from_flat_state(filled))


def plan_model(
    folder: str | Path,
    config: ModelConfig,
    *,
    dtype: DTypeLike,
    load_format: str = "auto",
    seed: int = 0,
    mesh: Mesh | None = None,
) -> ModelPlan:
    """Check the checkpoint against its config; no weights are read, but those of a tied head.

    Warns of a head that is not tied though the config says so.

    Args:
        folder: checkpoint folder or hub id; not looked at when `load_format` is "dummy".
        config: the model's config; picks the family.
        dtype: float32, float16 or bfloat16.
        load_format: "auto" and "safetensors" read the checkpoint; "dummy" makes random weights on
            the device, the same ones for the same `seed`.
        seed: of the dummy weights.
        mesh: the devices that share the model; None for one.

    Raises:
        CheckpointError: the checkpoint is missing, broken or does not fit the model exactly.
        ValueError: `dtype` or `load_format` is not one of the above, or the devices cannot share
            the model.
    """
    if load_format not in SUPPORTED_LOAD_FORMATS:
        raise ValueError(
            f"load_format={load_format!r} is unknown; use one of {SUPPORTED_LOAD_FORMATS}."
        )
    if jnp.dtype(dtype) not in SUPPORTED_DTYPES.values():
        raise ValueError(f"dtype={dtype!r} is unsupported; use float32, float16 or bfloat16.")
    if load_format == "dummy":
        abstract_model, specs = (
            make_abstract_model(config, dtype, mesh),
            _unsharded_specs(config, dtype),
        )
        return ModelPlan(config, mesh, abstract_model, specs, None, seed)
    tensors = read_tensor_infos(resolve_checkpoint(folder))
    rules = weight_rules(config)
    _check_num_layers(config, tensors, rules)
    config, rules = _resolve_tied_head(config, tensors, rules, jnp.dtype(dtype))
    abstract_model, specs = (
        make_abstract_model(config, dtype, mesh),
        _unsharded_specs(config, dtype),
    )
    try:
        placements = plan_weights(tensors, rules, specs)
    except CheckpointError as error:
        raise CheckpointError(f"{error} config.json says {config.size_summary}.") from None
    return ModelPlan(config, mesh, abstract_model, specs, placements, seed)


def _check_num_layers(
    config: ModelConfig, tensors: Iterable[TensorInfo], rules: WeightRules
) -> None:
    """Refuse more or fewer layers than the config has in one sentence, not tensor by tensor."""
    num_layers = 0
    for tensor in tensors:
        if number := _LAYER_NUMBER.search(tensor.name):
            # Every model has a layer 0, and all layers have the same names.
            rule = rules.find(_LAYER_NUMBER.sub("0", tensor.name, count=1))
            if rule is not None and rule.target and rule.target.startswith("layers.0."):
                num_layers = max(num_layers, int(number[0]) + 1)
    if num_layers not in (0, config.num_layers):
        raise CheckpointError(
            f"config.json says num_hidden_layers={config.num_layers}, but the checkpoint has "
            f"{format_count(num_layers, 'layer')}: fetch both again, from one place."
        )


def _resolve_tied_head(
    config: ModelConfig, tensors: Sequence[TensorInfo], rules: WeightRules, dtype: np.dtype
) -> tuple[ModelConfig, WeightRules]:
    """Whether the output head is tied, and the rules that go with that, from those of the config.

    As in transformers, a head that the file holds as well as the embedding is tied to it only if
    both are the same in the dtype they are loaded in; and one that it holds instead is the
    embedding.
    """
    if not config.tie_word_embeddings:
        return config, rules
    untied = replace(config, tie_word_embeddings=False)
    rules_untied = weight_rules(untied)
    found = {rule.target: it for it in tensors if (rule := rules_untied.find(it.name))}
    head, embed = found.get("lm_head.weight"), found.get("embed.weight")
    if head is None:
        return config, rules
    if embed is None:
        others = [rule for rule in rules.rules if rule.target not in (None, "embed.weight")]
        as_embedding = WeightRule("lm_head.weight", "embed.weight")
        return config, replace(rules, rules=[*others, as_embedding])
    if _are_equal(head, embed, dtype):
        return config, rules
    warnings.warn(
        f"config.json ties {head.name} to {embed.name} (tie_word_embeddings), but the checkpoint "
        "holds both with different values: the head is not tied. If that is right, set "
        "tie_word_embeddings to false in config.json.",
        stacklevel=2,
    )
    return untied, rules_untied


def _are_equal(one: TensorInfo, other: TensorInfo, dtype: np.dtype) -> bool:
    """Whether two tensors are the same once they are cast; read in slabs, up to the first that
    differs."""
    if one.shape != other.shape or len(one.shape) != 2:
        return False
    if not {one.dtype, other.dtype} <= SUPPORTED_DTYPES.keys():
        return False
    num_rows, width = one.shape
    item = max(SUPPORTED_DTYPES[each.dtype].itemsize for each in (one, other))
    step = max(1, COMPARE_CHUNK_BYTES // max(width * item, 1))
    for first in range(0, num_rows, step):
        rows = slice(first, min(first + step, num_rows))
        a, b = read_rows(one, rows), read_rows(other, rows)
        same_bytes = a.dtype == b.dtype and np.array_equal(a.view(np.uint8), b.view(np.uint8))
        if not same_bytes and not np.array_equal(a.astype(dtype), b.astype(dtype)):
            return False
    return True


def model_parameters(model: nnx.Module) -> dict[str, Any]:
    """Return the model's parameters, or the shapes in their places, by path."""
    flat = nnx.to_flat_state(nnx.state(model))
    return {_parameter_path(path): leaf.get_value() for path, leaf in flat}


def _unsharded_specs(config: ModelConfig, dtype: DTypeLike) -> ParameterSpecs:
    """Return the shapes of the parameters of the model on a single device, by path."""
    return model_parameters(make_abstract_model(config, dtype))


def _parameter_path(path: tuple) -> str:
    """Return a parameter's path, as of `WeightRule`."""
    return ".".join(str(each) for each in path if each != "format")


def make_abstract_model(
    config: ModelConfig, dtype: DTypeLike, mesh: Mesh | None = None
) -> nnx.Module:
    """The config's model, as each device of the mesh computes it, with shapes in its parameters'
    places: those of the arrays over all devices.

    Raises:
        ValueError: the devices cannot share the model.
    """
    whole = nnx.eval_shape(lambda: Decoder(config, dtype=dtype))
    if mesh is None:
        return whole
    shard = config.shard(mesh.size)
    own = nnx.eval_shape(lambda: Decoder(shard, dtype=dtype))
    specs = model_parameters(whole)
    values = {
        path: global_shape_struct(mesh, spec, sharded_axis(specs[path].shape, spec.shape))
        for path, spec in model_parameters(own).items()
    }
    return with_parameters(own, values)


Problems = dict[str, list[str]]
"""What is wrong with a checkpoint, by kind, so that one error names all of it."""


def plan_weights(
    tensors: Sequence[TensorInfo], rules: WeightRules, specs: ParameterSpecs
) -> list[TensorPlacement]:
    """Give every tensor its place and prove that every parameter is filled exactly once.

    The places come in the order of their tensors.

    Args:
        tensors: all tensors of the checkpoint.
        rules: the family's.
        specs: shape and dtype of each parameter by path.

    Raises:
        CheckpointError: unknown tensors, missing parameters, wrong shapes or dtypes, a place filled
            twice, a fused parameter with a missing piece. One error tells all of them.
    """
    problems: Problems = defaultdict(list)
    placements: list[TensorPlacement] = []
    names: dict[WeightRule, list[str]] = defaultdict(list)  # of the tensors of each rule
    for tensor in tensors:
        found = rules.find_all(tensor.name)
        if not found:
            problems["unknown tensors"].append(tensor.name)
        for rule in found:
            if rule.target is None:
                continue
            if rule.target not in specs:
                unknown = f"{tensor.name} (the model has no {rule.target})"
                problems["unknown tensors"].append(unknown)
                continue
            names[rule].append(tensor.name)
            placements.append(_place_tensor(tensor, rule, rule.target, specs, problems))
    rules_by_path: dict[str, list[WeightRule]] = {path: [] for path in specs}
    for rule in rules.rules:
        if rule.target in rules_by_path:
            rules_by_path[rule.target].append(rule)
    for path in {rule.scale_path for rule in rules.rules if rule.scale_path is not None}:
        del rules_by_path[path]  # made of what is read
    scales = {path: rules_by_path.pop(path) for path in specs if _KV_SCALE_PATH.fullmatch(path)}
    _check_kv_scales(scales, names, problems)
    _check_coverage(rules_by_path, names, specs, problems)
    for rule, twice in names.items():
        if len(twice) > 1:
            problems["parameters filled twice"].append(f"{rule.target} by {' and '.join(twice)}")
    if problems:
        kinds = (f"{kind} ({len(it)}): {format_names(it)}" for kind, it in problems.items())
        raise CheckpointError(f"The checkpoint does not fit the model. {'; '.join(kinds)}.")
    return placements


def _check_coverage(
    rules_by_path: Mapping[str, Sequence[WeightRule]],
    names: Mapping[WeightRule, Sequence[str]],
    specs: ParameterSpecs,
    problems: Problems,
) -> None:
    """Each parameter's pieces are all there, and fill it."""
    for path, own in rules_by_path.items():
        whole = specs[path].shape
        lacking = [rule.source for rule in own if rule not in names]
        sources = " and ".join(lacking) or "no rule"
        if len(lacking) == len(own):
            problems["missing parameters"].append(f"{path} (comes from {sources})")
            continue
        missing = whole[own[0].axis] - sum((rule.shape or whole)[rule.axis] for rule in own)
        if lacking or missing > 0:
            problem = f"{path} along axis {own[0].axis} (lacks {sources})"
            problems["parameters with a missing piece"].append(problem)
        elif missing < 0:
            twice = " and ".join(rule.source for rule in own)
            problems["parameters filled twice"].append(f"{path} by {twice}")


def _check_kv_scales(
    rules_by_path: Mapping[str, Sequence[WeightRule]],
    names: Mapping[WeightRule, Sequence[str]],
    problems: Problems,
) -> None:
    """Layers have one scale of their keys and one of their values, or neither."""
    found = {
        path: [names[rule][0] for rule in it if rule in names] for path, it in rules_by_path.items()
    }
    for path, own in found.items():
        other = _COUNTERPART_SCALE[path[-7:]]
        if len(own) > 1:
            problems["parameters filled twice"].append(f"{path} by {' and '.join(own)}")
        if own and not found[path[:-7] + other]:
            problems["scales without their counterpart"].append(
                f"{own[0]} (its layer has no {other}: fetch the checkpoint again, or load it with "
                "kv_cache_dtype='auto')"
            )


def _place_tensor(
    tensor: TensorInfo, rule: WeightRule, path: str, specs: ParameterSpecs, problems: Problems
) -> TensorPlacement:
    """The tensor's place in its parameter; wrong dtypes and shapes are reported."""
    whole, num_output_axes = (
        specs[path].shape,
        len(specs[rule.scale_path].shape) if rule.scale_path else 0,
    )
    shape = whole if rule.shape is None else rule.shape
    file_axes = rule.file_axes or [(axis,) for axis in range(len(shape))]
    wanted = tuple(math.prod(shape[axis] for axis in axes) for axes in file_axes)
    dtypes = list(SUPPORTED_DTYPES)
    if rule.scale_path is None and specs[path].dtype not in SUPPORTED_DTYPES.values():
        dtypes = [name for name, dtype in FILE_DTYPES.items() if dtype == specs[path].dtype]
    has_right_shape = math.prod(tensor.shape) == 1 if rule.is_scalar else tensor.shape == wanted
    if tensor.dtype not in dtypes:
        problem = f"{tensor.name} is {tensor.dtype}, supported are {', '.join(dtypes)}"
        problems["wrong dtypes"].append(problem)
    elif not has_right_shape:
        wanted = [] if rule.is_scalar else list(wanted)
        problem = f"{tensor.name} {list(tensor.shape)} should be {wanted}"
        problems["wrong shapes"].append(f"{problem} for {path} {list(whole)}")
    axis_order = tuple(axis for axes in file_axes for axis in axes)
    return TensorPlacement(tensor, rule, path, shape, axis_order, num_output_axes)


def _load_tensors(placements: Iterable[TensorPlacement], shards: Sequence[DeviceShard]) -> None:
    """Fill the devices' parameters, read in the order of the placements, which is that of the
    files; each slab is read once, however many devices have a part of it."""
    for placement in placements:
        for start, rows in _split_into_slabs(placement):
            # No name for the slab: it would live on while the next one is read.
            _write_to_shards(placement, _read_slab(placement, rows), start, shards)


def _write_to_shards(
    placement: TensorPlacement, slab: np.ndarray, start: np.ndarray, shards: Sequence[DeviceShard]
) -> None:
    rule, axis_order, scale = placement.rule, placement.axis_order, None
    if rule.scale_path is not None:
        scale = _slab_scales(placement, slab, start, shards)
        outputs = tuple(range(scale.ndim))
        for shard in shards:
            shard.write_slab(rule.scale_path, scale, start[: scale.ndim], outputs)
    place = slab, start, axis_order, rule.addend, scale
    written = [shard.write_slab(placement.path, *place) for shard in shards]
    # Before the next slab: running ahead of the devices would gather slabs on the host.
    jax.block_until_ready(written)


def _slab_scales(
    placement: TensorPlacement, slab: np.ndarray, start: np.ndarray, shards: Sequence[DeviceShard]
) -> np.ndarray:
    """The scale of each output of a slab, of which each device may have a part of the inputs."""
    axis_order, count = placement.axis_order, placement.num_output_axes
    largest = np.zeros([slab.shape[axis_order.index(axis)] for axis in range(count)], np.float32)
    found = [
        (
            tuple(cut[:count]),
            _max_abs(slab[tuple(cut[axis] for axis in axis_order)], axis_order, count),
        )
        for shard in shards
        for _, cut in shard.slab_slices(placement.path, slab, start, axis_order)
    ]
    for place, own in found:
        largest[place] = np.maximum(largest[place], own)
    return np.maximum(largest, np.float32(FP8_MIN_ABSMAX)) / np.float32(FP8_MAX)


@partial(jax.jit, static_argnames=("axis_order", "count"))
def _max_abs(slab: jax.Array, axis_order: tuple[int, ...], count: int) -> jax.Array:
    """The largest absolute value of each output."""
    inputs = tuple(place for place, axis in enumerate(axis_order) if axis >= count)
    found = jnp.max(jnp.abs(slab), axis=inputs).astype(jnp.float32)
    outputs = [axis for axis in axis_order if axis < count]
    return jnp.transpose(found, tuple(map(outputs.index, range(count))))


def _read_slab(placement: TensorPlacement, rows: slice) -> np.ndarray:
    """These rows of a tensor, its axes split as in the parameter but in the order of the file."""
    read = read_rows(placement.tensor, rows)
    if placement.path.endswith(_SCALE_SUFFIXES):
        _check_scales(placement.tensor, read)
    if placement.rule.is_scalar:
        return np.full(placement.shape, read.reshape(()))
    return read.reshape(-1, *(placement.shape[axis] for axis in placement.axis_order[1:]))


def _check_scales(tensor: TensorInfo, read: np.ndarray) -> None:
    """Refuse scales by which numbers would become zeros, infinite, others' negatives or NaN."""
    values = read.astype(np.float32)
    if not (bad := values[~((values > 0) & (values < np.inf))]).size:
        return
    more = f", and {bad.size - 1} more of its numbers are wrong" if bad.size > 1 else ""
    raise CheckpointError(
        f"{tensor.name} in {tensor.file.name} holds the scale {bad[0]:g}{more}; scales must be "
        "positive and finite in float32: fetch the checkpoint again, or quantise the model again."
    )


def _split_into_slabs(placement: TensorPlacement) -> Iterator[tuple[np.ndarray, slice]]:
    """Cut a piece into slabs of up to SLAB_BYTES, but at least one row of its slowest axis.

    Yields:
        The slab's start in the parameter (int32, one entry an axis), and its rows in the file.
    """
    tensor, slowest, size = placement.tensor, placement.axis_order[0], math.prod(placement.shape)
    if placement.is_read_whole:
        start = np.zeros(len(placement.shape), np.int32)
        start[placement.rule.axis] = placement.rule.start
        yield start, slice(None)
        return
    row_size, file_row_size = size // placement.shape[slowest], size // tensor.shape[0]
    common_row_size = math.lcm(
        row_size, file_row_size
    )  # where a row of the piece and one of the file end
    step = (
        max(1, SLAB_BYTES // (common_row_size * FILE_DTYPES[tensor.dtype].itemsize))
        * common_row_size
    )
    for first in range(0, size, step):
        start = np.zeros(len(placement.shape), np.int32)
        start[placement.rule.axis] = placement.rule.start
        start[slowest] += first // row_size
        yield start, slice(first // file_row_size, min(first + step, size) // file_row_size)


@partial(jax.jit, static_argnames=("axis_order", "addend"), donate_argnames="param")
def _update_parameter(
    param: jax.Array,
    slab: jax.Array,
    start: jax.Array,
    scale: jax.Array | None,
    axis_order: tuple[int, ...],
    addend: float,
) -> jax.Array:
    slab = jnp.transpose(slab, tuple(map(axis_order.index, range(len(axis_order)))))
    if scale is not None:
        slab = to_fp8(slab, jnp.expand_dims(scale, tuple(range(scale.ndim, slab.ndim))))
    slab = slab.astype(param.dtype)
    slab = slab + jnp.asarray(addend, param.dtype) if addend else slab
    return jax.lax.dynamic_update_slice(param, slab, list(start))


def _dummy_array(
    path: str,
    spec: jax.ShapeDtypeStruct,
    whole: tuple[int, ...],
    slices: Sequence[ShardSlice],
    seed: int,
) -> jax.Array:
    """Random weights made on the device, ones for the scales of norms.

    The values depend on the seed, the parameter's path and the place in the `whole` parameter
    alone: the model is the same however many devices share it.
    """
    if path.endswith(("weight_scale", "input_scale")):
        return jnp.full(spec.shape, _DUMMY_SCALE, spec.dtype)
    if len(spec.shape) == 1 and not path.endswith("bias"):  # other vectors are norms' scales
        return jnp.ones(spec.shape, spec.dtype)
    path_id = np.uint32(zlib.crc32(path.encode()))
    strides = [math.prod(whole[axis + 1 :]) for axis in range(len(whole))]
    seed_bits, options = np.uint32(seed % 2**32), {"strides": tuple(strides), "dtype": spec.dtype}

    def values(piece: ShardSlice) -> jax.Array:
        first = np.uint32(np.dot(piece.global_start, strides) % 2**32)
        return _random_values(seed_bits, path_id, first, shape=piece.shape, **options)

    if len(slices) == 1:
        return values(slices[0])
    own = jnp.zeros(spec.shape, spec.dtype)
    for piece in slices:
        own = jax.lax.dynamic_update_slice(own, values(piece), piece.local_start)
    return own


@partial(jax.jit, static_argnames=("shape", "strides", "dtype"))
def _random_values(
    seed: jax.Array,
    path_id: jax.Array,
    first: jax.Array,
    *,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: np.dtype,
) -> jax.Array:
    """Nearly normal numbers: each the sum of the four bytes of one hash of its place, the first
    one's being `first`.

    Purely element-wise, so it compiles to one kernel and needs no workspace; `jax.random.normal`
    takes up to eight times the parameter's own size, which a device full of weights does not have.
    """
    index = jnp.broadcast_to(first, shape)
    for axis, stride in enumerate(strides):
        along = jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
        index += along * np.uint32(stride % 2**32)
    key = jnp.broadcast_to(_hash(path_id ^ _hash(seed)), shape)
    bits = _hash(_hash(index) ^ key)
    byte_sum = sum((bits >> np.uint32(shift)) & np.uint32(255) for shift in (0, 8, 16, 24))
    centred = jnp.asarray(byte_sum, jnp.float32) - np.float32(4 * 255 / 2)
    std = _DUMMY_STD if dtype in SUPPORTED_DTYPES.values() else _DUMMY_STD / _DUMMY_SCALE
    return (centred * np.float32(std / math.sqrt(4 * (256**2 - 1) / 12))).astype(dtype)


def _hash(x: jax.Array) -> jax.Array:
    """The 32-bit integer hash lowbias32 (Chris Wellons, "Prospecting for Hash Functions", 2018)."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))
