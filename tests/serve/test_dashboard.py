"""Test the dashboard's HTTP routes: authentication, headers and served files."""

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
    """Send a GET request to an application whose engine has not started, and return the
    response."""

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(make_app(ServerState(ServeConfig(**config))))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.get(path, headers=headers)

    return asyncio.run(ask())


@pytest.mark.parametrize("path", sorted({*PAGE_PATHS, "/picture/events", "/picture/anything"}))
def test_dashboard_routes_require_the_api_key(path: str):
    answer = get(path, api_keys=("secret",))
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"].startswith('Basic realm="jpaged"')
    assert answer.json()["error"]["message"]
    given = basic("whoever", "secret")
    expected = {"events": 503, "anything": 404}.get(path.split("/")[-1], 200)
    assert get(path, given, api_keys=("secret",)).status_code == expected


def test_dashboard_events_return_503_before_the_engine_starts():
    answer = get("/picture/events")
    assert answer.status_code == 503
    assert "retry-after" in answer.headers


@pytest.mark.parametrize("path", sorted(PAGE_PATHS))
def test_dashboard_files_have_content_type_and_security_policy(path: str):
    answer = get(path)
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
    assert "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    kinds = {"js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
    assert answer.headers["content-type"].startswith(kinds.get(path.split(".")[-1], "text/html"))


@pytest.mark.parametrize("path", ["/picture/index.html", "/picture/x.js", "/picture/..%2fapp.py"])
def test_unknown_dashboard_file_returns_404(path: str):
    assert get(path).status_code == 404


def test_disabled_dashboard_returns_404():
    for path in (*PAGE_PATHS, "/picture/events"):
        assert get(path, dashboard=False).status_code == 404
    for given in ({}, basic("whoever", "secret")):
        answer = get("/", given, dashboard=False, api_keys=("secret",))
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"


def test_every_static_file_of_the_dashboard_is_served():
    served = {path.removeprefix("/picture/") for path in PAGE_PATHS - {"/"}} | {"index.html"}
    assert served == {file.name for file in STATIC.iterdir()}


def test_editor_backup_files_are_not_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "static").mkdir()
    for name in ("index.html", "main.js", "main.js~", ".main.js.swp", "notes", ".js"):
        (tmp_path / "static" / name).touch()
    monkeypatch.setattr("importlib.resources.files", lambda package: tmp_path)
    served = runpy.run_path(broadcast.__file__)["PAGE_PATHS"]
    assert served == {"/", "/picture/main.js"}


def test_dashboard_files_use_nothing_that_the_content_security_policy_forbids():
    for file in STATIC.iterdir():
        text = file.read_text(encoding="utf-8")
        assert "innerHTML" not in text
        assert not re.search(r"\beval\(|new Function|document\.write|insertAdjacentHTML", text)
        assert not re.search(r"(?:src|href|url\()=?[\"']?(?:https?:)?//", text), file.name
    page = STATIC.joinpath("index.html").read_text(encoding="utf-8")
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", page)


def test_find_browser_skips_or_fails_if_no_browser_is_installed(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("JPAGED_REQUIRE_BROWSER", raising=False)
    with pytest.raises(pytest.skip.Exception, match="apt-get install chromium"):
        find_browser()
    monkeypatch.setenv("JPAGED_REQUIRE_BROWSER", "1")
    with pytest.raises(pytest.fail.Exception, match="unset JPAGED_REQUIRE_BROWSER"):
        find_browser()
