"""The parts of a chat's answer, as OpenAI writes them: content, reasoning, tool calls."""

from typing import Any

from jpaged import AnswerParser, CallArguments, CallEnd, CallStart, Content, Reasoning

Body = dict[str, Any]


class AnswerParts:
    """Tells what an answer's text consists of.

    Args:
        parser: Takes the text; None: all of it is content.
        has_reasoning: Whether messages tell of reasoning.
        keeps: Whether `message` is asked for at the end.
    """

    def __init__(self, parser: AnswerParser | None, *, has_reasoning: bool, keeps: bool):
        self._parser, self._has_reasoning, self._keeps = parser, has_reasoning, keeps
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[tuple[CallStart, list[str]]] = []
        self._has_calls = False

    def deltas(self, text: str, *, is_last: bool) -> list[Body]:
        """What a stream tells of more text, one part a delta."""
        if self._parser is None:
            return [{"content": text}] if text else []
        events = self._parser.feed(text)
        events += self._parser.end() if is_last else []
        return [self._delta(event) for event in events if not isinstance(event, CallEnd)]

    def finish_reason(self, reason: str | None) -> str | None:
        """Why the answer ended, if it did: so that its calls are made, if there are any."""
        return "tool_calls" if reason == "stop" and self._has_calls else reason

    def message(self) -> Body:
        """The whole answer, once all text was given."""
        content = "".join(self._content)
        message: Body = {"role": "assistant", "content": content, "refusal": None}
        if self._has_reasoning:
            message["reasoning_content"] = "".join(self._reasoning) or None
        if self._calls:
            message["content"] = content or None
            message["tool_calls"] = [
                _call(start, "".join(arguments)) for start, arguments in self._calls
            ]
        return message

    def add(self, text: str, *, is_last: bool) -> None:
        """More text of an answer that is told as a whole."""
        if self._parser is None:
            self._content.append(text)
        else:
            self.deltas(text, is_last=is_last)

    def _delta(self, event: Content | Reasoning | CallStart | CallArguments) -> Body:
        match event:
            case Content():
                self._keep(self._content, event.text)
                return {"content": event.text}
            case Reasoning():
                self._keep(self._reasoning, event.text)
                return {"reasoning_content": event.text}
            case CallStart():
                self._has_calls = True
                if self._keeps:
                    self._calls.append((event, []))
                return {"tool_calls": [{"index": event.index, **_call(event, "")}]}
            case CallArguments():
                if self._keeps:
                    self._calls[event.index][1].append(event.text)
                function = {"arguments": event.text}
                return {"tool_calls": [{"index": event.index, "function": function}]}

    def _keep(self, pieces: list[str], text: str) -> None:
        if self._keeps:
            pieces.append(text)


def _call(start: CallStart, arguments: str) -> Body:
    function = {"name": start.name, "arguments": arguments}
    return {"id": start.id, "type": "function", "function": function}
