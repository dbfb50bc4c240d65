"""Tool calls of Mistral and Ministral: a tag, then a JSON list or a name and its arguments.

[TOOL_CALLS] [{"name": "f", "arguments": {...}}, ...]    tokenizers before 2025
[TOOL_CALLS]f{...}
[TOOL_CALLS]f[ARGS]{...}
[TOOL_CALLS]f[CALL_ID]a1b2c3d4e[ARGS]{...}
"""

import re
from collections.abc import Iterator

from jpaged.parsing.stream import ParserCoroutine, UnexpectedTextError
from jpaged.parsing.tool_calls import MAX_NAME_LENGTH, ToolCallParser, validate_name
from jpaged.parsing.tool_grammar import CallGrammar, literal

_TOOL_CALLS, _CALL_ID, _ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_NAME_PATTERN = re.compile(r"[^\s\[\]{}\"<>]+")
_ID_PATTERN = re.compile(r"[A-Za-z0-9]+")


class Parser(ToolCallParser):
    """Parser of the calls after each tag [TOOL_CALLS]: a JSON list of calls, or a single call."""

    opening_tags = (_TOOL_CALLS,)
    id_prefix = ""
    id_size = 9  # the chat templates of these models accept only call ids of this size

    def _parse_calls(self) -> ParserCoroutine[None]:
        yield from self._stream.take_literal(_TOOL_CALLS)
        if (yield from self._stream.take_literal("[")):
            yield from self._parse_list()
        else:
            yield from self._parse_call()

    def _parse_list(self) -> ParserCoroutine[None]:
        stream = self._stream
        while True:
            yield from stream.take_whitespace()
            yield from self._parse_json_call(_TOOL_CALLS)
            if not (yield from stream.take_literal(",")):
                break
        if not (yield from stream.take_literal("]")):
            raise UnexpectedTextError

    def _parse_call(self) -> ParserCoroutine[None]:
        stream, call_id = self._stream, ""
        yield from stream.take_whitespace()
        name = validate_name((yield from stream.take_matching(_NAME_PATTERN, MAX_NAME_LENGTH + 1)))
        if (yield from stream.take_literal(_CALL_ID)):
            call_id = yield from stream.take_matching(_ID_PATTERN, MAX_NAME_LENGTH)
            call_id = call_id if len(call_id) == self.id_size else ""
        yield from stream.take_literal(_ARGS)
        yield from stream.take_whitespace()
        if (yield from stream.peek()) != "{":
            raise UnexpectedTextError
        yield from self._parse_arguments(name, _TOOL_CALLS, call_id)


class Grammar(CallGrammar):
    """Grammar of calls after [TOOL_CALLS].

    The grammar uses the newer format if the tokenizer has [ARGS], and a JSON list otherwise.
    """

    @property
    def _is_one_list(self) -> bool:
        return not self._is_special(_ARGS)

    def _call_rules(self) -> Iterator[str]:
        tag = self._opening_rule()
        if self._is_one_list:
            opening = f"{tag} {literal('[')}"
            yield from self._sequence_rules(opening, literal(", "), literal("]"))
            yield from self._json_call_rules("", "arguments", "")
            return
        yield from self._sequence_rules("", "", "")
        for i, (_, function) in enumerate(self.functions):
            head = f"{tag} {literal(function['name'])} {self._tag_rule(_ARGS)}"
            yield f"call_{i}: {head} arguments_{i}"
            yield f"arguments_{i}: {self._arguments_rule(function)}"
