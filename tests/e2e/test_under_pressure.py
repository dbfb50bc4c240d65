"""Mixed requests in a pool twenty times too small: every answer is as if its request ran alone."""

from typing import Any

import pytest
from e2e_options import Engines

from jpaged import Engine, RequestOutput, SamplingParams
from tools.tiny.world import Example, sample_examples

NUM_REQUESTS = 500
MAX_MODEL_LEN, BLOCK_SIZE, MAX_NUM_SEQS = 120, 8, 64
POOL = MAX_NUM_SEQS * MAX_MODEL_LEN // BLOCK_SIZE // 20
"""Blocks: all sequences that may run at once could fill twenty times as many."""

SHAPE: dict[str, Any] = {
    "max_model_len": MAX_MODEL_LEN,
    "block_size": BLOCK_SIZE,
    "max_num_seqs": MAX_NUM_SEQS,
}


def params(index: int) -> SamplingParams:
    """All kinds of decoding, one after the other."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.9, "top_p": 0.95, "seed": index},
        {"temperature": 1.1, "n": 3, "seed": index},
        {"beam_width": 3, "n": 3},
        {"temperature": 0.0, "logprobs": 3, "repetition_penalty": 1.05},
        {"temperature": 1.0, "n": 2, "best_of": 3, "seed": index, "presence_penalty": 0.2},
        {"temperature": 0.0, "stop": "e"},
        {"beam_width": 4, "length_penalty": 0.5, "early_stopping": True},
    ]
    return SamplingParams(max_tokens=40, **kinds[index % len(kinds)])


@pytest.fixture(scope="module")
def examples() -> list[Example]:
    drawn = sample_examples(11, 4 * NUM_REQUESTS)
    fitting = [e for e in drawn if len(e.prompt + e.completion) < MAX_MODEL_LEN // 2]
    return fitting[:NUM_REQUESTS]


@pytest.fixture(scope="module")
def alone() -> dict[int, list[tuple]]:
    """Answers by the request's number, filled once."""
    return {}


def answers(output: RequestOutput) -> list[tuple]:
    return [(tuple(c.token_ids), c.text, c.finish_reason) for c in output.outputs]


def answers_alone(engine: Engine, examples: list[Example], known: dict[int, list[tuple]]) -> list:
    for index in range(len(known), len(examples)):
        output = engine.generate(examples[index].prompt, params(index))[0]
        known[index] = answers(output)
    return [known[index] for index in range(len(examples))]


@pytest.mark.parametrize(
    ("mode", "options", "count"),
    [
        ("auto", {}, 120),
        pytest.param("auto", {}, NUM_REQUESTS, marks=pytest.mark.soak),
        ("swap", {"swap_space": 0.001}, 120),
        ("recompute", {"async_scheduling": False}, 120),
        pytest.param("swap", {"enable_prefix_caching": False}, 120, marks=pytest.mark.soak),
    ],
)
def test_every_answer_is_as_if_its_request_ran_alone(
    engines: Engines,
    examples: list[Example],
    alone: dict[int, list[tuple]],
    mode: str,
    options: dict[str, Any],
    count: int,
):
    chosen = examples[:count]
    roomy = engines(num_blocks=20 * POOL, **SHAPE, enable_prefix_caching=False)
    tight = engines(num_blocks=POOL + 1, **SHAPE, preemption_mode=mode, **options)
    expected = answers_alone(roomy, chosen, alone)
    assert [e[0][1] for e in expected[::8]] == [e.completion for e in chosen[::8]]
    before = tight.stats()
    outputs = tight.generate([e.prompt for e in chosen], [params(i) for i in range(count)])
    wrong = [i for i, o in enumerate(outputs) if answers(o) != expected[i]]
    assert not wrong
    assert tight.stats().num_preemptions - before.num_preemptions > count // 10
    if mode == "swap":
        assert tight.stats().num_swapped_in_blocks > before.num_swapped_in_blocks
