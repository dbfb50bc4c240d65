"""Test the published schema, metric names and command-line help against the committed files.

After an intended change, `python tests/serve/test_published.py` rewrites the files in `published/`.
"""

import argparse
import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import jsonschema
import pytest
from serve_helpers import bearer

from jpaged import EngineStats, SamplingParams
from jpaged.__main__ import build_parser as generate
from jpaged.serve.engine.messages import EngineRequest
from jpaged.serve.http.app import build_openapi, make_app
from jpaged.serve.http.metrics import Metrics
from jpaged.serve.http.serving import ServerState
from jpaged.serve.options import ServeConfig
from jpaged.serve.options import build_parser as serve

FOLDER = Path(__file__).parent / "published"
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "LOCK")


def schema() -> str:
    """Return `/openapi.json` without jpaged's version."""
    document = build_openapi()
    document["info"].pop("version")
    return json.dumps(document, indent=1, sort_keys=True)


def metrics() -> str:
    """Return the names, descriptions, labels and buckets of `/metrics`, without the values."""
    figures = Metrics("m", max_model_len=64, block_size=16, num_blocks=9)
    figures.record_request(EngineRequest("r", [1], SamplingParams(max_tokens=2)), "stop", 1, 1)
    lines = figures.text(EngineStats(16, 8, 8, 0)).decode().splitlines()
    return "\n".join(line if line[0] == "#" else line.rpartition(" ")[0] for line in lines)


def help_of(parser: argparse.ArgumentParser) -> str:
    """Return the output of `--help` for a terminal of 10,000 columns, without indentation."""
    with mock.patch.dict(os.environ, COLUMNS="10000"):
        said = parser.format_help()
    return "\n".join(" ".join(line.split()) for line in said.splitlines())


PUBLISHED: dict[str, Callable[[], str]] = {
    "openapi.json": schema,
    "metrics.txt": metrics,
    "jpaged_help.txt": lambda: help_of(generate()),
    "serve_help.txt": lambda: help_of(serve()),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_match_the_code(name: str):
    assert f"{PUBLISHED[name]()}\n" == (FOLDER / name).read_text(encoding="utf-8")


def test_only_published_methods_are_answered():
    """Send each HTTP method to each path of a server that has no engine yet."""

    async def scenario() -> None:
        async with client() as http:
            for path, published in build_openapi()["paths"].items():
                for method in METHODS:
                    url = path.format(name="m")
                    answer = await http.request(method, url, headers=bearer("one"))
                    is_answered = method.lower() in published
                    assert (answer.status_code != 405) == is_answered, (method, path)

    asyncio.run(scenario())


def test_error_responses_match_the_published_schema():
    async def scenario() -> None:
        document = build_openapi()
        async with client() as http:
            for path, published in document["paths"].items():
                for method in published.keys() & {"get", "post"}:
                    asked = method.upper(), path.format(name="other")
                    wrong_host = {"Host": "elsewhere.example", **bearer("one")}
                    for headers in ({}, bearer("one"), wrong_host):
                        answer = await http.request(*asked, headers=headers)
                        if answer.status_code != 200:
                            check_response(document, published[method], answer)

    asyncio.run(scenario())


def client() -> httpx.AsyncClient:
    """Return a client of a server that has an API key and allowed hosts, but no engine yet."""
    config = ServeConfig(api_keys=("one",), allowed_hosts=("jpaged",))
    transport = httpx.ASGITransport(make_app(ServerState(config)))
    return httpx.AsyncClient(transport=transport, base_url="http://jpaged")


def check_response(
    document: dict[str, Any], operation: dict[str, Any], answer: httpx.Response
) -> None:
    """Validate a response against the OpenAPI schema for the operation and response status."""
    published = operation["responses"][str(answer.status_code)]
    if "content" not in published:
        assert answer.content == b""
        return
    schema = published["content"]["application/json"]["schema"]
    jsonschema.validate(answer.json(), {**schema, "components": document["components"]})
    is_anthropics = answer.request.url.path.startswith("/v1/messages")
    assert (answer.json().get("type") == "error") == is_anthropics


if __name__ == "__main__":
    for name, made in PUBLISHED.items():
        (FOLDER / name).write_text(f"{made()}\n", encoding="utf-8")
