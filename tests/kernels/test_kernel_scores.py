"""Test token scores and the greedy choice of adjusted logits against sorting and loops."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import on_backends

from pallas_kernels import (
    KEPT_MASS_COLUMN,
    NUM_TOKEN_COLUMNS,
    Adjustments,
    Backend,
    adjust_logits,
    greedy_scores,
    scores,
    token_scores,
)
from pallas_kernels.scores.adjustments import (
    BELOW_MIN_TOKENS,
    HAS_BIASES,
    IN_PROMPT,
    IS_ADJUSTED,
    IS_ENDING,
)
from tests.reference import kernels as reference

B, R = 4, 6
# Sizes of the vocabulary. The kernel divides the vocabulary into chunks of 4,096 tokens, and chunks
# into blocks of 128 tokens. The sizes are: less than a block, more than a block, more than a chunk,
# and two whole chunks.
WIDTHS = [5, 130, 4099, 8192]
_scores = jax.jit(token_scores, static_argnames=("count", "backend"))
_greedy = jax.jit(greedy_scores, static_argnames=("count", "backend"))
ALL = jnp.ones(B, jnp.bool_)


def _logits(width, seed=0, spread=3.0):
    return (np.random.default_rng(seed).standard_normal((B, width)) * spread).astype(np.float32)


def _run_scores(logits, tokens, count, backend, wanted=None, reports_logits=None):
    wanted = np.ones(len(logits), np.bool_) if wanted is None else np.array(wanted)
    given = jnp.asarray(logits), jnp.asarray(tokens, jnp.int32), jnp.asarray(wanted)
    options = {"count": count, "backend": backend, "reports_logits": reports_logits}
    return np.asarray(_scores(*given, **options))


def _check(logits, tokens, count, backend, reports_logits=None):
    packed = _run_scores(logits, tokens, count, backend, reports_logits=reports_logits)
    count = min(count, logits.shape[1])
    assert packed.shape == (len(logits), NUM_TOKEN_COLUMNS + 2 * count)
    np.testing.assert_array_equal(packed[:, KEPT_MASS_COLUMN].view(np.float32), 1.0)
    expected = reference.token_scores(logits, tokens, count, reports_logits=reports_logits)
    for row, token, (logprob, rank, top, logprobs) in zip(packed, tokens, expected, strict=True):
        assert (row[0], row[2]) == (token, rank)
        np.testing.assert_array_equal(row[NUM_TOKEN_COLUMNS::2], top)
        found = row[[1, *range(NUM_TOKEN_COLUMNS + 1, len(row), 2)]].view(np.float32)
        np.testing.assert_allclose(found, [logprob, *logprobs], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("width", WIDTHS)
def test_scores_match_sorted_reference(width, backend):
    logits = _logits(width)
    tokens = [0, width - 1, int(logits[2].argmax()), int(logits[3].argmin())]
    for count in (1, 20) if width == 130 else (20,):
        _check(logits, tokens, count, backend)


@pytest.mark.parametrize("width", [5, 4099])
def test_each_row_can_return_logits_instead_of_logprobs(width, backend):
    logits, reports_logits = _logits(width), np.array([True, False, False, True])
    logits[3, 1:4] = -np.inf
    _check(logits, [0, width - 1, 3, 2], 4, backend, reports_logits)
    packed = _greedy(
        jnp.asarray(logits), None, ALL, count=4, backend=backend, reports_logits=reports_logits
    )
    highest = np.asarray(packed)[:, 1].view(np.float32)
    np.testing.assert_array_equal(highest[[0, 3]], logits.max(axis=1)[[0, 3]])
    assert (highest[1:3] < 0).all()


def test_tokens_with_equal_logits_are_ordered_by_id(backend):
    """Equal logits are in one block, in different blocks or in different chunks of the vocabulary.
    In one row, all logits are equal."""
    logits = np.stack([np.round(row) for row in _logits(4099, spread=1.0)])
    logits[1] = 7.0
    logits[2, [4098, 4095, 4096, 127, 128, 3, 2000]] = 99.0
    _check(logits, [5, 4098, 4096, 0], 20, backend)


def test_forbidden_tokens_come_last_in_order_of_id(backend):
    logits = np.full((B, 4099), -np.inf, np.float32)
    logits[:, 4000:4007] = _logits(7)
    logits[1, :3] = -1e38
    _check(logits, [4000, 1, 4006, 0], 20, backend)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.integers(-3, 3).map(float),  # many ties
            st.floats(-60, 60, width=32, allow_subnormal=False),
            st.sampled_from([-np.inf, 1e30, -1e30]),
            # Adding 0.0 turns -0.0 into 0.0. The op ranks 0.0 above -0.0, unlike the reference.
        ).map(lambda x: x + 0.0),
        min_size=150,
        max_size=150,
    ).filter(lambda row: max(row) > -np.inf),
    st.integers(0, 149),
)
def test_scores_of_random_rows_match_sorted_reference(backend, row, token):
    _check(np.array([row], np.float32), [token], 20, backend)


def test_nan_infinity_and_zeros_are_ordered_like_top_k(backend):
    logits = _logits(4099)
    logits[:, 100:109] = [np.nan, -np.nan, np.inf, -np.inf, -0.0, 0.0, 0.0, -0.0, np.nan]
    logits[2] = np.nan
    logits[3] = np.tile(np.array([-0.0, 0.0], np.float32), 2050)[:4099]
    packed = _run_scores(logits, [0] * B, 20, backend)
    expected = np.asarray(jax.lax.top_k(logits, 20)[1])
    np.testing.assert_array_equal(packed[:, NUM_TOKEN_COLUMNS::2], expected)


def test_scored_rows_do_not_depend_on_other_rows(backend):
    logits, tokens = _logits(4099), [9, -1, 5000, 4098]
    whole = _run_scores(logits, tokens, 20, backend)
    for wanted in ([True, False, False, True], [False] * B):
        part = _run_scores(logits, tokens, 20, backend, wanted)
        np.testing.assert_array_equal(part[:, 0], tokens)
        np.testing.assert_array_equal(part[wanted], whole[wanted])


def test_scores_with_zero_top_tokens_contain_only_the_chosen_token():
    packed = _run_scores(_logits(40), [1] * B, 0, Backend.XLA)
    assert packed.shape == (B, NUM_TOKEN_COLUMNS)
    with pytest.raises(ValueError, match="count=-1 is negative"):
        _run_scores(_logits(40), [1] * B, -1, Backend.XLA)


def _adjustments(width, row_flags, seed=1):
    rng = np.random.default_rng(seed)
    words = rng.integers(0, 3, (R, width)) * (rng.random((R, width)) < 0.3)
    words |= np.where(rng.random((R, width)) < 0.2, IN_PROMPT, 0)
    words |= np.where(rng.random((R, width)) < 0.1, IS_ENDING, 0)
    biases = np.where(rng.random((R, width)) < 0.1, rng.standard_normal((R, width)), 0)
    biases[:, 1] = -np.inf
    penalties = np.array([[1.3, 0.5, 0.2], [1.0, 0.0, 0.0], [0.7, -0.5, 1.5], [2.0, 1.0, -0.3]])
    return Adjustments(
        jnp.asarray(words, jnp.int32),
        jnp.asarray(biases, jnp.float32),
        jnp.asarray([3, 0, 5, 2], jnp.int32),
        jnp.asarray(row_flags, jnp.int32),
        jnp.asarray(penalties, jnp.float32),
    )


ROW_FLAGS = [
    [IS_ADJUSTED, 0, IS_ADJUSTED | BELOW_MIN_TOKENS, IS_ADJUSTED | HAS_BIASES],
    [IS_ADJUSTED | HAS_BIASES | BELOW_MIN_TOKENS] * B,
    [0, HAS_BIASES, BELOW_MIN_TOKENS, HAS_BIASES | BELOW_MIN_TOKENS],
]


@pytest.mark.parametrize(
    ("width", "row_flags", "backend"),
    on_backends(
        WIDTHS,
        ROW_FLAGS,
        strength=0,
        keep=lambda width, _, backend: (
            width == 4099 or (backend is Backend.INTERPRET and width == 5)
        ),
    ),
)
def test_greedy_token_has_the_highest_adjusted_logit(width, row_flags, backend):
    logits, adjustments = _logits(width), _adjustments(width, row_flags)
    state: list[Any] = [np.asarray(array) for array in adjustments]
    expected = reference.adjust_logits(logits, *state)
    packed = _greedy(jnp.asarray(logits), adjustments, ALL, count=20, backend=backend)
    tokens = expected.argmax(axis=1)
    np.testing.assert_array_equal(np.asarray(packed[:, 0]), tokens)
    scores_without_adjustments = _run_scores(logits, tokens, 20, backend)
    np.testing.assert_array_equal(np.asarray(packed), scores_without_adjustments)
    found = jax.jit(partial(adjust_logits, backend=backend))(jnp.asarray(logits), adjustments)
    np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-6, atol=1e-5)


def test_row_without_logit_adjustments_does_not_read_the_adjustment_state(backend):
    logits, adjustments = _logits(4099), _adjustments(4099, [0, 0, 0, HAS_BIASES])
    poisoned = adjustments._replace(biases=jnp.full((R, 4099), jnp.nan))
    options = {"count": 20, "backend": backend}
    packed = _greedy(jnp.asarray(logits), poisoned, ALL, **options)
    np.testing.assert_array_equal(np.asarray(packed[:, 0]), logits.argmax(axis=1))
    unbiased = poisoned._replace(row_flags=jnp.full(B, IS_ADJUSTED, jnp.int32))
    packed = _greedy(jnp.asarray(logits), unbiased, ALL, **options)
    assert (np.asarray(packed[:, 0]) >= 0).all()


def test_greedy_token_is_the_first_token_with_the_maximum_logit(backend):
    """The token is -1 if the maximum logit of the row is NaN or infinite."""
    logits = np.zeros((7, 4099), np.float32)
    logits[0, [0, 1, 4097]] = -0.0  # The other logits are 0.0, which equals -0.0.
    logits[1, [4098, 4096, 4095]] = 5.0
    logits[2, [7, 4097]] = np.nan, 100
    logits[3, 4098] = np.inf
    logits[4] = -np.inf
    logits[5, 5] = -np.nan
    logits[6, :4098] = -np.inf
    wanted = jnp.zeros(7, jnp.bool_)
    packed = _greedy(jnp.asarray(logits), None, wanted, count=2, backend=backend)
    assert np.asarray(packed[:, 0]).tolist() == [0, 4095, -1, -1, -1, -1, 4098]


def test_mismatched_shapes_of_scores_raise_errors():
    logits, adjustments = jnp.zeros((B, 8)), _adjustments(8, [0] * B)
    for name in ("token_state", "biases", "state_rows", "row_flags", "penalties"):
        wrong = adjustments._replace(**{name: getattr(adjustments, name)[..., :-1]})
        with pytest.raises(ValueError, match=name):
            scores.check_adjustments(logits, wrong)
    tokens, wanted = jnp.zeros(B, jnp.int32), jnp.ones(B, jnp.bool_)
    for error, message, arguments in (
        (ValueError, "token_ids has shape", (logits, tokens[1:], wanted)),
        (ValueError, "needs_scores has shape", (logits, tokens, wanted[1:])),
        (TypeError, "logits has dtype", (logits.astype(jnp.bfloat16), tokens, wanted)),
    ):
        with pytest.raises(error, match=message):
            scores.check_scores(*arguments, 1)
