"""The HTTP process's end of the engine: requests in, what they grow by out, signs of life.

    client = await EngineClient.connect(sock, options)
    info = await client.ready()
    async with client.run([Job(...), ...]) as run:
        async for news in run:      # lists of (index of the job, `RequestDelta`)
            ...

Leaving the block aborts what is not over.
"""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, fields
from typing import Any

from jpaged import EngineStats, SamplingParams
from jpaged.serve.errors import failed, not_serving, refusal
from jpaged.serve.frames import (
    HEADER,
    Abort,
    Add,
    AskFrames,
    Command,
    Died,
    Frames,
    Ready,
    Refused,
    Report,
    Start,
    Stop,
    Turn,
    frame_of,
    report_of,
)
from jpaged.serve.run import Job, Run, Watch

_DEFAULTS = SamplingParams()
_LARGE_FRAME = 16 * 1024


@dataclass
class Pulse:
    """When the loop was last seen to go round, and its figures then.

    Attributes:
        turn: How often it had.
        seen: When, in seconds of `time.monotonic()`.
        stats: The engine's figures, as of late.
    """

    turn: int = -1
    seen: float = field(default_factory=time.monotonic)
    stats: EngineStats | None = None

    def note(self, turn: Turn) -> None:
        """The loop went round."""
        self.turn, self.seen = turn.number, time.monotonic()
        self.stats = turn.stats or self.stats


class EngineClient:
    """Speaks with a `Worker` over a socket.

    Attributes:
        pulse: Signs of life.
        death: Why there is no engine any more, for the log; None while there is one.
        runs: Who waits for the news of which request.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.pulse = Pulse()
        self.death: str | None = None
        self.runs: dict[str, Run] = {}
        self._writer = writer
        self._takes_requests = True
        self._info: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._frames: asyncio.Future[Frames] | None = None
        self._listening = asyncio.create_task(self._listen(reader))
        self.died = asyncio.Event()

    @classmethod
    async def connect(
        cls, sock: socket.socket, options: Mapping[str, Any] | None = None
    ) -> "EngineClient":
        """Speak over `sock`; with `options`, the engine is first made of them."""
        client = cls(*await asyncio.open_connection(sock=sock))
        if options is not None:
            client._send(Start(dict(options)))
        return client

    async def ready(self) -> Ready:
        """The engine's description, once it is made.

        Raises:
            RuntimeError: it could not be made.
        """
        return await asyncio.shield(self._info)

    @property
    def is_ready(self) -> bool:
        """Whether there is an engine, and it lives."""
        return self._info.done() and self.death is None

    @asynccontextmanager
    async def run(self, jobs: Sequence[Job], watch: Watch | None = None) -> AsyncIterator[Run]:
        """Put requests to the engine; what is not over at the end of the block is aborted.

        Raises:
            ApiError: there is no engine to put them to.
        """
        if not (self.is_ready and self._takes_requests):
            raise not_serving("the engine is not running")
        run = Run(jobs, self._abort, watch)
        try:
            for job in jobs:
                self.runs[job.request_id] = run
                if self._send(_add(job)) > _LARGE_FRAME:
                    await asyncio.sleep(0)  # others have events to send
            yield run
        finally:
            for job in jobs:
                self.runs.pop(job.request_id, None)
            self._abort(run.left)

    async def frames(self, epoch: int, tokens: bool) -> Frames:
        """What the memory did since the last question; one at a time may ask.

        Raises:
            ApiError: there is no engine to ask.
        """
        if not self.is_ready:
            raise not_serving("the engine is not running")
        self._frames = asyncio.get_running_loop().create_future()
        self._send(AskFrames(epoch, tokens))
        return await self._frames

    def cut_all(self) -> None:
        """End all requests where they are; their readers see an abort. None follow."""
        self._takes_requests = False
        self._abort(list(self.runs))
        for run in set(self.runs.values()):
            run.cut()

    async def stop(self) -> None:
        """Have the engine's process end, and hang up."""
        self._send(Stop())
        self._writer.close()
        self._listening.cancel()
        self._bury("the server stops")

    def _abort(self, request_ids: list[str]) -> None:
        if request_ids:
            self._send(Abort(request_ids))

    def _send(self, command: Command) -> int:
        """Give it on its way; tells of how many bytes it is."""
        if self.death is not None:
            return 0
        frame = frame_of(command)
        self._writer.write(frame)
        return len(frame)

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        reason = "the engine's process is gone"
        try:
            while True:
                (size,) = HEADER.unpack(await reader.readexactly(HEADER.size))
                report = report_of(await reader.readexactly(size))
                if isinstance(report, Died):
                    reason = report.reason
                    break
                self._take(report)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        except Exception as error:  # or all in flight would wait for an answer for ever
            reason = f"its words cannot be understood: {error!r}"
        self._bury(reason)

    def _take(self, report: Report) -> None:
        match report:
            case Turn():
                self.pulse.note(report)
                for delta in report.news:
                    if delta.request_id in self.runs:
                        self.runs[delta.request_id].put(delta)
            case Refused():
                if report.request_id in self.runs:
                    error = failed() if report.is_fault else refusal(report.message)
                    self.runs[report.request_id].fail(error)
            case Ready():
                self._info.set_result(report)
            case Frames():
                if self._frames is not None and not self._frames.done():
                    self._frames.set_result(report)

    def _bury(self, reason: str) -> None:
        """There is no engine any more: all who wait are told."""
        if self.death is not None:
            return
        self.death = reason
        self.died.set()
        for run in set(self.runs.values()):
            run.fail(not_serving("the engine failed, and the request with it"))
        if not self._info.done():
            self._info.set_exception(RuntimeError(reason))
        if self._frames is not None and not self._frames.done():
            self._frames.set_exception(not_serving("the engine is not running"))


def _add(job: Job) -> Add:
    given = {f.name: getattr(job.params, f.name) for f in fields(SamplingParams)}
    params = {name: v for name, v in given.items() if v != getattr(_DEFAULTS, name)}
    return Add(job.request_id, job.prompt_token_ids, params, job.priority, job.cache_salt)
