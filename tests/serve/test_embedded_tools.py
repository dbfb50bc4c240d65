"""Test calculator calls, schemas and reasoning over HTTP with the model shipped with jpaged."""

import asyncio
import json
import random
from collections.abc import Callable
from typing import Any

import jsonschema
import openai
import pytest
from serve_helpers import Server

from jpaged import Engine
from jpaged.terminal.tools_demo import CALCULATOR, calculate, run_tool_call

Run = Callable[..., None]
CHAT = "/v1/chat/completions"
FORMS = {
    "enable_auto_tool_choice": True,
    "tool_call_parser": "hermes",
    "reasoning_parser": "qwen3",
}


@pytest.fixture
def talk(serve: Run, engines: Callable[..., Engine]) -> Run:
    """Return a function that runs a scenario on a server with the model shipped with jpaged."""
    engine = engines(max_model_len=1024, num_blocks=520)
    return lambda scenario: serve(scenario, engine, **FORMS)


async def ask(server: Server, messages: list[Any], **fields: Any) -> dict[str, Any]:
    """Send a chat request, and return the only choice of the answer."""
    body = {"messages": messages, "temperature": 0, "max_tokens": 200, **fields}
    answer = await server.http.post(CHAT, json=body)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    return choice


async def round_trip(server: Server, question: str, **fields: Any) -> tuple[str, str]:
    """Ask a question that needs the calculator, and send the result of the model's tool call.
    Return the expression in the tool call, and the model's final answer."""
    messages: list[Any] = [{"role": "user", "content": question}]
    choice = await ask(server, messages, tools=[CALCULATOR], **fields)
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls", choice
    (call,) = message["tool_calls"]
    function = call["function"]
    assert function["name"] == "calculator"
    jsonschema.validate(json.loads(function["arguments"]), CALCULATOR["function"]["parameters"])
    result = run_tool_call(function["name"], function["arguments"])
    messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": result}]
    fields = {name: value for name, value in fields.items() if name != "tool_choice"}
    choice = await ask(server, messages, tools=[CALCULATOR], **fields)
    assert choice["finish_reason"] == "stop"
    return json.loads(function["arguments"])["expression"], choice["message"]["content"]


def random_sums(seed: int, n: int) -> list[tuple[str, str]]:
    """Return pairs of a question and the expression that answers it."""
    rng = random.Random(seed)
    sums = []
    for i in range(n):
        a, b, c = (rng.randrange(10 ** rng.randint(1, 6)) for _ in "abc")
        sums.append(
            (
                (f"What is {a} * {b}?", f"{a} * {b}"),
                (f"{a} plus {b}", f"{a} + {b}"),
                (f"Calculate {a}-{b}", f"{a} - {b}"),
                (f"how much is {a} divided by {b + 1}?", f"{a} / {b + 1}"),
                (f"What is ({a} + {b}) * {c}?", f"({a} + {b}) * {c}"),
                (f"Compute {a} + {b} * {c}", f"{a} + {b} * {c}"),
            )[i % 6]
        )
    return sums


@pytest.mark.parametrize("count", [3, pytest.param(24, marks=pytest.mark.full)])
@pytest.mark.parametrize("choice", ["required", pytest.param("auto", marks=pytest.mark.full)])
def test_model_calls_the_calculator_with_the_right_expression(talk: Run, choice: str, count: int):
    sums = random_sums(1, count)

    async def scenario(server: Server) -> None:
        trips = [round_trip(server, question, tool_choice=choice) for question, _ in sums]
        for (question, expected), made in zip(sums, await asyncio.gather(*trips), strict=True):
            assert made == (expected, f"{expected} = {calculate(expected)}"), question

    talk(scenario)


@pytest.mark.soak
def test_model_solves_nearly_all_of_three_hundred_calculations(talk: Run):
    sums = random_sums(2, 300)

    async def scenario(server: Server) -> None:
        trips = [round_trip(server, question) for question, _ in sums]
        made = await asyncio.gather(*trips)
        right = [
            own == (expected, f"{expected} = {calculate(expected)}")
            for (_, expected), own in zip(sums, made, strict=True)
        ]
        assert sum(right) >= 297

    talk(scenario)


def test_openai_client_streams_a_tool_call_round_trip(talk: Run):
    async def scenario(server: Server) -> None:
        http: Any = server.http
        client = openai.AsyncOpenAI(
            base_url="http://jpaged/v1", api_key="-", http_client=http, max_retries=0
        )
        messages: list[Any] = [
            {"role": "system", "content": "You are a helpful assistant."},
            {"role": "user", "content": "What is 48273 times 9164?"},
        ]
        function = CALCULATOR["function"]
        parameters = {**function["parameters"], "additionalProperties": False}
        # OpenAI's client parses only the arguments of strict tools.
        strict = {**function, "strict": True, "parameters": parameters}
        tools = [{"type": "function", "function": strict}]
        options: Any = {"model": "jpaged-tiny", "tools": tools, "temperature": 0}
        for _ in range(2):
            async with client.chat.completions.stream(messages=messages, **options) as stream:
                choice = (await stream.get_final_completion()).choices[0]
            messages.append(choice.message)
            for call in choice.message.tool_calls or ():
                own = call.function
                content = run_tool_call(own.name, own.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
        assert choice.message.content == "48273 * 9164 = 442373772"
        assert [m["role"] if isinstance(m, dict) else m.role for m in messages] == [
            *("system", "user", "assistant", "tool", "assistant")
        ]

    talk(scenario)


def test_model_answers_without_a_call_when_no_calculator_is_needed(talk: Run):
    async def scenario(server: Server) -> None:
        for question, answer in (
            ("Sort pear, apple, fig", "apple, fig, pear"),
            ("Reverse stone", "enots"),
            ("Count from 1 to 5", "1, 2, 3, 4, 5"),
        ):
            asked = [{"role": "user", "content": question}]
            choice = await ask(server, asked, tools=[CALCULATOR])
            assert choice["message"]["content"] == answer
            assert not choice["message"].get("tool_calls")

    talk(scenario)


def test_model_returns_the_error_message_of_the_calculator(talk: Run):
    async def scenario(server: Server) -> None:
        expression, answer = await round_trip(server, "What is 7 / 0?")
        assert expression == "7 / 0"
        assert answer == "The calculator says: Error: division by zero"

    talk(scenario)


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("is_held", [False, True])
def test_model_follows_a_schema_in_the_prompt(talk: Run, is_held: bool):
    """The test compares the answers with and without a grammar that enforces the schema."""
    form = {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": PERSON}}
    fields = {"response_format": form} if is_held else {}

    async def scenario(server: Server) -> None:
        text = f"Extract: Jason is 25 years old. Answer as JSON: {json.dumps(PERSON)}"
        choice = await ask(server, [{"role": "user", "content": text}], **fields)
        assert choice["message"]["content"] == '{"name": "Jason", "age": 25}'

    talk(scenario)


def test_reasoning_is_returned_separately_from_content(talk: Run):
    async def scenario(server: Server) -> None:
        thinking = {"chat_template_kwargs": {"enable_thinking": True}}
        asked = [{"role": "user", "content": "What is 34 * 27?"}]
        message = (await ask(server, asked, **thinking))["message"]
        assert message["reasoning_content"].strip() == "34 * 20 = 680, 34 * 7 = 238, 680 + 238"
        assert message["content"] == "918"
        message = (await ask(server, [{"role": "user", "content": "What is 17 + 25?"}]))["message"]
        assert (message["reasoning_content"], message["content"]) == (None, "42")
        sums = random_sums(3, 2)
        trips = [round_trip(server, question, **thinking) for question, _ in sums]
        for (_, expected), made in zip(sums, await asyncio.gather(*trips), strict=True):
            assert made == (expected, f"{expected} = {calculate(expected)}")

    talk(scenario)
