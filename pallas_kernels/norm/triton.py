"""Residual sum and RMSNorm in Pallas Triton, in one launch.

Grid (row,); one program:

    update = update[0, row] + update[1, row] + ..., rounded     (its split-K partials)
    total  = hidden[row] + update, rounded                      -> the new residual stream
    normed = total / rms(total) * weight, float32, rounded      -> the next projection's input

XLA makes two or three kernels of this: the partials' sum, the residual's, and a reduction that
reads it again. A row goes through in tiles of as many columns as the program's threads load in 16
bytes of the update each: side by side, so that no load takes half of what it fetches. Rows for a
product in FP8 are brought to it at the end: rounded first, so that they are what a kernel of its
own makes of them.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.gemm.fp8_triton import (
    quantize_and_store,
    quantized_shapes,
    static_scale_arguments,
    to_row_scales,
)


@dataclasses.dataclass(frozen=True)
class NormConfig:
    """Columns loaded at once, warps: one program has a whole row."""

    tile: int
    num_warps: int


def norm_config(*, size: int, itemsize: int) -> NormConfig:
    """For rows of `size` and an update of `itemsize` bytes an element: 16 bytes a thread."""
    elements = 32 * 16 // itemsize  # a warp
    tile = max(elements, min(32 * elements, pl.next_power_of_2(size)))
    return NormConfig(tile, num_warps=tile // elements)


def add_rms_norm(hidden, update, weight, *, eps, interpret: bool):
    """See the public entry of the same name."""
    return _launch(
        hidden, update, weight, None, eps=eps, interpret=interpret, scale_granularity=None
    )


def add_rms_norm_to_fp8(hidden, update, weight, static_scales, *, eps, grouped, interpret: bool):
    """See the public entry of the same name."""
    options = {
        "eps": eps,
        "interpret": interpret,
        "scale_granularity": "groups" if grouped else "rows",
    }
    total, values, scale = _launch(hidden, update, weight, static_scales, **options)
    return values, to_row_scales(scale), total


def _launch(hidden, update, weight, static_scales, *, eps, interpret, scale_granularity):
    """The kernel's results; `scale_granularity` is None, or what has one of its own in FP8."""
    config = norm_config(size=hidden.shape[1], itemsize=update.dtype.itemsize)
    total = jax.ShapeDtypeStruct(hidden.shape, hidden.dtype)
    narrow = [total, *quantized_shapes(hidden.shape, grouped=scale_granularity == "groups")]
    return tuple(
        pl.pallas_call(
            functools.partial(
                _kernel, eps=eps, tile=config.tile, scale_granularity=scale_granularity
            ),
            out_shape=[total, total] if scale_granularity is None else narrow,
            grid=(hidden.shape[0],),
            compiler_params=plgpu.CompilerParams(num_warps=config.num_warps, num_stages=1),
            interpret=interpret,
            name="add_rms_norm" if scale_granularity is None else "add_rms_norm_to_fp8",
        )(hidden, update, weight, *static_scale_arguments(static_scales))
    )


def _kernel(hidden_ref, update_ref, weight_ref, *refs, eps, tile, scale_granularity):
    num_outputs = 2 if scale_granularity is None else 3
    static_scales, out_refs = refs[:-num_outputs], refs[-num_outputs:]
    normed_ref, total_ref = out_refs if scale_granularity is None else (None, out_refs[0])
    size, num_partials = hidden_ref.shape[1], update_ref.shape[0]
    row, dtype = pl.program_id(0), total_ref.dtype
    tiles = [jnp.arange(tile, dtype=jnp.int32) + start for start in range(0, size, tile)]

    def column_mask(columns):
        return columns < size if size % tile else None

    def load(ref, *before, columns):
        index = (*(jnp.full_like(columns, i) for i in before), columns)
        mask = column_mask(columns)
        other = None if mask is None else 0
        return plgpu.load(ref.at[index], mask=mask, other=other).astype(jnp.float32)

    def store(ref, columns, values):
        index = jnp.full_like(columns, row), columns
        plgpu.store(ref.at[index], values.astype(dtype), mask=column_mask(columns))

    # All loads before any store: the compiler moves none over a store, and the weight, which no
    # kernel has read lately, would be waited for at the end.
    weights = [load(weight_ref, columns=c) for c in tiles]
    streams = [load(hidden_ref, row, columns=c) for c in tiles]
    updates = [[load(update_ref, s, row, columns=c) for s in range(num_partials)] for c in tiles]
    totals, squares = [], jnp.zeros((tile,), jnp.float32)
    for stream, partials in zip(streams, updates, strict=True):
        update = functools.reduce(jnp.add, partials).astype(dtype)
        total = (stream + update.astype(jnp.float32)).astype(dtype).astype(jnp.float32)
        totals.append(total)
        squares += total * total
    for columns, total in zip(tiles, totals, strict=True):
        store(total_ref, columns, total)
    scale = lax.rsqrt(jnp.sum(squares) / jnp.float32(size) + jnp.float32(eps))
    rows = [total * scale * factor for total, factor in zip(totals, weights, strict=True)]
    if scale_granularity is None:
        for columns, values in zip(tiles, rows, strict=True):
            store(normed_ref, columns, values)
    else:
        rounded = [values.astype(dtype).astype(jnp.float32) for values in rows]
        _, values_ref, scale_ref = out_refs
        quantize_and_store(
            rounded, values_ref, scale_ref, static_scales, grouped=scale_granularity == "groups"
        )
