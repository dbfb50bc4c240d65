"""Rung 5: a ragged batch in one launch of a kernel.

All tokens are back to back, [T, N, H], without padding, in tiles of at most 32 queries of one
sequence. A tile is (sequence, first row, position of the first row, number of rows). One launch
runs a program for each tile and head. The program loops over the sequence's blocks up to the tile's
last token. The kernel reads the loop length at run time, which XLA's array operations cannot do.
Keys after a tile are never read. Keys before a tile are read again by each tile: more bytes than in
rung 3, and fewer with larger tiles. On a GPU, Triton compiles the kernel. On a CPU, the kernel is
interpreted, so its time has no meaning.
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
    """Return queries [T + TILE, N, H], the pools, block tables [B, M] and tiles [tiles, 4]."""
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
    """Return the causal attention of every token, [T, N, H]."""
    grid, shape = (q.shape[1], tiles.shape[0]), jax.ShapeDtypeStruct(q.shape, q.dtype)
    on_gpu, triton = jax.default_backend() == "gpu", plgpu.CompilerParams(num_warps=4)
    launch = pl.pallas_call(kernel, shape, grid=grid, interpret=not on_gpu, compiler_params=triton)
    return launch(q, k_pool, v_pool, block_tables, tiles)[:-TILE]


def kernel(q_ref, k_ref, v_ref, tables_ref, tiles_ref, out_ref):
    """Compute attention for one tile and head with the online softmax of rung 3, in registers."""
    head, tile = pl.program_id(0), pl.program_id(1)
    sequence, first_row, first_position, num_rows = (tiles_ref[tile, i] for i in range(4))
    rows, slots = jnp.arange(TILE), jnp.arange(BLOCK_SIZE)
    # Load TILE rows of q. The results of rows that do not belong to the tile are not stored.
    window = (pl.ds(first_row, TILE), head, slice(None))
    q = q_ref[window]

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
    """Return the cost. A program multiplies TILE queries by all keys up to the tile's end."""
    return tiled_cost(work, TILE, BLOCK_SIZE)


if __name__ == "__main__":
    from examples.ladder import rung_5_ragged

    main(rung_4_block_tables, rung_5_ragged)
