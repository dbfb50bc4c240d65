"""Token ids to text as they come, and stop strings found on the way.

Text can not be made token by token: a character may take several tokens, and some tokenizers
write a word's leading space only if something stands before it. So the new tokens are decoded
together with a few before them, and the text of those is cut off (the technique of Hugging Face's
text-generation-inference). The cost of a token is that of decoding some twenty. Tokens of
byte-level tokenizers are bytes, whatever stands before them: their text is made of these.
"""

import codecs
from collections.abc import Callable, Sequence

from jpaged.text.tokenizer import Tokenizer

REPLACEMENT_CHARACTER = "\ufffd"
"""What decoders write for bytes that are no character, or not yet a whole one."""

PROMPT_TAIL_TOKENS = 64
"""Tokens of a prompt that matter to the text after it: the last of them that are not special. Some
specials may sit between those; more than this is no text anyway."""

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")
_MIN_CONTEXT = 4
_MAX_CONTEXT = 16
_MAX_WINDOW = 24
_MAX_INCOMPLETE_CALLS = 32
_MAX_CHARACTER_TOKENS = 4  # UTF-8 has at most four bytes, and a token at least one


class WindowDecoder:
    """Turns a growing list of tokens to text, piece by piece.

    The pieces, joined, are the text of all tokens as it reads after the prompt: decoding prompt
    and output together gives the prompt's text and then this.

    Args:
        decode: The text of tokens.
        prompt_token_ids: May end within a character.
        skipped: Tokens that are no text.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        prompt_token_ids: Sequence[int],
        skipped_ids: frozenset[int],
    ):
        self._decode, self._skipped_ids = decode, skipped_ids
        tail = prompt_token_ids[-PROMPT_TAIL_TOKENS:]
        # The last tokens, enough of them to decode what comes next rightly, and how many characters
        # of their text were returned before (of the prompt's: all whole ones).
        self._window, self._num_returned = self._prompt_window(
            [i for i in tail if i not in skipped_ids]
        )
        self._num_incomplete_calls = 0

    def push(self, token_ids: Sequence[int]) -> str:
        """Take new tokens and return the text that is certain now.

        An incomplete character at the end stays back until it is complete. No character takes
        `_MAX_INCOMPLETE_CALLS` calls, so after them the bytes are taken to be none.
        """
        new = [token_id for token_id in token_ids if token_id not in self._skipped_ids]
        if not new:
            return ""
        if (
            not self._num_incomplete_calls and len(self._window) > _MAX_WINDOW
        ):  # all text was returned
            self._window = self._find_context(self._window) or self._window[-_MAX_CONTEXT:]
            self._num_returned = len(self._decode(self._window))
        self._window += new
        text = self._decode(self._window)
        self._num_incomplete_calls += 1
        held = text.endswith(REPLACEMENT_CHARACTER) or len(text) <= self._num_returned
        if held and self._num_incomplete_calls < _MAX_INCOMPLETE_CALLS:
            return self._take_new_text(text.rstrip(REPLACEMENT_CHARACTER))
        self._num_incomplete_calls = 0
        return self._take_new_text(text)

    def flush(self) -> str:
        """Return the text held back: no token will complete it."""
        return self._take_new_text(self._decode(self._window)) if self._num_incomplete_calls else ""

    def _take_new_text(self, text: str) -> str:
        start, self._num_returned = self._num_returned, max(self._num_returned, len(text))
        return text[start:]

    def _find_context(self, token_ids: list[int]) -> list[int] | None:
        """The shortest tail that starts with a whole character and has more than spaces."""
        most = min(_MAX_CONTEXT, len(token_ids))
        for size in range(min(_MIN_CONTEXT, most), most + 1):
            text = self._decode(token_ids[-size:])
            if REPLACEMENT_CHARACTER not in text and text.strip():
                return token_ids[-size:]
        return None

    def _prompt_window(self, prompt: list[int]) -> tuple[list[int], int]:
        """The window and its whole characters, for a prompt that may end within a character."""
        window, num_sent = prompt[-_MAX_CONTEXT:], 0
        for end in range(len(prompt), max(len(prompt) - _MAX_CHARACTER_TOKENS, 0), -1):
            if context := self._find_context(prompt[:end]):
                window, num_sent = context + prompt[end:], len(self._decode(context))
                break
        return window, max(num_sent, len(self._decode(window).rstrip(REPLACEMENT_CHARACTER)))


class ByteDecoder:
    """A `WindowDecoder` for tokenizers whose tokens are bytes: a token costs its own bytes."""

    def __init__(
        self,
        token_bytes: Callable[[int], bytes],
        prompt_token_ids: Sequence[int],
        skipped_ids: frozenset[int],
    ):
        self._token_bytes, self._skipped_ids = token_bytes, skipped_ids
        self._utf8 = _Utf8Decoder("replace")
        self.push(prompt_token_ids[-PROMPT_TAIL_TOKENS:])

    def push(self, token_ids: Sequence[int]) -> str:
        """Take new tokens and return the text that is certain now."""
        token_bytes, skipped_ids = self._token_bytes, self._skipped_ids
        return self._utf8.decode(
            b"".join([token_bytes(i) for i in token_ids if i not in skipped_ids])
        )

    def flush(self) -> str:
        """Return the text held back: no token will complete it."""
        return self._utf8.decode(b"", final=True)


def make_decoder(
    tokenizer: Tokenizer, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool
) -> WindowDecoder | ByteDecoder:
    """The cheapest one that gives the tokenizer's text after the prompt's."""
    skipped_ids = tokenizer.special_token_ids if skip_special_tokens else frozenset[int]()
    if tokenizer.token_bytes is None:
        return WindowDecoder(tokenizer.decode, prompt_token_ids, skipped_ids)
    return ByteDecoder(tokenizer.token_bytes, prompt_token_ids, skipped_ids)


class StopChecker:
    """Looks for stop strings in growing text and keeps back what may be the start of one.

    The stop string whose end comes first wins (of several, the longest), so that the outcome does
    not depend on how the text was split.

    Attributes:
        matched: The stop string that was found, or None.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False):
        self.matched: str | None = None
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._max_stop_length = max(map(len, stops), default=1)
        self._possible_start = (
            ""  # the last characters seen, if they may be the start of a stop string
        )

    def push(self, text: str, *, check: bool = True) -> str:
        """Take new text and return what is released.

        With `check` False a stop string that ends in this text does not count.
        After a match everything further is dropped.
        """
        if self.matched is not None:
            return ""
        seen, buffer = len(self._possible_start), self._possible_start + text
        released = seen if self._include_stop else 0
        match = self._first_match(buffer, seen) if check else None
        if match is not None:
            end, self.matched = match
            return buffer[released : end if self._include_stop else end - len(self.matched)]
        self._possible_start = self._longest_start(buffer)
        return buffer[
            released : len(buffer) - (0 if self._include_stop else len(self._possible_start))
        ]

    def flush(self) -> str:
        """Return the text held back: no stop string will come of it."""
        held, self._possible_start = self._possible_start, ""
        return "" if self._include_stop or self.matched is not None else held

    def _first_match(self, buffer: str, seen: int) -> tuple[int, str] | None:
        """Where the stop string that ends first, after the first `seen` characters, ends."""
        found = []
        for stop in self._stops:
            begin = buffer.find(stop, max(0, seen - len(stop) + 1))
            if begin >= 0:
                found.append((begin + len(stop), begin, stop))
        return (min(found)[0], min(found)[2]) if found else None

    def _longest_start(self, buffer: str) -> str:
        """The longest end of the text that may be the start of a stop string."""
        for begin in range(max(0, len(buffer) - self._max_stop_length + 1), len(buffer)):
            tail = buffer[begin:]
            if any(len(stop) > len(tail) and stop.startswith(tail) for stop in self._stops):
                return tail
        return ""


class Detokenizer:
    """The text of one sequence as its tokens come.

    Nothing is decoded until someone asks for text, and then all new tokens at once (with stop
    strings each as it comes): a request that only wants the final text costs nothing while it waits
    and runs.

    Args:
        tokenizer: None makes all text empty.
        prompt_token_ids: The tokens before the first output token.
        stop: Stop strings.
        min_tokens: Number of output tokens that complete no stop string.
        include_stop: Whether the text includes the stop string or stop token that ends it.
        skip_special_tokens: Whether special tokens have no text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        prompt_token_ids: Sequence[int],
        *,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        include_stop: bool = False,
        skip_special_tokens: bool = True,
    ):
        self._tokenizer = tokenizer
        self._prompt_tail = prompt_token_ids[-PROMPT_TAIL_TOKENS:]
        self._min_tokens, self._include_stop = min_tokens, include_stop
        self._skips_special_tokens = skip_special_tokens
        self._stop_checker = StopChecker(stop, include_stop=include_stop) if stop else None
        self._num_tokens = 0
        self._pending: list[int] = []  # tokens that are not decoded yet
        self._decoder: WindowDecoder | ByteDecoder | None = None
        self._chunks: list[str] = []  # the text so far
        self._num_returned_chunks = 0  # pieces that take_delta returned

    def append(self, token_ids: Sequence[int], *, ended_by_token: bool = False) -> str | None:
        """Take new output tokens; return the stop string that their text completes, if any.

        The text then ends before the stop string (or after it, with
        `include_stop`), and further tokens change nothing. A stop string does not
        count if one of the first `min_tokens` tokens completes it.

        Args:
            token_ids: The tokens sampled since the last call.
            ended_by_token: The last of them is a stop token: it gets no text, unless
                `include_stop`.
        """
        if self._tokenizer is None:
            return None
        ids = token_ids[:-1] if ended_by_token and not self._include_stop else token_ids
        if self._stop_checker is None:
            self._pending += ids
            return None
        for token_id in ids:
            self._num_tokens += 1
            chunk = self._decode(self._tokenizer, [token_id])
            can_stop = self._num_tokens > self._min_tokens
            self._append_text(self._stop_checker.push(chunk, check=can_stop))
        return self._stop_checker.matched

    def take_delta(self) -> str:
        """Return the text that is new and final since the last call."""
        self._decode_pending()
        new = self._chunks[self._num_returned_chunks :]
        self._num_returned_chunks = len(self._chunks)
        return "".join(new)

    def finish(self) -> None:
        """No token will follow: text that was held back is released. May be called again."""
        self._decode_pending()
        rest = "" if self._decoder is None else self._decoder.flush()
        if self._stop_checker is not None:
            rest = self._stop_checker.push(rest, check=False) + self._stop_checker.flush()
        self._append_text(rest)

    @property
    def text(self) -> str:
        """All text so far, without what is held back; the whole text after `finish`."""
        if self._pending:
            self._decode_pending()
        whole = "".join(self._chunks)
        if len(self._chunks) > 1 and self._num_returned_chunks == len(self._chunks):
            self._chunks, self._num_returned_chunks = [whole], 1
        return whole

    def _decode_pending(self) -> None:
        if self._pending and self._tokenizer is not None:
            self._append_text(self._decode(self._tokenizer, self._pending))
            self._pending.clear()

    def _decode(self, tokenizer: Tokenizer, token_ids: list[int]) -> str:
        if self._decoder is None:  # not before: to begin a text is to decode the prompt's end
            tail, skips = self._prompt_tail, self._skips_special_tokens
            self._decoder = make_decoder(tokenizer, tail, skip_special_tokens=skips)
        return self._decoder.push(token_ids)

    def _append_text(self, chunk: str) -> None:
        if chunk:
            self._chunks.append(chunk)
