"""Rung 1: naive attention over a contiguous cache.

The keys and values of all sequences are in one array [B, Lmax, N, H], so one einsum multiplies
every query by every key. Short sequences are padded to the longest. Padding wastes memory and
FLOPs. With the lengths 128, 64, 32 and 8, padding takes

    1 - (128^2 + 64^2 + 32^2 + 8^2) / (4 * 128^2) = 67.1 %

of the multiplications, and 55 % of the slots (1 - 232 / 512). A server that does not know the
output lengths wastes more, because it reserves the maximum length for each sequence. The scores,
one square matrix per head and sequence, are also written to memory and read back. Their size grows
with the square of the length.

Rung 2 cuts the cache into blocks, so that a sequence holds and computes only its own tokens.
"""

import jax
import jax.numpy as jnp

from examples.ladder.workload import HEAD_SIZE, NUM_HEADS, Cost, Workload, main

TITLE = "1 naive, contiguous cache"


def prepare(work: Workload):
    """Return padded queries, keys and values; and the sequence and position of each token."""
    arrays = (work.padded(x) for x in (work.q, work.k, work.v))
    return *arrays, work.sequence, work.position


@jax.jit
def attend(q, k_cache, v_cache, sequence, position):
    """Return the causal attention of every token, [T, N, H]; q and the cache are padded."""
    scores = jnp.einsum("bqnh,bknh->bnqk", q, k_cache) / HEAD_SIZE**0.5
    # A token sees itself and the tokens before it. Padding comes after the tokens, so the causal
    # mask hides the padding too. The mask saves no work, because the einsum has computed all
    # scores.
    places = jnp.arange(q.shape[1])
    visible = places[None, :] <= places[:, None]  # [query, key]
    scores = jnp.where(visible[None, None], scores, -jnp.inf)
    # Softmax divides e^(s - max) by its sum over all scores s of a query. Subtracting the maximum
    # does not change the result, and prevents an overflow of e^s.
    weights = jnp.exp(scores - scores.max(axis=-1, keepdims=True))
    weights = weights / weights.sum(axis=-1, keepdims=True)
    out = jnp.einsum("bnqk,bknh->bqnh", weights, v_cache)
    return out[sequence, position]  # The padding rows were computed too. Drop them here.


def cost(work: Workload) -> Cost:
    """Return the cost of one call with an Lmax x Lmax score matrix per sequence and head."""
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
