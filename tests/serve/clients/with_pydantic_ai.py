"""Send chats, streams, schemas, forced tools and invalid requests with pydantic-ai."""

import sys
from typing import Any, Literal

import pytest
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.capabilities import AbstractCapability
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

GREEDY: Any = {"temperature": 0, "max_tokens": 100, "parallel_tool_calls": False}


class Sum(BaseModel):
    """Adds."""

    a: Literal[1, 2]
    b: Literal[3, 4]


class FirstCall(AbstractCapability):
    """Force a call of `add` in the first step."""

    def get_model_settings(self) -> Any:
        """Return model settings that force a call of `add` in the agent's first step."""
        return lambda ctx: {"tool_choice": ["add"] if ctx.run_step == 1 else "none"}


def check(model: Any) -> None:
    """Exercise every feature with one model."""
    assert Agent(model).run_sync("Reverse stone", model_settings=GREEDY).output == "enots"
    with Agent(model).run_stream_sync("Reverse stone", model_settings=GREEDY) as stream:
        assert "".join(stream.stream_text(delta=True)) == "enots"
    for form in (Sum, NativeOutput(Sum)):
        assert isinstance(Agent(model, output_type=form).run_sync("Add").output, Sum)

    agent, called = Agent(model, capabilities=[FirstCall()]), []

    @agent.tool_plain
    def add(a: Literal[1, 2], b: Literal[3, 4]) -> int:
        """Add."""
        called.append((a, b))
        return a + b

    result = agent.run_sync("Add", model_settings=GREEDY)
    assert len(called) == 1
    assert len(result.all_messages()) == 4
    with pytest.raises(ModelHTTPError) as refused:
        Agent(model).run_sync("a", model_settings={"temperature": -1})
    assert refused.value.status_code == 400


provider = OpenAIProvider(base_url=f"{sys.argv[1]}/v1", api_key="-")
check(OpenAIChatModel("jpaged-tiny", provider=provider))
check(OpenAIResponsesModel("jpaged-tiny", provider=provider))
