"""Quantization of rows to FP8 in Pallas Triton.

Grid (row,). One program computes:

    largest = max |x|                  of the row, or of each group of 128 numbers
    scale   = largest / 448            -> [T], or [groups, T], the layout that the GEMMs read
    values  = x / scale, rounded       -> [T, C]

With static scales, the largest static scale replaces `scale`. The program loads the row in tiles of
columns, 16 bytes per thread and tile, and keeps the row in registers between the passes. The norm
kernel also ends with `quantize_and_store`.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.types import FP8, FP8_GROUP_SIZE, FP8_MAX, FP8_MIN_ABSMAX

_ELEMENTS_PER_WARP = 32 * 8  # Each thread loads 16 bytes if the dtype has 2 bytes.


def quantize_rows(x, static_scales, *, grouped: bool, interpret: bool):
    """Run the public op `quantize_rows` in Pallas Triton."""
    rows, size = x.shape
    tile = max(_ELEMENTS_PER_WARP, min(16 * _ELEMENTS_PER_WARP, pl.next_power_of_2(size)))
    params = plgpu.CompilerParams(num_warps=tile // _ELEMENTS_PER_WARP, num_stages=1)
    values, scale = pl.pallas_call(
        functools.partial(_kernel, tile=tile, grouped=grouped),
        out_shape=quantized_shapes(x.shape, grouped=grouped),
        grid=(rows,),
        compiler_params=params,
        interpret=interpret,
        name="quantize_rows",
    )(x, *static_scale_arguments(static_scales))
    return values, to_row_scales(scale)


def quantized_shapes(shape, *, grouped):
    """Return the shapes of the outputs of `quantize_and_store` for rows of shape `shape`.

    Returns:
        The FP8 rows [T, C], and the scales [T], or [groups, T] with `grouped`.
    """
    rows, size = shape
    scales = (-(-size // FP8_GROUP_SIZE), rows) if grouped else (rows,)
    return [jax.ShapeDtypeStruct(shape, FP8), jax.ShapeDtypeStruct(scales, jnp.float32)]


def static_scale_arguments(static_scales):
    """Return the list of kernel arguments for `static_scales`: empty if it is None."""
    return () if static_scales is None else (static_scales,)


def to_row_scales(stored):
    """Convert stored scales, [T] or [groups, T], to the shape [T, groups] of the public ops.

    If a GEMM transposes the scales back, XLA removes both transpositions.
    """
    return stored[:, None] if stored.ndim == 1 else stored.T


def _kernel(x_ref, *refs, tile, grouped):
    *static_scales, values_ref, scale_ref = refs
    size, row = x_ref.shape[1], pl.program_id(0)
    rows = []
    for start in range(0, size, tile):
        columns = jnp.arange(tile, dtype=jnp.int32) + start
        mask = columns < size if size % tile else None
        other = None if mask is None else 0
        ref = x_ref.at[jnp.full_like(columns, row), columns]
        rows.append(plgpu.load(ref, mask=mask, other=other).astype(jnp.float32))
    quantize_and_store(rows, values_ref, scale_ref, static_scales, grouped=grouped)


def quantize_and_store(values, values_ref, scale_ref, static_scales, *, grouped):
    """Quantize and store the row of the program, and store the row's scales.

    Args:
        values: Tiles of the row in float32, all of the same size, a multiple of 128. Numbers past
            the end of the row are zeros.
        values_ref, scale_ref: Outputs with the shapes of `quantized_shapes`.
        static_scales: The reference to the static scales, in a list. The largest static scale is
            the scale of all rows. Without static scales, the list is empty, and the scales are
            computed from the row.
        grouped: Whether each group of 128 numbers has a scale; otherwise the row has one.
    """
    size, row = values_ref.shape[1], pl.program_id(0)
    if static_scales:
        scales = [_load_max(static_scales[0])] * len(values)
    else:
        if grouped:
            maxima = [jnp.max(jnp.abs(tile).reshape(-1, FP8_GROUP_SIZE), axis=1) for tile in values]
        else:
            largest = functools.reduce(jnp.maximum, [jnp.abs(tile) for tile in values])
            maxima = [jnp.max(largest)] * len(values)
        scales = [
            jnp.maximum(maximum, jnp.float32(FP8_MIN_ABSMAX)) / jnp.float32(FP8_MAX)
            for maximum in maxima
        ]
    for index, (tile, scale) in enumerate(zip(values, scales, strict=True)):
        columns = jnp.arange(tile.size, dtype=jnp.int32) + index * tile.size
        element_scale = scale
        if grouped:
            shape = tile.size // FP8_GROUP_SIZE, FP8_GROUP_SIZE
            element_scale = jnp.broadcast_to(scale[:, None], shape).reshape(tile.shape)
            groups = jnp.arange(shape[0], dtype=jnp.int32) + index * shape[0]
            target = scale_ref.at[groups, jnp.full_like(groups, row)]
            mask = groups < scale_ref.shape[0] if size % tile.size else None
            plgpu.store(target, scale, mask=mask)
        upper, lower = jnp.float32(FP8_MAX), jnp.float32(-FP8_MAX)
        scaled = tile / element_scale
        scaled = jnp.where(scaled > upper, upper, jnp.where(scaled < lower, lower, scaled))
        target = values_ref.at[jnp.full_like(columns, row), columns]
        mask = columns < size if size % tile.size else None
        plgpu.store(target, scaled.astype(FP8), mask=mask)
    if not grouped:
        plgpu.store(scale_ref.at[row], scales[0])


def _load_max(ref):
    """Load a short array of positive numbers, and return the largest."""
    index = jnp.arange(pl.next_power_of_2(ref.shape[0]), dtype=jnp.int32)
    return jnp.max(plgpu.load(ref.at[index], mask=index < ref.shape[0], other=0))
