"""FP8 GEMMs in Pallas Mosaic GPU for Hopper: few rows or many rows, by one weight or gated.

The kernels use the pipeline of `hopper_pipeline.py`. They resemble the ones in hopper.py, but the
weight is stored as [outputs, inputs]: the tensor core multiplies FP8 matrices only if the depth is
contiguous in both. A stage covers a group of 128 of the depth (128 bytes); with few rows a stage
may cover several groups:

    few rows    grid (split of the depth, tile of rows, tile of 64 to 256 outputs)
                one to four consumers, each computing 64 outputs:
                    for stage in depth: sums[64, rows] += weight tile @ x tile.T
    many rows   grid (program,), one program per SM, each taking tiles of 128 rows
                two consumers, each computing 64 rows:
                    for tile in tiles of the program:
                        for stage in depth: sums[64, 128] += x tile @ weight tile.T
                A tile has one or two blocks of 128 outputs; a gated GEMM has one block of gate and
                one block of up.

If each row and each output has one scale, both scales multiply the final sums. With block scales,
each group has different scales, which the kernels load as follows:

    row scales      The loader copies them with the tile of x.
    block scales    With few rows, the loader copies all of them to shared memory before the first
                    stage. A load one stage ahead into a register would not help there: the end of
                    the loop body moves the value to another register, which waits for the load.
                    With many rows, the consumers load them one stage ahead.

With few rows, the kernel adds the products of each group in float32 outside the tensor core. With
many rows, the tensor core adds them and keeps about 14 bits of the sums (DeepSeek-AI 2024,
arXiv:2412.19437, section 3.3.2), as in cuBLASLt.
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
from pallas_kernels import hopper_pipeline as pipelines
from pallas_kernels.gemm.tuning import (
    SCALE_COPY_ALIGNMENT,
    FewRowsConfig,
    ManyFP8RowsConfig,
    few_rows_scale_shapes,
)
from pallas_kernels.hopper_pipeline import CONSUMER_ROWS, NUM_CONSUMERS, TILE_COLUMNS, TILE_ROWS
from pallas_kernels.types import FP8_GROUP_SIZE

# `GROUP_DEPTH` columns of x share a scale. A group of a row has 128 bytes, the widest swizzle.
GROUP_DEPTH = FP8_GROUP_SIZE
# A consumer warpgroup of the few-rows kernel computes `CONSUMER_OUTPUTS` outputs.
CONSUMER_OUTPUTS = 64
STORE_COLUMNS = 64  # The many-rows kernel stores `STORE_COLUMNS` columns at a time.


def few_rows_gemm(x, weight, x_scale, weight_scale, *, gated, dtype, config: FewRowsConfig):
    """Return the scaled FP8 product of few rows by a weight, as split-K partials.

    Args:
        x: FP8 rows [T, C].
        weight: FP8 weight [D, C]. If `gated`, the rows of the gate projection come before the rows
            of the up projection.
        x_scale, weight_scale: Either scales [T] of the rows and [D] of the outputs; or scales
            [T, groups] of groups of 128 columns, and [blocks, groups] of blocks of 128 x 128.
        gated: Whether to return silu(gate) * up, as one partial with D / 2 columns.
        dtype: Dtype of a single partial; several partials are float32.
        config: Launch parameters.
    """
    is_grouped = x_scale.ndim == 2
    # The transpose makes the scales of the rows of a tile contiguous.
    scale = x_scale.T if is_grouped else x_scale
    return _few_rows_gemm(x, weight, scale, weight_scale, gated=gated, dtype=dtype, config=config)


def many_rows_gemm(x, weight, x_scale, weight_scale, *, gated, dtype, config: ManyFP8RowsConfig):
    """Return the scaled FP8 product of many rows by a weight.

    The number of rows must be a multiple of 128. The result is one array, not split-K partials. See
    `few_rows_gemm` for the arguments.
    """
    is_grouped = x_scale.ndim == 2
    scale = x_scale.T if is_grouped else x_scale
    return _many_rows_gemm(x, weight, scale, weight_scale, gated=gated, dtype=dtype, config=config)


# Because of this `jit`, layers with the same shapes share one trace and one lowering.
@functools.partial(jax.jit, static_argnames=("gated", "dtype", "config"))
def _few_rows_gemm(x, weight, x_scale, weight_scale, *, gated, dtype, config):
    (rows, depth), num_factors, num_consumers = x.shape, 1 + gated, config.num_consumers
    width, is_grouped = weight.shape[0] // num_factors, x_scale.ndim == 2
    out_dtype = jnp.dtype(dtype if config.num_splits == 1 else jnp.float32)
    stage_depth, split_depth = config.num_groups * GROUP_DEPTH, depth // config.num_splits
    tile_outputs, num_steps = num_consumers * CONSUMER_OUTPUTS, split_depth // stage_depth
    tile = config.tile_rows, config.num_splits * stage_depth, tile_outputs
    num_stages = min(config.num_stages, num_steps)
    pipelines.check_whole_tiles(
        (rows, depth, width), tile, config.num_stages, num_stages < num_steps
    )
    scratch: dict[str, Any] = {
        "x_smem": ops.swizzled_smem((num_stages, config.tile_rows, stage_depth), x.dtype),
        "weight_smem": ops.swizzled_smem(
            (num_stages, num_factors, tile_outputs, stage_depth), x.dtype
        ),
        "out_smem": ops.swizzled_smem(
            (num_consumers, config.tile_rows, CONSUMER_OUTPUTS), out_dtype
        ),
    }
    if is_grouped:
        row_scales_shape, block_scales_shape = few_rows_scale_shapes(config, depth, num_factors)
        scratch["x_scale_smem"] = plgpu.SMEM((num_stages, *row_scales_shape), jnp.float32)
        scratch["weight_scale_smem"] = plgpu.SMEM(block_scales_shape, jnp.float32)
        scratch["scaled"] = plgpu.Barrier(num_arrivals=math.prod(block_scales_shape[:3]))
    call = pipelines.pipelined_kernel(
        functools.partial(_few_rows_kernel, num_steps=num_steps),
        out_type=jax.ShapeDtypeStruct((config.num_splits, rows, width), out_dtype),
        grid={
            "split": config.num_splits,
            "row_tile": rows // config.tile_rows,
            "column_tile": width // tile_outputs,
        },
        num_consumers=num_consumers,
        num_stages=num_stages,
        num_copies=num_factors + 1 + is_grouped,
        scratch=scratch,
        name="fp8_gated_product_hopper" if gated else "fp8_product_hopper",
    )
    num_padding_scales = -weight_scale.shape[1] % SCALE_COPY_ALIGNMENT if is_grouped else 0
    # With the padding, each row of scales begins at a multiple of 16 bytes, and the array ends at
    # such a multiple. Copies to shared memory need this alignment.
    if num_padding_scales:
        weight_scale = jnp.pad(weight_scale, ((0, 0), (0, num_padding_scales)))
    return call(x, weight, x_scale, weight_scale.reshape(-1))


def _few_rows_kernel(
    x_ref,
    weight_ref,
    x_scale_ref,
    weight_scale_ref,
    out_ref,
    *,
    ring,
    x_smem,
    weight_smem,
    out_smem,
    num_steps,
    x_scale_smem: Any = None,
    weight_scale_smem: Any = None,
    scaled: Any = None,
):
    split, consumer = lax.axis_index("split"), ring.warp_group
    _, num_factors, tile_outputs, stage_depth = weight_smem.shape
    num_consumers, tile_rows, _ = out_smem.shape
    rows = pl.ds(lax.axis_index("row_tile") * tile_rows, tile_rows)
    width, num_groups = out_ref.shape[2], stage_depth // GROUP_DEPTH
    first_step, is_grouped = split * num_steps, scaled is not None
    # The copy of block scales begins `num_leading_scales` groups early, so that the copy's start is
    # aligned.
    num_leading_scales = lax.rem(first_step * num_groups, jnp.int32(SCALE_COPY_ALIGNMENT))
    # Two consumers with large accumulators need more registers, so the loader releases some of its
    # registers.
    moves_registers = num_consumers == 2 and num_factors * tile_rows > 128
    registers = pipelines.MANY_ROWS_REGISTERS if moves_registers else None
    pipeline = pipelines.Pipeline(ring, num_steps, registers=registers)

    def first_output(factor):
        return lax.axis_index("column_tile") * tile_outputs + factor * width

    def load_block_scales():
        """Copy all block scales that the program needs to shared memory.

        A copy has a fixed size, so it may also copy scales that no consumer reads.
        """
        all_groups = -(-x_scale_ref.shape[0] // SCALE_COPY_ALIGNMENT) * SCALE_COPY_ALIGNMENT
        first_group, part = first_step * num_groups - num_leading_scales, weight_scale_smem.shape[3]
        for factor, block, i in itertools.product(*map(range, weight_scale_smem.shape[:3])):
            weight_block = lax.div(first_output(factor), FP8_GROUP_SIZE) + block
            first = weight_block * all_groups + first_group + i * part
            source, target = weight_scale_ref.at[pl.ds(first, part)], weight_scale_smem
            plgpu.copy_gmem_to_smem(source, target.at[factor, block, i], scaled)

    def load(_, step, stage):
        depth_slice = pl.ds((first_step + step) * stage_depth, stage_depth)
        for factor in range(num_factors):
            outputs = pl.ds(first_output(factor), tile_outputs)
            stage.copy(weight_ref.at[outputs, depth_slice], weight_smem, factor)
        stage.copy(x_ref.at[rows, depth_slice], x_smem)
        if is_grouped:
            groups = pl.ds((first_step + step) * num_groups, x_scale_smem.shape[1])
            stage.copy(x_scale_ref.at[groups, rows], x_scale_smem)

    @pipeline.loader
    def _load():
        if is_grouped:
            load_block_scales()
        pipeline.load_tiles(load)

    @pipeline.consumers
    def _compute():
        shape = CONSUMER_OUTPUTS, tile_rows
        own_tile = pl.ds(consumer * CONSUMER_OUTPUTS, CONSUMER_OUTPUTS)
        firsts = [
            first_output(factor) + consumer * CONSUMER_OUTPUTS for factor in range(num_factors)
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
            """Yield one list for each group of `GROUP_DEPTH` columns of x in a step.

            The list contains (row scales * block scale) for each weight. A gated GEMM has two
            weights, gate and up.
            """
            part = jnp.int32(weight_scale_smem.shape[3])
            for i in range(num_groups):
                row_scales = load_scales(x_scale_smem.at[stage, i], 1)
                group = num_leading_scales + step * num_groups + i
                at = block, lax.div(group, part), lax.rem(group, part)
                yield [row_scales * weight_scale_smem[f, *at] for f in range(num_factors)]

        if is_grouped:
            block = lax.div(firsts[0], FP8_GROUP_SIZE) - lax.div(first_output(0), FP8_GROUP_SIZE)
            plgpu.barrier_wait(scaled)
        else:  # Load the scales before the GEMM starts, to hide the latency of global memory.
            row_scales = load_scales(x_scale_ref.at[rows], 1)
            output_scales = [load_scales(weight_scale_ref.at[columns], 0) for columns in outputs]

        def compute(steps):
            sums = accumulate_promoted(
                steps, num_groups, operands, shape, scales if is_grouped else None
            )
            if not is_grouped:
                sums = [
                    apply_scales(total, scales, row_scales)
                    for total, scales in zip(sums, output_scales, strict=True)
                ]
            own_out = out_smem.at[consumer]
            pipelines.write_transposed(pipelines.apply_activation(sums), own_out)
            plgpu.copy_smem_to_gmem(own_out, out_ref.at[split, rows, outputs[0]])

        pipeline.compute_tiles(compute)


# Because of this `jit`, layers with the same shapes share one trace and one lowering.
@functools.partial(jax.jit, static_argnames=("gated", "dtype", "config"))
def _many_rows_gemm(x, weight, x_scale, weight_scale, *, gated, dtype, config):
    num_stages, (rows, depth), is_grouped = config.num_stages, x.shape, x_scale.ndim == 2
    num_factors = 2 if gated else config.num_factors
    width, tile_width = weight.shape[0] // (1 + gated), TILE_COLUMNS * (1 if gated else num_factors)
    tile = TILE_ROWS, GROUP_DEPTH, tile_width
    pipelines.check_whole_tiles((rows, depth, width), tile, num_stages, True)
    scratch: dict[str, Any] = {
        "x_smem": ops.swizzled_smem((num_stages, TILE_ROWS, GROUP_DEPTH), x.dtype),
        "weight_smem": ops.swizzled_smem(
            (num_stages, num_factors, TILE_COLUMNS, GROUP_DEPTH), x.dtype
        ),
        "out_smem": ops.swizzled_smem(
            (NUM_CONSUMERS, TILE_COLUMNS // STORE_COLUMNS, CONSUMER_ROWS, STORE_COLUMNS), dtype
        ),
    }
    if is_grouped:
        scratch["scale_smem"] = plgpu.SMEM((num_stages, TILE_ROWS), jnp.float32)
    call = pipelines.pipelined_kernel(
        functools.partial(_many_rows_kernel, gated=gated, num_programs=config.num_programs),
        out_type=jax.ShapeDtypeStruct((rows, width), dtype),
        grid={"program": config.num_programs},
        num_consumers=NUM_CONSUMERS,
        num_stages=num_stages,
        num_copies=1 + num_factors + is_grouped,
        scratch=scratch,
        name="fp8_gated_gemm_hopper" if gated else "fp8_gemm_hopper",
    )
    return call(x, weight, x_scale, weight_scale)


def _many_rows_kernel(
    x_ref,
    weight_ref,
    x_scale_ref,
    weight_scale_ref,
    out_ref,
    *,
    ring,
    x_smem,
    weight_smem,
    out_smem,
    gated,
    num_programs,
    scale_smem: Any = None,
):
    program, (num_rows, depth), width = lax.axis_index("program"), x_ref.shape, out_ref.shape[1]
    num_factors, num_steps = weight_smem.shape[1], depth // GROUP_DEPTH
    # In a gated GEMM, the first `width` rows of the weight are the gate projection, and the next
    # `width` rows are the up projection.
    factor_stride, shape = width if gated else TILE_COLUMNS, (CONSUMER_ROWS, TILE_COLUMNS)
    tile_width = TILE_COLUMNS if gated else TILE_COLUMNS * num_factors
    grid = num_rows // TILE_ROWS, width // tile_width
    num_tiles = pipelines.tiles_of_program(program, num_programs, math.prod(grid))

    def origin(index):
        row, column = pipelines.snake_tile(grid, program, num_programs, index)
        return row * TILE_ROWS, column * tile_width

    def load(origin, step, stage):
        row, column = origin
        rows, depth_slice = pl.ds(row, TILE_ROWS), pl.ds(step * GROUP_DEPTH, GROUP_DEPTH)
        stage.copy(x_ref.at[rows, depth_slice], x_smem)
        for factor in range(num_factors):
            outputs = pl.ds(column + factor * factor_stride, TILE_COLUMNS)
            stage.copy(weight_ref.at[outputs, depth_slice], weight_smem, factor)
        if scale_smem is not None:
            stage.copy(x_scale_ref.at[step, rows], scale_smem)

    registers = pipelines.MANY_ROWS_REGISTERS
    pipeline = pipelines.Pipeline(ring, num_steps, num_tiles, origin, registers)
    pipeline.loader(lambda: pipeline.load_tiles(load))

    @pipeline.consumers
    def _compute():
        own_rows = pl.ds(ring.warp_group * CONSUMER_ROWS, CONSUMER_ROWS)

        def operands(stage):
            x_tile = x_smem.at[stage, own_rows]
            tiles = [weight_smem.at[stage, factor] for factor in range(num_factors)]
            return [(x_tile, tile.transpose((1, 0))) for tile in tiles]

        def rescaled_sums(steps, column):
            """Return the accumulated products of an output tile, times row and block scales."""

            def block_scales(step):
                group = jnp.minimum(step, num_steps - 1)
                firsts = [column + factor * factor_stride for factor in range(num_factors)]
                return [weight_scale_ref[lax.div(first, FP8_GROUP_SIZE), group] for first in firsts]

            def scales(blocks, stage):
                by_row = plgpu.Layout.WGMMA.reduce(1)
                row_scales = ops.load_with_layout(scale_smem.at[stage, own_rows], by_row)
                return [row_scales * scale for scale in blocks]

            return _accumulate_rescaled(steps, operands, shape, block_scales, scales)

        def scaled(sums, rows, column):
            row_scales = load_scales(x_scale_ref.at[rows], 0)
            outputs = [pl.ds(column + f * factor_stride, TILE_COLUMNS) for f in range(num_factors)]
            return [
                apply_scales(total, row_scales, load_scales(weight_scale_ref.at[columns], 1))
                for total, columns in zip(sums, outputs, strict=True)
            ]

        def compute(steps):
            (row, column), is_grouped = steps.locate(), scale_smem is not None
            if is_grouped:
                sums = rescaled_sums(steps, column)
            else:
                sums = steps.accumulate(operands, shape, num_factors)
            rows = pl.ds(row + ring.warp_group * CONSUMER_ROWS, CONSUMER_ROWS)
            sums = sums if is_grouped else scaled(sums, rows, column)
            results = [pipelines.apply_activation(sums)] if gated else sums
            pipelines.store_row_tiles(results, out_smem, out_ref, ring.warp_group, rows, column)

        pipeline.compute_tiles(compute)


def accumulate_promoted(steps, num_groups, operands, shape, scales):
    """Add the products of all groups in float32, outside the tensor core.

    If the accumulators of a stage fit in registers, the kernel starts all products of the stage
    before it waits for them. Otherwise the kernel waits for each product before the next.

    Args:
        steps: Steps of the tile.
        num_groups: Number of groups per stage.
        operands: Function that takes a stage and a group, and returns a list of pairs of tiles. The
            tensor core multiplies the two tiles of each pair.
        shape: Shape of the product of a pair.
        scales: Function that takes a step and the step's stage, and returns for each group a list
            with the scales of each product. None if groups have no scales.

    Returns:
        One array of sums per pair.
    """
    zeros = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
    count = len(operands(0, 0))

    def multiply(factors, *sums):
        for own_sums, own_factors in zip(sums, factors, strict=True):
            plgpu.wgmma(own_sums, *own_factors)
        # Reading the accumulators makes the warpgroup wait until the tensor core has finished.
        return [own_sums[...] for own_sums in sums]

    def scaled(part, scale):
        return part if scale is None else part * lax.broadcast_in_dim(scale, shape, (1,))

    def add(step, totals):
        stage = steps.stage_index(step)
        steps.wait(stage)
        own_scales = scales(step, stage) if scales else [[None] * count] * num_groups
        own_scales = [scale for group_scales in own_scales for scale in group_scales]
        factors = [pair for group in range(num_groups) for pair in operands(stage, group)]
        batch_size = len(factors) if math.prod(shape) <= CONSUMER_OUTPUTS * 64 else 1
        parts = []
        for first in range(0, len(factors), batch_size):
            batch = factors[first : first + batch_size]
            accumulators = [plgpu.ACC(shape, jnp.float32)] * len(batch)
            parts += pl.run_scoped(functools.partial(multiply, batch), *accumulators)
        steps.release(stage)
        for i, (part, scale) in enumerate(zip(parts, own_scales, strict=True)):
            totals[i % count] += scaled(part, scale)
        return totals

    return lax.fori_loop(0, steps.count, add, [zeros] * count)


def _accumulate_rescaled(steps, operands, shape, load, scales):
    """Add the products of all stages, each multiplied by the stage's scales.

    While the tensor core adds the products of stage i, each accumulator holds a sum divided by
    scale(i). The kernel therefore multiplies each accumulator by scale(i - 1) / scale(i) before
    stage i. This takes one operation per sum and stage. Multiplying the products by their scales
    would take three operations.

    The divisor is at least 2 ** -60 times the largest scale so far, so the accumulators cannot
    overflow. If the scale of a stage is below this bound, the products of that stage are smaller
    than the rounding error of the sums. The kernel adds these products as if their scale were the
    bound.

    Args:
        steps: Steps of the tile.
        operands: Function that takes a stage, and returns a list of pairs of tiles. The tensor core
            multiplies the two tiles of each pair.
        shape: Shape of the product of a pair.
        load: Function that loads the block scales of a step. The loop calls it one step ahead.
        scales: Function that takes the result of `load` and a stage, and returns for each pair the
            scales of the rows.

    Returns:
        One array of scaled sums per pair.
    """
    by_row = plgpu.Layout.WGMMA.reduce(1)

    def vector(value):
        return plgpu.layout_cast(jnp.full(shape[:1], value, jnp.float32), by_row)

    def times(sums, row_scales):
        return sums * lax.broadcast_in_dim(row_scales, shape, (0,))

    def add(step, carry):
        (totals, sum_scales, largest, loaded), stage = carry, steps.stage_index(step)
        ahead = load(step + 1)
        steps.wait(stage)
        stage_scales = scales(loaded, stage)
        largest = [jnp.maximum(a, b) for a, b in zip(largest, stage_scales, strict=True)]
        new = [jnp.maximum(a, b * 2.0**-60) for a, b in zip(stage_scales, largest, strict=True)]
        rescaled = [
            times(total, sum_scale / new_sum_scale)
            for total, sum_scale, new_sum_scale in zip(totals, sum_scales, new, strict=True)
        ]

        def multiply(sums):
            for own_sums, factors in zip(sums, operands(stage), strict=True):
                plgpu.wgmma(own_sums, *factors)
            plgpu.wgmma_wait(0)
            steps.release(stage)

        return continue_accumulation(multiply, rescaled), new, largest, ahead

    count = len(operands(0))
    zeros = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
    first = [zeros] * count, [vector(1.0)] * count, [vector(2.0**-40)] * count, load(jnp.int32(0))
    totals, sum_scales, *_ = lax.fori_loop(0, steps.count, add, first)
    return [times(total, sum_scale) for total, sum_scale in zip(totals, sum_scales, strict=True)]


def continue_accumulation(multiply, sums):
    """Initialize accumulators with `sums`, run `multiply` on them, and return their values.

    Args:
        multiply: Function that takes the list of accumulator references and updates them.
        sums: Initial values.
    """
    results: Any = pl.run_state(multiply)([plgpu.ACC.init(total) for total in sums])
    return list(results)  # `run_state` is annotated to return references, but it returns arrays.


def load_scales(ref, axis):
    """Load scales into registers, in a layout that can be broadcast along axis `axis` of the
    sums."""
    return ops.load_with_layout(ref, plgpu.Layout.WGMMA.reduce(1 - axis), optimized=False)


def apply_scales(sums, first, second):
    """Multiply row i of the sums by `first[i]`, and column j by `second[j]`."""
    for axis, scales in enumerate((first, second)):
        sums *= lax.broadcast_in_dim(scales, sums.shape, (axis,))
    return sums
