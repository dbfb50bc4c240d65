"""Compare n GPUs as n replicas with n GPUs as one tensor-parallel engine.

    python -m bench.replicas [--tensor-parallel-size 2]

Each load is a number of concurrent requests of 128 tokens in and 128 out. The requests are greedy
and run through `Engine.generate`; the weights are random. One engine with `tensor_parallel_size` n
serves all requests. Each of n replicas, on one GPU each, serves an n-th of the requests.
Replicas are independent, so only one is measured, and its throughput is multiplied by n. This
assumes that the host has enough cores for n replicas. The default shape is Llama-3.1-8B's.
"""

import argparse
import statistics
import time
from typing import NamedTuple

from bench.common import ALL_SHAPES, make_engine, random_prompts
from bench.compare import parse_arguments
from bench.latency import timed
from bench.records import print_table, record
from jpaged import Engine

LOADS = (2, 8, 32, 128, 256, 512)
PROMPT_LEN, OUTPUT_LEN = 128, 128


class Answered(NamedTuple):
    """Result of a generation: the total seconds, and the CPU seconds per step of the engine's
    thread."""

    seconds: float
    host_seconds: float


def answer(engine: Engine, num_requests: int, seed: int) -> Answered:
    """Serve `num_requests` requests once. Return the total time and the CPU time per step."""
    prompts = random_prompts([PROMPT_LEN] * num_requests, engine.vocab_size, seed)
    steps, host = engine.stats().num_steps, time.thread_time()
    seconds = timed(engine, prompts, OUTPUT_LEN)
    host, steps = time.thread_time() - host, engine.stats().num_steps - steps
    return Answered(seconds, host / steps)


def median_of(engine: Engine, num_requests: int, repeats: int) -> Answered:
    """Return the medians of `repeats` runs after a warm-up run; each run has new prompts."""
    runs = [answer(engine, num_requests, seed) for seed in range(repeats + 1)][1:]
    return Answered(*map(statistics.median, zip(*runs, strict=True)))


def row_of(num_requests: int, replica: Answered, shared: Answered) -> dict:
    """Return a row that compares n replicas with one tensor-parallel engine on n GPUs.

    Args:
        num_requests: Number of concurrent requests.
        replica: Result of one replica, which serves 1 / n of the requests.
        shared: Result of the tensor-parallel engine with all requests.
    """
    tokens = num_requests * OUTPUT_LEN
    return {
        "requests": num_requests,
        "replicas_tokens_per_s": tokens / replica.seconds,
        "shared_tokens_per_s": tokens / shared.seconds,
        "shared_over_replicas": replica.seconds / shared.seconds,
        "replicas_ms_a_token": 1e3 * replica.seconds / OUTPUT_LEN,
        "shared_ms_a_token": 1e3 * shared.seconds / OUTPUT_LEN,
        "replica_host_ms_a_step": 1e3 * replica.host_seconds,
        "shared_host_ms_a_step": 1e3 * shared.host_seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=[*ALL_SHAPES], default="llama-3.1-8b")
    parser.add_argument(
        "--loads", type=int, nargs="+", default=LOADS, help="numbers of concurrent requests"
    )
    parser.add_argument("--tensor-parallel-size", type=int, default=2, help="GPUs (%(default)s)")
    parser.add_argument("--repeats", type=int, default=3)
    args = parse_arguments(parser)
    num_devices, found = args.tensor_parallel_size, dict[tuple[int, int], Answered]()
    for size in (num_devices, 1):
        engine = make_engine(args.model, verbose=True, tensor_parallel_size=size)
        for load in args.loads:
            part = load if size > 1 else -(-load // num_devices)
            found[size, load] = median_of(engine, part, args.repeats)
            print(f"{size} GPUs, {part} requests: {found[size, load]}", flush=True)
        del engine
    rows = [row_of(load, found[1, load], found[num_devices, load]) for load in args.loads]
    print_table(rows)
    print(record("replicas", rows, model=args.model, devices=num_devices, repeats=args.repeats))


if __name__ == "__main__":
    main()
