"""Greedy token choice, logit adjustments, log-probabilities and ranks.

The public ops check their arguments, then run xla.py or triton.py, depending on the backend.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from pallas_kernels import checks
from pallas_kernels.scores import triton, xla
from pallas_kernels.scores.adjustments import KEPT_MASS_COLUMN as KEPT_MASS_COLUMN
from pallas_kernels.scores.adjustments import LOGPROB_COLUMN as LOGPROB_COLUMN
from pallas_kernels.scores.adjustments import NUM_TOKEN_COLUMNS as NUM_TOKEN_COLUMNS
from pallas_kernels.scores.adjustments import RANK_COLUMN as RANK_COLUMN
from pallas_kernels.scores.adjustments import TOKEN_COLUMN as TOKEN_COLUMN
from pallas_kernels.scores.adjustments import Adjustments as Adjustments
from pallas_kernels.scores.adjustments import adjust_all_rows
from pallas_kernels.scores.xla import first_maximum as first_maximum
from pallas_kernels.types import Backend


def adjust_logits(
    logits: Float32[Array, "B V"], adjustments: Adjustments, *, backend: Backend
) -> Float32[Array, "B V"]:
    """Apply biases, forbidden tokens and penalties to the logits of the rows that need them.

    The op runs in plain XLA on every backend, because XLA fuses it with the op that follows.

    Raises:
        ValueError: Shapes do not match.
        TypeError: A dtype is not supported.
    """
    check_adjustments(logits, adjustments)
    if Backend(backend) is Backend.XLA:
        return xla.adjust_logits(logits, adjustments)
    return adjust_all_rows(logits, adjustments)


def greedy_scores(
    logits: Float32[Array, "B V"],
    adjustments: Adjustments | None,
    needs_scores: Bool[Array, "B"],
    count: int,
    *,
    reports_logits: Bool[Array, "B"] | None = None,
    backend: Backend,
) -> Int32[Array, "B W"]:
    """Choose the token with the highest adjusted logit in each row, and return its scores.

    The result has the columns of `token_scores`. Among equal logits the lowest token id wins. The
    token is -1 if the highest logit is not finite. Adjustments affect only the choice: the scores
    are computed from the original logits. For a row without adjustments, the op does not read the
    adjustment state.

    Args:
        logits: Logits of V tokens.
        adjustments: Adjustments of the logits; None leaves the logits unchanged.
        needs_scores, count, reports_logits, backend: See `token_scores`.

    Raises:
        ValueError: Shapes do not match, or `count` is negative.
        TypeError: A dtype is not supported.
    """
    check_adjustments(logits, adjustments)
    check_scores(logits, None, needs_scores, count, reports_logits)
    backend, count = Backend(backend), min(count, logits.shape[1])
    if backend is Backend.XLA or not logits.size or not count:
        return xla.greedy_scores(logits, adjustments, needs_scores, count, reports_logits)
    return triton.token_scores(
        logits,
        None,
        needs_scores,
        count,
        reports_logits,
        adjustments=adjustments,
        interpret=backend is Backend.INTERPRET,
    )


def token_scores(
    logits: Float32[Array, "T V"],
    token_ids: Int32[Array, "T"],
    needs_scores: Bool[Array, "T"],
    count: int,
    *,
    reports_logits: Bool[Array, "T"] | None = None,
    backend: Backend,
) -> Int32[Array, "T W"]:
    """Return for each row the log-probability and rank of a given token, and the most probable
    tokens.

    All results are packed into one int32 array, because reading an array costs the host tens of
    microseconds. Floats are stored as the bits of a float32. Let L = min(count, V). The columns of
    a row are:

        0           the token id from `token_ids`
        1           log-probability of the token
        2           rank: number of tokens at least as probable, so 1 is the most probable token
        3           1.0: a caller that truncates the distribution overwrites this column with the
                    sum of the probabilities that it kept
        4 + 2 i     id of the token with the i-th highest logit, for i from 0 to L - 1
        5 + 2 i     log-probability of that token

    Among equal logits the lowest token id comes first, as in `jax.lax.top_k`. The width W is
    `NUM_TOKEN_COLUMNS` + 2 L.

    Args:
        logits: Logits of V tokens.
        token_ids: One token id per row. If the id is outside the vocabulary, the log-probability
            and the rank are undefined.
        needs_scores: Whether to compute the scores of each row. In other rows only column 0 is
            defined. If no row needs scores, the op costs almost nothing.
        count: Number of most probable tokens to return per row.
        reports_logits: Whether each row returns logits instead of log-probabilities. None means
            that no row does.
        backend: The implementation to run.

    Raises:
        ValueError: Shapes do not match, or `count` is negative.
        TypeError: A dtype is not supported.
    """
    check_scores(logits, token_ids, needs_scores, count, reports_logits)
    backend, count = Backend(backend), min(count, logits.shape[1])
    if backend is Backend.XLA or not logits.size or not count:
        return xla.token_scores(logits, token_ids, needs_scores, count, reports_logits)
    interpret = backend is Backend.INTERPRET
    return triton.token_scores(
        logits, token_ids, needs_scores, count, reports_logits, interpret=interpret
    )


def check_adjustments(logits, adjustments):
    """Check the arguments of `adjust_logits`, which documents the errors."""
    sizes = checks.check_array("logits", logits, "[B, V]", jnp.float32)
    if adjustments is None:
        return
    sizes |= checks.check_array(
        "token_state", adjustments.token_state, "[R, V]", jnp.int32, **sizes
    )
    checks.check_array("biases", adjustments.biases, "[R, V]", None, **sizes)
    checks.check_array("state_rows", adjustments.state_rows, "[B]", jnp.int32, **sizes)
    checks.check_array("row_flags", adjustments.row_flags, "[B]", jnp.int32, **sizes)
    checks.check_array("penalties", adjustments.penalties, "[B, 3]", None, **sizes)


def check_scores(logits, token_ids, needs_scores, count, reports_logits=None):
    """Check the arguments of `token_scores`, which documents the errors; token_ids may be None."""
    sizes = checks.check_array("logits", logits, "[T, V]", jnp.float32)
    if token_ids is not None:
        checks.check_array("token_ids", token_ids, "[T]", jnp.int32, **sizes)
    checks.check_array("needs_scores", needs_scores, "[T]", None, **sizes)
    if reports_logits is not None:
        checks.check_array("reports_logits", reports_logits, "[T]", None, **sizes)
    if count < 0:
        raise ValueError(f"count={count} is negative: pass the number of tokens to return, or 0")
