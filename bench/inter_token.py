"""Measure inter-token latency with and without arriving prompts (`python -m bench.inter_token`).

A batch of requests decodes throughout. In the second part a prompt arrives every few steps, so most
steps are mixed. The token budget of a step bounds how long decoding waits for a prefill. Requests
are greedy and run through `Engine.step`; the weights are random. The percentiles are over all
tokens of the decoding requests.
"""

import argparse
import time

import numpy as np

from bench.common import SHAPES, make_engine, random_prompts
from bench.compare import parse_arguments
from bench.records import print_table, record
from jpaged import Engine, SamplingParams

DECODE_PROMPT = 128


class Feed:
    """A source of requests that arrive while other requests decode.

    One request arrives every `every` steps. Each request has `length` prompt tokens and one output
    token.
    """

    def __init__(self, engine: Engine, length: int, every: int):
        self._engine, self._every = engine, every
        self._prompts = iter(random_prompts([length] * 64, engine.vocab_size, seed=2))
        self._step = 0

    def step(self) -> None:
        """Add a request if it is due. Call this method before each step of the engine."""
        prompt = next(self._prompts, None) if self._step % self._every == 0 else None
        if prompt is not None:
            self._engine.add_request(prompt, SamplingParams(max_tokens=1, ignore_eos=True))
        self._step += 1


def start_decoding(engine: Engine, count: int, num_tokens: int) -> dict[str, int]:
    """Start `count` requests, and run steps until each has an output token.

    Returns:
        The number of output tokens of each request, by request id.
    """
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    prompts = random_prompts([DECODE_PROMPT] * count, engine.vocab_size)
    counts = {engine.add_request(prompt, params): 0 for prompt in prompts}
    while not all(counts.values()):
        _run_step(engine, counts)
    return counts


def gaps(engine: Engine, counts: dict[str, int], num_steps: int, feed: Feed | None) -> np.ndarray:
    """Run `num_steps` steps; return the milliseconds between consecutive tokens of a request."""
    found: list[float] = []
    waited = dict.fromkeys(counts, time.perf_counter())
    for _ in range(num_steps):
        if feed is not None:
            feed.step()
        grown = _run_step(engine, counts)
        now = time.perf_counter()
        for request_id in grown:
            found.append(1e3 * (now - waited[request_id]))
            waited[request_id] = now
    return np.asarray(found)


def _run_step(engine: Engine, counts: dict[str, int]) -> list[str]:
    """Run a step, update the token `counts`, and return the ids of requests with a new token."""
    grown = []
    for output in engine.step():
        num_tokens = len(output.outputs[0].token_ids)
        if num_tokens > counts.get(output.request_id, num_tokens):
            counts[output.request_id] = num_tokens
            grown.append(output.request_id)
    return grown


def measure(engine: Engine, shape: str, batch: int, length: int, every: int, steps: int) -> dict:
    """Return a result row with latency percentiles, first without, then with arriving prompts."""
    counts = start_decoding(engine, batch, 2 * steps + 64)
    row = {"model": shape, "batch": batch, "prompt": length, "every_steps": every}
    for name, feed in (("alone", None), ("prefills", Feed(engine, length, every))):
        found = gaps(engine, counts, steps, feed)
        for percent in (50, 99):
            row[f"{name}_p{percent}_ms"] = float(np.percentile(found, percent))
    engine.abort_all()
    return row | {"token_budget": engine.runtime_config.max_num_batched_tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=[*SHAPES], nargs="+", default=[*SHAPES])
    parser.add_argument("--batch", type=int, default=64, help="number of decoding requests")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of an arriving prompt")
    parser.add_argument("--every", type=int, default=4, help="steps between two arrivals")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--budget", type=int, nargs="+", default=[2048, 8192])
    args = parse_arguments(parser)
    rows = []
    for shape in args.model:
        for budget in args.budget:
            engine = make_engine(shape, max_num_batched_tokens=budget)
            rows.append(measure(engine, shape, args.batch, args.prompt, args.every, args.steps))
            del engine
    print_table(rows)
    print(record("inter_token", rows))


if __name__ == "__main__":
    main()
