"""Requests in a pool far too small for them, every answer checked for truth."""

import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
from e2e_options import Engines

from jpaged import Engine, SamplingParams
from tools.tiny.world import Example, sample_examples

NUM_REQUESTS, FEW = 100, 12
TIGHT = 21  # blocks: the longest sequence fits alone, but eight want to run together
MAX_MODEL_LEN = 320


@pytest.fixture(scope="module")
def examples() -> list[Example]:
    """The longest come first, so that a few need more than the pool has too."""
    drawn = sample_examples(7, 2 * NUM_REQUESTS)
    fitting = [e for e in drawn if len(e.prompt + e.completion) < MAX_MODEL_LEN]  # a token a byte
    drawn = fitting[:NUM_REQUESTS]
    longest = sorted(drawn, key=lambda e: -len(e.prompt + e.completion))[:FEW]
    return [e for e in drawn if e in longest] + [e for e in drawn if e not in longest]


def params(index: int) -> SamplingParams:
    """Greedy and seeded requests mixed; a cold temperature does not change a sure answer."""
    if index % 3:
        return SamplingParams(temperature=0.0, max_tokens=MAX_MODEL_LEN)
    return SamplingParams(temperature=0.01, top_p=0.9, seed=index, max_tokens=MAX_MODEL_LEN)


def answers(engine: Engine, examples: list[Example]) -> list[str]:
    prompts = [e.prompt for e in examples]
    outputs = engine.generate(prompts, [params(i) for i in range(len(prompts))])
    return [output.outputs[0].text for output in outputs]


@pytest.mark.parametrize(
    ("async_scheduling", "count"),
    [
        pytest.param(True, FEW, marks=pytest.mark.full),
        pytest.param(True, NUM_REQUESTS, marks=pytest.mark.full),
        pytest.param(False, NUM_REQUESTS, marks=pytest.mark.soak),
    ],
)
def test_memory_pressure_changes_no_answer_of_the_embedded_model(
    engines: Engines, examples: list[Example], async_scheduling: bool, count: int
):
    chosen = examples[:count]
    roomy = engines(max_model_len=MAX_MODEL_LEN, num_blocks=161)
    tight = engines(
        max_model_len=MAX_MODEL_LEN, num_blocks=TIGHT, async_scheduling=async_scheduling
    )
    unpressed = answers(roomy, chosen)
    before = tight.stats().num_preemptions
    assert answers(tight, chosen) == unpressed
    assert tight.stats().num_preemptions - before > 5
    right = [a == e.completion for a, e in zip(unpressed, chosen, strict=True)]
    assert right.count(False) <= math.ceil(0.02 * len(right))


@pytest.mark.full
@pytest.mark.parametrize("count", [FEW, 80])
def test_random_aborts_change_no_other_answer(
    engines: Engines, shallow_folder: Path, examples: list[Example], count: int
):
    engine = engines(shallow_folder, max_model_len=MAX_MODEL_LEN, num_blocks=TIGHT)
    rng = random.Random(0)
    chosen = examples[:count]
    asked = [replace(params(i), max_tokens=60) for i in range(count)]
    outputs = engine.generate([e.prompt for e in chosen], asked)
    expected = [output.outputs[0].text for output in outputs]
    ids = [engine.add_request(e.prompt, own) for e, own in zip(chosen, asked, strict=True)]
    alive, finished = dict(enumerate(ids)), {}
    while engine.has_unfinished_requests:
        for output in engine.step():
            if output.finished:
                finished[output.request_id] = output.outputs[0].text
        engine.check_integrity()
        doomed = [i for i, request_id in alive.items() if request_id not in finished]
        if doomed and rng.random() < 0.1:
            engine.abort(alive.pop(rng.choice(doomed)))
    assert len(alive) < len(ids)
    assert {i: finished[request_id] for i, request_id in alive.items()} == {
        i: expected[i] for i in alive
    }
