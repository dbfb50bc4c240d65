"""What the host does for a decode step, without a device (`python -m bench.host_step`).

The engine's own scheduler, loop and runner serve 256 sequences, but the programs are stubs that
give back arrays made beforehand. So the figures hold no launch and no waiting: what is left has to
fit beside the device's work. Microseconds a step, the median over the steps:

    schedule    who computes what, block tables
    rows        which row of the device's arrays each sequence has
    pack        the step's inputs in one array
    dispatch    calling the programs: two stubs
    launch      the rest of the launch
    consume     reading the tokens
    update      tokens into sequences, stops, blocks
    outputs     the engine's own books: times, texts
    total       a turn of the loop
"""

import argparse
import gc
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial, wraps
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from bench.common import SHAPES, random_prompts
from bench.compare import parse_arguments
from bench.records import print_table, record
from jpaged import SamplingParams
from jpaged.config import LoopMode
from jpaged.core.block_manager import BlockManager
from jpaged.core.scheduler import Scheduler, SchedulerConfig
from jpaged.driver import Driver, Job
from jpaged.engine_loop import EngineLoop
from jpaged.intake import Intake
from jpaged.models.config import ModelConfig
from jpaged.models.registry import model_class
from jpaged.runtime import model_runner
from jpaged.runtime.buckets import Buckets, make_buckets
from jpaged.runtime.model_runner import ModelRunner, StepHandle
from jpaged.runtime.programs import Programs
from jpaged.runtime.recipes import Shapes, SplitModel
from jpaged.runtime.sampler import Sampled, SamplerLevel
from jpaged.runtime_config import RuntimeConfig
from pallas_kernels import Backend

SHAPE = "qwen3-0.6b"
BLOCK_SIZE, MAX_MODEL_LEN, BUDGET = 16, 2048, 8192
# Of a step of case A at the figure to reach: 256 sequences at 80,000 tokens a second.
STEP_TO_REACH_US = 256 / 80_000 * 1e6
TOKEN = 7


def null_programs(buckets: Buckets, clock: "Clock") -> Programs:
    """Programs that compute nothing; calling one counts as "dispatch"."""
    shapes = buckets.prefill_shapes
    sizes = {*buckets.decode_seqs, *(seqs for _, seqs in shapes)}

    def stubs(run: Callable, keys: Iterable, size_of: Callable[[Any], Any]) -> dict:
        return {key: clock.timed("dispatch", partial(run, size_of(key))) for key in keys}

    tokens = {size: jnp.full(size, TOKEN, jnp.int32) for size in sizes}
    levels = [(size, level) for size in sizes for level in SamplerLevel]
    return Programs(
        decode_burst={},
        decode=stubs(_decode, buckets.decode_seqs, lambda seqs: seqs),
        prefill=stubs(_prefill, shapes, lambda shape: shape),
        sample=stubs(_sample, levels, lambda key: tokens[key[0]]),
        prompt_logprobs={},
        load_row=_keep,
        copy_blocks=_keep,
        fork_rows=_keep,
        gather_blocks={},
        scatter_blocks={},
    )


def _decode(seqs: int, leaves: Any, *, state: Any, **inputs: Any) -> tuple:
    return SimpleNamespace(shape=(seqs,)), None, state


def _prefill(shape: tuple[int, int], leaves: Any, *, state: Any, **inputs: Any) -> tuple:
    tokens, seqs = shape
    return SimpleNamespace(shape=(seqs,)), SimpleNamespace(shape=(tokens,)), None, state


def _sample(
    tokens: jax.Array, logits: Any, inputs: Any, *, last_tokens: Any, sampling: Any
) -> tuple:
    return Sampled(tokens), last_tokens, sampling


def _keep(state: Any, *inputs: Any) -> Any:
    return state


class Clock:
    """Seconds spent in parts of the current step, the time of inner parts left out."""

    def __init__(self, now: Callable[[], float] = time.perf_counter):
        self._now = now
        self.parts: dict[str, float] = defaultdict(float)
        self._inner = [0.0]

    def timed(self, part: str, function: Callable) -> Callable:
        """A function that counts for `part`."""

        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            start = self._now()
            try:
                return function(*args, **kwargs)
            finally:
                seconds = self._now() - start
                self.parts[part] += seconds - self._inner.pop()
                self._inner[-1] += seconds

        return run

    def take(self) -> dict[str, float]:
        """The parts of the step that is over."""
        taken, self.parts = dict(self.parts), defaultdict(float)
        return taken


def make_loop(num_seqs: int, max_tokens: int, clock: Clock) -> EngineLoop:
    """A loop over null programs, timed, with `num_seqs` requests of 128 tokens."""
    runtime = RuntimeConfig(
        block_size=BLOCK_SIZE,
        num_blocks=num_seqs * MAX_MODEL_LEN // BLOCK_SIZE + 1,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=BUDGET,
        vocab_size=SHAPES[SHAPE]["vocab_size"],
        backend=Backend.XLA,
    )
    scheduler = Scheduler(
        SchedulerConfig(num_seqs, BUDGET, MAX_MODEL_LEN),
        BlockManager(runtime.num_blocks, BLOCK_SIZE),
    )
    loop = EngineLoop(scheduler, make_runner(runtime, clock), LoopMode.OVERLAPPED)
    scheduler.schedule = clock.timed("schedule", scheduler.schedule)
    scheduler.update = clock.timed("update", scheduler.update)
    limits = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": num_seqs}
    intake = Intake(
        None, vocab_size=runtime.vocab_size, eos_token_ids=frozenset(), seed=0, **limits
    )
    driver = Driver(loop, intake)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    for prompt in random_prompts([128] * num_seqs, runtime.vocab_size):
        driver.add(Job(intake.checked(prompt), params, 0), None, polled=False)
    return loop


def make_runner(runtime: RuntimeConfig, clock: Clock) -> ModelRunner:
    """The engine's runner with null programs and next to no arrays."""
    tiny = ModelConfig.from_hf({**SHAPES[SHAPE], "num_hidden_layers": 1, "head_dim": 2})
    dtype = np.dtype(np.float32)
    split = SplitModel.of(nnx.eval_shape(lambda: model_class(tiny)(tiny, dtype=dtype)))
    shapes = Shapes.of(split, tiny, runtime, dtype)
    buckets = make_buckets(runtime.max_num_seqs, BUDGET)
    programs = null_programs(buckets, clock)
    runner = ModelRunner(split, shapes, runtime, buckets, programs)
    runner.launch = clock.timed("launch", runner.launch)
    rows = runner._rows
    for name in ("rows", "level", "assign", "release"):
        setattr(rows, name, clock.timed("rows", getattr(rows, name)))
    return runner


def measure(num_seqs: int, num_steps: int) -> dict[str, float]:
    """Median microseconds a step, by part."""
    clock, warm = Clock(), 20
    loop = make_loop(num_seqs, num_steps + 200, clock)
    original = model_runner.pack_decode, StepHandle.read
    model_runner.pack_decode = clock.timed("pack", model_runner.pack_decode)
    StepHandle.read = clock.timed("consume", StepHandle.read)
    advance = clock.timed("outputs", loop.advance)
    try:
        # All prompts are computed, and some steps decoded, before any counts.
        while loop.counts.generated_tokens < warm * num_seqs:
            loop.advance()
        steps = []
        for _ in range(num_steps):
            clock.take()
            advance()
            steps.append(clock.take())
    finally:
        model_runner.pack_decode, StepHandle.read = original
    parts = {part: [1e6 * step.get(part, 0.0) for step in steps] for part in steps[0]}
    totals = [1e6 * sum(step.values()) for step in steps]
    return {
        **{part: statistics.median(times) for part, times in parts.items()},
        "total": statistics.median(totals),
        "total, 99 of 100": sorted(totals)[int(0.99 * len(totals))],
    }


ORDER = ("schedule", "rows", "pack", "dispatch", "launch", "consume", "update", "outputs")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seqs", type=int, nargs="+", default=[256])
    parser.add_argument("--steps", type=int, default=500)
    args = parse_arguments(parser)
    rows = []
    for num_seqs in args.seqs:
        gc.collect()
        found = measure(num_seqs, args.steps)
        for part in (*ORDER, "total", "total, 99 of 100"):
            us = found[part]
            rows.append(
                {
                    "part": part,
                    "batch": num_seqs,
                    "us_a_step": us,
                    "us_a_sequence": us / num_seqs,
                    "share_of_a_step_to_reach": us / STEP_TO_REACH_US if num_seqs == 256 else None,
                }
            )
    print_table(rows)
    print(record("host_step", rows, steps=args.steps, step_to_reach_us=STEP_TO_REACH_US))


if __name__ == "__main__":
    main()
