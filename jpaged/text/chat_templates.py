"""Special tokens in the text of messages: found, kept apart from the template's own, and written
as the plain text that they are."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

Messages = list[dict[str, Any]]
Render = Callable[[Messages, dict[str, Any]], str]
"""Writes messages and more variables out by a template."""

_PRIVATE = range(0xF0000, 0x10FFFE)
"""Code points that no text has a meaning for."""


class Special(NamedTuple):
    """A special token, and the blanks beside it that it takes in."""

    text: str
    lstrip: bool = False
    rstrip: bool = False


@dataclass(frozen=True)
class ChatText:
    """A conversation written out.

    Attributes:
        text: All of it.
        pieces: None if `text` is tokenised as it is. Otherwise text between special tokens of the
            template's own, in which nothing is special, and those tokens, by turns; it begins and
            ends with text.
    """

    text: str
    pieces: list[str] | None = None


class SpecialText:
    """Tells what messages say from what their template says.

    Marked in messages is what could become a special token: its text as a whole; and at a message's
    ends the beginning or end of one, which the template's text or another message might complete.
    The template sees a character of no meaning instead. So the special tokens in what it writes are
    its own.

    Args:
        specials: The special tokens.
    """

    def __init__(self, specials: Iterable[Special]):
        known = sorted(set(specials), key=lambda special: -len(special.text))
        texts = [special.text for special in known if special.text]
        self._texts = texts
        self._longest = max(map(len, texts), default=0)
        self._whole = _any_of(map(re.escape, texts))
        self._in_template = _any_of(_with_blanks(special) for special in known if special.text)
        self._heads = {text[:i] for text in texts for i in range(1, len(text))}
        self._tails = {text[-i:] for text in texts for i in range(1, len(text))}

    def written(
        self,
        render: Render,
        messages: Messages,
        variables: dict[str, Any],
        *,
        is_disguised: Callable[[str], bool] | None = None,
    ) -> ChatText:
        """What a template makes of messages, in which none of their text is special.

        Args:
            render: Applies the template.
            messages: The conversation. Roles may be part of the template's tokens; a whole special
                token is none in a role either.
            variables: More of the template's variables.
            is_disguised: Whether a text that is not known here for one becomes a special token.
        """
        marks = _Marks(_strings([messages, variables]))
        edges, wholes = 0, 0

        def mark(text: str, *, is_role: bool = False) -> str:
            nonlocal edges, wholes
            if is_disguised is not None and is_disguised(text):
                wholes += 1
                return marks.mark(text)
            marked, found = self._whole.subn(lambda match: marks.mark(match[0]), text)
            wholes += found
            if is_role or (spans := self._edges(marked)) is None:
                return marked
            edges += 1
            return _replaced(marked, spans, marks)

        marked = _mapped(messages, mark), _mapped(variables, mark)
        if not edges and not wholes:
            return ChatText(render(messages, variables))
        apart = render(*marked)
        if not wholes:
            text = render(messages, variables)
            if self._whole.findall(text) == self._whole.findall(apart):
                return ChatText(text)
        pieces = [marks.restored(piece) for piece in self._in_template.split(apart)]
        return ChatText("".join(pieces), pieces)

    def num_in(self, text: str) -> int:
        """How many special tokens a text has."""
        return sum(1 for _ in self._whole.finditer(text))

    def _edges(self, text: str) -> tuple[tuple[int, int], ...] | None:
        """Where a text begins with the end of a special token, and ends with the beginning of one;
        blanks, which templates strip, aside."""
        start, end = len(text) - len(text.lstrip()), len(text.rstrip())
        if start >= end:
            return None
        most = min(self._longest - 1, end - start)
        if most == end - start and any(text[start:end] in special for special in self._texts):
            return ((start, end),)
        tail = next((i for i in range(most, 0, -1) if text[start : start + i] in self._tails), 0)
        head = next((i for i in range(most, 0, -1) if text[end - i : end] in self._heads), 0)
        if tail + head > end - start:
            return ((start, end),)
        spans = (start, start + tail), (end - head, end)
        return tuple(span for span in spans if span[0] < span[1]) or None


class _Marks:
    """Characters that stand for texts; none of them is in the conversation itself."""

    def __init__(self, strings: Iterable[str]):
        self._strings = strings
        self._free: Iterator[int] | None = None
        self._text_of: dict[int, str] = {}
        self._mark_of: dict[str, str] = {}

    def mark(self, text: str) -> str:
        """The character that stands for a text, in which others may be restored."""
        if text not in self._mark_of:
            if self._free is None:
                taken = {ord(letter) for string in self._strings for letter in set(string)}
                self._free = (point for point in _PRIVATE if point not in taken)
            point = next(self._free, None)
            if point is None:
                raise ValueError("the messages have more special tokens than can be told apart")
            self._text_of[point], self._mark_of[text] = self.restored(text), chr(point)
        return self._mark_of[text]

    def restored(self, text: str) -> str:
        """A text with what the marks in it stand for."""
        return text.translate(self._text_of) if self._text_of else text


def _replaced(text: str, spans: Sequence[tuple[int, int]], marks: _Marks) -> str:
    for start, end in reversed(spans):
        text = text[:start] + marks.mark(text[start:end]) + text[end:]
    return text


def _any_of(patterns: Iterable[str]) -> re.Pattern[str]:
    """One group, so that splitting keeps what it finds; of nothing: one that never matches."""
    return re.compile(f"({'|'.join(patterns) or '(?!)'})")


def _with_blanks(special: Special) -> str:
    before, after = r"\s*" if special.lstrip else "", r"\s*" if special.rstrip else ""
    return f"{before}{re.escape(special.text)}{after}"


def _strings(value: Any) -> Iterator[str]:
    """All strings in a value, keys aside."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _strings(item)


def _mapped(value: Any, change: Callable[..., str]) -> Any:
    """The value with all its strings changed, keys aside."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {
            key: change(item, is_role=True)
            if key == "role" and isinstance(item, str)
            else _mapped(item, change)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_mapped(item, change) for item in value]
    return value
