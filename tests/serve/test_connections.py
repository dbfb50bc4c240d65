"""Connections of clients that send too much, too slowly, or nothing."""

import asyncio
import resource
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from starlette.responses import PlainTextResponse

from jpaged.serve import connections
from jpaged.serve.auth import OPEN_PATHS
from jpaged.serve.connections import BoundedProtocol, SurplusGuard
from jpaged.serve.lifecycle import HttpServer, allow_connections

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], object]
REQUEST = b"GET / HTTP/1.1\r\nHost: a\r\n"


@asynccontextmanager
async def server(app: Any = None, **options: Any) -> AsyncIterator[int]:
    """The port of a server that says yes."""
    config = uvicorn.Config(
        app or PlainTextResponse("yes"),
        port=0,
        http=BoundedProtocol,
        lifespan="off",
        log_level="error",
        **options,
    )
    http = HttpServer(config)
    serving = asyncio.create_task(http.serve())
    while not http.started:
        await asyncio.sleep(0.01)
    yield http.servers[0].sockets[0].getsockname()[1]
    http.should_exit = True
    await serving


async def answer_to(port: int, *pieces: bytes, pause: float = 0.0) -> bytes:
    """All that comes back until the server hangs up."""
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


def test_a_whole_request_also_slowly(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connections, "HEADER_TIMEOUT", 2.0)

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
def test_headers_that_do_not_come_in_time(
    monkeypatch: pytest.MonkeyPatch, pieces: tuple[bytes, ...]
):
    monkeypatch.setattr(connections, "HEADER_TIMEOUT", 0.3)

    async def scenario() -> None:
        async with server(timeout_keep_alive=60) as port:
            answer = await asyncio.wait_for(answer_to(port, *pieces, pause=0.05), 5)
            assert answer.count(b"yes") == len(pieces) - 1 if len(pieces) > 1 else not answer

    asyncio.run(scenario())


def test_headers_that_are_too_large():
    async def scenario() -> None:
        async with server(h11_max_incomplete_event_size=1024) as port:
            answer = await answer_to(port, REQUEST + b"X: " + b"y" * 5000)
            assert answer.startswith(b"HTTP/1.1 400")

    asyncio.run(scenario())


async def yes(scope: Any, receive: Any, send: Any) -> None:
    await PlainTextResponse("yes")(scope, receive, send)


def test_too_many_connections():
    async def scenario() -> None:
        async with server(SurplusGuard(yes), limit_concurrency=2) as port:
            early = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
            answer = await answer_to(port, REQUEST + b"\r\n")
            assert answer.startswith(b"HTTP/1.1 503")
            assert b"retry-after" in answer
            assert b'"type":"server_error"' in answer
            for path in OPEN_PATHS:  # and then it hangs up
                answer = await answer_to(
                    port, REQUEST.replace(b"/ ", path.encode() + b" ") + b"\r\n"
                )
                assert answer.endswith(b"yes")
            for reader, writer in early:  # who was there first is served
                writer.write(REQUEST + b"Connection: close\r\n\r\n")
                assert (await reader.read()).endswith(b"yes")
                writer.close()
            assert (await answer_to(port, REQUEST + b"Connection: close\r\n\r\n")).endswith(b"yes")

    asyncio.run(scenario())


def test_more_connections_than_get_an_answer(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connections, "NUM_SPARE", 1)

    async def scenario() -> None:
        async with server(SurplusGuard(yes), limit_concurrency=1) as port:
            waiting = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
            assert await answer_to(port, REQUEST + b"\r\n") == b""
            for _, writer in waiting:
                writer.close()
            await asyncio.sleep(0.1)
            assert (await answer_to(port, REQUEST + b"Connection: close\r\n\r\n")).endswith(b"yes")

    asyncio.run(scenario())


def test_files_for_all_connections(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    asked = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (400, 4000))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: asked.append(limits))
    allow_connections(100)
    assert asked == []
    allow_connections(1000)
    ((soft, hard),) = asked
    assert 1000 + connections.NUM_SPARE < soft < 4000 == hard
    assert capsys.readouterr().err == ""
    allow_connections(5000)
    assert asked[1:] == [(4000, 4000)]
    assert "4000 open files, too few for --max-connections 5000" in capsys.readouterr().err
