"""Tool calls of Qwen3-Coder and Qwen 3.5: a tag for the function and one for each parameter.

    <tool_call><function=f><parameter=key>value</parameter></function></tool_call>

The outer tags may be missing. Values have no quotes. A value is JSON of a type that the tool's
schema gives the parameter, or a string if the value has none of these types. One line break on
either side of it belongs to the tags.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jpaged.errors import ErrorKind, RequestError
from jpaged.parsing.stream import MAX_HELD, Steps, TextStream, UnexpectedTextError
from jpaged.parsing.tool_calls import LONGEST_NAME, ToolCallParser, checked_name
from jpaged.parsing.tool_grammar import LINE_BREAK, CallGrammar, json_rule, literal, parameters_of
from jpaged.structured_outputs.schemas import ANNOTATIONS, target_of

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION, _END_FUNCTION = "<function=", "</function>"
_PARAMETER, _END_PARAMETER = "<parameter=", "</parameter>"
_NAME = re.compile(r"[^<>\n]+")
_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]{0,399})")

_TYPE_OF = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    type(None): "null",
    dict: "object",
    list: "array",
}
_JSON_TYPES, _STRING = frozenset(_TYPE_OF.values()), frozenset({"string"})
_MAX_REFERENCES = 8

_DEFINITIONS = ("$defs", "definitions")
_NOT_ENFORCED = {"patternProperties", "$ref", "allOf", "anyOf", "oneOf"}
_NOT_ENFORCED |= {"minProperties", "maxProperties"}
_LEAST_SIZE = 64
"""Minimum number of characters of a parameter's rules."""


class Parser(ToolCallParser):
    """Parse the tags, and make JSON of the values."""

    opening_tags = (_OPEN, _FUNCTION)

    def _calls(self) -> Steps[None]:
        stream = self._stream
        yield from stream.literal(_OPEN)
        if not (yield from stream.literal(_FUNCTION)):
            raise UnexpectedTextError
        name = checked_name((yield from stream.run(_NAME, LONGEST_NAME + 1)))
        yield from stream.expect(">")
        self._begin_call(name)
        try:
            yield from self._parameters(name)
        finally:
            self._end_call()
        yield from stream.literal(_END_FUNCTION)
        yield from stream.literal(_CLOSE)

    def _parameters(self, function: str) -> Steps[None]:
        """Emit the arguments as JSON, without the last brace if the answer ends here."""
        stream, before = self._stream, "{"
        while (yield from stream.literal(_PARAMETER)):
            key = yield from stream.run(_NAME, LONGEST_NAME)
            yield from stream.expect(">")
            stream.release()
            self._emit_arguments(f"{before}{_quoted(key)}: ")
            yield from self._value(self._types(function, key))
            before = ", "
        if before == "{":
            self._emit_arguments("{")
        if not (yield from stream.is_over()):
            self._emit_arguments("}")

    def _value(self, types: frozenset[str]) -> Steps[None]:
        """Emit a value. Its closing tag is followed by another tag or the end of the answer; any
        other </parameter> is part of the value."""
        stream, value = self._stream, _Value(self._emit_arguments, types)
        if (yield from stream.peek()) == "\n":
            yield from stream.expect("\n")
        while True:
            stream.release()
            stream.sink = value.add
            is_tag = yield from stream.text_until(_END_PARAMETER, blank=0)
            stream.sink = None
            if not is_tag:
                value.break_off(stream.rest())
                raise UnexpectedTextError
            yield from stream.literal(_END_PARAMETER)
            tags = (_PARAMETER, _END_FUNCTION, _CLOSE)
            if (yield from stream.leads_to(*tags)) or (yield from stream.is_over()):
                stream.release()
                value.end()
                return
            value.add(stream.release())

    def _types(self, function: str, parameter: str) -> frozenset[str]:
        """Return the names of a parameter's JSON types: string if there is no such parameter."""
        schema = self._schemas.get(function, {})
        properties = schema.get("properties")
        if not isinstance(properties, Mapping) or parameter not in properties:
            return _STRING
        return _types_in(properties[parameter], schema)


class _Value:
    """Convert a value to JSON while it is read.

    A string is emitted as it is read. A value that may have another type is held until it ends, or
    has more than `MAX_HELD` characters, which makes it a string.

    Args:
        emit: Takes the JSON text.
        types: The names of the JSON types that the value may have.
    """

    def __init__(self, emit: Callable[[str], None], types: frozenset[str]):
        self._emit, self._types = emit, types
        self._max_held = 0 if types <= _STRING else MAX_HELD
        self._held: list[str] = []
        self._num_characters = 0
        self._is_string = False
        self._line_break = ""  # held, because the last one belongs to the tag

    def add(self, text: str) -> None:
        text = self._line_break + text
        self._line_break = "\n" if text.endswith("\n") else ""
        self._put(text.removesuffix("\n"))

    def end(self) -> None:
        self._emit('"' if self._is_string else json_of("".join(self._held), self._types))

    def break_off(self, text: str) -> None:
        """End the value, with `text` as its last part, where the answer ends without a tag."""
        self.add(text)
        self._put(self._line_break)
        self._emit("".join(self._held))

    def _put(self, text: str) -> None:
        if not text:
            return
        self._num_characters += len(text)
        self._held.append(text)
        if self._num_characters > self._max_held:
            text = _quoted("".join(self._held))[1:-1]
            self._emit(text if self._is_string else f'"{text}')
            self._held.clear()
            self._is_string = True


def json_of(text: str, types: frozenset[str]) -> str:
    """Return `text` as a JSON value of one of `types`; if it fits none, as a JSON string."""
    bare = text.strip()
    word = bare.lower()
    if word in ("null", "none") and ("null" in types or "string" not in types):
        return "null"
    if word in ("true", "false") and "boolean" in types:
        return word
    if "integer" in types and _INTEGER.fullmatch(bare):
        return bare
    kind = {"{": "object", "[": "array"}.get(bare[:1], "number")
    if kind in types and bare[:1] not in ('"', "t", "f", "n") and _is_json(bare):
        return bare
    return _quoted(text)


def _is_json(text: str) -> bool:
    stream = TextStream()
    stream.sink = lambda piece: None
    stream.ended = True
    stream.add(text)
    try:
        for _ in stream.json_value():
            pass
    except UnexpectedTextError:
        return False
    return not stream.rest()


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _types_in(
    schema: Any, whole: Mapping[str, Any], num_references: int = _MAX_REFERENCES
) -> frozenset[str]:
    """Return the names of the JSON types that a schema within `whole` allows.

    Only `type`, `enum`, `const`, `anyOf`, `oneOf` and up to `num_references` references are read;
    a schema without them allows all types.
    """
    if not isinstance(schema, Mapping) or not num_references:
        return _JSON_TYPES
    if isinstance(reference := schema.get("$ref"), str):
        target: Any = whole
        for name in reference.removeprefix("#/").split("/"):
            target = target.get(name) if isinstance(target, Mapping) else None
        return _types_in(target, whole, num_references - 1)
    if (named := schema.get("type")) is not None:
        names = named if isinstance(named, list) else [named]
        return _JSON_TYPES & {name for name in names if isinstance(name, str)} or _JSON_TYPES
    values = schema["enum"] if isinstance(schema.get("enum"), list) else []
    values = [schema["const"]] if "const" in schema else values
    if values:
        return frozenset(_TYPE_OF.get(type(value), "string") for value in values)
    for key in ("anyOf", "oneOf"):
        if isinstance(cases := schema.get(key), list) and cases:
            found = (_types_in(case, whole, num_references - 1) for case in cases)
            return frozenset[str]().union(*found)
    return _JSON_TYPES


class Grammar(CallGrammar):
    """Generate a tag for each parameter, in the order of the schema."""

    def _least_size(self, schema: Any, num_characters: int) -> int:
        properties = schema.get("properties") if isinstance(schema, dict) else None
        return _LEAST_SIZE * len(properties) if isinstance(properties, dict) else 0

    def _call_rules(self) -> Iterator[str]:
        yield from self._sequence_rules("", LINE_BREAK, "")
        opening, closing = self._opening(), self._tag(_CLOSE)
        for i, (path, function) in enumerate(self.functions):
            head = literal(f"\n{_FUNCTION}{function['name']}>\n")
            if not self._is_enforced(function):
                yield f"call_{i}: {opening} {head} rest_{i} {closing}"
                yield f'rest_{i}[suffix="</function>\\n"]: /(?s:.*)/'
                continue
            schema = parameters_of(function)
            _check_names(path, schema)
            body, required = [head], schema.get("required", ())
            for j, (key, value) in enumerate(schema.get("properties", {}).items()):
                if not key or set(key) & set("<>\n"):
                    problem = f"has {key!r}, which no tag can have"
                    raise RequestError(f"{path}.properties", problem, kind=ErrorKind.UNSUPPORTED)
                yield from _value_rules(f"{path}.properties.{key}", f"value_{i}_{j}", value, schema)
                opened = literal(f"{_PARAMETER}{key}>\n")
                parameter = f"{opened} value_{i}_{j} {LINE_BREAK}"
                body.append(parameter if key in required else f"({parameter})?")
            body.append(literal(f"{_END_FUNCTION}\n"))
            yield f"call_{i}: {opening} {' '.join(body)} {closing}"


def _check_names(path: str, schema: Mapping[str, Any]) -> None:
    """Raise ValueError unless a schema names in `properties` every parameter that it allows."""
    if unnamed := sorted(schema.keys() & _NOT_ENFORCED):
        raise RequestError(
            f"{path}.{unnamed[0]}",
            "cannot be enforced in this family's calls, which have a tag for each parameter",
            remedy="name all of them in properties",
            kind=ErrorKind.UNSUPPORTED,
        )
    for key in schema.get("required", ()):
        if key not in schema.get("properties", {}):
            raise RequestError(f"{path}.required", f"names {key!r}, which properties must have")


def _value_rules(path: str, rule: str, schema: Any, whole: Mapping[str, Any]) -> Iterator[str]:
    """Yield the rules of a value and its closing tag: the text of a string, or JSON.

    `whole` is the schema of all parameters. Errors call the value `path`.
    """
    types, end = _types_in(schema, whole), literal(f"\n{_END_PARAMETER}")
    if "string" not in types:
        definitions = {key: whole[key] for key in _DEFINITIONS if key in whole}
        yield f"{rule}: {rule}_json {end}"
        yield f"{rule}_json: {json_rule({**schema, **definitions})}"
        return
    asked = _resolved(schema, whole)
    if asked.keys() == {"anyOf"}:  # null or one other schema: the parser reads "null" as null
        cases = [_resolved(case, whole) for case in asked["anyOf"]]
        asked = next((case for case in cases if case != {"type": "null"}), {})
        asked = asked if len(cases) <= 2 else {}
    choices = [asked["const"]] if "const" in asked else asked.get("enum", [])
    is_plain = asked.keys() <= {"type", "enum", "const"} and all(
        isinstance(it, str) and it == it.strip("\n") and _END_PARAMETER not in it for it in choices
    )
    if not (asked and is_plain and types <= {"string", "null"}):
        raise RequestError(
            path,
            "cannot be enforced in this family's calls",
            remedy="let it be a plain string, a string of an enum, or of other types than a string",
            kind=ErrorKind.UNSUPPORTED,
        )
    if choices:
        yield f"{rule}: ({' | '.join(map(literal, choices))}) {end}"
    else:
        yield f'{rule}[suffix="{_END_PARAMETER}"]: /(?s:.*)/'


def _resolved(schema: Any, whole: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords of a schema, or of the schema it refers to, without annotations."""
    for _ in range(_MAX_REFERENCES):
        schema = {} if isinstance(schema, bool) else schema
        asked = {key: value for key, value in schema.items() if key not in ANNOTATIONS}
        if asked.keys() != {"$ref"}:
            return asked
        schema = target_of(whole, asked["$ref"])
    return {}
