"""One process of `bench.serving`'s client: sends its share of the requests, times the answers.

The parent writes one line of JSON to its standard input, a `Share`; the process answers "ready",
reads the moment to start at (`time.monotonic()`, which all processes of a machine share), and
writes one line of JSON, a `Report`.
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
"""Seconds between two looks at how late the event loop is."""

_LEAD = 0.1
"""Seconds from the last process's "ready" to the start."""


class Target(msgspec.Struct, frozen=True):
    """The server: its address up to `/v1`, the model to name (None: none), a key."""

    url: str
    model: str | None = None
    api_key: str | None = None
    timeout: float = 600.0
    """Seconds between two pieces of an answer."""

    @property
    def headers(self) -> dict[str, str]:
        """What requests bring besides their content."""
        return {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}


class Work(msgspec.Struct, frozen=True):
    """One request: token ids in, so many out, `due` seconds after the start."""

    prompt: list[int]
    num_outputs: int
    due: float


class Answer(msgspec.Struct):
    """What became of a request; times in seconds since it was due.

    Attributes:
        chunk_times: When each piece of text came.
        end: When the stream ended.
        num_prompt_tokens, num_output_tokens: As the server counts them.
        error: Why it does not count; None if it does.
    """

    chunk_times: list[float] = []
    end: float = 0.0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    error: str | None = None


class Share(msgspec.Struct):
    """What one process does."""

    target: Target
    work: list[Work]


class Report(msgspec.Struct):
    """What came of a share.

    Attributes:
        answers: In the order of its work.
        busy: Share of one processor that the process took while requests were under way.
        lags: How late the event loop was, in seconds, at each look.
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
    """Send `work` from so many processes, request `i` from process `i % num_processes`.

    Raises:
        RuntimeError: a process failed; its standard error says why.
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
        raise RuntimeError("a process of the client failed")
    return line


def session(target: Target) -> aiohttp.ClientSession:
    """Any number of connections to the target."""
    limits = aiohttp.ClientTimeout(total=None, sock_read=target.timeout)
    connector = aiohttp.TCPConnector(limit=0)
    return aiohttp.ClientSession(connector=connector, timeout=limits, headers=target.headers)


async def serve_share(share: Share, start: float) -> Report:
    """Send each request when it is due."""
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
        answer.error = "not as many tokens as asked for"
    return answer


async def _stream(
    client: aiohttp.ClientSession, target: Target, work: Work
) -> AsyncIterator[_Chunk]:
    """The answer's chunks. ValueError if the server refuses, or says what cannot be read."""
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
    """What the server says of an error, if it does so as OpenAI does."""
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
