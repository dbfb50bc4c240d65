"""Text to token ids and back: a thin layer over the tokenizers of `transformers`.

What the layer adds: no code from a checkpoint is ever run, mistakes in text and messages get an
error that names them, and decoding skips the wrappers that cost more than the decoding.
"""

import contextlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import jinja2

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_AS_SERIALISED = ("TokenizersBackend", "PreTrainedTokenizerFast")
"""Tokenizer classes that mean: `tokenizer.json` just as it is."""


@runtime_checkable
class Decoder(Protocol):
    """The part of a tokenizer that makes text; all that the detokenizer knows of one."""

    @property
    def special_token_ids(self) -> frozenset[int]:
        """The tokens that `skip_special_tokens` leaves out."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of the tokens."""
        ...


class Tokenizer:
    """A model's tokenizer.

    Attributes:
        hf_tokenizer: The tokenizer of `transformers` underneath.
        special_token_ids: The tokens that are not text (end of text, roles of a chat ...).
        vocab_size: How many tokens it knows; the model's logits may be wider.
        eos_token_id, bos_token_id: None if the tokenizer has none.
        bytes_of: The bytes of a token, where the text of tokens is that of their bytes in a row
            (byte-level tokenizers); None where a token's text depends on those before it.
    """

    def __init__(self, hf_tokenizer: "PreTrainedTokenizerBase"):
        self.hf_tokenizer: Any = hf_tokenizer
        self.special_token_ids = _special_token_ids(hf_tokenizer)
        self.vocab_size: int = len(self.hf_tokenizer)
        self.eos_token_id: int | None = self.hf_tokenizer.eos_token_id
        self.bos_token_id: int | None = self.hf_tokenizer.bos_token_id
        self._decode = _decode_function(self.hf_tokenizer)
        self.bytes_of = _bytes_function(self.hf_tokenizer)

    @classmethod
    def from_folder(cls, folder: str | Path) -> "Tokenizer":
        """Load the tokenizer of the checkpoint in a local folder; never runs code from it.

        Raises:
            ValueError: the folder has no tokenizer that `transformers` can load without running
                code from the checkpoint.
        """
        folder = Path(folder)
        try:
            loader = _tokenizer_class(folder)
            return cls(
                loader.from_pretrained(
                    str(folder), local_files_only=True, trust_remote_code=False, verbose=False
                )
            )
        except Exception as error:  # transformers raises every kind, from OSError to KeyError
            cause = " ".join(str(error).split()).rstrip(".") or type(error).__name__
            raise ValueError(
                f"no tokenizer could be loaded from {folder}: put the checkpoint's tokenizer.json "
                "and tokenizer_config.json there, or use skip_tokenizer_init=True and pass token "
                f"ids ({cause})"
            ) from error

    def __len__(self) -> int:
        return self.vocab_size

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text, with the special tokens that the tokenizer adds to a prompt.

        Raises:
            ValueError: the text has a lone surrogate, which no encoding can represent.
        """
        _check_encodable(text, "prompt")
        return self.hf_tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of the tokens, spaces as the tokens have them; unknown ids are no text."""
        return self._decode(list(token_ids), skip_special_tokens)

    @property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat_template` works without an explicit `chat_template`."""
        return self.hf_tokenizer.chat_template is not None

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        **template_variables: Any,
    ) -> list[int]:
        """The token ids of a conversation.

        Args:
            messages: Dicts with a `role` and a `content`, both strings; other keys are handed to
                the template. Only a message with `tool_calls` may leave the content out.
            add_generation_prompt: End with the tokens that open the assistant's answer.
            chat_template: A Jinja template to use instead of the model's.
            template_variables: More variables of the template, such as `enable_thinking`.

        Raises:
            TypeError, ValueError: a malformed message, no chat template, or a template that
                fails or refuses the messages.
        """
        if chat_template is None and not self.has_chat_template:
            raise ValueError(
                "this model has no chat template: pass chat_template=, or a plain text prompt"
            )
        check_messages(messages)
        try:
            return self.hf_tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                chat_template=chat_template,
                tokenize=True,
                return_dict=False,
                **template_variables,
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise ValueError(f"the chat template refused the messages: {error}") from error


def check_messages(messages: object) -> None:
    """Check the form of a conversation.

    Raises:
        TypeError, ValueError: naming the message and what is wrong with it.
    """
    if not isinstance(messages, (list, tuple)):
        raise TypeError(
            f"messages must be a list of {{'role': ..., 'content': ...}}; "
            f"got {type(messages).__name__}"
        )
    if not messages:
        raise ValueError("messages is empty: give at least one message")
    for i, message in enumerate(messages):
        _check_message(message, f"messages[{i}]")


def _check_message(message: object, name: str) -> None:
    if not isinstance(message, Mapping):
        raise TypeError(f"{name} must be a dict, got {type(message).__name__}")
    optional = ("content",) if message.get("tool_calls") else ()
    for key in ("role", "content"):
        value = message.get(key)
        if value is None and key in optional:
            continue
        if key not in message:
            raise ValueError(f"{name} has no {key!r}")
        if not isinstance(value, str):
            raise TypeError(f"{name}[{key!r}] must be a string, got {type(value).__name__}")
        _check_encodable(value, f"{name}[{key!r}]")
    if not message["role"]:
        raise ValueError(f"{name}['role'] is empty")


def _check_encodable(text: str, name: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} has a lone surrogate (U+{ord(text[error.start]):04X}) at character "
            f"{error.start}, which is no text: remove it, or decode the bytes it came from anew"
        ) from None


def _tokenizer_class(folder: Path) -> Any:
    """AutoTokenizer, or the class it would pick where that is plain: importing it takes half."""
    with _no_torch_advice():
        if _declared_class(folder) in _AS_SERIALISED and (folder / "tokenizer.json").is_file():
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast
        from transformers import AutoTokenizer

        return AutoTokenizer


def _declared_class(folder: Path) -> str | None:
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return None
    config = json.loads(path.read_text(encoding="utf-8"))
    return None if "auto_map" in config else config.get("tokenizer_class")


@contextlib.contextmanager
def _no_torch_advice() -> Iterator[None]:
    """Importing transformers without PyTorch warns that models will not work; none is wanted."""
    logger = logging.getLogger("transformers")

    def keep(record: logging.LogRecord) -> bool:
        return "PyTorch was not found" not in record.getMessage()

    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)


def _special_token_ids(hf_tokenizer: Any) -> frozenset[int]:
    added = hf_tokenizer.added_tokens_decoder
    special = {token_id for token_id, token in added.items() if token.special}
    return frozenset(special) | frozenset(hf_tokenizer.all_special_ids)


def _decode_function(hf_tokenizer: Any) -> Callable[[list[int], bool], str]:
    """The Rust decoder where there is one: the method around it takes five times as long."""
    backend = getattr(hf_tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return lambda ids, skip: backend.decode(ids, skip_special_tokens=skip)
    return lambda ids, skip: hf_tokenizer.decode(
        ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
    )


def _bytes_function(hf_tokenizer: Any) -> Callable[[int], bytes] | None:
    """Each token's bytes as the `ByteLevel` decoder has them; None with any other decoder.

    A token of its alphabet stands for a byte a character; one with any other character, such as an
    added token with a space, for its own text. Ids that the tokenizer does not know are no text.
    """
    backend = getattr(hf_tokenizer, "backend_tokenizer", None)
    if backend is None or type(backend.decoder).__name__ != "ByteLevel":
        return None
    byte_of = _byte_alphabet()

    @cache
    def bytes_of(token_id: int) -> bytes:
        token = backend.id_to_token(token_id) or ""
        own = [byte_of.get(character) for character in token]
        return token.encode() if None in own else b"".join(own)  # type: ignore[arg-type]

    return bytes_of


def _byte_alphabet() -> dict[str, bytes]:
    """GPT-2's: a printable byte is its own character, the others follow from U+0100 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): bytes([byte]) for byte in printable}
    return alphabet | {chr(256 + n): bytes([byte]) for n, byte in enumerate(others)}
