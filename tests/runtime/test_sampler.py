from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.core.plan import NO_TOKEN
from jpaged.runtime.results import TokenScores
from jpaged.runtime.sampler import (
    FULL_LEVEL,
    PADDING_PARAMS,
    ROW_WIDTH,
    ROWS_PER_LOAD,
    SCORED_GREEDY,
    TOKENS_PER_LOAD,
    RowMarks,
    SamplerLevel,
    bias_row,
    init_sampling_state,
    load_bias,
    load_rows,
    make_adjustments,
    pack_marks,
    pack_params,
    record_tokens,
    required_level,
    sample,
    unpack_params,
)
from jpaged.runtime.steps import SampleInputs, sample_step
from jpaged.sampling_params import SamplingParams
from pallas_kernels import Backend, adjust_logits
from pallas_kernels.scores.adjustments import COUNT_MASK, IN_PROMPT, IS_ENDING

V = 40
_sample = jax.jit(partial(sample, backend=Backend.XLA), static_argnames=("level", "max_logprobs"))
_load_rows, _load_bias = jax.jit(load_rows), jax.jit(load_bias)
_record = jax.jit(record_tokens)

LEVELS = [
    *(SamplerLevel.GREEDY, SamplerLevel.RANDOM, SamplerLevel.TRUNCATED, SamplerLevel.ADJUSTED),
    *(SamplerLevel.LOGPROBS, SCORED_GREEDY, FULL_LEVEL),
]

_PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=1.3, top_p=0.8),
    SamplingParams(top_k=5),
    SamplingParams(temperature=2.0, min_p=0.05, top_p=0.95, top_k=30),
    SamplingParams(temperature=5.0),
    SamplingParams(temperature=0.9, top_p=0.3, top_k=-1),
    SamplingParams(temperature=0.0, top_k=3),
]


def _params_at(level):
    """Return `_PARAMS`, with greedy sampling in place of each item that the sampler variant `level`
    does not support."""
    return [one if level.covers(required_level(one)) else _PARAMS[0] for one in _PARAMS]


def _rows(params, seeds, positions):
    packed = np.stack([pack_params(one, seed) for one, seed in zip(params, seeds, strict=True)])
    return unpack_params(jnp.asarray(packed), jnp.asarray(positions, jnp.int32))


def _tokens(logits, rows, level, state=None, row_ids=None):
    ids = jnp.arange(len(logits), dtype=jnp.int32) if row_ids is None else row_ids
    return np.asarray(_sample(jnp.asarray(logits), rows, state, ids, level=level).token_ids)


def _load(state, rows, vocab_size=V):
    """Return a sampling state in which the batch rows `rows` are initialized from their
    `RowMarks`."""
    for packed in pack_marks(rows, state.token_state.shape[0] - 1, vocab_size):
        state = _load_rows(state, jnp.asarray(packed))
    return state


def _counts(state):
    return np.asarray(state.token_state) & COUNT_MASK


def _adjusted(logits, rows, state, row_ids):
    adjustments = make_adjustments(rows, state, row_ids)
    return np.asarray(adjust_logits(jnp.asarray(logits), adjustments, backend=Backend.XLA))


def _draws(row, count, params=None, *, seeds=(11,), positions=None):
    """Sample `count` tokens from the logits `row`.

    By default, all tokens have the same seed, and token i has position i in its sequence.
    """
    params = params or SamplingParams()
    words = np.array([[seed >> 32 & 0xFFFFFFFF, seed & 0xFFFFFFFF] for seed in seeds], np.uint32)
    positions = np.arange(count) if positions is None else np.array(positions)
    packed = np.broadcast_to(pack_params(params, 0), (count, ROW_WIDTH))
    rows = unpack_params(jnp.asarray(packed), jnp.asarray(positions, jnp.int32))
    rows = rows._replace(seed=jnp.asarray(np.broadcast_to(words, (count, 2))))
    logits = np.broadcast_to(np.asarray(row, np.float32), (count, len(row)))
    return _tokens(logits, rows, required_level(params))


def _logits(count, width=V, seed=0):
    return (np.random.RandomState(seed).randn(count, width) * 3).astype(np.float32)


def test_packed_sampling_parameters_unpack_unchanged():
    fields = {"temperature": 0.3, "top_p": 0.9, "top_k": 7, "min_p": 0.125, "min_tokens": 3}
    fields |= {"repetition_penalty": 1.5, "presence_penalty": -0.5, "frequency_penalty": 0.25}
    defaults = dict.fromkeys(fields, 0) | dict.fromkeys(
        ("temperature", "top_p", "repetition_penalty"), 1.0
    )
    params = SamplingParams(**fields)
    rows = _rows([params, SamplingParams(top_k=-1)], [2**63 + 5, -1], [17, 0])
    assert pack_params(params, 0).shape == (ROW_WIDTH,) == PADDING_PARAMS.shape
    wanted = {name: [value, defaults[name]] for name, value in fields.items()} | {
        "is_adjusted": [True, False],
        "is_biased": [False, False],
        "is_scored": [False, False],
        "position": [17, 0],
        "seed": [[2**31, 5], [2**32 - 1, 2**32 - 1]],
    }
    for name, values in wanted.items():
        found = getattr(rows, name)
        np.testing.assert_array_equal(np.asarray(found), np.array(values, found.dtype), name)


def test_extreme_sampling_parameters_are_clamped():
    params = SamplingParams(temperature=1e-60, repetition_penalty=1e-60, top_k=2**40)
    rows = _rows([params], [0], [0])
    assert float(rows.temperature[0]) > 0
    assert float(rows.repetition_penalty[0]) > 0
    assert int(rows.top_k[0]) == 2**31 - 1


@pytest.mark.parametrize(
    ("params", "level"),
    [
        (SamplingParams(temperature=0.0), SamplerLevel.GREEDY),
        (SamplingParams(temperature=0.0, top_p=0.5, top_k=3), SamplerLevel.GREEDY),
        (SamplingParams(), SamplerLevel.RANDOM),
        (SamplingParams(top_k=-1), SamplerLevel.RANDOM),
        (SamplingParams(top_k=1), SamplerLevel.TRUNCATED),
        (SamplingParams(top_p=0.9), SamplerLevel.TRUNCATED),
        (SamplingParams(min_p=0.1), SamplerLevel.TRUNCATED),
        (SamplingParams(temperature=0.0, repetition_penalty=1.1), SamplerLevel.ADJUSTED),
        (SamplingParams(presence_penalty=0.1), SamplerLevel.RANDOM | SamplerLevel.ADJUSTED),
        (SamplingParams(frequency_penalty=0.1), SamplerLevel.RANDOM | SamplerLevel.ADJUSTED),
        (SamplingParams(min_tokens=1), SamplerLevel.RANDOM | SamplerLevel.ADJUSTED),
        (SamplingParams(logit_bias={1: 1.0}), SamplerLevel.RANDOM | SamplerLevel.ADJUSTED),
        (SamplingParams(logit_bias={}), SamplerLevel.RANDOM),
        (SamplingParams(allowed_token_ids=[1]), SamplerLevel.RANDOM | SamplerLevel.ADJUSTED),
        (SamplingParams(temperature=0.0, logprobs=0), SamplerLevel.LOGPROBS),
        (SamplingParams(temperature=0.0, prompt_logprobs=2), SamplerLevel.GREEDY),
        (SamplingParams(top_k=1, logprobs=2, min_tokens=1), FULL_LEVEL),
        (SamplingParams(n=2, best_of=3), SamplerLevel.RANDOM | SamplerLevel.LOGPROBS),
    ],
)
def test_sampling_parameters_select_the_compiled_sampler_variant(params, level):
    assert required_level(params) == level


def test_greedy_rows_take_the_first_maximum_in_a_batch_with_random_rows():
    logits = _logits(8)
    logits[0, [4, 9]] = logits[7, [2, 3]] = 50.0
    for level in LEVELS:
        state = init_sampling_state(9, V)
        tokens = _tokens(logits, _rows(_params_at(level), range(8), range(8)), level, state)
        assert tokens[0] == 4
        assert tokens[7] == 2


def test_sampler_variant_with_more_features_returns_the_same_tokens():
    logits = _logits(8, seed=3)
    rows, state = _rows(_PARAMS, range(8), range(30, 38)), init_sampling_state(9, V)
    by_level = {level: _tokens(logits, rows, level, state) for level in LEVELS}
    for index, params in enumerate(_PARAMS):
        needed = required_level(params)
        covering = [tokens[index] for level, tokens in by_level.items() if level.covers(needed)]
        assert len(covering) >= 2
        assert set(covering) == {by_level[needed][index]}


def test_sampled_token_does_not_depend_on_other_batch_rows():
    logits, seeds, positions = _logits(8, seed=4), [i * 2**33 - 5 for i in range(8)], range(8)
    state, level = init_sampling_state(9, V), FULL_LEVEL
    alone = [
        _tokens(logits[i : i + 1], _rows([_PARAMS[i]], [seeds[i]], [positions[i]]), level, state)[0]
        for i in range(8)
    ]
    for order in ([7, 6, 5, 4, 3, 2, 1, 0], [2, 2, 5, 1, 0, 7, 3, 3, 6, 4, 4, 1, 5], [3, 1, 6]):
        rows = _rows(*([column[i] for i in order] for column in (_PARAMS, seeds, positions)))
        together = _tokens(logits[order], rows, level, state)
        assert together.tolist() == [alone[i] for i in order]


@pytest.mark.parametrize("is_partitionable", [True, False])
def test_seeded_samples_equal_recorded_tokens_with_either_threefry_flag(is_partitionable):
    with jax.threefry_partitionable(is_partitionable):
        drawn = _draws(np.zeros(1000), 8, seeds=[0, 0, 0, 1, 2**32, -1, 2**63, 7])
    # If these tokens change, the output of every seeded request changes.
    assert drawn.tolist() == [954, 683, 291, 136, 329, 88, 628, 750]


def test_padding_rows_change_no_token():
    params, seeds, positions = [SamplingParams(top_p=0.9)] * 8, range(8), range(8)
    state, dummy, level = init_sampling_state(9, V), 8, FULL_LEVEL
    logits = _logits(8)
    full = _tokens(logits, _rows(params, seeds, positions), level, state)
    logits[2:] = np.nan
    packed = [pack_params(one, seed) for one, seed in zip(params[:2], seeds, strict=False)]
    packed = np.stack(packed + [PADDING_PARAMS] * 6)
    rows = unpack_params(jnp.asarray(packed), jnp.asarray([0, 1] + [0] * 6, jnp.int32))
    row_ids = jnp.asarray([0, 1] + [dummy] * 6, jnp.int32)
    padded = _tokens(logits, rows, level, state, row_ids)
    np.testing.assert_array_equal(padded[:2], full[:2])
    counted = _record(state, row_ids, jnp.asarray(padded), jnp.ones(8, jnp.bool_))
    assert _counts(counted).sum(axis=1).tolist() == [1, 1, 0, 0, 0, 0, 0, 0, 0]


def test_numpy_numbers_are_packed_like_python_numbers():
    values = {"temperature": 0.5, "top_p": 0.75, "top_k": 3, "repetition_penalty": 1.5}
    numpys = {"temperature": np.float16(0.5), "top_p": np.float32(0.75), "top_k": np.int8(3)}
    numpys["repetition_penalty"] = np.float64(1.5)
    packed, expected = (pack_params(SamplingParams(**each), 5) for each in (numpys, values))
    np.testing.assert_array_equal(packed, expected)


@pytest.mark.parametrize("temperature", [1e-300, 1e-45, 1e-30, 1e-6])
def test_tiny_temperature_gives_the_greedy_token(temperature):
    logits = _logits(1, seed=8)[0]
    logits[[0, 5]] = -np.inf
    params = SamplingParams(temperature=temperature, top_p=0.9, top_k=9, min_p=0.01)
    assert set(_draws(logits, 8, params)) == {int(np.argmax(logits))}


def test_huge_temperature_keeps_tokens_forbidden():
    logits = np.where(np.arange(V) < 4, np.array(100.0 * np.arange(V)), -np.inf)
    drawn = _draws(logits, 4096, SamplingParams(temperature=1e300))
    counts = np.bincount(drawn, minlength=V)
    assert counts[4:].sum() == 0
    # each token is expected 1,024 times, with a standard deviation of 28
    assert counts[:4].min() > 900


def test_token_is_always_sampled_if_all_other_logits_are_minus_infinity():
    logits = np.where(np.arange(V) == 17, -1e30, -np.inf)
    assert set(_draws(logits, 512)) == {17}


_COUNT = 20_000


def _chi_square(drawn, probabilities):
    expected = probabilities * len(drawn)
    counts = np.bincount(drawn, minlength=len(probabilities))
    assert counts[expected == 0].sum() == 0
    some = expected > 0
    return ((counts - expected)[some] ** 2 / expected[some]).sum()


def _softmax(x):
    weight = np.exp(np.asarray(x, np.float64) - np.max(x))
    return weight / weight.sum()


# Maps a number of degrees of freedom to the 0.999 quantile of the chi-square distribution.
_LIMIT = {1: 10.83, 3: 16.27, 7: 24.32, 63: 103.4}


@pytest.mark.parametrize("varied", ["positions", "low words of seeds", "high words of seeds"])
def test_draws_follow_the_softmax(varied):
    logits = np.array([2.0, 1.0, 0.0, -1.0, -2.0, 1.5, 0.5, -3.0])
    given = {}
    if varied != "positions":
        shift = 32 * varied.startswith("high")
        given = {"seeds": [i << shift for i in range(_COUNT)], "positions": [9] * _COUNT}
    drawn = _draws(logits, _COUNT, SamplingParams(temperature=0.8), **given)
    probabilities = _softmax(logits / 0.8)
    assert _chi_square(drawn, probabilities) < _LIMIT[7]
    observed = np.bincount(drawn, minlength=8) / _COUNT
    assert np.abs(observed - probabilities).sum() / 2 < 0.012  # total variation; mean 0.006


def test_truncated_draws_follow_the_renormalised_softmax():
    logits = np.log(np.array([0.35, 0.3, 0.2, 0.1, 0.04, 0.01]))
    drawn = _draws(logits, _COUNT, SamplingParams(top_p=0.9))
    expected = np.array([0.35, 0.3, 0.2, 0.1, 0, 0]) / 0.95
    assert _chi_square(drawn, expected) < _LIMIT[3]


def test_successive_random_tokens_are_independent():
    drawn = _draws(np.zeros(8), _COUNT)
    pairs = drawn[:-1:2] * 8 + drawn[1::2]
    assert _chi_square(pairs, np.full(64, 1 / 64)) < _LIMIT[63]


def test_uniform_logits_favour_no_token():
    drawn = _draws(np.zeros(4096), 2048)
    halves = np.bincount(drawn // 2048, minlength=2)
    assert ((halves - 1024) ** 2 / 1024).sum() < _LIMIT[1]


_NOT_FINITE = {
    "one NaN": {11: np.nan},
    "a NaN that is not the highest": {11: 100.0, 30: np.nan},
    "infinite": {11: np.inf},
    "two infinite": {0: np.inf, 39: np.inf},
    "only NaN": dict.fromkeys(range(V), np.nan),
    "all forbidden": dict.fromkeys(range(V), -np.inf),
    "forbidden or NaN": dict.fromkeys(range(V), -np.inf) | {20: np.nan},
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("case", _NOT_FINITE)
def test_row_whose_maximum_logit_is_not_finite_gets_no_token(case, level):
    logits, state = _logits(8, seed=5), init_sampling_state(9, V)
    rows = _rows(_params_at(level), range(8), range(8))
    expected = _tokens(logits, rows, level, state)
    for row in range(8):
        changed = logits.copy()
        changed[row, list(_NOT_FINITE[case])] = list(_NOT_FINITE[case].values())
        found = _tokens(changed, rows, level, state)
        assert found[row] == NO_TOKEN
        np.testing.assert_array_equal(np.delete(found, row), np.delete(expected, row))


def test_row_with_some_tokens_at_minus_infinity_samples_another_token():
    logits = _logits(8, seed=5)
    logits[:, 3] = -np.inf
    logits[:, 4] = -1e38
    for level in LEVELS:
        rows = _rows(_params_at(level), range(8), range(8))
        assert _tokens(logits, rows, level, init_sampling_state(9, V)).min() >= 0


def test_row_without_a_sampled_token_stores_zero_and_counts_no_token():
    inputs = SampleInputs(
        rows=jnp.arange(3, dtype=jnp.int32),
        is_output=jnp.ones(3, jnp.bool_),
        packed_params=jnp.asarray(np.stack([pack_params(SamplingParams(temperature=0.0), 0)] * 3)),
        positions=jnp.zeros(3, jnp.int32),
    )
    logits = _logits(3)
    logits[1] = np.nan
    last_tokens = jnp.full(4, V - 1, jnp.int32)
    options = {"level": FULL_LEVEL, "backend": Backend.XLA, "max_logprobs": 2}
    state = init_sampling_state(4, V)
    sampled, last_tokens, counted, _ = sample_step(
        jnp.asarray(logits), inputs, last_tokens, state, **options
    )
    assert counted is not None
    best = logits[[0, 2]].argmax(axis=1)
    assert sampled.token_ids.tolist() == [best[0], NO_TOKEN, best[1]]
    assert last_tokens.tolist() == [best[0], 0, best[1], V - 1]
    counts = np.zeros((4, V), np.int32)
    counts[[0, 2], best] = 1
    np.testing.assert_array_equal(_counts(counted), counts)


@pytest.mark.parametrize(
    ("level", "num_passes"), [(SamplerLevel.GREEDY, 1), (SamplerLevel.RANDOM, 2)]
)
def test_check_for_non_finite_logits_adds_no_pass_over_the_logits(level, num_passes):
    logits, rows = jnp.asarray(_logits(8, width=4096)), _rows(_PARAMS, range(8), range(8))
    ids = jnp.arange(8, dtype=jnp.int32)
    compiled = _sample.lower(logits, rows, None, ids, level=level).compile().as_text() or ""
    assert compiled.count(" reduce(") == num_passes  # RANDOM first finds the maximum
    assert " gather(" not in compiled


def _adjust_by_hand(logits, params, prompt, output, eos):
    """Compute the adjusted logits of one row in plain Python, token by token."""
    x = logits.astype(np.float64).copy()
    for token in range(len(x)):
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            x[token] = -np.inf
        x[token] += (params.logit_bias or {}).get(token, 0.0)
        if len(output) < params.min_tokens and token in {*eos, *(params.stop_token_ids or ())}:
            x[token] = -np.inf
        if token in prompt or token in output:
            r = params.repetition_penalty
            x[token] = x[token] / r if x[token] > 0 else x[token] * r
        x[token] -= params.presence_penalty * (token in output)
        x[token] -= params.frequency_penalty * list(output).count(token)
    return x


_ADJUSTING = [
    SamplingParams(repetition_penalty=1.7),
    SamplingParams(presence_penalty=0.6),
    SamplingParams(frequency_penalty=-0.4),
    SamplingParams(logit_bias={3: 100.0, 4: -100, 39: 2.5}),
    SamplingParams(allowed_token_ids=[1, 2, 8], logit_bias={2: -3.0, 5: 9.0}),
    SamplingParams(min_tokens=5, stop_token_ids=[6]),
    SamplingParams(min_tokens=4, stop_token_ids=[6]),
    SamplingParams(
        repetition_penalty=0.5, presence_penalty=1.0, frequency_penalty=2.0, logit_bias={7: 1.0}
    ),
]


def test_logit_adjustments_equal_a_plain_python_computation():
    prompt, output, eos = [1, 2, 2, 7, 0], [7, 8, 8, 39], (11,)
    logits = _logits(8, seed=6)
    state = init_sampling_state(10, V)
    row_ids = jnp.asarray([4, 8, 0, 2, 3, 1, 7, 5], jnp.int32)
    marks = {}
    for params, row in zip(_ADJUSTING, row_ids.tolist(), strict=True):
        marks[row] = RowMarks.of(prompt + output[:2], 5, params.first_forbidden_ids(eos))
        if params.biases_logits:
            state = _load_bias(state, jnp.int32(row), jnp.asarray(bias_row(params, V)))
    state = _load(state, marks)
    for token in output[2:]:
        state = _record(state, row_ids, jnp.full(8, token, jnp.int32), jnp.ones(8, jnp.bool_))
    rows = _rows(_ADJUSTING, range(8), [len(prompt) + len(output)] * 8)
    found = _adjusted(logits, rows, state, row_ids)
    for row, params, adjusted in zip(logits, _ADJUSTING, found, strict=True):
        expected = _adjust_by_hand(row, params, prompt, output, eos)
        np.testing.assert_allclose(adjusted, expected, rtol=1e-6, atol=1e-5)


def test_penalties_count_only_output_tokens():
    row_ids, tokens = jnp.asarray([1, 0], jnp.int32), jnp.asarray([V - 1, 5], jnp.int32)
    is_counted = jnp.asarray([True, False])
    counts = _counts(_record(init_sampling_state(3, V), row_ids, tokens, is_counted))
    assert counts[1, V - 1] == 1
    assert counts.sum() == 1


def test_loading_any_number_of_rows_replaces_their_old_sampling_state():
    """The test loads more rows and tokens than one launch can load. Some output tokens are also in
    the prompt."""
    width, rng = 50, np.random.default_rng(0)
    lengths = [TOKENS_PER_LOAD + 700, 3, 1, 2 * TOKENS_PER_LOAD, *[5] * ROWS_PER_LOAD]
    sequences = [rng.integers(0, width, n) for n in lengths]
    prompts = [max(1, length - 400) for length in lengths]
    rows = {
        row: RowMarks.of(tokens.tolist(), num_prompt, [7, 9])
        for row, (tokens, num_prompt) in enumerate(zip(sequences, prompts, strict=True))
    }
    state = init_sampling_state(len(rows) + 2, width)
    state = state._replace(token_state=jnp.full_like(state.token_state, 3))
    state = _load(state, rows, width)
    token_state = np.asarray(state.token_state)
    assert (token_state[-2] == 3).all()  # no state was loaded for this batch row
    for tokens, num_prompt, found in zip(sequences, prompts, token_state[:-2], strict=True):
        expected = np.bincount(tokens[num_prompt:], minlength=width)
        expected[np.unique(tokens[:num_prompt])] |= IN_PROMPT
        expected[[7, 9]] |= IS_ENDING
        np.testing.assert_array_equal(found, expected)
    assert np.asarray(state.prompt_lens)[:-1].tolist() == [*prompts, 0]


def test_request_without_logit_adjustments_ignores_state_of_an_earlier_request():
    logits = _logits(8)
    garbage = init_sampling_state(9, V)._replace(
        logit_bias=jnp.full((9, V), -jnp.inf, jnp.float32),
        token_state=jnp.full((9, V), -1, jnp.int32),
    )
    rows, row_ids = _rows(_PARAMS, range(8), range(8)), jnp.arange(8, dtype=jnp.int32)
    np.testing.assert_array_equal(_adjusted(logits, rows, garbage, row_ids), logits)


def test_request_without_logit_biases_ignores_biases_of_an_earlier_request():
    params = [SamplingParams(presence_penalty=0.5), SamplingParams(logit_bias={1: 2.0})]
    state = init_sampling_state(3, V)._replace(logit_bias=jnp.full((3, V), -7.0, jnp.float32))
    logits = _logits(2)
    found = _adjusted(logits, _rows(params, [0, 0], [1, 1]), state, jnp.asarray([0, 1]))
    np.testing.assert_array_equal(found, logits - np.array([[0], [7]], np.float32))


def test_loading_a_preempted_sequence_restores_its_token_counts():
    prompt, output = [3, 4, 3], [5, 5, 6]
    recorded = _load(init_sampling_state(3, V), {1: RowMarks.of(prompt, 3)})
    for token in output:
        recorded = _record(recorded, jnp.int32([1]), jnp.int32([token]), jnp.ones(1, jnp.bool_))
    reloaded = _load(recorded, {1: RowMarks.of(prompt + output, 3)})
    for one, other in zip(recorded, reloaded, strict=True):
        np.testing.assert_array_equal(np.asarray(one)[:2], np.asarray(other)[:2])


def test_forbidden_tokens_are_never_drawn():
    params = SamplingParams(temperature=1e6, allowed_token_ids=[3, 30])
    state = _load(init_sampling_state(9, V), {0: RowMarks.of([0], 1)})
    state = _load_bias(state, jnp.int32(0), jnp.asarray(bias_row(params, V)))
    level, row_ids, drawn = FULL_LEVEL, jnp.zeros(8, jnp.int32), set()
    for seed in range(8):
        rows = _rows([params] * 8, [seed] * 8, range(8))
        drawn |= set(_tokens(_logits(8), rows, level, state, row_ids).tolist())
    assert drawn == {3, 30}


def test_sampler_variant_with_logit_adjustments_requires_a_sampling_state():
    with pytest.raises(ValueError, match="state is None, but sampling with ADJUSTED"):
        _tokens(_logits(1), _rows(_PARAMS[:1], [0], [0]), SamplerLevel.ADJUSTED)


@pytest.mark.parametrize("level", [SCORED_GREEDY, FULL_LEVEL])
def test_logprobs_come_from_the_unchanged_logits(level):
    params = SamplingParams(temperature=0.0, logit_bias={5: 100.0}, logprobs=3)
    logits = _logits(1)
    state = _load_bias(init_sampling_state(2, V), jnp.int32(0), jnp.asarray(bias_row(params, V)))
    rows, row_ids = _rows([params], [0], [0]), jnp.zeros(1, jnp.int32)
    out = _sample(jnp.asarray(logits), rows, state, row_ids, level=level, max_logprobs=3)
    assert out.token_ids.tolist() == [5]
    scores = TokenScores(np.asarray(out.scores))
    expected = np.log(_softmax(logits[0]))
    order = np.argsort(-expected, kind="stable")[:3]
    np.testing.assert_allclose(scores.logprobs[0], expected[5], rtol=1e-5)
    assert scores.ranks.tolist() == [(expected >= expected[5]).sum()]
    np.testing.assert_array_equal(scores.top_token_ids[0], order)
    np.testing.assert_allclose(scores.top_logprobs[0], expected[order], rtol=1e-5)


def test_only_rows_that_request_logprobs_get_logprobs():
    params = [SamplingParams(temperature=0.0, logprobs=i % 2 or None) for i in range(8)]
    logits, row_ids = _logits(8), jnp.arange(8, dtype=jnp.int32)
    rows = _rows(params, range(8), range(8))
    options = {"level": SCORED_GREEDY, "max_logprobs": V + 5}
    out = _sample(jnp.asarray(logits), rows, init_sampling_state(9, V), row_ids, **options)
    scores = TokenScores(np.asarray(out.scores))
    assert scores.packed[:, 0].tolist() == out.token_ids.tolist() == logits.argmax(axis=1).tolist()
    assert scores.top_token_ids.shape == (8, V)
    assert scores.ranks[1::2].tolist() == [1] * 4
