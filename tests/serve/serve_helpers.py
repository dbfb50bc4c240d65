"""A server in this process, its engine in a thread."""

import asyncio
import atexit
import contextlib
import functools
import json
import socket
import threading
import time
from base64 import b64encode
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any

import httpx
from starlette.types import ASGIApp

from jpaged import Engine
from jpaged.processes import MessageSocket
from jpaged.serve.engine.client import EngineClient
from jpaged.serve.engine.tokenizing_process import TokenizingProcess, TokenizingSettings
from jpaged.serve.engine.worker import EngineWorker
from jpaged.serve.http.app import make_app
from jpaged.serve.http.lifecycle import start_serving
from jpaged.serve.http.serving import ServerState
from jpaged.serve.options import Limits, ServeConfig

SMALL: dict[str, Any] = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "max_model_len": 256,
    "num_blocks": 129,
}
QUESTION, ANSWER = "Count from 3 to 7", "\n3, 4, 5, 6, 7"


@dataclass
class Server:
    """A server without a socket for HTTP: requests go straight to its application."""

    engine: Engine
    serving: ServerState
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

    async def idle(self, seconds: float = 30.0) -> None:
        """Wait until nothing is in flight and all blocks are back; the accounts agree.

        The engine's thread may be in the middle of a change, so that only what lasts is a fault.
        """
        end = time.monotonic() + seconds
        while True:
            try:
                assert not self.busy, f"still busy: {self.engine.stats()}"
                self.engine.check_integrity()
            except (AssertionError, RuntimeError):
                if time.monotonic() > end:
                    raise
                await asyncio.sleep(0.01)
            else:
                return

    @property
    def busy(self) -> bool:
        try:
            stats = self.engine.stats()
        except RuntimeError:  # the worker's thread changed what was being counted
            return True
        in_flight = self.serving.num_requests or stats.num_running or stats.num_waiting
        blocks_out = stats.num_free_blocks != stats.num_blocks
        return bool(in_flight or blocks_out or self.engine.has_unfinished_requests)


class Servers:
    """Starts servers inside the running event loop, and ends them."""

    def __init__(self) -> None:
        self.started: list[Server] = []

    async def start(self, engine: Engine, **config: Any) -> Server:
        limits = Limits(**config.pop("limits", {}))
        serving = ServerState(replace(ServeConfig(limits=limits), **config))
        ours, theirs = socket.socketpair()
        worker = threading.Thread(target=run_worker, args=(engine, theirs), daemon=True)
        worker.start()
        client = await EngineClient.connect(ours)
        await start_serving(serving, client, kept_tokenizing_process)
        app = make_app(serving)
        http = httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://jpaged", timeout=60
        )
        self.started.append(Server(engine, serving, app, http, worker))
        return self.started[-1]

    async def end(self) -> None:
        for server in self.started:
            alive = server.serving.engine.close_reason is None
            if alive:
                await server.idle()
            await server.http.aclose()
            await server.serving.engine.stop()
            server.serving.tokenizing.close()
            await asyncio.to_thread(server.worker.join, 10)
            assert not server.worker.is_alive()


@functools.cache
def kept_tokenizing_process(settings: TokenizingSettings) -> TokenizingProcess:
    """Servers of the same settings share one, for it takes a second to start."""
    process = TokenizingProcess(settings)
    atexit.register(process.close)
    return process


def run_worker(engine: Engine, sock: socket.socket) -> None:
    """A worker in a thread; what it raises, its client is told."""
    with contextlib.suppress(RuntimeError):
        EngineWorker(engine, MessageSocket(sock)).run()


Scenario = Callable[[Server], Coroutine[Any, Any, None]]


async def events_of(answer: httpx.Response) -> AsyncIterator[str]:
    """The data of a stream's events."""
    async for line in answer.aiter_lines():
        if line.startswith("data: "):
            yield line.removeprefix("data: ")


def bearer(key: str) -> dict[str, str]:
    """The header by which programs bring a key."""
    return {"Authorization": f"Bearer {key}"}


def basic(user: str, password: str) -> dict[str, str]:
    """The header by which browsers bring a name and a password."""
    return {"Authorization": f"Basic {b64encode(f'{user}:{password}'.encode()).decode()}"}


class RawRequest:
    """One POST straight to an application, whose client reads what it likes and can go.

    Attributes:
        status: Of the answer; 0 before it.
        body: What was read so far.
        paused: While set, the client reads nothing.
    """

    def __init__(self, app: ASGIApp, path: str, fields: dict[str, Any]):
        self.status = 0
        self.body = b""
        self.reading = asyncio.Event()
        self.reading.set()
        self.grown = asyncio.Event()
        self._gone = asyncio.Event()
        self._sent = False
        self._content = json.dumps(fields).encode()
        headers = [(b"content-type", b"application/json")]
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": headers,
            "client": ("127.0.0.1", 1),
        }
        self.task = asyncio.create_task(self._run(app, scope))

    def leave(self) -> None:
        """Hang up."""
        self._gone.set()

    async def read_some(self) -> None:
        """Wait until there is something of the answer."""
        await asyncio.wait_for(self.grown.wait(), 20)

    async def _run(self, app: ASGIApp, scope: dict[str, Any]) -> None:
        await app(scope, self._receive, self._send)

    async def _receive(self) -> dict[str, Any]:
        if not self._sent:
            self._sent = True
            return {"type": "http.request", "body": self._content, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        await self.reading.wait()
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.body += message["body"]
            if message["body"]:
                self.grown.set()
