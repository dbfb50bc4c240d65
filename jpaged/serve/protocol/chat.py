"""What `/v1/chat/completions` takes."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from jpaged.serve.errors import bad_field
from jpaged.serve.options import Limits
from jpaged.serve.protocol.record import Nested, of
from jpaged.serve.protocol.rules import (
    Choice,
    Either,
    Flag,
    Ignored,
    Integer,
    ListOf,
    Nothing,
    Schema,
    Text,
    check_length,
    refuse,
)
from jpaged.serve.protocol.sampling import MAX_LOGPROBS, SamplingFields

MAX_MESSAGES = 4096
_NO_TOOLS = "tools are not supported"
_NO_CALLS = "tool calls are not supported: send the conversation without them"
_CONTENT_ALONE = "messages have their content alone"
_TEXT_ONLY = "text is all that goes in and out"


@dataclass(frozen=True)
class TextPart:
    """A piece of a message."""

    type: str = of(Choice("text", hint=f"{_TEXT_ONLY}, and nothing is fetched from anywhere"))
    text: str = of(Text())


@dataclass(frozen=True)
class Message:
    """One message of a conversation, such as an answer that is sent back as it came."""

    tool_calls: None = of(Nothing([], hint=_NO_CALLS), None)  # first: there may be no content
    function_call: None = of(Nothing(hint=_NO_CALLS), None)
    role: str = of(Choice("system", "developer", "user", "assistant", "tool"))
    content: str | list[TextPart] = of(Either(string=Text(), array=ListOf(Nested(TextPart), 256)))
    name: None = of(Ignored(), None)
    tool_call_id: None = of(Ignored(), None)
    refusal: None = of(Nothing("", hint=_CONTENT_ALONE), None)
    annotations: None = of(Nothing([], hint=_CONTENT_ALONE), None)

    def as_dict(self) -> dict[str, str]:
        """As templates take it; parts of a text are joined by line breaks."""
        if isinstance(self.content, str):
            return {"role": self.role, "content": self.content}
        return {"role": self.role, "content": "\n".join(part.text for part in self.content)}


class TemplateVariables:
    """Scalars by name; which names are allowed, the operator says."""

    def read(self, value: Any, path: str) -> dict[str, Any]:
        """The variables themselves."""
        if not isinstance(value, dict):
            refuse(path, value, "must be an object")
        check_length(path, value, 32, 0)
        for name, item in value.items():
            if not isinstance(item, (str, bool, int, float)) or len(str(item)) > 1000:
                refuse(f"{path}.{name[:60]}", item, "must be a short string, a number or a flag")
        return value

    def schema(self) -> Schema:
        """An object of scalars."""
        scalar = {"type": ["string", "boolean", "number"], "maxLength": 1000}
        return {"type": "object", "additionalProperties": scalar, "maxProperties": 32}


@dataclass(frozen=True)
class ResponseFormat:
    """The form of the answer."""

    type: str = of(Choice("text", hint="answers are free text"))


@dataclass(frozen=True)
class TemplateFields:
    """How a conversation is written out."""

    add_generation_prompt: bool = of(Flag(), True, "open the assistant's answer")
    continue_final_message: bool = of(Flag(), False, "go on with the last message")
    chat_template_kwargs: dict[str, Any] | None = of(TemplateVariables(), None)
    chat_template: None = of(Nothing("", hint="templates come from the server alone"), None)

    def check_template(self, allowed: Collection[str]) -> None:
        """Raise ApiError for variables that are not `allowed`, and for contradictions."""
        for name in self.chat_template_kwargs or {}:
            if name not in allowed:
                known = ", ".join(sorted(allowed)) or "none"
                what = f"chat_template_kwargs has {name[:60]!r}; allowed here: {known}"
                raise bad_field("chat_template_kwargs", what)
        if self.continue_final_message and self.add_generation_prompt:
            what = "continue_final_message=true needs add_generation_prompt=false"
            raise bad_field("continue_final_message", what)

    @property
    def template_options(self) -> dict[str, Any]:
        """For the template."""
        return {
            **(self.chat_template_kwargs or {}),
            "add_generation_prompt": self.add_generation_prompt,
            "continue_final_message": self.continue_final_message,
        }


MESSAGES = ListOf(Nested(Message, unknown_nulls=True), MAX_MESSAGES, least=1)


@dataclass(frozen=True)
class ChatRequest(SamplingFields, TemplateFields):
    """The fields of `/v1/chat/completions`."""

    messages: list[Message] = of(MESSAGES)
    max_tokens: int | None = of(Integer(1, 2**31 - 1), None)
    max_completion_tokens: int | None = of(Integer(1, 2**31 - 1), None)
    logprobs: bool = of(Flag(), False)
    top_logprobs: int | None = of(Integer(0, MAX_LOGPROBS), None)
    add_special_tokens: bool = of(Choice(False, hint="the template writes its own"), False)
    response_format: ResponseFormat | None = of(Nested(ResponseFormat), None)
    modalities: list[str] | None = of(ListOf(Choice("text", hint=_TEXT_ONLY), 1), None)
    tools: None = of(Nothing([], hint=_NO_TOOLS), None)
    tool_choice: str | None = of(Choice("none", "auto", hint=_NO_TOOLS), None)
    parallel_tool_calls: None = of(Ignored(), None)

    def check(self, limits: Limits) -> None:
        """Raise ApiError for what no rule of a single field sees."""
        super().check(limits)
        if self.top_logprobs is not None and not self.logprobs:
            raise bad_field("top_logprobs", "top_logprobs needs logprobs=true")

    @property
    def num_logprobs(self) -> int | None:
        """Candidates told of for each token."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def longest(self) -> int | None:
        """Tokens of an answer at most; None for as many as fit."""
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens
        return self.max_tokens
