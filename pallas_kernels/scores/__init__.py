"""The greedy choice and how probable tokens are, of logits after their adjustments."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from pallas_kernels import checks
from pallas_kernels.scores import triton, xla
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
    """The logits after biases, forbidden tokens and penalties, in the rows that are adjusted.

    On a GPU plain XLA, which fuses it with what reads it.

    Raises:
        ValueError: shapes that do not fit.
        TypeError: logits not float32.
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
    backend: Backend,
) -> Int32[Array, "B W"]:
    """`token_scores` of each row's first maximum after its adjustments: the token first in a row,
    -1 where the highest logit is not finite. The scores are those of the unchanged logits.

    Rows that are not adjusted read no state, and cost what they cost without adjustments.

    Args:
        logits: of V tokens.
        adjustments: what changes them first; None for nothing.
        wanted, count, backend: as of `token_scores`.

    Raises:
        ValueError: shapes that do not fit; a negative count.
        TypeError: logits not float32.
    """
    check_adjustments(logits, adjustments)
    check_scores(logits, None, needs_scores, count)
    backend, count = Backend(backend), min(count, logits.shape[1])
    if backend is Backend.XLA or not logits.size or not count:
        return xla.greedy_scores(logits, adjustments, needs_scores, count)
    interpret = backend is Backend.INTERPRET
    return triton.token_scores(
        logits, None, needs_scores, count, adjustments=adjustments, interpret=interpret
    )


def token_scores(
    logits: Float32[Array, "T V"],
    token_ids: Int32[Array, "T"],
    needs_scores: Bool[Array, "T"],
    count: int,
    *,
    backend: Backend,
) -> Int32[Array, "T W"]:
    """How probable tokens are, and which ones are most: without a sort, and packed, since each
    array that a step gives back takes its host tens of microseconds.

    A row is: the token as given, its log-probability, its rank (how many tokens are at least as
    probable: 1 is the most probable); then L = min(count, V) times a token and its
    log-probability, the most probable first and of equal ones the one with the lowest id
    (`jax.lax.top_k`'s order). W = NUM_FACTS + 2 L; log-probabilities are float32 by their bits.

    Args:
        logits: of V tokens.
        token_ids: one a row; of one outside the vocabulary the log-probability and rank mean
            nothing.
        wanted: rows to fill; of others only the token is defined, and where no row is wanted next
            to nothing is computed.
        count: most probable tokens of each row.
        backend: which implementation runs.

    Raises:
        ValueError: shapes that do not fit; a negative count.
        TypeError: logits not float32.
    """
    check_scores(logits, token_ids, needs_scores, count)
    backend, count = Backend(backend), min(count, logits.shape[1])
    if backend is Backend.XLA or not logits.size or not count:
        return xla.token_scores(logits, token_ids, needs_scores, count)
    interpret = backend is Backend.INTERPRET
    return triton.token_scores(logits, token_ids, needs_scores, count, interpret=interpret)


def check_adjustments(logits, adjustments):
    """A matrix of logits, and adjustments of its rows and tokens."""
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


def check_scores(logits, token_ids, needs_scores, count):
    """A matrix of logits, and a mark a row; a token, too, unless it is None."""
    sizes = checks.check_array("logits", logits, "[T, V]", jnp.float32)
    if token_ids is not None:
        checks.check_array("token_ids", token_ids, "[T]", jnp.int32, **sizes)
    checks.check_array("needs_scores", needs_scores, "[T]", None, **sizes)
    if count < 0:
        raise ValueError(f"count={count} is negative: 0 asks for no other tokens")
