"""Connections of clients that send too much, too slowly, or nothing."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from starlette.responses import PlainTextResponse

from jpaged.serve import connections
from jpaged.serve.connections import PunctualProtocol
from jpaged.serve.lifecycle import HttpServer

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], object]
REQUEST = b"GET / HTTP/1.1\r\nHost: a\r\n"


@asynccontextmanager
async def server(**options: Any) -> AsyncIterator[int]:
    """The port of a server that says yes."""
    config = uvicorn.Config(
        PlainTextResponse("yes"),
        port=0,
        http=PunctualProtocol,
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


def test_too_many_connections():
    async def scenario() -> None:
        async with server(limit_concurrency=2) as port:
            waiting = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
            answer = await answer_to(port, REQUEST + b"Connection: close\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 503")
            for _, writer in waiting:
                writer.close()

    asyncio.run(scenario())
