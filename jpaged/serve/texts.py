"""Text to tokens and back, beside the event loop."""

import asyncio
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

import jinja2

from jpaged import Tokenizer
from jpaged.serve.errors import ApiError, bad_field, failed, too_long
from jpaged.serve.protocol.chat import Message

T = TypeVar("T")

_THREADS = 2


class Texts:
    """Tokenises for the server.

    Args:
        tokenizer: The model's.
        vocab_size: Of the model: every token id is below it.
        max_model_len: Most tokens of a sequence.
        chat_template: To use instead of the model's.
        template_timeout: Seconds for a template to render.

    Raises:
        ValueError: `chat_template` is no template.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        vocab_size: int,
        max_model_len: int,
        chat_template: str | None = None,
        template_timeout: float = 5.0,
    ):
        self.max_model_len = max_model_len
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._chat_template = chat_template
        self._template_timeout = template_timeout
        self._longest = max(map(len, tokenizer.hf_tokenizer.get_vocab()))  # of all tokens' texts
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="text")
        if chat_template is not None:
            self._check_template(chat_template)

    async def encode(
        self,
        prompt: str | list[int],
        path: str,
        *,
        add_special_tokens: bool = True,
        is_cut: bool = False,
    ) -> list[int]:
        """A prompt's token ids, which are checked if they are given.

        Args:
            prompt: Text or ids.
            path: What errors call it.
            add_special_tokens: Such as the one that begins a text.
            is_cut: It will be cut to what fits.

        Raises:
            ApiError: the model does not have one of them, or the text is too long for it.
        """
        if isinstance(prompt, list):
            return self._known(prompt, path)
        if len(prompt) > self.max_model_len * self._longest and not is_cut:
            raise self._too_long(path, f"{len(prompt)} characters")
        encode = self._tokenizer.encode
        return await self._beside(lambda: encode(prompt, add_special_tokens=add_special_tokens))

    async def render(
        self, messages: Sequence[Message], options: dict[str, Any], path: str = "messages"
    ) -> list[int]:
        """The token ids of a conversation.

        Raises:
            ApiError: there is no template, it refuses the messages, or they are too long.
        """
        num_characters = sum(len(message.as_dict()["content"]) for message in messages)
        if num_characters > self.max_model_len * self._longest:
            raise self._too_long(path, f"{num_characters} characters")
        return await self._beside(lambda: self._render(messages, options, path))

    async def decode(self, token_ids: list[int]) -> str:
        """The text of tokens.

        Raises:
            ApiError: the model does not have one of them.
        """
        known = self._known(token_ids, "tokens")
        return await self._beside(lambda: self._tokenizer.decode(known))

    def token_text(self, token_id: int) -> str:
        """The text of one token alone."""
        return self._tokenizer.decode([token_id])

    def fitted(
        self, token_ids: list[int], path: str, max_tokens: int | None, keep: int | None
    ) -> list[int]:
        """A prompt that fits the model together with an answer.

        Args:
            token_ids: The prompt.
            path: What errors call it.
            max_tokens: Of the answer; None for as many as there is room for, at least one.
            keep: Cut the prompt to its last so many tokens; -1: to what there is room for.

        Raises:
            ApiError: it does not fit.
        """
        room = self.max_model_len - max(max_tokens or 0, 1)
        if keep is not None:
            token_ids = token_ids[-(room if keep == -1 else keep) :] if room > 0 else token_ids
        if not token_ids:
            raise bad_field(path, f"{path} has no tokens: give at least one")
        if len(token_ids) >= self.max_model_len:
            raise self._too_long(path, f"{len(token_ids)} tokens")
        if len(token_ids) > room:
            raise too_long(
                "max_tokens",
                f"max_tokens={max_tokens} and the {len(token_ids)} tokens of {path} are more than "
                f"this model's maximum context length of {self.max_model_len} tokens: lower "
                f"max_tokens to {self.max_model_len - len(token_ids)}, or shorten the prompt",
            )
        return token_ids

    def close(self) -> None:
        """Wait for nothing."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _check_template(self, template: str) -> None:
        """It may fail with this message or that, but a template it must be."""
        message = {"role": "user", "content": "a"}
        try:
            with time_limit(self._template_timeout):
                self._tokenizer.apply_chat_template([message], chat_template=template)
        except Exception as error:
            if isinstance(cause := error.__cause__, jinja2.TemplateSyntaxError):
                what = f"line {cause.lineno}: {cause.message}"
                raise ValueError(f"--chat-template is no Jinja template ({what})") from None

    def _render(self, messages: Sequence[Message], options: dict[str, Any], path: str) -> list[int]:
        written = [message.as_dict() for message in messages]
        try:
            with time_limit(self._template_timeout):
                return self._tokenizer.apply_chat_template(
                    written, chat_template=self._chat_template, **options
                )
        except TimeoutError:
            raise bad_field(path, "the chat template took too long with these messages") from None
        except (TypeError, ValueError) as error:
            raise bad_field(path, str(error)) from None

    async def _beside(self, work: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        except ApiError:
            raise
        except ValueError as error:
            raise bad_field(None, str(error)) from None
        except Exception as error:
            print(f"jpaged: tokenising failed: {error!r}", file=sys.stderr, flush=True)
            raise failed() from None

    def _known(self, token_ids: list[int], path: str) -> list[int]:
        if token_ids and max(token_ids) >= self._vocab_size:
            worst = max(token_ids)
            known = f"known are 0 to {self._vocab_size - 1}"
            raise bad_field(path, f"{path} has the token id {worst}, which is unknown; {known}")
        return token_ids

    def _too_long(self, path: str, length: str) -> ApiError:
        return too_long(
            path,
            f"{path} has {length}, too many for this model's maximum context length of "
            f"{self.max_model_len} tokens, the answer's included: shorten it",
        )


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the block's Python code, in this thread, once the time is over.

    Looked at before each line, as a debugger does: templates are Python code, of which no thread
    can be rid otherwise. What a single line takes (the sandbox bounds ranges) is not cut short.
    """
    end, before = time.monotonic() + seconds, sys.gettrace()

    def look(frame: FrameType, event: str, arg: object) -> Any:
        if time.monotonic() > end:
            raise TimeoutError(f"not done after {seconds} seconds")
        return look

    sys.settrace(look)
    try:
        yield
    finally:
        sys.settrace(before)
