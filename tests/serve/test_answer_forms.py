"""Test structured outputs over HTTP: schemas, grammars, forced tool calls and reasoning."""

import asyncio
import json
import re
from collections.abc import Callable
from typing import Any, Literal

import jsonschema
import openai
import pydantic
import pytest
from hostile_forms import HOSTILE, names_by_pattern, references, rules, with_schema
from scripted_engine import ScriptedEngine
from serve_helpers import Server
from test_tools import HERMES, TEMPLATE, USER, WEATHER, ask, choices_of

from jpaged import Engine, GrammarTrial
from jpaged.serve.engine.tokenizing import TokenizingService
from jpaged.serve.errors import field_error
from jpaged.structured_outputs import bounds

Run = Callable[..., None]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green"]},
        "sizes": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2},
    },
    "required": ["colour", "sizes"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "box", "schema": SCHEMA, "strict": True}}
NAMED = {"type": "function", "function": {"name": "weather"}}
NOW = {"type": "function", "function": {"name": "now"}}
CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": CITY}}


class Box(pydantic.BaseModel):
    """A response format for the `.parse()` method of OpenAI's client."""

    colour: Literal["red", "green"]
    nullable: bool | None = None


def client_of(server: Server) -> openai.AsyncOpenAI:
    http: Any = server.http
    return openai.AsyncOpenAI(base_url="http://test/v1", api_key="-", http_client=http)


def test_answers_and_streams_match_their_json_schema(serve: Run):
    async def scenario(server: Server) -> None:
        asked = {"response_format": FORMAT, "max_tokens": 100, "n": 3, "seed": 1}
        for choice in (await ask(server, **asked))["choices"]:
            jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
            assert choice["finish_reason"] == "stop"
        chunks = await choices_of(server, **asked)
        for index in range(3):
            own = [it["delta"].get("content", "") for it in chunks if it["index"] == index]
            jsonschema.validate(json.loads("".join(own)), SCHEMA)

    serve(scenario)


def test_openai_client_parses_answers_into_pydantic_models(serve: Run):
    async def scenario(server: Server) -> None:
        made = await client_of(server).chat.completions.parse(
            model="jpaged-tiny", messages=[{"role": "user", "content": "a"}], response_format=Box
        )
        box = made.choices[0].message.parsed
        assert box is not None
        assert box.colour in ("red", "green")

    serve(scenario)


@pytest.mark.parametrize(
    ("spec", "pattern"),
    [
        ({"regex": "[0-9]{3}"}, "[0-9]{3}"),
        ({"choice": ["yes", "no"]}, "yes|no"),
        ({"grammar": 'start: "<" /[a-z]{1,4}/ ">"'}, "<[a-z]{1,4}>"),
        ({"json": json.dumps({"const": {"a": 1}})}, r'\{ ?"a" ?: ?1 ?\}'),
    ],
)
def test_vllm_structured_outputs_field_constrains_answers(
    serve: Run, spec: dict[str, Any], pattern: str
):
    async def scenario(server: Server) -> None:
        asked = {"prompt": ["a", "b"], "structured_outputs": spec, "max_tokens": 60}
        answer = await server.http.post("/v1/completions", json=asked)
        assert answer.status_code == 200, answer.text
        for choice in answer.json()["choices"]:
            assert re.fullmatch(pattern, choice["text"])
        (choice,) = (await ask(server, structured_outputs=spec, max_tokens=60))["choices"]
        assert re.fullmatch(pattern, choice["message"]["content"])

    serve(scenario)


def test_answer_with_json_object_format_starts_with_a_brace(serve: Run):
    async def scenario(server: Server) -> None:
        asked = {"response_format": {"type": "json_object"}, "max_tokens": 40, "logprobs": True}
        (choice,) = (await ask(server, **asked, top_logprobs=3))["choices"]
        assert choice["message"]["content"].startswith("{")
        scores = choice["logprobs"]["content"]
        assert [it["token"] for it in scores[0]["top_logprobs"]] == ["{"]
        free = await ask(server, response_format={"type": "text"}, temperature=0)
        assert free["choices"] == (await ask(server, temperature=0))["choices"]

    serve(scenario)


async def _refusal_message(server: Server, spec: dict[str, Any]) -> str:
    """Send a structured-output spec that the server must refuse, and return the error message.
    Check that the server answers the next request."""
    body = {"structured_outputs": spec, "max_tokens": 4, "stream": True}
    answer = await server.http.post("/v1/completions", json={"prompt": "a", **body})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert str(error["param"]).startswith(f"structured_outputs.{next(iter(spec))}"), error
    await server.canary()
    await server.idle()
    return error["message"]


def test_structured_output_spec_that_exceeds_a_limit_gets_status_400(serve: Run):
    async def scenario(server: Server) -> None:
        for spec, _, message in HOSTILE.values():
            assert re.search(message, await _refusal_message(server, spec))
            if "json" in spec:
                await _refusal_message(server, with_schema(spec))

    serve(scenario)


@pytest.mark.parametrize("name", HOSTILE)
def test_spec_that_exceeds_time_memory_or_stack_fails_only_its_request(
    serve: Run, monkeypatch: pytest.MonkeyPatch, name: str
):
    """Each spec is refused by a limit. Without the limit, compiling the spec would take too much
    time, memory or stack."""
    spec, bound, _ = HOSTILE[name]
    monkeypatch.setattr(bounds, "SOURCE_LENGTH", bounds.SOURCE_LENGTH._replace(limit=10**9))
    monkeypatch.setattr(bounds, "MAX_MULTIPLE_OF", 10**9)
    bounded = {bound, "SCHEMAS", "GRAMMAR_RULES", "SCHEMAS_PER_VALUE", "PATTERNS_PER_VALUE"} - {
        "MAX_MULTIPLE_OF"
    }
    for each in bounded:
        monkeypatch.setattr(bounds, each, getattr(bounds, each)._replace(limit=10**9))
    spec = {
        "references": {"json": json.dumps(references(12_000))},
        "rules": {"grammar": rules(25_000)},
        "patterns of names": {"json": names_by_pattern(1000)},
    }.get(name, spec)

    async def scenario(server: Server) -> None:
        assert "cannot be enforced" in await _refusal_message(server, spec)

    serve(scenario)


def test_answer_with_a_too_ambiguous_grammar_ends_with_an_error(serve: Run):
    async def scenario(server: Server) -> None:
        spec = {"grammar": 'start: s\ns: s s s | s s | "a" | "b"'}
        body = {"prompt": "a", "structured_outputs": spec, "max_tokens": 200, "ignore_eos": True}
        answer = await server.http.post("/v1/completions", json=body)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == "structured_outputs.grammar"
        answer = await server.http.post("/v1/completions", json={**body, "stream": True})
        assert answer.status_code == 200
        assert '"param":"structured_outputs.grammar"' in answer.text
        assert answer.text.endswith("data: [DONE]\n\n")

    serve(scenario)


@pytest.mark.parametrize(
    ("regex", "fields", "names", "num_tokens"),
    [
        ("[ab]{3}", {"allowed_token_ids": [200]}, "allowed_token_ids", 0),
        ("aab", {"allowed_token_ids": [97]}, "allowed_token_ids", 2),
        ("ba+", {"stop_token_ids": [97], "min_tokens": 3}, "min_tokens", 1),
        (
            "[ab]{3}",
            {"allowed_token_ids": [97, 200], "stop_token_ids": [97], "min_tokens": 3},
            "allowed_token_ids and min_tokens",
            0,
        ),
    ],
)
def test_error_names_parameters_that_conflict_with_the_grammar(
    serve: Run, regex: str, fields: dict[str, Any], names: str, num_tokens: int
):
    async def scenario(server: Server) -> None:
        spec = {"structured_outputs": {"regex": regex}}
        body = {"prompt": "a", "max_tokens": 9, **spec, **fields}
        answer = await server.http.post("/v1/completions", json=body)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["param"] == "structured_outputs.regex"
        words = f"and {names} together allow no token after {num_tokens} tokens"
        assert words in error["message"]
        answer = await server.http.post("/v1/completions", json={**body, "stream": True})
        assert words in answer.text
        assert "invalid_request_error" in answer.text
        await server.canary()

    serve(scenario)


@pytest.mark.full
@pytest.mark.parametrize("choice", ["required", NAMED])
def test_tool_choice_forces_a_valid_tool_call(
    serve: Run, engines: Callable[..., Engine], choice: Any
):
    async def scenario(server: Server) -> None:
        tools = [TOOL, NOW] if choice == NAMED else [TOOL]
        for parallel in (False, True):
            asked = {"tools": tools, "tool_choice": choice, "parallel_tool_calls": parallel}
            (answer,) = (await ask(server, **asked, max_tokens=200, seed=1))["choices"]
            calls = answer["message"]["tool_calls"]
            assert calls
            assert parallel or len(calls) == 1
            if answer["finish_reason"] == "length":
                calls.pop()
            for call in calls:
                assert call["function"]["name"] == "weather"
                jsonschema.validate(json.loads(call["function"]["arguments"]), CITY)
        asked["parallel_tool_calls"] = False
        chunks = await choices_of(server, **asked, max_tokens=200)
        assert chunks[-1]["finish_reason"] == "tool_calls"

    serve(scenario, engines(max_model_len=1024, num_blocks=520), **HERMES)


def test_strict_tool_schema_constrains_calls_under_auto_tool_choice(
    serve: Run, scripted: ScriptedEngine
):
    def with_strict(strict: bool | None) -> Any:
        return {"type": "function", "function": {**TOOL["function"], "strict": strict}}

    async def scenario(server: Server) -> None:
        for strict in (None, False):
            scripted.say("Hello")
            await ask(server, tools=[with_strict(strict)])
            assert scripted.params[-1].structured_outputs is None
        scripted.say("Hello")
        await ask(server, tools=[with_strict(True)], tool_choice="auto")
        spec = scripted.params[-1].structured_outputs
        assert spec is not None
        assert '"enum":["Paris","Rome"]' in (spec.grammar or "")
        (choice,) = (await ask(server, tools=[with_strict(True)], temperature=0))["choices"]
        # the model generated this text; it is not a scripted answer
        assert choice["message"]["content"]

    serve(scenario, scripted, **HERMES)


def test_request_with_tools_and_response_format_returns_tool_calls_or_valid_json(
    serve: Run, engines: Callable[..., Engine]
):
    async def scenario(server: Server) -> None:
        tool = {"type": "function", "function": {**TOOL["function"], "strict": True}}
        asked = {"response_format": FORMAT, "tools": [tool], "max_tokens": 150, "seed": 1, "n": 8}
        kinds = set()
        for choice in (await ask(server, **asked))["choices"]:
            message = choice["message"]
            kinds.add(choice["finish_reason"])
            for call in message.get("tool_calls", ()):
                jsonschema.validate(json.loads(call["function"]["arguments"]), CITY)
            if choice["finish_reason"] == "stop":
                jsonschema.validate(json.loads(message["content"]), SCHEMA)
        assert kinds & {"stop", "tool_calls"}
        # The answer of a forced tool call has no text.
        named = {**asked, "tool_choice": NAMED, "n": 2}
        for choice in (await ask(server, **named))["choices"]:
            (call,) = choice["message"]["tool_calls"]
            assert call["function"]["name"] == "weather"

    serve(scenario, engines(max_model_len=1024, num_blocks=520), **HERMES)


def test_unenforceable_tool_schema_is_refused_only_when_a_call_is_required(
    serve: Run, engines: Callable[..., Engine]
):
    async def scenario(server: Server) -> None:
        hard = {"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}
        body = {"messages": [USER], "tools": [TOOL, hard], "max_tokens": 3}
        answer = await server.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200
        body["tool_choice"] = "required"
        answer = await server.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "tools[1].function.parameters.not"

    serve(scenario, engines(max_model_len=1024, num_blocks=520), **HERMES)


def test_error_names_only_the_tools_field_if_finding_the_invalid_tool_takes_too_long(
    serve: Run, engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
):
    tried: list[str] = []

    async def check_spec(self: TokenizingService, spec: object, path: str, client: str) -> None:
        tried.append(path)
        await asyncio.sleep(5 * (path != "tools"))
        raise field_error(path, "cannot be enforced")

    async def scenario(server: Server) -> None:
        body = {"messages": [USER], "tools": [TOOL, NOW], "tool_choice": "required"}
        answer = await server.http.post("/v1/chat/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")
        assert tried == ["tools", "tools[0].function.parameters"]

    monkeypatch.setattr(GrammarTrial, "seconds", 0.1)
    monkeypatch.setattr(TokenizingService, "check_spec", check_spec)
    serve(scenario, engines(max_model_len=1024, num_blocks=520), **HERMES)


@pytest.mark.parametrize(
    ("parser", "thinks", "after", "opening"),
    [
        ("qwen3", True, "</think>", None),
        ("qwen3", None, "</think>", "<think>"),
        ("deepseek_r1", None, "</think>", None),
        (None, None, None, None),
    ],
)
def test_grammar_starts_after_the_reasoning_end_tag(
    serve: Run,
    scripted: ScriptedEngine,
    parser: str | None,
    thinks: bool | None,
    after: str | None,
    opening: str | None,
):
    async def scenario(server: Server) -> None:
        scripted.say("x")
        kwargs = {} if thinks is None else {"chat_template_kwargs": {"enable_thinking": thinks}}
        await ask(server, response_format=FORMAT, **kwargs)
        spec = scripted.params[0].structured_outputs
        assert spec is not None
        assert (spec.after, spec.opening) == (after, opening)
        scripted.say("x")
        await ask(server, tools=[WEATHER], tool_choice="required", **kwargs)
        spec = scripted.params[-1].structured_outputs
        assert spec is not None
        assert (spec.kind, spec.after) == ("grammar", after)

    more = {} if parser is None else {"reasoning_parser": parser}
    serve(scenario, scripted, **HERMES, **more)


def test_grammar_starts_immediately_when_the_template_closes_the_reasoning(
    serve: Run, scripted: ScriptedEngine
):
    template = TEMPLATE.replace("<think>\n", "<think>\n\n</think>\n\n")

    async def scenario(server: Server) -> None:
        scripted.say("x")
        kwargs = {"enable_thinking": True}
        await ask(server, response_format=FORMAT, chat_template_kwargs=kwargs)
        spec = scripted.params[0].structured_outputs
        assert spec is not None
        assert spec.after is None

    config = {**HERMES, "chat_template": template, "reasoning_parser": "qwen3"}
    serve(scenario, scripted, **config)
