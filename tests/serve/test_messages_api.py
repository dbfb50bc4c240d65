"""Test Anthropic's Messages API with Anthropic's client and with invalid requests."""

import asyncio
import json
from collections.abc import Callable
from typing import Any, Literal

import anthropic
import httpx2
import pydantic
import pytest
from scripted_engine import ScriptedEngine
from serve_helpers import Server, events_of
from test_connections import answer_to, server
from test_tools import CALL, HERMES, THOUGHT

from jpaged import Engine, RequestDelta
from jpaged.serve.engine import client as engine_client
from jpaged.serve.http.app import make_app
from jpaged.serve.http.serving import ServerState
from jpaged.serve.options import Limits, ServeConfig

Run = Callable[..., None]
PATH = "/v1/messages"
USER = {"role": "user", "content": "a"}
TOOL: dict[str, Any] = {
    "name": "weather",
    "description": "now",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}


@pytest.fixture
def scripted(engines: Callable[..., Engine]) -> ScriptedEngine:
    return ScriptedEngine(engines(max_model_len=1024, num_blocks=520))


def client_of(server: Server, key: str = "-") -> anthropic.AsyncAnthropic:
    app: Any = server.app
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app))
    return anthropic.AsyncAnthropic(
        base_url="http://jpaged", api_key=key, http_client=http, max_retries=0
    )


async def ask(server: Server, **fields: Any) -> dict[str, Any]:
    answer = await server.http.post(PATH, json={"messages": [USER], "max_tokens": 20, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def streamed(server: Server, **fields: Any) -> list[dict[str, Any]]:
    body = {"messages": [USER], "max_tokens": 20, "stream": True, **fields}
    async with server.http.stream("POST", PATH, json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        return [json.loads(data) async for data in events_of(answer)]


def test_message_text_equals_the_chat_completion(serve: Run):
    async def scenario(server: Server) -> None:
        asked = {"temperature": 0, "system": [{"type": "text", "text": "Be brief"}]}
        given = [{"role": "user", "content": [{"type": "text", "text": "Count from 3 to 7"}]}]
        made = await ask(server, **asked, messages=given)
        messages = [
            {"role": "system", "content": "Be brief"},
            {"role": "user", "content": "Count from 3 to 7"},
        ]
        body = {"messages": messages, "temperature": 0, "max_tokens": 20}
        chat = (await server.http.post("/v1/chat/completions", json=body)).json()
        text = chat["choices"][0]["message"]["content"]
        assert made["content"] == [{"type": "text", "text": text}]
        used = made["usage"]
        cached = used["cache_read_input_tokens"]
        assert used["input_tokens"] + cached == chat["usage"]["prompt_tokens"]
        assert used["output_tokens"] == chat["usage"]["completion_tokens"]
        reason = {"stop": "end_turn", "length": "max_tokens"}[chat["choices"][0]["finish_reason"]]
        assert (made["stop_reason"], made["stop_sequence"]) == (reason, None)
        assert made["model"] == "jpaged-tiny"
        cut = await ask(server, temperature=0, max_tokens=2)
        assert cut["stop_reason"] == "max_tokens"

    serve(scenario)


def test_cached_prompt_tokens_are_not_input_tokens(serve: Run):
    async def scenario(server: Server) -> None:
        messages = [{"role": "user", "content": "Count from 3 to 7, " * 4}]
        counted = await server.http.post(f"{PATH}/count_tokens", json={"messages": messages})
        await ask(server, messages=messages, max_tokens=1)
        used = (await ask(server, messages=messages, max_tokens=1))["usage"]
        cached = used["cache_read_input_tokens"]
        assert cached > 0
        assert used["input_tokens"] + cached == counted.json()["input_tokens"]

    serve(scenario)


def test_matched_stop_sequence_is_reported(serve: Run):
    async def scenario(server: Server) -> None:
        asked = {"temperature": 0, "messages": [{"role": "user", "content": "Count from 3 to 7"}]}
        whole = (await ask(server, **asked))["content"][0]["text"]
        stop = whole[3]
        made = await ask(server, **asked, stop_sequences=["§", stop])
        assert (made["stop_reason"], made["stop_sequence"]) == ("stop_sequence", stop)
        assert made["content"][0]["text"] == whole[: whole.index(stop)]

    serve(scenario)


def test_content_blocks_contain_thinking_then_text_then_tool_use(
    serve_scripted: Run, scripted: ScriptedEngine
):
    async def scenario(server: Server) -> None:
        scripted.say(THOUGHT)
        made = await ask(server, tools=[TOOL])
        thought, said, call = made["content"]
        assert thought == {"type": "thinking", "thinking": "Hm.", "signature": ""}
        assert said == {"type": "text", "text": "I look."}
        assert (call["type"], call["name"]) == ("tool_use", "weather")
        assert call["input"] == {"city": "Paris"}
        assert made["stop_reason"] == "tool_use"

    serve_scripted(scenario)


@pytest.mark.parametrize("size", [0, 1, 9])
def test_stream_events_follow_the_anthropic_order(
    serve_scripted: Run, scripted: ScriptedEngine, size: int
):
    async def scenario(server: Server) -> None:
        scripted.say(f"{THOUGHT}\n{CALL}", size=size)
        events = await streamed(server, tools=[TOOL])
        kinds: list[str] = []
        for event in events:
            if not kinds or kinds[-1] != event["type"]:
                kinds.append(event["type"])
        block = [f"content_block_{part}" for part in ("start", "delta", "stop")]
        assert kinds == ["message_start", *block * 4, "message_delta", "message_stop"]
        pieces: dict[int, str] = {}
        for event in events:
            if event["type"] == "content_block_delta":
                kind, text = event["delta"].values()
                pieces[event["index"]] = pieces.get(event["index"], "") + text
                assert kind in ("thinking_delta", "text_delta", "input_json_delta")
        arguments = '{"city": "Paris"}'
        assert pieces == {0: "Hm.", 1: "I look.", 2: arguments, 3: arguments}
        assert events[0]["message"]["content"] == []
        assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
        assert events[-2]["usage"]["output_tokens"] > 0

    serve_scripted(scenario)


def test_anthropic_client_completes_a_tool_use_conversation(
    serve_scripted: Run, scripted: ScriptedEngine
):
    """The client sends the returned content blocks back unchanged."""

    async def scenario(server: Server) -> None:
        client = client_of(server)
        scripted.say(THOUGHT)
        given: list[Any] = [{"role": "user", "content": "Weather?"}]
        asked: dict[str, Any] = {"model": "jpaged-tiny", "max_tokens": 50, "tools": [TOOL]}
        made = await client.messages.create(messages=given, **asked)
        call = made.content[-1]
        assert call.type == "tool_use"
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
        given += [
            {"role": "assistant", "content": made.content},
            {"role": "user", "content": [result, {"type": "text", "text": "And?"}]},
        ]
        scripted.say("It is sunny.", size=3)
        async with client.messages.stream(messages=given, **asked) as stream:
            text = "".join([piece async for piece in stream.text_stream])
            final = await stream.get_final_message()
        assert text == "It is sunny."
        assert final.stop_reason == "end_turn"
        prompt = scripted.prompts[-1]
        assert "(user:Weather?)(assistant:<Hm.>I look. call_" in prompt
        assert f"city=Paris)(tool{call.id}:sunny)(user:And?)" in prompt

    serve_scripted(scenario)


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_tool_choice_forces_a_tool_call(
    serve: Run, engines: Callable[..., Engine], choice: dict[str, Any]
):
    async def scenario(server: Server) -> None:
        schema = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}}
        tool = {**TOOL, "input_schema": {**schema, "additionalProperties": False}}
        one = {**choice, "disable_parallel_tool_use": True}
        made = await ask(server, tools=[tool], tool_choice=one, max_tokens=200)
        (call,) = made["content"]
        assert call["name"] == "weather"
        assert call["input"].get("city", "Paris") in ("Paris", "Rome")

    serve(scenario, engines(max_model_len=1024, num_blocks=520), **HERMES)


def test_api_key_is_read_from_the_anthropic_header(serve: Run):
    async def scenario(server: Server) -> None:
        asked: Any = {"model": "jpaged-tiny", "max_tokens": 2, "messages": [USER]}
        made = await client_of(server, "secret").messages.create(**asked)
        assert made.stop_reason == "max_tokens"
        with pytest.raises(anthropic.AuthenticationError) as refused:
            await client_of(server, "other").messages.create(**asked)
        body: Any = refused.value.body
        assert body["error"]["type"] == "authentication_error"

    serve(scenario, api_keys=("secret",))


def test_client_disconnect_aborts_its_message(serve: Run, engine: Engine):
    async def scenario(server: Server) -> None:
        body = {"messages": [USER], "stream": True, "max_tokens": 200}
        async with server.http.stream("POST", PATH, json=body) as answer:
            async for _ in events_of(answer):
                break
        while server.serving.num_requests:
            await asyncio.sleep(0.01)

    serve(scenario)
    assert not engine.has_unfinished_requests


def test_message_output_conforms_to_a_schema(serve: Run):
    async def scenario(server: Server) -> None:
        colour = Literal["red", "green"]
        box = pydantic.create_model("Box", colour=(colour, ...), full=(bool, ...))
        asked: Any = {"model": "jpaged-tiny", "max_tokens": 60, "messages": [USER]}
        made = await client_of(server).messages.parse(output_format=box, **asked)
        assert made.parsed_output is not None
        format = {"type": "json_schema", "schema": {"not": {}}}
        body = {**asked, "output_config": {"format": format}}
        answer = await server.http.post(PATH, json=body)
        assert answer.status_code == 400
        assert "output_config.format.schema.not is not" in answer.json()["error"]["message"]

    serve(scenario)


def test_counted_tokens_equal_the_input_tokens_of_a_message(
    serve_scripted: Run, scripted: ScriptedEngine
):
    async def scenario(server: Server) -> None:
        client = client_of(server)
        turns: list[Any] = [
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": [{**USE, "name": "weather"}]},
            {"role": "user", "content": [{**RESULT, "content": "sunny"}]},
        ]
        asked: Any = {"model": "jpaged-tiny", "messages": turns, "system": "Be brief"}
        none = {"tools": [TOOL], "tool_choice": {"type": "none"}}
        others: list[Any] = [{}, {"tools": [TOOL]}, none]
        for more in others:
            scripted.say("So.")
            made = await client.messages.create(max_tokens=9, **asked, **more)
            counted = await client.messages.count_tokens(**asked, **more)
            cached = made.usage.cache_read_input_tokens or 0
            assert counted.input_tokens == made.usage.input_tokens + cached
        long: Any = {"model": "jpaged-tiny", "messages": [{"role": "user", "content": "a" * 2000}]}
        assert (await client.messages.count_tokens(**long)).input_tokens > 2000
        with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\]\.role"):
            await client.messages.count_tokens(model="jpaged-tiny", messages=[{"role": "x"}])  # type: ignore
        with pytest.raises(anthropic.NotFoundError, match="not_found_error"):
            await client.messages.count_tokens(model="gpt-4", messages=turns)

    serve_scripted(scenario)


def test_anthropic_tool_runner_completes_a_tool_call(serve_scripted: Run, scripted: ScriptedEngine):
    """The runner first asks the server to store the conversation. The server refuses that."""
    called: list[str] = []

    @anthropic.beta_async_tool
    async def weather(city: str) -> str:
        """The weather."""
        called.append(city)
        return "sunny"

    async def scenario(server: Server) -> None:
        scripted.say(THOUGHT)
        scripted.say("It is sunny.")
        asked: Any = {"model": "jpaged-tiny", "max_tokens": 50}
        given: Any = [{"role": "user", "content": "Weather?"}]
        runner = client_of(server).beta.messages.tool_runner(
            messages=given, tools=[weather], **asked
        )
        final = await runner.until_done()
        assert final.content[0].text == "It is sunny."  # type: ignore
        assert called == ["Paris"]

    serve_scripted(scenario)


RESULT = {"type": "tool_result", "tool_use_id": "a"}
USE = {"type": "tool_use", "id": "a", "name": "f", "input": {}}


def turn(*blocks: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [USER, {"role": role, "content": list(blocks)}]}


BAD: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens is missing"),
    ({"max_tokens": 0}, "max_tokens=0"),
    ({"max_tokens": 10**6}, "max_tokens=1000000"),
    ({"messages": []}, "messages"),
    ({"messages": "a"}, "messages"),
    ({"messages": [{"role": "system", "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "a" * 300}]}, "messages"),
    (turn(), "messages[1].content"),
    (turn({"type": "image"}), "messages[1].content[0].type"),
    (turn({"type": "text"}), "messages[1].content[0].text"),
    (turn({"type": "text", "text": "a", "colour": 1}), "'colour' of messages[1].content[0]"),
    (turn(USE), "messages[1].content[0] of type 'tool_use' belongs"),
    (turn(RESULT, role="assistant"), "messages[1].content[0] of type 'tool_result' belongs"),
    (turn({**USE, "input": None}, role="assistant"), "messages[1].content[0].input"),
    (turn({**USE, "input": "{}"}, role="assistant"), "messages[1].content[0].input"),
    (turn({**RESULT, "tool_use_id": None}), "messages[1].content[0].tool_use_id"),
    (turn({**RESULT, "content": [{"type": "image"}]}), "messages[1].content[0].content[0].type"),
    ({"system": 1}, "system"),
    ({"system": [{"type": "image"}]}, "system[0].type"),
    ({"stop_sequences": [""]}, "stop_sequences[0]"),
    ({"temperature": -1}, "temperature"),
    ({"top_k": -2}, "top_k"),
    ({"tools": [{**TOOL, "type": "web_search_20250305"}]}, "tools[0].type"),
    ({"tools": [{"name": "a"}]}, "tools[0].input_schema"),
    ({"tools": [TOOL]}, "--enable-auto-tool-choice"),
    ({"tools": [TOOL, TOOL]}, "'weather' twice"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tool_choice": {"type": "tool", "name": "g"}}, "tool_choice"),
    ({"thinking": {"type": "maybe"}}, "thinking.type"),
    ({"output_config": {"format": {"type": "text"}}}, "output_config.format.type"),
    ({"thread": {"type": "create"}}, "thread: this server keeps no conversations"),
    ({"container": "a"}, "container"),
    ({"mcp_servers": []}, "mcp_servers"),
]


def test_unsupported_message_field_is_named_in_the_error(serve: Run):
    async def scenario(server: Server) -> None:
        for fields, told in BAD:
            body = {"messages": [USER], "max_tokens": 3, **fields}
            answer = await server.http.post(PATH, json=body)
            assert answer.status_code == 400, (fields, answer.text[:300])
            made = answer.json()
            assert made["type"] == "error"
            assert made["error"]["type"] == "invalid_request_error"
            assert told in made["error"]["message"], (fields, made)
        answer = await server.http.post(PATH, content=b"{")
        assert answer.json()["type"] == "error"
        assert (await ask(server, max_tokens=1))["stop_reason"] == "max_tokens"

    serve(scenario)


def test_surplus_connection_gets_an_anthropic_overloaded_error():
    async def scenario() -> None:
        app = make_app(ServerState(ServeConfig()))
        async with server(app, Limits(max_connections=1)) as port:
            _, first = await asyncio.open_connection("127.0.0.1", port)
            answer = await answer_to(port, b"POST /v1/messages HTTP/1.1\r\nHost: a\r\n\r\n")
            first.close()
        made = json.loads(answer.partition(b"\r\n\r\n")[2])
        assert (made["type"], made["error"]["type"]) == ("error", "overloaded_error")

    asyncio.run(scenario())


def test_message_body_with_a_text_content_type_gets_415(serve: Run):
    async def scenario(server: Server) -> None:
        for path in (PATH, f"{PATH}/count_tokens"):
            answer = await server.http.post(
                path, content=b"{}", headers={"Content-Type": "text/plain"}
            )
            assert answer.status_code == 415
            assert answer.json()["error"]["type"] == "invalid_request_error"

    serve(scenario)


def test_fields_without_effect_on_the_message_are_accepted(serve: Run):
    async def scenario(server: Server) -> None:
        plain = await ask(server, temperature=0)
        cache = {"cache_control": {"type": "ephemeral"}}
        given = [{"role": "user", "content": [{"type": "text", "text": "a", **cache}]}]
        more = {
            "messages": given,
            "metadata": {"user_id": "a"},
            "service_tier": "auto",
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "tool_choice": {"type": "auto"},
            "output_config": {"effort": "low"},
            "speed": "standard",
        }
        assert (await ask(server, temperature=0, **more))["content"] == plain["content"]

    serve(scenario)


def test_aborted_message_is_an_overloaded_error(serve: Run, monkeypatch: pytest.MonkeyPatch):
    """Anthropic's API has no stop reason for an abort, and its clients retry this error."""
    put = engine_client.UpdateStream.put

    def cut_after(self: engine_client.UpdateStream, delta: RequestDelta) -> None:
        put(self, delta)
        if not delta.finished:
            self.abort()

    monkeypatch.setattr(engine_client.UpdateStream, "put", cut_after)

    async def scenario(server: Server) -> None:
        asked = {"model": "jpaged-tiny", "max_tokens": 100, "messages": [USER]}
        answer = await server.http.post(PATH, json=asked)
        assert answer.status_code == 503
        assert answer.json()["error"]["type"] == "overloaded_error"
        answer = await server.http.post(PATH, json={**asked, "stream": True})
        assert answer.status_code == 200
        assert "message_start" in answer.text
        assert "message_stop" not in answer.text
        assert '"overloaded_error"' in answer.text

    serve(scenario)
