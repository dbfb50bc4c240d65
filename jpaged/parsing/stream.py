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
ParserCoroutine = Generator[None, None, T]
"""A part of a parser: it continues with more text whenever it is resumed, and returns a T."""

MAX_BUFFERED_CHARACTERS = 16 * 1024
"""Maximum number of characters that are held until it is known what they are."""

MAX_TAG_WHITESPACE = 64
"""Maximum number of characters of whitespace next to a tag that belong to the tag."""

MAX_JSON_DEPTH = 200
"""Maximum depth of nested arrays and objects: about what JSON parsers of clients accept."""

_MAX_NUMBER_LENGTH = 400
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


ParserEvent = Content | Reasoning | CallStart | CallArguments | CallEnd


class UnexpectedTextError(Exception):
    """The text does not fit what the parser expects."""


_JSON_WHITESPACE = re.compile(r"[ \t\n\r]+")
_TAG_WHITESPACE = re.compile(rf"\s{{0,{MAX_TAG_WHITESPACE}}}")
_IN_STRING = re.compile(r'[^"\\]+')
_IN_SCALAR = re.compile(r"[-+.0-9A-Za-z]+")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_JSON_LITERALS = ("true", "false", "null")


class TextStream:
    """Text that comes in pieces, and the parser's position in it.

    Taken text goes to `sink`. Without a sink it is held, so that it can still become content.

    Attributes:
        sink: Called with each piece of taken text.
        ended: Whether the text is complete.
    """

    def __init__(self) -> None:
        self.sink: Callable[[str], None] | None = None
        self.is_complete = False
        self._text, self._position = "", 0
        self._buffer: list[str] = []
        self._num_buffered = 0

    def add(self, text: str) -> None:
        """Append a piece of text."""
        self._text, self._position = self._text[self._position :] + text, 0

    def release(self) -> str:
        """Return the held text, and hold it no longer."""
        held = "".join(self._buffer)
        self._buffer.clear()
        self._num_buffered = 0
        return held

    def capture_text(self, coroutine: ParserCoroutine[None]) -> ParserCoroutine[str]:
        """Do `coroutine`, without a sink. Return the text that they take."""
        num_held = len(self._buffer)
        yield from coroutine
        return "".join(self._buffer[num_held:])

    # Steps: they take text from the parser's position on.

    def peek(self) -> ParserCoroutine[str]:
        """Return the next character without taking it, or "" at the end."""
        while self._position == len(self._text) and not self.is_complete:
            yield
        return self._text[self._position : self._position + 1]

    def expect(self, characters: str) -> ParserCoroutine[str]:
        """Take and return one of `characters`; raise UnexpectedTextError if another one is next."""
        char = yield from self.peek()
        if not char or char not in characters:
            raise UnexpectedTextError
        return self._take(1)

    def take_matching(
        self, pattern: re.Pattern[str], max_characters: int = MAX_BUFFERED_CHARACTERS
    ) -> ParserCoroutine[str]:
        """Take and return up to `max_characters` characters that match `pattern`, one repeated class."""
        taken: list[str] = []
        while max_characters:
            room = (
                max_characters
                if self.sink
                else min(max_characters, MAX_BUFFERED_CHARACTERS - self._num_buffered)
            )
            found = pattern.match(self._text, self._position, self._position + room)
            if found:
                taken.append(self._take(found.end() - self._position))
                max_characters -= len(taken[-1])
            elif self._position < len(self._text) or self.is_complete:
                if not room:
                    raise UnexpectedTextError
                break
            else:
                yield
        return "".join(taken)

    def take_whitespace(self) -> ParserCoroutine[None]:
        """Take JSON whitespace, if any is next."""
        while (yield from self.take_matching(_JSON_WHITESPACE)):
            pass

    def take_literal(self, *words: str) -> ParserCoroutine[str]:
        """Take one of `words` and the whitespace before it, and return the word. If none is next,
        take nothing and return ""."""
        word, size = yield from self._peek_word(words)
        if word:
            self._take(size)
        return word

    def is_next(self, *words: str) -> ParserCoroutine[bool]:
        """Return whether one of `words` is next, after whitespace. Take nothing."""
        word, _ = yield from self._peek_word(words)
        return bool(word)

    def is_over(self) -> ParserCoroutine[bool]:
        """Return whether only whitespace is left. Take nothing."""
        while self._whitespace_end() == len(self._text):
            if self.is_complete:
                return True
            yield
        return False

    def _peek_word(self, words: Sequence[str]) -> ParserCoroutine[tuple[str, int]]:
        """Return which of `words` is next, and its size with the whitespace before it."""
        while True:
            start = self._whitespace_end()
            have = self._text[start : start + max(map(len, words))]
            for word in words:
                if have.startswith(word):
                    return word, start + len(word) - self._position
            if self.is_complete or (have and not any(word.startswith(have) for word in words)):
                return "", 0
            yield

    def _whitespace_end(self) -> int:
        found = _TAG_WHITESPACE.match(self._text, self._position)
        return found.end() if found else self._position

    def take_until(
        self, *tags: str, max_whitespace: int = MAX_TAG_WHITESPACE
    ) -> ParserCoroutine[str]:
        """Take the text before the first of `tags`, and return that tag, or "" if the text ends.

        Up to `max_whitespace` characters of whitespace before the tag are not taken. At the end of the text,
        whitespace and the beginning of a tag may be left, which `take_rest` takes.
        """
        pattern = re.compile("|".join(map(re.escape, tags)))
        while True:
            found = pattern.search(self._text, self._position)
            end = found.start() if found else self._safe_end(tags)
            start = max(self._position, end - max_whitespace)
            while end > start and self._text[end - 1].isspace():
                end -= 1
            if end > self._position:
                self._take(end - self._position)
            if found:
                return found[0]
            if self.is_complete:
                return ""
            yield

    def _safe_end(self, tags: Sequence[str]) -> int:
        """Return the position up to which the text cannot be part of a tag."""
        text, at = self._text, self._position
        starts = (tag[:i] for tag in tags for i in range(1, len(tag)))
        held = max((len(start) for start in starts if text.endswith(start, at)), default=0)
        return len(text) - held

    def take_rest(self) -> str:
        """Take and return all remaining text, without the sink."""
        rest, self._position = self._text[self._position :], len(self._text)
        return rest

    # JSON.

    def take_json_string(self) -> ParserCoroutine[str]:
        """Take a JSON string, which may have line breaks, and return its value.

        Raises:
            UnexpectedTextError: Something else is next, or the value is not Unicode text.
        """
        text = yield from self.capture_text(self._take_string())
        value: str = json.loads(text, strict=False)
        try:
            value.encode()
        except UnicodeEncodeError:  # half of a surrogate pair
            raise UnexpectedTextError from None
        return value

    def take_json_value(self) -> ParserCoroutine[None]:
        """Take a JSON value; raise UnexpectedTextError at the first character that does not fit."""
        closers: list[str] = []
        while True:
            char = yield from self.peek()
            if char and char in "{[":
                if len(closers) == MAX_JSON_DEPTH:
                    raise UnexpectedTextError
                self._take(1)
                closers.append("}" if char == "{" else "]")
                yield from self.take_whitespace()
                if (yield from self.peek()) != closers[-1]:
                    if char == "{":
                        yield from self._take_key()
                    continue
            elif char == '"':
                yield from self._take_string()
            else:
                yield from self._take_scalar()
            if not (yield from self._take_separator(closers)):
                return

    def _take_separator(self, closers: list[str]) -> ParserCoroutine[bool]:
        """Take what is between a value, or an empty array or object, and the next value. Return
        whether there is a next value."""
        while closers:
            yield from self.take_whitespace()
            if (yield from self.expect("," + closers[-1])) != ",":
                closers.pop()
                continue
            yield from self.take_whitespace()
            if closers[-1] == "}":
                yield from self._take_key()
            return True
        return False

    def _take_key(self) -> ParserCoroutine[None]:
        yield from self._take_string()
        yield from self.take_whitespace()
        yield from self.expect(":")
        yield from self.take_whitespace()

    def _take_string(self) -> ParserCoroutine[None]:
        yield from self.expect('"')
        while True:
            while (yield from self.take_matching(_IN_STRING)):
                pass
            if (yield from self.expect('"\\')) == '"':
                return
            if (yield from self.expect('"\\/bfnrtu')) == "u":
                for _ in range(4):
                    yield from self.expect("0123456789abcdefABCDEF")

    def _take_scalar(self) -> ParserCoroutine[None]:
        text = yield from self.take_matching(_IN_SCALAR, _MAX_NUMBER_LENGTH)
        if text not in _JSON_LITERALS and not _NUMBER.fullmatch(text):
            raise UnexpectedTextError

    def _take(self, size: int) -> str:
        chunk = self._text[self._position : self._position + size]
        if self.sink is not None:
            self.sink(chunk)
        elif self._num_buffered + size > MAX_BUFFERED_CHARACTERS:
            raise UnexpectedTextError
        else:
            self._buffer.append(chunk)
            self._num_buffered += size
        self._position += size
        return chunk


class StreamParser:
    """A parser of one answer. A subclass defines `_parse_answer`, which takes text from `_stream` and
    appends to `_events`."""

    def __init__(self) -> None:
        self._stream = TextStream()
        self._events: list[ParserEvent] = []
        self._coroutine = self._parse_answer()

    def feed(self, text: str) -> list[ParserEvent]:
        """Return the events of more text."""
        self._stream.add(text)
        next(self._coroutine)
        return self._take_events()

    def end(self) -> list[ParserEvent]:
        """Return the last events, those of held text. Feed nothing afterwards."""
        self._stream.is_complete = True
        for _ in self._coroutine:
            pass
        return self._take_events()

    def _parse_answer(self) -> ParserCoroutine[None]:
        """Parse the whole answer."""
        raise NotImplementedError

    def _take_events(self) -> list[ParserEvent]:
        events, self._events = self._events, []
        return events
