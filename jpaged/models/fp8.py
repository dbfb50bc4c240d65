"""W8A8 projections: weights in FP8 (e4m3), activations quantized before each GEMM. Half the bytes
of bfloat16, and twice the FLOP/s on a GPU that multiplies FP8.

A weight is [*outputs, *inputs], which is how GPUs multiply FP8 and how checkpoints store it. The
formats differ in their scales:

- `FP8Format` and its subclasses have one for each output of the weight, and one for each row, or,
  where the checkpoint says so, one for all rows.
- `FP8BlockFormat` has one for each 128 x 128 block of the weight, and one for each 128 numbers of a
  row.

Rows that devices sum are quantized by the largest number of the whole row, over all devices, so
that tokens do not depend on the number of devices.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from jpaged.models.checkpoint import WeightRule
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
    Backend,
    add_rms_norm_to_fp8,
    block_scaled_gated_gemm,
    block_scaled_gemm,
    quantize_rows,
    scaled_gated_gemm,
    scaled_gemm,
)


class _FP8Base(WeightFormat):
    """What the formats share: an FP8 `weight`, and rows in FP8.

    With static scales of rows, `input_scale` has one for each part: parts that are fused are given
    rows by the largest.
    """

    is_grouped: ClassVar[bool] = False
    """Whether each `FP8_GROUP_SIZE` numbers of a row have a scale; else each row has one."""
    is_static: ClassVar[bool] = False
    """Whether the checkpoint has the scale of all rows."""

    def __init__(self, projection: Projection, dtype: DTypeLike):
        super().__init__(projection, dtype)
        self.weight = zero_param(FP8, *projection.output_shape, *projection.input_shape)
        self.input_scale = (
            zero_param(jnp.float32, len(projection.parts)) if self.is_static else None
        )

    def add_rms_norm(
        self,
        hidden: Float[Array, "T D"],
        update: Float[Array, "parts T D"] | PendingAllReduce,
        weight: Float[Array, "D"],
        eps: float,
        backend: Backend,
    ) -> tuple[QuantizedRows, Float[Array, "T D"]]:
        """See `WeightFormat`."""
        if isinstance(update, PendingAllReduce):
            update = reduce_update(update, hidden.dtype)[None]
        options = {"eps": eps, "grouped": self.is_grouped, "backend": backend}
        values, scale, total = add_rms_norm_to_fp8(
            hidden, update, weight, self.static_scales, **options
        )
        return QuantizedRows(values, scale, hidden.dtype), total

    @property
    def static_scales(self) -> Float32[Array, "parts"] | None:
        """The static scales of rows; None if each row has its own."""
        return None if self.input_scale is None else self.input_scale[...]

    def _gemm_operands(
        self, x: LinearInput, backend: Backend
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return rows and weight in FP8 [outputs, inputs], and the scales [T, groups] of rows."""
        if not isinstance(x, QuantizedRows):
            given, is_whole = self.static_scales, not self.projection.needs_all_reduce
            reduce_max = None if is_whole or self.is_grouped or given is not None else all_max
            options = {"grouped": self.is_grouped, "reduce_max": reduce_max, "backend": backend}
            x = QuantizedRows(*quantize_rows(x.reshape(x.shape[0], -1), given, **options), x.dtype)
        return x.values, self.weight[...].reshape(-1, x.values.shape[1]), x.scale


class FP8Format(_FP8Base):
    """A scale for each output: `weight_scale` [*outputs] in float32.

    The checkpoint's weights are wider, and are quantized while it is loaded. Subclasses are for
    checkpoints in FP8.
    """

    name = "fp8"
    scale_granularity: ClassVar[Literal["channel", "tensor"] | None] = None
    """What has a scale in the checkpoint: each output, or each tensor."""

    def __init__(self, projection: Projection, dtype: DTypeLike):
        super().__init__(projection, dtype)
        self.weight_scale = zero_param(jnp.float32, *projection.output_shape)

    @classmethod
    def rules(
        cls, projection: Projection, sources: Sequence[str], target: str, *, transposed: bool
    ) -> list[WeightRule]:
        """See `WeightFormat`."""
        found, scale = list[WeightRule](), target + ".weight_scale"
        scale_path = scale if cls.scale_granularity is None else None
        count = len(projection.parts) if len(sources) == 1 else 1
        outputs = tuple(range(len(projection.output_shape)))
        for index, source_range in enumerate(projection.source_ranges(sources)):
            found.append(
                weight_rule(projection, source_range, target, transposed, scale_path=scale_path)
            )
            source, start, size = source_range
            shape = size, *projection.trailing_shape
            rule = WeightRule(source + ".weight_scale", scale, shape, None, 0, start)
            if cls.scale_granularity == "channel":  # in a file [out, 1]
                found.append(replace(rule, file_axes=(outputs, ())))
            elif cls.scale_granularity == "tensor":
                found.append(replace(rule, is_scalar=True))
            if cls.is_static:
                own = source + ".input_scale", target + ".input_scale", (count,), None, 0, index
                found.append(WeightRule(*own, is_scalar=True))
        return found

    def matmul_partials(self, x: LinearInput, backend: Backend) -> Float[Array, "parts T size_out"]:
        """See `WeightFormat`."""
        return scaled_gemm(*self._scaled_gemm_operands(x, backend), dtype=x.dtype, backend=backend)

    def gated_silu(self, x: LinearInput, backend: Backend) -> Float[Array, "T F"]:
        """See `WeightFormat`."""
        return scaled_gated_gemm(
            *self._scaled_gemm_operands(x, backend), dtype=x.dtype, backend=backend
        )

    def _scaled_gemm_operands(self, x: LinearInput, backend: Backend) -> tuple[jax.Array, ...]:
        """Return rows and weight, and a scale for each row and each output."""
        values, weight, scale = self._gemm_operands(x, backend)
        return values, weight, scale[:, 0], self.weight_scale[...].reshape(-1)


class FP8ChannelFormat(FP8Format):
    """`FP8Format`, from checkpoints with a scale for each output."""

    name, scale_granularity = "fp8_channel", "channel"


class FP8StaticChannelFormat(FP8ChannelFormat):
    """`FP8ChannelFormat` with static scales of rows."""

    name, is_static = "fp8_channel_static", True


class FP8TensorFormat(FP8Format):
    """`FP8Format`, from checkpoints with a scale for each tensor."""

    name, scale_granularity = "fp8_tensor", "tensor"


class FP8StaticTensorFormat(FP8TensorFormat):
    """`FP8TensorFormat` with static scales of rows."""

    name, is_static = "fp8_tensor_static", True


class FP8BlockFormat(_FP8Base):
    """A scale for each 128 x 128 block: `weight_scale` [blocks, groups] in float32.

    Each part begins with a new block. Rows have a scale for each 128 numbers.
    """

    name, outputs_per_scale, is_grouped = "fp8_block", FP8_GROUP_SIZE, True

    def __init__(self, projection: Projection, dtype: DTypeLike):
        super().__init__(projection, dtype)
        blocks = sum(_num_blocks(size) for size in _part_widths(projection))
        self.weight_scale = zero_param(
            jnp.float32, blocks, _num_blocks(math.prod(projection.input_shape))
        )

    @classmethod
    def rules(
        cls, projection: Projection, sources: Sequence[str], target: str, *, transposed: bool
    ) -> list[WeightRule]:
        """See `WeightFormat`."""
        is_fused = len(sources) < len(projection.parts)
        if is_fused and any(size % FP8_GROUP_SIZE for size in _part_widths(projection)):
            raise ValueError(
                f"{sources[0]} has several projections in one, whose rows are no multiples of "
                f"{FP8_GROUP_SIZE}: blocks with a scale would straddle them; use another FP8 checkpoint"
            )
        found, first, scale = list[WeightRule](), 0, target + ".weight_scale"
        for source_range in projection.source_ranges(sources):
            found.append(weight_rule(projection, source_range, target, transposed))
            source, _, size = source_range
            blocks = _num_blocks(size * math.prod(projection.trailing_shape))
            shape = blocks, _num_blocks(math.prod(projection.input_shape))
            found.append(WeightRule(source + ".weight_scale", scale, shape, None, 0, first))
            first += blocks
        return found

    def matmul_partials(self, x: LinearInput, backend: Backend) -> Float[Array, "parts T size_out"]:
        """See `WeightFormat`."""
        factors, widths = self._gemm_operands(x, backend), _part_widths(self.projection)
        scale = self.weight_scale[...]
        return block_scaled_gemm(*factors, scale, widths, dtype=x.dtype, backend=backend)

    def gated_silu(self, x: LinearInput, backend: Backend) -> Float[Array, "T F"]:
        """See `WeightFormat`."""
        factors, scale = self._gemm_operands(x, backend), self.weight_scale[...]
        return block_scaled_gated_gemm(*factors, scale, dtype=x.dtype, backend=backend)


def _part_widths(projection: Projection) -> list[int]:
    """Return the number of outputs of each part."""
    return [size * math.prod(projection.trailing_shape) for size in projection.part_sizes]


def _num_blocks(size: int) -> int:
    """Return the number of blocks along an axis; the last one may be smaller."""
    return -(-size // FP8_GROUP_SIZE)
