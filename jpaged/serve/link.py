"""The engine's end of the socket: never waits for the other side to read."""

import select
import socket

from jpaged.serve.frames import HEADER, MAX_FRAME, Command, Report, command_of, frame_of

_MAX_CHUNKS = 8
"""Of a MiB at most, read in one go."""


class Link:
    """Sends reports and receives commands over a stream socket.

    Args:
        sock: A connected stream socket; owned by the link from now on.
    """

    def __init__(self, sock: socket.socket):
        sock.setblocking(False)
        self._sock = sock
        self._incoming = bytearray()
        self._outgoing = bytearray()

    @property
    def is_clear(self) -> bool:
        """Whether all that was sent so far is on its way: the other side keeps up."""
        return not self._outgoing

    def send(self, report: Report) -> None:
        """Send it as soon as the other side takes it."""
        self._outgoing += frame_of(report)
        self._flush()

    def receive(self, timeout: float) -> Command | None:
        """The next command; waits so many seconds at most for it.

        Raises:
            EOFError: the other side is gone.
        """
        body = self._take_body()
        if body is None:
            writing = [self._sock] if self._outgoing else []
            readable, writable, _ = select.select([self._sock], writing, [], timeout)
            if writable:
                self._flush()
            if readable:
                self._fill()
            body = self._take_body()
        return None if body is None else command_of(body)

    def close(self) -> None:
        """Say what can be said at once, and hang up."""
        self._flush()
        self._sock.close()

    def _flush(self) -> None:
        try:
            while self._outgoing:
                del self._outgoing[: self._sock.send(self._outgoing)]
        except BlockingIOError:
            pass
        except OSError:  # nobody listens; `receive` will find out
            self._outgoing.clear()

    def _fill(self) -> None:
        """Take in what has come, but not all of much: steps wait meanwhile."""
        try:
            for _ in range(_MAX_CHUNKS):
                chunk = self._sock.recv(1 << 20)
                if not chunk:
                    raise EOFError("the other side is gone")
                self._incoming += chunk
        except BlockingIOError:
            pass
        except ConnectionError as error:
            raise EOFError("the other side is gone") from error

    def _take_body(self) -> bytes | None:
        """Of the first frame, once all of it has come."""
        data, start = self._incoming, HEADER.size
        if len(data) < start:
            return None
        (size,) = HEADER.unpack_from(data)
        if size > MAX_FRAME:
            raise EOFError(f"a frame of {size} bytes: the other side is not jpaged")
        if len(data) < start + size:
            return None
        body = bytes(data[start : start + size])
        del data[: start + size]
        return body
