"""Test the tool-call parsers of each family, however the answer is split into chunks."""

import itertools
import json
import random
import re
import time
from pathlib import Path
from typing import Any

import pytest
from answer_helpers import ParsedParts, check_any_three_chunks, check_any_two_chunks, parse_chunks
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.parsing.answer import AnswerParser
from jpaged.parsing.reasoning import REASONING_FAMILIES
from jpaged.parsing.stream import (
    MAX_BUFFERED_CHARACTERS,
    MAX_JSON_DEPTH,
    CallArguments,
    CallEnd,
    CallStart,
    Content,
)
from jpaged.parsing.tool_families import TOOL_CALL_FAMILIES
from jpaged.parsing.tool_families.qwen3_xml import to_json_value


def tool(name: str, **properties: Any) -> dict[str, Any]:
    definitions = {"Size": {"enum": [1, 2, None]}}
    parameters = {"type": "object", "properties": properties, "$defs": definitions}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [
    tool("get_weather", city={"type": "string"}, days={"type": "integer"}),
    tool("now"),
    tool(
        "write",
        path={"type": "string"},
        text={"type": "string"},
        lines={"type": "array"},
        mode={"anyOf": [{"type": "string"}, {"type": "null"}]},
        size={"$ref": "#/$defs/Size"},
        force={"type": "boolean"},
        ratio={"type": ["number", "null"]},
        any={},
        loop={"$ref": "#/properties/loop"},
    ),
]
PARIS = '{"city": "Paris", "days": 3}'
WEATHER = ("call", "get_weather", PARIS)

TRANSCRIPTS: list[tuple[str, str, ParsedParts]] = [
    # The chat templates of Qwen 2.5, Qwen 3 and Hermes ask for calls in this format.
    (
        "hermes",
        "I will look.\n\n<tool_call>\n"
        '{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>',
        [("content", "I will look."), WEATHER],
    ),
    (
        "hermes",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n'
        '</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n',
        [WEATHER, ("call", "now", "{}")],
    ),
    (  # The call has the arguments before the name, and an additional key.
        "hermes",
        '<tool_call>{"id": 7, "arguments": {"q": "\\u00e9\\n \\"}{ é"}, "name": "f", "x": [{}]}'
        "</tool_call> Done.\n",
        [("call", "f", '{"q": "\\u00e9\\n \\"}{ é"}'), ("content", " Done.\n")],
    ),
    (  # The call has a line break within a string, and no closing tag.
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"code": "a\nb", "n": [-1.5e3, true, null]}',
        [("call", "f", '{"code": "a\nb", "n": [-1.5e3, true, null]}')],
    ),
    (  # a missing brace
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": {}}\n</tool_call>\nAnd so on',
        [("call", "f", '{"a": {}}'), ("content", "\nAnd so on")],
    ),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', [("call", "now", "{}")]),
    ("hermes", '<tool_call>{"a\nb": 1, "name": "now"}</tool_call>', [("call", "now", "{}")]),
    # Invalid arguments are emitted unchanged, and later calls are still parsed.
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": 1,, "<tool_call>"}}</tool_call>'
        '<tool_call>{"name": "now", "arguments": {}}</tool_call>',
        [("call", "f", '{"a": 1,, "<tool_call>"}}'), ("call", "now", "{}")],
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "b', [("call", "f", '{"a": "b')]),
    # Llama 3.1 and 3.2 write calls in this format.
    (
        "llama3_json",
        '{"name": "get_weather", "parameters": {"city": "Paris", "days": 3}}',
        [WEATHER],
    ),
    (
        "llama3_json",
        '<|python_tag|>{"type": "function", "name": "now", "parameters": {}}; '
        '{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}',
        [("call", "now", "{}"), WEATHER],
    ),
    (
        "llama3_json",
        'Wait. <|python_tag|>{"name": "now", "parameters": {}}\n{"name": "f", "parameters": {}}',
        [("content", "Wait."), ("call", "now", "{}"), ("call", "f", "{}")],
    ),
    (
        "llama3_json",
        '{"name": "now", "parameters": {}}; then {"name": "f", "parameters": {}}',
        [("call", "now", "{}"), ("content", '; then {"name": "f", "parameters": {}}')],
    ),
    # Mistral 7B v0.3 writes a list of calls. Newer models of Mistral write one tag for each call.
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}, '
        '{"name": "now", "arguments": {}}]',
        [WEATHER, ("call", "now", "{}")],
    ),
    (
        "mistral",
        "So: [TOOL_CALLS]get_weather" + PARIS + "[TOOL_CALLS]now[ARGS]{}",
        [("content", "So:"), WEATHER, ("call", "now", "{}")],
    ),
    ("mistral", "[TOOL_CALLS]now[CALL_ID]a1b2c3d4e[ARGS]{}", [("call", "now", "{}")]),
    (
        "mistral",
        '[TOOL_CALLS]f[ARGS]{"a": oops[TOOL_CALLS]now{} ',
        [("call", "f", '{"a": oops'), ("call", "now", "{}")],
    ),
    # Qwen3-Coder writes calls in this format.
    (
        "qwen3_xml",
        "I will look.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
        [("content", "I will look."), WEATHER],
    ),
    (
        "qwen3_xml",
        "<tool_call>\n<function=now>\n</function>\n</tool_call>\n"
        "<tool_call><function=now></function></tool_call>",
        [("call", "now", "{}"), ("call", "now", "{}")],
    ),
    (
        "qwen3_xml",
        "<tool_call>\n<function=write>\n<parameter=path>\na/b\n</parameter>\n<parameter=text>\n"
        '\n  "x" </parameter> y\\\n\n</parameter>\n<parameter=lines>\n[1, "a"]\n</parameter>\n'
        "<parameter=mode>null</parameter><parameter=size>2</parameter><parameter=force>True"
        "</parameter><parameter=ratio>0.5</parameter><parameter=other>7</parameter></function>"
        "</tool_call>",
        [
            (
                "call",
                "write",
                '{"path": "a/b", "text": "\\n  \\"x\\" </parameter> y\\\\\\n", "lines": [1, "a"], '
                '"mode": null, "size": 2, "force": true, "ratio": 0.5, "other": "7"}',
            )
        ],
    ),
    (  # The call lacks the outer tags, and its function and parameters are unknown.
        "qwen3_xml",
        "<function=f><parameter=a>1</parameter></function> Done",
        [("call", "f", '{"a": "1"}'), ("content", " Done")],
    ),
    (
        "qwen3_xml",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nPar",
        [("call", "get_weather", '{"city": "Par')],
    ),
    (
        "qwen3_xml",
        "<tool_call>\n<function=get_weather>\n<parameter=days>\n12",
        [("call", "get_weather", '{"days": 12')],
    ),
    (  # if the closing tag is missing, the line break belongs to the value
        "qwen3_xml",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nPar\n",
        [("call", "get_weather", '{"city": "Par\\n')],
    ),
    ("qwen3_xml", "<tool_call><function=now>", [("call", "now", "{")]),
    (
        "qwen3_xml",
        "<function=get_weather><parameter=days>3</parameter> so </function>",
        [("call", "get_weather", '{"days": 3</parameter> so </function>')],
    ),
]


@pytest.mark.parametrize(("family", "text", "expected"), TRANSCRIPTS)
def test_tool_call_transcripts_parse_the_same_in_any_two_chunks(
    family: str, text: str, expected: ParsedParts
):
    check_any_two_chunks(text, expected, tool_calls=family, tools=TOOLS)


SHORT: dict[str, tuple[str, ParsedParts]] = {
    "hermes": (
        'a \n<tool_call>{"name":"f","arguments":{"b":"\\""}}\n</tool_call>\n',
        [("content", "a"), ("call", "f", '{"b":"\\""}')],
    ),
    "llama3_json": (
        ' {"name":"f","parameters":{"b":1}}; {"c":2}',
        [("call", "f", '{"b":1}'), ("content", '; {"c":2}')],
    ),
    "mistral": (
        '[TOOL_CALLS] [{"name":"f","arguments":{"b":[]}}] c',
        [("call", "f", '{"b":[]}'), ("content", " c")],
    ),
    "qwen3_xml": (
        "<function=f><parameter=b>\nc\n\n</parameter></function>",
        [("call", "f", '{"b": "c\\n"}')],
    ),
}


@pytest.mark.parametrize("family", SHORT)
def test_short_tool_calls_parse_the_same_in_any_three_chunks(family: str):
    text, expected = SHORT[family]
    check_any_three_chunks(text, expected, tool_calls=family)


TEXTS = [
    *("", " \n ", "a < b", "<tool_call", "<tool_call>", "</tool_call>", "<tool_calls>{}"),
    *('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "  <tool_call> {} \n"),
    *('<tool_call>{"name": "", "arguments": {}}</tool_call>', "<tool_call>\n  no\n</tool_call>\n"),
    *('<tool_call>{"name": 1, "arguments": {}}', '<tool_call>{"arguments": {}}</tool_call>'),
    *('<tool_call>{"name": "f", "arguments": "{}"}', '<tool_call>{"name": "\\ud800"}</tool_call>'),
    *('<tool_call>{"name": "f" "arguments": {}}', '<tool_call>{"name": "f", x}</tool_call>'),
    *('<tool_call>{"name": "' + "f" * 257 + '", "arguments": {}}', "<tool_call>" * 40),
    *(
        "{}",
        '{"name": "Bob"}',
        '{"city": "Paris", "name": "f", "parameters": {}}',
        "<|python_tag|>",
    ),
    *('<|python_tag|>brave.call(q="x")', '{"name": "f", "parameters": null}', '; {"name": "f"}'),
    *('See: {"name": "f", "parameters": {}}', '[{"name": "f", "parameters": {}}]', "<|python_tag"),
    *("[TOOL_CALLS", "[TOOL_CALLS] []", "[TOOL_CALLS]", "[TOOL_CALLS]two words{}", "[ARGS]{}"),
    *("[TOOL_CALLS]f[ARGS]", "[TOOL_CALLS]f[CALL_ID]abc", "[TOOL_CALLS] [1]", "[TOOL_CALLS]{}"),
    *("<function=", "<function=>", "<function=a\nb></function>", "<tool_call>\n<function f>"),
    *("<tool_call><parameter=a>1</parameter></tool_call>", "</function></tool_call>", "<function"),
]


@pytest.mark.parametrize("family", TOOL_CALL_FAMILIES)
def test_text_that_resembles_a_call_is_content(family: str):
    for text in TEXTS:
        expected: ParsedParts = [("content", text)] if text else []
        check_any_two_chunks(text, expected, tool_calls=family)


# The following tests parse random texts in random chunks.

FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "["),
    *("<function=f>", "</function>", "<parameter=city>", "</parameter>", "<tool_", "]", "{", "}"),
    *(
        '{"name": "f", "arguments": ',
        '"name"',
        '"arguments"',
        '"parameters"',
        '{"a": "b\\n"}',
        "{}",
    ),
    *(": ", ",", ", ", "; ", "\n", "  ", "\\", '"'),
    *("1", "-2.5e", "true", "nul", "é", "a", "</", "<"),
    *('{"name": "now", "parameters": {"x": [1, {"y": "z"}]}}', " " * 70, "f"),
    *("<function=get_weather>", "<parameter=days>", "\n<tool_call>\n"),
    *('{"arguments": {"k": 0}, "name": "g"}', "[TOOL_CALLS]g"),
]
ANSWERS = st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join)


@pytest.mark.parametrize("family", TOOL_CALL_FAMILIES)
@given(text=ANSWERS, data=st.data())
@settings(max_examples=150, deadline=None)
def test_random_texts_parse_the_same_in_any_chunks(family: str, text: str, data: st.DataObject):
    whole = parse_chunks([text], tool_calls=family, tools=TOOLS)
    assert parse_chunks(text, tool_calls=family, tools=TOOLS) == whole
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=3)))
    cuts = [0, *places, len(text)]
    pieces = [text[i:j] for i, j in itertools.pairwise(cuts)]
    assert parse_chunks(pieces, tool_calls=family, tools=TOOLS) == whole
    if all(part[0] == "content" for part in whole):
        assert "".join(part[1] for part in whole) == text


NAMES = st.from_regex(r"[a-zA-Z0-9_-]{1,12}", fullmatch=True)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8"), max_size=12),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=6), VALUES, max_size=3)
CALLS = st.lists(st.tuples(NAMES, ARGUMENTS), min_size=1, max_size=3)
WRITTEN = {
    "hermes": lambda calls: "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {text}}}\n</tool_call>'
        for name, text in calls
    ),
    "llama3_json": lambda calls: "; ".join(
        f'{{"name": "{name}", "parameters": {text}}}' for name, text in calls
    ),
    "mistral": lambda calls: (
        "[TOOL_CALLS] ["
        + ", ".join(f'{{"name": "{name}", "arguments": {text}}}' for name, text in calls)
        + "]"
    ),
}


@pytest.mark.parametrize("family", WRITTEN)
@given(calls=CALLS, ascii_only=st.booleans(), size=st.integers(1, 9))
@settings(max_examples=60, deadline=None)
def test_json_arguments_are_emitted_unchanged(
    family: str, calls: list[tuple[str, Any]], ascii_only: bool, size: int
):
    texts = [(name, json.dumps(own, ensure_ascii=ascii_only)) for name, own in calls]
    text = WRITTEN[family](texts)
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    assert parse_chunks(pieces, tool_calls=family) == [("call", *each) for each in texts]


@given(value=st.text(st.characters(codec="utf-8"), max_size=30), size=st.integers(1, 9))
@settings(max_examples=60, deadline=None)
def test_unquoted_values_become_json_strings(value: str, size: int):
    text = f"<function=write>\n<parameter=text>\n{value}\n</parameter>\n</function>"
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    ((_, name, arguments),) = parse_chunks(pieces, tool_calls="qwen3_xml", tools=TOOLS)
    assert (name, json.loads(arguments)) == ("write", {"text": value})


LONG_LIST = "[" + "1, " * MAX_BUFFERED_CHARACTERS + "1]"


@pytest.mark.parametrize(
    ("parameter", "text", "value"),
    [
        ("days", " 12 ", 12),
        ("days", "twelve", "twelve"),
        ("days", "1.5", "1.5"),
        ("days", "None", None),
        ("days", "9" * 401, "9" * 401),
        ("city", "null", "null"),
        ("city", "12", "12"),
        ("mode", "None", None),
        ("mode", "r", "r"),
        ("ratio", "3", 3),
        ("ratio", "-2.5e3", -2500.0),
        ("ratio", "nan", "nan"),
        ("ratio", "null", None),
        ("force", "FALSE", False),
        ("force", "yes", "yes"),
        ("lines", '["a", {"b": [1]}]', ["a", {"b": [1]}]),
        ("lines", "[1,]", "[1,]"),
        ("lines", '{"a": 1}', '{"a": 1}'),
        ("lines", "[1] [2]", "[1] [2]"),
        ("lines", "[" * 5000, "[" * 5000),
        ("size", "2", 2),
        ("size", "two", "two"),
        ("any", '{"a": 1}', {"a": 1}),
        ("any", "1.5", 1.5),
        ("any", '"quoted"', '"quoted"'),
        ("any", "tell me", "tell me"),
        ("loop", "7", 7),
        ("unknown", "7", "7"),
        ("lines", LONG_LIST, LONG_LIST),
    ],
)
def test_unquoted_values_become_json_of_the_parameter_type(parameter: str, text: str, value: Any):
    answer = f"<function=write><parameter={parameter}>{text}</parameter></function>"
    if parameter in ("days", "city"):
        answer = answer.replace("write", "get_weather")
    for pieces in ([answer], [answer[:40], answer[40:]]):
        ((_, _, arguments),) = parse_chunks(pieces, tool_calls="qwen3_xml", tools=TOOLS)
        assert json.loads(arguments) == {parameter: value}


def test_value_of_a_parameter_without_types_is_a_string():
    assert to_json_value("7", frozenset()) == '"7"'


# Streaming


def test_call_start_is_emitted_before_the_arguments_end():
    parser = AnswerParser(tool_calls="hermes")
    assert parser.feed("Look:\n<tool_") == [Content("Look:")]
    assert parser.feed('call>{"name": "f", "arguments"') == []
    (start, *rest) = parser.feed(': {"a": "b')
    assert isinstance(start, CallStart)
    assert (start.index, start.name, len(start.id)) == (0, "f", 29)
    assert rest == [CallArguments(0, '{"a": "b')]
    assert parser.feed('c"}}</tool_call>') == [CallArguments(0, 'c"}'), CallEnd(0)]
    assert parser.end() == []


def test_chunks_of_a_string_value_are_emitted_as_they_arrive():
    parser = AnswerParser(tool_calls="qwen3_xml", tools=TOOLS)
    parser.feed("<function=write><parameter=text>\n")
    assert parser.feed("one\n") == [CallArguments(0, '"one')]
    assert parser.feed("two</par") == [CallArguments(0, "\\ntwo")]


@pytest.mark.parametrize("family", TOOL_CALL_FAMILIES)
def test_size_of_buffered_text_is_bounded(family: str):
    parser = AnswerParser(tool_calls=family)
    start = {
        "hermes": '<tool_call>{"a": "',
        "llama3_json": '{"id": "',
        "mistral": '[TOOL_CALLS][{"a": "',
        "qwen3_xml": "<tool_call>",
    }[family]
    events = parser.feed(start)
    assert events == []
    for _ in range(MAX_BUFFERED_CHARACTERS // 100 + 1):
        events += parser.feed("x" * 100)
    num_told = sum(len(event.text) for event in events if isinstance(event, Content))
    assert num_told >= MAX_BUFFERED_CHARACTERS
    assert parser.feed("y") == [Content("y")]


def test_buffer_limit_does_not_depend_on_the_chunks():
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    start = '<tool_call>{"a": "'
    most = MAX_BUFFERED_CHARACTERS - len(start)
    for size in (most - 50, most - 1, most, most + 100):
        text = start + "x" * size + call
        whole = parse_chunks([text], tool_calls="hermes")
        for piece in (1, 7, 64, 1000):
            pieces = [text[i : i + piece] for i in range(0, len(text), piece)]
            assert parse_chunks(pieces, tool_calls="hermes") == whole
        kinds = [part[0] for part in whole]
        assert kinds == (["content"] if size < most else ["content", "call"])


def test_only_the_first_call_is_parsed_if_parallel_calls_are_disabled():
    text = TRANSCRIPTS[1][1] + "and text"
    expected = [WEATHER, ("content", "\nand text")]
    check_any_two_chunks(text, expected, tool_calls="hermes", parallel=False)


def test_call_ids_match_the_chat_templates_of_the_family():
    def ids(family: str, text: str) -> list[str]:
        parser = AnswerParser(tool_calls=family)
        return [it.id for it in parser.feed(text) + parser.end() if isinstance(it, CallStart)]

    (made,) = ids("hermes", SHORT["hermes"][0])
    assert made.startswith("call_")
    assert made.removeprefix("call_").isalnum()
    (made,) = ids("mistral", "[TOOL_CALLS]f{}")
    assert len(made) == 9
    assert made.isalnum()
    assert ids("mistral", "[TOOL_CALLS]f[CALL_ID]a1b2c3d4e[ARGS]{}") == ["a1b2c3d4e"]
    assert ids("mistral", "[TOOL_CALLS]f[CALL_ID]ab[ARGS]{}") != ["ab"]
    broken = "[TOOL_CALLS]f[CALL_ID]a1b2c3d4e[ARGS] no [TOOL_CALLS]f{}"
    assert ids("mistral", broken) != ["a1b2c3d4e"]


def test_json_depth_of_arguments_is_bounded():
    deep = '{"a": ' + "[" * (MAX_JSON_DEPTH - 1) + "]" * (MAX_JSON_DEPTH - 1) + "}"
    deeper = deep.replace("[]", "[[]]")
    for arguments, expected in ((deep, deep), (deeper, deeper + "}")):
        text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
        assert parse_chunks([text], tool_calls="hermes") == [("call", "f", expected)]


@pytest.mark.parametrize("family", TOOL_CALL_FAMILIES)
@pytest.mark.parametrize("fragment", FRAGMENTS[:-8])
def test_parsing_time_is_linear_in_the_text_length(family: str, fragment: str):
    """Some of the texts repeat the start of a call, which the parser must buffer."""

    def seconds(num_characters: int) -> float:
        text = (fragment * num_characters)[:num_characters]
        begin = time.process_time()
        parse_chunks((text[i : i + 4] for i in range(0, len(text), 4)), tool_calls=family)
        return time.process_time() - begin

    quarter = min(seconds(2000) for _ in range(3))
    # For four times the text, a linear parser takes 3.7 to 4.5 times as long, and a quadratic
    # parser takes 16 times as long.
    assert any(seconds(8000) < 8 * quarter for _ in range(3))


def test_random_punctuation_is_emitted_completely():
    rng = random.Random(0)
    for family in TOOL_CALL_FAMILIES:
        for _ in range(300):
            text = "".join(rng.choice('<>{}[]":,;\\ tfnau=/|') for _ in range(40))
            parts = parse_chunks([text], tool_calls=family)
            assert "".join(part[1] for part in parts) == text


def test_tools_page_lists_every_parser_family():
    page = (Path(__file__).parents[2] / "docs" / "tools.md").read_text(encoding="utf-8")
    tables = page.partition("## Which parser")[2].partition("\n## ")[0]
    listed = re.findall(r"^\| `(\w+)` \|", tables, re.MULTILINE)
    assert sorted(listed) == sorted(TOOL_CALL_FAMILIES + REASONING_FAMILIES)
