"""Tool calls of Mistral and Ministral: a tag, then a JSON list or a name and its arguments.

[TOOL_CALLS] [{"name": "f", "arguments": {...}}, ...]    tokenizers before 2025
[TOOL_CALLS]f{...}
[TOOL_CALLS]f[ARGS]{...}
[TOOL_CALLS]f[CALL_ID]a1b2c3d4e[ARGS]{...}
"""

import re
from collections.abc import Iterator

from jpaged.parsing.stream import Steps, UnexpectedTextError
from jpaged.parsing.tool_calls import LONGEST_NAME, ToolCallParser, checked_name
from jpaged.parsing.tool_grammar import CallGrammar, literal

_TOOL_CALLS, _CALL_ID, _ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_NAME = re.compile(r"[^\s\[\]{}\"<>]+")
_ID = re.compile(r"[A-Za-z0-9]+")


class Parser(ToolCallParser):
    """Parse the list of calls, or the one call, after each tag."""

    opening_tags = (_TOOL_CALLS,)
    id_prefix = ""
    id_size = 9  # the models' chat templates accept no other size

    def _calls(self) -> Steps[None]:
        yield from self._stream.literal(_TOOL_CALLS)
        if (yield from self._stream.literal("[")):
            yield from self._list()
        else:
            yield from self._call()

    def _list(self) -> Steps[None]:
        stream = self._stream
        while True:
            yield from stream.spaces()
            yield from self._json_call(_TOOL_CALLS)
            if not (yield from stream.literal(",")):
                break
        if not (yield from stream.literal("]")):
            raise UnexpectedTextError

    def _call(self) -> Steps[None]:
        stream, call_id = self._stream, ""
        yield from stream.spaces()
        name = checked_name((yield from stream.run(_NAME, LONGEST_NAME + 1)))
        if (yield from stream.literal(_CALL_ID)):
            call_id = yield from stream.run(_ID, LONGEST_NAME)
            call_id = call_id if len(call_id) == self.id_size else ""
        yield from stream.literal(_ARGS)
        yield from stream.spaces()
        if (yield from stream.peek()) != "{":
            raise UnexpectedTextError
        yield from self._call_with_arguments(name, _TOOL_CALLS, call_id)


class Grammar(CallGrammar):
    """Generate one list of calls, or the newer format where the tokenizer has [ARGS]."""

    @property
    def _is_one_list(self) -> bool:
        return not self._is_special(_ARGS)

    def _call_rules(self) -> Iterator[str]:
        tag = self._opening()
        if self._is_one_list:
            opening = f"{tag} {literal('[')}"
            yield from self._sequence_rules(opening, literal(", "), literal("]"))
            yield from self._json_call_rules("", "arguments", "")
            return
        yield from self._sequence_rules("", "", "")
        for i, (_, function) in enumerate(self.functions):
            head = f"{tag} {literal(function['name'])} {self._tag(_ARGS)}"
            yield f"call_{i}: {head} arguments_{i}"
            yield f"arguments_{i}: {self._arguments(function)}"
