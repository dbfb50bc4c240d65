"""Test how a normalized prompt and its parameters become a request."""

from typing import Any

import numpy as np
import pytest

from jpaged.engine.preprocessing import NormalizedPrompt, Preprocessor
from jpaged.engine.request_state import RequestState
from jpaged.sampling_params import SamplingParams


def make_preprocessor(seed: int = 0) -> Preprocessor:
    return Preprocessor(
        None,
        vocab_size=10,
        max_model_len=8,
        max_num_seqs=4,
        eos_token_ids=frozenset({9}),
        seed=seed,
    )


def make_state(preprocessor: Preprocessor, params: SamplingParams) -> RequestState:
    return preprocessor.make_request_state(NormalizedPrompt(token_ids=[1]), params)


def seeds_of(preprocessor: Preprocessor, params: SamplingParams) -> list[int]:
    return [it.seed for it in make_state(preprocessor, params).request.sequences]


@pytest.mark.parametrize(
    ("seed", "expected"),
    [
        (5, [5, 6, 7]),
        (-1, [2**64 - 1, 0, 1]),
        (2**64 - 2, [2**64 - 2, 2**64 - 1, 0]),
        (np.int64(-1), [2**64 - 1, 0, 1]),
        (np.uint64(2**64 - 2), [2**64 - 2, 2**64 - 1, 0]),
        (np.int8(127), [127, 128, 129]),
    ],
)
def test_sample_seed_is_request_seed_plus_index(seed: Any, expected: list[int]):
    seeds = seeds_of(make_preprocessor(), SamplingParams(n=3, seed=seed))
    assert seeds == expected
    assert {type(one) for one in seeds} == {int}


def test_unseeded_requests_get_reproducible_seeds():
    first, second, other = make_preprocessor(3), make_preprocessor(3), make_preprocessor(4)
    found = [seeds_of(first, SamplingParams(n=2)) for _ in range(20)]
    assert len({seed for seeds in found for seed in seeds}) == 40
    assert found == [seeds_of(second, SamplingParams(n=2)) for _ in range(20)]
    assert found[0] != seeds_of(other, SamplingParams(n=2))


def test_params_are_not_modified():
    params = SamplingParams()
    assert make_state(make_preprocessor(), params).params is params


def test_min_tokens_above_max_model_len_is_refused():
    params = SamplingParams(max_tokens=None, min_tokens=9)
    with pytest.raises(ValueError, match="min_tokens=9 is more than max_model_len=8: lower min"):
        make_state(make_preprocessor(), params)
    make_state(make_preprocessor(), SamplingParams(max_tokens=None, min_tokens=8))
    make_state(make_preprocessor(), SamplingParams(max_tokens=9, min_tokens=9))
