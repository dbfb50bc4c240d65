"""Rung 3: online softmax over blocks (Milakov and Gimelshein, arXiv:1805.02867).

The largest score need not be known beforehand. Keep the largest so far, and weights relative to it;
when a block brings a larger one, all that was added up is too large by one factor for each query:

    e^(s - new) = e^(s - old) * e^(old - new)

so the running sum and output are rescaled, and the block is added. One pass does it: keys are read
and multiplied once, as in rung 1, and still only one block's scores exist at a time. This is the
loop inside FlashAttention, and inside every kernel of jpaged.

What is left to mend is the number of calls: one for each block of each sequence, all of them too
small to keep a device busy. Rung 4 takes all sequences in one call.
"""

import jax
import jax.numpy as jnp

from examples.ladder import rung_2_two_pass
from examples.ladder.rung_2_two_pass import prepare, scores_of_block  # the same pool and scores
from examples.ladder.workload import Cost, Workload, main

TITLE = "3 online softmax over blocks"

__all__ = ["TITLE", "attend", "cost", "prepare"]


def attend(queries, k_pool, v_pool, block_tables):
    """Causal attention of every token, [T, N, H], one sequence after the other."""
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
    """Largest score, sum of weights and of weighted values, with this block's."""
    scores = scores_of_block(q, k_pool[block], index)
    new_largest = jnp.maximum(largest, scores.max(axis=-1))
    # Block 0 shows each query at least one key (the first), so from there on no maximum is -inf;
    # before it, e^(-inf - new) = 0 clears what is not there.
    rescale = jnp.exp(largest - new_largest)
    weights = jnp.exp(scores - new_largest[..., None])
    total = total * rescale + weights.sum(axis=-1)
    out = out * rescale[..., None] + jnp.einsum("qns,snh->qnh", weights, v_pool[block])
    return new_largest, total, out


def cost(work: Workload) -> Cost:
    """As rung 2, with one pass."""
    return rung_2_two_pass.cost(work, passes=1)


if __name__ == "__main__":
    from examples.ladder import rung_3_online

    main(rung_2_two_pass, rung_3_online)
