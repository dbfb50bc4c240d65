"""Base classes for parsing an answer while the model generates it, and the events of the parsers.

Each parser is a generator that yields when it needs more text. Its code therefore looks like that
of a parser of complete text. A parser decides only after it has all characters that the decision
depends on. The result therefore does not depend on how the answer is split into chunks.
"""

import json
import re
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
ParserCoroutine = Generator[None, None, T]
"""A generator that parses a part of an answer, yields to wait for more text, and returns a value of
type T."""

MAX_BUFFERED_CHARACTERS = 16 * 1024
"""Maximum number of characters that a parser buffers while it waits for the end of a tag or of a
call."""

MAX_TAG_WHITESPACE = 64
"""Maximum number of whitespace characters next to a tag that are dropped with the tag."""

MAX_JSON_DEPTH = 200
"""Maximum nesting depth of arrays and objects in arguments. JSON parsers of clients have such
limits."""

_MAX_NUMBER_LENGTH = 400
"""Maximum number of characters in a JSON number."""


@dataclass(frozen=True, slots=True)
class Content:
    """A chunk of content: text of the answer outside reasoning and tool calls."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A chunk of the reasoning before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """The start of a tool call.

    Attributes:
        index: Position of the call among the answer's calls, from 0.
        id: Id of the call. The client's message with the tool's result refers to this id.
        name: Function name as the model wrote it.
    """

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A chunk of the JSON text of a tool call's arguments."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The end of a tool call.

    The arguments are a complete JSON object, unless the model stopped early or wrote invalid JSON.
    """

    index: int


ParserEvent = Content | Reasoning | CallStart | CallArguments | CallEnd


class UnexpectedTextError(Exception):
    """Raised if the text does not match the format that the parser expects."""


_JSON_WHITESPACE = re.compile(r"[ \t\n\r]+")
_TAG_WHITESPACE = re.compile(rf"\s{{0,{MAX_TAG_WHITESPACE}}}")
_IN_STRING = re.compile(r'[^"\\]+')
_IN_SCALAR = re.compile(r"[-+.0-9A-Za-z]+")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_JSON_LITERALS = ("true", "false", "null")


class TextStream:
    """A text that arrives in chunks, and the parser's position in the text.

    A method named `take_...` moves the position past some text, and passes this text to `sink`.
    Without a sink, the stream buffers the text, so that the parser can emit it as content if the
    format turns out to be wrong.

    Attributes:
        sink: Function that receives the text that `take_...` methods take; None to buffer the text.
        is_complete: Whether all text has arrived.
    """

    def __init__(self) -> None:
        self.sink: Callable[[str], None] | None = None
        self.is_complete = False
        self._text, self._position = "", 0
        self._buffer: list[str] = []
        self._num_buffered = 0

    def add(self, text: str) -> None:
        """Append the next chunk of text."""
        self._text, self._position = self._text[self._position :] + text, 0

    def release(self) -> str:
        """Return the buffered text, and clear the buffer."""
        held = "".join(self._buffer)
        self._buffer.clear()
        self._num_buffered = 0
        return held

    def capture_text(self, coroutine: ParserCoroutine[None]) -> ParserCoroutine[str]:
        """Run a parser coroutine, and return the text that the coroutine consumes.

        `sink` must be None, so that the stream buffers the text.
        """
        num_held = len(self._buffer)
        yield from coroutine
        return "".join(self._buffer[num_held:])

    # The following methods are generators that read text at the parser's position.

    def peek(self) -> ParserCoroutine[str]:
        """Return the next character without taking it, or "" at the end of the text."""
        while self._position == len(self._text) and not self.is_complete:
            yield
        return self._text[self._position : self._position + 1]

    def expect(self, characters: str) -> ParserCoroutine[str]:
        """Take and return the next character.

        Raises:
            UnexpectedTextError: The next character is not one of `characters`, or the text ends.
        """
        char = yield from self.peek()
        if not char or char not in characters:
            raise UnexpectedTextError
        return self._take(1)

    def take_matching(
        self, pattern: re.Pattern[str], max_characters: int = MAX_BUFFERED_CHARACTERS
    ) -> ParserCoroutine[str]:
        """Take and return up to `max_characters` characters that match `pattern`.

        Args:
            pattern: A repeated character class, such as `[a-z]+`, because a match may continue in
                the next chunk.
            max_characters: Maximum number of characters to take.

        Raises:
            UnexpectedTextError: The buffer is full.
        """
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
        """Take all JSON whitespace at the position."""
        while (yield from self.take_matching(_JSON_WHITESPACE)):
            pass

    def take_literal(self, *words: str) -> ParserCoroutine[str]:
        """Take and return one of `words` if the text continues with that word, after optional
        whitespace.

        The whitespace is taken too. If no word follows, take nothing and return "".
        """
        word, size = yield from self._peek_word(words)
        if word:
            self._take(size)
        return word

    def is_next(self, *words: str) -> ParserCoroutine[bool]:
        """Return whether the text continues with one of `words`, after optional whitespace."""
        word, _ = yield from self._peek_word(words)
        return bool(word)

    def is_over(self) -> ParserCoroutine[bool]:
        """Return whether only whitespace is left, at most `MAX_TAG_WHITESPACE` characters."""
        while self._whitespace_end() == len(self._text):
            if self.is_complete:
                return True
            yield
        return False

    def _peek_word(self, words: Sequence[str]) -> ParserCoroutine[tuple[str, int]]:
        """Return the word of `words` that comes next, and the number of characters up to its end,
        including whitespace before the word. Return ("", 0) if none of `words` comes next."""
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
        """Move the position past the text before the first tag of `tags`, and return that tag.

        The text is passed to `sink` or buffered. The next `take_...` call starts at the tag, or at
        the whitespace before the tag (up to `max_whitespace` characters).

        If the text ends without a tag, return "". Whitespace and an incomplete tag at the end of
        the text are then left for `take_rest`.
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
        """Return the position before which no tag of `tags` can begin. If the text ends with an
        incomplete tag, this is the position of that tag. Otherwise, it is the length of the
        text."""
        text, at = self._text, self._position
        starts = (tag[:i] for tag in tags for i in range(1, len(tag)))
        held = max((len(start) for start in starts if text.endswith(start, at)), default=0)
        return len(text) - held

    def take_rest(self) -> str:
        """Take and return all remaining text. Unlike the other `take_...` methods, this method does
        not pass the text to `sink`."""
        rest, self._position = self._text[self._position :], len(self._text)
        return rest

    # Generators that take JSON.

    def take_json_string(self) -> ParserCoroutine[str]:
        """Take a JSON string and return its value. The string may contain line breaks.

        Raises:
            UnexpectedTextError: The text is not a JSON string, or the string contains a lone
                surrogate.
        """
        text = yield from self.capture_text(self._take_string())
        value: str = json.loads(text, strict=False)
        try:
            value.encode()
        except UnicodeEncodeError:  # a lone surrogate
            raise UnexpectedTextError from None
        return value

    def take_json_value(self) -> ParserCoroutine[None]:
        """Take a JSON value.

        Raises:
            UnexpectedTextError: The text is not valid JSON, or is nested too deeply. The characters
                before the error are taken.
        """
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
        """Take the commas, keys and closing brackets that follow a value.

        Args:
            closers: Closing brackets of the open arrays and objects, innermost last. The method
                removes each bracket that it takes.

        Returns:
            Whether another value follows.
        """
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
    """Base class of parsers. A parser object parses a single answer.

    A subclass defines `_parse_answer`, which takes text from `_stream` and appends to `_events`.
    """

    def __init__(self) -> None:
        self._stream = TextStream()
        self._events: list[ParserEvent] = []
        self._coroutine = self._parse_answer()

    def feed(self, text: str) -> list[ParserEvent]:
        """Parse the next chunk of the answer and return its events."""
        self._stream.add(text)
        next(self._coroutine)
        return self._take_events()

    def end(self) -> list[ParserEvent]:
        """End the answer and return the events of the buffered text.

        Do not call `feed` afterwards.
        """
        self._stream.is_complete = True
        for _ in self._coroutine:
            pass
        return self._take_events()

    def _parse_answer(self) -> ParserCoroutine[None]:
        raise NotImplementedError

    def _take_events(self) -> list[ParserEvent]:
        events, self._events = self._events, []
        return events
