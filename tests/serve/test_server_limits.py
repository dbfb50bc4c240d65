"""Test API keys, limits per client, the queue, time limits and draining."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from hashlib import sha256
from typing import Any

import httpx
import pytest
from serve_helpers import QUESTION, RawRequest, Server, basic, bearer

from jpaged import Engine
from jpaged.serve.errors import ApiError
from jpaged.serve.http.access import InFlightLimiter
from jpaged.serve.http.serving import ServerState
from jpaged.serve.options import Limits, ServeConfig

Run = Callable[..., None]
PATH = "/v1/completions"
LONG: dict[str, Any] = {"prompt": "Hello", "max_tokens": 200, "ignore_eos": True}


@pytest.fixture
def slow(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    advance = engine.advance
    monkeypatch.setattr(engine, "advance", lambda: (time.sleep(0.02), advance()))


def test_requests_without_a_valid_api_key_get_401(serve: Run):
    async def scenario(server: Server) -> None:
        http = server.http
        for path in ("/health", "/ready", "/ping"):
            assert (await http.get(path)).status_code == 200
        closed = ("/v1/models", "/metrics", "/version", "/load", "/openapi.json", "/x")
        for path in (*closed, "/picture/events"):
            for headers in (
                {},
                bearer("no"),
                bearer(""),
                basic("one", ""),
                {"Authorization": "one"},
            ):
                answer = await http.get(path, headers=headers)
                assert answer.status_code == 401
                error = answer.json()["error"]
                assert error["message"]
                assert error["type"] == "invalid_request_error"
                assert error["code"] == "invalid_api_key"
        for path in (PATH, "/v1/chat/completions", "/tokenize", "/detokenize", "/health/../x"):
            assert (await http.post(path, json={})).status_code == 401
        for key in ("one", "two"):
            assert (await http.get("/v1/models", headers=bearer(key))).status_code == 200
        assert (await http.get("/v1/models", headers={"authorization": "bearer one"})).is_success

    serve(scenario, api_keys=("one", "two"))


@pytest.fixture
def salts(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """Return a list to which the cache salt of each request to the engine is added."""
    found: list[str | None] = []
    add = engine.add_request

    def noted(prompt: Any, *args: Any, **options: Any) -> str:
        found.append(prompt["cache_salt"])
        return add(prompt, *args, **options)

    monkeypatch.setattr(engine, "add_request", noted)
    engine.reset_prefix_cache()
    return found


async def num_cached_tokens(server: Server, headers: dict[str, str], **fields: Any) -> int:
    """Send a prompt of 40 tokens, and return how many of them were found in the prefix cache."""
    asked = {"prompt": "x" * 40, "max_tokens": 1, **fields}
    answer = await server.http.post(PATH, json=asked, headers=headers)
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_prefix_cache_is_not_shared_between_api_keys(serve: Run, salts: list[str | None]):
    one, two = bearer("key-one"), bearer("key-two")

    async def scenario(server: Server) -> None:
        for headers in (one, two):
            assert await num_cached_tokens(server, headers) == 0
            assert await num_cached_tokens(server, headers) == 32
            assert await num_cached_tokens(server, headers, cache_salt="a") == 0
            assert await num_cached_tokens(server, headers, cache_salt="a") == 32
        # The API key is the password of Basic credentials; the user name does not matter.
        page = {"Sec-Fetch-Site": "same-origin"}
        assert await num_cached_tokens(server, basic("anybody", "key-one") | page) == 32
        of_one = salts[0]
        assert len({*salts}) == 4
        # A request that sends the cache salt of another API key does not hit that key's cache.
        assert await num_cached_tokens(server, two, cache_salt=of_one) == 0
        assert await num_cached_tokens(server, two, cache_salt=f"{of_one}a") == 0
        known = ("key-one", sha256(b"key-one").hexdigest()[:8])
        assert not any(secret in str(salt) for salt in salts for secret in known)

    serve(scenario, api_keys=("key-one", "key-two"))


@pytest.mark.parametrize(
    "config",
    [{"api_keys": ("one", "two"), "share_prefix_cache_across_keys": True}, {}],
    ids=["keys-that-share", "no-keys"],
)
def test_prefix_cache_is_shared_if_there_are_no_api_keys_or_an_option_allows_sharing(
    serve: Run, salts: list[str | None], config: Any
):
    async def scenario(server: Server) -> None:
        assert await num_cached_tokens(server, bearer("one")) == 0
        assert await num_cached_tokens(server, bearer("two")) == 32
        assert await num_cached_tokens(server, bearer("two"), cache_salt="a") == 0
        assert await num_cached_tokens(server, bearer("one"), cache_salt="a") == 32
        assert salts == [None, None, "a", "a"]

    serve(scenario, **config)


def test_cache_salts_differ_after_a_restart():
    config = ServeConfig(api_keys=("one",))
    salts = {ServerState(config).cache_salt("client", None) for _ in range(2)}
    assert len(salts) == 2


FROM_THE_PAGE = (
    {"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Mode": "cors"},
    {"Origin": "http://jpaged"},  # over plain HTTP, browsers send no Sec-Fetch-*
)
FROM_ELSEWHERE = (
    {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},
    {"Sec-Fetch-Site": "same-site", "Origin": "http://jpaged"},
    {"Origin": "http://evil"},
    {"Origin": "null"},
)


def test_cross_origin_api_requests_with_basic_credentials_are_refused(serve: Run):
    async def scenario(server: Server) -> None:
        http, key = server.http, basic("anybody", "a:key")
        asked = {"prompt": "a", "max_tokens": 1}
        for own in FROM_THE_PAGE:
            assert (await http.post(PATH, json=asked, headers=key | own)).status_code == 200
            assert (await http.get("/v1/models", headers=key | own)).status_code == 200
        for other in FROM_ELSEWHERE:
            answer = await http.post(PATH, json=asked, headers=key | other)
            assert answer.status_code == 403
            assert "Bearer" in answer.json()["error"]["message"]
            assert (await http.get("/picture/events", headers=key | other)).status_code == 403
            # A browser sends a Bearer header only if a script sets it.
            bearers = bearer("a:key") | other
            assert (await http.post(PATH, json=asked, headers=bearers)).status_code == 200
        assert (await http.post(PATH, json=asked, headers=key)).status_code == 403
        assert (await http.get("/v1/models", headers=key)).status_code == 200
        form = key | FROM_THE_PAGE[0] | {"Content-Type": "text/plain"}
        assert (await http.post(PATH, content=b"{}", headers=form)).status_code == 415
        for mode, status in (("navigate", 200), ("no-cors", 403)):
            followed = key | {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": mode}
            assert (await http.get("/", headers=followed)).status_code == status

    serve(scenario, api_keys=("a:key",))


@pytest.mark.parametrize(
    "given", ["Basic", "Basic !", "Basic c2VjcmV0", "Basic /zpzZWNyZXQ=", "Basic " + "A" * 99]
)
def test_malformed_basic_credentials_get_401(serve: Run, given: str):
    async def scenario(server: Server) -> None:
        answer = await server.http.get("/v1/models", headers={"Authorization": given})
        assert answer.status_code == 401

    serve(scenario, api_keys=("secret",))


async def post_slowly(server: Server, body: bytes, rest: asyncio.Event) -> httpx.Response:
    """Send a request. The last byte of its body is sent only after the event `rest` is set."""

    async def pieces() -> AsyncIterator[bytes]:
        yield body[:-1]
        await rest.wait()
        yield body[-1:]

    headers = {"Content-Type": "application/json"}
    return await server.http.post(PATH, content=pieces(), headers=headers)


def test_total_size_of_pending_request_bodies_is_limited(serve: Run):
    async def scenario(server: Server) -> None:
        body = json.dumps({"prompt": "a" * 100, "max_tokens": 1}).encode()
        rest = asyncio.Event()
        coming = [asyncio.create_task(post_slowly(server, body, rest)) for _ in range(2)]
        await asyncio.sleep(0.05)
        refused = await server.http.post(PATH, json={"prompt": "a" * 100, "max_tokens": 1})
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        assert (await server.http.get("/load")).status_code == 200
        rest.set()
        assert [(await each).status_code for each in coming] == [200, 200]
        for _ in range(3):  # the bytes of a refused request must not stay counted
            too_large = await server.http.post(PATH, json={"prompt": "a" * 300})
            assert too_large.status_code == 413
            await server.canary()

    limits = {"max_body_bytes": 200, "max_total_body_bytes": 290}
    serve(scenario, limits=limits)


@pytest.mark.usefixtures("slow")
def test_request_body_counts_toward_the_size_limit_until_its_response_ends(serve: Run):
    async def scenario(server: Server) -> None:
        running = RawRequest(server.app, PATH, {**LONG, "stream": True})
        await running.read_some()
        assert (await server.http.post(PATH, json=LONG)).status_code == 503
        running.leave()
        await running.task
        await server.complete(**{**LONG, "max_tokens": 2})

    serve(scenario, limits={"max_total_body_bytes": 100})


@pytest.mark.usefixtures("slow")
def test_full_queue_gets_503(serve: Run, engine: Engine):
    async def scenario(server: Server) -> None:
        first = [RawRequest(server.app, PATH, LONG) for _ in range(10)]  # 8 requests run, 2 wait
        await asyncio.sleep(0.2)
        answer = await server.http.post(PATH, json=LONG)
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) >= 1
        assert (await server.http.get("/load")).json() == {"server_load": 10}
        for request in first:
            request.leave()
        await asyncio.gather(*(request.task for request in first))
        await server.canary()

    serve(scenario, limits={"max_num_queued_reqs": 2})


@pytest.mark.usefixtures("slow")
def test_request_that_would_have_to_wait_gets_503_if_the_queue_size_is_zero(serve: Run):
    async def scenario(server: Server) -> None:
        running = RawRequest(server.app, PATH, {**LONG, "n": 8})
        await asyncio.sleep(0.2)
        assert (await server.http.post(PATH, json=LONG)).status_code == 503
        running.leave()
        await running.task
        await server.canary()
        answer = await server.http.post(PATH, json={**LONG, "prompt": ["a"] * 9})
        # nine sequences are too many for the engine even if no other request runs
        assert answer.status_code == 400

    serve(scenario, limits={"max_num_queued_reqs": 0})


def test_finished_request_frees_the_queue_places_of_all_its_sequences():
    in_flight = InFlightLimiter(Limits(max_num_queued_reqs=0), max_num_seqs=8)
    for _ in range(3):
        with (
            in_flight.admit("client", 8),
            pytest.raises(ApiError, match="the queue is full"),
            in_flight.admit("client", 1),
        ):
            pass


@pytest.mark.usefixtures("slow")
def test_client_above_its_request_limit_gets_429(serve: Run):
    async def scenario(server: Server) -> None:
        def ask(key: str, **fields: Any):
            return server.http.post(PATH, json={**LONG, **fields}, headers=bearer(key))

        running = [asyncio.create_task(ask("one", max_tokens=40)) for _ in range(2)]
        await asyncio.sleep(0.2)
        answer = await ask("one")
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["code"] == "rate_limit_exceeded"
        assert (await ask("two", max_tokens=1)).status_code == 200
        assert [(await each).status_code for each in running] == [200, 200]
        assert (await ask("one", max_tokens=1)).status_code == 200

    serve(scenario, api_keys=("one", "two"), limits={"max_num_client_reqs": 2})


@pytest.mark.usefixtures("slow")
def test_request_that_waits_too_long_gets_503(serve: Run):
    async def scenario(server: Server) -> None:
        running = RawRequest(server.app, PATH, {**LONG, "n": 8, "stream": True})
        await running.read_some()
        answer = await server.http.post(PATH, json=LONG)
        assert answer.status_code == 503
        assert "waited too long" in answer.json()["error"]["message"]
        assert not running.task.done()
        running.leave()
        await running.task

    serve(scenario, limits={"queue_timeout": 1.5})


@pytest.mark.usefixtures("slow")
def test_request_that_takes_too_long_is_aborted(serve: Run):
    async def scenario(server: Server) -> None:
        answer = await server.http.post(PATH, json=LONG)
        assert answer.status_code == 503
        assert "took too long" in answer.json()["error"]["message"]
        streamed = RawRequest(server.app, PATH, {**LONG, "stream": True})
        await streamed.task
        assert streamed.status == 200
        assert b'data: {"error":{"message":"aborted: the request took too long"' in streamed.body
        assert streamed.body.endswith(b"data: [DONE]\n\n")

    serve(scenario, limits={"request_timeout": 0.5})


@pytest.mark.usefixtures("slow")
def test_draining_server_rejects_new_requests_and_completes_running_requests_unless_aborted(
    serve: Run,
):
    async def scenario(server: Server) -> None:
        asked = {"prompt": QUESTION, "max_tokens": 64, "temperature": 0}
        running = asyncio.create_task(server.complete(**asked))
        cut = asyncio.create_task(server.complete(**LONG, n=2))
        streamed = RawRequest(server.app, PATH, {**LONG, "stream": True})
        await streamed.read_some()
        server.serving.stop_admitting()
        assert (await server.http.get("/health")).status_code == 200
        assert (await server.http.get("/ready")).status_code == 503
        refused = await server.http.post(PATH, json=asked)
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        assert (await running)["choices"][0]["finish_reason"] == "stop"
        server.serving.engine.abort_all()
        reasons = [choice["finish_reason"] for choice in (await cut)["choices"]]
        assert reasons == ["abort", "abort"]
        await streamed.task
        assert b'"finish_reason":"abort"' in streamed.body
        assert streamed.body.endswith(b"data: [DONE]\n\n")

    serve(scenario)


def test_request_may_have_a_priority_with_the_priority_scheduling_policy(serve: Run, engines: Any):
    async def scenario(server: Server) -> None:
        await server.complete(prompt="a", max_tokens=1, priority=-5)

    serve(scenario, engines(scheduling_policy="priority"))


def test_server_that_shuts_down_during_startup_never_becomes_ready(serve: Run):
    async def scenario(server: Server) -> None:
        serving = server.serving
        late = ServerState(serving.config)
        late.stop_admitting()
        info = await serving.engine.wait_ready()
        late.open(serving.engine, serving.tokenizing, info)
        assert not late.is_ready
        with pytest.raises(ApiError, match="shutting down"), late.admit("a", 1):
            pass

    serve(scenario)
