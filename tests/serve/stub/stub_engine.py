"""An engine without JAX, for tests of the server's processes."""

import ctypes
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jpaged
from jpaged import EngineStats, RequestDelta, SamplingParams, TextDelta

STEP_SECONDS = 0.005
NUM_BLOCKS = 129

START_SECONDS = "STUB_START_SECONDS"
"""Name of the environment variable with the number of seconds that the engine takes to start."""

BLOCKED_WHILE = "STUB_BLOCKED_WHILE"
"""Name of the environment variable with the path of a file. While the file exists, steps block."""

BLOCKED_IN = "STUB_BLOCKED_IN"
"""Name of the environment variable that says how steps block.

With `PyDLL`, a blocked step holds the interpreter lock. With `CDLL`, it releases the lock.
"""


class StubEngine:
    """An engine that generates one letter per answer and step, up to `max_tokens`.

    At most `max_num_seqs` requests run at a time, in order of arrival.
    """

    def __init__(self, *, max_num_seqs: int = 8, max_model_len: int = 256, **_: Any):
        print("jpaged: the stub engine starts", file=sys.stderr, flush=True)
        time.sleep(float(os.environ.get(START_SECONDS, "0")))
        self.folder = self.tokenizer_folder = Path(jpaged.__file__).parent / "assets" / "tiny"
        self.vocab_size = 512
        self.config = SimpleNamespace(kv_cache_dtype="float32")
        self.runtime_config = SimpleNamespace(
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            block_size=16,
            num_blocks=NUM_BLOCKS,
        )
        # Maps a request id to (number of tokens left, number of answers).
        self._left: dict[str, tuple[int, int]] = {}
        self._deltas: list[RequestDelta] = []

    is_paused = is_sleeping = False
    can_advance = True

    @property
    def has_work(self) -> bool:
        return bool(self._left)

    def add_request(
        self, prompt: dict[str, Any], params: SamplingParams, *, request_id: str, priority: int
    ) -> None:
        self._left[request_id] = (params.max_tokens or 16, params.n)

    def advance(self) -> None:
        self._block()
        time.sleep(STEP_SECONDS)
        for name in list(self._left)[: self.runtime_config.max_num_seqs]:
            left, count = self._left[name]
            reason = "length" if left == 1 else None
            deltas = [TextDelta("a", (97,), reason, index=index) for index in range(count)]
            self._deltas.append(RequestDelta(name, deltas, finished=left == 1))
            self._left[name] = (left - 1, count)
            if left == 1:
                del self._left[name]

    def _block(self) -> None:
        while (flag := os.environ.get(BLOCKED_WHILE)) and Path(flag).exists():
            getattr(ctypes, os.environ[BLOCKED_IN])(None).sleep(1)

    def take_deltas(self) -> list[RequestDelta]:
        deltas, self._deltas = self._deltas, []
        return deltas

    def abort(self, request_id: str) -> None:
        if self._left.pop(request_id, None) is not None:
            delta = RequestDelta(request_id, [TextDelta("", (), "abort")], finished=True)
            self._deltas.append(delta)

    def abort_all(self) -> None:
        self._left.clear()

    def stats(self) -> EngineStats:
        running = min(len(self._left), self.runtime_config.max_num_seqs)
        return EngineStats(
            block_size=16,
            num_blocks=NUM_BLOCKS - 1,
            num_free_blocks=NUM_BLOCKS - 1 - running,
            peak_used_blocks=running,
            num_running=running,
            num_waiting=len(self._left) - running,
        )
