"""Latency under load of any server with OpenAI's completions API (`python -m bench.serving`).

An open loop: requests arrive as a Poisson process, whether or not earlier ones were answered, with
ShareGPT-like lengths; answers are streamed, and none ends before its length. Every time counts
from the moment a request was due, so that a client that falls behind hides nothing. Normalised
latency is a request's time over its output tokens: the PagedAttention paper's figure 12.

    python -m jpaged.serve &
    python -m bench.serving --rate 1,2,4,inf --num-requests 100 --max-tokens 200

The client is several processes. `client_busy` is the share of a processor that the busiest of them
took, `client_lag_ms_p99` how late its event loop was: where they are high the client was the limit,
which is said.

With --shape there need be no server: one of a published shape with random weights is started, and
after it the engine alone serves the same requests (rows "engine"), which shows what HTTP costs.

    python -m bench.serving --shape qwen3-0.6b --rate 20,40,80,inf --num-requests 512
"""

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import msgspec
import numpy as np

from bench.common import AS_VLLM, SHAPES
from bench.compare import parse_arguments
from bench.lengths import sharegpt_like_lengths
from bench.load_client import Answer, Report, Target, Work, run_shares
from bench.records import print_table, record
from bench.serving_engine import Runs
from bench.synthetic_tokenizer import write_tokenizer

PERCENTILES = (50, 90, 99)
MAX_TOKENS = 1024
BUSY, LAG_MS = 0.85, 10.0
"""From here on the client is the limit: share of a processor, milliseconds."""

_NUM_WARM = 8
"""Requests before the first that count."""


def make_work(
    count: int, rate: float, *, vocab_size: int, max_tokens: int, seed: int = 0
) -> list[Work]:
    """Requests with ShareGPT-like lengths of `max_tokens` at most, `rate` a second on average."""
    rng = np.random.RandomState(seed)
    prompts, outputs = sharegpt_like_lengths(count, seed)
    gaps = np.zeros(count) if math.isinf(rate) else rng.exponential(1 / rate, count)
    return [
        Work(rng.randint(0, vocab_size, min(n, max_tokens)).tolist(), min(int(m), max_tokens), due)
        for n, m, due in zip(prompts, outputs, np.cumsum(gaps).tolist(), strict=True)
    ]


def summarise(rate: float, work: Sequence[Work], answers: Sequence[Answer]) -> dict:
    """A row of the table: latencies in milliseconds, of the requests that were answered in full,
    None if there are none."""
    good = [answer for answer in answers if answer.error is None]
    pairs = zip(work, answers, strict=True)
    seconds = max(one.due + answer.end for one, answer in pairs)
    row = {
        "rate": "inf" if math.isinf(rate) else rate,
        "requests": len(answers),
        "errors": len(answers) - len(good),
        "seconds": seconds,
        "requests_per_s": len(good) / seconds,
        "output_tokens_per_s": sum(a.num_output_tokens for a in good) / seconds,
        "tokens_per_s": sum(a.num_output_tokens + a.num_prompt_tokens for a in good) / seconds,
    }
    series = {
        "ttft_ms": [a.chunk_times[0] for a in good if a.chunk_times],
        "inter_token_ms": [gap for a in good for gap in np.diff(a.chunk_times)],
        "normalised_ms": [a.end / a.num_output_tokens for a in good if a.num_output_tokens],
    }
    for name, values in series.items():
        for percentile in PERCENTILES:
            at = 1e3 * float(np.percentile(values, percentile)) if values else None
            row[f"{name}_p{percentile}"] = at
    return row


def client_figures(reports: Sequence[Report]) -> dict:
    """How busy the client was, and how late."""
    lags = [lag for report in reports for lag in report.lags]
    return {
        "client_busy": max(report.busy for report in reports),
        "client_lag_ms_p99": 1e3 * float(np.percentile(lags, 99)) if lags else 0.0,
    }


def merged(reports: Sequence[Report]) -> list[Answer]:
    """All answers in the order of the work that `run_shares` was given."""
    answers = [Answer()] * sum(len(report.answers) for report in reports)
    for i, report in enumerate(reports):
        answers[i :: len(reports)] = report.answers
    return answers


def warn(text: str) -> None:
    """A line next to the table."""
    print(text, file=sys.stderr, flush=True)


def half_of_what_fits(target: Target) -> int:
    """Tokens of a prompt and of an answer that fit the model together, as the server says."""
    url = f"{target.url.rstrip('/')}/models"
    try:
        asked = urllib.request.Request(url, headers=target.headers)
        with urllib.request.urlopen(asked, timeout=30) as response:
            cards = json.load(response)["data"]
        named = [card for card in cards if target.model in (None, card["id"])]
        return min(int(named[0]["max_model_len"]) // 2, MAX_TOKENS)
    except (OSError, ValueError, LookupError, TypeError):
        return MAX_TOKENS


def sweep(target: Target, runs: dict[float, list[Work]], num_processes: int) -> list[dict]:
    """A row for each rate."""
    rows = []
    for rate, work in runs.items():
        reports = run_shares(target, work, num_processes)
        answers, client = merged(reports), client_figures(reports)
        rows.append({"through": "http", **summarise(rate, work, answers), **client})
        errors = Counter(answer.error for answer in answers if answer.error)
        for error, count in errors.most_common():
            warn(f"rate {rate}: {count} requests: {error}")
        if client["client_busy"] > BUSY or client["client_lag_ms_p99"] > LAG_MS:
            warn(
                f"rate {rate}: the client was the limit, not the server: a process of it took "
                f"{client['client_busy']:.0%} of a processor and was up to "
                f"{client['client_lag_ms_p99']:.0f} ms late; use more --processes than "
                f"{num_processes}, or another machine for the client"
            )
    return rows


def engine_alone(options: dict, runs: dict[float, list[Work]]) -> list[dict]:
    """A row for each rate, of an engine that serves the same requests with no server around it.

    Raises:
        subprocess.CalledProcessError: it failed; its standard error says why.
    """
    asked = msgspec.json.encode(Runs(options, list(runs.values())))
    command = [sys.executable, "-m", "bench.serving_engine"]
    folder = Path(__file__).parent.parent
    done = subprocess.run(
        command, input=asked + b"\n", stdout=subprocess.PIPE, check=True, cwd=folder
    )
    found = msgspec.json.decode(done.stdout.splitlines()[-1], type=list[list[Answer]])
    return [
        {"through": "engine", **summarise(rate, work, answers)}
        for (rate, work), answers in zip(runs.items(), found, strict=True)
    ]


@contextmanager
def server_of(options: dict) -> Iterator[str]:
    """A server of an engine with these options, started and ended; gives its API's address.

    Raises:
        RuntimeError: it did not start.
    """
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    flags = [flag for flag in flags if not flag.endswith(("=False", "=True"))]
    flags += [f"--no-{name.replace('_', '-')}" for name, value in options.items() if value is False]
    command = [sys.executable, "-m", "jpaged.serve", "--port=0", "--no-log-requests", *flags]
    with tempfile.TemporaryFile("w+") as log, subprocess.Popen(command, stderr=log) as process:
        try:
            yield _address(process, log)
        finally:
            process.terminate()


def _address(process: subprocess.Popen, log: TextIO) -> str:
    """Where the server's API is, once it serves."""
    while process.poll() is None:
        log.seek(0)
        text = log.read()
        if found := re.search(r"serving .* at (http://\S+)", text):
            return f"{found[1]}/v1"
        time.sleep(0.1)
    log.seek(0)
    raise RuntimeError(f"the server did not start: {log.read()[-1000:]}")


def of_shape(args: argparse.Namespace) -> list[dict]:
    """Rows of a server of `args.shape`, and of the engine alone."""
    if args.max_tokens is None:
        args.max_tokens = MAX_TOKENS
    with tempfile.TemporaryDirectory() as folder:
        config = SHAPES[args.shape]
        (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        write_tokenizer(Path(folder), config["vocab_size"])
        args.vocab_size = config["vocab_size"]
        options = {"model": folder, "load_format": "dummy", **AS_VLLM}
        runs = runs_of(args)
        with server_of(options) as url:
            target = Target(url, timeout=args.timeout)
            run_shares(target, next(iter(runs.values()))[:_NUM_WARM], 1)
            rows = sweep(target, runs, args.processes)
        return rows + engine_alone(options, runs)


def runs_of(args: argparse.Namespace) -> dict[float, list[Work]]:
    """The requests at each rate."""
    names = ("vocab_size", "max_tokens", "seed")
    options = {name: getattr(args, name) for name in names}
    return {rate: make_work(args.num_requests, rate, **options) for rate in args.rate}


def _rates(text: str) -> list[float]:
    rates = [float(rate) for rate in text.split(",")]
    if not all(rate > 0 for rate in rates):
        raise argparse.ArgumentTypeError(f"{text!r}: rates are above 0, such as 1,2,4,inf")
    return rates


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 on")
    return int(text)


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000/v1", help="the API (%(default)s)")
    add("--model", help="the model to name (default: none, if the server lets us)")
    add("--api-key")
    add("--shape", choices=[*SHAPES], help="start a server of this shape, then the engine alone")
    add("--rate", type=_rates, default=[math.inf], help="requests a second: 1,2,4,inf (inf)")
    add("--num-requests", type=_count, default=100, help="at each rate (%(default)s)")
    add(
        "--max-tokens",
        type=_count,
        help=f"of a prompt, and of an answer (half of what the model takes, at most {MAX_TOKENS})",
    )
    add("--vocab-size", type=_count, default=256, help="prompts' token ids lie below (%(default)s)")
    add("--seed", type=int, default=0)
    add("--timeout", type=float, default=600.0, help="seconds between two chunks (%(default)s)")
    processes = max(1, min(6, (os.cpu_count() or 2) // 2))
    add("--processes", type=_count, default=processes, help="of the client (%(default)s)")
    add("--device", help="what the server runs on, for the results' file")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Measure, print, record; 1 if any request failed."""
    args = parse_arguments(build_parser(), argv)
    if args.shape:
        rows = of_shape(args)
    else:
        target = Target(args.url, args.model, args.api_key, args.timeout)
        if args.max_tokens is None:
            args.max_tokens = half_of_what_fits(target)
        rows = sweep(target, runs_of(args), args.processes)
    print_table(rows)
    names = ("shape", "model", "num_requests", "max_tokens", "seed", "processes")
    settings = {name: getattr(args, name) for name in names}
    device = args.device or (None if args.shape else "unknown")
    print(record("serving", rows, device=device, **settings))
    return 1 if any(row["errors"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
