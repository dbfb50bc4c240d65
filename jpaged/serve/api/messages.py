"""`/v1/messages`: Anthropic's Messages API, and its token count.

A body becomes a `ChatRequest`. Chat events become the content blocks and events of this API.
"""

import json
from collections.abc import AsyncGenerator, Iterator
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from jpaged import TextDelta
from jpaged.serve.api.chat_events import Event, Item, Kind
from jpaged.serve.api.conversation import (
    MAX_TOOLS,
    TEXT_ONLY,
    Body,
    ChosenFunction,
    ChosenTool,
    FunctionCall,
    FunctionName,
    Message,
    Name,
    ToolCall,
    check_has,
    function_tool,
    text_of,
)
from jpaged.serve.api.fields import ChatRequest, Stop
from jpaged.serve.api.generation import ChatGeneration, Encode, Json
from jpaged.serve.api.response_format import JsonSchema, ResponseFormat, Schema
from jpaged.serve.engine.client import News
from jpaged.serve.errors import ApiError, bad_field, not_serving
from jpaged.serve.http.exchange import json_answer, json_bytes

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
"""Kinds of errors by status; Anthropic counts any other 4xx as an invalid request."""

ANTHROPIC_ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {
                "type": {"enum": sorted(set(_KINDS.values()))},
                "message": {"type": "string"},
            },
        },
    },
}
"""The JSON schema of `error_body`."""

NO_THREADS = "thread_unsupported_request"
"""By this code Anthropic's client knows that it must send whole conversations."""

_NAMES = {
    "stop": "stop_sequences",
    "parameters": "input_schema",
    "response_format.json_schema.schema": "output_config.format.schema",
    "structured_outputs.json": "output_config.format.schema",
}
"""Names of a chat's fields in this API."""

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_DELTAS: dict[Kind, tuple[str, str]] = {
    "reasoning": ("thinking_delta", "thinking"),
    "content": ("text_delta", "text"),
    "tool_call": ("input_json_delta", "partial_json"),
}
"""By kind of item: the type of a delta, and the field of its text."""


class TextBlock(Body, frozen=True, kw_only=True):
    """A piece of text."""

    type: Annotated[Literal["text"], Meta(description=TEXT_ONLY)]
    text: str


TextBlocks = Annotated[list[TextBlock], Meta(max_length=256)]


class Block(Body, frozen=True, kw_only=True):
    """A piece of a message: text, a call, its result, or a thought; such as one of an answer."""

    drops_unknown_nulls: ClassVar[bool] = True
    type: Annotated[
        Literal["text", "tool_use", "tool_result", "thinking", "redacted_thinking"],
        Meta(description=TEXT_ONLY),
    ]
    text: str | None = None
    id: Name | None = None
    name: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    input: dict[str, Any] | None = None
    tool_use_id: Name | None = None
    content: str | TextBlocks | None = None
    is_error: bool = False
    thinking: str | None = None


class Turn(Body, frozen=True, kw_only=True):
    """A message."""

    role: Literal["user", "assistant"]
    content: str | Annotated[list[Block], Meta(min_length=1, max_length=1024)]


class CustomTool(Body, frozen=True, kw_only=True):
    """A function that the model may call."""

    drops_unknown_nulls: ClassVar[bool] = True
    name: FunctionName
    input_schema: Schema
    description: str | None = None
    type: Annotated[Literal["custom"], Meta(description="the server has no tools of its own")] = (
        "custom"
    )
    strict: bool | None = None


class Choice(Body, frozen=True, kw_only=True):
    """Whether tools are called."""

    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = None
    disable_parallel_tool_use: bool = False


class Thinking(Body, frozen=True, kw_only=True):
    """Whether the model is to think; it does as its template has it."""

    type: Literal["enabled", "disabled", "adaptive"]


class OutputFormat(Body, frozen=True, kw_only=True):
    """The form of the answer's text."""

    type: Literal["json_schema"]
    schema: Schema


class OutputConfig(Body, frozen=True, kw_only=True):
    """What the answer is to be."""

    format: OutputFormat | None = None


class CountTokensRequest(Body, frozen=True, kw_only=True, dict=True):
    """The fields of `/v1/messages/count_tokens`: those of a conversation."""

    messages: Annotated[list[Turn], Meta(min_length=1, max_length=4096)]
    model: Name | None = None
    system: str | TextBlocks | None = None
    tools: Annotated[list[CustomTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Choice | None = None
    output_config: OutputConfig | None = None
    thinking: Thinking | None = None
    thread: Annotated[Any, Meta(extra_json_schema={"type": "null"})] = None

    def __post_init__(self) -> None:
        """Raise ApiError for what cannot be had; here, since bodies are read in a thread."""
        if self.thread is not None:  # clients that know the code go on without one
            problem = ": this server keeps no conversations: send the whole of it"
            raise bad_field("thread", problem, code=NO_THREADS)
        _ = self.chat

    @cached_property
    def chat(self) -> ChatRequest:
        """What it asks, as a chat."""
        told = [message for _, message in self._chat_messages()]
        choice = self.tool_choice or Choice(type="auto")
        try:
            return ChatRequest(
                **self._sampling(),
                messages=[Message(**message) for message in told],
                response_format=self._format(),
                tools=[function_tool(tool, tool.input_schema) for tool in self.tools or ()] or None,
                tool_choice=None if self.tool_choice is None else _choice_of(choice),
                parallel_tool_calls=not choice.disable_parallel_tool_use,
            )
        except ApiError as error:
            raise error.renamed(self.names) from None

    def _chat_messages(self) -> Iterator[tuple[str, Json]]:
        """Yield the chat's messages, each with the path of what it was made of."""
        if self.system:
            yield "system", {"role": "system", "content": text_of(self.system)}
        for i, turn in enumerate(self.messages):
            path = f"messages[{i}]"
            yield from ((path, message) for message in _messages_of(turn, path))

    @property
    def names(self) -> dict[str, str]:
        """Names of the chat's fields in this API, for errors."""
        names = dict(_NAMES)
        for i, (path, _) in enumerate(self._chat_messages()):
            names[f"messages[{i}]"] = path
        for i in range(len(self.tools or ())):
            names[f"tools[{i}].function"] = f"tools[{i}]"
            names[f"tools[{i}].function.parameters"] = f"tools[{i}].input_schema"
        return names

    def _format(self) -> ResponseFormat | None:
        own = None if self.output_config is None else self.output_config.format
        if own is None:
            return None
        schema = JsonSchema(name="answer", schema=own.schema)
        return ResponseFormat(type="json_schema", json_schema=schema)

    def _sampling(self) -> Json:
        """What else a chat has."""
        return {}


class MessagesRequest(CountTokensRequest, frozen=True, kw_only=True, dict=True):
    """The fields of `/v1/messages`."""

    max_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    stop_sequences: Annotated[list[Stop], Meta(max_length=16)] | None = None
    stream: bool = False
    temperature: Annotated[float, Meta(ge=0, le=1e6)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] = 0

    def _sampling(self) -> Json:
        names = ("max_tokens", "temperature", "top_p", "top_k", "stream")
        asked = {name: getattr(self, name) for name in names}
        return {**asked, "stop": self.stop_sequences or None}


def _choice_of(choice: Choice) -> Any:
    if choice.type != "tool":
        return {"auto": "auto", "any": "required", "none": "none"}[choice.type]
    if choice.name is None:
        path = "tool_choice.name"
        raise bad_field(path, "is missing", remedy="it is required of type 'tool'")
    return ChosenTool(type="function", function=ChosenFunction(name=choice.name))


def _messages_of(turn: Turn, path: str) -> list[Json]:
    """A chat's messages of one of Anthropic's, whose results of calls are messages there."""
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    results: list[Json] = []
    own: Json = {"role": turn.role, "content": None}
    for i, block in enumerate(turn.content):
        _add_block(own, results, block, f"{path}.content[{i}]")
    is_empty = own["content"] is None and "tool_calls" not in own
    if is_empty and results:
        return results
    return [*results, {**own, "content": ""} if is_empty else own]


def _add_block(own: Json, results: list[Json], block: Block, path: str) -> None:
    by_user = own["role"] == "user"
    if block.type != "text" and by_user != (block.type == "tool_result"):
        whose = "assistant" if by_user else "user"
        raise bad_field(path, f"of type {block.type!r} belongs to a message of {whose}")
    match block.type:
        case "text":
            check_has(block, path, "text")
            own["content"] = (own["content"] or "") + (block.text or "")
        case "tool_use":
            check_has(block, path, "id", "name", "input")
            arguments = json.dumps(block.input, ensure_ascii=False)
            function = FunctionCall(name=block.name or "", arguments=arguments)
            own.setdefault("tool_calls", []).append(ToolCall(function=function, id=block.id))
        case "tool_result":
            check_has(block, path, "tool_use_id")
            text = text_of(block.content)
            result = {"role": "tool", "content": text, "tool_call_id": block.tool_use_id}
            results.append(result)
        case "thinking":
            check_has(block, path, "thinking")
            own["reasoning_content"] = own.get("reasoning_content", "") + (block.thinking or "")


def error_body(error: ApiError) -> Json:
    """An error as Anthropic's clients know it."""
    kind = _KINDS.get(error.status, "invalid_request_error")
    own: Json = {"type": kind, "message": str(error)}
    if error.code == NO_THREADS:
        own["details"] = {"error_code": error.code, "unsupported": [error.param]}
    return {"type": "error", "error": own}


def anthropic_answer(error: ApiError) -> Any:
    """An error as an answer."""
    return json_answer(error_body(error), error.status, error.headers)


def failure_event(error: ApiError) -> bytes:
    """What goes wrong in a stream after it has begun."""
    return _event(error_body(error))


def _event(value: Json) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (value["type"].encode(), json_bytes(value))


def _rendered(event: Event) -> Json:
    """Return the event of this API for a chat event."""
    what, item, text = event
    if what == "start":
        block = _block(item, "")
        return {"type": "content_block_start", "index": item.index, "content_block": block}
    if what == "end":
        return {"type": "content_block_stop", "index": item.index}
    kind, name = _DELTAS[item.kind]
    delta = {"type": kind, name: text}
    return {"type": "content_block_delta", "index": item.index, "delta": delta}


def _block(item: Item, text: str) -> Json:
    """Return the content block of an item that has come to a text."""
    if (call := item.call) is not None:
        return {"type": "tool_use", "id": call.id, "name": call.name, "input": _object(text)}
    if item.kind == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": ""}
    return {"type": "text", "text": text}


def _object(text: str) -> Json:
    """The arguments of a call; none, where the model's text is no object."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


class Messages(ChatGeneration):
    """One request of `/v1/messages`."""

    def __init__(self, serving: Any, asked: MessagesRequest, *about: Any):
        super().__init__(serving, asked.chat, *about)
        self._body_asked = asked
        self._has_begun = False

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """The answer: one piece of JSON, or events.

        Raises:
            ApiError: the request is not acceptable, or failed.
        """
        try:
            async for piece in super().pieces():
                yield piece
        except ApiError as error:
            raise error.renamed(self._body_asked.names) from None

    def _events(self, news: list[News], encode: Encode) -> bytes:
        bodies = [_rendered(event) for event in self._chat_events(news)]
        if not self._has_begun:
            self._has_begun = True
            start = {**self._message(), "content": [], "stop_reason": None, "stop_sequence": None}
            start["usage"] = {**start["usage"], "output_tokens": 0}
            bodies.insert(0, {"type": "message_start", "message": start})
        return b"".join(map(_event, bodies))

    def _last_events(self) -> bytes:
        self._check_whole()
        whole = self._message()
        delta = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
        last = {"type": "message_delta", "delta": delta, "usage": whole["usage"]}
        return _event(last) + _event({"type": "message_stop"})

    def _body(self, answers: list[list[TextDelta]]) -> Json:
        self._check_whole()
        return self._message()

    def _check_whole(self) -> None:
        """Raise ApiError for an answer that was cut short, for which there is no `stop_reason`."""
        if self._answer(0).finish_reason == "abort":
            raise not_serving("the answer was cut short, for the server ends")

    def _message(self) -> Json:
        """Return the message object. Its content is empty in a stream, which keeps no text."""
        usage, answer = self._usage(), self._answer(0)
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        reason = answer.finish_reason
        if answer.stop_string is not None:
            reason = "stop_sequence"
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [_block(item, item.text) for item in answer.items],
            "stop_reason": _REASONS.get(reason or "", reason),
            "stop_sequence": answer.stop_string,
            "usage": {
                "input_tokens": usage["prompt_tokens"] - cached,
                "cache_read_input_tokens": cached,
                "cache_creation_input_tokens": 0,
                "output_tokens": usage["completion_tokens"],
            },
        }
