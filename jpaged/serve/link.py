"""The engine's end of the socket: never waits for the other side to read."""

import select
import socket

from jpaged.serve.frames import HEADER, MAX_FRAME, Command, Report, command_of, frame_of


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

    def receive(self, timeout: float) -> list[Command]:
        """The commands that have come; waits so many seconds at most for one.

        Raises:
            EOFError: the other side is gone.
        """
        writing = [self._sock] if self._outgoing else []
        readable, writable, _ = select.select([self._sock], writing, [], timeout)
        if writable:
            self._flush()
        if readable:
            self._fill()
        return [command_of(body) for body in self._take_bodies()]

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
        try:
            while chunk := self._sock.recv(1 << 20):
                self._incoming += chunk
            raise EOFError("the other side is gone")
        except BlockingIOError:
            pass
        except ConnectionError as error:
            raise EOFError("the other side is gone") from error

    def _take_bodies(self) -> list[bytes]:
        bodies, at, data = [], 0, self._incoming
        while len(data) >= at + HEADER.size:
            (size,) = HEADER.unpack_from(data, at)
            if size > MAX_FRAME:
                raise EOFError(f"a frame of {size} bytes: the other side is not jpaged")
            end = at + HEADER.size + size
            if len(data) < end:
                break
            bodies.append(bytes(data[at + HEADER.size : end]))
            at = end
        del data[:at]
        return bodies
