"""Test start, shutdown, signals and failures of the server process.

Most tests need no real engine, so they start the server with the stub engine.
"""

import asyncio
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_process import ARGUMENTS, STUB, ServerProcess
from stub.stub_engine import BLOCKED_IN, BLOCKED_WHILE, START_SECONDS

from jpaged.processes import child_command
from jpaged.serve.engine.worker import describe_start_error
from jpaged.serve.http.lifecycle import run_server, serving_app
from jpaged.serve.options import read_flags

LONG: dict[str, Any] = {"prompt": "Hello", "max_tokens": 200, "ignore_eos": True}
SLOW_START = STUB | {START_SECONDS: "60"}


def ask_in_thread(url: str, fields: dict[str, Any]) -> tuple[threading.Thread, list[Any]]:
    """Send a request in a thread. Return a list to which the thread adds the response or the
    error."""
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


def wait_until_running(url: str) -> None:
    """Wait until the engine runs a request."""
    end = time.monotonic() + 20
    idle = 'vllm:num_requests_running{engine="0",model_name="jpaged-tiny"} 0.0'
    while idle in httpx.get(f"{url}/metrics").text:
        assert time.monotonic() < end


def test_sigterm_lets_running_requests_finish(compilation_cache: Path):
    server = ServerProcess(compilation_cache)
    try:
        thread, found = ask_in_thread(server.url, LONG)
        server.process.send_signal(signal.SIGTERM)
        thread.join()
        assert found[0].json()["choices"][0]["finish_reason"] == "length"
        assert server.wait() == 0
        assert "shutting down" in server.log
        assert "Traceback" not in server.log
    finally:
        server.end()


def test_sigterm_to_all_processes_lets_running_requests_finish(compilation_cache: Path):
    server = ServerProcess(compilation_cache, environment=STUB)
    try:
        thread, found = ask_in_thread(server.url, {**LONG, "prompt": ["Hello"] * 16})
        wait_until_running(server.url)
        for pid in (*children_of(server.process.pid), server.process.pid):
            os.kill(pid, signal.SIGTERM)
        thread.join()
        reasons = {choice["finish_reason"] for choice in found[0].json()["choices"]}
        assert reasons == {"length"}
        assert server.wait() == 0
    finally:
        server.end()


def test_requests_over_the_shutdown_timeout_are_aborted(compilation_cache: Path):
    server = ServerProcess(compilation_cache, "--shutdown-timeout", "0", environment=STUB)
    try:
        thread, found = ask_in_thread(server.url, {**LONG, "prompt": ["Hello"] * 64})
        wait_until_running(server.url)
        server.process.send_signal(signal.SIGINT)
        thread.join()
        reasons = {choice["finish_reason"] for choice in found[0].json()["choices"]}
        assert "abort" in reasons
        assert server.wait() == 0
    finally:
        server.end()


def test_second_signal_stops_the_server_immediately(compilation_cache: Path):
    server = ServerProcess(compilation_cache, environment=STUB)
    try:
        thread, found = ask_in_thread(server.url, {**LONG, "prompt": ["Hello"] * 64})
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


def test_sigterm_during_startup_exits_cleanly(tmp_path: Path):
    server = ServerProcess(tmp_path, wait=False, environment=SLOW_START)
    try:
        wait_for_log(server)
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0
    finally:
        server.end()


def test_sigterm_stops_the_server_with_a_closed_stderr_pipe(compilation_cache: Path):
    """In `python -m jpaged.serve 2>&1 | head`, `head` closes the server's stderr."""
    command = [sys.executable, "-m", "jpaged.serve", *ARGUMENTS]
    command += ["--compilation-cache-dir", str(compilation_cache)]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=os.environ | STUB
    ) as process:
        try:
            assert process.stderr is not None
            for line in process.stderr:
                if "serving" in line:
                    break
            process.stderr.close()
            process.terminate()
            assert process.wait(30) in (0, 120)  # Python exits with 120 if it cannot flush stderr
        finally:
            process.kill()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "hangs"])
def test_killed_or_hung_engine_stops_the_server(how: int, compilation_cache: Path):
    server = ServerProcess(compilation_cache, "--hang-timeout", "2", environment=STUB)
    try:
        thread, found = ask_in_thread(server.url, {**LONG, "prompt": ["Hello"] * 64})
        worker = worker_of(server.process.pid)
        wait_until_running(server.url)
        os.kill(worker, how)
        assert server.wait(20) == 1
        thread.join()
        assert found[0].status_code == 503
        assert "the engine is gone" in server.log
        assert ("--hang-timeout" in server.log) == (how == signal.SIGSTOP)
        assert ("SIGKILL" in server.log) == (how == signal.SIGKILL)
        assert b"worker" not in command_of(worker)
    finally:
        server.end()


def test_engine_hung_during_startup_stops_the_server(tmp_path: Path):
    server = ServerProcess(tmp_path, "--start-timeout", "2", wait=False, environment=SLOW_START)
    try:
        while not (workers := engines_of(server.process.pid)):
            assert server.process.poll() is None
            time.sleep(0.05)
        worker = int(workers[0])
        os.kill(worker, signal.SIGSTOP)
        assert server.wait(20) == 1
        assert "error: the engine did not start within 2 s (--start-timeout)" in server.log
        assert "Traceback" not in server.log
        assert b"worker" not in command_of(worker)
    finally:
        server.end()


def test_tokenizer_process_hung_during_startup_stops_the_server(
    tmp_path: Path, compilation_cache: Path
):
    code = """import sys, time
if "jpaged.serve.engine.tokenizing_process" in sys.orig_argv:
    time.sleep(1000)
"""
    stub = (Path(__file__).parent / "stub" / "sitecustomize.py").read_text(encoding="utf-8")
    (tmp_path / "sitecustomize.py").write_text(code + stub, encoding="utf-8")
    around = {"PYTHONPATH": os.pathsep.join([str(tmp_path), STUB["PYTHONPATH"]])}
    limit = ("--start-timeout", "4")  # the test also passes if the engine starts after this line
    server = ServerProcess(compilation_cache, *limit, wait=False, environment=around)
    try:
        assert server.wait(60) == 1
        assert "error: the engine did not start within 4 s (--start-timeout)" in server.log
        assert "Traceback" not in server.log
    finally:
        server.end()


@pytest.mark.parametrize("library", ["CDLL", "PyDLL"])
def test_hung_engine_step_stops_the_server(tmp_path: Path, compilation_cache: Path, library: str):
    """The engine step hangs in C code. With `PyDLL`, the C code holds the interpreter lock. With
    `CDLL`, the C code has released the lock."""
    flag = tmp_path / "blocked"
    around = STUB | {BLOCKED_WHILE: str(flag), BLOCKED_IN: library}
    server = ServerProcess(compilation_cache, "--hang-timeout", "2", environment=around)
    try:
        worker = worker_of(server.process.pid)
        thread, found = ask_in_thread(server.url, {**LONG, "prompt": ["Hello"] * 64})
        wait_until_running(server.url)
        flag.touch()
        assert server.wait(20) == 1
        thread.join()
        assert found[0].status_code == 503
        assert "stood still for 2 s (--hang-timeout)" in server.log
        assert b"worker" not in command_of(worker)
    finally:
        flag.unlink(missing_ok=True)
        server.end()


@pytest.mark.parametrize("with_engine", [pytest.param(False, marks=pytest.mark.full), True])
def test_resumed_server_does_not_report_its_engine_as_hung(
    compilation_cache: Path, with_engine: bool
):
    """Ctrl-Z stops the server and its engine; the engine may resume later than the server."""
    server = ServerProcess(compilation_cache, "--hang-timeout", "2", environment=STUB)
    try:
        pids = [server.process.pid]
        if with_engine:
            pids.append(worker_of(server.process.pid))
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(4)
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.1)
        for _ in range(8):
            assert httpx.get(f"{server.url}/version").status_code == 200
            time.sleep(0.1)
        found = httpx.post(f"{server.url}/v1/completions", json=LONG, timeout=60)
        assert found.status_code == 200
    finally:
        server.end()


def test_asgi_app_answers_without_a_socket(compilation_cache: Path):
    flags = read_flags([*ARGUMENTS, "--compilation-cache-dir", str(compilation_cache)])

    async def use() -> None:
        async with serving_app(flags) as (app, serving):
            assert len(engines_of(os.getpid())) == 1
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://jpaged") as http:
                assert (await http.get("/ready")).status_code == 200
                asked = {"prompt": "Count from 3 to 7", "max_tokens": 64, "temperature": 0}
                answer = await http.post("/v1/completions", json=asked, timeout=60)
                assert answer.json()["choices"][0]["text"] == "\n3, 4, 5, 6, 7"
                serving.stop_admitting()
                assert (await http.post("/v1/completions", json=asked)).status_code == 503
        assert not serving.is_healthy

    asyncio.run(use())
    assert not engines_of(os.getpid())


def test_asgi_app_kills_a_hung_engine_process(
    compilation_cache: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PYTHONPATH", STUB["PYTHONPATH"])
    flags = ["--compilation-cache-dir", str(compilation_cache), "--hang-timeout", "1"]

    async def use() -> None:
        async with serving_app(read_flags([*ARGUMENTS, *flags])) as (_, serving):
            (engine,) = engines_of(os.getpid())
            os.kill(int(engine), signal.SIGSTOP)
            await asyncio.wait_for(serving.engine.closed.wait(), 20)
            assert "stood still for 1 s (--hang-timeout)" in str(serving.engine.close_reason)

    asyncio.run(use())
    assert not engines_of(os.getpid())


def test_asgi_app_raises_if_the_engine_exceeds_the_start_timeout(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    flags = ["--compilation-cache-dir", str(tmp_path), "--start-timeout", "0.5"]

    async def use() -> None:
        async with serving_app(read_flags([*ARGUMENTS, *flags])):
            pass

    with pytest.raises(RuntimeError, match=r"did not start within 0\.5 s \(--start-timeout\)"):
        asyncio.run(use())
    assert not engines_of(os.getpid())
    gc.collect()
    assert not caplog.text  # asyncio logs exceptions that are never retrieved


def test_asgi_app_raises_for_a_folder_without_a_model(compilation_cache: Path, tmp_path: Path):
    async def use() -> None:
        async with serving_app(read_flags(["--model", str(tmp_path)])):
            pass

    with pytest.raises((RuntimeError, ValueError), match=r"config\.json"):
        asyncio.run(use())
    assert not engines_of(os.getpid())


def test_starting_engine_exits_when_its_server_is_killed(tmp_path: Path):
    server = ServerProcess(tmp_path, wait=False)
    wait_for_log(server)
    worker = worker_of(server.process.pid)
    server.end()
    end = time.monotonic() + 10
    while b"worker" in command_of(worker):
        assert time.monotonic() < end
        time.sleep(0.05)


def test_server_exits_with_an_error_if_the_model_cannot_be_loaded(
    compilation_cache: Path, tmp_path: Path
):
    server = ServerProcess(compilation_cache, "--model", str(tmp_path), wait=False)
    assert server.wait(60) == 1
    assert "error:" in server.log
    assert "Traceback" not in server.log


def test_server_exits_with_an_error_if_the_chat_template_is_invalid(
    compilation_cache: Path, tmp_path: Path
):
    template = tmp_path / "broken.jinja"
    template.write_text("{{ messages }}\n{% for m in messages %}", encoding="utf-8")
    server = ServerProcess(
        compilation_cache, "--chat-template", str(template), wait=False, environment=STUB
    )
    assert server.wait(60) == 1
    assert (
        "error: --chat-template is not a valid Jinja template (line 2: Unexpected end" in server.log
    )
    assert "Traceback" not in server.log


def test_server_exits_with_an_error_if_its_engine_is_killed_during_startup(tmp_path: Path):
    server = ServerProcess(tmp_path, wait=False, environment=SLOW_START)
    wait_for_log(server)
    worker = worker_of(server.process.pid)
    os.kill(worker, signal.SIGKILL)
    assert server.wait() == 1
    assert "error:" in server.log
    assert "SIGKILL: out of memory?" in server.log
    assert "Traceback" not in server.log


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ValueError("dtype='int4' is unknown"), "dtype='int4' is unknown"),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory"), "lower --gpu-memory-utilization"),
        (MemoryError(), "lower --gpu-memory-utilization"),
        (KeyError("layers"), "KeyError: 'layers'"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_start_error_says_what_to_do(
    error: Exception, words: str, capsys: pytest.CaptureFixture[str]
):
    assert words in describe_start_error(error)
    assert ("KeyError" in capsys.readouterr().err) == isinstance(error, KeyError)


# The server process sends the signal to itself, so that the signal arrives at a known line.
BEFORE_IT_LISTENS = """
from jpaged.serve import __main__, options
options.read_flags = lambda argv: os.kill(os.getpid(), signal.{name})
__main__.main([])
"""
BEFORE_THERE_IS_AN_ENGINE = """
from jpaged.serve import __main__
from jpaged.serve.engine import client as engine_client
start = engine_client.EngineProcess.start.__func__
async def interrupted(cls, options):
    os.kill(os.getpid(), signal.{name})
    await asyncio.sleep(0.1)
    return await start(cls, options)
engine_client.EngineProcess.start = classmethod(interrupted)
sys.exit(__main__.main(["--port", "0"]))
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
@pytest.mark.parametrize("script", [BEFORE_IT_LISTENS, BEFORE_THERE_IS_AN_ENGINE])
def test_signal_before_the_engine_starts_exits_cleanly(script: str, name: str):
    code = "import asyncio, os, signal, sys" + script.format(name=name)
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert "Traceback" not in said
    assert "error" not in said
    assert not engines_of(process.pid)


def test_engine_process_exits_if_the_server_process_has_already_died():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        nobody = 2**30
        command = child_command("jpaged.serve.engine.worker", theirs.fileno(), nobody)
        engine = subprocess.run(command, pass_fds=[theirs.fileno()], timeout=60)
    assert engine.returncode == 1


def test_server_exits_with_an_error_if_its_host_name_cannot_be_resolved(
    capsys: pytest.CaptureFixture[str],
):
    for host in ("a" * 64 + ".b", "no.such.host.invalid"):
        assert run_server(read_flags(["--host", host])) == 1
        assert f"cannot listen at {host}:8000" in capsys.readouterr().err


def test_server_exits_with_an_error_if_its_port_is_in_use(compilation_cache: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        server = ServerProcess(compilation_cache, "--port", port, wait=False, environment=STUB)
        assert server.wait(60) == 1
    assert f"cannot listen at 127.0.0.1:{port}" in server.log
    assert "Traceback" not in server.log


def wait_for_log(server: ServerProcess, words: str = "jpaged:") -> None:
    """Wait until the server's log contains `words`.

    By default, wait for the first log line of jpaged, which starts with "jpaged:".
    """
    end = time.monotonic() + 60
    while words not in server.log:
        assert time.monotonic() < end
        time.sleep(0.01)


def children_of(pid: int) -> list[int]:
    """Return the process ids of a process's children."""
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
    return [int(child) for child in text.split()]


def worker_of(pid: int) -> int:
    """Return the process id of the engine process of the server process `pid`."""
    (worker,) = (it for it in children_of(pid) if b"serve.engine.worker" in command_of(it))
    return worker


def engines_of(pid: int) -> list[str]:
    """Return the ids of the engine processes that server process `pid` started."""
    commands = {path.name: command_of(int(path.name)) for path in Path("/proc").glob("[0-9]*")}
    of_it = {name: command for name, command in commands.items() if b"worker" in command}
    return [name for name, command in of_it.items() if command.endswith(b"\0%d\0" % pid)]


def command_of(pid: int) -> bytes:
    """Return the process's command line, or empty bytes if it has exited."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
