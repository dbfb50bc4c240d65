"""Child processes: how one is started, the channel to it, and how it ends.

A child is a Python that runs the `main` of a module. The first argument of `main` is the child's
end of a socket pair, the channel. On a channel each message is its length, 4 bytes, big endian, and
its bytes.
"""

import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio

LENGTH_HEADER = struct.Struct("!I")

MAX_MESSAGE_BYTES = 2**30
"""Bytes of the largest message that a `MessageSocket` receives."""

_MAX_CHUNKS_PER_RECEIVE = 8
"""Chunks, of a MiB at most, that `MessageSocket.receive` reads in one call."""

_CHILD_SCRIPT = """
import importlib, json, os, signal, socket, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C, the parent ends this process
try:
    os.fstat(2)
except OSError:  # stderr is closed
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
os.dup2(2, 1)  # keep what libraries print out of the parent's standard output
path, module, channel, *arguments = sys.argv[1:]
sys.path[:] = json.loads(path)
channel = socket.socket(fileno=int(channel))
channel.set_inheritable(False)  # else a child of this process would keep the channel open
sys.exit(importlib.import_module(module).main(channel, *arguments))
"""


def can_start_python() -> bool:
    """Whether a Python can be started; in a frozen program, `sys.executable` is no Python."""
    return bool(sys.executable) and not getattr(sys, "frozen", False)


def child_command(module: str, channel: int, *arguments: object) -> list[str]:
    """Return the command line of a child, which inherits the descriptor `channel` and finds modules
    where this process does."""
    path = json.dumps([entry for entry in sys.path if isinstance(entry, str)])
    return [
        sys.executable,
        "-P",
        "-c",
        _CHILD_SCRIPT,
        path,
        module,
        str(channel),
        *map(str, arguments),
    ]


def exit_with_parent(sock: socket.socket) -> None:
    """Start a thread that ends this process once the parent has closed its end of the channel."""

    def wait() -> None:
        closed = select.poll()
        closed.register(sock, 0)  # POLLHUP is always reported
        closed.poll()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def describe_exit(code: int) -> str:
    """Return the exit code of a child process in words, a signal by its name."""
    if code >= 0:
        return f"exit code {code}"
    hint = ": out of memory?" if code == -signal.SIGKILL else ""
    return f"killed by {signal.Signals(-code).name}{hint}"


class Child:
    """A child process, and the parent's end of the channel (`sock`).

    Args:
        module: The module whose `main` the child runs.
        arguments: The arguments of `main` after the channel; they arrive as strings.
        files: Descriptors that the child inherits under the same numbers.
        leads_group: Whether the child leads a process group, which Ctrl-C in a terminal does not
            reach. The group is killed with the child.
        errors: Standard error of the child, as `subprocess.Popen` takes it.
        environment: Variables in addition to those of this process.
    """

    def __init__(
        self,
        module: str,
        *arguments: object,
        pass_fds: Iterable[int] = (),
        is_group_leader: bool = False,
        stderr: int | None = None,
        extra_env: Mapping[str, str] | None = None,
    ):
        self._parent_pid, self._is_group_leader = os.getpid(), is_group_leader
        self.sock, child_sock = socket_pair()
        with child_sock:
            try:
                self.process: subprocess.Popen[Any] = subprocess.Popen(
                    child_command(module, child_sock.fileno(), *arguments),
                    pass_fds=[child_sock.fileno(), *pass_fds],
                    stdin=subprocess.DEVNULL,
                    stderr=stderr,
                    process_group=0 if is_group_leader else None,
                    env={**os.environ, **(extra_env or {})},
                )
            except BaseException:  # an interrupt, too: without the channel the child ends
                self.sock.close()
                raise

    def exit_code(self, seconds: float) -> int | None:
        """Return the child's exit code, or -N if signal N killed it. Return None if the child still
        runs after `seconds`."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> bool:
        """Kill the child and wait for its end; return False in a fork of the parent, which leaves
        the child alone."""
        if os.getpid() != self._parent_pid:
            return False
        if self.process.returncode is None:  # else another process may have its id by now
            if self._is_group_leader:
                with suppress(ProcessLookupError):  # the system has reaped all of it
                    os.killpg(self.process.pid, signal.SIGKILL)
            else:
                self.process.kill()
            self.process.wait()
        return True

    def kill_and_close(self) -> None:
        """Kill the child and close the channel; in a fork of the parent, close the fork's copy of
        the channel alone."""
        self.kill()
        self.sock.close()


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets that block, whatever `socket.setdefaulttimeout` was told."""
    ours, theirs = socket.socketpair()
    ours.setblocking(True)
    theirs.setblocking(True)
    return ours, theirs


def frame_message(*parts: bytes) -> bytes:
    """Join the parts of a message, and put the length of the message in front."""
    return b"".join((LENGTH_HEADER.pack(sum(map(len, parts))), *parts))


def send(sock: socket.socket, message: bytes) -> None:
    """Send a message over a socket that blocks."""
    sock.sendall(frame_message(message))


def receive(sock: socket.socket, received_fds: list[int] | None = None) -> bytes | None:
    """Return the next message of a socket that blocks; None once the peer has closed it. A
    descriptor that comes with the message is added to `files`."""
    try:
        if received_fds is None:
            header = _receive(sock, LENGTH_HEADER.size)
        else:
            header, new_fds, _, _ = socket.recv_fds(sock, LENGTH_HEADER.size, 1, socket.MSG_WAITALL)
            received_fds += new_fds
        return _receive(sock, LENGTH_HEADER.unpack(header)[0]) if header else None
    except ConnectionError:  # the peer has closed it without reading what was sent
        return None


def _receive(sock: socket.socket, size: int) -> bytes | None:
    data = b""
    while len(data) < size:  # a process that was stopped meanwhile gets less than it waits for
        part = sock.recv(size - len(data), socket.MSG_WAITALL)
        if not part:
            return None
        data += part
    return data


async def read_message(reader: "asyncio.StreamReader") -> bytes:
    """Return the next message of a stream; asyncio.IncompleteReadError at the end."""
    (size,) = LENGTH_HEADER.unpack(await reader.readexactly(LENGTH_HEADER.size))
    return await reader.readexactly(size)


class MessageSocket:
    """An end of a channel that sends and receives messages and never waits for its peer to read.

    Args:
        sock: The end; owned by the link from now on.
    """

    def __init__(self, sock: socket.socket):
        sock.setblocking(False)
        self._sock = sock
        self._incoming = bytearray()
        self._outgoing = bytearray()

    @property
    def is_flushed(self) -> bool:
        """Whether the peer keeps up: all that was sent so far is on its way."""
        return not self._outgoing

    def send(self, message: bytes) -> None:
        """Send a message as soon as the peer takes it."""
        self._outgoing += frame_message(message)
        self._flush()

    def receive(self, timeout: float) -> bytes | None:
        """Return the next message; None if none has come within `timeout` seconds.

        Raises:
            EOFError: the other side is gone.
        """
        if (message := self._pop_message()) is not None:
            return message
        writing = [self._sock] if self._outgoing else []
        readable, writable, _ = select.select([self._sock], writing, [], timeout)
        if writable:
            self._flush()
        if readable:
            self._read_available()
        return self._pop_message()

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

    def _read_available(self) -> None:
        """Read what has come, but at most `_MAX_CHUNKS_PER_RECEIVE` chunks: steps wait meanwhile."""
        try:
            for _ in range(_MAX_CHUNKS_PER_RECEIVE):
                chunk = self._sock.recv(1 << 20)
                if not chunk:
                    raise EOFError("the other side is gone")
                self._incoming += chunk
        except BlockingIOError:
            pass
        except ConnectionError as error:
            raise EOFError("the other side is gone") from error

    def _pop_message(self) -> bytes | None:
        """Return the first message, once all of it has come."""
        data, start = self._incoming, LENGTH_HEADER.size
        if len(data) < start:
            return None
        (size,) = LENGTH_HEADER.unpack_from(data)
        if size > MAX_MESSAGE_BYTES:
            raise EOFError(f"a message of {size} bytes: the other side is not jpaged")
        if len(data) < start + size:
            return None
        message = bytes(data[start : start + size])
        del data[: start + size]
        return message
