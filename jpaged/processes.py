"""Child processes: start and end them, and exchange messages over a channel.

A child is a Python process that runs the function `main` of a module. The channel is a socket pair,
and the first argument of `main` is the child's end. A message on the channel is its length (4
bytes, big endian), followed by its bytes.
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
"""Maximum size in bytes of a message that a `MessageSocket` receives."""

_MAX_CHUNKS_PER_RECEIVE = 8
"""Maximum number of chunks, of up to 1 MiB each, that one `MessageSocket.receive` call reads."""

_CHILD_SCRIPT = """
import importlib, json, os, signal, socket, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C, the parent ends the child
try:
    os.fstat(2)
except OSError:  # stderr is closed
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
os.dup2(2, 1)  # print to stderr: stdout may be the parent's output
path, module, channel, *arguments = sys.argv[1:]
sys.path[:] = json.loads(path)
channel = socket.socket(fileno=int(channel))
channel.set_inheritable(False)  # else a child of this process would keep the channel open
sys.exit(importlib.import_module(module).main(channel, *arguments))
"""


def can_start_python() -> bool:
    """Return whether this process can start a Python process as a child.

    A frozen program cannot, because its `sys.executable` is the program, not a Python interpreter.
    """
    return bool(sys.executable) and not getattr(sys, "frozen", False)


def child_command(module: str, channel: int, *arguments: object) -> list[str]:
    """Return the command line of a child process with the `sys.path` of this process.

    Args:
        module: Module whose `main` the child runs.
        channel: Descriptor of the child's end of the channel, which the child must inherit.
        arguments: Arguments of `main` after the channel, passed as strings.
    """
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
    """Start a thread that ends this process when the parent closes its end of the channel."""

    def wait() -> None:
        closed = select.poll()
        closed.register(sock, 0)  # POLLHUP is always reported
        closed.poll()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def describe_exit(code: int) -> str:
    """Return a text for the exit code of a child process, such as "killed by SIGSEGV" for -11."""
    if code >= 0:
        return f"exit code {code}"
    hint = ": out of memory?" if code == -signal.SIGKILL else ""
    return f"killed by {signal.Signals(-code).name}{hint}"


class Child:
    """A running child process and the parent's end of the channel.

    Attributes:
        sock: Parent's end of the channel.
        process: The child process.

    Args:
        module: Module whose `main` the child runs.
        arguments: Arguments of `main` after the channel, passed as strings.
        pass_fds: Descriptors that the child inherits under the same numbers.
        is_group_leader: Whether the child leads its own process group. Ctrl-C in a terminal does
            not reach this group, and `kill` kills the whole group.
        stderr: Standard error of the child, as for `subprocess.Popen`; None to inherit.
        extra_env: Environment variables to set in addition to the variables of this process.
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
            # After any error, even KeyboardInterrupt, close the channel: a child that has started
            # ends when its parent closes the channel.
            except BaseException:
                self.sock.close()
                raise

    def exit_code(self, seconds: float) -> int | None:
        """Wait at most `seconds` for the child to end, and return its exit code.

        Returns:
            The exit code, -N if signal N killed the child, or None if the child is still running.
        """
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> bool:
        """Kill the child, wait until the child has ended, and return True.

        In a fork of the parent process, return False and do nothing.
        """
        if os.getpid() != self._parent_pid:
            return False
        # Do not use the id of a child that has ended: another process may have it.
        if self.process.returncode is None:
            if self._is_group_leader:
                # A `ProcessLookupError` means that every process of the group has ended.
                with suppress(ProcessLookupError):
                    os.killpg(self.process.pid, signal.SIGKILL)
            else:
                self.process.kill()
            self.process.wait()
        return True

    def kill_and_close(self) -> None:
        """Kill the child and close the channel.

        In a fork of the parent process, only close the fork's copy of the channel.
        """
        self.kill()
        self.sock.close()


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected blocking sockets, regardless of `socket.setdefaulttimeout`."""
    ours, theirs = socket.socketpair()
    ours.setblocking(True)
    theirs.setblocking(True)
    return ours, theirs


def frame_message(*parts: bytes) -> bytes:
    """Return the bytes of a message on a channel: the length, followed by the joined `parts`."""
    return b"".join((LENGTH_HEADER.pack(sum(map(len, parts))), *parts))


def send(sock: socket.socket, message: bytes) -> None:
    """Send a message over a blocking socket."""
    sock.sendall(frame_message(message))


def receive(sock: socket.socket, received_fds: list[int] | None = None) -> bytes | None:
    """Wait for the next message on a blocking socket, and return the message.

    Args:
        sock: Blocking socket.
        received_fds: List to which a file descriptor sent with the message is appended. None:
            descriptors are not received.

    Returns:
        The message, or None if the peer has closed the channel.
    """
    try:
        if received_fds is None:
            header = _receive(sock, LENGTH_HEADER.size)
        else:
            header, new_fds, _, _ = socket.recv_fds(sock, LENGTH_HEADER.size, 1, socket.MSG_WAITALL)
            received_fds += new_fds
        return _receive(sock, LENGTH_HEADER.unpack(header)[0]) if header else None
    except ConnectionError:  # the peer has closed the channel before it read everything
        return None


def _receive(sock: socket.socket, size: int) -> bytes | None:
    data = b""
    while len(data) < size:  # despite MSG_WAITALL, SIGSTOP can make recv return less than `size`
        part = sock.recv(size - len(data), socket.MSG_WAITALL)
        if not part:
            return None
        data += part
    return data


async def read_message(reader: "asyncio.StreamReader") -> bytes:
    """Return the next message of a stream.

    Raises:
        asyncio.IncompleteReadError: The stream ended.
    """
    (size,) = LENGTH_HEADER.unpack(await reader.readexactly(LENGTH_HEADER.size))
    return await reader.readexactly(size)


class MessageSocket:
    """One end of a channel, with a buffer so that `send` never waits for the peer.

    Args:
        sock: Connected socket. `close` closes this socket.
    """

    def __init__(self, sock: socket.socket):
        sock.setblocking(False)
        self._sock = sock
        self._incoming = bytearray()
        self._outgoing = bytearray()

    @property
    def is_flushed(self) -> bool:
        """Whether all sent messages have left the buffer of this process."""
        return not self._outgoing

    def send(self, message: bytes) -> None:
        """Send a message, or buffer the message until the socket accepts more bytes."""
        self._outgoing += frame_message(message)
        self._flush()

    def receive(self, timeout: float) -> bytes | None:
        """Return the next message, or None if no complete message arrives within `timeout` seconds.

        Raises:
            EOFError: The peer has closed the channel, or has sent an invalid length.
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
        """Send the buffered bytes that the socket accepts immediately, and close the socket."""
        self._flush()
        self._sock.close()

    def _flush(self) -> None:
        try:
            while self._outgoing:
                del self._outgoing[: self._sock.send(self._outgoing)]
        except BlockingIOError:
            pass
        except OSError:  # the peer has ended, which `receive` reports
            self._outgoing.clear()

    def _read_available(self) -> None:
        """Read the bytes that have arrived, at most `_MAX_CHUNKS_PER_RECEIVE` MiB in one call.

        A longer read would delay the engine's next step.
        """
        try:
            for _ in range(_MAX_CHUNKS_PER_RECEIVE):
                chunk = self._sock.recv(1 << 20)
                if not chunk:
                    raise EOFError("the peer has closed the channel")
                self._incoming += chunk
        except BlockingIOError:
            pass
        except ConnectionError as error:
            raise EOFError("the connection to the peer is lost") from error

    def _pop_message(self) -> bytes | None:
        """Return the next buffered message, or None if no complete message has arrived."""
        data, start = self._incoming, LENGTH_HEADER.size
        if len(data) < start:
            return None
        (size,) = LENGTH_HEADER.unpack_from(data)
        if size > MAX_MESSAGE_BYTES:
            raise EOFError(f"message length {size} is too large: the peer is not jpaged")
        if len(data) < start + size:
            return None
        message = bytes(data[start : start + size])
        del data[: start + size]
        return message
