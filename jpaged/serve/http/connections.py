"""Connections: uvicorn's, with bounds on their number and on how slow a client may be.

A connection is in one of these states, and each ends by itself:

- *A request comes in.* One clock runs from the connection, or from the request's first byte, to the
  end of its headers and on to the end of its body.
- *It is answered.* The client reads on, or the connection ends after `--stall-timeout`.
- *It waits for the next request*, as long as uvicorn's keep-alive lets it.
- *It lingers*: an answer is out whose request is not in, or was no HTTP. What still comes is thrown
  away for a moment, and then the connection is closed. Closed at once, it would be reset, and
  the answer could be lost before the client has read it.
"""

import asyncio
import errno
import re
import socket
from collections.abc import Callable
from typing import Any

import h11
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from jpaged.serve.errors import ApiError, unavailable_error
from jpaged.serve.http.access import UNAUTHENTICATED_PATHS
from jpaged.serve.http.exchange import encode_json, error_response
from jpaged.serve.options import Limits

HEADER_TIMEOUT_S = 20.0
"""Seconds for a request's line and headers to arrive, from the connection or its first byte.
A body has `Limits.body_timeout` more."""

LINGER_TIME_S = 2.0
"""Seconds to read on after an answer whose request is not in."""

PROBE_DELAY_S = 1.0
"""Seconds for the answer to a client that sends no more, before it is asked whether it reads."""

NUM_SPARE_CONNECTIONS = 64
"""Connections beyond the limit that still get an answer, such as health checks."""

OUT_OF_FILES_ERRNOS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
"""Errors of `accept` that last until connections are closed."""

_PROBE_INTERVAL_S = 0.1  # seconds between looks whether a half-closed client is gone
_MIN_ACCEPT_BATCH = (
    4  # connections that are accepted before those before them are looked at, at least
)
_SURPLUS_KEY = "jpaged_surplus"
_CLOSE_HEADER = (b"connection", b"close")
_ABSOLUTE_TARGET = re.compile(rb"https?://([^/?#]*)([^#]*)", re.I)
_QUOTED_BYTES = re.compile(r": (?:b|bytearray\(b)['\"]")


def make_bounded_protocol(
    limits: Limits, num_spare: int = NUM_SPARE_CONNECTIONS
) -> type["BoundedProtocol"]:
    """The protocol for uvicorn, with these limits."""
    attributes = {"limits": limits, "num_spare": num_spare}
    return type("BoundedProtocol", (BoundedProtocol,), attributes)


class BoundedProtocol(H11Protocol):
    """A connection that closes itself when its client is too slow.

    A client that comes when there are `limits.max_connections` connections is known as surplus to
    `SurplusGuard`. When there are `num_spare` of those too, the one that was silent for longest is
    closed. uvicorn itself would refuse everybody, health checks and those who have been there
    for long too, in plain text.

    Attributes:
        limits: Of which it keeps those of headers, bodies, unread answers and connections.
        num_spare: Connections beyond the limit that still get an answer.
    """

    limits = Limits()
    num_spare = NUM_SPARE_CONNECTIONS

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.conn: StrictConnection = StrictConnection(self.limits.max_header_bytes)
        # Those who may be hung up on to make room, the oldest first; one list for all connections.
        self._idle_connections: dict[BoundedProtocol, None]
        self._idle_connections = self.server_state.__dict__.setdefault("idlers", {})
        self._request_start = 0.0  # when the request began to come
        self._timed_state: Any = None  # the client's state that the clock runs for
        self._request_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._probe_timer: asyncio.TimerHandle | None = None
        self._is_lingering = self._is_half_closed = self._is_probed = False

    def connection_made(self, transport: Any) -> None:
        """The clock runs from the connection on."""
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

    def data_received(self, data: bytes) -> None:
        """The clock follows what the client has sent."""
        if self._is_lingering:
            return
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE and not self._is_lingering:
            self._idle_connections.pop(self, None)
        self._update_request_timer()

    def eof_received(self) -> bool:
        """Whether the connection stays: a client may end its half, and wait for its answer.

        One that is gone looks the same until it is sent something.
        """
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

    def on_response_complete(self) -> None:
        """What a half-closed client has asked before is answered too, and then it is over."""
        super().on_response_complete()
        if self._is_half_closed and self.cycle.response_complete:
            self.transport.close()
        self._update_request_timer()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP in OpenAI's shape, where that is still possible, and close."""
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

    def pause_writing(self) -> None:
        """Much is unread: from now on the client has to read."""
        super().pause_writing()
        self._limit_stall()

    def resume_writing(self) -> None:
        """It reads."""
        super().resume_writing()
        if not self._raw_transport.is_closing():
            self._stall_timer = _cancel_timer(self._stall_timer)

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is waited for any more."""
        self._idle_connections.pop(self, None)
        for timer in (self._request_timer, self._stall_timer, self._probe_timer):
            _cancel_timer(timer)
        super().connection_lost(exc)

    def _update_request_timer(self) -> None:
        """One clock a request, which goes on from its headers to its body."""
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
        """Close; who has sent something that is not read yet may read its answer before."""
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
            except OSError:  # the client has reset the connection just now
                self._raw_transport.abort()
        else:
            self._raw_transport.close()
            self._limit_stall()

    def _evict(self) -> None:
        self._idle_connections.pop(self, None)
        self._raw_transport.abort()

    def _limit_stall(self, num_unread_before: float = float("inf")) -> None:
        """Hang up on a client that reads nothing of what is left for `--stall-timeout`."""
        self._stall_timer = _cancel_timer(self._stall_timer)
        num_unread = self._raw_transport.get_write_buffer_size()
        if num_unread >= num_unread_before:
            self._raw_transport.abort()
        elif num_unread:
            timeout = self.limits.stall_timeout
            self._stall_timer = self.loop.call_later(timeout, self._limit_stall, num_unread)

    def _probe(self) -> None:
        """Find out whether a client that sends no more is still there.

        Where it has closed its socket, the first thing it is sent comes back as a reset. Before the
        answer that is an interim response, which every client of HTTP/1.1 passes over; one
        of HTTP/1.0 may not get any, and counts as gone.
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
    """h11's parser, without what it lets pass.

    - Headers that come in one piece are bounded as those that come in many.
    - A request with both Content-Length and Transfer-Encoding, whose end proxies may see in
      different places, is refused.
    - Absolute targets, as proxies get them, become paths, and their authority the Host.
    - An answer to a request whose body is not in says that the connection will be closed.

    Args:
        max_header_bytes: Most bytes of a request's line and headers together.
    """

    def __init__(self, max_header_bytes: int):
        super().__init__(h11.SERVER, max_header_bytes)
        self._max_header_bytes = max_header_bytes
        self._protocol_error: h11.RemoteProtocolError | None = None

    def next_event(self) -> Any:
        """As h11's."""
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

    def send(self, event: h11.Event) -> Any:
        """As h11's."""
        if isinstance(event, h11.Response) and self.their_state is h11.SEND_BODY:
            headers = [pair for pair in event.headers if pair != _CLOSE_HEADER]
            status, reason = event.status_code, event.reason
            event = h11.Response(
                status_code=status, headers=[*headers, _CLOSE_HEADER], reason=reason
            )
        return super().send(event)

    def client_error(self) -> ApiError:
        """What is wrong with what came, for the client."""
        protocol_error = self._protocol_error or h11.RemoteProtocolError("it is malformed")
        status = protocol_error.error_status_hint
        if status == 431:
            message = (
                f"the request's line and headers are larger than {self._max_header_bytes} bytes"
            )
            return ApiError(status, f"{message}: send fewer or shorter ones")
        why = _QUOTED_BYTES.split(str(protocol_error))[0]  # without the client's own bytes
        return ApiError(status, f"the request cannot be read as HTTP/1.1: {why}")

    def _check(self, event: h11.Request, size: int) -> None:
        names = {name for name, _ in event.headers}
        if size > self._max_header_bytes:
            raise h11.RemoteProtocolError("headers too large", error_status_hint=431)
        if {b"content-length", b"transfer-encoding"} <= names:
            why = "both Content-Length and Transfer-Encoding are given, and only one can be meant"
            raise h11.RemoteProtocolError(why)


class SurplusGuard:
    """Refuse requests on connections beyond the limit, except health checks, and close them.

    Args:
        app: Answers health checks, and all requests on other connections.
        refusal: Return the response for an error at a path.
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
        """Pass on or refuse, as ASGI has it."""

        async def send_and_close(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], _CLOSE_HEADER]}
            await send(message)

        if _SURPLUS_KEY not in scope.get("state", ()):
            await self._app(scope, receive, send)
        elif scope["path"] in UNAUTHENTICATED_PATHS:
            await self._app(scope, receive, send_and_close)
        else:
            error = unavailable_error("there are too many connections: try again later")
            await self._format_error(scope["path"], error)(scope, receive, send_and_close)


class Listener(socket.socket):
    """A TCP socket to listen with, whose `accept` keeps asyncio from running out of files.

    asyncio accepts all who wait before it looks at any of them; here it gets a few at a time, so
    that those who are too many are hung up on in between. When there are no files all the same, it
    leaves new connections waiting for a second, but only after as many more attempts
    as its backlog is long, each of which it logs; here after the first.

    Args:
        family: `AF_INET` or `AF_INET6`.

    Attributes:
        at_a_time: How many those are.
    """

    def __init__(self, family: int):
        # Said to be TCP: of other sockets asyncio does not set TCP_NODELAY, and the body of an
        # answer would wait for the client to acknowledge its headers, 40 ms.
        super().__init__(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self.accept_batch = self._num_accepts_left = _MIN_ACCEPT_BATCH

    def accept(self) -> tuple[socket.socket, Any]:
        """As sockets do, but now and then it reports that no connection waits."""
        if not self._num_accepts_left:
            self._num_accepts_left = self.accept_batch
            raise BlockingIOError
        self._num_accepts_left -= 1
        try:
            return super().accept()
        except OSError as error:
            self._num_accepts_left = 0 if error.errno in OUT_OF_FILES_ERRNOS else self.accept_batch
            raise


class _TransportProxy:
    """A transport whose `close` the protocol decides."""

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
    """The request with a path for a target that was absolute."""
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
