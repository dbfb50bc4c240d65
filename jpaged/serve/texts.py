"""Text to tokens and back, in processes beside the server's."""

from collections.abc import Sequence
from typing import Any

from jpaged import Tokenizer
from jpaged.serve.errors import ApiError, bad_field, failed, say, too_long
from jpaged.serve.protocol import Message
from jpaged.serve.text_pool import TextPool
from jpaged.serve.text_process import Done, Order, TextProcess

_MOST_COUNTED = 65536
"""Tokens that a text may always have that is only to be tokenised."""


class Texts:
    """Tokenises for the server.

    Args:
        tokenizer: The model's, for the text of single tokens.
        process: Does all else.
        vocab_size: Of the model: every token id is below it.
        max_model_len: Most tokens of a sequence.
        text_timeout: Seconds for one text or conversation.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        process: TextProcess,
        *,
        vocab_size: int,
        max_model_len: int,
        text_timeout: float = 10.0,
    ):
        self.max_model_len = max_model_len
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._longest = max(map(len, tokenizer.hf_tokenizer.get_vocab()))  # of all tokens' texts
        self._pool = TextPool(process, text_timeout)

    async def check_template(self) -> None:
        """Raise ValueError if the server's template is none; some messages it may well refuse."""
        done = await self._pool.do(Order(messages=[{"role": "user", "content": "a"}]))
        if done.mistake is not None:
            raise ValueError(f"--chat-template is no Jinja template ({done.mistake})")

    async def encode(
        self,
        prompt: str | list[int],
        path: str,
        *,
        add_special_tokens: bool = True,
        last: int | None = None,
    ) -> list[int]:
        """A prompt's token ids, which are checked if they are given.

        Args:
            prompt: Text or ids.
            path: What errors call it.
            add_special_tokens: Such as the one that begins a text.
            last: Only so many at the end are wanted, of a text that may be too long.

        Raises:
            ApiError: the model does not have one of them, or the text is too long for it.
        """
        if isinstance(prompt, list):
            return self._known(prompt, path)
        self._check_length(len(prompt), path, last)
        order = Order(prompt, add_special_tokens, last=last, most=self.max_model_len)
        return (await self._done(order, path)).token_ids

    async def render(
        self,
        messages: Sequence[Message],
        options: dict[str, Any],
        path: str = "messages",
        *,
        last: int | None = None,
    ) -> list[int]:
        """The token ids of a conversation; `last` as of `encode`.

        Raises:
            ApiError: there is no template, it refuses the messages, or they are too long.
        """
        written = [message.as_dict() for message in messages]
        self._check_length(_num_characters(written), path, last)
        order = Order(messages=written, options=options, last=last, most=self.max_model_len)
        return (await self._done(order, path)).token_ids

    async def tokenized(
        self,
        prompt: str | Sequence[Message],
        options: dict[str, Any],
        *,
        add_special_tokens: bool = True,
        strings: bool = False,
    ) -> tuple[list[int], list[str] | None]:
        """The token ids of a text or a conversation, which may be longer than the model's context,
        and if asked each token's text.

        Raises:
            ApiError: as of `encode` and `render`.
        """
        most = max(4 * self.max_model_len, _MOST_COUNTED)
        if isinstance(prompt, str):
            path, num_characters = "prompt", len(prompt)
            order = Order(prompt, add_special_tokens, most=most, strings=strings)
        else:
            path, written = "messages", [message.as_dict() for message in prompt]
            num_characters = _num_characters(written)
            order = Order(messages=written, options=options, most=most, strings=strings)
        self._check_length(num_characters, path, None)
        done = await self._done(order, path)
        return done.token_ids, done.strings

    async def decode(self, token_ids: list[int]) -> str:
        """The text of tokens.

        Raises:
            ApiError: the model does not have one of them.
        """
        known = self._known(token_ids, "tokens")
        return (await self._done(Order(token_ids=known), "tokens")).text

    def token_text(self, token_id: int) -> str:
        """The text of one token alone."""
        return self._tokenizer.decode([token_id])

    def num_kept(self, max_tokens: int | None, keep: int | None) -> int | None:
        """How many tokens of a prompt's end are wanted; None for all.

        Args:
            max_tokens: Of the answer, as of `fitted`.
            keep: Of the prompt, as of `fitted`.
        """
        if keep is None:
            return None
        room = self._room(max_tokens)
        return max(min(room if keep == -1 else keep, self.max_model_len), 1)

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
        room = self._room(max_tokens)
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
        """Drop what is under way."""
        self._pool.close()

    def _room(self, max_tokens: int | None) -> int:
        """Tokens that a prompt may have with an answer of so many, at least one."""
        return self.max_model_len - max(max_tokens or 0, 1)

    async def _done(self, order: Order, path: str) -> Done:
        try:
            done = await self._pool.do(order)
        except OverflowError:
            done = Done(refused=f"{path} has a number that is too large for a chat template")
        except (OSError, RuntimeError, ValueError) as error:
            done = Done(failed=repr(error))
        if done.failed is not None:
            say(f"tokenising failed: {done.failed}")
            raise failed()
        if done.refused is not None:
            raise bad_field(path, done.refused)
        if done.is_longer:
            raise self._too_long(path, f"more than {order.most} tokens")
        return done

    def _check_length(self, num_characters: int, path: str, last: int | None) -> None:
        if last is None and num_characters > self.max_model_len * self._longest:
            raise self._too_long(path, f"{num_characters} characters")

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


def _num_characters(messages: list[dict[str, str]]) -> int:
    return sum(len(message["content"]) for message in messages)
