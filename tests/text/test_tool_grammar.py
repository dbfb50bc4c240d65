"""Calls that a grammar forces are those that the family's parser reads, with valid arguments."""

import json
from typing import Any

import jsonschema
import pytest
from grammar_walks import EOS, GRAMMARS, TOKENIZER, allowed, matcher_of, walk

from jpaged import TOOL_CALL_FAMILIES, AnswerParser, CallArguments, CallStart, call_grammar

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Paris", "Rome", "São Paulo"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "units": {"$ref": "#/$defs/units"},
        "where": {
            "type": "object",
            "properties": {"x": {"type": "number"}, "y": {"type": ["integer", "null"]}},
            "required": ["x"],
            "additionalProperties": False,
        },
        "alerts": {"type": "boolean"},
        "note": {"anyOf": [{"type": "string", "title": "Note"}, {"type": "null"}]},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"units": {"enum": ["C", "F"]}},
}


def tool(name: str, parameters: Any = None) -> dict[str, Any]:
    own = {"name": name} if parameters is None else {"name": name, "parameters": parameters}
    return {"type": "function", "function": own}


TOOLS = [tool("get_weather", WEATHER), tool("now"), tool("any-of", {"properties": {"a": {}}})]
XML_TOOLS = [*TOOLS[:2], tool("say", {"type": "object", "properties": {"a": {"type": "string"}}})]


def tools_of(family: str) -> list[dict[str, Any]]:
    return XML_TOOLS if family == "qwen3_xml" else TOOLS


def calls_in(family: str, text: str) -> list[tuple[str, Any]]:
    """The calls; nothing else may be there."""
    parser = AnswerParser(tool_calls=family, tools=tools_of(family))
    calls: list[list[Any]] = []
    for event in [*parser.feed(text), *parser.end()]:
        if isinstance(event, CallStart):
            calls.append([event.name, ""])
        elif isinstance(event, CallArguments):
            calls[-1][1] += event.text
        else:
            assert type(event).__name__ == "CallEnd", (event, text)
    return [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize("family", TOOL_CALL_FAMILIES)
@pytest.mark.parametrize("parallel", [True, False])
def test_forced_calls_are_read_back_and_their_arguments_are_valid(family: str, parallel: bool):
    tools = tools_of(family)
    form = call_grammar(family, tools, parallel=parallel)
    GRAMMARS.compile(form)
    schemas = {it["function"]["name"]: it["function"].get("parameters") for it in tools}
    counts, names = set(), set()
    for seed in range(25):
        if (text := walk(form, seed)) is None:
            continue
        calls = calls_in(family, text)
        counts.add(len(calls))
        for name, arguments in calls:
            names.add(name)
            assert schemas[name] is not None or arguments == {}
            assert isinstance(arguments, dict)
            jsonschema.validate(arguments, schemas[name] or {})
    assert names == set(schemas)
    assert counts == {1} if not parallel else max(counts) > 1


@pytest.mark.parametrize("family", TOOL_CALL_FAMILIES)
def test_a_named_function_alone_is_called(family: str):
    form = call_grammar(family, tools_of(family), name="now", parallel=False)
    texts = {walk(form, seed) for seed in range(8)}
    assert all(calls_in(family, text) == [("now", {})] for text in texts if text is not None)
    assert texts != {None}


def test_a_tag_that_is_a_special_token_is_that_token():
    special = {"[TOOL_CALLS]": EOS + 1, "[ARGS]": EOS + 2}
    form = call_grammar("mistral", TOOLS, name="now", special_ids=special)
    GRAMMARS.compile(form)
    matcher = matcher_of(form)
    assert allowed(matcher) == {EOS + 1}
    matcher.accept(EOS + 1)
    for token in TOKENIZER.encode("now", add_special_tokens=False):
        matcher.accept(token)
    assert allowed(matcher) == {EOS + 2}


@pytest.mark.parametrize(
    ("family", "parameters", "path"),
    [
        ("hermes", {"properties": {"a": {"not": {}}}}, r"parameters\.properties\.a\.not "),
        ("mistral", {"type": "array"}, r"parameters\.type='array'"),
        ("llama3_json", {"properties": {"a": 3}}, r"parameters\.properties\.a=3"),
        ("qwen3_xml", {"properties": {"a": {"type": "string", "maxLength": 3}}}, r"properties\.a "),
        ("qwen3_xml", {"properties": {"a": {"type": ["string", "integer"]}}}, r"properties\.a "),
        ("qwen3_xml", {"properties": {"a": {}}}, r"properties\.a "),
        ("qwen3_xml", {"properties": {"a": {"enum": ["x", "y</parameter>"]}}}, r"properties\.a "),
        ("qwen3_xml", {"properties": {"a>": {"type": "null"}}}, "'a>', which no tag"),
        ("qwen3_xml", {"required": ["b"]}, "required names 'b'"),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_its_place(family: str, parameters: Any, path: str):
    tools = [tool("f"), tool("g", parameters)]
    with pytest.raises((TypeError, ValueError), match=r"^tools\[1\]\.function\." + ".*" + path):
        call_grammar(family, tools)
    call_grammar(family, tools, name="f")


def test_names_are_checked():
    with pytest.raises(ValueError, match="family='x' must be one of"):
        call_grammar("x", TOOLS)
    with pytest.raises(ValueError, match="name='x' must be that of one of the tools"):
        call_grammar("hermes", TOOLS, name="x")
