"""W8A8 projections: weights in FP8 (e4m3), activations quantized before each GEMM. Half the bytes
of bfloat16, and twice the FLOP/s on a GPU that multiplies FP8.

A weight is [*outputs, *inputs], which is how GPUs multiply FP8 and how checkpoints store it. The
formats differ in their scales:

- `Scaled` and its subclasses have one for each output of the weight, and one for each row, or,
  where the checkpoint says so, one for all rows.
- `BlockScaled` has one for each 128 x 128 block of the weight, and one for each 128 numbers of a
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
from jpaged.models.formats import Format, Projection, QuantizedRows, Rows, weight_rule, zeros
from jpaged.models.sharding import Unsummed, all_max, summed
from pallas_kernels import (
    FP8,
    FP8_GROUP,
    Backend,
    add_rms_norm_to_fp8,
    block_scaled_gated_gemm,
    block_scaled_gemm,
    quantize_rows,
    scaled_gated_gemm,
    scaled_gemm,
)


class _Quantized(Format):
    """What the formats share: an FP8 `weight`, and rows in FP8.

    With static scales of rows, `input_scale` has one for each part: parts that are fused are given
    rows by the largest.
    """

    is_grouped: ClassVar[bool] = False
    """Whether each `FP8_GROUP` numbers of a row have a scale; else each row has one."""
    is_static: ClassVar[bool] = False
    """Whether the checkpoint has the scale of all rows."""

    def __init__(self, projection: Projection, dtype: DTypeLike):
        super().__init__(projection, dtype)
        self.weight = zeros(FP8, *projection.outputs, *projection.inputs)
        self.input_scale = zeros(jnp.float32, len(projection.parts)) if self.is_static else None

    def add_rms_norm(
        self,
        hidden: Float[Array, "T D"],
        update: Float[Array, "parts T D"] | Unsummed,
        weight: Float[Array, "D"],
        eps: float,
        backend: Backend,
    ) -> tuple[QuantizedRows, Float[Array, "T D"]]:
        """See `Format`."""
        if isinstance(update, Unsummed):
            update = summed(update, hidden.dtype)[None]
        options = {"eps": eps, "grouped": self.is_grouped, "backend": backend}
        values, scale, total = add_rms_norm_to_fp8(
            hidden, update, weight, self.given_scales, **options
        )
        return QuantizedRows(values, scale, hidden.dtype), total

    @property
    def given_scales(self) -> Float32[Array, "parts"] | None:
        """The static scales of rows; None if each row has its own."""
        return None if self.input_scale is None else self.input_scale[...]

    def _factors(self, x: Rows, backend: Backend) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return rows and weight in FP8 [outputs, inputs], and the scales [T, groups] of rows."""
        if not isinstance(x, QuantizedRows):
            given, is_whole = self.given_scales, not self.projection.all_reduced
            across = None if is_whole or self.is_grouped or given is not None else all_max
            options = {"grouped": self.is_grouped, "across": across, "backend": backend}
            x = QuantizedRows(*quantize_rows(x.reshape(x.shape[0], -1), given, **options), x.dtype)
        return x.values, self.weight[...].reshape(-1, x.values.shape[1]), x.scale


class Scaled(_Quantized):
    """A scale for each output: `weight_scale` [*outputs] in float32.

    The checkpoint's weights are wider, and are quantized while it is loaded. Subclasses are for
    checkpoints in FP8.
    """

    name = "fp8"
    scales: ClassVar[Literal["channel", "tensor"] | None] = None
    """What has a scale in the checkpoint: each output, or each tensor."""

    def __init__(self, projection: Projection, dtype: DTypeLike):
        super().__init__(projection, dtype)
        self.weight_scale = zeros(jnp.float32, *projection.outputs)

    @classmethod
    def rules(
        cls, projection: Projection, sources: Sequence[str], target: str, *, transposed: bool
    ) -> list[WeightRule]:
        """See `Format`."""
        found, scale = list[WeightRule](), target + ".weight_scale"
        made = scale if cls.scales is None else None
        count = len(projection.parts) if len(sources) == 1 else 1
        outputs = tuple(range(len(projection.outputs)))
        for index, piece in enumerate(projection.pieces(sources)):
            found.append(weight_rule(projection, piece, target, transposed, scale=made))
            source, start, size = piece
            shape = size, *projection.width
            rule = WeightRule(source + ".weight_scale", scale, shape, None, 0, start)
            if cls.scales == "channel":  # in a file [out, 1]
                found.append(replace(rule, file_axes=(outputs, ())))
            elif cls.scales == "tensor":
                found.append(replace(rule, fills=True))
            if cls.is_static:
                own = source + ".input_scale", target + ".input_scale", (count,), None, 0, index
                found.append(WeightRule(*own, fills=True))
        return found

    def partials(self, x: Rows, backend: Backend) -> Float[Array, "parts T size_out"]:
        """See `Format`."""
        return scaled_gemm(*self._scaled(x, backend), dtype=x.dtype, backend=backend)

    def gated_silu(self, x: Rows, backend: Backend) -> Float[Array, "T F"]:
        """See `Format`."""
        return scaled_gated_gemm(*self._scaled(x, backend), dtype=x.dtype, backend=backend)

    def _scaled(self, x: Rows, backend: Backend) -> tuple[jax.Array, ...]:
        """Return rows and weight, and a scale for each row and each output."""
        values, weight, scale = self._factors(x, backend)
        return values, weight, scale[:, 0], self.weight_scale[...].reshape(-1)


class ChannelScaled(Scaled):
    """`Scaled`, from checkpoints with a scale for each output."""

    name, scales = "fp8_channel", "channel"


class StaticChannelScaled(ChannelScaled):
    """`ChannelScaled` with static scales of rows."""

    name, is_static = "fp8_channel_static", True


class TensorScaled(Scaled):
    """`Scaled`, from checkpoints with a scale for each tensor."""

    name, scales = "fp8_tensor", "tensor"


class StaticTensorScaled(TensorScaled):
    """`TensorScaled` with static scales of rows."""

    name, is_static = "fp8_tensor_static", True


class BlockScaled(_Quantized):
    """A scale for each 128 x 128 block: `weight_scale` [blocks, groups] in float32.

    Each part begins with a new block. Rows have a scale for each 128 numbers.
    """

    name, scaled_rows, is_grouped = "fp8_block", FP8_GROUP, True

    def __init__(self, projection: Projection, dtype: DTypeLike):
        super().__init__(projection, dtype)
        blocks = sum(_blocks(size) for size in _widths(projection))
        self.weight_scale = zeros(jnp.float32, blocks, _blocks(math.prod(projection.inputs)))

    @classmethod
    def rules(
        cls, projection: Projection, sources: Sequence[str], target: str, *, transposed: bool
    ) -> list[WeightRule]:
        """See `Format`."""
        is_fused = len(sources) < len(projection.parts)
        if is_fused and any(size % FP8_GROUP for size in _widths(projection)):
            raise ValueError(
                f"{sources[0]} has several projections in one, whose rows are no multiples of "
                f"{FP8_GROUP}: blocks with a scale would straddle them; use another FP8 checkpoint"
            )
        found, first, scale = list[WeightRule](), 0, target + ".weight_scale"
        for piece in projection.pieces(sources):
            found.append(weight_rule(projection, piece, target, transposed))
            source, _, size = piece
            blocks = _blocks(size * math.prod(projection.width))
            shape = blocks, _blocks(math.prod(projection.inputs))
            found.append(WeightRule(source + ".weight_scale", scale, shape, None, 0, first))
            first += blocks
        return found

    def partials(self, x: Rows, backend: Backend) -> Float[Array, "parts T size_out"]:
        """See `Format`."""
        factors, widths = self._factors(x, backend), _widths(self.projection)
        scale = self.weight_scale[...]
        return block_scaled_gemm(*factors, scale, widths, dtype=x.dtype, backend=backend)

    def gated_silu(self, x: Rows, backend: Backend) -> Float[Array, "T F"]:
        """See `Format`."""
        factors, scale = self._factors(x, backend), self.weight_scale[...]
        return block_scaled_gated_gemm(*factors, scale, dtype=x.dtype, backend=backend)


def _widths(projection: Projection) -> list[int]:
    """Return the number of outputs of each part."""
    return [size * math.prod(projection.width) for size in projection.sizes]


def _blocks(size: int) -> int:
    """Return the number of blocks along an axis; the last one may be smaller."""
    return -(-size // FP8_GROUP)
