"""Rung 4: a whole batch through its block tables.

The block tables are an array [B, M], and one call runs the loop of rung 3 for all sequences. Step i
gathers the i-th block of each sequence from the pool and updates the running sums. Sequences may
start, end, grow and share blocks; only the numbers in the array change. For a compiler, paging is
indirection through an array whose shape never changes.

But the padded FLOPs of rung 1 are back. The memory is in blocks, but the computation is padded:
every sequence has Lmax queries and M steps. Shorter sequences gather the null block (0) and compute
scores that are masked. So paging alone saves memory but no computation. Rung 5 removes the padding.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from examples.ladder import rung_3_online
from examples.ladder.workload import BLOCK_SIZE, HEAD_SIZE, NUM_HEADS, Cost, Workload, main

TITLE = "4 batched through block tables"


def prepare(work: Workload):
    """Return padded queries, the pools, block tables [B, M] padded with 0, and token indices.

    The token indices are two arrays: the sequence of each token and the position of each token.
    """
    width = max(map(len, tables := work.block_tables()))
    tables = np.array([table + [0] * (width - len(table)) for table in tables])
    pools = work.pool(work.k), work.pool(work.v)
    return work.padded(work.q), *pools, tables, work.sequence, work.position


@jax.jit
def attend(q, k_pool, v_pool, block_tables, sequence, position):
    """Return the causal attention of every token, [T, N, H]; q is [B, Lmax, N, H]."""
    rows = jnp.arange(q.shape[1])

    def fold(carry, step):
        (largest, total, out), (index, blocks) = carry, step
        keys, values = k_pool[blocks], v_pool[blocks]  # [B, S, N, H]
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
    """Return the cost of one call.

    The call takes M steps, each with one block and Lmax queries of every sequence.
    """
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
