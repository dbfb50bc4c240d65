"""Test schemas that llguidance can enforce only after jpaged has rewritten them."""

import json
from itertools import combinations
from typing import Any

import jsonschema
import pytest
from grammar_walks import GRAMMARS, accepts

from jpaged import StructuredOutputs
from jpaged.structured_outputs.matcher import GrammarError

NULL = {"type": "null"}
CLOSED: dict[str, Any] = {"additionalProperties": False}
BY_PATTERN: dict[str, Any] = {"patternProperties": {"^x[0-9]$": NULL}, **CLOSED}


@pytest.mark.parametrize(
    ("counts", "others"),
    [
        ({"minProperties": 2}, CLOSED),
        ({"minProperties": 3}, CLOSED),
        ({"minProperties": 2, "required": ["b"]}, CLOSED),
        ({"maxProperties": 2}, CLOSED),
        ({"maxProperties": 0}, CLOSED),
        ({"maxProperties": 9}, CLOSED),
        ({"minProperties": 2, "maxProperties": 2}, CLOSED),
        ({"minProperties": 2, "maxProperties": 3, "required": ["c"]}, CLOSED),
        ({"minProperties": 1}, {"additionalProperties": NULL}),
        ({"minProperties": 2, "required": ["a"]}, {"additionalProperties": NULL}),
        ({"minProperties": 1, "maxProperties": 2}, {"additionalProperties": NULL}),
        ({"minProperties": 1, "maxProperties": 1}, BY_PATTERN),
        ({"maxProperties": 2, "required": ["a"]}, BY_PATTERN),
    ],
)
def test_min_properties_and_max_properties_are_enforced(
    counts: dict[str, Any], others: dict[str, Any]
):
    schema = {"properties": dict.fromkeys("abc", NULL), **counts, **others}
    spec = StructuredOutputs(json=schema)
    validator = jsonschema.Draft202012Validator(schema)
    for size in range(4):
        for names in combinations("abc", size):
            for more in ((), ("x1",), ("x1", "x2")):
                value = dict.fromkeys((*names, *more))
                assert accepts(spec, json.dumps(value)) is validator.is_valid(value), value
    assert accepts(spec, "3")


def test_schema_with_min_properties_may_contain_references():
    schema = {
        "type": "object",
        "properties": {"a": NULL, "b": {"$ref": "#/properties/a"}, "c": {"$ref": "#"}},
        "additionalProperties": False,
        "minProperties": 2,
    }
    spec = StructuredOutputs(json=schema)
    assert accepts(spec, '{"a":null,"b":null}')
    assert accepts(spec, '{"b":null,"c":{"a":null,"b":null}}')
    assert not accepts(spec, '{"b":null,"c":{"a":null}}')


def record(name: str, value: Any, *, required: bool = True) -> dict[str, Any]:
    schema = {"type": "object", "properties": {name: {"const": value}}}
    return {**schema, "required": [name]} if required else schema


@pytest.mark.parametrize(
    ("cases", "text"),
    [
        ([{"const": i} for i in range(50)], "49"),
        ([{"const": value} for value in (1, True, "1", None, [1], {"a": 1})], "[1]"),
        ([{"enum": [i, str(i)]} for i in range(50)], '"49"'),
        ([{"allOf": [{"const": i}]} for i in range(50)], "49"),
        ([{"$ref": f"#/$defs/d{i}"} for i in range(50)], "49"),
        ([record("kind", i) for i in range(50)], '{"kind":49}'),
        ([record("a", 1), {**record("a", 2, required=False), **CLOSED}], '{"a":2}'),
        ([{**record("a", 1), **CLOSED}, {**record("b", 1), **CLOSED}], '{"b":1}'),
    ],
)
def test_oneof_keyword_with_mutually_exclusive_cases_is_enforced(cases: list[Any], text: str):
    definitions = {f"d{i}": {"const": i} for i in range(50)}
    schema = {"oneOf": cases, "$defs": definitions}
    spec = StructuredOutputs(json=schema)
    assert accepts(spec, text)
    assert not accepts(spec, "99")
    jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize(
    "cases",
    [
        [{"const": 1}, {"const": 1.0}],
        [{"const": "a"}, {"type": "string"}],
        [{"enum": [1, 2]}, {"enum": [2, 3]}],
        [record("a", 1, required=False), record("a", 2, required=False)],
        [record("a", 1), record("b", 1)],
        [record("a", 1) | {"type": ["object", "null"]}, record("a", 2) | {"type": "null"}],
    ],
)
def test_error_for_oneof_keyword_with_overlapping_cases_says_what_to_do(cases: list[Any]):
    with pytest.raises(GrammarError, match=r"two cases of oneOf may allow the same value: use"):
        GRAMMARS.compile(StructuredOutputs(json={"oneOf": cases}))


def test_spec_with_the_maximum_number_of_choices_compiles():
    spec = StructuredOutputs(choice=[f"choice {i}" for i in range(1024)])
    assert accepts(spec, "choice 1023")
    assert accepts(spec, "choice 102")
    assert not accepts(spec, "choice 1024")


def test_schema_reached_by_exponentially_many_references_compiles():
    chain: dict[str, Any] = {
        f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(30)
    }
    schema = {
        "oneOf": [{"$ref": "#/$defs/a0"}, {"type": "string"}],
        "$defs": {**chain, "a30": {"type": "integer"}},
    }
    spec = StructuredOutputs(json=schema)
    assert accepts(spec, "1")
    assert accepts(spec, '"a"')
    assert not accepts(spec, "null")


def test_oneof_with_a_chain_of_1100_references_is_refused():
    chain = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(1100)}
    schema = {
        "oneOf": [{"$ref": "#/$defs/a0"}, {"type": "string"}],
        "$defs": {**chain, "a1100": {"type": "integer"}},
    }
    with pytest.raises(GrammarError, match="two cases of oneOf may allow the same value"):
        GRAMMARS.compile(StructuredOutputs(json=schema))
