"""Text that a model is still writing: read as it comes, and what was found in it.

Parsers here are generators that `yield` where they need more text, and so read like parsers of a
whole text. What they find does not depend on where the text was cut: nothing is decided before the
characters that decide it are there. Each character is read once.
"""

import json
import re
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
"""Reads on each time that it is resumed; returns a T."""

MAX_HELD = 16 * 1024
"""Characters that are held back, at most, until it is known what they are."""

MAX_BLANK = 64
"""Characters of whitespace next to a tag, at most, that count as the tag's."""

MAX_DEPTH = 200
"""Arrays and objects within each other, at most: about what clients' JSON parsers take."""

_LONGEST_NUMBER = 400
"""Characters."""


@dataclass(frozen=True, slots=True)
class Content:
    """More of what the answer says."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of what the model thought before."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins: its number in the answer, from 0; its id; the name the model wrote."""

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
    """A call is over. Its arguments are a JSON object, unless the model broke off or erred."""

    index: int


Event = Content | Reasoning | CallStart | CallArguments | CallEnd


class UnexpectedTextError(Exception):
    """What comes is not what was looked for."""


_SPACE = re.compile(r"[ \t\n\r]+")
_BLANK = re.compile(rf"\s{{0,{MAX_BLANK}}}")
_IN_STRING = re.compile(r'[^"\\]+')
_IN_SCALAR = re.compile(r"[-+.0-9A-Za-z]+")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_WORDS = ("true", "false", "null")


class TextStream:
    """Text that comes in pieces, and where in it a parser is.

    What is taken goes to `sink`; without one it is held, so that it can still be given out as
    content.

    Attributes:
        sink: Is given what is taken.
        ended: Whether no more text comes.
    """

    def __init__(self) -> None:
        self.sink: Callable[[str], None] | None = None
        self.ended = False
        self._text, self._at = "", 0
        self._held: list[str] = []
        self._num_held = 0

    def add(self, text: str) -> None:
        """More text has come."""
        self._text, self._at = self._text[self._at :] + text, 0

    def release(self) -> str:
        """What is held, which is not any longer."""
        held = "".join(self._held)
        self._held.clear()
        self._num_held = 0
        return held

    def text_of(self, steps: Steps[None]) -> Steps[str]:
        """Do `steps`, without a sink. Return the text that they take."""
        num_held = len(self._held)
        yield from steps
        return "".join(self._held[num_held:])

    # Steps: they take text from where the parser is.

    def peek(self) -> Steps[str]:
        """The next character, which is not taken; nothing at the end."""
        while self._at == len(self._text) and not self.ended:
            yield
        return self._text[self._at : self._at + 1]

    def expect(self, characters: str) -> Steps[str]:
        """Takes one of these characters; UnexpectedTextError if another is next."""
        char = yield from self.peek()
        if not char or char not in characters:
            raise UnexpectedTextError
        return self._take(1)

    def run(self, pattern: re.Pattern[str], most: int = MAX_HELD) -> Steps[str]:
        """Takes what a pattern of one repeated character matches, up to so many characters."""
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
        """Takes whitespace as JSON has it, if any is next."""
        while (yield from self.run(_SPACE)):
            pass

    def literal(self, *words: str) -> Steps[str]:
        """Takes one of `words` with the whitespace before it, if that is next: which one. Else
        nothing is taken, and that is returned."""
        word, size = yield from self._ahead(words)
        if word:
            self._take(size)
        return word

    def leads_to(self, *words: str) -> Steps[bool]:
        """Whether one of `words` is next, after whitespace; takes nothing."""
        word, _ = yield from self._ahead(words)
        return bool(word)

    def is_over(self) -> Steps[bool]:
        """Whether there is nothing more but whitespace; takes nothing."""
        while self._behind_blank() == len(self._text):
            if self.ended:
                return True
            yield
        return False

    def _ahead(self, words: Sequence[str]) -> Steps[tuple[str, int]]:
        """Which of `words` is next, and how many characters it and the whitespace before it are."""
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
        """Gives the sink the text before the first of `tags`, but for up to `blank` characters of
        whitespace right before it: which tag. Nothing if the text ends first; what may have been
        the whitespace or the beginning of a tag is then left to take."""
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
        """Where the text ends without the beginning of a tag at its end."""
        text, at = self._text, self._at
        starts = (tag[:i] for tag in tags for i in range(1, len(tag)))
        held = max((len(start) for start in starts if text.endswith(start, at)), default=0)
        return len(text) - held

    def rest(self) -> str:
        """Takes all that is there, past the sink."""
        rest, self._at = self._text[self._at :], len(self._text)
        return rest

    # JSON.

    def json_string(self) -> Steps[str]:
        """Takes a string as JSON has it, line breaks in it permitted: what it says.

        Raises:
            UnexpectedTextError: there is none; or what it says is no text.
        """
        text = yield from self.text_of(self._string())
        said: str = json.loads(text, strict=False)
        try:
            said.encode()
        except UnicodeEncodeError:  # half of a surrogate pair
            raise UnexpectedTextError from None
        return said

    def json_value(self) -> Steps[None]:
        """Takes one value; UnexpectedTextError at the first character that does not fit."""
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
        """Behind a value, or in an empty array or object: goes on to the next value; whether there
        is one."""
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
    """What the parsers of one answer have in common: subclasses read `_stream` in `_answer`, and
    tell what they find in `_events`."""

    def __init__(self) -> None:
        self._stream = TextStream()
        self._events: list[Event] = []
        self._steps = self._answer()

    def feed(self, text: str) -> list[Event]:
        """What more of the answer's text tells."""
        self._stream.add(text)
        next(self._steps)
        return self._take_events()

    def end(self) -> list[Event]:
        """What is left when no more text comes; nothing may be fed after it."""
        self._stream.ended = True
        for _ in self._steps:
            pass
        return self._take_events()

    def _answer(self) -> Steps[None]:
        raise NotImplementedError

    def _take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events
