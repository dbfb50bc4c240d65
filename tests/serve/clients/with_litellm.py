"""Send chats, streams, schemas, tools and invalid requests through three litellm providers."""

import sys
from typing import Any, Literal

import litellm
import pytest
from pydantic import BaseModel

ASKED: list[Any] = [{"role": "user", "content": "Reverse stone"}]
NAMED: Any = {"type": "function", "function": {"name": "add"}}


class Sum(BaseModel):
    """Adds."""

    a: Literal[1, 2]
    b: Literal[3, 4]


TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": Sum.model_json_schema()}}

for provider in ("openai", "hosted_vllm", "anthropic"):
    how: Any = {
        "model": f"{provider}/jpaged-tiny",
        "api_base": sys.argv[1] + ("" if provider == "anthropic" else "/v1"),
        "api_key": "-",
        "max_tokens": 100,
        "num_retries": 0,
    }
    made: Any = litellm.completion(messages=ASKED, temperature=0, **how)
    assert made.choices[0].message.content == "enots"
    chunks: Any = litellm.completion(messages=ASKED, temperature=0, stream=True, **how)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "enots"
    if provider != "anthropic":  # litellm drops the schema for Anthropic models it does not know
        made = litellm.completion(messages=ASKED, response_format=Sum, **how)
        Sum.model_validate_json(made.choices[0].message.content)

    made = litellm.completion(messages=ASKED, tools=[TOOL], tool_choice=NAMED, **how)
    message = made.choices[0].message
    (call,) = message.tool_calls
    Sum.model_validate_json(call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": "5"}
    again: Any = litellm.completion(messages=[*ASKED, message, result], tools=[TOOL], **how)
    assert again.choices[0].message.role == "assistant"
    chunks = litellm.completion(messages=ASKED, tools=[TOOL], tool_choice=NAMED, stream=True, **how)
    whole: Any = litellm.stream_chunk_builder(list(chunks), messages=ASKED)
    (call,) = whole.choices[0].message.tool_calls
    Sum.model_validate_json(call.function.arguments)
    with pytest.raises(litellm.BadRequestError, match="temperature=-1 must be"):
        litellm.completion(messages=ASKED, temperature=-1, **how)
