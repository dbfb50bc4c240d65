"""Send chats, streams, schemas, tools and invalid requests with langchain-openai over both APIs."""

import sys
from typing import Any, Literal

import pytest
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from openai import BadRequestError
from pydantic import BaseModel


class Sum(BaseModel):
    """Adds."""

    a: Literal[1, 2]
    b: Literal[3, 4]


@tool
def add(a: Literal[1, 2], b: Literal[3, 4]) -> int:
    """Add."""
    return a + b


for of_responses in (False, True):
    how: dict[str, Any] = {
        "model": "jpaged-tiny",
        "base_url": f"{sys.argv[1]}/v1",
        "api_key": "-",
        "max_retries": 0,
        "use_responses_api": of_responses,
    }
    llm = ChatOpenAI(temperature=0, **how)
    assert llm.invoke("Reverse stone").text == "enots"
    assert "".join(chunk.text for chunk in llm.stream("Reverse stone")) == "enots"
    for method in ("json_schema", "function_calling"):
        ways: list[Any] = [{}, {"strict": True}]
        for more in ways:
            form = llm.with_structured_output(Sum, method=method, **more)
            assert isinstance(form.invoke("Add"), Sum)

    messages: list[Any] = [HumanMessage("Add 1 and 3")]
    answer = llm.bind_tools([add], tool_choice="add").invoke(messages)
    results = [add.invoke(call) for call in answer.tool_calls]
    assert len(results) == 1
    told = llm.bind_tools([add]).invoke([*messages, answer, *results])
    assert told.text or told.tool_calls  # the small model may answer with any text
    chunks = llm.bind_tools([add], tool_choice="add", strict=True).stream(messages)
    whole: Any = next(chunks)
    for chunk in chunks:
        whole += chunk
    (call,) = whole.tool_calls
    Sum.model_validate(call["args"])
    with pytest.raises(BadRequestError, match="temperature=-1 must be"):
        ChatOpenAI(temperature=-1, **how).invoke("a")
