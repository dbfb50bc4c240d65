"""Rung 1: naive attention over a contiguous cache.

The keys and values of all sequences lie in one array [B, Lmax, N, H], which a framework likes: one
einsum multiplies every query by every key. The array is a rectangle and the sequences are not, so
short ones are padded to the longest. Padding costs twice: memory that holds nothing, and FLOPs
that compute nothing. Of the lengths 128, 64, 32 and 8, padding takes

    1 - (128^2 + 64^2 + 32^2 + 8^2) / (4 * 128^2) = 67.1 %

of the multiplications, and 55 % of the slots (1 - 232 / 512); a server that does not know how long
answers will be reserves its longest sequence for each, and loses more. The scores, a square a head
of every sequence, are written and read as well: they grow with the square of the length.

Rung 2 cuts the cache into blocks, so that a sequence holds, and computes, what it fills.
"""

import jax
import jax.numpy as jnp

from examples.ladder.workload import HEAD_SIZE, NUM_HEADS, Cost, Workload, main

TITLE = "1 naive, contiguous cache"


def prepare(work: Workload):
    """Queries, and the contiguous cache; which positions of the rectangle hold tokens."""
    arrays = (work.padded(x) for x in (work.q, work.k, work.v))
    return *arrays, work.sequence, work.position


@jax.jit
def attend(q, k_cache, v_cache, sequence, position):
    """Causal attention of every token, [T, N, H]; q and the cache are [B, Lmax, N, H]."""
    scores = jnp.einsum("bqnh,bknh->bnqk", q, k_cache) / HEAD_SIZE**0.5
    # A token sees itself and what comes before it. Padding comes after all tokens, so this mask
    # hides it too; but what is masked has been computed already.
    places = jnp.arange(q.shape[1])
    visible = places[None, :] <= places[:, None]  # [query, key]
    scores = jnp.where(visible[None, None], scores, -jnp.inf)
    # Softmax needs all scores of a query: e^(s - max), over their sum. Subtracting the largest
    # score changes nothing but keeps e^s in range.
    weights = jnp.exp(scores - scores.max(axis=-1, keepdims=True))
    weights = weights / weights.sum(axis=-1, keepdims=True)
    out = jnp.einsum("bnqk,bknh->bqnh", weights, v_cache)
    return out[sequence, position]  # rows of padding are dropped, after they were computed


def cost(work: Workload) -> Cost:
    """One call, whole squares of the longest sequence for each."""
    num_slots = len(work.lengths) * max(work.lengths)
    num_pairs = num_slots * max(work.lengths)
    return Cost(
        calls=1,
        num_pairs=num_pairs,
        num_padding_pairs=num_pairs - work.num_real_pairs,
        num_rows_read=2 * num_slots,
        num_slots=num_slots,
        scores_at_once=NUM_HEADS * num_pairs,
    )


if __name__ == "__main__":
    from examples.ladder import rung_1_naive

    main(rung_1_naive)
