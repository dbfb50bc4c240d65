import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from jpaged.sampling_params import SamplingParams


def test_defaults_are_those_of_vllm():
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k) == (1, 1.0, 1.0, 0)
    assert (params.min_p, params.repetition_penalty, params.max_tokens) == (0.0, 1.0, 16)
    assert params.seed is None
    assert params.logprobs is None
    assert params.skip_special_tokens
    assert params.detokenize
    assert not params.adjusts_logits
    assert not params.truncates


def test_importing_parameters_imports_no_jax():
    code = "import sys, jpaged.sampling_params; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


NAN, INF = float("nan"), float("inf")
INVALID: dict[str, tuple[tuple, tuple]] = {  # (out of range, wrong type)
    "temperature": ((-0.1, NAN, INF, 10**400), ("1", None, True, 1j)),
    "top_p": ((0.0, -0.5, 1.01, NAN), (True, "0.9")),
    "top_k": ((-2,), (1.0, True, None)),
    "min_p": ((-0.01, 1.01, NAN), ()),
    "repetition_penalty": ((0.0, -1.0, INF), ()),
    "presence_penalty": ((-2.01, 2.01, NAN), ()),
    "frequency_penalty": ((-2.01, 2.01), ()),
    "seed": ((-(2**63) - 1, 2**64), (1.5, True, "1")),
    "n": ((0, -1), (1.0, True)),
    "best_of": ((0, -1), (2.0, True, "2")),
    "beam_width": ((0, -1), (2.0, True, "2")),
    "length_penalty": ((NAN, INF, -(10**400)), ("1", None, True)),
    "early_stopping": (("always", None, 1, 0.5), ()),
    "max_tokens": ((0, -3), (1.0, True)),
    "min_tokens": ((-1, 17), (0.0, None)),
    "logprobs": ((-1,), (True, 1.0)),
    "prompt_logprobs": ((-1,), ()),
    "stop": (("", ["a", ""]), (3, [3], {"a": 1})),
    "stop_token_ids": (([-1],), (3, "3", [1.0], [True])),
    "allowed_token_ids": (([], [-1]), (3, ["a"])),
    "logit_bias": (
        ({-1: 0.0}, {3: 100.5}, {3: NAN}, {3: -101}),
        ([1], {"1": 0.0}, {1: "a"}, {1: True}),
    ),
    "ignore_eos": ((), (0, None)),
    "detokenize": ((), (1,)),
    "skip_special_tokens": ((), ("yes",)),
    "include_stop_str_in_output": ((), (1,)),
}


@pytest.mark.parametrize("name", INVALID)
def test_error_for_an_invalid_value_names_the_parameter(name: str):
    for error, values in zip((ValueError, TypeError), INVALID[name], strict=True):
        for value in values:
            options: dict[str, Any] = {name: value}
            with pytest.raises(error, match=name):
                SamplingParams(**options)


def test_values_at_the_limits_are_accepted():
    SamplingParams(temperature=0.0, top_p=1e-9, top_k=-1, min_p=1.0, max_tokens=None)
    SamplingParams(temperature=1, top_p=1, presence_penalty=-2, frequency_penalty=2)
    SamplingParams(seed=2**64 - 1, min_tokens=16, logprobs=0, prompt_logprobs=0)
    SamplingParams(seed=-(2**63), logit_bias={0: 100, 1: -100.0}, max_tokens=None, min_tokens=99)


def test_numpy_numbers_are_accepted():
    numbers: dict[str, Any] = {"temperature": np.float32(0.5), "seed": np.uint64(2**63)}
    SamplingParams(**numbers)
    not_a_bool: Any = np.bool_(True)
    with pytest.raises(TypeError, match="ignore_eos"):
        SamplingParams(ignore_eos=not_a_bool)


def test_best_of_sets_the_number_of_samples_and_needs_logprobs():
    assert SamplingParams(n=3).num_samples == 3
    assert SamplingParams(n=2, best_of=5).num_samples == 5
    assert SamplingParams(best_of=1, temperature=0.0).num_samples == 1
    assert not SamplingParams(n=3).needs_logprobs
    assert SamplingParams(n=3, best_of=4).needs_logprobs
    assert not SamplingParams(n=3, best_of=3).needs_logprobs  # all samples are returned


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 3, "best_of": 2}, "best_of=2 is less than n=3.*raise best_of or lower n"),
        ({"n": 2, "temperature": 0.0}, "n=2 with temperature=0.*leave n at 1"),
        ({"best_of": 2, "temperature": 0}, "best_of=2 with temperature=0.*leave best_of at 1"),
        ({"n": 5, "beam_width": 4}, "n=5 is more than beam_width=4.*raise beam_width"),
        ({"length_penalty": 2.0}, "length_penalty=.* is for beam search only: set beam_width"),
        ({"early_stopping": True}, "early_stopping=.* is for beam search only: set beam_width"),
        ({"stop": "end", "detokenize": False}, "detokenize"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens=5 is more than max_tokens=4.*raise"),
    ],
    ids=str,
)
def test_contradicting_options_are_refused(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**options)


def test_beam_search_accepts_options_that_do_not_change_logits():
    search: dict[str, Any] = {"beam_width": 3, "length_penalty": -0.5, "early_stopping": "never"}
    neutral: dict[str, Any] = {"temperature": 0, "top_k": -1, "stop": [], "logit_bias": {}}
    ends: dict[str, Any] = {"stop_token_ids": [5], "ignore_eos": True, "max_tokens": None}
    other: dict[str, Any] = {"seed": 5, "prompt_logprobs": 1, "skip_special_tokens": False}
    assert SamplingParams(n=2, **search, **neutral, **ends, **other).needs_logprobs
    SamplingParams(beam_width=1, early_stopping=True)


NOT_WITH_BEAMS: dict[str, Any] = {
    "best_of": 4,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.1,
    "frequency_penalty": -0.1,
    "min_tokens": 1,
    "logit_bias": {3: 1.0},
    "allowed_token_ids": [3],
    "stop": "end",
    "logprobs": 0,
}


@pytest.mark.parametrize("name", NOT_WITH_BEAMS)
def test_error_names_the_option_that_beam_search_does_not_support(name: str):
    options: dict[str, Any] = {"beam_width": 4, name: NOT_WITH_BEAMS[name]}
    message = rf"{name}=.* cannot be combined with beam_width=4, .*: leave {name} at"
    with pytest.raises(ValueError, match=message):
        SamplingParams(**options)


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("n", SamplingParams(n=9)),
        ("best_of", SamplingParams(n=2, best_of=9)),
        ("beam_width", SamplingParams(n=2, beam_width=9)),
    ],
)
def test_request_with_more_sequences_than_max_num_seqs_is_refused(
    name: str, params: SamplingParams
):
    params.validate_for(100, max_num_seqs=9)
    message = rf"{name}=9 .*max_num_seqs=8: lower {name}, or create the engine with max_num_seqs=9"
    with pytest.raises(ValueError, match=message):
        params.validate_for(100, max_num_seqs=8)


def test_beam_width_and_end_tokens_together_are_limited():
    params = SamplingParams(beam_width=18, stop_token_ids=[4])
    params.validate_for(100, 20, (2,))
    with pytest.raises(ValueError, match=r"beam_width=18 is more than 17\. .*only 20 next"):
        params.validate_for(100, 20, (2, 3))
    params.validate_for(20, 20, (2, 3))  # 20 is the vocabulary size


def test_error_for_too_many_stop_tokens_of_a_beam_search_suggests_fewer():
    params = SamplingParams(beam_width=1, ignore_eos=True, stop_token_ids=[*range(20)])
    with pytest.raises(ValueError, match=r"beam_width=1 is more than 0\. .*: pass fewer stop_tok"):
        params.validate_for(100, 20, (2,))


def test_beam_search_and_best_of_above_n_cannot_be_streamed():
    SamplingParams(n=3).check_streamable()
    SamplingParams(n=3, best_of=3).check_streamable()
    with pytest.raises(ValueError, match=r"beam_width=2 cannot be streamed.*use generate"):
        SamplingParams(beam_width=2).check_streamable()
    with pytest.raises(ValueError, match=r"best_of=4 above n=3 cannot be streamed"):
        SamplingParams(n=3, best_of=4).check_streamable()


def test_stop_strings_are_a_tuple():
    assert SamplingParams(stop="end").stop_strings == ("end",)
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")
    assert SamplingParams().stop_strings == ()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(stop_token_ids=[9, 10]),
        SamplingParams(allowed_token_ids={10, 3}),
        SamplingParams(logit_bias={10: 1.0}),
    ],
)
def test_token_ids_must_be_less_than_the_logits_width(params):
    params.validate_for(11)
    with pytest.raises(ValueError, match=r"ids \[10\].*from 0 to 9"):
        params.validate_for(10)


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_logprobs_are_bounded_by_max_logprobs(name):
    options: dict[str, Any] = {name: 20}
    params = SamplingParams(**options)
    params.validate_for(100)
    with pytest.raises(ValueError, match=f"{name}=20.*max_logprobs=5"):
        params.validate_for(100, 5)


@pytest.mark.parametrize("mode", ["raw_logits", "processed_logits"])
def test_best_of_above_n_cannot_report_logits(mode: str):
    params = SamplingParams(best_of=3, logprobs=2)
    params.validate_for(10)
    with pytest.raises(ValueError, match=f"logprobs=2 .*best_of=3.*{mode}"):
        params.validate_for(10, 2, logprobs_mode=mode)
    SamplingParams(best_of=3).validate_for(10, logprobs_mode=mode)
    SamplingParams(n=3, logprobs=2).validate_for(10, logprobs_mode=mode)


def test_min_tokens_that_forbids_every_allowed_token_is_refused():
    params = SamplingParams(min_tokens=1, allowed_token_ids=[2, 3], stop_token_ids=[3])
    params.validate_for(10)
    with pytest.raises(ValueError, match="min_tokens=1 forbids"):
        params.validate_for(10, eos_token_ids=(2,))
    SamplingParams(allowed_token_ids=[2]).validate_for(10, eos_token_ids=(2,))
    all_of_three = SamplingParams(min_tokens=1, stop_token_ids=[0, 1, 2])
    all_of_three.validate_for(4)
    with pytest.raises(ValueError, match="min_tokens=1 forbids every one of the 3 tokens"):
        all_of_three.validate_for(3)


def test_ending_ids_include_the_models_eos_unless_ignored():
    params = SamplingParams(stop_token_ids=[5])
    assert params.ending_ids((2,)) == {2, 5}
    assert params.first_forbidden_ids((2,)) == frozenset()
    ignoring = SamplingParams(stop_token_ids=[5], ignore_eos=True, min_tokens=1)
    assert ignoring.ending_ids((2,)) == {5}
    assert ignoring.first_forbidden_ids((2,)) == {5}


def test_names_of_options_that_forbid_all_given_tokens_are_returned():
    params = SamplingParams(min_tokens=3, allowed_token_ids=[1, 2, 3], stop_token_ids=[1])
    assert params.names_that_forbid_all([1, 2], 0, ()) == []
    assert params.names_that_forbid_all([4, 5], 9, ()) == ["allowed_token_ids"]
    assert params.names_that_forbid_all([1], 2, ()) == ["min_tokens"]
    assert params.names_that_forbid_all([1], 3, ()) == []
    assert params.names_that_forbid_all([1, 7], 2, ()) == ["allowed_token_ids", "min_tokens"]
    assert params.names_that_forbid_all([], 0, ()) == []
