"""HTTP connections: uvicorn's protocol with limits on their number and on slow clients.

A connection is in one of four states, and each state has a time limit:

- *Receiving a request.* One timer starts with the connection, or with the request's first byte. It
  limits the arrival of the headers, and then the arrival of the body.
- *Sending a response.* The connection is aborted if the client reads nothing for `--stall-timeout`.
- *Waiting for the next request.* uvicorn's keep-alive timeout limits this state.
- *Lingering.* The server has sent its response before the whole request arrived, or after invalid
  HTTP. The connection discards what it receives for `LINGER_TIME_S`, and then closes. Closing it
  immediately would reset it, and the client could lose the response.
"""

import asyncio
import errno
import re
import socket
from collections.abc import Callable
from typing import Any

import h11
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from typing_extensions import override
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from jpaged.serve.errors import ApiError, unavailable_error
from jpaged.serve.http.access import UNAUTHENTICATED_PATHS
from jpaged.serve.http.exchange import encode_json, error_response
from jpaged.serve.options import Limits

HEADER_TIMEOUT_S = 20.0
"""Seconds for a request's line and headers to arrive; a body has `Limits.body_timeout` more."""

LINGER_TIME_S = 2.0
"""Seconds to keep reading after a response that was sent before its request was complete."""

PROBE_DELAY_S = 1.0
"""Seconds that a half-closed client waits for its response before the server probes it."""

NUM_SPARE_CONNECTIONS = 64
"""Number of connections above the limit that still get a response, such as health checks."""

OUT_OF_FILES_ERRNOS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
"""Errors of `accept` that persist until connections are closed."""

_PROBE_INTERVAL_S = 0.1
"""Seconds between two probes of a half-closed client."""

_MIN_ACCEPT_BATCH = 4
"""Initial `Listener.accept_batch`, for servers with few file descriptors."""

_SURPLUS_KEY = "jpaged_surplus"
_CLOSE_HEADER = (b"connection", b"close")
_ABSOLUTE_TARGET = re.compile(rb"https?://([^/?#]*)([^#]*)", re.I)
_QUOTED_BYTES = re.compile(r": (?:b|bytearray\(b)['\"]")


def make_bounded_protocol(
    limits: Limits, num_spare: int = NUM_SPARE_CONNECTIONS
) -> type["BoundedProtocol"]:
    """Return a subclass of `BoundedProtocol` that has the given limits, for uvicorn."""
    attributes = {"limits": limits, "num_spare": num_spare}
    return type("BoundedProtocol", (BoundedProtocol,), attributes)


class BoundedProtocol(H11Protocol):
    """HTTP connection that limits slow clients and the number of connections.

    Each connection beyond `limits.max_connections` is marked as surplus, and `SurplusGuard` refuses
    its requests. If more than `num_spare` connections are surplus, the oldest idle or lingering
    connection is closed. uvicorn's own limit would refuse all requests in plain text, including
    health checks and requests on older connections.

    Attributes:
        limits: Limits of the server.
        num_spare: Number of connections above the limit that still get a response.
    """

    limits = Limits()
    num_spare = NUM_SPARE_CONNECTIONS

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.conn: StrictConnection = StrictConnection(self.limits.max_header_bytes)
        # Connections that may be closed to make room, oldest first: connections without a request,
        # and connections that discard the rest of a request. All connections share this dict.
        self._idle_connections: dict[BoundedProtocol, None]
        self._idle_connections = self.server_state.__dict__.setdefault("idlers", {})
        self._request_start = 0.0  # event-loop time at which the request began
        self._timed_state: Any = None  # h11 state that `_request_timer` limits
        self._request_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._probe_timer: asyncio.TimerHandle | None = None
        self._is_lingering = self._is_half_closed = self._is_probed = False

    @override
    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._raw_transport: asyncio.Transport = transport
        self.transport: Any = _TransportProxy(
            transport, self._close_or_linger, lambda: self._is_lingering
        )
        num_surplus = len(self.connections) - self.limits.max_connections
        if num_surplus > self.num_spare:
            if not self._idle_connections:
                transport.abort()
                return
            next(iter(self._idle_connections))._evict()
        if num_surplus > 0:
            self.app_state = {**self.app_state, _SURPLUS_KEY: True}
            self._idle_connections[self] = None
        self._update_request_timer()

    @override
    def data_received(self, data: bytes) -> None:
        if self._is_lingering:
            return
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE and not self._is_lingering:
            self._idle_connections.pop(self, None)
        self._update_request_timer()

    @override
    def eof_received(self) -> bool:
        # A client may close the sending half of its connection and still wait for the response.
        # Until the server sends data, this looks the same as a closed connection: see `_probe`.
        is_response_pending = self.cycle is not None and not self.cycle.response_complete
        if (
            self._is_lingering
            or not is_response_pending
            or self.conn.their_state in (h11.SEND_BODY, h11.ERROR)
        ):
            self._limit_stall()
            return False
        self._is_half_closed = True
        self._probe_timer = self.loop.call_later(PROBE_DELAY_S, self._probe)
        return True

    @override
    def on_response_complete(self) -> None:
        super().on_response_complete()
        # Pipelined requests of a half-closed client are answered before the connection closes.
        if self._is_half_closed and self.cycle.response_complete:
            self.transport.close()
        self._update_request_timer()

    def send_400_response(self, msg: str) -> None:
        """Answer invalid HTTP with an error in OpenAI's format, if possible, and close."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            error = self.conn.client_error()
            body = encode_json(error.body)
            headers = [
                *self.server_state.default_headers,
                (b"content-type", b"application/json"),
                (b"content-length", b"%d" % len(body)),
                _CLOSE_HEADER,
            ]
            status, reason = error.status, STATUS_PHRASES[error.status]
            start = h11.Response(status_code=status, headers=headers, reason=reason)
            for event in (start, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event))
        self.transport.close()

    @override
    def pause_writing(self) -> None:
        super().pause_writing()
        self._limit_stall()

    @override
    def resume_writing(self) -> None:
        super().resume_writing()
        if not self._raw_transport.is_closing():
            self._stall_timer = _cancel_timer(self._stall_timer)

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._idle_connections.pop(self, None)
        for timer in (self._request_timer, self._stall_timer, self._probe_timer):
            _cancel_timer(timer)
        super().connection_lost(exc)

    def _update_request_timer(self) -> None:
        """Start, extend or cancel the timer that aborts the connection of a slow client.

        The headers of a request must arrive within `HEADER_TIMEOUT_S`. Once the headers have
        arrived, extend the timer by `limits.body_timeout` for the body. Once the whole request has
        arrived, cancel the timer.
        """
        state = self.conn.their_state
        is_receiving = state is h11.SEND_BODY or (
            state is h11.IDLE and (self.cycle is None or bool(self.conn.trailing_data[0]))
        )
        timed_state = state if is_receiving and not self._is_lingering else None
        if timed_state is self._timed_state:
            return
        if self._timed_state is None:
            self._request_start = self.loop.time()
        self._timed_state, self._request_timer = timed_state, _cancel_timer(self._request_timer)
        if timed_state is not None:
            timeout = HEADER_TIMEOUT_S + (self.limits.body_timeout if state is h11.SEND_BODY else 0)
            self._request_timer = self.loop.call_at(
                self._request_start + timeout, self._raw_transport.abort
            )

    def _close_or_linger(self) -> None:
        """Close the connection. If the client is still sending, keep reading for a while first."""
        if self._is_lingering or self._raw_transport.is_closing():
            return
        if (
            self.conn.their_state in (h11.SEND_BODY, h11.ERROR)
            and self._raw_transport.can_write_eof()
        ):
            self._is_lingering = True
            self._idle_connections[self] = None
            self._update_request_timer()
            self._request_timer = self.loop.call_later(LINGER_TIME_S, self._raw_transport.abort)
            self.flow.resume_reading()
            try:
                self._raw_transport.write_eof()
            except OSError:  # the client has reset the connection in the meantime
                self._raw_transport.abort()
        else:
            self._raw_transport.close()
            self._limit_stall()

    def _evict(self) -> None:
        self._idle_connections.pop(self, None)
        self._raw_transport.abort()

    def _limit_stall(self, num_unread_before: float = float("inf")) -> None:
        """Abort the connection if the client reads no response data for `--stall-timeout`."""
        self._stall_timer = _cancel_timer(self._stall_timer)
        num_unread = self._raw_transport.get_write_buffer_size()
        if num_unread >= num_unread_before:
            self._raw_transport.abort()
        elif num_unread:
            timeout = self.limits.stall_timeout
            self._stall_timer = self.loop.call_later(timeout, self._limit_stall, num_unread)

    def _probe(self) -> None:
        """Abort a half-closed connection if the client has closed its socket completely.

        A closed socket answers data with a reset, so send some data. If no response has started,
        the probe is an interim response (status 102), which clients of HTTP/1.1 ignore. Clients of
        HTTP/1.0 must not get interim responses, so their connections are aborted.
        """
        can_probe = (self.conn.their_http_version or b"") >= b"1.1"
        is_probe_done = self._is_probed or self.conn.our_state is not h11.SEND_RESPONSE
        raw_socket = self._raw_transport.get_extra_info("socket")
        if raw_socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) or not (
            is_probe_done or can_probe
        ):
            self._raw_transport.abort()
            return
        if not is_probe_done:
            self._is_probed = True
            interim = h11.InformationalResponse(status_code=102, headers=[], reason=b"Processing")
            self.transport.write(self.conn.send(interim))
        self._probe_timer = self.loop.call_later(_PROBE_INTERVAL_S, self._probe)


class StrictConnection(h11.Connection):
    """h11's connection with stricter checks of requests.

    - The size limit of headers also applies if they arrive in one segment.
    - A request with both Content-Length and Transfer-Encoding is refused, because proxies may
      disagree about its end.
    - An absolute target, as sent to proxies, becomes a path, and its authority becomes the Host.
    - A response sent before its request is complete has the header `Connection: close`.

    Args:
        max_header_bytes: Maximum total size of a request's line and headers.
    """

    def __init__(self, max_header_bytes: int):
        super().__init__(h11.SERVER, max_header_bytes)
        self._max_header_bytes = max_header_bytes
        self._protocol_error: h11.RemoteProtocolError | None = None

    @override
    def next_event(self) -> Any:
        try:
            num_before = len(self.trailing_data[0]) if self.their_state is h11.IDLE else 0
            event = super().next_event()
            if isinstance(event, h11.Request):
                self._check(event, num_before - len(self.trailing_data[0]))
                return _to_origin_form(event)
        except h11.RemoteProtocolError as error:
            self._protocol_error = error
            raise
        return event

    @override
    def send(self, event: h11.Event) -> Any:
        if isinstance(event, h11.Response) and self.their_state is h11.SEND_BODY:
            headers = [pair for pair in event.headers if pair != _CLOSE_HEADER]
            status, reason = event.status_code, event.reason
            event = h11.Response(
                status_code=status, headers=[*headers, _CLOSE_HEADER], reason=reason
            )
        return super().send(event)

    def client_error(self) -> ApiError:
        """Return an error that explains to the client why its request is not valid HTTP."""
        protocol_error = self._protocol_error or h11.RemoteProtocolError("it is malformed")
        status = protocol_error.error_status_hint
        if status == 431:
            message = f"the request line and headers are larger than {self._max_header_bytes} bytes"
            return ApiError(status, f"{message}: send fewer or shorter headers")
        why = _QUOTED_BYTES.split(str(protocol_error))[0]  # leave out quoted bytes
        return ApiError(status, f"the request cannot be read as HTTP/1.1: {why}")

    def _check(self, event: h11.Request, size: int) -> None:
        names = {name for name, _ in event.headers}
        if size > self._max_header_bytes:
            raise h11.RemoteProtocolError("headers too large", error_status_hint=431)
        if {b"content-length", b"transfer-encoding"} <= names:
            why = "Content-Length and Transfer-Encoding are both present: send only one"
            raise h11.RemoteProtocolError(why)


class SurplusGuard:
    """ASGI middleware that refuses requests on connections above the limit.

    Health checks on these surplus connections are answered. After a response, a surplus connection
    is closed.

    Args:
        app: Application that answers the other requests.
        format_error: Function that returns the response for an error, in the format of the API at a
            path.
    """

    def __init__(
        self,
        app: ASGIApp,
        format_error: Callable[[str, ApiError], ASGIApp] = lambda path, error: error_response(
            error
        ),
    ):
        self._app, self._format_error = app, format_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass an ASGI request to the application, or refuse it."""

        async def send_and_close(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], _CLOSE_HEADER]}
            await send(message)

        if _SURPLUS_KEY not in scope.get("state", ()):
            await self._app(scope, receive, send)
        elif scope["path"] in UNAUTHENTICATED_PATHS:
            await self._app(scope, receive, send_and_close)
        else:
            error = unavailable_error("the server has too many connections: try again later")
            await self._format_error(scope["path"], error)(scope, receive, send_and_close)


class Listener(socket.socket):
    """Listening TCP socket that keeps asyncio from running out of file descriptors.

    asyncio accepts all waiting connections in one batch, before it handles the first connection.
    This socket limits the size of a batch. So the server can close surplus connections between two
    batches.

    If `accept` fails because no file descriptor is free, asyncio accepts nothing for one second.
    Before this pause, asyncio calls `accept` up to `backlog` times, and logs each failure. This
    socket ends the batch after the first failure.

    Args:
        family: `AF_INET` or `AF_INET6`.

    Attributes:
        accept_batch: Maximum number of connections that asyncio accepts in one batch.
    """

    def __init__(self, family: int):
        # Pass IPPROTO_TCP, because asyncio sets TCP_NODELAY only if the protocol number is
        # explicit. Without TCP_NODELAY, a response body is delayed by 40 ms until the client
        # acknowledges the headers.
        super().__init__(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self.accept_batch = self._num_accepts_left = _MIN_ACCEPT_BATCH

    @override
    def accept(self) -> tuple[socket.socket, Any]:
        if not self._num_accepts_left:
            self._num_accepts_left = self.accept_batch
            # BlockingIOError tells asyncio that no connection is waiting. So asyncio ends the
            # batch of accepted connections.
            raise BlockingIOError
        self._num_accepts_left -= 1
        try:
            return super().accept()
        except OSError as error:
            self._num_accepts_left = 0 if error.errno in OUT_OF_FILES_ERRNOS else self.accept_batch
            raise


class _TransportProxy:
    """Transport whose method `close` calls a function of the protocol instead of closing."""

    def __init__(
        self,
        transport: asyncio.Transport,
        close: Callable[[], None],
        is_lingering: Callable[[], bool],
    ):
        self._transport, self._is_lingering = transport, is_lingering
        self.close = close

    def is_closing(self) -> bool:
        return self._is_lingering() or self._transport.is_closing()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def _to_origin_form(event: h11.Request) -> h11.Request:
    """Return the request with a path and a Host header instead of an absolute target."""
    found = _ABSOLUTE_TARGET.fullmatch(event.target)
    if found is None:
        return event
    authority, path = found.groups()
    headers = [(name, value) for name, value in event.headers if name != b"host"]
    return h11.Request(
        method=event.method,
        target=path if path.startswith(b"/") else b"/" + path,
        headers=[(b"host", authority), *headers],
        http_version=event.http_version,
    )


def _cancel_timer(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
