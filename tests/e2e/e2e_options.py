"""Options of the end-to-end tests' engines."""

from collections.abc import Callable
from typing import Any

from jpaged import Engine

Engines = Callable[..., Engine]

SMALL: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 256}
"""One decode and one prefill bucket, so that an engine compiles in seconds."""


LOOPS: dict[str, dict[str, Any]] = {
    "overlapped": {},
    "bursts": {"num_scheduler_steps": 3},
    "synchronous": {"async_scheduling": False},
}
"""Options of the loops, which all give the same answers."""
