"""Run the server's application in the test's process, with the engine in a thread."""

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
    """A server without an HTTP socket: requests go directly to its application."""

    engine: Engine
    serving: ServerState
    app: ASGIApp
    http: httpx.AsyncClient
    worker: threading.Thread

    async def complete(self, **fields: Any) -> dict[str, Any]:
        """Return the response of `/v1/completions`, which must have status 200."""
        answer = await self.http.post("/v1/completions", json=fields)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def canary(self) -> None:
        """Check that the server still gives the known answer to `QUESTION`."""
        body = await self.complete(prompt=QUESTION, max_tokens=64, temperature=0)
        assert body["choices"][0]["text"] == ANSWER
        assert body["choices"][0]["finish_reason"] == "stop"

    async def idle(self, seconds: float = 30.0) -> None:
        """Wait until no request is in flight, all blocks are free, and the block manager's counts
        are consistent. The engine's thread may be changing these counts, so an inconsistency is an
        error only if it lasts.
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
        # the engine's thread changed a container while this thread iterated over it
        except RuntimeError:
            return True
        in_flight = self.serving.num_requests or stats.num_running or stats.num_waiting
        blocks_out = stats.num_free_blocks != stats.num_blocks
        return bool(in_flight or blocks_out or self.engine.has_unfinished_requests)


class Servers:
    """Start servers in the running event loop with `start`, and stop every server with `end`."""

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
    """Return a tokenizer process. Servers with the same settings share one process, because
    starting a process takes a second.
    """
    process = TokenizingProcess(settings)
    atexit.register(process.close)
    return process


def run_worker(engine: Engine, sock: socket.socket) -> None:
    """Run an engine worker in this thread. If a step fails, the worker reports the error to the
    client."""
    with contextlib.suppress(RuntimeError):
        EngineWorker(engine, MessageSocket(sock)).run()


Scenario = Callable[[Server], Coroutine[Any, Any, None]]


async def events_of(answer: httpx.Response) -> AsyncIterator[str]:
    """Yield the data of each server-sent event in a response."""
    async for line in answer.aiter_lines():
        if line.startswith("data: "):
            yield line.removeprefix("data: ")


def bearer(key: str) -> dict[str, str]:
    """Return the header `Authorization: Bearer KEY`."""
    return {"Authorization": f"Bearer {key}"}


def basic(user: str, password: str) -> dict[str, str]:
    """Return the header `Authorization: Basic ...` for a user name and a password."""
    return {"Authorization": f"Basic {b64encode(f'{user}:{password}'.encode()).decode()}"}


class RawRequest:
    """A POST request to an ASGI application, from a client that can stop reading or disconnect.

    Attributes:
        status: Status of the response; 0 before it starts.
        body: Bytes of the response body that the client has read so far.
        reading: While this event is set, the client reads.
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
        """Disconnect the client."""
        self._gone.set()

    async def read_some(self) -> None:
        """Wait until part of the response body has arrived."""
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
