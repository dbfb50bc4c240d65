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

from jpaged.serve.errors import ApiError, not_serving
from jpaged.serve.http.access import OPEN_PATHS
from jpaged.serve.http.exchange import error_answer, json_bytes
from jpaged.serve.options import Limits

HEADER_TIMEOUT = 20.0
"""Seconds for a request's line and headers to arrive, from the connection or its first byte.
A body has `Limits.body_timeout` more."""

LINGER_TIME = 2.0
"""Seconds to read on after an answer whose request is not in."""

HALF_CLOSED_TIME = 1.0
"""Seconds for the answer to a client that sends no more, before it is asked whether it reads."""

NUM_SPARE = 64
"""Connections beyond the limit that still get an answer, such as health checks."""

OUT_OF_FILES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
"""Errors of `accept` that last until connections are closed."""

_LOOK_AGAIN = 0.1  # seconds between looks whether a half-closed client is gone
_AT_A_TIME = 4  # connections that are accepted before those before them are looked at, at least
_SURPLUS = "jpaged_surplus"
_CLOSE = (b"connection", b"close")
_ABSOLUTE = re.compile(rb"https?://([^/?#]*)([^#]*)", re.I)
_QUOTED = re.compile(r": (?:b|bytearray\(b)['\"]")


def bounded_by(limits: Limits, num_spare: int = NUM_SPARE) -> type["BoundedProtocol"]:
    """The protocol for uvicorn, with these limits."""
    own = {"limits": limits, "num_spare": num_spare}
    return type("BoundedProtocol", (BoundedProtocol,), own)


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
    num_spare = NUM_SPARE

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.conn: StrictConnection = StrictConnection(self.limits.max_header_bytes)
        # Those who may be hung up on to make room, the oldest first; one list for all connections.
        self._idlers: dict[BoundedProtocol, None]
        self._idlers = self.server_state.__dict__.setdefault("idlers", {})
        self._since = 0.0  # when the request began to come
        self._awaited: Any = None  # the client's state that the clock runs for
        self._clock: asyncio.TimerHandle | None = None
        self._reader_clock: asyncio.TimerHandle | None = None
        self._probe_clock: asyncio.TimerHandle | None = None
        self._lingers = self._is_half_closed = self._is_probed = False

    def connection_made(self, transport: Any) -> None:
        """The clock runs from the connection on."""
        super().connection_made(transport)
        self._socket: asyncio.Transport = transport
        self.transport: Any = _Hold(transport, self._hang_up, lambda: self._lingers)
        num_surplus = len(self.connections) - self.limits.max_connections
        if num_surplus > self.num_spare:
            if not self._idlers:
                transport.abort()
                return
            next(iter(self._idlers))._make_room()
        if num_surplus > 0:
            self.app_state = {**self.app_state, _SURPLUS: True}
            self._idlers[self] = None
        self._set_clock()

    def data_received(self, data: bytes) -> None:
        """The clock follows what the client has sent."""
        if self._lingers:
            return
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE and not self._lingers:
            self._idlers.pop(self, None)
        self._set_clock()

    def eof_received(self) -> bool:
        """Whether the connection stays: a client may end its half, and wait for its answer.

        One that is gone looks the same until it is sent something.
        """
        waits = self.cycle is not None and not self.cycle.response_complete
        if self._lingers or not waits or self.conn.their_state in (h11.SEND_BODY, h11.ERROR):
            self._await_reader()
            return False
        self._is_half_closed = True
        self._probe_clock = self.loop.call_later(HALF_CLOSED_TIME, self._probe)
        return True

    def on_response_complete(self) -> None:
        """What a half-closed client has asked before is answered too, and then it is over."""
        super().on_response_complete()
        if self._is_half_closed and self.cycle.response_complete:
            self.transport.close()
        self._set_clock()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP in OpenAI's shape, where that is still possible, and close."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            error = self.conn.why_refused()
            body = json_bytes(error.body)
            headers = [
                *self.server_state.default_headers,
                (b"content-type", b"application/json"),
                (b"content-length", b"%d" % len(body)),
                _CLOSE,
            ]
            status, reason = error.status, STATUS_PHRASES[error.status]
            start = h11.Response(status_code=status, headers=headers, reason=reason)
            for event in (start, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event))
        self.transport.close()

    def pause_writing(self) -> None:
        """Much is unread: from now on the client has to read."""
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        """It reads."""
        super().resume_writing()
        if not self._socket.is_closing():
            self._reader_clock = _stop(self._reader_clock)

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is waited for any more."""
        self._idlers.pop(self, None)
        for clock in (self._clock, self._reader_clock, self._probe_clock):
            _stop(clock)
        super().connection_lost(exc)

    def _set_clock(self) -> None:
        """One clock a request, which goes on from its headers to its body."""
        state = self.conn.their_state
        comes = state is h11.SEND_BODY or (
            state is h11.IDLE and (self.cycle is None or bool(self.conn.trailing_data[0]))
        )
        awaited = state if comes and not self._lingers else None
        if awaited is self._awaited:
            return
        if self._awaited is None:
            self._since = self.loop.time()
        self._awaited, self._clock = awaited, _stop(self._clock)
        if awaited is not None:
            span = HEADER_TIMEOUT + (self.limits.body_timeout if state is h11.SEND_BODY else 0)
            self._clock = self.loop.call_at(self._since + span, self._socket.abort)

    def _hang_up(self) -> None:
        """Close; who has sent something that is not read yet may read its answer before."""
        if self._lingers or self._socket.is_closing():
            return
        if self.conn.their_state in (h11.SEND_BODY, h11.ERROR) and self._socket.can_write_eof():
            self._lingers = True
            self._idlers[self] = None
            self._set_clock()
            self._clock = self.loop.call_later(LINGER_TIME, self._socket.abort)
            self.flow.resume_reading()
            try:
                self._socket.write_eof()
            except OSError:  # the client has reset the connection just now
                self._socket.abort()
        else:
            self._socket.close()
            self._await_reader()

    def _make_room(self) -> None:
        self._idlers.pop(self, None)
        self._socket.abort()

    def _await_reader(self, before: float = float("inf")) -> None:
        """Hang up on a client that reads nothing of what is left for `--stall-timeout`."""
        self._reader_clock = _stop(self._reader_clock)
        unread = self._socket.get_write_buffer_size()
        if unread >= before:
            self._socket.abort()
        elif unread:
            wait = self.limits.stall_timeout
            self._reader_clock = self.loop.call_later(wait, self._await_reader, unread)

    def _probe(self) -> None:
        """Find out whether a client that sends no more is still there.

        Where it has closed its socket, the first thing it is sent comes back as a reset. Before the
        answer that is an interim response, which every client of HTTP/1.1 passes over; one
        of HTTP/1.0 may not get any, and counts as gone.
        """
        may_ask = (self.conn.their_http_version or b"") >= b"1.1"
        is_asked = self._is_probed or self.conn.our_state is not h11.SEND_RESPONSE
        own = self._socket.get_extra_info("socket")
        if own.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) or not (is_asked or may_ask):
            self._socket.abort()
            return
        if not is_asked:
            self._is_probed = True
            interim = h11.InformationalResponse(status_code=102, headers=[], reason=b"Processing")
            self.transport.write(self.conn.send(interim))
        self._probe_clock = self.loop.call_later(_LOOK_AGAIN, self._probe)


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
        self._fault: h11.RemoteProtocolError | None = None

    def next_event(self) -> Any:
        """As h11's."""
        try:
            num_before = len(self.trailing_data[0]) if self.their_state is h11.IDLE else 0
            event = super().next_event()
            if isinstance(event, h11.Request):
                self._check(event, num_before - len(self.trailing_data[0]))
                return _with_path(event)
        except h11.RemoteProtocolError as error:
            self._fault = error
            raise
        return event

    def send(self, event: h11.Event) -> Any:
        """As h11's."""
        if isinstance(event, h11.Response) and self.their_state is h11.SEND_BODY:
            headers = [pair for pair in event.headers if pair != _CLOSE]
            status, reason = event.status_code, event.reason
            event = h11.Response(status_code=status, headers=[*headers, _CLOSE], reason=reason)
        return super().send(event)

    def why_refused(self) -> ApiError:
        """What is wrong with what came, for the client."""
        fault = self._fault or h11.RemoteProtocolError("it is malformed")
        status = fault.error_status_hint
        if status == 431:
            message = (
                f"the request's line and headers are larger than {self._max_header_bytes} bytes"
            )
            return ApiError(status, f"{message}: send fewer or shorter ones")
        why = _QUOTED.split(str(fault))[0]  # without the client's own bytes
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
        refusal: Callable[[str, ApiError], ASGIApp] = lambda path, error: error_answer(error),
    ):
        self._app, self._refusal = app, refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on or refuse, as ASGI has it."""

        async def send_last(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], _CLOSE]}
            await send(message)

        if _SURPLUS not in scope.get("state", ()):
            await self._app(scope, receive, send)
        elif scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send_last)
        else:
            error = not_serving("there are too many connections: try again later")
            await self._refusal(scope["path"], error)(scope, receive, send_last)


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
        self.at_a_time = self._num_left = _AT_A_TIME

    def accept(self) -> tuple[socket.socket, Any]:
        """As sockets do, but now and then it reports that no connection waits."""
        if not self._num_left:
            self._num_left = self.at_a_time
            raise BlockingIOError
        self._num_left -= 1
        try:
            return super().accept()
        except OSError as error:
            self._num_left = 0 if error.errno in OUT_OF_FILES else self.at_a_time
            raise


class _Hold:
    """A transport whose `close` the protocol decides."""

    def __init__(
        self, transport: asyncio.Transport, close: Callable[[], None], lingers: Callable[[], bool]
    ):
        self._transport, self._lingers = transport, lingers
        self.close = close

    def is_closing(self) -> bool:
        return self._lingers() or self._transport.is_closing()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def _with_path(event: h11.Request) -> h11.Request:
    """The request with a path for a target that was absolute."""
    found = _ABSOLUTE.fullmatch(event.target)
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


def _stop(clock: asyncio.TimerHandle | None) -> None:
    if clock is not None:
        clock.cancel()
