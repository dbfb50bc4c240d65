"""Rung 3: online softmax over blocks (Milakov and Gimelshein, arXiv:1805.02867).

One pass suffices without knowing the largest score in advance. The loop keeps the largest score so
far, and computes weights relative to it. When a block has a larger score, the earlier weights of a
query are too large by one factor:

    e^(s - new) = e^(s - old) * e^(old - new)

So the loop rescales the running sum and output by e^(old - new), and adds the block. Keys are read
and multiplied once, as in rung 1, and only one block's scores exist at a time. This loop is the
core of FlashAttention and of jpaged's attention kernels.

One problem remains: each block of each sequence needs a call, and a call is too small to keep a
device busy. Rung 4 computes all sequences in one call.
"""

import jax
import jax.numpy as jnp

from examples.ladder import rung_2_two_pass

# `prepare` is the same function as in rung 2.
from examples.ladder.rung_2_two_pass import prepare, scores_of_block
from examples.ladder.workload import Cost, Workload, main

TITLE = "3 online softmax over blocks"

__all__ = ["TITLE", "attend", "cost", "prepare"]


def attend(queries, k_pool, v_pool, block_tables):
    """Return the causal attention of every token, [T, N, H]; compute one sequence after another."""
    outs = []
    for q, table in zip(queries, block_tables, strict=True):
        largest = jnp.full(q.shape[:2], -jnp.inf)  # [L, N]
        total, out = jnp.zeros(q.shape[:2]), jnp.zeros(q.shape)
        for index, block in enumerate(table):
            largest, total, out = fold(largest, total, out, q, k_pool, v_pool, block, index)
        outs.append(out / total[..., None])
    return jnp.concatenate(outs)


@jax.jit
def fold(largest, total, out, q, k_pool, v_pool, block, index):
    """Update the largest score, the sum of weights, and the weighted values with a block's keys."""
    scores = scores_of_block(q, k_pool[block], index)
    new_largest = jnp.maximum(largest, scores.max(axis=-1))
    # Every query sees at least the first key of block 0, so `new_largest` is always finite. For
    # block 0, `largest` is -inf, so `rescale` is e^(-inf) = 0.
    rescale = jnp.exp(largest - new_largest)
    weights = jnp.exp(scores - new_largest[..., None])
    total = total * rescale + weights.sum(axis=-1)
    out = out * rescale[..., None] + jnp.einsum("qns,snh->qnh", weights, v_pool[block])
    return new_largest, total, out


def cost(work: Workload) -> Cost:
    """Return the cost. It is the cost of rung 2, but with one pass instead of two."""
    return rung_2_two_pass.cost(work, passes=1)


if __name__ == "__main__":
    from examples.ladder import rung_3_online

    main(rung_2_two_pass, rung_3_online)
