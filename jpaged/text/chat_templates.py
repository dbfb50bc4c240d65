"""Special tokens in the text of messages: found, kept apart from the template's own, and written
as the plain text that they are."""

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

Messages = list[dict[str, Any]]
Render = Callable[[Messages, dict[str, Any]], str]
"""Writes messages and more variables out by a template."""

_PRIVATE = range(0xF0000, 0x10FFFE)
"""Code points that no text has a meaning for."""

_KEY = "(key)"
_AS_NAMED = ("role", "type", _KEY)
"""Keys of strings that templates look for by their names."""


class Special(NamedTuple):
    """A special token, and the blanks next to it that it takes in."""

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
            messages: The conversation. Roles, and keys of objects, may be part of the template's
                tokens; a whole special token is none in them either.
            variables: More of the template's variables, such as `tools`.
            is_disguised: Whether a text that is not known here for one becomes a special token.
        """
        marks = _Marks([messages, variables])
        num_wholes = 0

        def mark(text: str, key: str) -> str:
            nonlocal num_wholes
            if is_disguised is not None and is_disguised(text):
                num_wholes += 1
                return marks.mark(text)
            marked, found = self._whole.subn(lambda match: marks.mark(match[0]), text)
            num_wholes += found
            return marked if key in _AS_NAMED else self._mark_edges(marked, marks)

        marked = _mapped(messages, mark), _mapped(variables, mark)
        if not marks.text_of:
            return ChatText(render(messages, variables))
        apart = render(*marked)
        if not num_wholes:
            text = render(messages, variables)
            if self._whole.findall(text) == self._whole.findall(apart):
                return ChatText(text)
        pieces = [marks.restored(piece) for piece in self._in_template.split(apart)]
        return ChatText("".join(pieces), pieces)

    def num_in(self, text: str) -> int:
        """How many special tokens a text has."""
        return sum(1 for _ in self._whole.finditer(text))

    def _mark_edges(self, text: str, marks: "_Marks") -> str:
        """Mark the end of a special token that a text begins with, and the beginning of one that it
        ends with; blanks, which templates strip, aside."""
        inner = text.strip()
        if not inner:
            return text
        most, size = min(self._longest - 1, len(inner)), len(inner)
        tail = next((i for i in range(most, 0, -1) if inner[:i] in self._tails), 0)
        head = next((i for i in range(most, 0, -1) if inner[size - i :] in self._heads), 0)
        if tail + head > size or any(inner in special for special in self._texts):
            tail, head = size, 0
        start = len(text) - len(text.lstrip())
        cuts = (0, start, start + tail, start + size - head, start + size, len(text))
        before, first, middle, last, after = (text[i:j] for i, j in itertools.pairwise(cuts))
        first, last = (marks.mark(part) if part else "" for part in (first, last))
        return f"{before}{first}{middle}{last}{after}"


class _Marks:
    """Characters that stand for texts; none of them is in the conversation itself.

    Attributes:
        text_of: What they stand for, by their code points.
    """

    def __init__(self, conversation: object):
        self.text_of: dict[int, str] = {}
        self._conversation = conversation
        self._free: Iterator[int] | None = None
        self._mark_of: dict[str, str] = {}

    def mark(self, text: str) -> str:
        """The character that stands for a text, in which others may be restored."""
        if text not in self._mark_of:
            if self._free is None:
                taken = set[str]()
                _mapped(self._conversation, lambda text, _: taken.update(text))
                self._free = (point for point in _PRIVATE if chr(point) not in taken)
            point = next(self._free, None)
            if point is None:
                raise ValueError("the messages have more special tokens than can be told apart")
            self.text_of[point], self._mark_of[text] = self.restored(text), chr(point)
        return self._mark_of[text]

    def restored(self, text: str) -> str:
        """A text with what the marks in it stand for."""
        return text.translate(self.text_of)


def _any_of(patterns: Iterable[str]) -> re.Pattern[str]:
    """One group, so that splitting keeps what it finds; of nothing: one that never matches."""
    return re.compile(f"({'|'.join(patterns) or '(?!)'})")


def _with_blanks(special: Special) -> str:
    before, after = r"\s*" if special.lstrip else "", r"\s*" if special.rstrip else ""
    return f"{before}{re.escape(special.text)}{after}"


def _mapped(value: Any, change: Callable[[str, str], Any], key: str = "") -> Any:
    """The value with all its strings changed; `change` is told the key of a string, of a key that
    it is one."""
    if isinstance(value, str):
        return change(value, key)
    if isinstance(value, Mapping):
        return {change(own, _KEY): _mapped(item, change, own) for own, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_mapped(item, change) for item in value]
    return value
