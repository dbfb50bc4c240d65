"""Profile the kernels of a step (`python -m bench.profile_step --model qwen3-0.6b --batch 64`).

The script runs an engine until all requests decode, and traces some steps with JAX's profiler. It
prints each kernel's launches and time per step, then the busy time of the device and the whole time
of a step. `--prefill` profiles the steps that compute the prompts instead. Requests are greedy and
the weights are random. `--format` takes several formats. Decode steps are single steps, as for
streaming clients, while `Engine.generate` also launches bursts of several steps.

The table shows the compiler's name of a kernel without numbers, so equal fusions share a line.
"""

import argparse
import gzip
import itertools
import json
import re
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import jax

from bench.common import (
    ALL_SHAPES,
    BYTES_PER_SECOND,
    FORMATS,
    Floor,
    add_format_option,
    labelled,
    make_engine,
    random_prompts,
)
from bench.compare import parse_arguments
from bench.records import print_table, record
from jpaged import Engine, SamplingParams
from jpaged.core.plan import SchedulingGoal


@dataclass(frozen=True)
class Kernel:
    """One launch of a kernel on a stream of the device. Times are in microseconds."""

    name: str
    start: float
    duration: float

    @property
    def end(self) -> float:
        """End time in microseconds."""
        return self.start + self.duration


def read_trace(folder: Path) -> list[Kernel]:
    """Return the kernel launches in the trace, in order of their start times.

    The function reads all streams of the first device only, since all tensor-parallel devices
    launch the same kernels.

    Raises:
        RuntimeError: the trace has no kernel of a GPU.
    """
    (path,) = folder.rglob("*.trace.json.gz")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    names = {(e["pid"], e.get("tid"), e["name"]): e["args"].get("name", "") for e in _meta(events)}
    devices = sorted(
        (name, pid)
        for (pid, _, kind), name in names.items()
        if kind == "process_name" and name.startswith("/device:GPU")
    )
    own = devices[0][1] if devices else None
    streams = {
        (pid, tid)
        for (pid, tid, kind), name in names.items()
        if kind == "thread_name" and pid == own and name.startswith("Stream")
    }
    kernels = [
        Kernel(e["name"], e["ts"], e["dur"])
        for e in events
        if e.get("ph") == "X" and (e["pid"], e["tid"]) in streams
    ]
    if not kernels:
        raise RuntimeError("the trace has no kernel of a GPU: run this on a machine with a GPU")
    return sorted(kernels, key=lambda kernel: kernel.start)


def _meta(events: Iterable[dict]) -> Iterator[dict]:
    return (event for event in events if event.get("ph") == "M")


def family(name: str) -> str:
    """Return a kernel's name without template arguments and trailing numbers."""
    return re.sub(r"(_\d+)+$", "", re.sub(r"<.*", "", name))


def busy_time(kernels: list[Kernel]) -> float:
    """Return the microseconds during which at least one kernel ran."""
    total, until = 0.0, 0.0
    for kernel in kernels:
        total += max(kernel.end - max(kernel.start, until), 0.0)
        until = max(until, kernel.end)
    return total


def table(kernels: list[Kernel], num_steps: int, top: int) -> list[dict]:
    """Return a row for each of the `top` kernels that take the most time.

    Kernels whose names differ only in numbers or template arguments count as one kernel.
    """
    times: dict[str, list[float]] = defaultdict(list)
    for kernel in kernels:
        times[family(kernel.name)].append(kernel.duration)
    whole = sum(map(sum, times.values()))
    ranked = sorted(times.items(), key=lambda item: -sum(item[1]))
    return [
        {
            "kernel": name[:60],
            "launches_a_step": len(durations) / num_steps,
            "us_each": sum(durations) / len(durations),
            "us_a_step": sum(durations) / num_steps,
            "share": sum(durations) / whole,
        }
        for name, durations in ranked[:top]
    ]


def profile(engine: Engine, batch: int, context: int, num_steps: int, folder: Path) -> dict:
    """Trace about `num_steps` decode steps of `batch` sequences of about `context` tokens.

    Returns:
        A dict with `ms_a_step`, the milliseconds per step without tracing, and `num_steps`, the
        number of traced steps.
    """
    # First run until the sequences have `warm` output tokens on average. A sequence gains at most
    # one token per step, so the loop takes at least `warm` steps. The prefills take less than
    # `warm` steps, so all prefills are then complete, and the engine runs only decode steps.
    warm = 16 + 2 * -(-batch * context // engine.runtime_config.max_num_batched_tokens)
    burst = engine.runtime_config.num_scheduler_steps
    max_tokens = warm + 2 * num_steps + 8 * burst + 16
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    for prompt in random_prompts([context] * batch, engine.vocab_size):
        engine.add_request(prompt, params)
    loop = engine._loop
    before = engine.stats().num_generated_tokens
    while engine.stats().num_generated_tokens - before < warm * batch:
        loop.advance(SchedulingGoal.LATENCY)

    def run() -> int:
        launched = loop.counts["num_steps"]
        while loop.counts["num_steps"] - launched < num_steps:
            loop.advance(SchedulingGoal.LATENCY)
        return loop.counts["num_steps"] - launched

    start = time.perf_counter()
    untraced = run()
    seconds = time.perf_counter() - start
    with jax.profiler.trace(str(folder)):
        traced = run()
    engine.abort_all()
    return {"ms_a_step": 1e3 * seconds / untraced, "num_steps": traced}


def profile_prefill(engine: Engine, batch: int, context: int, folder: Path) -> dict:
    """Trace the steps that compute `batch` prompts of `context` tokens.

    Returns the same keys as `profile`.
    """
    loop = engine._loop

    def run(seed: int) -> tuple[float, int]:
        prompts = random_prompts([context] * batch, engine.vocab_size, seed)
        launched, start = loop.counts["num_steps"], time.perf_counter()
        engine.generate(prompts, SamplingParams(max_tokens=1, temperature=0.0), use_tqdm=False)
        return time.perf_counter() - start, loop.counts["num_steps"] - launched

    run(0)
    seconds, untraced = run(1)
    with jax.profiler.trace(str(folder)):
        _, traced = run(2)
    return {"ms_a_step": 1e3 * seconds / untraced, "num_steps": traced}


def _floor(floor: Floor, args: argparse.Namespace, batch: int, num_steps: int) -> float:
    if args.prefill:
        compute = floor.prefill([args.context] * batch) / num_steps
        return max(compute, floor.weight_bytes / BYTES_PER_SECOND)
    return floor.decode_step(batch, args.context)


def measure(
    engine: Engine, shape: str, form: str, batch: int, args: argparse.Namespace
) -> tuple[dict, list[dict]]:
    """Profile steps of `batch` sequences. Return one row for the whole step, and one row per
    kernel."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if args.prefill:
            figures = profile_prefill(engine, batch, args.context, folder)
        else:
            figures = profile(engine, batch, args.context, args.steps, folder)
        kernels = read_trace(folder)
    num_steps = figures["num_steps"]
    row = figures | {
        "model": shape,
        "batch": batch,
        "kernels_a_step": len(kernels) / num_steps,
        "busy_ms": busy_time(kernels) / num_steps / 1e3,
        "traced_ms": (kernels[-1].end - kernels[0].start) / num_steps / 1e3,
        "floor_ms": 1e3 * _floor(Floor.of(engine), args, batch, num_steps),
    }
    return labelled(row, form), table(kernels, num_steps, args.top)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=[*ALL_SHAPES], nargs="+", default=["qwen3-0.6b"])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--top", type=int, default=25)
    parser.add_argument(
        "--prefill",
        action="store_true",
        help="profile the prefill steps instead of decode steps",
    )
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="GPUs (%(default)s)")
    add_format_option(parser)
    args = parse_arguments(parser, argv)
    shared, results = {"tensor_parallel_size": args.tensor_parallel_size}, []
    labels = {} if args.layers is None else {"layers": args.layers}
    for shape, form in itertools.product(args.model, args.format):
        if args.layers is not None:
            ALL_SHAPES[shape] = ALL_SHAPES[shape] | {"num_hidden_layers": args.layers}
        engine = make_engine(shape, verbose=True, **shared, **FORMATS[form])
        for batch in args.batch:
            row, kernels = measure(engine, shape, form, batch, args)
            print_table(kernels)
            print_table([row])
            sys.stdout.flush()
            results.append({**row, **labels, "kernels": kernels})
        del engine
    name = "profile_prefill" if args.prefill else "profile_step"
    name += f"_on_{args.tensor_parallel_size}" if args.tensor_parallel_size > 1 else ""
    print(record(name, results))


if __name__ == "__main__":
    main()
