"""Rung 2: two-pass safe softmax over blocks.

The cache is a pool of blocks of 16 slots. A sequence holds the blocks that its tokens fill,
anywhere in the pool. The block table lists them in order. Only the last block may have empty slots.

A block has only 16 keys, but softmax needs the largest score and the sum over all keys. "Safe"
softmax reads the blocks twice: first for the largest score, then for the sums. Only one block's
scores exist at a time.

The cost: keys are read and multiplied twice, in two calls per block. Rung 3 needs only one pass.
"""

import jax
import jax.numpy as jnp

from examples.ladder import rung_1_naive
from examples.ladder.workload import BLOCK_SIZE, HEAD_SIZE, NUM_HEADS, Cost, Workload, main

TITLE = "2 two passes over blocks"


def prepare(work: Workload):
    """Return each sequence's queries [L, N, H], the pools [P, S, N, H], and the block tables."""
    queries = [work.q[work.sequence == b] for b in range(len(work.lengths))]
    return queries, work.pool(work.k), work.pool(work.v), work.block_tables()


def attend(queries, k_pool, v_pool, block_tables):
    """Return the causal attention of every token, [T, N, H]; compute one sequence after another."""
    outs = []
    for q, table in zip(queries, block_tables, strict=True):
        largest = jnp.full(q.shape[:2], -jnp.inf)  # [L, N]
        for index, block in enumerate(table):
            largest = first_pass(largest, q, k_pool, block, index)
        total, out = jnp.zeros(q.shape[:2]), jnp.zeros(q.shape)
        for index, block in enumerate(table):
            total, out = second_pass(total, out, largest, q, k_pool, v_pool, block, index)
        outs.append(out / total[..., None])
    return jnp.concatenate(outs)


@jax.jit
def first_pass(largest, q, k_pool, block, index):
    """Return the largest score so far of each query and head, including the scores of a block."""
    return jnp.maximum(largest, scores_of_block(q, k_pool[block], index).max(axis=-1))


@jax.jit
def second_pass(total, out, largest, q, k_pool, v_pool, block, index):
    """Add one block's softmax weights to `total`, and its weighted values to `out`."""
    weights = jnp.exp(scores_of_block(q, k_pool[block], index) - largest[..., None])
    return total + weights.sum(axis=-1), out + jnp.einsum("qns,snh->qnh", weights, v_pool[block])


def scores_of_block(q, keys, index):
    """Return the scores [L, N, S] of block number `index`; -inf for keys after the query."""
    scores = jnp.einsum("qnh,snh->qns", q, keys) / HEAD_SIZE**0.5
    positions = index * BLOCK_SIZE + jnp.arange(BLOCK_SIZE)
    visible = positions[None, :] <= jnp.arange(q.shape[0])[:, None]
    return jnp.where(visible[:, None, :], scores, -jnp.inf)


def cost(work: Workload, passes: int = 2) -> Cost:
    """Return the cost. Each pass reads all keys once; the last pass also reads the values."""
    num_pairs = sum(n * -(-n // BLOCK_SIZE) * BLOCK_SIZE for n in work.lengths)
    return Cost(
        calls=passes * work.num_blocks,
        num_pairs=num_pairs,
        num_padding_pairs=num_pairs - work.num_real_pairs,
        num_rows_read=(passes + 1) * work.num_blocks * BLOCK_SIZE,
        num_slots=work.num_blocks * BLOCK_SIZE,
        scores_at_once=NUM_HEADS * max(work.lengths) * BLOCK_SIZE,
        flops_per_pair=2 * (passes + 1) * HEAD_SIZE,
    )


if __name__ == "__main__":
    from examples.ladder import rung_2_two_pass

    main(rung_1_naive, rung_2_two_pass)
