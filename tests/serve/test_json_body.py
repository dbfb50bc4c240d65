"""Test parsing of request bodies as strict JSON with limits, and encoding of large JSON."""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schema_strategies import ANYTHING

from jpaged.serve.errors import ApiError
from jpaged.serve.http.bodies import parse_json
from jpaged.serve.http.exchange import encode_large_json

PIECE = 256 * 1024
"""Size in bytes of the chunks in which a body is scanned. Results must not depend on the chunks."""

ODD_TEXTS = ['"' * 3, "\\", "\\\\", '\\"', '\\\\"', ",:[{", "\n\u4e2d", "", ' ":1,"a":2']


def refusal_message(content: bytes, max_values: int = 10**9) -> str:
    with pytest.raises(ApiError) as refused:
        parse_json(content, max_values)
    assert refused.value.status == 400
    return str(refused.value)


@settings(max_examples=200, deadline=None)
@given(ANYTHING, st.booleans())
def test_parse_json_returns_the_encoded_value(value: Any, is_ascii: bool):
    content = json.dumps(value, ensure_ascii=is_ascii).encode()
    assert parse_json(content, 10**9) == value


@pytest.mark.parametrize("text", ODD_TEXTS)
@pytest.mark.parametrize("is_ascii", [True, False])
def test_punctuation_inside_strings_is_not_counted_as_values(text: str, is_ascii: bool):
    own = json.dumps(text * 4, ensure_ascii=is_ascii)[1:-1].encode()
    for pad in (0, *range(PIECE - 14, PIECE - 1)):
        content = b'{"%b": "%b", "b": 1}' % (own, b"x" * pad + own)
        assert parse_json(content, 17) == json.loads(content)
        assert "more than 16 JSON values" in refusal_message(content, 16)
        assert "twice" in refusal_message(content.replace(b'"b"', b'"%b"' % own))


UNITS = [
    "a",
    "\u00e9",
    "\u4e2d",
    "\U0001f600",
    "\\",
    '"',
    "\n",
    "\x00",
    "\\u0041",
    "a\U0001f600",
    "\\n",
]


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("is_ascii", [True, False])
def test_long_strings_are_parsed_correctly_at_every_chunk_boundary(unit: str, is_ascii: bool):
    for pad in range(13):
        text = "x" * pad + unit * (200_000 // len(json.dumps(unit, ensure_ascii=is_ascii)))
        value = {"a": [text, 1.5, {"b": text + "y"}], "c": "d", "e": 1}
        assert parse_json(json.dumps(value, ensure_ascii=is_ascii).encode(), 10**6) == value


BROKEN = [b'["%b\\q"]', b'["%b\\u00zz"]', b'["%b", oops]', b'[oops, "%b"]', b'["%b\n"]', b'["%b']


@pytest.mark.parametrize("body", BROKEN)
def test_parse_error_gives_the_position_after_a_long_string(body: bytes):
    whole = body % (b"x" * 100_000)
    with pytest.raises(msgspec.DecodeError) as error:
        msgspec.json.decode(whole)
    assert str(error.value).removeprefix("JSON is malformed: ") in refusal_message(whole)


def test_malformed_long_strings_are_refused():
    long = b"x" * 100_000
    for around in (b'[-"%b"]', b'[1"%b"]', b'["%b"1]', b'["%b""%b"]'):
        assert "cannot be parsed as JSON" in refusal_message(around.replace(b"%b", long))
    assert "byte 100002 is not UTF-8" in refusal_message(b'["%b\xff"]' % long)
    assert "[0] has a lone surrogate" in refusal_message(b'["%b\\ud83d"]' % long)
    assert "a key is longer than 16384 bytes" in refusal_message(b'{"%b" : 1}' % long)


@pytest.mark.parametrize("unit", [b"\\n\\u4e2d", b'\\"', b"\\\\", b"\\ud83d\\ude00"])
def test_parsing_a_long_string_holds_the_gil_only_briefly(unit: bytes):
    body = b'{"prompt":"%b"}' % (unit * (2**23 // len(unit)))
    whole = min(longest_call(lambda: msgspec.json.decode(body)) for _ in range(3))
    parts = min(longest_call(lambda: parse_json(body, 10**6)) for _ in range(3))
    assert parts < whole / 4


def longest_call(work: Callable[[], object]) -> float:
    """Run `work`, and return the CPU seconds of the longest call into C code."""
    longest = began = 0.0

    def watch(frame: object, event: str, called: object) -> None:
        nonlocal longest, began
        if event == "c_call":
            began = time.thread_time()
        elif event == "c_return":
            longest = max(longest, time.thread_time() - began)

    sys.setprofile(watch)
    try:
        work()
    finally:
        sys.setprofile(None)
    return longest


def test_string_array_or_object_counts_four_times_toward_the_limit_on_json_values():
    """Keys and decimal fractions also count four times. An integer, true, false or null counts
    once, because it takes less time to build."""
    for content, weight in (
        (b"1", 1),
        (b'"a"', 4),
        (b"[1]", 5),
        (b"[1, 2, null]", 7),
        (b'{"a": 1}', 9),
        (b'[[1], {"a": true}, ""]', 22),
        (b"-17", 1),
        (b"1.5", 4),
        (b"1e5", 1),
        (b"[]", 5),  # an empty array counts as much as [1]
    ):
        parse_json(content, weight)
        assert "JSON values" in refusal_message(content, weight - 1)


def test_long_numbers_are_limited_by_their_digits():
    """The time to parse a number is quadratic in the number of its digits."""
    numbers = b"[%b]" % b",".join([b"9" * 63] * 100)
    parse_json(numbers, 10**9)
    assert "by their digits" in refusal_message(numbers, 104 + 600)
    parse_json(b"[%b]" % b",".join([b"9" * 7] * 1000), 1004)
    assert "too long" in refusal_message(b'{"seed": %b}' % (b"9" * 200))
    text = b'{"user": "%b"}' % (b"9" * 10_000)
    assert parse_json(text, 10**9) == json.loads(text)


@settings(max_examples=100, deadline=None)
@given(ANYTHING)
def test_encode_large_json_matches_msgspec(value: Any):
    assert encode_large_json(value) == msgspec.json.encode(value)


def test_encoding_large_json_in_many_pieces_matches_msgspec():
    text = 'a"\n\u4e2d\\' * 100_000
    entry = {"token": "a", "top_logprobs": [{"token": text[:9], "logprob": -0.5}]}
    value = {
        "choices": [{"text": text, "logprobs": {"content": [entry] * 1000, "none": None}}],
        "tokens": list(range(10_000)),
        "empty": [[], {}, "", ()],
    }
    assert encode_large_json(value) == msgspec.json.encode(value)


@pytest.mark.parametrize("size", [0, 20_000])
def test_colon_inside_a_string_does_not_count_as_a_key(size: int):
    """`parse_json` decodes a string of 20,000 bytes separately from the rest of the body."""
    more = ["a" * size]
    body = {"a": "b:c", "d": {"e:": ["f: g", {"h": 1}]}, "more": more}
    assert parse_json(json.dumps(body).encode(), 10**6) == body
    for twice in ('{"a": "b:c", "a": 1', '{"x": [{"b": 1, "b": 2}]', '{"x": ":", "x": ":"'):
        with pytest.raises(ApiError, match="twice"):
            parse_json(f'{twice}, "more": {json.dumps(more)}}}'.encode(), 10**6)
    with pytest.raises(ApiError, match="too long"):
        parse_json(f'{{"a": {"1" * 200}, "more": {json.dumps(more)}}}'.encode(), 10**6)
    digits = {"a": "1" * 200, "more": more}
    assert parse_json(json.dumps(digits).encode(), 10**6) == digits
