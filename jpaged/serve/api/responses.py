"""OpenAI's Responses API without memory: `/v1/responses` is a chat in other words.

A body becomes a `ChatRequest`, and what a chat tells of an answer becomes items and events.
"""

from collections.abc import AsyncGenerator, Callable
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, cast

import msgspec
from msgspec import Meta

from jpaged import TextDelta
from jpaged.serve.api.answers import Chat, Encode
from jpaged.serve.api.conversation import (
    MAX_TOOLS,
    TEXT_ONLY,
    Body,
    ChosenFunction,
    ChosenTool,
    Function,
    FunctionCall,
    FunctionName,
    Ignored,
    Message,
    Name,
    Tool,
    ToolCall,
    check_has,
)
from jpaged.serve.api.fields import ChatRequest
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

Json = dict[str, Any]


class Part(Body, frozen=True, kw_only=True):
    """A piece of an item."""

    drops_unknown_nulls: ClassVar[bool] = True
    type: Annotated[
        Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"],
        Meta(description=TEXT_ONLY),
    ]
    text: str
    annotations: Ignored = None
    logprobs: Ignored = None


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
    summary: Ignored = None
    encrypted_content: Ignored = None
    id: Ignored = None
    status: Ignored = None
    phase: Ignored = None


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
    description: Ignored = None
    strict: bool | None = None


class TextOptions(Body, frozen=True, kw_only=True):
    """What the answer's text is to be."""

    format: TextFormat | None = None
    verbosity: Ignored = None


class _Plain(Body, frozen=True, kw_only=True):
    include: Ignored = None
    metadata: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None
    safety_identifier: Ignored = None
    service_tier: Ignored = None
    user: Ignored = None
    reasoning: Ignored = None
    stream_options: Ignored = None
    max_tool_calls: Ignored = None


class ResponsesRequest(_Plain, frozen=True, kw_only=True, dict=True):
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

    def __post_init__(self) -> None:
        """Raise ApiError for what cannot be had; here, since bodies are read in a thread."""
        for name in ("store", "background"):
            if getattr(self, name):
                raise bad_field(name, "must be false", value="true", remedy=f"{_NO_MEMORY}")
        _ = self.chat

    @cached_property
    def chat(self) -> ChatRequest:
        """What it asks, as a chat."""
        told, _ = _Conversation(self).told()
        choice = self.tool_choice
        if isinstance(choice, ChosenFunctionTool):
            choice = ChosenTool(type="function", function=ChosenFunction(name=choice.name))
        tools = [
            Tool(
                type="function",
                function=Function(
                    name=tool.name,
                    description=tool.description,
                    parameters=tool.parameters,
                    strict=tool.strict,
                ),
            )
            for tool in self.tools or ()
        ]
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
                    own["content"] = (own["content"] or "") + _text(item.content)
                else:
                    self._close()
                    self._add(index, role=item.role, content=_text(item.content))
            case "function_call":
                check_has(item, path, "call_id", "name", "arguments")
                function = FunctionCall(name=item.name or "", arguments=item.arguments or "")
                call = ToolCall(function=function, id=item.call_id)
                self._own(index).setdefault("tool_calls", []).append(call)
            case "function_call_output":
                check_has(item, path, "call_id", "output")
                self._close()
                text = _text(item.output)
                self._add(index, role="tool", content=text, tool_call_id=item.call_id)
            case "reasoning":
                if text := _text(item.content):
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


def _text(content: str | list[Part] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.text for part in content)


class Output:
    """The items of an answer and, as it grows, the events that tell of them.

    Args:
        name: Of the response, in the items' ids.
    """

    def __init__(self, name: str):
        self.items: list[Json] = []
        self._name = name
        self._open: tuple[str, Json, list[str]] | None = None

    def take(self, delta: Json) -> list[Json]:
        """What a chat's delta adds."""
        events: list[Json] = []
        if text := delta.get("reasoning_content"):
            events += self._grow("reasoning", text)
        if text := delta.get("content"):
            events += self._grow("message", text)
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                events += self.close()
                function = call["function"]
                own = {"call_id": call["id"], "name": function["name"], "arguments": ""}
                events += self._begin("function_call", own)
            if arguments := call["function"]["arguments"]:
                events += self._grow("function_call", arguments)
        return events

    def close(self, status: str = "completed") -> list[Json]:
        """The events that end the item which grows."""
        if self._open is None:
            return []
        kind, item, pieces = self._open
        text, self._open, item["status"] = "".join(pieces), None, status
        place, events = self._place(), []
        if kind == "function_call":
            item["arguments"] = text
            done = {**place, "name": item["name"], "arguments": text}
            events.append({"type": "response.function_call_arguments.done", **done})
        else:
            part = item["content"][0]
            part["text"], place = text, {**place, "content_index": 0}
            more = {"logprobs": []} if kind == "message" else {}
            done = f"response.{part['type']}.done"
            events.append({"type": done, **place, "text": text, **more})
            events.append({"type": "response.content_part.done", **place, "part": part})
        events.append({"type": "response.output_item.done", **self._index(), "item": item})
        return events

    def _begin(self, kind: str, fields: Json) -> list[Json]:
        prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc"}[kind]
        name = f"{prefix}_{self._name}_{len(self.items)}"
        item: Json = {"id": name, "type": kind, "status": "in_progress", **fields}
        self.items.append(item)
        self._open = kind, item, []
        told = item if kind == "function_call" else {**item, "content": []}
        events = [{"type": "response.output_item.added", **self._index(), "item": dict(told)}]
        if kind != "function_call":
            place = {**self._place(), "content_index": 0}
            part = dict(item["content"][0])
            events.append({"type": "response.content_part.added", **place, "part": part})
        return events

    def _grow(self, kind: str, text: str) -> list[Json]:
        events: list[Json] = []
        if self._open is None or self._open[0] != kind:
            events += self.close()
            if kind == "message":
                part = {"type": "output_text", "text": "", "annotations": []}
                events += self._begin(kind, {"role": "assistant", "content": [part]})
            else:
                part = {"type": "reasoning_text", "text": ""}
                events += self._begin(kind, {"summary": [], "content": [part]})
        _, item, pieces = cast(tuple[str, Json, list[str]], self._open)
        pieces.append(text)
        if kind == "function_call":
            what, more = "response.function_call_arguments.delta", {}
        else:
            what = f"response.{item['content'][0]['type']}.delta"
            more = {"content_index": 0} | ({"logprobs": []} if kind == "message" else {})
        return [*events, {"type": what, **self._place(), **more, "delta": text}]

    def _index(self) -> Json:
        return {"output_index": len(self.items) - 1}

    def _place(self) -> Json:
        return {"item_id": self.items[-1]["id"], **self._index()}


class Responding(Chat):
    """One request of `/v1/responses`."""

    def __init__(self, serving: Any, asked: ResponsesRequest, *about: Any):
        super().__init__(serving, asked.chat, *about)
        self._body_asked = asked
        self._output = Output(self._head["id"].removeprefix("resp_"))
        self._reason: str | None = None
        self._num_events = 0
        self._num_thought = 0  # tokens that told of nothing but reasoning

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
        events: list[Json] = []
        if not self._num_events:
            told = self._response("in_progress", None)
            begun = ("response.created", "response.in_progress")
            events += [{"type": kind, "response": told} for kind in begun]
        for each in news:
            for place, delta in self._take(each):
                events += self._grown(place, delta)
        return b"".join(map(self._named, events))

    def _last_events(self) -> bytes:
        status = self._status()
        told = self._response(status, self._used())
        return self._named({"type": f"response.{status}", "response": told})

    def _read(self, place: int, delta: TextDelta) -> None:
        self._grown(place, delta)  # the items tell, not the events

    def _body(self, answers: list[list[TextDelta]]) -> Callable[[Encode], bytes]:
        told = self._response(self._status(), self._used())
        return lambda encode: encode(told)

    def _grown(self, place: int, delta: TextDelta) -> list[Json]:
        events: list[Json] = []
        parts = self._parts_of(place).deltas(delta.text, is_last=delta.finished)
        for part in parts:
            events += self._output.take(part)
        if parts and all("reasoning_content" in part for part in parts):
            self._num_thought += len(delta.token_ids)
        if delta.finished:
            self._reason = delta.finish_reason
            complete = delta.finish_reason == "stop"
            events += self._output.close("completed" if complete else "incomplete")
        return events

    def _named(self, event: Json) -> bytes:
        told = {**event, "sequence_number": self._num_events}
        self._num_events += 1
        return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), json_bytes(told))

    def _status(self) -> str:
        known = {"stop": "completed", "length": "incomplete"}
        return known.get(self._reason or "", "failed")

    def _used(self) -> Json:
        usage = self._usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {
                "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
                "cache_write_tokens": 0,
            },
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._num_thought},
            "total_tokens": usage["total_tokens"],
        }

    def _response(self, status: str, usage: Json | None) -> Json:
        asked, error, details = self._body_asked, None, None
        if status == "incomplete":
            details = {"reason": "max_output_tokens"}
        elif status == "failed":
            message = "the answer was cut short: its time was over, or it failed"
            error = {"code": "server_error", "message": message}
        form = asked.text.format if asked.text is not None else None
        return {
            "id": self._head["id"],
            "object": "response",
            "created_at": self._head["created"],
            "status": status,
            "error": error,
            "incomplete_details": details,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata or {},
            "model": self._head["model"],
            "output": list(self._output.items),
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
