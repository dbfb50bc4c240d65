"""Rung 4: a whole batch through its block tables.

The block tables become an array [B, M], and one call does for all sequences what rung 3 did for
one: at step i it gathers the i-th block of each from the pool, wherever that lies, and folds it in.
Sequences come and go, grow and share blocks; the program sees only another array of numbers. This
is what paging is to a compiler: indirection through an array, at shapes that never change.

But look at the FLOPs: the padding of rung 1 is back. Memory is still held in blocks, but the
computation is a rectangle again: every sequence has Lmax queries and M steps, and those that are
over early gather the null block (0) and multiply what is masked. Paging saves memory by itself,
and no work. Rung 5 gets rid of the rectangle.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from examples.ladder import rung_3_online
from examples.ladder.workload import BLOCK_SIZE, HEAD_SIZE, NUM_HEADS, Cost, Workload, main

TITLE = "4 batched through block tables"


def prepare(work: Workload):
    """Padded queries, the pool, the block tables [B, M] (0 past a sequence's end), positions."""
    width = max(map(len, tables := work.block_tables()))
    tables = np.array([table + [0] * (width - len(table)) for table in tables])
    pools = work.pool(work.k), work.pool(work.v)
    return work.padded(work.q), *pools, tables, work.sequence, work.position


@jax.jit
def attend(q, k_pool, v_pool, block_tables, sequence, position):
    """Causal attention of every token, [T, N, H]; q is [B, Lmax, N, H]."""
    rows = jnp.arange(q.shape[1])

    def fold(carry, step):
        (largest, total, out), (index, blocks) = carry, step
        keys, values = k_pool[blocks], v_pool[blocks]  # [B, S, N, H] of any B blocks
        scores = jnp.einsum("bqnh,bsnh->bqns", q, keys) / HEAD_SIZE**0.5
        positions = index * BLOCK_SIZE + jnp.arange(BLOCK_SIZE)
        visible = positions[None, :] <= rows[:, None]
        scores = jnp.where(visible[None, :, None, :], scores, -jnp.inf)
        new_largest = jnp.maximum(largest, scores.max(axis=-1))
        rescale = jnp.exp(largest - new_largest)
        weights = jnp.exp(scores - new_largest[..., None])
        total = total * rescale + weights.sum(axis=-1)
        out = out * rescale[..., None] + jnp.einsum("bqns,bsnh->bqnh", weights, values)
        return (new_largest, total, out), None

    start = jnp.full(q.shape[:3], -jnp.inf), jnp.zeros(q.shape[:3]), jnp.zeros(q.shape)
    steps = jnp.arange(block_tables.shape[1]), block_tables.T
    (_, total, out), _ = lax.scan(fold, start, steps)
    return (out / total[..., None])[sequence, position]


def cost(work: Workload) -> Cost:
    """One call of M steps; each has a block for every sequence and Lmax queries."""
    num_slots_read = len(work.lengths) * -(-max(work.lengths) // BLOCK_SIZE) * BLOCK_SIZE
    num_pairs = num_slots_read * max(work.lengths)
    return Cost(
        calls=1,
        num_pairs=num_pairs,
        num_padding_pairs=num_pairs - work.num_real_pairs,
        num_rows_read=2 * num_slots_read,
        num_slots=work.num_blocks * BLOCK_SIZE,
        scores_at_once=NUM_HEADS * len(work.lengths) * max(work.lengths) * BLOCK_SIZE,
    )


if __name__ == "__main__":
    from examples.ladder import rung_4_block_tables

    main(rung_3_online, rung_4_block_tables)
