"""Greedy token choice, log-probabilities and ranks in plain XLA."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from pallas_kernels.scores.adjustments import (
    IS_ADJUSTED,
    NUM_TOKEN_COLUMNS,
    TOKEN_COLUMN,
    Adjustments,
    adjust_all_rows,
)


def first_maximum(x: Float32[Array, "B V"]) -> tuple[Int32[Array, "B"], Float32[Array, "B"]]:
    """Return the index and the value of the first maximum of each row.

    NaN counts as the highest value. The function reads each row once, and XLA fuses the computation
    of `x` into that pass. `jnp.argmax` does the same reduction, but returns no values.
    """

    def higher(left, right):
        (x, i), (y, j) = left, right
        is_left = (x > y) | (x != x) | ((x == y) & (i < j))
        return jnp.where(is_left, x, y), jnp.where(is_left, i, j)

    column = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
    nothing = jnp.float32(-jnp.inf), jnp.int32(0)
    height, index = jax.lax.reduce((x, column), nothing, higher, (1,))
    return index, height


def greedy_scores(
    logits: Float32[Array, "B V"],
    adjustments: Adjustments | None,
    needs_scores: Bool[Array, "B"],
    count: int,
    reports_logits: Bool[Array, "B"] | None,
) -> Int32[Array, "B W"]:
    """Run the public op `greedy_scores` in plain XLA."""
    x = logits if adjustments is None else adjust_logits(logits, adjustments)
    best, height = first_maximum(x)
    token_ids = jnp.where(jnp.isfinite(height), best, jnp.int32(-1))
    return token_scores(logits, token_ids, needs_scores, count, reports_logits)


def adjust_logits(logits: Float32[Array, "B V"], adjustments: Adjustments) -> Float32[Array, "B V"]:
    """Run the public op `adjust_logits` in plain XLA; skip the work if no row has adjustments."""
    adjusts = ((adjustments.row_flags & IS_ADJUSTED) != 0).any()
    return jax.lax.cond(adjusts, lambda: adjust_all_rows(logits, adjustments), lambda: logits)


def token_scores(
    logits: Float32[Array, "T V"],
    token_ids: Int32[Array, "T"],
    needs_scores: Bool[Array, "T"],
    count: int,
    reports_logits: Bool[Array, "T"] | None,
) -> Int32[Array, "T W"]:
    """Run the public op `token_scores` in plain XLA, for a `count` of at most V.

    If any row needs scores, the function computes the scores of all rows.
    """

    def score() -> Int32[Array, "T W"]:
        total = _log_sum_exp(logits)
        if reports_logits is not None:
            total = jnp.where(reports_logits, 0.0, total)
        known = jnp.clip(token_ids, 0, logits.shape[1] - 1)
        chosen = jnp.take_along_axis(logits, known[:, None], axis=1)
        values, ids = jax.lax.top_k(logits, count)
        top = jnp.stack([ids.astype(jnp.int32), _float_bits(values - total[:, None])], axis=2)
        logprobs = _float_bits(chosen[:, 0] - total)
        ranks = (logits >= chosen).sum(axis=1, dtype=jnp.int32)
        facts = token_ids, logprobs, ranks, _float_bits(jnp.ones_like(total))
        return jnp.concatenate([jnp.stack(facts, axis=1), top.reshape(len(ids), -1)], axis=1)

    def skip() -> Int32[Array, "T W"]:
        empty = jnp.zeros((logits.shape[0], NUM_TOKEN_COLUMNS + 2 * count), jnp.int32)
        return empty.at[:, TOKEN_COLUMN].set(token_ids)

    return jax.lax.cond(needs_scores.any(), score, skip)


def _log_sum_exp(logits: Float32[Array, "T V"]) -> Float32[Array, "T"]:
    """Return the log-sum-exp of each row, one row after another.

    The order in which XLA adds the numbers of a row may depend on the number of rows. In a loop,
    XLA always reduces one row, so the order is always the same. The loop has at least two steps,
    because XLA would inline a single step. On a CPU the loop is as fast as one reduction.
    """
    num_rows = logits.shape[0]
    if not num_rows:
        return jnp.zeros(0, logits.dtype)
    indices = jnp.minimum(jnp.arange(max(num_rows, 2), dtype=jnp.int32), num_rows - 1)

    def reduce_row(index: Int32[Array, ""]) -> Float32[Array, ""]:
        return jax.nn.logsumexp(jax.lax.dynamic_index_in_dim(logits, index, keepdims=False))

    return jax.lax.map(reduce_row, indices)[:num_rows]


def _float_bits(x: Float32[Array, "*axes"]) -> Int32[Array, "*axes"]:
    return jax.lax.bitcast_convert_type(x, jnp.int32)
