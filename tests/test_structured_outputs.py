"""What an answer is asked to obey is checked when it is made, and refused by its place."""

from typing import Any

import msgspec
import pytest

from jpaged import StructuredOutputs
from jpaged.structured_outputs import bounds

MAX_CHOICES, MAX_DEPTH = bounds.CHOICES.most, bounds.DEPTH.most
MAX_SOURCE = bounds.SOURCE.most


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "structured_outputs must have just one of .* it has none"),
    ({"regex": "a", "choice": ["a"]}, "it has regex and choice"),
    ({"regex": ""}, r"structured_outputs\.regex is empty"),
    ({"regex": 1}, r"structured_outputs\.regex=1 must be a string"),
    ({"regex": "a" * (MAX_SOURCE + 1)}, f"regex has {MAX_SOURCE + 1} characters"),
    ({"regex": "\ud800"}, r"regex has a lone surrogate at position 0"),
    ({"grammar": b"start"}, r"grammar=b'start' must be a string"),
    ({"choice": "ab"}, r"choice='ab' must be a list of strings"),
    ({"choice": []}, "choice has no choices"),
    ({"choice": ["a"] * (MAX_CHOICES + 1)}, f"choice has {MAX_CHOICES + 1} choices"),
    ({"choice": ["a", ""]}, r"choice\[1\] is empty"),
    ({"choice": ["a" * (MAX_SOURCE // 2), "b" * MAX_SOURCE]}, "at most 65536"),
    ({"choice": ["a" * 40_000, "b" * 40_000]}, "choice has 80000 characters"),
    ({"json_object": False}, "json_object=False must be True"),
    ({"json": "{"}, r"json is no JSON text"),
    ({"json": "[" * 100_000}, "characters"),
    ({"json": "[" * 50_000}, "json is no JSON text"),
    ({"json": "3"}, r"json=3 must be a JSON schema"),
    ({"json": True}, r"json=True must be a JSON schema"),
    ({"json": {"enum": ["a" * MAX_SOURCE]}}, "json has .* characters"),
    ({"json": {"enum": [float("nan")]}}, r"json\.enum=nan must be a number of at most"),
    ({"json": {"enum": [{1}]}}, "json cannot be written as JSON"),
    ({"json": nested(MAX_DEPTH + 1)}, f"has {MAX_DEPTH + 1} schemas around it"),
    ({"regex": "a", "after": ""}, r"structured_outputs\.after='' must be some text"),
    ({"regex": "a", "opening": "<"}, "opening='<' needs after"),
]
BAD_SCHEMAS: list[tuple[dict[Any, Any], str]] = [
    ({"uniqueItems": True}, r"uniqueItems is not enforced"),
    ({"not": {}}, r"not is not enforced"),
    ({"contains": {}}, r"contains is not enforced"),
    ({"if": {}}, r"if is not enforced"),
    ({"then": {}}, r"then is not enforced"),
    ({"dependentRequired": {}}, r"dependentRequired is not enforced"),
    ({"propertyNames": {}}, r"propertyNames is not enforced"),
    ({"unevaluatedProperties": False}, r"unevaluatedProperties is not enforced"),
    ({"nullable": True}, r"nullable is not enforced"),
    ({"x-guidance": {}}, r"x-guidance is not enforced"),
    ({"minLenght": 1}, "minLenght is not enforced .* did you mean 'minLength'"),
    ({"type": "float"}, r"type='float' must be a type"),
    ({"type": []}, r"type=\[\] must be a type"),
    ({"enum": []}, r"enum=\[\] must be a list of values"),
    ({"required": "a"}, r"required='a' must be a list of names"),
    ({"minLength": -1}, r"minLength=-1 must be a count"),
    ({"maxItems": True}, r"maxItems=True must be a count"),
    ({"maxItems": 2**31}, r"maxItems=2147483648 must be a count"),
    ({"minimum": "1"}, r"minimum='1' must be a number"),
    ({"maximum": 1e301}, r"maximum=1e\+301 must be a number"),
    ({"pattern": 1}, r"pattern=1 must be a regular expression"),
    ({"format": "color"}, r"format='color' must be one of date,"),
    ({"format": ["date"]}, r"format=\['date'\] must be one of"),
    ({"multipleOf": 0.1}, r"multipleOf=0\.1 must be a whole number"),
    ({"multipleOf": 0}, r"multipleOf=0 must be a whole number"),
    ({"$ref": "other.json"}, r"\$ref='other\.json' must be a place in this schema"),
    ({"$ref": "#/$defs/a"}, r"\$ref='#/\$defs/a' leads nowhere: there is no '\$defs'"),
    ({"$ref": 3}, r"\$ref=3 must be a place"),
    ({"properties": []}, r"properties=\[\] must be an object of schemas"),
    ({"properties": {1: {}}}, r"properties=1 must be an object whose names are strings"),
    ({"properties": {"a": 1}}, r"properties\.a=1 must be a schema"),
    ({"anyOf": []}, r"anyOf=\[\] must be a list of schemas"),
    ({"anyOf": [{}, 1]}, r"anyOf\[1\]=1 must be a schema"),
    ({"prefixItems": [{"not": {}}]}, r"prefixItems\[0\]\.not is not enforced"),
    ({"additionalProperties": {"not": {}}}, r"additionalProperties\.not is not enforced"),
    ({"patternProperties": {"^a": {"not": {}}}}, r"patternProperties\.\^a\.not is not"),
    ({"definitions": {"a": {"not": {}}}}, r"definitions\.a\.not is not enforced"),
    ({"minProperties": 2}, r"minProperties=2 is not enforced where further properties"),
    (dict(enumerate([2], 1)), "1=1 must be a schema whose keywords are strings"),
]


@pytest.mark.parametrize(("fields", "message"), BAD)
def test_what_cannot_be_asked_is_refused(fields: dict[str, Any], message: str):
    with pytest.raises((TypeError, ValueError), match=message):
        StructuredOutputs(**fields)


@pytest.mark.parametrize(("schema", "message"), BAD_SCHEMAS)
def test_a_schema_is_refused_at_the_place_that_no_grammar_enforces(
    schema: dict[str, Any], message: str
):
    with pytest.raises((TypeError, ValueError), match=r"^structured_outputs\.json\.?" + message):
        StructuredOutputs(json=schema)
    outer = {"type": "object", "properties": {"deep": {"items": schema}}}
    path = r"^format\.json\.properties\.deep\.items\.?" + message
    with pytest.raises((TypeError, ValueError), match=path):
        StructuredOutputs(json=outer, name="format")


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"items": True, "additionalProperties": False},
        {"title": "a", "default": 3, "x-order": 1, "$schema": "https://json-schema.org/"},
        {"uniqueItems": False, "nullable": False},
        {"minProperties": 1},
        {"minProperties": 2, "additionalProperties": False},
        {"multipleOf": 2.0},
        {"$defs": {"a/b": {"type": "null"}}, "$ref": "#/$defs/a~1b"},
        {"properties": {"self": {"$ref": "#"}}},
        nested(MAX_DEPTH),
    ],
)
def test_what_asks_nothing_else_is_taken(schema: dict[str, Any]):
    form = StructuredOutputs(json=schema)
    assert form.kind == "json"
    assert StructuredOutputs(json=form.json) == form


def test_it_is_a_value():
    """Known by what it asks; sent between processes as it is, and not checked anew there."""
    form = StructuredOutputs(choice=["a", "b", "a"])
    assert form.choice == ("a", "b")
    assert {form: 1}[StructuredOutputs(choice=("a", "b"))] == 1
    behind = form.behind("</think>", "<think>")
    assert behind != form
    assert behind.behind(None) == form
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(behind), type=StructuredOutputs)
    assert sent == behind
