"""Measure the latency under load of a server with OpenAI's completions API.

    python -m jpaged.serve &
    python -m bench.serving --rate 1,2,4,inf --num-requests 100 --max-tokens 200

The load is an open loop: requests arrive as a Poisson process, whether or not earlier requests are
answered. Lengths are ShareGPT-like, answers are streamed, and EOS is ignored. Latencies count from
the time a request was due, so they include delays of the client. Normalised latency is a request's
time divided by its output tokens, as in figure 12 of the PagedAttention paper.

The client has several processes. `client_busy` is the fraction of a processor that the busiest
process used. `client_lag_ms_p99` is the lag of the event loops. If either is high, the client was
the limit, and the script prints a warning.

With --shape, the script starts a server of a published shape with random weights. Then an engine
alone serves the same requests (rows "engine"), which shows the cost of HTTP.

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

from bench.common import ALL_SHAPES, AS_VLLM
from bench.compare import parse_arguments
from bench.lengths import sharegpt_like_lengths
from bench.load_client import Answer, Report, Target, Work, run_shares
from bench.records import print_table, record
from bench.serving_engine import Runs
from bench.synthetic_tokenizer import write_tokenizer

PERCENTILES = (50, 90, 99)
MAX_TOKENS = 1024
BUSY, LAG_MS = 0.85, 10.0
"""Limits above which the client counts as overloaded.

`BUSY` is a fraction of a processor, `LAG_MS` a lag of the event loop in milliseconds.
"""

_NUM_WARM = 8
"""Number of warm-up requests."""


def make_work(
    count: int, rate: float, *, vocab_size: int, max_tokens: int, seed: int = 0
) -> list[Work]:
    """Return `count` requests of ShareGPT-like lengths, which arrive at `rate` per second.

    A prompt and an output have at most `max_tokens` tokens each.
    """
    rng = np.random.RandomState(seed)
    prompts, outputs = sharegpt_like_lengths(count, seed)
    gaps = np.zeros(count) if math.isinf(rate) else rng.exponential(1 / rate, count)
    return [
        Work(rng.randint(0, vocab_size, min(n, max_tokens)).tolist(), min(int(m), max_tokens), due)
        for n, m, due in zip(prompts, outputs, np.cumsum(gaps).tolist(), strict=True)
    ]


def summarise(rate: float, work: Sequence[Work], answers: Sequence[Answer]) -> dict:
    """Return a row of the table with the results at one request rate.

    Percentiles of latencies are in milliseconds, over the requests without errors. They are None if
    all requests failed.
    """
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
    """Return the load of the busiest client process, and the lag of the event loops."""
    lags = [lag for report in reports for lag in report.lags]
    return {
        "client_busy": max(report.busy for report in reports),
        "client_lag_ms_p99": 1e3 * float(np.percentile(lags, 99)) if lags else 0.0,
    }


def merged(reports: Sequence[Report]) -> list[Answer]:
    """Return the answers of all reports, in the order of the argument `work` of `run_shares`."""
    answers = [Answer()] * sum(len(report.answers) for report in reports)
    for i, report in enumerate(reports):
        answers[i :: len(reports)] = report.answers
    return answers


def warn(text: str) -> None:
    """Print a line to standard error."""
    print(text, file=sys.stderr, flush=True)


def half_of_what_fits(target: Target) -> int:
    """Return half of the maximum sequence length that the server reports at `/models`.

    A prompt and an answer of this length then fit into one sequence. The result is at most
    `MAX_TOKENS`. If the server reports no maximum, the result is `MAX_TOKENS`.
    """
    url = f"{target.url.rstrip('/')}/models"
    try:
        request = urllib.request.Request(url, headers=target.headers)
        with urllib.request.urlopen(request, timeout=30) as response:
            cards = json.load(response)["data"]
        named = [card for card in cards if target.model in (None, card["id"])]
        return min(int(named[0]["max_model_len"]) // 2, MAX_TOKENS)
    except (OSError, ValueError, LookupError, TypeError):
        return MAX_TOKENS


def sweep(target: Target, runs: dict[float, list[Work]], num_processes: int) -> list[dict]:
    """Send the requests of each rate to the server, and return one row per rate."""
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
                f"rate {rate}: the client was the limit, not the server: a client process used "
                f"{client['client_busy']:.0%} of a processor, and the event loops lagged "
                f"{client['client_lag_ms_p99']:.0f} ms (p99); use more --processes than "
                f"{num_processes}, or run the client on another machine"
            )
    return rows


def engine_alone(options: dict, runs: dict[float, list[Work]]) -> list[dict]:
    """Serve the requests of each rate by an engine without a server; return one row per rate.

    Raises:
        subprocess.CalledProcessError: the engine's process failed.
    """
    line = msgspec.json.encode(Runs(options, list(runs.values())))
    command = [sys.executable, "-m", "bench.serving_engine"]
    folder = Path(__file__).parent.parent
    done = subprocess.run(
        command, input=line + b"\n", stdout=subprocess.PIPE, check=True, cwd=folder
    )
    found = msgspec.json.decode(done.stdout.splitlines()[-1], type=list[list[Answer]])
    return [
        {"through": "engine", **summarise(rate, work, answers)}
        for (rate, work), answers in zip(runs.items(), found, strict=True)
    ]


@contextmanager
def server_of(options: dict) -> Iterator[str]:
    """Start a server with the given engine options, and yield the URL of the API. Stop the server
    at the end of the `with` block.

    Raises:
        RuntimeError: the server did not start.
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
    """Wait until the server's log says that it listens, and return the URL of the API."""
    while process.poll() is None:
        log.seek(0)
        text = log.read()
        if found := re.search(r"serving .* at (http://\S+)", text):
            return f"{found[1]}/v1"
        time.sleep(0.1)
    log.seek(0)
    raise RuntimeError(f"the server did not start: {log.read()[-1000:]}")


def of_shape(args: argparse.Namespace) -> list[dict]:
    """Measure a server, then the engine without a server. Return the result rows of both.

    `args.shape` names the model. The server loads dummy weights.
    """
    if args.max_tokens is None:
        args.max_tokens = MAX_TOKENS
    with tempfile.TemporaryDirectory() as folder:
        config = ALL_SHAPES[args.shape]
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
    """Return a dict that maps each request rate to the requests to send."""
    names = ("vocab_size", "max_tokens", "seed")
    options = {name: getattr(args, name) for name in names}
    return {rate: make_work(args.num_requests, rate, **options) for rate in args.rate}


def _rates(text: str) -> list[float]:
    rates = [float(rate) for rate in text.split(",")]
    if not all(rate > 0 for rate in rates):
        raise argparse.ArgumentTypeError(f"{text!r}: pass rates above 0, such as 1,2,4,inf")
    return rates


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r}: pass an integer of at least 1")
    return int(text)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000/v1", help="URL of the API (%(default)s)")
    add("--model", help="model of the requests (none: the server's default)")
    add("--api-key")
    add("--shape", choices=[*ALL_SHAPES], help="start a server of this shape, then an engine alone")
    add("--rate", type=_rates, default=[math.inf], help="requests per second: 1,2,4,inf (inf)")
    add("--num-requests", type=_count, default=100, help="requests per rate (%(default)s)")
    add(
        "--max-tokens",
        type=_count,
        help="maximum tokens of a prompt, and of an answer (half of the model's maximum length, "
        f"at most {MAX_TOKENS})",
    )
    add("--vocab-size", type=_count, default=256, help="bound of prompt token ids (%(default)s)")
    add("--seed", type=int, default=0)
    add("--timeout", type=float, default=600.0, help="seconds between two chunks (%(default)s)")
    processes = max(1, min(6, (os.cpu_count() or 2) // 2))
    add("--processes", type=_count, default=processes, help="client processes (%(default)s)")
    add("--device", help="name of the server's device, for the results")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Measure, print and record; return 1 if any request failed."""
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
