"""Scores of given tokens in Pallas Mosaic GPU for Hopper: a GEMM that stores no product.

    grid (program,), one program per SM, each taking tiles of 128 rows x 256 tokens
    a loader and two consumers, each computing 64 rows:
        for tile in tiles of the program:
            for stage in depth: logits += x tile @ table tile.T
            store, for each row: the largest logit, the sum of exp(logit - largest), and the
            target's logit if the tile has the target

The loops are those of `hopper_pipeline.py`. XLA then combines the tiles of each row: three numbers
per 256 logits. The last tile may exceed the vocabulary: the copies fill its end with zeros, and the
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
from pallas_kernels import hopper_pipeline as pipelines
from pallas_kernels.gemm.hopper import NUM_FACTORS, TILE
from pallas_kernels.hopper_pipeline import CONSUMER_ROWS, NUM_CONSUMERS, TILE_COLUMNS, TILE_ROWS

# A tile covers `TILE_TOKENS` tokens of the vocabulary.
TILE_TOKENS = NUM_FACTORS * TILE_COLUMNS
# The weight of the output head has one row per token of the vocabulary. Shared memory holds the
# weight in tiles of 8 rows, so the vocabulary size must be a multiple of `TOKEN_MULTIPLE`.
TOKEN_MULTIPLE = 8
NUM_STAGES = 4  # Shared memory has room for four pipeline stages.
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
    call = pipelines.pipelined_kernel(
        functools.partial(_kernel, num_programs=num_programs),
        out_type=jax.ShapeDtypeStruct((3, tiles, rows), jnp.float32),
        grid={"program": num_programs},
        num_consumers=NUM_CONSUMERS,
        num_stages=NUM_STAGES,
        num_copies=1 + NUM_FACTORS,
        scratch={
            "x_smem": ops.swizzled_smem((NUM_STAGES, TILE_ROWS, TILE), x.dtype),
            "table_smem": ops.swizzled_smem((NUM_STAGES, NUM_FACTORS, TILE_COLUMNS, TILE), x.dtype),
            "out_smem": plgpu.SMEM((NUM_CONSUMERS, 3, CONSUMER_ROWS), jnp.float32),
        },
        name="target_scores_hopper",
    )
    return call(x, table, targets)


def _kernel(
    x_ref, table_ref, targets_ref, out_ref, *, ring, x_smem, table_smem, out_smem, num_programs
):
    program, consumer = lax.axis_index("program"), ring.warp_group
    (num_rows, depth), width = x_ref.shape, table_ref.shape[0]
    grid = num_rows // TILE_ROWS, out_ref.shape[1]
    num_tiles = pipelines.tiles_of_program(program, num_programs, math.prod(grid))
    locate = functools.partial(pipelines.snake_tile, grid, program, num_programs)
    registers = pipelines.MANY_ROWS_REGISTERS
    pipeline = pipelines.Pipeline(ring, depth // TILE, num_tiles, locate, registers)

    def load(location, step, stage):
        row_tile, token_tile = location
        rows, depth_slice = pl.ds(row_tile * TILE_ROWS, TILE_ROWS), pl.ds(step * TILE, TILE)
        stage.copy(x_ref.at[rows, depth_slice], x_smem)
        for factor in range(NUM_FACTORS):
            first = token_tile * TILE_TOKENS + factor * TILE_COLUMNS
            stage.copy(table_ref.at[pl.ds(first, TILE_COLUMNS), depth_slice], table_smem, factor)

    def operands(stage):
        x_tile = x_smem.at[stage, pl.ds(consumer * CONSUMER_ROWS, CONSUMER_ROWS)]
        tiles = [table_smem.at[stage, factor] for factor in range(NUM_FACTORS)]
        return [(x_tile, tile.transpose((1, 0))) for tile in tiles]

    pipeline.loader(lambda: pipeline.load_tiles(load))

    @pipeline.consumers
    def _compute():
        shape, by_row = (CONSUMER_ROWS, TILE_COLUMNS), plgpu.Layout.WGMMA.reduce(1)
        column = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, shape, 1), plgpu.Layout.WGMMA)

        def compute(steps):
            row_tile, token_tile = steps.locate()
            rows = pl.ds(row_tile * TILE_ROWS + consumer * CONSUMER_ROWS, CONSUMER_ROWS)
            targets = ops.load_with_layout(targets_ref.at[rows], by_row, optimized=False)
            logits = steps.accumulate(operands, shape, NUM_FACTORS)
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
                out_smem.at[consumer, i][...] = numbers
            plgpu.commit_smem()
            for i in range(3):
                plgpu.copy_smem_to_gmem(out_smem.at[consumer, i], out_ref.at[i, token_tile, rows])

        pipeline.compute_tiles(compute)
