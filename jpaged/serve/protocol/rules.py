"""Rules for the fields of a request: each reads a JSON value strictly, and tells its JSON schema.

`read` raises `ApiError` with status 400 that names the field.
"""

import math
from collections.abc import Collection
from typing import Any, NoReturn, Protocol

from jpaged.serve.errors import bad_field

Schema = dict[str, Any]

INT64 = 2**63 - 1


class Rule(Protocol):
    """How one field is read."""

    def read(self, value: Any, path: str) -> Any:
        """The value as the server uses it; `path` is what errors call it."""
        ...

    def schema(self) -> Schema:
        """The values that are accepted, as a JSON schema."""
        ...


class Flag:
    """True or false."""

    def read(self, value: Any, path: str) -> bool:
        """The boolean itself."""
        if not isinstance(value, bool):
            refuse(path, value, "must be true or false")
        return value

    def schema(self) -> Schema:
        """A boolean."""
        return {"type": "boolean"}


class Integer:
    """A whole number within bounds; 3.0 is one, true is none."""

    def __init__(self, low: int = -INT64 - 1, high: int = INT64):
        self._low, self._high = low, high

    def read(self, value: Any, path: str) -> int:
        """The number as an int."""
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            refuse(path, value, "must be an integer")
        if not self._low <= value <= self._high:
            refuse(path, value, f"must be an integer from {self._low} to {self._high}")
        return value

    def schema(self) -> Schema:
        """An integer."""
        return {"type": "integer", "minimum": self._low, "maximum": self._high}


COUNT = Integer(0, 2**31 - 1)


class Number:
    """A finite number within bounds."""

    def __init__(self, low: float, high: float, *, above: bool = False):
        self._low, self._high, self._above = low, high, above

    def read(self, value: Any, path: str) -> float:
        """The number as a float."""
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            refuse(path, value, "must be a number")
        start = "above" if self._above else "from"
        bounds = f"must be a number {start} {self._low:g} to {self._high:g}"
        if not self._low <= value <= self._high or (self._above and value == self._low):
            refuse(path, value, bounds)
        return float(value)

    def schema(self) -> Schema:
        """A number."""
        low = "exclusiveMinimum" if self._above else "minimum"
        return {"type": "number", low: self._low, "maximum": self._high}


class Text:
    """A string that can be encoded."""

    def __init__(self, most: int | None = None, least: int = 0):
        self._most, self._least = most, least

    def read(self, value: Any, path: str) -> str:
        """The string itself."""
        if not isinstance(value, str):
            refuse(path, value, "must be a string")
        if len(value) < self._least:
            refuse(path, value, "is empty: give at least one character")
        if self._most is not None and len(value) > self._most:
            refuse(path, value, f"has {len(value)} characters: at most {self._most} are allowed")
        return value

    def schema(self) -> Schema:
        """A string."""
        bounds = {"minLength": self._least, "maxLength": self._most}
        return {"type": "string", **{name: bound for name, bound in bounds.items() if bound}}


class Choice:
    """One of some values; with a `hint` for those who want another."""

    def __init__(self, *values: Any, hint: str = ""):
        self._values, self._hint = values, hint

    def read(self, value: Any, path: str) -> Any:
        """The value itself."""
        if not any(value == own and type(value) is type(own) for own in self._values):
            known = " or ".join(_shown(own) for own in self._values)
            refuse(path, value, f"must be {known}{self._hint and ': ' + self._hint}")
        return value

    def schema(self) -> Schema:
        """An enumeration."""
        return {"enum": list(self._values)}


class ListOf:
    """An array of values of one kind."""

    def __init__(self, item: Rule, most: int, least: int = 0):
        self._item, self._most, self._least = item, most, least

    def read(self, value: Any, path: str) -> list[Any]:
        """The items, read."""
        if not isinstance(value, list):
            refuse(path, value, "must be an array")
        check_length(path, value, self._most, self._least)
        return [self._item.read(item, f"{path}[{i}]") for i, item in enumerate(value)]

    def schema(self) -> Schema:
        """An array."""
        bounds = {"minItems": self._least, "maxItems": self._most}
        return {"type": "array", "items": self._item.schema(), **bounds}


class Nothing:
    """What is empty, so that it asks for nothing: its use is not supported here."""

    def __init__(self, *empty: Any, hint: str):
        self._empty, self._hint = empty, hint

    def read(self, value: Any, path: str) -> None:
        """Nothing."""
        if not any(value == own and type(value) is type(own) for own in self._empty):
            refuse(path, value, f"must be left out: {self._hint}")

    def schema(self) -> Schema:
        """The empty values."""
        return {"enum": list(self._empty), "description": self._hint}


class ByTokenId:
    """An object that maps token ids, written as strings, to values of one kind."""

    def __init__(self, item: Rule, most: int):
        self._item, self._most = item, most

    def read(self, value: Any, path: str) -> dict[int, Any]:
        """The values by integer id."""
        if not isinstance(value, dict):
            refuse(path, value, "must be an object of token ids and numbers")
        check_length(path, value, self._most, 0)
        found = {_token_id(k, path): self._item.read(v, f"{path}.{k}") for k, v in value.items()}
        if len(found) < len(value):
            raise bad_field(path, f"{path} names a token id twice, written in two ways")
        return found

    def schema(self) -> Schema:
        """An object whose keys are numbers."""
        return {
            "type": "object",
            "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,8})$"},
            "additionalProperties": self._item.schema(),
            "maxProperties": self._most,
        }


class Either:
    """A value of one of several kinds, told apart by its JSON type."""

    def __init__(self, **rules: Rule):
        self._rules = rules

    def read(self, value: Any, path: str) -> Any:
        """What the rule for its kind reads."""
        kind = kind_of(value)
        if kind not in self._rules:
            refuse(path, value, f"must be of type {' or '.join(self._rules)}")
        return self._rules[kind].read(value, path)

    def schema(self) -> Schema:
        """Any of the kinds."""
        return {"anyOf": [rule.schema() for rule in self._rules.values()]}


class Ignored:
    """A value that clients send and that has no effect here: it is not looked at."""

    def read(self, value: Any, path: str) -> None:
        """Nothing."""

    def schema(self) -> Schema:
        """Anything."""
        return {"description": "accepted, and without effect here"}


class TokenIds:
    """An array of token ids; which of them exist, the engine knows.

    Args:
        most: Ids in it.
        as_set: Each counts once.
    """

    def __init__(self, most: int, *, as_set: bool = False):
        self._most, self._as_set = most, as_set

    def read(self, value: Any, path: str) -> list[int]:
        """The ids; those that all are integers are read in C."""
        if not isinstance(value, list):
            refuse(path, value, "must be an array")
        check_length(path, value, self._most, 0)
        if set(map(type, value)) - {int} or (value and not 0 <= min(value) <= max(value) < 2**31):
            value = [
                item if _is_count(item) else COUNT.read(item, f"{path}[{i}]")
                for i, item in enumerate(value)
            ]
        return list(dict.fromkeys(value)) if self._as_set else value

    def schema(self) -> Schema:
        """An array of integers."""
        return {"type": "array", "items": COUNT.schema(), "minItems": 0, "maxItems": self._most}


def kind_of(value: Any) -> str:
    """JSON's name for the value's type."""
    if isinstance(value, bool):
        return "boolean"
    names = {int: "number", float: "number", str: "string", list: "array", dict: "object"}
    return names.get(type(value), "null")


def check_length(path: str, value: Collection[Any], most: int, least: int) -> None:
    """Raise unless there are at least `least` and at most `most` items."""
    if len(value) < least:
        raise bad_field(path, f"{path} is empty: give at least {least}")
    if len(value) > most:
        raise bad_field(path, f"{path} has {len(value)} entries: at most {most} are allowed")


def refuse(path: str, value: Any, what: str) -> NoReturn:
    """Raise an error about a value."""
    raise bad_field(path, f"{path}={_shown(value)} {what}")


def _token_id(key: str, path: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) <= 9):
        raise bad_field(path, f"{path} has the key {_shown(key)}, which is no token id")
    return int(key)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**31


def _shown(value: Any) -> str:
    if isinstance(value, (dict, list)):
        return f"({kind_of(value)} of {len(value)})"
    if isinstance(value, float) and not math.isfinite(value):
        return "infinite"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int) and abs(value) > 10**30:
        return "(a huge integer)"
    text = repr(value[:60] if isinstance(value, str) else value)
    return text if len(text) <= 60 else text[:57] + "..."
