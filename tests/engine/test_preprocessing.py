"""What is made of a checked prompt and its parameters."""

from typing import Any

import numpy as np
import pytest

from jpaged.engine.inputs import Prompt
from jpaged.engine.preprocessing import Intake
from jpaged.engine.request_state import RequestState
from jpaged.sampling_params import SamplingParams


def make_intake(seed: int = 0) -> Intake:
    return Intake(
        None,
        vocab_size=10,
        max_model_len=8,
        max_num_seqs=4,
        eos_token_ids=frozenset({9}),
        seed=seed,
    )


def make_state(intake: Intake, params: SamplingParams) -> RequestState:
    job = intake.make_job(Prompt(token_ids=[1]), params)
    return intake.make_state(job, request_id=None, ids_in_use=())


def seeds_of(intake: Intake, params: SamplingParams) -> list[int]:
    state = make_state(intake, params)
    return [sequence.seed for sequence in state.request.sequences]


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
def test_each_sample_has_the_seed_of_its_number(seed: Any, expected: list[int]):
    seeds = seeds_of(make_intake(), SamplingParams(n=3, seed=seed))
    assert seeds == expected
    assert {type(one) for one in seeds} == {int}


def test_requests_without_a_seed_get_one_each_that_an_engine_repeats():
    first, second, other = make_intake(3), make_intake(3), make_intake(4)
    found = [seeds_of(first, SamplingParams(n=2)) for _ in range(20)]
    assert len({seed for seeds in found for seed in seeds}) == 40
    assert found == [seeds_of(second, SamplingParams(n=2)) for _ in range(20)]
    assert found[0] != seeds_of(other, SamplingParams(n=2))


def test_a_state_keeps_the_params_as_they_were_given():
    params = SamplingParams()
    made = make_state(make_intake(), params)
    assert made.params is params


def test_what_could_never_end_is_refused_before_a_request_is_made():
    params = SamplingParams(max_tokens=None, min_tokens=9)
    with pytest.raises(ValueError, match="min_tokens=9 is more than max_model_len=8: lower it"):
        make_intake().make_job(Prompt(token_ids=[1]), params)
    make_state(make_intake(), SamplingParams(max_tokens=None, min_tokens=8))
    make_state(make_intake(), SamplingParams(max_tokens=9, min_tokens=9))
