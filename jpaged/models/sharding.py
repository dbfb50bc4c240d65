"""How several devices share a model (Shoeybi et al. 2019, arXiv:1909.08053).

Each device of the mesh holds some heads of every attention, some of the width within every
feed-forward and some rows of the token tables; norms and positions are on all of them. It runs the
same step on these smaller arrays (`ModelConfig.shard` says how small), and the devices' results are
summed after every projection back to the residual stream. An array over all devices is their own
arrays side by side along one axis, in the order of the mesh.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, wraps
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
"""The mesh's one axis."""


def make_mesh(devices: Sequence[Any], count: int) -> Mesh | None:
    """The first `count` of the devices; None for a single one, which needs no mesh.

    Raises:
        ValueError: there are fewer.
    """
    if count > len(devices):
        more = " (JAX_NUM_CPU_DEVICES makes more of a CPU)" if devices[0].platform == "cpu" else ""
        raise ValueError(
            f"tensor_parallel_size={count} needs as many devices, and this process has "
            f"{len(devices)} of kind {devices[0].device_kind}; give at most {len(devices)}{more}"
        )
    return None if count == 1 else Mesh(np.array(devices[:count]), (MESH_AXIS,))


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["partials", "peer_header"],
    meta_fields=["buffer_index"],
)
@dataclass(frozen=True)
class PendingAllReduce:
    """Rows that are still to be summed over devices, so that the norm behind can do it at once.

    Attributes:
        partials: A device's own, as split-K partials.
        peer_header: What the device knows of the others (`pallas_kernels.make_exchange_header`).
        buffer_index: 0 and 1 in turn over a program's sums with `peer_header`, of which it has an even number.
    """

    partials: Float[Array, "parts T D"]
    peer_header: Int32[Array, "W"]
    buffer_index: int


def reduce_update(
    update: Float[Array, "parts T D"] | PendingAllReduce, dtype: DTypeLike
) -> Float[Array, "T D"]:
    """The sum of split-K partials, and over devices where that is to be done."""
    if isinstance(update, PendingAllReduce):
        own = sum_partials(update.partials, dtype)
        return device_sum(
            own, MESH_AXIS, header=update.peer_header, buffer_index=update.buffer_index
        )
    return sum_partials(update, dtype)


def barrier_all_reduce(
    x: Float[Array, "T D"], peer_header: Int32[Array, "W"] | None
) -> Float[Array, "T D"]:
    """The first all-reduce of a program, always by XLA, which also serves as a barrier.

    No device then polls in a kernel of ours before every device has loaded the program. If a device
    has lost another, the result is NaN on all devices.
    """
    if peer_header is not None:
        x += nan_if_peer_lost(peer_header).astype(x.dtype)
    return lax.psum(x, MESH_AXIS)


def all_max(x: jax.Array) -> jax.Array:
    """The largest of the devices' arrays in each place, on each of them."""
    return lax.pmax(x, MESH_AXIS)


def all_gather(x: jax.Array, axis: int) -> jax.Array:
    """The devices' arrays side by side along an axis, on each of them."""
    # One behind the other first, as they arrive: asked for along another axis, XLA transposes each
    # before and all of them after.
    found = jnp.moveaxis(lax.all_gather(x, MESH_AXIS), 0, axis)
    return found.reshape(*x.shape[:axis], -1, *x.shape[axis + 1 :])


def shard_start(size: int) -> Int32[Array, ""]:
    """Where a device's own part begins along an axis of which each has `size`, in their order."""
    return lax.axis_index(MESH_AXIS) * size


def sharded_axis(whole: Sequence[int], own: Sequence[int]) -> int | None:
    """The axis along which devices share an array of the shape `whole`, each with one of `own`;
    None if each has all of it."""
    return next((i for i, (a, b) in enumerate(zip(whole, own, strict=True)) if a != b), None)


def axis_sharding(mesh: Mesh, axis: int | None) -> NamedSharding:
    """Of an array that is split along an axis, or whole on every device."""
    before = () if axis is None else (*[None] * axis, MESH_AXIS)
    return NamedSharding(mesh, PartitionSpec(*before))


def global_shape_struct(
    mesh: Mesh | None, own: jax.ShapeDtypeStruct, axis: int | None
) -> jax.ShapeDtypeStruct:
    """The array over all devices of which each has one like `own`; that itself without a mesh."""
    if mesh is None:
        return own
    shape = list(own.shape)
    if axis is not None:
        shape[axis] *= mesh.size
    return jax.ShapeDtypeStruct(tuple(shape), own.dtype, sharding=axis_sharding(mesh, axis))


def per_device_shape(array: Any) -> tuple[int, ...]:
    """The shape of what each device has of an array, or of what stands for one."""
    sharding = getattr(array, "sharding", None)
    return array.shape if sharding is None else sharding.shard_shape(array.shape)


def per_device_bytes(tree: Any) -> int:
    """Bytes of a tree of arrays on each device."""
    return sum(math.prod(per_device_shape(it)) * it.dtype.itemsize for it in jax.tree.leaves(tree))


def tree_mesh(tree: Any) -> Mesh | None:
    """The mesh over which arrays lie; None if they are on one device."""
    for leaf in jax.tree.leaves(tree):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
            return sharding.mesh
    return None


def wrap_in_shard_map(
    function: Callable, mesh: Mesh, arguments: tuple, keywords: Mapping[str, Any], out_specs: Any
) -> Callable:
    """A function of a device's own arrays as one of arrays over all devices, run on each at once.

    Args:
        function: Of the device's arrays; may call `device_sum` and `all_gather`.
        mesh: The devices.
        arguments, keywords: What stands for the arrays over all devices, with their shardings.
        results: How the results lie: a tree of `PartitionSpec`, or a prefix of it.
    """
    in_specs = jax.tree.map(lambda it: it.sharding.spec, (arguments, dict(keywords)))

    def call(arguments: tuple, keywords: dict) -> Any:
        return function(*arguments, **keywords)

    # check_vma: JAX cannot see that what kernels return is the same on all devices.
    options: dict[str, Any] = {"in_specs": in_specs, "out_specs": out_specs, "check_vma": False}
    mapped = jax.shard_map(call, mesh=mesh, **options)

    @wraps(function)  # arguments are donated by name
    def run(*arguments, **keywords):
        return mapped(arguments, keywords)

    return run


@dataclass(frozen=True)
class ShardSlice:
    """A box of an array that one device has.

    Attributes:
        whole: Where it begins in the array as a single device would have it.
        own: Where it begins in the device's own array.
        shape: Its shape.
    """

    global_start: tuple[int, ...]
    local_start: tuple[int, ...]
    shape: tuple[int, ...]


def shard_slices(
    whole: tuple[int, ...],
    own: tuple[int, ...],
    device_index: int,
    count: int,
    parts: Sequence[tuple[int, int]] = (),
) -> list[ShardSlice]:
    """What device `device_index` of `count` has of an array.

    Args:
        whole: The array's shape on a single device.
        own: The shape of a device's array.
        place, count: Which device of how many.
        parts: Where several arrays lie side by side along the split axis, as queries, keys and
            values do, the sizes there of each, whole and own. Of a part that has fewer rows than
            there are devices, several devices have the same one.
    """
    axis, nowhere = sharded_axis(whole, own), (0,) * len(whole)
    if axis is None:
        return [ShardSlice(nowhere, nowhere, whole)]

    def at(start: int) -> tuple[int, ...]:
        return (*nowhere[:axis], start, *nowhere[axis + 1 :])

    found, before, own_before = [], 0, 0
    for size, own_size in parts or [(whole[axis], own[axis])]:
        shape = (*whole[:axis], own_size, *whole[axis + 1 :])
        # Devices that have a part together, as a KV head, all begin where it does.
        start = before + device_index * size // count // own_size * own_size
        found.append(ShardSlice(at(start), at(own_before), shape))
        before, own_before = before + size, own_before + own_size
    return found
