"""What an answer must obey: `StructuredOutputs`, checked when it is made. Nothing here imports JAX
or compiles a grammar."""

import copy
import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAX_SOURCE = 64 * 1024
"""Characters of a schema's JSON, a regular expression, a grammar, or all choices together."""

MAX_CHOICES = 1024

MAX_DEPTH = 32
"""Of schemas within schemas."""

_KINDS = ("json", "regex", "choice", "grammar", "json_object")

ANNOTATIONS = {
    *("title", "description", "default", "example", "examples", "deprecated", "readOnly"),
    *("writeOnly", "discriminator", "contentEncoding", "contentMediaType"),
    *("$comment", "$schema", "$id", "$anchor"),
}
"""Keywords that allow and forbid nothing."""

_OF_ONE = {"items", "additionalProperties"}
_OF_MANY = {"anyOf", "oneOf", "allOf", "prefixItems"}
_OF_NAMED = {"properties", "patternProperties", "$defs", "definitions"}
_COUNTS = {"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"}
_NUMBERS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
_ENFORCED = {
    *("type", "enum", "const", "pattern", "format", "required", "multipleOf", "$ref"),
    *(_OF_ONE | _OF_MANY | _OF_NAMED | _COUNTS | _NUMBERS),
}
_TYPES = ("string", "number", "integer", "boolean", "null", "object", "array")
_FORMATS = (
    *("date", "date-time", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"),
)

Path = str


@dataclass(frozen=True, init=False)
class StructuredOutputs:
    """What an answer must obey: just one of the first five, whose names are vLLM's.

    Args:
        json: a JSON schema, as a mapping or as text; the answer is JSON that obeys it. Which
            keywords are enforced: docs/structured_output.md. Kept as text.
        regex: a regular expression that the whole answer matches, of Rust's syntax.
        choice: the answers that are allowed.
        grammar: a context-free grammar in llguidance's variant of Lark's syntax.
        json_object: True: the answer is any JSON object.
        after: nothing is asked before this text has come, such as "</think>".
        opening: the text with which the passage begins that `after` ends, such as "<think>": an
            answer that does not begin with it obeys from the start. None: the prompt has it.

    Raises:
        TypeError, ValueError: naming the field, and of a schema the place in it.
    """

    json: str | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    after: str | None = None
    opening: str | None = None

    def __init__(
        self,
        json: Mapping[str, Any] | str | bool | None = None,
        regex: str | None = None,
        choice: Sequence[str] | None = None,
        grammar: str | None = None,
        json_object: bool | None = None,
        *,
        after: str | None = None,
        opening: str | None = None,
        name: str = "structured_outputs",
    ):
        """As of the class; errors call it `name`."""
        given = dict(zip(_KINDS, (json, regex, choice, grammar, json_object), strict=True))
        given = {kind: it for kind, it in given.items() if it is not None}
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise ValueError(f"{name} must have just one of {', '.join(_KINDS)}; it has {found}")
        ((kind, value),) = given.items()
        for text, what in ((after, "after"), (opening, "opening")):
            if text is not None and (not isinstance(text, str) or not text):
                raise TypeError(f"{name}.{what}={text!r} must be some text, or None")
        if opening is not None and after is None:
            raise ValueError(f"{name}.opening={opening!r} needs after: it is what that ends")
        made = {**dict.fromkeys(_KINDS), kind: _CHECKS[kind](f"{name}.{kind}", value)}
        for field, own in {**made, "after": after, "opening": opening}.items():
            object.__setattr__(self, field, own)

    def behind(self, after: str | None, opening: str | None = None) -> "StructuredOutputs":
        """The same behind a passage that is free; see `after` and `opening`."""
        other = copy.copy(self)
        object.__setattr__(other, "after", after)
        object.__setattr__(other, "opening", opening)
        return other

    @property
    def kind(self) -> str:
        """Which of the fields is given."""
        return next(kind for kind in _KINDS if getattr(self, kind) is not None)


def _checked_text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name}={_shown(value)} must be a string")
    if not value:
        raise ValueError(f"{name} is empty: leave it out")
    _check_size(name, len(value))
    try:
        value.encode()
    except UnicodeEncodeError as error:
        where = f"at position {error.start}"
        raise ValueError(f"{name} has a lone surrogate {where}: leave it out") from None
    return value


def _check_size(name: str, size: int) -> None:
    if size > MAX_SOURCE:
        raise ValueError(f"{name} has {size} characters: at most {MAX_SOURCE} are allowed")


def _checked_choices(name: str, value: object) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise TypeError(f"{name}={_shown(value)} must be a list of strings")
    if not 1 <= len(value) <= MAX_CHOICES:
        raise ValueError(f"{name} has {len(value)} choices: give 1 to {MAX_CHOICES}")
    choices = tuple(_checked_text(f"{name}[{i}]", it) for i, it in enumerate(value))
    _check_size(name, sum(map(len, choices)))
    return tuple(dict.fromkeys(choices))


def _checked_flag(name: str, value: object) -> bool:
    if value is not True:
        raise ValueError(f"{name}={_shown(value)} must be True: leave it out for no JSON object")
    return True


def _checked_schema(name: str, value: object) -> str:
    """The schema as JSON text."""
    if isinstance(value, str):
        _check_size(name, len(value))
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{name} is no JSON text: {error}") from None
    if isinstance(value, bool) or not isinstance(value, Mapping):
        raise TypeError(f"{name}={_shown(value)} must be a JSON schema, an object")
    _SchemaCheck(value, name).run()
    try:
        text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{name} cannot be written as JSON: {error}") from None
    _check_size(name, len(text))
    return text


_CHECKS = {
    "json": _checked_schema,
    "regex": _checked_text,
    "choice": _checked_choices,
    "grammar": _checked_text,
    "json_object": _checked_flag,
}


class _SchemaCheck:
    """Refuses what a grammar cannot enforce, by its place."""

    def __init__(self, root: Mapping[str, Any], name: str):
        self._root, self._name = root, name

    def run(self) -> None:
        """Look at every schema within the root.

        Raises:
            TypeError, ValueError: one is malformed, or cannot be enforced.
        """
        left: list[tuple[Path, Any, int]] = [(self._name, self._root, 0)]
        while left:
            path, schema, depth = left.pop()
            if isinstance(schema, bool):
                continue
            if not isinstance(schema, Mapping):
                raise TypeError(f"{path}={_shown(schema)} must be a schema: an object or a boolean")
            if depth > MAX_DEPTH:
                raise ValueError(f"{path} is nested deeper than {MAX_DEPTH} schemas: use $defs")
            for keyword, value in schema.items():
                own = f"{path}.{keyword}"
                if keyword not in _ENFORCED:
                    _check_annotation(own, keyword, value)
                    continue
                self._check_keyword(own, keyword, value, schema)
                left += [(where, it, depth + 1) for where, it in _within(own, keyword, value)]

    def _check_keyword(self, path: Path, keyword: str, value: Any, schema: Mapping) -> None:
        if keyword in _COUNTS:
            _require(path, value, _is_count(value), "a count, 0 or more")
        elif keyword in _NUMBERS:
            _require(path, value, _is_number(value), "a number")
        elif keyword == "type":
            named = value if isinstance(value, list) else [value]
            _require(path, value, bool(named) and all(it in _TYPES for it in named), "a type")
        elif keyword == "enum":
            _require(path, value, isinstance(value, list) and bool(value), "a list of values")
        elif keyword == "required":
            is_names = isinstance(value, list) and all(isinstance(it, str) for it in value)
            _require(path, value, is_names, "a list of names")
        elif keyword == "pattern":
            _require(path, value, isinstance(value, str), "a regular expression")
        elif keyword == "format":
            known = f"one of {', '.join(_FORMATS)}, or left out: others are not enforced"
            _require(path, value, value in _FORMATS, known)
        elif keyword == "multipleOf":
            is_whole = _is_number(value) and value == int(value) and value > 0
            _require(path, value, is_whole, "a whole number: others are not enforced")
        elif keyword == "$ref":
            self._check_reference(path, value)
        may_repeat = bool(schema.get("additionalProperties", True))
        if keyword == "minProperties" and may_repeat and value not in (0, 1):
            raise ValueError(
                f"{path}={value} is not enforced where further properties may repeat a name: give "
                "additionalProperties false, or leave it out"
            )

    def _check_reference(self, path: Path, value: Any) -> None:
        is_own = isinstance(value, str) and re.fullmatch(r"#(/.*)?", value, re.DOTALL) is not None
        _require(path, value, is_own, "a place in this schema, such as #/$defs/name")
        found: Any = self._root
        for step in value[2:].split("/") if len(value) > 1 else ():
            step = step.replace("~1", "/").replace("~0", "~")
            if not isinstance(found, Mapping) or step not in found:
                raise ValueError(f"{path}={_shown(value)} leads nowhere: there is no {step!r}")
            found = found[step]


def _within(path: Path, keyword: str, value: Any) -> Iterator[tuple[Path, Any]]:
    """The schemas in a keyword's value."""
    if keyword in _OF_ONE:
        yield path, value
    elif keyword in _OF_MANY:
        _require(path, value, isinstance(value, list) and bool(value), "a list of schemas")
        yield from ((f"{path}[{i}]", it) for i, it in enumerate(value))
    elif keyword in _OF_NAMED:
        _require(path, value, isinstance(value, Mapping), "an object of schemas")
        for name, it in value.items():
            _require(path, name, isinstance(name, str), "an object whose names are strings")
            yield f"{path}.{name[:60]}", it


def _check_annotation(path: Path, keyword: object, value: Any) -> None:
    """Raise ValueError unless a keyword asks for nothing."""
    _require(path, keyword, isinstance(keyword, str), "a schema whose keywords are strings")
    keyword = str(keyword)
    asks_nothing = {"uniqueItems": False, "nullable": False, "unevaluatedProperties": True}
    if asks_nothing.get(keyword, ...) is value:
        return
    if keyword in ANNOTATIONS or (keyword.startswith("x-") and keyword != "x-guidance"):
        return
    near = difflib.get_close_matches(keyword[:60], sorted(_ENFORCED), 1, cutoff=0.8)
    hint = f"; did you mean {near[0]!r}?" if near else ": leave it out, and check it yourself"
    raise ValueError(f"{path[:200]} is not enforced by a grammar{hint}")


def _require(path: Path, value: Any, holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(f"{path}={_shown(value)} must be {what}")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and abs(value) < 1e300


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
