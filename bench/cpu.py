"""Measure the bundled model on a CPU (`python -m bench.cpu`): first token and throughput.

The first part starts `python -m jpaged` cold and warm, as `bench.startup` does. The second part
serves 16 concurrent greedy requests with an engine of default options, and reports the output
tokens per second of the fastest run.
"""

import argparse
import os
import time

from bench.compare import parse_arguments
from bench.records import print_table, record
from bench.startup import EMBEDDED, PROMPT, Kind, measure
from jpaged import Engine, SamplingParams

TO_REACH = 200  # The target is `TO_REACH` output tokens per second.


def throughput(num_requests: int, max_tokens: int, repeats: int) -> dict:
    """Serve `num_requests` equal requests concurrently. Return a result row with the output tokens
    per second."""
    engine = Engine()
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)

    def run() -> float:
        began = time.perf_counter()
        engine.generate([PROMPT] * num_requests, params, use_tqdm=False)
        return num_requests * max_tokens / (time.perf_counter() - began)

    run()
    reached = max(run() for _ in range(repeats))
    return {
        "case": "throughput",
        "requests": num_requests,
        "output_tokens_per_s": reached,
        "to_reach": TO_REACH,
        "reached": reached >= TO_REACH,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128, help="output tokens per request")
    parser.add_argument("--repeats", type=int, default=3)
    args = parse_arguments(parser)
    starts = measure(Kind(EMBEDDED), args.repeats)
    served = throughput(args.requests, args.tokens, args.repeats)
    print_table(starts)
    print_table([served])
    print(record("cpu", [*starts, served], processors=os.cpu_count()))


if __name__ == "__main__":
    main()
