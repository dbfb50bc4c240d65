"""Weight formats: how a projection's weight is stored, loaded, split over devices and multiplied.

A format is a subclass of `WeightFormat`. Its class methods and attributes say how weights come from a
checkpoint and how devices may split them. Its instances hold a weight's parameters and multiply
by it. This module has `UnquantizedFormat`; `jpaged.models.fp8` has the formats of 8-bit weights.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from jpaged.models.checkpoint import WeightRule
from jpaged.models.sharding import PendingAllReduce
from pallas_kernels import Backend, einsum, gated_gemm, split_k_gemm, sum_partials


@dataclass(frozen=True)
class Projection:
    """A linear map of rows: weight [*inputs, *outputs], bias [*outputs].

    Attributes:
        inputs: sizes of the input axes, over which the product sums.
        parts: name and size of each output along the first output axis. A fused projection has
            several outputs, such as (("q", 32), ("k", 8), ("v", 8)) with sizes in heads.
        width: sizes of the other output axes.
        bias: whether a bias is added.
        all_reduced: whether each tensor-parallel device has a shard of the inputs, so that an
            all-reduce must sum the devices' outputs.
        format: how the weight is stored.
    """

    input_shape: tuple[int, ...]
    parts: tuple[tuple[str, int], ...]
    trailing_shape: tuple[int, ...] = ()
    has_bias: bool = False
    needs_all_reduce: bool = False
    format: "type[WeightFormat]" = field(default_factory=lambda: UnquantizedFormat)

    @property
    def output_shape(self) -> tuple[int, ...]:
        """Axes of a row of the result, all parts side by side."""
        return (sum(self.part_sizes), *self.trailing_shape)

    @property
    def part_sizes(self) -> tuple[int, ...]:
        """Size of each part along the first output axis."""
        return tuple(size for _, size in self.parts)

    def source_ranges(self, sources: Sequence[str]) -> list[tuple[str, int, int]]:
        """Return source, start and size along the first output axis of each checkpoint tensor:
        one source for each part, or a single source for all parts."""
        part_sizes = self.part_sizes if len(sources) == len(self.parts) else (sum(self.part_sizes),)
        starts = [sum(part_sizes[:index]) for index in range(len(part_sizes))]
        return list(zip(sources, starts, part_sizes, strict=True))


@dataclass(frozen=True)
class QuantizedRows:
    """Rows [T, size_in] that a format has quantized for its product.

    Attributes:
        values: the quantized numbers.
        scale: factors of these numbers, [T, groups].
        dtype: dtype of the rows before, which products with them have.
    """

    values: Float[Array, "T size_in"]
    scale: Float32[Array, "T groups"]
    dtype: DTypeLike


LinearInput = Float[Array, "T *inputs"] | QuantizedRows
"""What a projection is given."""


class WeightFormat(nnx.Module):
    """A projection's weight in one format.

    `__init__` of a subclass makes the parameters, zeros that the loader fills.
    """

    name: ClassVar[str]
    """Name in reports."""

    outputs_per_scale: ClassVar[int] = 1
    """Number of neighbouring outputs with one scale, which devices cannot split."""

    def __init__(self, projection: Projection, dtype: DTypeLike):
        self.projection = projection

    @classmethod
    @abstractmethod
    def rules(
        cls, projection: Projection, sources: Sequence[str], target: str, *, transposed: bool
    ) -> list[WeightRule]:
        """Return how the parameters come from a checkpoint; see `linear.linear_rules`."""

    @abstractmethod
    def matmul_partials(self, x: LinearInput, backend: Backend) -> Float[Array, "parts T size_out"]:
        """Multiply rows by the weight, in split-K partials whose sum is the product."""

    @abstractmethod
    def gated_silu(self, x: LinearInput, backend: Backend) -> Float[Array, "T F"]:
        """Return silu(gate) * up of a projection to gate and up, without bias."""

    def matmul(self, x: LinearInput, backend: Backend) -> Float[Array, "T *outputs"]:
        """Multiply rows by the weight."""
        rows = sum_partials(self.matmul_partials(x, backend), x.dtype)
        return rows.reshape(-1, *self.projection.output_shape)

    def dense_weight(self) -> Float[Array, "..."] | None:
        """Return the weight [*inputs, *outputs]; None if the format stores no such array."""
        return None

    def add_rms_norm(
        self,
        hidden: Float[Array, "T D"],
        update: Float[Array, "parts T D"] | PendingAllReduce,
        weight: Float[Array, "D"],
        eps: float,
        backend: Backend,
    ) -> tuple[QuantizedRows, Float[Array, "T D"]] | None:
        """Compute the RMS norm of hidden + sum(update), and quantize the norm in the same kernel.

        Returns:
            The quantized norm, and hidden + sum(update). None if the format does not quantize rows.
        """
        return None


class UnquantizedFormat(WeightFormat):
    """A weight in the model's dtype, float32, float16 or bfloat16: `weight` [*inputs, *outputs]."""

    name = "plain"

    def __init__(self, projection: Projection, dtype: DTypeLike):
        super().__init__(projection, dtype)
        self.weight = zero_param(dtype, *projection.input_shape, *projection.output_shape)

    @classmethod
    def rules(
        cls, projection: Projection, sources: Sequence[str], target: str, *, transposed: bool
    ) -> list[WeightRule]:
        """See `WeightFormat`."""
        return [
            weight_rule(
                projection, source_range, target, transposed, axis=len(projection.input_shape)
            )
            for source_range in projection.source_ranges(sources)
        ]

    def matmul_partials(self, x: Any, backend: Backend) -> Float[Array, "parts T size_out"]:
        """See `WeightFormat`."""
        rows = x.reshape(x.shape[0], -1)
        return split_k_gemm(rows, self.weight[...].reshape(rows.shape[1], -1), backend=backend)

    def gated_silu(self, x: Any, backend: Backend) -> Float[Array, "T F"]:
        """See `WeightFormat`."""
        return gated_gemm(x, self.weight[...], backend=backend)

    def matmul(self, x: Any, backend: Backend) -> Float[Array, "T *outputs"]:
        """See `WeightFormat`; by XLA."""
        outputs = "odf"[: len(self.projection.output_shape)]
        return einsum(f"ti,i{outputs}->t{outputs}", x, self.weight[...])

    def dense_weight(self) -> Float[Array, "..."]:
        """See `WeightFormat`."""
        return self.weight[...]


def weight_rule(
    projection: Projection,
    source_range: tuple[str, int, int],
    target: str,
    transposed: bool,
    *,
    axis: int = 0,
    scale_path: str | None = None,
) -> WeightRule:
    """Return the rule of one of `Projection.source_ranges` of a weight.

    Args:
        projection: the projection.
        piece: the piece.
        target: path of the `Linear`.
        transposed: as of `linear.linear_rules`.
        axis: first output axis of the parameter: 0 if it is [*outputs, *inputs], and
            `len(projection.input_shape)` if it is [*inputs, *outputs].
        scale: as of `WeightRule`.
    """
    source, start, size = source_range
    own = size, *projection.trailing_shape
    shape = (*projection.input_shape[:axis], *own, *projection.input_shape[axis:])
    outputs = tuple(range(axis, axis + len(own)))
    inputs = tuple(each for each in range(len(shape)) if each not in outputs)
    file_axes = (outputs, inputs) if transposed else (inputs, outputs)
    return WeightRule(
        source + ".weight", target + ".weight", shape, file_axes, axis, start, scale_path=scale_path
    )


def zero_param(dtype: DTypeLike, *shape: int) -> nnx.Param:
    """A parameter to be filled by the loader; costs nothing under `nnx.eval_shape`."""
    return nnx.Param(jnp.zeros(shape, dtype))
