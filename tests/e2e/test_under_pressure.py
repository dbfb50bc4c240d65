"""Mixed requests in a pool far too small: every answer is as if its request ran alone."""

from pathlib import Path
from typing import Any

import pytest
from e2e_options import Engines

from jpaged import Engine, RequestOutput, SamplingParams
from tools.tiny.world import Example, sample_examples

NUM_REQUESTS, FEW = 500, 12
MAX_MODEL_LEN, BLOCK_SIZE = 120, 8
POOL = 48
"""Blocks: 16 sequences could fill five times as many, and 64 sequences twenty times as many."""

ROOMY = 20 * POOL
"""Blocks that are enough for every sequence that may run at once."""

SHAPE: dict[str, Any] = {
    "max_model_len": MAX_MODEL_LEN,
    "block_size": BLOCK_SIZE,
    "max_num_seqs": 16,
}
WIDE: dict[str, Any] = {"max_num_seqs": 64}


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
def alone() -> dict[Path | None, dict[int, list[tuple]]]:
    """Answers of each model by the request's number, filled once."""
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
        pytest.param("auto", {}, FEW, marks=pytest.mark.full),
        ("swap", {"swap_space": 0.001}, FEW),
        ("recompute", {"async_scheduling": False}, FEW),
        pytest.param("auto", WIDE, 120, marks=pytest.mark.full),
        pytest.param("swap", WIDE | {"swap_space": 0.001}, 120, marks=pytest.mark.full),
        pytest.param("recompute", WIDE | {"async_scheduling": False}, 120, marks=pytest.mark.full),
        pytest.param("auto", WIDE, NUM_REQUESTS, marks=pytest.mark.soak),
        pytest.param("swap", WIDE | {"enable_prefix_caching": False}, 120, marks=pytest.mark.soak),
    ],
)
def test_requests_under_memory_pressure_answer_as_alone(
    engines: Engines,
    shallow_folder: Path,
    examples: list[Example],
    alone: dict[Path | None, dict[int, list[tuple]]],
    mode: str,
    options: dict[str, Any],
    count: int,
):
    chosen = examples[:count]
    is_right = count > FEW  # only the whole model's answers are
    model = None if is_right else shallow_folder
    roomy = engines(model, num_blocks=ROOMY, **SHAPE, enable_prefix_caching=False)
    pressed = {"num_blocks": POOL + 1, **SHAPE, "preemption_mode": mode, **options}
    tight = engines(model, **pressed)
    expected = answers_alone(roomy, chosen, alone.setdefault(model, {}))
    if is_right:
        assert [e[0][1] for e in expected[::8]] == [e.completion for e in chosen[::8]]
    before = tight.stats()
    outputs = tight.generate([e.prompt for e in chosen], [params(i) for i in range(count)])
    wrong = [i for i, o in enumerate(outputs) if answers(o) != expected[i]]
    assert not wrong
    assert tight.stats().num_preemptions - before.num_preemptions > count // 10
    if mode == "swap":
        assert tight.stats().num_swapped_in_blocks > before.num_swapped_in_blocks
