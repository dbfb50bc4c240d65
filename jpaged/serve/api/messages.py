"""`/v1/messages` and `/v1/messages/count_tokens`: Anthropic's Messages API.

A request body is converted to a `ChatRequest`. Chat events are converted to Anthropic's content
blocks and stream events.
"""

import json
from collections.abc import AsyncGenerator, Iterator
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta
from typing_extensions import override

from jpaged import TextDelta
from jpaged.serve.api.chat_events import AnswerItem, ChatEvent, ItemKind
from jpaged.serve.api.conversation import (
    MAX_TOOLS,
    TEXT_ONLY,
    Body,
    ChatMessage,
    ChosenFunction,
    ChosenTool,
    FunctionCall,
    FunctionName,
    Identifier,
    ToolCall,
    check_required_fields,
    content_text,
    to_chat_tool,
)
from jpaged.serve.api.fields import ChatRequest, StopString
from jpaged.serve.api.generation import ChatGeneration, JsonEncoder, JsonObject
from jpaged.serve.api.response_format import JsonSchema, JsonSchemaDict, ResponseFormat
from jpaged.serve.engine.client import RequestUpdate
from jpaged.serve.errors import ApiError, field_error, unavailable_error
from jpaged.serve.http.exchange import encode_json, json_response

_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
"""Anthropic's error types by HTTP status. Other 4xx errors are invalid_request_error."""

ANTHROPIC_ERROR_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {
                "type": {"enum": sorted(set(_ERROR_TYPES.values()))},
                "message": {"type": "string"},
            },
        },
    },
}
"""The JSON schema of `error_body`."""

THREAD_UNSUPPORTED_CODE = "thread_unsupported_request"
"""Error code that makes Anthropic's client send whole conversations instead of a thread."""

_FIELD_NAMES = {
    "stop": "stop_sequences",
    "parameters": "input_schema",
    "response_format.json_schema.schema": "output_config.format.schema",
    "structured_outputs.json": "output_config.format.schema",
}
"""Mapping from field paths of a `ChatRequest` to Anthropic's field paths, for errors."""

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_DELTA_TYPES: dict[ItemKind, tuple[str, str]] = {
    "reasoning": ("thinking_delta", "thinking"),
    "content": ("text_delta", "text"),
    "tool_call": ("input_json_delta", "partial_json"),
}
"""By item kind: the type of a delta, and the name of the field that has the text."""


class TextBlock(Body, frozen=True, kw_only=True):
    """A content block that is text."""

    type: Annotated[Literal["text"], Meta(description=TEXT_ONLY)]
    text: str


TextBlocks = Annotated[list[TextBlock], Meta(max_length=256)]


class ContentBlock(Body, frozen=True, kw_only=True):
    """A content block of a message: text, a tool call, a tool result or reasoning."""

    drops_unknown_nulls: ClassVar[bool] = True
    type: Annotated[
        Literal["text", "tool_use", "tool_result", "thinking", "redacted_thinking"],
        Meta(description=TEXT_ONLY),
    ]
    text: str | None = None
    id: Identifier | None = None
    name: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    input: dict[str, Any] | None = None
    tool_use_id: Identifier | None = None
    content: str | TextBlocks | None = None
    is_error: bool = False
    thinking: str | None = None


class AnthropicMessage(Body, frozen=True, kw_only=True):
    """A message of the user or of the assistant."""

    role: Literal["user", "assistant"]
    content: str | Annotated[list[ContentBlock], Meta(min_length=1, max_length=1024)]


class CustomTool(Body, frozen=True, kw_only=True):
    """A function that the model may call."""

    drops_unknown_nulls: ClassVar[bool] = True
    name: FunctionName
    input_schema: JsonSchemaDict
    description: str | None = None
    type: Annotated[Literal["custom"], Meta(description="this server provides no tools")] = "custom"
    strict: bool | None = None


class AnthropicToolChoice(Body, frozen=True, kw_only=True):
    """Whether the model may or must call tools, and which tool."""

    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = None
    disable_parallel_tool_use: bool = False


class ThinkingConfig(Body, frozen=True, kw_only=True):
    """Accepted but ignored: the chat template decides whether the model reasons."""

    type: Literal["enabled", "disabled", "adaptive"]


class OutputFormat(Body, frozen=True, kw_only=True):
    """The JSON schema that the text of the answer must match."""

    type: Literal["json_schema"]
    schema: JsonSchemaDict


class OutputConfig(Body, frozen=True, kw_only=True):
    """Options for the text of the answer."""

    format: OutputFormat | None = None


class CountTokensRequest(Body, frozen=True, kw_only=True, dict=True):
    """The request body of `/v1/messages/count_tokens`: a conversation."""

    messages: Annotated[list[AnthropicMessage], Meta(min_length=1, max_length=4096)]
    model: Identifier | None = None
    system: str | TextBlocks | None = None
    tools: Annotated[list[CustomTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: AnthropicToolChoice | None = None
    output_config: OutputConfig | None = None
    thinking: ThinkingConfig | None = None
    thread: Annotated[Any, Meta(extra_json_schema={"type": "null"})] = None

    def __post_init__(self) -> None:
        """Raise ApiError if the field `thread` is set, or if `ChatRequest` rejects the request."""
        if self.thread is not None:  # after this error, Anthropic's client retries without `thread`
            problem = ": this server keeps no conversations: send the whole conversation"
            raise field_error("thread", problem, code=THREAD_UNSUPPORTED_CODE)
        _ = self.chat

    @cached_property
    def chat(self) -> ChatRequest:
        """The request converted to a `ChatRequest`. Errors name the fields of Anthropic's API."""
        chat_messages = [message for _, message in self._chat_messages()]
        choice = self.tool_choice or AnthropicToolChoice(type="auto")
        try:
            return ChatRequest(
                **self._sampling_fields(),
                messages=[ChatMessage(**message) for message in chat_messages],
                response_format=self._response_format(),
                tools=[to_chat_tool(tool, tool.input_schema) for tool in self.tools or ()] or None,
                tool_choice=None if self.tool_choice is None else _convert_tool_choice(choice),
                parallel_tool_calls=not choice.disable_parallel_tool_use,
            )
        except ApiError as error:
            raise error.with_renamed_fields(self.field_names) from None

    def _chat_messages(self) -> Iterator[tuple[str, JsonObject]]:
        """Yield the chat messages, each with the path of the request field that contains it."""
        if self.system:
            yield "system", {"role": "system", "content": content_text(self.system)}
        for i, anthropic_message in enumerate(self.messages):
            path = f"messages[{i}]"
            yield from ((path, message) for message in _convert_message(anthropic_message, path))

    @property
    def field_names(self) -> dict[str, str]:
        """Mapping from field paths of `chat` to field paths of this request, for errors."""
        field_names = dict(_FIELD_NAMES)
        for i, (path, _) in enumerate(self._chat_messages()):
            field_names[f"messages[{i}]"] = path
        for i in range(len(self.tools or ())):
            field_names[f"tools[{i}].function"] = f"tools[{i}]"
            field_names[f"tools[{i}].function.parameters"] = f"tools[{i}].input_schema"
        return field_names

    def _response_format(self) -> ResponseFormat | None:
        own = None if self.output_config is None else self.output_config.format
        if own is None:
            return None
        schema = JsonSchema(name="answer", schema=own.schema)
        return ResponseFormat(type="json_schema", json_schema=schema)

    def _sampling_fields(self) -> JsonObject:
        """Return the sampling fields of `chat`. A request that counts tokens has none."""
        return {}


class MessagesRequest(CountTokensRequest, frozen=True, kw_only=True, dict=True):
    """The request body of `/v1/messages`."""

    max_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    stop_sequences: Annotated[list[StopString], Meta(max_length=16)] | None = None
    stream: bool = False
    temperature: Annotated[float, Meta(ge=0, le=1e6)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] = 0

    @override
    def _sampling_fields(self) -> JsonObject:
        names = ("max_tokens", "temperature", "top_p", "top_k", "stream")
        asked = {name: getattr(self, name) for name in names}
        return {**asked, "stop": self.stop_sequences or None}


def _convert_tool_choice(choice: AnthropicToolChoice) -> Any:
    if choice.type != "tool":
        return {"auto": "auto", "any": "required", "none": "none"}[choice.type]
    if choice.name is None:
        path = "tool_choice.name"
        raise field_error(path, "is missing", remedy="it is required for type 'tool'")
    return ChosenTool(type="function", function=ChosenFunction(name=choice.name))


def _convert_message(anthropic_message: AnthropicMessage, path: str) -> list[JsonObject]:
    """Convert one of Anthropic's messages to chat messages. Each tool result becomes a message."""
    if isinstance(anthropic_message.content, str):
        return [{"role": anthropic_message.role, "content": anthropic_message.content}]
    results: list[JsonObject] = []
    message: JsonObject = {"role": anthropic_message.role, "content": None}
    for i, block in enumerate(anthropic_message.content):
        _add_block(message, results, block, f"{path}.content[{i}]")
    is_empty = message["content"] is None and "tool_calls" not in message
    if is_empty and results:
        return results
    return [*results, {**message, "content": ""} if is_empty else message]


def _add_block(
    message: JsonObject, results: list[JsonObject], block: ContentBlock, path: str
) -> None:
    by_user = message["role"] == "user"
    if block.type != "text" and by_user != (block.type == "tool_result"):
        whose = "assistant" if by_user else "user"
        raise field_error(path, f"of type {block.type!r} belongs in a message with role {whose!r}")
    match block.type:
        case "text":
            check_required_fields(block, path, "text")
            message["content"] = (message["content"] or "") + (block.text or "")
        case "tool_use":
            check_required_fields(block, path, "id", "name", "input")
            arguments = json.dumps(block.input, ensure_ascii=False)
            function = FunctionCall(name=block.name or "", arguments=arguments)
            message.setdefault("tool_calls", []).append(ToolCall(function=function, id=block.id))
        case "tool_result":
            check_required_fields(block, path, "tool_use_id")
            text = content_text(block.content)
            result = {"role": "tool", "content": text, "tool_call_id": block.tool_use_id}
            results.append(result)
        case "thinking":
            check_required_fields(block, path, "thinking")
            message["reasoning_content"] = message.get("reasoning_content", "") + (
                block.thinking or ""
            )


def error_body(error: ApiError) -> JsonObject:
    """Return an error as a JSON object in Anthropic's format."""
    kind = _ERROR_TYPES.get(error.status, "invalid_request_error")
    own: JsonObject = {"type": kind, "message": str(error)}
    if error.code == THREAD_UNSUPPORTED_CODE:
        own["details"] = {"error_code": error.code, "unsupported": [error.param]}
    return {"type": "error", "error": own}


def anthropic_error_response(error: ApiError) -> Any:
    """Return an error as an HTTP response in Anthropic's format."""
    return json_response(error_body(error), error.status, error.headers)


def failure_event(error: ApiError) -> bytes:
    """Return the event for an error in a stream that has already started."""
    return _encode_event(error_body(error))


def _encode_event(value: JsonObject) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (value["type"].encode(), encode_json(value))


def _render_event(event: ChatEvent) -> JsonObject:
    """Return Anthropic's stream event for a chat event."""
    event_kind, item, text = event
    if event_kind == "start":
        block = _content_block(item, "")
        return {"type": "content_block_start", "index": item.index, "content_block": block}
    if event_kind == "end":
        return {"type": "content_block_stop", "index": item.index}
    kind, name = _DELTA_TYPES[item.kind]
    delta = {"type": kind, name: text}
    return {"type": "content_block_delta", "index": item.index, "delta": delta}


def _content_block(item: AnswerItem, text: str) -> JsonObject:
    """Return an item as a content block that contains `text`."""
    if (call := item.call) is not None:
        return {
            "type": "tool_use",
            "id": call.id,
            "name": call.name,
            "input": _parse_arguments(text),
        }
    if item.kind == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": ""}
    return {"type": "text", "text": text}


def _parse_arguments(text: str) -> JsonObject:
    """Return the arguments of a tool call, or {} if the text is not a JSON object."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


class MessagesGeneration(ChatGeneration):
    """Runs one request of `/v1/messages` and renders the answer."""

    def __init__(self, serving: Any, request_body: MessagesRequest, *args: Any):
        super().__init__(serving, request_body.chat, *args)
        self._request_body = request_body
        self._has_started = False

    @override
    async def iter_body(self) -> AsyncGenerator[bytes, None]:
        try:
            async for chunk in super().iter_body():
                yield chunk
        except ApiError as error:
            raise error.with_renamed_fields(self._request_body.field_names) from None

    @override
    def _encode_events(self, updates: list[RequestUpdate], encode: JsonEncoder) -> bytes:
        bodies = [_render_event(event) for event in self._chat_events(updates)]
        if not self._has_started:
            self._has_started = True
            start = {**self._message(), "content": [], "stop_reason": None, "stop_sequence": None}
            start["usage"] = {**start["usage"], "output_tokens": 0}
            bodies.insert(0, {"type": "message_start", "message": start})
        return b"".join(map(_encode_event, bodies))

    @override
    def _encode_last_events(self) -> bytes:
        self._check_finished()
        whole = self._message()
        delta = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
        last = {"type": "message_delta", "delta": delta, "usage": whole["usage"]}
        return _encode_event(last) + _encode_event({"type": "message_stop"})

    @override
    def _answer_body(self, answers: list[list[TextDelta]]) -> JsonObject:
        self._check_finished()
        return self._message()

    def _check_finished(self) -> None:
        """Raise ApiError if the engine aborted the answer.

        Anthropic's API has no `stop_reason` for aborted answers.
        """
        if self._answer_events(0).finish_reason == "abort":
            raise unavailable_error(
                "the server was paused or is shutting down, so it ended the answer"
            )

    def _message(self) -> JsonObject:
        """Return the message object. If the answer is streamed, the text in `content` is empty."""
        usage, answer = self._usage(), self._answer_events(0)
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        reason = answer.finish_reason
        if answer.stop_string is not None:
            reason = "stop_sequence"
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [_content_block(item, item.text) for item in answer.items],
            "stop_reason": _STOP_REASONS.get(reason or "", reason),
            "stop_sequence": answer.stop_string,
            "usage": {
                "input_tokens": usage["prompt_tokens"] - cached,
                "cache_read_input_tokens": cached,
                "cache_creation_input_tokens": 0,
                "output_tokens": usage["completion_tokens"],
            },
        }
