"""Tool calls in what a model writes, as it writes them.

A family is how models write calls; the names are vLLM's:

    hermes       <tool_call>{"name": "f", "arguments": {...}}</tool_call>
    qwen3_xml    <tool_call><function=f><parameter=key>value</parameter></function></tool_call>
    llama3_json  {"name": "f", "parameters": {...}}; {...}, perhaps after <|python_tag|>
    mistral      [TOOL_CALLS] [{"name": "f", "arguments": {...}}, ...], or
                 [TOOL_CALLS]f{...}, or [TOOL_CALLS]f[ARGS]{...}

A call begins once its name and the beginning of its arguments are there. Up to then what does not
fit makes all of it content: no tag, broken JSON, a name of other than 1 to 256 characters. The name
is what the model says, whether there is such a tool or not. Arguments are the JSON text of an
object just as the model wrote it (of `qwen3_xml` made of its values). Where they turn out to be
broken they go on as they are to the call's closing tag, so that a client sees the mistake; the call
stands, since it was told of. What follows a call in its own frame, such as an "id", is dropped;
anything else is text. Of whitespace next to a call's tags up to 64 characters are the tags'.
"""

import json
import re
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jpaged.parsing.stream import (
    MAX_HELD,
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    Event,
    Steps,
    StreamParser,
    TextStream,
    UnexpectedTextError,
)

Tool = Mapping[str, Any]
"""A tool as OpenAI writes it: {"type": "function", "function": {"name": ..., ...}}."""

LONGEST_NAME = 256
"""Characters of a function's name, and of a parameter's."""

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"
_TOOL_CALLS = "[TOOL_CALLS]"
_FUNCTION, _END_FUNCTION = "<function=", "</function>"
_PARAMETER, _END_PARAMETER = "<parameter=", "</parameter>"

_FRAME_KEYS = frozenset({"name", "parameters", "arguments", "type", "id"})
_ARGUMENTS_KEYS = ("arguments", "parameters")

_IN_TAG = re.compile(r"[^<>\n]+")
_IN_BARE_NAME = re.compile(r"[^\s\[\]{}\"<>]+")
_IN_CALL_ID = re.compile(r"[A-Za-z0-9]+")
_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]{0,399})")

_ID_CHARACTERS = string.ascii_letters + string.digits


class ToolCallParser(StreamParser):
    """Finds calls in one answer.

    Args:
        family: One of `TOOL_CALL_FAMILIES`.
        tools: Those that the model was told of; their parameters' types say what values mean where
            a family writes them without quotes.
    """

    def __init__(self, family: str, tools: Sequence[Tool] = ()):
        self._family = family
        self._pieces: list[str] = []  # of the text that the last event has more of
        self._num_calls = 0
        self._has_text = True  # since the last call
        self._types = ParameterTypes(tools)
        self._call_id: str | None = None  # the model's own
        self._id_size = 9 if family == "mistral" else 24  # Mistral's templates take no other
        self._id_start = "" if family == "mistral" else "call_"
        super().__init__()

    def _answer(self) -> Steps[None]:
        return _FAMILIES[self._family](self)

    def _taken(self) -> list[Event]:
        self._join()
        return super()._taken()

    def _join(self) -> None:
        if self._pieces:
            text, last = "".join(self._pieces), self._events.pop()
            index = last.index if isinstance(last, CallArguments) else None
            self._events.append(Content(text) if index is None else CallArguments(index, text))
            self._pieces.clear()

    def _tell(self, event: Event) -> None:
        self._join()
        self._events.append(event)

    def _tell_text(self, text: str) -> None:
        if not text:
            return
        self._has_text = True
        if not self._pieces or not isinstance(self._events[-1], Content):
            self._tell(Content(text))
        self._pieces.append(text)

    def _tell_unless_blank(self, text: str) -> None:
        """Text, unless it is whitespace right behind a call."""
        if self._has_text or text.strip():
            self._tell_text(text)

    def _tell_arguments(self, text: str) -> None:
        if not text:
            return
        if not self._pieces or not isinstance(self._events[-1], CallArguments):
            self._tell(CallArguments(self._num_calls, text))
        self._pieces.append(text)

    def _begin_call(self, name: str) -> None:
        self._stream.release()
        made = "".join(secrets.choice(_ID_CHARACTERS) for _ in range(self._id_size))
        call_id, self._call_id = self._call_id or self._id_start + made, None
        self._tell(CallStart(self._num_calls, call_id, name))

    def _tell_call(self, name: str, arguments: str) -> None:
        self._begin_call(name)
        self._tell_arguments(arguments)
        self._end_call()

    def _end_call(self) -> None:
        self._tell(CallEnd(self._num_calls))
        self._num_calls += 1
        self._has_text = False

    # What families have in common.

    def _text(self, *tags: str) -> Steps[str]:
        """Tells the text before the next tag: which tag, not taken; nothing at the end."""
        stream = self._stream
        stream.sink = self._tell_text
        tag = yield from stream.text_until(*tags)
        stream.sink = None
        if not tag:
            self._tell_unless_blank(stream.rest())
        return tag

    def _attempt(self, calls: Steps[None]) -> Steps[None]:
        """Reads what may be calls. What is not is text; but where the answer breaks off in the
        frame of a call that was told of, no more is."""
        num_before = self._num_calls
        try:
            yield from calls
        except UnexpectedTextError:
            self._call_id = None
            left = self._stream.release()
            if self._num_calls == num_before or not (yield from self._stream.is_over()):
                self._tell_unless_blank(left)
        self._stream.release()

    def _object(self, closer: str, keys: frozenset[str] | None = None) -> Steps[None]:
        """One call as a JSON object.

        Args:
            closer: What ends the call, if its arguments are broken.
            keys: Those that the object may have, and then its arguments must be there; None for
                any.

        Raises:
            UnexpectedTextError: it is none; what is held is text.
        """
        stream, name, early, is_told = self._stream, "", "", False
        yield from stream.expect("{")
        yield from stream.spaces()
        is_over = False
        while not is_over:
            key = yield from stream.json_string()
            if keys is not None and key not in keys:
                raise UnexpectedTextError
            yield from stream.spaces()
            yield from stream.expect(":")
            yield from stream.spaces()
            if key == "name" and not name:
                name = _checked_name((yield from stream.json_string()))
            elif key in _ARGUMENTS_KEYS and not (early or is_told):
                early = yield from self._arguments_in(name, closer)
                is_told = not early
            else:
                yield from stream.json_value()
            if name and early:
                self._tell_call(name, early)
                early, is_told = "", True
            is_over = yield from self._object_ends(closer if is_told else "")
        if not is_told:
            if not name or keys is not None:
                raise UnexpectedTextError
            self._tell_call(name, "{}")
        stream.release()

    def _arguments_in(self, name: str, closer: str) -> Steps[str]:
        """Tells a call and its arguments, if its name is known, or else gives their text."""
        stream = self._stream
        if (yield from stream.peek()) != "{":
            raise UnexpectedTextError
        if name:
            self._begin_call(name)
            yield from self._arguments(closer)
            return ""
        start = stream.num_pieces
        yield from stream.json_value()
        return stream.held_since(start)

    def _object_ends(self, closer: str) -> Steps[bool]:
        """Behind a value of an object: whether that was its last. A closer is as good as its end,
        and so is the answer's end."""
        stream = self._stream
        yield from stream.spaces()
        if closer and ((yield from stream.leads_to(closer)) or (yield from stream.is_over())):
            return True
        if (yield from stream.expect(",}")) == "}":
            return True
        yield from stream.spaces()
        return False

    def _arguments(self, closer: str) -> Steps[None]:
        """Tells the arguments of a call that has begun, and its end."""
        stream = self._stream
        stream.sink = self._tell_arguments
        try:
            yield from stream.json_value()
        except UnexpectedTextError:
            if not (yield from stream.text_until(closer, blank=0)):
                self._tell_arguments(stream.rest())
        stream.sink = None
        self._end_call()

    # Families.

    def _hermes(self) -> Steps[None]:
        while (yield from self._text(_OPEN)):
            yield from self._attempt(self._hermes_call())

    def _hermes_call(self) -> Steps[None]:
        yield from self._stream.literal(_OPEN)
        yield from self._stream.spaces()
        yield from self._object(_CLOSE)
        yield from self._stream.literal(_CLOSE)

    def _llama3_json(self) -> Steps[None]:
        yield from self._attempt(self._llama3_calls())
        while (yield from self._text(_PYTHON_TAG)):
            yield from self._attempt(self._llama3_calls())

    def _llama3_calls(self) -> Steps[None]:
        stream = self._stream
        yield from stream.literal(_PYTHON_TAG)
        while True:
            yield from stream.spaces()
            yield from self._object(_PYTHON_TAG, _FRAME_KEYS)
            if not (yield from stream.literal(";")) and not (yield from stream.leads_to("{")):
                return

    def _mistral(self) -> Steps[None]:
        while (yield from self._text(_TOOL_CALLS)):
            yield from self._attempt(self._mistral_calls())

    def _mistral_calls(self) -> Steps[None]:
        stream = self._stream
        yield from stream.literal(_TOOL_CALLS)
        if (yield from stream.literal("[")):
            is_first = True
            while is_first or (yield from stream.literal(",")):
                yield from stream.spaces()
                yield from self._object(_TOOL_CALLS)
                is_first = False
            if not (yield from stream.literal("]")):
                raise UnexpectedTextError
            return
        yield from stream.spaces()
        name = _checked_name((yield from stream.run(_IN_BARE_NAME, LONGEST_NAME + 1)))
        if (yield from stream.literal("[CALL_ID]")):
            call_id = yield from stream.run(_IN_CALL_ID, LONGEST_NAME)
            self._call_id = call_id if len(call_id) == self._id_size else None
        yield from stream.literal("[ARGS]")
        yield from stream.spaces()
        yield from self._arguments_in(name, _TOOL_CALLS)

    def _qwen3_xml(self) -> Steps[None]:
        while (yield from self._text(_OPEN, _FUNCTION)):
            yield from self._attempt(self._xml_call())

    def _xml_call(self) -> Steps[None]:
        stream = self._stream
        yield from stream.literal(_OPEN)
        if not (yield from stream.literal(_FUNCTION)):
            raise UnexpectedTextError
        name = _checked_name((yield from stream.run(_IN_TAG, LONGEST_NAME + 1)))
        yield from stream.expect(">")
        self._begin_call(name)
        try:
            yield from self._xml_parameters(name)
        except UnexpectedTextError:
            self._end_call()
            raise
        self._end_call()
        yield from stream.literal(_END_FUNCTION)
        yield from stream.literal(_CLOSE)

    def _xml_parameters(self, function: str) -> Steps[None]:
        """Tells the arguments as JSON; open, where the answer breaks off."""
        stream, before = self._stream, "{"
        while (yield from stream.literal(_PARAMETER)):
            key = yield from stream.run(_IN_TAG, LONGEST_NAME)
            yield from stream.expect(">")
            stream.release()
            self._tell_arguments(f"{before}{_quoted(key)}: ")
            yield from self._xml_value(self._types.of(function, key))
            before = ", "
        if before == "{":
            self._tell_arguments("{")
        if not (yield from stream.is_over()):
            self._tell_arguments("}")

    def _xml_value(self, types: frozenset[str]) -> Steps[None]:
        """Tells a value, which ends at a closing tag that a tag follows."""
        stream, value = self._stream, XmlValue(self._tell_arguments, types)
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


_FAMILIES: Mapping[str, Callable[[ToolCallParser], Steps[None]]] = {
    "hermes": ToolCallParser._hermes,
    "llama3_json": ToolCallParser._llama3_json,
    "mistral": ToolCallParser._mistral,
    "qwen3_xml": ToolCallParser._qwen3_xml,
}

TOOL_CALL_FAMILIES = tuple(_FAMILIES)
"""The names of `ToolCallParser`'s families."""


def _checked_name(name: str) -> str:
    if not 0 < len(name) <= LONGEST_NAME:
        raise UnexpectedTextError
    return name


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


# Values without quotes.

JSON_TYPES = frozenset({"string", "integer", "number", "boolean", "null", "object", "array"})

_TYPE_OF = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    type(None): "null",
    dict: "object",
    list: "array",
}
_STRING = frozenset({"string"})
_MOST_REFERENCES = 8


class XmlValue:
    """A value written as text, as JSON of one of some types; else it is a string.

    Strings are told as they come. Others are held until they end, up to `MAX_HELD` characters.

    Args:
        tell: Is given the JSON text.
        types: JSON schema's names.
    """

    def __init__(self, tell: Callable[[str], None], types: frozenset[str]):
        self._tell, self._types = tell, types
        self._most = 0 if types <= _STRING else MAX_HELD
        self._held: list[str] = []
        self._num_held = 0
        self._is_string = False
        self._line_break = ""  # held, since the last one is the tag's

    def add(self, text: str) -> None:
        """More of it."""
        text = self._line_break + text
        self._line_break = "\n" if text.endswith("\n") else ""
        self._put(text.removesuffix("\n"))

    def end(self) -> None:
        """That was all."""
        self._tell('"' if self._is_string else json_of("".join(self._held), self._types))

    def break_off(self, text: str) -> None:
        """That was all, since the answer ends; `text` too is part of it."""
        self.add(text)
        self._put(self._line_break)
        self._tell("".join(self._held))

    def _put(self, text: str) -> None:
        if not text:
            return
        self._num_held += len(text)
        self._held.append(text)
        if self._num_held > self._most:
            text = _quoted("".join(self._held))[1:-1]
            self._tell(text if self._is_string else f'"{text}')
            self._held.clear()
            self._is_string = True


def json_of(text: str, types: frozenset[str]) -> str:
    """The JSON of a value that was written as text: of one of these types, else a string."""
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


class ParameterTypes:
    """The types of tools' parameters.

    Args:
        tools: Whose `function.parameters` are JSON schemas of objects.
    """

    def __init__(self, tools: Sequence[Tool]):
        functions = [tool["function"] for tool in tools]
        self._schemas = {each["name"]: each.get("parameters") or {} for each in functions}

    def of(self, function: str, parameter: str) -> frozenset[str]:
        """JSON schema's names of the types that a parameter may have; a string's, if there is no
        such parameter; all, if its schema does not say."""
        whole = self._schemas.get(function, {})
        properties = whole.get("properties")
        if not isinstance(properties, Mapping) or parameter not in properties:
            return _STRING
        return types_in(properties[parameter], whole)


def types_in(
    schema: Any, whole: Mapping[str, Any], num_references: int = _MOST_REFERENCES
) -> frozenset[str]:
    """JSON schema's names of the types that a schema allows, as far as types, values, alternatives
    and so many references within the `whole` schema tell."""
    if not isinstance(schema, Mapping) or not num_references:
        return JSON_TYPES
    if isinstance(reference := schema.get("$ref"), str):
        target: Any = whole
        for name in reference.removeprefix("#/").split("/"):
            target = target.get(name) if isinstance(target, Mapping) else None
        return types_in(target, whole, num_references - 1)
    if (named := schema.get("type")) is not None:
        names = named if isinstance(named, list) else [named]
        return JSON_TYPES & {name for name in names if isinstance(name, str)} or JSON_TYPES
    values = schema["enum"] if isinstance(schema.get("enum"), list) else []
    values = [schema["const"]] if "const" in schema else values
    if values:
        return frozenset(_TYPE_OF.get(type(value), "string") for value in values)
    for key in ("anyOf", "oneOf"):
        if isinstance(cases := schema.get(key), list) and cases:
            found = (types_in(case, whole, num_references - 1) for case in cases)
            return frozenset[str]().union(*found)
    return JSON_TYPES
