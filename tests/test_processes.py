"""Test child processes: messages over the channel, and how children end."""

import os
import signal
import socket
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from jpaged.processes import Child, describe_exit, frame_message, receive, send

ECHO = """
import subprocess, sys
from jpaged.processes import receive, send

def main(sock, *arguments):
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], close_fds=False)
    send(sock, f"{other.pid} {arguments}".encode())
    while (message := receive(sock)) is not None:
        print("a library's words")
        send(sock, message)
    other.kill()
    other.wait()
    return 3
"""

SLOW = """
import time
import warnings
from jpaged.processes import receive, send

def main(sock):
    time.sleep(0.1)
    send(sock, b"ready")
    return int(receive(sock) != b"done")
"""


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Child]:
    (tmp_path / "echo.py").write_text(ECHO, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    child = Child("echo", 1, "two", is_group_leader=True)
    yield child
    child.kill_and_close()


def test_child_gets_arguments_and_answers_messages(child: Child):
    assert (receive(child.sock) or b"").endswith(b" ('1', 'two')")
    for message in (b"", b"a", bytes(10**6)):
        child.sock.settimeout(20)
        send(child.sock, message)
        assert receive(child.sock) == message


def test_default_timeout_of_sockets_does_not_break_a_channel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A user's program may call `socket.setdefaulttimeout` before it creates an engine."""
    (tmp_path / "slow.py").write_text(SLOW, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(0.01)
    try:
        child = Child("slow")
    finally:
        socket.setdefaulttimeout(before)
    assert receive(child.sock) == b"ready"
    time.sleep(0.1)
    send(child.sock, b"done")
    assert child.exit_code(20) == 0
    child.kill_and_close()


def test_closed_channel_ends_a_child_whose_own_child_still_runs(child: Child):
    receive(child.sock)
    assert child.exit_code(0.0) is None
    child.sock.shutdown(socket.SHUT_WR)
    assert receive(child.sock) is None
    assert child.exit_code(20) == 3


def test_killing_a_child_twice_kills_its_process_group_once(child: Child):
    other = int((receive(child.sock) or b"").split()[0])
    assert child.kill()
    assert child.process.returncode == -signal.SIGKILL
    until = time.monotonic() + 20
    # Wait until the child's child has exited. A zombie process has exited too.
    while Path(f"/proc/{other}").exists():
        if ") Z" in Path(f"/proc/{other}/stat").read_text(encoding="ascii"):
            break
        assert time.monotonic() < until
    assert child.kill()


def test_forked_copy_of_the_parent_cannot_kill_the_child(child: Child):
    receive(child.sock)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warns about a fork with threads
        fork = os.fork()
    if fork == 0:
        child.kill_and_close()
        os._exit(0)
    assert os.waitpid(fork, 0)[1] == 0
    send(child.sock, b"still here")
    assert receive(child.sock) == b"still here"


def test_receive_returns_none_for_an_incomplete_last_message():
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            theirs.sendall(frame_message(b"whole") + frame_message(b"cut", b" short")[:-1])
        assert receive(ours) == b"whole"
        assert receive(ours) is None
        assert receive(ours) is None


def test_receive_returns_none_if_the_peer_closed_with_unread_messages():
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            send(ours, b"never read")
        assert receive(ours) is None


def test_exit_code_of_a_child_is_described_in_words():
    assert describe_exit(3) == "exit code 3"
    assert describe_exit(-signal.SIGSEGV) == "killed by SIGSEGV"
    assert describe_exit(-signal.SIGKILL) == "killed by SIGKILL: out of memory?"
