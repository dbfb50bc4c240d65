"""Connections: uvicorn's, with limits of their own for how many, and for how long they dawdle."""

import asyncio
from typing import Any

import h11
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from jpaged.serve.auth import OPEN_PATHS
from jpaged.serve.errors import not_serving
from jpaged.serve.exchange import error_answer

HEADER_TIMEOUT = 20.0
"""Seconds for a request's line and headers to arrive, from the connection or its first byte."""

NUM_SPARE = 64
"""Connections beyond the limit that still get an answer, so that whoever watches the server can."""

_SURPLUS = "jpaged_surplus"


class BoundedProtocol(H11Protocol):
    """Hangs up on who opens a connection and does not finish a request's headers in time.

    A connection between two requests is closed sooner, by uvicorn's own keep-alive timeout.

    Who comes when there are `limit_concurrency` connections is known as surplus to `SurplusGuard`;
    beyond a few of those, connections are closed at once. uvicorn itself would refuse everybody,
    health checks and those who have been there for long too, in plain text.
    """

    _deadline: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._most, self.limit_concurrency = self.limit_concurrency, None

    def connection_made(self, transport: Any) -> None:
        """The clock runs from the connection on."""
        super().connection_made(transport)
        num_surplus = 0 if self._most is None else len(self.connections) - self._most
        if num_surplus > NUM_SPARE:
            transport.abort()
            return
        if num_surplus > 0:
            self.app_state = {**self.app_state, _SURPLUS: True}
        self._await_headers()

    def data_received(self, data: bytes) -> None:
        """It stops with the end of the headers, and runs again with the next request's start."""
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._stop_clock()
        elif self._deadline is None:
            self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is waited for any more."""
        self._stop_clock()
        super().connection_lost(exc)

    def _await_headers(self) -> None:
        self._deadline = self.loop.call_later(HEADER_TIMEOUT, self.transport.close)

    def _stop_clock(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class SurplusGuard:
    """Answers on connections beyond the limit only whether the server lives, and hangs up."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on or refuse, as ASGI has it."""

        async def send_last(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
            await send(message)

        if _SURPLUS not in scope.get("state", ()):
            await self._app(scope, receive, send)
        elif scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send_last)
        else:
            error = not_serving("there are too many connections: try again later")
            await error_answer(error)(scope, receive, send_last)
