"""Write a caller's arrays into the parameters of a model that is on the device.

`ModelParameters.prepare` checks all arrays first, by the rules that also load checkpoints. The
returned function then writes one parameter after another. The device transposes, casts, quantizes
and fuses the arrays of a parameter in one program, and writes them over the old values. No value
passes through the host. The extra device memory at any time is at most the size of one unsharded
parameter.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike
from typing_extensions import override

from jpaged.models.checkpoint import (
    FILE_DTYPES,
    FP8_FILE_DTYPE,
    CheckpointError,
    ScaleAxis,
    TensorInfo,
    WeightRule,
    WeightRules,
    read_rows,
    read_tensor_infos,
    resolve_checkpoint,
)
from jpaged.models.config import ModelConfig
from jpaged.models.expert_formats import expert_format
from jpaged.models.fp8 import expand_scales, fp8_scales
from jpaged.models.loader import TensorPlacement, update_parameter
from jpaged.models.registry import weight_rules
from jpaged.models.sharding import MESH_AXIS, ShardSlice, axis_sharding
from jpaged.models.weight_plan import (
    ModelPlan,
    model_parameters,
    parameter_path,
    plan_weights,
    with_parameters,
)

_FILE_DTYPE_NAMES = {dtype: name for name, dtype in FILE_DTYPES.items()}

_KEPT_SUFFIXES = (".k_scale", ".v_scale", ".input_scale")
"""Suffixes of the paths of small parameters that an update may leave as they are."""

WriteFunction = Callable[[tuple[jax.Array, ...]], tuple[jax.Array, ...]]
"""Function from the parameters of an engine to new ones. The old arrays are donated."""


@dataclass(frozen=True)
class _Piece:
    """Position of one array within an unsharded parameter.

    See `TensorPlacement` for the other fields.

    Attributes:
        scale_axes: Axes of the FP8 scales that are computed when the array is written. Empty if the
            array is not quantized.
    """

    shape: tuple[int, ...]
    axis_order: tuple[int, ...]
    start: tuple[int, ...]
    addend: float
    is_scalar: bool
    scale_axes: tuple[ScaleAxis, ...]


@dataclass(frozen=True)
class _Layout:
    """Description of how to write the caller's arrays into one parameter.

    Attributes:
        pieces: For each array, the position in the parameter at which the array is written.
        shape, dtype: Shape and dtype of the unsharded parameter.
        mesh: Mesh of the tensor-parallel devices; None for a single device.
        spec: How the devices split the parameter.
        boxes: For each device, the rectangular parts of the unsharded parameter that are in the
            device's shard. Empty for a single device.
        scale_shape, scale_spec, scale_boxes: The same as `shape`, `spec` and `boxes`, for the FP8
            scales of the parameter. Unset for a parameter without FP8 scales.
    """

    pieces: tuple[_Piece, ...]
    shape: tuple[int, ...]
    dtype: np.dtype
    mesh: Mesh | None
    spec: PartitionSpec | None
    boxes: tuple[tuple[ShardSlice, ...], ...]
    scale_shape: tuple[int, ...] | None = None
    scale_spec: PartitionSpec | None = None
    scale_boxes: tuple[tuple[ShardSlice, ...], ...] = ()


@dataclass(frozen=True)
class _Write:
    """Description of a write: which arrays of the caller fill one parameter, and where."""

    path: str
    scale_path: str | None
    names: tuple[str, ...]
    layout: _Layout


class ModelParameters:
    """Description of the parameters of a running engine, for replacing their values.

    Args:
        plan: The plan that loaded the model.
        devices: Devices of the engine.

    Attributes:
        shared_names: Names of the parameters that the engine shares with the caller. It is empty,
            because the engine owns all its arrays.
    """

    shared_names: tuple[str, ...] = ()

    def __init__(self, plan: ModelPlan, devices: Sequence[Any]):
        self._plan, self._devices = replace(plan, placements=None), tuple(devices)
        self._specs = model_parameters(plan.abstract_model)
        self._last_plan: tuple[Any, list[_Write]] | None = None
        named = with_parameters(plan.abstract_model, {path: path for path in self._specs})
        self._paths: tuple[str, ...] = tuple(jax.tree.leaves(nnx.state(named)))

    def prepare(self, params: Any, *, check_finite: bool = False) -> WriteFunction:
        """Check new parameters, and return the function that writes them.

        Args:
            params: A dict from the names of a checkpoint's tensors to JAX arrays, or an `nnx.State`
                of the family's model, or the state as nested dicts, or the path of a folder with
                safetensors files.
            check_finite: Whether to refuse NaN and infinite values. The check waits for the device.

        Raises:
            TypeError: `params` is not such a tree, or a leaf is not a JAX array.
            ValueError: A name is missing or unknown, an array has a wrong shape, dtype or device,
                was deleted, or is not finite. The message names the arrays.
        """
        if isinstance(params, Path):
            if check_finite:
                raise ValueError(
                    "check_finite needs arrays, but params is a folder: omit check_finite, or read "
                    "the files and pass their arrays"
                )
            tensors = read_tensor_infos(_check_folder(params))
            arrays = _FileTensors(tensors)
            return partial(self._write, arrays, self._plan_writes(tensors, arrays, is_state=False))
        arrays, is_state = _flatten(params)
        for name, array in arrays.items():
            _check_array(name, array, self._devices)
        tensors = [
            TensorInfo(name, Path(), _file_dtype(it), it.shape) for name, it in arrays.items()
        ]
        writes = self._plan_writes(tensors, arrays, is_state=is_state)
        # Wait, so that an array whose computation failed raises its error before any parameter is
        # overwritten.
        jax.block_until_ready(arrays)
        if check_finite:
            check_all_finite(arrays)
        return partial(self._write, arrays, writes)

    def release(self, leaves: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """Free the device memory of all parameters except static FP8 scales.

        The next update may keep the static scales, and replaces every other parameter.

        Returns:
            The argument `leaves`. Only its arrays of static scales still exist. Pass it to the
            function that `prepare` returns: that function allocates the deleted arrays again.
        """
        for path, leaf in zip(self._paths, leaves, strict=True):
            if not path.endswith(_KEPT_SUFFIXES):
                leaf.delete()
        return leaves

    def _plan_writes(
        self, tensors: Sequence[TensorInfo], arrays: Mapping[str, Any], *, is_state: bool
    ) -> list[_Write]:
        """Check names, shapes and dtypes, and return a `_Write` for each parameter.

        If the arrays have the same names, shapes and dtypes as in the last update, reuse the last
        plan, because planning takes longer than launching the writes.
        """
        if not is_state:
            self._check_head(arrays)
        key = is_state, tuple((it.name, it.dtype, it.shape) for it in tensors)
        if self._last_plan is None or self._last_plan[0] != key:
            self._last_plan = key, self._make_plan(tensors, is_state=is_state)
        return self._last_plan[1]

    def _make_plan(self, tensors: Sequence[TensorInfo], *, is_state: bool) -> list[_Write]:
        config, specs = self._plan.config, self._plan.unsharded_specs
        fp8_name = next((it.name for it in tensors if it.dtype == FP8_FILE_DTYPE), None)
        if config.quantization is not None and fp8_name is None:
            quantization = replace(config.quantization, has_float_tensors=True)
            config = replace(config, quantization=quantization)
            # Do not replace the static scales of the activations, because `params` has no new ones.
            specs = {path: it for path, it in specs.items() if not path.endswith(".input_scale")}
        if is_state:
            rules, tensors = _state_rules(config, specs, tensors)
        else:
            rules = weight_rules(config)
        try:
            placements = plan_weights(tensors, rules, specs, subject="params")
        except CheckpointError as error:
            # If only some tensors are in FP8, `error` may name an unquantized tensor, although the
            # FP8 tensor is the mistake. Therefore, add a hint that names the FP8 tensor.
            hint = ""
            if config.quantization is not None and fp8_name is not None:
                hint = (
                    f" {fp8_name} is in FP8: pass either no weight in FP8, or all weights that the "
                    "engine's checkpoint has in FP8."
                )
            raise ValueError(
                f"{error}{hint} Pass all tensors of the engine's checkpoint by their names, or the "
                "nnx.State of the engine's model."
            ) from None
        placed: dict[str, list[TensorPlacement]] = {}
        for placement in placements:
            placed.setdefault(placement.path, []).append(placement)
        return [self._plan_write(path, found) for path, found in placed.items()]

    def _check_head(self, arrays: Mapping[str, Any]) -> None:
        """If the output head is tied to the embedding, check that both arrays have equal values."""
        if not self._plan.config.tie_word_embeddings:
            return
        untied = weight_rules(replace(self._plan.config, tie_word_embeddings=False))
        names = {rule.target: name for name in arrays if (rule := untied.find(name)) is not None}
        head, embed = names.get("lm_head.weight"), names.get("embed.weight")
        dtype = self._plan.unsharded_specs["embed.weight"].dtype
        if head is None or embed is None or _are_equal(arrays[head], arrays[embed], dtype):
            return
        raise ValueError(
            f"{head} differs from {embed}, but the engine's model ties them: omit {head}, or set "
            "tie_word_embeddings to false in config.json and create a new engine"
        )

    def _plan_write(self, path: str, placements: Sequence[TensorPlacement]) -> _Write:
        plan, rule = self._plan, placements[0].rule
        spec, scale_path = plan.unsharded_specs[path], rule.scale_path
        pieces = tuple(
            _Piece(
                it.shape,
                it.axis_order,
                tuple(it.start.tolist()),
                it.rule.addend,
                it.rule.is_scalar,
                _scale_axes(it),
            )
            for it in placements
        )
        layout = _Layout(pieces, spec.shape, np.dtype(spec.dtype), plan.mesh, *self._split(path))
        if scale_path is not None:
            scale_spec, scale_boxes = self._split(scale_path)
            layout = replace(
                layout,
                scale_shape=plan.unsharded_specs[scale_path].shape,
                scale_spec=scale_spec,
                scale_boxes=scale_boxes,
            )
        names = tuple(it.tensor.name for it in placements)
        return _Write(path, scale_path, names, layout)

    def _split(self, path: str) -> tuple[PartitionSpec | None, tuple[tuple[ShardSlice, ...], ...]]:
        """Return how the devices split a parameter, and which boxes (rectangular parts) each
        holds."""
        mesh, sharding = self._plan.mesh, self._specs[path].sharding
        if mesh is None or sharding is None:
            return None, ()
        boxes = (tuple(self._plan.device_slices(path, index)) for index in range(mesh.size))
        return sharding.spec, tuple(boxes)

    def _write(
        self,
        arrays: Mapping[str, Any],
        writes: Iterable[_Write],
        leaves: tuple[jax.Array, ...],
    ) -> tuple[jax.Array, ...]:
        values = dict(zip(self._paths, leaves, strict=True))
        del leaves
        mesh = self._plan.mesh
        for write in writes:
            tensors = tuple(on_mesh(arrays[name], mesh) for name in write.names)
            scale = None if write.scale_path is None else _allocated(values[write.scale_path])
            values[write.path], scale = _write_parameter(
                _allocated(values[write.path]), scale, tensors, layout=write.layout
            )
            if write.scale_path is not None:
                values[write.scale_path] = scale
        return tuple(values[path] for path in self._paths)


def _flatten(params: Any) -> tuple[dict[str, Any], bool]:
    """Return the leaves of `params` by name, and whether the names are parameter paths.

    The keys of a flat dict are names of a checkpoint's tensors. Any other tree is the state of a
    model, whose names are parameter paths.
    """
    if isinstance(params, nnx.Module):
        params = nnx.state(params)
    if isinstance(params, Mapping) and not isinstance(params, nnx.State):
        if wrong := [key for key in params if not isinstance(key, (str, int))]:
            raise TypeError(f"params has the key {wrong[0]!r}: use names of tensors as keys")
        if not any(isinstance(it, (Mapping, nnx.Variable)) for it in params.values()):
            return {str(name): it for name, it in params.items()}, False
    elif not isinstance(params, nnx.State):
        raise TypeError(
            f"params is a {type(params).__name__}: pass a dict from the names of a checkpoint's "
            "tensors to JAX arrays, an nnx.State of the engine's model, or the pathlib.Path of a "
            "folder with safetensors files"
        )
    found = {}
    for keys, leaf in jax.tree.leaves_with_path(params):
        names = (getattr(key, "key", getattr(key, "idx", None)) for key in keys)
        found[parameter_path(tuple(name for name in names if name is not None))] = leaf
    return found, True


def _check_array(name: str, leaf: Any, devices: Sequence[Any]) -> None:
    """Check that a leaf is a JAX array on the devices of the engine."""
    if not isinstance(leaf, jax.Array) or isinstance(leaf, Tracer):
        kind = f"{type(leaf).__module__.partition('.')[0]}.{type(leaf).__qualname__}"
        raise TypeError(
            f"{name} is a {kind}, not a JAX array: move arrays to the device with jax.device_put"
        )
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        raise TypeError(f"{name} is an array of {leaf.dtype}, not of numbers: omit it")
    if leaf.is_deleted():
        raise ValueError(
            f"{name} was deleted or donated to another function: pass an array that exists"
        )
    found = leaf.devices()
    if not (found == set(devices) or (len(found) == 1 and found <= set(devices))):
        raise ValueError(
            f"{name} is on {', '.join(sorted(map(str, found)))}, but the engine runs on "
            f"{', '.join(map(str, devices))}: pass arrays on one or all of these devices, for "
            "example jax.device_put(params, jax.local_devices()[0])"
        )
    memory = leaf.sharding.memory_kind
    if memory not in (None, default := devices[0].default_memory().kind):
        raise ValueError(
            f"{name} is in {memory} memory: pass arrays in {default} memory, for example "
            "jax.device_put(params, jax.local_devices()[0])"
        )


def _file_dtype(array: jax.Array) -> str:
    """Return the name that safetensors uses for the array's dtype. If checkpoints cannot have this
    dtype, return JAX's name."""
    return _FILE_DTYPE_NAMES.get(np.dtype(array.dtype), array.dtype.name)


def _state_rules(
    config: ModelConfig,
    specs: Mapping[str, jax.ShapeDtypeStruct],
    tensors: Sequence[TensorInfo],
) -> tuple[WeightRules, list[TensorInfo]]:
    """Return the rules that map the state of a model to the parameters of the engine.

    The state and the engine use the same names for parameters. If the state is unquantized, the
    weights that the engine quantizes must have the shape [*inputs, *outputs], or for experts, the
    shape in `UnquantizedExpertFormat`.

    Args:
        config: Config of the model.
        specs: Shape and dtype of each unsharded parameter, by path.
        tensors: Arrays in the state.

    Returns:
        The rules, and `tensors`, but with the shape [inputs, outputs] for each weight of an
        unquantized state.
    """
    rules, shapes = list[WeightRule](), dict[str, tuple[tuple, tuple]]()
    if config.has_float_tensors:
        for path in specs:
            module, _, name = path.rpartition(".")
            projection = config.projection(module)
            if name != "weight" or projection is None:
                continue
            shapes[path] = projection.input_shape, projection.output_shape
            rules += projection.format.float_rules(projection, [module], module, transposed=False)
        for index, layer in enumerate(config.layers):
            if layer.experts is not None:
                weight_format, path = expert_format(config, index), f"layers.{index}.mlp"
                rules += weight_format.state_rules(config, layer.experts, path)
    filled = {path for rule in rules for path in (rule.target, rule.scale_path)}
    rules += [WeightRule(path, path) for path in specs if path not in filled]
    return WeightRules(rules), [
        replace(it, shape=tuple(math.prod(sizes) for sizes in found))
        if (found := shapes.get(it.name)) is not None and it.shape == found[0] + found[1]
        else it
        for it in tensors
    ]


def _scale_axes(placement: TensorPlacement) -> tuple[ScaleAxis, ...]:
    """Return the axes of the scales of a tensor that is quantized; otherwise an empty tuple."""
    if placement.rule.scale_axes is not None:
        return placement.rule.scale_axes
    sizes = placement.shape[: placement.num_output_axes]
    starts = placement.start.tolist()
    return tuple(
        ScaleAxis((size,), start=start) for size, start in zip(sizes, starts, strict=False)
    )


class _FileTensors(Mapping[str, np.ndarray]):
    """Mapping from tensor names of a checkpoint to tensors. A tensor is read from its file at each
    access."""

    def __init__(self, tensors: Sequence[TensorInfo]):
        self._tensors = {it.name: it for it in tensors}

    @override
    def __getitem__(self, name: str) -> np.ndarray:
        return read_rows(self._tensors[name], slice(None))

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    @override
    def __len__(self) -> int:
        return len(self._tensors)


def _check_folder(folder: Path) -> Path:
    """Return the checkpoint folder `folder`.

    Raise an error if the folder does not exist, or if a file that would be read is a FIFO, a socket
    or a device. Other files in the folder are not checked.
    """
    if not folder.is_dir():
        raise ValueError(f"params={str(folder)!r} is not a folder: pass a checkpoint's folder")
    return resolve_checkpoint(folder)


def check_all_finite(arrays: Mapping[str, jax.Array]) -> None:
    """Raise ValueError if an array has a value that is NaN or infinite."""
    checks = {
        name: _is_finite(it)
        for name, it in arrays.items()
        if jnp.issubdtype(it.dtype, jnp.floating)
    }
    for name, is_finite in jax.device_get(checks).items():
        if not is_finite:
            raise ValueError(
                f"{name} has values that are NaN or infinite: lower the learning rate, or pass "
                "check_finite=False to serve them"
            )


@jax.jit
def _is_finite(array: jax.Array) -> jax.Array:
    return jnp.isfinite(array.astype(jnp.float32)).all()


def _are_equal(one: Any, other: Any, dtype: DTypeLike) -> bool:
    """Return whether two arrays have equal values after casting to `dtype`."""
    if one is other:
        return True
    return one.shape == other.shape and bool(_equals(one, other, dtype=np.dtype(dtype)))


@partial(jax.jit, static_argnames="dtype")
def _equals(one: Any, other: Any, dtype: np.dtype) -> jax.Array:
    return (one.astype(dtype) == other.astype(dtype)).all()


def _allocated(leaf: jax.Array) -> jax.Array:
    """Return the array `leaf`, or an array of zeros if `release` has deleted it."""
    return jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding) if leaf.is_deleted() else leaf


def on_mesh(array: Any, mesh: Mesh | None) -> Any:
    """Return the array with a copy on each tensor-parallel device.

    A JAX array is copied between devices, without the host. A numpy array, which was read from a
    file, is copied from host memory.
    """
    if mesh is None:
        return array
    replicated = axis_sharding(mesh, None)
    if isinstance(array, np.ndarray) or len(array.devices()) == 1:
        return jax.device_put(array, replicated)
    return jax.jit(_identity, out_shardings=replicated)(array)


def _identity(array: jax.Array) -> jax.Array:
    """Return the array. `jax.jit` caches the program of a module-level function, but would compile
    a new lambda at each call."""
    return array


@partial(jax.jit, static_argnames="layout", donate_argnames=("param", "scale"))
def _write_parameter(
    param: jax.Array,
    scale: jax.Array | None,
    tensors: tuple[jax.Array, ...],
    layout: _Layout,
) -> tuple[jax.Array, jax.Array | None]:
    """Return a parameter and its scales with new values.

    Args:
        param: Old values.
        scale: Old scales of a parameter that is quantized; otherwise None.
        tensors: Arrays in the order of `layout.pieces`.
        layout: Positions of the arrays within the parameter.
    """
    if layout.mesh is None:
        return _write_pieces(param, scale, tensors, layout)

    def write_shards(param, scale, tensors):
        whole = jnp.zeros(layout.shape, layout.dtype)
        scales = None if scale is None else jnp.zeros(layout.scale_shape or (), scale.dtype)
        whole, scales = _write_pieces(whole, scales, tensors, layout)
        param = _write_boxes(param, whole, layout.boxes)
        if scale is not None and scales is not None:
            scale = _write_boxes(scale, scales, layout.scale_boxes)
        return param, scale

    specs = layout.spec, layout.scale_spec
    options: dict[str, Any] = {"in_specs": (*specs, PartitionSpec()), "out_specs": specs}
    write = jax.shard_map(write_shards, mesh=layout.mesh, check_vma=False, **options)
    return write(param, scale, tensors)


def _write_pieces(
    param: jax.Array,
    scale: jax.Array | None,
    tensors: Sequence[jax.Array],
    layout: _Layout,
) -> tuple[jax.Array, jax.Array | None]:
    """Write arrays into an unsharded parameter, and return the updated parameter and its scales.

    If `scale` is given, quantize the arrays to FP8, and write their scales into `scale`.
    """
    for piece, tensor in zip(layout.pieces, tensors, strict=True):
        if piece.is_scalar:
            tensor = jnp.broadcast_to(tensor.reshape([1] * len(piece.shape)), piece.shape)
        slab = tensor.reshape([piece.shape[axis] for axis in piece.axis_order])
        start, axes, number_scale = np.array(piece.start, np.int32), piece.scale_axes, None
        if scale is not None:
            inverse = tuple(map(piece.axis_order.index, range(slab.ndim)))
            found = fp8_scales(jnp.transpose(slab, inverse), axes)
            scale = jax.lax.dynamic_update_slice(scale, found, [axis.start for axis in axes])
            number_scale = expand_scales(found, axes, piece.shape)
        param = update_parameter(param, slab, start, number_scale, piece.axis_order, piece.addend)
    return param, scale


def _write_boxes(
    shard: jax.Array, whole: jax.Array, boxes: Sequence[Sequence[ShardSlice]]
) -> jax.Array:
    """Copy this device's boxes (rectangular parts) of an unsharded array into its shard."""
    index = jax.lax.axis_index(MESH_AXIS)
    # All devices run the same program. In each iteration of the loop, every device copies one box
    # (rectangular part). The index of the device in the mesh selects where the box starts.
    for device_boxes in zip(*boxes, strict=True):
        starts = jnp.asarray([box.unsharded_start for box in device_boxes], jnp.int32)[index]
        first = device_boxes[0]
        part = jax.lax.dynamic_slice(whole, list(starts), first.shape)
        shard = jax.lax.dynamic_update_slice(shard, part, first.local_start)
    return shard
