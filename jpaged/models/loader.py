"""Load the tensors of a checkpoint, or random weights, into parameters that are on the device.

`weight_plan.py` says which tensor goes where in which parameter, before any weight is read. Then
the loader copies the tensors to the device in slabs (groups of rows), file by file. The device
transposes and casts each slab, and writes the slab in place into its parameter. A parameter may be
fused from several tensors. Files are mapped for one slab at a time. The host therefore holds only a
few slabs, even if a file or a parameter is large. Each tensor-parallel device receives its shard of
every slab.
"""

import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.models.checkpoint import (
    FILE_DTYPES,
    SUPPORTED_DTYPES,
    CheckpointError,
    TensorInfo,
    WeightRule,
    read_rows,
)
from jpaged.models.sharding import ShardSlice
from pallas_kernels import FP8_MAX, FP8_MIN_ABSMAX, to_fp8

SLAB_BYTES = 64 << 20

_DUMMY_STD = 0.02

_DUMMY_SCALE = 2.0**-8
"""Scale of random FP8 weights, and static scale of the rows that they multiply."""

_SCALE_SUFFIXES = ("weight_scale", ".input_scale", ".k_scale", ".v_scale")
"""Suffixes of the paths of parameters that hold FP8 scales."""

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
        slab overlaps, yield two things: the box, and the part of the slab that lies in the box, as
        one slice per axis of the parameter.
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


def load_tensors(placements: Iterable[TensorPlacement], shards: Sequence[DeviceShard]) -> None:
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
    # may differ. A slab (the rows that are read together) must consist of whole rows in both
    # shapes. The number of elements in a slab is therefore a multiple of both row sizes.
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
