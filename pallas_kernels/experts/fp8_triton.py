"""Expert GEMMs of FP8 matrices in Pallas Triton.

Grid (tile, block of columns). A tile is up to `tile_rows` rows of one expert; `triton.expert_tiles`
packs the tiles. One program computes:

    for step in depth:
        sums += x tile @ weight tile.T    times the scales of the group, if groups have scales
    out = activation(sums)                after the scales of rows and outputs, if they have scales

The gated GEMM loads the rows of the tokens through `Routing.order`. The program converts the tiles
to float16 before the product. This conversion is exact, and one instruction converts two numbers.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.experts.triton import (
    HEADER_SIZE,
    TILE_FIELDS,
    choices,
    combine_rows,
    expert_tiles,
    max_tiles,
)
from pallas_kernels.types import FP8_GROUP_SIZE

# Each program computes `_COLUMNS` columns. `FP8_GROUP_SIZE` must be a multiple of `_COLUMNS`, so
# that all columns of a program have the same scale per block of the weight.
_COLUMNS = 64
# Each step of the loop over the contracted axis (the depth) covers `_DEPTH` indices of this axis.
# `FP8_GROUP_SIZE` must be a multiple of `_DEPTH`, so that a step needs one scale per row.
_DEPTH = 64
_PRODUCT_DTYPE = jnp.float16


def gated_gemm(x, weight, x_scale, weight_scale, routing, *, dtype, tile_rows, interpret: bool):
    """Return the rows [R, F] of the gated FP8 GEMM, sorted by expert.

    Args:
        x: FP8 rows of the tokens [T, D].
        weight: FP8 weights of all experts [E, 2 F, D].
        x_scale: Scales [T] of the rows, or [T, groups] of groups of `FP8_GROUP_SIZE` columns.
        weight_scale: Scales [E, 2 F] of the weight rows. If `x_scale` has groups, scales
            [E, blocks, groups] of blocks of `FP8_GROUP_SIZE` rows by `FP8_GROUP_SIZE` columns.
        routing: The `Routing`.
        dtype: Dtype of the result. Rows that are routed to no expert of this device are undefined.
        tile_rows: Rows per tile: at least 16, a power of two.
        interpret: Whether to run the kernels in interpret mode.
    """
    arguments = x, weight, x_scale, weight_scale, routing.offsets, routing.order
    num_choices = routing.experts.shape[1]
    options = {"dtype": dtype, "tile_rows": tile_rows, "interpret": interpret}
    return _expert_gemm(*arguments, num_choices=num_choices, **options)


def down_gemm(x, weight, x_scale, weight_scale, routing, *, dtype, tile_rows, interpret: bool):
    """Apply the FP8 down projections, and return the weighted sum [T, D] over each token's experts.

    Args:
        x: FP8 rows [R, F], sorted by expert: one row per token and chosen expert.
        weight: FP8 weights of all experts [E, D, F].
        x_scale: Scales [R] of the rows, or [R, groups] of groups of `FP8_GROUP_SIZE` columns.
        weight_scale: Scales [E, D] of the weight rows. If `x_scale` has groups, scales
            [E, blocks, groups] of blocks of `FP8_GROUP_SIZE` rows by `FP8_GROUP_SIZE` columns.
        routing, dtype, tile_rows, interpret: See `gated_gemm`.
    """
    arguments = x, weight, x_scale, weight_scale, routing.offsets
    options = {"tile_rows": tile_rows, "interpret": interpret}
    rows = _expert_gemm(*arguments, num_choices=None, dtype=dtype, **options)
    return combine_rows(rows, *choices(routing), dtype=dtype, interpret=interpret)


# The jit makes layers with the same shapes share one trace and one lowering.
@functools.partial(jax.jit, static_argnames=("num_choices", "dtype", "tile_rows", "interpret"))
def _expert_gemm(
    x,
    weight,
    x_scale,
    weight_scale,
    offsets,
    order=None,
    *,
    num_choices,
    dtype,
    tile_rows,
    interpret,
):
    """Return the rows of the product, sorted by expert; the product is gated if `order` is given.

    See `gated_gemm` for the arguments. `num_choices` is None without `order`.
    """
    num_rows = x.shape[0] if order is None else order.shape[0]
    tiles = expert_tiles(offsets, num_rows=num_rows, tile_rows=tile_rows, interpret=interpret)
    width = weight.shape[1] // (1 if order is None else 2)
    num_tiles = max_tiles(num_rows, weight.shape[0], tile_rows)
    return pl.pallas_call(
        functools.partial(_kernel, num_choices=num_choices, tile_rows=tile_rows),
        out_shape=jax.ShapeDtypeStruct((num_rows, width), dtype),
        grid=(num_tiles, pl.cdiv(width, _COLUMNS)),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="fp8_expert_gemm" if order is None else "fp8_expert_gated_gemm",
    )(x, weight, x_scale.T, weight_scale, tiles, *(() if order is None else (order,)))


def _kernel(
    x_ref, weight_ref, x_scale_ref, weight_scale_ref, tiles_ref, *refs, num_choices, tile_rows
):
    *order_refs, out_ref = refs
    depth, width, tile = x_ref.shape[1], out_ref.shape[1], pl.program_id(0)
    first_column = pl.program_id(1) * _COLUMNS
    num_factors, is_grouped = weight_ref.shape[1] // width, len(x_scale_ref.shape) == 2
    blocks_per_factor = pl.cdiv(width, FP8_GROUP_SIZE)

    def broadcast(index, axis, shape):
        return lax.broadcast_in_dim(index, shape, (axis,))

    @pl.when(tile < tiles_ref[0])
    def _multiply():
        first = HEADER_SIZE + tile * TILE_FIELDS
        expert, row, count = (tiles_ref[first + field] for field in range(3))
        member = jnp.arange(tile_rows, dtype=jnp.int32)
        is_row, rows = member < count, row + member
        x_rows = _rows_of_x(order_refs, rows, is_row, num_choices)
        columns = jnp.arange(_COLUMNS, dtype=jnp.int32) + first_column
        is_column = columns < width

        def load(ref, index, mask, inner):
            """Return a tile as `_PRODUCT_DTYPE`, with zeros past the end of the contracted axis.

            Rows of the tile that `mask` excludes are undefined: they only change results that the
            kernel does not store.
            """
            if depth % _DEPTH == 0:
                return plgpu.load(ref.at[index], mask=mask).astype(_PRODUCT_DTYPE)
            is_inner = jnp.broadcast_to((inner < depth)[None, :], mask.shape)
            values = plgpu.load(ref.at[index], mask=mask & is_inner).astype(_PRODUCT_DTYPE)
            return jnp.where(is_inner, values, 0)

        def load_rows(inner):
            shape = tile_rows, _DEPTH
            index = broadcast(x_rows, 0, shape), broadcast(inner, 1, shape)
            return load(x_ref, index, broadcast(is_row, 0, shape), inner)

        def load_weight(inner, factor):
            shape = _COLUMNS, _DEPTH
            index = (
                jnp.full(shape, expert),
                broadcast(columns + factor * width, 0, shape),
                broadcast(inner, 1, shape),
            )
            return load(weight_ref, index, broadcast(is_column, 0, shape), inner)

        def group_scales(step):
            """Return, for each weight (gate and up, or only down), a scale per row of the product.

            A product's scale is the scale of x's row times the scale of the weight's block. Column
            `step * _DEPTH` of x is in a group of `FP8_GROUP_SIZE` columns, and both scales are the
            scales for this group.
            """
            group = lax.div(step, jnp.int32(FP8_GROUP_SIZE // _DEPTH))
            source = x_scale_ref.at[jnp.full_like(x_rows, group), x_rows]
            row_scales = plgpu.load(source, mask=is_row, other=0)
            block = lax.div(first_column, jnp.int32(FP8_GROUP_SIZE))
            blocks = [block + factor * blocks_per_factor for factor in range(num_factors)]
            return [row_scales * weight_scale_ref[expert, block, group] for block in blocks]

        def add(step, sums):
            inner = jnp.arange(_DEPTH, dtype=jnp.int32) + step * _DEPTH
            x = load_rows(inner)
            scales = group_scales(step) if is_grouped else [None] * num_factors
            results = []
            for factor, (total, scale) in enumerate(zip(sums, scales, strict=True)):
                weight = load_weight(inner, factor)
                product = plgpu.dot(x, weight.T)
                results.append(total + (product if scale is None else product * scale[:, None]))
            return results

        zeros = [jnp.zeros((tile_rows, _COLUMNS), jnp.float32)] * num_factors
        sums = lax.fori_loop(0, pl.cdiv(depth, _DEPTH), add, zeros)
        if not is_grouped:
            row_scales = plgpu.load(x_scale_ref.at[x_rows], mask=is_row, other=0)
            for factor, total in enumerate(sums):
                source = weight_scale_ref.at[
                    jnp.full_like(columns, expert), columns + factor * width
                ]
                scales = plgpu.load(source, mask=is_column, other=0)
                sums[factor] = total * row_scales[:, None] * scales[None, :]
        result, *up = sums
        if up:
            result *= up[0] / (1 + jnp.exp(-result))
        shape = tile_rows, _COLUMNS
        target = out_ref.at[broadcast(rows, 0, shape), broadcast(columns, 1, shape)]
        plgpu.store(target, result.astype(out_ref.dtype), mask=is_row[:, None] & is_column[None, :])


def _rows_of_x(order_refs, rows, is_row, num_choices):
    """Return, for each output row, the index of the row of x that is multiplied.

    Args:
        order_refs: A list with the reference to `Routing.order`, in the gated GEMM. Empty in the
            down GEMM: the rows of x and of the output then have the same order.
        rows: Indices of output rows, which are sorted by expert.
        is_row: Mask of `rows`. The result is 0 for masked rows in the gated GEMM.
        num_choices: Number of experts per token.
    """
    if not order_refs:
        return rows
    pairs = plgpu.load(order_refs[0].at[rows], mask=is_row, other=0)
    return lax.div(pairs, jnp.int32(num_choices))
