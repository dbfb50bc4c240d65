"""Projections of rows and tables of vectors: the modules that own a model's large weights.

`Linear` is every projection of every family. What is fused in it is data (`Projection.parts`), and
it holds its weight in one format (`jpaged.models.formats`), the one of `Projection.format`.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32

from jpaged.models.checkpoint import WeightRule
from jpaged.models.config import ModelConfig
from jpaged.models.formats import LinearInput, Projection, zero_param
from jpaged.models.norm import Norm, RMSNorm, add_norm
from jpaged.models.sharding import (
    MESH_AXIS,
    PendingAllReduce,
    barrier_all_reduce,
    reduce_update,
    shard_start,
)
from pallas_kernels import Backend, device_sum, einsum, gated_silu, sum_partials


def apply_activation(name: str, x: Float[Array, "..."]) -> Float[Array, "..."]:
    """A feed-forward activation by its Hugging Face name, in float32; "relu", which rounds nothing,
    in x's dtype, so that XLA computes it within the product before it."""
    if name == "relu":
        return jax.nn.relu(x)
    x = x.astype(jnp.float32)
    if is_silu(name):
        return jax.nn.silu(x)
    if name == "gelu":
        return jax.nn.gelu(x, approximate=False)
    return jax.nn.gelu(x, approximate=True)


def is_silu(name: str) -> bool:
    """Whether the activation is SiLU, for which kernels exist."""
    return name in ("silu", "swish")


class Linear(nnx.Module):
    """A projection of rows [T, *inputs] to rows [T, *outputs]: x @ weight + bias.

    Its format owns the weight: nothing else reads the weight's parameters.
    """

    def __init__(self, projection: Projection, *, dtype: DTypeLike):
        self.projection, self.format = projection, projection.format(projection, dtype)
        self.bias = zero_param(dtype, *projection.output_shape) if projection.has_bias else None

    def __call__(self, x: LinearInput, backend: Backend) -> Float[Array, "..."]:
        """The rows [parts, T, *outputs] in split-K partials, to be summed by what reads them next.

        Several partials are float32. With a bias, or summed over devices, there is one, of x's
        dtype.
        """
        partials = self.format.matmul_partials(x, backend)
        if self.projection.needs_all_reduce:
            partials = device_sum(sum_partials(partials, x.dtype), MESH_AXIS)[None]
        return self._add_bias(partials, x.dtype)

    def forward_residual(
        self,
        x: Float[Array, "T *inputs"],
        backend: Backend,
        peer_header: Int32[Array, "W"] | None,
        buffer_index: int,
    ) -> Float[Array, "parts T D"] | PendingAllReduce:
        """`__call__` for a projection back to the residual stream. With `peer_header` (see
        `device_sum`) and without a bias the result is `PendingAllReduce`: the next norm does the
        all-reduce.
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
        """Add the bias and split the outputs into their axes."""
        if self.bias is not None:  # as one row, which XLA adds within its product
            partials = (sum_partials(partials, dtype) + self.bias[...].reshape(1, -1))[None]
        return partials.reshape(*partials.shape[:2], *self.projection.output_shape)

    def add_norm(
        self,
        norm: Norm,
        hidden: Float[Array, "T D"],
        update: Float[Array, "parts T D"] | PendingAllReduce | None,
        backend: Backend,
    ) -> tuple[LinearInput, Float[Array, "T D"]]:
        """`jpaged.models.norm.add_norm` of a norm whose rows only this projection reads. If the
        format quantizes rows, one kernel does both."""
        quantized = None
        if update is not None and isinstance(norm, RMSNorm):
            quantized = self.format.add_rms_norm(hidden, update, norm.scale, norm.eps, backend)
        return add_norm(norm, hidden, update, backend) if quantized is None else quantized

    def forward(self, x: LinearInput, backend: Backend = Backend.XLA) -> Float[Array, "T *outputs"]:
        """The rows, in x's dtype."""
        y = self.format.matmul(x, backend)
        return y if self.bias is None else y + self.bias[...][None]

    def forward_gated(self, x: LinearInput, name: str, backend: Backend) -> Float[Array, "T F"]:
        """activation(gate) * up of a projection to the two, in float32 and then rounded."""
        if is_silu(name) and self.bias is None:
            return self.format.gated_silu(x, backend)
        gate_up = self.forward(x, backend)
        if is_silu(name):
            return gated_silu(gate_up, backend=backend)
        gate = apply_activation(name, gate_up[:, 0])
        return (gate * gate_up[:, 1].astype(gate.dtype)).astype(gate_up.dtype)

    def dense_weight(self) -> Float[Array, "..."] | None:
        """The weight [*inputs, *outputs] if it is all there is, for kernels that fuse several
        projections; None with a bias, summed over devices, or in a format that has no such array.
        """
        is_all = self.bias is None and not self.projection.needs_all_reduce
        return self.format.dense_weight() if is_all else None


def make_linear(config: ModelConfig, path: str, dtype: DTypeLike) -> Linear | None:
    """The projection of that path, in models that have it."""
    projection = config.projection(path)
    return None if projection is None else Linear(projection, dtype=dtype)


def linear_rules(
    projection: Projection,
    sources: Sequence[str],
    target: str,
    *,
    transposed: bool = True,
) -> list[WeightRule]:
    """How a projection comes from a checkpoint.

    Args:
        projection: the projection.
        sources: its names there, without ".weight": one of each part, in order, or one of all
            parts that are fused there as well.
        target: path of the `Linear`.
        transposed: weights lie as [out, in] in the checkpoint, not as [in, out].
    """
    weights = projection.format.rules(projection, sources, target, transposed=transposed)
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
    """Return the sizes along an axis of the parts of a parameter; empty if the parts lie along
    another axis."""
    rules = linear_rules(projection, [part for part, _ in projection.parts], "")
    found = [it for it in rules if "." + name in (it.target, it.scale_path) and it.axis == axis]
    return [it.shape[axis] for it in found if it.shape is not None]


class Embedding(nnx.Module):
    """A table [rows, D] of token or position vectors; as an output head, its own transpose.

    A shared one is the device's rows of a table of as many for each device.
    """

    def __init__(self, rows: int, size: int, *, dtype: DTypeLike, is_sharded: bool = False):
        self.weight = zero_param(dtype, rows, size)
        self.is_sharded = is_sharded

    def __call__(
        self, ids: Int32[Array, "T"], peer_header: Int32[Array, "W"] | None = None
    ) -> Float[Array, "T D"]:
        """The rows `ids`; an id out of range reads the nearest row. With `peer_header` the devices meet
        (`sharding.barrier_all_reduce`)."""
        weight = self.weight[...]
        if not self.is_sharded:
            found = jnp.take(weight, ids, axis=0, mode="clip")
            if peer_header is None:
                return found
            # Zeros of this step's rows: of others' XLA would make one sum for all steps of a burst.
            return found + barrier_all_reduce(found[:1, :1] * 0, peer_header)
        rows = weight.shape[0]
        ids = jnp.clip(ids, 0, rows * jax.lax.axis_size(MESH_AXIS) - 1) - shard_start(rows)
        is_here = (ids >= 0) & (ids < rows)
        found = jnp.take(weight, ids, axis=0, mode="clip")
        return barrier_all_reduce(
            jnp.where(is_here[:, None], found, jnp.zeros((), found.dtype)), peer_header
        )

    def logits(self, hidden: Float[Array, "R D"]) -> Float32[Array, "R V"]:
        """Dot products with every row that the device has of the table, in float32."""
        return einsum("rd,vd->rv", hidden, self.weight[...], out=jnp.float32)
