"""Expert GEMMs of FP8 matrices in Pallas Mosaic GPU, for Hopper.

The kernel computes the work items of hopper.py's `ProgramItems`. The weight is stored as [outputs,
inputs], because the tensor core multiplies FP8 matrices only if the depth is contiguous in both. A
stage covers a group of 128 of the depth (128 bytes):

    one loader and one or two consumers, each computing 64 outputs, or 64 of gate and 64 of up:
        for item in work items of the program:
            for stage in depth: sums += weight tile @ (rows of x).T    times the group's scales
            out rows = activation(sums).T, stored through shared memory

If each row and each output has one scale, both scales multiply the final sums. Otherwise each group
has different scales. In most cases, the kernel adds the products of each group in float32 outside
the tensor core, as in the few-rows kernel of `gemm/fp8_hopper.py`. The exception is a tile with
more than 64 rows, which has one scale per row. The tensor core adds the products of this tile,
because the registers cannot hold both products and sums.

A tile begins at any row, and a gated tile has rows of any tokens. So each thread loads the scales
of its rows one by one.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import hopper_ops as ops
from pallas_kernels import hopper_pipeline as pipelines
from pallas_kernels.experts import triton
from pallas_kernels.experts.hopper import multiply_rows
from pallas_kernels.experts.tuning import ExpertsConfig
from pallas_kernels.gemm.fp8_hopper import (
    CONSUMER_OUTPUTS,
    GROUP_DEPTH,
    accumulate_promoted,
    apply_scales,
    load_scales,
)

# Layout of an array that has one element for each row of a tile.
_ROW_LAYOUT = plgpu.Layout.WGMMA.reduce(0)
# If each row has one scale, the kernel adds the products of a tile of at most `_MAX_PROMOTED_ROWS`
# rows in float32, outside the tensor core. In a larger tile, the tensor core adds the products,
# because the registers cannot hold both products and sums.
_MAX_PROMOTED_ROWS = 64


def gated_gemm(x, weight, x_scale, weight_scale, routing, *, dtype, config: ExpertsConfig):
    """Return the rows [R, F] of the gated FP8 GEMM, sorted by expert.

    See `fp8_triton.gated_gemm` for the arguments. `config` has the launch parameters.
    """
    operands = x, weight, x_scale, weight_scale
    return _multiply(operands, routing, gated=True, dtype=dtype, config=config)


def down_gemm(x, weight, x_scale, weight_scale, routing, *, dtype, config: ExpertsConfig):
    """Apply the FP8 down projections, and return the weighted sum [T, D] over each token's experts.

    See `fp8_triton.down_gemm` for the arguments. `config` has the launch parameters.
    """
    operands = x, weight, x_scale, weight_scale
    rows = _multiply(operands, routing, gated=False, dtype=dtype, config=config)
    return triton.combine_rows(rows, *triton.choices(routing), dtype=dtype)


def _multiply(operands, routing, *, config, **options):
    block_outputs = config.num_consumers * CONSUMER_OUTPUTS
    options |= {"weight_tiles": (config.num_blocks, block_outputs, GROUP_DEPTH), "config": config}
    return multiply_rows(_kernel, operands, routing, **options)


def _kernel(items, weight_ref, x_scale_ref, weight_scale_ref, *, weight_smem):
    (num_blocks, block_outputs), tile_rows = weight_smem.shape[1:3], items.config.tile_rows
    width, is_grouped = items.out_ref.shape[1], len(x_scale_ref.shape) == 2
    num_steps, num_factors = weight_ref.shape[1] // GROUP_DEPTH, 1 + items.is_gated
    # In a gated GEMM, a tile has two blocks: the same output columns of gate and of up. Otherwise
    # the blocks of a tile have neighbouring output columns.
    blocks = [(b, 0) if items.is_gated else (0, b * block_outputs) for b in range(num_blocks)]
    # With two consumers, the loader gives some of its registers to the consumers, for their sums.
    pipeline = items.pipeline(num_steps, moves_registers=items.config.num_consumers > 1)

    def load_weights(item, step, stage):
        depth_slice = pl.ds(step * GROUP_DEPTH, GROUP_DEPTH)
        for block, (factor, offset) in enumerate(blocks):
            first = (item.expert * num_factors + factor) * width + item.column + offset
            stage.copy(weight_ref.at[pl.ds(first, block_outputs), depth_slice], weight_smem, block)

    items.run_loader(pipeline, load_weights)

    @pipeline.consumers
    def _compute():
        own_first = items.ring.warp_group * CONSUMER_OUTPUTS
        own_tile, shape = pl.ds(own_first, CONSUMER_OUTPUTS), (CONSUMER_OUTPUTS, tile_rows)

        def operands(stage, group=0):
            del group  # a stage has one group
            x_tile = items.x_views[0].at[stage].transpose((1, 0))
            return [(weight_smem.at[stage, block, own_tile], x_tile) for block in range(num_blocks)]

        def grouped_sums(item, steps, firsts):
            x_rows, blocks_per_factor = _rows_of_x(items, item), pl.cdiv(width, GROUP_DEPTH)

            def group_scales(step, _):
                row_scales = _gather_scales(x_scale_ref, x_rows, step)
                scales = []
                for factor, first in firsts:
                    block = (item.expert * num_factors + factor) * blocks_per_factor
                    block += lax.div(first, jnp.int32(GROUP_DEPTH))
                    scales.append(row_scales * weight_scale_ref[block * num_steps + step])
                yield scales

            return accumulate_promoted(steps, 1, operands, shape, group_scales)

        def scaled_sums(item, steps, firsts):
            if tile_rows <= _MAX_PROMOTED_ROWS:
                sums = accumulate_promoted(steps, 1, operands, shape, None)
            else:
                sums = steps.accumulate(operands, shape, num_blocks)
            # Compute the row indices only here, because the registers cannot hold both the row
            # indices of a large tile and the accumulators.
            row_scales = _gather_scales(x_scale_ref, _rows_of_x(items, item), jnp.int32(0))
            output_scales = []
            for factor, first in firsts:
                start = (item.expert * num_factors + factor) * width + first
                own_scales = weight_scale_ref.at[pl.ds(start, CONSUMER_OUTPUTS)]
                output_scales.append(load_scales(own_scales, 0))
            return [
                apply_scales(total, scales, row_scales)
                for total, scales in zip(sums, output_scales, strict=True)
            ]

        def compute(steps):
            item = steps.locate()
            firsts = [(factor, item.column + offset + own_first) for factor, offset in blocks]
            results = (grouped_sums if is_grouped else scaled_sums)(item, steps, firsts)
            results = [pipelines.apply_activation(results)] if items.is_gated else results
            items.store(results, item, lambda block: item.column + blocks[block][1] + own_first)

        pipeline.compute_tiles(compute)


def _rows_of_x(items, item):
    """Return, for each row of a tile, the index of the row of x that the kernel multiplies.

    `item` is the `Item` of the tile. The index is 0 for rows past the end of the tile.
    """
    shape = (items.config.tile_rows,)
    index = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=_ROW_LAYOUT)
    if not items.is_gated:
        return jnp.where(index < item.count, item.row + index, 0)

    def body(index, order, row, count):
        [[pair]] = ops.load([ops.WordLoad(ops.offset(order, row + index, 4), 1, index < count)])
        return pair // items.num_choices

    types = plgpu.RefType(), ops.SCALAR_LAYOUT, ops.SCALAR_LAYOUT
    options = {"arg_types": types, "layout": _ROW_LAYOUT, "dtype": jnp.int32}
    return ops.map_elements(body, index, items.order_ref, item.row, item.count, **options)


def _gather_scales(x_scale_ref, x_rows, group):
    """Return the scales of rows of x, in a layout that can be broadcast along axis 1 of the sums.

    Args:
        x_scale_ref: Scales [rows of x], or [groups, rows of x] if each group of `GROUP_DEPTH`
            columns of a row has a scale.
        x_rows: Indices of rows of x.
        group: Index of the group; 0 if each row has one scale.
    """
    num_rows = x_scale_ref.shape[-1]

    def body(x_row, scales, group):
        address = ops.offset(scales, group * num_rows + x_row, 4)
        return ops.load_float(address)

    types = plgpu.RefType(), ops.SCALAR_LAYOUT
    options = {"arg_types": types, "layout": _ROW_LAYOUT, "dtype": jnp.float32}
    return ops.map_elements(body, x_rows, x_scale_ref, group, **options)
