"""A parser that splits an answer into reasoning, content and tool calls while the model generates
the answer."""

from collections.abc import Sequence

from jpaged.parsing.reasoning import ReasoningParser
from jpaged.parsing.stream import Content, ParserEvent
from jpaged.parsing.tool_calls import ToolCallParser, ToolDefinition
from jpaged.parsing.tool_families import load_family


class AnswerParser:
    """Parser that splits one answer into reasoning, content and tool calls.

    The caller feeds the answer in chunks, and gets events. An event begins, extends or ends a part
    of the answer: reasoning, content or a tool call. The sizes of the chunks do not change the
    parts. Text that may become a tag or a call is buffered, up to `MAX_BUFFERED_CHARACTERS`
    characters.

    Args:
        reasoning: One of `REASONING_FAMILIES`. None: the answer has no reasoning.
        tool_calls: One of `TOOL_CALL_FAMILIES`. None: the answer has no tool calls.
        tools: The tools in the prompt, in OpenAI's format.
        prompt_end: The last characters of the prompt's text. A chat template may end the prompt
            with the tag that opens the reasoning.
        parallel: Whether the result contains all calls. If False, the parser drops every call after
            the first one.
    """

    def __init__(
        self,
        *,
        reasoning: str | None = None,
        tool_calls: str | None = None,
        tools: Sequence[ToolDefinition] = (),
        prompt_end: str = "",
        parallel: bool = True,
    ):
        self._reasoning_parser = ReasoningParser(reasoning, prompt_end) if reasoning else None
        self._call_parser: ToolCallParser | None = None
        if tool_calls:
            self._call_parser = load_family(tool_calls).Parser(tools)
        self._parallel = parallel

    def feed(self, text: str) -> list[ParserEvent]:
        """Parse the next chunk of the answer, and return the new events."""
        if self._reasoning_parser is None:
            return self._split_calls([Content(text)] if text else [])
        return self._split_calls(self._reasoning_parser.feed(text))

    def end(self) -> list[ParserEvent]:
        """End the answer and return the events of the buffered text.

        Do not call `feed` afterwards.
        """
        events = self._split_calls(
            [] if self._reasoning_parser is None else self._reasoning_parser.end()
        )
        return events + (
            [] if self._call_parser is None else self._drop_extra_calls(self._call_parser.end())
        )

    def _split_calls(self, events: list[ParserEvent]) -> list[ParserEvent]:
        """Replace each content event by events for the tool calls and other content in its text."""
        if self._call_parser is None:
            return events
        found: list[ParserEvent] = []
        for event in events:
            is_content = isinstance(event, Content)
            found += (
                self._drop_extra_calls(self._call_parser.feed(event.text))
                if is_content
                else [event]
            )
        return found

    def _drop_extra_calls(self, events: list[ParserEvent]) -> list[ParserEvent]:
        """Drop the events of every call after the first one, unless `parallel` is true."""
        return [it for it in events if self._parallel or getattr(it, "index", 0) == 0]
