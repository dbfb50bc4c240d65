"""Test the grammars of tool calls: the family's parser reads the generated calls, with valid
arguments."""

import json
from typing import Any

import jsonschema
import pytest
from grammar_walks import EOS, GRAMMARS, TOKENIZER, accepts, allowed, matcher_of, read, walk

from jpaged import (
    TOOL_CALL_FAMILIES,
    AnswerParser,
    CallArguments,
    CallStart,
    StructuredOutputs,
    call_grammar,
)

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
    """Return the calls of a text, and check that the text has no other content."""
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
def test_forced_calls_are_parsed_back_with_valid_arguments(family: str, parallel: bool):
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
def test_named_tool_choice_calls_only_that_function(family: str):
    form = call_grammar(family, tools_of(family), name="now", parallel=False)
    texts = {walk(form, seed) for seed in range(8)}
    assert all(calls_in(family, text) == [("now", {})] for text in texts if text is not None)
    assert texts != {None}


def test_call_tag_is_generated_as_special_token_if_the_tokenizer_has_it():
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
        ("qwen3_xml", {"properties": {"a>": {"type": "null"}}}, "'a>': names must not"),
        ("qwen3_xml", {"required": ["b"]}, "required contains 'b'"),
        ("qwen3_xml", {"allOf": [{"properties": {"a": {}}}]}, r"allOf cannot be enforced"),
        ("qwen3_xml", {"$ref": "#/$defs/a", "$defs": {"a": {}}}, r"\$ref cannot be enforced"),
    ],
)
def test_error_about_unenforceable_parameters_names_their_path(
    family: str, parameters: Any, path: str
):
    tools = [tool("f"), tool("g", parameters)]
    with pytest.raises((TypeError, ValueError), match=r"^tools\[1\]\.function\." + ".*" + path):
        call_grammar(family, tools)
    call_grammar(family, tools, name="f")


def test_unknown_tool_call_format_and_unknown_tool_name_are_rejected():
    with pytest.raises(ValueError, match="family='x' must be one of"):
        call_grammar("x", TOOLS)
    with pytest.raises(ValueError, match="name='x' must be the name of one of the tools"):
        call_grammar("hermes", TOOLS, name="x")


STRICT = [
    tool("get_weather", WEATHER),
    tool("now"),
    tool("free", {"properties": {"a": {"not": 1}}}),
]
STRICT[0]["function"]["strict"] = True
GOOD = {"city": "Rome", "days": 3}
BAD = ({"city": "Rome"}, {"city": "Oslo", "days": 3}, {**GOOD, "x": 1})


def write_call(family: str, name: str, arguments: dict[str, Any]) -> str:
    """Return the text of a tool call in the format of a model family, such as "hermes"."""
    key = "parameters" if family == "llama3_json" else "arguments"
    text = json.dumps({"name": name, key: arguments})
    if family == "qwen3_xml":
        values = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in arguments.items())
        text = f"<function={name}>\n{values}</function>"
    tags = {"mistral": ("[TOOL_CALLS][", "]"), "llama3_json": ("", "")}
    start, end = tags.get(family, ("<tool_call>\n", "\n</tool_call>"))
    return start + text + end


@pytest.mark.parametrize("family", TOOL_CALL_FAMILIES)
def test_auto_tool_choice_enforces_only_strict_functions(family: str):
    form = call_grammar(family, STRICT, or_text=True)
    GRAMMARS.compile(form)
    begins = family == "llama3_json"
    said = "" if begins else "I look <tool_ [TOOL_ at {}.\n"
    for text in ("", "Hello", "a < b, [1] <tool_call", "naïve\n\n{}"):
        assert accepts(form, text)
    for name, arguments in (("get_weather", GOOD), ("now", {"a": 1}), ("free", {"b": "x"})):
        call = write_call(family, name, arguments)
        assert accepts(form, call)
        assert accepts(form, said + call)
        assert begins or accepts(form, f"{said}{call}\nSo.")
        more = family in ("hermes", "qwen3_xml")
        assert accepts(form, f"{call}\n{call}\n") == more
        one = call_grammar(family, STRICT, or_text=True, parallel=False)
        assert accepts(one, said + call)
        assert not accepts(one, f"{call}\n{call}")
    for arguments in BAD:
        assert not read(matcher_of(form), said + write_call(family, "get_weather", arguments))
    assert not read(matcher_of(form), said + write_call(family, "other", GOOD))


def test_free_text_cannot_contain_a_call_tag():
    for family, text in (
        ("hermes", "a <tool_call> b"),
        ("mistral", "a [TOOL_CALLS] b"),
        ("qwen3_xml", "a <function=f> b"),
        ("llama3_json", " {}"),
        ("llama3_json", "a <|python_tag|> b"),
    ):
        assert not read(matcher_of(call_grammar(family, STRICT, or_text=True)), text)


def test_special_token_begins_a_call_after_text():
    special = {"<tool_call>": EOS + 1, "</tool_call>": EOS + 2}
    form = call_grammar("hermes", STRICT, or_text=True, special_ids=special)
    matcher = matcher_of(form)
    assert read(matcher, "I look.")
    assert {EOS, EOS + 1} < allowed(matcher)
    assert not read(matcher_of(form), "I <tool_call>")
    matcher.accept(EOS + 1)
    assert read(matcher, '\n{"name": "get_weather", "arguments": {"city": "Rome", "days": 3}}\n')
    assert allowed(matcher) == {EOS + 2}
    matcher.accept(EOS + 2)
    assert EOS in allowed(matcher)
    assert read(matcher, "So.")


@pytest.mark.parametrize("family", TOOL_CALL_FAMILIES)
def test_answer_either_calls_tools_or_matches_the_json_spec(family: str):
    other = StructuredOutputs(json={"enum": [1, "x"]})
    if family == "llama3_json":
        with pytest.raises(
            ValueError, match=r"^tools cannot be combined with a JSON response format"
        ):
            call_grammar(family, STRICT, or_json=other)
        return
    form = call_grammar(family, STRICT, or_json=other)
    GRAMMARS.compile(form)
    assert accepts(form, '"x"')
    assert accepts(form, write_call(family, "get_weather", GOOD))
    assert accepts(form, write_call(family, "now", {}))
    assert not read(matcher_of(form), "Hello")
    assert not read(matcher_of(form), write_call(family, "get_weather", BAD[0]))
    anything = call_grammar(family, STRICT, or_json=StructuredOutputs(json_object=True))
    assert accepts(anything, '{"a": 1}')


def test_forced_call_allows_only_declared_arguments():
    properties = {"a": {"enum": [1]}}
    for more, is_open in (({}, False), ({"additionalProperties": True}, True)):
        tools = [tool("f", {"properties": properties, "required": ["a"], **more})]
        form = call_grammar("llama3_json", tools)
        assert accepts(form, '{"name": "f", "parameters": {"a": 1}}')
        assert accepts(form, '{"name": "f", "parameters": {"a": 1, "b": 2}}') == is_open
    for parameters in ({}, {"properties": properties, "required": ["b"]}):
        form = call_grammar("llama3_json", [tool("f", parameters)])
        assert accepts(form, '{"name": "f", "parameters": {"b": 2}}')


def test_total_size_of_tool_schemas_is_bounded():
    names = [f"a{i}" for i in range(400)]
    schema = {"properties": {name: {"type": "integer"} for name in names}, "required": names}
    with pytest.raises(ValueError, match=r"^tools has \d+ characters: at most"):
        call_grammar("hermes", [tool(f"f{i}", schema) for i in range(10)])
    long = [tool(f"f{i}", {"properties": {}, "description": "x" * 2000}) for i in range(40)]
    with pytest.raises(ValueError, match=r"^tools has \d+ characters: at most"):
        call_grammar("hermes", long)
    call_grammar("qwen3_xml", long)  # this grammar contains no schema descriptions
    with pytest.raises(ValueError, match=r"^tools has \d+ characters: at most"):
        call_grammar("qwen3_xml", [tool(f"f{i}", schema) for i in range(10)])
    with pytest.raises(ValueError, match=r"^tools\[1\]\.function\.parameters has \d+ characters"):
        call_grammar("hermes", [tool("f", {}), tool("g", {"description": "x" * 70_000})])
