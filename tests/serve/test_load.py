"""Test that many concurrent streams are complete and correct while some clients disconnect."""

import asyncio
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from serve_helpers import RawRequest, Server
from server_process import ServerProcess

Run = Callable[..., None]
PATH = "/v1/completions"


def question(number: int) -> tuple[dict[str, Any], str]:
    """Return a streaming request that asks the model to count from `1 + number % 90`, and the
    expected answer."""
    first = 1 + number % 90
    answer = "\n" + ", ".join(map(str, range(first, first + 6)))
    asked = {"prompt": f"Count from {first} to {first + 5}", "max_tokens": 40, "temperature": 0}
    return {**asked, "stream": True, "stream_options": {"include_usage": True}}, answer


def read_stream(body: bytes) -> tuple[str, int, list[str]]:
    """Read a whole stream. Return its text, its number of completion tokens, and the set of ids in
    its events."""
    *events, done, rest = body.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
    return text, chunks[-1]["usage"]["completion_tokens"], sorted({c["id"] for c in chunks})


def is_whole(body: bytes) -> bool:
    """Return whether a stream is complete; check that it contains no error event."""
    assert b'data: {"error":' not in body, body[-1000:]
    return body.endswith(b"data: [DONE]\n\n")


def check_streams(bodies: list[tuple[bytes, str]]) -> None:
    ids = set()
    for body, expected in bodies:
        text, num_tokens, own_ids = read_stream(body)
        assert text == expected
        assert num_tokens == len(expected) + 1
        (own_id,) = own_ids
        assert own_id not in ids
        ids.add(own_id)


def test_concurrent_streams_are_complete_while_other_clients_disconnect(serve: Run):
    pick = random.Random(0)

    async def one(server: Server, number: int) -> tuple[bytes, str] | None:
        asked, answer = question(number)
        leaves, waits = number % 3 == 0, pick.random() < 0.7
        request = RawRequest(server.app, PATH, asked)
        if leaves:
            if waits:  # disconnect after a random time
                await asyncio.wait({request.task}, timeout=pick.uniform(0, 0.5))
            request.leave()
        await request.task
        whole = is_whole(request.body)
        assert whole or leaves, (request.status, request.body)
        return (request.body, answer) if whole else None

    async def scenario(server: Server) -> None:
        found = await asyncio.gather(*(one(server, number) for number in range(150)))
        check_streams([each for each in found if each is not None])
        # 50 of the 150 clients disconnect, but some of them only after their stream is complete.
        assert 10 <= sum(each is None for each in found) <= 50

    serve(scenario)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("num_clients", "seconds", "fewest"),
    [
        pytest.param(150, 5, 75, marks=pytest.mark.full),
        pytest.param(1000, 60, 1000, marks=pytest.mark.soak),
    ],
)
def test_server_under_sustained_load_returns_complete_streams(
    compilation_cache: Path, num_clients: int, seconds: int, fewest: int
):
    server = ServerProcess(compilation_cache, "--no-log-requests")
    end = time.monotonic() + seconds
    survivors: list[tuple[bytes, str]] = []
    num_left = 0

    async def client(http: httpx.AsyncClient, number: int) -> None:
        nonlocal num_left
        pick = random.Random(number)
        while time.monotonic() < end:
            asked, answer = question(pick.randrange(90))
            patience = pick.uniform(0, seconds / 3) if pick.random() < 0.3 else 1e6
            started, body = time.monotonic(), b""
            async with http.stream("POST", f"{server.url}{PATH}", json=asked) as got:
                assert got.status_code == 200, await got.aread()
                async for chunk in got.aiter_bytes():
                    body += chunk
                    if time.monotonic() - started > patience:
                        break
            if is_whole(body):
                survivors.append((body, answer))
            else:
                assert patience < 1e6
                num_left += 1

    async def all_clients() -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=300, limits=limits) as http:
            await asyncio.gather(*(client(http, number) for number in range(num_clients)))

    try:
        asyncio.run(all_clients())
        check_streams(survivors)
        assert len(survivors) > fewest
        assert num_left > num_clients / 20
        for _ in range(100):
            figures = httpx.get(f"{server.url}/metrics").text
            if 'kv_cache_usage_perc{engine="0",model_name="jpaged-tiny"} 0.0' in figures:
                break
            time.sleep(0.1)
        else:
            pytest.fail(figures)
        assert httpx.get(f"{server.url}/load").json() == {"server_load": 0}
    finally:
        server.end()
        print(server.log)
