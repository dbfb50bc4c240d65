"""Test HTTP connections with clients that send too much, too slowly, or nothing."""

import asyncio
import errno
import json
import resource
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

import httpx
import pytest
import uvicorn
from serve_helpers import Server
from server_process import STUB, ServerProcess
from starlette.responses import PlainTextResponse

from jpaged.serve.http import connections
from jpaged.serve.http.access import UNAUTHENTICATED_PATHS
from jpaged.serve.http.connections import SurplusGuard, make_bounded_protocol
from jpaged.serve.http.exchange import run_while_connected
from jpaged.serve.http.lifecycle import HttpServer, LoopExceptionHandler, listen, raise_file_limit
from jpaged.serve.options import Limits

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], object]
STANDARD = Limits()
REQUEST = b"GET / HTTP/1.1\r\nHost: a\r\n"


@asynccontextmanager
async def server(
    app: Any = None, limits: Limits = STANDARD, num_spare: int = 64, **options: Any
) -> AsyncIterator[int]:
    """Yield the port of a server that runs `app`; the default app answers "yes"."""
    config = uvicorn.Config(
        app or PlainTextResponse("yes"),
        http=make_bounded_protocol(limits, num_spare),
        lifespan="off",
        log_level="error",
        timeout_graceful_shutdown=1,
        **options,
    )
    http = HttpServer(config)
    with listen("127.0.0.1", 0) as sock:
        serving = asyncio.create_task(http.serve([sock]))
        while not http.started:
            await asyncio.sleep(0.01)
        yield sock.getsockname()[1]
        http.should_exit = True
        await serving


async def answer_to(port: int, *pieces: bytes, pause: float = 0.0) -> bytes:
    """Send `pieces`, then return all bytes received until the server closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(pause)
        return await asyncio.wait_for(reader.read(), 10)
    except ConnectionError:
        return b""
    finally:
        writer.close()


def test_request_sent_in_pieces_is_answered(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connections, "HEADER_TIMEOUT_S", 2.0)

    async def scenario() -> None:
        async with server() as port:
            close = b"Connection: close\r\n\r\n"
            assert (await answer_to(port, REQUEST, close, pause=0.05)).endswith(b"yes")

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "pieces",
    [(), (b"G",), (REQUEST,), (REQUEST + b"\r\n", REQUEST)],
    ids=["nothing", "a letter", "no end", "the second one"],
)
def test_incomplete_headers_close_the_connection_at_the_timeout(
    monkeypatch: pytest.MonkeyPatch, pieces: tuple[bytes, ...]
):
    monkeypatch.setattr(connections, "HEADER_TIMEOUT_S", 0.3)

    async def scenario() -> None:
        async with server(timeout_keep_alive=60) as port:
            answer = await asyncio.wait_for(answer_to(port, *pieces, pause=0.05), 5)
            assert answer.count(b"yes") == len(pieces) - 1 if len(pieces) > 1 else not answer

    asyncio.run(scenario())


def test_too_large_headers_return_431():
    async def scenario() -> None:
        async with server(limits=Limits(max_header_bytes=1024)) as port:
            answer = await answer_to(port, REQUEST + b"X: " + b"y" * 5000)
            assert answer.startswith(b"HTTP/1.1 431")

    asyncio.run(scenario())


async def yes(scope: Any, receive: Any, send: Any) -> None:
    await PlainTextResponse("yes")(scope, receive, send)


def test_connections_above_max_connections_get_503_except_for_health_routes():
    async def scenario() -> None:
        async with server(SurplusGuard(yes), Limits(max_connections=2)) as port:
            early = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
            answer = await answer_to(port, REQUEST + b"\r\n")
            assert answer.startswith(b"HTTP/1.1 503")
            assert b"retry-after" in answer
            assert b'"type":"server_error"' in answer
            # the server answers a health request, then closes the connection
            for path in UNAUTHENTICATED_PATHS:
                answer = await answer_to(
                    port, REQUEST.replace(b"/ ", path.encode() + b" ") + b"\r\n"
                )
                assert answer.endswith(b"yes")
            # the server answers requests on connections within the limit
            for reader, writer in early:
                writer.write(REQUEST + b"Connection: close\r\n\r\n")
                assert (await reader.read()).endswith(b"yes")
                writer.close()
            assert (await answer_to(port, REQUEST + b"Connection: close\r\n\r\n")).endswith(b"yes")

    asyncio.run(scenario())


@pytest.mark.parametrize("said", [b"", b"GET / HT"], ids=["nothing", "a little"])
def test_server_closes_old_idle_connections_to_answer_new_clients(said: bytes):
    """The server keeps the first `max_connections` connections, even if they are idle."""

    async def scenario() -> None:
        async with server(SurplusGuard(yes), Limits(max_connections=1), num_spare=2) as port:
            silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(9)]
            for _, writer in silent:
                writer.write(said)
            for _ in range(3):
                answer = await answer_to(port, b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
                assert answer.endswith(b"yes")
            for reader, _ in silent[1:-2]:  # the server has closed these idle connections
                assert await is_closed_by_server(reader)
            reader, writer = silent[0]  # within max_connections
            writer.write(REQUEST.removeprefix(said) + b"Connection: close\r\n\r\n")
            assert (await reader.read()).endswith(b"yes")
            for _, writer in silent:
                writer.close()

    asyncio.run(scenario())


async def is_closed_by_server(reader: asyncio.StreamReader) -> bool:
    try:
        return await asyncio.wait_for(reader.read(), 5) == b""
    except ConnectionError:
        return True


def test_file_limit_is_raised_or_max_connections_lowered(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    asked = []
    hard = 4000
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (min(400, hard), hard))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: asked.append(limits))
    assert raise_file_limit(100) == (100, connections.NUM_SPARE_CONNECTIONS)
    assert asked == []
    assert raise_file_limit(1000) == (1000, connections.NUM_SPARE_CONNECTIONS)
    ((soft, most),) = asked
    assert 1000 + connections.NUM_SPARE_CONNECTIONS < soft < 4000 == most
    assert capsys.readouterr().err == ""
    for hard, fewer, spare in ((4000, 3808, 64), (256, 128, 64), (128, 48, 48), (30, 1, 1)):
        assert raise_file_limit(5000) == (fewer, spare)
        assert asked[-1] == (hard, hard) or hard < 400
        said = capsys.readouterr().err
        assert f"--max-connections is {fewer}, not 5000" in said
        assert f"{hard} open files" in said
        assert said.count("\n") == 1


def test_new_connections_wait_while_file_descriptors_run_out(
    caplog: pytest.LogCaptureFixture, capsys: Any
):
    attempts = []

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(LoopExceptionHandler().handle)

        def fail() -> NoReturn:
            attempts.append(loop.time())
            raise OSError(errno.EMFILE, "Too many open files")

        with listen("127.0.0.1", 0) as sock:
            made = asyncio.Event()
            serving = await loop.create_server(
                lambda: ClosingProtocol(made), sock=sock, backlog=2048, start_serving=False
            )
            monkey = pytest.MonkeyPatch()
            monkey.setattr(sock, "_accept", fail, raising=False)
            await serving.start_serving()
            _, writer = await asyncio.open_connection(*sock.getsockname())
            await asyncio.sleep(1.3)
            assert not made.is_set()
            monkey.undo()
            await asyncio.wait_for(made.wait(), 5)
            writer.close()
            serving.close()
            await serving.wait_closed()

    asyncio.run(scenario())
    # without file descriptors, asyncio tries to accept a connection only once per second
    assert 1 <= len(attempts) <= 3
    assert "Traceback" not in caplog.text
    assert capsys.readouterr().err.count("Too many open files") == 1


class ClosingProtocol(asyncio.Protocol):
    """A protocol that sets an event when a connection is made, and closes the connection."""

    def __init__(self, made: asyncio.Event):
        self.made = made

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.made.set()
        transport.close()


def test_event_loop_exceptions_unrelated_to_file_limits_are_logged(
    caplog: pytest.LogCaptureFixture,
):
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(LoopExceptionHandler().handle)
        loop.call_exception_handler({"message": "it broke", "exception": OSError(1, "x")})

    asyncio.run(scenario())
    assert "it broke" in caplog.text


def test_answers_on_a_keep_alive_connection_do_not_wait_for_tcp_acknowledgements():
    async def seconds() -> list[float]:
        async with server() as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            times = []
            for _ in range(60):
                start = time.perf_counter()
                writer.write(REQUEST + b"\r\n")
                await reader.readuntil(b"\r\n\r\nyes")
                times.append(time.perf_counter() - start)
            writer.close()
            return times

    assert is_quick(asyncio.run(seconds()))


def is_quick(times: list[float]) -> bool:
    """Return whether the server sent its answers without waiting for a TCP acknowledgement.

    Waiting for an acknowledgement adds 40 ms to each answer after the first few. Otherwise an
    answer takes 0.5 ms. Only the fifth fastest answer is checked, because a busy machine delays
    some answers.
    """
    return sorted(times[20:])[4] < 0.005


def test_real_server_answers_without_delay_and_refuses_unknown_hosts(real_server: ServerProcess):
    url = f"{real_server.url}/version"
    with httpx.Client() as client:
        assert is_quick([client.get(url).elapsed.total_seconds() for _ in range(60)])
        assert client.get(url, headers={"Host": "evil.example"}).status_code == 403


def test_server_with_few_file_descriptors_answers_despite_idle_connections(compilation_cache: Path):
    server = ServerProcess(compilation_cache, num_files=128, environment=STUB)
    try:
        where = urlsplit(server.url)
        address = (where.hostname, where.port)
        silent = [socket.create_connection(address) for _ in range(300)]
        for path in sorted(UNAUTHENTICATED_PATHS) * 3:
            assert httpx.get(server.url + path, timeout=5).status_code == 200
        for sock in silent:
            sock.close()
        end = time.monotonic() + 10
        while httpx.get(f"{server.url}/version").status_code != 200:
            assert time.monotonic() < end
        asked = {"prompt": "a", "max_tokens": 1}
        assert httpx.post(f"{server.url}/v1/completions", json=asked).status_code == 200
        assert server.log.count("open files") == 1
        assert "--max-connections is 48" in server.log
        assert "Traceback" not in server.log
    finally:
        server.end()


async def drip(port: int, *pieces: bytes, seconds: float = 10.0) -> tuple[bytes, float]:
    """Send `pieces`. Then send an "x" every 50 ms until the server closes the connection.

    Return the server's answer and the elapsed seconds. If the connection is still open after
    `seconds`, the returned answer is "it stays".
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    start = time.monotonic()
    for piece in pieces:
        writer.write(piece)
        await asyncio.sleep(0.05)
    reading = asyncio.create_task(reader.read())
    try:
        while not reading.done() and time.monotonic() - start < seconds:
            writer.write(b"x")
            await asyncio.sleep(0.05)
        return (await reading if reading.done() else b"it stays"), time.monotonic() - start
    except ConnectionError:
        return b"", time.monotonic() - start
    finally:
        reading.cancel()
        writer.close()


POST = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
DRIPPING = POST + b"Content-Length: 100000\r\n\r\n"


def test_server_closes_the_connection_if_the_request_body_continues_after_the_response(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(connections, "LINGER_TIME_S", 0.3)

    async def scenario() -> None:
        async with server() as port:
            answer, seconds = await drip(port, DRIPPING)
            assert answer.endswith(b"yes")
            assert b"connection: close" in answer.lower()
            assert seconds < 5

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "pieces",
    [(DRIPPING,), (POST, b"X: y\r\n" * 3, b"Content-Length: 99999\r\n\r\n")],
    ids=["a body", "headers and a body"],
)
def test_connection_of_a_slow_request_is_closed_at_the_header_or_body_timeout(
    monkeypatch: pytest.MonkeyPatch, pieces: tuple[bytes, ...]
):
    monkeypatch.setattr(connections, "HEADER_TIMEOUT_S", 0.4)
    ends = []

    async def read_all(scope: Any, receive: Any, send: Any) -> None:
        while (message := await receive()).get("more_body"):
            pass
        ends.append(message["type"])

    async def scenario() -> None:
        async with server(read_all, Limits(body_timeout=0.3)) as port:
            answer, seconds = await drip(port, *pieces)
            assert answer == b""
            assert 0.5 < seconds < 5
            assert ends == ["http.disconnect"]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"PUT /version", 405),
        (b"POST /nowhere", 404),
        (b"POST /v1/completions", 413),
        (b"POST /v1/models", 401),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else "",
)
def test_server_closes_the_connection_if_the_request_body_continues_after_an_error(
    serve: Any, monkeypatch: pytest.MonkeyPatch, head: bytes, status: int
):
    monkeypatch.setattr(connections, "LINGER_TIME_S", 0.3)
    key = b"Authorization: Bearer k\r\n" if status != 401 else b""

    async def scenario(own: Server) -> None:
        async with server(own.app) as port:
            asked = POST.replace(b"POST /", head) + key + b"Content-Length: 99999999\r\n\r\n"
            answer, seconds = await drip(port, asked)
            assert answer.startswith(b"HTTP/1.1 %d" % status)
            assert seconds < 5

    serve(scenario, api_keys=("k",))


def test_client_gets_the_response_even_if_the_server_never_reads_the_large_request_body():
    def ask(port: int) -> bytes:
        with socket.create_connection(("127.0.0.1", port)) as sock:
            sock.sendall(DRIPPING.replace(b"100000", b"20000000"))
            for _ in range(20):
                sock.sendall(b"x" * 2**20)
            return sock.recv(10000)

    async def scenario() -> None:
        async with server() as port:
            assert (await asyncio.to_thread(ask, port)).endswith(b"yes")

    asyncio.run(scenario())


def test_connection_is_reused_after_a_complete_body():
    async def scenario() -> None:
        async with server(echo) as port:
            asked = POST + b"Content-Length: 2\r\n\r\n{}"
            answer = await answer_to(port, asked, asked, END, pause=0.05)
            assert answer.count(b"200 OK") == 3

    asyncio.run(scenario())


def body_of(answer: bytes) -> dict[str, Any]:
    return json.loads(answer.partition(b"\r\n\r\n")[2])


LARGE = b"X: " + b"y" * 100_000 + b"\r\n"
END = REQUEST + b"Connection: close\r\n\r\n"


@pytest.mark.parametrize(
    ("asked", "status", "words"),
    [
        (REQUEST + LARGE + b"\r\n", 431, "32768 bytes"),
        (REQUEST + b"X: y\r\n" * 10_000 + b"\r\n", 431, "32768 bytes"),
        (b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n", 431, "32768 bytes"),
        (
            POST + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            400,
            "send only one",
        ),
        (POST + b"Transfer-Encoding: gzip\r\n\r\n", 501, "Transfer-Encoding"),
        (b"GET / HTTP/1.1\r\n\r\n", 400, "Host"),
        (b"GET / HTTP/9\r\nHost: a\r\n\r\n", 400, "illegal request line"),
        (b"\x16\x03\x01\x02\x00\x01\xfc", 400, "illegal request line"),
        (REQUEST + b"secret name: x\r\n\r\n", 400, "illegal header line"),
        (POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", 400, "illegal chunk header"),
    ],
    ids=[
        "a large header",
        "many headers",
        "a large target",
        "two lengths",
        "an encoding",
        "no host",
        "a version",
        "TLS",
        "a header's name",
        "a chunk",
    ],
)
def test_invalid_http_gets_an_error_in_openai_format(asked: bytes, status: int, words: str):
    async def scenario() -> None:
        async with server(echo) as port:
            # Send the invalid request alone. Then send a valid request and the invalid request in
            # one write.
            for before in (b"", REQUEST + b"\r\n"):
                answer = await answer_to(port, before + asked)
                if before:
                    assert answer.count(b"200 OK") == 1
                    answer = answer[answer.index(b"HTTP/1.1 %d" % status) :]
                assert answer.startswith(b"HTTP/1.1 %d" % status)
                assert b"application/json" in answer
                assert b"connection: close" in answer.lower()
                error = body_of(answer)["error"]
                assert words in error["message"]
                assert "secret" not in error["message"]
                assert error["type"] == "invalid_request_error"

    asyncio.run(scenario())


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Read the whole body, then answer with the request's path, query and host."""
    while (message := await receive()).get("more_body"):
        pass
    if message["type"] == "http.request":
        host = dict(scope["headers"])[b"host"].decode()
        said = f"{scope['path']}?{scope['query_string'].decode()} {host}"
        await PlainTextResponse(said)(scope, receive, send)


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (b"http://b:80/v1/models?x=1", b"/v1/models?x=1 b:80"),
        (b"HTTPS://b", b"/? b"),
        (b"http://b?x", b"/?x b"),
        (b"/http://b/", b"/http://b/? a"),
    ],
)
def test_absolute_request_target_sets_path_and_host(target: bytes, expected: bytes):
    async def scenario() -> None:
        async with server(echo) as port:
            asked = b"GET %s HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n" % target
            assert (await answer_to(port, asked)).endswith(b"\r\n\r\n" + expected)

    asyncio.run(scenario())


class SlowApp:
    """An ASGI application that answers after a delay, unless the client disconnects.

    Attributes:
        num_asked, num_gone: Number of requests, and number of clients that disconnected.
    """

    def __init__(self, seconds: float):
        self.seconds = seconds
        self.num_asked = self.num_gone = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.num_asked += 1
        await run_while_connected(receive, self._answer(scope, receive, send))

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await asyncio.sleep(self.seconds)
        except asyncio.CancelledError:
            self.num_gone += 1
            raise
        await PlainTextResponse("yes")(scope, receive, send)


async def half_closed(port: int, asked: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(asked)
    writer.write_eof()
    answer = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    return answer


def test_half_closed_client_gets_its_answer(monkeypatch: pytest.MonkeyPatch):
    async def scenario() -> None:
        app = SlowApp(0.3)
        monkeypatch.setattr(connections, "PROBE_DELAY_S", 5.0)
        async with server(app) as port:
            asked = REQUEST + b"\r\n"
            for request in (asked, asked.replace(b"1.1", b"1.0")):
                answer = await half_closed(port, request)
                assert answer.startswith(b"HTTP/1.1 200")
                assert answer.endswith(b"yes")
            assert (await half_closed(port, asked * 3)).count(b"200 OK") == 3
            # The server does not answer an incomplete request.
            assert await half_closed(port, DRIPPING) == b""
            monkeypatch.setattr(connections, "PROBE_DELAY_S", 0.05)
            answer = await half_closed(port, asked)
            assert answer.startswith(b"HTTP/1.1 102 Processing\r\n\r\nHTTP/1.1 200 OK\r\n")
            assert app.num_gone == 1
            # To find out whether a client still waits, the server sends an interim response (status
            # 102). HTTP/1.0 has no interim responses, so the server treats an HTTP/1.0 client that
            # closed its sending side as disconnected.
            assert await half_closed(port, asked.replace(b"1.1", b"1.0")) == b""
            assert app.num_gone == 2

    asyncio.run(scenario())


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
def test_disconnect_cancels_the_running_request(monkeypatch: pytest.MonkeyPatch, version: bytes):
    monkeypatch.setattr(connections, "PROBE_DELAY_S", 0.1)

    async def scenario() -> None:
        app = SlowApp(30)
        async with server(app) as port:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(REQUEST.replace(b"1.1", version) + b"\r\n")
            while not app.num_asked:
                await asyncio.sleep(0.01)
            writer.close()
            start = time.monotonic()
            while not app.num_gone:
                assert time.monotonic() - start < 5
                await asyncio.sleep(0.01)

    asyncio.run(scenario())


LONG_ANSWER = b"x" * (20 * 2**20)


def test_stalled_reader_is_disconnected_but_slow_reader_is_not():
    async def scenario() -> None:
        async with server(PlainTextResponse(LONG_ANSWER), Limits(stall_timeout=1.0)) as port:
            silent = [ask(port, last) for last in (b"", b"Connection: close\r\n")]
            await asyncio.sleep(2.5)
            for sock in silent:
                assert await asyncio.to_thread(count_bytes, sock, 0.0) < len(LONG_ANSWER)
            slow = ask(port, b"Connection: close\r\n")
            assert await asyncio.to_thread(count_bytes, slow, 0.1) > len(LONG_ANSWER)

    def ask(port: int, header: bytes) -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", port))
        sock.sendall(REQUEST + header + b"\r\n")
        return sock

    asyncio.run(scenario())


def count_bytes(sock: socket.socket, pause: float) -> int:
    """Read until the connection ends, pausing after each read; return the number of bytes."""
    num_bytes = 0
    with sock:
        try:
            while data := sock.recv(2**20, socket.MSG_WAITALL):
                num_bytes += len(data)
                time.sleep(pause)
        except ConnectionError:
            pass
    return num_bytes
