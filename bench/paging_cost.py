"""What paging costs when memory is plenty (`python -m bench.paging_cost`).

The same requests, end to end, through jpaged's engine and through the contiguous decoder of
`bench.contiguous`, with room for all of them in both:

    A   256 requests, 128 tokens in and 128 out
    B   512 requests with ShareGPT-like lengths (not alike: a static batch waits for its longest)
    D   64 requests, 1,024 tokens in and 128 out

The decoder knows how long outputs get: its static batches are of requests alike, in slabs as narrow
as they allow. Paging costs the engine's seconds over those of the faster of the two batchings. The
systems are made in turn, in as many rounds as asked for, so that a device that changes its pace
shows; of all runs the median counts, but for the first one of each case, in which the decoder
compiles what the case needs. The engine is used as it comes, whatever else it does better. Each
system has a process of its own, and with it the whole of the device's memory.
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
"""At most so much longer than the contiguous decoder."""

EMBEDDED = "embedded"
Tokens = list[list[int]]


class Work(NamedTuple):
    """Requests of a run: prompts, and the tokens that each is to be answered with."""

    prompts: Tokens
    outputs: list[int]


def work_of(case: str, scale: float, vocab_size: int, max_len: int, seed: int) -> Work:
    """A case's requests, or the first of them, as long as `max_len` allows; each seed has prompts
    of its own."""
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
    """What every system is measured with."""

    shape: str
    cases: tuple[str, ...]
    scale: float = 1.0
    repeats: int = 3
    num_seqs: int = 256
    max_len: int = 2048


def start(system: str, at: Setting) -> Callable[[Work], Tokens]:
    """A system that answers requests."""
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
    """Of a system and a case: seconds of each run but the first, and the last run's answers."""

    seconds: list[float]
    answers: Tokens


def time_system(system: str, at: Setting) -> dict[str, Times]:
    """Start a system and run each case.

    Raises:
        ValueError: an answer has another length than asked for.
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
                raise ValueError(f"{system}: answers of case {case} are not as long as asked")
        found[case] = Times(seconds[1:], tokens)
    return found


def measure(at: Setting, rounds: int) -> list[dict]:
    """A row a case: the median seconds of each system, and what paging costs.

    Raises:
        ValueError: as `time_system`.
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
    return 256  # of the embedded model's 264 the bytes


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    shapes = [*ALL_SHAPES, EMBEDDED]
    parser.add_argument("--model", choices=shapes, nargs="+", default=["qwen3-0.6b"])
    parser.add_argument("--case", choices=CASES, nargs="+", default=[*CASES])
    parser.add_argument("--scale", type=float, default=1.0, help="share of the requests to run")
    parser.add_argument("--rounds", type=int, default=2, help="times each system is made")
    parser.add_argument("--repeats", type=int, default=3, help="runs a round, after one to warm up")
    parser.add_argument("--num-seqs", type=int, default=256, help="sequences in a batch")
    parser.add_argument("--max-len", type=int, default=2048, help="tokens of a sequence")
    parser.add_argument("--output", type=Path, help="folder of the JSON (bench/results)")
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
