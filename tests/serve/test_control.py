"""Test the endpoints that pause the engine, let it sleep and update its weights."""

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from serve_helpers import ANSWER, QUESTION, Server, bearer

from jpaged.config import EMBEDDED_MODEL
from jpaged.errors import RequestError
from jpaged.models import live_weights
from jpaged.models.checkpoint import TensorInfo, read_tensor_infos
from jpaged.serve.options import ServeConfig, read_flags

PATHS = ("/pause", "/resume", "/sleep", "/wake_up", "/update_weights")
CONTROL: dict[str, Any] = {"control_api_keys": ("control",)}
KEY = bearer("control")
AWAKE = {"is_paused": False, "is_sleeping": False}


async def post(server: Server, path: str, **options: Any) -> Any:
    answer = await server.http.post(path, headers=KEY, **options)
    assert answer.status_code == 200, answer.text
    state = answer.json()
    del state["weights_version"]
    return state


async def refused(server: Server, path: str, status: int, **options: Any) -> str:
    answer = await server.http.post(path, headers=KEY, **options)
    assert answer.status_code == status, answer.text
    return answer.json()["error"]["message"]


def start_request(server: Server, **fields: Any) -> asyncio.Task[dict[str, Any]]:
    fields = {"prompt": QUESTION, "max_tokens": 64, "temperature": 0} | fields
    return asyncio.create_task(server.complete(**fields))


async def wait_until_running(server: Server) -> None:
    while not server.engine.stats().num_running:
        await asyncio.sleep(0.001)


def test_server_has_no_control_endpoints_by_default(serve: Callable[..., None]):
    async def scenario(server: Server) -> None:
        for path in (*PATHS, "/is_paused"):
            assert (await server.http.post(path)).status_code == 404

    serve(scenario)


def test_control_endpoints_need_the_control_key_and_other_endpoints_refuse_it(
    serve: Callable[..., None],
):
    async def scenario(server: Server) -> None:
        for path in PATHS:
            for headers in ({}, bearer("client"), {"x-api-key": "wrong"}):
                assert (await server.http.post(path, headers=headers)).status_code == 401
        assert (await server.http.get("/is_sleeping", headers=KEY)).json()["is_sleeping"] is False
        assert (await server.http.get("/v1/models", headers=KEY)).status_code == 401
        assert (await server.http.get("/v1/models", headers=bearer("client"))).status_code == 200

    serve(scenario, api_keys=("client",), **CONTROL)


def test_control_key_is_needed_for_every_spelling_of_the_path(serve: Callable[..., None]):
    async def scenario(server: Server) -> None:
        mounted = httpx.ASGITransport(server.app, root_path="/api")
        async with httpx.AsyncClient(transport=mounted, base_url="http://jpaged") as http:
            for client, path in ((server.http, "/pause%0A"), (http, "/api/pause")):
                assert (await client.post(path)).status_code == 401
        await server.canary()

    serve(scenario, **CONTROL)


def test_paused_request_continues_after_the_pause(serve: Callable[..., None]):
    async def scenario(server: Server) -> None:
        request = start_request(server)
        await wait_until_running(server)
        assert await post(server, "/pause") == AWAKE | {"is_paused": True}
        num_steps = server.engine.stats().num_steps
        queued = start_request(server)
        await asyncio.sleep(0.1)
        assert (await server.http.get("/is_paused", headers=KEY)).json()["is_paused"]
        assert server.engine.stats().num_steps == num_steps
        assert server.serving.is_healthy
        assert await post(server, "/resume") == AWAKE
        for task in (request, queued):
            assert (await task)["choices"][0]["text"] == ANSWER

    serve(scenario, **CONTROL)


def test_pause_in_wait_mode_finishes_running_requests_and_delays_later_requests(
    serve: Callable[..., None],
):
    async def scenario(server: Server) -> None:
        request = start_request(server)
        await wait_until_running(server)
        pause = asyncio.create_task(post(server, "/pause?mode=wait"))
        await asyncio.sleep(0)
        later = start_request(server)
        assert await pause == AWAKE | {"is_paused": True}
        assert (await request)["choices"][0]["text"] == ANSWER
        await asyncio.sleep(0.05)
        assert not later.done()
        await post(server, "/resume")
        assert (await later)["choices"][0]["text"] == ANSWER

    serve(scenario, **CONTROL)


def test_pause_in_abort_mode_aborts_running_requests(serve: Callable[..., None]):
    async def scenario(server: Server) -> None:
        request = start_request(server)
        await wait_until_running(server)
        await post(server, "/pause?mode=abort")
        choice = (await request)["choices"][0]
        assert choice["finish_reason"] == "abort"
        assert ANSWER.startswith(choice["text"])
        await post(server, "/resume")

    serve(scenario, **CONTROL)


def test_sleeping_server_wakes_up(serve: Callable[..., None]):
    async def scenario(server: Server) -> None:
        assert await post(server, "/sleep?level=1") == AWAKE | {"is_sleeping": True}
        request = start_request(server)
        await asyncio.sleep(0.05)
        assert (server.serving.is_healthy, request.done()) == (True, False)
        assert "the engine is sleeping" in await refused(server, "/pause?mode=wait", 400)
        assert await post(server, "/wake_up") == AWAKE
        assert (await request)["choices"][0]["text"] == ANSWER

    serve(scenario, **CONTROL)


def test_wrong_arguments_are_refused(serve: Callable[..., None]):
    async def scenario(server: Server) -> None:
        for path, message in {
            "/sleep?level=3": "level='3' is unknown: pass 1 or 2",
            "/pause?mode=drain": "mode='drain' is unknown: pass 'keep', 'wait' or 'abort'",
            "/pause?mode=wait&recompute=true": "recompute=True needs mode='keep', not 'wait'",
            "/pause?recompute=1": "recompute='1' is unknown: pass true or false",
            "/pause?clear_cache=true": "clear_cache is not a parameter of this path: use mode or",
            "/resume?now=1": "now is not a parameter of this path: omit it",
        }.items():
            assert message in await refused(server, path, 400)
        message = await refused(server, "/update_weights", 403, json={"path": "new"})
        assert "start the server with --weights-folder FOLDER" in message
        await server.canary()

    serve(scenario, **CONTROL)


def test_weights_come_only_from_the_allowed_folder(serve: Callable[..., None], tmp_path: Path):
    root = tmp_path / "root"
    (root / "broken").mkdir(parents=True)
    (root / "pickled").mkdir()
    (root / "pickled" / "pytorch_model.bin").write_bytes(b"")
    (tmp_path / "outside").mkdir()
    (root / "link").symlink_to(tmp_path / "outside")
    (root / "good").mkdir()
    shutil.copy(EMBEDDED_MODEL / "model.safetensors", root / "good")

    async def scenario(server: Server) -> None:
        for path in ("..", "../outside", str(tmp_path / "outside"), "link", "good/../.."):
            message = await refused(server, "/update_weights", 403, json={"path": path})
            assert "outside --weights-folder" in message
        for path, expected in {
            "absent": "is not a folder below --weights-folder",
            "broken": "broken holds no .safetensors file",
            "pickled": "Pickled weights are never opened",
            "a\0b": "is not a valid path",
        }.items():
            message = await refused(server, "/update_weights", 400, json={"path": path})
            assert expected in message
            assert str(tmp_path) not in message
        too_large = {"path": "good", "version": 2**64}
        assert "version=" in await refused(server, "/update_weights", 400, json=too_large)
        body = {"path": "good", "version": 12}
        answer = await server.http.post("/update_weights", headers=KEY, json=body)
        assert answer.json() == AWAKE | {"weights_version": 12}
        body = await server.complete(prompt="ab", max_tokens=2, return_token_ids=True)
        assert body["choices"][0]["weight_versions"] == [[12, 0]]
        await server.canary()

    serve(scenario, weights_folder=root, **CONTROL)


def test_server_without_weights_waits_for_them(
    serve: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in ("good", "broken"):
        (tmp_path / name).mkdir()
    shutil.copy(EMBEDDED_MODEL / "model.safetensors", tmp_path / "good")

    def read(folder: Path) -> list[TensorInfo]:
        if folder.name == "broken":
            raise PermissionError(13, "Permission denied", str(folder / "model.safetensors"))
        return read_tensor_infos(folder)

    monkeypatch.setattr(live_weights, "read_tensor_infos", read)

    async def scenario(server: Server) -> None:
        await post(server, "/sleep?level=2")
        assert await post(server, "/wake_up") == AWAKE
        request = start_request(server)
        async with asyncio.timeout(10):
            while not server.engine.stats().num_waiting:
                await asyncio.sleep(0.001)
        message = await refused(server, "/update_weights", 400, json={"path": "broken"})
        assert "Permission denied: 'broken/model.safetensors'" in message
        assert not request.done()
        await post(server, "/update_weights", json={"path": "good"})
        assert (await request)["choices"][0]["text"] == ANSWER

    serve(scenario, weights_folder=tmp_path, **CONTROL)


def test_invalid_combinations_of_control_key_with_other_options_are_refused(tmp_path: Path):
    with pytest.raises(RequestError, match="control_api_key is also an --api-key: use another"):
        ServeConfig(api_keys=("a", "b"), control_api_keys=("b",))
    with pytest.raises(RequestError, match="needs --control-api-key: set a key"):
        ServeConfig(weights_folder=tmp_path)
    flags = read_flags(["--control-api-key", "a", "--weights-folder", str(tmp_path)])
    assert (flags.serve.control_api_keys, flags.serve.weights_folder) == (("a",), tmp_path)
