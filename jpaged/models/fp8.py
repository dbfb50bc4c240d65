"""Weight formats in FP8 (e4m3), for GEMMs of 8-bit weights and 8-bit activations (W8A8).

Activations are quantized before each GEMM. A weight is stored as [*outputs, *inputs]: GPUs multiply
FP8 in this layout, and checkpoints use it too. The formats differ in their scales:

- `FP8Format` and its subclasses have one scale per output of the weight. Activations have one scale
  per row, or one static scale from the checkpoint.
- `FP8BlockFormat` has one scale per 128 x 128 block of the weight. Activations have one scale per
  128 consecutive numbers of a row.

If each tensor-parallel device holds a shard of a row, the scale of the row comes from the largest
number on any device. Therefore the quantized rows do not depend on the number of devices.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32
from typing_extensions import override

from jpaged.models.checkpoint import ScaleAxis, WeightRule
from jpaged.models.formats import (
    LinearInput,
    Projection,
    QuantizedRows,
    WeightFormat,
    weight_rule,
    zero_param,
)
from jpaged.models.sharding import PendingAllReduce, all_max, reduce_update
from pallas_kernels import (
    FP8,
    FP8_GROUP_SIZE,
    FP8_MAX,
    FP8_MIN_ABSMAX,
    Backend,
    add_rms_norm_to_fp8,
    block_scaled_gated_gemm,
    block_scaled_gemm,
    quantize_rows,
    scaled_gated_gemm,
    scaled_gemm,
)


class _FP8Base(WeightFormat):
    """Base class of the formats that store a weight in FP8 and quantize input rows to FP8.

    With static scales, `input_scale` holds one scale for each part of a fused projection (such as
    q, k and v). The rows are quantized once for all parts, with the largest of these scales.
    """

    is_grouped: ClassVar[bool] = False
    """Whether each group of `FP8_GROUP_SIZE` numbers in a row has a scale, rather than each row."""

    is_static: ClassVar[bool] = False
    """Whether all rows of activations share a static scale from the checkpoint."""

    def __init__(self, projection: Projection, dtype: DTypeLike):
        super().__init__(projection, dtype)
        self.weight = zero_param(FP8, *projection.output_shape, *projection.input_shape)
        self.input_scale = (
            zero_param(jnp.float32, len(projection.parts)) if self.is_static else None
        )

    @override
    def add_rms_norm(
        self,
        hidden: Float[Array, "T D"],
        update: Float[Array, "parts T D"] | PendingAllReduce,
        weight: Float[Array, "D"],
        eps: float,
        backend: Backend,
    ) -> tuple[QuantizedRows, Float[Array, "T D"]]:
        if isinstance(update, PendingAllReduce):
            update = reduce_update(update, hidden.dtype)[None]
        options = {"eps": eps, "grouped": self.is_grouped, "backend": backend}
        values, scale, total = add_rms_norm_to_fp8(
            hidden, update, weight, self.static_scales, **options
        )
        return QuantizedRows(values, scale, hidden.dtype), total

    @property
    def static_scales(self) -> Float32[Array, "parts"] | None:
        """Static scales of the input rows, one for each part of a fused projection (such as q, k
        and v). None if the scales are dynamic."""
        return None if self.input_scale is None else self.input_scale[...]

    def _gemm_operands(
        self, x: LinearInput, backend: Backend
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return the operands of an FP8 GEMM. Rows that are not quantized yet are quantized.

        Returns:
            The rows in FP8 [T, inputs], the weight [outputs, inputs], and the scales of the rows
            [T, groups].
        """
        if not isinstance(x, QuantizedRows):
            scales, is_whole = self.static_scales, not self.projection.needs_all_reduce
            reduce_max = None if is_whole or self.is_grouped or scales is not None else all_max
            options = {"grouped": self.is_grouped, "reduce_max": reduce_max, "backend": backend}
            x = QuantizedRows(*quantize_rows(x.reshape(x.shape[0], -1), scales, **options), x.dtype)
        return x.values, self.weight[...].reshape(-1, x.values.shape[1]), x.scale


class FP8Format(_FP8Base):
    """FP8 weight with one scale per output: `weight_scale` is float32 [*outputs].

    This class quantizes the weights of an unquantized checkpoint while they are loaded. The
    subclasses load checkpoints that are in FP8 already.
    """

    name = "fp8"
    scale_granularity: ClassVar[Literal["channel", "tensor"] | None] = None
    """Whether the checkpoint has a weight scale per output ("channel") or per tensor ("tensor").

    None: the weights in the checkpoint are not in FP8.
    """

    def __init__(self, projection: Projection, dtype: DTypeLike):
        super().__init__(projection, dtype)
        self.weight_scale = zero_param(jnp.float32, *projection.output_shape)

    @override
    @classmethod
    def rules(
        cls, projection: Projection, sources: Sequence[str], target: str, *, transposed: bool
    ) -> list[WeightRule]:
        if cls.scale_granularity is None:
            return cls.float_rules(projection, sources, target, transposed=transposed)
        found, scale = list[WeightRule](), target + ".weight_scale"
        count = len(projection.parts) if len(sources) == 1 else 1
        outputs = tuple(range(len(projection.output_shape)))
        for index, source_range in enumerate(projection.source_ranges(sources)):
            found.append(weight_rule(projection, source_range, target, transposed))
            source, start, size = source_range
            shape = size, *projection.trailing_shape
            rule = WeightRule(source + ".weight_scale", scale, shape, None, 0, start)
            # In the checkpoint, the scales have the shape [outputs, 1].
            if cls.scale_granularity == "channel":
                found.append(replace(rule, file_axes=(outputs, ())))
            else:
                found.append(replace(rule, is_scalar=True))
            if cls.is_static:
                fields = source + ".input_scale", target + ".input_scale", (count,), None, 0, index
                found.append(WeightRule(*fields, is_scalar=True))
        return found

    @override
    @classmethod
    def float_rules(
        cls, projection: Projection, sources: Sequence[str], target: str, *, transposed: bool
    ) -> list[WeightRule]:
        options: dict[str, Any] = {"scale_path": target + ".weight_scale"}
        return [
            weight_rule(projection, source_range, target, transposed, **options)
            for source_range in projection.source_ranges(sources)
        ]

    @override
    def matmul_partials(self, x: LinearInput, backend: Backend) -> Float[Array, "parts T size_out"]:
        return scaled_gemm(*self._scaled_gemm_operands(x, backend), dtype=x.dtype, backend=backend)

    @override
    def gated_silu(self, x: LinearInput, backend: Backend) -> Float[Array, "T F"]:
        return scaled_gated_gemm(
            *self._scaled_gemm_operands(x, backend), dtype=x.dtype, backend=backend
        )

    def _scaled_gemm_operands(self, x: LinearInput, backend: Backend) -> tuple[jax.Array, ...]:
        """Return the operands of `scaled_gemm`: rows [T, inputs], weight [outputs, inputs], scales
        of the rows [T], and scales of the outputs."""
        values, weight, scale = self._gemm_operands(x, backend)
        return values, weight, scale[:, 0], self.weight_scale[...].reshape(-1)


class FP8ChannelFormat(FP8Format):
    """`FP8Format` for checkpoints with one weight scale per output."""

    name, scale_granularity = "fp8_channel", "channel"


class FP8StaticChannelFormat(FP8ChannelFormat):
    """`FP8ChannelFormat` for checkpoints with static scales of the activations."""

    name, is_static = "fp8_channel_static", True


class FP8TensorFormat(FP8Format):
    """`FP8Format` for checkpoints with one weight scale per tensor."""

    name, scale_granularity = "fp8_tensor", "tensor"


class FP8StaticTensorFormat(FP8TensorFormat):
    """`FP8TensorFormat` for checkpoints with static scales of the activations."""

    name, is_static = "fp8_tensor_static", True


class FP8BlockFormat(_FP8Base):
    """FP8 weight with one scale per block of 128 outputs x 128 inputs.

    `weight_scale` is float32 [output blocks, input blocks].
    Each part of a fused projection begins with a new block. A row of activations has one scale per
    128 consecutive numbers.
    """

    name, outputs_per_scale, is_grouped = "fp8_block", FP8_GROUP_SIZE, True

    def __init__(self, projection: Projection, dtype: DTypeLike):
        super().__init__(projection, dtype)
        blocks = sum(num_blocks(size) for size in _part_widths(projection))
        self.weight_scale = zero_param(
            jnp.float32, blocks, num_blocks(math.prod(projection.input_shape))
        )

    @override
    @classmethod
    def rules(
        cls, projection: Projection, sources: Sequence[str], target: str, *, transposed: bool
    ) -> list[WeightRule]:
        is_fused = len(sources) < len(projection.parts)
        if is_fused and any(size % FP8_GROUP_SIZE for size in _part_widths(projection)):
            raise ValueError(
                f"{sources[0]} fuses projections whose output sizes are not multiples of "
                f"{FP8_GROUP_SIZE}, so a block with one scale would span two projections: use a "
                "checkpoint with another FP8 format"
            )
        found, first, scale = list[WeightRule](), 0, target + ".weight_scale"
        for source_range in projection.source_ranges(sources):
            found.append(weight_rule(projection, source_range, target, transposed))
            source, _, size = source_range
            blocks = num_blocks(size * math.prod(projection.trailing_shape))
            shape = blocks, num_blocks(math.prod(projection.input_shape))
            found.append(WeightRule(source + ".weight_scale", scale, shape, None, 0, first))
            first += blocks
        return found

    @override
    @classmethod
    def float_rules(
        cls, projection: Projection, sources: Sequence[str], target: str, *, transposed: bool
    ) -> list[WeightRule]:
        found, first, widths = list[WeightRule](), 0, tuple(_part_widths(projection))
        ranges = projection.source_ranges(sources)
        inputs = ScaleAxis((math.prod(projection.input_shape),), FP8_GROUP_SIZE)
        for index, source_range in enumerate(ranges):
            # If one tensor holds all parts of a fused projection (such as q, k and v), each part
            # still begins with a new block, so that no two parts share a scale.
            part_sizes = widths if len(ranges) == 1 else (widths[index],)
            outputs = ScaleAxis(part_sizes, FP8_GROUP_SIZE, first)
            options: dict[str, Any] = {
                "scale_path": target + ".weight_scale",
                "scale_axes": (outputs, inputs),
            }
            found.append(weight_rule(projection, source_range, target, transposed, **options))
            first += sum(outputs.num_blocks)
        return found

    @override
    def matmul_partials(self, x: LinearInput, backend: Backend) -> Float[Array, "parts T size_out"]:
        factors, widths = self._gemm_operands(x, backend), _part_widths(self.projection)
        scale = self.weight_scale[...]
        return block_scaled_gemm(*factors, scale, widths, dtype=x.dtype, backend=backend)

    @override
    def gated_silu(self, x: LinearInput, backend: Backend) -> Float[Array, "T F"]:
        factors, scale = self._gemm_operands(x, backend), self.weight_scale[...]
        return block_scaled_gated_gemm(*factors, scale, dtype=x.dtype, backend=backend)


def _part_widths(projection: Projection) -> list[int]:
    """Return the number of outputs for each part of a projection."""
    return [size * math.prod(projection.trailing_shape) for size in projection.part_sizes]


def num_blocks(size: int) -> int:
    """Return the number of scale blocks along an axis of `size` numbers. The last block may be
    smaller."""
    return -(-size // FP8_GROUP_SIZE)


def fp8_scales(values: Float[Array, "..."], axes: Sequence[ScaleAxis]) -> Float32[Array, "..."]:
    """Return one FP8 scale for each block of an unquantized weight.

    The function reshapes the weight. The new shape has one axis for each entry of `axes`, and a
    last axis for the remaining numbers. A block has the entry's `block_size` along each of the
    first axes, and the whole last axis.

    Args:
        values: The unquantized weight, in the layout of the parameter.
        axes: Size and block size of each axis of the scales.

    Returns:
        The scales, with one axis for each entry of `axes`.
    """
    largest = jnp.abs(values).reshape(*(axis.size for axis in axes), -1).max(-1)
    # Compute the maximum of each block along one axis at a time. The last axis comes first, because
    # its blocks are contiguous in memory.
    for index in reversed(range(len(axes))):
        largest = _block_max(largest, axes[index], index)
    largest = largest.astype(jnp.float32)
    # The barrier hides that the divisor is constant. XLA would multiply by the reciprocal of a
    # constant, and the result would be rounded differently.
    divisor = jax.lax.optimization_barrier(jnp.full(largest.shape, FP8_MAX, jnp.float32))
    return jnp.maximum(largest, jnp.float32(FP8_MIN_ABSMAX)) / divisor


def _block_max(values: jax.Array, axis: ScaleAxis, index: int) -> jax.Array:
    """Return the maximum of each block along axis `index` of an array without negative numbers."""
    if axis.block_size == 1:
        return values
    maxima = list[jax.Array]()
    for part in _split_parts(values, axis.part_sizes, index):
        padding = [(0, 0)] * part.ndim
        padding[index] = 0, -part.shape[index] % axis.block_size
        shape = *part.shape[:index], -1, axis.block_size, *part.shape[index + 1 :]
        maxima.append(jnp.pad(part, padding).reshape(shape).max(index + 1))
    return jnp.concatenate(maxima, index)


def expand_scales(
    scales: Float32[Array, "..."], axes: Sequence[ScaleAxis], shape: Sequence[int]
) -> Float32[Array, "..."]:
    """Return the scale of each number of a weight.

    Args:
        scales: Result of `fp8_scales`.
        axes: Axes of the scales.
        shape: Shape of the weight.
    """
    for index, axis in enumerate(axes):
        if axis.block_size == 1:
            continue
        parts = _split_parts(scales, axis.num_blocks, index)
        repeated = (jnp.repeat(part, axis.block_size, index) for part in parts)
        cut = [
            jax.lax.slice_in_dim(part, 0, size, axis=index)
            for part, size in zip(repeated, axis.part_sizes, strict=True)
        ]
        scales = jnp.concatenate(cut, index)
    num_shared = math.prod(shape) // scales.size
    return jnp.broadcast_to(scales[..., None], (*scales.shape, num_shared)).reshape(shape)


def _split_parts(array: jax.Array, sizes: Sequence[int], index: int) -> list[jax.Array]:
    """Split an array along axis `index` into parts of the given sizes."""
    return jnp.split(array, np.cumsum(sizes)[:-1], index)
