"""Parser of reasoning: the text that a model writes between <think> and </think>.

A reasoning family is a format in which models write reasoning. The names are those of vLLM:

    qwen3        The answer has reasoning only if it begins with <think>, or if the prompt ends
                 with <think>.
    deepseek_r1  The answer begins with reasoning, with or without <think>, unless the prompt ends
                 with </think>.

The parser drops line breaks after <think> and </think>, and up to 64 characters of whitespace
before </think>. The whitespace is not lost: chat templates insert it again when a client sends the
conversation back.
"""

import re
from collections.abc import Callable

from jpaged.parsing.stream import Content, ParserCoroutine, ParserEvent, Reasoning, StreamParser

_OPEN, _CLOSE = "<think>", "</think>"
_CALL, _FUNCTION = "<tool_call>", "<function="
_LINE_BREAKS = re.compile(r"\n+")

REASONING_FAMILIES = ("deepseek_r1", "qwen3")
"""Names of the reasoning families."""


def reasoning_end(family: str, prompt_end: str) -> tuple[str | None, str | None]:
    """Return the closing and opening tags of an answer's reasoning.

    `StructuredOutputs.with_reasoning` takes the tags as arguments.

    Args:
        family: One of `REASONING_FAMILIES`.
        prompt_end: The last few dozen characters of the prompt's text.

    Returns:
        closing_tag: None if the answer has no reasoning.
        opening_tag: None if the answer has no reasoning, or begins inside the reasoning.
    """
    end = prompt_end.rstrip()
    if end.endswith(_CLOSE):
        return None, None
    is_open = end.endswith(_OPEN) or family == "deepseek_r1"
    return _CLOSE, None if is_open else _OPEN


class ReasoningParser(StreamParser):
    """Parser that separates the reasoning of one answer from its content.

    Args:
        family: One of `REASONING_FAMILIES`.
        prompt_end: The last few dozen characters of the prompt's text.
    """

    def __init__(self, family: str, prompt_end: str = ""):
        super().__init__()
        self._starts_in_reasoning = reasoning_end(family, prompt_end) == (_CLOSE, None)
        # Newer Qwen3 models may begin a tool call without a </think> tag before it.
        self._end_tags = (_CLOSE, _CALL) if family == "qwen3" else (_CLOSE,)

    def _parse_answer(self) -> ParserCoroutine[None]:
        stream = self._stream
        has_tag = yield from stream.take_literal(_OPEN)
        if has_tag or self._starts_in_reasoning:
            stream.release()
            yield from self._skip_line_breaks()
            if (yield from self._parse_reasoning()):
                yield from self._skip_line_breaks()
        while True:
            self._emit(Content, stream.take_rest())
            if stream.is_complete:
                return
            yield

    def _parse_reasoning(self) -> ParserCoroutine[bool]:
        """Emit the reasoning, and return whether </think> ended it."""
        stream = self._stream
        while True:
            stream.sink = lambda chunk: self._emit(Reasoning, chunk)
            tag = yield from stream.take_until(*self._end_tags)
            stream.sink = None
            if tag == _CLOSE:
                yield from stream.take_literal(_CLOSE)
                stream.release()
                return True
            if not tag:
                self._emit(Reasoning, stream.take_rest())
                return False
            yield from stream.take_literal(_CALL)
            if (yield from stream.is_next(_FUNCTION)):
                self._emit(Content, stream.release())
                return False
            self._emit(Reasoning, stream.release())

    def _skip_line_breaks(self) -> ParserCoroutine[None]:
        self._stream.sink = lambda chunk: None
        yield from self._stream.take_matching(_LINE_BREAKS)
        self._stream.sink = None

    def _emit(self, event_type: Callable[[str], ParserEvent], text: str) -> None:
        if text:
            self._events.append(event_type(text))
