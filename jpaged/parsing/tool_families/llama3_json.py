"""Tool calls of Llama 3.1, 3.2 and 3.3: JSON objects, optionally after <|python_tag|>.

Without the tag, the JSON objects must be at the start of the answer.

    {"name": "f", "parameters": {...}}; {...}
"""

from collections.abc import Iterator

from jpaged.parsing.stream import ParserCoroutine
from jpaged.parsing.tool_calls import ToolCallParser
from jpaged.parsing.tool_grammar import CallGrammar, literal

_PYTHON_TAG = "<|python_tag|>"
_CALL_KEYS = frozenset({"name", "parameters", "arguments", "type", "id"})


class Parser(ToolCallParser):
    """Parser of calls that are JSON objects, separated by semicolons or whitespace."""

    opening_tags = (_PYTHON_TAG,)

    def _parse_answer(self) -> ParserCoroutine[None]:
        yield from self._try_parse_calls()
        yield from super()._parse_answer()

    def _parse_calls(self) -> ParserCoroutine[None]:
        stream = self._stream
        yield from stream.take_literal(_PYTHON_TAG)
        while True:
            yield from stream.take_whitespace()
            yield from self._parse_json_call(_PYTHON_TAG, _CALL_KEYS)
            if not (yield from stream.take_literal(";")) and not (yield from stream.is_next("{")):
                return


class Grammar(CallGrammar):
    """Grammar of calls that are JSON objects at the start of the answer, separated by
    semicolons."""

    is_bare_json = True

    @property
    def _is_one_list(self) -> bool:
        return True

    def _call_rules(self) -> Iterator[str]:
        yield from self._sequence_rules("", literal("; "), "")
        yield from self._json_call_rules("", "parameters", "")
