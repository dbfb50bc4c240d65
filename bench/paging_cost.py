"""Measure the cost of paging when memory is plentiful (`python -m bench.paging_cost`).

jpaged's engine and the contiguous decoder of `bench.contiguous` serve the same requests from start
to end. Both have memory for all requests:

    A   256 requests, 128 tokens in and 128 out
    B   512 requests with ShareGPT-like lengths (a static batch waits for its longest sequence)
    D   64 requests, 1,024 tokens in and 128 out

The decoder knows the output lengths, so static batches group requests of similar length in narrow
slabs. The cost is the engine's time divided by the time of the faster batching mode, less 1.
The engine has its default options, so its other optimizations count too. The systems take turns for
`--rounds` rounds, so that a change of the device's speed shows. The median of all runs counts. The
first run of each case is left out, because the decoder compiles in it. Each system runs in a
separate process with all of the device's memory.
"""

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench.common import ALL_SHAPES, make_engine, random_prompts, shape_folder
from bench.compare import parse_arguments
from bench.contiguous import BATCHINGS, WIDTHS, Decoder, load
from bench.records import print_table, record
from bench.throughput import lengths_of
from jpaged import Engine, SamplingParams
from jpaged.config import EMBEDDED_MODEL

CASES = ("A", "B", "D")
MARK = 0.02
"""Target: maximum cost of paging, as a fraction of the contiguous decoder's time."""

EMBEDDED = "embedded"
Tokens = list[list[int]]


class Work(NamedTuple):
    """Requests of a run: prompts, and the number of output tokens of each request."""

    prompts: Tokens
    outputs: list[int]


def work_of(case: str, scale: float, vocab_size: int, max_len: int, seed: int) -> Work:
    """Return the requests of a case. A request with more than `max_len` tokens is shortened.

    If `scale` is below 1, return only that fraction of the requests. The seed determines the
    prompts.
    """
    if case == "D":
        count = max(round(64 * scale), 1)
        prompts, outputs = np.full(count, 1024), np.full(count, 128)
    else:
        prompts, outputs = lengths_of(case, scale)
    prompts = np.minimum(prompts, max_len // 2)
    outputs = np.minimum(outputs, max_len - prompts)
    return Work(random_prompts(prompts.tolist(), vocab_size, seed), outputs.tolist())


@dataclass(frozen=True)
class Setting:
    """The model and the workload, which are the same for all compared systems."""

    shape: str
    cases: tuple[str, ...]
    scale: float = 1.0
    repeats: int = 3
    num_seqs: int = 256
    max_len: int = 2048


def start(system: str, at: Setting) -> Callable[[Work], Tokens]:
    """Create a system; return a function that serves requests and returns their tokens."""
    if system == "engine":
        engine = _engine(at)

        def by_engine(work: Work) -> Tokens:
            params = [
                SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True, detokenize=False)
                for most in work.outputs
            ]
            found = engine.generate(work.prompts, params, use_tqdm=False)
            return [list(output.outputs[0].token_ids) for output in found]

        return by_engine
    with shape_folder(None if at.shape == EMBEDDED else at.shape) as folder:
        dummy: dict[str, Any] = {} if folder is None else {"load_format": "dummy"}
        model, _ = load(folder or EMBEDDED_MODEL, **dummy)
    decoder = Decoder(model, system, num_slots=at.num_seqs, max_len=at.max_len, widths=WIDTHS)
    return lambda work: decoder.generate(*work)


def _engine(at: Setting) -> Engine:
    options: dict[str, Any] = {"max_num_seqs": at.num_seqs, "max_model_len": at.max_len}
    if at.shape != EMBEDDED:
        return make_engine(at.shape, **options)
    return Engine(skip_tokenizer_init=True, enable_prefix_caching=False, **options)


class Times(NamedTuple):
    """Results of one case: the seconds of each run except the first, and the output tokens of the
    last run."""

    seconds: list[float]
    answers: Tokens


def time_system(system: str, at: Setting) -> dict[str, Times]:
    """Start a system and run each case.

    Raises:
        ValueError: an answer has a wrong length.
    """
    run, vocab_size = start(system, at), _vocab_size(at.shape)
    found = {}
    for case in at.cases:
        seconds: list[float] = []
        tokens: Tokens = []
        for seed in range(at.repeats + 1):
            work = work_of(case, at.scale, vocab_size, at.max_len, seed)
            started = time.perf_counter()
            tokens = run(work)
            seconds.append(time.perf_counter() - started)
            print(f"{at.shape}, {system}, case {case}: {seconds[-1]:.3f} s", flush=True)
            if list(map(len, tokens)) != work.outputs:
                raise ValueError(f"{system}: case {case} has answers of a wrong length")
        found[case] = Times(seconds[1:], tokens)
    return found


def measure(at: Setting, rounds: int) -> list[dict]:
    """Return one row per case: the median seconds of each system, and the cost of paging.

    Raises:
        ValueError: an answer has a wrong length.
    """
    seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
    answers: dict[tuple[str, str], Tokens] = {}
    for _ in range(rounds):
        for system in ("engine", *BATCHINGS):
            with ProcessPoolExecutor(1, get_context("spawn")) as process:
                found = process.submit(time_system, system, at).result()
            for case, times in found.items():
                seconds[case, system] += times.seconds
                answers[case, system] = times.answers
    return [row_of(at.shape, case, seconds, answers) for case in at.cases]


def row_of(shape: str, case: str, seconds: dict, answers: dict) -> dict:
    medians = {name: statistics.median(seconds[case, name]) for name in ("engine", *BATCHINGS)}
    best = min(BATCHINGS, key=lambda name: medians[name])
    theirs = answers[case, "engine"]
    same = [a == b for a, b in zip(theirs, answers[case, best], strict=True)]
    engine_times = seconds[case, "engine"]
    return {
        "case": case,
        "model": shape,
        "engine_s": medians["engine"],
        **{f"{name}_s": medians[name] for name in BATCHINGS},
        "engine_slowest_s": max(engine_times),
        "engine_fastest_s": min(engine_times),
        "output_tokens_per_s": sum(map(len, theirs)) / medians["engine"],
        "faster_batching": best,
        "paging_costs": medians["engine"] / medians[best] - 1,
        "to_reach": MARK,
        "same_answers": sum(same) / len(same),
    }


def _vocab_size(shape: str) -> int:
    if shape != EMBEDDED:
        return ALL_SHAPES[shape]["vocab_size"]
    return 256  # The model that ships with jpaged has one token for each value of a byte.


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    shapes = [*ALL_SHAPES, EMBEDDED]
    parser.add_argument("--model", choices=shapes, nargs="+", default=["qwen3-0.6b"])
    parser.add_argument("--case", choices=CASES, nargs="+", default=[*CASES])
    parser.add_argument("--scale", type=float, default=1.0, help="fraction of the requests to run")
    parser.add_argument("--rounds", type=int, default=2, help="times to start each system")
    parser.add_argument("--repeats", type=int, default=3, help="timed runs per round")
    parser.add_argument("--num-seqs", type=int, default=256, help="maximum sequences in a batch")
    parser.add_argument("--max-len", type=int, default=2048, help="maximum tokens of a sequence")
    parser.add_argument("--output", type=Path, help="folder of the results (bench/results)")
    args = parse_arguments(parser)
    names = ("scale", "repeats", "num_seqs", "max_len")
    given: dict[str, Any] = {name: getattr(args, name) for name in names}
    rows = []
    for model in args.model:
        rows += measure(Setting(model, tuple(args.case), **given), args.rounds)
    print_table(rows)
    print(record("paging_cost", rows, folder=args.output, rounds=args.rounds, **given))


if __name__ == "__main__":
    main()
