"""An engine without a server, for `bench.serving --shape`.

The process reads a `Runs` as a line of JSON from standard input. It serves the requests, and writes
one line with the answers of each run. The times are defined as in `bench.load_client`, so the
difference between the two tables is the cost of the server.
"""

import sys
import time
from collections import deque
from typing import Any

import msgspec

from bench.load_client import Answer, Work
from jpaged import Engine, RequestDelta, SamplingParams


class Runs(msgspec.Struct):
    """Input of the process: options of `Engine`, and the requests of each run."""

    options: dict[str, Any]
    runs: list[list[Work]]


def serve_alone(engine: Engine, work: list[Work]) -> list[Answer]:
    """Add each request to the engine when it is due, and run steps until all are answered.

    Returns:
        The answers in the order of `work`. Times count from the time at which a request was due.
    """
    waiting = deque(sorted(enumerate(work), key=lambda pair: pair[1].due))
    answers = [Answer() for _ in work]
    start, left = time.monotonic(), len(work)
    while left:
        while waiting and start + waiting[0][1].due <= time.monotonic():
            _add(engine, *waiting.popleft())
        if engine.has_work:
            engine.advance()
        else:
            time.sleep(max(start + waiting[0][1].due - time.monotonic(), 0.0))
        for delta in engine.take_deltas():
            one = work[number := int(delta.request_id)]
            _note(answers[number], delta, time.monotonic() - start - one.due)
            left -= delta.finished
    for answer, one in zip(answers, work, strict=True):
        answer.num_prompt_tokens = len(one.prompt)
    return answers


def _add(engine: Engine, number: int, work: Work) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=work.num_outputs, ignore_eos=True)
    engine.add_request({"prompt_token_ids": work.prompt}, params, request_id=str(number))


def _note(answer: Answer, delta: RequestDelta, now: float) -> None:
    answer.end = now
    answer.error = delta.error
    num_tokens = sum(len(each.token_ids) for each in delta.deltas)
    answer.num_output_tokens += num_tokens
    if num_tokens:
        answer.chunk_times.append(now)


def main() -> None:
    runs = msgspec.json.decode(sys.stdin.buffer.readline(), type=Runs)
    engine = Engine(**runs.options)
    found = [serve_alone(engine, work) for work in runs.runs]
    sys.stdout.buffer.write(msgspec.json.encode(found) + b"\n")


if __name__ == "__main__":
    main()
