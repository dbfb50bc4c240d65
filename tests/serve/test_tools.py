"""Test tool calls and reasoning over HTTP, with scripted answers."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import openai
import pytest
from scripted_engine import ScriptedEngine
from serve_helpers import Server, events_of, kept_tokenizing_process

from jpaged.errors import ErrorInfo, ErrorKind
from jpaged.serve.http.lifecycle import start_serving
from jpaged.serve.http.serving import ServerState
from jpaged.serve.options import ServeConfig

Run = Callable[..., None]
CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "Weather?"}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "now",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
TEMPLATE = (
    "{% for t in tools or [] %}[{{ t | tojson }}]{% endfor %}"
    "{% for m in messages %}({{ m.role }}{{ m.get('tool_call_id', '') }}:"
    "{% if m.reasoning_content is defined %}<{{ m.reasoning_content }}>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %} {{ c.id }} {{ c.function.name }}"
    "{% for key, value in c.function.arguments | items %} {{ key }}={{ value }}{% endfor %}"
    "{% endfor %}){% endfor %}"
    "{% if enable_thinking is defined and enable_thinking %}<think>\n{% endif %}"
)
HERMES = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes", "chat_template": TEMPLATE}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
ANSWER = f"I will look.\n{CALL}"
THOUGHT = f"<think>\nHm.\n</think>\n\nI look.\n{CALL}"


@pytest.fixture
def serve_scripted(serve: Run, scripted: ScriptedEngine) -> Run:
    """Return a function that runs a scenario with the scripted engine."""

    def run(scenario: Any, **config: Any) -> None:
        serve(scenario, scripted, **{**HERMES, **config})

    return run


async def ask(server: Server, **fields: Any) -> dict[str, Any]:
    answer = await server.http.post(CHAT, json={"messages": [USER], **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def choices_of(server: Server, **fields: Any) -> list[dict[str, Any]]:
    """Return the choices of all chunks of a stream."""
    asked = {"messages": [USER], "stream": True, **fields}
    async with server.http.stream("POST", CHAT, json=asked) as answer:
        assert answer.status_code == 200, await answer.aread()
        *events, last = [data async for data in events_of(answer)]
    assert last == "[DONE]"
    return [choice for data in events for choice in json.loads(data)["choices"]]


def without_id(call: dict[str, Any]) -> dict[str, Any]:
    assert call["id"].startswith("call_")
    return {name: value for name, value in call.items() if name != "id"}


def test_answer_contains_both_text_content_and_the_tool_call(
    serve_scripted: Run, scripted: ScriptedEngine
):
    async def scenario(server: Server) -> None:
        scripted.say(ANSWER)
        (choice,) = (await ask(server, tools=[WEATHER]))["choices"]
        message = choice["message"]
        assert (message["content"], choice["finish_reason"]) == ("I will look.", "tool_calls")
        (call,) = message["tool_calls"]
        function = {"name": "weather", "arguments": '{"city": "Paris"}'}
        assert without_id(call) == {"type": "function", "function": function}
        told = json.dumps(WEATHER)
        assert scripted.prompts == [f"[{told}](user:Weather?)"]
        assert not scripted.params[0].skip_special_tokens
        scripted.say(CALL)
        (choice,) = (await ask(server, tools=[WEATHER], tool_choice="auto"))["choices"]
        assert choice["message"]["content"] is None

    serve_scripted(scenario)


@pytest.mark.parametrize("size", [0, 1, 7])
def test_streamed_tool_calls_follow_the_openai_chunk_format(
    serve_scripted: Run, scripted: ScriptedEngine, size: int
):
    async def scenario(server: Server) -> None:
        scripted.say(f"{ANSWER}\n{CALL}", size=size)
        first, *choices, last = await choices_of(server, tools=[WEATHER])
        assert first["delta"] == {"role": "assistant", "content": ""}
        assert (last["delta"], last["finish_reason"]) == ({}, "tool_calls")
        assert {choice["finish_reason"] for choice in choices} == {None}
        deltas = [choice["delta"] for choice in choices]
        assert all(len(delta) == 1 for delta in deltas)
        assert "".join(delta.get("content", "") for delta in deltas) == "I will look."
        for index in (0, 1):
            calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
            start, *rest = [call for call in calls if call["index"] == index]
            function = {"name": "weather", "arguments": ""}
            begin = {"index": index, "type": "function", "function": function}
            assert without_id(start) == begin
            assert {frozenset(call) for call in rest} == {frozenset({"index", "function"})}
            assert {frozenset(call["function"]) for call in rest} == {frozenset({"arguments"})}
            pieces = [call["function"]["arguments"] for call in rest]
            assert "".join(pieces) == '{"city": "Paris"}'
            assert len(pieces) > 1 or size != 1

    serve_scripted(scenario)


def test_stream_sends_logprobs_and_token_ids_while_text_is_held_back(
    serve_scripted: Run, scripted: ScriptedEngine
):
    async def scenario(server: Server) -> None:
        for fields in ({"logprobs": True}, {"return_token_ids": True}, {}):
            scripted.say(ANSWER, size=4)
            choices = await choices_of(server, tools=[WEATHER], **fields)
            scores = [choice["logprobs"] for choice in choices if choice["logprobs"]]
            ids = [choice["token_ids"] for choice in choices if choice.get("token_ids")]
            num_tokens = -(-len(ANSWER) // 4)
            assert len(scores) == (num_tokens if "logprobs" in fields else 0)
            assert len(ids) == (num_tokens if "return_token_ids" in fields else 0)
            empty = [each for each in choices if not each["delta"] and not each["finish_reason"]]
            assert bool(empty) == bool(fields)

    serve_scripted(scenario)


def test_finish_reason_depends_on_tool_calls_and_truncation(
    serve_scripted: Run, scripted: ScriptedEngine
):
    async def scenario(server: Server) -> None:
        half = ANSWER.partition('"Paris"')[0]
        for text, reason, told in (
            ("Sunny.", "stop", "stop"),
            (half, "length", "length"),
            (half, "abort", "abort"),
            (half, "stop", "tool_calls"),
            ("<tool_call>{", "length", "length"),
        ):
            scripted.say(text, size=5, reason=reason)
            (choice,) = (await ask(server, tools=[WEATHER]))["choices"]
            assert choice["finish_reason"] == told
            calls = choice["message"].get("tool_calls")
            if text == half:
                assert calls[0]["function"]["arguments"] == '{"city": '
            else:
                assert (choice["message"]["content"], calls) == (text, None)

    serve_scripted(scenario)


def test_tool_calls_and_results_are_rendered_in_the_next_prompt(
    serve_scripted: Run, scripted: ScriptedEngine
):
    async def scenario(server: Server) -> None:
        scripted.say(ANSWER)
        message = (await ask(server, tools=[WEATHER]))["choices"][0]["message"]
        call_id = message["tool_calls"][0]["id"]
        result = {
            "role": "tool",
            "tool_call_id": call_id,
            "content": [{"type": "text", "text": "1"}],
        }
        scripted.say("Sunny.")
        # the messages contain calls, but the request has no tools
        body = await ask(server, messages=[USER, message, result])
        assert body["choices"][0]["message"]["content"] == "Sunny."
        assert scripted.prompts[1] == (
            f"(user:Weather?)(assistant:I will look. {call_id} weather city=Paris)(tool{call_id}:1)"
        )
        message["tool_calls"][0]["function"]["arguments"] = ""
        asked = {"messages": [USER, message | {"content": None, "reasoning_content": "hm"}]}
        answer = await server.http.post("/tokenize", json=asked)
        detokenized = await server.http.post(
            "/detokenize", json={"tokens": answer.json()["tokens"]}
        )
        expected = f"(user:Weather?)(assistant:<hm> {call_id} weather)"
        assert detokenized.json()["prompt"] == expected

    serve_scripted(scenario)


def test_special_tokens_in_tool_names_and_arguments_are_encoded_as_text(
    serve_scripted: Run, scripted: ScriptedEngine
):
    end = "<|im_end|>"
    tool = {"type": "function", "function": {"name": "f", "parameters": {end: {end: end}}}}
    call = {"id": "1", "function": {"name": end, "arguments": json.dumps({end: end})}}

    async def scenario(server: Server) -> None:
        messages = [USER, {"role": "assistant", "tool_calls": [call]}]
        asked = {"messages": messages, "tools": [tool]}
        tokens = (await server.http.post("/tokenize", json=asked)).json()["tokens"]
        assert max(tokens) < 256
        text = (await server.http.post("/detokenize", json={"tokens": tokens})).json()["prompt"]
        assert text.count(end) == 6

    serve_scripted(scenario)


def test_calls_are_not_parsed_if_the_request_has_no_tools(
    serve_scripted: Run, scripted: ScriptedEngine
):
    async def scenario(server: Server) -> None:
        for fields in ({}, {"tools": []}, {"tools": [WEATHER], "tool_choice": "none"}):
            scripted.say(ANSWER)
            (choice,) = (await ask(server, **fields))["choices"]
            assert choice["message"] == {"role": "assistant", "content": ANSWER, "refusal": None}
            assert choice["finish_reason"] == "stop"
        assert set(scripted.prompts) == {"(user:Weather?)"}
        assert all(params.skip_special_tokens for params in scripted.params)

    serve_scripted(scenario)


def test_parallel_tool_calls_false_returns_one_call(serve_scripted: Run, scripted: ScriptedEngine):
    async def scenario(server: Server) -> None:
        scripted.say(ANSWER + CALL)
        body = await ask(server, tools=[WEATHER], parallel_tool_calls=False)
        assert len(body["choices"][0]["message"]["tool_calls"]) == 1

    serve_scripted(scenario)


@pytest.mark.parametrize(
    ("asked", "kind", "param"),
    [
        ({"tools": [WEATHER], "tool_choice": "required"}, "grammar", "tools"),
        (
            {"response_format": {"type": "json_object"}},
            "json_object",
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "structured_outputs.regex"),
    ],
)
def test_structured_output_error_names_the_field_of_the_request(
    serve_scripted: Run, scripted: ScriptedEngine, asked: dict[str, Any], kind: str, param: str
):
    async def scenario(server: Server) -> None:
        path, name = f"structured_outputs.{kind}", "structured_outputs"
        ended, lost = ErrorKind.UNAVAILABLE, ErrorKind.INTERNAL
        for info, status in (
            (ErrorInfo(path, ("cannot be enforced: it takes too long",)), 400),
            (ErrorInfo(name, (": the process has ended",), remedy=("retry",), kind=ended), 503),
            (ErrorInfo(name, (": no tokenizer in /home/retry: missing",), kind=lost), 500),
        ):
            scripted.say("", reason="error")
            scripted.errors.append(info)
            answer = await server.http.post(CHAT, json={"messages": [USER], **asked})
            assert answer.status_code == status, answer.text
            error = answer.json()["error"]
            assert "/home" not in error["message"]
            if status == 400:
                assert error["param"] == param
                assert error["message"].startswith(f"{param} cannot be enforced")
            if status == 503:
                assert answer.headers["Retry-After"] == "1"

    serve_scripted(scenario)


def test_each_choice_returns_its_own_tool_calls(serve_scripted: Run, scripted: ScriptedEngine):
    async def scenario(server: Server) -> None:
        scripted.say(ANSWER, "Sunny.", f"{CALL}{CALL}", size=3)
        choices = (await ask(server, tools=[WEATHER], n=3))["choices"]
        assert [len(each["message"].get("tool_calls", ())) for each in choices] == [1, 0, 2]
        reasons = [each["finish_reason"] for each in choices]
        assert reasons == ["tool_calls", "stop", "tool_calls"]

    serve_scripted(scenario)


def test_argument_values_have_the_types_of_the_tool_schema(
    serve_scripted: Run, scripted: ScriptedEngine
):
    tool = json.loads(json.dumps(WEATHER))
    tool["function"]["parameters"]["properties"]["days"] = {"type": "integer"}
    text = "<tool_call>\n<function=weather>\n<parameter=days>\n3\n</parameter>\n</function>"

    async def scenario(server: Server) -> None:
        scripted.say(text, size=6)
        (call,) = (await ask(server, tools=[tool]))["choices"][0]["message"]["tool_calls"]
        assert call["function"]["arguments"] == '{"days": 3}'

    serve_scripted(scenario, tool_call_parser="qwen3_xml")


def test_reasoning_is_separated_from_content(serve_scripted: Run, scripted: ScriptedEngine):
    text = f"<think>\nParis?\n</think>\n\n{ANSWER}"

    async def scenario(server: Server) -> None:
        scripted.say(text)
        (choice,) = (await ask(server, tools=[WEATHER]))["choices"]
        message = choice["message"]
        assert (message["reasoning_content"], message["content"]) == ("Paris?", "I will look.")
        assert len(message["tool_calls"]) == 1
        scripted.say(text, size=2)
        deltas = [choice["delta"] for choice in await choices_of(server)]
        thought = "".join(delta.get("reasoning_content", "") for delta in deltas)
        content = "".join(delta.get("content", "") for delta in deltas)
        assert (thought, content) == ("Paris?", ANSWER)
        scripted.say("Sunny.")
        message = (await ask(server))["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == (None, "Sunny.")
        # The template starts the reasoning.
        for enabled, parts in ((True, ("Sun", "ny.")), (False, (None, "Sun</think>ny."))):
            scripted.say("Sun</think>ny.")
            body = await ask(server, chat_template_kwargs={"enable_thinking": enabled})
            message = body["choices"][0]["message"]
            assert (message["reasoning_content"], message["content"]) == parts
        assert [prompt.endswith("<think>\n") for prompt in scripted.prompts[-2:]] == [True, False]

    serve_scripted(scenario, reasoning_parser="qwen3")


def test_openai_client_completes_a_tool_call_conversation(
    serve_scripted: Run, scripted: ScriptedEngine
):
    async def scenario(server: Server) -> None:
        http: Any = server.http
        client = openai.AsyncOpenAI(
            base_url="http://jpaged/v1", api_key="-", http_client=http, max_retries=0
        )
        messages: list[Any] = [USER]
        tool = {"type": "function", "function": {"name": "weather"}}
        options: Any = {"model": "jpaged-tiny", "tools": [tool], "max_tokens": 8}
        scripted.say(f"<think>hm</think>{CALL}", size=3)
        made = await client.chat.completions.create(messages=messages, **options)
        message = made.choices[0].message
        assert made.choices[0].finish_reason == "tool_calls"
        assert getattr(message, "reasoning_content", None) == "hm"
        (call,) = message.tool_calls or []
        result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
        messages += [message, result]
        scripted.say(CALL, size=3)
        streamed = await client.chat.completions.create(messages=messages, stream=True, **options)
        choices = [chunk.choices[0] async for chunk in streamed]
        assert choices[-1].finish_reason == "tool_calls"
        parts = [part for choice in choices for part in choice.delta.tool_calls or ()]
        assert parts[0].id != call.id
        arguments = "".join(part.function.arguments or "" for part in parts if part.function)
        assert json.loads(arguments) == {"city": "Paris"}
        messages = [USER, message, result]
        scripted.say("Sunny.")
        last = await client.chat.completions.create(messages=messages, **options)
        assert last.choices[0].message.content == "Sunny."

    serve_scripted(scenario, reasoning_parser="qwen3")


def test_server_does_not_start_when_the_template_ignores_tools(serve_scripted: Run):
    async def fine(server: Server) -> None:
        await server.serving.tokenizing.check_tools()

    async def lacking(server: Server) -> None:
        again = ServerState(replace(server.serving.config, enable_auto_tool_choice=True))
        with pytest.raises(ValueError, match="ignores tools"):
            await start_serving(again, server.serving.engine, kept_tokenizing_process)

    serve_scripted(fine)
    serve_scripted(
        lacking, chat_template="{{ messages[0].content }}", enable_auto_tool_choice=False
    )


def test_oversized_and_too_deep_tools_get_400(serve_scripted: Run, scripted: ScriptedEngine):
    many = [{**WEATHER, "function": {"name": f"f{i}", "description": "a" * 99}} for i in range(128)]
    deep: dict[str, Any] = {}
    for _ in range(20):
        deep = {"anyOf": [deep]}
    wild = {"type": "object", "properties": {"a": {"$ref": "http://localhost/"}, "b": deep}}

    async def scenario(server: Server) -> None:
        for tools in (many, [{**WEATHER, "function": {"name": "f", "parameters": wild}}]):
            answer = await server.http.post(CHAT, json={"messages": [USER], "tools": tools})
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert "maximum context" in error["message"] or "deep" in error["message"]
        await server.canary()

    serve_scripted(scenario)


def test_long_tool_call_arguments_are_parsed(serve_scripted: Run, scripted: ScriptedEngine):
    long = json.dumps({"city": "x" * 20_000, "n": [1] * 2000})

    async def scenario(server: Server) -> None:
        scripted.say(CALL.replace('{"city": "Paris"}', long), size=100)
        body = await ask(server, tools=[WEATHER])
        (call,) = body["choices"][0]["message"]["tool_calls"]
        assert call["function"]["arguments"] == long

    serve_scripted(scenario)


def test_invalid_parser_flags_are_rejected():
    with pytest.raises(ValueError, match="--tool-call-parser"):
        ServeConfig(enable_auto_tool_choice=True)
    with pytest.raises(ValueError, match="hermes"):
        ServeConfig(tool_call_parser="json")
    with pytest.raises(ValueError, match="qwen3"):
        ServeConfig(reasoning_parser="r1")
