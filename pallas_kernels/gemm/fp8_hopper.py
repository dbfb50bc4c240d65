"""GEMMs of numbers in FP8 in Pallas Mosaic GPU, for Hopper (compute capability 9.0): of few rows by
a weight [outputs, inputs], and of many; each of one weight, or gated with the activation.

They are the kernels of hopper.py with the weight the other way round, as tensor cores multiply such
numbers: both factors have their depth side by side, 128 numbers of it (128 bytes), of few rows
perhaps several times that, a stage. A loader warpgroup fills a ring of stages in shared memory,
consumer warpgroups multiply:

    few rows    grid (split of the depth, tile of rows, 64 to 256 outputs); one to four consumers of
                64 outputs each: sums[64, rows] += weight tile . (x tile) transposed
    many rows   as many programs as the GPU has SMs take tiles of 128 rows in turn; two consumers of
                64 rows each: sums[64, 128] += x tile . (weight tile) transposed, for one or two
                blocks of 128 outputs, which of a gated GEMM are the gate's and up's

Where a row and an output have one scale each, the sums are multiplied by both at the end. Where 128
numbers have, a stage's sums have scales of their own: a row's come with its tile; a block's are
loaded a stage ahead or, of few rows, all before the first one, into shared memory. (What is loaded
a stage ahead into a register is waited for at the loop's end, which moves it to another one.) Of
few rows each 128 numbers' sums are added to the others in float32, outside the tensor core; of many
the tensor core adds them, whose sums of such numbers keep some 14 bits (DeepSeek-AI 2024,
arXiv:2412.19437, 3.3.2), as cuBLASLt's do.
"""

import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import hopper_ops as ops
from pallas_kernels.gemm.hopper import (
    CONSUMER_ROWS,
    NUM_CONSUMERS,
    SNAKE_TILE_WIDTH,
    accumulate_steps,
    check_whole_tiles,
)
from pallas_kernels.gemm.tuning import (
    SCALE_COPY_ALIGNMENT,
    FewRowsConfig,
    ManyFP8RowsConfig,
    few_rows_scale_shapes,
)
from pallas_kernels.types import FP8_GROUP_SIZE

GROUP_DEPTH = FP8_GROUP_SIZE  # of a stage: the widest swizzle, and what has a scale of its own
CONSUMER_OUTPUTS = 64  # of a consumer of few rows
TILE_COLUMNS = 128  # of a tile of many rows, of each factor; and of a block with a scale
STORE_COLUMNS = 64  # columns written at once


def few_rows_gemm(x, weight, x_scale, weight_scale, *, gated, dtype, config: FewRowsConfig):
    """x @ weight.T in split-K partials; gated: one, of half the width.

    Args:
        x, weight: rows [T, C], and [D, C] or, gated, both factors' outputs one after the other.
        x_scale, weight_scale: [T] and [D], or [T, groups] and [blocks, groups], blocks of 128.
        gated: silu(the first half of the columns) * the second half.
        dtype: of one partial; several are float32.
        config: how.
    """
    is_grouped = x_scale.ndim == 2
    scale = x_scale.T if is_grouped else x_scale  # a tile's are side by side then
    return _few_rows_gemm(x, weight, scale, weight_scale, gated=gated, dtype=dtype, config=config)


def many_rows_gemm(x, weight, x_scale, weight_scale, *, gated, dtype, config: ManyFP8RowsConfig):
    """As `few_rows_gemm`, for tiles of 128 rows and without partials."""
    is_grouped = x_scale.ndim == 2
    scale = x_scale.T if is_grouped else x_scale
    return _many_rows_gemm(x, weight, scale, weight_scale, gated=gated, dtype=dtype, config=config)


@functools.partial(jax.jit, static_argnames=("gated", "dtype", "config"))
def _few_rows_gemm(x, weight, x_scale, weight_scale, *, gated, dtype, config):
    """In a jit of its own, so that a step's layers have it traced and lowered once."""
    (rows, depth), num_factors, num_consumers = x.shape, 1 + gated, config.num_consumers
    width, is_grouped = weight.shape[0] // num_factors, x_scale.ndim == 2
    out_dtype = jnp.dtype(dtype if config.num_splits == 1 else jnp.float32)
    stage_depth, split_depth = config.num_groups * GROUP_DEPTH, depth // config.num_splits
    tile_outputs, num_steps = num_consumers * CONSUMER_OUTPUTS, split_depth // stage_depth
    tile = config.tile_rows, config.num_splits * stage_depth, tile_outputs
    num_stages = min(config.num_stages, num_steps)
    check_whole_tiles((rows, depth, width), tile, config.num_stages, num_stages < num_steps)
    scratch = {
        "x_smem": ops.swizzled_smem((num_stages, config.tile_rows, stage_depth), x.dtype),
        "weight_smem": ops.swizzled_smem(
            (num_stages, num_factors, tile_outputs, stage_depth), x.dtype
        ),
        "out_smem": ops.swizzled_smem(
            (num_consumers, config.tile_rows, CONSUMER_OUTPUTS), out_dtype
        ),
        "full": plgpu.Barrier(num_arrivals=num_factors + 1 + is_grouped, num_barriers=num_stages),
        "empty": plgpu.Barrier(num_arrivals=num_consumers, num_barriers=num_stages),
    }
    if is_grouped:
        of_rows, block_scales_shape = few_rows_scale_shapes(config, depth, num_factors)
        scratch["x_scale_smem"] = plgpu.SMEM((num_stages, *of_rows), jnp.float32)
        scratch["weight_scale_smem"] = plgpu.SMEM(block_scales_shape, jnp.float32)
        scratch["scaled"] = plgpu.Barrier(num_arrivals=math.prod(block_scales_shape[:3]))
    call = plgpu.kernel(
        functools.partial(_few_rows_kernel, num_steps=num_steps),
        out_type=jax.ShapeDtypeStruct((config.num_splits, rows, width), out_dtype),
        grid=(config.num_splits, rows // config.tile_rows, width // tile_outputs),
        grid_names=("split", "row_tile", "column_tile"),
        num_threads=num_consumers + 1,
        thread_name="warp_group",
        scratch_types=scratch,
        compiler_params=ops.COMPILER_PARAMS,
        kernel_name="fp8_gated_product_hopper" if gated else "fp8_product_hopper",
    )
    num_padding_scales = -weight_scale.shape[1] % SCALE_COPY_ALIGNMENT if is_grouped else 0
    if (
        num_padding_scales
    ):  # each row begins where a copy may begin, and so ends what is copied last
        weight_scale = jnp.pad(weight_scale, ((0, 0), (0, num_padding_scales)))
    return call(x, weight, x_scale, weight_scale.reshape(-1))


def _few_rows_kernel(
    x_ref,
    weight_ref,
    x_scale_ref,
    weight_scale_ref,
    out_ref,
    *,
    x_smem,
    weight_smem,
    out_smem,
    full,
    empty,
    num_steps,
    x_scale_smem: Any = None,
    weight_scale_smem: Any = None,
    scaled: Any = None,
):
    warp_group, split = lax.axis_index("warp_group"), lax.axis_index("split")
    (num_stages, num_factors, tile_outputs, stage_depth) = weight_smem.shape
    num_consumers, tile_rows, _ = out_smem.shape
    rows = pl.ds(lax.axis_index("row_tile") * tile_rows, tile_rows)
    width, num_groups = out_ref.shape[2], stage_depth // GROUP_DEPTH
    first_step, is_grouped = split * num_steps, scaled is not None
    num_leading_scales = lax.rem(
        first_step * num_groups, jnp.int32(SCALE_COPY_ALIGNMENT)
    )  # copied with the first
    moves_registers = (
        num_consumers == 2 and num_factors * tile_rows > 128
    )  # registers, of which those lack

    def stage_index(step):
        return lax.rem(step, jnp.int32(num_stages))

    def first_output(factor):
        return lax.axis_index("column_tile") * tile_outputs + factor * width

    def load_block_scales():
        """All that the program's sums need. What is copied beyond them is not looked at."""
        all_groups = -(-x_scale_ref.shape[0] // SCALE_COPY_ALIGNMENT) * SCALE_COPY_ALIGNMENT
        first_group, part = first_step * num_groups - num_leading_scales, weight_scale_smem.shape[3]
        for factor, block, i in itertools.product(*map(range, weight_scale_smem.shape[:3])):
            own = lax.div(first_output(factor), FP8_GROUP_SIZE) + block
            first = own * all_groups + first_group + i * part
            source, target = weight_scale_ref.at[pl.ds(first, part)], weight_scale_smem
            plgpu.copy_gmem_to_smem(source, target.at[factor, block, i], scaled)

    @pl.when(warp_group == num_consumers)
    def _load():
        if moves_registers:
            plgpu.set_max_registers(40, action="decrease")
        if is_grouped:
            load_block_scales()

        def load(step, _):
            stage = stage_index(step)
            pl.when(step >= num_stages)(lambda: plgpu.barrier_wait(empty.at[stage]))
            depth_slice = pl.ds((first_step + step) * stage_depth, stage_depth)
            for factor in range(num_factors):
                source = weight_ref.at[pl.ds(first_output(factor), tile_outputs), depth_slice]
                plgpu.copy_gmem_to_smem(source, weight_smem.at[stage, factor], full.at[stage])
            plgpu.copy_gmem_to_smem(x_ref.at[rows, depth_slice], x_smem.at[stage], full.at[stage])
            if is_grouped:
                groups = pl.ds((first_step + step) * num_groups, x_scale_smem.shape[1])
                source, target = x_scale_ref.at[groups, rows], x_scale_smem.at[stage]
                plgpu.copy_gmem_to_smem(source, target, full.at[stage])

        lax.fori_loop(0, num_steps, load, None)

    @pl.when(warp_group < num_consumers)
    def _compute():
        if moves_registers:
            plgpu.set_max_registers(232, action="increase")
        shape = CONSUMER_OUTPUTS, tile_rows
        own_tile = pl.ds(warp_group * CONSUMER_OUTPUTS, CONSUMER_OUTPUTS)
        firsts = [
            first_output(factor) + warp_group * CONSUMER_OUTPUTS for factor in range(num_factors)
        ]
        outputs = [pl.ds(first, CONSUMER_OUTPUTS) for first in firsts]

        def operands(stage, group):
            depth_slice = pl.ds(group * GROUP_DEPTH, GROUP_DEPTH)
            x_tile = x_smem.at[stage, :, depth_slice].transpose((1, 0))
            return [
                (weight_smem.at[stage, f, own_tile, depth_slice], x_tile)
                for f in range(num_factors)
            ]

        def scales(step, stage):
            """Of a step's groups, each factor's: the rows', times the block's."""
            part = jnp.int32(weight_scale_smem.shape[3])
            for i in range(num_groups):
                row_scales = _load_scales(x_scale_smem.at[stage, i], 1)
                group = num_leading_scales + step * num_groups + i
                at = block, lax.div(group, part), lax.rem(group, part)
                yield [row_scales * weight_scale_smem[f, *at] for f in range(num_factors)]

        if is_grouped:
            block = lax.div(firsts[0], FP8_GROUP_SIZE) - lax.div(first_output(0), FP8_GROUP_SIZE)
            plgpu.barrier_wait(scaled)
        else:  # loaded before the sums, for the weight's come from memory
            row_scales = _load_scales(x_scale_ref.at[rows], 1)
            output_scales = [_load_scales(weight_scale_ref.at[own], 0) for own in outputs]
        args = num_steps, num_groups, stage_index, operands, full, empty, shape
        sums = _accumulate_promoted(*args, scales if is_grouped else None)
        if not is_grouped:
            sums = [
                _apply_scales(total, scales, row_scales)
                for total, scales in zip(sums, output_scales, strict=True)
            ]
        result = plgpu.layout_cast(_apply_activation(sums), plgpu.Layout.WGMMA_TRANSPOSED)
        own_out = out_smem.at[warp_group]
        own_out.transpose((1, 0))[...] = result.astype(out_ref.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(own_out, out_ref.at[split, rows, outputs[0]])
        plgpu.wait_smem_to_gmem(0)


@functools.partial(jax.jit, static_argnames=("gated", "dtype", "config"))
def _many_rows_gemm(x, weight, x_scale, weight_scale, *, gated, dtype, config):
    """In a jit of its own, so that a step's layers have it traced and lowered once."""
    num_stages, (rows, depth), is_grouped = config.num_stages, x.shape, x_scale.ndim == 2
    num_factors = 2 if gated else config.num_factors
    width, tile_width = weight.shape[0] // (1 + gated), TILE_COLUMNS * (1 if gated else num_factors)
    check_whole_tiles(
        (rows, depth, width),
        (NUM_CONSUMERS * CONSUMER_ROWS, GROUP_DEPTH, tile_width),
        num_stages,
        True,
    )
    scratch = {
        "x_smem": ops.swizzled_smem(
            (num_stages, NUM_CONSUMERS * CONSUMER_ROWS, GROUP_DEPTH), x.dtype
        ),
        "weight_smem": ops.swizzled_smem(
            (num_stages, num_factors, TILE_COLUMNS, GROUP_DEPTH), x.dtype
        ),
        "out_smem": ops.swizzled_smem(
            (NUM_CONSUMERS, TILE_COLUMNS // STORE_COLUMNS, CONSUMER_ROWS, STORE_COLUMNS), dtype
        ),
        "full": plgpu.Barrier(num_arrivals=1 + num_factors + is_grouped, num_barriers=num_stages),
        "empty": plgpu.Barrier(num_arrivals=NUM_CONSUMERS, num_barriers=num_stages),
    }
    if is_grouped:
        scratch["scale_smem"] = plgpu.SMEM((num_stages, NUM_CONSUMERS * CONSUMER_ROWS), jnp.float32)
    call = plgpu.kernel(
        functools.partial(_many_rows_kernel, gated=gated, config=config),
        out_type=jax.ShapeDtypeStruct((rows, width), dtype),
        grid=(config.num_programs,),
        grid_names=("program",),
        num_threads=NUM_CONSUMERS + 1,
        thread_name="warp_group",
        scratch_types=scratch,
        compiler_params=ops.COMPILER_PARAMS,
        kernel_name="fp8_gated_gemm_hopper" if gated else "fp8_gemm_hopper",
    )
    return call(x, weight, x_scale, weight_scale)


def _many_rows_kernel(
    x_ref,
    weight_ref,
    x_scale_ref,
    weight_scale_ref,
    out_ref,
    *,
    x_smem,
    weight_smem,
    out_smem,
    full,
    empty,
    gated,
    config,
    scale_smem: Any = None,
):
    warp_group, program = lax.axis_index("warp_group"), lax.axis_index("program")
    (num_rows, depth), width, num_programs = x_ref.shape, out_ref.shape[1], config.num_programs
    num_stages, num_factors = weight_smem.shape[:2]
    tile_rows, factor_stride = (
        x_smem.shape[1],
        width if gated else TILE_COLUMNS,
    )  # columns between factors
    tile_width = TILE_COLUMNS if gated else TILE_COLUMNS * num_factors
    num_steps, grid = depth // GROUP_DEPTH, (num_rows // tile_rows, width // tile_width)
    num_rounds = lax.div(math.prod(grid) + (num_programs - 1) - program, jnp.int32(num_programs))

    def tile_origin(round_index):
        """Its first row and its first column."""
        row, column = plgpu.planar_snake(
            program + round_index * num_programs, grid, 0, SNAKE_TILE_WIDTH
        )
        return row * tile_rows, column * tile_width

    def stage_index(round_index, step):
        return lax.rem(round_index * num_steps + step, jnp.int32(num_stages))

    @pl.when(warp_group == NUM_CONSUMERS)
    def _load():
        plgpu.set_max_registers(40, action="decrease")

        def load_tile(round_index, _):
            row, column = tile_origin(round_index)

            def load(step, _):
                stage = stage_index(round_index, step)

                @pl.when(round_index * num_steps + step >= num_stages)
                def _wait():
                    plgpu.barrier_wait(empty.at[stage])

                rows, depth_slice = pl.ds(row, tile_rows), pl.ds(step * GROUP_DEPTH, GROUP_DEPTH)
                plgpu.copy_gmem_to_smem(
                    x_ref.at[rows, depth_slice], x_smem.at[stage], full.at[stage]
                )
                for factor in range(num_factors):
                    source = weight_ref.at[
                        pl.ds(column + factor * factor_stride, TILE_COLUMNS), depth_slice
                    ]
                    plgpu.copy_gmem_to_smem(source, weight_smem.at[stage, factor], full.at[stage])
                if scale_smem is not None:
                    source, target = x_scale_ref.at[step, rows], scale_smem.at[stage]
                    plgpu.copy_gmem_to_smem(source, target, full.at[stage])

            lax.fori_loop(0, num_steps, load, None)

        lax.fori_loop(0, num_rounds, load_tile, None)

    @pl.when(warp_group < NUM_CONSUMERS)
    def _compute():
        plgpu.set_max_registers(232, action="increase")
        shape, by_row = (CONSUMER_ROWS, TILE_COLUMNS), plgpu.Layout.WGMMA.reduce(1)
        own_rows = pl.ds(warp_group * CONSUMER_ROWS, CONSUMER_ROWS)

        def operands(stage):
            x_tile = x_smem.at[stage, own_rows]
            tiles = [weight_smem.at[stage, factor] for factor in range(num_factors)]
            return [(x_tile, tile.transpose((1, 0))) for tile in tiles]

        def compute_sums(round_index, column):
            own_stage = functools.partial(stage_index, round_index)
            args = num_steps, own_stage, operands, full, empty

            def add_all(*sums):
                results = accumulate_steps(*args, *sums)
                plgpu.barrier_arrive(empty.at[own_stage(num_steps - 1)])
                return results

            if scale_smem is None:
                return pl.run_scoped(add_all, *[plgpu.ACC(shape, jnp.float32)] * num_factors)

            def block_scales(step):
                group = jnp.minimum(step, num_steps - 1)
                firsts = [column + factor * factor_stride for factor in range(num_factors)]
                return [weight_scale_ref[lax.div(first, FP8_GROUP_SIZE), group] for first in firsts]

            def scales(blocks, stage):
                row_scales = ops.load_with_layout(scale_smem.at[stage, own_rows], by_row)
                return [row_scales * own for own in blocks]

            return _accumulate_rescaled(*args, shape, block_scales, scales)

        def compute_tile(round_index, _):
            row, column = tile_origin(round_index)
            sums = compute_sums(round_index, column)
            rows = pl.ds(row + warp_group * CONSUMER_ROWS, CONSUMER_ROWS)
            if scale_smem is None:
                row_scales = _load_scales(x_scale_ref.at[rows], 0)
                own = [pl.ds(column + f * factor_stride, TILE_COLUMNS) for f in range(num_factors)]
                sums = [
                    _apply_scales(total, row_scales, _load_scales(weight_scale_ref.at[columns], 1))
                    for total, columns in zip(sums, own, strict=True)
                ]
            results = [_apply_activation(sums)] if gated else sums
            for factor, result in enumerate(results):
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the columns before
                rounded = result.astype(out_ref.dtype)
                for chunk in range(TILE_COLUMNS // STORE_COLUMNS):
                    own_out = out_smem.at[warp_group, chunk]
                    own_out[...] = rounded[:, chunk * STORE_COLUMNS : (chunk + 1) * STORE_COLUMNS]
                    plgpu.commit_smem()
                    first = column + factor * factor_stride + chunk * STORE_COLUMNS
                    plgpu.copy_smem_to_gmem(own_out, out_ref.at[rows, pl.ds(first, STORE_COLUMNS)])

        lax.fori_loop(0, num_rounds, compute_tile, None)
        plgpu.wait_smem_to_gmem(0)


def _accumulate_promoted(num_steps, num_groups, stage_index, operands, full, empty, shape, scales):
    """Sums in float32 of the products of each stage's groups, one factor after the other. A stage's
    are all begun before one is waited for, if they are few enough to have registers each.

    Args:
        num_steps, stage_of, full, empty: as of `accumulate_steps`.
        num_groups: of a stage.
        operands: of a group of a stage, for each factor.
        shape: of a factor's sums.
        scales: of each group of a step, whose stage is there, the factors'. None: nothing has a
            scale of its own.
    """
    zeros = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
    count = len(operands(0, 0))

    def multiply(factors, *sums):
        for own_sums, own_factors in zip(sums, factors, strict=True):
            plgpu.wgmma(own_sums, *own_factors)
        return [own_sums[...] for own_sums in sums]  # waits

    def scaled(part, scale):
        return part if scale is None else part * lax.broadcast_in_dim(scale, shape, (1,))

    def add(step, totals):
        stage = stage_index(step)
        plgpu.barrier_wait(full.at[stage])
        own_scales = scales(step, stage) if scales else [[None] * count] * num_groups
        own_scales = [scale for of_group in own_scales for scale in of_group]
        factors = [pair for group in range(num_groups) for pair in operands(stage, group)]
        at_once = len(factors) if math.prod(shape) <= CONSUMER_OUTPUTS * 64 else 1
        parts = []
        for first in range(0, len(factors), at_once):
            some = factors[first : first + at_once]
            accumulators = [plgpu.ACC(shape, jnp.float32)] * len(some)
            parts += pl.run_scoped(functools.partial(multiply, some), *accumulators)
        plgpu.barrier_arrive(empty.at[stage])
        for i, (part, scale) in enumerate(zip(parts, own_scales, strict=True)):
            totals[i % count] += scaled(part, scale)
        return totals

    return lax.fori_loop(0, num_steps, add, [zeros] * count)


def _accumulate_rescaled(num_steps, stage_index, operands, full, empty, shape, load, scales):
    """Sums of all stages' products, each stage's times its own scale: kept in units of the scale of
    the latest stage, to which they are brought before its products are added. That is one
    multiplication of each sum, where adding a stage's products to others takes three operations.

    A unit is at least 2 ** -60 of the largest scale before, which no sum outgrows: what a stage of
    smaller scales adds is less than what rounding takes from the others.

    Args:
        num_steps, stage_of, operands, full, empty: as of `accumulate_steps`.
        shape: of a factor's sums.
        load: what is loaded for a step, a step ahead.
        scales: the scales of a stage's rows for each factor, from that and what the stage has.
    """
    by_row = plgpu.Layout.WGMMA.reduce(1)

    def vector(value):
        return plgpu.layout_cast(jnp.full(shape[:1], value, jnp.float32), by_row)

    def times(sums, row_scales):
        return sums * lax.broadcast_in_dim(row_scales, shape, (0,))

    def add(step, carry):
        (totals, sum_scales, largest, loaded), stage = carry, stage_index(step)
        ahead = load(step + 1)
        plgpu.barrier_wait(full.at[stage])
        own = scales(loaded, stage)
        largest = [jnp.maximum(a, b) for a, b in zip(largest, own, strict=True)]
        new = [jnp.maximum(a, b * 2.0**-60) for a, b in zip(own, largest, strict=True)]
        rescaled = [
            times(total, sum_scale / new_sum_scale)
            for total, sum_scale, new_sum_scale in zip(totals, sum_scales, new, strict=True)
        ]

        def multiply(sums):
            for own_sums, factors in zip(sums, operands(stage), strict=True):
                plgpu.wgmma(own_sums, *factors)
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(empty.at[stage])

        return continue_accumulation(multiply, rescaled), new, largest, ahead

    count = len(operands(0))
    zeros = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
    first = [zeros] * count, [vector(1.0)] * count, [vector(2.0**-40)] * count, load(jnp.int32(0))
    totals, sum_scales, *_ = lax.fori_loop(0, num_steps, add, first)
    return [times(total, sum_scale) for total, sum_scale in zip(totals, sum_scales, strict=True)]


def continue_accumulation(multiply, sums):
    """What accumulators that begin as these sums hold after `multiply` of their references."""
    ends: Any = pl.run_state(multiply)([plgpu.ACC.init(total) for total in sums])
    return list(ends)  # arrays, not references as its type says


def _load_scales(ref, axis):
    """The scales of that axis of sums."""
    return ops.load_with_layout(ref, plgpu.Layout.WGMMA.reduce(1 - axis), optimized=False)


def _apply_scales(sums, first, second):
    """Sums times the scales of their first and their second axis."""
    for axis, scales in enumerate((first, second)):
        sums *= lax.broadcast_in_dim(scales, sums.shape, (axis,))
    return sums


def _apply_activation(sums):
    """silu(gate) * up of two sums, the gate finite; or the only one."""
    gate, *up = sums
    return gate * (up[0] / (1 + jnp.exp(-gate))) if up else gate
