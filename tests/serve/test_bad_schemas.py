"""Send malformed, contradictory, hostile and huge schemas and tools to all three chat APIs: Chat
Completions, Responses and Messages."""

import re
import socket
from collections.abc import Callable
from typing import Any

import pytest
from serve_helpers import Server
from test_tools import HERMES

from jpaged import Engine
from jpaged.serve.errors import ApiError
from jpaged.serve.http.bodies import parse_json

Run = Callable[..., None]
Fields = dict[str, Any]


def deep(depth: int) -> Fields:
    return {"items": deep(depth - 1)} if depth else {}


def obj(name: str, own: Any, **more: Any) -> Fields:
    schema = {"type": "object", "properties": {name: own}, "required": [name]}
    return {**schema, "additionalProperties": False, **more}


def field(own: Any) -> Fields:
    return obj("a", own)


# Pairs of an invalid schema and words that its error message must contain. All schemas have the
# type "object", because the parameters of a tool must be an object.
NOTHING = ("cannot be enforced", "matches no finite value")
BAD: list[tuple[Fields, str | tuple[str, ...]]] = [
    (field({"type": "integer", "minimum": 5, "maximum": 1}), NOTHING),
    (field({"type": "number", "exclusiveMinimum": 1, "exclusiveMaximum": 1}), NOTHING),
    (field({"type": "integer", "multipleOf": 10, "minimum": 1, "maximum": 9}), NOTHING),
    (field({"type": "string", "minLength": 5, "maxLength": 1}), NOTHING),
    (field({"type": "array", "minItems": 5, "maxItems": 1}), NOTHING),
    (field({"allOf": [{"type": "string"}, {"type": "integer"}]}), NOTHING),
    (field({"type": "string", "const": 1}), NOTHING),
    (field(False), NOTHING),
    (obj("a", {}, required=["b"]), NOTHING),
    (obj("a", {}, minProperties=5, maxProperties=1), NOTHING),
    (field({"enum": []}), "properties.a.enum"),
    (field({"type": "text"}), "properties.a.type='text'"),
    (field({"uniqueItems": True}), "properties.a.uniqueItems is not enforced"),
    (field({"$ref": "#/$defs/b"}), "properties.a.$ref='#/$defs/b' cannot be resolved"),
    (field({"$ref": "file:///etc/passwd"}), "properties.a.$ref='file:///etc/passwd' must be"),
    (field({"enum": [f"value {i}" for i in range(20_000)]}), "are allowed"),
    (field({"pattern": "("}), NOTHING),
]
# The server may answer or refuse these schemas, but must keep running.
ODD: list[Fields] = [
    field({"pattern": "(a{1000}){1000}"}),
    field(deep(12)),
    field(deep(40)),
    {"$ref": "#"},
    {"type": "object", "$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    obj("c", {"$ref": "#"}),
    obj("c", {"anyOf": [{"$ref": "#"}, {"type": "null"}]}),
    field({"enum": list(range(9000))}),
    obj("a\nb", {"type": "null"}),
    obj("\x00", {"type": "null"}),
    obj("\x1b[2J", {"enum": ["\x07"]}),
    obj("\u202e", {"const": "\U0001f600"}),
    obj("a" * 60_000, {"type": "null"}),
    {"properties": {f"a{i}": {"type": "null"} for i in range(3000)}},
    {"$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(900)} | {"d900": {}}}
    | obj("a", {"$ref": "#/$defs/d0"}),
]


def chat_form(schema: Any, **how: Any) -> Fields:
    form = {"name": "a", "schema": schema, **how}
    return {"response_format": {"type": "json_schema", "json_schema": form}}


def chat_tools(tools: list[Fields], choice: str) -> Fields:
    """Return the fields `tools` and `tool_choice` of a chat request."""
    names = {"parameters": "parameters", "name": "name", "strict": "strict"}
    told = [{names[key]: it for key, it in tool.items()} for tool in tools]
    return {
        "tools": [{"type": "function", "function": tool} for tool in told],
        "tool_choice": choice,
    }


def responses_form(schema: Any, **how: Any) -> Fields:
    return {"text": {"format": {"type": "json_schema", "name": "a", "schema": schema, **how}}}


def responses_tools(tools: list[Fields], choice: str) -> Fields:
    return {"tools": [{"type": "function", **tool} for tool in tools], "tool_choice": choice}


def messages_form(schema: Any, **how: Any) -> Fields:
    return {"output_config": {"format": {"type": "json_schema", "schema": schema, **how}}}


def messages_tools(tools: list[Fields], choice: str) -> Fields:
    told = [{("input_schema" if k == "parameters" else k): v for k, v in t.items()} for t in tools]
    return {"tools": told, "tool_choice": {"type": {"required": "any"}.get(choice, choice)}}


SHORT = "{{ tools | length if tools else '' }}{{ messages[0].content }}"
USER = {"role": "user", "content": "a"}
# The three chat APIs by URL path. Each API has a tuple of five items:
# 1. the fields of a request without JSON schemas
# 2. a function that returns the request field with a JSON schema for the model's answer
# 3. a function that returns the request fields with the tools
# 4. the path of the answer's schema in the request body
# 5. the path of the first tool's schema in the request body
APIS: dict[str, tuple[Fields, Any, Any, str, str]] = {
    "/v1/chat/completions": (
        {"messages": [USER], "max_tokens": 2},
        chat_form,
        chat_tools,
        "response_format.json_schema.schema",
        "tools[0].function.parameters",
    ),
    "/v1/responses": (
        {"input": "a", "max_output_tokens": 2},
        responses_form,
        responses_tools,
        "text.format.schema",
        "tools[0].parameters",
    ),
    "/v1/messages": (
        {"messages": [USER], "max_tokens": 2},
        messages_form,
        messages_tools,
        "output_config.format.schema",
        "tools[0].input_schema",
    ),
}


@pytest.fixture
def with_tools(serve: Run, engines: Callable[..., Engine]) -> Run:
    engine = engines(max_model_len=1024, num_blocks=520)
    return lambda scenario: serve(scenario, engine, **{**HERMES, "chat_template": SHORT})


async def refusal(server: Server, path: str, fields: Fields) -> str:
    """Send a request that must be refused with status 400, and return the error message."""
    answer = await server.http.post(path, json=fields)
    assert answer.status_code == 400, (str(fields)[:300], answer.text[:300])
    message = answer.json()["error"]["message"]
    assert len(message) < 1000
    assert message.isprintable()
    await server.idle()
    return message


@pytest.mark.parametrize("path", APIS)
def test_unsatisfiable_schema_error_names_the_schema_field(with_tools: Run, path: str):
    plain, form, tools, at_form, at_tool = APIS[path]

    async def scenario(server: Server) -> None:
        for schema, told in BAD:
            message = await refusal(server, path, {**plain, **form(schema)})
            assert message.startswith(at_form), message
            words = (told,) if isinstance(told, str) else told
            assert any(word in message for word in words), message
            own = {"name": "f", "parameters": schema}
            message = await refusal(server, path, {**plain, **tools([own], "required")})
            assert message.startswith((at_tool, "tools has")), message
            assert any(word in message for word in words), message
            strict = await refusal(
                server, path, {**plain, **tools([{**own, "strict": True}], "auto")}
            )
            assert strict == message
        await server.canary()

    with_tools(scenario)


@pytest.mark.parametrize(
    "path",
    [it if "chat" in it else pytest.param(it, marks=pytest.mark.full) for it in APIS],
)
def test_server_survives_deep_recursive_and_huge_schemas(with_tools: Run, path: str):
    plain, form, tools, at_form, at_tool = APIS[path]

    async def scenario(server: Server) -> None:
        for schema in ODD:
            own = {"name": "f", "parameters": schema}
            for fields in (form(schema), tools([own], "required")):
                answer = await server.http.post(path, json={**plain, **fields})
                assert answer.status_code in (200, 400), answer.text[:300]
                if answer.status_code == 400:
                    message = answer.json()["error"]["message"]
                    where = (at_form, at_tool, "tools ", "the body", "structured_outputs.")
                    assert message.startswith(where), message[:300]
                    assert len(message) < 1000
                await server.idle()
                await server.canary()

    with_tools(scenario)


@pytest.mark.parametrize("path", APIS)
def test_server_never_fetches_urls_in_schemas(with_tools: Run, path: str):
    plain, form, tools, *_ = APIS[path]

    async def scenario(server: Server) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.setblocking(False)
            there = f"http://127.0.0.1:{listener.getsockname()[1]}/schema.json"
            for reference in (there, f"{there}#/a", there.removeprefix("http:")):
                schema = field({"$ref": reference})
                own = {"name": "f", "parameters": schema}
                for fields in (form(schema), tools([own], "required")):
                    message = await refusal(server, path, {**plain, **fields})
                    assert "must be a reference within this schema" in message
            for keyword in ("$schema", "$id", "$comment"):
                named = {**field({"type": "null"}), keyword: there}
                own = {"name": "f", "parameters": named}
                for fields in (form(named), tools([own], "required")):
                    answer = await server.http.post(path, json={**plain, **fields})
                    assert answer.status_code in (200, 400), answer.text
            with pytest.raises(BlockingIOError):
                listener.accept()
        await server.canary()

    with_tools(scenario)


@pytest.mark.parametrize("path", APIS)
def test_limits_on_tool_count_tool_size_and_tool_names_are_enforced(with_tools: Run, path: str):
    plain, form, tools, *_ = APIS[path]
    small, large = field({"type": "null"}), field({"enum": [f"value {i}" for i in range(100)]})

    def many(number: int, schema: Fields) -> list[Fields]:
        return [{"name": f"f{i}", "parameters": schema} for i in range(number)]

    async def scenario(server: Server) -> None:
        for number in (129, 5000):
            for choice in ("auto", "required"):
                message = await refusal(server, path, {**plain, **tools(many(number, {}), choice)})
                assert message.startswith("tools=(array of ")
        message = await refusal(server, path, {**plain, **tools(many(128, large), "required")})
        assert message.startswith("tools has ")
        for name in ("", "a b", "a\n", "\x00", "\x1b[2J", "f\u202e", "a" * 65):
            own = {"name": name, "parameters": small}
            message = await refusal(server, path, {**plain, **tools([own], "auto")})
            assert message.startswith("tools[0].")
        for name in ("", "a\n", "\x00", "\x1b[2J", "\x7f", "a" * 65):
            if path != "/v1/messages":
                message = await refusal(server, path, {**plain, **form(small, name=name)})
                assert ".name=" in message
        answer = await server.http.post(path, json={**plain, **tools(many(20, small), "required")})
        assert answer.status_code == 200, answer.text[:300]
        await server.idle()
        await server.canary()

    with_tools(scenario)


@pytest.mark.parametrize(
    ("body", "path"),
    [
        (rb'{"structured_outputs":{"regex":"a\ud800"}}', "structured_outputs.regex"),
        (rb'{"structured_outputs":{"choice":["a","\udfff"]}}', "structured_outputs.choice[1]"),
        (rb'{"text":{"format":{"schema":{"\ud83d":1}}}}', "text.format.schema"),
        (rb'{"tools":[{"a":{"const":"\ud83d\ud83d"}}]}', "tools[0].a.const"),
    ],
)
def test_lone_surrogate_error_names_the_field(body: bytes, path: str):
    with pytest.raises(ApiError, match=f"^{re.escape(path)} has a lone surrogate") as found:
        parse_json(body, 1000)
    assert (found.value.status, found.value.param) == (400, path)
