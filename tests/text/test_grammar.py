"""Whatever a grammar's masks allow is an answer that an independent validator accepts."""

import json
import re
import threading
from typing import Any

import jsonschema
import numpy as np
import pytest
from grammar_walks import EOS, GRAMMARS, TOKENIZER, VOCAB_SIZE, accepts, allowed, matcher_of, walk
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from jpaged import StructuredOutputs, Tokenizer
from jpaged.text.grammar import MAX_CACHED, GrammarError, Grammars

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
def test_what_masks_allow_is_valid(name: str):
    form = StructuredOutputs(json=SCHEMAS[name])
    validator = jsonschema.Draft202012Validator(SCHEMAS[name], format_checker=FORMATS)
    texts = [walk(form, seed) for seed in range(12)]
    ended = [text for text in texts if text is not None]
    assert len(ended) >= 8
    for text in ended:
        validator.validate(json.loads(text))


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"regex": r"[a-c]{2,4}(-[0-9]+)?"}, r"[a-c]{2,4}(-[0-9]+)?"),
        ({"choice": ["yes", "yes, but", 'a"b\\c\n\t', "é😀", "/x/"]}, None),
        ({"grammar": 'start: "(" start? ")" | /[a-z]/'}, r"\(*[a-z]?\)*"),
    ],
)
def test_other_forms(form: dict[str, Any], pattern: str | None):
    texts = {walk(StructuredOutputs(**form), seed) for seed in range(160)} - {None}
    assert texts
    if pattern is None:
        assert texts == set(form["choice"])
    else:
        assert all(re.fullmatch(pattern, text or "") for text in texts)


def test_any_object():
    form = StructuredOutputs(json_object=True)
    assert accepts(form, '{"a": [1, {"b": null}]}')
    assert not accepts(form, "[1]")
    assert not accepts(form, '{"a": 1')


@pytest.mark.parametrize(
    ("text", "is_answer"),
    [
        ('{"a":1}', True),
        ('{ "a" : 1 }', True),
        ('{"a":1,"b":"é\\n"}', True),
        ('{  "a":1}', False),  # blanks without end
        ('{"\\u0061":1}', False),  # another spelling of the name
        ('{"a":1,"\\u0061":"x"}', False),
        ('{"a":1,"a":"x"}', False),
        (' {"a":1}', False),
        ('{"a":1} ', False),
        ('{"a":"x"}', False),
        ("{}", False),
    ],
)
def test_json_has_one_spelling(text: str, is_answer: bool):
    assert accepts(StructuredOutputs(json=SCHEMAS["open"]), text) is is_answer


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"regex": "(a"}, r"structured_outputs\.regex cannot be enforced: .*unclosed group"),
        ({"regex": "a(?=b)"}, r"structured_outputs\.regex cannot be enforced"),
        ({"grammar": "start: x"}, r"structured_outputs\.grammar cannot be enforced: .*x"),
        ({"grammar": 'begin: "a"'}, r"structured_outputs\.grammar cannot be enforced"),
        ({"json": {"minimum": 5, "maximum": 4, "type": "integer"}}, "minimum"),
        ({"json": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}, "oneOf"),
    ],
)
def test_what_no_grammar_can_be_is_refused_by_its_field(form: dict[str, Any], message: str):
    asked = StructuredOutputs(**form)
    with pytest.raises(GrammarError, match=message):
        GRAMMARS.compile(asked)
    with pytest.raises(GrammarError, match=message):
        GRAMMARS.submit(asked).result(10)


def test_what_costs_too_much_is_refused_before_a_step_has_it():
    names = [f"p{i}" for i in range(1200)]
    many = {"anyOf": [{"required": [name], "type": "object"} for name in names[:200]]}
    many = {"allOf": [many, {"properties": {name: {} for name in names}, "required": names}]}
    for form in (StructuredOutputs(json=many), StructuredOutputs(regex="a?" * 400 + "b{9999}")):
        with pytest.raises(GrammarError, match="cannot be enforced"):
            GRAMMARS.compile(form)


# Tokens


def test_the_end_is_allowed_where_the_grammar_may_end():
    matcher = matcher_of(StructuredOutputs(regex="a|ab"), frozenset({EOS, 5}))
    a, b = (TOKENIZER.encode(it, add_special_tokens=False)[0] for it in "ab")
    assert allowed(matcher) == {a}
    matcher.accept(a)
    assert allowed(matcher) == {b, EOS, 5}
    assert not matcher.is_stopped
    matcher.accept(EOS)  # it is not matched
    matcher.accept(b)
    assert matcher.is_stopped
    ignoring = matcher_of(StructuredOutputs(regex="a|ab"), frozenset())
    ignoring.accept(a)
    assert allowed(ignoring) == {b}


def test_special_tokens_and_ids_beyond_the_tokenizer_are_no_text():
    matcher = matcher_of(StructuredOutputs(regex="(?s:.)*"))
    special = set(TOKENIZER.special_token_ids) - {EOS}
    assert special
    assert not special & allowed(matcher)
    assert max(allowed(matcher)) < len(TOKENIZER) < VOCAB_SIZE


def test_a_token_that_may_not_follow_is_an_error():
    matcher = matcher_of(StructuredOutputs(choice=["a"]))
    with pytest.raises(GrammarError, match=r"structured_outputs\.choice"):
        matcher.accept(TOKENIZER.encode("b", add_special_tokens=False)[0])
    with pytest.raises(GrammarError, match=r"structured_outputs\.choice"):
        allowed(matcher)


def test_one_that_fails_spoils_no_other_row():
    good, bad = (matcher_of(StructuredOutputs(choice=["a"])) for _ in range(2))
    with pytest.raises(GrammarError):
        bad.accept(TOKENIZER.encode("b", add_special_tokens=False)[0])
    masks = np.full((3, -(-VOCAB_SIZE // 32)), -1, np.int32)
    ((index, _),) = GRAMMARS.fill_masks([(bad, 0), (good, 2)], masks)
    assert index == 0
    assert (masks[1] == -1).all()
    (token,) = np.flatnonzero(np.unpackbits(masks[2].view(np.uint8), bitorder="little")).tolist()
    assert TOKENIZER.decode([token]) == "a"


def sentencepiece_like() -> Tokenizer:
    """As Llama 2's: blanks are ▁, unknown characters bytes."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    pieces += ["▁", "▁a", "ab", "a", "b", "c", '"', "{", "}", ":", "1", "▁1"]
    model = models.BPE(
        {piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True
    )
    rust = RustTokenizer(model)
    rust.normalizer = normalizers.Replace(" ", "▁")
    rust.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    rust.add_special_tokens(["<unk>", "<s>", "</s>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=rust, eos_token="</s>", unk_token="<unk>")
    return Tokenizer(fast)


def test_a_tokenizer_with_byte_tokens():
    tokenizer = sentencepiece_like()
    size = len(tokenizer)
    grammars = Grammars(tokenizer, size, frozenset({2}))
    matcher = grammars.compile(StructuredOutputs(regex="ab? a|é")).matcher(frozenset({2}))
    ids = tokenizer.hf_tokenizer.convert_tokens_to_ids
    assert allowed(matcher, grammars, size) >= set(ids(["a", "ab", "<0xC3>"]))
    assert not allowed(matcher, grammars, size) & set(ids(["b", "▁a", "<0xA9>"]))
    for piece in ("ab", "▁a"):
        matcher.accept(ids(piece))
    assert matcher.is_stopped


# A free passage before the grammar


def free(text: str, form: StructuredOutputs) -> Any:
    matcher = matcher_of(form)
    for token in TOKENIZER.encode(text, add_special_tokens=False):
        assert token in allowed(matcher), text
        matcher.accept(token)
    return matcher


def test_a_grammar_begins_behind_a_free_passage():
    form = StructuredOutputs(choice=["ab"]).behind("</think>")
    digit = TOKENIZER.encode("7", add_special_tokens=False)[0]
    for text in ("", "7 <think> x", "7 </thi", "x</think"):
        assert digit in allowed(free(text, form))
        assert EOS not in allowed(free(text, form))
    for text in ("7</think>", "</think>", "x</think>\n", "x</think>\n\n"):
        matcher = free(text, form)
        assert digit not in allowed(matcher)
        assert EOS not in allowed(matcher)
        left = 2 - text.count("\n")
        breaks = TOKENIZER.encode("\n", add_special_tokens=False)
        assert (breaks[0] in allowed(matcher)) == (left > 0)
    assert free("x</think>\nab", form).is_stopped


def test_an_answer_that_does_not_open_the_passage_obeys_from_its_first_token():
    form = StructuredOutputs(choice=["ab"]).behind("</think>", "<think>")
    first = TOKENIZER.encode("<think>", add_special_tokens=False)[0]
    a = TOKENIZER.encode("a", add_special_tokens=False)[0]
    assert allowed(matcher_of(form)) == {first, a}
    assert free("ab", form).is_stopped
    assert free("<think>7 7</think>\n\nab", form).is_stopped


# Compiled once


def test_grammars_are_kept_up_to_a_bound():
    grammars = Grammars(TOKENIZER, VOCAB_SIZE, frozenset({EOS}))
    forms = [StructuredOutputs(choice=[f"a{i}"]) for i in range(MAX_CACHED + 1)]
    first = grammars.compile(forms[0])
    assert grammars.compile(StructuredOutputs(choice=["a0"])) is first
    assert grammars.submit(forms[0]).result(0) is first
    for form in forms[1:]:
        grammars.compile(form)
    assert grammars.compile(forms[0]) is not first


def test_matchers_of_one_grammar_go_their_own_ways():
    one, other = (matcher_of(StructuredOutputs(regex="[ab]{2}")) for _ in range(2))
    a, b = (TOKENIZER.encode(it, add_special_tokens=False)[0] for it in "ab")
    for token in (a, b):
        one.accept(token)
    assert one.is_stopped
    assert allowed(other) == {a, b}


def test_threads_may_compile_at_once():
    grammars = Grammars(TOKENIZER, VOCAB_SIZE, frozenset({EOS}))
    futures = [grammars.submit(StructuredOutputs(choice=[f"a{i % 3}"])) for i in range(12)]
    assert {future.result(20).form.choice for future in futures} == {("a0",), ("a1",), ("a2",)}
    assert sum(it.name.startswith("jpaged-grammars") for it in threading.enumerate()) >= 1


def test_a_model_without_an_end_token_obeys_no_grammar():
    grammars = Grammars(TOKENIZER, VOCAB_SIZE, frozenset())
    with pytest.raises(GrammarError, match="structured_outputs needs an end token"):
        grammars.compile(StructuredOutputs(choice=["a"]))
