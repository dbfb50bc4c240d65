"""Test that requests end when their client disconnects, and that unread streams stay small."""

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from scripted_engine import ScriptedEngine
from serve_helpers import QUESTION, RawRequest, Server

from jpaged import Engine, RequestDelta
from jpaged.serve.api import generation
from jpaged.serve.engine import client as engine_client
from jpaged.serve.http.exchange import StalledClientError

Run = Callable[..., None]
PATH = "/v1/completions"
LONG: dict[str, Any] = {"max_tokens": 200, "ignore_eos": True}


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Callable[[Engine], Engine]:
    """Return a function that makes the steps of an engine slow, so that a test can observe the
    states of sequences."""

    def slow_down(engine: Engine) -> Engine:
        advance = engine.advance

        def lasting() -> None:
            time.sleep(0.02)
            advance()

        monkeypatch.setattr(engine, "advance", lasting)
        return engine

    return slow_down


async def wait_until(happened: Callable[[], Any], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while True:
        try:
            if happened():
                return
        # the engine's thread changed a container while this thread iterated over it
        except RuntimeError:
            pass
        assert time.monotonic() < end, "it did not happen"
        await asyncio.sleep(0.002)


async def leave_and_check(server: Server, requests: list[RawRequest]) -> None:
    """Disconnect all clients, and check that the engine drops their requests within three steps."""
    for request in requests:
        request.leave()
    await asyncio.gather(*(request.task for request in requests))
    await asyncio.sleep(0.03)  # let the current step end
    before = server.engine.stats().num_steps
    await server.idle()
    assert server.engine.stats().num_steps - before <= 3
    assert not server.serving.engine.runs
    await server.canary()


def has_states(engine: Engine, *states: str) -> bool:
    """Return whether the engine's sequences have exactly these states, in order of arrival."""
    return tuple(sequence.status for sequence in engine.block_tables()) == states


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize(
    "fields",
    [{}, {"n": 4}, {"n": 2, "best_of": 4}, {"beam_width": 4, "temperature": 0}],
    ids=["one", "n", "best_of", "beams"],
)
def test_disconnect_while_decoding_frees_the_request(
    serve: Run, slow: Any, engine: Engine, stream: bool, fields: dict
):
    slow(engine)

    async def scenario(server: Server) -> None:
        asked = {"prompt": "Hello", **LONG, **fields, "stream": stream}
        request = RawRequest(server.app, PATH, asked)
        await wait_until(
            lambda: engine.stats().num_generated_tokens or engine.stats().num_steps > 3
        )
        await wait_until(lambda: any(s.num_computed_tokens > 6 for s in engine.block_tables()))
        await leave_and_check(server, [request])

    serve(scenario)


def test_disconnect_during_prefill_frees_the_request(serve: Run, slow: Any, engine: Engine):
    slow(engine)

    async def scenario(server: Server) -> None:
        request = RawRequest(server.app, PATH, {"prompt": "x" * 250, "max_tokens": 2})
        await wait_until(
            lambda: any(0 < s.num_computed_tokens < 200 for s in engine.block_tables())
        )
        await leave_and_check(server, [request])

    engine.reset_prefix_cache()
    serve(scenario)


def test_disconnect_while_queued_removes_the_request(serve: Run, slow: Any, engine: Engine):
    slow(engine)

    async def scenario(server: Server) -> None:
        full = [RawRequest(server.app, PATH, {"prompt": "Hello", **LONG, "n": 8})]
        await wait_until(lambda: engine.stats().num_running == 1)
        queued = RawRequest(server.app, PATH, {"prompt": QUESTION, **LONG})
        await wait_until(lambda: engine.stats().num_waiting == 1)
        queued.leave()
        await wait_until(lambda: engine.stats().num_waiting == 0)
        assert queued.status == 0
        await leave_and_check(server, full)

    serve(scenario)


def test_disconnect_while_swapped_out_frees_host_blocks(serve: Run, slow: Any, engines: Any):
    engine = slow(engines(num_blocks=21, preemption_mode="swap", swap_space=0.002))

    async def scenario(server: Server) -> None:
        requests = [
            RawRequest(server.app, PATH, {"prompt": f"{i} Hello", **LONG}) for i in range(3)
        ]
        await wait_until(lambda: engine.stats().num_swapped >= 1, 30)
        await leave_and_check(server, requests)
        assert engine.stats().num_used_host_blocks == 0

    serve(scenario, engine)


def test_client_that_disconnects_immediately_leaves_no_request_in_the_server(serve: Run):
    async def scenario(server: Server) -> None:
        request = RawRequest(server.app, PATH, {"prompt": "Hello", **LONG})
        request.leave()
        await request.task
        await server.idle()
        await server.canary()

    serve(scenario)


def test_disconnect_of_one_client_leaves_other_answers_correct(
    serve: Run, slow: Any, engine: Engine
):
    slow(engine)

    async def scenario(server: Server) -> None:
        asked = {"prompt": QUESTION, "max_tokens": 64, "temperature": 0}
        staying = [asyncio.create_task(server.complete(**asked)) for _ in range(5)]
        leaving = RawRequest(server.app, PATH, {**asked, "stream": True})
        await leaving.read_some()
        leaving.leave()
        texts = [(await each)["choices"][0]["text"] for each in staying]
        assert texts == ["\n3, 4, 5, 6, 7"] * 5

    serve(scenario)


def test_slow_reader_stalls_no_other_request_and_gets_every_token(serve: Run):
    async def scenario(server: Server) -> None:
        asked = {"prompt": "Count from 1 to 30", "max_tokens": 130, "temperature": 0}
        reader = RawRequest(server.app, PATH, {**asked, "stream": True})
        await reader.read_some()
        reader.reading.clear()
        for _ in range(3):
            await server.canary()
        await wait_until(lambda: not server.engine.has_unfinished_requests)
        assert server.engine.stats().num_free_blocks == server.engine.stats().num_blocks
        reader.reading.set()
        await reader.task
        assert reader.body.endswith(b"data: [DONE]\n\n")
        expected = (await server.complete(**asked))["usage"]["completion_tokens"]
        assert reader.body.count(b'"text":') == expected

    serve(scenario)


def test_stalled_reader_is_dropped_after_the_stall_timeout(serve: Run, slow: Any, engine: Engine):
    slow(engine)

    async def scenario(server: Server) -> None:
        asked = {"prompt": "Hello", **LONG, "stream": True}
        reader = RawRequest(server.app, PATH, asked)
        await reader.read_some()
        reader.reading.clear()
        with pytest.raises(StalledClientError):
            await asyncio.wait_for(reader.task, 10)
        await server.idle()

    serve(scenario, limits={"stall_timeout": 0.3})


def test_request_with_too_many_unread_tokens_is_aborted(
    serve: Run, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("jpaged.serve.engine.client.MAX_UNREAD_TOKENS", 20)

    async def scenario(server: Server) -> None:
        before = server.engine.stats().num_generated_tokens
        reader = RawRequest(server.app, PATH, {"prompt": "Hello", **LONG, "stream": True})
        await reader.read_some()
        reader.reading.clear()
        await wait_until(lambda: not server.engine.has_unfinished_requests)
        assert server.engine.stats().num_generated_tokens < before + 100
        reader.reading.set()
        await reader.task
        assert b"read the answer too slowly" in reader.body
        assert reader.body.endswith(b"data: [DONE]\n\n")

    serve(scenario)


def test_best_of_and_beam_search_tokens_do_not_count_as_unread(
    serve: Run, monkeypatch: pytest.MonkeyPatch
):
    """A client cannot read `best_of` or beam answers before they are complete."""
    monkeypatch.setattr("jpaged.serve.engine.client.MAX_UNREAD_TOKENS", 20)

    async def scenario(server: Server) -> None:
        for asked in ({"best_of": 3, "n": 2, "logprobs": 1}, {"beam_width": 3, "n": 3}):
            prompts = ["Hello", QUESTION]
            made = await server.complete(prompt=prompts, max_tokens=30, ignore_eos=True, **asked)
            assert len(made["choices"]) == 2 * asked["n"]

    serve(scenario)


def test_aborting_an_unread_stream_keeps_the_finish_reason_of_each_answer(
    serve: Run, engine: Engine, monkeypatch: pytest.MonkeyPatch
):
    """One answer of the request has stopped, and the other answer is aborted. The unread deltas of
    both answers are merged into one update."""
    monkeypatch.setattr("jpaged.serve.engine.client._MIN_SEPARATE_UPDATES", 5)
    scripted = ScriptedEngine(engine)
    scripted.say("a" * 2000, "b" * 100_000, size=1)
    put, sizes = engine_client.UpdateStream.put, list[int]()

    def noted(self: engine_client.UpdateStream, delta: RequestDelta) -> None:
        put(self, delta)
        sizes.append(len(delta.deltas))

    monkeypatch.setattr(engine_client.UpdateStream, "put", noted)

    async def scenario(server: Server) -> None:
        asked = {"prompt": "Hello", "n": 2, "max_tokens": 200}
        reader = RawRequest(server.app, PATH, {**asked, "stream": True})
        await reader.read_some()
        reader.reading.clear()
        # wait for an update that contains deltas of only one of the two answers
        await wait_until(lambda: 1 in sizes)
        (run,) = set(server.serving.engine.runs.values())
        # From now on, unread updates are merged. The update for the abort is merged with an earlier
        # update.
        monkeypatch.setattr(run, "max_separate_updates", 0)
        run.abort()
        reader.reading.set()
        await reader.task
        reasons: dict[int, str | None] = {}
        for line in reader.body.split(b"\n"):
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    reasons[choice["index"]] = choice["finish_reason"]
        assert reasons == {0: "stop", 1: "abort"}

    serve(scenario, scripted)


def test_unread_deltas_are_merged_into_fewer_events_without_loss(
    serve: Run, monkeypatch: pytest.MonkeyPatch
):
    """Large events are encoded in a thread."""
    monkeypatch.setattr("jpaged.serve.engine.client._MIN_SEPARATE_UPDATES", 5)
    monkeypatch.setattr(generation, "MAX_INLINE_LOGPROBS", 1)
    in_thread, encode = list[Any](), generation.encode_large_json

    def noted(value: Any) -> bytes:
        in_thread.append(value)
        return encode(value)

    monkeypatch.setattr(generation, "encode_large_json", noted)

    async def scenario(server: Server) -> None:
        asked = {"prompt": ["Hello", QUESTION], "n": 2, "seed": 1, "logprobs": 1, **LONG}
        whole = (await server.complete(**asked))["choices"]
        in_thread.clear()
        reader = RawRequest(server.app, PATH, {**asked, "stream": True})
        await reader.read_some()
        reader.reading.clear()
        await wait_until(lambda: not server.engine.has_unfinished_requests)
        reader.reading.set()
        await reader.task
        events = [line[6:] for line in reader.body.split(b"\n") if line.startswith(b"data: {")]
        assert len(events) < 50
        assert in_thread
        told: list[list[Any]] = [[] for _ in whole]
        for event in events:
            for choice in json.loads(event)["choices"]:
                told[choice["index"]].append(choice)
        for own, expected in zip(told, whole, strict=True):
            assert "".join(each["text"] for each in own) == expected["text"]
            tokens = [token for each in own for token in each["logprobs"]["tokens"]]
            assert tokens == expected["logprobs"]["tokens"]
            assert own[-1]["finish_reason"] == expected["finish_reason"]

    serve(scenario)
