"""Request schemas and tool calls in each of instructor's modes, and check its errors."""

import sys
from typing import Any, Literal

import instructor
import pytest
from instructor import Mode
from instructor.core import InstructorRetryException
from openai import OpenAI
from pydantic import BaseModel, ConfigDict

ASKED: list[Any] = [{"role": "user", "content": "Add 1 and 3"}]


class Sum(BaseModel):
    """Adds."""

    model_config = ConfigDict(extra="forbid")
    a: Literal[1, 2]
    b: Literal[3, 4]


with OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="-", max_retries=0) as plain:
    how: dict[str, Any] = {"model": "jpaged-tiny", "messages": ASKED, "max_retries": 0}
    for mode in (Mode.TOOLS, Mode.TOOLS_STRICT, Mode.JSON_SCHEMA, Mode.RESPONSES_TOOLS):
        made = instructor.from_openai(plain, mode=mode).create(response_model=Sum, **how)
        assert isinstance(made, Sum), mode
    client = instructor.from_openai(plain, mode=Mode.TOOLS)
    *_, last = client.create_partial(response_model=Sum, **how)
    assert last.a in (1, 2)
    with pytest.raises(InstructorRetryException, match="temperature=-1 must be"):
        client.create(response_model=Sum, temperature=-1, **how)
