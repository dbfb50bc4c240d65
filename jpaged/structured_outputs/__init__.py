"""What an answer must obey: `StructuredOutputs`, checked when it is made. Nothing here imports JAX
or compiles a grammar."""

import copy
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

from jpaged.errors import RequestError, RequestTypeError, short_repr
from jpaged.structured_outputs import bounds
from jpaged.structured_outputs.schemas import check_schema
from jpaged.structured_outputs.syntax import check_grammar_text, check_regex, parse_json


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

    KINDS: ClassVar = ("json", "regex", "choice", "grammar", "json_object")

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
        given = dict(zip(self.KINDS, (json, regex, choice, grammar, json_object), strict=True))
        given = {kind: it for kind, it in given.items() if it is not None}
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise RequestError(
                name, f"must have just one of {', '.join(self.KINDS)}; it has {found}"
            )
        ((kind, value),) = given.items()
        for text, what in ((after, "after"), (opening, "opening")):
            if text is not None and (not isinstance(text, str) or not text):
                raise RequestTypeError(
                    f"{name}.{what}", "must be some text, or None", value=repr(text)
                )
        if opening is not None and after is None:
            problem = "needs after: it is what that ends"
            raise RequestError(f"{name}.opening", problem, value=repr(opening))
        made = {**dict.fromkeys(self.KINDS), kind: _VALIDATORS[kind](f"{name}.{kind}", value)}
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
        return next(kind for kind in self.KINDS if getattr(self, kind) is not None)


def _validate_text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise RequestTypeError(name, "must be a string", value=short_repr(value))
    if not value:
        raise RequestError(name, "is empty", remedy="leave it out")
    bounds.SOURCE_LENGTH.check(name, len(value))
    try:
        value.encode()
    except UnicodeEncodeError as error:
        where = f"at position {error.start}"
        raise RequestError(name, f"has a lone surrogate {where}", remedy="leave it out") from None
    return value


def _validate_choices(name: str, value: object) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise RequestTypeError(name, "must be a list of strings", value=short_repr(value))
    if not value:
        raise RequestError(name, "has no choices", remedy="give one at least")
    bounds.CHOICES.check(name, len(value))
    choices = tuple(_validate_text(f"{name}[{i}]", it) for i, it in enumerate(value))
    bounds.SOURCE_LENGTH.check(name, sum(map(len, choices)))
    return tuple(dict.fromkeys(choices))


def _validate_flag(name: str, value: object) -> bool:
    if value is not True:
        raise RequestError(
            name, "must be True", value=short_repr(value), remedy="leave it out for no JSON object"
        )
    return True


def _validate_regex(name: str, value: object) -> str:
    text = _validate_text(name, value)
    check_regex(name, text)
    return text


def _validate_grammar(name: str, value: object) -> str:
    text = _validate_text(name, value)
    check_grammar_text(name, text, check_schema)
    return text


def _validate_schema(name: str, value: object) -> str:
    """The schema as JSON text."""
    if isinstance(value, str):
        bounds.SOURCE_LENGTH.check(name, len(value))
        value = parse_json(name, value)
    else:
        size = 0
        with suppress(TypeError, ValueError, RecursionError):  # what is wrong is told below
            size = len(json.dumps(value, separators=(",", ":")))
        bounds.SOURCE_LENGTH.check(name, size)
    check_schema(name, value)
    try:
        text = json.dumps(value, allow_nan=False, separators=(",", ":"))
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise RequestError(name, "has a lone surrogate", remedy="leave it out") from None
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(name, f"cannot be written as JSON: {error}") from None
    bounds.SOURCE_LENGTH.check(name, len(text))
    return text


_VALIDATORS = {
    "json": _validate_schema,
    "regex": _validate_regex,
    "choice": _validate_choices,
    "grammar": _validate_grammar,
    "json_object": _validate_flag,
}
