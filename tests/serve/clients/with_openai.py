"""Test features of OpenAI's client that the docs and `test_clients.py` do not use."""

import json
import sys
from typing import Any, Literal

import pytest
from openai import BadRequestError, OpenAI, pydantic_function_tool
from pydantic import BaseModel

MODEL = "jpaged-tiny"
ASKED: list[Any] = [{"role": "user", "content": "Reverse stone"}]


class Sum(BaseModel):
    """Adds."""

    a: Literal[1, 2]
    b: Literal[3, 4]


with OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="-", max_retries=0) as client:
    chat, responses = client.chat.completions, client.responses
    tools: list[Any] = [pydantic_function_tool(Sum, name="add")]
    named: Any = {"type": "function", "function": {"name": "add"}}

    parsed = chat.parse(model=MODEL, messages=ASKED, tools=tools, tool_choice=named)
    message = parsed.choices[0].message
    (call,) = message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Sum)
    result = {"role": "tool", "tool_call_id": call.id, "content": "5"}
    told: list[Any] = [*ASKED, message, result]
    again = chat.create(model=MODEL, messages=told, tools=tools)
    assert again.choices[0].message.role == "assistant"

    chunks = list(
        chat.create(model=MODEL, messages=ASKED, tools=tools, tool_choice=named, stream=True)
    )
    deltas = [it for c in chunks for it in c.choices[0].delta.tool_calls or []]
    assert [it.id for it in deltas if it.id] == [deltas[0].id]
    assert [it.function.name for it in deltas if it.function and it.function.name] == ["add"]
    pieces = [it.function.arguments or "" for it in deltas if it.function]
    Sum.model_validate_json("".join(pieces))
    assert chunks[-1].choices[0].finish_reason == "tool_calls"

    own = {"type": "function", "name": "add", "parameters": Sum.model_json_schema()}
    flat: Any = {"tools": [own], "tool_choice": {"type": "function", "name": "add"}}
    first = responses.create(model=MODEL, input="Reverse stone", **flat)
    (called,) = first.output
    assert called.type == "function_call"
    output = {"type": "function_call_output", "call_id": called.call_id, "output": "5"}
    said: Any = [{"role": "user", "content": "Add"}, *first.output, output]
    assert responses.create(model=MODEL, input=said).output_text is not None
    events = list(responses.create(model=MODEL, input="a", stream=True, **flat))
    done = next(it for it in events if it.type == "response.function_call_arguments.done")
    assert set(json.loads(done.arguments)) == {"a", "b"}

    for ask in (
        lambda: chat.create(model=MODEL, messages=ASKED, temperature=-1),
        lambda: responses.create(model=MODEL, input="a", temperature=-1),
    ):
        with pytest.raises(BadRequestError) as refused:
            ask()
        assert refused.value.param == "temperature"
