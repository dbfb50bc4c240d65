"""Connections: uvicorn's, with a time limit for what uvicorn would wait for for ever."""

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_TIMEOUT = 20.0
"""Seconds for a request's line and headers to arrive, from the connection or its first byte."""


class PunctualProtocol(H11Protocol):
    """Hangs up on who opens a connection and does not finish a request's headers in time.

    A connection between two requests is closed sooner, by uvicorn's own keep-alive timeout.
    """

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """The clock runs from the connection on."""
        super().connection_made(transport)
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
