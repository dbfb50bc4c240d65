"""The modules that own a model's large weights: projections (`Linear`) and tables (`Embedding`).

`Linear` implements every projection of every model family, fused or not. A `Projection` describes
the shapes and selects the weight format (`jpaged.models.formats`).
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32

from jpaged.models.checkpoint import WeightRule
from jpaged.models.config import ModelConfig
from jpaged.models.formats import BatchInvariantFormat, LinearInput, Projection, zero_param
from jpaged.models.norm import Norm, RMSNorm, add_norm
from jpaged.models.sharding import (
    MESH_AXIS,
    PendingAllReduce,
    barrier_all_reduce,
    reduce_update,
    shard_start,
    sum_in_device_order,
)
from pallas_kernels import (
    Backend,
    TargetScores,
    batch_invariant_transposed_gemm,
    device_sum,
    einsum,
    gated_silu,
    sum_partials,
    target_scores,
)


def apply_activation(name: str, x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Apply the feed-forward activation that Hugging Face calls `name`.

    The result is in x's dtype for "relu", and in float32 for all other activations.
    """
    if name == "relu":
        # relu is exact in any dtype. Without a cast, XLA fuses relu into the preceding product.
        return jax.nn.relu(x)
    x = x.astype(jnp.float32)
    if is_silu(name):
        return jax.nn.silu(x)
    if name == "gelu":
        return jax.nn.gelu(x, approximate=False)
    return jax.nn.gelu(x, approximate=True)


def is_silu(name: str) -> bool:
    """Return whether the activation is SiLU, which the gated kernels support."""
    return name in ("silu", "swish")


class Linear(nnx.Module):
    """A projection of rows [T, *inputs] to rows [T, *outputs]: x @ weight + bias.

    `format` owns the weight and its scales. Only `format` and the loader access these arrays.
    """

    def __init__(self, projection: Projection, *, dtype: DTypeLike):
        self.projection, self.format = projection, projection.format(projection, dtype)
        self.bias = zero_param(dtype, *projection.output_shape) if projection.has_bias else None

    def __call__(self, x: LinearInput, backend: Backend) -> Float[Array, "..."]:
        """Return the projected rows as split-K partials [parts, T, *outputs].

        The caller sums the partials. If the projection has a bias or an all-reduce, the result has
        a single partial in x's dtype. Results with more than one partial are in float32.
        """
        partials = self.format.matmul_partials(x, backend)
        if self.projection.needs_all_reduce:
            partials = self._sum_devices(sum_partials(partials, x.dtype))[None]
        return self._add_bias(partials, x.dtype)

    def _sum_devices(self, rows: Float[Array, "T width"]) -> Float[Array, "T width"]:
        """Sum the rows of all devices, in device order if the format is batch-invariant."""
        if isinstance(self.format, BatchInvariantFormat):
            return sum_in_device_order(rows)
        return device_sum(rows, MESH_AXIS)

    def forward_residual(
        self,
        x: Float[Array, "T *inputs"],
        backend: Backend,
        peer_header: Int32[Array, "W"] | None,
        buffer_index: int,
    ) -> Float[Array, "parts T D"] | PendingAllReduce:
        """Project rows back to the residual stream.

        Args:
            x: Input rows.
            backend: Implementation of the kernels.
            peer_header: Addresses of the memory through which a kernel all-reduces over the devices
                (`pallas_kernels.make_exchange_header`). If None, the all-reduce does not use a
                kernel, and the result is `self(x, backend)`.
            buffer_index: Index of the buffer in that memory, 0 or 1 (see `PendingAllReduce`).

        Returns:
            If `peer_header` is given and the projection has no bias, a `PendingAllReduce`: the next
            norm runs the all-reduce. Otherwise split-K partials, already summed over the devices.
        """
        if peer_header is None:
            return self(x, backend)
        pending = PendingAllReduce(
            self.format.matmul_partials(x, backend), peer_header, buffer_index
        )
        if self.bias is None:
            return pending
        return self._add_bias(reduce_update(pending, x.dtype)[None], x.dtype)

    def _add_bias(
        self, partials: Float[Array, "parts T width"], dtype: DTypeLike
    ) -> Float[Array, "..."]:
        """Add the bias, if any, and reshape the split-K partials to [parts, T, *outputs].

        With a bias, the result has a single partial.
        """
        if self.bias is not None:
            # Reshape the bias to one row, so that XLA fuses the addition of the bias into the
            # product.
            partials = (sum_partials(partials, dtype) + self.bias[...].reshape(1, -1))[None]
        return partials.reshape(*partials.shape[:2], *self.projection.output_shape)

    def add_norm(
        self,
        norm: Norm,
        hidden: Float[Array, "T D"],
        update: Float[Array, "parts T D"] | PendingAllReduce | None,
        backend: Backend,
    ) -> tuple[LinearInput, Float[Array, "T D"]]:
        """Add an update to the residual stream, and apply the norm that precedes this projection.

        If the weight format quantizes rows, one kernel runs the RMSNorm and the quantization.

        Returns:
            The input rows of this projection, and hidden + sum(update).
        """
        quantized = None
        if update is not None and isinstance(norm, RMSNorm):
            quantized = self.format.add_rms_norm(hidden, update, norm.scale, norm.eps, backend)
        return add_norm(norm, hidden, update, backend) if quantized is None else quantized

    def forward(self, x: LinearInput, backend: Backend = Backend.XLA) -> Float[Array, "T *outputs"]:
        """Return the projected rows [T, *outputs] in x's dtype, without an all-reduce."""
        y = self.format.matmul(x, backend)
        return y if self.bias is None else y + self.bias[...][None]

    def forward_gated(self, x: LinearInput, name: str, backend: Backend) -> Float[Array, "T F"]:
        """Return activation(gate(x)) * up(x) in x's dtype, for a fused gate and up projection.

        Args:
            x: Input rows.
            name: Hugging Face's name of the activation.
            backend: Implementation of the kernels.
        """
        if is_silu(name) and self.bias is None:
            return self.format.gated_silu(x, backend)
        gate_up = self.forward(x, backend)
        if is_silu(name):
            return gated_silu(gate_up, backend=backend)
        gate = apply_activation(name, gate_up[:, 0])
        return (gate * gate_up[:, 1].astype(gate.dtype)).astype(gate_up.dtype)

    def dense_weight(self) -> Float[Array, "..."] | None:
        """Return the weight [*inputs, *outputs], for kernels that fuse several projections.

        Return None if the projection has a bias or an all-reduce, or if its format does not store
        the weight in this layout.
        """
        is_product = self.bias is None and not self.projection.needs_all_reduce
        return self.format.dense_weight() if is_product else None


def make_linear(config: ModelConfig, path: str, dtype: DTypeLike) -> Linear | None:
    """Create the projection at `path`. Return None if the model has no projection at `path`."""
    projection = config.projection(path)
    return None if projection is None else Linear(projection, dtype=dtype)


def linear_rules(
    projection: Projection,
    sources: Sequence[str],
    target: str,
    *,
    transposed: bool = True,
) -> list[WeightRule]:
    """Return the rules that map checkpoint tensors to the parameters of a projection.

    Args:
        projection: The projection.
        sources: Names of the checkpoint modules, without ".weight": one module for each part of
            the projection (such as q, k and v), in order, or a single module with all parts.
        target: Path of the `Linear`.
        transposed: Whether the checkpoint stores weights as [out, in] rather than [in, out].
    """
    weight_format = projection.format
    make_rules = weight_format.float_rules if projection.has_float_tensors else weight_format.rules
    weights = make_rules(projection, sources, target, transposed=transposed)
    size = len(projection.output_shape)
    biases = [
        WeightRule(
            source + ".bias",
            target + ".bias",
            (length, *projection.trailing_shape),
            (tuple(range(size)),),
            0,
            start,
        )
        for source, start, length in projection.source_ranges(sources)
    ]
    return [*weights, *biases]


def parameter_part_sizes(projection: Projection, name: str, axis: int) -> list[int]:
    """Return the size of each part of a projection's parameter along `axis`.

    Return an empty list if `axis` is not the axis along which the parts are concatenated.

    Args:
        projection: The projection.
        name: Name of the parameter, such as "weight" or "bias".
        axis: Axis of the parameter.
    """
    rules = linear_rules(projection, [part for part, _ in projection.parts], "")
    found = [it for it in rules if "." + name in (it.target, it.scale_path) and it.axis == axis]
    return [it.shape[axis] for it in found if it.shape is not None]


class Embedding(nnx.Module):
    """A table of token or position vectors, also used as an output head.

    Args:
        rows: Number of table rows on one device.
        size: Length of a table row (D).
        dtype: Dtype of the table.
        is_sharded: Whether the table is split by rows over the tensor-parallel devices. If not,
            every device holds the whole table.
        batch_invariant: Whether the bits of a sequence's logits must not depend on the other
            sequences in the batch.
    """

    def __init__(
        self,
        rows: int,
        size: int,
        *,
        dtype: DTypeLike,
        is_sharded: bool = False,
        batch_invariant: bool = False,
    ):
        self.weight = zero_param(dtype, rows, size)
        self.is_sharded, self.batch_invariant = is_sharded, batch_invariant

    def __call__(
        self, ids: Int32[Array, "T"], peer_header: Int32[Array, "W"] | None = None
    ) -> Float[Array, "T D"]:
        """Return the embedding vector of each id: the row of the table with that index.

        An id out of range gives the nearest row. If the table is sharded, each device looks up the
        ids of its shard, and `sharding.barrier_all_reduce` adds the results of all devices.

        If the table is not sharded and `peer_header` is given, the method runs an all-reduce of a
        single zero. This all-reduce serves only as a barrier between the devices.

        Args:
            ids: Indices of rows in the whole table.
            peer_header: Addresses of the memory through which kernels all-reduce over the devices
                (`pallas_kernels.make_exchange_header`); None if XLA runs all all-reduces.
        """
        weight = self.weight[...]
        if not self.is_sharded:
            found = jnp.take(weight, ids, axis=0, mode="clip")
            if peer_header is None:
                return found
            # An all-reduce of a zero from each device is a barrier for the devices. It returns 0,
            # or NaN if a device is unreachable. The zero is computed from the step's rows, because
            # XLA would merge the barriers of several steps if the zero were a constant.
            return found + barrier_all_reduce(found[:1, :1] * 0, peer_header)
        rows = weight.shape[0]
        ids = jnp.clip(ids, 0, rows * jax.lax.axis_size(MESH_AXIS) - 1) - shard_start(rows)
        is_here = (ids >= 0) & (ids < rows)
        found = jnp.take(weight, ids, axis=0, mode="clip")
        return barrier_all_reduce(
            jnp.where(is_here[:, None], found, jnp.zeros((), found.dtype)), peer_header
        )

    def logits(
        self, hidden: Float[Array, "R D"], backend: Backend = Backend.XLA
    ) -> Float32[Array, "R V"]:
        """Return the logits of each row of hidden states, in float32.

        A logit is the dot product of a row of hidden states and a row of the token table. Each
        device computes the logits of the table rows that the device holds. `backend` has an effect
        only if `batch_invariant` is true; otherwise, XLA computes the product.
        """
        if self.batch_invariant:
            return batch_invariant_transposed_gemm(hidden, self.weight[...], backend=backend)
        return einsum("rd,vd->rv", hidden, self.weight[...], out=jnp.float32)

    def target_scores(
        self,
        hidden: Float[Array, "R D"],
        targets: Int32[Array, "R"],
        soft_cap: float | None,
        backend: Backend,
    ) -> TargetScores:
        """Return three numbers per row, which determine the log-probability of the target token.

        The numbers are the row's largest logit, the sum of exp(logit - largest), and the target's
        logit. The method never stores all logits at the same time. If the vocabulary is sharded
        over devices, a device's numbers cover only the tokens of the device's shard.

        Args:
            hidden: Hidden states.
            targets: One target token id per row of hidden states.
            soft_cap: See `pallas_kernels.target_scores`.
            backend: Implementation of the kernels.
        """
        table = self.weight[...]
        if self.is_sharded:
            targets = targets - shard_start(table.shape[0])
        return target_scores(hidden, table, targets, soft_cap=soft_cap, backend=backend)
