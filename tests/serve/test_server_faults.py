"""Test that a failed request fails alone and that an engine failure reaches every client."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from serve_helpers import QUESTION, RawRequest, Server

from jpaged import Engine
from jpaged.core.block_manager import BlockManager
from jpaged.core.scheduler import Scheduler
from jpaged.engine.request_state import RequestState
from jpaged.runtime import batch
from jpaged.runtime.model_runner import ModelRunner
from jpaged.serve.engine.tokenizing import TokenizingWorkers

Run = Callable[..., None]
PATH = "/v1/completions"
VICTIM: dict[str, Any] = {"prompt": "Hello", "max_tokens": 40, "temperature": 0.125, "seed": 1}
# The tests inject an error into the request that has the temperature 0.125.


def is_victim(*args: Any) -> bool:
    for arg in args:
        if isinstance(arg, RequestState):
            return arg.params.temperature == 0.125
        request = getattr(arg, "request", arg)
        if getattr(request, "request_id", None) is not None:
            # The scheduler's `Request` does not store the temperature. Here, the prompt "Hello"
            # identifies the request that must fail.
            return bytes(request.sequences[0].token_ids[:5]) == b"Hello"
        if getattr(arg, "temperature", None) is not None:
            return arg.temperature == 0.125
        if "Hello" in (arg, getattr(arg, "text", None)):
            return True
    return False


def failing(target: Callable[..., Any], after: int = 0) -> Callable[..., Any]:
    calls = iter(range(after))

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if is_victim(*args) and next(calls, None) is None:
            raise KeyError("/secret/path")
        return target(*args, **kwargs)

    return wrapper


FAULTS = {
    "tokenising": (TokenizingWorkers, "run_job", 0),
    "queueing": (Scheduler, "add", 0),
    "scheduling at first": (BlockManager, "admit", 0),
    "scheduling later": (BlockManager, "append", 1),
    "sampling": (batch, "pack_params", 0),
    "detokenising at first": (RequestState, "accept_token", 0),
    "detokenising later": (RequestState, "accept_token", 5),
    "telling": (RequestState, "take_delta", 3),
}


@contextlib.contextmanager
def fault(monkeypatch: pytest.MonkeyPatch, name: str) -> Iterator[None]:
    owner, attribute, after = FAULTS[name]
    with monkeypatch.context() as patch:
        patch.setattr(owner, attribute, failing(getattr(owner, attribute), after))
        yield


@pytest.mark.parametrize("name", FAULTS)
def test_failure_of_one_request_leaves_other_requests_running(
    serve: Run, monkeypatch: pytest.MonkeyPatch, name: str, capfd: pytest.CaptureFixture[str]
):
    async def scenario(server: Server) -> None:
        asked = {"prompt": QUESTION, "max_tokens": 64, "temperature": 0}
        others = [asyncio.create_task(server.complete(**asked)) for _ in range(4)]
        with fault(monkeypatch, name):
            whole = await server.http.post(PATH, json=VICTIM)
            assert whole.status_code == 500
            error = whole.json()["error"]
            assert error["type"] == "server_error"
            assert "secret" not in error["message"]
        with fault(monkeypatch, name):
            streamed = RawRequest(server.app, PATH, {**VICTIM, "stream": True})
            await streamed.task
        if streamed.status == 200:
            *_, last, done, _ = streamed.body.decode().split("\n\n")
            assert json.loads(last.removeprefix("data: "))["error"] == error
            assert done == "data: [DONE]"
        else:
            assert (streamed.status, json.loads(streamed.body)["error"]) == (500, error)
        texts = [(await other)["choices"][0]["text"] for other in others]
        assert texts == ["\n3, 4, 5, 6, 7"] * 4
        await server.canary()
        assert (await server.http.get("/health")).status_code == 200

    serve(scenario)
    assert "/secret/path" in capfd.readouterr().err  # the log contains the cause of the failure


@pytest.fixture
def doomed(compilation_cache: Any) -> Engine:
    """Return an engine that no other test uses, because the test makes it fail."""
    return Engine(
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=256,
        num_blocks=129,
        compilation_cache_dir=compilation_cache,
    )


def test_device_failure_fails_all_requests(
    serve: Run, doomed: Engine, monkeypatch: pytest.MonkeyPatch
):
    async def scenario(server: Server) -> None:
        asked = {"prompt": "Hello", "max_tokens": 200, "ignore_eos": True}
        advance = doomed.advance
        monkeypatch.setattr(doomed, "advance", lambda: (time.sleep(0.02), advance()))
        streamed = RawRequest(server.app, PATH, {**asked, "stream": True})
        whole = RawRequest(server.app, PATH, asked)
        await streamed.read_some()

        def lose(*_: Any) -> None:
            raise RuntimeError("the device is lost at /secret/path")

        with monkeypatch.context() as patch:
            patch.setattr(ModelRunner, "launch", lose)
            await asyncio.gather(streamed.task, whole.task)
        assert (streamed.status, whole.status) == (200, 503)
        *_, last, done, _ = streamed.body.decode().split("\n\n")
        assert json.loads(last.removeprefix("data: "))["error"]["type"] == "server_error"
        assert done == "data: [DONE]"
        assert b"secret" not in streamed.body + whole.body
        for path in ("/health", "/ready", "/ping"):
            assert (await server.http.get(path)).status_code == 503
        answer = await server.http.post(PATH, json=asked)
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) >= 1
        assert server.serving.engine.close_reason == (
            # The engine keeps the full error text. HTTP responses must not contain this text.
            "RuntimeError: the device is lost at /secret/path"
        )

    serve(scenario, doomed)


async def never() -> AsyncIterator[bytes]:
    await asyncio.sleep(60)
    yield b""


def test_stalled_engine_loop_is_reported_unhealthy(
    serve: Run, engine: Engine, monkeypatch: pytest.MonkeyPatch
):
    advance, pauses = engine.advance, [3.5]
    monkeypatch.setattr(
        engine, "advance", lambda: (time.sleep(pauses.pop() if pauses else 0), advance())
    )

    async def scenario(server: Server) -> None:
        assert (await server.http.get("/health")).status_code == 200
        asking = asyncio.create_task(server.complete(prompt="Hello", max_tokens=1))
        await asyncio.sleep(1.6)
        assert (await server.http.get("/health")).status_code == 503
        for path in (PATH, "/v1/chat/completions"):  # the server refuses these requests immediately
            refused = await server.http.post(path, content=never())
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) >= 1
            assert "does not respond" in refused.json()["error"]["message"]
        assert not asking.done()
        await asking  # an admitted request still completes
        assert (await server.http.get("/health")).status_code == 200
        await server.canary()

    serve(scenario, limits={"health_timeout": 1.2})
