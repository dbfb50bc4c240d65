"""Test OpenAI's Responses API with OpenAI's client and with invalid requests."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import openai
import pydantic
import pytest
from scripted_engine import ScriptedEngine
from serve_helpers import Server, events_of
from test_answer_forms import SCHEMA
from test_tools import CALL, THOUGHT

from jpaged import Engine

Run = Callable[..., None]
PATH = "/v1/responses"
TOOL: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "description": "now",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": True,
}


@pytest.fixture
def scripted(engines: Callable[..., Engine]) -> ScriptedEngine:
    return ScriptedEngine(engines(max_model_len=1024, num_blocks=520))


def client_of(server: Server) -> openai.AsyncOpenAI:
    http: Any = server.http
    return openai.AsyncOpenAI(base_url="http://test/v1", api_key="-", http_client=http)


async def ask(server: Server, **fields: Any) -> dict[str, Any]:
    answer = await server.http.post(PATH, json={"input": "a", **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def streamed(server: Server, **fields: Any) -> list[dict[str, Any]]:
    body = {"input": "a", "stream": True, **fields}
    async with server.http.stream("POST", PATH, json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        return [json.loads(data) async for data in events_of(answer)]


def test_response_text_equals_the_chat_completion(serve: Run):
    async def scenario(server: Server) -> None:
        asked = {"temperature": 0, "max_output_tokens": 20, "instructions": "Be brief"}
        made = await ask(server, **asked, input="Count from 3 to 7", metadata={"a": "b"})
        messages = [
            {"role": "system", "content": "Be brief"},
            {"role": "user", "content": "Count from 3 to 7"},
        ]
        body = {"messages": messages, "temperature": 0, "max_tokens": 20}
        chat = (await server.http.post("/v1/chat/completions", json=body)).json()
        (item,) = made["output"]
        assert item["content"][0]["text"] == chat["choices"][0]["message"]["content"]
        assert made["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
        assert made["usage"]["output_tokens"] == chat["usage"]["completion_tokens"]
        reason = chat["choices"][0]["finish_reason"]
        assert made["status"] == ("completed" if reason == "stop" else "incomplete")
        assert (made["store"], made["metadata"]) == (False, {"a": "b"})

    serve(scenario)


def test_truncated_response_is_incomplete(serve: Run):
    async def scenario(server: Server) -> None:
        made = await ask(server, temperature=0, max_output_tokens=2)
        assert made["status"] == made["output"][0]["status"] == "incomplete"
        assert made["incomplete_details"] == {"reason": "max_output_tokens"}
        events = await streamed(server, temperature=0, max_output_tokens=2)
        assert events[-1]["type"] == "response.incomplete"
        assert events[-1]["response"]["output"][0]["content"] == made["output"][0]["content"]

    serve(scenario)


def test_output_items_contain_reasoning_then_text_then_tool_calls(
    serve_scripted: Run, scripted: ScriptedEngine
):
    async def scenario(server: Server) -> None:
        scripted.say(THOUGHT)
        made = await ask(server, tools=[TOOL])
        thought, said, call = made["output"]
        assert thought["content"] == [{"type": "reasoning_text", "text": "Hm."}]
        assert said["content"] == [{"type": "output_text", "text": "I look.", "annotations": []}]
        assert (said["role"], said["status"]) == ("assistant", "completed")
        assert (call["name"], call["arguments"]) == ("weather", '{"city": "Paris"}')
        assert call["call_id"].startswith("call_")
        assert len({it["id"] for it in made["output"]}) == 3
        assert made["tools"] == [TOOL]
        assert made["tool_choice"] == "auto"

    serve_scripted(scenario)


@pytest.mark.parametrize("size", [0, 1, 9])
def test_stream_events_follow_the_openai_order(
    serve_scripted: Run, scripted: ScriptedEngine, size: int
):
    async def scenario(server: Server) -> None:
        scripted.say(f"{THOUGHT}\n{CALL}", size=size)
        events = await streamed(server, tools=[TOOL])
        assert [event["sequence_number"] for event in events] == [*range(len(events))]
        kinds: list[str] = []
        for event in events:
            if not kinds or kinds[-1] != event["type"]:
                kinds.append(event["type"])
        whole = {
            "reasoning": ["content_part.added", "reasoning_text", "content_part.done"],
            "message": ["content_part.added", "output_text", "content_part.done"],
            "function_call": ["function_call_arguments"],
        }
        expected = ["created", "in_progress"]
        for kind in ("reasoning", "message", "function_call", "function_call"):
            expected.append("output_item.added")
            for part in whole[kind]:
                has_text = part.endswith(("text", "arguments"))
                expected += [f"{part}.delta", f"{part}.done"] if has_text else [part]
            expected.append("output_item.done")
        assert kinds == [f"response.{kind}" for kind in [*expected, "completed"]]
        deltas: dict[int, str] = {}
        for event in events:
            if event["type"].endswith(".delta"):
                place = event["output_index"]
                deltas[place] = deltas.get(place, "") + event["delta"]
        output = events[-1]["response"]["output"]
        done = [event["item"] for event in events if event["type"].endswith("output_item.done")]
        assert done == output
        texts = [it.get("arguments") or it["content"][0]["text"] for it in output]
        assert deltas == dict(enumerate(texts))

    serve_scripted(scenario)


def test_openai_client_completes_a_function_call_conversation(
    serve_scripted: Run, scripted: ScriptedEngine
):
    """The client sends the returned output items back unchanged."""

    async def scenario(server: Server) -> None:
        client = client_of(server)
        scripted.say(THOUGHT)
        given: list[Any] = [{"role": "user", "content": "Weather?"}]
        tools: Any = [TOOL]
        model = "jpaged-tiny"
        made = await client.responses.create(model=model, input=given, tools=tools)
        given += made.output
        call = made.output[-1]
        assert call.type == "function_call"
        given.append({"type": "function_call_output", "call_id": call.call_id, "output": "sunny"})
        scripted.say("It is sunny.", size=3)
        stream = await client.responses.create(model=model, input=given, tools=tools, stream=True)
        text, last = "", None
        async for event in stream:
            if event.type == "response.output_text.delta":
                text += event.delta
            last = event
        assert text == "It is sunny."
        assert last is not None
        assert last.type == "response.completed"
        prompt = scripted.prompts[-1]
        assert "(user:Weather?)(assistant:<Hm.>I look. call_" in prompt
        assert f"city=Paris)(tool{call.call_id}:sunny)" in prompt

    serve_scripted(scenario)


def test_text_after_a_call_starts_another_message(serve_scripted: Run, scripted: ScriptedEngine):
    async def scenario(server: Server) -> None:
        scripted.say("So.")
        given = [MESSAGE, MADE, {"role": "assistant", "content": "I wait."}, OUTPUT]
        await ask(server, input=given)
        assert "(user:a)(assistant: a f)(assistant:I wait.)(toola:b)" in scripted.prompts[-1]

    serve_scripted(scenario)


def test_last_item_of_an_aborted_response_is_incomplete(
    serve_scripted: Run, scripted: ScriptedEngine
):
    async def scenario(server: Server) -> None:
        scripted.say("I lo", reason="abort")
        made = await ask(server)
        assert (made["status"], made["output"][0]["status"]) == ("failed", "incomplete")

    serve_scripted(scenario)


class Box(pydantic.BaseModel):
    """The schema passed to `parse()`."""

    full: bool


def test_response_output_conforms_to_a_schema(serve: Run):
    async def scenario(server: Server) -> None:
        made = await client_of(server).responses.parse(
            model="jpaged-tiny", input="a", text_format=Box
        )
        assert made.output_parsed in (Box(full=True), Box(full=False))
        form = {"type": "json_schema", "name": "box", "schema": SCHEMA}
        events = await streamed(server, text={"format": form}, max_output_tokens=90)
        told = events[-1]["response"]
        assert told["text"]["format"] == form
        assert set(json.loads(told["output"][0]["content"][0]["text"])) == {"colour", "sizes"}

    serve(scenario)


def test_client_disconnect_aborts_its_response(serve: Run, engine: Engine):
    async def scenario(server: Server) -> None:
        body = {"input": "a", "stream": True, "max_output_tokens": 200}
        async with server.http.stream("POST", PATH, json=body) as answer:
            async for _ in events_of(answer):
                break
        while server.serving.num_requests:
            await asyncio.sleep(0.01)

    serve(scenario)
    assert not engine.has_unfinished_requests


MESSAGE = {"role": "user", "content": "a"}
OUTPUT = {"type": "function_call_output", "call_id": "a", "output": "b"}
MADE = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": 3}, "input"),
    ({"input": [MESSAGE] * 5000}, "input"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"content": "a"}]}, "input[0].role"),
    ({"input": [{**MESSAGE, "role": "tool"}]}, "input[0].role"),
    ({"input": [MESSAGE, {"type": "item_reference", "id": "a"}]}, "input[1].type"),
    ({"input": [{**MESSAGE, "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
    ({"input": [{**MESSAGE, "colour": 1}]}, "input[0].colour"),
    ({"input": [MESSAGE, {**OUTPUT, "call_id": None}]}, "input[1].call_id"),
    ({"input": [MESSAGE, {**OUTPUT, "output": None}]}, "input[1].output"),
    ({"input": [MESSAGE, {**MADE, "name": None}]}, "input[1].name"),
    ({"input": [MESSAGE, {**MADE, "arguments": "[]"}]}, "input[1].arguments"),
    ({"input": "a" * 300}, "input"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": 10**6}, "max_output_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"n": 2}, "n"),
    ({"store": True}, "store"),
    ({"background": True}, "background"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"truncation": "auto"}, "truncation"),
    ({"tools": [{"type": "web_search"}]}, "tools[0]"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tools": [TOOL]}, "tools"),
    ({"tools": [TOOL, TOOL]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
    ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
    (
        {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"not": {}}}}},
        "text.format.schema.not",
    ),
    ({"prompt": {"id": "a"}}, "prompt"),
]


def test_error_names_the_invalid_field_of_a_responses_api_request(serve: Run):
    async def scenario(server: Server) -> None:
        for fields, param in BAD:
            answer = await server.http.post(PATH, json={"input": "a", **fields})
            assert answer.status_code == 400, (fields, answer.text[:300])
            error = answer.json()["error"]
            assert str(error["param"]).startswith(param), (fields, error)
            assert "messages" not in error["message"], error
        assert (await ask(server, max_output_tokens=1))["status"] == "incomplete"

    serve(scenario)


def test_fields_without_effect_on_the_response_are_accepted(serve: Run):
    async def scenario(server: Server) -> None:
        plain = await ask(server, temperature=0, max_output_tokens=4)
        more = {
            "include": ["reasoning.encrypted_content"],
            "metadata": None,
            "prompt_cache_key": "a",
            "safety_identifier": "b",
            "service_tier": "auto",
            "user": "c",
            "reasoning": {"effort": "low"},
            "store": False,
            "background": None,
            "text": {"format": {"type": "text"}, "verbosity": "low"},
            "truncation": "disabled",
        }
        made = await ask(server, temperature=0, max_output_tokens=4, **more)
        assert made["output"][0]["content"] == plain["output"][0]["content"]

    serve(scenario)
