"""W8A8 projections: weights in FP8 (e4m3), activations quantised before each GEMM. Half the bytes
of bfloat16, and twice the FLOP/s on a GPU that multiplies FP8.

A weight lies as [*outputs, *inputs], which is how GPUs multiply such numbers and how checkpoints
have them. Formats differ in what has a scale of its own:

- `Scaled`: each output of the weight, and each row (or, where the checkpoint says so, all rows
  together). The weight's are the checkpoint's, or are made while a wider one loads.
- `BlockScaled`: each block of 128 rows and columns of the weight, and each 128 numbers of a row.

What is summed over devices that share the model is brought to FP8 by what all of them have of a
row, so that tokens do not depend on their number.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from jpaged.models.checkpoint import WeightRule
from jpaged.models.config import Projection
from jpaged.models.formats import FP8Rows, Layout, Rows, RowScales, pieces, sizes, zeros
from jpaged.models.sharding import all_max
from pallas_kernels import (
    FP8,
    FP8_GROUP,
    Backend,
    block_scaled_gated_gemm,
    block_scaled_gemm,
    quantize_rows,
    scaled_gated_gemm,
    scaled_gemm,
    sum_partials,
)


class _Rows:
    """What the formats share: all that a product in FP8 is used for."""

    def partials(self, linear: Any, x: Rows, backend: Backend) -> Float[Array, "parts T size_out"]:
        """See `Format`."""
        raise NotImplementedError

    def product(self, linear: Any, x: Rows, backend: Backend) -> Float[Array, "T *outputs"]:
        """See `Format`."""
        rows = sum_partials(self.partials(linear, x, backend), x.dtype)
        return rows.reshape(-1, *linear.projection.outputs)

    def array(self, linear: Any) -> None:
        """See `Format`: there is none."""
        return

    def given_scales(self, linear: Any) -> Float32[Array, "parts"] | None:
        """See `Format`."""
        return None


@dataclass(frozen=True)
class Scaled(_Rows):
    """A scale an output: `weight` in FP8 and `weight_scale` [*outputs] in float32.

    Attributes:
        scales: Which scales the checkpoint has: one for each output ("channel") or one for a whole
            tensor ("tensor"). None: it has none, its weights are wider and brought to FP8 as they
            are loaded.
        is_static: The checkpoint has the scale of all rows that a tensor is ever given:
            `input_scale`, one for each part. Parts that are fused are given rows by the largest.
    """

    scales: Literal["channel", "tensor"] | None
    is_static: bool = False

    @property
    def row_scales(self) -> RowScales:
        """See `Format`."""
        return "row"

    def given_scales(self, linear: Any) -> Float32[Array, "parts"] | None:
        """See `Format`."""
        return linear.input_scale[...] if self.is_static else None

    def parameters(self, projection: Projection, dtype: DTypeLike) -> dict[str, nnx.Param]:
        """See `Format`."""
        found = {
            "weight": zeros(FP8, *projection.outputs, *projection.inputs),
            "weight_scale": zeros(jnp.float32, *projection.outputs),
        }
        if self.is_static:
            found["input_scale"] = zeros(jnp.float32, len(projection.parts))
        return found

    def layout(self, projection: Projection) -> Layout:
        """See `Format`."""
        return dict.fromkeys(("weight", "weight_scale"), (0, sizes(projection)))

    def rules(
        self, projection: Projection, sources: Sequence[str], target: str, *, transposed: bool
    ) -> list[WeightRule]:
        """See `Format`."""
        found, scale, is_fused = [], target + ".weight_scale", len(sources) == 1
        count = len(projection.parts) if is_fused else 1
        for index, (source, start, size) in enumerate(pieces(projection, sources)):
            place = projection, source, target, start, size
            made = scale if self.scales is None else None
            found.append(_weight_rule(*place, transposed=transposed, scale=made))
            shape, outputs = (size, *projection.width), tuple(range(len(projection.outputs)))
            rule = WeightRule(source + ".weight_scale", scale, shape, None, 0, start)
            if self.scales == "channel":  # in a file [out, 1]
                found.append(replace(rule, file_axes=(outputs, ())))
            elif self.scales == "tensor":
                found.append(replace(rule, fills=True))
            if self.is_static:
                own = source + ".input_scale", target + ".input_scale", (count,), None, 0, index
                found.append(WeightRule(*own, fills=True))
        return found

    def partials(self, linear: Any, x: Rows, backend: Backend) -> Float[Array, "parts T size_out"]:
        """See `Format`."""
        factors = self._factors(linear, x, backend)
        return scaled_gemm(*factors, dtype=x.dtype, backend=backend)

    def gated_silu(self, linear: Any, x: Rows, backend: Backend) -> Float[Array, "T F"]:
        """See `Format`."""
        factors = self._factors(linear, x, backend)
        return scaled_gated_gemm(*factors, dtype=x.dtype, backend=backend)

    def _factors(
        self, linear: Any, x: Rows, backend: Backend
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Rows and weight in FP8, and the scales of both."""
        if isinstance(x, FP8Rows):
            values, scales = x.values, x.scale
        else:
            given = self.given_scales(linear)
            across = all_max if linear.projection.all_reduced and given is None else None
            values, scales = quantize_rows(x, given, across=across, backend=backend)
        weight = linear.weight[...].reshape(-1, values.shape[1])
        return values, weight, scales[:, 0], linear.weight_scale[...].reshape(-1)


@dataclass(frozen=True)
class BlockScaled(_Rows):
    """A scale a block of 128 x 128: `weight` in FP8 and `weight_scale` [blocks, groups] in float32,
    where blocks begin anew in each part. Rows have a scale for each 128 numbers.
    """

    @property
    def row_scales(self) -> RowScales:
        """See `Format`."""
        return "group"

    def parameters(self, projection: Projection, dtype: DTypeLike) -> dict[str, nnx.Param]:
        """See `Format`."""
        groups = blocks_of(math.prod(projection.inputs))
        return {
            "weight": zeros(FP8, *projection.outputs, *projection.inputs),
            "weight_scale": zeros(jnp.float32, sum(_blocks(projection)), groups),
        }

    def layout(self, projection: Projection) -> Layout:
        """See `Format`."""
        return {"weight": (0, sizes(projection)), "weight_scale": (0, _blocks(projection))}

    def rules(
        self, projection: Projection, sources: Sequence[str], target: str, *, transposed: bool
    ) -> list[WeightRule]:
        """See `Format`."""
        found, first, width = list[WeightRule](), 0, math.prod(projection.width)
        groups, scale = blocks_of(math.prod(projection.inputs)), target + ".weight_scale"
        is_fused = len(sources) < len(projection.parts)
        if is_fused and any(size * width % FP8_GROUP for size in sizes(projection)):
            raise ValueError(
                f"{sources[0]} has several projections in one, whose rows are no multiples of "
                f"{FP8_GROUP}: blocks with a scale would straddle them; use another FP8 checkpoint"
            )
        for source, start, size in pieces(projection, sources):
            place = projection, source, target, start, size
            found.append(_weight_rule(*place, transposed=transposed))
            shape = blocks_of(size * width), groups
            found.append(WeightRule(source + ".weight_scale", scale, shape, None, 0, first))
            first += shape[0]
        return found

    def partials(self, linear: Any, x: Rows, backend: Backend) -> Float[Array, "parts T size_out"]:
        """See `Format`."""
        factors, width = self._factors(linear, x, backend), math.prod(linear.projection.width)
        rows = [size * width for size in sizes(linear.projection)]
        return block_scaled_gemm(*factors, rows, dtype=x.dtype, backend=backend)

    def gated_silu(self, linear: Any, x: Rows, backend: Backend) -> Float[Array, "T F"]:
        """See `Format`."""
        factors = self._factors(linear, x, backend)
        return block_scaled_gated_gemm(*factors, dtype=x.dtype, backend=backend)

    def _factors(
        self, linear: Any, x: Rows, backend: Backend
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Rows and weight in FP8, and the scales of both."""
        if isinstance(x, FP8Rows):
            values, x_scale = x.values, x.scale
        else:
            values, x_scale = quantize_rows(x, grouped=True, backend=backend)
        weight = linear.weight[...].reshape(-1, values.shape[1])
        return values, weight, x_scale, linear.weight_scale[...]


def _weight_rule(
    projection: Projection,
    source: str,
    target: str,
    start: int,
    size: int,
    *,
    transposed: bool,
    scale: str | None = None,
) -> WeightRule:
    """How a part's weight comes to lie as [*outputs, *inputs]."""
    outputs = tuple(range(len(projection.outputs)))
    inputs = tuple(range(len(outputs), len(outputs) + len(projection.inputs)))
    return WeightRule(
        source + ".weight",
        target + ".weight",
        (size, *projection.width, *projection.inputs),
        (outputs, inputs) if transposed else (inputs, outputs),
        0,
        start,
        scale=scale,
    )


def blocks_of(size: int) -> int:
    """Blocks along an axis of that size; the last one may be smaller."""
    return -(-size // FP8_GROUP)


def _blocks(projection: Projection) -> tuple[int, ...]:
    """Blocks along the outputs of each part."""
    width = math.prod(projection.width)
    return tuple(blocks_of(size * width) for size in sizes(projection))


FP8_FORMATS = {
    "fp8": Scaled(None),
    "fp8_channel": Scaled("channel"),
    "fp8_channel_static": Scaled("channel", is_static=True),
    "fp8_tensor": Scaled("tensor"),
    "fp8_tensor_static": Scaled("tensor", is_static=True),
    "fp8_block": BlockScaled(),
}
"""By the names that `Projection.format` has."""
