"""Compare two checkouts of jpaged on one GPU (`python -m bench.pairs OTHER_CHECKOUT`).

Each checkout runs an engine in a separate process, and both engines serve the same requests. Both
engines stay loaded on the GPU, and serve in turn. The order alternates, so a change in the
machine's speed affects both. The ratio of a case is the median of (seconds of this checkout /
seconds of the other checkout), over all pairs of runs. The target is a ratio of at most 1.015.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

from bench.common import ALL_SHAPES, EMBEDDED
from bench.compare import parse_arguments
from bench.records import commit_of, print_table, record

THIS_CHECKOUT = Path(__file__).parent.parent
MAX_RATIO = 1.015
CASES = {
    "many requests": (256, 128, 128),
    "one request": (1, 128, 400),
    "long prompts": (64, 1024, 64),
}
"""Maps a case to (number of requests, tokens per prompt, tokens per answer)."""

OPTIONS = {"gpu_memory_utilization": 0.42, "max_num_batched_tokens": 2048}

# A worker reads one line of JSON per run: the number of requests, the tokens of a prompt, the
# tokens of an answer, and the seed. It prints the seconds of the run. The code uses only functions
# that older checkouts have too.
WORKER = """
import json, sys, time
from bench.common import make_engine, random_prompts
from jpaged import Engine, SamplingParams
shape, options = sys.argv[1], json.loads(sys.argv[2])
engine = make_engine(shape, **options) if shape != "embedded" else Engine(**options)
print("ready", flush=True)
for line in sys.stdin:
    num_requests, prompt_len, answer_len, seed = json.loads(line)
    prompts = random_prompts([prompt_len] * num_requests, 256, seed)
    sampling = SamplingParams(temperature=0.0, max_tokens=answer_len, ignore_eos=True)
    start = time.perf_counter()
    engine.generate(prompts, sampling, use_tqdm=False)
    print(time.perf_counter() - start, flush=True)
"""


class Worker:
    """A process with an engine of one checkout.

    Args:
        checkout: Folder of the checkout.
        shape: Key of `ALL_SHAPES`, or `EMBEDDED`.
        options: Options of the engine.
    """

    def __init__(self, checkout: Path, shape: str, options: dict[str, Any]):
        inherited = filter(None, [os.getenv("PYTHONPATH")])
        path = os.pathsep.join([str(checkout.resolve()), *inherited])
        self._checkout = checkout
        self._process = subprocess.Popen(
            [sys.executable, "-c", WORKER, shape, json.dumps(options)],
            cwd=checkout,
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def read_line(self) -> str:
        """Wait for the next line that the process prints, and return it.

        Raises:
            RuntimeError: The process has ended.
        """
        line = cast(IO[str], self._process.stdout).readline()
        if not line:
            raise RuntimeError(
                f"the process of {self._checkout} ended early: its output above has the error"
            )
        return line

    def run(self, sizes: tuple[int, int, int], seed: int) -> float:
        """Let the engine serve the requests of a case (see `CASES`), and return the seconds."""
        stdin = cast(IO[str], self._process.stdin)
        with contextlib.suppress(BrokenPipeError):  # `read_line` then raises an error
            stdin.write(json.dumps([*sizes, seed]) + "\n")
            stdin.flush()
        return float(self.read_line())

    def close(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.communicate()


def measure(
    other: Path, shape: str, num_pairs: int, cases: dict[str, tuple[int, int, int]], **options: Any
) -> list[dict[str, Any]]:
    """Return one row per case. The first pair of runs of each case is a warm-up, and not counted.

    Args:
        other: Folder of the other checkout.
        shape: Key of `ALL_SHAPES`, or `EMBEDDED`.
        num_pairs: Number of counted pairs.
        cases: See `CASES`.
        options: Options of the engines.
    """
    with contextlib.ExitStack() as stack:
        workers = list[Worker]()
        for checkout in (other, THIS_CHECKOUT):
            workers.append(Worker(checkout, shape, options))
            stack.callback(workers[-1].close)
        for worker in workers:
            worker.read_line()
        seconds_of: dict[str, list[list[float]]] = {case: [] for case in cases}
        for pair in range(num_pairs + 1):
            for case, sizes in cases.items():
                seconds = [0.0, 0.0]
                for index in (0, 1) if pair % 2 else (1, 0):
                    seconds[index] = workers[index].run(sizes, pair)
                if pair:
                    seconds_of[case].append(seconds)
    return [{"model": shape, "case": case, **summarize(seconds_of[case])} for case in cases]


def summarize(pairs: list[list[float]]) -> dict[str, Any]:
    """Return a row with the median seconds of both checkouts, and the median ratio of the pairs.

    A pair is (seconds of the other checkout, seconds of this checkout).
    """
    ratio = statistics.median(this / other for other, this in pairs)
    other_s, this_s = (statistics.median(each) for each in zip(*pairs, strict=True))
    row = {"other_s": other_s, "this_s": this_s, "ratio": ratio, "pairs": len(pairs)}
    return row | {"to_reach": MAX_RATIO, "reached": ratio <= MAX_RATIO}


def rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield one row per model and case."""
    other_commit = commit_of(args.other)
    for shape in args.model:
        for row in measure(args.other, shape, args.pairs, CASES, **OPTIONS):
            yield row | {"other_commit": other_commit}


def main() -> None:
    """Print one row per model and case, and record the rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("other", type=Path, nargs="?", help="folder of the other checkout")
    models = [*ALL_SHAPES, EMBEDDED]
    parser.add_argument(
        "--model", choices=models, nargs="+", default=["qwen3-0.6b", "llama-3.1-8b"]
    )
    parser.add_argument("--pairs", type=int, default=6, help="counted pairs of runs (%(default)s)")
    args = parse_arguments(parser)
    if args.other is None:
        parser.error("pass the folder of the other checkout")
    if not (args.other / "bench" / "common.py").is_file():
        parser.error(f"{args.other} is not a checkout of jpaged: it has no bench/common.py")
    if args.pairs < 1:
        parser.error(f"--pairs is {args.pairs}: pass 1 or more")
    found = [*rows(args)]
    print_table(found)
    print(record("pairs", found, by=("model", "case")))


if __name__ == "__main__":
    main()
