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

from jpaged.serve.errors import ApiError, failed

json_bytes = msgspec.json.Encoder().encode
"""The value as JSON."""

_TEXT_PIECE = 256 * 1024
"""Characters that are encoded in one go."""

_ARRAY_PIECE = 256
"""Items that are encoded in one go: numbers, texts of tokens, or their candidates."""

_DEEPEST = 4
"""Depth of the deepest long arrays: those of the choices' log-probabilities."""

DONE = b"data: [DONE]\n\n"
"""Ends a stream of events."""


def large_json(value: Any) -> bytes:
    """The value as JSON, for a thread: no single call holds the interpreter for long.

    Texts, arrays and what has them near its top are encoded in pieces.
    """
    return b"".join(_pieces(value, _DEEPEST))


def _pieces(value: Any, depth: int) -> Iterator[bytes]:
    if isinstance(value, str) and len(value) > _TEXT_PIECE:
        yield b'"'
        for at in range(0, len(value), _TEXT_PIECE):
            yield json_bytes(value[at : at + _TEXT_PIECE])[1:-1]
        yield b'"'
    elif isinstance(value, dict) and value and depth:
        for i, (name, item) in enumerate(value.items()):
            yield b"%b%b:" % (b"," if i else b"{", json_bytes(name))
            yield from _pieces(item, depth - 1)
        yield b"}"
    elif isinstance(value, list) and len(value) > _ARRAY_PIECE:
        for at in range(0, len(value), _ARRAY_PIECE):
            yield b"," if at else b"["
            yield json_bytes(value[at : at + _ARRAY_PIECE])[1:-1]
        yield b"]"
    elif isinstance(value, list) and value and depth:
        for i, item in enumerate(value):
            yield b"," if i else b"["
            yield from _pieces(item, depth - 1)
        yield b"]"
    else:
        yield json_bytes(value)


def event(value: Any) -> bytes:
    """The value as a server-sent event."""
    return b"data: " + json_bytes(value) + b"\n\n"


def json_answer(
    value: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """A whole answer in JSON."""
    return Response(json_bytes(value), status, headers, media_type="application/json")


def error_answer(error: ApiError) -> Response:
    """An error as an answer."""
    return json_answer(error.body, error.status, error.headers)


class Exchange(Response):
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
        pieces: AsyncGenerator[bytes, None],
        *,
        streams: bool,
        stall_timeout: float,
        failure: Callable[[ApiError], bytes] = lambda error: event(error.body) + DONE,
        refusal: Callable[[ApiError], Response] = error_answer,
    ):
        self._pieces = pieces
        self._streams = streams
        self._stall_timeout, self._failure, self._refusal = stall_timeout, failure, refusal
        self._started = False
        self._sending_since: float | None = None  # in the loop's time, while a piece is on its way

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, as ASGI has it."""
        await while_connected(receive, self._unstalled(scope, receive, send))

    async def _unstalled(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, but hang up on a client that takes longer than that to read a piece.

        One timer an answer looks at how long a piece is on its way, four times in that time: a
        timeout for each piece costs a fifth of writing it.
        """
        loop = asyncio.get_running_loop()
        patience = asyncio.timeout(None)

        def look() -> None:
            nonlocal timer
            now, since = loop.time(), self._sending_since
            if since is not None and now - since >= self._stall_timeout:
                patience.reschedule(now)
                return
            later = now + self._stall_timeout / 4
            timer = loop.call_at(later if since is None else since + self._stall_timeout, look)

        timer = loop.call_soon(look)
        try:
            async with patience:
                await self._answer(scope, receive, send)
        except TimeoutError:
            if not patience.expired():
                raise
            raise StalledClientError from None
        finally:
            timer.cancel()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self._pieces):
                async for piece in self._pieces:
                    await self._send(send, piece)
        except Exception as error:
            await self._fail(error, scope, receive, send)
        else:
            await self._send(send, b"", is_last=True)

    async def _send(self, send: Send, piece: bytes, *, is_last: bool = False) -> None:
        self._sending_since = asyncio.get_running_loop().time()
        if not self._started:
            self._started = True
            await send(self._start(None if self._streams else len(piece)))
        await send({"type": "http.response.body", "body": piece, "more_body": not is_last})
        self._sending_since = None

    def _start(self, size: int | None) -> dict[str, Any]:
        kind = b"application/json" if size is not None else b"text/event-stream; charset=utf-8"
        headers = [(b"content-type", kind), (b"cache-control", b"no-store")]
        if size is not None:
            headers.append((b"content-length", b"%d" % size))
        else:
            headers.append((b"x-accel-buffering", b"no"))  # nginx, pass events on as they come
        return {"type": "http.response.start", "status": 200, "headers": headers}

    async def _fail(self, error: Exception, scope: Scope, receive: Receive, send: Send) -> None:
        told = as_api_error(error)
        if not self._started:
            await self._refusal(told)(scope, receive, send)
        elif self._streams:
            await self._send(send, self._failure(told), is_last=True)
        else:
            raise error


class StalledClientError(Exception):
    """A client did not read what it had asked for."""


def as_api_error(error: Exception) -> ApiError:
    """The error for the client; an unforeseen one also goes to the log."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):  # a route's: the method is not one of its own
        message = f"{error.detail}: /openapi.json lists what there is"
        return ApiError(error.status_code, message, headers=error.headers)
    traceback.print_exception(error, file=sys.stderr)
    return failed()


async def while_connected(receive: Receive, work: Awaitable[None]) -> None:
    """Do the work, but drop it when the client goes."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        watching.cancel()
        if not working.done():
            working.cancel()
            await asyncio.wait({working})
    if not working.cancelled():
        working.result()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
