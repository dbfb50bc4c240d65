"""Test the engine worker over its socket, without an event loop."""

import asyncio
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from serve_helpers import ANSWER, QUESTION, run_worker

from jpaged import Engine, SamplingParams
from jpaged.processes import MessageSocket, frame_message, receive, send
from jpaged.serve.engine import worker
from jpaged.serve.engine.client import EngineClient
from jpaged.serve.engine.messages import (
    AbortRequests,
    Command,
    EngineInfo,
    EngineRequest,
    EngineUpdate,
    Report,
    RequestRefused,
    StopEngine,
    decode_report,
    encode,
)

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 64}


class HttpSide:
    """Act as the HTTP process at the other end of the worker's socket: send commands, and receive
    reports."""

    def __init__(self, sock: socket.socket):
        sock.settimeout(20)
        self.sock = sock

    def send(self, command: Command) -> None:
        send(self.sock, encode(command))

    def receive(self) -> Report:
        message = receive(self.sock)
        assert message is not None
        return decode_report(message)

    def deltas(self, request_id: str) -> Iterator[Any]:
        """Yield the deltas of a request until it finishes."""
        while True:
            report = self.receive()
            for delta in report.deltas if isinstance(report, EngineUpdate) else ():
                if delta.request_id == request_id:
                    yield delta
                    if delta.finished:
                        return

    def close(self) -> None:
        self.sock.close()


@pytest.fixture
def line(engine: Engine) -> Iterator[HttpSide]:
    ours, theirs = socket.socketpair()
    worker = threading.Thread(target=run_worker, args=(engine, theirs), daemon=True)
    worker.start()
    line = HttpSide(ours)
    assert isinstance(line.receive(), EngineInfo)
    yield line
    line.close()
    worker.join(10)
    assert not worker.is_alive()
    stats = engine.stats()
    assert stats.num_free_blocks == stats.num_blocks
    engine.check_integrity()


def add(name: str, prompt: str = QUESTION, **params: Any) -> EngineRequest:
    return EngineRequest(name, list(prompt.encode()), SamplingParams(**{**GREEDY, **params}))


def text_of(deltas: list[Any]) -> str:
    return "".join(each.text for delta in deltas for each in delta.deltas)


def test_request_returns_its_text_and_final_metrics(line: HttpSide):
    line.send(add("a"))
    deltas = list(line.deltas("a"))
    assert text_of(deltas) == ANSWER
    assert deltas[-1].metrics is not None
    assert all(delta.metrics is None for delta in deltas[:-1])


def test_idle_engine_worker_sends_status_updates(line: HttpSide):
    assert all(isinstance(line.receive(), EngineUpdate) for _ in range(3))


def test_error_of_an_invalid_request_names_the_invalid_parameter(line: HttpSide):
    line.send(add("a", n=9, temperature=1.0))
    line.send(add("b", beam_width=99))
    line.send(add("c"))
    refused = {}
    while len(refused) < 2:
        report = line.receive()
        if isinstance(report, RequestRefused):
            refused[report.request_id] = str(report.error)
    assert "n=9" in refused["a"]
    assert "beam_width=99" in refused["b"]
    line.send(add("d"))
    assert text_of(list(line.deltas("d"))) == ANSWER


def test_steps_continue_and_deltas_merge_while_the_client_does_not_read(
    line: HttpSide, engine: Engine
):
    line.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    before = engine.stats().num_finished
    for i in range(8):
        line.send(add(str(i), "Hello", max_tokens=240, ignore_eos=True, logprobs=20))
    end = time.monotonic() + 60
    while engine.has_work or engine.stats().num_finished < before + 8:
        assert time.monotonic() < end
        time.sleep(0.05)
    counts: dict[str, list[int]] = {}
    while len(counts) < 8 or not all(sum(each) == 240 for each in counts.values()):
        report = line.receive()
        for delta in report.deltas if isinstance(report, EngineUpdate) else ():
            num_tokens = sum(len(each.token_ids) for each in delta.deltas)
            counts.setdefault(delta.request_id, []).append(num_tokens)
    assert min(map(len, counts.values())) < 200  # the worker has sent many tokens in one delta
    assert max(max(each) for each in counts.values()) > 20


def test_many_commands_do_not_delay_running_requests(line: HttpSide, engine: Engine):
    add_request = engine.add_request

    def add_slowly(*args: Any, **options: Any) -> Any:
        time.sleep(0.02)
        return add_request(*args, **options)

    line.send(add("first", "Hello", max_tokens=200, ignore_eos=True))
    next(line.deltas("first"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "add_request", add_slowly)
        for i in range(40):
            line.send(add(str(i), max_tokens=1))
        gaps = []
        last = time.monotonic()
        for _ in line.deltas("first"):
            gaps.append(time.monotonic() - last)
            last = time.monotonic()
    assert max(gaps) < 0.7, "all commands at once take at least 0.8 s"
    assert len(gaps) > 40


def test_prompt_logprobs_arrive_in_chunks_before_the_answer(line: HttpSide):
    """Between two chunks of prompt logprobs, the engine can send tokens of other requests."""
    prompt = "ab" * 100
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "LOGPROBS_CHUNK_SIZE", 16)
        for name in ("a", "b"):
            line.send(add(name, prompt, max_tokens=20, ignore_eos=True, prompt_logprobs=3))
        deltas = list(line.deltas("a"))
    sizes = [len(each.prompt_logprobs) for each in deltas if each.prompt_logprobs]
    assert sizes == [16] * 12 + [8]
    first = next(i for i, each in enumerate(deltas) if each.deltas)
    assert all(each.prompt_logprobs is None for each in deltas[first + 1 :])
    assert sum(len(d.token_ids) for each in deltas for d in each.deltas) == 20
    assert [each.finished for each in deltas] == [False] * (len(deltas) - 1) + [True]
    line.send(add("c", prompt, max_tokens=1, prompt_logprobs=3))
    line.send(AbortRequests(["a", "b", "c"]))


def test_prompt_logprobs_of_requests_are_sent_in_turns(line: HttpSide):
    """The prompt logprobs of a short prompt do not wait for all chunks of a longer prompt."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "LOGPROBS_CHUNK_SIZE", 4)
        line.send(add("long", "ab" * 120, max_tokens=1, prompt_logprobs=0))
        line.send(add("short", "ab" * 10, max_tokens=1, prompt_logprobs=0))
        list(line.deltas("short"))
        left = sum(len(each.prompt_logprobs or ()) for each in line.deltas("long"))
    assert left > 100


def test_abort_and_stop_commands_end_running_requests(line: HttpSide, engine: Engine):
    line.send(add("a", "Hello", max_tokens=200, ignore_eos=True))
    next(line.deltas("a"))
    line.send(AbortRequests(["a", "unknown"]))
    line.send(add("b"))
    assert text_of(list(line.deltas("b"))) == ANSWER
    line.send(add("c", "Hello", max_tokens=200, ignore_eos=True))
    line.send(StopEngine())


def test_losing_the_connection_inside_a_command_frees_all_blocks(line: HttpSide, engine: Engine):
    line.send(add("a", "Hello", max_tokens=200, ignore_eos=True))
    line.sock.sendall(frame_message(encode(add("b")))[:10])


def test_message_with_an_invalid_header_raises_eof_error():
    ours, theirs = socket.socketpair()
    link = MessageSocket(theirs)
    ours.sendall(b"GET / HTTP/1.1\r\n\r\n")
    with pytest.raises(EOFError, match="not jpaged"):
        link.receive(1)
    link.close()
    ours.close()


MODULES = "import jpaged.serve.http.app, jpaged.serve.options, jpaged.serve.http.lifecycle, sys;"


def test_http_process_imports_neither_jax_nor_transformers_nor_torch():
    """Without these imports, the HTTP process starts quickly and does not use the GPU."""
    code = f"{MODULES} print(*({{'jax', 'transformers', 'torch'}} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"


def test_invalid_message_from_the_engine_closes_the_client():
    async def scenario() -> str | None:
        ours, theirs = socket.socketpair()
        with theirs:
            client = await EngineClient.connect(ours)
            send(theirs, b"\xc1")  # MessagePack never uses the byte 0xC1
            with pytest.raises(RuntimeError, match="sent an invalid message"):
                await asyncio.wait_for(client.wait_ready(), 5)
            await client.stop()
            return client.close_reason

    assert "sent an invalid message" in (asyncio.run(scenario()) or "")
