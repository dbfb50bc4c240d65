"""Incremental conversion of token ids to text, and detection of stop strings.

Tokens cannot be decoded separately. A character may consist of several tokens, and some tokenizers
write the leading space of a word only after another token. `WindowDecoder` therefore decodes new
tokens together with a few earlier tokens and cuts off the text of the earlier tokens, as Hugging
Face's text-generation-inference does. In byte-level tokenizers each token stands for fixed bytes,
and `ByteDecoder` decodes these bytes.
"""

import codecs
from collections.abc import Callable, Sequence

from jpaged.text.tokenizer import Tokenizer

REPLACEMENT_CHARACTER = "\ufffd"
"""The character that decoders write for invalid bytes and for an incomplete character."""

PROMPT_TAIL_TOKENS = 64
"""Number of tokens at the end of a prompt that a decoder uses as context for the output.

The number exceeds the context of a `WindowDecoder`, because special tokens are removed afterwards.
"""

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")
_MIN_CONTEXT_TOKENS = 4
_MAX_CONTEXT_TOKENS = 16
_MAX_WINDOW_TOKENS = 24
_MAX_INCOMPLETE_CALLS = 32
# A UTF-8 character has at most 4 bytes, and each token has at least 1 byte.
_MAX_CHARACTER_TOKENS = 4


class WindowDecoder:
    """Incremental decoder for tokenizers where the text of a token depends on earlier tokens.

    All returned chunks together are the text that the output adds to the prompt's text, as if
    prompt and output were decoded in one call.

    Args:
        decode: Function that returns the text of a list of token ids.
        prompt_token_ids: The tokens before the output, which may end inside a character.
        skipped_ids: Ids of tokens that have no text.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        prompt_token_ids: Sequence[int],
        skipped_ids: frozenset[int],
    ):
        self._decode, self._skipped_ids = decode, skipped_ids
        tail = prompt_token_ids[-PROMPT_TAIL_TOKENS:]
        # `_window` holds the last tokens, as context for decoding the next tokens. `_num_returned`
        # is the number of characters in the window's text that belong to the prompt or were
        # returned already.
        self._window, self._num_returned = self._prompt_window(
            [i for i in tail if i not in skipped_ids]
        )
        self._num_incomplete_calls = 0

    def push(self, token_ids: Sequence[int]) -> str:
        """Add new tokens and return the text that later tokens cannot change.

        An incomplete character at the end is held back until it is complete. After
        `_MAX_INCOMPLETE_CALLS` calls the bytes count as invalid, and are returned as replacement
        characters.
        """
        new = [token_id for token_id in token_ids if token_id not in self._skipped_ids]
        if not new:
            return ""
        # Shorten the window only if all of its text was returned.
        if not self._num_incomplete_calls and len(self._window) > _MAX_WINDOW_TOKENS:
            self._window = self._find_context(self._window) or self._window[-_MAX_CONTEXT_TOKENS:]
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
        """End the text. Return an incomplete character at the end as a replacement character."""
        return self._take_new_text(self._decode(self._window)) if self._num_incomplete_calls else ""

    def _take_new_text(self, text: str) -> str:
        start, self._num_returned = self._num_returned, max(self._num_returned, len(text))
        return text[start:]

    def _find_context(self, token_ids: list[int]) -> list[int] | None:
        """Return the last tokens of `token_ids`, as context for decoding the next tokens.

        Return `_MIN_CONTEXT_TOKENS` to `_MAX_CONTEXT_TOKENS` tokens, as few as possible. The text
        of the tokens must have only complete characters, and at least one character that is not
        whitespace. Return None if that is impossible.
        """
        max_size = min(_MAX_CONTEXT_TOKENS, len(token_ids))
        for size in range(min(_MIN_CONTEXT_TOKENS, max_size), max_size + 1):
            text = self._decode(token_ids[-size:])
            if REPLACEMENT_CHARACTER not in text and text.strip():
                return token_ids[-size:]
        return None

    def _prompt_window(self, prompt: list[int]) -> tuple[list[int], int]:
        """Return the prompt tokens that are context for decoding the first output tokens.

        Also return the number of complete characters in the text of these prompt tokens.

        Args:
            prompt: The last tokens of the prompt, which may end inside a character.
        """
        window, num_sent = prompt[-_MAX_CONTEXT_TOKENS:], 0
        for end in range(len(prompt), max(len(prompt) - _MAX_CHARACTER_TOKENS, 0), -1):
            if context := self._find_context(prompt[:end]):
                window, num_sent = context + prompt[end:], len(self._decode(context))
                break
        return window, max(num_sent, len(self._decode(window).rstrip(REPLACEMENT_CHARACTER)))


class ByteDecoder:
    """Incremental decoder for byte-level tokenizers, with the interface of `WindowDecoder`.

    Args:
        token_bytes: Function that returns the bytes of a token id.
        prompt_token_ids: The tokens before the output, which may end inside a character.
        skipped_ids: Ids of tokens that have no text.
    """

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
        """Add new tokens and return their text, without an incomplete character at the end."""
        token_bytes, skipped_ids = self._token_bytes, self._skipped_ids
        return self._utf8.decode(
            b"".join([token_bytes(i) for i in token_ids if i not in skipped_ids])
        )

    def flush(self) -> str:
        """End the text. Return an incomplete character at the end as a replacement character."""
        return self._utf8.decode(b"", final=True)


def make_decoder(
    tokenizer: Tokenizer, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool
) -> WindowDecoder | ByteDecoder:
    """Return an incremental decoder for the output after a prompt.

    Args:
        tokenizer: The tokenizer. Byte-level tokenizers get the cheaper `ByteDecoder`.
        prompt_token_ids: The tokens before the output.
        skip_special_tokens: Whether special tokens have no text.
    """
    skipped_ids = tokenizer.special_token_ids if skip_special_tokens else frozenset[int]()
    if tokenizer.token_bytes is None:
        return WindowDecoder(tokenizer.decode, prompt_token_ids, skipped_ids)
    return ByteDecoder(tokenizer.token_bytes, prompt_token_ids, skipped_ids)


class StopChecker:
    """Detector of stop strings in a text that arrives in chunks.

    The checker holds back text that may be the start of a stop string. If several stop strings
    match, the one that ends first wins, and the longest wins a tie. The result therefore does not
    depend on how the text is split into chunks.

    Args:
        stops: The stop strings.
        include_stop: Whether the returned text includes the stop string.

    Attributes:
        matched: The stop string that was found, or None.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False):
        self.matched: str | None = None
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._max_stop_length = max(map(len, stops), default=1)
        # Held-back end of the text, which may be the start of a stop string.
        self._possible_start = ""

    def push(self, text: str, *, check: bool = True) -> str:
        """Add a chunk of text and return the text that cannot be part of a stop string.

        Args:
            text: The next chunk. After a match, the chunk is dropped.
            check: If False, ignore stop strings that end in this chunk.
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
        """End the text and return the characters that were held back as a possible stop string."""
        held, self._possible_start = self._possible_start, ""
        return "" if self._include_stop or self.matched is not None else held

    def _first_match(self, buffer: str, seen: int) -> tuple[int, str] | None:
        """Return (end index, stop string) for the stop string that ends first in `buffer`, or None.

        Stop strings that end within the first `seen` characters are ignored.
        """
        found = []
        for stop in self._stops:
            begin = buffer.find(stop, max(0, seen - len(stop) + 1))
            if begin >= 0:
                found.append((begin + len(stop), begin, stop))
        return (min(found)[0], min(found)[2]) if found else None

    def _longest_start(self, buffer: str) -> str:
        """Return the longest suffix of `buffer` that may be the start of a stop string."""
        for begin in range(max(0, len(buffer) - self._max_stop_length + 1), len(buffer)):
            tail = buffer[begin:]
            if any(len(stop) > len(tail) and stop.startswith(tail) for stop in self._stops):
                return tail
        return ""


class Detokenizer:
    """The output text of one sequence, decoded while the tokens arrive.

    Without stop strings, tokens are decoded only when the caller reads the text, all new tokens in
    one call. A request that needs only the final text therefore costs nothing while it runs. With
    stop strings, each token is decoded when it arrives.

    Args:
        tokenizer: The tokenizer. None: all text is empty.
        prompt_token_ids: The tokens before the first output token.
        stop: Strings that end the text.
        min_tokens: Number of output tokens at the start that cannot complete a stop string.
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
        self._pending: list[int] = []  # tokens to decode
        self._decoder: WindowDecoder | ByteDecoder | None = None
        self._chunks: list[str] = []
        self._num_returned_chunks = 0

    def append(self, token_ids: Sequence[int], *, ended_by_token: bool = False) -> str | None:
        """Add new output tokens, and return the stop string that they complete, or None.

        After a match, the text ends before the stop string, or after it if `include_stop` is set,
        and later tokens are ignored. The first `min_tokens` tokens cannot complete a stop string.

        Args:
            token_ids: The tokens sampled since the last call.
            ended_by_token: Whether the last token is a stop token, which has text only with
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
        """Return the text that was added since the last call and cannot change any more."""
        self._decode_pending()
        new = self._chunks[self._num_returned_chunks :]
        self._num_returned_chunks = len(self._chunks)
        return "".join(new)

    def finish(self) -> None:
        """End the text and release the characters that were held back. Further calls do nothing."""
        self._decode_pending()
        rest = "" if self._decoder is None else self._decoder.flush()
        if self._stop_checker is not None:
            rest = self._stop_checker.push(rest, check=False) + self._stop_checker.flush()
        self._append_text(rest)

    @property
    def text(self) -> str:
        """The text so far, without characters that are held back until `finish`."""
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
        # Create the decoder only when needed: its constructor decodes the end of the prompt.
        if self._decoder is None:
            tail, skips = self._prompt_tail, self._skips_special_tokens
            self._decoder = make_decoder(tokenizer, tail, skip_special_tokens=skips)
        return self._decoder.push(token_ids)

    def _append_text(self, chunk: str) -> None:
        if chunk:
            self._chunks.append(chunk)
