"""Parsing of text that a model is still writing, and the events that parsers emit.

The parsers are generators that `yield` where they need more text, so that their code reads like
that of a parser of complete text. What they find does not depend on how the text is cut into
pieces: nothing is decided before the characters that decide it have come. Each character is read
once.
"""

import json
import re
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A part of a parser: it continues with more text whenever it is resumed, and returns a T."""

MAX_HELD = 16 * 1024
"""Maximum number of characters that are held until it is known what they are."""

MAX_BLANK = 64
"""Maximum number of characters of whitespace next to a tag that belong to the tag."""

MAX_DEPTH = 200
"""Maximum depth of nested arrays and objects: about what JSON parsers of clients accept."""

_LONGEST_NUMBER = 400
"""Maximum number of characters of a number."""


@dataclass(frozen=True, slots=True)
class Content:
    """More text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More text of the reasoning before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins. `index` counts the answer's calls from 0; the model wrote `name`."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """A call ends. Its arguments are a JSON object, unless the model stopped early or erred."""

    index: int


Event = Content | Reasoning | CallStart | CallArguments | CallEnd


class UnexpectedTextError(Exception):
    """The text does not fit what the parser expects."""


_SPACE = re.compile(r"[ \t\n\r]+")
_BLANK = re.compile(rf"\s{{0,{MAX_BLANK}}}")
_IN_STRING = re.compile(r'[^"\\]+')
_IN_SCALAR = re.compile(r"[-+.0-9A-Za-z]+")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_WORDS = ("true", "false", "null")


class TextStream:
    """Text that comes in pieces, and the parser's position in it.

    Taken text goes to `sink`. Without a sink it is held, so that it can still become content.

    Attributes:
        sink: Called with each piece of taken text.
        ended: Whether the text is complete.
    """

    def __init__(self) -> None:
        self.sink: Callable[[str], None] | None = None
        self.ended = False
        self._text, self._at = "", 0
        self._held: list[str] = []
        self._num_held = 0

    def add(self, text: str) -> None:
        """Append a piece of text."""
        self._text, self._at = self._text[self._at :] + text, 0

    def release(self) -> str:
        """Return the held text, and hold it no longer."""
        held = "".join(self._held)
        self._held.clear()
        self._num_held = 0
        return held

    def text_of(self, steps: Steps[None]) -> Steps[str]:
        """Do `steps`, without a sink. Return the text that they take."""
        num_held = len(self._held)
        yield from steps
        return "".join(self._held[num_held:])

    # Steps: they take text from the parser's position on.

    def peek(self) -> Steps[str]:
        """Return the next character without taking it, or "" at the end."""
        while self._at == len(self._text) and not self.ended:
            yield
        return self._text[self._at : self._at + 1]

    def expect(self, characters: str) -> Steps[str]:
        """Take and return one of `characters`; raise UnexpectedTextError if another one is next."""
        char = yield from self.peek()
        if not char or char not in characters:
            raise UnexpectedTextError
        return self._take(1)

    def run(self, pattern: re.Pattern[str], most: int = MAX_HELD) -> Steps[str]:
        """Take and return up to `most` characters that match `pattern`, one repeated class."""
        taken: list[str] = []
        while most:
            room = most if self.sink else min(most, MAX_HELD - self._num_held)
            found = pattern.match(self._text, self._at, self._at + room)
            if found:
                taken.append(self._take(found.end() - self._at))
                most -= len(taken[-1])
            elif self._at < len(self._text) or self.ended:
                if not room:
                    raise UnexpectedTextError
                break
            else:
                yield
        return "".join(taken)

    def spaces(self) -> Steps[None]:
        """Take JSON whitespace, if any is next."""
        while (yield from self.run(_SPACE)):
            pass

    def literal(self, *words: str) -> Steps[str]:
        """Take one of `words` and the whitespace before it, and return the word. If none is next,
        take nothing and return ""."""
        word, size = yield from self._ahead(words)
        if word:
            self._take(size)
        return word

    def leads_to(self, *words: str) -> Steps[bool]:
        """Return whether one of `words` is next, after whitespace. Take nothing."""
        word, _ = yield from self._ahead(words)
        return bool(word)

    def is_over(self) -> Steps[bool]:
        """Return whether only whitespace is left. Take nothing."""
        while self._behind_blank() == len(self._text):
            if self.ended:
                return True
            yield
        return False

    def _ahead(self, words: Sequence[str]) -> Steps[tuple[str, int]]:
        """Return which of `words` is next, and its size with the whitespace before it."""
        while True:
            start = self._behind_blank()
            have = self._text[start : start + max(map(len, words))]
            for word in words:
                if have.startswith(word):
                    return word, start + len(word) - self._at
            if self.ended or (have and not any(word.startswith(have) for word in words)):
                return "", 0
            yield

    def _behind_blank(self) -> int:
        found = _BLANK.match(self._text, self._at)
        return found.end() if found else self._at

    def text_until(self, *tags: str, blank: int = MAX_BLANK) -> Steps[str]:
        """Take the text before the first of `tags`, and return that tag, or "" if the text ends.

        Up to `blank` characters of whitespace before the tag are not taken. At the end of the text,
        whitespace and the beginning of a tag may be left, which `rest` takes.
        """
        pattern = re.compile("|".join(map(re.escape, tags)))
        while True:
            found = pattern.search(self._text, self._at)
            end = found.start() if found else self._num_sure(tags)
            start = max(self._at, end - blank)
            while end > start and self._text[end - 1].isspace():
                end -= 1
            if end > self._at:
                self._take(end - self._at)
            if found:
                return found[0]
            if self.ended:
                return ""
            yield

    def _num_sure(self, tags: Sequence[str]) -> int:
        """Return the position up to which the text cannot be part of a tag."""
        text, at = self._text, self._at
        starts = (tag[:i] for tag in tags for i in range(1, len(tag)))
        held = max((len(start) for start in starts if text.endswith(start, at)), default=0)
        return len(text) - held

    def rest(self) -> str:
        """Take and return all remaining text, without the sink."""
        rest, self._at = self._text[self._at :], len(self._text)
        return rest

    # JSON.

    def json_string(self) -> Steps[str]:
        """Take a JSON string, which may have line breaks, and return its value.

        Raises:
            UnexpectedTextError: Something else is next, or the value is not Unicode text.
        """
        text = yield from self.text_of(self._string())
        value: str = json.loads(text, strict=False)
        try:
            value.encode()
        except UnicodeEncodeError:  # half of a surrogate pair
            raise UnexpectedTextError from None
        return value

    def json_value(self) -> Steps[None]:
        """Take a JSON value; raise UnexpectedTextError at the first character that does not fit."""
        closers: list[str] = []
        while True:
            char = yield from self.peek()
            if char and char in "{[":
                if len(closers) == MAX_DEPTH:
                    raise UnexpectedTextError
                self._take(1)
                closers.append("}" if char == "{" else "]")
                yield from self.spaces()
                if (yield from self.peek()) != closers[-1]:
                    if char == "{":
                        yield from self._key()
                    continue
            elif char == '"':
                yield from self._string()
            else:
                yield from self._scalar()
            if not (yield from self._next_in(closers)):
                return

    def _next_in(self, closers: list[str]) -> Steps[bool]:
        """Take what is between a value, or an empty array or object, and the next value. Return
        whether there is a next value."""
        while closers:
            yield from self.spaces()
            if (yield from self.expect("," + closers[-1])) != ",":
                closers.pop()
                continue
            yield from self.spaces()
            if closers[-1] == "}":
                yield from self._key()
            return True
        return False

    def _key(self) -> Steps[None]:
        yield from self._string()
        yield from self.spaces()
        yield from self.expect(":")
        yield from self.spaces()

    def _string(self) -> Steps[None]:
        yield from self.expect('"')
        while True:
            while (yield from self.run(_IN_STRING)):
                pass
            if (yield from self.expect('"\\')) == '"':
                return
            if (yield from self.expect('"\\/bfnrtu')) == "u":
                for _ in range(4):
                    yield from self.expect("0123456789abcdefABCDEF")

    def _scalar(self) -> Steps[None]:
        text = yield from self.run(_IN_SCALAR, _LONGEST_NUMBER)
        if text not in _WORDS and not _NUMBER.fullmatch(text):
            raise UnexpectedTextError

    def _take(self, size: int) -> str:
        piece = self._text[self._at : self._at + size]
        if self.sink is not None:
            self.sink(piece)
        elif self._num_held + size > MAX_HELD:
            raise UnexpectedTextError
        else:
            self._held.append(piece)
            self._num_held += size
        self._at += size
        return piece


class StreamParser:
    """A parser of one answer. A subclass defines `_answer`, which takes text from `_stream` and
    appends to `_events`."""

    def __init__(self) -> None:
        self._stream = TextStream()
        self._events: list[Event] = []
        self._steps = self._answer()

    def feed(self, text: str) -> list[Event]:
        """Return the events of more text."""
        self._stream.add(text)
        next(self._steps)
        return self._take_events()

    def end(self) -> list[Event]:
        """Return the last events, those of held text. Feed nothing afterwards."""
        self._stream.ended = True
        for _ in self._steps:
            pass
        return self._take_events()

    def _answer(self) -> Steps[None]:
        """Parse the whole answer."""
        raise NotImplementedError

    def _take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events
