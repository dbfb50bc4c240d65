"""One stream of chat events, which Chat, Responses and Messages render in their own formats.

An answer is a sequence of items: reasoning, content and tool calls. An item starts, grows by text
and ends. `AnswerEvents` makes these events from the engine's deltas of one answer.
"""

from dataclasses import dataclass, field
from typing import Literal

from jpaged import AnswerParser, CallArguments, CallStart, Content, Reasoning, TextDelta

ItemKind = Literal["reasoning", "content", "tool_call"]


@dataclass(eq=False, slots=True)
class AnswerItem:
    """One part of an answer.

    Attributes:
        kind: The kind of part.
        index: Position among the answer's items.
        call: The number, id and function name of a tool call; None for another kind.
        is_complete: Whether the item ended by itself. If the answer was cut, its last item did not.
        pieces: The text so far, or a tool call's arguments as JSON text; empty if not kept.
    """

    kind: ItemKind
    index: int
    call: CallStart | None = None
    is_complete: bool = False
    chunks: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The pieces joined."""
        return "".join(self.chunks)


ChatEvent = tuple[Literal["start", "text", "end"], AnswerItem, str]
"""The kind of event, the item, and the new text, which is empty unless the kind is "text".

The text of a tool call is a part of its arguments. An item ends when the next item starts or the
answer ends. Events are plain tuples because every token creates one.
"""


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
        self.items: list[AnswerItem] = []
        self.finish_reason: str | None = None
        self.stop_string: str | None = None
        self.num_reasoning_tokens = 0
        self._events: list[ChatEvent] = []

    def add(self, delta: TextDelta) -> list[ChatEvent]:
        """Return the events of the answer's next delta."""
        if self._parser is None:
            if delta.text:
                self._add_text("content", delta.text)
        else:
            self._parse_delta(self._parser, delta)
        if delta.finished:
            self._finish(delta)
        events, self._events = self._events, []
        return events

    def _parse_delta(self, parser: AnswerParser, delta: TextDelta) -> None:
        parts = parser.feed(delta.text)
        parts += parser.end() if delta.finished else []
        for part in parts:
            match part:
                case Content():
                    self._add_text("content", part.text)
                case Reasoning():
                    self._add_text("reasoning", part.text)
                case CallStart():
                    self._start_item("tool_call", part)
                case CallArguments():
                    self._add_text("tool_call", part.text)
        if parts and isinstance(parts[-1], Reasoning):  # nothing precedes reasoning
            self.num_reasoning_tokens += len(delta.token_ids)

    def _finish(self, delta: TextDelta) -> None:
        stopped = delta.finish_reason == "stop"
        self._end_item(is_complete=stopped)
        self.finish_reason = delta.finish_reason
        if stopped and any(item.call for item in self.items):
            self.finish_reason = "tool_calls"
        if stopped and isinstance(delta.stop_reason, str):
            self.stop_string = delta.stop_reason

    def _add_text(self, kind: ItemKind, text: str) -> None:
        item = self.items[-1] if self.items else None
        if item is None or item.kind != kind:
            item = self._start_item(kind)
        if self._keeps_text:
            item.chunks.append(text)
        self._events.append(("text", item, text))

    def _start_item(self, kind: ItemKind, call: CallStart | None = None) -> AnswerItem:
        self._end_item(is_complete=True)
        item = AnswerItem(kind, len(self.items), call)
        self.items.append(item)
        self._events.append(("start", item, ""))
        return item

    def _end_item(self, *, is_complete: bool) -> None:
        if self.items:
            self.items[-1].is_complete = is_complete
            self._events.append(("end", self.items[-1], ""))
