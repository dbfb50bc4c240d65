"""Engine options, requests and helpers that several end-to-end tests use."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from jpaged import Engine, SamplingParams

Engines = Callable[..., Engine]

SMALL: dict[str, Any] = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "max_model_len": 256,
    "num_compile_workers": 0,
}
"""Engine options with one decode bucket and one prefill bucket, so that an engine compiles in
seconds. There are no compile workers: they would refuse to compile, because the tests add type
checks to jpaged's code."""

LOOPS: dict[str, dict[str, Any]] = {
    "overlapped": {},
    "bursts": {"num_scheduler_steps": 3},
    "synchronous": {"async_scheduling": False},
}
"""Options of each kind of engine loop. All loops give the same answers."""

SINGLE_STEP_LOOPS = {name: LOOPS[name] for name in ("overlapped", "synchronous")}


def in_full_tier(*values: Any) -> list[Any]:
    """Return the values as test parameters that run only in the full test tier."""
    return [pytest.param(value, marks=pytest.mark.full) for value in values]


MOSTLY_OVERLAPPED = ["overlapped", *in_full_tier("bursts", "synchronous")]
"""Values of the parameter `engine` for a slow test. The default tier runs the test only with the
overlapped loop."""

GREEDY = SamplingParams(temperature=0.0, max_tokens=64)
QUESTION, ANSWER = "Count from 3 to 7", "\n3, 4, 5, 6, 7"


def scores(engine: Engine, prompts: list[Any]) -> np.ndarray:
    """Return the log-probabilities of the prompts' tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, prompt_logprobs=0)
    outputs = engine.generate(prompts, params)
    entries = [entry for output in outputs for entry in output.prompt_logprobs or () if entry]
    return np.array([value.logprob for entry in entries for value in entry.values()])


def text(output: Any) -> str:
    """Return the text of a request's first completion."""
    return output.outputs[0].text


def generate_text(engine: Engine, params: SamplingParams = GREEDY, prompt: Any = QUESTION) -> str:
    return text(engine.generate(prompt, params)[0])


def token_ids(outputs: Any) -> list[list[list[int]]]:
    """Return the token ids of every completion of every request."""
    return [[list(completion.token_ids) for completion in it.outputs] for it in outputs]


def answers(outputs: Any) -> list[list[tuple]]:
    """Return the tokens, text, finish reason and stop reason of every completion of every
    request."""
    return [
        [(tuple(c.token_ids), c.text, c.finish_reason, c.stop_reason) for c in output.outputs]
        for output in outputs
    ]


def make_workload(
    kinds: list[dict[str, Any]], count: int, vocab_size: int, **options: Any
) -> tuple[list[list[int]], list[SamplingParams]]:
    """Return `count` prompts that share a prefix, and one `SamplingParams` per prompt. The sampling
    parameters repeat the items of `kinds` in turn."""
    rng = random.Random(0)
    prefix = [rng.randrange(5, vocab_size) for _ in range(60)]
    prompts = [[*prefix[: 20 + 2 * i], 5 + i] for i in range(count)]
    chosen = ({"seed": i, **options, **kinds[i % len(kinds)]} for i in range(count))
    return prompts, [SamplingParams(**each) for each in chosen]


def check_small_pool_changes_no_answer(
    roomy: Engine, tight: Engine, prompts: list[list[int]], params: list[SamplingParams]
) -> None:
    """Check that two engines give the same answers. The engine `tight` has so few blocks that it
    preempts requests, and shares and copies blocks."""
    expected = answers(roomy.generate(prompts, params))
    before = tight.stats()
    for _ in range(2):  # the second run finds prefixes in the cache
        assert answers(tight.generate(prompts, params)) == expected
    stats = tight.stats()
    assert stats.num_preemptions > before.num_preemptions
    assert stats.num_cached_tokens > before.num_cached_tokens
    assert stats.num_block_copies > before.num_block_copies


def run(engine: Engine) -> dict[str, Any]:
    """Run the engine until all requests have ended; return the last output of each request."""
    last = {}
    while engine.has_unfinished_requests:
        last.update((output.request_id, output) for output in engine.step())
    return last


def take_steps(engine: Engine, num_steps: int) -> None:
    for _ in range(num_steps):
        engine.step()


def updates(engine: Engine) -> Iterator[Any]:
    """Run the engine until all requests have ended; yield each update of each request."""
    while engine.has_work:
        engine.advance()
        yield from engine.take_deltas()


def final_updates(engine: Engine) -> dict[str, Any]:
    """Run the engine until all requests have ended; return the last update of each request."""
    return {it.request_id: it for it in updates(engine) if it.finished}
