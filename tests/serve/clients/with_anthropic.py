"""Send chats, streams, tools and invalid requests with Anthropic's client."""

import sys
from typing import Any, Literal

import pytest
from anthropic import Anthropic, BadRequestError
from pydantic import BaseModel

USER: Any = {"role": "user", "content": "Reverse stone"}
ASKED: dict[str, Any] = {"model": "jpaged-tiny", "max_tokens": 100}
GREEDY = {"temperature": 0}


class Sum(BaseModel):
    """Adds."""

    a: Literal[1, 2]
    b: Literal[3, 4]


TOOL: Any = {"name": "add", "description": "Adds", "input_schema": Sum.model_json_schema()}
NAMED: Any = {"type": "tool", "name": "add"}

with Anthropic(base_url=sys.argv[1], api_key="-", max_retries=0) as client:
    create, stream = client.messages.create, client.messages.stream
    (block,) = create(messages=[USER], extra_body=GREEDY, **ASKED).content
    assert (block.type, block.text) == ("text", "enots")
    with stream(messages=[USER], extra_body=GREEDY, **ASKED) as pieces:
        assert "".join(pieces.text_stream) == "enots"
    assert [model.id for model in client.models.list()][-1] == "jpaged-tiny"

    made = create(messages=[USER], tools=[TOOL], tool_choice=NAMED, **ASKED)
    (call,) = made.content
    assert (call.type, made.stop_reason) == ("tool_use", "tool_use")
    Sum.model_validate(call.input)
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "5"}
    given: Any = [
        USER,
        {"role": "assistant", "content": made.content},
        {"role": "user", "content": [result]},
    ]
    again = create(messages=given, tools=[TOOL], **ASKED)
    counted = client.messages.count_tokens(messages=given, tools=[TOOL], model=ASKED["model"])
    cached = again.usage.cache_read_input_tokens or 0
    assert again.usage.input_tokens + cached == counted.input_tokens

    strict: Any = {**TOOL, "strict": True}
    with stream(messages=[USER], tools=[strict], tool_choice={"type": "any"}, **ASKED) as events:
        deltas = [event for event in events if event.type == "input_json"]
        final = events.get_final_message()
    assert deltas
    Sum.model_validate(final.content[0].input)  # type: ignore
    with pytest.raises(BadRequestError, match="temperature=-1 must be"):
        create(messages=[USER], extra_body={"temperature": -1}, **ASKED)
