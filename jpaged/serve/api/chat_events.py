"""Chat events. The Chat, Responses and Messages APIs render them in different formats.

An answer is a sequence of items: reasoning, content and tool calls. Each item has a start event,
text events and an end event. `AnswerEvents` makes the events from the engine's deltas of an answer.
"""

from dataclasses import dataclass, field
from typing import Literal

from jpaged import AnswerParser, CallArguments, CallStart, Content, Reasoning, TextDelta

ItemKind = Literal["reasoning", "content", "tool_call"]


@dataclass(eq=False, slots=True)
class AnswerItem:
    """One item of an answer: reasoning, content or a tool call.

    Attributes:
        kind: The kind of the item.
        index: Position of the item in the answer.
        call: Index, id and function name of a tool call. None for other kinds.
        is_complete: Whether all of the item has been generated. The last item stays incomplete if
            the answer reached its token limit, or if the engine aborted the request.
        chunks: Parts of the text, or of a tool call's arguments as JSON text. Empty if
            `AnswerEvents` does not keep text.
    """

    kind: ItemKind
    index: int
    call: CallStart | None = None
    is_complete: bool = False
    chunks: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The text of the item: all of `chunks`, joined."""
        return "".join(self.chunks)


ChatEvent = tuple[Literal["start", "text", "end"], AnswerItem, str]
"""An event: its kind, the item, and the new text. The text is empty unless the kind is "text".

For a tool call, the text is a part of the arguments. An item ends when the next item starts or the
answer ends. Events are plain tuples for speed, because every token creates one.
"""


class AnswerEvents:
    """Makes the chat events of one answer.

    Args:
        parser: Splits the text into reasoning, content and tool calls. None: all text is content.
        keeps_text: Whether items keep their text in `chunks`.

    Attributes:
        items: All items so far.
        finish_reason: OpenAI's finish reason, such as "tool_calls". None until the answer ends.
        stop_string: The stop string that ended the answer. None if no stop string ended it.
        num_reasoning_tokens: Number of tokens in deltas that contain only reasoning.
    """

    def __init__(self, parser: AnswerParser | None, *, keeps_text: bool):
        self._parser, self._keeps_text = parser, keeps_text
        self.items: list[AnswerItem] = []
        self.finish_reason: str | None = None
        self.stop_string: str | None = None
        self.num_reasoning_tokens = 0
        self._events: list[ChatEvent] = []

    def add(self, delta: TextDelta) -> list[ChatEvent]:
        """Return the chat events of the answer's next delta."""
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
        # Reasoning comes first in an answer. So if the last part is reasoning, all parts are
        # reasoning.
        if parts and isinstance(parts[-1], Reasoning):
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
