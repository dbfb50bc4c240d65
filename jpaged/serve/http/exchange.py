"""An answer on its way to the client: sent as it is made, dropped when the client goes."""

import asyncio
import sys
import traceback
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jpaged.serve.errors import ApiError, internal_error

encode_json = msgspec.json.Encoder().encode
"""The value as JSON."""

_STRING_CHUNK_SIZE = 256 * 1024
"""Characters that are encoded in one go."""

_ARRAY_CHUNK_SIZE = 256
"""Items that are encoded in one go: numbers, texts of tokens, or their candidates."""

_MAX_ARRAY_DEPTH = 4
"""Depth of the deepest long arrays: those of the choices' log-probabilities."""

DONE_EVENT = b"data: [DONE]\n\n"
"""Ends a stream of events."""


def encode_large_json(value: Any) -> bytes:
    """The value as JSON, for a thread: no single call holds the interpreter for long.

    Texts, arrays and what has them near its top are encoded in pieces.
    """
    return b"".join(_chunks(value, _MAX_ARRAY_DEPTH))


def _chunks(value: Any, depth: int) -> Iterator[bytes]:
    if isinstance(value, str) and len(value) > _STRING_CHUNK_SIZE:
        yield b'"'
        for at in range(0, len(value), _STRING_CHUNK_SIZE):
            yield encode_json(value[at : at + _STRING_CHUNK_SIZE])[1:-1]
        yield b'"'
    elif isinstance(value, dict) and value and depth:
        for i, (name, item) in enumerate(value.items()):
            yield b"%b%b:" % (b"," if i else b"{", encode_json(name))
            yield from _chunks(item, depth - 1)
        yield b"}"
    elif isinstance(value, list) and len(value) > _ARRAY_CHUNK_SIZE:
        for at in range(0, len(value), _ARRAY_CHUNK_SIZE):
            yield b"," if at else b"["
            yield encode_json(value[at : at + _ARRAY_CHUNK_SIZE])[1:-1]
        yield b"]"
    elif isinstance(value, list) and value and depth:
        for i, item in enumerate(value):
            yield b"," if i else b"["
            yield from _chunks(item, depth - 1)
        yield b"]"
    else:
        yield encode_json(value)


def encode_event(value: Any) -> bytes:
    """The value as a server-sent event."""
    return b"data: " + encode_json(value) + b"\n\n"


def json_response(
    value: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """A whole answer in JSON."""
    return Response(encode_json(value), status, headers, media_type="application/json")


def error_response(error: ApiError) -> Response:
    """An error as an answer."""
    return json_response(error.body, error.status, error.headers)


class GeneratorResponse(Response):
    """Sends what a generator yields; one that ends early, or a client that goes, closes it.

    The answer starts with the first piece, so that what fails before has its own status. What fails
    later is an event in a stream.

    Args:
        pieces: JSON as a whole, or events.
        streams: Whether they are events.
        stall_timeout: Seconds that the client may leave a piece unread.
        failure: Writes what fails in the middle of a stream.
        refusal: Makes an answer of what fails before.
    """

    def __init__(
        self,
        chunks: AsyncGenerator[bytes, None],
        *,
        is_stream: bool,
        stall_timeout: float,
        format_error_event: Callable[[ApiError], bytes] = lambda error: (
            encode_event(error.body) + DONE_EVENT
        ),
        format_error: Callable[[ApiError], Response] = error_response,
    ):
        self._chunks = chunks
        self._is_stream = is_stream
        self._stall_timeout, self._format_error_event, self._format_error = (
            stall_timeout,
            format_error_event,
            format_error,
        )
        self._has_started = False
        self._sending_since: float | None = None  # in the loop's time, while a piece is on its way

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, as ASGI has it."""
        await run_while_connected(receive, self._answer_unless_stalled(scope, receive, send))

    async def _answer_unless_stalled(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, but hang up on a client that takes longer than that to read a piece.

        One timer an answer looks at how long a piece is on its way, four times in that time: a
        timeout for each piece costs a fifth of writing it.
        """
        loop = asyncio.get_running_loop()
        deadline = asyncio.timeout(None)

        def check_progress() -> None:
            nonlocal timer
            now, since = loop.time(), self._sending_since
            if since is not None and now - since >= self._stall_timeout:
                deadline.reschedule(now)
                return
            next_check = now + self._stall_timeout / 4
            timer = loop.call_at(
                next_check if since is None else since + self._stall_timeout, check_progress
            )

        timer = loop.call_soon(check_progress)
        try:
            async with deadline:
                await self._answer(scope, receive, send)
        except TimeoutError:
            if not deadline.expired():
                raise
            raise StalledClientError from None
        finally:
            timer.cancel()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self._chunks):
                async for chunk in self._chunks:
                    await self._send(send, chunk)
        except Exception as error:
            await self._fail(error, scope, receive, send)
        else:
            await self._send(send, b"", is_last=True)

    async def _send(self, send: Send, chunk: bytes, *, is_last: bool = False) -> None:
        self._sending_since = asyncio.get_running_loop().time()
        if not self._has_started:
            self._has_started = True
            await send(self._start_message(None if self._is_stream else len(chunk)))
        await send({"type": "http.response.body", "body": chunk, "more_body": not is_last})
        self._sending_since = None

    def _start_message(self, size: int | None) -> dict[str, Any]:
        content_type = (
            b"application/json" if size is not None else b"text/event-stream; charset=utf-8"
        )
        headers = [(b"content-type", content_type), (b"cache-control", b"no-store")]
        if size is not None:
            headers.append((b"content-length", b"%d" % size))
        else:
            headers.append((b"x-accel-buffering", b"no"))  # nginx, pass events on as they come
        return {"type": "http.response.start", "status": 200, "headers": headers}

    async def _fail(self, error: Exception, scope: Scope, receive: Receive, send: Send) -> None:
        api_error = to_api_error(error)
        if not self._has_started:
            await self._format_error(api_error)(scope, receive, send)
        elif self._is_stream:
            await self._send(send, self._format_error_event(api_error), is_last=True)
        else:
            raise error


class StalledClientError(Exception):
    """A client did not read what it had asked for."""


def to_api_error(error: Exception) -> ApiError:
    """The error for the client; an unforeseen one also goes to the log."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):  # a route's: the method is not one of its own
        message = f"{error.detail}: /openapi.json lists what there is"
        return ApiError(error.status_code, message, headers=error.headers)
    traceback.print_exception(error, file=sys.stderr)
    return internal_error()


async def run_while_connected(receive: Receive, work: Awaitable[None]) -> None:
    """Do the work, but drop it when the client goes."""
    work_task = asyncio.ensure_future(work)
    disconnect_task = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait({work_task, disconnect_task}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        disconnect_task.cancel()
        if not work_task.done():
            work_task.cancel()
            await asyncio.wait({work_task})
    if not work_task.cancelled():
        work_task.result()


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
