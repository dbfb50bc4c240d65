"""`StructuredOutputs`: a specification that the model's answer must match.

The constructor checks the specification. This module imports neither JAX nor llguidance.
"""

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
    """A structured-output specification: the rule that a model's answer must match.

    Exactly one of `json`, `regex`, `choice`, `grammar` and `json_object` is set. vLLM uses the same
    names.

    Args:
        json: JSON schema, as a mapping or as JSON text. The answer is JSON that matches the schema.
            docs/structured_output.md lists the enforced keywords. The attribute is JSON text.
        regex: Regular expression in Rust's syntax that must match the whole answer.
        choice: The allowed answers.
        grammar: Context-free grammar in llguidance's variant of Lark's syntax.
        json_object: True if the answer may be any JSON object.
        after: Text that ends the reasoning, such as "</think>". The answer may contain anything
            before this text. None: the answer is constrained from its first token.
        opening: Text that starts the reasoning, such as "<think>". An answer that does not start
            with this text is constrained from its first token. None: the prompt has opened the
            reasoning.
        name: Path of the specification, for errors.

    Raises:
        TypeError, ValueError: A field is invalid. The error names the field, and for a schema the
            path of the invalid part.
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
        given = dict(zip(self.KINDS, (json, regex, choice, grammar, json_object), strict=True))
        given = {kind: it for kind, it in given.items() if it is not None}
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise RequestError(
                name, f"must have exactly one of {', '.join(self.KINDS)}; it has {found}"
            )
        ((kind, value),) = given.items()
        for text, what in ((after, "after"), (opening, "opening")):
            if text is not None and (not isinstance(text, str) or not text):
                raise RequestTypeError(
                    f"{name}.{what}", "must be a non-empty string or None", value=repr(text)
                )
        if opening is not None and after is None:
            problem = "needs after: pass the text that ends the reasoning, or omit opening"
            raise RequestError(f"{name}.opening", problem, value=repr(opening))
        made = {**dict.fromkeys(self.KINDS), kind: _VALIDATORS[kind](f"{name}.{kind}", value)}
        for field, own in {**made, "after": after, "opening": opening}.items():
            object.__setattr__(self, field, own)

    def with_reasoning(self, after: str | None, opening: str | None = None) -> "StructuredOutputs":
        """Return a copy of the specification with other reasoning tags.

        Args:
            after: Text that ends the reasoning, such as "</think>"; None for no reasoning.
            opening: Text that starts the reasoning, such as "<think>"; None if the prompt has
                opened the reasoning.
        """
        other = copy.copy(self)
        object.__setattr__(other, "after", after)
        object.__setattr__(other, "opening", opening)
        return other

    @property
    def kind(self) -> str:
        """Name of the field that is set: one of `KINDS`."""
        return next(kind for kind in self.KINDS if getattr(self, kind) is not None)


def _validate_text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise RequestTypeError(name, "must be a string", value=short_repr(value))
    if not value:
        raise RequestError(name, "is empty", remedy="pass a non-empty string, or omit it")
    bounds.SOURCE_LENGTH.check(name, len(value))
    try:
        value.encode()
    except UnicodeEncodeError as error:
        where = f"at position {error.start}"
        raise RequestError(name, f"has a lone surrogate {where}", remedy="remove it") from None
    return value


def _validate_choices(name: str, value: object) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise RequestTypeError(name, "must be a list of strings", value=short_repr(value))
    if not value:
        raise RequestError(name, "has no choices", remedy="pass at least one choice")
    bounds.CHOICES.check(name, len(value))
    choices = tuple(_validate_text(f"{name}[{i}]", it) for i, it in enumerate(value))
    bounds.SOURCE_LENGTH.check(name, sum(map(len, choices)))
    return tuple(dict.fromkeys(choices))


def _validate_flag(name: str, value: object) -> bool:
    if value is not True:
        raise RequestError(
            name,
            "must be True",
            value=short_repr(value),
            remedy="omit it if the answer need not be a JSON object",
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
    """Check a JSON schema, given as Python values or as text, and return the schema as text."""
    if isinstance(value, str):
        bounds.SOURCE_LENGTH.check(name, len(value))
        value = parse_json(name, value)
    else:
        size = 0
        with suppress(TypeError, ValueError, RecursionError):  # the code below reports the error
            size = len(json.dumps(value, separators=(",", ":")))
        bounds.SOURCE_LENGTH.check(name, size)
    check_schema(name, value)
    try:
        text = json.dumps(value, allow_nan=False, separators=(",", ":"))
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise RequestError(name, "has a lone surrogate", remedy="remove it") from None
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
