"""Rung 5: ragged, in one launch: a kernel of our own.

All tokens lie back to back, [T, N, H], with no padding between them, and are cut into tiles of 32
queries of one sequence. Four numbers say what a tile is: its sequence, its first row, that row's
position, its number of rows. The device runs a program for each tile and head, all in one launch;
each loops over the blocks of its sequence up to its own last token, and no further. The length of
the loop is read at run time: no array of XLA's can say that, which is why there are kernels. Keys
after a tile are not even read; those before it are read by each tile: more bytes than in rung 3,
and fewer the larger the tile. A GPU runs what Triton makes of the kernel; on a CPU it is only
interpreted, so that its time means nothing.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from examples.ladder import rung_4_block_tables
from examples.ladder.workload import BLOCK_SIZE, HEAD_SIZE, Cost, Workload, main, tiled_cost

TITLE = "5 ragged, one launch"
TILE = 32


def prepare(work: Workload):
    """Flat queries (and a tile of room behind), the pool, block tables [B, M], tiles [tiles, 4]."""
    _, k_pool, v_pool, tables, *_ = rung_4_block_tables.prepare(work)
    q = jnp.pad(work.q, ((0, TILE), (0, 0), (0, 0)))
    tiles, start = [], 0
    for sequence, length in enumerate(work.lengths):
        for at in range(0, length, TILE):
            tiles.append((sequence, start + at, at, min(TILE, length - at)))
        start += length
    return q, k_pool, v_pool, tables.astype(np.int32), np.array(tiles, np.int32)


@jax.jit
def attend(q, k_pool, v_pool, block_tables, tiles):
    """Causal attention of every token, [T, N, H]."""
    grid, shape = (q.shape[1], tiles.shape[0]), jax.ShapeDtypeStruct(q.shape, q.dtype)
    on_gpu, triton = jax.default_backend() == "gpu", plgpu.CompilerParams(num_warps=4)
    launch = pl.pallas_call(kernel, shape, grid=grid, interpret=not on_gpu, compiler_params=triton)
    return launch(q, k_pool, v_pool, block_tables, tiles)[:-TILE]


def kernel(q_ref, k_ref, v_ref, tables_ref, tiles_ref, out_ref):
    """One head of one tile: rung 3's loop, with everything in registers."""
    head, tile = pl.program_id(0), pl.program_id(1)
    sequence, first_row, first_position, num_rows = (tiles_ref[tile, i] for i in range(4))
    rows, slots = jnp.arange(TILE), jnp.arange(BLOCK_SIZE)
    window = (pl.ds(first_row, TILE), head, slice(None))
    q = q_ref[window]  # rows past the tile's own belong to the next one: computed, never stored

    def fold(index, carry):
        largest, total, out = carry
        block = tables_ref[sequence, index]
        scores = jnp.dot(q, k_ref[block, :, head, :].T) / HEAD_SIZE**0.5
        visible = (index * BLOCK_SIZE + slots)[None, :] <= (first_position + rows)[:, None]
        scores = jnp.where(visible, scores, -jnp.inf)
        new_largest = jnp.maximum(largest, scores.max(axis=1))
        rescale, weights = jnp.exp(largest - new_largest), jnp.exp(scores - new_largest[:, None])
        update = jnp.dot(weights, v_ref[block, :, head, :])
        return new_largest, total * rescale + weights.sum(axis=1), out * rescale[:, None] + update

    start = jnp.full(TILE, -jnp.inf), jnp.zeros(TILE), jnp.zeros((TILE, HEAD_SIZE))
    steps = pl.cdiv(first_position + num_rows, BLOCK_SIZE)
    _, total, out = jax.lax.fori_loop(0, steps, fold, start)
    plgpu.store(out_ref.at[window], out / total[:, None], mask=(rows < num_rows)[:, None])


def cost(work: Workload) -> Cost:
    """One call; a tile computes TILE queries with the blocks up to its own last token."""
    return tiled_cost(work, TILE, BLOCK_SIZE)


if __name__ == "__main__":
    from examples.ladder import rung_5_ragged

    main(rung_4_block_tables, rung_5_ragged)
