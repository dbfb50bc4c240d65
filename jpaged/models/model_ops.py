"""Fused operations for a user's model: products and norms.

`ModelOps` is the argument of `logits`, and the base of `ModelStep`. Its operations are the kernels
of the built-in model families.
"""

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, SupportsFloat

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.typing import DTypeLike
from jaxtyping import Array

from jpaged.models.layer_calls import trace_once
from jpaged.models.model_devices import REPLICATED, ShardRunner, Split, refuse_split
from jpaged.models.norm import add_norm_rows, normalize_rows
from jpaged.models.sharding import sum_in_device_order
from pallas_kernels import (
    Backend,
    batch_invariant_gated_gemm,
    batch_invariant_gemm,
    batch_invariant_transposed_gemm,
    einsum,
    gated_gemm,
    split_k_gemm,
    sum_partials,
)


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True)
class Partials:
    """Partial products whose sum is a matrix product. A later operation computes the sum.

    The kernel that normalizes or rotates the product also computes the sum, which saves a kernel
    launch.

    Attributes:
        values: Partial products [parts, T, *outputs].
        dtype: Dtype of the product.
    """

    values: Array
    dtype: DTypeLike

    def sum(self) -> Array:
        """Return the matrix product [T, *outputs], which is the sum of the partial products."""
        return sum_partials(self.values, self.dtype)

    def tree_flatten(self):
        """Return the array, and the dtype as static data."""
        return (self.values,), jnp.dtype(self.dtype)

    @classmethod
    def tree_unflatten(cls, dtype, values):
        """Rebuild the object without `__init__`: JAX may pass placeholders instead of arrays."""
        self = object.__new__(cls)
        vars(self).update(values=values[0], dtype=dtype)
        return self


def as_partials(product: Array | Partials) -> Partials:
    """Wrap an array as `Partials` with one partial product; return `Partials` unchanged."""
    return product if isinstance(product, Partials) else Partials(product[None], product.dtype)


class ModelOps:
    """Fused operations that the functions of a user's model may call.

    The operations run the kernels of the built-in model families on a GPU, and plain XLA elsewhere.
    With the engine's option `batch_invariant`, the bits of a row do not depend on other rows.
    Products accumulate in float32. Rows and weights must have the same dtype.

    With several devices, the docstring of an operation says how its weights may be split. These
    weights must be arrays of `params`, because the split of other arrays is unknown. If no weight
    of an operation is split, every device computes all rows.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        batch_invariant: bool = False,
        shard_runner: ShardRunner | None = None,
    ):
        self._backend, self._batch_invariant = backend, batch_invariant
        self._shard_runner = shard_runner

    def project(self, x: Array, weight: Array) -> Partials:
        """Return the product of rows and a weight.

        Args:
            x: Rows [T, *inputs].
            weight: Weight [*inputs, *outputs]. If it is split over devices along an axis of the
                outputs, the product is split along this axis. If it is split along an axis of the
                inputs, the devices' products are summed.

        Returns:
            The product. Pass it to `add_rms_norm` or `ModelStep.rope_attend`, or call its method
            `sum` to get an array [T, *outputs].
        """
        if x.shape[1:] != weight.shape[: x.ndim - 1]:
            raise ValueError(
                f"project: weight has shape {list(weight.shape)}, but must be [*inputs, *outputs] "
                f"with inputs = {list(x.shape[1:])}, because x has shape {list(x.shape)}"
            )
        split = self._product_split(x, weight)
        return self._call("project", _project, x, weight, split=split)

    def gated_project(self, x: Array, weight: Array) -> Array:
        """Return silu(x @ weight[:, 0]) * (x @ weight[:, 1]), the first half of a SwiGLU.

        Args:
            x: Rows [T, D].
            weight: Gate and up projection [D, 2, F]. If it is split over devices, it must be split
                along F, and the result is split along F.

        Returns:
            The rows [T, F] for the down projection.
        """
        split = None
        if (shard_runner := self._shard_runner) is not None:
            axis = shard_runner.weight_axis("gated_project", "weight", weight)
            if axis not in (None, 2):
                raise refuse_split("gated_project", "weight [D, 2, F]", axis, "split along F")
            rows = shard_runner.split_along(None if axis is None else 1)
            split = Split((REPLICATED, shard_runner.split_along(axis)), rows)
        return self._call("gated_project", _gated_project, x, weight, split=split)

    def project_vocabulary(self, hidden: Array, table: Array) -> Array:
        """Return the logits hidden @ table.T in float32.

        Args:
            hidden: Hidden states [R, D].
            table: Output head or embedding table [V, D]. If it is split over devices along V, the
                logits are split along V. If it is split along D, the devices' logits are summed.
        """
        split = self._vocabulary_split(table)
        return self._call("project_vocabulary", _project_vocabulary, hidden, table, split=split)

    def rms_norm(self, x: Array, weight: Array, *, eps: SupportsFloat) -> Array:
        """Return x / rms(x) * weight, where rms(x) is taken over the last axis. The computation is
        in float32, and the result has x's dtype."""
        eps = check_norm("rms_norm", weight, x.shape[-1:], eps)
        return self._call("rms_norm", _rms_norm, x, weight, split=self._replicated(2), eps=eps)

    def add_rms_norm(
        self,
        hidden: Array,
        update: Array | Partials | None,
        weight: Array,
        *,
        eps: SupportsFloat,
    ) -> tuple[Array, Array]:
        """Add an update to the residual stream, and normalize the sum with RMSNorm.

        Args:
            hidden: Residual stream [T, D].
            update: Update [T, D], for example the result of `project`; None for no update.
            weight: Weight of the norm [D].
            eps: Epsilon of the norm.

        Returns:
            The normalized rows, and the new residual stream.
        """
        eps = check_norm("add_rms_norm", weight, hidden.shape[-1:], eps)
        values = None if update is None else as_partials(update).values
        arrays, split = (hidden, values, weight), self._replicated(3)
        return self._call("add_rms_norm", _add_rms_norm, *arrays, split=split, eps=eps)

    def _product_split(self, x: Array, weight: Array) -> Split | None:
        """Return how devices split the arrays of the operation `project`; None on one device."""
        if (shard_runner := self._shard_runner) is None:
            return None
        axis, num_inputs = shard_runner.weight_axis("project", "weight", weight), x.ndim - 1
        spec = shard_runner.split_along(axis)
        if axis is None:
            return Split((REPLICATED, spec))
        if axis < num_inputs:
            return Split(
                (shard_runner.split_along(1 + axis), spec), sum_axis=shard_runner.axis_name
            )
        # The partials of the product are [parts, T, *outputs].
        return Split((REPLICATED, spec), shard_runner.split_along(2 + axis - num_inputs))

    def _vocabulary_split(self, table: Array) -> Split | None:
        """Return how devices split the arrays of the operation `project_vocabulary`; None on one
        device."""
        if (shard_runner := self._shard_runner) is None:
            return None
        axis = shard_runner.weight_axis("project_vocabulary", "table", table)
        spec = shard_runner.split_along(axis)
        if axis == 1:
            return Split((shard_runner.split_along(1), spec), sum_axis=shard_runner.axis_name)
        return Split((REPLICATED, spec), shard_runner.split_along(None if axis is None else 1))

    def _replicated(self, num_arrays: int) -> Split | None:
        """Return the `Split` of an operation with only replicated arrays; None on one device."""
        return None if self._shard_runner is None else Split((REPLICATED,) * num_arrays)

    def _call(
        self,
        name: str,
        function: Callable[..., Any],
        *arrays: Any,
        split: Split | None,
        **options: Any,
    ) -> Any:
        """Run an operation with this object's backend and `batch_invariant` mode.

        Args:
            name: Name of the operation.
            function: Function of the operation, with `arrays` and `options` as arguments.
            arrays: Arrays, or trees of arrays.
            split: How devices split the arrays; None on one device.
            options: Static options.
        """
        mode = {"backend": self._backend, "batch_invariant": self._batch_invariant}
        if split is None or self._shard_runner is None:
            return function(*arrays, **options, **mode)
        if split.sum_axis is not None:
            options["sum_axis"] = split.sum_axis
        return self._shard_runner.run(partial(function, **options, **mode), split, *arrays)


def sum_over_devices(rows: Array, axis_name: str, *, batch_invariant: bool) -> Array:
    """Return the sum of the devices' arrays. In the batch-invariant mode, the order of the sum does
    not depend on the number of rows."""
    if batch_invariant:
        return sum_in_device_order(rows, axis_name)
    return jax.lax.psum(rows, axis_name)


@trace_once
def _project(x, weight, *, backend, batch_invariant, sum_axis=None):
    outputs = weight.shape[x.ndim - 1 :]
    rows = x.reshape(x.shape[0], -1)
    flat = weight.reshape(rows.shape[1], -1)
    if batch_invariant:
        values = batch_invariant_gemm(rows, flat, backend=backend)[None]
    else:
        values = split_k_gemm(rows, flat, backend=backend)
    if sum_axis is not None:
        total = sum_partials(values, x.dtype)
        values = sum_over_devices(total, sum_axis, batch_invariant=batch_invariant)[None]
    return Partials(values.reshape(*values.shape[:2], *outputs), x.dtype)


@trace_once
def _gated_project(x, weight, *, backend, batch_invariant):
    gemm = batch_invariant_gated_gemm if batch_invariant else gated_gemm
    return gemm(x, weight, backend=backend)


@trace_once
def _project_vocabulary(hidden, table, *, backend, batch_invariant, sum_axis=None):
    if batch_invariant:
        logits = batch_invariant_transposed_gemm(hidden, table, backend=backend)
    else:
        logits = einsum("rd,vd->rv", hidden, table, out=jnp.float32)
    if sum_axis is None:
        return logits
    return sum_over_devices(logits, sum_axis, batch_invariant=batch_invariant)


@trace_once
def _rms_norm(x, weight, *, eps, backend, batch_invariant):
    return normalize_rows(x, weight, eps, batch_invariant=batch_invariant)


@trace_once
def _add_rms_norm(hidden, update, weight, *, eps, backend, batch_invariant):
    return add_norm_rows(
        hidden, update, weight, eps, backend=backend, batch_invariant=batch_invariant
    )


def check_norm(where: str, weight: Array, shape: tuple[int, ...], eps: Any) -> float:
    """Check the weight and the epsilon of an RMSNorm, and return the epsilon."""
    if jnp.shape(weight) != shape:
        raise ValueError(
            f"{where}: the weight of the norm has shape {list(jnp.shape(weight))}, but must have "
            f"shape {list(shape)}: pass one number per channel"
        )
    number = static_number(where, "eps", eps, float)
    if number is None:
        raise TypeError(f"{where}: eps=None: pass a positive number, such as 1e-6")
    return number


def static_number(where: str, name: str, value: Any, convert: Callable) -> Any:
    """Return an option as a Python number, or None if the option is None. Refuse traced values."""
    if value is None:
        return None
    if isinstance(value, Tracer):
        raise TypeError(f"{where}: {name} is a traced value: pass a Python number")
    try:
        number = convert(value)
    except (TypeError, ValueError) as error:
        kind = "an int" if convert is operator.index else "a number"
        raise TypeError(f"{where}: {name}={value!r}: pass {kind}, or None") from error
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"{where}: {name}={number}: pass a positive number, or None")
    return number
