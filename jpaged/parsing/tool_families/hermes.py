"""Tool calls of Qwen 2.5, Qwen 3, Hermes 2 and Hermes 3: a JSON object between tags.

<tool_call>{"name": "f", "arguments": {...}}</tool_call>
"""

from collections.abc import Iterator

from jpaged.parsing.stream import ParserCoroutine
from jpaged.parsing.tool_calls import ToolCallParser
from jpaged.parsing.tool_grammar import LINE_BREAK, CallGrammar

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class Parser(ToolCallParser):
    """Parser of calls that are JSON objects between <tool_call> and </tool_call>."""

    opening_tags = (_OPEN,)

    def _parse_calls(self) -> ParserCoroutine[None]:
        yield from self._stream.take_literal(_OPEN)
        yield from self._stream.take_whitespace()
        yield from self._parse_json_call(_CLOSE)
        yield from self._stream.take_literal(_CLOSE)


class Grammar(CallGrammar):
    """Grammar of calls that are JSON objects between <tool_call> and </tool_call>."""

    def _call_rules(self) -> Iterator[str]:
        yield from self._sequence_rules("", LINE_BREAK, "")
        opening = f"{self._opening_rule()} {LINE_BREAK}"
        closing = f"{LINE_BREAK} {self._tag_rule(_CLOSE)}"
        yield from self._json_call_rules(opening, "arguments", closing)
