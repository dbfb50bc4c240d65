"""Requests and engine options of the end-to-end tests."""

from collections.abc import Callable
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
"""One decode and one prefill bucket, so that an engine compiles in seconds. Worker processes would
refuse to compile, since the code of tests has checks in it."""


LOOPS: dict[str, dict[str, Any]] = {
    "overlapped": {},
    "bursts": {"num_scheduler_steps": 3},
    "synchronous": {"async_scheduling": False},
}
"""Options of the loops, which all give the same answers."""

MOSTLY_OVERLAPPED = [
    "overlapped",
    *(pytest.param(loop, marks=pytest.mark.full) for loop in ("bursts", "synchronous")),
]
"""Loops of a slow test: the full tier alone runs it in the other two."""

GREEDY = SamplingParams(temperature=0.0, max_tokens=64)
QUESTION, ANSWER = "Count from 3 to 7", "\n3, 4, 5, 6, 7"


def scores(engine: Engine, prompts: list[Any]) -> np.ndarray:
    """Log-probabilities of the prompts' tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, prompt_logprobs=0)
    found = engine.generate(prompts, params)
    places = [place for output in found for place in output.prompt_logprobs or () if place]
    return np.array([entry.logprob for place in places for entry in place.values()])


def run(engine: Engine) -> dict[str, Any]:
    """Step to the end; the last output of each request."""
    last = {}
    while engine.has_unfinished_requests:
        last.update((output.request_id, output) for output in engine.step())
    return last
