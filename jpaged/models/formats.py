"""Weight formats: how a projection's weight is stored, loaded, split over devices and multiplied.

A format is a subclass of `Format`. Its class methods and attributes say how weights come from a
checkpoint and how devices may split them. Its instances hold a weight's parameters and multiply
by it. This module has `Plain`; `jpaged.models.fp8` has the formats of 8-bit weights.
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
from jpaged.models.sharding import Unsummed
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

    inputs: tuple[int, ...]
    parts: tuple[tuple[str, int], ...]
    width: tuple[int, ...] = ()
    bias: bool = False
    all_reduced: bool = False
    format: "type[Format]" = field(default_factory=lambda: Plain)

    @property
    def outputs(self) -> tuple[int, ...]:
        """Axes of a row of the result, all parts side by side."""
        return (sum(self.sizes), *self.width)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Size of each part along the first output axis."""
        return tuple(size for _, size in self.parts)

    def pieces(self, sources: Sequence[str]) -> list[tuple[str, int, int]]:
        """Return source, start and size along the first output axis of each checkpoint tensor:
        one source for each part, or a single source for all parts."""
        sizes = self.sizes if len(sources) == len(self.parts) else (sum(self.sizes),)
        starts = [sum(sizes[:index]) for index in range(len(sizes))]
        return list(zip(sources, starts, sizes, strict=True))


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


Rows = Float[Array, "T *inputs"] | QuantizedRows
"""What a projection is given."""


class Format(nnx.Module):
    """A projection's weight in one format.

    `__init__` of a subclass makes the parameters, zeros that the loader fills.
    """

    name: ClassVar[str]
    """Name in reports."""

    scaled_rows: ClassVar[int] = 1
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
    def partials(self, x: Rows, backend: Backend) -> Float[Array, "parts T size_out"]:
        """Multiply rows by the weight, in split-K partials whose sum is the product."""

    @abstractmethod
    def gated_silu(self, x: Rows, backend: Backend) -> Float[Array, "T F"]:
        """Return silu(gate) * up of a projection to gate and up, without bias."""

    def product(self, x: Rows, backend: Backend) -> Float[Array, "T *outputs"]:
        """Multiply rows by the weight."""
        rows = sum_partials(self.partials(x, backend), x.dtype)
        return rows.reshape(-1, *self.projection.outputs)

    def array(self) -> Float[Array, "..."] | None:
        """Return the weight [*inputs, *outputs]; None if the format stores no such array."""
        return None

    def add_rms_norm(
        self,
        hidden: Float[Array, "T D"],
        update: Float[Array, "parts T D"] | Unsummed,
        weight: Float[Array, "D"],
        eps: float,
        backend: Backend,
    ) -> tuple[QuantizedRows, Float[Array, "T D"]] | None:
        """Compute the RMS norm of hidden + sum(update), and quantize the norm in the same kernel.

        Returns:
            The quantized norm, and hidden + sum(update). None if the format does not quantize rows.
        """
        return None


class Plain(Format):
    """A weight in the model's dtype, float32, float16 or bfloat16: `weight` [*inputs, *outputs]."""

    name = "plain"

    def __init__(self, projection: Projection, dtype: DTypeLike):
        super().__init__(projection, dtype)
        self.weight = zeros(dtype, *projection.inputs, *projection.outputs)

    @classmethod
    def rules(
        cls, projection: Projection, sources: Sequence[str], target: str, *, transposed: bool
    ) -> list[WeightRule]:
        """See `Format`."""
        return [
            weight_rule(projection, piece, target, transposed, axis=len(projection.inputs))
            for piece in projection.pieces(sources)
        ]

    def partials(self, x: Any, backend: Backend) -> Float[Array, "parts T size_out"]:
        """See `Format`."""
        rows = x.reshape(x.shape[0], -1)
        return split_k_gemm(rows, self.weight[...].reshape(rows.shape[1], -1), backend=backend)

    def gated_silu(self, x: Any, backend: Backend) -> Float[Array, "T F"]:
        """See `Format`."""
        return gated_gemm(x, self.weight[...], backend=backend)

    def product(self, x: Any, backend: Backend) -> Float[Array, "T *outputs"]:
        """See `Format`; by XLA."""
        outputs = "odf"[: len(self.projection.outputs)]
        return einsum(f"ti,i{outputs}->t{outputs}", x, self.weight[...])

    def array(self) -> Float[Array, "..."]:
        """See `Format`."""
        return self.weight[...]


def weight_rule(
    projection: Projection,
    piece: tuple[str, int, int],
    target: str,
    transposed: bool,
    *,
    axis: int = 0,
    scale: str | None = None,
) -> WeightRule:
    """Return the rule of one of `Projection.pieces` of a weight.

    Args:
        projection: the projection.
        piece: the piece.
        target: path of the `Linear`.
        transposed: as of `linear.linear_rules`.
        axis: first output axis of the parameter: 0 if it is [*outputs, *inputs], and
            `len(projection.inputs)` if it is [*inputs, *outputs].
        scale: as of `WeightRule`.
    """
    source, start, size = piece
    own = size, *projection.width
    shape = (*projection.inputs[:axis], *own, *projection.inputs[axis:])
    outputs = tuple(range(axis, axis + len(own)))
    inputs = tuple(each for each in range(len(shape)) if each not in outputs)
    file_axes = (outputs, inputs) if transposed else (inputs, outputs)
    return WeightRule(
        source + ".weight", target + ".weight", shape, file_axes, axis, start, scale=scale
    )


def zeros(dtype: DTypeLike, *shape: int) -> nnx.Param:
    """A parameter to be filled by the loader; costs nothing under `nnx.eval_shape`."""
    return nnx.Param(jnp.zeros(shape, dtype))
