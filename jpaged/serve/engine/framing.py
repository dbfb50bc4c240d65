"""Messages on a stream socket: each is its length, 4 bytes, big endian, and its bytes."""

import asyncio
import select
import socket
import struct

LENGTH = struct.Struct("!I")
MAX_SIZE = 2**30
"""Bytes of the largest message that is believed."""

_MAX_CHUNKS = 8
"""Chunks, of a MiB at most, that one `receive` reads."""


def framed(message: bytes) -> bytes:
    """The message as it travels."""
    return LENGTH.pack(len(message)) + message


def send(sock: socket.socket, message: bytes) -> None:
    """Send a message over a socket that blocks."""
    sock.sendall(LENGTH.pack(len(message)))
    sock.sendall(message)


def receive(sock: socket.socket) -> bytearray | None:
    """The next message of a socket that blocks; None at the end."""
    head = _receive(sock, LENGTH.size)
    return None if head is None else _receive(sock, LENGTH.unpack(head)[0])


async def read(reader: asyncio.StreamReader) -> bytes:
    """The next message of a stream; asyncio.IncompleteReadError at the end."""
    (size,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    return await reader.readexactly(size)


def _receive(sock: socket.socket, size: int) -> bytearray | None:
    data = bytearray(size)
    view, got = memoryview(data), 0
    while got < size:
        num = sock.recv_into(view[got:])
        if not num:
            return None
        got += num
    return data


class Link:
    """The engine's end: sends messages and receives some, and never waits for its peer to read.

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

    def send(self, message: bytes) -> None:
        """Send it as soon as the other side takes it."""
        self._outgoing += framed(message)
        self._flush()

    def receive(self, timeout: float) -> bytes | None:
        """The next message; waits so many seconds at most for it.

        Raises:
            EOFError: the other side is gone.
        """
        message = self._take()
        if message is None:
            writing = [self._sock] if self._outgoing else []
            readable, writable, _ = select.select([self._sock], writing, [], timeout)
            if writable:
                self._flush()
            if readable:
                self._fill()
            message = self._take()
        return message

    def close(self) -> None:
        """Send what can be sent at once, and close the socket."""
        self._flush()
        self._sock.close()

    def _flush(self) -> None:
        try:
            while self._outgoing:
                del self._outgoing[: self._sock.send(self._outgoing)]
        except BlockingIOError:
            pass
        except OSError:  # the peer is gone; `receive` will find out
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

    def _take(self) -> bytes | None:
        """The first message, once all of it has come."""
        data, start = self._incoming, LENGTH.size
        if len(data) < start:
            return None
        (size,) = LENGTH.unpack_from(data)
        if size > MAX_SIZE:
            raise EOFError(f"a message of {size} bytes: the other side is not jpaged")
        if len(data) < start + size:
            return None
        message = bytes(data[start : start + size])
        del data[: start + size]
        return message
