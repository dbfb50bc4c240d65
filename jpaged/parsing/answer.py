"""An answer's reasoning, content and tool calls, as events while the model writes it."""

from collections.abc import Sequence

from jpaged.parsing.reasoning import ReasoningParser
from jpaged.parsing.stream import Content, ParserEvent
from jpaged.parsing.tool_calls import ToolCallParser, ToolDefinition
from jpaged.parsing.tool_families import load_family


class AnswerParser:
    """Take one answer's text in pieces, and return the events of each piece.

    How the text is cut into pieces changes neither the parts nor their text. Each event adds to a
    part. Up to `MAX_BUFFERED_CHARACTERS` characters are held until it is known whether they are a tag or a call.

    Args:
        reasoning: One of `REASONING_FAMILIES`. None: the answer has no reasoning.
        tool_calls: One of `TOOL_CALL_FAMILIES`. None: the answer has no calls.
        tools: The tools in the prompt, in OpenAI's format.
        prompt_end: The end of the prompt's text, where the reasoning may begin.
        parallel: Whether calls after the first one are emitted; otherwise they are dropped.
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
        """Return the events of more text."""
        if self._reasoning_parser is None:
            return self._split_calls([Content(text)] if text else [])
        return self._split_calls(self._reasoning_parser.feed(text))

    def end(self) -> list[ParserEvent]:
        """Return the last events, those of held text. Feed nothing afterwards."""
        events = self._split_calls(
            [] if self._reasoning_parser is None else self._reasoning_parser.end()
        )
        return events + (
            [] if self._call_parser is None else self._drop_extra_calls(self._call_parser.end())
        )

    def _split_calls(self, events: list[ParserEvent]) -> list[ParserEvent]:
        """Replace content by the calls and the content in it."""
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
        """Drop the events of calls after the first one, unless calls are parallel."""
        return [it for it in events if self._parallel or getattr(it, "index", 0) == 0]
