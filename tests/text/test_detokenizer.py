import functools
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_helpers import CORPUS, byte_level, byte_level_backend, metaspace
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from jpaged.text.detokenizer import (
    ByteDecoder,
    Detokenizer,
    StopChecker,
    WindowDecoder,
    make_decoder,
)
from jpaged.text.tokenizer import Tokenizer

FAMILIES = pytest.mark.parametrize("make", [byte_level, metaspace])
QUICK = settings(max_examples=100, deadline=None)

words = st.one_of(
    st.sampled_from(sorted({word for line in CORPUS for word in line.split(" ")})),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=6),
    st.sampled_from(["😀", "你好", "e\u0301", "👩\u200d👩\u200d👧", " ", "\n", "\u200f", "🇮🇱"]),
)
texts = st.lists(words, max_size=12).map(" ".join)


def split(items: Sequence[Any], cuts: list[int]) -> list[Any]:
    edges = [0, *sorted(min(cut, len(items)) for cut in cuts), len(items)]
    return [items[a:b] for a, b in itertools.pairwise(edges)]


def stream(
    tokenizer: Tokenizer, prompt: list[int], chunks: list[list[int]], **kwargs: Any
) -> tuple[list[str], Detokenizer]:
    detokenizer = Detokenizer(tokenizer, prompt, **kwargs)
    deltas = []
    for chunk in chunks:
        detokenizer.append(chunk)
        deltas.append(detokenizer.take_delta())
    detokenizer.finish()
    deltas.append(detokenizer.take_delta())
    assert "".join(deltas) == detokenizer.text
    return deltas, detokenizer


# Incremental decoding


@FAMILIES
@QUICK
@given(text=texts, cuts=st.lists(st.integers(0, 60), max_size=40), data=st.data())
def test_deltas_join_to_the_decoded_text(make: Any, text: str, cuts: list[int], data: Any):
    tokenizer = make()
    ids = tokenizer.encode(text)
    one_by_one = data.draw(st.booleans())
    chunks = [[i] for i in ids] if one_by_one else split(ids, cuts)
    _, detokenizer = stream(tokenizer, [], chunks)
    assert detokenizer.text == tokenizer.decode(ids, skip_special_tokens=True)


@FAMILIES
@QUICK
@given(before=texts, after=texts)
def test_prompt_and_output_join_to_the_decoded_text(make: Any, before: str, after: str):
    tokenizer = make()
    before = "." + before + "."
    ids = tokenizer.encode(before + " " + after)
    for cut in {1, len(ids) // 2, len(ids)}:
        head = tokenizer.decode(ids[:cut], skip_special_tokens=True)
        if head.endswith("\ufffd") or not head.strip():
            continue
        _, detokenizer = stream(tokenizer, ids[:cut], [[i] for i in ids[cut:]])
        assert head + detokenizer.text == tokenizer.decode(ids, skip_special_tokens=True)


@QUICK
@given(
    ids=st.lists(st.integers(0, 399), max_size=30),
    cuts=st.lists(st.integers(0, 30), max_size=30),
    skip=st.booleans(),
)
def test_special_tokens_and_broken_bytes_decode_like_the_tokenizer(
    ids: list[int], cuts: list[int], skip: bool
):
    tokenizer = byte_level()
    ids = [i for i in ids if i < tokenizer.vocab_size]
    _, detokenizer = stream(tokenizer, [], split(ids, cuts), skip_special_tokens=skip)
    assert detokenizer.text == tokenizer.decode(ids, skip_special_tokens=skip)


@FAMILIES
def test_character_of_several_tokens_is_emitted_whole(make: Any):
    tokenizer = make()
    ids = tokenizer.encode("a🦜b")
    assert len(ids) > 4
    deltas, _ = stream(tokenizer, tokenizer.encode("x"), [[i] for i in ids])
    assert [delta.strip() for delta in deltas if delta.strip()] == ["a", "🦜", "b"]


def test_incomplete_character_is_emitted_only_at_the_end():
    tokenizer = byte_level()
    ids = tokenizer.encode("ok🦜")[:-1]
    deltas, detokenizer = stream(tokenizer, [], [ids])
    assert deltas == ["ok", "\ufffd"]
    detokenizer.finish()
    assert detokenizer.text == "ok\ufffd"


def test_output_completes_a_character_that_the_prompt_started():
    tokenizer = byte_level()
    ids = tokenizer.encode("ok🦜!")
    cut = len(ids) - 2
    assert stream(tokenizer, ids[:cut], [[i] for i in ids[cut:]])[1].text == "🦜!"


def test_long_run_of_byte_tokens_is_decoded_wherever_the_prompt_ends():
    """The prompt may end inside a character. If the detokenizer decoded the output from the middle
    of that character on, all later bytes of the run would be decoded wrongly."""
    tokenizer, text = metaspace(), "x" + "🦜你" * 12
    ids = tokenizer.encode(text)
    for cut in range(1, len(ids)):
        num_whole = len(bytes(text, "utf8")[: cut - 1].decode(errors="ignore"))
        _, detokenizer = stream(tokenizer, ids[:cut], [[i] for i in ids[cut:]])
        assert detokenizer.text == text[num_whole:]


def test_leading_space_is_kept_only_after_text():
    tokenizer = metaspace()
    ids = tokenizer.encode("hello world")
    cut = next(n for n in range(1, len(ids)) if tokenizer.decode(ids[:n]) == "hello")
    assert stream(tokenizer, ids[:cut], [ids[cut:]])[1].text == " world"
    assert stream(tokenizer, [], [ids[cut:]])[1].text == "world"
    assert tokenizer.bos_token_id is not None
    assert stream(tokenizer, [tokenizer.bos_token_id], [ids[cut:]])[1].text == "world"


class CountingDecoder:
    token_bytes = None

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.special_token_ids = tokenizer.special_token_ids
        self.sizes: list[int] = []

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        self.sizes.append(len(token_ids))
        return self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)


@FAMILIES
@pytest.mark.parametrize("kind", ["text", "garbage", "special"])
def test_decoding_cost_per_token_is_bounded(make: Any, kind: str):
    tokenizer = make()
    counting: Any = CountingDecoder(tokenizer)
    ids = {
        "text": tokenizer.encode("hello 世界, the end of 😀 the world. " * 20),
        "garbage": tokenizer.encode("🦜")[-2:-1] * 500,
        "special": [tokenizer.eos_token_id] * 500,
    }[kind]
    decoder = WindowDecoder(counting.decode, ids * 3, tokenizer.special_token_ids)
    text = "".join([decoder.push([i]) for i in ids]) + decoder.flush()
    assert max(counting.sizes, default=0) <= 64
    assert sum(counting.sizes) <= 45 * len(ids)
    if kind == "text":
        assert len(text) > 500


@functools.cache
def with_added_tokens() -> Tokenizer:
    """Return a byte-level tokenizer with added tokens. Some added tokens contain characters that do
    not stand for a byte in the tokenizer's vocabulary."""
    backend = Backend.from_str(byte_level_backend().to_str())
    backend.add_tokens([AddedToken("<a b>"), AddedToken("你好"), AddedToken("é")])
    backend.add_special_tokens([AddedToken("<| sp ecial |>", special=True)])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))


@QUICK
@given(
    prompt=st.lists(st.integers(0, 410), max_size=8),
    ids=st.lists(st.integers(0, 410), max_size=30),
    skip=st.booleans(),
)
def test_byte_decoder_matches_the_tokenizer(prompt: list[int], ids: list[int], skip: bool):
    """Some token ids are not in the vocabulary, and some byte sequences are not valid UTF-8."""
    tokenizer = with_added_tokens()
    decoder = make_decoder(tokenizer, [], skip_special_tokens=skip)
    assert isinstance(decoder, ByteDecoder)
    text = "".join([decoder.push([i]) for i in ids]) + decoder.flush()
    assert text == tokenizer.decode(ids, skip_special_tokens=skip)
    decoder = make_decoder(tokenizer, prompt, skip_special_tokens=skip)
    text = "".join([decoder.push([i]) for i in ids]) + decoder.flush()
    both = tokenizer.decode(prompt + ids, skip_special_tokens=skip)
    before = both[: len(both) - len(text)]
    assert before + text == both
    # `before` is the text of the prompt. If the output has no text, `before` may end in an
    # incomplete character.
    if text:
        whole = tokenizer.decode(prompt, skip_special_tokens=skip)
        assert before.rstrip("\ufffd") == whole.rstrip("\ufffd")


def test_byte_level_tokens_are_decoded_without_calling_tokenizer_decode(
    monkeypatch: pytest.MonkeyPatch,
):
    tokenizer = byte_level()
    ids = tokenizer.encode("hello 世界, the end of 😀 the world. " * 20)
    monkeypatch.setattr(tokenizer, "decode", lambda *_, **__: pytest.fail("decoded a window"))
    _, detokenizer = stream(tokenizer, ids[:5], [[i] for i in ids[5:]])
    assert len(detokenizer.text) > 500


def test_text_is_decoded_only_when_it_is_read():
    counting: Any = CountingDecoder(byte_level())
    ids = byte_level().encode(CORPUS[0])
    detokenizer = Detokenizer(counting, ids)
    for i in ids:
        detokenizer.append([i])
    assert not counting.sizes
    assert detokenizer.text == CORPUS[0]
    num_decodes = len(counting.sizes)
    assert num_decodes <= 4
    detokenizer.finish()
    # `finish` decodes nothing, because all text has been returned.
    assert len(counting.sizes) == num_decodes


@FAMILIES
def test_detokenizer_without_output_returns_no_text(make: Any, monkeypatch: pytest.MonkeyPatch):
    """The prompt ends with an incomplete character, which must not be decoded."""
    tokenizer = make()
    detokenizer = Detokenizer(tokenizer, tokenizer.encode("ok🦜")[:-1])
    monkeypatch.setattr(tokenizer, "decode", lambda *_, **__: pytest.fail("decoded"))
    if tokenizer.token_bytes is not None:
        monkeypatch.setattr(tokenizer, "token_bytes", lambda _: pytest.fail("decoded"))
    detokenizer.finish()
    assert detokenizer.text == ""


# Stop strings


def char_by_char(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


@settings(max_examples=300, deadline=None)
@given(
    text=st.text("abc", max_size=20),
    stops=st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 20), max_size=20),
    include=st.booleans(),
)
def test_stop_strings_match_however_the_text_is_split(
    text: str, stops: list[str], cuts: list[int], include: bool
):
    checker = StopChecker(stops, include_stop=include)
    expected, matched = char_by_char(text, stops, include)
    released = ""
    for piece in split(text, cuts):
        released += checker.push(piece)
        assert expected.startswith(released)
    assert checker.matched == matched
    assert released + checker.flush() == expected


@given(
    text=st.text("ab", max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_only_text_that_may_start_a_stop_string_is_delayed(text: str, stops: list[str]):
    checker = StopChecker(stops)
    released = "".join(checker.push(char) for char in text)
    if checker.matched is None:
        held = text[len(released) :]
        starts = [stop[:n] for stop in stops for n in range(len(stop))]
        assert held == max((s for s in starts if text.endswith(s)), key=len)


@pytest.mark.parametrize("include", [False, True])
def test_stop_string_is_found_if_the_text_is_split_anywhere(include: bool):
    text, stop = "say STOP now", "STOP"
    for a in range(len(text) + 1):
        for b in range(a, len(text) + 1):
            checker = StopChecker([stop], include_stop=include)
            released = "".join(checker.push(piece) for piece in split(text, [a, b]))
            assert released == ("say STOP" if include else "say ")
            assert checker.matched == stop


@FAMILIES
def test_stop_string_of_several_tokens_is_never_returned(make: Any):
    tokenizer = make()
    ids = tokenizer.encode("the world ends here. STOPPED")
    stop = "d ends h"
    detokenizer = Detokenizer(tokenizer, [], stop=[stop, "zzz"])
    seen, matched = "", None
    for i in ids:
        matched = detokenizer.append([i])
        seen += detokenizer.take_delta()
        assert "the worl".startswith(seen)
        if matched:
            break
    assert matched == stop
    detokenizer.finish()
    assert detokenizer.text == seen == "the worl"
    assert detokenizer.append(ids) == stop
    assert detokenizer.take_delta() == ""


def test_included_stop_string_stays_in_the_text():
    tokenizer = byte_level()
    ids = tokenizer.encode("the world ends here")
    _, detokenizer = stream(tokenizer, [], [ids], stop=["d en"], include_stop=True)
    assert detokenizer.text == "the world en"


def test_incomplete_stop_string_at_the_end_of_the_output_is_returned():
    tokenizer = byte_level()
    deltas, detokenizer = stream(tokenizer, [], [tokenizer.encode("say STO")], stop=["STOP"])
    assert deltas == ["say ", "STO"]
    detokenizer.finish()  # a second call of `finish` adds no text
    assert detokenizer.text == "say STO"


def test_output_does_not_repeat_a_prompt_that_ends_in_invalid_bytes():
    """The prompt ends with one byte of a character of several bytes, and then a letter."""
    tokenizer = metaspace()
    broken, letter = tokenizer.encode("🦜")[-1], tokenizer.encode("d")[-1]
    prompt = [*tokenizer.encode("hello world"), broken, letter]
    assert stream(tokenizer, prompt, [tokenizer.encode("!")[-1:]])[1].text == "!"


def test_stop_strings_are_ignored_before_min_tokens():
    tokenizer = byte_level()
    ids = tokenizer.encode("a,b,c,d")
    assert len(ids) == 7
    for min_tokens, text in [(0, "a"), (1, "a"), (2, "a,b"), (3, "a,b"), (4, "a,b,c")]:
        _, detokenizer = stream(tokenizer, [], [ids], stop=[","], min_tokens=min_tokens)
        assert detokenizer.text == text


# Output without text


def test_detokenizer_without_a_tokenizer_returns_no_text():
    detokenizer = Detokenizer(None, [1])
    assert detokenizer.append([3, 4]) is None
    assert detokenizer.take_delta() == detokenizer.text == ""
    detokenizer.finish()
    assert detokenizer.text == ""


@pytest.mark.parametrize("stop", [[], ["zzz"]])
def test_stop_token_adds_no_text(stop: list[str]):
    tokenizer = byte_level()
    ids = [*tokenizer.encode("hello"), tokenizer.eos_token_id]
    assert stream(tokenizer, [], [ids], stop=stop)[1].text == "hello"
    detokenizer = Detokenizer(tokenizer, [], stop=stop, skip_special_tokens=False)
    detokenizer.append(ids, ended_by_token=True)
    detokenizer.finish()
    assert detokenizer.text == "hello"


def test_included_stop_token_stays_in_the_text():
    tokenizer = byte_level()
    detokenizer = Detokenizer(tokenizer, [], include_stop=True)
    detokenizer.append(tokenizer.encode("a!"), ended_by_token=True)
    detokenizer.finish()
    assert detokenizer.text == "a!"
