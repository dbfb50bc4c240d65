"""Reasoning: what a model writes before its answer, separated from the answer as it is written.

The families are named as in vLLM. In both, the model writes <think>...</think> and then the answer:

    qwen3        the answer has reasoning only if it begins with <think>, or the prompt ends with it
    deepseek_r1  the answer begins with reasoning even without <think>, unless the prompt ends with
                 </think>

Line breaks before the reasoning and before the answer belong to the tags, and so do up to 64
characters of whitespace after the reasoning: chat templates write them when the conversation is
sent back.
"""

import re
from collections.abc import Callable

from jpaged.parsing.stream import Content, Event, Reasoning, Steps, StreamParser

_OPEN, _CLOSE = "<think>", "</think>"
_CALL, _FUNCTION = "<tool_call>", "<function="
_LINE_BREAKS = re.compile(r"\n+")

REASONING_FAMILIES = ("deepseek_r1", "qwen3")
"""The names of the families."""


def reasoning_end(family: str, prompt_end: str) -> tuple[str | None, str | None]:
    """Return the tags around the reasoning of an answer, as `StructuredOutputs.behind` takes them.

    Args:
        family: One of `REASONING_FAMILIES`.
        prompt_end: The end of the prompt's text, a few dozen characters.

    Returns:
        The closing tag, or None if the answer has no reasoning; then the opening tag, or None if
        the answer begins with reasoning.
    """
    end = prompt_end.rstrip()
    if end.endswith(_CLOSE):
        return None, None
    is_open = end.endswith(_OPEN) or family == "deepseek_r1"
    return _CLOSE, None if is_open else _OPEN


class ReasoningParser(StreamParser):
    """Separate the reasoning of one answer from the rest.

    Args:
        family: One of `REASONING_FAMILIES`.
        prompt_end: The end of the prompt's text, a few dozen characters.
    """

    def __init__(self, family: str, prompt_end: str = ""):
        super().__init__()
        self._is_open = reasoning_end(family, prompt_end) == (_CLOSE, None)
        # Newer Qwen3 models call tools in the middle of their reasoning.
        self._ends = (_CLOSE, _CALL) if family == "qwen3" else (_CLOSE,)

    def _answer(self) -> Steps[None]:
        stream = self._stream
        has_tag = yield from stream.literal(_OPEN)
        if has_tag or self._is_open:
            stream.release()
            yield from self._skip_line_breaks()
            if (yield from self._reasoning()):
                yield from self._skip_line_breaks()
        while True:
            self._emit(Content, stream.rest())
            if stream.ended:
                return
            yield

    def _reasoning(self) -> Steps[bool]:
        """Emit the reasoning. Return whether a closing tag ended it."""
        stream = self._stream
        while True:
            stream.sink = lambda piece: self._emit(Reasoning, piece)
            tag = yield from stream.text_until(*self._ends)
            stream.sink = None
            if tag == _CLOSE:
                yield from stream.literal(_CLOSE)
                stream.release()
                return True
            if not tag:
                self._emit(Reasoning, stream.rest())
                return False
            yield from stream.literal(_CALL)
            if (yield from stream.leads_to(_FUNCTION)):
                self._emit(Content, stream.release())
                return False
            self._emit(Reasoning, stream.release())

    def _skip_line_breaks(self) -> Steps[None]:
        self._stream.sink = lambda piece: None
        yield from self._stream.run(_LINE_BREAKS)
        self._stream.sink = None

    def _emit(self, kind: Callable[[str], Event], text: str) -> None:
        if text:
            self._events.append(kind(text))
