"""Tensor parallelism: the sharding of a model over devices (Shoeybi et al. 2019, arXiv:1909.08053).

Each device of the mesh holds a shard of the attention heads, of the feed-forward width and of the
rows of the token tables. It also holds a shard of the width of every expert or, with
`enable_expert_parallel`, some whole experts. Norms, routers and position tables are replicated.
Every device runs the same step on its shards, whose sizes `ModelConfig.shard` returns. After every
projection back to the residual stream, an all-reduce sums the devices' results.

A global array is the concatenation of the devices' shards along one axis, in the order of the mesh.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial, reduce, wraps
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32

from pallas_kernels import device_sum, nan_if_peer_lost, sum_partials

MESH_AXIS = "tensor"
"""Name of the only axis of the mesh that `make_mesh` returns. The axis of a user's mesh may have
another name (`split_axis`)."""


def make_mesh(devices: Sequence[Any], count: int) -> Mesh | None:
    """Return a mesh of the first `count` devices; None if `count` is 1.

    Raises:
        ValueError: `count` is larger than the number of devices.
    """
    if count > len(devices):
        more = (
            " (JAX_NUM_CPU_DEVICES sets the number of CPU devices)"
            if devices[0].platform == "cpu"
            else ""
        )
        raise ValueError(
            f"tensor_parallel_size={count} is larger than the number of devices: this process has "
            f"{len(devices)} of kind {devices[0].device_kind}; use at most {len(devices)}{more}"
        )
    return None if count == 1 else Mesh(np.array(devices[:count]), (MESH_AXIS,))


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["partials", "peer_header"],
    meta_fields=["buffer_index"],
)
@dataclass(frozen=True)
class PendingAllReduce:
    """Rows that still need an all-reduce. The kernel of the next norm runs the all-reduce.

    Attributes:
        partials: This device's rows, as split-K partials.
        peer_header: Addresses of all devices' peer memory (`pallas_kernels.make_exchange_header`).
        buffer_index: Index of the exchange buffer, 0 or 1. Successive all-reduces through peer
            memory must alternate between the two buffers. Each program must contain an even number
            of all-reduces through peer memory.
    """

    partials: Float[Array, "parts T D"]
    peer_header: Int32[Array, "W"]
    buffer_index: int


def reduce_update(
    update: Float[Array, "parts T D"] | PendingAllReduce, dtype: DTypeLike
) -> Float[Array, "T D"]:
    """Return the rows that an attention or feed-forward block adds to the residual stream.

    Sum the split-K partials. If `update` is a `PendingAllReduce`, then sum over the devices.
    """
    if isinstance(update, PendingAllReduce):
        local_sum = sum_partials(update.partials, dtype)
        return device_sum(
            local_sum, MESH_AXIS, header=update.peer_header, buffer_index=update.buffer_index
        )
    return sum_partials(update, dtype)


def barrier_all_reduce(
    x: Float[Array, "T D"], peer_header: Int32[Array, "W"] | None
) -> Float[Array, "T D"]:
    """Sum `x` over the devices with XLA's all-reduce, which is also a barrier.

    Every program begins with this all-reduce. Therefore no kernel polls peer memory before every
    device has loaded the program. If a device can no longer reach another device, the result is NaN
    on all devices.
    """
    if peer_header is not None:
        x += nan_if_peer_lost(peer_header).astype(x.dtype)
    return lax.psum(x, MESH_AXIS)


def sum_in_device_order(x: jax.Array, axis_name: str = MESH_AXIS) -> jax.Array:
    """Sum the devices' arrays in float32 in the order of the devices, and round once.

    This function does not use an all-reduce, whose order may depend on the size of the array.
    """
    parts = lax.all_gather(x, axis_name).astype(jnp.float32)
    return reduce(jnp.add, list(parts)).astype(x.dtype)


def all_max(x: jax.Array) -> jax.Array:
    """Return the elementwise maximum of the devices' arrays, on every device."""
    return lax.pmax(x, MESH_AXIS)


def all_mean(x: jax.Array) -> jax.Array:
    """Return the elementwise mean of the devices' arrays, added in the order of the devices."""
    return sum_in_device_order(x) / lax.axis_size(MESH_AXIS)


def all_gather(x: jax.Array, axis: int) -> jax.Array:
    """Concatenate the devices' arrays along an axis, on every device."""
    # Gather along a new first axis. To gather along another axis, XLA would transpose each array
    # before the all-gather, and transpose the result again.
    gathered = jnp.moveaxis(lax.all_gather(x, MESH_AXIS), 0, axis)
    return gathered.reshape(*x.shape[:axis], -1, *x.shape[axis + 1 :])


def split_rows(x: jax.Array) -> jax.Array:
    """Convert a shard of columns [T, C] on this device to a shard of rows [T / n, C * n].

    The n devices exchange their parts with an all-to-all. T must be a multiple of n. The first
    device gets the first rows.
    """
    return lax.all_to_all(x, MESH_AXIS, split_axis=0, concat_axis=1, tiled=True)


def shard_start(size: int) -> Int32[Array, ""]:
    """Return the start index of this device's shard along an axis, if every shard has `size`
    entries."""
    return lax.axis_index(MESH_AXIS) * size


def sharded_axis(unsharded_shape: Sequence[int], shard_shape: Sequence[int]) -> int | None:
    """Return the axis along which an array is split; None if the array is replicated."""
    return next(
        (i for i, (a, b) in enumerate(zip(unsharded_shape, shard_shape, strict=True)) if a != b),
        None,
    )


def split_axis(mesh: Mesh) -> str:
    """Return the name of the mesh axis that splits arrays: the only axis with several devices, or
    the first axis if there is a single device."""
    return next((name for name, size in mesh.shape.items() if size > 1), mesh.axis_names[0])


def axis_sharding(mesh: Mesh, axis: int | None) -> NamedSharding:
    """Return the sharding of an array that is split along `axis`; replicated if `axis` is None."""
    spec = () if axis is None else (*[None] * axis, split_axis(mesh))
    return NamedSharding(mesh, PartitionSpec(*spec))


def global_shape_struct(
    mesh: Mesh | None, shard_spec: jax.ShapeDtypeStruct, axis: int | None
) -> jax.ShapeDtypeStruct:
    """Return shape, dtype and sharding of the global array whose shards have the shape and dtype of
    `shard_spec`.

    Args:
        mesh: Mesh of the devices; None returns `shard_spec` itself.
        shard_spec: Shape and dtype of one device's shard.
        axis: Axis along which the global array is split; None if it is replicated.
    """
    if mesh is None:
        return shard_spec
    shape = list(shard_spec.shape)
    if axis is not None:
        shape[axis] *= mesh.size
    return jax.ShapeDtypeStruct(tuple(shape), shard_spec.dtype, sharding=axis_sharding(mesh, axis))


def per_device_shape(array: Any) -> tuple[int, ...]:
    """Return the shape of each device's shard of an array or `jax.ShapeDtypeStruct`."""
    sharding = getattr(array, "sharding", None)
    return array.shape if sharding is None else sharding.shard_shape(array.shape)


def per_device_bytes(tree: Any) -> int:
    """Return the number of bytes that a tree of arrays takes on each device."""
    return sum(math.prod(per_device_shape(it)) * it.dtype.itemsize for it in jax.tree.leaves(tree))


def tree_mesh(tree: Any) -> Mesh | None:
    """Return the mesh over which a tree of arrays is sharded; None on a single device."""
    for leaf in jax.tree.leaves(tree):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
            return sharding.mesh
    return None


def without_mesh() -> AbstractContextManager[Any]:
    """Return a context in which JAX ignores the mesh that a caller has set with `jax.set_mesh`.

    In the caller's context, JAX places new arrays on the caller's mesh, and refuses arrays of
    another mesh.
    """
    return jax.set_mesh(Mesh(np.empty((), object), ()))


def wrap_in_shard_map(
    function: Callable, mesh: Mesh, arguments: tuple, keywords: Mapping[str, Any], out_specs: Any
) -> Callable:
    """Return a function that takes global arrays, and runs `function` on each device with that
    device's shards.

    Args:
        function: Function that takes the shards of one device. It may call `device_sum` and
            `all_gather`.
        mesh: Mesh of the devices.
        arguments, keywords: Global arrays or their shape structs, with shardings.
        out_specs: Sharding of the results: a tree of `PartitionSpec`, or a prefix of such a tree.
    """
    in_specs = jax.tree.map(lambda it: it.sharding.spec, (arguments, dict(keywords)))

    def call(arguments: tuple, keywords: dict) -> Any:
        return function(*arguments, **keywords)

    # Disable `check_vma`: JAX cannot infer that a kernel's result is equal on all devices.
    options: dict[str, Any] = {"in_specs": in_specs, "out_specs": out_specs, "check_vma": False}
    mapped = jax.shard_map(call, mesh=mesh, **options)

    @wraps(function)  # `jax.jit` donates arguments by name, so keep the names of the arguments
    def run(*arguments, **keywords):
        return mapped(arguments, keywords)

    return run


@dataclass(frozen=True)
class ShardSlice:
    """A box (rectangular part) of an unsharded array that one device's shard contains.

    Attributes:
        unsharded_start: Index of the box's first element in the unsharded array.
        local_start: Index of the box's first element in the shard of the device.
        shape: Shape of the box.
    """

    unsharded_start: tuple[int, ...]
    local_start: tuple[int, ...]
    shape: tuple[int, ...]


def shard_slices(
    unsharded_shape: tuple[int, ...],
    shard_shape: tuple[int, ...],
    device_index: int,
    count: int,
    parts: Sequence[tuple[int, int]] = (),
) -> list[ShardSlice]:
    """Return the boxes (rectangular parts) of an unsharded array that are in one device's shard.

    Args:
        unsharded_shape: Shape of the array on a single device.
        shard_shape: Shape of the device's shard.
        device_index: Index of the device in the mesh.
        count: Number of devices.
        parts: Sizes along the split axis, as one pair (unsharded size, shard size) per part of a
            fused array. For example, a fused projection has a part for queries, one for keys and
            one for values. Empty for an array that is not fused. If a part has fewer rows than
            there are devices, several devices hold the same row.
    """
    axis, origin = sharded_axis(unsharded_shape, shard_shape), (0,) * len(unsharded_shape)
    if axis is None:
        return [ShardSlice(origin, origin, unsharded_shape)]

    def at(start: int) -> tuple[int, ...]:
        return (*origin[:axis], start, *origin[axis + 1 :])

    slices, unsharded_offset, local_offset = [], 0, 0
    for size, shard_size in parts or [(unsharded_shape[axis], shard_shape[axis])]:
        shape = (*unsharded_shape[:axis], shard_size, *unsharded_shape[axis + 1 :])
        # If the devices outnumber the KV heads, several devices hold the same head. These devices
        # need the same start, so round the device's offset down to a multiple of `shard_size`.
        start = unsharded_offset + device_index * size // count // shard_size * shard_size
        slices.append(ShardSlice(at(start), at(local_offset), shape))
        unsharded_offset, local_offset = unsharded_offset + size, local_offset + shard_size
    return slices
