"""Records: dataclasses whose fields say how they are read from JSON."""

import difflib
from dataclasses import MISSING, Field, field, fields
from functools import cache
from typing import Any, TypeVar

from jpaged.serve.errors import bad_field
from jpaged.serve.protocol.rules import Rule, Schema, refuse

T = TypeVar("T")


def of(rule: Rule, default: Any = MISSING, note: str = "") -> Any:
    """A field read by `rule`; null and nothing stand for `default`, without which it is required.

    Args:
        rule: How it is read.
        default: Immutable.
        note: What it means, for the published schema.
    """
    return field(default=default, metadata={"rule": rule, "note": note}, kw_only=True)


class Nested:
    """A field that is a record itself."""

    def __init__(self, record: type, *, unknown_nulls: bool = False):
        self._record, self._unknown_nulls = record, unknown_nulls

    def read(self, value: Any, path: str) -> Any:
        """The record."""
        return read_record(self._record, value, path, unknown_nulls=self._unknown_nulls)

    def schema(self) -> Schema:
        """The record's."""
        others = {"type": "null"} if self._unknown_nulls else False
        return schema_of(self._record) | {"additionalProperties": others}


def read_record(record: type[T], value: Any, path: str = "", *, unknown_nulls: bool = False) -> T:
    """A `record` from a JSON object.

    Args:
        record: A dataclass with fields made by `of`.
        value: The object.
        path: What errors call it.
        unknown_nulls: Fields that it does not have may be null, which asks for nothing.

    Raises:
        ApiError: it is no object, or a field is missing, unknown or not acceptable.
    """
    if not isinstance(value, dict):
        refuse(path or "the body", value, "must be an object")
    known = _fields(record)
    for name in value:
        if name not in known and not (unknown_nulls and value[name] is None):
            _refuse_unknown(name, path, list(known))
    read = {}
    for name, (rule, is_required) in known.items():
        given = value.get(name)
        if given is not None:
            read[name] = rule.read(given, f"{path}.{name}" if path else name)
        elif is_required:
            own_path = f"{path}.{name}" if path else name
            raise bad_field(own_path, f"{own_path} is missing: it is required")
    return record(**read)


@cache
def _fields(record: type) -> dict[str, tuple[Rule, bool]]:
    """By name the rule of each, and whether it is required."""
    return {f.name: (f.metadata["rule"], f.default is MISSING) for f in fields(record)}


def schema_of(record: type) -> Schema:
    """The record's JSON schema."""
    own = fields(record)
    return {
        "type": "object",
        "properties": {f.name: _field_schema(f) for f in own},
        "required": [f.name for f in own if f.default is MISSING],
        "additionalProperties": False,
    }


def _field_schema(own: Field[Any]) -> Schema:
    schema = own.metadata["rule"].schema()
    if own.default is not MISSING:
        schema = {"anyOf": [schema, {"type": "null"}]}
    return schema | ({"description": own.metadata["note"]} if own.metadata["note"] else {})


def _refuse_unknown(name: str, path: str, known: list[str]) -> None:
    shown = repr(name if len(name) <= 60 else name[:57] + "...")
    near = difflib.get_close_matches(name[:60], known, 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    where, start = (f" of {path}", f"{path}.") if path else ("", "")
    raise bad_field(start + name[:60], f"unknown or unsupported field {shown}{where}{hint}")
