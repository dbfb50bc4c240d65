"""Tool calls of Qwen3-Coder and Qwen 3.5: a tag for the function and one for each parameter.

    <tool_call><function=f><parameter=key>value</parameter></function></tool_call>

The outer tags may be missing. Values have no quotes. If the tool's schema allows a type other than
string, and the text of the value is valid JSON of that type, the parser reads the value as JSON.
Otherwise, the value is a string. One line break before a value and one after it belong to the tags.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jpaged.errors import ErrorKind, RequestError
from jpaged.parsing.stream import (
    MAX_BUFFERED_CHARACTERS,
    ParserCoroutine,
    TextStream,
    UnexpectedTextError,
)
from jpaged.parsing.tool_calls import MAX_NAME_LENGTH, ToolCallParser, validate_name
from jpaged.parsing.tool_grammar import LINE_BREAK, CallGrammar, json_rule, literal, tool_parameters
from jpaged.structured_outputs.schemas import ANNOTATION_KEYWORDS, resolve_reference

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION, _END_FUNCTION = "<function=", "</function>"
_PARAMETER, _END_PARAMETER = "<parameter=", "</parameter>"
_NAME_PATTERN = re.compile(r"[^<>\n]+")
_INTEGER_PATTERN = re.compile(r"-?(?:0|[1-9][0-9]{0,399})")

_JSON_TYPE_NAMES = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    type(None): "null",
    dict: "object",
    list: "array",
}
_JSON_TYPES, _STRING = frozenset(_JSON_TYPE_NAMES.values()), frozenset({"string"})
_MAX_REFERENCES = 8

_DEFINITION_KEYWORDS = ("$defs", "definitions")
_UNENFORCED_KEYWORDS = {"patternProperties", "$ref", "allOf", "anyOf", "oneOf"}
_UNENFORCED_KEYWORDS |= {"minProperties", "maxProperties"}
_MIN_PARAMETER_SIZE = 64
"""Lower bound for the number of characters in the grammar rules of one parameter."""


class Parser(ToolCallParser):
    """Parser of calls with one tag for each parameter. Converts the values to JSON."""

    opening_tags = (_OPEN, _FUNCTION)

    def _parse_calls(self) -> ParserCoroutine[None]:
        stream = self._stream
        yield from stream.take_literal(_OPEN)
        if not (yield from stream.take_literal(_FUNCTION)):
            raise UnexpectedTextError
        name = validate_name((yield from stream.take_matching(_NAME_PATTERN, MAX_NAME_LENGTH + 1)))
        yield from stream.expect(">")
        self._begin_call(name)
        try:
            yield from self._parse_parameters(name)
        finally:
            self._end_call()
        yield from stream.take_literal(_END_FUNCTION)
        yield from stream.take_literal(_CLOSE)

    def _parse_parameters(self, function: str) -> ParserCoroutine[None]:
        """Take the parameters of a call, and emit them as JSON. If the answer ends before the call
        does, leave out the last brace."""
        stream, before = self._stream, "{"
        while (yield from stream.take_literal(_PARAMETER)):
            key = yield from stream.take_matching(_NAME_PATTERN, MAX_NAME_LENGTH)
            yield from stream.expect(">")
            stream.release()
            self._emit_arguments(f"{before}{_to_json_string(key)}: ")
            yield from self._parse_value(self._parameter_types(function, key))
            before = ", "
        if before == "{":
            self._emit_arguments("{")
        if not (yield from stream.is_over()):
            self._emit_arguments("}")

    def _parse_value(self, types: frozenset[str]) -> ParserCoroutine[None]:
        """Take a parameter's value and emit the value as JSON.

        The value ends at a </parameter> that is followed by another tag or by the end of the
        answer. Any other </parameter> is part of the value.
        """
        stream, value = self._stream, _ValueWriter(self._emit_arguments, types)
        if (yield from stream.peek()) == "\n":
            yield from stream.expect("\n")
        while True:
            stream.release()
            stream.sink = value.add
            is_tag = yield from stream.take_until(_END_PARAMETER, max_whitespace=0)
            stream.sink = None
            if not is_tag:
                value.end_early(stream.take_rest())
                raise UnexpectedTextError
            yield from stream.take_literal(_END_PARAMETER)
            tags = (_PARAMETER, _END_FUNCTION, _CLOSE)
            if (yield from stream.is_next(*tags)) or (yield from stream.is_over()):
                stream.release()
                value.end()
                return
            value.add(stream.release())

    def _parameter_types(self, function: str, parameter: str) -> frozenset[str]:
        """Return the JSON types that the tool's schema allows for a parameter. An unknown parameter
        is a string."""
        schema = self._schemas.get(function, {})
        properties = schema.get("properties")
        if not isinstance(properties, Mapping) or parameter not in properties:
            return _STRING
        return _allowed_types(properties[parameter], schema)


class _ValueWriter:
    """Converts one parameter value to JSON while the chunks of the value arrive.

    If the value can only be a string, each chunk is emitted immediately. Otherwise the value is
    buffered up to its end. A value longer than `MAX_BUFFERED_CHARACTERS` becomes a string.

    Args:
        emit: Function that receives the JSON text.
        types: Names of the JSON types that the value may have.
    """

    def __init__(self, emit: Callable[[str], None], types: frozenset[str]):
        self._emit, self._types = emit, types
        self._max_buffered = 0 if types <= _STRING else MAX_BUFFERED_CHARACTERS
        self._buffer: list[str] = []
        self._num_characters = 0
        self._is_string = False
        # Line break at the end of the value so far, which may belong to the closing tag.
        self._line_break = ""

    def add(self, text: str) -> None:
        text = self._line_break + text
        self._line_break = "\n" if text.endswith("\n") else ""
        self._put(text.removesuffix("\n"))

    def end(self) -> None:
        self._emit('"' if self._is_string else to_json_value("".join(self._buffer), self._types))

    def end_early(self, text: str) -> None:
        """Add the last chunk of a value whose closing tag is missing, and end the value."""
        self.add(text)
        self._put(self._line_break)
        self._emit("".join(self._buffer))

    def _put(self, text: str) -> None:
        if not text:
            return
        self._num_characters += len(text)
        self._buffer.append(text)
        if self._num_characters > self._max_buffered:
            text = _to_json_string("".join(self._buffer))[1:-1]
            self._emit(text if self._is_string else f'"{text}')
            self._buffer.clear()
            self._is_string = True


def to_json_value(text: str, types: frozenset[str]) -> str:
    """Return `text` as a JSON value of one of `types`, or as a JSON string if no type fits."""
    bare = text.strip()
    word = bare.lower()
    if word in ("null", "none") and ("null" in types or "string" not in types):
        return "null"
    if word in ("true", "false") and "boolean" in types:
        return word
    if "integer" in types and _INTEGER_PATTERN.fullmatch(bare):
        return bare
    kind = {"{": "object", "[": "array"}.get(bare[:1], "number")
    if kind in types and bare[:1] not in ('"', "t", "f", "n") and _is_json(bare):
        return bare
    return _to_json_string(text)


def _is_json(text: str) -> bool:
    stream = TextStream()
    stream.sink = lambda chunk: None
    stream.is_complete = True
    stream.add(text)
    try:
        for _ in stream.take_json_value():
            pass
    except UnexpectedTextError:
        return False
    return not stream.take_rest()


def _to_json_string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _allowed_types(
    schema: Any, root: Mapping[str, Any], num_references: int = _MAX_REFERENCES
) -> frozenset[str]:
    """Return the names of the JSON types that a schema allows.

    The function reads only `$ref`, `type`, `enum`, `const`, `anyOf` and `oneOf`. A schema without
    these keywords allows all types.

    Args:
        schema: A schema inside `root`.
        root: Schema of all parameters, in which references are looked up.
        num_references: Maximum number of nested references and alternatives to follow.
    """
    if not isinstance(schema, Mapping) or not num_references:
        return _JSON_TYPES
    if isinstance(reference := schema.get("$ref"), str):
        target: Any = root
        for name in reference.removeprefix("#/").split("/"):
            target = target.get(name) if isinstance(target, Mapping) else None
        return _allowed_types(target, root, num_references - 1)
    if (named := schema.get("type")) is not None:
        names = named if isinstance(named, list) else [named]
        return _JSON_TYPES & {name for name in names if isinstance(name, str)} or _JSON_TYPES
    values = schema["enum"] if isinstance(schema.get("enum"), list) else []
    values = [schema["const"]] if "const" in schema else values
    if values:
        return frozenset(_JSON_TYPE_NAMES.get(type(value), "string") for value in values)
    for key in ("anyOf", "oneOf"):
        if isinstance(cases := schema.get(key), list) and cases:
            found = (_allowed_types(case, root, num_references - 1) for case in cases)
            return frozenset[str]().union(*found)
    return _JSON_TYPES


class Grammar(CallGrammar):
    """Grammar of calls with one tag for each parameter, in the order of the schema."""

    def _min_rules_size(self, schema: Any, num_characters: int) -> int:
        properties = schema.get("properties") if isinstance(schema, dict) else None
        return _MIN_PARAMETER_SIZE * len(properties) if isinstance(properties, dict) else 0

    def _call_rules(self) -> Iterator[str]:
        yield from self._sequence_rules("", LINE_BREAK, "")
        opening, closing = self._opening_rule(), self._tag_rule(_CLOSE)
        for i, (path, function) in enumerate(self.functions):
            head = literal(f"\n{_FUNCTION}{function['name']}>\n")
            if not self._is_enforced(function):
                yield f"call_{i}: {opening} {head} rest_{i} {closing}"
                yield f'rest_{i}[suffix="</function>\\n"]: /(?s:.*)/'
                continue
            schema = tool_parameters(function)
            _check_parameter_names(path, schema)
            body, required = [head], schema.get("required", ())
            for j, (key, value) in enumerate(schema.get("properties", {}).items()):
                if not key or set(key) & set("<>\n"):
                    problem = f"has {key!r}: names must not be empty or contain <, > or line breaks"
                    raise RequestError(f"{path}.properties", problem, kind=ErrorKind.UNSUPPORTED)
                yield from _value_rules(f"{path}.properties.{key}", f"value_{i}_{j}", value, schema)
                opened = literal(f"{_PARAMETER}{key}>\n")
                parameter = f"{opened} value_{i}_{j} {LINE_BREAK}"
                body.append(parameter if key in required else f"({parameter})?")
            body.append(literal(f"{_END_FUNCTION}\n"))
            yield f"call_{i}: {opening} {' '.join(body)} {closing}"


def _check_parameter_names(path: str, schema: Mapping[str, Any]) -> None:
    """Raise ValueError if a schema allows a parameter that is not in `properties`."""
    if unnamed := sorted(schema.keys() & _UNENFORCED_KEYWORDS):
        raise RequestError(
            f"{path}.{unnamed[0]}",
            "cannot be enforced in qwen3_xml tool calls, which have one tag for each parameter",
            remedy="remove this keyword, and name every parameter in properties",
            kind=ErrorKind.UNSUPPORTED,
        )
    for key in schema.get("required", ()):
        if key not in schema.get("properties", {}):
            raise RequestError(
                f"{path}.required",
                f"contains {key!r}, which is not in properties: add {key!r} to properties",
            )


def _value_rules(path: str, rule: str, schema: Any, root: Mapping[str, Any]) -> Iterator[str]:
    """Yield the grammar rules of a parameter's value and its closing tag.

    Args:
        path: Path of the parameter's schema, for errors.
        rule: Name of the first rule.
        schema: Schema of the parameter.
        root: Schema of all parameters, in which references are looked up.

    Raises:
        RequestError: The value may be a string, and the schema restricts the string in a way that
            cannot be enforced without quotes.
    """
    types, end = _allowed_types(schema, root), literal(f"\n{_END_PARAMETER}")
    if "string" not in types:
        definitions = {key: root[key] for key in _DEFINITION_KEYWORDS if key in root}
        yield f"{rule}: {rule}_json {end}"
        yield f"{rule}_json: {json_rule({**schema, **definitions})}"
        return
    keywords = _resolve_keywords(schema, root)
    # Support `anyOf` only with two cases, one of which is null.
    if keywords.keys() == {"anyOf"}:
        cases = [_resolve_keywords(case, root) for case in keywords["anyOf"]]
        keywords = next((case for case in cases if case != {"type": "null"}), {})
        keywords = keywords if len(cases) <= 2 else {}
    choices = [keywords["const"]] if "const" in keywords else keywords.get("enum", [])
    is_plain = keywords.keys() <= {"type", "enum", "const"} and all(
        isinstance(it, str) and it == it.strip("\n") and _END_PARAMETER not in it for it in choices
    )
    if not (keywords and is_plain and types <= {"string", "null"}):
        raise RequestError(
            path,
            "cannot be enforced in qwen3_xml tool calls, which write strings without quotes",
            remedy="use a plain string, an enum of strings, or only types other than string",
            kind=ErrorKind.UNSUPPORTED,
        )
    if choices:
        yield f"{rule}: ({' | '.join(map(literal, choices))}) {end}"
    else:
        yield f'{rule}[suffix="{_END_PARAMETER}"]: /(?s:.*)/'


def _resolve_keywords(schema: Any, root: Mapping[str, Any]) -> dict[str, Any]:
    """Follow the references of a schema. Return the final schema's keywords without annotations."""
    for _ in range(_MAX_REFERENCES):
        schema = {} if isinstance(schema, bool) else schema
        keywords = {key: value for key, value in schema.items() if key not in ANNOTATION_KEYWORDS}
        if keywords.keys() != {"$ref"}:
            return keywords
        schema = resolve_reference(root, keywords["$ref"])
    return {}
