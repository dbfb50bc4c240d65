"""Latency under load of any server with OpenAI's completions API (`python -m bench.serving`).

An open loop: requests arrive as a Poisson process, whether or not earlier ones were answered, with
ShareGPT-like lengths; answers are streamed, and none ends before its length. Every time counts
from the moment a request was due, so that a client that falls behind hides nothing. Normalised
latency is a request's time over its output tokens: the PagedAttention paper's figure 12.

    python -m jpaged.serve &
    python -m bench.serving --rate 1,2,4,inf --num-requests 100 --max-tokens 200
"""

import argparse
import asyncio
import json
import math
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import httpx
import numpy as np

from bench.compare import parse_arguments
from bench.lengths import sharegpt_like_lengths
from bench.records import print_table, record

PERCENTILES = (50, 90, 99)
MAX_TOKENS = 1024


@dataclass(frozen=True)
class Target:
    """The server: its address up to `/v1`, the model to name (None: none), a key."""

    url: str
    model: str | None = None
    api_key: str | None = None

    @property
    def headers(self) -> dict[str, str]:
        """What requests bring beside their content."""
        return {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}


@dataclass(frozen=True)
class Work:
    """One request: token ids in, so many out, `due` seconds after the start."""

    prompt: list[int]
    num_outputs: int
    due: float


@dataclass
class Answer:
    """What became of a request; times in seconds since it was due.

    Attributes:
        chunk_times: When each piece of text came.
        end: When the stream ended.
        num_prompt_tokens, num_output_tokens: As the server counts them.
        error: Why it does not count; None if it does.
    """

    chunk_times: list[float] = field(default_factory=list)
    end: float = 0.0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    error: str | None = None


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


async def serve_all(client: httpx.AsyncClient, target: Target, work: list[Work]) -> list[Answer]:
    """Send each request when it is due; gives their answers, in order."""
    start = time.perf_counter()
    return await asyncio.gather(*(_ask(client, target, one, start) for one in work))


async def _ask(client: httpx.AsyncClient, target: Target, work: Work, start: float) -> Answer:
    await asyncio.sleep(max(start + work.due - time.perf_counter(), 0))
    answer, due = Answer(), start + work.due
    try:
        async for chunk in _stream(client, target, work):
            _take(answer, chunk, time.perf_counter() - due)
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        answer.error = str(error) if isinstance(error, ValueError) else type(error).__name__
    answer.end = time.perf_counter() - due
    if answer.error is None and answer.num_output_tokens != work.num_outputs:
        answer.error = "not as many tokens as asked for"
    return answer


async def _stream(client: httpx.AsyncClient, target: Target, work: Work) -> AsyncIterator[dict]:
    """The answer's chunks. ValueError if the server refuses."""
    body = {
        "prompt": work.prompt,
        "max_tokens": work.num_outputs,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **({} if target.model is None else {"model": target.model}),
    }
    url = f"{target.url.rstrip('/')}/completions"
    async with client.stream("POST", url, json=body, headers=target.headers) as response:
        if response.status_code != 200:
            await response.aread()
            raise ValueError(f"status {response.status_code}{_reason(response)}")
        async for line in response.aiter_lines():
            data = line.removeprefix("data:").strip()
            if line.startswith("data:") and data != "[DONE]":
                yield json.loads(data)


def _reason(response: httpx.Response) -> str:
    """What the server says of an error, if it does so as OpenAI does."""
    try:
        return f": {response.json()['error']['message']}"[:300]
    except (ValueError, LookupError, TypeError):
        return ""


def _take(answer: Answer, chunk: dict, now: float) -> None:
    if "error" in chunk:
        raise ValueError(f"error event: {chunk['error']}"[:300])
    if chunk.get("choices"):
        answer.chunk_times.append(now)
    if usage := chunk.get("usage"):
        answer.num_prompt_tokens = usage["prompt_tokens"]
        answer.num_output_tokens = usage["completion_tokens"]


def summarise(rate: float, work: list[Work], answers: list[Answer]) -> dict:
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


async def half_of_what_fits(client: httpx.AsyncClient, target: Target) -> int:
    """Tokens of a prompt and of an answer that fit the model together, as the server says."""
    try:
        response = await client.get(f"{target.url.rstrip('/')}/models", headers=target.headers)
        cards = response.json()["data"]
        named = [card for card in cards if target.model in (None, card["id"])]
        return min(int(named[0]["max_model_len"]) // 2, MAX_TOKENS)
    except (httpx.HTTPError, ValueError, LookupError, TypeError):
        return MAX_TOKENS


async def sweep(target: Target, rates: list[float], args: argparse.Namespace) -> list[dict]:
    """A row for each rate; `args.max_tokens` becomes what was used."""
    rows = []
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=100)
    async with httpx.AsyncClient(limits=limits, timeout=args.timeout) as client:
        if args.max_tokens is None:
            args.max_tokens = await half_of_what_fits(client, target)
        for rate in rates:
            work = make_work(
                args.num_requests,
                rate,
                vocab_size=args.vocab_size,
                max_tokens=args.max_tokens,
                seed=args.seed,
            )
            answers = await serve_all(client, target, work)
            rows.append(summarise(rate, work, answers))
            errors = Counter(answer.error for answer in answers if answer.error)
            for error, count in errors.most_common():
                print(f"rate {rate}: {count} requests: {error}", file=sys.stderr, flush=True)
    return rows


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
    add("--device", default="unknown", help="what the server runs on, for the results' file")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Measure, print, record; 1 if any request failed."""
    args = parse_arguments(build_parser(), argv)
    target = Target(args.url, args.model, args.api_key)
    rows = asyncio.run(sweep(target, args.rate, args))
    print_table(rows)
    settings = {
        name: getattr(args, name) for name in ("model", "num_requests", "max_tokens", "seed")
    }
    print(record("serving", rows, device=args.device, **settings))
    return 1 if any(row["errors"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
