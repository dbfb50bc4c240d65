"""Test min-p, top-k and top-p truncation, which does not sort, against sorting."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import on_backends

from pallas_kernels import Backend, truncation, truncation_mask
from tests.covering import num_examples
from tests.reference import kernels as reference

B, V = 4, 24
SMALL_BATCH = 6  # rows
OFF = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
_truncate = jax.jit(truncation_mask, static_argnames="backend")


def _parameters(rows):
    rows = [{**OFF, **one} for one in rows]

    def column(name):
        dtype = np.int32 if name == "top_k" else np.float32
        return jnp.asarray(np.array([one[name] for one in rows], dtype))

    return {name: column(name) for name in OFF}


def _kept(logits, rows, backend):
    """Run `truncation_mask`, and return the mask of kept tokens.

    Small inputs are padded with tokens of logit -inf and with more rows. All small inputs then have
    the same shape, so JAX compiles the op once.
    """
    logits = np.asarray(logits, np.float32)
    num_rows, width = logits.shape
    if num_rows <= SMALL_BATCH and width <= V:
        more = SMALL_BATCH - num_rows
        logits = np.pad(logits, ((0, 0), (0, V - width)), constant_values=-np.inf)
        logits = np.pad(logits, ((0, more), (0, 0)), mode="edge")
        rows = [*rows, *[rows[-1]] * more]
    kept = _truncate(jnp.asarray(logits), **_parameters(rows), backend=backend)
    return np.asarray(kept)[:num_rows, :width]


def _bounds(logits, rows):
    """Return two masks: the tokens that must be kept, and the tokens that may be kept.

    The masks differ only for tokens so close to a threshold that float32 rounding decides.
    """

    def kept(top_p, min_p):
        changed = [
            {
                **one,
                "top_p": one["top_p"] * top_p if one["top_p"] < 1 else 1.0,
                "min_p": min(one["min_p"] * min_p, 1.0),
            }
            for one in ({**OFF, **row} for row in rows)
        ]
        arrays: dict[str, Any] = {name: np.array([one[name] for one in changed]) for name in OFF}
        return reference.truncation_mask(np.asarray(logits, np.float32), **arrays)

    return kept(1 - 4e-6, 1 + 3e-5), kept(1 + 4e-6, 1 - 3e-5)


def _check(logits, rows, backend):
    kept = _kept(logits, rows, backend)
    must, may = _bounds(logits, rows)
    assert kept.any(axis=1).all()
    assert kept[must].all(), rows
    assert not (kept & ~may).any(), rows
    return kept


_value = st.one_of(
    st.integers(-3, 3).map(float),  # many ties
    st.floats(-40, 40, width=32, allow_subnormal=False),
    st.sampled_from([-np.inf, 0.0, -0.0, 1e30, -1e30]),
)
_row = st.lists(_value, min_size=V, max_size=V).filter(lambda row: max(row) > -np.inf)
_settings = st.fixed_dictionaries(
    {
        "top_p": st.one_of(st.just(1.0), st.floats(1e-6, 1.0), st.sampled_from([0.25, 0.5, 1e-9])),
        "top_k": st.sampled_from([0, 1, 2, 5, V - 1, V, V + 1, 10**6]),
        "min_p": st.one_of(st.just(0.0), st.floats(1e-30, 1), st.just(1.0)),
    }
)


@settings(max_examples=num_examples(100), deadline=None)
@given(
    rows=st.lists(_row, min_size=B, max_size=B),
    scales=st.lists(st.sampled_from([1e-20, 1e-3, 1.0, 1e6]), min_size=B, max_size=B),
    params=st.lists(_settings, min_size=B, max_size=B),
)
def test_min_p_top_k_and_top_p_of_random_logits_match_sorting(rows, scales, params, backend):
    logits = np.array(rows, np.float32) * np.array(scales, np.float32)[:, None]
    logits[np.abs(logits) < 1e-30] = 0.0  # XLA treats subnormal numbers as zeros.
    _check(logits, params, backend)


def test_top_k_keeps_all_tokens_tied_with_the_last_kept_token(backend):
    row = np.array([5, 3, 3, 3, 1, 0], np.float32)
    kept = _kept([row] * 4, [{"top_k": k} for k in (1, 2, 4, 5)], backend)
    assert kept.sum(axis=1).tolist() == [1, 4, 4, 5]
    # 0.0 and -0.0 are equal.
    kept = _kept([[0.0, -0.0, -1.0, -2.0]], [{"top_k": 1}], backend)
    assert kept[0].tolist() == [True, True, False, False]


@pytest.mark.parametrize("temperature", [1.0, 0.25, 3.0])
def test_top_p_keeps_the_smallest_set_with_enough_probability(temperature, backend):
    row = temperature * np.log(np.array([0.5, 0.25, 0.125, 0.125], np.float32))
    wanted = {0.1: 1, 0.49: 1, 0.51: 2, 0.74: 2, 0.76: 4, 1.0: 4}
    params = [{"top_p": p, "temperature": temperature} for p in wanted]
    kept = _kept([row] * len(wanted), params, backend)
    assert kept.sum(axis=1).tolist() == list(wanted.values())


def test_top_p_applies_after_top_k_and_min_p(backend):
    row = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    # After top-k or min-p, probabilities 0.4 and 0.3 remain. 0.4 is 57% of their sum, which is
    # enough for a top_p of 0.55.
    params = [{"top_p": 0.55}, {"top_p": 0.55, "top_k": 2}, {"top_p": 0.55, "min_p": 0.6}]
    assert _kept([row] * 3, params, backend).sum(axis=1).tolist() == [2, 1, 1]


@pytest.mark.parametrize("one", [{"top_p": 1e-9}, {"top_p": 1e-60}, {"min_p": 1.0}, {"top_k": 1}])
def test_min_p_top_k_and_top_p_keep_all_tokens_if_all_logits_are_equal(one, backend):
    assert _kept(np.full((1, V), -7.5), [one], backend).all()


def test_all_tokens_are_kept_without_min_p_top_k_and_top_p(backend):
    row = np.where(np.arange(V) == 3, 0.0, -1e30)
    assert _kept([row], [{}], backend).all()


LARGE = {
    "normal": lambda rng, shape: rng.randn(*shape) * 2,
    "nearly flat": lambda rng, shape: rng.randn(*shape) * 0.1,
    "peaked": lambda rng, shape: rng.standard_t(2, shape) * 3,
    # The number of candidate tokens exceeds the number that the kernel can collect.
    "many ties": lambda rng, shape: np.round(rng.randn(*shape) * 2) / 2,
    "one value": lambda rng, shape: np.full(shape, 3.0),
}


@pytest.mark.parametrize(
    ("name", "backend"),
    on_backends(
        LARGE,
        strength=0,
        keep=lambda name, backend: backend is Backend.INTERPRET or name == "normal",
    ),
)
def test_min_p_top_k_and_top_p_of_a_large_vocabulary_match_sorting(name, backend):
    params = [{"top_p": p} for p in (0.1, 0.9, 0.99, 0.999)]
    params += [{"top_p": 0.9, "temperature": t, "min_p": 1e-4} for t in (0.1, 1.7)]
    params += [{"top_k": k, "top_p": p} for k in (1, 20, 12_000) for p in (1.0, 0.5)]
    # A vocabulary of 50,000 tokens is not a whole number of the kernel's chunks.
    logits = LARGE[name](np.random.RandomState(0), (len(params), 50_000)).astype(np.float32)
    # One token gets a much higher logit, so most other tokens are far less probable.
    logits[::2, 7] = logits.max() + 3
    _check(logits, params, backend)


@pytest.mark.parametrize(
    ("part", "backend"),
    on_backends(
        [slice(1), slice(3, 7)], strength=0, keep=lambda _, backend: backend is Backend.XLA
    ),
)
def test_top_p_threshold_does_not_depend_on_the_batch(part, backend):
    # Up to rounding, each row's top_p equals the total probability of the row's `count` + 1 most
    # probable tokens. A different rounding in another batch would therefore change the mask.
    logits = np.random.RandomState(1).randn(16, 300).astype(np.float32)
    weight = np.sort(np.exp(logits - logits.max(axis=1, keepdims=True)), axis=1)[:, ::-1]
    mass = np.cumsum(weight, axis=1, dtype=np.float32) / weight.sum(axis=1, keepdims=True)
    for count in range(10, 250, 80):
        params = [{"top_p": float(row[count])} for row in mass]
        together = _kept(logits, params, backend)
        some = _kept(logits[part], params[part], backend)
        np.testing.assert_array_equal(some, together[part])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_row_with_nan_or_infinity_changes_no_other_row(bad, backend):
    """The search for a threshold must terminate even for the row with NaN or infinity."""
    logits = np.random.RandomState(2).randn(B, V).astype(np.float32)
    for one in ({"top_p": 0.7}, {"top_k": 9}, {"top_k": 9, "top_p": 0.7, "min_p": 0.01}):
        clean = _kept(logits, [one] * B, backend)
        for columns in (slice(None), slice(5, 6)):
            ruined = logits.copy()
            ruined[1, columns] = bad
            kept = _kept(ruined, [one] * B, backend)
            np.testing.assert_array_equal(kept[[0, 2, 3]], clean[[0, 2, 3]])


def test_min_p_top_k_and_top_p_lower_without_a_sort():
    logits = jnp.zeros((B, V), jnp.float32)
    text = _truncate.lower(logits, **_parameters([{}] * B), backend=Backend.XLA).as_text()
    assert "stablehlo.sort" not in text
    assert "chlo.top_k" not in text


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"top_k": jnp.zeros(B, jnp.float32)}, TypeError, "top_k has dtype float32"),
        ({"top_p": jnp.zeros(B + 1, jnp.float32)}, ValueError, "top_p has shape"),
        ({"min_p": jnp.zeros(B, jnp.int32)}, TypeError, "min_p has dtype int32"),
    ],
)
def test_error_names_min_p_top_k_or_top_p_of_wrong_dtype_or_shape(change, error, message):
    arguments = {**_parameters([{}] * B), **change}
    with pytest.raises(error, match=message):
        truncation.check_truncation(jnp.zeros((B, V), jnp.float32), **arguments)
