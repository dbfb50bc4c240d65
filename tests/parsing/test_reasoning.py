"""Test that reasoning is separated from content, however the answer is split into chunks."""

import pytest
from answer_helpers import ParsedParts, check_any_three_chunks, check_any_two_chunks, parse_chunks
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.parsing.answer import AnswerParser
from jpaged.parsing.reasoning import REASONING_FAMILIES
from jpaged.parsing.stream import Content, Reasoning

OPENED, CLOSED = "<|im_start|>assistant\n<think>\n", "assistant\n<think>\n\n</think>\n\n"
HELLO, THOUGHT = ("content", "Hello <b>!\n"), ("reasoning", "So, 2 < 3.\n\nYes")

TRANSCRIPTS: list[tuple[str, str, str, ParsedParts]] = [
    # The opening tag may be in Qwen3's answer or at the end of the prompt. The prompt may also end
    # with empty reasoning.
    ("qwen3", "", "<think>\nSo, 2 < 3.\n\nYes\n</think>\n\nHello <b>!\n", [THOUGHT, HELLO]),
    ("qwen3", "", "\n<think>So, 2 < 3.\n\nYes</think>Hello <b>!\n", [THOUGHT, HELLO]),
    ("qwen3", OPENED, "So, 2 < 3.\n\nYes\n</think>\n\nHello <b>!\n", [THOUGHT, HELLO]),
    ("qwen3", OPENED, "<think>\nSo, 2 < 3.\n\nYes\n</think>\n\nHello <b>!\n", [THOUGHT, HELLO]),
    ("qwen3", CLOSED, "Hello <b>!\n", [HELLO]),
    ("qwen3", "", "Hello <b>!\n", [HELLO]),
    ("qwen3", "", "\n\nHello", [("content", "\n\nHello")]),
    ("qwen3", "", "<think>\n\n</think>\n\nHello <b>!\n", [HELLO]),
    ("qwen3", "", "Hello <think>no</think>", [("content", "Hello <think>no</think>")]),
    (
        "qwen3",
        "",
        "<think>a</think>b<think>c</think>",
        [("reasoning", "a"), ("content", "b<think>c</think>")],
    ),
    ("qwen3", "", "<thinking> a", [("content", "<thinking> a")]),
    # DeepSeek R1 may leave out the opening tag.
    ("deepseek_r1", "", "So, 2 < 3.\n\nYes\n</think>\n\nHello <b>!\n", [THOUGHT, HELLO]),
    ("deepseek_r1", OPENED, "So, 2 < 3.\n\nYes\n</think>\n\nHello <b>!\n", [THOUGHT, HELLO]),
    ("deepseek_r1", "", "<think>\nSo, 2 < 3.\n\nYes\n</think>\n\nHello <b>!\n", [THOUGHT, HELLO]),
    ("deepseek_r1", CLOSED, "Hello <b>!\n", [HELLO]),
    ("deepseek_r1", "", "<tool_call>\n<function=f>", [("reasoning", "<tool_call>\n<function=f>")]),
    # Truncated reasoning.
    ("qwen3", "", "<think>\nSo \n", [("reasoning", "So \n")]),
    ("qwen3", OPENED, "So </thin", [("reasoning", "So </thin")]),
    ("qwen3", OPENED, "So <tool_call>", [("reasoning", "So <tool_call>")]),
    ("deepseek_r1", "", "So", [("reasoning", "So")]),
    ("qwen3", "", "<thin", [("content", "<thin")]),
    ("qwen3", "", "", []),
    ("deepseek_r1", "", "</think>", []),
]


@pytest.mark.parametrize(("family", "prompt_end", "text", "expected"), TRANSCRIPTS)
def test_reasoning_transcripts_parse_the_same_in_any_two_chunks(
    family: str, prompt_end: str, text: str, expected: ParsedParts
):
    check_any_two_chunks(text, expected, reasoning=family, prompt_end=prompt_end)


def test_short_reasoning_answer_parses_the_same_in_any_three_chunks():
    text = "<think>\na </b \n</think>\n\n b \n"
    expected: ParsedParts = [("reasoning", "a </b"), ("content", " b \n")]
    check_any_three_chunks(text, expected, reasoning="qwen3")


def test_tool_calls_inside_closed_reasoning_stay_reasoning():
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    text = f"<think>\nI could {call}, or\n</think>\n\nWell.\n{call}\n"
    expected = [
        ("reasoning", f"I could {call}, or"),
        ("content", "Well."),
        ("call", "f", "{}"),
    ]
    check_any_two_chunks(text, expected, reasoning="qwen3", tool_calls="hermes")


def test_qwen3_tool_call_ends_unclosed_reasoning():
    text = "I could <tool_call> now.\n<tool_call>\n<function=f>\n</function>\n</tool_call>"
    expected = [("reasoning", "I could <tool_call> now."), ("call", "f", "{}")]
    options = {"reasoning": "qwen3", "tool_calls": "qwen3_xml", "prompt_end": OPENED}
    check_any_two_chunks(text, expected, **options)


def test_reasoning_and_content_are_emitted_as_they_arrive():
    parser = AnswerParser(reasoning="qwen3", prompt_end=OPENED)
    assert parser.feed("One \n") == [Reasoning("One")]
    assert parser.feed("two</th") == [Reasoning(" \ntwo")]
    assert parser.feed("ink>\n") == []
    assert parser.feed("\nThree\n") == [Content("Three\n")]
    assert parser.feed("<think>") == [Content("<think>")]
    assert parser.end() == []


FRAGMENTS = ["<think>", "</think>", "\n", " ", "a", "<", "</", "think>", "<tool_call>", "\n" * 70]
FRAGMENTS += ["<function=f>", "</function></tool_call>", "é"]


@pytest.mark.parametrize("family", REASONING_FAMILIES)
@pytest.mark.parametrize("prompt_end", ["", OPENED, CLOSED])
@given(text=st.lists(st.sampled_from(FRAGMENTS), max_size=10).map("".join), size=st.integers(1, 9))
@settings(max_examples=80, deadline=None)
def test_random_reasoning_parses_the_same_in_any_chunks_and_loses_only_tags(
    family: str, prompt_end: str, text: str, size: int
):
    options = {"reasoning": family, "prompt_end": prompt_end}
    whole = parse_chunks([text], **options)
    assert parse_chunks(text, **options) == whole
    assert parse_chunks([text[i : i + size] for i in range(0, len(text), size)], **options) == whole
    kept = "".join(part[1] for part in whole)
    own = text.lstrip().removeprefix("<think>")
    lefts = [it.replace("</think>", "", i) for it in (text, own) for i in (0, 1)]
    assert "".join(kept.split()) in ["".join(left.split()) for left in lefts]
    assert [part[0] for part in whole] in ([], ["reasoning"], ["content"], ["reasoning", "content"])
