"""What a model thinks before it answers, told apart from the answer as it writes both.

The names of the families are vLLM's. Both write <think>...</think> and then the answer:

    qwen3        reasoning begins with the tag, which the chat template may have written already
    deepseek_r1  the answer begins inside the reasoning even where the tag is missing, unless the
                 chat template has closed it

Line breaks before the reasoning and before the answer, and up to 64 characters of whitespace behind
the reasoning, are the tags': chat templates write them when the conversation is sent back.
"""

import re
from collections.abc import Callable

from jpaged.parsing.stream import Content, Event, Reasoning, Steps, StreamParser

_OPEN, _CLOSE = "<think>", "</think>"
_CALL, _FUNCTION = "<tool_call>", "<function="
_LINE_BREAKS = re.compile(r"\n+")

REASONING_FAMILIES = ("deepseek_r1", "qwen3")
"""The names of `ReasoningParser`'s families."""


def reasoning_end(family: str, prompt_end: str) -> tuple[str | None, str | None]:
    """With what the reasoning of an answer ends, and begins if the prompt has not begun it: as
    `StructuredOutputs.behind` takes it; twice None for an answer without.

    Args:
        family: One of `REASONING_FAMILIES`.
        prompt_end: The end of the prompt's text, a few dozen characters.
    """
    end = prompt_end.rstrip()
    if end.endswith(_CLOSE):
        return None, None
    is_open = end.endswith(_OPEN) or family == "deepseek_r1"
    return _CLOSE, None if is_open else _OPEN


class ReasoningParser(StreamParser):
    """Tells reasoning from the rest of one answer.

    Args:
        family: One of `REASONING_FAMILIES`.
        prompt_end: The end of the prompt's text, a few dozen characters.
    """

    def __init__(self, family: str, prompt_end: str = ""):
        end = prompt_end.rstrip()
        self._is_open = end.endswith(_OPEN) or (
            family == "deepseek_r1" and not end.endswith(_CLOSE)
        )
        # Qwen3's newer models call tools in the middle of a thought.
        self._ends = (_CLOSE, _CALL) if family == "qwen3" else (_CLOSE,)
        self._is_over = False
        super().__init__()

    def feed(self, text: str) -> list[Event]:
        """What more of the answer's text tells."""
        if self._is_over:
            return [Content(text)] if text else []
        return super().feed(text)

    def _answer(self) -> Steps[None]:
        stream = self._stream
        has_tag = yield from stream.literal(_OPEN)
        if has_tag or self._is_open:
            stream.release()
            yield from self._skip_line_breaks()
            if (yield from self._reasoning()):
                yield from self._skip_line_breaks()
        self._is_over = True
        while True:
            self._tell(Content, stream.rest())
            if stream.ended:
                return
            yield

    def _reasoning(self) -> Steps[bool]:
        """Tells the reasoning: whether a tag closed it."""
        stream = self._stream
        while True:
            stream.sink = lambda piece: self._tell(Reasoning, piece)
            tag = yield from stream.text_until(*self._ends)
            stream.sink = None
            if tag == _CLOSE:
                yield from stream.literal(_CLOSE)
                stream.release()
                return True
            if not tag:
                self._tell(Reasoning, stream.rest())
                return False
            yield from stream.literal(_CALL)
            if (yield from stream.leads_to(_FUNCTION)):
                self._tell(Content, stream.release())
                return False
            self._tell(Reasoning, stream.release())

    def _skip_line_breaks(self) -> Steps[None]:
        self._stream.sink = lambda piece: None
        yield from self._stream.run(_LINE_BREAKS)
        self._stream.sink = None

    def _tell(self, kind: Callable[[str], Event], text: str) -> None:
        if text:
            self._events.append(kind(text))
