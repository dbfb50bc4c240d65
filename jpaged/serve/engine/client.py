"""The HTTP process's end of the engine: its process, requests in flight, signs of life.

    client = await EngineClient.connect(sock, options)
    info = await client.ready()
    async with client.run([EngineRequest(...), ...], on_news) as run:
        async for news in run:      # lists of (index of the request, `RequestDelta`)
            ...

Leaving the block aborts what is not over.
"""

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, NamedTuple

from jpaged import EngineStats, RequestDelta, TextDelta, processes
from jpaged.serve.engine.messages import (
    AbortRequests,
    Command,
    EngineFailed,
    EngineInfo,
    EngineRequest,
    EngineUpdate,
    FetchPoolDiffs,
    PoolDiffs,
    Report,
    RequestRefused,
    StartEngine,
    StopEngine,
    decode_report,
    encode,
)
from jpaged.serve.errors import ApiError, error_from_info, internal_error, unavailable_error

MAX_UNREAD_TOKENS = 256 * 1024
"""Tokens and their candidates that may wait for a slow reader before its request is aborted."""

_MIN_SEPARATE_UPDATES = 8192
"""News of a run that wait one by one, at least."""

_LARGE_MESSAGE_BYTES = 16 * 1024


class RequestUpdate(NamedTuple):
    """What one of the requests of a run grew by."""

    index: int
    delta: RequestDelta


class UpdateStream:
    """The news of some requests as they come: an asynchronous iterator of lists of `RequestUpdate`.

    Iterating raises `ApiError` if one of them is refused or fails.

    Attributes:
        has_started: Whether anything came of it.
        most_news: News that wait one by one; of more, those of a request become one.
    """

    def __init__(
        self,
        requests: Sequence[EngineRequest],
        abort: Callable[[list[str]], None],
        on_update: Callable[[RequestUpdate], None],
    ):
        self.has_started = False
        self._abort = abort
        self._on_update = on_update
        self._unfinished = {request.request_id: i for i, request in enumerate(requests)}
        self._unread: list[RequestUpdate] = []
        self._num_unread = 0
        self.max_separate_updates = max(_MIN_SEPARATE_UPDATES, 4 * len(requests))
        self._error: ApiError | None = None
        self._changed = asyncio.Event()

    def __aiter__(self) -> "UpdateStream":
        return self

    async def __anext__(self) -> list[RequestUpdate]:
        while not (self._unread or self._error or self.is_over):
            self._changed.clear()
            await self._changed.wait()
        if self._unread:
            updates, self._unread, self._num_unread = self._unread, [], 0
            return updates
        if self._error is not None:
            raise self._error
        raise StopAsyncIteration

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come."""
        return not self._unfinished or self._error is not None

    @property
    def unfinished_ids(self) -> list[str]:
        """Requests that are not over, as far as is known here."""
        return list(self._unfinished)

    @property
    def end_reason(self) -> str:
        """Why those ended that did not come to their ends: "error", "abort" or "refused"."""
        status = None if self._error is None else self._error.status
        return {500: "error", 400: "refused"}.get(status or 0, "abort")

    def put(self, delta: RequestDelta) -> None:
        """Take news in; the run fails when too many are unread."""
        index = self._unfinished.get(delta.request_id)
        if index is None or self._error is not None:
            return
        self.has_started = True
        if not delta.finished:  # the last may be whole answers, which no reader had before
            self._num_unread += sum(map(_delta_size, delta.deltas))
            if self._num_unread > MAX_UNREAD_TOKENS:
                self.fail(unavailable_error("aborted: the answer was not read as it came"))
                return
        update = RequestUpdate(index, delta)
        self._unread.append(update)
        self._on_update(update)
        if len(self._unread) > self.max_separate_updates:
            self._unread = _merge_updates(self._unread)
        if delta.finished:
            del self._unfinished[delta.request_id]
            if delta.error is not None:
                self.fail(
                    internal_error()
                    if delta.error_info is None
                    else error_from_info(delta.error_info)
                )
        self._changed.set()

    def fail(self, error: ApiError) -> None:
        """End it with an error, after what came before."""
        if self._error is None:
            self._error = error
            self._abort(self.unfinished_ids)
        self._changed.set()

    def abort(self) -> None:
        """End it here, as if aborted."""
        for request_id in self.unfinished_ids:
            self.put(RequestDelta(request_id, [], finished=True))


def _delta_size(delta: TextDelta) -> int:
    return len(delta.token_ids) + sum(map(len, delta.logprobs or ()))


def _merge_updates(unread: Sequence[RequestUpdate]) -> list[RequestUpdate]:
    """News of a request as one, which may be of several steps."""
    by_index: dict[int, list[RequestDelta]] = {}
    for index, delta in unread:
        by_index.setdefault(index, []).append(delta)
    return [
        RequestUpdate(index, _join_request_deltas(deltas)) for index, deltas in by_index.items()
    ]


def _join_request_deltas(deltas: Sequence[RequestDelta]) -> RequestDelta:
    """All that a request grew by as one."""
    deltas_by_index: dict[int, list[TextDelta]] = {}
    for each in deltas:
        for own in each.deltas:
            deltas_by_index.setdefault(own.index, []).append(own)
    scores = [each.prompt_logprobs for each in deltas if each.prompt_logprobs is not None]
    return replace(
        deltas[-1],
        deltas=[join_deltas(own) for own in deltas_by_index.values()],
        prompt_logprobs=[found for own in scores for found in own] if scores else None,
        num_cached_tokens=max(each.num_cached_tokens for each in deltas),
    )


def join_deltas(deltas: Sequence[TextDelta]) -> TextDelta:
    """All that an answer grew by as one."""
    if not deltas:
        return TextDelta("")
    scores = [each.logprobs for each in deltas if each.logprobs is not None]
    return replace(
        deltas[-1],
        text="".join(each.text for each in deltas),
        token_ids=tuple(token_id for each in deltas for token_id in each.token_ids),
        logprobs=[found for own in scores for found in own] if scores else None,
    )


class EngineClient:
    """Speaks with a `EngineWorker` over a socket.

    Attributes:
        seen: When the loop was last seen to go round, in seconds of `time.monotonic()`.
        stats: The engine's figures, as of late; None before the first.
        death: Why the engine is gone, for the log; None while it lives.
        runs: By request id, the run that gets its news.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.last_heartbeat = time.monotonic()
        self.stats: EngineStats | None = None
        self.close_reason: str | None = None
        self.runs: dict[str, UpdateStream] = {}
        self._writer = writer
        self._accepts_requests = True
        self._info: asyncio.Future[EngineInfo] = asyncio.get_running_loop().create_future()
        self._pool_diffs: asyncio.Future[PoolDiffs] | None = None
        self._listen_task = asyncio.create_task(self._listen(reader))
        self.closed = asyncio.Event()

    @classmethod
    async def connect(
        cls, sock: socket.socket, options: Mapping[str, Any] | None = None
    ) -> "EngineClient":
        """Speak over `sock`; with `options`, the engine is first made of them."""
        client = cls(*await asyncio.open_connection(sock=sock))
        if options is not None:
            client._send(StartEngine(dict(options)))
        return client

    async def wait_ready(self) -> EngineInfo:
        """The engine's description, once it is made.

        Raises:
            RuntimeError: it could not be made.
        """
        return await asyncio.shield(self._info)

    @property
    def is_ready(self) -> bool:
        """Whether there is an engine, and it lives."""
        return self._info.done() and self.close_reason is None

    @asynccontextmanager
    async def run(
        self, requests: Sequence[EngineRequest], on_update: Callable[[RequestUpdate], None]
    ) -> AsyncIterator[UpdateStream]:
        """Put requests to the engine; what is not over at the end of the block is aborted.

        Args:
            requests: Each of its own name.
            on_news: Called with all news as they come, read or not.

        Raises:
            ApiError: there is no engine to put them to.
        """
        if not (self.is_ready and self._accepts_requests):
            raise unavailable_error("the engine is not running")
        run = UpdateStream(requests, self._abort, on_update)
        try:
            for request in requests:
                self.runs[request.request_id] = run
                if self._send(request) > _LARGE_MESSAGE_BYTES:
                    await asyncio.sleep(0)  # others have events to send
                if run.is_over:  # one was refused
                    break
            yield run
        finally:
            for request in requests:
                self.runs.pop(request.request_id, None)
            self._abort(run.unfinished_ids)

    async def fetch_pool_diffs(self, snapshot: bool, tokens: bool) -> PoolDiffs:
        """What changed in the pool since the last question, and perhaps all there is; one at a time
        may ask.

        Raises:
            ApiError: there is no engine to ask.
        """
        if not self.is_ready:
            raise unavailable_error("the engine is not running")
        self._pool_diffs = asyncio.get_running_loop().create_future()
        self._send(FetchPoolDiffs(snapshot, tokens))
        return await self._pool_diffs

    def abort_all(self) -> None:
        """End all requests where they are; their readers see an abort. None follow."""
        self._accepts_requests = False
        self._abort(list(self.runs))
        for run in set(self.runs.values()):
            run.abort()

    async def stop(self) -> None:
        """Have the engine's process end, and hang up."""
        self._send(StopEngine())
        self._writer.close()
        self._listen_task.cancel()
        self.close("the server stops")

    def _abort(self, request_ids: list[str]) -> None:
        if request_ids:
            self._send(AbortRequests(request_ids))

    def _send(self, command: Command) -> int:
        """Queue the command for sending; gives its size in bytes."""
        if self.close_reason is not None:
            return 0
        message = processes.frame_message(encode(command))
        self._writer.write(message)
        return len(message)

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        reason = "the engine's process is gone"
        try:
            while True:
                report = decode_report(await processes.read_message(reader))
                if isinstance(report, EngineFailed):
                    reason = report.reason
                    break
                self._handle_report(report)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        except Exception as error:  # or all in flight would wait for an answer for ever
            reason = f"its words cannot be understood: {error!r}"
        self.close(reason)

    def _handle_report(self, report: Report) -> None:
        match report:
            case EngineUpdate():
                self.last_heartbeat, self.stats = time.monotonic(), report.stats or self.stats
                for delta in report.deltas:
                    if delta.request_id in self.runs:
                        self.runs[delta.request_id].put(delta)
            case RequestRefused():
                if report.request_id in self.runs:
                    self.runs[report.request_id].fail(error_from_info(report.error))
            case EngineInfo():
                self.last_heartbeat = time.monotonic()
                self._info.set_result(report)
            case PoolDiffs():
                if self._pool_diffs is not None and not self._pool_diffs.done():
                    self._pool_diffs.set_result(report)

    def close(self, reason: str) -> None:
        """The engine is gone: fail all that waits for it."""
        if self.close_reason is not None:
            return
        self.close_reason = reason
        self.closed.set()
        for run in set(self.runs.values()):
            run.fail(unavailable_error("the engine failed, and the request with it"))
        if not self._info.done():
            self._info.set_exception(RuntimeError(reason))
            self._info.exception()  # asked for here: asyncio logs one that never is
        if self._pool_diffs is not None and not self._pool_diffs.done():
            self._pool_diffs.set_exception(unavailable_error("the engine is not running"))


class EngineProcess:
    """The process of `worker.py`, and the channel to it.

    Attributes:
        client: Speaks with the engine.
    """

    def __init__(self, child: processes.Child, client: EngineClient):
        self.client = client
        self._child = child
        self._is_killed = False

    @classmethod
    async def start(cls, options: Mapping[str, Any]) -> "EngineProcess":
        """Start a process that makes `Engine(**options)`."""
        child = processes.Child("jpaged.serve.engine.worker", os.getpid())
        return cls(child, await EngineClient.connect(child.sock, options))

    async def stop(self, timeout: float = 10.0) -> None:
        """End it: by asking, and after `timeout` seconds by force."""
        await self.client.stop()
        if await self._exit_code(timeout) is None:
            self.kill()
            await self._exit_code(timeout)  # one that waits in a driver does not end

    def kill_and_close(self, reason: str) -> None:
        """End it at once and fail what waits for it, though it may not be able to end."""
        self.kill()
        self.client.close(reason)

    async def exit_description(self, timeout: float = 2.0) -> str:
        """Return in brackets the signal that ended the process, unless `kill` sent it."""
        code = await self._exit_code(timeout)
        if code is None or code >= 0 or self._is_killed:
            return ""
        return f" ({processes.describe_exit(code)})"

    def kill(self) -> None:
        """End it at once."""
        self._is_killed = True
        self._child.process.kill()

    async def _exit_code(self, seconds: float) -> int | None:
        return await asyncio.to_thread(self._child.exit_code, seconds)
