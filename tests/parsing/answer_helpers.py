"""Answers' texts, cut in pieces, and what parsers tell of them."""

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

Told = list[tuple[str, ...]]


def told(pieces: Iterable[str], **options: Any) -> Told:
    """What a parser tells of pieces of a text, the events of each part as one."""
    parser = AnswerParser(**options)
    events = [event for piece in pieces for event in parser.feed(piece)]
    return joined(events + parser.end())


def joined(events: list[ParserEvent]) -> Told:
    """In words, without ids; and calls begin, go on and end in their order."""
    parts: Told = []
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


def check_every_cut(text: str, expected: Told, **options: Any) -> None:
    """The same is told of the whole text, of its characters, and of it cut anywhere."""
    assert told([text], **options) == expected
    assert told(text, **options) == expected
    for i in range(1, len(text)):
        assert told([text[:i], text[i:]], **options) == expected, text[:i]


def check_every_two_cuts(text: str, expected: Told, **options: Any) -> None:
    for i in range(len(text)):
        for j in range(i, len(text)):
            assert told([text[:i], text[i:j], text[j:]], **options) == expected
