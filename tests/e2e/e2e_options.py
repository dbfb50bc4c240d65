"""What the end-to-end tests ask, and of which engines."""

from collections.abc import Callable
from typing import Any

from jpaged import Engine, SamplingParams

Engines = Callable[..., Engine]

SMALL: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 256}
"""One decode and one prefill bucket, so that an engine compiles in seconds."""


LOOPS: dict[str, dict[str, Any]] = {
    "overlapped": {},
    "bursts": {"num_scheduler_steps": 3},
    "synchronous": {"async_scheduling": False},
}
"""Options of the loops, which all give the same answers."""

GREEDY = SamplingParams(temperature=0.0, max_tokens=64)
QUESTION, ANSWER = "Count from 3 to 7", "\n3, 4, 5, 6, 7"


def run(engine: Engine) -> dict[str, Any]:
    """Step to the end; the last output of each request."""
    last = {}
    while engine.has_unfinished_requests:
        last.update((output.request_id, output) for output in engine.step())
    return last
