"""Protection against special tokens in the text of chat messages.

A user could write a special token such as `<|im_end|>` in a message, and so forge the end of the
message. `SpecialTokenEscaper` makes the tokenizer read such text as plain text.
"""

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

TemplateMessages = list[dict[str, Any]]
RenderTemplate = Callable[[TemplateMessages, dict[str, Any]], str]
"""A function (messages, variables) -> text that applies a chat template."""

_PRIVATE_USE_AREA = range(0xF0000, 0x10FFFE)
"""Code points of Unicode's private-use planes, which have no assigned meaning."""

_OBJECT_KEY = "(key)"
_TEMPLATE_KEYS = ("role", "type", _OBJECT_KEY)
"""Keys whose string values a template may compare with names, such as "user"."""


class SpecialToken(NamedTuple):
    """A special token: its text, and the whitespace that it includes.

    Attributes:
        text: Text of the token.
        lstrip: Whether the token includes whitespace before the text.
        rstrip: Whether the token includes whitespace after the text.
    """

    text: str
    lstrip: bool = False
    rstrip: bool = False


@dataclass(frozen=True)
class RenderedChat:
    """The text of a conversation, as the chat template wrote it.

    Attributes:
        text: The whole text.
        chunks: None if the tokenizer may encode `text` as a whole. Otherwise `text` in alternating
            chunks of plain text and special tokens of the template. The first and the last chunk
            are plain text. No plain text may be encoded as a special token.
    """

    text: str
    chunks: list[str] | None = None


class SpecialTokenEscaper:
    """Renderer of chat templates that keeps message text from becoming special tokens.

    The escaper replaces special tokens in the messages by private-use characters before it renders
    the template. Every special token in the rendered text then belongs to the template. A part of a
    special token at either end of a message is replaced too, because the template or another
    message could complete the token.

    Args:
        specials: The tokenizer's special tokens.
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
        """Render a chat template so that no text of the messages becomes a special token.

        Args:
            render: Function that applies the template.
            messages: The conversation. In roles, types and keys of objects, only complete special
                tokens are escaped, because templates may build a special token from a role.
            variables: Other variables of the template, such as `tools`, which are escaped too.
            becomes_special: Function that returns whether the tokenizer turns a string into special
                tokens, although the string does not contain the text of any special token.
        """
        marks = _Marks([messages, variables])
        num_complete_tokens = 0

        def mark(text: str, key: str) -> str:
            nonlocal num_complete_tokens
            if becomes_special is not None and becomes_special(text):
                num_complete_tokens += 1
                return marks.mark(text)
            marked, found = self._token_pattern.subn(lambda match: marks.mark(match[0]), text)
            num_complete_tokens += found
            return marked if key in _TEMPLATE_KEYS else self._mark_edges(marked, marks)

        marked = _map_strings(messages, mark), _map_strings(variables, mark)
        if not marks.marked_texts:
            return RenderedChat(render(messages, variables))
        escaped = render(*marked)
        if not num_complete_tokens:
            text = render(messages, variables)
            if self._token_pattern.findall(text) == self._token_pattern.findall(escaped):
                return RenderedChat(text)
        chunks = [marks.restore(chunk) for chunk in self._padded_token_pattern.split(escaped)]
        return RenderedChat("".join(chunks), chunks)

    def count_special_tokens(self, text: str) -> int:
        """Return the number of special tokens in `text`."""
        return sum(1 for _ in self._token_pattern.finditer(text))

    def _mark_edges(self, text: str, marks: "_Marks") -> str:
        """Replace incomplete special tokens at the start and the end of `text` by private-use
        characters.

        For example, `text` may start with "im_end|>" or end with "<|im_". The template or another
        message could then complete the special token. Whitespace around `text` is ignored, because
        templates may strip whitespace.
        """
        inner = text.strip()
        if not inner:
            return text
        max_size, size = min(self._max_token_length - 1, len(inner)), len(inner)
        tail = next((i for i in range(max_size, 0, -1) if inner[:i] in self._suffixes), 0)
        head = next((i for i in range(max_size, 0, -1) if inner[size - i :] in self._prefixes), 0)
        if tail + head > size or any(inner in special for special in self._texts):
            tail, head = size, 0
        start = len(text) - len(text.lstrip())
        cuts = (0, start, start + tail, start + size - head, start + size, len(text))
        before, first, middle, last, after = (text[i:j] for i, j in itertools.pairwise(cuts))
        first, last = (marks.mark(part) if part else "" for part in (first, last))
        return f"{before}{first}{middle}{last}{after}"


class _Marks:
    """Unicode private-use characters ("marks") that stand for texts while a template is rendered.

    Each mark is a character that the conversation does not contain.

    Attributes:
        marked_texts: Mapping from the code point of a mark to the text that the mark stands for.
    """

    def __init__(self, conversation: object):
        self.marked_texts: dict[int, str] = {}
        self._conversation = conversation
        self._unused_points: Iterator[int] | None = None
        self._marks_by_text: dict[str, str] = {}

    def mark(self, text: str) -> str:
        """Return a private-use character that stands for `text` while the template is rendered.

        `text` may already contain such characters. `restore` puts back the original text.
        """
        if text not in self._marks_by_text:
            if self._unused_points is None:
                taken = set[str]()
                _map_strings(self._conversation, lambda text, _: taken.update(text))
                self._unused_points = (
                    point for point in _PRIVATE_USE_AREA if chr(point) not in taken
                )
            point = next(self._unused_points, None)
            if point is None:
                raise ValueError("the messages have too many different special tokens: remove some")
            self.marked_texts[point], self._marks_by_text[text] = self.restore(text), chr(point)
        return self._marks_by_text[text]

    def restore(self, text: str) -> str:
        """Replace each mark in `text` by the text that the mark stands for. Return the result."""
        return text.translate(self.marked_texts)


def _compile_alternatives(patterns: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that matches any of `patterns`; without patterns, it never matches.

    The pattern has one group, so that `split` keeps the matches.
    """
    return re.compile(f"({'|'.join(patterns) or '(?!)'})")


def _padded_pattern(special: SpecialToken) -> str:
    before, after = r"\s*" if special.lstrip else "", r"\s*" if special.rstrip else ""
    return f"{before}{re.escape(special.text)}{after}"


def _map_strings(value: Any, change: Callable[[str, str], Any], key: str = "") -> Any:
    """Return a copy of a JSON-like value, in which `change` has replaced every string.

    Args:
        value: Strings, mappings, lists and tuples, nested to any depth. Other values stay the same.
        change: Function that takes (string, key) and returns the new string. If the string is a
            value in a mapping, `key` is the value's key. If the string is itself a key in a
            mapping, `key` is `_OBJECT_KEY`. Otherwise, `key` is "".
        key: Argument `key` of `change` if `value` is a string.
    """
    if isinstance(value, str):
        return change(value, key)
    if isinstance(value, Mapping):
        return {
            change(item_key, _OBJECT_KEY): _map_strings(item, change, item_key)
            for item_key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_map_strings(item, change) for item in value]
    return value
