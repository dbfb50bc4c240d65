"""Residual addition and RMSNorm in Pallas Triton, in one launch.

Grid (row,). One program computes:

    update = update[0, row] + update[1, row] + ..., rounded     sum of the split-K partials
    total  = hidden[row] + update, rounded                      -> the new residual stream
    normed = total / rms(total) * weight, float32, rounded      -> the next projection's input
    if FP8:  quantize normed                                    -> FP8 row and its scales

XLA compiles the same computation to two or three kernels. The program reads the row in tiles of
columns. In each tile, every thread loads 16 adjacent bytes of the update, so that no fetched byte
is wasted. Rows are rounded before they are quantized, so that the fused kernel returns the same
numbers as a norm kernel followed by a quantization kernel.
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
    """Launch parameters of the norm kernel, in which one program computes one row.

    Attributes:
        tile: Number of columns per load.
        num_warps: Number of warps of a program.
    """

    tile: int
    num_warps: int


def norm_config(*, size: int, itemsize: int) -> NormConfig:
    """Return launch parameters with which each thread loads 16 bytes per tile. The loaded bytes
    belong to `update`, the array that `add_rms_norm` adds to the residual stream.

    Args:
        size: Number of columns of a row.
        itemsize: Number of bytes per element of `update`.
    """
    elements = 32 * 16 // itemsize  # elements that a warp loads
    tile = max(elements, min(32 * elements, pl.next_power_of_2(size)))
    return NormConfig(tile, num_warps=tile // elements)


def add_rms_norm(hidden, update, weight, *, eps, interpret: bool):
    """Run the public op `add_rms_norm` in Pallas Triton."""
    return _launch(
        hidden, update, weight, None, eps=eps, interpret=interpret, scale_granularity=None
    )


def add_rms_norm_to_fp8(hidden, update, weight, static_scales, *, eps, grouped, interpret: bool):
    """Run the public op `add_rms_norm_to_fp8` in Pallas Triton."""
    options = {
        "eps": eps,
        "interpret": interpret,
        "scale_granularity": "groups" if grouped else "rows",
    }
    total, values, scale = _launch(hidden, update, weight, static_scales, **options)
    return values, to_row_scales(scale), total


def _launch(hidden, update, weight, static_scales, *, eps, interpret, scale_granularity):
    """Launch the kernel; `scale_granularity` is "rows" or "groups", or None for no quantization."""
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

    # Issue all loads before the first store, since the compiler does not move a load before a
    # store. The weight is unlikely to be in the cache, so start its load early.
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
