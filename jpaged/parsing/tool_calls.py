"""Base class of the tool-call parsers, which find tool calls while the model generates the answer.

The parsers of all families follow these rules:

* A call begins when its name and the first character of its arguments have arrived. If the text
  deviates from the format before that point, all of the text becomes content. Examples of
  deviations are a missing tag, invalid JSON, or a name that is empty or longer than 256 characters.
* `CallStart` has the name that the model wrote, even if no tool has this name.
* The arguments are a JSON object as the model wrote it. Only `qwen3_xml` creates the JSON from
  values that the model wrote without JSON.
* Invalid arguments are emitted unchanged up to the call's closing tag, because the start of the
  call has already been emitted. The client can see the mistake of the model.
* Other keys of a call, such as "id", are dropped.
* Up to 64 characters of whitespace next to a call's tags are dropped. All other text is content.
"""

import secrets
import string
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from jpaged.parsing.stream import (
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    ParserCoroutine,
    ParserEvent,
    StreamParser,
    UnexpectedTextError,
)

ToolDefinition = Mapping[str, Any]
"""A tool in OpenAI's format: {"type": "function", "function": {"name": ..., ...}}."""

MAX_NAME_LENGTH = 256
"""Maximum number of characters in the name of a function or a parameter."""

_ARGUMENTS_KEYS = ("arguments", "parameters")
_ID_CHARACTERS = string.ascii_letters + string.digits


class ToolCallParser(StreamParser):
    """Parser that splits one answer into tool calls and content.

    Each family has a subclass, which defines `opening_tags` and `_parse_calls`.

    Args:
        tools: The tools in the prompt. If the model writes argument values without quotes, the
            parser looks up the types of the values in the schemas of the tools.

    Attributes:
        opening_tags: Tags with which a call may begin.
        id_prefix: First characters of every call id that the parser generates.
        id_size: Number of random characters in a call id.
    """

    opening_tags: ClassVar[tuple[str, ...]]
    id_prefix: ClassVar[str] = "call_"
    id_size: ClassVar[int] = 24

    def __init__(self, tools: Sequence[ToolDefinition] = ()):
        super().__init__()
        functions = [tool["function"] for tool in tools]
        self._schemas = {each["name"]: each.get("parameters") or {} for each in functions}
        # Chunks of text that are not emitted yet. Inside a tool call, they belong to its arguments;
        # otherwise, they are content.
        self._chunks: list[str] = []
        self._num_calls = 0
        self._is_in_call = False
        self._has_text_since_call = True  # True before the first call

    def _parse_calls(self) -> ParserCoroutine[None]:
        """Take one or more calls. The stream's position is at an opening tag.

        Raises:
            UnexpectedTextError: The text does not match the family's format.
        """
        raise NotImplementedError

    def _parse_answer(self) -> ParserCoroutine[None]:
        stream, is_over = self._stream, False
        while not is_over:
            stream.sink = self._emit_text
            is_over = not (yield from stream.take_until(*self.opening_tags))
            stream.sink = None
            if is_over:
                self._emit_unless_blank(stream.take_rest())
            else:
                yield from self._try_parse_calls()

    def _try_parse_calls(self) -> ParserCoroutine[None]:
        """Parse tool calls. Text that does not match the format of calls is emitted as content.

        If the answer ends within the closing tag of a call, the incomplete tag is dropped.
        """
        num_before = self._num_calls
        try:
            yield from self._parse_calls()
        except UnexpectedTextError:
            text = self._stream.release()
            if self._num_calls == num_before or not (yield from self._stream.is_over()):
                self._emit_unless_blank(text)
        self._stream.release()

    # Methods that emit events.

    def _take_events(self) -> list[ParserEvent]:
        self._emit_chunks()
        return super()._take_events()

    def _emit_chunks(self) -> None:
        """Emit the collected chunks as one event."""
        text = "".join(self._chunks)
        self._chunks.clear()
        if text:
            is_open, index = self._is_in_call, self._num_calls
            self._events.append(CallArguments(index, text) if is_open else Content(text))

    def _emit_text(self, text: str) -> None:
        if text:
            self._has_text_since_call = True
            self._chunks.append(text)

    def _emit_unless_blank(self, text: str) -> None:
        """Emit text as content, unless it consists of whitespace that directly follows a call."""
        if self._has_text_since_call or text.strip():
            self._emit_text(text)

    def _emit_arguments(self, text: str) -> None:
        self._chunks.append(text)

    def _begin_call(self, name: str, call_id: str = "") -> None:
        self._stream.release()
        self._emit_chunks()
        random_id = "".join(secrets.choice(_ID_CHARACTERS) for _ in range(self.id_size))
        self._events.append(CallStart(self._num_calls, call_id or self.id_prefix + random_id, name))
        self._is_in_call = True

    def _end_call(self) -> None:
        self._emit_chunks()
        self._events.append(CallEnd(self._num_calls))
        self._num_calls += 1
        self._is_in_call = self._has_text_since_call = False

    # The following methods are generators that parse calls written as JSON.

    def _parse_json_call(
        self, closing_tag: str, keys: frozenset[str] | None = None
    ) -> ParserCoroutine[None]:
        """Take one call that is a JSON object.

        Args:
            closing_tag: Tag that ends the call if the arguments are not valid JSON.
            keys: Allowed keys of the object; None allows all keys. The arguments of the call may be
                missing only if `keys` is None.

        Raises:
            UnexpectedTextError: The text is not a valid call. The caller must emit the buffered
                text of the stream as content.
        """
        stream, name, arguments = self._stream, "", ""
        is_emitted = is_over = False
        yield from stream.expect("{")
        yield from stream.take_whitespace()
        while not is_over:
            key = yield from stream.take_json_string()
            if keys is not None and key not in keys:
                raise UnexpectedTextError
            yield from stream.take_whitespace()
            yield from stream.expect(":")
            yield from stream.take_whitespace()
            if key == "name" and not name:
                name = validate_name((yield from stream.take_json_string()))
            elif key not in _ARGUMENTS_KEYS or arguments or is_emitted:
                yield from stream.take_json_value()
            elif (yield from stream.peek()) != "{":
                raise UnexpectedTextError
            elif name:
                yield from self._parse_arguments(name, closing_tag)
                is_emitted = True
            else:
                arguments = yield from stream.capture_text(stream.take_json_value())
            if name and arguments:
                self._emit_whole_call(name, arguments)
                arguments, is_emitted = "", True
            is_over = yield from self._parse_object_end(closing_tag if is_emitted else "")
        if not is_emitted:
            if not name or keys is not None:
                raise UnexpectedTextError
            self._emit_whole_call(name, "{}")
        stream.release()

    def _emit_whole_call(self, name: str, arguments: str) -> None:
        self._begin_call(name)
        self._emit_arguments(arguments)
        self._end_call()

    def _parse_arguments(
        self, name: str, closing_tag: str, call_id: str = ""
    ) -> ParserCoroutine[None]:
        """Take the arguments of one call, and emit the events of the call.

        If the arguments are not valid JSON, they end at `closing_tag`, or at the end of the answer.
        """
        stream = self._stream
        self._begin_call(name, call_id)
        stream.sink = self._emit_arguments
        try:
            yield from stream.take_json_value()
        except UnexpectedTextError:
            if not (yield from stream.take_until(closing_tag, max_whitespace=0)):
                self._emit_arguments(stream.take_rest())
        stream.sink = None
        self._end_call()

    def _parse_object_end(self, closing_tag: str) -> ParserCoroutine[bool]:
        """Take the comma or the brace after a value in an object, and return whether the object
        ends.

        Args:
            closing_tag: If not "", the object may also end without a brace: before this tag, or at
                the end of the answer. If "", only a brace ends the object.
        """
        stream = self._stream
        yield from stream.take_whitespace()
        if closing_tag and (
            (yield from stream.is_next(closing_tag)) or (yield from stream.is_over())
        ):
            return True
        if (yield from stream.expect(",}")) == "}":
            return True
        yield from stream.take_whitespace()
        return False


def validate_name(name: str) -> str:
    """Check the name of a function, and return it unchanged.

    Raises:
        UnexpectedTextError: `name` is empty, or longer than `MAX_NAME_LENGTH` characters.
    """
    if not 0 < len(name) <= MAX_NAME_LENGTH:
        raise UnexpectedTextError
    return name
