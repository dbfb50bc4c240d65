"""What an answer's text consists of: reasoning, content and tool calls, told as they come."""

from collections.abc import Sequence

from jpaged.parsing.reasoning import ReasoningParser
from jpaged.parsing.stream import CallArguments, CallEnd, CallStart, Content, Event
from jpaged.parsing.tool_calls import Tool, ToolCallParser
from jpaged.parsing.tool_families import load_family


class AnswerParser:
    """Takes one answer's text in pieces and gives what is new of its parts.

    Where the text is cut has no effect on the parts, nor how often; of a part each event has more.
    Of what may be a tag or a call up to `MAX_HELD` characters are held until that is known.

    Args:
        reasoning: One of `REASONING_FAMILIES`; None: the answer has no reasoning.
        tool_calls: One of `TOOL_CALL_FAMILIES`; None: the answer has no calls.
        tools: Those that the model was told of, as OpenAI writes them.
        prompt_end: The end of the prompt's text, which may have opened the reasoning.
        parallel: Whether calls after the first are told of; else they are dropped.
    """

    def __init__(
        self,
        *,
        reasoning: str | None = None,
        tool_calls: str | None = None,
        tools: Sequence[Tool] = (),
        prompt_end: str = "",
        parallel: bool = True,
    ):
        self._reasoning = ReasoningParser(reasoning, prompt_end) if reasoning else None
        self._calls: ToolCallParser | None = None
        if tool_calls:
            self._calls = load_family(tool_calls).Parser(tools)
        self._parallel = parallel

    def feed(self, text: str) -> list[Event]:
        """What more of the text tells."""
        if self._reasoning is None:
            return self._with_calls([Content(text)] if text else [])
        return self._with_calls(self._reasoning.feed(text))

    def end(self) -> list[Event]:
        """What is left when no more text comes; nothing may be fed after it."""
        found = self._with_calls([] if self._reasoning is None else self._reasoning.end())
        return found + ([] if self._calls is None else self._wanted(self._calls.end()))

    def _with_calls(self, found: list[Event]) -> list[Event]:
        """The events, with calls where their content has some."""
        if self._calls is None:
            return found
        events: list[Event] = []
        for event in found:
            is_content = isinstance(event, Content)
            events += self._wanted(self._calls.feed(event.text)) if is_content else [event]
        return events

    def _wanted(self, events: list[Event]) -> list[Event]:
        if self._parallel:
            return events
        of_calls = (CallStart, CallArguments, CallEnd)
        return [it for it in events if not isinstance(it, of_calls) or it.index == 0]
