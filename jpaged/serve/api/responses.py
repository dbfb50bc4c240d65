"""`/v1/responses`: OpenAI's Responses API, without stored conversations.

A request body is converted to a `ChatRequest`. Chat events are converted to the output items and
stream events of the Responses API.
"""

from collections.abc import AsyncGenerator
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

import msgspec
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
from jpaged.serve.api.fields import ChatRequest, EchoedValue
from jpaged.serve.api.generation import ChatGeneration, JsonEncoder, JsonObject
from jpaged.serve.api.response_format import JsonSchema, JsonSchemaDict, ResponseFormat, SchemaName
from jpaged.serve.engine.client import RequestUpdate
from jpaged.serve.errors import ApiError, field_error
from jpaged.serve.http.exchange import encode_json

_STATELESS_NOTE = "this server keeps no responses: send the whole conversation"
_FIELD_NAMES = {
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "response_format": "text.format",
    "response_format.json_schema.schema": "text.format.schema",
    "structured_outputs.json": "text.format.schema",
}
"""Mapping from field paths of a `ChatRequest` to those of the Responses API, for errors."""

_ITEM_TYPES: dict[ItemKind, tuple[str, str]] = {
    "content": ("msg", "message"),
    "reasoning": ("rs", "reasoning"),
    "tool_call": ("fc", "function_call"),
}
"""By item kind: the prefix of an output item's id, and the output item's type."""

_TEXT_TYPES: dict[ItemKind, str] = {
    "content": "output_text",
    "reasoning": "reasoning_text",
    "tool_call": "function_call_arguments",
}


class ContentPart(Body, frozen=True, kw_only=True):
    """A text part of an input item's content."""

    drops_unknown_nulls: ClassVar[bool] = True
    type: Annotated[
        Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"],
        Meta(description=TEXT_ONLY),
    ]
    text: str


ContentParts = Annotated[list[ContentPart], Meta(max_length=256)]


class InputItem(Body, frozen=True, kw_only=True):
    """An input item: a message, a tool call, a tool result or reasoning."""

    drops_unknown_nulls: ClassVar[bool] = True
    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | ContentParts | None = None
    call_id: Identifier | None = None
    name: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    arguments: Annotated[str, Meta(description="JSON text of an object; may be empty")] | None = (
        None
    )
    output: str | ContentParts | None = None


class FunctionTool(Body, frozen=True, kw_only=True):
    """A function that the model may call."""

    drops_unknown_nulls: ClassVar[bool] = True
    type: Annotated[Literal["function"], Meta(description="this server provides no tools")]
    name: FunctionName
    description: str | None = None
    parameters: JsonSchemaDict | None = None
    strict: bool | None = None


class ChosenFunctionTool(Body, frozen=True, kw_only=True):
    """The function that the model must call."""

    type: Literal["function"]
    name: FunctionName


class TextFormat(Body, frozen=True, kw_only=True):
    """The format of the text of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    name: SchemaName | None = None
    schema: JsonSchemaDict | None = None
    description: EchoedValue = None
    strict: bool | None = None


class TextOptions(Body, frozen=True, kw_only=True):
    """Options for the text of the answer."""

    format: TextFormat | None = None


class ResponsesRequest(Body, frozen=True, kw_only=True, dict=True):
    """The request body of `/v1/responses`."""

    input: str | Annotated[list[InputItem], Meta(min_length=1, max_length=4096)]
    model: Identifier | None = None
    instructions: str | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=1e6)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    stream: bool = False
    tools: Annotated[list[FunctionTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenFunctionTool | None = None
    parallel_tool_calls: bool = True
    text: TextOptions | None = None
    truncation: Annotated[Literal["disabled"], Meta(description="the input is never truncated")] = (
        "disabled"
    )
    store: Annotated[bool, Meta(extra_json_schema={"enum": [False]})] = False
    background: Annotated[bool, Meta(extra_json_schema={"enum": [False]})] = False
    previous_response_id: Annotated[None, Meta(description=_STATELESS_NOTE)] = None
    conversation: Annotated[None, Meta(description=_STATELESS_NOTE)] = None
    metadata: EchoedValue = None
    user: EchoedValue = None

    def __post_init__(self) -> None:
        """Raise ApiError for unsupported fields and for everything that `ChatRequest` rejects."""
        for name in ("store", "background"):
            if getattr(self, name):
                raise field_error(name, "must be false", value="true", remedy=_STATELESS_NOTE)
        _ = self.chat

    @cached_property
    def chat(self) -> ChatRequest:
        """The request converted to a `ChatRequest`. Errors name the fields of the Responses API."""
        chat_messages, _ = _ChatMessageBuilder(self).chat_messages()
        choice = self.tool_choice
        if isinstance(choice, ChosenFunctionTool):
            choice = ChosenTool(type="function", function=ChosenFunction(name=choice.name))
        tools = [to_chat_tool(tool, tool.parameters) for tool in self.tools or ()]
        try:
            return ChatRequest(
                messages=chat_messages,
                max_tokens=self.max_output_tokens,
                temperature=self.temperature,
                top_p=self.top_p,
                stream=self.stream,
                tools=tools or None,
                tool_choice=choice,
                parallel_tool_calls=self.parallel_tool_calls,
                response_format=self._response_format(),
            )
        except ApiError as error:
            raise error.with_renamed_fields(self.field_names) from None

    @property
    def field_names(self) -> dict[str, str]:
        """Mapping from field paths of `chat` to field paths of this request, for errors."""
        field_names = dict(_FIELD_NAMES)
        for i, (message, item_index) in enumerate(
            zip(*_ChatMessageBuilder(self).chat_messages(), strict=True)
        ):
            path = "instructions" if item_index < 0 else f"input[{item_index}]"
            field_names[f"messages[{i}]"] = path
            for j in range(len(message.tool_calls or ())):
                field_names[f"messages[{i}].tool_calls[{j}].function"] = path
        return field_names | {
            f"tools[{i}].function": f"tools[{i}]" for i in range(len(self.tools or ()))
        }

    def _response_format(self) -> ResponseFormat | None:
        own = None if self.text is None else self.text.format
        if own is None:
            return None
        if own.type != "json_schema":
            return ResponseFormat(type=own.type)
        if own.schema is None:
            path = "text.format.schema"
            raise field_error(path, "is missing", remedy="it is required for type 'json_schema'")
        schema = JsonSchema(name=own.name or "answer", schema=own.schema)
        return ResponseFormat(type=own.type, json_schema=schema)


class _ChatMessageBuilder:
    """Convert input items to chat messages.

    Text, reasoning and tool calls of the assistant that follow each other become one message.
    """

    def __init__(self, request_body: ResponsesRequest):
        self._messages: list[JsonObject] = []
        self._item_indices: list[int] = []
        if request_body.instructions:
            self._add_message(-1, role="system", content=request_body.instructions)
        if isinstance(request_body.input, str):
            self._add_message(0, role="user", content=request_body.input)
        else:
            for i, item in enumerate(request_body.input):
                self._add_item(i, f"input[{i}]", item)
        self._complete_last_message()

    def chat_messages(self) -> tuple[list[ChatMessage], list[int]]:
        """Return the chat messages, and for each message the index of its first input item.

        A message made from `instructions` has the index -1.
        """
        return [ChatMessage(**message) for message in self._messages], self._item_indices

    def _add_item(self, index: int, path: str, item: InputItem) -> None:
        match item.type:
            case "message":
                check_required_fields(item, path, "role", "content")
                if item.role == "assistant":
                    own = self._open_assistant_message(index, is_text=True)
                    own["content"] = (own["content"] or "") + content_text(item.content)
                else:
                    self._complete_last_message()
                    self._add_message(index, role=item.role, content=content_text(item.content))
            case "function_call":
                check_required_fields(item, path, "call_id", "name", "arguments")
                function = FunctionCall(name=item.name or "", arguments=item.arguments or "")
                call = ToolCall(function=function, id=item.call_id)
                self._open_assistant_message(index).setdefault("tool_calls", []).append(call)
            case "function_call_output":
                check_required_fields(item, path, "call_id", "output")
                self._complete_last_message()
                text = content_text(item.output)
                self._add_message(index, role="tool", content=text, tool_call_id=item.call_id)
            case "reasoning":
                if text := content_text(item.content):
                    self._open_assistant_message(index, is_text=True)["reasoning_content"] = text

    def _open_assistant_message(self, index: int, *, is_text: bool = False) -> JsonObject:
        """Return the assistant message to which the next input item belongs.

        Add a new message if the last message is not an assistant message. Also add a new message if
        the item is text and the last message has tool calls. Otherwise, return the last message.
        """
        last = self._messages[-1] if self._messages else {}
        if last.get("role") != "assistant" or (is_text and "tool_calls" in last):
            self._complete_last_message()
            self._add_message(index, role="assistant", content=None)
        return self._messages[-1]

    def _complete_last_message(self) -> None:
        """Set the last message's `content` to "" if the assistant wrote only reasoning in it."""
        last = self._messages[-1] if self._messages else {}
        if last.get("role") == "assistant" and last["content"] is None and "tool_calls" not in last:
            last["content"] = ""

    def _add_message(self, index: int, **message: Any) -> None:
        self._messages.append(message)
        self._item_indices.append(index)


class ResponsesGeneration(ChatGeneration):
    """Runs one request of `/v1/responses` and renders the answer."""

    def __init__(self, serving: Any, request_body: ResponsesRequest, *args: Any):
        super().__init__(serving, request_body.chat, *args)
        self._request_body = request_body
        self._num_events = 0

    # Keep the text, because the last event of a stream repeats the text of all items.
    keeps_streamed_text = True

    @override
    async def iter_body(self) -> AsyncGenerator[bytes, None]:
        try:
            async for chunk in super().iter_body():
                yield chunk
        except ApiError as error:
            raise error.with_renamed_fields(self._request_body.field_names) from None

    @override
    def _encode_events(self, updates: list[RequestUpdate], encode: JsonEncoder) -> bytes:
        bodies: list[JsonObject] = []
        if not self._num_events:
            begun = self._response("in_progress", None)
            kinds = ("response.created", "response.in_progress")
            bodies += [{"type": kind, "response": begun} for kind in kinds]
        for event in self._chat_events(updates):
            bodies += self._render_event(event)
        return b"".join(map(self._encode_event, bodies))

    @override
    def _encode_last_events(self) -> bytes:
        status = self._status()
        whole = self._response(status, self._usage_fields())
        return self._encode_event({"type": f"response.{status}", "response": whole})

    @override
    def _answer_body(self, answers: list[list[TextDelta]]) -> JsonObject:
        return self._response(self._status(), self._usage_fields())

    def _render_event(self, event: ChatEvent) -> list[JsonObject]:
        """Return the stream events of the Responses API for a chat event."""
        event_kind, item, text = event
        call = item.call
        item_location: JsonObject = {"output_index": item.index}
        content_location: JsonObject = {"item_id": self._item_id(item), **item_location}
        content_location |= {} if call else {"content_index": 0}
        logprobs = {"logprobs": []} if item.kind == "content" else {}
        kind = f"response.{_TEXT_TYPES[item.kind]}"
        if event_kind == "text":
            return [{"type": f"{kind}.delta", **content_location, **logprobs, "delta": text}]
        if event_kind == "start":
            output_item = self._output_item(item, "", "in_progress")
            added = {"type": "response.output_item.added", **item_location, "item": output_item}
            if call:
                return [added]
            part = {
                "type": "response.content_part.added",
                **content_location,
                "part": output_item["content"][0],
            }
            return [{**added, "item": {**output_item, "content": []}}, part]
        output_item = self._ended_item(item)
        done = {"type": "response.output_item.done", **item_location, "item": output_item}
        if call:
            arguments = {"name": call.name, "arguments": output_item["arguments"]}
            return [{"type": f"{kind}.done", **content_location, **arguments}, done]
        part = output_item["content"][0]
        text_done = {"type": f"{kind}.done", **content_location, "text": part["text"], **logprobs}
        return [
            text_done,
            {"type": "response.content_part.done", **content_location, "part": part},
            done,
        ]

    def _item_id(self, item: AnswerItem) -> str:
        return f"{_ITEM_TYPES[item.kind][0]}_{self._id.removeprefix('resp_')}_{item.index}"

    def _ended_item(self, item: AnswerItem) -> JsonObject:
        return self._output_item(item, item.text, "completed" if item.is_complete else "incomplete")

    def _output_item(self, item: AnswerItem, text: str, status: str) -> JsonObject:
        head = {"id": self._item_id(item), "type": _ITEM_TYPES[item.kind][1], "status": status}
        if (call := item.call) is not None:
            return {**head, "call_id": call.id, "name": call.name, "arguments": text}
        part: JsonObject = {"type": _TEXT_TYPES[item.kind], "text": text}
        if item.kind == "reasoning":
            return {**head, "summary": [], "content": [part]}
        return {**head, "role": "assistant", "content": [{**part, "annotations": []}]}

    def _encode_event(self, body: JsonObject) -> bytes:
        """Encode a stream event with the next sequence number."""
        data = encode_json({**body, "sequence_number": self._num_events})
        self._num_events += 1
        return b"event: %b\ndata: %b\n\n" % (body["type"].encode(), data)

    def _status(self) -> str:
        known = {"stop": "completed", "tool_calls": "completed", "length": "incomplete"}
        return known.get(self._answer_events(0).finish_reason or "", "failed")

    def _usage_fields(self) -> JsonObject:
        """Return the `usage` object of the Responses API, which has the token counts."""
        usage = self._usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {
                "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
                "cache_write_tokens": 0,
            },
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {
                "reasoning_tokens": self._answer_events(0).num_reasoning_tokens
            },
            "total_tokens": usage["total_tokens"],
        }

    def _response(self, status: str, usage: JsonObject | None) -> JsonObject:
        """Return the `response` object of the Responses API."""
        request_body, error, details = self._request_body, None, None
        if status == "incomplete":
            details = {"reason": "max_output_tokens"}
        elif status == "failed":
            message = "the server was paused or is shutting down, so it ended the answer"
            error = {"code": "server_error", "message": message}
        text_format = request_body.text.format if request_body.text is not None else None
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": error,
            "incomplete_details": details,
            "instructions": request_body.instructions,
            "max_output_tokens": request_body.max_output_tokens,
            "metadata": request_body.metadata or {},
            "model": self._model,
            "output": [self._ended_item(item) for item in self._answer_events(0).items],
            "parallel_tool_calls": request_body.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "background": False,
            "store": False,
            "temperature": request_body.temperature,
            "text": {
                "format": {"type": "text"} if text_format is None else _drop_nulls(text_format)
            },
            "tool_choice": "auto"
            if request_body.tool_choice is None
            else _drop_nulls(request_body.tool_choice),
            "tools": [_drop_nulls(tool) for tool in request_body.tools or ()],
            "top_p": request_body.top_p,
            "truncation": "disabled",
            "usage": usage,
            "user": request_body.user,
        }


def failure_event(error: ApiError) -> bytes:
    """Return the event for an error in a stream that has already started."""
    event = {"type": "error", "code": error.code, "message": str(error), "param": error.param}
    return b"event: error\ndata: %b\n\n" % encode_json({**event, "sequence_number": 0})


def _drop_nulls(value: Any) -> Any:
    """Return the value as JSON data, without fields that are null."""
    data = msgspec.to_builtins(value)
    return {k: v for k, v in data.items() if v is not None} if isinstance(data, dict) else data
