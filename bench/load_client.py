"""A client process of `bench.serving`: it sends a part of the requests and times the answers.

The process reads a `Share` as a line of JSON from standard input and answers "ready". Then it reads
the start time, a value of `time.monotonic()`, which all processes of a machine share. At the end it
writes a `Report` as a line of JSON.
"""

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

_LAG_PROBE = 0.005
"""Seconds between two measurements of how late the event loop runs."""

_LEAD = 0.1
"""Seconds between the moment when all processes are ready and the start of the load."""


class Target(msgspec.Struct, frozen=True):
    """The server that receives the requests.

    Attributes:
        url: URL of the server, up to and including `/v1`.
        model: Model name in the requests; None to omit it.
        api_key: API key of the requests; None to send no key.
    """

    url: str
    model: str | None = None
    api_key: str | None = None
    timeout: float = 600.0
    """Maximum seconds between two chunks of an answer."""

    @property
    def headers(self) -> dict[str, str]:
        """HTTP headers of the requests."""
        return {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}


class Work(msgspec.Struct, frozen=True):
    """One request: prompt token ids, number of output tokens, and time to send it.

    The time is in seconds since the start of the load.
    """

    prompt: list[int]
    num_outputs: int
    due: float


class Answer(msgspec.Struct):
    """Result of a request; times are in seconds since the request was due.

    Attributes:
        chunk_times: Arrival time of each chunk of text.
        end: End of the stream.
        num_prompt_tokens, num_output_tokens: The server's token counts.
        error: The reason why the request failed; None if it succeeded.
    """

    chunk_times: list[float] = []
    end: float = 0.0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    error: str | None = None


class Share(msgspec.Struct):
    """Input of one client process: the requests that it sends."""

    target: Target
    work: list[Work]


class Report(msgspec.Struct):
    """Result of one client process.

    Attributes:
        answers: Results in the order of `Share.work`.
        busy: Fraction of one processor that the process used while requests were in flight.
        lags: For each measurement: the seconds by which the event loop was late.
    """

    answers: list[Answer]
    busy: float = 0.0
    lags: list[float] = []


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int


class _Chunk(msgspec.Struct):
    choices: list[msgspec.Raw] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


def run_shares(target: Target, work: Sequence[Work], num_processes: int) -> list[Report]:
    """Send request `i` from process `i % num_processes`; return a report for each process.

    Raises:
        RuntimeError: a process failed.
    """
    shares = [Share(target, list(work[i::num_processes])) for i in range(num_processes)]
    processes = [_spawn() for share in shares]
    try:
        for process, share in zip(processes, shares, strict=True):
            _write(process, msgspec.json.encode(share))
        for process in processes:
            _read(process)
        start = time.monotonic() + _LEAD
        for process in processes:
            _write(process, b"%.6f" % start)
        return [msgspec.json.decode(_read(process), type=Report) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def _spawn() -> subprocess.Popen:
    command = [sys.executable, "-m", "bench.load_client"]
    folder = Path(__file__).parent.parent
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=folder)


def _write(process: subprocess.Popen, line: bytes) -> None:
    if process.stdin is not None:
        process.stdin.write(line + b"\n")
        process.stdin.flush()


def _read(process: subprocess.Popen) -> bytes:
    line = process.stdout.readline() if process.stdout is not None else b""
    if not line:
        raise RuntimeError("a client process failed: see its error above")
    return line


def session(target: Target) -> aiohttp.ClientSession:
    """Open an HTTP session without a limit on the number of connections."""
    limits = aiohttp.ClientTimeout(total=None, sock_read=target.timeout)
    connector = aiohttp.TCPConnector(limit=0)
    return aiohttp.ClientSession(connector=connector, timeout=limits, headers=target.headers)


async def serve_share(share: Share, start: float) -> Report:
    """Send each request at its time after `start`, and wait for all answers."""
    report, used = Report([]), time.process_time()
    async with session(share.target) as client:
        asking = [_ask(client, share.target, one, start + one.due) for one in share.work]
        probe = asyncio.create_task(_probe(report.lags, start))
        report.answers = await asyncio.gather(*asking)
        probe.cancel()
    report.busy = (time.process_time() - used) / max(time.monotonic() - start, 1e-9)
    return report


async def _probe(lags: list[float], start: float) -> None:
    await asyncio.sleep(max(start - time.monotonic(), 0))
    while True:
        due = time.monotonic() + _LAG_PROBE
        await asyncio.sleep(_LAG_PROBE)
        lags.append(time.monotonic() - due)


async def _ask(client: aiohttp.ClientSession, target: Target, work: Work, due: float) -> Answer:
    await asyncio.sleep(max(due - time.monotonic(), 0))
    answer = Answer()
    try:
        async for chunk in _stream(client, target, work):
            _take(answer, chunk, time.monotonic() - due)
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        answer.error = str(error) if isinstance(error, ValueError) else type(error).__name__
    answer.end = time.monotonic() - due
    if answer.error is None and answer.num_output_tokens != work.num_outputs:
        answer.error = "wrong number of output tokens"
    return answer


async def _stream(
    client: aiohttp.ClientSession, target: Target, work: Work
) -> AsyncIterator[_Chunk]:
    """Yield the answer's chunks.

    Raises:
        ValueError: the server returned an error status or an unreadable chunk.
    """
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
    async with client.post(url, json=body) as response:
        if response.status != 200:
            raise ValueError(f"status {response.status}{_reason(await response.read())}")
        rest = b""
        async for data in response.content.iter_any():
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                text = line.removeprefix(b"data:").strip()
                if text and line.startswith(b"data:") and text != b"[DONE]":
                    yield _decode(text)


def _reason(body: bytes) -> str:
    """Return the message in the body of an error response, or an empty string.

    The body must have OpenAI's format.
    """
    try:
        return f": {msgspec.json.decode(body)['error']['message']}"[:300]
    except (ValueError, LookupError, TypeError):
        return ""


def _take(answer: Answer, chunk: _Chunk, now: float) -> None:
    if chunk.error is not None:
        raise ValueError(f"error event: {chunk.error}"[:300])
    if chunk.choices:
        answer.chunk_times.append(now)
    if chunk.usage is not None:
        answer.num_prompt_tokens = chunk.usage.prompt_tokens
        answer.num_output_tokens = chunk.usage.completion_tokens


def main() -> None:
    share = msgspec.json.decode(sys.stdin.buffer.readline(), type=Share)
    print("ready", flush=True)
    start = float(sys.stdin.buffer.readline())
    report = asyncio.run(serve_share(share, start))
    sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")


if __name__ == "__main__":
    main()
