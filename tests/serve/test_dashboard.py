"""The page's routes: who may fetch what, and what comes with it."""

import asyncio
import re
import runpy
from importlib.resources import files
from pathlib import Path

import httpx
import pytest
from browsing import find_browser
from serve_helpers import basic

from jpaged.serve.dashboard import broadcast
from jpaged.serve.dashboard.broadcast import PAGE_PATHS
from jpaged.serve.http.app import make_app
from jpaged.serve.http.serving import ServerState
from jpaged.serve.options import ServeConfig

STATIC = files("jpaged.serve.dashboard").joinpath("static")


def get(path: str, headers: dict[str, str] | None = None, **config) -> httpx.Response:
    """The answer of a server whose engine is not there yet."""

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(make_app(ServerState(ServeConfig(**config))))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.get(path, headers=headers)

    return asyncio.run(ask())


@pytest.mark.parametrize("path", sorted({*PAGE_PATHS, "/picture/events", "/picture/anything"}))
def test_a_browser_is_asked_for_a_key(path: str):
    answer = get(path, api_keys=("secret",))
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"].startswith('Basic realm="jpaged"')
    assert answer.json()["error"]["message"]
    given = basic("whoever", "secret")
    expected = {"events": 503, "anything": 404}.get(path.split("/")[-1], 200)
    assert get(path, given, api_keys=("secret",)).status_code == expected


def test_events_before_there_is_an_engine():
    answer = get("/picture/events")
    assert answer.status_code == 503
    assert "retry-after" in answer.headers


@pytest.mark.parametrize("path", sorted(PAGE_PATHS))
def test_files_come_with_their_type_and_a_strict_policy(path: str):
    answer = get(path)
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
    assert "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    kinds = {"js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
    assert answer.headers["content-type"].startswith(kinds.get(path.split(".")[-1], "text/html"))


@pytest.mark.parametrize("path", ["/picture/index.html", "/picture/x.js", "/picture/..%2fapp.py"])
def test_there_are_no_other_files(path: str):
    assert get(path).status_code == 404


def test_it_can_be_left_out():
    for path in (*PAGE_PATHS, "/picture/events"):
        assert get(path, dashboard=False).status_code == 404
    for given in ({}, basic("whoever", "secret")):
        answer = get("/", given, dashboard=False, api_keys=("secret",))
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"


def test_all_files_are_served():
    served = {path.removeprefix("/picture/") for path in PAGE_PATHS - {"/"}} | {"index.html"}
    assert served == {file.name for file in STATIC.iterdir()}


def test_a_stray_file_is_not_among_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "static").mkdir()
    for name in ("index.html", "main.js", "main.js~", ".main.js.swp", "notes", ".js"):
        (tmp_path / "static" / name).touch()
    monkeypatch.setattr("importlib.resources.files", lambda package: tmp_path)
    served = runpy.run_path(broadcast.__file__)["PAGE_PATHS"]
    assert served == {"/", "/picture/main.js"}


def test_the_page_has_nothing_that_its_policy_forbids():
    for file in STATIC.iterdir():
        text = file.read_text(encoding="utf-8")
        assert "innerHTML" not in text
        assert not re.search(r"\beval\(|new Function|document\.write|insertAdjacentHTML", text)
        assert not re.search(r"(?:src|href|url\()=?[\"']?(?:https?:)?//", text), file.name
    page = STATIC.joinpath("index.html").read_text(encoding="utf-8")
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", page)


def test_without_a_browser_the_tests_are_skipped_but_not_in_continuous_integration(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("JPAGED_REQUIRE_BROWSER", raising=False)
    with pytest.raises(pytest.skip.Exception, match="apt-get install chromium"):
        find_browser()
    monkeypatch.setenv("JPAGED_REQUIRE_BROWSER", "1")
    with pytest.raises(pytest.fail.Exception, match="must be tested"):
        find_browser()
