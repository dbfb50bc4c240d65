"""Send random bodies to every POST route, and check responses against the published schema."""

import json
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schema_strategies import ANYTHING, values_of
from serve_helpers import Server

from jpaged.serve.http.app import build_openapi
from tests.covering import num_examples

Run = Callable[..., None]
DOCUMENT = json.loads(json.dumps(build_openapi()))
POSTS = {
    path: methods["post"]
    for path, methods in DOCUMENT["paths"].items()
    if "requestBody" in methods.get("post", ())
}
FUZZ = settings(
    max_examples=num_examples(60),
    deadline=None,
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.filter_too_much,
        HealthCheck.data_too_large,
    ],
)


ENDS = {
    "/v1/messages": b'event: message_stop\ndata: {"type":"message_stop"}\n\n',
    "/v1/responses": b"}\n\n",
}
"""By path: last bytes of a stream that does not end with `data: [DONE]`."""


def body_schema(path: str) -> dict[str, Any]:
    return POSTS[path]["requestBody"]["content"]["application/json"]["schema"]


def fields_of(path: str) -> list[str]:
    name = body_schema(path)["$ref"].rpartition("/")[2]
    return sorted(DOCUMENT["components"]["schemas"][name]["properties"])


async def check_answer(server: Server, path: str, body: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    answer = await server.http.post(path, content=body, headers=headers)
    assert str(answer.status_code) in POSTS[path]["responses"], (body, answer.text)
    assert answer.status_code < 500, (body, answer.text)
    if answer.status_code != 200:
        published = POSTS[path]["responses"][str(answer.status_code)]["content"]
        schema = {**DOCUMENT, **published["application/json"]["schema"]}
        jsonschema.validate(answer.json(), schema)
    elif answer.headers["content-type"].startswith("text/event-stream"):
        assert answer.content.endswith(ENDS.get(path, b"data: [DONE]\n\n"))
        assert b'"error":{' not in answer.content
    else:
        answer.json()


def fuzz(serve: Run, path: str, bodies: st.SearchStrategy[bytes]) -> None:
    async def scenario(server: Server) -> None:
        made: list[bytes] = []

        # Hypothesis cannot call coroutines, so collect the bodies first and send them afterwards.
        @FUZZ
        @given(bodies)
        def collect(body: bytes) -> None:
            made.append(body)

        collect()
        for body in made:
            await check_answer(server, path, body)
        await server.idle()
        await server.canary()

    serve(scenario, limits={"max_body_bytes": 100_000})


@pytest.mark.parametrize("path", POSTS)
def test_valid_random_requests_never_cause_a_server_error(serve: Run, path: str):
    fuzz(serve, path, values_of(body_schema(path), DOCUMENT).map(as_json))


@pytest.mark.parametrize("path", POSTS)
def test_requests_with_random_field_values_never_cause_a_server_error(serve: Run, path: str):
    good = values_of(body_schema(path), DOCUMENT)
    spoilt = st.dictionaries(st.sampled_from(fields_of(path)), ANYTHING, min_size=1, max_size=3)
    fuzz(serve, path, st.builds(lambda a, b: as_json(a | b), good, spoilt))


@pytest.mark.parametrize("path", POSTS)
def test_random_bytes_never_cause_a_server_error(serve: Run, path: str):
    good = values_of(body_schema(path), DOCUMENT).map(as_json)
    torn = st.builds(
        lambda body, at, junk: body[:at] + junk + body[at:],
        good,
        st.integers(0, 60),
        st.binary(max_size=4),
    )
    fuzz(serve, path, ANYTHING.map(as_json) | st.binary(max_size=50) | torn)


def as_json(value: Any) -> bytes:
    return json.dumps(value).encode()
