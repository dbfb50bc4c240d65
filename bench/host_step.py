"""Measure the host's time for a decode step and for a generation (`python -m bench.host_step`).

The engine's scheduler, loop and runner serve 256 sequences, but stubs that return prepared arrays
replace the compiled programs. So the figures contain no kernel launch and no wait for the device.
This is the work that must overlap with the device. Median microseconds per step:

    schedule    choosing the sequences and tokens of the step, block tables
    rows        assigning the sequences to rows of the device arrays
    pack        packing the step's inputs into one array
    dispatch    calling the programs: two stubs
    launch      the rest of the launch
    consume     reading the sampled tokens
    update      appending tokens, checking stops, freeing blocks
    outputs     timing metrics and text
    total       an iteration of the engine loop

The second table has the parts of a generation that no device step hides. The generation has as many
requests as there are sequences, with 128 tokens in and out. Median milliseconds per generation:

    checks      normalizing the prompts
    adding      creating and queueing the requests of the first step, checking all parameters
    first step  from there to the launch of the first step
    answers     creating the outputs of the requests that end last
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from bench.common import SHAPES, add_sampling_options, random_prompts, sampling_options
from bench.compare import parse_arguments
from bench.null_device import SHAPE, Clock, make_engine, runtime_of
from bench.records import print_table, record
from jpaged import SamplingParams
from jpaged.engine import engine as engine_module
from jpaged.runtime.results import StepHandle

# Case A decodes 256 sequences. At the target of 80,000 tokens per second, a step takes this many
# microseconds.
STEP_TO_REACH_US = 256 / 80_000 * 1e6
NUM_PROMPT_TOKENS = NUM_OUTPUT_TOKENS = 128
NOTHING: Mapping[str, Any] = MappingProxyType({})


def make_params(max_tokens: int, sampling: Mapping[str, Any] = NOTHING) -> SamplingParams:
    """Return the sampling parameters that `bench.throughput` uses."""
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **sampling)


def make_prompts(num_seqs: int) -> list[list[int]]:
    """Return `num_seqs` prompts of `NUM_PROMPT_TOKENS` random tokens."""
    return random_prompts([NUM_PROMPT_TOKENS] * num_seqs, SHAPES[SHAPE]["vocab_size"])


def measure(
    num_seqs: int, num_steps: int, sampling: Mapping[str, Any] = NOTHING
) -> dict[str, float]:
    """Return the median microseconds per step for each part of the host's work. The module's
    docstring lists the parts."""
    clock, warm = Clock(), 20
    original = StepHandle.read
    StepHandle.read = clock.timed("consume", StepHandle.read)
    try:
        engine = make_engine(runtime_of(num_seqs), clock)
        params = make_params(num_steps + 200, sampling)
        streams = [engine.stream(prompt, params) for prompt in make_prompts(num_seqs)]
        advance = clock.timed("outputs", engine.advance)
        # Finish the prefills and some decode steps before the timed steps.
        while engine.stats().num_generated_tokens < warm * num_seqs:
            engine.advance()
        steps = []
        for _ in range(num_steps):
            clock.take()
            advance()
            steps.append(clock.take())
        del streams
    finally:
        StepHandle.read = original
    parts = {part: [1e6 * step.get(part, 0.0) for step in steps] for part in steps[0]}
    totals = [1e6 * sum(step.values()) for step in steps]
    return {
        **{part: statistics.median(times) for part, times in parts.items()},
        "total": statistics.median(totals),
        "total, 99 of 100": sorted(totals)[int(0.99 * len(totals))],
    }


def measure_ends(
    num_seqs: int, num_times: int, sampling: Mapping[str, Any] = NOTHING
) -> dict[str, float]:
    """Return the median milliseconds of the parts of a generation during which the device is idle.

    The module's docstring lists the parts.
    """
    engine, prompts = make_engine(runtime_of(num_seqs), Clock()), make_prompts(num_seqs)
    marks: list[float] = []
    loop, normalize = engine._loop, engine_module.normalize_prompts
    loop.advance = _marked(loop.advance, marks)
    engine_module.normalize_prompts = _marked(normalize, marks)
    params = [make_params(NUM_OUTPUT_TOKENS, sampling) for _ in prompts]
    taken = []
    try:
        for _ in range(num_times):
            engine.generate(prompts, params, use_tqdm=False)
            marks.append(time.perf_counter())
            taken.append([*np.diff(marks[:4]), marks[-1] - marks[-2]])
            marks.clear()
    finally:
        engine_module.normalize_prompts = normalize
    return dict(zip(ENDS, 1e3 * np.median(taken, axis=0), strict=True))


def _marked(function: Callable[..., Any], marks: list[float]) -> Callable[..., Any]:
    def run(*args: Any, **options: Any) -> Any:
        marks.append(time.perf_counter())
        result = function(*args, **options)
        marks.append(time.perf_counter())
        return result

    return run


ENDS = ("checks", "adding", "first step", "answers")
ORDER = ("schedule", "rows", "pack", "dispatch", "launch", "consume", "update", "outputs")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seqs", type=int, nargs="+", default=[256])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--generations", type=int, default=20)
    add_sampling_options(parser)
    args = parse_arguments(parser)
    sampling = sampling_options(args)
    rows, ends = [], []
    for num_seqs in args.seqs:
        gc.collect()
        found = measure(num_seqs, args.steps, sampling)
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
        for part, ms in measure_ends(num_seqs, args.generations, sampling).items():
            row = {
                "part": part,
                "requests": num_seqs,
                "ms": ms,
                "us_a_request": 1e3 * ms / num_seqs,
            }
            ends.append(row)
    print_table(rows)
    print_table(ends)
    more = {"steps": args.steps, "generations": args.generations} | sampling
    name = "host_step" + ("_logprobs" if args.logprobs is not None else "")
    name += "_penalties" if args.penalties else ""
    print(record(name, rows + ends, **more, step_to_reach_us=STEP_TO_REACH_US))


if __name__ == "__main__":
    main()
