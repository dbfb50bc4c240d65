"""Plan how to load a checkpoint: which tensor goes to which parameter of the model.

Before any weight is read, `plan_weights` checks the headers of the files against the model. A
header lists the tensors of a file, with their dtypes and shapes.
`ModelPlan.load` then calls the loader, and returns the model with its parameters.

If the config ties the output head to the embedding, but the checkpoint holds both, their values are
compared, as in transformers. If they differ, the model keeps the head and is not tied.
"""

import math
import re
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
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
from jpaged.models.loader import DeviceShard, ParameterSpecs, TensorPlacement, load_tensors
from jpaged.models.registry import weight_rules
from jpaged.models.sharding import (
    ShardSlice,
    global_shape_struct,
    per_device_shape,
    shard_slices,
    sharded_axis,
)

SUPPORTED_LOAD_FORMATS = ("auto", "safetensors", "dummy")

COMPARE_CHUNK_BYTES = 4 << 20
"""Maximum bytes of a chunk when two tensors are compared in chunks. Larger chunks are slower to
allocate."""

_KV_SCALE_PATH = re.compile(r"layers\.\d+\.attention\.[kv]_scale")
"""Matches the paths of KV-cache scales. If a checkpoint lacks both scales of a layer, they are 1.
Several rules can fill the same scale, because checkpoints name its tensor differently."""

_COUNTERPART_SCALE = {"k_scale": "v_scale", "v_scale": "k_scale"}

_MAX_LISTED_SOURCES = 4
"""Maximum number of tensors that an error lists for one parameter."""

_LAYER_NUMBER = re.compile(r"(?<=\.)\d{1,9}(?=\.)")


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
        shard_specs = {
            path: jax.ShapeDtypeStruct(per_device_shape(it), it.dtype)
            for path, it in self._global_specs.items()
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
            load_tensors(self.placements, shards)
            for shard in shards:
                shard.fill_missing()
        else:
            for shard in shards:
                shard.fill_random(self.unsharded_specs, self._seed)
        arrays = {
            path: _assemble_array(it, shards, path) for path, it in self._global_specs.items()
        }
        return with_parameters(self.abstract_model, arrays)

    @cached_property
    def _global_specs(self) -> ParameterSpecs:
        """Shape, dtype and sharding of each global parameter, by path. Listing them takes long."""
        return model_parameters(self.abstract_model)

    def device_slices(self, path: str, device_index: int) -> list[ShardSlice]:
        """Return the boxes (rectangular parts) of an unsharded parameter that a device holds."""
        count = 1 if self.mesh is None else self.mesh.size
        shard_shape = per_device_shape(self._global_specs[path])
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
            # Look up the name of the same tensor in layer 0, because no weight rule covers layers
            # beyond the number of layers in the config.
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

    Each parameter is a `jax.ShapeDtypeStruct` instead of an array. It describes the array with all
    devices' shards, or one device's array if `mesh` is None.

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
