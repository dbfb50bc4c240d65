"""`/v1/responses`: OpenAI's Responses API, without stored conversations.

A body becomes a `ChatRequest`. Chat events become the items and events of this API.
"""

from collections.abc import AsyncGenerator
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

import msgspec
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
from jpaged.serve.api.fields import ChatRequest, Echoed
from jpaged.serve.api.generation import ChatGeneration, Encode, Json
from jpaged.serve.api.response_format import FormName, JsonSchema, ResponseFormat, Schema
from jpaged.serve.engine.client import News
from jpaged.serve.errors import ApiError, bad_field
from jpaged.serve.http.exchange import json_bytes

_NO_MEMORY = "this server keeps no answers: send the whole conversation"
_NAMES = {
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "response_format": "text.format",
    "response_format.json_schema.schema": "text.format.schema",
    "structured_outputs.json": "text.format.schema",
}
"""Names of a chat's fields in this API."""

_ITEM_KINDS: dict[Kind, tuple[str, str]] = {
    "content": ("msg", "message"),
    "reasoning": ("rs", "reasoning"),
    "tool_call": ("fc", "function_call"),
}
"""By kind of item: how its id begins, and its type."""

_TEXT_KINDS: dict[Kind, str] = {
    "content": "output_text",
    "reasoning": "reasoning_text",
    "tool_call": "function_call_arguments",
}


class Part(Body, frozen=True, kw_only=True):
    """A piece of an item."""

    drops_unknown_nulls: ClassVar[bool] = True
    type: Annotated[
        Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"],
        Meta(description=TEXT_ONLY),
    ]
    text: str


Parts = Annotated[list[Part], Meta(max_length=256)]


class InputItem(Body, frozen=True, kw_only=True):
    """A message, a call, its result or a thought; such as an item of an answer, as it came."""

    drops_unknown_nulls: ClassVar[bool] = True
    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | Parts | None = None
    call_id: Name | None = None
    name: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    arguments: Annotated[str, Meta(description="JSON text of an object; may be empty")] | None = (
        None
    )
    output: str | Parts | None = None


class FunctionTool(Body, frozen=True, kw_only=True):
    """A function that the model may call."""

    drops_unknown_nulls: ClassVar[bool] = True
    type: Annotated[Literal["function"], Meta(description="this server has no tools of its own")]
    name: FunctionName
    description: str | None = None
    parameters: Schema | None = None
    strict: bool | None = None


class ChosenFunctionTool(Body, frozen=True, kw_only=True):
    """The function that the model must call."""

    type: Literal["function"]
    name: FunctionName


class TextFormat(Body, frozen=True, kw_only=True):
    """The form of the answer's text."""

    type: Literal["text", "json_object", "json_schema"]
    name: FormName | None = None
    schema: Schema | None = None
    description: Echoed = None
    strict: bool | None = None


class TextOptions(Body, frozen=True, kw_only=True):
    """What the answer's text is to be."""

    format: TextFormat | None = None


class ResponsesRequest(Body, frozen=True, kw_only=True, dict=True):
    """The fields of `/v1/responses`."""

    input: str | Annotated[list[InputItem], Meta(min_length=1, max_length=4096)]
    model: Name | None = None
    instructions: str | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=1e6)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    stream: bool = False
    tools: Annotated[list[FunctionTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenFunctionTool | None = None
    parallel_tool_calls: bool = True
    text: TextOptions | None = None
    truncation: Annotated[Literal["disabled"], Meta(description="nothing is cut")] = "disabled"
    store: Annotated[bool, Meta(extra_json_schema={"enum": [False]})] = False
    background: Annotated[bool, Meta(extra_json_schema={"enum": [False]})] = False
    previous_response_id: Annotated[None, Meta(description=_NO_MEMORY)] = None
    conversation: Annotated[None, Meta(description=_NO_MEMORY)] = None
    metadata: Echoed = None
    user: Echoed = None

    def __post_init__(self) -> None:
        """Raise ApiError for what cannot be had; here, since bodies are read in a thread."""
        for name in ("store", "background"):
            if getattr(self, name):
                raise bad_field(name, "must be false", value="true", remedy=_NO_MEMORY)
        _ = self.chat

    @cached_property
    def chat(self) -> ChatRequest:
        """What it asks, as a chat."""
        told, _ = _Conversation(self).told()
        choice = self.tool_choice
        if isinstance(choice, ChosenFunctionTool):
            choice = ChosenTool(type="function", function=ChosenFunction(name=choice.name))
        tools = [function_tool(tool, tool.parameters) for tool in self.tools or ()]
        try:
            return ChatRequest(
                messages=told,
                max_tokens=self.max_output_tokens,
                temperature=self.temperature,
                top_p=self.top_p,
                stream=self.stream,
                tools=tools or None,
                tool_choice=choice,
                parallel_tool_calls=self.parallel_tool_calls,
                response_format=self._format(),
            )
        except ApiError as error:
            raise error.renamed(self.names) from None

    @property
    def names(self) -> dict[str, str]:
        """Names of the chat's fields in this API, for errors."""
        names = dict(_NAMES)
        for i, (message, place) in enumerate(zip(*_Conversation(self).told(), strict=True)):
            path = "instructions" if place < 0 else f"input[{place}]"
            names[f"messages[{i}]"] = path
            for j in range(len(message.tool_calls or ())):
                names[f"messages[{i}].tool_calls[{j}].function"] = path
        return names | {f"tools[{i}].function": f"tools[{i}]" for i in range(len(self.tools or ()))}

    def _format(self) -> ResponseFormat | None:
        own = None if self.text is None else self.text.format
        if own is None:
            return None
        if own.type != "json_schema":
            return ResponseFormat(type=own.type)
        if own.schema is None:
            path = "text.format.schema"
            raise bad_field(path, "is missing", remedy="it is required with type 'json_schema'")
        schema = JsonSchema(name=own.name or "answer", schema=own.schema)
        return ResponseFormat(type=own.type, json_schema=schema)


class _Conversation:
    """Makes messages of a body's items; calls and thoughts belong to the assistant's message."""

    def __init__(self, asked: ResponsesRequest):
        self._messages: list[Json] = []
        self._places: list[int] = []
        if asked.instructions:
            self._add(-1, role="system", content=asked.instructions)
        if isinstance(asked.input, str):
            self._add(0, role="user", content=asked.input)
        else:
            for i, item in enumerate(asked.input):
                self._take(i, f"input[{i}]", item)
        self._close()

    def told(self) -> tuple[list[Message], list[int]]:
        """The messages, and the item that each began with."""
        return [Message(**message) for message in self._messages], self._places

    def _take(self, index: int, path: str, item: InputItem) -> None:
        match item.type:
            case "message":
                check_has(item, path, "role", "content")
                if item.role == "assistant":
                    own = self._own(index, opens=True)
                    own["content"] = (own["content"] or "") + text_of(item.content)
                else:
                    self._close()
                    self._add(index, role=item.role, content=text_of(item.content))
            case "function_call":
                check_has(item, path, "call_id", "name", "arguments")
                function = FunctionCall(name=item.name or "", arguments=item.arguments or "")
                call = ToolCall(function=function, id=item.call_id)
                self._own(index).setdefault("tool_calls", []).append(call)
            case "function_call_output":
                check_has(item, path, "call_id", "output")
                self._close()
                text = text_of(item.output)
                self._add(index, role="tool", content=text, tool_call_id=item.call_id)
            case "reasoning":
                if text := text_of(item.content):
                    self._own(index, opens=True)["reasoning_content"] = text

    def _own(self, index: int, *, opens: bool = False) -> Json:
        """The assistant's message that is open; a new one where text follows calls."""
        last = self._messages[-1] if self._messages else {}
        if last.get("role") != "assistant" or (opens and "tool_calls" in last):
            self._close()
            self._add(index, role="assistant", content=None)
        return self._messages[-1]

    def _close(self) -> None:
        """A thought alone is no message."""
        last = self._messages[-1] if self._messages else {}
        if last.get("role") == "assistant" and last["content"] is None and "tool_calls" not in last:
            last["content"] = ""

    def _add(self, index: int, **message: Any) -> None:
        self._messages.append(message)
        self._places.append(index)


class Responses(ChatGeneration):
    """One request of `/v1/responses`."""

    def __init__(self, serving: Any, asked: ResponsesRequest, *about: Any):
        super().__init__(serving, asked.chat, *about)
        self._body_asked = asked
        self._num_events = 0

    keeps_streamed_text = True  # the last event has all items

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
        bodies: list[Json] = []
        if not self._num_events:
            begun = self._response("in_progress", None)
            kinds = ("response.created", "response.in_progress")
            bodies += [{"type": kind, "response": begun} for kind in kinds]
        for event in self._chat_events(news):
            bodies += self._rendered(event)
        return b"".join(map(self._numbered, bodies))

    def _last_events(self) -> bytes:
        status = self._status()
        whole = self._response(status, self._used())
        return self._numbered({"type": f"response.{status}", "response": whole})

    def _body(self, answers: list[list[TextDelta]]) -> Json:
        return self._response(self._status(), self._used())

    def _rendered(self, event: Event) -> list[Json]:
        """Return the events of this API for a chat event."""
        what, item, text = event
        call = item.call
        where: Json = {"output_index": item.index}
        at: Json = {"item_id": self._item_id(item), **where}
        at |= {} if call else {"content_index": 0}
        logprobs = {"logprobs": []} if item.kind == "content" else {}
        kind = f"response.{_TEXT_KINDS[item.kind]}"
        if what == "text":
            return [{"type": f"{kind}.delta", **at, **logprobs, "delta": text}]
        if what == "start":
            shown = self._item(item, "", "in_progress")
            added = {"type": "response.output_item.added", **where, "item": shown}
            if call:
                return [added]
            part = {"type": "response.content_part.added", **at, "part": shown["content"][0]}
            return [{**added, "item": {**shown, "content": []}}, part]
        shown = self._ended(item)
        done = {"type": "response.output_item.done", **where, "item": shown}
        if call:
            arguments = {"name": call.name, "arguments": shown["arguments"]}
            return [{"type": f"{kind}.done", **at, **arguments}, done]
        part = shown["content"][0]
        text_done = {"type": f"{kind}.done", **at, "text": part["text"], **logprobs}
        return [text_done, {"type": "response.content_part.done", **at, "part": part}, done]

    def _item_id(self, item: Item) -> str:
        return f"{_ITEM_KINDS[item.kind][0]}_{self._id.removeprefix('resp_')}_{item.index}"

    def _ended(self, item: Item) -> Json:
        """Return an output item that has ended."""
        return self._item(item, item.text, "completed" if item.is_complete else "incomplete")

    def _item(self, item: Item, text: str, status: str) -> Json:
        head = {"id": self._item_id(item), "type": _ITEM_KINDS[item.kind][1], "status": status}
        if (call := item.call) is not None:
            return {**head, "call_id": call.id, "name": call.name, "arguments": text}
        part: Json = {"type": _TEXT_KINDS[item.kind], "text": text}
        if item.kind == "reasoning":
            return {**head, "summary": [], "content": [part]}
        return {**head, "role": "assistant", "content": [{**part, "annotations": []}]}

    def _numbered(self, body: Json) -> bytes:
        """Return an event with the next sequence number."""
        data = json_bytes({**body, "sequence_number": self._num_events})
        self._num_events += 1
        return b"event: %b\ndata: %b\n\n" % (body["type"].encode(), data)

    def _status(self) -> str:
        known = {"stop": "completed", "tool_calls": "completed", "length": "incomplete"}
        return known.get(self._answer(0).finish_reason or "", "failed")

    def _used(self) -> Json:
        """Return the token counts under the names of this API."""
        usage = self._usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {
                "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
                "cache_write_tokens": 0,
            },
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._answer(0).num_reasoning_tokens},
            "total_tokens": usage["total_tokens"],
        }

    def _response(self, status: str, usage: Json | None) -> Json:
        """Return the response object."""
        asked, error, details = self._body_asked, None, None
        if status == "incomplete":
            details = {"reason": "max_output_tokens"}
        elif status == "failed":
            message = "the answer was cut short: its time was over, or it failed"
            error = {"code": "server_error", "message": message}
        form = asked.text.format if asked.text is not None else None
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": error,
            "incomplete_details": details,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata or {},
            "model": self._model,
            "output": [self._ended(item) for item in self._answer(0).items],
            "parallel_tool_calls": asked.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "background": False,
            "store": False,
            "temperature": asked.temperature,
            "text": {"format": {"type": "text"} if form is None else _given(form)},
            "tool_choice": "auto" if asked.tool_choice is None else _given(asked.tool_choice),
            "tools": [_given(tool) for tool in asked.tools or ()],
            "top_p": asked.top_p,
            "truncation": "disabled",
            "usage": usage,
            "user": asked.user,
        }


def failure_event(error: ApiError) -> bytes:
    """What goes wrong in a stream after it has begun."""
    event = {"type": "error", "code": error.code, "message": str(error), "param": error.param}
    return b"event: error\ndata: %b\n\n" % json_bytes({**event, "sequence_number": 0})


def _given(value: Any) -> Any:
    """As it was sent, but for nulls."""
    told = msgspec.to_builtins(value)
    return {k: v for k, v in told.items() if v is not None} if isinstance(told, dict) else told
