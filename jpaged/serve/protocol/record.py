"""Records: dataclasses whose fields say how they are read from JSON."""

import difflib
from dataclasses import MISSING, Field, field, fields
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

    def __init__(self, record: type):
        self._record = record

    def read(self, value: Any, path: str) -> Any:
        """The record."""
        return read_record(self._record, value, path)

    def schema(self) -> Schema:
        """The record's."""
        return schema_of(self._record)


def read_record(record: type[T], value: Any, path: str = "") -> T:
    """A `record` from a JSON object.

    Raises:
        ApiError: it is no object, or a field is missing, unknown or not acceptable.
    """
    if not isinstance(value, dict):
        refuse(path or "the body", value, "must be an object")
    known = {f.name: f for f in fields(record)}  # type: ignore[arg-type]
    for name in value:
        if name not in known:
            _refuse_unknown(name, path, list(known))
    read = {}
    for name, own in known.items():
        given, own_path = value.get(name), f"{path}.{name}" if path else name
        if given is not None:
            read[name] = own.metadata["rule"].read(given, own_path)
        elif own.default is MISSING:
            raise bad_field(own_path, f"{own_path} is missing: it is required")
    return record(**read)


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
