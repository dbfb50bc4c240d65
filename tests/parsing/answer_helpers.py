"""Helpers that parse answers in chunks and join the parser's events."""

from collections.abc import Iterable
from typing import Any

from jpaged.parsing.answer import AnswerParser
from jpaged.parsing.stream import (
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    ParserEvent,
    Reasoning,
)

ParsedParts = list[tuple[str, ...]]


def parse_chunks(pieces: Iterable[str], **options: Any) -> ParsedParts:
    """Parse a model's output, which arrives in the chunks `pieces`. Return content, reasoning and
    tool calls as `join_events` does."""
    parser = AnswerParser(**options)
    events = [event for piece in pieces for event in parser.feed(piece)]
    return join_events(events + parser.end())


def join_events(events: list[ParserEvent]) -> ParsedParts:
    """Join the parser's events into content, reasoning and tool calls, and return these in order.

    Each returned item is ("content", text), ("reasoning", text) or ("call", name, arguments). The
    function checks that the events of tool calls are in order.
    """
    parts: ParsedParts = []
    open_call, num_calls, ids = None, 0, set[str]()
    for event in events:
        if isinstance(event, CallStart):
            assert (open_call, event.index) == (None, num_calls)
            assert event.id not in ids
            ids.add(event.id)
            open_call, num_calls = event.index, num_calls + 1
            parts.append(("call", event.name, ""))
        elif isinstance(event, CallEnd):
            assert event.index == open_call
            open_call = None
        elif isinstance(event, CallArguments):
            assert event.index == open_call
            assert event.text
            *call, arguments = parts[-1]
            parts[-1] = (*call, arguments + event.text)
        else:
            assert isinstance(event, Content | Reasoning)
            assert open_call is None
            assert event.text
            kind = "content" if isinstance(event, Content) else "reasoning"
            if parts and parts[-1][0] == kind:
                parts[-1] = kind, parts[-1][1] + event.text
            else:
                parts.append((kind, event.text))
    assert open_call is None
    return parts


def check_any_two_chunks(text: str, expected: ParsedParts, **options: Any) -> None:
    """Check that a text parses to `expected` as one chunk, one character per chunk, and as any two
    chunks."""
    assert parse_chunks([text], **options) == expected
    assert parse_chunks(text, **options) == expected
    for i in range(1, len(text)):
        assert parse_chunks([text[:i], text[i:]], **options) == expected, text[:i]


def check_any_three_chunks(text: str, expected: ParsedParts, **options: Any) -> None:
    for i in range(len(text)):
        for j in range(i, len(text)):
            assert parse_chunks([text[:i], text[i:j], text[j:]], **options) == expected
