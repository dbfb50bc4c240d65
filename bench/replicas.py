"""Two GPUs as two replicas, or as one engine that shares its model (`python -m bench.replicas`).

So many requests at once, 128 tokens in and 128 out, greedy, random weights, through
`Engine.generate`: all of them to an engine with `tensor_parallel_size` n, or an n-th of them to
each of n engines with a GPU of their own. Such engines have nothing to do with each other, so one
of them is measured, and n times its tokens count; the host has cores for all. Llama-3.1-8B's shape
unless told otherwise.
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
    """How long a generation took, and how long the engine's thread worked for each of its steps."""

    seconds: float
    host_seconds: float


def answer(engine: Engine, num_requests: int, seed: int) -> Answered:
    """Have so many requests answered."""
    prompts = random_prompts([PROMPT_LEN] * num_requests, engine.vocab_size, seed)
    steps, host = engine.stats().num_steps, time.thread_time()
    seconds = timed(engine, prompts, OUTPUT_LEN)
    host, steps = time.thread_time() - host, engine.stats().num_steps - steps
    return Answered(seconds, host / steps)


def median_of(engine: Engine, num_requests: int, repeats: int) -> Answered:
    """The medians of some runs, after one to warm up; each has prompts of its own."""
    runs = [answer(engine, num_requests, seed) for seed in range(repeats + 1)][1:]
    return Answered(*map(statistics.median, zip(*runs, strict=True)))


def row_of(num_requests: int, replica: Answered, shared: Answered) -> dict:
    """What both ways make of so many requests.

    Args:
        num_requests: There at once.
        replica: How a replica answers its part of them.
        shared: How the engine of all GPUs answers them all.
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
    parser.add_argument("--loads", type=int, nargs="+", default=LOADS, help="requests at once")
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
