"""One stream of chat events, which Chat, Responses and Messages render in their own formats.

An answer is a sequence of items: reasoning, content and tool calls. An item starts, grows by text
and ends. `AnswerEvents` makes these events from the engine's deltas of one answer, and
`ChatGeneration` holds what the three APIs have in common.
"""

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple

from jpaged import (
    AnswerParser,
    CallArguments,
    CallStart,
    Content,
    GrammarTrial,
    Reasoning,
    StructuredOutputs,
    TextDelta,
    reasoning_end,
)
from jpaged.serve.api.fields import ChatRequest
from jpaged.serve.api.generation import Generation
from jpaged.serve.api.response_format import form_of_calls
from jpaged.serve.engine.client import News
from jpaged.serve.engine.messages import EngineRequest
from jpaged.serve.engine.tokenizing_process import Order
from jpaged.serve.errors import ApiError

Kind = Literal["reasoning", "content", "tool_call"]


@dataclass(eq=False, slots=True)
class Item:
    """One part of an answer.

    Attributes:
        kind: The kind of part.
        index: Position among the answer's items.
        call: The number, id and function name of a tool call; None for another kind.
        is_complete: Whether the item ended by itself. If the answer was cut, its last item did not.
        pieces: The text so far, or a tool call's arguments as JSON text; empty if not kept.
    """

    kind: Kind
    index: int
    call: CallStart | None = None
    is_complete: bool = False
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The pieces joined."""
        return "".join(self.pieces)


class Event(NamedTuple):
    """What happens to an item: it starts, grows by `text`, or ends because another one starts or
    the answer is over. The text of a tool call is a part of its arguments."""

    what: Literal["start", "text", "end"]
    item: Item
    text: str = ""


class AnswerEvents:
    """Makes the events of one answer.

    Args:
        parser: Splits the text into reasoning, content and tool calls; None: all text is content.
        keeps_text: Whether items keep their text.

    Attributes:
        items: All items so far.
        finish_reason: OpenAI's reason why the answer is over, "tool_calls" included; None before.
        stop_string: The stop string that ended the answer; None for another reason.
        num_reasoning_tokens: Tokens of deltas that had reasoning and nothing else.
    """

    def __init__(self, parser: AnswerParser | None, *, keeps_text: bool):
        self._parser, self._keeps_text = parser, keeps_text
        self.items: list[Item] = []
        self.finish_reason: str | None = None
        self.stop_string: str | None = None
        self.num_reasoning_tokens = 0
        self._events: list[Event] = []

    def add(self, delta: TextDelta) -> list[Event]:
        """Return the events of the answer's next delta."""
        if self._parser is None:
            if delta.text:
                self._grow("content", delta.text)
        else:
            self._parse(self._parser, delta)
        if delta.finished:
            self._finish(delta)
        events, self._events = self._events, []
        return events

    def _parse(self, parser: AnswerParser, delta: TextDelta) -> None:
        parts = parser.feed(delta.text)
        parts += parser.end() if delta.finished else []
        for part in parts:
            match part:
                case Content():
                    self._grow("content", part.text)
                case Reasoning():
                    self._grow("reasoning", part.text)
                case CallStart():
                    self._start("tool_call", part)
                case CallArguments():
                    self._grow("tool_call", part.text)
        if parts and all(isinstance(part, Reasoning) for part in parts):
            self.num_reasoning_tokens += len(delta.token_ids)

    def _finish(self, delta: TextDelta) -> None:
        stopped = delta.finish_reason == "stop"
        self._end(is_complete=stopped)
        self.finish_reason = delta.finish_reason
        if stopped and any(item.call for item in self.items):
            self.finish_reason = "tool_calls"
        if stopped and isinstance(delta.stop_reason, str):
            self.stop_string = delta.stop_reason

    def _grow(self, kind: Kind, text: str) -> None:
        item = self.items[-1] if self.items else None
        if item is None or item.kind != kind:
            item = self._start(kind)
        if self._keeps_text:
            item.pieces.append(text)
        self._events.append(Event("text", item, text))

    def _start(self, kind: Kind, call: CallStart | None = None) -> Item:
        self._end(is_complete=True)
        item = Item(kind, len(self.items), call)
        self.items.append(item)
        self._events.append(Event("start", item))
        return item

    def _end(self, *, is_complete: bool) -> None:
        if self.items:
            self.items[-1].is_complete = is_complete
            self._events.append(Event("end", self.items[-1]))


class ChatGeneration(Generation):
    """A generation that answers a conversation. Subclasses render its events."""

    keeps_streamed_text = False
    """Whether a stream needs the text of items again after it has sent that text."""

    _asked: ChatRequest

    def __init__(self, *about: Any):
        super().__init__(*about)
        config, tools = self._serving.config, self._asked.offered_tools
        self._has_reasoning = config.reasoning_parser is not None
        self._is_parsed = self._has_reasoning or bool(tools)
        self._answers: dict[int, AnswerEvents] = {}  # by the answer's number

    async def _requests(self) -> list[EngineRequest]:
        asked = self._asked
        # The tags of reasoning and calls may be special tokens.
        others = {"skip_special_tokens": False} if self._is_parsed else {}
        params = asked.sampling_params(asked.longest, logprobs=asked.num_logprobs, **others)
        order = Order(messages=asked.conversation, options=asked.template_options)
        keep = asked.truncate_prompt_tokens
        ids = await self._texts.prompt_ids(order, "messages", asked.longest, keep)
        form = await self._form(self._texts.text_end(ids))
        return [self._request(0, ids, replace(params, structured_outputs=form))]

    @property
    def _holds_calls(self) -> bool:
        """Whether a grammar constrains the calls of the answer."""
        return self._asked.holds_calls and self._serving.config.tool_call_parser is not None

    @property
    def _form_path(self) -> str:
        return "tools" if self._holds_calls else self._asked.form_path

    async def _form(self, prompt_end: str) -> StructuredOutputs | None:
        """Return the structured-output specification of what follows the reasoning."""
        asked, config = self._asked, self._serving.config
        form = asked.form
        if self._holds_calls and config.tool_call_parser is not None:
            make = partial(
                form_of_calls,
                config.tool_call_parser,
                asked.offered_tools,
                asked.tool_choice,
                form,
                parallel=asked.parallel_tool_calls,
                special_ids=self._texts.special_ids,
            )
            form = await self._serving.in_thread(make)
            await self._check_calls(form)
        elif form is not None:
            await self._texts.check_form(form, asked.form_path, self._client)
        if form is not None and config.reasoning_parser is not None:
            form = form.behind(*reasoning_end(config.reasoning_parser, prompt_end))
        return form

    async def _check_calls(self, form: StructuredOutputs) -> None:
        """Raise ApiError unless the grammar of an answer with calls compiles. If a single schema
        does not compile either, and that shows in time, the error names the schema."""
        try:
            await self._texts.check_form(form, "tools", self._client)
        except ApiError as error:
            if error.status != 400:
                raise
            with suppress(TimeoutError):
                async with asyncio.timeout(GrammarTrial.seconds):
                    for path, own in self._asked.forms_within():
                        await self._texts.check_form(own, path, self._client)
            raise

    def _answer(self, number: int) -> AnswerEvents:
        """Return what makes the events of an answer."""
        found = self._answers.get(number)
        if found is None:
            asked, config, parser = self._asked, self._serving.config, None
            if self._is_parsed:
                parser = AnswerParser(
                    reasoning=config.reasoning_parser,
                    tool_calls=config.tool_call_parser if asked.offered_tools else None,
                    tools=[tool.told for tool in asked.offered_tools],
                    prompt_end=self._texts.text_end(self._prompts[0]),
                    parallel=asked.parallel_tool_calls,
                )
            keeps_text = self.keeps_streamed_text or not asked.stream
            found = self._answers[number] = AnswerEvents(parser, keeps_text=keeps_text)
        return found

    def _read(self, number: int, delta: TextDelta) -> None:
        self._answer(number).add(delta)

    def _chat_events(self, news: list[News]) -> list[Event]:
        """Return the events of the engine's news."""
        grown = [each for update in news for each in self._take(update)]
        return [event for number, delta in grown for event in self._answer(number).add(delta)]
