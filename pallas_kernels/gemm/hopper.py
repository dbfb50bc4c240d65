"""GEMMs in Pallas Mosaic GPU for Hopper: few rows (split-K or gated), and many rows (gated or not).

A program consists of a loader warpgroup and consumer warpgroups. The loader copies tiles of x and
of the weight into a ring of pipeline stages in shared memory. A stage covers 64 of the depth. The
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
weight's columns take the place of the rows, so x may have only 8 rows. With many rows, concurrent
programs take neighbouring tiles, so that most reads hit the L2 cache. The loader fetches the next
tile while the consumers store the current one.

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
from pallas_kernels.gemm.tuning import FewRowsConfig, ManyRowsConfig

# `TILE` is the depth of a pipeline stage, the number of columns per store, and the number of
# columns per consumer of the few-rows kernel. 64 numbers of 2 bytes fill the widest swizzle, 128
# bytes.
TILE = 64
# Constants of the many-rows kernel. A tile has `TILE_COLUMNS` columns per factor.
CONSUMER_ROWS = 64  # rows that a consumer computes
NUM_CONSUMERS = 2
NUM_FACTORS = 2
TILE_COLUMNS = 128
# A band has `SNAKE_TILE_WIDTH` rows of tiles. Programs traverse a band column by column.
SNAKE_TILE_WIDTH = 8


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
    split_depth = depth // config.num_splits
    tile = config.tile_rows, config.num_splits * TILE, num_consumers * TILE
    num_stages = min(config.num_stages, split_depth // TILE)
    check_whole_tiles(
        (rows, depth, width), tile, config.num_stages, num_stages < split_depth // TILE
    )
    call = plgpu.kernel(
        functools.partial(_few_rows_kernel, split_depth=split_depth, transposed=transposed),
        out_type=jax.ShapeDtypeStruct((config.num_splits, rows, width), out_dtype),
        grid=(config.num_splits, rows // config.tile_rows, width // (num_consumers * TILE)),
        grid_names=("split", "row_tile", "column_tile"),
        num_threads=num_consumers + 1,
        thread_name="warp_group",
        scratch_types={
            "x_smem": ops.swizzled_smem((num_stages, config.tile_rows, TILE), x.dtype),
            "weight_smem": ops.swizzled_smem(
                (num_stages, num_factors, num_consumers, TILE, TILE), x.dtype
            ),
            "out_smem": ops.swizzled_smem((num_consumers, config.tile_rows, TILE), out_dtype),
            "full": plgpu.Barrier(
                num_arrivals=num_factors * num_consumers + 1, num_barriers=num_stages
            ),
            "empty": plgpu.Barrier(num_arrivals=num_consumers, num_barriers=num_stages),
        },
        compiler_params=ops.COMPILER_PARAMS,
        kernel_name="gated_product_hopper" if gated else "product_hopper",
    )
    return call(x, weight)


def _few_rows_kernel(
    x_ref,
    weight_ref,
    out_ref,
    *,
    x_smem,
    weight_smem,
    out_smem,
    full,
    empty,
    split_depth,
    transposed,
):
    warp_group, split = lax.axis_index("warp_group"), lax.axis_index("split")
    (num_stages, num_factors, num_consumers), tile_rows = weight_smem.shape[:3], out_smem.shape[1]
    rows = pl.ds(lax.axis_index("row_tile") * tile_rows, tile_rows)
    num_steps, width = split_depth // TILE, out_ref.shape[2]

    def stage_index(step):
        return lax.rem(step, jnp.int32(num_stages))

    def column_slice(consumer, factor=0):
        first = lax.axis_index("column_tile") * (num_consumers * TILE) + consumer * TILE
        return pl.ds(first + factor * width, TILE)

    @pl.when(warp_group == num_consumers)
    def _load():
        def load(step, _):
            stage = stage_index(step)
            pl.when(step >= num_stages)(lambda: plgpu.barrier_wait(empty.at[stage]))
            depth_slice = pl.ds(split * split_depth + step * TILE, TILE)
            for factor, consumer in itertools.product(range(num_factors), range(num_consumers)):
                index = depth_slice, column_slice(consumer, factor)
                source = weight_ref.at[index[::-1] if transposed else index]
                target = weight_smem.at[stage, factor, consumer]
                plgpu.copy_gmem_to_smem(source, target, full.at[stage])
            plgpu.copy_gmem_to_smem(x_ref.at[rows, depth_slice], x_smem.at[stage], full.at[stage])

        lax.fori_loop(0, num_steps, load, None)

    @pl.when(warp_group < num_consumers)
    def _compute():
        def operands(stage):
            weights = [weight_smem.at[stage, f, warp_group] for f in range(num_factors)]
            x_tile = x_smem.at[stage].transpose((1, 0))
            if not transposed:
                weights = [weight.transpose((1, 0)) for weight in weights]
            return [(weight, x_tile) for weight in weights]

        add_all = functools.partial(accumulate_steps, num_steps, stage_index, operands, full, empty)
        accumulator = plgpu.ACC((TILE, tile_rows), jnp.float32)
        result, *up = pl.run_scoped(add_all, *[accumulator] * num_factors)
        if up:  # The next line computes silu(gate) * up. The gate must be finite.
            result *= up[0] / (1 + jnp.exp(-result))
        result = plgpu.layout_cast(result, plgpu.Layout.WGMMA_TRANSPOSED)
        own_out = out_smem.at[warp_group]
        own_out.transpose((1, 0))[...] = result.astype(out_ref.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(own_out, out_ref.at[split, rows, column_slice(warp_group)])
        plgpu.wait_smem_to_gmem(0)


# Because of this `jit`, layers with the same shapes share one trace and one lowering.
@functools.partial(jax.jit, static_argnames=("gated", "config"))
def _many_rows_gemm(x, weight, *, gated, config):
    num_stages, (rows, depth) = config.num_stages, x.shape
    width = weight.shape[1] // (NUM_FACTORS if gated else 1)
    columns = TILE_COLUMNS * (1 if gated else NUM_FACTORS)
    check_whole_tiles(
        (rows, depth, width), (NUM_CONSUMERS * CONSUMER_ROWS, TILE, columns), num_stages, True
    )
    call = plgpu.kernel(
        functools.partial(_many_rows_kernel, num_programs=config.num_programs, gated=gated),
        out_type=jax.ShapeDtypeStruct((rows, width), x.dtype),
        grid=(config.num_programs,),
        grid_names=("program",),
        num_threads=NUM_CONSUMERS + 1,
        thread_name="warp_group",
        scratch_types={
            "x_smem": ops.swizzled_smem((num_stages, NUM_CONSUMERS * CONSUMER_ROWS, TILE), x.dtype),
            "weight_smem": ops.swizzled_smem(
                (num_stages, NUM_FACTORS, TILE, TILE_COLUMNS), x.dtype
            ),
            "out_smem": ops.swizzled_smem(
                (NUM_CONSUMERS, TILE_COLUMNS // TILE, CONSUMER_ROWS, TILE), x.dtype
            ),
            "full": plgpu.Barrier(num_arrivals=1 + NUM_FACTORS, num_barriers=num_stages),
            "empty": plgpu.Barrier(num_arrivals=NUM_CONSUMERS, num_barriers=num_stages),
        },
        compiler_params=ops.COMPILER_PARAMS,
        kernel_name="gated_gemm_hopper" if gated else "gemm_hopper",
    )
    return call(x, weight)


def _many_rows_kernel(
    x_ref, weight_ref, out_ref, *, x_smem, weight_smem, out_smem, full, empty, num_programs, gated
):
    warp_group, program = lax.axis_index("warp_group"), lax.axis_index("program")
    (num_rows, depth), width = x_ref.shape, out_ref.shape[1]
    num_stages, tile_rows, _ = x_smem.shape
    # A tile reads two blocks of weight columns. In a gated GEMM, they are the same columns of gate
    # and of up. Otherwise they are neighbouring columns of the weight.
    tile_columns = TILE_COLUMNS * (1 if gated else NUM_FACTORS)
    factor_distance = width if gated else TILE_COLUMNS
    num_steps, grid = depth // TILE, (num_rows // tile_rows, width // tile_columns)
    num_rounds = lax.div(math.prod(grid) + (num_programs - 1) - program, jnp.int32(num_programs))

    def tile_origin(round_index):
        """Return the first row and the first column of the tile of round `round_index`."""
        row, column = plgpu.planar_snake(
            program + round_index * num_programs, grid, 0, SNAKE_TILE_WIDTH
        )
        return row * tile_rows, column * tile_columns

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

                rows, depth_slice = pl.ds(row, tile_rows), pl.ds(step * TILE, TILE)
                plgpu.copy_gmem_to_smem(
                    x_ref.at[rows, depth_slice], x_smem.at[stage], full.at[stage]
                )
                for factor in range(NUM_FACTORS):
                    source = weight_ref.at[
                        depth_slice, pl.ds(column + factor * factor_distance, TILE_COLUMNS)
                    ]
                    plgpu.copy_gmem_to_smem(source, weight_smem.at[stage, factor], full.at[stage])

            lax.fori_loop(0, num_steps, load, None)

        lax.fori_loop(0, num_rounds, load_tile, None)

    @pl.when(warp_group < NUM_CONSUMERS)
    def _compute():
        plgpu.set_max_registers(232, action="increase")

        def operands(stage):
            x_tile = x_smem.at[stage, pl.ds(warp_group * CONSUMER_ROWS, CONSUMER_ROWS)]
            return [(x_tile, weight_smem.at[stage, factor]) for factor in range(NUM_FACTORS)]

        def add_all(round_index, *sums):
            own_stage = functools.partial(stage_index, round_index)
            results = accumulate_steps(num_steps, own_stage, operands, full, empty, *sums)
            plgpu.barrier_arrive(empty.at[stage_index(round_index, num_steps - 1)])
            return results

        def compute_tile(round_index, _):
            accumulator = plgpu.ACC((CONSUMER_ROWS, TILE_COLUMNS), jnp.float32)
            add_own = functools.partial(add_all, round_index)
            results = pl.run_scoped(add_own, *[accumulator] * NUM_FACTORS)
            if gated:
                gate, up = results
                # The result is silu(gate) * up. This formula may give NaN if the gate is infinite.
                results = [gate * (up / (1 + jnp.exp(-gate)))]
            row, column = tile_origin(round_index)
            rows = pl.ds(row + warp_group * CONSUMER_ROWS, CONSUMER_ROWS)
            for index, result in enumerate(results):
                # Wait until the previous copy has read `out_smem`.
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                result = result.astype(out_ref.dtype)
                for chunk in range(TILE_COLUMNS // TILE):
                    own_out = out_smem.at[warp_group, chunk]
                    own_out[...] = result[:, chunk * TILE : (chunk + 1) * TILE]
                    plgpu.commit_smem()
                    first = column + index * TILE_COLUMNS + chunk * TILE
                    plgpu.copy_smem_to_gmem(own_out, out_ref.at[rows, pl.ds(first, TILE)])

        lax.fori_loop(0, num_rounds, compute_tile, None)
        plgpu.wait_smem_to_gmem(0)


def accumulate_steps(num_steps, stage_index, operands, full, empty, *sums):
    """Add the products of all steps of the depth on the tensor core.

    Each step waits until its pipeline stage is filled, and releases the stage of the previous step.
    If the loader reuses the last stage, the caller must release that stage.

    Args:
        num_steps: Number of steps.
        stage_index: Function that takes a step and returns the index of the step's stage.
        operands: Function that takes a stage, and returns for each accumulator the pair of tiles to
            multiply.
        full: Barriers on which the loader arrives when a stage is filled.
        empty: Barriers on which the consumers arrive when a stage is read.
        sums: References of the accumulators, which hold the initial values.

    Returns:
        The final values of the accumulators.
    """
    num_stages = full.shape[0]

    def add(step, _):
        stage = stage_index(step)
        plgpu.barrier_wait(full.at[stage])
        for own_sums, factors in zip(sums, operands(stage), strict=True):
            plgpu.wgmma(own_sums, *factors)
        plgpu.wgmma_wait(len(sums))  # Wait until the products of the previous step are complete.
        previous = stage_index(step + (num_stages - 1))
        pl.when(step > 0)(lambda: plgpu.barrier_arrive(empty.at[previous]))

    lax.fori_loop(0, num_steps, add, None)
    return [own_sums[...] for own_sums in sums]


def check_whole_tiles(sizes, tile, num_stages, reuses_stages):
    """Raise ValueError unless all sizes are multiples of the tile's, and there are enough stages.

    If stages are reused, there must be at least two: a consumer releases a stage only after the
    product of the next stage has started, so a single stage would deadlock.

    Args:
        sizes: The number of rows, the depth and the width of the GEMM.
        tile: The sizes of a tile along the same axes.
        num_stages: The number of pipeline stages.
        reuses_stages: Whether the loader fills a stage more than once.
    """
    if any(size % unit for size, unit in zip(sizes, tile, strict=True)):
        raise ValueError(
            f"rows, depth and width are {sizes}; they must be multiples of {tile}: call the "
            "public op, which chooses a kernel that fits"
        )
    if num_stages < 2 and reuses_stages:
        raise ValueError(f"num_stages is {num_stages}: pass at least 2")
