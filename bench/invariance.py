"""Count requests whose bits depend on the batch, and measure what batch_invariant costs.

    python -m bench.invariance           pairs tried and pairs unequal, for both modes
    python -m bench.invariance --costs   cases A to D of both modes, and one row of 32,768 tokens

Each request first runs alone. Several engines then run the same requests in random batches. A pair
is a request alone and the same request in a batch. The pair is equal if all tokens and
log-probabilities have the same bits. The engines ("compositions") differ in bursts, loop, chunk
size, preemption and speculation, and all of them cache prefixes. The composition "scoring" compares
the log-probabilities of the generation with the results of `Engine.score_completions`.
"""

import argparse
import gc
import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from bench import latency, throughput
from bench.common import ALL_SHAPES, EMBEDDED, make_engine, new_engine, random_prompts
from bench.compare import parse_arguments
from bench.records import print_table, record
from jpaged import Engine, SamplingParams

NUM_REQUESTS = 64
COMMON_PREFIXES = 4
MODES = {"batch-invariant": True, "default": False}
COST_PARTS = ("steps", "long-context")
COMPOSITIONS: dict[str, dict[str, Any]] = {
    "bursts": {},
    "chunks, synchronous": {"max_num_batched_tokens": 256, "async_scheduling": False},
    "recompute, speculation": {
        "preemption_mode": "recompute",
        "speculative_config": {"num_speculative_tokens": 3},
    },
    "swap": {"preemption_mode": "swap"},
}
"""Maps the name of an engine in the results ("composition") to the engine's options. With a
`preemption_mode`, the pool is so small that requests are preempted."""

Bits = tuple[tuple[int, ...], tuple[float, ...]]


def make_requests(
    vocab_size: int, max_len: int, count: int
) -> list[tuple[list[int], SamplingParams]]:
    """Return `count` requests (prompt, parameters) with random lengths; some share a prefix."""
    rng = np.random.default_rng(0)
    prefixes = random_prompts([max_len // 4] * COMMON_PREFIXES, vocab_size, seed=1)
    requests = []
    for index in range(count):
        length = int(rng.integers(1, max_len // 4))
        (prompt,) = random_prompts([length], vocab_size, seed=100 + index)
        if index % 2:
            prompt = prefixes[index % COMMON_PREFIXES] + prompt
        sampling: dict[str, Any] = {"temperature": 0.0}
        if index % 4 == 0:
            sampling = {"temperature": 0.9, "top_p": 0.95, "top_k": 50, "seed": index}
        num_tokens = int(rng.integers(1, max_len // 4))
        requests.append(
            (prompt, SamplingParams(max_tokens=num_tokens, logprobs=1, ignore_eos=True, **sampling))
        )
    return requests


def run(engine: Engine, requests: Sequence[tuple[list[int], SamplingParams]]) -> list[Bits]:
    """Generate all requests in one batch; return each request's tokens and log-probabilities."""
    prompts, params = zip(*requests, strict=True)
    results = []
    for output in engine.generate(list(prompts), list(params), use_tqdm=False):
        (sample,) = output.outputs
        entries = zip(sample.token_ids, sample.logprobs or (), strict=True)
        logprobs = tuple(entry[token].logprob for token, entry in entries)
        results.append((tuple(sample.token_ids), logprobs))
    return results


def compare(
    engine: Engine,
    requests: list[tuple[list[int], SamplingParams]],
    alone: list[Bits],
    num_pairs: int,
    seed: int,
) -> tuple[int, int, int]:
    """Run random batches of the requests. Compare the result of each request with `alone`, the
    result of the same request without other requests.

    Returns:
        The number of compared pairs, the number of pairs with unequal bits, and the number of pairs
            with unequal tokens.
    """
    rng = np.random.default_rng(seed)
    tried = unequal = other_tokens = 0
    while tried < num_pairs:
        size = int(rng.choice([2, 8, 32, 96, 256]))
        chosen = rng.integers(0, len(requests), size)
        for index, found in zip(chosen, run(engine, [requests[i] for i in chosen]), strict=True):
            unequal += found != alone[index]
            other_tokens += found[0] != alone[index][0]
        tried += size
    return tried, unequal, other_tokens


def compare_scores(
    engine: Engine, requests: list[tuple[list[int], SamplingParams]], alone: list[Bits]
) -> tuple[int, int, int]:
    """Score the tokens of `alone`, which were generated without other requests. Compare the scores
    with the log-probabilities of the generation.

    Returns:
        The same three numbers as `compare`; the number of unequal tokens is 0.
    """
    scores = engine.score_completions(
        [prompt for prompt, _ in requests], [list(tokens) for tokens, _ in alone], use_tqdm=False
    )
    found = [tuple(score.logprobs) for score in scores]
    return len(found), sum(a != b[1] for a, b in zip(found, alone, strict=True)), 0


def measure(
    shape: str, num_pairs: int, max_len: int, count: int, modes: Sequence[str]
) -> Iterator[dict]:
    """Compare requests that run alone with the same requests in random batches.

    Yields:
        One row for each of `modes` and each engine of `COMPOSITIONS`. The row has the number of
            compared pairs, and the number of pairs with unequal bits. Each mode has one more row,
            which compares generation with `Engine.score_completions`.
    """
    common = {
        "max_num_seqs": 256,
        "max_model_len": max_len,
        "max_num_batched_tokens": 2048,
        "enable_prefix_caching": True,
    }
    for mode in modes:
        is_invariant, alone, requests = MODES[mode], [], []
        for name, options in COMPOSITIONS.items():
            options = common | options
            if "preemption_mode" in options:
                options["num_blocks"] = 1 + 12 * max_len // 16
            engine = new_engine(shape, batch_invariant=is_invariant, **options)
            if not requests:
                requests = make_requests(engine.vocab_size, max_len, count)
                alone = [run(engine, [request])[0] for request in requests]
            counts = compare(engine, requests, alone, num_pairs // len(COMPOSITIONS), seed=1)
            yield _row(shape, mode, name, counts, engine.stats().num_preemptions)
            if name == "bursts":
                yield _row(shape, mode, "scoring", compare_scores(engine, requests, alone), 0)
            del engine
            gc.collect()


def _row(shape: str, mode: str, name: str, counts: tuple[int, int, int], preemptions: int) -> dict:
    tried, unequal, other_tokens = counts
    return {
        "model": shape,
        "mode": mode,
        "composition": name,
        "pairs": tried,
        "unequal": unequal,
        "other_tokens": other_tokens,
        "preemptions": preemptions,
    }


def measure_costs(
    shape: str, repeats: int, modes: Sequence[str], parts: Sequence[str]
) -> Iterator[dict]:
    """Yield one row per mode and measured case. `parts` selects measurements of `COST_PARTS`."""
    for mode in modes:
        if "steps" in parts:
            yield from _measure_steps(shape, repeats, mode)
        if "long-context" in parts:
            engine = make_engine(
                shape, batch_invariant=MODES[mode], max_model_len=32_832, max_num_seqs=8
            )
            yield _cost(shape, mode, "1 x 32,768", "ms", time_long_context(engine, repeats))
            del engine
            gc.collect()


def _measure_steps(shape: str, repeats: int, mode: str) -> Iterator[dict]:
    """Yield the results of cases A and B of `bench.throughput`, and of cases C and D of
    `bench.latency`."""
    engine = make_engine(shape, batch_invariant=MODES[mode])
    for case in "AB":
        rows = [throughput.measure(engine, shape, case, seed=seed) for seed in range(1 + repeats)]
        rates = [row["output_tokens_per_s"] for row in rows[1:]]
        yield _cost(shape, mode, case, "tokens_per_s", statistics.median(rates))
    for case in "CD":
        row = latency.measure(engine, shape, case, repeats)
        yield _cost(shape, mode, case, "ms", row["ms_a_step"])
        if case == "D":
            yield _cost(shape, mode, "D, prefill", "ms", 1e3 * row["prefill_s"])
    del engine
    gc.collect()


def time_long_context(engine: Engine, repeats: int) -> float:
    """Return the milliseconds per decode step of one sequence with a context of 32,768 tokens."""
    seeds = itertools.count()

    def seconds(num_tokens: int) -> float:
        prompts = random_prompts([32_768], engine.vocab_size, next(seeds))
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        start = time.perf_counter()
        engine.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - start

    seconds(2)
    first, whole = (
        statistics.median(seconds(num_tokens) for _ in range(repeats)) for num_tokens in (1, 33)
    )
    return 1e3 * (whole - first) / 32


def _cost(shape: str, mode: str, case: str, unit: str, value: float) -> dict:
    return {"model": shape, "mode": mode, "case": case, unit: value}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=[EMBEDDED, *ALL_SHAPES], nargs="+", default=[EMBEDDED])
    parser.add_argument("--pairs", type=int, default=10_000, help="pairs per mode (%(default)s)")
    parser.add_argument("--requests", type=int, default=NUM_REQUESTS)
    parser.add_argument("--max-len", type=int, default=512, help="longest sequence (%(default)s)")
    parser.add_argument("--costs", action="store_true", help="measure the costs instead")
    parser.add_argument(
        "--part", choices=COST_PARTS, nargs="+", default=COST_PARTS, help="what --costs measures"
    )
    parser.add_argument("--mode", choices=[*MODES], nargs="+", default=[*MODES])
    parser.add_argument("--repeats", type=int, default=5)
    args = parse_arguments(parser)
    name = "invariance_costs" if args.costs else "invariance"
    by = ("model", "mode", "case" if args.costs else "composition")
    rows = []
    for row in _rows(args):
        rows.append(row)
        print(*row.values(), sep="  ", flush=True)
        # Record after each row, so that an interrupted run keeps its rows.
        path = record(name, rows, by=by)
    print_table(rows)
    print(path)


def _rows(args: argparse.Namespace) -> Iterator[dict]:
    for shape in args.model:
        if args.costs:
            yield from measure_costs(shape, args.repeats, args.mode, args.part)
        else:
            yield from measure(shape, args.pairs, args.max_len, args.requests, args.mode)


if __name__ == "__main__":
    main()
