"""Special tokens in the text of messages: found, kept apart from the template's own, and written
as the plain text that they are."""

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

TemplateMessages = list[dict[str, Any]]
RenderTemplate = Callable[[TemplateMessages, dict[str, Any]], str]
"""Writes messages and more variables out by a template."""

_PRIVATE_USE_AREA = range(0xF0000, 0x10FFFE)
"""Code points that no text has a meaning for."""

_OBJECT_KEY = "(key)"
_TEMPLATE_KEYS = ("role", "type", _OBJECT_KEY)
"""Keys of strings that templates look for by their names."""


class SpecialToken(NamedTuple):
    """A special token, and the blanks next to it that it takes in."""

    text: str
    lstrip: bool = False
    rstrip: bool = False


@dataclass(frozen=True)
class RenderedChat:
    """A conversation written out.

    Attributes:
        text: All of it.
        pieces: None if `text` is tokenised as it is. Otherwise text between special tokens of the
            template's own, in which nothing is special, and those tokens, by turns; it begins and
            ends with text.
    """

    text: str
    chunks: list[str] | None = None


class SpecialTokenEscaper:
    """Tells what messages say from what their template says.

    Marked in messages is what could become a special token: its text as a whole; and at a message's
    ends the beginning or end of one, which the template's text or another message might complete.
    The template sees a character of no meaning instead. So the special tokens in what it writes are
    its own.

    Args:
        specials: The special tokens.
    """

    def __init__(self, specials: Iterable[SpecialToken]):
        known = sorted(set(specials), key=lambda special: -len(special.text))
        texts = [special.text for special in known if special.text]
        self._texts = texts
        self._max_token_length = max(map(len, texts), default=0)
        self._token_pattern = _compile_alternatives(map(re.escape, texts))
        self._padded_token_pattern = _compile_alternatives(
            _padded_pattern(special) for special in known if special.text
        )
        self._prefixes = {text[:i] for text in texts for i in range(1, len(text))}
        self._suffixes = {text[-i:] for text in texts for i in range(1, len(text))}

    def render_escaped(
        self,
        render: RenderTemplate,
        messages: TemplateMessages,
        variables: dict[str, Any],
        *,
        becomes_special: Callable[[str], bool] | None = None,
    ) -> RenderedChat:
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
            if becomes_special is not None and becomes_special(text):
                num_wholes += 1
                return marks.mark(text)
            marked, found = self._token_pattern.subn(lambda match: marks.mark(match[0]), text)
            num_wholes += found
            return marked if key in _TEMPLATE_KEYS else self._mark_edges(marked, marks)

        marked = _map_strings(messages, mark), _map_strings(variables, mark)
        if not marks.marked_texts:
            return RenderedChat(render(messages, variables))
        escaped = render(*marked)
        if not num_wholes:
            text = render(messages, variables)
            if self._token_pattern.findall(text) == self._token_pattern.findall(escaped):
                return RenderedChat(text)
        chunks = [marks.restore(chunk) for chunk in self._padded_token_pattern.split(escaped)]
        return RenderedChat("".join(chunks), chunks)

    def count_special_tokens(self, text: str) -> int:
        """How many special tokens a text has."""
        return sum(1 for _ in self._token_pattern.finditer(text))

    def _mark_edges(self, text: str, marks: "_Marks") -> str:
        """Mark the end of a special token that a text begins with, and the beginning of one that it
        ends with; blanks, which templates strip, aside."""
        inner = text.strip()
        if not inner:
            return text
        most, size = min(self._max_token_length - 1, len(inner)), len(inner)
        tail = next((i for i in range(most, 0, -1) if inner[:i] in self._suffixes), 0)
        head = next((i for i in range(most, 0, -1) if inner[size - i :] in self._prefixes), 0)
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
        self.marked_texts: dict[int, str] = {}
        self._conversation = conversation
        self._unused_points: Iterator[int] | None = None
        self._marks_by_text: dict[str, str] = {}

    def mark(self, text: str) -> str:
        """The character that stands for a text, in which others may be restored."""
        if text not in self._marks_by_text:
            if self._unused_points is None:
                taken = set[str]()
                _map_strings(self._conversation, lambda text, _: taken.update(text))
                self._unused_points = (
                    point for point in _PRIVATE_USE_AREA if chr(point) not in taken
                )
            point = next(self._unused_points, None)
            if point is None:
                raise ValueError("the messages have more special tokens than can be told apart")
            self.marked_texts[point], self._marks_by_text[text] = self.restore(text), chr(point)
        return self._marks_by_text[text]

    def restore(self, text: str) -> str:
        """A text with what the marks in it stand for."""
        return text.translate(self.marked_texts)


def _compile_alternatives(patterns: Iterable[str]) -> re.Pattern[str]:
    """One group, so that splitting keeps what it finds; of nothing: one that never matches."""
    return re.compile(f"({'|'.join(patterns) or '(?!)'})")


def _padded_pattern(special: SpecialToken) -> str:
    before, after = r"\s*" if special.lstrip else "", r"\s*" if special.rstrip else ""
    return f"{before}{re.escape(special.text)}{after}"


def _map_strings(value: Any, change: Callable[[str, str], Any], key: str = "") -> Any:
    """The value with all its strings changed; `change` is told the key of a string, of a key that
    it is one."""
    if isinstance(value, str):
        return change(value, key)
    if isinstance(value, Mapping):
        return {
            change(own, _OBJECT_KEY): _map_strings(item, change, own) for own, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_map_strings(item, change) for item in value]
    return value
