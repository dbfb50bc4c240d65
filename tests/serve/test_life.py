"""The server's life: start, drain, signals, and mistakes in the command line."""

import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import httpx
from server_process import ServerProcess

LONG: dict[str, Any] = {"prompt": "Hello", "max_tokens": 200, "ignore_eos": True}


def ask_meanwhile(url: str, fields: dict[str, Any]) -> tuple[threading.Thread, list[Any]]:
    """Ask in another thread; the answer comes into the list."""
    found: list[Any] = []

    def ask() -> None:
        try:
            found.append(httpx.post(f"{url}/v1/completions", json=fields, timeout=60))
        except httpx.HTTPError as error:
            found.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    end = time.monotonic() + 20
    while not httpx.get(f"{url}/load").json()["server_load"]:
        assert time.monotonic() < end
    return thread, found


def wait_until_it_runs(url: str) -> None:
    """Wait until the engine has begun: what is let in is tokenised first, and not yet running."""
    end = time.monotonic() + 20
    idle = 'vllm:num_requests_running{engine="0",model_name="jpaged-tiny"} 0.0'
    while idle in httpx.get(f"{url}/metrics").text:
        assert time.monotonic() < end


def test_a_signal_lets_requests_end(compilation_cache: Path):
    server = ServerProcess(compilation_cache)
    try:
        thread, found = ask_meanwhile(server.url, LONG)
        server.process.send_signal(signal.SIGTERM)
        thread.join()
        assert found[0].json()["choices"][0]["finish_reason"] == "length"
        assert server.wait() == 0
        assert "shutting down" in server.log
        assert "Traceback" not in server.log
    finally:
        server.end()


def test_a_signal_to_all_processes_lets_requests_end(compilation_cache: Path):
    server = ServerProcess(compilation_cache)
    try:
        thread, found = ask_meanwhile(server.url, {**LONG, "prompt": ["Hello"] * 64})
        wait_until_it_runs(server.url)
        for pid in (*children_of(server.process.pid), server.process.pid):
            os.kill(pid, signal.SIGTERM)
        thread.join()
        reasons = {choice["finish_reason"] for choice in found[0].json()["choices"]}
        assert reasons == {"length"}
        assert server.wait() == 0
    finally:
        server.end()


def test_what_does_not_end_in_time_is_aborted(compilation_cache: Path):
    server = ServerProcess(compilation_cache, "--shutdown-timeout", "0")
    try:
        thread, found = ask_meanwhile(server.url, {**LONG, "prompt": ["Hello"] * 64})
        wait_until_it_runs(server.url)
        server.process.send_signal(signal.SIGINT)
        thread.join()
        reasons = {choice["finish_reason"] for choice in found[0].json()["choices"]}
        assert "abort" in reasons
        assert server.wait() == 0
    finally:
        server.end()


def test_a_second_signal_ends_all_at_once(compilation_cache: Path):
    server = ServerProcess(compilation_cache)
    try:
        thread, found = ask_meanwhile(server.url, {**LONG, "prompt": ["Hello"] * 64})
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        start = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 128 + signal.SIGTERM
        assert time.monotonic() - start < 2
        thread.join()
        assert isinstance(found[0], httpx.HTTPError)
    finally:
        server.end()


def test_a_signal_while_it_starts(compilation_cache: Path):
    server = ServerProcess(compilation_cache, wait=False)
    try:
        wait_for_words(server)
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0
    finally:
        server.end()


def test_the_engines_death_turns_health_red(compilation_cache: Path):
    server = ServerProcess(compilation_cache)
    try:
        thread, found = ask_meanwhile(server.url, {**LONG, "prompt": ["Hello"] * 64})
        (worker,) = children_of(server.process.pid)
        wait_until_it_runs(server.url)
        os.kill(worker, signal.SIGKILL)
        thread.join()
        assert found[0].status_code == 503
        assert httpx.get(f"{server.url}/health").status_code == 503
        wait_for_words(server, "the engine is gone")
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0
    finally:
        server.end()


def test_the_engine_ends_with_its_server_also_while_it_starts(compilation_cache: Path):
    server = ServerProcess(compilation_cache, wait=False)
    wait_for_words(server)
    (worker,) = children_of(server.process.pid)
    server.end()
    end = time.monotonic() + 10
    while b"worker" in command_of(worker):
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_model_that_cannot_be_loaded(compilation_cache: Path, tmp_path: Path):
    server = ServerProcess(compilation_cache, "--model", str(tmp_path), wait=False)
    assert server.wait(60) == 1
    assert "error:" in server.log
    assert "Traceback" not in server.log


def test_a_port_that_is_taken(compilation_cache: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        server = ServerProcess(compilation_cache, "--port", port, wait=False)
        assert server.wait(60) == 1
    assert f"cannot listen at 127.0.0.1:{port}" in server.log


def wait_for_words(server: ServerProcess, words: str = "jpaged:") -> None:
    """Wait until they are in the log, by default any of the engine's process."""
    end = time.monotonic() + 60
    while words not in server.log:
        assert time.monotonic() < end
        time.sleep(0.01)


def children_of(pid: int) -> list[int]:
    """The process's children."""
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
    return [int(child) for child in text.split()]


def command_of(pid: int) -> bytes:
    """The process's command line; nothing if it is gone."""
    path = Path(f"/proc/{pid}/cmdline")
    return path.read_bytes() if path.exists() else b""
