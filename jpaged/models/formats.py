"""Weight formats: how a projection's weight is stored, loaded, split over devices and multiplied.

A format is a subclass of `WeightFormat`. The class says how a weight is loaded from a checkpoint,
and how devices may split the weight. An instance holds the parameters of one weight and multiplies
rows by the weight. `UnquantizedFormat` is defined here; the FP8 formats are in `jpaged.models.fp8`.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32
from typing_extensions import override

from jpaged.models.checkpoint import ScaleAxis, WeightRule
from jpaged.models.sharding import PendingAllReduce
from pallas_kernels import (
    Backend,
    batch_invariant_gated_gemm,
    batch_invariant_gemm,
    einsum,
    gated_gemm,
    split_k_gemm,
    sum_partials,
)


@dataclass(frozen=True)
class Projection:
    """Description of a linear map, with the weight [*inputs, *outputs] and the bias [*outputs].

    Attributes:
        input_shape: Sizes of the input axes, over which the product sums.
        parts: Name and size of each part along the first output axis. A fused projection has
            several parts, such as (("q", 32), ("k", 8), ("v", 8)) with sizes in heads.
        trailing_shape: Sizes of the output axes after the first one.
        has_bias: Whether a bias is added.
        needs_all_reduce: Whether each tensor-parallel device has a shard of the inputs, so that an
            all-reduce must sum the devices' outputs.
        format: Class of the weight's format.
        has_float_tensors: See `QuantizationConfig`.
    """

    input_shape: tuple[int, ...]
    parts: tuple[tuple[str, int], ...]
    trailing_shape: tuple[int, ...] = ()
    has_bias: bool = False
    needs_all_reduce: bool = False
    format: "type[WeightFormat]" = field(default_factory=lambda: UnquantizedFormat)
    has_float_tensors: bool = False

    @property
    def output_shape(self) -> tuple[int, ...]:
        """Sizes of the output axes. The parts of a fused projection (such as q, k and v) are
        concatenated along the first output axis."""
        return (sum(self.part_sizes), *self.trailing_shape)

    @property
    def part_sizes(self) -> tuple[int, ...]:
        """Size of each part of the projection (such as q, k and v) along the first output axis."""
        return tuple(size for _, size in self.parts)

    def source_ranges(self, sources: Sequence[str]) -> list[tuple[str, int, int]]:
        """Return where the weights of checkpoint modules lie along the first output axis.

        Args:
            sources: Names of the checkpoint modules: one module for each of `parts` (such as q, k
                and v), in order, or a single module with all parts.

        Returns:
            For each module: the name, and the start and size of the range that the module fills.
        """
        part_sizes = self.part_sizes if len(sources) == len(self.parts) else (sum(self.part_sizes),)
        starts = [sum(part_sizes[:index]) for index in range(len(part_sizes))]
        return list(zip(sources, starts, part_sizes, strict=True))


@dataclass(frozen=True)
class QuantizedRows:
    """Activations [T, size_in] that a weight format has quantized.

    Attributes:
        values: Quantized activations. A value times the scale of its group approximates the
            original activation.
        scale: Scale of each group of consecutive numbers in a row, [T, groups]. If a row has one
            scale, the whole row is one group.
        dtype: Dtype of the rows before quantization, and of products with these rows.
    """

    values: Float[Array, "T size_in"]
    scale: Float32[Array, "T groups"]
    dtype: DTypeLike


LinearInput = Float[Array, "T *inputs"] | QuantizedRows
"""Rows that a projection takes as input, quantized or not."""


class WeightFormat(nnx.Module):
    """Base class of weight formats; an instance holds the weight of one projection.

    `__init__` of a subclass creates the parameters as zeros, and the loader fills them.
    """

    name: ClassVar[str]
    """Name of the format in the engine's startup report."""

    outputs_per_scale: ClassVar[int] = 1
    """Number of consecutive outputs that share a scale, and therefore must be on the same
    device."""

    def __init__(self, projection: Projection, dtype: DTypeLike):
        self.projection = projection

    @classmethod
    @abstractmethod
    def rules(
        cls, projection: Projection, sources: Sequence[str], target: str, *, transposed: bool
    ) -> list[WeightRule]:
        """Return the rules that load the projection's weight, and any scales, from a checkpoint.

        See `linear.linear_rules` for the arguments.
        """

    @classmethod
    def float_rules(
        cls, projection: Projection, sources: Sequence[str], target: str, *, transposed: bool
    ) -> list[WeightRule]:
        """Return the rules that load the projection's weight from unquantized tensors.

        An FP8 format overrides this method with rules that quantize the tensors and compute the
        scales. See `linear.linear_rules` for the arguments.
        """
        return cls.rules(projection, sources, target, transposed=transposed)

    @abstractmethod
    def matmul_partials(self, x: LinearInput, backend: Backend) -> Float[Array, "parts T size_out"]:
        """Multiply rows by the weight, and return split-K partials whose sum is the product."""

    @abstractmethod
    def gated_silu(self, x: LinearInput, backend: Backend) -> Float[Array, "T F"]:
        """Return silu(gate(x)) * up(x), for a fused gate and up projection without bias."""

    def matmul(self, x: LinearInput, backend: Backend) -> Float[Array, "T *outputs"]:
        """Return the product of rows and the weight."""
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
        """Add the parts of `update` to `hidden`, and compute the RMS norm of the sum. Quantize the
        norm in the same kernel.

        Returns:
            The quantized norm, and the sum. None if the format does not quantize rows.
        """
        return None


class UnquantizedFormat(WeightFormat):
    """Unquantized weight [*inputs, *outputs] in the model's dtype."""

    name = "plain"

    def __init__(self, projection: Projection, dtype: DTypeLike):
        super().__init__(projection, dtype)
        self.weight = zero_param(dtype, *projection.input_shape, *projection.output_shape)

    @override
    @classmethod
    def rules(
        cls, projection: Projection, sources: Sequence[str], target: str, *, transposed: bool
    ) -> list[WeightRule]:
        return [
            weight_rule(
                projection, source_range, target, transposed, axis=len(projection.input_shape)
            )
            for source_range in projection.source_ranges(sources)
        ]

    @override
    def matmul_partials(self, x: Any, backend: Backend) -> Float[Array, "parts T size_out"]:
        rows = x.reshape(x.shape[0], -1)
        return split_k_gemm(rows, self.weight[...].reshape(rows.shape[1], -1), backend=backend)

    @override
    def gated_silu(self, x: Any, backend: Backend) -> Float[Array, "T F"]:
        return gated_gemm(x, self.weight[...], backend=backend)

    @override
    def matmul(self, x: Any, backend: Backend) -> Float[Array, "T *outputs"]:
        outputs = "odf"[: len(self.projection.output_shape)]
        return einsum(f"ti,i{outputs}->t{outputs}", x, self.weight[...])

    @override
    def dense_weight(self) -> Float[Array, "..."]:
        return self.weight[...]


class BatchInvariantFormat(UnquantizedFormat):
    """Unquantized weight. The product of a row does not depend on the other rows of the step."""

    @override
    def matmul_partials(self, x: Any, backend: Backend) -> Float[Array, "parts T size_out"]:
        rows = x.reshape(x.shape[0], -1)
        weight = self.weight[...].reshape(rows.shape[1], -1)
        return batch_invariant_gemm(rows, weight, backend=backend)[None]

    @override
    def gated_silu(self, x: Any, backend: Backend) -> Float[Array, "T F"]:
        return batch_invariant_gated_gemm(x, self.weight[...], backend=backend)

    @override
    def matmul(self, x: Any, backend: Backend) -> Float[Array, "T *outputs"]:
        return WeightFormat.matmul(self, x, backend)

    @override
    def dense_weight(self) -> None:
        # Return None to disable the kernel that fuses a whole layer. That kernel's order of sums
        # depends on the number of rows, so its results are not batch-invariant.
        return None


def weight_rule(
    projection: Projection,
    source_range: tuple[str, int, int],
    target: str,
    transposed: bool,
    *,
    axis: int = 0,
    scale_path: str | None = None,
    scale_axes: tuple[ScaleAxis, ...] | None = None,
) -> WeightRule:
    """Return the rule that maps one checkpoint tensor to the range of a projection's weight that it
    fills.

    Args:
        projection: The projection.
        source_range: One result of `Projection.source_ranges`.
        target: Path of the `Linear`.
        transposed: See `linear.linear_rules`.
        axis: First output axis of the parameter: 0 if the parameter is [*outputs, *inputs], and
            `len(projection.input_shape)` if the parameter is [*inputs, *outputs].
        scale_path, scale_axes: See `WeightRule`.
    """
    source, start, size = source_range
    output_shape = size, *projection.trailing_shape
    shape = (*projection.input_shape[:axis], *output_shape, *projection.input_shape[axis:])
    outputs = tuple(range(axis, axis + len(output_shape)))
    inputs = tuple(each for each in range(len(shape)) if each not in outputs)
    file_axes = (outputs, inputs) if transposed else (inputs, outputs)
    scales: dict[str, Any] = {"scale_path": scale_path, "scale_axes": scale_axes}
    return WeightRule(
        source + ".weight", target + ".weight", shape, file_axes, axis, start, **scales
    )


def zero_param(dtype: DTypeLike, *shape: int) -> nnx.Param:
    """Return a parameter of zeros, which the loader fills.

    Inside `nnx.eval_shape`, no array is allocated.
    """
    return nnx.Param(jnp.zeros(shape, dtype))
