"""Truncation by bisection against truncation by sorting."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.runtime.sampling_state import ROW_WIDTH, decode_rows, encode_row
from jpaged.runtime.truncation import truncate
from jpaged.sampling_params import SamplingParams

B, V = 4, 24
_truncate = jax.jit(truncate)


def _kept(logits, settings_of_rows):
    logits = np.asarray(logits, np.float32)
    packed = np.stack([encode_row(SamplingParams(**one), 0) for one in settings_of_rows])
    rows = decode_rows(jnp.asarray(packed), jnp.zeros(len(packed), jnp.int32))
    out = np.asarray(_truncate(jnp.asarray(logits), rows))
    kept = ~np.isneginf(out)
    np.testing.assert_array_equal(out[kept], logits[kept])
    return kept


def _kept_by_sorting(logits, *, top_p, top_k, min_p):
    """The oracle: one row in float64, the filters one after the other on sorted logits."""
    x = logits.astype(np.float64)
    weight = np.exp(x - x.max())
    kept = x - x.max() >= (np.log(min_p) if min_p else -np.inf)
    if 0 < top_k < len(x):
        kept &= x >= np.sort(np.where(kept, x, -np.inf))[::-1][top_k - 1]
    if top_p < 1:
        order = np.sort(x[kept])[::-1]
        mass = np.cumsum(np.sort(weight[kept])[::-1])
        last = min(np.searchsorted(mass, top_p * mass[-1]), len(order) - 1)
        kept &= x >= order[last]
    return kept & ~np.isneginf(x)


def _bounds(logits, one):
    """What must and what may be kept, a float32 rounding either side of top_p and min_p."""
    loose = {
        "top_k": one["top_k"],
        "top_p": one["top_p"] * (1 + 4e-6),
        "min_p": one["min_p"] * (1 - 3e-5),
    }
    tight = {
        "top_k": one["top_k"],
        "top_p": one["top_p"] * (1 - 4e-6) if one["top_p"] < 1 else 1.0,
        "min_p": min(one["min_p"] * (1 + 3e-5), 1.0),
    }
    return _kept_by_sorting(logits, **tight), _kept_by_sorting(logits, **loose)


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


@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(_row, min_size=B, max_size=B),
    scales=st.lists(st.sampled_from([1e-20, 1e-3, 1.0, 1e6]), min_size=B, max_size=B),
    params=st.lists(_settings, min_size=B, max_size=B),
)
def test_keeps_what_sorting_keeps(rows, scales, params):
    logits = np.array(rows, np.float32) * np.array(scales, np.float32)[:, None]
    logits[np.abs(logits) < 1e-30] = 0.0  # subnormal numbers are zeros to XLA
    kept = _kept(logits, params)
    for row, one, found in zip(logits, params, kept, strict=True):
        must, may = _bounds(row, one)
        assert found.any()
        assert (found[must]).all(), (row, one)
        assert not (found & ~may).any(), (row, one)


def test_top_k_keeps_the_ties_of_the_last():
    row = np.array([5, 3, 3, 3, 1, 0], np.float32)
    kept = _kept([row] * 4, [{"top_k": k} for k in (1, 2, 4, 5)])
    assert kept.sum(axis=1).tolist() == [1, 4, 4, 5]


def test_the_two_zeros_are_a_tie():
    kept = _kept([[0.0, -0.0, -1.0, -2.0]], [{"top_k": 1}])
    assert kept[0].tolist() == [True, True, False, False]


def test_top_p_keeps_the_smallest_set_with_the_mass():
    row = np.log(np.array([0.5, 0.25, 0.125, 0.125], np.float32))
    wanted = {0.1: 1, 0.49: 1, 0.51: 2, 0.74: 2, 0.76: 4, 1.0: 4}
    kept = _kept([row] * len(wanted), [{"top_p": p} for p in wanted])
    assert kept.sum(axis=1).tolist() == list(wanted.values())


def test_top_p_counts_what_top_k_and_min_p_left():
    row = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    # Of 0.4 and 0.3 alone, 0.4 is 57 %: enough for 0.55, and too little among all four.
    params = [{"top_p": 0.55}, {"top_p": 0.55, "top_k": 2}, {"top_p": 0.55, "min_p": 0.6}]
    assert _kept([row] * 3, params).sum(axis=1).tolist() == [2, 1, 1]


@pytest.mark.parametrize("one", [{"top_p": 1e-9}, {"top_p": 1e-60}, {"min_p": 1.0}, {"top_k": 1}])
def test_equal_logits_stay_together(one):
    assert _kept(np.full((1, V), -7.5), [one]).all()


def test_nothing_on_keeps_even_what_has_no_probability():
    row = np.where(np.arange(V) == 3, 0.0, -1e30)
    assert _kept([row], [{}]).all()


def test_a_large_vocabulary_keeps_what_sorting_keeps():
    # Small weights in great number: most of the mass lies far below the top.
    logits = np.random.RandomState(0).randn(3, 40_000).astype(np.float32) * 2
    logits[:, 0] = 14.0
    params = [{"top_p": p, "top_k": 0, "min_p": 0.0} for p in (0.9, 0.99, 0.999)]
    kept = _kept(logits, params)
    for row, one, found in zip(logits, params, kept, strict=True):
        must, may = _bounds(row, one)
        assert found[must].all()
        assert not (found & ~may).any()


def test_the_edge_of_top_p_does_not_move_with_the_batch():
    # Every row's top_p lies within a rounding of the mass of some set of tokens.
    logits = np.random.RandomState(1).randn(16, 300).astype(np.float32)
    weight = np.sort(np.exp(logits - logits.max(axis=1, keepdims=True)), axis=1)[:, ::-1]
    share = np.cumsum(weight, axis=1, dtype=np.float32) / weight.sum(axis=1, keepdims=True)
    for count in range(10, 250, 40):
        params = [{"top_p": float(row[count])} for row in share]
        together = _kept(logits, params)
        for start, stop in [(0, 1), (3, 8)]:
            some = _kept(logits[start:stop], params[start:stop])
            np.testing.assert_array_equal(some, together[start:stop])


def test_there_is_no_sort():
    rows = decode_rows(jnp.zeros((B, ROW_WIDTH), jnp.int32), jnp.zeros(B, jnp.int32))
    text = _truncate.lower(jnp.zeros((B, V), jnp.float32), rows).as_text()
    assert "sort" not in text
    assert "top_k" not in text
