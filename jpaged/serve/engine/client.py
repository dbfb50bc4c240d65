"""Client with which the HTTP process uses the engine process.

    client = await EngineClient.connect(sock, options)
    info = await client.wait_ready()
    async with client.run([EngineRequest(...), ...], on_update) as run:
        async for updates in run:      # lists of `RequestUpdate`
            ...

Leaving the `async with` block aborts the unfinished requests.
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
    ControlEngine,
    ControlResult,
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
"""Maximum number of unread tokens in an `UpdateStream`. A longer backlog aborts its requests.

Each candidate in the log-probabilities counts as a token.
"""

_MIN_SEPARATE_UPDATES = 8192
"""Minimum of `UpdateStream.max_separate_updates`."""

_LARGE_MESSAGE_BYTES = 16 * 1024


class RequestUpdate(NamedTuple):
    """New tokens of one request.

    Attributes:
        index: Index of the request in the requests of `EngineClient.run`.
        delta: The new tokens.
    """

    index: int
    delta: RequestDelta


class UpdateStream:
    """Asynchronous iterator over the updates of several requests, as lists of `RequestUpdate`.

    The iterator raises `ApiError` if a request is refused or fails.

    Attributes:
        has_started: Whether an update has arrived.
        max_separate_updates: Maximum number of unread updates that stay separate. If more
            updates are unread, the updates of each request are merged.
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
        """Whether no more updates will arrive."""
        return not self._unfinished or self._error is not None

    @property
    def unfinished_ids(self) -> list[str]:
        """Ids of the requests whose last update has not arrived."""
        return list(self._unfinished)

    @property
    def end_reason(self) -> str:
        """Finish reason of the requests that did not finish: "error", "abort" or "refused"."""
        status = None if self._error is None else self._error.status
        return {500: "error", 400: "refused"}.get(status or 0, "abort")

    def put(self, delta: RequestDelta) -> None:
        """Add a delta to the unread updates.

        More than `MAX_UNREAD_TOKENS` unread tokens end the stream with an error.
        """
        index = self._unfinished.get(delta.request_id)
        if index is None or self._error is not None:
            return
        self.has_started = True
        # The tokens of a request's last delta do not count towards `MAX_UNREAD_TOKENS`. A beam
        # search sends all its tokens in the last delta, so the client could not read them earlier.
        if not delta.finished:
            self._num_unread += sum(map(_delta_size, delta.deltas))
            if self._num_unread > MAX_UNREAD_TOKENS:
                self.fail(unavailable_error("aborted: the client read the answer too slowly"))
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
        """Abort the unfinished requests. The iterator raises `error` after the unread updates."""
        if self._error is None:
            self._error = error
            self._abort(self.unfinished_ids)
        self._changed.set()

    def abort(self) -> None:
        """End every unfinished request with a last update that has no new tokens."""
        for request_id in self.unfinished_ids:
            self.put(RequestDelta(request_id, [], finished=True))


def _delta_size(delta: TextDelta) -> int:
    return len(delta.token_ids) + sum(map(len, delta.logprobs or ()))


def _merge_updates(unread: Sequence[RequestUpdate]) -> list[RequestUpdate]:
    """Return one update for each request, with all its unread deltas."""
    by_index: dict[int, list[RequestDelta]] = {}
    for index, delta in unread:
        by_index.setdefault(index, []).append(delta)
    return [
        RequestUpdate(index, _join_request_deltas(deltas)) for index, deltas in by_index.items()
    ]


def _join_request_deltas(deltas: Sequence[RequestDelta]) -> RequestDelta:
    deltas_by_index: dict[int, list[TextDelta]] = {}
    for each in deltas:
        for text_delta in each.deltas:
            deltas_by_index.setdefault(text_delta.index, []).append(text_delta)
    logprobs = [each.prompt_logprobs for each in deltas if each.prompt_logprobs is not None]
    return replace(
        deltas[-1],
        deltas=[join_deltas(text_deltas) for text_deltas in deltas_by_index.values()],
        prompt_logprobs=[entry for chunk in logprobs for entry in chunk] if logprobs else None,
        num_cached_tokens=max(each.num_cached_tokens for each in deltas),
    )


def join_deltas(deltas: Sequence[TextDelta]) -> TextDelta:
    """Join consecutive deltas of one answer. Return an empty delta if `deltas` is empty."""
    if not deltas:
        return TextDelta("")
    logprobs = [each.logprobs for each in deltas if each.logprobs is not None]
    return replace(
        deltas[-1],
        text="".join(each.text for each in deltas),
        token_ids=tuple(token_id for each in deltas for token_id in each.token_ids),
        logprobs=[entry for chunk in logprobs for entry in chunk] if logprobs else None,
        weight_versions=_join_versions(deltas),
    )


def _join_versions(deltas: Sequence[TextDelta]) -> tuple[tuple[int, int], ...]:
    """Return the `weight_versions` of the delta that joins `deltas`.

    The result has one pair (version, index) for each version of the weights. The index is the
    position, in the joined tokens, of the first token that this version generated.
    """
    joined, num_tokens = list[tuple[int, int]](), 0
    for delta in deltas:
        for version, index in delta.weight_versions:
            if not joined or joined[-1][0] != version:
                joined.append((version, num_tokens + index))
        num_tokens += len(delta.token_ids)
    return tuple(joined)


class EngineClient:
    """Sends commands to an `EngineWorker` over a socket, and receives its reports.

    Attributes:
        last_heartbeat: Time of the engine's last update, in seconds of `time.monotonic()`.
        stats: Latest statistics of the engine; None before the first.
        close_reason: Why the connection closed, for the log; None while it is open.
        runs: Update streams by request id.
        closed: Event that is set when the connection closes.
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
        self._controls: dict[int, asyncio.Future[ControlResult]] = {}
        self._num_controls = 0
        self._listen_task = asyncio.create_task(self._listen(reader))
        self.closed = asyncio.Event()

    @classmethod
    async def connect(
        cls, sock: socket.socket, options: Mapping[str, Any] | None = None
    ) -> "EngineClient":
        """Return a client that uses `sock`.

        Args:
            sock: Connected socket of the worker.
            options: The worker creates `Engine(**options)`; None sends no options.
        """
        client = cls(*await asyncio.open_connection(sock=sock))
        if options is not None:
            client._send(StartEngine(dict(options)))
        return client

    async def wait_ready(self) -> EngineInfo:
        """Wait until the engine has started, and return its description.

        Raises:
            RuntimeError: The engine could not be started.
        """
        return await asyncio.shield(self._info)

    @property
    def is_ready(self) -> bool:
        """Whether the engine has started and the connection is open."""
        return self._info.done() and self.close_reason is None

    @asynccontextmanager
    async def run(
        self, requests: Sequence[EngineRequest], on_update: Callable[[RequestUpdate], None]
    ) -> AsyncIterator[UpdateStream]:
        """Send requests to the engine, and yield the stream of their updates.

        The end of the `async with` block aborts the unfinished requests.

        Args:
            requests: Requests with distinct ids.
            on_update: Called with each update when it arrives, even if the stream is not read.

        Raises:
            ApiError: The engine is not running, or accepts no more requests.
        """
        if not (self.is_ready and self._accepts_requests):
            raise unavailable_error("the engine is not running")
        run = UpdateStream(requests, self._abort, on_update)
        try:
            for request in requests:
                self.runs[request.request_id] = run
                if self._send(request) > _LARGE_MESSAGE_BYTES:
                    # Let the event loop serve other responses between large messages.
                    await asyncio.sleep(0)
                if run.is_over:  # the engine refused a request, so do not send the others
                    break
            yield run
        finally:
            for request in requests:
                self.runs.pop(request.request_id, None)
            self._abort(run.unfinished_ids)

    async def fetch_pool_diffs(self, snapshot: bool, tokens: bool) -> PoolDiffs:
        """Return the changes of the KV block pool since the last fetch.

        Only one fetch may run at a time.

        Args:
            snapshot: Whether to fetch the state of the whole pool too.
            tokens: Whether the next snapshot and all later diffs contain the tokens of blocks.

        Raises:
            ApiError: The engine is not running.
        """
        if not self.is_ready:
            raise unavailable_error("the engine is not running")
        self._pool_diffs = asyncio.get_running_loop().create_future()
        self._send(FetchPoolDiffs(snapshot, tokens))
        return await self._pool_diffs

    async def control(self, action: Any, **arguments: Any) -> ControlResult:
        """Call a method of the engine, and return the engine's state after it.

        Args:
            action, arguments: See `ControlEngine`.

        Raises:
            ApiError: The engine refused the call, or is not running.
        """
        if not self.is_ready:
            raise unavailable_error("the engine is not running")
        self._num_controls += 1
        control_id = self._num_controls
        self._controls[control_id] = asyncio.get_running_loop().create_future()
        try:
            self._send(ControlEngine(control_id, action, arguments))
            result = await self._controls[control_id]
        finally:
            del self._controls[control_id]
        if result.error is not None:
            raise error_from_info(result.error)
        return result

    def abort_all(self) -> None:
        """Abort all requests, and accept no more. The streams end without an error."""
        self._accepts_requests = False
        self._abort(list(self.runs))
        for run in set(self.runs.values()):
            run.abort()

    async def stop(self) -> None:
        """Send `StopEngine` to the engine process, and close the connection."""
        self._send(StopEngine())
        self._writer.close()
        self._listen_task.cancel()
        self.close("the server is shutting down")

    def _abort(self, request_ids: list[str]) -> None:
        if request_ids:
            self._send(AbortRequests(request_ids))

    def _send(self, command: Command) -> int:
        """Send a command without waiting, and return the size of the message in bytes."""
        if self.close_reason is not None:
            return 0
        message = processes.frame_message(encode(command))
        self._writer.write(message)
        return len(message)

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        reason = "the engine process has ended"
        try:
            while True:
                report = decode_report(await processes.read_message(reader))
                if isinstance(report, EngineFailed):
                    reason = report.reason
                    break
                self._handle_report(report)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        except Exception as error:  # an uncaught error would let requests in flight wait forever
            reason = f"the engine process sent an invalid message: {error!r}"
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
            case ControlResult():
                future = self._controls.get(report.control_id)
                if future is not None and not future.done():
                    future.set_result(report)

    def close(self, reason: str) -> None:
        """Mark the connection as closed, and end all waiting requests with an error."""
        if self.close_reason is not None:
            return
        self.close_reason = reason
        self.closed.set()
        for run in set(self.runs.values()):
            run.fail(unavailable_error("the engine stopped before the request finished: retry"))
        if not self._info.done():
            self._info.set_exception(RuntimeError(reason))
            # Retrieve the exception, because asyncio logs exceptions that are never retrieved.
            self._info.exception()
        for future in (self._pool_diffs, *self._controls.values()):
            if future is not None and not future.done():
                future.set_exception(unavailable_error("the engine is not running"))


class EngineProcess:
    """The engine process, which runs `worker.py`.

    Attributes:
        client: Client of the engine.
    """

    def __init__(self, child: processes.Child, client: EngineClient):
        self.client = client
        self._child = child
        self._is_killed = False

    @classmethod
    async def start(cls, options: Mapping[str, Any]) -> "EngineProcess":
        """Start a process that creates `Engine(**options)`, without waiting for the engine."""
        child = processes.Child("jpaged.serve.engine.worker", os.getpid())
        return cls(child, await EngineClient.connect(child.sock, options))

    async def stop(self, timeout: float = 10.0) -> None:
        """Ask the process to stop, and kill the process after `timeout` seconds."""
        await self.client.stop()
        if await self._exit_code(timeout) is None:
            self.kill()
            # Wait at most `timeout`: a process that hangs in a driver may not end.
            await self._exit_code(timeout)

    def kill_and_close(self, reason: str) -> None:
        """Kill the process and fail all requests in flight. Do not wait for the process to end."""
        self.kill()
        self.client.close(reason)

    async def exit_description(self, timeout: float = 2.0) -> str:
        """Return a text for a log line that names the signal which ended the process.

        Returns:
            An empty string if no signal ended the process, if `kill` sent the signal, or if the
            process still runs after `timeout` seconds.
        """
        code = await self._exit_code(timeout)
        if code is None or code >= 0 or self._is_killed:
            return ""
        return f" ({processes.describe_exit(code)})"

    def kill(self) -> None:
        """Kill the process without waiting for the process to end."""
        self._is_killed = True
        self._child.process.kill()

    async def _exit_code(self, seconds: float) -> int | None:
        return await asyncio.to_thread(self._child.exit_code, seconds)


class AttachedEngine:
    """An engine in the process that started this process, with the interface of `EngineProcess`.

    The caller of `jpaged.serve.serve` owns the engine, so stopping only ends the connection.

    Attributes:
        client: Client of the engine.
    """

    def __init__(self, client: EngineClient):
        self.client = client

    @classmethod
    async def attach(cls, sock: socket.socket) -> "AttachedEngine":
        """Connect to the engine at the other end of a channel."""
        return cls(await EngineClient.connect(sock, {}))

    async def stop(self, timeout: float = 10.0) -> None:
        """Send `StopEngine`, so that `jpaged.serve.serve` returns in the engine's process."""
        await self.client.stop()

    def kill_and_close(self, reason: str) -> None:
        """Fail all requests in flight."""
        self.client.close(reason)

    async def exit_description(self, timeout: float = 2.0) -> str:
        """Return an empty string, because the process that owns the engine prints its errors."""
        return ""

    def kill(self) -> None:
        """Do nothing: the engine does not belong to this process."""
