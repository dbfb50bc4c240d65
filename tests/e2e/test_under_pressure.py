"""Test that requests of many kinds get the same answers as single requests, although the pool is
much too small for all of them."""

import random
from pathlib import Path
from typing import Any

import pytest
from e2e_options import Engines, answers

from jpaged import Engine, SamplingParams
from tools.tiny.world import Example, sample_examples

NUM_REQUESTS, FEW = 500, 12
MAX_MODEL_LEN, BLOCK_SIZE = 120, 8
POOL = 48
"""Number of usable blocks. 16 sequences of the maximum length would need 5 times as many, and 64
sequences 20 times as many."""

ROOMY = 20 * POOL
"""Number of blocks that is enough for all running sequences."""

SHAPE: dict[str, Any] = {
    "max_model_len": MAX_MODEL_LEN,
    "block_size": BLOCK_SIZE,
    "max_num_seqs": 16,
}
WIDE: dict[str, Any] = {"max_num_seqs": 64}


def params(index: int) -> SamplingParams:
    """Return the sampling parameters of request `index`. The kind of decoding depends on the
    index."""
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
    """Return an empty dict, in which the tests cache the answers of requests that run alone.

    The keys are model folders. A value maps the index of a request to the answers.
    """
    return {}


def answers_alone(engine: Engine, examples: list[Example], known: dict[int, list[tuple]]) -> list:
    for index in range(len(known), len(examples)):
        (known[index],) = answers(engine.generate(examples[index].prompt, params(index)))
    return [known[index] for index in range(len(examples))]


@pytest.mark.parametrize(
    ("mode", "options", "count"),
    [
        pytest.param("auto", {}, FEW, marks=pytest.mark.full),
        ("swap", {"swap_space": 0.001}, FEW),
        pytest.param("recompute", {"async_scheduling": False}, FEW, marks=pytest.mark.full),
        pytest.param("auto", WIDE, 120, marks=pytest.mark.full),
        pytest.param("swap", WIDE | {"swap_space": 0.001}, 120, marks=pytest.mark.full),
        pytest.param("recompute", WIDE | {"async_scheduling": False}, 120, marks=pytest.mark.full),
        pytest.param("auto", WIDE, NUM_REQUESTS, marks=pytest.mark.soak),
        pytest.param("swap", WIDE | {"enable_prefix_caching": False}, 120, marks=pytest.mark.soak),
    ],
)
def test_memory_pressure_changes_no_answer(
    engines: Engines,
    shallow_folder: Path,
    examples: list[Example],
    alone: dict[Path | None, dict[int, list[tuple]]],
    mode: str,
    options: dict[str, Any],
    count: int,
):
    chosen = examples[:count]
    is_right = count > FEW  # short runs use a model with two layers, whose answers are wrong
    model = None if is_right else shallow_folder
    roomy = engines(model, num_blocks=ROOMY, **SHAPE, enable_prefix_caching=False)
    pressed = {"num_blocks": POOL + 1, **SHAPE, "preemption_mode": mode, **options}
    tight = engines(model, **pressed)
    expected = answers_alone(roomy, chosen, alone.setdefault(model, {}))
    if is_right:
        assert [e[0][1] for e in expected[::8]] == [e.completion for e in chosen[::8]]
    before = tight.stats()
    outputs = tight.generate([e.prompt for e in chosen], [params(i) for i in range(count)])
    assert [i for i, it in enumerate(answers(outputs)) if it != expected[i]] == []
    assert tight.stats().num_preemptions - before.num_preemptions > count // 10
    if mode == "swap":
        assert tight.stats().num_swapped_in_blocks > before.num_swapped_in_blocks


@pytest.mark.full
@pytest.mark.parametrize("count", [FEW, 80])
def test_random_aborts_change_no_answer_of_other_requests(
    engines: Engines,
    shallow_folder: Path,
    examples: list[Example],
    alone: dict[Path | None, dict[int, list[tuple]]],
    count: int,
):
    roomy = engines(shallow_folder, num_blocks=ROOMY, **SHAPE, enable_prefix_caching=False)
    expected = answers_alone(roomy, examples[:count], alone.setdefault(shallow_folder, {}))
    engine, rng = engines(shallow_folder, num_blocks=POOL + 1, **SHAPE), random.Random(0)
    for i, example in enumerate(examples[:count]):
        engine.add_request(example.prompt, params(i), request_id=str(i))
    finished, aborted = dict[int, list[tuple]](), set[int]()
    while engine.has_unfinished_requests:
        finished |= {int(it.request_id): answers([it])[0] for it in engine.step() if it.finished}
        engine.check_integrity()
        running = [i for i in range(count) if i not in finished and i not in aborted]
        if running and rng.random() < 0.1:
            aborted.add(index := rng.choice(running))
            engine.abort(str(index))
    assert aborted
    assert finished == {i: expected[i] for i in range(count) if i not in aborted}
