"""Load a checkpoint folder into a model whose parameters are on the device.

Before any weight is read, `plan_weights` checks the headers of the files against the model. Then
the loader copies the tensors to the device in slabs (groups of rows), file by file. The device
transposes and casts each slab, and writes the slab in place into its parameter. A parameter may be
fused from several tensors. Files are mapped for one slab at a time. The host therefore holds only a
few slabs, even if a file or a parameter is large. Each tensor-parallel device receives its shard of
every slab.

If the config ties the output head to the embedding, but the checkpoint holds both, their values are
compared, as in transformers. If they differ, the model keeps the head and is not tied.
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
"""Maximum bytes of a chunk when two tensors are compared in chunks. Larger chunks are slower to
allocate."""

_DUMMY_STD = 0.02

_DUMMY_SCALE = 2.0**-8
"""Scale of random FP8 weights, and static scale of the rows that they multiply."""

_KV_SCALE_PATH = re.compile(r"layers\.\d+\.attention\.[kv]_scale")
"""Matches the paths of KV-cache scales. If a checkpoint lacks both scales of a layer, they are 1.
Several rules can fill the same scale, because checkpoints name its tensor differently."""

_COUNTERPART_SCALE = {"k_scale": "v_scale", "v_scale": "k_scale"}

_SCALE_SUFFIXES = ("weight_scale", ".input_scale", ".k_scale", ".v_scale")
"""Suffixes of the paths of parameters that hold FP8 scales."""

_MAX_LISTED_SOURCES = 4
"""Maximum number of tensors that an error lists for one parameter."""

_LAYER_NUMBER = re.compile(r"(?<=\.)\d{1,9}(?=\.)")

ParameterSpecs = Mapping[str, jax.ShapeDtypeStruct]
"""Shape and dtype of each parameter, by path."""


@dataclass(frozen=True)
class TensorPlacement:
    """Position of one checkpoint tensor within a parameter.

    Attributes:
        tensor: The checkpoint tensor.
        rule: The rule that maps the tensor to the parameter.
        path: Path of the parameter.
        shape: Shape of the tensor in the parameter's layout.
        axis_order: Axes of `shape` in the order of the file, slowest first.
        num_output_axes: Number of leading axes of `shape` that are outputs, if the tensor is
            quantized to FP8 with one scale per output; otherwise 0.
    """

    tensor: TensorInfo
    rule: WeightRule
    path: str
    shape: tuple[int, ...]
    axis_order: tuple[int, ...]
    num_output_axes: int = 0

    @property
    def start(self) -> np.ndarray:
        """Indices at which the tensor begins within the parameter: int32, one index per axis."""
        start = np.zeros(len(self.shape), np.int32)
        for axis, offset in self.rule.offsets.items():
            start[axis] = offset
        return start

    @property
    def is_read_whole(self) -> bool:
        """Whether the loader reads the whole tensor in one slab.

        This is true for scalars. It is also true for a tensor that is stored as [in, out], as in
        GPT-2, and quantized to FP8 while it is loaded: an output's scale needs all inputs.
        """
        return self.rule.is_scalar or self.axis_order[0] >= self.num_output_axes > 0


@dataclass(frozen=True)
class ModelPlan:
    """Plan to load a model. The checkpoint has been checked, and the parameters are not loaded yet.

    Attributes:
        config: Config of the model. If the checkpoint has a separate output head,
            `tie_word_embeddings` is False.
        mesh: Mesh of the tensor-parallel devices; None for a single device.
        abstract_model: The model that each device computes. Instead of values, its parameters are
            the `jax.ShapeDtypeStruct`s of the global arrays.
        unsharded_specs: Shapes and dtypes of the model on a single device, by path.
        placements: Positions of the checkpoint's tensors within the parameters; None for random
            weights.
    """

    config: ModelConfig
    mesh: Mesh | None
    abstract_model: nnx.Module
    unsharded_specs: ParameterSpecs
    placements: Sequence[TensorPlacement] | None
    _seed: int

    def load(self) -> nnx.Module:
        """Load the parameters onto the devices and return the model.

        Raises:
            CheckpointError: A file can no longer be read, or holds an invalid scale.
        """
        global_specs = model_parameters(self.abstract_model)
        shard_specs = {
            path: jax.ShapeDtypeStruct(per_device_shape(it), it.dtype)
            for path, it in global_specs.items()
        }
        devices = [None] if self.mesh is None else self.mesh.devices.ravel().tolist()
        shards = [
            DeviceShard(
                device,
                shard_specs,
                {path: self.device_slices(path, device_index) for path in shard_specs},
            )
            for device_index, device in enumerate(devices)
        ]
        if self.placements is not None:
            _load_tensors(self.placements, shards)
            for shard in shards:
                shard.fill_missing()
        else:
            for shard in shards:
                shard.fill_random(self.unsharded_specs, self._seed)
        arrays = {path: _assemble_array(it, shards, path) for path, it in global_specs.items()}
        return with_parameters(self.abstract_model, arrays)

    def device_slices(self, path: str, device_index: int) -> list[ShardSlice]:
        """Return the boxes (rectangular parts) of an unsharded parameter that a device holds."""
        count = 1 if self.mesh is None else self.mesh.size
        shard_shape = per_device_shape(model_parameters(self.abstract_model)[path])
        unsharded_shape, parts = self.unsharded_specs[path].shape, ()
        module_path, _, name = path.rpartition(".")
        projection, shard_projection = (
            it.projection(module_path) for it in (self.config, self.config.shard(count))
        )
        axis = sharded_axis(unsharded_shape, shard_shape)
        if projection is not None and shard_projection is not None and axis is not None:
            sizes, shard_sizes = (
                parameter_part_sizes(it, name, axis) for it in (projection, shard_projection)
            )
            parts = list(zip(sizes, shard_sizes, strict=True))
        return shard_slices(unsharded_shape, shard_shape, device_index, count, parts)


@dataclass
class DeviceShard:
    """The parameters of one device, while a checkpoint is loaded into them.

    Attributes:
        device: The JAX device; None for JAX's default device.
        specs: Shape and dtype of the device's shard of each parameter, by path.
        slices: For each path, the boxes (rectangular parts) of the unsharded parameter that are on
            the device.
        arrays: The shards of parameters that have been allocated so far, by path.
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
        """Write this device's part of a slab (rows of a checkpoint tensor) into its parameter.

        Args:
            path: Path of the parameter, which is allocated at the first write.
            slab: Values as read from the file, with axes in the order of the file.
            start: Index of the slab's first element in the unsharded parameter.
            axis_order: For each axis of the slab, the index of the same axis in the parameter.
            addend: Number to add to every value.
            scale: Scales [*outputs] for quantizing the slab to FP8; None to cast the slab.

        Returns:
            The shard of the parameter. JAX may still be writing the slab.
        """
        if path not in self.arrays:
            spec = self.specs[path]
            self.arrays[path] = jnp.zeros(spec.shape, spec.dtype, device=self.device)
        for shard_slice, ranges in self.slab_slices(path, slab, start, axis_order):
            part, first = (
                slab[tuple(ranges[axis] for axis in axis_order)],
                [it.start for it in ranges],
            )
            local_start = (
                np.add(start, first) - shard_slice.unsharded_start + shard_slice.local_start
            )
            scale_part = None if scale is None else scale[tuple(ranges[: scale.ndim])]
            self.arrays[path] = update_parameter(
                self.arrays[path],
                part,
                local_start.astype(np.int32),
                scale_part,
                axis_order,
                addend,
            )
        return self.arrays[path]

    def slab_slices(
        self, path: str, slab: np.ndarray, start: np.ndarray, axis_order: tuple[int, ...]
    ) -> Iterator[tuple[ShardSlice, list[slice]]]:
        """Yield the parts of a slab (rows of a checkpoint tensor) that belong to this device.

        The device holds boxes (rectangular parts) of the unsharded parameter. For each box that the
        slab overlaps, yield the box, and which range of the slab lies in the box, on each axis of
        the parameter.
        """
        end = start.copy()
        end[list(axis_order)] += slab.shape
        for shard_slice in self.slices[path]:
            low = np.maximum(shard_slice.unsharded_start, start)
            high = np.minimum(np.add(shard_slice.unsharded_start, shard_slice.shape), end)
            if (low < high).all():
                yield (
                    shard_slice,
                    [slice(*ends) for ends in zip(low - start, high - start, strict=True)],
                )

    def fill_missing(self) -> None:
        """Set each parameter that the checkpoint does not contain, such as a KV-cache scale, to
        ones."""
        for path in self.specs.keys() - self.arrays.keys():
            spec = self.specs[path]
            self.arrays[path] = jnp.ones(spec.shape, spec.dtype, device=self.device)

    def fill_random(self, unsharded_specs: ParameterSpecs, seed: int) -> None:
        """Fill all parameters with random values, which are the same for any number of devices.

        Args:
            unsharded_specs: Parameters of the model on a single device.
            seed: Seed of the random values.
        """
        with nullcontext() if self.device is None else jax.default_device(self.device):
            for path, spec in self.specs.items():
                slices = self.slices[path]
                self.arrays[path] = _dummy_array(
                    path, spec, unsharded_specs[path].shape, slices, seed
                )


def _assemble_array(
    spec: jax.ShapeDtypeStruct, shards: Sequence[DeviceShard], path: str
) -> jax.Array:
    """Return the global array of a parameter. It consists of the devices' shards."""
    arrays = [shard.arrays[path] for shard in shards]
    if spec.sharding is None:
        return arrays[0]
    return jax.make_array_from_single_device_arrays(spec.shape, spec.sharding, arrays)


def with_parameters(model: nnx.Module, values: Mapping[str, Any]) -> nnx.Module:
    """Return a copy of the model whose parameters have the given values, by path."""
    definition, state = nnx.split(model)
    flat = nnx.to_flat_state(state)
    filled = [(path, leaf.replace(values[parameter_path(path)])) for path, leaf in flat]
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
    """Check a checkpoint against its config and plan how to load its weights.

    Only the headers of the files are read. One exception: if the config ties the output head to the
    embedding and the checkpoint contains both, their values are compared. If they differ, a warning
    is logged and the head is loaded separately.

    Args:
        folder: Checkpoint folder or hub id; ignored if `load_format` is "dummy".
        config: Config of the model, which selects the family.
        dtype: Dtype of the parameters: float32, float16 or bfloat16.
        load_format: "auto" and "safetensors" read the checkpoint. "dummy" makes random weights on
            the device, which are equal for equal seeds.
        seed: Seed of the random weights.
        mesh: Mesh of the tensor-parallel devices; None for a single device.

    Raises:
        CheckpointError: The checkpoint is missing or broken, or does not fit the model.
        ValueError: `dtype` or `load_format` is unsupported, or the devices cannot split the model.
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
        raise CheckpointError(f"{error} {config.size_summary}.") from None
    return ModelPlan(config, mesh, abstract_model, specs, placements, seed)


def _check_num_layers(
    config: ModelConfig, tensors: Iterable[TensorInfo], rules: WeightRules
) -> None:
    """Raise CheckpointError if checkpoint and config differ in the number of layers.

    Without this check, the error would list every tensor of the extra or missing layers.
    """
    num_layers = 0
    for tensor in tensors:
        if number := _LAYER_NUMBER.search(tensor.name):
            # Look up the name of the same tensor in layer 0, because the weight rules have no entry
            # for layers beyond the number of layers in the config.
            rule = rules.find(_LAYER_NUMBER.sub("0", tensor.name, count=1))
            if rule is not None and rule.target and rule.target.startswith("layers.0."):
                num_layers = max(num_layers, int(number[0]) + 1)
    if num_layers not in (0, config.num_layers):
        raise CheckpointError(
            f"config.json says num_hidden_layers={config.num_layers}, but the checkpoint has "
            f"{format_count(num_layers, 'layer')}: fetch both again from the same source."
        )


def _resolve_tied_head(
    config: ModelConfig, tensors: Sequence[TensorInfo], rules: WeightRules, dtype: np.dtype
) -> tuple[ModelConfig, WeightRules]:
    """Return the config and the weight rules that match the checkpoint's output head.

    If the config does not tie the head to the embedding, return `config` and `rules`. If it does,
    and the checkpoint has both tensors, compare them after casting to `dtype`, as transformers
    does. The head stays tied if they are equal. Otherwise, log a warning, and return a config that
    does not tie the head. If the checkpoint has a head but no embedding, the rules load the head as
    the embedding.
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
    """Return whether two matrices are equal after casting to `dtype`.

    Chunks of rows are read until the first difference.
    """
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
    """Return the parameters of a model, or the shape structs of an abstract model, by path."""
    flat = nnx.to_flat_state(nnx.state(model))
    return {parameter_path(path): leaf.get_value() for path, leaf in flat}


def _unsharded_specs(config: ModelConfig, dtype: DTypeLike) -> ParameterSpecs:
    """Return shape and dtype of each parameter by path, for the model on a single device."""
    return model_parameters(make_abstract_model(config, dtype))


def parameter_path(path: tuple) -> str:
    """Return a parameter's dotted path; `WeightRule` describes these paths."""
    return ".".join(str(each) for each in path if each != "format")


def make_abstract_model(
    config: ModelConfig, dtype: DTypeLike, mesh: Mesh | None = None
) -> nnx.Module:
    """Return the model that each device of the mesh computes, without parameter values.

    Instead of values, the parameters are the `jax.ShapeDtypeStruct`s of the global arrays over
    `mesh`, or of the arrays of a single device if `mesh` is None.

    Raises:
        ValueError: The devices cannot split the model.
    """
    unsharded_model = nnx.eval_shape(lambda: Decoder(config, dtype=dtype))
    if mesh is None:
        return unsharded_model
    shard = config.shard(mesh.size)
    sharded_model = nnx.eval_shape(lambda: Decoder(shard, dtype=dtype))
    specs = model_parameters(unsharded_model)
    values = {
        path: global_shape_struct(mesh, spec, sharded_axis(specs[path].shape, spec.shape))
        for path, spec in model_parameters(sharded_model).items()
    }
    return with_parameters(sharded_model, values)


Problems = dict[str, list[str]]
"""Problems of a checkpoint, listed by kind so that one error can report all of them."""


def plan_weights(
    tensors: Sequence[TensorInfo],
    rules: WeightRules,
    specs: ParameterSpecs,
    subject: str = "The checkpoint",
) -> list[TensorPlacement]:
    """Assign every tensor to its parameters, and check that each parameter is filled exactly once.

    Args:
        tensors: All tensors of the checkpoint.
        rules: Weight rules of the model.
        specs: Shape and dtype of each unsharded parameter, by path.
        subject: Start of the error message: a phrase that names the source of the tensors.

    Returns:
        The placements, in the order of `tensors`.

    Raises:
        CheckpointError: The checkpoint has unknown tensors, wrong shapes or dtypes, missing
            parameters, fused parameters with a missing piece, or parameters filled twice. One error
            reports all problems.
    """
    problems: Problems = defaultdict(list)
    placements: list[TensorPlacement] = []
    names: dict[WeightRule, list[str]] = defaultdict(list)  # tensor names by rule
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
        del rules_by_path[path]  # the loader computes these scales
    scales = {path: rules_by_path.pop(path) for path in specs if _KV_SCALE_PATH.fullmatch(path)}
    _check_kv_scales(scales, names, problems)
    _check_coverage(rules_by_path, names, specs, problems)
    for rule, twice in names.items():
        if len(twice) > 1:
            problems["parameters filled twice"].append(f"{rule.target} by {' and '.join(twice)}")
    if problems:
        kinds = (f"{kind} ({len(it)}): {format_names(it)}" for kind, it in problems.items())
        raise CheckpointError(f"{subject} does not fit the model. {'; '.join(kinds)}.")
    return placements


def _check_coverage(
    rules_by_path: Mapping[str, Sequence[WeightRule]],
    names: Mapping[WeightRule, Sequence[str]],
    specs: ParameterSpecs,
    problems: Problems,
) -> None:
    """Add a text to `problems` for each parameter in which elements are missing or are filled
    twice."""
    for path, path_rules in rules_by_path.items():
        param_shape = specs[path].shape
        found = [rule for rule in path_rules if rule in names]
        if any(rule.is_alternative for rule in found):
            path_rules = found
        else:
            path_rules = [rule for rule in path_rules if not rule.is_alternative]
        lacking = [rule.source for rule in path_rules if rule not in names]
        sources = _join_sources(lacking) or "a tensor that no rule names"
        if len(lacking) == len(path_rules):
            problems["missing parameters"].append(f"{path} (comes from {sources})")
            continue
        missing = math.prod(param_shape) - sum(
            math.prod(rule.shape or param_shape) for rule in path_rules
        )
        if lacking or missing > 0:
            problem = f"{path} along axis {path_rules[0].axis} (lacks {sources})"
            problems["parameters with a missing piece"].append(problem)
        elif missing < 0:
            twice = _join_sources([rule.source for rule in path_rules])
            problems["parameters filled twice"].append(f"{path} by {twice}")


def _join_sources(sources: Sequence[str]) -> str:
    """Return a text that lists at most `_MAX_LISTED_SOURCES` names of tensors."""
    more = len(sources) - _MAX_LISTED_SOURCES
    if more <= 0:
        return " and ".join(sources)
    return f"{', '.join(sources[:_MAX_LISTED_SOURCES])} and {more} more"


def _check_kv_scales(
    rules_by_path: Mapping[str, Sequence[WeightRule]],
    names: Mapping[WeightRule, Sequence[str]],
    problems: Problems,
) -> None:
    """Add a text to `problems` for each layer that has only one of its two KV-cache scales.

    Also add a text for each scale that two tensors fill.
    """
    sources_by_path = {
        path: [names[rule][0] for rule in it if rule in names] for path, it in rules_by_path.items()
    }
    for path, sources in sources_by_path.items():
        other = _COUNTERPART_SCALE[path[-7:]]
        if len(sources) > 1:
            problems["parameters filled twice"].append(f"{path} by {' and '.join(sources)}")
        if sources and not sources_by_path[path[:-7] + other]:
            problems["scales without their counterpart"].append(
                f"{sources[0]} (its layer has no {other}: fetch the checkpoint again, or load it "
                "with kv_cache_dtype='auto')"
            )


def _place_tensor(
    tensor: TensorInfo, rule: WeightRule, path: str, specs: ParameterSpecs, problems: Problems
) -> TensorPlacement:
    """Return the position of a tensor within its parameter.

    If the tensor's dtype or shape is wrong, add a text to `problems`.
    """
    param_shape, num_output_axes = specs[path].shape, 0
    if rule.scale_path is not None and rule.scale_axes is None:
        num_output_axes = len(specs[rule.scale_path].shape)
    shape = param_shape if rule.shape is None else rule.shape
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
        problems["wrong shapes"].append(f"{problem} for {path} {list(param_shape)}")
    axis_order = tuple(axis for axes in file_axes for axis in axes)
    return TensorPlacement(tensor, rule, path, shape, axis_order, num_output_axes)


def _load_tensors(placements: Iterable[TensorPlacement], shards: Sequence[DeviceShard]) -> None:
    """Load the tensors of `placements` into the devices' parameters, in the order of the files.

    A slab is a group of rows of one tensor. Each slab is read once, and each device stores its own
    part of the slab.
    """
    for placement in placements:
        for start, rows in _split_into_slabs(placement):
            # Do not assign the result of `_read_slab` to a variable: the variable would keep a slab
            # in memory while the next slab is read.
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
    arguments = slab, start, axis_order, rule.addend, scale
    written = [shard.write_slab(placement.path, *arguments) for shard in shards]
    # Wait for the transfers. Otherwise, slabs would accumulate in host memory if files are read
    # faster than the devices copy.
    jax.block_until_ready(written)


def _slab_scales(
    placement: TensorPlacement, slab: np.ndarray, start: np.ndarray, shards: Sequence[DeviceShard]
) -> np.ndarray:
    """Return the FP8 scale for each output in a slab (rows of a checkpoint tensor).

    A scale is computed from all inputs of its output, even if the devices split the inputs.
    """
    axis_order, count = placement.axis_order, placement.num_output_axes
    largest = np.zeros([slab.shape[axis_order.index(axis)] for axis in range(count)], np.float32)
    maxima = [
        (
            tuple(ranges[:count]),
            max_abs(slab[tuple(ranges[axis] for axis in axis_order)], axis_order, count),
        )
        for shard in shards
        for _, ranges in shard.slab_slices(placement.path, slab, start, axis_order)
    ]
    for output_ranges, maximum in maxima:
        largest[output_ranges] = np.maximum(largest[output_ranges], maximum)
    return np.maximum(largest, np.float32(FP8_MIN_ABSMAX)) / np.float32(FP8_MAX)


@partial(jax.jit, static_argnames=("axis_order", "count"))
def max_abs(slab: jax.Array, axis_order: tuple[int, ...], count: int) -> jax.Array:
    """Return the maximum absolute value for each output in a slab (rows of a tensor).

    Args:
        slab: Values as read from the file, with axes in the order of the file.
        axis_order: For each axis of the slab, the index of the same axis in the parameter.
        count: Number of output axes. The output axes are the first axes of the parameter.
    """
    inputs = tuple(place for place, axis in enumerate(axis_order) if axis >= count)
    maxima = jnp.max(jnp.abs(slab), axis=inputs).astype(jnp.float32)
    outputs = [axis for axis in axis_order if axis < count]
    return jnp.transpose(maxima, tuple(map(outputs.index, range(count))))


def _read_slab(placement: TensorPlacement, rows: slice) -> np.ndarray:
    """Read rows of a checkpoint tensor, and reshape the rows to an array with the parameter's axes.

    The axes of the result are in the order of the file, not in the order of the parameter.
    """
    read = read_rows(placement.tensor, rows)
    if placement.path.endswith(_SCALE_SUFFIXES):
        _check_scales(placement.tensor, read)
    if placement.rule.is_scalar:
        return np.full(placement.shape, read.reshape(()))
    return read.reshape(-1, *(placement.shape[axis] for axis in placement.axis_order[1:]))


def _check_scales(tensor: TensorInfo, read: np.ndarray) -> None:
    """Raise CheckpointError if any scale is not both positive and finite."""
    values = read.astype(np.float32)
    if not (bad := values[~((values > 0) & (values < np.inf))]).size:
        return
    more = f", and {bad.size - 1} more of its numbers are wrong" if bad.size > 1 else ""
    raise CheckpointError(
        f"{tensor.name} in {tensor.file.name} holds the scale {bad[0]:g}{more}; scales must be "
        "positive and finite in float32: fetch the checkpoint again, or quantise the model again."
    )


def _split_into_slabs(placement: TensorPlacement) -> Iterator[tuple[np.ndarray, slice]]:
    """Split a tensor into slabs (groups of rows) of at most SLAB_BYTES, but at least one row.

    Yields:
        For each slab, a pair. First, the index of the slab's first element in the parameter: int32,
        one entry per axis. Second, the slice of the tensor's rows in the file.
    """
    tensor, slowest, size = placement.tensor, placement.axis_order[0], math.prod(placement.shape)
    if placement.is_read_whole:
        yield placement.start, slice(None)
        return
    row_size, file_row_size = size // placement.shape[slowest], size // tensor.shape[0]
    # The tensor may have different shapes in the file and in the parameter, so the sizes of a row
    # may differ. A slab must consist of whole rows in both shapes. The number of elements in a slab
    # is therefore a multiple of both row sizes.
    common_row_size = math.lcm(row_size, file_row_size)
    step = (
        max(1, SLAB_BYTES // (common_row_size * FILE_DTYPES[tensor.dtype].itemsize))
        * common_row_size
    )
    for first in range(0, size, step):
        start = placement.start
        start[slowest] += first // row_size
        yield start, slice(first // file_row_size, min(first + step, size) // file_row_size)


@partial(jax.jit, static_argnames=("axis_order", "addend"), donate_argnames="param")
def update_parameter(
    param: jax.Array,
    slab: jax.Array,
    start: jax.Array,
    scale: jax.Array | None,
    axis_order: tuple[int, ...],
    addend: float,
) -> jax.Array:
    """Return a copy of `param` into which the array `slab` is written at the index `start`."""
    slab = jnp.transpose(slab, tuple(map(axis_order.index, range(len(axis_order)))))
    if scale is not None:
        slab = to_fp8(slab, jnp.expand_dims(scale, tuple(range(scale.ndim, slab.ndim))))
    slab = slab.astype(param.dtype)
    slab = slab + jnp.asarray(addend, param.dtype) if addend else slab
    return jax.lax.dynamic_update_slice(param, slab, list(start))


def _dummy_array(
    path: str,
    spec: jax.ShapeDtypeStruct,
    unsharded_shape: tuple[int, ...],
    slices: Sequence[ShardSlice],
    seed: int,
) -> jax.Array:
    """Return random weights, made on the device. Norm weights and KV-cache scales are ones.

    A value depends only on the seed, the parameter's path and the value's index in the unsharded
    parameter. Therefore, the values are the same for any number of devices.
    """
    if path.endswith(("weight_scale", "input_scale")):
        return jnp.full(spec.shape, _DUMMY_SCALE, spec.dtype)
    # A one-dimensional parameter is a bias, a norm weight or a KV-cache scale.
    if len(spec.shape) == 1 and not path.endswith("bias"):
        return jnp.ones(spec.shape, spec.dtype)
    path_id = np.uint32(zlib.crc32(path.encode()))
    strides = [math.prod(unsharded_shape[axis + 1 :]) for axis in range(len(unsharded_shape))]
    seed_bits, options = np.uint32(seed % 2**32), {"strides": tuple(strides), "dtype": spec.dtype}

    def values(shard_slice: ShardSlice) -> jax.Array:
        first = np.uint32(np.dot(shard_slice.unsharded_start, strides) % 2**32)
        return _random_values(seed_bits, path_id, first, shape=shard_slice.shape, **options)

    if len(slices) == 1:
        return values(slices[0])
    array = jnp.zeros(spec.shape, spec.dtype)
    for shard_slice in slices:
        array = jax.lax.dynamic_update_slice(array, values(shard_slice), shard_slice.local_start)
    return array


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
    """Return random numbers with an approximately normal distribution.

    Each number is the sum of the four bytes of a hash of the number's index. `first` is the index
    of the first number, and `strides` are the index strides of the axes. The computation is
    elementwise, so XLA compiles one kernel without workspace. `jax.random.normal` would need a
    workspace, which does not fit on a device that is full of weights.
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
    """Hash integers with lowbias32 (Chris Wellons, "Prospecting for Hash Functions", 2018)."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))
