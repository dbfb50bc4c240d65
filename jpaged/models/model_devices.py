"""Devices of a user's model: the split of the parameters, and functions on each device's shards.

XLA partitions the plain JAX code of a user's functions over the mesh of the parameters. Attention,
fused operations and sampling run kernels, which XLA cannot partition. `ShardRunner` calls these
functions on each device by `jax.shard_map`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jpaged.errors import format_count
from jpaged.models.sharding import axis_sharding, sharded_axis, split_axis

REPLICATED = PartitionSpec()


@dataclass(frozen=True)
class ModelDevices:
    """The mesh of a user's parameters, and the axis along which each parameter is split.

    Attributes:
        mesh: Mesh in which only one axis has more than one device. All axes have the type
            `AxisType.Auto`, so XLA partitions the arrays of a traced function.
        split_axes: For each parameter, in the order of `jax.tree.leaves`, the axis along which the
            array is split; None if every device has the whole array.
    """

    mesh: Mesh
    split_axes: tuple[int | None, ...]

    def replicate(self, array: jax.Array) -> jax.Array:
        """Constrain a traced array so that every device has a complete copy, and return it."""
        return jax.lax.with_sharding_constraint(array, NamedSharding(self.mesh, REPLICATED))

    def on_each_device(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls `function` on every device with complete arrays. The results
        must be the same on all devices."""
        return _map_shards(function, self.mesh, REPLICATED, REPLICATED)

    def shard_runner(self, params: Any) -> "ShardRunner":
        """Return a `ShardRunner`, which is valid during the trace that `params` belong to.

        Args:
            params: The traced parameters.
        """
        leaves = jax.tree.leaves(params)
        return ShardRunner(self, list(zip(leaves, self.split_axes, strict=True)))


class Split(NamedTuple):
    """How devices split the arrays of an operation.

    Attributes:
        inputs: A `PartitionSpec` for each argument.
        output: One `PartitionSpec` for all results, or a tree with a `PartitionSpec` for each
            result.
        sum_axis: Name of the mesh axis over which the operation sums its result; None for no sum.
    """

    inputs: tuple[PartitionSpec, ...]
    output: Any = REPLICATED
    sum_axis: str | None = None


class ShardRunner:
    """Calls functions on each device with the device's shards, while a user's model is traced.

    `run` wraps a function in `jax.shard_map`. The other methods return how arrays are split.

    Args:
        devices: Devices of the model.
        weights: Pairs of a traced parameter and the axis along which it is split; the axis is None
            for a replicated parameter.
    """

    def __init__(self, devices: ModelDevices, weights: list[tuple[Any, int | None]]):
        self._mesh, self.axis_name = devices.mesh, split_axis(devices.mesh)
        # Keep a reference to each parameter, because Python may reuse the id of a deleted object.
        self._weights = {id(array): (array, axis) for array, axis in weights}

    @property
    def num_devices(self) -> int:
        """Number of devices of the mesh."""
        return self._mesh.size

    def split_along(self, axis: int | None) -> PartitionSpec:
        """Return the `PartitionSpec` of an array that is split along `axis`, or of a replicated
        array if `axis` is None."""
        return axis_sharding(self._mesh, axis).spec

    def weight_axis(self, where: str, name: str, weight: Any) -> int | None:
        """Return the axis along which a weight is split; None if the weight is replicated.

        Args:
            where: Name of the operation, for the error.
            name: Name of the argument `weight` in that operation, for the error.
            weight: A parameter of the model.

        Raises:
            ValueError: `weight` is not a parameter of the model. For example, the model's function
                has computed `weight` from a parameter.
        """
        if id(weight) not in self._weights:
            raise ValueError(
                f"{where}: {name} is computed by the function, so its split over the "
                f"{self.num_devices} devices is unknown. Pass an unchanged array of params: "
                "reshape, stack or cast arrays before the engine is created, and do not pass them "
                "through jax.jit, jax.checkpoint or lax.scan"
            )
        return self._weights[id(weight)][1]

    def run(self, function: Callable[..., Any], split: Split, *arguments: Any) -> Any:
        """Call `function` on each device with the shards of the arguments, and return the global
        results."""
        return _map_shards(function, self._mesh, split.inputs, split.output)(*arguments)


def _map_shards(function: Callable[..., Any], mesh: Mesh, inputs: Any, output: Any) -> Any:
    """Return a function of global arrays that calls `function` on each device with the device's
    shards of the arrays."""
    specs: dict[str, Any] = {"in_specs": inputs, "out_specs": output}
    # JAX cannot infer that a kernel's result is equal on all devices, so set check_vma to False.
    return jax.shard_map(function, mesh=mesh, check_vma=False, **specs)


def refuse_split(where: str, name: str, axis: int, supported: str) -> ValueError:
    """Return the error for a weight that is split along an axis that an operation cannot use."""
    return ValueError(
        f"{where}: {name} is split over the devices along axis {axis}, but must be {supported}: "
        "change its PartitionSpec"
    )


def find_mesh(params: Any) -> Mesh | None:
    """Return the mesh of the first parameter that is on several devices.

    Return None if every parameter is on a single device.

    Raises:
        ValueError: The parameter has no `NamedSharding`, more than one axis of its mesh is longer
            than 1, or its mesh contains a device that is not in `jax.local_devices()`. The message
            names the parameter.
    """
    for path, leaf in jax.tree.leaves_with_path(params):
        if not isinstance(leaf, jax.Array) or isinstance(leaf, Tracer) or leaf.is_deleted():
            continue  # `_check_parameters` in jax_model.py raises an error for this leaf
        if len(leaf.sharding.device_set) > 1:
            return _check_mesh(f"params{jax.tree_util.keystr(path)}", leaf)
    return None


def _check_mesh(name: str, leaf: jax.Array) -> Mesh:
    """Return the mesh of an array on several devices, with axes of the type `AxisType.Auto`."""
    sharding, count = leaf.sharding, len(leaf.sharding.device_set)
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        raise ValueError(
            f"{name} is on {count} devices with a {type(sharding).__name__}: pass arrays with a "
            "NamedSharding, for example jax.device_put(params, NamedSharding(mesh, "
            "PartitionSpec()))"
        )
    mesh = sharding.mesh
    axes = [f"{axis}={size}" for axis, size in mesh.shape.items() if size > 1]
    if len(axes) > 1:
        raise ValueError(
            f"{name} is on a mesh with the axes {' and '.join(axes)}, but a JaxModel is split "
            "over one mesh axis: move params to a mesh with one axis of several "
            "devices, such as jax.make_mesh((2,), ('tensor',)), without an fsdp axis"
        )
    if others := set(mesh.devices.flat) - set(jax.local_devices()):
        raise ValueError(
            f"{name} is also on {min(others, key=str)}, which is not one of jax.local_devices(): "
            "pass arrays on these devices, because an engine runs in one process"
        )
    types = (AxisType.Auto,) * len(mesh.axis_names)
    return Mesh(mesh.devices, mesh.axis_names, axis_types=types)


def place_on_mesh(name: str, leaf: jax.Array, mesh: Mesh) -> jax.Array:
    """Return a parameter with its sharding expressed on `mesh`. No data is copied.

    Raises:
        ValueError: The parameter is not on the devices of `mesh`, or is unreduced, which means that
            each device holds one addend of a sum. The message begins with `name`.
    """
    sharding, remedy = leaf.sharding, "jax.device_put(array, NamedSharding(mesh, PartitionSpec()))"
    own = sharding.mesh if isinstance(sharding, NamedSharding) else None
    if not isinstance(own, Mesh) or own.shape != mesh.shape:
        where = format_count(len(sharding.device_set), "device")
        raise ValueError(
            f"{name} is on {where} with {sharding}, but other arrays of params are on "
            f"{_describe(mesh)}: pass {remedy} for an array that every device needs"
        )
    if [*own.devices.flat] != [*mesh.devices.flat]:
        raise ValueError(
            f"{name} is on {_describe(own)}, but other arrays of params are on a mesh with other "
            f"devices or another device order: pass {remedy} with the same mesh for all arrays"
        )
    if isinstance(sharding, NamedSharding) and sharding.spec.unreduced:
        raise ValueError(
            f"{name} is unreduced ({sharding.spec}), so it is the sum of the devices' arrays: sum "
            "them with jax.reshard before the engine is created"
        )
    wanted = axis_sharding(mesh, split_axis_of(leaf))
    if sharding == wanted:
        return leaf
    shards = [shard.data for shard in leaf.addressable_shards]
    return jax.make_array_from_single_device_arrays(leaf.shape, wanted, shards)


def split_axis_of(leaf: jax.Array) -> int | None:
    """Return the axis along which an array is split over devices; None if it is replicated."""
    return sharded_axis(leaf.shape, leaf.sharding.shard_shape(leaf.shape))


def _describe(mesh: Mesh) -> str:
    axes = ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
    return f"a mesh of {format_count(mesh.size, 'device')} ({axes})"
