"""Test with an independent validator that answers match their specification if masks allow them."""

import json
import re
import threading
from typing import Any

import jsonschema
import pytest
from grammar_walks import (
    ENDING,
    EOS,
    GRAMMARS,
    TOKENIZER,
    VOCAB_SIZE,
    accepts,
    allowed,
    matcher_of,
    walk,
)
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from jpaged import StructuredOutputs, Tokenizer
from jpaged.structured_outputs import bounds
from jpaged.structured_outputs import compiler as grammar_module
from jpaged.structured_outputs.compiler import MAX_CACHED_GRAMMARS, GrammarCompiler
from jpaged.structured_outputs.lexers import LexerUse
from jpaged.structured_outputs.matcher import GrammarError

WORD = {"type": "string", "maxLength": 6}
SCHEMAS: dict[str, Any] = {
    "person": {
        "type": "object",
        "properties": {"name": WORD, "age": {"type": "integer", "minimum": 0, "maximum": 120}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "optional": {
        "type": "object",
        "properties": {"a": WORD, "b": {"type": "boolean"}, "c": {"type": "null"}},
        "required": ["b"],
        "additionalProperties": False,
    },
    "open": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    "values": {"type": "object", "additionalProperties": {"type": "integer"}, "maxProperties": 2},
    "patterned": {
        "type": "object",
        "patternProperties": {"^n_": {"type": "number"}},
        "additionalProperties": False,
    },
    "list": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3},
    "pair": {"type": "array", "prefixItems": [WORD, {"type": "number"}], "items": False},
    "nested": {
        "type": "array",
        "items": {"type": "array", "items": {"enum": [0, 1]}, "maxItems": 2},
        "maxItems": 2,
    },
    "enum": {"enum": ["a", 1, None, True, [1], {"b": 2}, 1.5, 'é"\n']},
    "const": {"const": {"a": [1, {"b": None}]}},
    "any": {"anyOf": [{"type": "integer", "minimum": 3}, {"type": "string", "pattern": "^a+$"}]},
    "one": {"oneOf": [WORD, {"type": "integer"}, {"type": "null"}]},
    "all": {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
            {"type": "object", "properties": {"b": {"type": "boolean"}}, "required": ["b"]},
        ]
    },
    "tagged": {
        "anyOf": [
            {
                "type": "object",
                "properties": {"kind": {"const": kind}, "size": {"type": "integer"}},
                "required": ["kind", "size"],
                "additionalProperties": False,
            }
            for kind in ("cat", "dog")
        ]
    },
    "list_of_links": {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "value": {"type": "integer"},
                    "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
                },
                "required": ["value", "next"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/node",
    },
    "narrowed": {
        "definitions": {"word": {"type": "string"}},
        "type": "object",
        "properties": {"a": {"$ref": "#/definitions/word", "maxLength": 2}},
        "required": ["a"],
        "additionalProperties": False,
    },
    "types": {"type": ["string", "null", "integer"], "maxLength": 4},
    "number": {"type": "number", "minimum": -1.5, "exclusiveMaximum": 2.5},
    "integer": {"type": "integer", "exclusiveMinimum": 3, "maximum": 1000},
    "even": {"type": "integer", "multipleOf": 4, "minimum": 0, "maximum": 100},
    "string": {"type": "string", "minLength": 2, "maxLength": 5},
    "pattern": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"},
    "pattern_and_length": {"type": "string", "pattern": "^[a-z]+$", "maxLength": 3},
    "date": {"type": "string", "format": "date"},
    "date-time": {"type": "string", "format": "date-time"},
    "time": {"type": "string", "format": "time"},
    "duration": {"type": "string", "format": "duration"},
    "email": {"type": "string", "format": "email", "maxLength": 20},
    "uuid": {"type": "string", "format": "uuid"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "ipv6": {"type": "string", "format": "ipv6"},
    "names": {
        "type": "object",
        "properties": {'a"b\\\n': {"type": "integer"}, "é": {"type": "null"}},
        "required": ['a"b\\\n', "é"],
        "additionalProperties": False,
    },
    "pydantic": {
        "$defs": {"Unit": {"enum": ["C", "F"], "title": "Unit", "type": "string"}},
        "properties": {
            "unit": {"$ref": "#/$defs/Unit", "default": "C"},
            "note": {"anyOf": [WORD, {"type": "null"}], "default": None, "title": "Note"},
        },
        "title": "Report",
        "type": "object",
        "additionalProperties": False,
    },
    "untyped": {"properties": {"a": {"type": "integer"}}, "minimum": 3, "maxLength": 5},
}
FORMATS = jsonschema.Draft202012Validator.FORMAT_CHECKER


@pytest.mark.parametrize("name", SCHEMAS)
def test_answers_sampled_with_masks_conform_to_the_schema(name: str):
    spec = StructuredOutputs(json=SCHEMAS[name])
    validator = jsonschema.Draft202012Validator(SCHEMAS[name], format_checker=FORMATS)
    texts = [walk(spec, seed) for seed in range(12)]
    ended = [text for text in texts if text is not None]
    assert len(ended) >= 8
    for text in ended:
        validator.validate(json.loads(text))


@pytest.mark.parametrize(
    ("spec", "pattern"),
    [
        ({"regex": r"[a-c]{2,4}(-[0-9]+)?"}, r"[a-c]{2,4}(-[0-9]+)?"),
        ({"choice": ["yes", "yes, but", 'a"b\\c\n\t', "é😀", "/x/"]}, None),
        ({"grammar": 'start: "(" start? ")" | /[a-z]/'}, r"\(*[a-z]?\)*"),
    ],
)
def test_answers_sampled_with_masks_match_their_regex_or_choice_or_grammar(
    spec: dict[str, Any], pattern: str | None
):
    texts = {walk(StructuredOutputs(**spec), seed) for seed in range(160)} - {None}
    assert texts
    if pattern is None:
        assert texts == set(spec["choice"])
    else:
        assert all(re.fullmatch(pattern, text or "") for text in texts)


def test_json_object_accepts_only_json_objects():
    spec = StructuredOutputs(json_object=True)
    assert accepts(spec, '{"a": [1, {"b": null}]}')
    assert not accepts(spec, "[1]")
    assert not accepts(spec, '{"a": 1')


@pytest.mark.parametrize(
    ("text", "is_answer"),
    [
        ('{"a":1}', True),
        ('{ "a" : 1 }', True),
        ('{"a":1,"b":"é\\n"}', True),
        ('{  "a":1}', False),  # unbounded whitespace
        ('{"\\u0061":1}', False),  # the name "a" is escaped
        ('{"a":1,"\\u0061":"x"}', False),
        ('{"a":1,"a":"x"}', False),
        (' {"a":1}', False),
        ('{"a":1} ', False),
        ('{"a":"x"}', False),
        ("{}", False),
    ],
)
def test_json_with_escaped_or_duplicate_names_or_long_whitespace_is_refused(
    text: str, is_answer: bool
):
    assert accepts(StructuredOutputs(json=SCHEMAS["open"]), text) is is_answer


@pytest.mark.parametrize(
    ("format", "text", "is_answer"),
    [
        ("date", "2024-02-29", True),
        ("date", "2023-02-29", False),
        ("date", "1900-02-29", False),
        ("date", "2000-02-29", True),
        ("date", "2023-02-28", True),
        ("date", "2023-04-31", False),
        ("date", "0000-01-01", False),
        ("date", "0010-12-31", True),
        ("time", "23:59:59Z", True),
        ("time", "23:59:60Z", False),
        ("time", "24:00:00Z", False),
        ("time", "00:00:00.5+23:59", True),
        ("date-time", "2024-02-29T00:00:00Z", True),
        ("date-time", "2023-02-29T00:00:00Z", False),
        ("date-time", "2016-12-31T23:59:60Z", False),
    ],
)
def test_only_dates_and_times_that_exist_are_accepted(format: str, text: str, is_answer: bool):
    for schema in ({"format": format}, {"type": "string", "format": format, "maxLength": 40}):
        assert accepts(StructuredOutputs(json=schema), json.dumps(text)) is is_answer
    grammar = StructuredOutputs(grammar=f'start: "<" %json {{"format": "{format}"}} ">"')
    assert accepts(grammar, f'<"{text}">') is is_answer
    assert not is_answer or FORMATS.conforms(text, format)
    assert accepts(StructuredOutputs(json={"format": format}), "3")


def test_date_format_and_pattern_are_both_enforced():
    spec = StructuredOutputs(json={"type": "string", "format": "date", "pattern": "^20[01]"})
    assert accepts(spec, '"2016-02-29"')
    assert not accepts(spec, '"2024-02-29"')
    assert not accepts(spec, '"2015-02-29"')


def test_schema_inside_a_grammar_is_enforced_like_a_json_schema():
    grammar = 'start: "<" %json {"properties": {"a": true}, "required": ["a"]} ">" tail\ntail: "!"'
    spec = StructuredOutputs(grammar=grammar)
    assert accepts(spec, '<{"a": "é"}>!')
    assert not accepts(spec, '<{  "a": 1}>!')
    assert not accepts(spec, '<{"\\u0061": 1}>!')


NAMES = ("a", "b", 'c"\n')
TEXTS = st.text(st.characters(codec="utf-8", min_codepoint=32), max_size=4).map(
    lambda text: text.replace("\x7f", "")
)
NUMBERS = st.integers(-(2**53), 2**53) | st.integers(-30, 30)
SCALARS = st.none() | st.booleans() | NUMBERS | TEXTS
CONSTANTS = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXTS, inner, max_size=2),
    max_leaves=4,
)
PATTERNS = st.sampled_from(["^[ab]{1,3}$", "^x", "^(é|ü)+$", r"^\d{2}$", r"^[^\n]{0,3}$"])


RANGES = [("minimum", "maximum"), ("exclusiveMinimum", "exclusiveMaximum")]
FORMAT_NAMES = ["date", "date-time", "time", "ipv4"]


@st.composite
def ranges(draw: st.DrawFn) -> dict[str, Any]:
    low, size = draw(st.integers(-(10**6), 10**6)), draw(st.integers(2, 1000))
    words = draw(st.sampled_from(RANGES))
    kind = draw(st.sampled_from(["integer", "number"]))
    more = draw(st.sampled_from([{}, {"multipleOf": 1}]))
    return {"type": kind, **dict(zip(words, (low, low + size), strict=True)), **more}


def strings() -> st.SearchStrategy[dict[str, Any]]:
    return st.one_of(
        st.builds(lambda low, more: {"minLength": low, "maxLength": low + more}, LOW, LOW),
        st.builds(lambda it: {"pattern": it}, PATTERNS),
        st.builds(lambda it: {"format": it}, st.sampled_from(FORMAT_NAMES)),
    ).map(lambda it: {"type": "string", **it})


LOW = st.integers(0, 3)


def objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.builds(
        lambda properties, needed, others: {
            "type": "object",
            "properties": properties,
            "required": sorted(needed),
            "additionalProperties": others,
        },
        st.fixed_dictionaries(dict.fromkeys(NAMES, inner)),
        st.sets(st.sampled_from(NAMES)),
        st.just(False) | inner,
    )


def arrays(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.builds(
        lambda items, first, low, more: {
            "type": "array",
            "items": items,
            "prefixItems": first,
            "minItems": low,
            "maxItems": low + more,
        },
        inner,
        st.lists(inner, min_size=1, max_size=2),
        st.integers(0, 2),
        st.integers(0, 2),
    )


SMALL = st.recursive(
    st.one_of(
        ranges(),
        strings(),
        st.builds(lambda it: {"const": it}, CONSTANTS),
        st.builds(lambda it: {"enum": it}, st.lists(CONSTANTS, min_size=1, max_size=3)),
    ),
    lambda inner: st.one_of(
        objects(inner),
        arrays(inner),
        st.builds(lambda it: {"anyOf": it}, st.lists(inner, min_size=1, max_size=3)),
        st.builds(lambda it: {"allOf": [it, it]}, inner),
        st.builds(lambda it: {"$ref": "#/$defs/own", "$defs": {"own": it}}, inner),
    ),
    max_leaves=8,
)


def without_definitions(schema: dict[str, Any]) -> dict[str, Any]:
    """Move all definitions inside a schema to its root, and change the references to them."""
    definitions: dict[str, Any] = {}

    def moved(it: Any) -> Any:
        if isinstance(it, list):
            return [moved(each) for each in it]
        if not isinstance(it, dict) or "const" in it or "enum" in it:
            return it
        own = {key: moved(each) for key, each in it.items()}
        if "$ref" in own:
            name = f"d{len(definitions)}"
            definitions[name] = own["$defs"]["own"]
            return {"$ref": f"#/$defs/{name}"}
        return own

    return {**moved(schema), "$defs": definitions}


@given(schema=SMALL.map(without_definitions), seed=st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_answers_sampled_with_masks_conform_to_random_schemas(schema: dict[str, Any], seed: int):
    try:
        text = walk(StructuredOutputs(json=schema), seed)
    except ValueError:  # the schema exceeds a limit, or llguidance cannot enforce it
        reject()
    if text is not None:
        jsonschema.Draft202012Validator(schema, format_checker=FORMATS).validate(json.loads(text))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"regex": "(a"}, r"structured_outputs\.regex cannot be enforced: .*unclosed group"),
        ({"regex": "a(?=b)"}, r"structured_outputs\.regex cannot be enforced"),
        ({"grammar": "start: x"}, r"structured_outputs\.grammar cannot be enforced: .*x"),
        ({"grammar": 'begin: "a"'}, r"structured_outputs\.grammar cannot be enforced"),
        ({"json": {"minimum": 5, "maximum": 4, "type": "integer"}}, "minimum"),
        ({"json": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}, "oneOf"),
    ],
)
def test_invalid_grammar_error_names_the_field(spec: dict[str, Any], message: str):
    asked = StructuredOutputs(**spec)
    with pytest.raises(GrammarError, match=message):
        GRAMMARS.compile(asked)
    with pytest.raises(GrammarError, match=message):
        GRAMMARS.submit(asked, ENDING).result(10)


def test_too_expensive_grammars_are_rejected_at_compilation():
    names = [f"p{i}" for i in range(1200)]
    many = {"anyOf": [{"required": [name], "type": "object"} for name in names[:200]]}
    many = {"allOf": [many, {"properties": {name: {} for name in names}, "required": names}]}
    for spec in (StructuredOutputs(json=many), StructuredOutputs(regex="a?" * 400 + "b{9999}")):
        with pytest.raises(GrammarError, match="cannot be enforced"):
            GRAMMARS.compile(spec)


# Tokens


def test_end_token_is_allowed_where_the_grammar_may_end():
    matcher = matcher_of(StructuredOutputs(regex="a|ab"), frozenset({EOS, 5}))
    a, b = (TOKENIZER.encode(it, add_special_tokens=False)[0] for it in "ab")
    assert allowed(matcher) == {a}
    matcher.accept(a)
    assert allowed(matcher) == {b, EOS, 5}
    assert not matcher.is_stopped
    matcher.accept(EOS)  # the end token does not advance the matcher
    matcher.accept(b)
    assert matcher.is_stopped
    ignoring = matcher_of(StructuredOutputs(regex="a|ab"), frozenset())
    ignoring.accept(a)
    assert allowed(ignoring) == {b}


def test_special_tokens_and_ids_beyond_the_tokenizer_are_never_allowed():
    matcher = matcher_of(StructuredOutputs(regex="(?s:.)*"))
    special = set(TOKENIZER.special_token_ids) - {EOS}
    assert special
    assert not special & allowed(matcher)
    assert max(allowed(matcher)) < len(TOKENIZER) < VOCAB_SIZE


def test_disallowed_token_raises_a_grammar_error():
    matcher = matcher_of(StructuredOutputs(choice=["a"]))
    with pytest.raises(GrammarError, match=r"structured_outputs\.choice"):
        matcher.accept(TOKENIZER.encode("b", add_special_tokens=False)[0])
    with pytest.raises(GrammarError, match=r"structured_outputs\.choice"):
        allowed(matcher)


@pytest.mark.parametrize("more", range(33))
def test_answers_work_with_any_vocabulary_padding(more: int):
    """The engine's masks may be one word longer or shorter than llguidance's masks."""
    grammars = GrammarCompiler(TOKENIZER, len(TOKENIZER) + more, frozenset({EOS}))
    grammars.try_random_answer(StructuredOutputs(regex="[ab]{1,30}"), ENDING)
    with pytest.raises(GrammarError, match="regex cannot be enforced"):
        grammars.try_random_answer(StructuredOutputs(regex="(a"), ENDING)


def sentencepiece_like() -> Tokenizer:
    """Return a tokenizer like Llama 2's: spaces are ▁, unknown characters are byte tokens."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    pieces += ["▁", "▁a", "ab", "a", "b", "c", '"', "{", "}", ":", "1", "▁1"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    rust = RustTokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    rust.normalizer = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    rust.decoder = decoders.Sequence(steps)
    rust.add_special_tokens(["<unk>", "<s>", "</s>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=rust, eos_token="</s>", unk_token="<unk>")
    return Tokenizer(fast)


def test_masks_are_correct_for_a_sentencepiece_tokenizer_with_byte_fallback():
    tokenizer = sentencepiece_like()
    size = len(tokenizer)
    grammars = GrammarCompiler(tokenizer, size, frozenset({2}))
    matcher = grammars.compile(StructuredOutputs(regex="ab? a|é")).matcher(frozenset({2}))
    ids = tokenizer.hf_tokenizer.convert_tokens_to_ids
    assert allowed(matcher, size) >= set(ids(["a", "ab", "<0xC3>"]))
    assert not allowed(matcher, size) & set(ids(["b", "▁a", "<0xA9>"]))
    for piece in ("ab", "▁a"):
        matcher.accept(ids(piece))
    assert matcher.is_stopped


# Reasoning before the grammar


def matcher_after(text: str, spec: StructuredOutputs) -> Any:
    matcher = matcher_of(spec)
    for token in TOKENIZER.encode(text, add_special_tokens=False):
        assert token in allowed(matcher), text
        matcher.accept(token)
    return matcher


def test_grammar_applies_after_the_reasoning_end_tag():
    spec = StructuredOutputs(choice=["ab"]).with_reasoning("</think>")
    digit = TOKENIZER.encode("7", add_special_tokens=False)[0]
    for text in ("", "7 <think> x", "7 </thi", "x</think"):
        assert digit in allowed(matcher_after(text, spec))
        assert EOS not in allowed(matcher_after(text, spec))
    for text in ("7</think>", "</think>", "x</think>\n", "x</think>\n\n"):
        matcher = matcher_after(text, spec)
        assert digit not in allowed(matcher)
        assert EOS not in allowed(matcher)
        left = 2 - text.count("\n")
        breaks = TOKENIZER.encode("\n", add_special_tokens=False)
        assert (breaks[0] in allowed(matcher)) == (left > 0)
    assert matcher_after("x</think>\nab", spec).is_stopped


def test_grammar_applies_immediately_when_reasoning_does_not_start():
    spec = StructuredOutputs(choice=["ab"]).with_reasoning("</think>", "<think>")
    first = TOKENIZER.encode("<think>", add_special_tokens=False)[0]
    a = TOKENIZER.encode("a", add_special_tokens=False)[0]
    assert allowed(matcher_of(spec)) == {first, a}
    assert matcher_after("ab", spec).is_stopped
    assert matcher_after("<think>7 7</think>\n\nab", spec).is_stopped


# Cached grammars and their lexers


def test_grammar_cache_is_bounded():
    grammars = GrammarCompiler(TOKENIZER, VOCAB_SIZE, frozenset({EOS}))
    forms = [StructuredOutputs(choice=[f"a{i}"]) for i in range(MAX_CACHED_GRAMMARS + 1)]
    first = grammars.compile(forms[0])
    again = StructuredOutputs(choice=["a0"])
    assert grammars.compile(again).lexers is first.lexers
    for spec in forms[1:]:
        grammars.compile(spec)
    assert grammars.compile(forms[0]).lexers is not first.lexers


def test_matchers_of_one_grammar_are_independent():
    one, other = (matcher_of(StructuredOutputs(regex="[ab]{2}")) for _ in range(2))
    a, b = (TOKENIZER.encode(it, add_special_tokens=False)[0] for it in "ab")
    for token in (a, b):
        one.accept(token)
    assert one.is_stopped
    assert allowed(other) == {a, b}


def test_each_answer_gets_an_exclusive_lexer_that_is_reused(monkeypatch: pytest.MonkeyPatch):
    """llguidance's copies of a matcher share a lock, so they compute one mask at a time."""
    monkeypatch.setattr(bounds, "MAX_GRAMMAR_LEXERS", 4)
    grammars = GrammarCompiler(TOKENIZER, VOCAB_SIZE, frozenset({EOS}))
    spec = StructuredOutputs(regex="[ab]{2}")
    lexers = grammars.compile(spec).lexers
    assert (lexers.num_spare, lexers.num_lexers) == (1, 1)
    for _ in range(2):
        matchers = grammars.submit(spec, ENDING, 3).result(10)
        assert (lexers.num_spare, lexers.num_lexers) == (0, 3)
        del matchers
        assert lexers.num_spare == 3
    matchers = grammars.submit(spec, ENDING, 6).result(10)  # the last answers share lexers
    assert (lexers.num_spare, lexers.num_lexers) == (0, 4)
    matchers += grammars.submit(spec, ENDING).result(10)
    assert [lexers.acquire()[1] for _ in range(2)] == [LexerUse.SHARED] * 2
    del matchers
    assert lexers.num_spare == 4


def test_total_number_of_lexers_is_bounded_over_all_grammars(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bounds, "MAX_TOTAL_LEXERS", 10)
    grammars = GrammarCompiler(TOKENIZER, VOCAB_SIZE, frozenset({EOS}))
    forms = [StructuredOutputs(choice=[name]) for name in "abcd"]
    for spec in forms[:2]:
        grammars.submit(spec, ENDING, 4).result(10)
    matchers = grammars.submit(forms[2], ENDING, 3).result(10)
    old, busy, new = (grammars.compile(it).lexers for it in (forms[0], forms[2], forms[1]))
    assert [it.num_lexers for it in (old, busy, new)] == [1, 3, 4]
    last = grammars.submit(forms[3], ENDING, 8).result(10)
    assert [it.num_lexers for it in (old, busy, new)] == [1, 3, 1]
    assert len(matchers) + len(last) == 11


def test_cached_grammar_does_not_wait_for_compilations(monkeypatch: pytest.MonkeyPatch):
    grammars = GrammarCompiler(TOKENIZER, VOCAB_SIZE, frozenset({EOS}))
    spec = StructuredOutputs(regex="[ab]{2}")
    matcher = grammars.compile(spec).matcher(ENDING)
    goes_on = threading.Event()

    def wait(text: str, _: Any) -> str:
        assert goes_on.wait(20)
        return text

    monkeypatch.setattr(grammar_module, "replace_schemas", wait)
    slow = [StructuredOutputs(grammar=f'start: "{name}"') for name in "cde"]
    others = [grammars.submit(it, ENDING) for it in slow]
    assert len(grammars.submit(spec, ENDING, 3).result(10)) == 3
    goes_on.set()
    for other in others:
        other.result(20)
    assert matcher.inner is not None


def test_grammar_with_a_slow_compilation_has_one_shared_lexer(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bounds, "CHEAP_COMPILE_S", 0.0)
    grammars = GrammarCompiler(TOKENIZER, VOCAB_SIZE, frozenset({EOS}))
    spec = StructuredOutputs(regex="[ab]{2}")
    one, other = (grammars.compile(spec).matcher(ENDING) for _ in range(2))
    a, b = (TOKENIZER.encode(it, add_special_tokens=False)[0] for it in "ab")
    one.accept(a)
    assert allowed(one) == allowed(other) == {a, b}
    assert [grammars.compile(spec).lexers.acquire()[1] for _ in range(2)] == [LexerUse.SHARED] * 2


def test_grammars_compile_concurrently():
    grammars = GrammarCompiler(TOKENIZER, VOCAB_SIZE, frozenset({EOS}))
    forms = [StructuredOutputs(choice=[f"a{i % 3}", f"b{i % 3}"]) for i in range(12)]
    futures = [grammars.submit(spec, ENDING) for spec in forms]
    matchers = [matcher for future in futures for matcher in future.result(20)]
    assert [len(allowed(it)) for it in matchers] == [2] * 12
    assert sum(it.name.startswith("jpaged-grammars") for it in threading.enumerate()) >= 1


def test_grammars_are_rejected_for_a_model_without_an_end_token():
    grammars = GrammarCompiler(TOKENIZER, VOCAB_SIZE, frozenset())
    with pytest.raises(GrammarError, match="structured_outputs needs an end token"):
        grammars.compile(StructuredOutputs(choice=["a"]))
