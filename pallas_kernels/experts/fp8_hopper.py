"""Expert GEMMs of FP8 matrices in Pallas Mosaic GPU, for Hopper.

The kernel resembles the one in hopper.py: each program, one per SM, takes every `num_programs`-th
item of the packed list of tiles times blocks of outputs. The weight is stored as [outputs, inputs],
because the tensor core multiplies FP8 matrices only if the depth is contiguous in both. A stage
covers a group of 128 of the depth (128 bytes):

    one loader and one or two consumers, each computing 64 outputs, or 64 outputs of two factors:
        for item in items of the program:
            for stage in depth: sums += weight tile @ (rows of x).T    times the group's scales
            out rows = activation(sums).T, stored through shared memory

If each row and each output has one scale, both scales multiply the final sums. The products of each
group are added in float32 outside the tensor core, as in the few-rows kernel of
`gemm/fp8_hopper.py`. Tiles of 128 rows without scales of groups are the exception: the tensor core
adds their products, as in the many-rows kernel, because products and sums do not fit in registers.

A tile begins at any row, and a gated tile has rows of any tokens. So each thread loads the scales
of its rows one by one.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import hopper_ops as ops
from pallas_kernels.experts import triton
from pallas_kernels.experts.hopper import (
    expert_tiles,
    gather_rows,
    num_gathers_ahead,
    row_smem,
    store_rows,
    tile_smem,
    wait_for_gathers,
)
from pallas_kernels.experts.triton import HEADER_SIZE, TILE_FIELDS
from pallas_kernels.experts.tuning import ExpertsConfig
from pallas_kernels.gemm.fp8_hopper import (
    CONSUMER_OUTPUTS,
    GROUP_DEPTH,
    accumulate_promoted,
    apply_activation,
    apply_scales,
    load_scales,
)
from pallas_kernels.gemm.hopper import accumulate_steps, check_whole_tiles

_ROW_LAYOUT = plgpu.Layout.WGMMA.reduce(0)  # of an array with an element for each row of a tile
_MAX_PROMOTED_ROWS = 64  # of a tile; more products do not fit in registers next to the sums


def gated_gemm(x, weight, x_scale, weight_scale, routing, *, dtype, config: ExpertsConfig):
    """Return the rows [R, F] of the gated FP8 GEMM, sorted by expert.

    See `fp8_triton.gated_gemm` for the arguments. `config` has the launch parameters.
    """
    num_choices = routing.experts.shape[1]
    arguments = x, weight, x_scale, weight_scale, expert_tiles(routing, config), routing.order
    return _expert_gemm(*arguments, num_choices=num_choices, dtype=dtype, config=config)


def down_gemm(x, weight, x_scale, weight_scale, routing, *, dtype, config: ExpertsConfig):
    """Return the weighted sum [T, D] of the FP8 products of each token's pairs.

    See `fp8_triton.down_gemm` for the arguments. `config` has the launch parameters.
    """
    arguments = x, weight, x_scale, weight_scale, expert_tiles(routing, config)
    rows = _expert_gemm(*arguments, num_choices=None, dtype=dtype, config=config)
    return triton.combine_rows(rows, *triton.choices(routing), dtype=dtype)


# The jit makes layers with the same shapes share one trace and one lowering.
@functools.partial(jax.jit, static_argnames=("num_choices", "dtype", "config"))
def _expert_gemm(
    x, weight, x_scale, weight_scale, tiles, order=None, *, num_choices, dtype, config
):
    """Return the rows [R, width] of the product, sorted by expert.

    Args:
        x: Rows of the tokens [T, D] if `order` is given, else rows [R, D] sorted by expert.
        weight: Weights of all experts [E, width, D], or [E, 2 width, D] if `order` is given.
        x_scale, weight_scale: Scales of the rows of x and of the weights, see `fp8_triton`.
        tiles: Result of `expert_tiles`. Rows of the product that are in no tile are undefined.
        order: Pair index of each row. If given, the product is gated.
        num_choices: Number of pairs per token; None without `order`.
        dtype: Dtype of the product.
        config: Launch parameters.
    """
    (_, num_outputs, depth), is_gated = weight.shape, order is not None
    num_consumers, num_blocks, tile_rows = config.num_consumers, config.num_blocks, config.tile_rows
    block_outputs, width = num_consumers * CONSUMER_OUTPUTS, num_outputs // (1 + is_gated)
    tile_outputs = block_outputs * (1 if is_gated else num_blocks)
    tile = 8, GROUP_DEPTH, tile_outputs
    check_whole_tiles((tile_rows, depth, width), tile, config.num_stages, True)
    num_rows = x.shape[0] if order is None else order.shape[0]
    num_padded_rows = max(tile_rows, num_rows)  # a copy may not be larger than its source
    if order is None and num_rows < tile_rows:
        x = jnp.pad(x, ((0, tile_rows - num_rows), (0, 0)))
    x_shape = config.num_stages, tile_rows, GROUP_DEPTH
    call = plgpu.kernel(
        functools.partial(_kernel, num_choices=num_choices, config=config),
        out_type=jax.ShapeDtypeStruct((num_padded_rows, width), dtype),
        grid=(config.num_programs,),
        grid_names=("program",),
        num_threads=num_consumers + 1,
        thread_name="warp_group",
        scratch_types={
            # Two views of the same memory: swizzled tiles of 8 rows for the tensor core; and bytes
            # or rows for the loader.
            "x_smem": plgpu.RefUnion(
                ops.swizzled_smem(x_shape, x.dtype),
                plgpu.SMEM(x_shape, x.dtype) if is_gated else row_smem(x_shape, x.dtype),
            ),
            "weight_smem": ops.swizzled_smem(
                (config.num_stages, num_blocks, block_outputs, GROUP_DEPTH), x.dtype
            ),
            # Two views of the same memory: tiles, which the consumers write; and rows, of which any
            # number can be copied.
            "out_smem": plgpu.RefUnion(
                tile_smem((num_consumers, tile_rows, CONSUMER_OUTPUTS), dtype),
                row_smem((num_consumers, tile_rows, CONSUMER_OUTPUTS), dtype),
            ),
            "full": plgpu.Barrier(num_arrivals=num_blocks + 1, num_barriers=config.num_stages),
            "empty": plgpu.Barrier(num_arrivals=num_consumers, num_barriers=config.num_stages),
        },
        compiler_params=ops.COMPILER_PARAMS,
        kernel_name="fp8_expert_gated_gemm_hopper" if is_gated else "fp8_expert_gemm_hopper",
    )
    arguments = x, weight.reshape(-1, depth), x_scale.T, weight_scale.reshape(-1), tiles
    return call(*arguments, *(() if order is None else (order,)))[:num_rows]


def _kernel(
    x_ref,
    weight_ref,
    x_scale_ref,
    weight_scale_ref,
    tiles_ref,
    *refs,
    x_smem,
    weight_smem,
    out_smem,
    full,
    empty,
    num_choices,
    config,
):
    *order_refs, out_ref = refs
    gated, (x_tiles, x_rows) = num_choices is not None, x_smem
    warp_group, program = lax.axis_index("warp_group"), lax.axis_index("program")
    num_stages, num_blocks, block_outputs, _ = weight_smem.shape
    num_consumers, num_programs, tile_rows = (
        config.num_consumers,
        config.num_programs,
        config.tile_rows,
    )
    depth, width, is_grouped = x_ref.shape[1], out_ref.shape[1], len(x_scale_ref.shape) == 2
    num_steps, num_factors = depth // GROUP_DEPTH, 1 + gated
    # The blocks of a gated tile are the same outputs of gate and up, or neighbouring outputs.
    blocks = [(b, 0) if gated else (0, b * block_outputs) for b in range(num_blocks)]
    tile_outputs = block_outputs * (1 if gated else num_blocks)
    num_columns = width // tile_outputs
    num_items = tiles_ref[0] * num_columns
    num_rounds = lax.div(num_items + (num_programs - 1) - program, jnp.int32(num_programs))
    gathers_ahead = num_gathers_ahead(num_stages)
    # The sums of two consumers need some of the loader's registers.
    moves_registers = num_consumers > 1

    def item_fields(round_index):
        """Return the expert, first row, number of rows, and first output of a round's item."""
        item = round_index * num_programs + program
        first = HEADER_SIZE + lax.div(item, jnp.int32(num_columns)) * TILE_FIELDS
        column = lax.rem(item, jnp.int32(num_columns)) * tile_outputs
        return *(tiles_ref[first + field] for field in range(3)), column

    def stage_index(round_index, step):
        return lax.rem(round_index * num_steps + step, jnp.int32(num_stages))

    @pl.when(warp_group == num_consumers)
    def _load():
        if moves_registers:
            plgpu.set_max_registers(56, action="decrease")

        def load_item(round_index, _):
            expert, row, count, column = item_fields(round_index)

            def load(step, _):
                stage, total_steps = stage_index(round_index, step), round_index * num_steps + step

                @pl.when(total_steps >= num_stages)
                def _wait():
                    plgpu.barrier_wait(empty.at[stage])

                depth_slice = pl.ds(step * GROUP_DEPTH, GROUP_DEPTH)
                for block, (factor, offset) in enumerate(blocks):
                    first = (expert * num_factors + factor) * width + column + offset
                    source = weight_ref.at[pl.ds(first, block_outputs), depth_slice]
                    plgpu.copy_gmem_to_smem(source, weight_smem.at[stage, block], full.at[stage])
                if not gated:
                    source = x_ref.at[pl.ds(row, tile_rows), depth_slice]
                    plgpu.copy_gmem_to_smem(source, x_rows.at[stage], full.at[stage])
                    return
                gather_rows(
                    order_refs[0], x_ref, x_rows, row, count, step, stage, num_choices=num_choices
                )

                @pl.when(total_steps >= gathers_ahead)
                def _publish():
                    wait_for_gathers(gathers_ahead)
                    earlier = lax.rem(total_steps - gathers_ahead, jnp.int32(num_stages))
                    plgpu.barrier_arrive(full.at[earlier])

            lax.fori_loop(0, num_steps, load, None)

        lax.fori_loop(0, num_rounds, load_item, None)
        if gated:
            wait_for_gathers(0)
            total_steps = num_rounds * num_steps

            def publish(step, _):
                plgpu.barrier_arrive(full.at[lax.rem(step, jnp.int32(num_stages))])

            first = jnp.maximum(total_steps - gathers_ahead, 0)
            lax.fori_loop(first, total_steps, publish, None)

    @pl.when(warp_group < num_consumers)
    def _compute():
        if moves_registers:
            plgpu.set_max_registers(224, action="increase")
        tile_out, row_out = (view.at[warp_group] for view in out_smem)
        own_first = warp_group * CONSUMER_OUTPUTS
        own_tile, shape = pl.ds(own_first, CONSUMER_OUTPUTS), (CONSUMER_OUTPUTS, tile_rows)

        def operands(stage, group):
            del group  # a stage has one group
            x_tile = x_tiles.at[stage].transpose((1, 0))
            return [(weight_smem.at[stage, block, own_tile], x_tile) for block in range(num_blocks)]

        def add_all(own_stage, *sums):
            own_operands = functools.partial(operands, group=0)
            results = accumulate_steps(num_steps, own_stage, own_operands, full, empty, *sums)
            plgpu.barrier_arrive(empty.at[own_stage(num_steps - 1)])
            return results

        def compute_sums(round_index, expert, row, count, column):
            """Return the scaled sums of each block."""
            own_stage = functools.partial(stage_index, round_index)
            arguments = num_steps, 1, own_stage, operands, full, empty, shape
            firsts = [(factor, column + offset + own_first) for factor, offset in blocks]
            rows_of_x = functools.partial(
                _rows_of_x, order_refs, row, count, tile_rows, num_choices
            )

            def group_scales(x_rows, step, _):
                row_scales = _gather_scales(x_scale_ref, x_rows, step)
                blocks_per_factor = pl.cdiv(width, GROUP_DEPTH)
                scales = []
                for factor, first in firsts:
                    block = (expert * num_factors + factor) * blocks_per_factor
                    block += lax.div(first, jnp.int32(GROUP_DEPTH))
                    scales.append(row_scales * weight_scale_ref[block * num_steps + step])
                yield scales

            if is_grouped:
                return accumulate_promoted(*arguments, functools.partial(group_scales, rows_of_x()))
            if tile_rows <= _MAX_PROMOTED_ROWS:
                sums = accumulate_promoted(*arguments, None)
            else:
                sums = pl.run_scoped(
                    functools.partial(add_all, own_stage),
                    *[plgpu.ACC(shape, jnp.float32)] * num_blocks,
                )
            # The row indices of a large tile would not fit in registers next to the accumulators.
            row_scales = _gather_scales(x_scale_ref, rows_of_x(), jnp.int32(0))
            output_scales = [
                load_scales(
                    weight_scale_ref.at[
                        pl.ds((expert * num_factors + factor) * width + first, CONSUMER_OUTPUTS)
                    ],
                    0,
                )
                for factor, first in firsts
            ]
            return [
                apply_scales(total, scales, row_scales)
                for total, scales in zip(sums, output_scales, strict=True)
            ]

        def compute_item(round_index, _):
            expert, row, count, column = item_fields(round_index)
            results = compute_sums(round_index, expert, row, count, column)
            results = [apply_activation(results)] if gated else results
            for result, (_, offset) in zip(results, blocks, strict=False):
                result = plgpu.layout_cast(result, plgpu.Layout.WGMMA_TRANSPOSED)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # out_smem is free again
                tile_out.transpose((1, 0))[...] = result.astype(out_ref.dtype)
                plgpu.commit_smem()
                store_rows(row_out, out_ref, row, count, column + offset + own_first)

        lax.fori_loop(0, num_rounds, compute_item, None)
        plgpu.wait_smem_to_gmem(0)


def _rows_of_x(order_refs, row, count, tile_rows, num_choices):
    """Return the row of x of each row of a tile; 0 past the last row of the tile.

    Args:
        order_refs: A list with the reference of the pair index of each sorted row; empty if x has
            sorted rows.
        row, count: First sorted row and number of rows of the tile.
        tile_rows: Maximum number of rows of a tile.
        num_choices: Number of pairs per token.
    """
    index = plgpu.broadcasted_iota(jnp.int32, (tile_rows,), 0, layout=_ROW_LAYOUT)
    if not order_refs:
        return jnp.where(index < count, row + index, 0)

    def body(index, order, row, count):
        [[pair]] = ops.load([ops.WordLoad(ops.offset(order, row + index, 4), 1, index < count)])
        return pair // num_choices

    types = plgpu.RefType(), ops.SCALAR_LAYOUT, ops.SCALAR_LAYOUT
    options = {"arg_types": types, "layout": _ROW_LAYOUT, "dtype": jnp.int32}
    return ops.map_elements(body, index, order_refs[0], row, count, **options)


def _gather_scales(x_scale_ref, x_rows, group):
    """Return the scales of rows of x in the layout of the second axis of the sums.

    Args:
        x_scale_ref: Scales of rows, or of groups and rows.
        x_rows: Rows of x.
        group: Index of the group; 0 if rows have one scale.
    """
    num_rows = x_scale_ref.shape[-1]

    def body(x_row, scales, group):
        address = ops.offset(scales, group * num_rows + x_row, 4)
        return ops.load_float(address)

    types = plgpu.RefType(), ops.SCALAR_LAYOUT
    options = {"arg_types": types, "layout": _ROW_LAYOUT, "dtype": jnp.float32}
    return ops.map_elements(body, x_rows, x_scale_ref, group, **options)
