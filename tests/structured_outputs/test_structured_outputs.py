"""Test that an invalid structured-output spec is rejected with the path of the field."""

import time
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hostile_forms import HOSTILE, with_schema

from jpaged import StructuredOutputs
from jpaged.structured_outputs import bounds

MAX_CHOICES, MAX_DEPTH = bounds.CHOICES.limit, bounds.SCHEMA_DEPTH.limit
MAX_SOURCE = bounds.SOURCE_LENGTH.limit


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


NAMES = [f"p{i}" for i in range(500)]

BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "structured_outputs must have exactly one of .* it has none"),
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
    ({"json": "{"}, r"json is not valid JSON"),
    ({"json": "[" * 100_000}, "characters"),
    ({"json": "[" * 50_000}, "json is not valid JSON"),
    ({"json": '{"a": 1, "type": {}, "a": 2}'}, "json has the name 'a' twice in an object"),
    ({"json": {"const": "\ud800"}}, "json has a lone surrogate"),
    ({"choice": ["a", "\ud800"]}, r"choice\[1\] has a lone surrogate at position 0"),
    (
        {"grammar": 'start: %json {"type": "null", "type": "null"}'},
        r"%json\[0\] has the name 'type' twice in an object",
    ),
    ({"json": "3"}, r"json=3 must be a JSON schema"),
    ({"json": True}, r"json=True must be a JSON schema"),
    ({"json": {"enum": ["a" * MAX_SOURCE]}}, "json has .* characters"),
    ({"json": {"enum": [float("nan")]}}, r"json\.enum=nan must be a number of at most"),
    ({"json": {"enum": [{1}]}}, "json cannot be written as JSON"),
    ({"json": nested(MAX_DEPTH + 1)}, f"has {MAX_DEPTH + 1} enclosing schemas"),
    ({"regex": "a", "after": ""}, r"structured_outputs\.after='' must be a non-empty string"),
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
    ({"$ref": "other.json"}, r"\$ref='other\.json' must be a reference within this schema"),
    ({"$ref": "#/$defs/a"}, r"\$ref='#/\$defs/a' cannot be resolved: '\$defs' does not exist"),
    ({"$ref": 3}, r"\$ref=3 must be a reference"),
    ({"properties": []}, r"properties=\[\] must be an object of schemas"),
    ({"properties": {1: {}}}, r"properties=1 must be an object whose names are strings"),
    ({"properties": {"a": 1}}, r"properties\.a=1 must be a schema"),
    ({"anyOf": []}, r"anyOf=\[\] must be a list of schemas"),
    ({"anyOf": [{}, 1]}, r"anyOf\[1\]=1 must be a schema"),
    ({"prefixItems": [{"not": {}}]}, r"prefixItems\[0\]\.not is not enforced"),
    ({"additionalProperties": {"not": {}}}, r"additionalProperties\.not is not enforced"),
    ({"patternProperties": {"^a": {"not": {}}}}, r"patternProperties\.\^a\.not is not"),
    ({"definitions": {"a": {"not": {}}}}, r"definitions\.a\.not is not enforced"),
    ({"minProperties": 2}, r"minProperties=2 cannot be enforced: a name .* may appear twice"),
    (
        {"patternProperties": {"^a": {}}, "additionalProperties": False, "minProperties": 2},
        r"minProperties=2 cannot be enforced: a name .* may appear twice",
    ),
    (
        {"patternProperties": {"^a": {}}, "maxProperties": 2},
        r"maxProperties=2 cannot be enforced: a name .* may appear twice",
    ),
    (
        {
            "properties": dict.fromkeys("abc", True),
            "additionalProperties": False,
            "minProperties": 4,
        },
        r"minProperties=4: no object with these properties can match",
    ),
    (
        {
            "properties": dict.fromkeys(NAMES[:40], True),
            "additionalProperties": False,
            "maxProperties": 2,
        },
        r"maxProperties has 821 combinations of optional properties: at most 128",
    ),
    ({"const": "a\u0001b"}, r"const has the control character U\+0001"),
    ({"enum": ["a", {"b": ["\x7f"]}]}, r"enum has the control character U\+007F"),
    ({"enum": [{"\x00": 1}]}, r"enum has the control character U\+0000"),
    ({"properties": {"\x0b": {}}}, r"properties has the control character U\+000B"),
    ({"required": ["\x1f"]}, r"required has the control character U\+001F"),
    ({"pattern": "a\x01"}, r"pattern has the control character U\+0001"),
    ({"pattern": r"^a\x01$"}, r"pattern has the control character U\+0001"),
    ({"pattern": r"^a\u{1f}$"}, r"pattern has the control character U\+001F"),
    ({"pattern": r"^a\u0002$"}, r"pattern has the control character U\+0002"),
    ({"pattern": r"^a\v$"}, r"pattern has the control character U\+000B"),
    ({"patternProperties": {r"^a\x01$": {}}}, r"patternProperties\..* control character U\+0001"),
    ({"const": 2**53 + 1}, r"const=9007199254740993 must be a number of at most 2\*\*53"),
    ({"enum": [1, {"a": -(2**60)}]}, r"enum=-1152921504606846976 must be a number of at most"),
    ({"minimum": 1e16}, r"minimum=1e\+16 must be a number of at most"),
    ({"pattern": "(a{99}){102}"}, r"pattern has 10098 repetitions within repetitions"),
    ({"pattern": "a+" * 501}, r"pattern has 501 repetitions"),
    ({"patternProperties": {"a+" * 501: {}}}, r"patternProperties\.a.* has 501 repetitions"),
    ({"multipleOf": 10_001}, r"multipleOf=10001 must be at most 10000"),
    ({"enum": list(range(2049))}, r"enum has 2049 values"),
    ({"const": list(range(2049))}, r"const has 2049 values"),
    ({"properties": {f"p{i}": {} for i in range(129)}}, "properties has 129 optional properties"),
    ({"anyOf": [{}] * 257}, r"anyOf has 257 cases"),
    ({"allOf": [{"pattern": "a"}] * 5}, r"has 5 patterns and formats for one value"),
    (
        {"format": "date", "allOf": [{"anyOf": [{"pattern": "a", "format": "time"}, {}]}] * 2},
        r"has 5 patterns and formats for one value",
    ),
    ({"multipleOf": 3, "anyOf": [{"multipleOf": 5}]}, r"has 2 multipleOf for one value"),
    ({"properties": {"a": {"$id": "b"}}}, r"properties\.a\.\$id is allowed only at the root"),
    ({"type": "string", "enum": [1]}, r"matches no finite value"),
    ({"type": "object", "required": ["a"], "additionalProperties": False}, r"matches no fin"),
    ({"type": "array", "minItems": 2, "prefixItems": [{}, False]}, r"matches no finite value"),
    (dict(enumerate([2], 1)), "1=1 must be a schema whose keywords are strings"),
]


@pytest.mark.parametrize(("fields", "message"), BAD)
def test_invalid_spec_is_rejected(fields: dict[str, Any], message: str):
    with pytest.raises((TypeError, ValueError), match=message):
        StructuredOutputs(**fields)


BY_PATTERN: dict[str, Any] = {"type": "object", "patternProperties": {"^a": {}}}
SEVERAL: dict[str, Any] = {"type": "object", "maxProperties": 2}


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [BY_PATTERN, SEVERAL]},
        {**SEVERAL, "allOf": [{"allOf": [BY_PATTERN]}]},
        {**SEVERAL, "$ref": "#/$defs/a", "$defs": {"a": BY_PATTERN}},
        {**BY_PATTERN, "$ref": "#/$defs/a", "$defs": {"a": SEVERAL}},
        {**SEVERAL, "anyOf": [{"type": "null"}, BY_PATTERN]},
        {"allOf": [{"anyOf": [{}, SEVERAL]}, {"oneOf": [{"type": "null"}, BY_PATTERN]}]},
    ],
)
def test_combined_pattern_properties_and_max_properties_are_rejected(
    schema: dict[str, Any],
):
    with pytest.raises(ValueError, match="combines patternProperties with a maxProperties above 1"):
        StructuredOutputs(json=schema)


@pytest.mark.parametrize(("schema", "message"), BAD_SCHEMAS)
def test_schema_error_names_the_keyword_path(schema: dict[str, Any], message: str):
    with pytest.raises((TypeError, ValueError), match=r"^structured_outputs\.json[. ]?" + message):
        StructuredOutputs(json=schema)
    outer = {"type": "object", "properties": {"deep": {"items": schema}}}
    path = r"^format\.json\.properties\.deep\.items[. ]?" + message
    with pytest.raises((TypeError, ValueError), match=path):
        StructuredOutputs(json=outer, name="format")


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"items": True, "additionalProperties": False},
        {"enum": ["\n\t\r\b\f é", 2**53, -(2**53), 0.1, {"a": [None]}]},
        {"pattern": r"^[\x00-\x20]*\.\n\t$"},
        {"pattern": r"(\w{100}){100}" + "b?" * 400},
        {"properties": {f"p{i}": {} for i in range(128)}},
        {
            "properties": {f"p{i}": {} for i in range(500)},
            "required": [f"p{i}" for i in range(400)],
        },
        {"anyOf": [{"pattern": "a"}] * 200},
        {"$id": "https://a", "properties": {"$id": {"type": "string"}}},
        {"title": "a", "default": 3, "x-order": 1, "$schema": "https://json-schema.org/"},
        {"uniqueItems": False, "nullable": False},
        {"minProperties": 1},
        {"minProperties": 2, "additionalProperties": False},
        {"minProperties": 2, "required": ["a"]},
        {"patternProperties": {"^a": {}}, "maxProperties": 1},
        {"anyOf": [{"patternProperties": {"^a": {}}}, {"maxProperties": 2}]},
        {"patternProperties": {"^a": {}}, "allOf": [{"maxProperties": 2}, {"maxProperties": 1}]},
        {
            "allOf": [{"patternProperties": {"^a": {}}}],
            "properties": {"a": {}, "ab": {}, "abc": {}},
            "additionalProperties": False,
            "maxProperties": 2,
        },
        {"multipleOf": 2.0},
        {"$defs": {"a/b": {"type": "null"}}, "$ref": "#/$defs/a~1b"},
        {"properties": {"self": {"$ref": "#"}}},
        nested(MAX_DEPTH),
    ],
)
def test_enforceable_schema_is_accepted(schema: dict[str, Any]):
    spec = StructuredOutputs(json=schema)
    assert spec.kind == "json"
    assert StructuredOutputs(json=spec.json) == spec


@pytest.mark.parametrize("name", HOSTILE)
def test_too_expensive_spec_is_rejected_by_a_limit(name: str):
    spec, _, message = HOSTILE[name]
    with pytest.raises(ValueError, match=rf"^structured_outputs\.{message}"):
        StructuredOutputs(**spec)
    if "json" in spec:
        with pytest.raises(ValueError, match=r"^structured_outputs\.grammar\.%json\[0\]"):
            StructuredOutputs(**with_schema(spec))


NODE: dict[str, Any] = {"type": "object", "properties": {"next": {"$ref": "#"}}}
LIST = {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}
RING = {"a": {"$ref": "#/$defs/b"}, "b": {"allOf": [{"$ref": "#/$defs/a"}]}}


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({**NODE, "required": ["next"]}, r"json matches no finite value"),
        ({"allOf": [{"type": "object"}, {**NODE, "required": ["next"]}]}, "no finite value"),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "no finite value"),
        ({"additionalProperties": {"$ref": "#"}, "type": "object", "required": ["a"]}, "no finite"),
        ({"$defs": RING, "$ref": "#/$defs/a"}, r"refers to itself without a property"),
        ({"anyOf": [{"type": "null"}, {"$ref": "#"}]}, r"refers to itself without a property"),
    ],
)
def test_schema_with_infinite_recursion_is_rejected(schema: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        StructuredOutputs(json=schema)


@pytest.mark.parametrize("backwards", [False, True])
def test_object_with_many_required_properties_is_checked_quickly(backwards: bool):
    """A check that starts again after each property would take a second."""
    names = [f"b{i}" for i in range(600)]
    within = {name: {"$ref": f"#/$defs/{name}"} for name in names}
    hub = {"required": ["a"] * 8000 + names, "properties": {"a": True, **within}}
    if backwards:
        hub["required"].reverse()
    schema = {"properties": {"h": hub}, "required": ["h"], "$defs": {name: {} for name in names}}
    start = time.process_time()
    StructuredOutputs(json=schema)
    assert time.process_time() - start < 0.4


@pytest.mark.parametrize(
    "schema",
    [
        NODE,
        {"required": ["next"], "properties": {"next": LIST}, "$defs": {"node": NODE}},
        {"type": "array", "items": {"$ref": "#"}},
        {"type": ["array", "null"], "items": {"$ref": "#"}, "minItems": 1},
    ],
)
def test_recursive_schema_with_a_finite_value_is_accepted(schema: dict[str, Any]):
    assert StructuredOutputs(json=schema).json


def test_reference_may_point_to_any_schema_in_the_document():
    schema = {
        "type": "object",
        "default": {"a/b": {"type": "array", "items": {"type": "string"}}},
        "properties": {"a": {"$ref": "#/default/a~1b"}},
    }
    assert StructuredOutputs(json=schema).json


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ("grammar", 'start: "a" {' + " " * 60_000),
        ("grammar", 'start: "a" ~ 1' + " " * 60_000),
        ("grammar", "start: " + '"\\' * 20_000),
        ("grammar", "start: " + "/a\\" * 15_000),
        ("grammar", "start: " + "<a" * 30_000),
        ("regex", "a{" + " " * 60_000),
        ("regex", "a{ 1" + " " * 60_000),
        ("regex", "\\x{" + " " * 60_000),
        ("regex", "\\x{" + "0" * 60_000),
        ("regex", "[" * 60_000),
        ("regex", "[[:a" * 15_000),
        ("regex", "(?" * 30_000),
        ("regex", "{1," * 20_000),
        ("json", {"type": "string", "pattern": "[" * 60_000}),
        ("json", {"type": "string", "pattern": "\\x{" + " " * 60_000}),
        ("json", {"type": "string", "pattern": "a{" * 500_000}),
    ],
)
def test_hostile_spec_is_checked_in_half_a_second(spec: str, text: Any):
    """The server answers no other request during the check."""
    start = time.process_time()
    with suppress(ValueError):
        StructuredOutputs(**{spec: text})
    assert time.process_time() - start < 0.5


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"regex": "a[b"}, r"regex opens '\[b' and does not close it"),
        ({"grammar": 'start: "a'}, "grammar opens '\"a' and does not close it"),
        ({"grammar": "start: /a"}, "grammar opens '/a' and does not close it"),
        ({"regex": "a{" + "9" * 5000 + "}"}, "regex has 1000000000 repetitions within repetitions"),
        ({"regex": "(?P<x>(a{200}){200})"}, "regex has 40000 repetitions within repetitions"),
    ],
)
def test_unclosed_groups_and_huge_repetitions_are_rejected(spec: dict[str, Any], words: str):
    with pytest.raises(ValueError, match=words):
        StructuredOutputs(**spec)


def test_schema_reached_only_by_a_reference_is_checked():
    for place in ("x-hidden", "default"):
        with pytest.raises(ValueError, match=rf"json\.{place}\.not is not enforced"):
            StructuredOutputs(json={place: {"not": {}}, "$ref": f"#/{place}"})
    with pytest.raises(
        ValueError, match=r"\$ref='#/\$defs/%41' must be a reference within this schema"
    ):
        StructuredOutputs(json={"$defs": {"%41": {}, "A": {}}, "$ref": "#/$defs/%41"})


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ('start: %json {"type": "string", "not": {}}', r"%json\[0\]\.not is not enforced"),
        (
            'start: a %json{"x-guidance": {}}\na: "b"',
            r"%json\[0\]\.x-guidance is not enforced",
        ),
        (
            'start: %json {} | %json\n{"const": "\\u0001"}',
            r"%json\[1\]\.const has the control",
        ),
        ("start: %json", r"%json\[0\] is not valid JSON"),
        ("start: %json [1]", r"%json\[0\]=\[1\] must be a JSON schema"),
        ('start: "a" # %json {}', r" has %json within '# %json \{\}'"),
        ('start: "%json {}"', r" has %json within"),
        ("start: <%json> /a/", r" has %json within '<%json>'"),
        ("start: /a{200}(b{200}){200}/", r"/a.* has 40000 repetitions within"),
        ('start: (("a"~200) ~ 3..200)', r" has 40000 repetitions within"),
        ('start: ("a"{2,200}){200}', r" has 40000 repetitions within"),
        ("start: " + "(" * 101, r" has 101 levels of nested groups"),
    ],
)
def test_schemas_and_repetitions_inside_a_grammar_are_checked(grammar: str, message: str):
    with pytest.raises((TypeError, ValueError), match=rf"^structured_outputs\.grammar\.?{message}"):
        StructuredOutputs(grammar=grammar)


def test_spec_is_equal_after_encoding_and_decoding():
    spec = StructuredOutputs(choice=["a", "b", "a"])
    assert spec.choice == ("a", "b")
    assert {spec: 1}[StructuredOutputs(choice=("a", "b"))] == 1
    delayed = spec.with_reasoning("</think>", "<think>")
    assert delayed != spec
    assert delayed.with_reasoning(None) == spec
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(delayed), type=StructuredOutputs)
    assert sent == delayed
