"""Rows to numbers in FP8 in Pallas Triton.

Grid (row,); one program:

    largest = max |x|                  of the row, or of each 128 numbers of it
    scale   = largest / 448            -> [T], or [groups, T], as the GEMMs read them; or as given
    values  = x / scale, rounded       -> [T, C]

A row goes through in tiles of as many columns as the program's threads load in 16 bytes each, and
stays in registers in between. `quantize_and_store` is the last part of other kernels too.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.types import FP8, FP8_GROUP_SIZE, FP8_MAX, FP8_MIN_ABSMAX

_ELEMENTS_PER_WARP = 32 * 8  # 16 bytes a thread, of numbers of two bytes


def quantize_rows(x, static_scales, *, grouped: bool, interpret: bool):
    """See the public entry of the same name."""
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
    """What `quantize_and_store` stores of rows of that shape: the numbers, and the scales [T], or
    [groups, T]."""
    rows, size = shape
    scales = (-(-size // FP8_GROUP_SIZE), rows) if grouped else (rows,)
    return [jax.ShapeDtypeStruct(shape, FP8), jax.ShapeDtypeStruct(scales, jnp.float32)]


def static_scale_arguments(static_scales):
    """The arguments for scales that are given or, where they are None, are not."""
    return () if static_scales is None else (static_scales,)


def to_row_scales(stored):
    """Stored scales as the public entries return them, [T, groups]; where a GEMM turns them again,
    XLA has nothing to do."""
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
    """Stores the program's row, float32 in tiles of columns, and its scales.

    Args:
        values: of each tile, all of one size, a multiple of 128; zeros behind the row's end.
        values_ref, scale_ref: as `quantized_shapes` has them.
        given: of the array whose largest number is the scale of all rows, or empty.
        grouped: a scale for each 128 numbers.
    """
    size, row = values_ref.shape[1], pl.program_id(0)
    if static_scales:
        scales = [_load_max(static_scales[0])] * len(values)
    else:
        if grouped:
            own = [jnp.max(jnp.abs(it).reshape(-1, FP8_GROUP_SIZE), axis=1) for it in values]
        else:
            largest = functools.reduce(jnp.maximum, [jnp.abs(it) for it in values])
            own = [jnp.max(largest)] * len(values)
        scales = [jnp.maximum(it, jnp.float32(FP8_MIN_ABSMAX)) / jnp.float32(FP8_MAX) for it in own]
    for index, (it, scale) in enumerate(zip(values, scales, strict=True)):
        columns = jnp.arange(it.size, dtype=jnp.int32) + index * it.size
        element_scale = scale
        if grouped:
            shape = it.size // FP8_GROUP_SIZE, FP8_GROUP_SIZE
            element_scale = jnp.broadcast_to(scale[:, None], shape).reshape(it.shape)
            groups = jnp.arange(shape[0], dtype=jnp.int32) + index * shape[0]
            target = scale_ref.at[groups, jnp.full_like(groups, row)]
            mask = groups < scale_ref.shape[0] if size % it.size else None
            plgpu.store(target, scale, mask=mask)
        most, least = jnp.float32(FP8_MAX), jnp.float32(-FP8_MAX)
        scaled = it / element_scale
        scaled = jnp.where(scaled > most, most, jnp.where(scaled < least, least, scaled))
        target = values_ref.at[jnp.full_like(columns, row), columns]
        mask = columns < size if size % it.size else None
        plgpu.store(target, scaled.astype(FP8), mask=mask)
    if not grouped:
        plgpu.store(scale_ref.at[row], scales[0])


def _load_max(ref):
    """Of a few positive numbers."""
    index = jnp.arange(pl.next_power_of_2(ref.shape[0]), dtype=jnp.int32)
    return jnp.max(plgpu.load(ref.at[index], mask=index < ref.shape[0], other=0))
