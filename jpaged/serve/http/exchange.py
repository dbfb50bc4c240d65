"""Responses: JSON, server-sent events, and streaming from a generator to a connected client."""

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
"""Encode a value as JSON."""

_STRING_CHUNK_SIZE = 256 * 1024
"""Number of characters of a long string that are encoded per call."""

_ARRAY_CHUNK_SIZE = 256
"""Number of array items that are encoded per call. Items are small, such as token ids."""

_MAX_ARRAY_DEPTH = 4
"""Maximum depth at which long arrays are split; log-probabilities of choices are deepest."""

DONE_EVENT = b"data: [DONE]\n\n"
"""Last event of a stream in OpenAI's format."""


def encode_large_json(value: Any) -> bytes:
    """Encode a value as JSON in a thread, without holding the interpreter lock for long.

    Long strings and arrays, down to a depth of `_MAX_ARRAY_DEPTH`, are encoded in chunks.
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
    """Encode a value as a server-sent event."""
    return b"data: " + encode_json(value) + b"\n\n"


def json_response(
    value: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Return a response with a value as its JSON body."""
    return Response(encode_json(value), status, headers, media_type="application/json")


def error_response(error: ApiError) -> Response:
    """Return the response for an error, in OpenAI's format."""
    return json_response(error.body, error.status, error.headers)


class GeneratorResponse(Response):
    """Response that sends what an async generator yields.

    The response starts when the generator yields the first chunk. An earlier error becomes an error
    response with its HTTP status. A later error becomes an event of the stream. The generator is
    closed when the response ends or the client disconnects.

    Args:
        chunks: Generator of the body: a whole JSON text, or server-sent events.
        is_stream: Whether the chunks are server-sent events.
        stall_timeout: Maximum number of seconds that the client may leave a chunk unread.
        format_error_event: Returns the event for an error after the first chunk.
        format_error: Returns the response for an error before the first chunk.
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
        # Event-loop time at which the current chunk was sent.
        self._sending_since: float | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response to an ASGI request, until the client disconnects."""
        await run_while_connected(receive, self._answer_unless_stalled(scope, receive, send))

    async def _answer_unless_stalled(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response; raise StalledClientError if a chunk stays unread for too long.

        One timer per response checks the current chunk, at least four times per `stall_timeout`.
        With a separate timeout for each chunk, sending would be a fifth slower.
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
            headers.append((b"x-accel-buffering", b"no"))  # nginx passes events on immediately
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
    """A client left a chunk unread for longer than the stall timeout."""


def to_api_error(error: Exception) -> ApiError:
    """Return the error for the client, and log the traceback of an unexpected exception."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):  # the route does not support the request's method
        message = f"{error.detail}: /openapi.json lists the methods of each path"
        return ApiError(error.status_code, message, headers=error.headers)
    traceback.print_exception(error, file=sys.stderr)
    return internal_error()


async def run_while_connected(receive: Receive, work: Awaitable[None]) -> None:
    """Await `work`, and cancel it if the client disconnects."""
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
