"""GEMMs in Pallas Mosaic GPU for Hopper: few rows (split-K or gated), and many rows (gated or not).

The kernels use the pipeline of `hopper_pipeline.py`. A stage covers 64 of the depth, and the
consumers accumulate in float32:

    few rows    grid (split of the depth, tile of rows, tile of 64 or 128 columns)
                one or two consumers, each computing 64 columns:
                    for stage in depth: sums += (x tile @ weight tile).T
                    out tile = sums.T, stored through shared memory
    many rows   grid (program,), one program per SM, each taking tiles of 128 rows x 128 columns
                two consumers, each computing 64 rows:
                    for tile in tiles of the program:
                        for stage in depth: sums += x tile @ weight tile
                        out tile = activation(sums), stored through shared memory

With few rows the product is transposed, because the tensor core multiplies at least 64 rows: the
weight's columns take the place of the rows, so x may have only 8 rows.

A many-rows tile that is not gated is twice as wide: 256 neighbouring columns in two accumulators.
In a gated GEMM, a consumer accumulates the same columns of both factors, gate and up, and applies
the activation in registers. This writes half as much as a GEMM by both factors, and the activation
reads no memory. With few rows, each SM has at most one program, and the number of bytes in flight
decides the speed. `tuning.py` chooses that number.
"""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import hopper_ops as ops
from pallas_kernels import hopper_pipeline as pipelines
from pallas_kernels.gemm.tuning import FewRowsConfig, ManyRowsConfig
from pallas_kernels.hopper_pipeline import CONSUMER_ROWS, NUM_CONSUMERS, TILE_COLUMNS, TILE_ROWS

# `TILE` is the depth of a pipeline stage and the number of columns per store. In the few-rows
# kernel, it is also the number of columns per consumer. The widest swizzle has 128 bytes, which are
# 64 numbers of 2 bytes.
TILE = 64
# `_many_rows_kernel` multiplies each tile of x by `NUM_FACTORS` blocks of weight columns. A gated
# GEMM has one block of gate and one block of up; other GEMMs have two neighbouring blocks.
NUM_FACTORS = 2


def split_k_gemm(x, weight, *, config: FewRowsConfig):
    """Run the public op `split_k_gemm` in Mosaic GPU, with `config.num_splits` partials."""
    return _few_rows_gemm(x, weight, gated=False, config=config)


def transposed_gemm(x, weight, *, dtype, config: FewRowsConfig):
    """Return x @ weight.T in `dtype`, without splitting the depth."""
    options = {"transposed": True, "dtype": jnp.dtype(dtype), "config": config}
    return _few_rows_gemm(x, weight, gated=False, **options)[0]


def many_rows_gemm(x, weight, *, config: ManyRowsConfig):
    """Return x @ weight for many rows; the number of rows must be a multiple of 128."""
    return _many_rows_gemm(x, weight, gated=False, config=config)


def few_rows_gated_gemm(x, weight, *, config: FewRowsConfig):
    """Run the public op `gated_gemm` in Mosaic GPU for few rows; the depth is not split."""
    return _few_rows_gemm(x, weight.reshape(weight.shape[0], -1), gated=True, config=config)[0]


def many_rows_gated_gemm(x, weight, *, config: ManyRowsConfig):
    """Run the public op `gated_gemm` in Mosaic GPU, for a multiple of 128 rows."""
    return _many_rows_gemm(x, weight.reshape(weight.shape[0], -1), gated=True, config=config)


# Because of this `jit`, layers with the same shapes share one trace and one lowering.
@functools.partial(jax.jit, static_argnames=("gated", "transposed", "dtype", "config"))
def _few_rows_gemm(x, weight, *, gated, config, transposed=False, dtype=None):
    (rows, depth), num_factors, num_consumers = x.shape, 1 + gated, config.num_consumers
    width = weight.shape[0 if transposed else 1] // num_factors
    out_dtype = dtype or (x.dtype if config.num_splits == 1 else jnp.float32)
    tile = config.tile_rows, config.num_splits * TILE, num_consumers * TILE
    num_steps = depth // config.num_splits // TILE
    num_stages = min(config.num_stages, num_steps)
    pipelines.check_whole_tiles(
        (rows, depth, width), tile, config.num_stages, num_stages < num_steps
    )
    call = pipelines.pipelined_kernel(
        functools.partial(_few_rows_kernel, num_steps=num_steps, transposed=transposed),
        out_type=jax.ShapeDtypeStruct((config.num_splits, rows, width), out_dtype),
        grid={
            "split": config.num_splits,
            "row_tile": rows // config.tile_rows,
            "column_tile": width // (num_consumers * TILE),
        },
        num_consumers=num_consumers,
        num_stages=num_stages,
        num_copies=num_factors * num_consumers + 1,
        scratch={
            "x_smem": ops.swizzled_smem((num_stages, config.tile_rows, TILE), x.dtype),
            "weight_smem": ops.swizzled_smem(
                (num_stages, num_factors, num_consumers, TILE, TILE), x.dtype
            ),
            "out_smem": ops.swizzled_smem((num_consumers, config.tile_rows, TILE), out_dtype),
        },
        name="gated_product_hopper" if gated else "product_hopper",
    )
    return call(x, weight)


def _few_rows_kernel(
    x_ref, weight_ref, out_ref, *, ring, x_smem, weight_smem, out_smem, num_steps, transposed
):
    split, consumer = lax.axis_index("split"), ring.warp_group
    (num_factors, num_consumers), tile_rows = weight_smem.shape[1:3], out_smem.shape[1]
    rows = pl.ds(lax.axis_index("row_tile") * tile_rows, tile_rows)
    width = out_ref.shape[2]
    pipeline = pipelines.Pipeline(ring, num_steps)

    def column_slice(consumer, factor=0):
        first = lax.axis_index("column_tile") * (num_consumers * TILE) + consumer * TILE
        return pl.ds(first + factor * width, TILE)

    def load(_, step, stage):
        depth_slice = pl.ds(split * (num_steps * TILE) + step * TILE, TILE)
        for factor, consumer in itertools.product(range(num_factors), range(num_consumers)):
            index = depth_slice, column_slice(consumer, factor)
            source = weight_ref.at[index[::-1] if transposed else index]
            stage.copy(source, weight_smem, factor, consumer)
        stage.copy(x_ref.at[rows, depth_slice], x_smem)

    def operands(stage):
        weights = [weight_smem.at[stage, factor, consumer] for factor in range(num_factors)]
        x_tile = x_smem.at[stage].transpose((1, 0))
        if not transposed:
            weights = [weight.transpose((1, 0)) for weight in weights]
        return [(weight, x_tile) for weight in weights]

    def compute(steps):
        sums = steps.accumulate(operands, (TILE, tile_rows), num_factors)
        own_out = out_smem.at[consumer]
        pipelines.write_transposed(pipelines.apply_activation(sums), own_out)
        plgpu.copy_smem_to_gmem(own_out, out_ref.at[split, rows, column_slice(consumer)])

    pipeline.loader(lambda: pipeline.load_tiles(load))
    pipeline.consumers(lambda: pipeline.compute_tiles(compute))


# Because of this `jit`, layers with the same shapes share one trace and one lowering.
@functools.partial(jax.jit, static_argnames=("gated", "config"))
def _many_rows_gemm(x, weight, *, gated, config):
    num_stages, (rows, depth) = config.num_stages, x.shape
    width = weight.shape[1] // (NUM_FACTORS if gated else 1)
    columns = TILE_COLUMNS * (1 if gated else NUM_FACTORS)
    pipelines.check_whole_tiles((rows, depth, width), (TILE_ROWS, TILE, columns), num_stages, True)
    call = pipelines.pipelined_kernel(
        functools.partial(_many_rows_kernel, num_programs=config.num_programs, gated=gated),
        out_type=jax.ShapeDtypeStruct((rows, width), x.dtype),
        grid={"program": config.num_programs},
        num_consumers=NUM_CONSUMERS,
        num_stages=num_stages,
        num_copies=1 + NUM_FACTORS,
        scratch={
            "x_smem": ops.swizzled_smem((num_stages, TILE_ROWS, TILE), x.dtype),
            "weight_smem": ops.swizzled_smem(
                (num_stages, NUM_FACTORS, TILE, TILE_COLUMNS), x.dtype
            ),
            "out_smem": ops.swizzled_smem(
                (NUM_CONSUMERS, TILE_COLUMNS // TILE, CONSUMER_ROWS, TILE), x.dtype
            ),
        },
        name="gated_gemm_hopper" if gated else "gemm_hopper",
    )
    return call(x, weight)


def _many_rows_kernel(
    x_ref, weight_ref, out_ref, *, ring, x_smem, weight_smem, out_smem, num_programs, gated
):
    program, (num_rows, depth), width = lax.axis_index("program"), x_ref.shape, out_ref.shape[1]
    # A tile reads two blocks of weight columns. In a gated GEMM, the blocks are the same columns of
    # gate and of up. Otherwise the blocks are neighbouring columns of the weight.
    tile_columns = TILE_COLUMNS * (1 if gated else NUM_FACTORS)
    factor_distance = width if gated else TILE_COLUMNS
    grid = num_rows // TILE_ROWS, width // tile_columns
    num_tiles = pipelines.tiles_of_program(program, num_programs, math.prod(grid))

    def origin(index):
        row, column = pipelines.snake_tile(grid, program, num_programs, index)
        return row * TILE_ROWS, column * tile_columns

    def load(origin, step, stage):
        row, column = origin
        rows, depth_slice = pl.ds(row, TILE_ROWS), pl.ds(step * TILE, TILE)
        stage.copy(x_ref.at[rows, depth_slice], x_smem)
        for factor in range(NUM_FACTORS):
            columns = pl.ds(column + factor * factor_distance, TILE_COLUMNS)
            stage.copy(weight_ref.at[depth_slice, columns], weight_smem, factor)

    def operands(stage):
        x_tile = x_smem.at[stage, pl.ds(ring.warp_group * CONSUMER_ROWS, CONSUMER_ROWS)]
        return [(x_tile, weight_smem.at[stage, factor]) for factor in range(NUM_FACTORS)]

    def compute(steps):
        results = steps.accumulate(operands, (CONSUMER_ROWS, TILE_COLUMNS), NUM_FACTORS)
        results = [pipelines.apply_activation(results)] if gated else results
        row, column = steps.locate()
        rows = pl.ds(row + ring.warp_group * CONSUMER_ROWS, CONSUMER_ROWS)
        pipelines.store_row_tiles(results, out_smem, out_ref, ring.warp_group, rows, column)

    registers = pipelines.MANY_ROWS_REGISTERS
    pipeline = pipelines.Pipeline(ring, depth // TILE, num_tiles, origin, registers)
    pipeline.loader(lambda: pipeline.load_tiles(load))
    pipeline.consumers(lambda: pipeline.compute_tiles(compute))
