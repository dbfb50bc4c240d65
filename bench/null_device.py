"""An engine whose compiled programs are stubs, to measure the time of the host's work alone."""

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial, wraps
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
from flax import nnx

from bench.common import SHAPES
from jpaged.config import EngineConfig, LoopMode
from jpaged.core.block_manager import BlockManager
from jpaged.core.scheduler import Scheduler, SchedulerConfig
from jpaged.engine.engine import Engine
from jpaged.engine.preprocessing import Preprocessor
from jpaged.engine.startup import EngineParts
from jpaged.models.config import ModelConfig
from jpaged.models.decoder import Decoder
from jpaged.models.registry import read_model_config
from jpaged.observe.statistics import MemoryAccount
from jpaged.runtime.model_runner import ModelRunner
from jpaged.runtime.programs import DeviceShapes, ProgramName, Programs, SplitModel
from jpaged.runtime.runtime_config import RuntimeConfig
from jpaged.runtime.sampler import SampledTokens
from jpaged.runtime.step_programs import PROGRAMS
from jpaged.sampling_params import MAX_LOGPROBS
from pallas_kernels import NUM_TOKEN_COLUMNS, TOKEN_COLUMN, Backend

SHAPE = "qwen3-0.6b"
BLOCK_SIZE, MAX_MODEL_LEN, BUDGET = 16, 2048, 8192
TOKEN = 7
"""The token id that every step samples."""


class Clock:
    """Measure the seconds of each part of a step. The time of a part excludes other parts that it
    calls.

    Several threads may run different parts at the same time, but never the same part.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter):
        self._now = now
        self.parts: dict[str, float] = defaultdict(float)
        self._threads = threading.local()

    def timed(self, part: str, function: Callable) -> Callable:
        """Return `function`, wrapped so that the time of each call is added to `part`."""

        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            inner = vars(self._threads).setdefault("inner", [0.0])
            inner.append(0.0)
            start = self._now()
            try:
                return function(*args, **kwargs)
            finally:
                seconds = self._now() - start
                self.parts[part] += seconds - inner.pop()
                inner[-1] += seconds

        return run

    def take(self) -> dict[str, float]:
        """Return the seconds of each part since the last call of `take`."""
        taken, self.parts = dict(self.parts), defaultdict(float)
        return taken


def runtime_of(num_seqs: int) -> RuntimeConfig:
    """Return a runtime configuration for `num_seqs` concurrent sequences."""
    return RuntimeConfig(
        block_size=BLOCK_SIZE,
        num_blocks=num_seqs * MAX_MODEL_LEN // BLOCK_SIZE + 1,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=BUDGET,
        vocab_size=SHAPES[SHAPE]["vocab_size"],
        backend=Backend.XLA,
    )


def make_engine(
    runtime: RuntimeConfig, clock: Clock, mode: LoopMode = LoopMode.OVERLAPPED
) -> Engine:
    """Create an engine whose compiled programs are stubs, and which has no tokenizer. `clock`
    measures the time of each part of the host's work."""
    limits = SchedulerConfig(
        runtime.max_num_seqs, runtime.max_num_batched_tokens, runtime.max_model_len
    )
    scheduler = Scheduler(limits, BlockManager(runtime.num_blocks, runtime.block_size))
    parts = EngineParts(
        folder=Path(),
        preprocessor=Preprocessor(
            None,
            vocab_size=runtime.vocab_size,
            max_model_len=runtime.max_model_len,
            max_num_seqs=runtime.max_num_seqs,
            eos_token_ids=frozenset(),
            seed=0,
        ),
        model_config=tiny_model(),
        runtime_config=runtime,
        memory_account=MemoryAccount(0, 0, 0, 0, None),
        scheduler=scheduler,
        runner=make_runner(runtime, clock),
        # This engine has no weights to update.
        parameters=cast(Any, SimpleNamespace(shared_names=())),
    )
    config = EngineConfig(async_scheduling=mode is LoopMode.OVERLAPPED, skip_tokenizer_init=True)
    engine = Engine.from_parts(config, parts)
    scheduler.schedule = clock.timed("schedule", scheduler.schedule)
    scheduler.update = clock.timed("update", scheduler.update)
    return engine


def tiny_model() -> ModelConfig:
    """Return a model configuration with the vocabulary of `SHAPE`, one layer and small heads."""
    return read_model_config({**SHAPES[SHAPE], "num_hidden_layers": 1, "head_dim": 2})


def make_runner(runtime: RuntimeConfig, clock: Clock) -> ModelRunner:
    """Create a `ModelRunner` with stub programs and small arrays."""
    tiny, dtype = tiny_model(), np.dtype(np.float32)
    split = SplitModel.of(nnx.eval_shape(lambda: Decoder(tiny, dtype=dtype)))
    shapes = DeviceShapes.of(tiny, runtime, dtype)
    runner = ModelRunner(split, shapes, runtime, null_programs(runtime, shapes, clock))
    runner.launch = clock.timed("launch", runner.launch)
    rows = runner._rows
    for name in ("rows", "level", "assign", "release"):
        setattr(rows, name, clock.timed("rows", getattr(rows, name)))
    runner._packers = {name: clock.timed("pack", it) for name, it in runner._packers.items()}
    return runner


def null_programs(runtime: RuntimeConfig, shapes: DeviceShapes, clock: Clock) -> Programs:
    """Return stub programs. `clock` counts the time of their calls as the part "dispatch"."""
    programs = dict[ProgramName, Callable[..., Any]]()
    sampled = {rows: _sampled(rows) for rows in runtime.buckets.logits_row_sizes}
    for step in PROGRAMS.values():
        for key in step.keys(runtime, shapes):
            sizes = step.sizes(runtime, key)
            num_rows, num_tokens = sizes.get("num_rows"), sizes.get("num_tokens")
            made = dict.fromkeys(step.results) | {
                "logits": SimpleNamespace(shape=(num_rows,)),
                "hidden": SimpleNamespace(shape=(num_tokens,)),
                "sampled": sampled.get(num_rows or 0),
            }
            run = partial(_run, itemgetter(*step.results), made)
            programs[step.name, key] = clock.timed("dispatch", run)
    return programs


def _run(results: Callable[[dict], Any], made: dict[str, Any], *model: Any, **given: Any) -> Any:
    """Return the results of a stub program as a dict. If the program has an argument with the name
    of a result, the result is this argument. Otherwise the result is taken from `made`.
    """
    return results(made | given)


def _sampled(seqs: int) -> SampledTokens:
    scores = np.zeros((seqs, NUM_TOKEN_COLUMNS + 2 * MAX_LOGPROBS), np.int32)
    scores[:, TOKEN_COLUMN] = TOKEN
    return SampledTokens(jnp.full(seqs, TOKEN, jnp.int32), jnp.asarray(scores))
