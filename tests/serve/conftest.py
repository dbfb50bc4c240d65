"""A server in this process, its engine in a thread; and the census after each test."""

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import ASGIApp

from jpaged import Engine
from jpaged.serve.app import make_app
from jpaged.serve.client import EngineClient
from jpaged.serve.lifecycle import open_door
from jpaged.serve.limits import Limits
from jpaged.serve.link import Link
from jpaged.serve.serving import ServeConfig, Serving
from jpaged.serve.worker import Worker

SMALL: dict[str, Any] = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "max_model_len": 256,
    "num_blocks": 129,
}
QUESTION, ANSWER = "Count from 3 to 7", "\n3, 4, 5, 6, 7"


@pytest.fixture(scope="session")
def compilation_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache for the whole run: engines of the same shapes compile once."""
    return tmp_path_factory.getbasetemp().parent / "jax-cache"


@pytest.fixture(scope="session")
def all_engines() -> dict[tuple, Engine]:
    return {}


@pytest.fixture
def engines(all_engines: dict[tuple, Engine], compilation_cache: Path) -> Callable[..., Engine]:
    """Makes an engine, or gives one of these options that was made before."""

    def make(**options: Any) -> Engine:
        options = {**SMALL, **options}
        key = tuple(sorted(options.items()))
        if key not in all_engines:
            all_engines[key] = Engine(**options, compilation_cache_dir=compilation_cache)
        return all_engines[key]

    return make


@pytest.fixture
def engine(engines: Callable[..., Engine]) -> Engine:
    return engines()


@dataclass
class Server:
    """A server without a socket for HTTP: requests go straight to its application."""

    engine: Engine
    serving: Serving
    app: ASGIApp
    http: httpx.AsyncClient
    worker: threading.Thread

    async def complete(self, **fields: Any) -> dict[str, Any]:
        """The answer of `/v1/completions`, which is one."""
        answer = await self.http.post("/v1/completions", json=fields)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def canary(self) -> None:
        """A request gets its known answer."""
        body = await self.complete(prompt=QUESTION, max_tokens=64, temperature=0)
        assert body["choices"][0]["text"] == ANSWER
        assert body["choices"][0]["finish_reason"] == "stop"

    async def idle(self, seconds: float = 5.0) -> None:
        """Wait until nothing is in flight and all blocks are back; the books are in order."""
        end = time.monotonic() + seconds
        while self.busy:
            assert time.monotonic() < end, f"still busy: {self.engine.stats()}"
            await asyncio.sleep(0.01)
        self.engine.check_integrity()

    @property
    def busy(self) -> bool:
        stats = self.engine.stats()
        in_flight = self.serving.num_requests or stats.num_running or stats.num_waiting
        blocks_out = stats.num_free_blocks != stats.num_blocks
        return bool(in_flight or blocks_out or self.engine.has_unfinished_requests)


Serve = Callable[..., Any]


class Servers:
    """Starts servers inside the running event loop, and ends them."""

    def __init__(self) -> None:
        self.started: list[Server] = []

    async def start(self, engine: Engine, **config: Any) -> Server:
        ours, theirs = socket.socketpair()
        worker = threading.Thread(target=run_worker, args=(engine, theirs), daemon=True)
        worker.start()
        limits = Limits(**config.pop("limits", {}))
        serving = Serving(replace(ServeConfig(limits=limits), **config))
        client = await EngineClient.connect(ours)
        await open_door(serving, client)
        app = make_app(serving)
        http = httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://jpaged", timeout=60
        )
        self.started.append(Server(engine, serving, app, http, worker))
        return self.started[-1]

    async def end(self) -> None:
        for server in self.started:
            alive = server.serving.engine.death is None
            if alive:
                await server.idle()
            await server.http.aclose()
            await server.serving.engine.stop()
            server.serving.texts.close()
            await asyncio.to_thread(server.worker.join, 10)
            assert not server.worker.is_alive()


def run_worker(engine: Engine, sock: socket.socket) -> None:
    """A worker in a thread; what it raises, its client is told."""
    try:
        Worker(engine, Link(sock)).run()
    except RuntimeError:
        pass


Scenario = Callable[[Server], Coroutine[Any, Any, None]]


@pytest.fixture
def serve(engine: Engine) -> Iterator[Callable[..., None]]:
    """Runs a scenario, an async function of a `Server`, to its end; then all blocks are back."""

    def run(scenario: Scenario, own_engine: Engine | None = None, **config: Any) -> None:
        async def whole() -> None:
            servers = Servers()
            server = await servers.start(own_engine or engine, **config)
            try:
                await scenario(server)
            finally:
                await servers.end()

        asyncio.run(whole())

    yield run


async def events_of(answer: httpx.Response) -> AsyncIterator[str]:
    """The data of a stream's events."""
    async for line in answer.aiter_lines():
        if line.startswith("data: "):
            yield line.removeprefix("data: ")
