"""Scores of given tokens in Pallas Mosaic GPU for Hopper: a GEMM that stores no product.

    grid (program,), one program per SM, each taking tiles of 128 rows x 256 tokens
    a loader and two consumers, each computing 64 rows:
        for tile in tiles of the program:
            for stage in depth: logits += x tile @ table tile.T
            store, for each row: the largest logit, the sum of exp(logit - largest), and the
            target's logit if the tile has the target

The loop resembles the many-rows kernels of `gemm/`. The loader fetches the next tile while the
consumers reduce the current one. XLA then combines the tiles of each row: three numbers per 256
logits. The last tile may exceed the vocabulary: the copies fill its end with zeros, and the
consumers replace these logits by -inf.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import hopper_ops as ops
from pallas_kernels.gemm.hopper import (
    CONSUMER_ROWS,
    NUM_CONSUMERS,
    NUM_FACTORS,
    SNAKE_TILE_WIDTH,
    TILE,
    TILE_COLUMNS,
    accumulate_steps,
)

TILE_ROWS = NUM_CONSUMERS * CONSUMER_ROWS
# A tile covers `TILE_TOKENS` tokens of the vocabulary.
TILE_TOKENS = NUM_FACTORS * TILE_COLUMNS
# The table has one row per token. Shared memory holds it in tiles of 8 rows, so the vocabulary size
# must be a multiple of `TOKEN_MULTIPLE`.
TOKEN_MULTIPLE = 8
NUM_STAGES = 4  # Four pipeline stages fill the shared memory.
_LOG2_E = math.log2(math.e)


def target_scores(x, table, targets, *, num_programs):
    """Run the public op `target_scores` in Mosaic GPU; return the fields of its result.

    The dtype must have 2 bytes. The depth must be a multiple of `TILE`. The number of tokens in the
    vocabulary must be a multiple of `TOKEN_MULTIPLE`, and at least `TILE_TOKENS`.
    """
    rows = x.shape[0]
    targets = jnp.where(targets < table.shape[0], targets, -1)  # column -1 matches no token
    padding = -rows % TILE_ROWS
    x, targets = jnp.pad(x, ((0, padding), (0, 0))), jnp.pad(targets, (0, padding))
    largest, totals, target = _scan_tiles(x, table, targets, num_programs=num_programs)
    whole = largest.max(axis=0)
    total = (totals * jnp.exp(largest - whole[None])).sum(axis=0)
    return whole[:rows], total[:rows], target.sum(axis=0)[:rows]


@functools.partial(jax.jit, static_argnames="num_programs")
def _scan_tiles(x, table, targets, *, num_programs):
    """Return the fields of `TargetScores` for each tile and row, float32 [3, tiles, R]."""
    (rows, depth), tiles = x.shape, pl.cdiv(table.shape[0], TILE_TOKENS)
    if rows % TILE_ROWS or depth % TILE:
        raise ValueError(
            f"x has shape {x.shape}; its sizes must be multiples of {(TILE_ROWS, TILE)}: call the "
            "public op, which chooses an implementation that fits"
        )
    call = plgpu.kernel(
        functools.partial(_kernel, num_programs=num_programs),
        out_type=jax.ShapeDtypeStruct((3, tiles, rows), jnp.float32),
        grid=(num_programs,),
        grid_names=("program",),
        num_threads=NUM_CONSUMERS + 1,
        thread_name="warp_group",
        scratch_types={
            "x_smem": ops.swizzled_smem((NUM_STAGES, TILE_ROWS, TILE), x.dtype),
            "table_smem": ops.swizzled_smem((NUM_STAGES, NUM_FACTORS, TILE_COLUMNS, TILE), x.dtype),
            "out_smem": plgpu.SMEM((NUM_CONSUMERS, 3, CONSUMER_ROWS), jnp.float32),
            "full": plgpu.Barrier(num_arrivals=1 + NUM_FACTORS, num_barriers=NUM_STAGES),
            "empty": plgpu.Barrier(num_arrivals=NUM_CONSUMERS, num_barriers=NUM_STAGES),
        },
        compiler_params=ops.COMPILER_PARAMS,
        kernel_name="target_scores_hopper",
    )
    return call(x, table, targets)


def _kernel(
    x_ref,
    table_ref,
    targets_ref,
    out_ref,
    *,
    x_smem,
    table_smem,
    out_smem,
    full,
    empty,
    num_programs,
):
    warp_group, program = lax.axis_index("warp_group"), lax.axis_index("program")
    (num_rows, depth), width = x_ref.shape, table_ref.shape[0]
    num_steps, grid = depth // TILE, (num_rows // TILE_ROWS, out_ref.shape[1])
    num_rounds = lax.div(math.prod(grid) + (num_programs - 1) - program, jnp.int32(num_programs))

    def tile_index(round_index):
        """Return the row index and the column index of the tile of round `round_index`."""
        return plgpu.planar_snake(program + round_index * num_programs, grid, 0, SNAKE_TILE_WIDTH)

    def stage_index(round_index, step):
        return lax.rem(round_index * num_steps + step, jnp.int32(NUM_STAGES))

    @pl.when(warp_group == NUM_CONSUMERS)
    def _load():
        plgpu.set_max_registers(40, action="decrease")

        def load_tile(round_index, _):
            row_tile, token_tile = tile_index(round_index)

            def load(step, _):
                stage = stage_index(round_index, step)

                @pl.when(round_index * num_steps + step >= NUM_STAGES)
                def _wait():
                    plgpu.barrier_wait(empty.at[stage])

                rows, depth_slice = pl.ds(row_tile * TILE_ROWS, TILE_ROWS), pl.ds(step * TILE, TILE)
                plgpu.copy_gmem_to_smem(
                    x_ref.at[rows, depth_slice], x_smem.at[stage], full.at[stage]
                )
                for factor in range(NUM_FACTORS):
                    first = token_tile * TILE_TOKENS + factor * TILE_COLUMNS
                    source = table_ref.at[pl.ds(first, TILE_COLUMNS), depth_slice]
                    plgpu.copy_gmem_to_smem(source, table_smem.at[stage, factor], full.at[stage])

            lax.fori_loop(0, num_steps, load, None)

        lax.fori_loop(0, num_rounds, load_tile, None)

    @pl.when(warp_group < NUM_CONSUMERS)
    def _compute():
        plgpu.set_max_registers(232, action="increase")
        shape, by_row = (CONSUMER_ROWS, TILE_COLUMNS), plgpu.Layout.WGMMA.reduce(1)
        column = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, shape, 1), plgpu.Layout.WGMMA)

        def operands(stage):
            x_tile = x_smem.at[stage, pl.ds(warp_group * CONSUMER_ROWS, CONSUMER_ROWS)]
            tiles = [table_smem.at[stage, factor] for factor in range(NUM_FACTORS)]
            return [(x_tile, tile.transpose((1, 0))) for tile in tiles]

        def add_all(round_index, *sums):
            own_stage = functools.partial(stage_index, round_index)
            results = accumulate_steps(num_steps, own_stage, operands, full, empty, *sums)
            plgpu.barrier_arrive(empty.at[stage_index(round_index, num_steps - 1)])
            return results

        def compute_tile(round_index, _):
            row_tile, token_tile = tile_index(round_index)
            rows = pl.ds(row_tile * TILE_ROWS + warp_group * CONSUMER_ROWS, CONSUMER_ROWS)
            targets = ops.load_with_layout(targets_ref.at[rows], by_row, optimized=False)
            add_own = functools.partial(add_all, round_index)
            accumulator = plgpu.ACC(shape, jnp.float32)
            logits = pl.run_scoped(add_own, *[accumulator] * NUM_FACTORS)
            firsts = [token_tile * TILE_TOKENS + i * TILE_COLUMNS for i in range(NUM_FACTORS)]
            if width % TILE_TOKENS:
                logits = [
                    jnp.where(column < width - first, part, -jnp.inf)
                    for part, first in zip(logits, firsts, strict=True)
                ]
            largest = jnp.maximum(*(jnp.max(part, axis=1) for part in logits))
            base = lax.broadcast_in_dim(largest * _LOG2_E, shape, (0,))
            powers = [jnp.exp2(part * _LOG2_E - base) for part in logits]
            total = sum(jnp.sum(part, axis=1) for part in powers)
            chosen = [
                jnp.where(column == lax.broadcast_in_dim(targets - first, shape, (0,)), part, 0.0)
                for part, first in zip(logits, firsts, strict=True)
            ]
            target = sum(jnp.sum(part, axis=1) for part in chosen)
            # Wait until the previous copy has read `out_smem`.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            for i, numbers in enumerate((largest, total, target)):
                out_smem.at[warp_group, i][...] = numbers
            plgpu.commit_smem()
            for i in range(3):
                plgpu.copy_smem_to_gmem(out_smem.at[warp_group, i], out_ref.at[i, token_tile, rows])

        lax.fori_loop(0, num_rounds, compute_tile, None)
        plgpu.wait_smem_to_gmem(0)
