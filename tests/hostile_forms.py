"""Structured-output specs that are small but expensive to compile, and the limits they exceed."""

import json
from typing import Any


def references(count: int) -> dict[str, Any]:
    """Return a schema with a chain of `count` references."""
    chain = {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(count)}
    return {"$defs": {**chain, f"d{count}": {"type": "null"}}, "$ref": "#/$defs/d0"}


def rules(count: int) -> str:
    """Return a grammar with a chain of `count` rules."""
    chain = "".join(f'r{i:x}:"a"r{i + 1:x}\n' for i in range(count))
    return f'start:r0\n{chain}r{count:x}:"b"\n'


def names_by_pattern(count: int) -> dict[str, Any]:
    """Return a schema with `count` patterns of property names."""
    return {"patternProperties": {f"^a{i}b.*c": {"type": "null"} for i in range(count)}}


HOSTILE: dict[str, tuple[dict[str, Any], str, str]] = {
    "references": ({"json": references(1500)}, "SCHEMAS", "json has 2049 schemas"),
    "rules": ({"grammar": rules(4100)}, "GRAMMAR_RULES", "grammar has 4097 rules"),
    "all of": (
        {"json": {"type": "string", "allOf": [{"pattern": f"a{i}b"} for i in range(40)]}},
        "SCHEMAS_PER_VALUE",
        "json has 41 schemas that apply to one value",
    ),
    "patterns of names": (
        {"json": names_by_pattern(300)},
        "PATTERN_PROPERTIES",
        r"json\.patternProperties has 300 names",
    ),
    "multiple": (
        {"json": {"type": "integer", "multipleOf": 1999993, "minimum": 0, "maximum": 10**12}},
        "MAX_MULTIPLE_OF",
        r"json\.multipleOf=1999993 must be at most 10000",
    ),
    "quantifiers": ({"regex": "a?" * 20_000}, "QUANTIFIERS", "regex has 501 repetitions"),
    "product": (
        {"regex": "(a{1000}){1000}"},
        "NESTED_REPETITIONS",
        "regex has 1000000 repetitions within",
    ),
}
"""By name: fields of a spec, name of the limit in `bounds` that the spec exceeds, and the error."""


def with_schema(spec: dict[str, Any]) -> dict[str, Any]:
    """Return a spec with a grammar that embeds the JSON schema of `spec`."""
    return {"grammar": f"start:%json {json.dumps(spec['json'], separators=(',', ':'))}"}
