"""Test how prompts, parameters and priorities of a call are normalized and checked."""

from dataclasses import replace

import numpy as np
import pytest

from jpaged.engine.preprocessing import (
    NormalizedPrompt,
    normalize_prompt,
    normalize_prompts,
    pair_params,
    pair_priorities,
)
from jpaged.sampling_params import SamplingParams

IDS = NormalizedPrompt(token_ids=[1, 2, 3])


@pytest.mark.parametrize(
    "prompt",
    [
        [1, 2, 3],
        (1, 2, 3),
        range(1, 4),
        np.array([1, 2, 3], np.int32),
        [np.int64(1), 2, np.uint8(3)],
        {"prompt_token_ids": [1, 2, 3]},
        {"prompt_token_ids": np.array([1, 2, 3])},
        {"prompt_token_ids": (1, 2, 3)},
    ],
)
def test_list_or_tuple_or_array_of_token_ids_is_read_as_one_prompt(prompt: object):
    assert normalize_prompts(prompt) == [IDS]
    assert normalize_prompts([prompt, prompt]) == [IDS, IDS]
    ids = normalize_prompt(prompt).token_ids
    assert ids is not None
    assert all(type(token_id) is int for token_id in ids)


def test_list_may_mix_text_prompts_and_token_id_prompts():
    assert (
        normalize_prompts("a") == normalize_prompts({"prompt": "a"}) == [NormalizedPrompt(text="a")]
    )
    mixed = normalize_prompts(["a", [1, 2, 3], {"prompt": "b", "prompt_token_ids": [1]}])
    assert mixed == [NormalizedPrompt(text="a"), IDS, NormalizedPrompt(text="b", token_ids=[1])]
    assert normalize_prompts(np.array([[1, 2, 3], [1, 2, 3]])) == [IDS, IDS]


def test_cache_salt_works_with_text_and_token_ids():
    for values in ({"prompt": "a"}, {"prompt_token_ids": [1, 2, 3]}):
        salted = normalize_prompt({**values, "cache_salt": "s"})
        assert salted == replace(normalize_prompt(values), cache_salt="s")
    assert normalize_prompt({"prompt": "a", "cache_salt": None}) == NormalizedPrompt("a")


def test_list_of_token_ids_is_copied():
    ids = [1, 2, 3]
    (prompt,) = normalize_prompts(ids)
    ids.append(4)
    assert prompt == IDS


@pytest.mark.parametrize(
    ("prompts", "error", "message"),
    [
        ("", ValueError, "prompt is empty"),
        ([], ValueError, "prompts is empty"),
        (["a", ""], ValueError, r"prompts\[1\] is empty"),
        (["a", []], ValueError, r"prompts\[1\] is empty"),
        ({"prompt": ""}, ValueError, r"prompt\['prompt'\] is empty"),
        ({"prompt_token_ids": []}, ValueError, r"prompt\['prompt_token_ids'\] is empty"),
        ({"prompt": "a", "cache_salt": ""}, ValueError, r"prompt\['cache_salt'\] is empty"),
        ({"prompt": "a", "cache_salt": 3}, TypeError, "must be a non-empty string; got int: 3"),
        ({"cache_salt": "s"}, ValueError, "neither 'prompt' nor"),
        ({}, ValueError, "neither 'prompt' nor 'prompt_token_ids'"),
        (
            [{"text": "a"}],
            ValueError,
            r"prompts\[0\] has the unknown key 'text'; known keys are prompt",
        ),
        ([1, True], TypeError, "position 1 must be an integer; got bool: True"),
        ([1, 2.0], TypeError, "position 1 must be an integer; got float: 2.0"),
        ([1, "a"], TypeError, "position 1 must be an integer; got str: 'a'"),
        ([[1], [None]], TypeError, r"prompts\[1\]: the token id at position 0 .* NoneType"),
        ([3, -1], ValueError, "prompt: the token id -1 at position 1 is unknown; ids start at 0"),
        (None, TypeError, "prompt must be a string, .* got NoneType"),
        ([None], TypeError, r"prompts\[0\] must be a string"),
        (1.5, TypeError, "got float"),
        (b"bytes", TypeError, "got bytes"),
        ({"prompt": 3}, TypeError, r"prompt\['prompt'\] must be"),
        ({"prompt_token_ids": "abc"}, TypeError, "must be a list of token ids; got str"),
    ],
)
def test_invalid_prompts_are_refused(prompts: object, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        normalize_prompts(prompts)


def test_token_id_outside_the_vocabulary_is_refused():
    assert normalize_prompts([9], vocab_size=10) == [NormalizedPrompt(token_ids=[9])]
    match = r"prompts\[1\].* 10 at position 2 .*; known ids are 0 to 9"
    with pytest.raises(ValueError, match=match):
        normalize_prompts([[1], [0, 9, 10]], vocab_size=10)


@pytest.mark.parametrize("token_id", [-(2**64), -1, 2**63, 2**64])
def test_token_ids_at_integer_limits_are_refused(token_id: int):
    with pytest.raises(ValueError, match=f"the token id {token_id} at position 1 is unknown"):
        normalize_prompts([9, token_id], vocab_size=10)
    if token_id > 0:
        assert normalize_prompts([9, token_id]) == [NormalizedPrompt(token_ids=[9, token_id])]


def test_params_may_be_one_object_for_all_prompts_or_a_list_with_one_per_prompt():
    a, b = SamplingParams(temperature=0.5), SamplingParams(seed=3)
    assert pair_params(a, 2) == [a, a]
    assert pair_params([a, b], 2) == [a, b]
    assert pair_params((a, b), 2) == [a, b]
    assert pair_params(None, 1) == [SamplingParams()]


def test_wrong_number_of_params_is_refused():
    with pytest.raises(ValueError, match="params has 2 entries for 3 prompts"):
        pair_params([SamplingParams()] * 2, 3)
    with pytest.raises(TypeError, match=r"params\[1\] must be SamplingParams, got dict"):
        pair_params([SamplingParams(), {}], 2)
    with pytest.raises(TypeError, match="params must be SamplingParams, got dict"):
        pair_params({"seed": 1}, 1)


def test_priorities_must_be_one_integer_per_prompt():
    assert pair_priorities(None, 2) == [0, 0]
    assert pair_priorities((3, np.int64(-1)), 2) == [3, -1]
    with pytest.raises(ValueError, match="priority has 1 entry for 2 prompts"):
        pair_priorities([1], 2)
    for wrong in (1, "12", [1.0, 2], [True, 1]):
        with pytest.raises(TypeError, match="priority"):
            pair_priorities(wrong, 2)
