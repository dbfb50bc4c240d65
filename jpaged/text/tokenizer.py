"""Conversion between text and token ids: a thin layer over the tokenizers of `transformers`.

The layer never runs code from a checkpoint. It raises errors that name the invalid text or message,
and it calls the Rust decoder directly, because the Python wrappers are slower than the decoding.
"""

import contextlib
import functools
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2

from jpaged.text.chat_templates import RenderedChat, SpecialToken, SpecialTokenEscaper

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EncodeText = Callable[[str], list[int]]

_SERIALIZED_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")
"""Tokenizer classes that `tokenizer.json` describes completely."""

_BYTES_PER_TOKEN = 8
"""Number of bytes per token, above the average of any language."""

_SIZE_SLACK = 4096
"""Number of characters or bytes that are added to an estimate, because encoding them is cheap."""


class Tokenizer:
    """A model's tokenizer.

    Attributes:
        hf_tokenizer: The wrapped tokenizer of `transformers`.
        special_token_ids: Ids of the special tokens, such as the end of the text or chat roles.
        vocab_size: Number of tokens in the vocabulary. The model's logits may be wider.
        eos_token_id: Id of the end-of-sequence token, or None.
        bos_token_id: Id of the beginning-of-sequence token, or None.
        token_bytes: Function that returns the bytes of a token id, for byte-level tokenizers. None
            if the text of a token depends on earlier tokens.
    """

    def __init__(self, hf_tokenizer: "PreTrainedTokenizerBase"):
        self.hf_tokenizer: Any = hf_tokenizer
        self.special_token_ids = _special_token_ids(hf_tokenizer)
        self.vocab_size: int = len(self.hf_tokenizer)
        self.eos_token_id: int | None = self.hf_tokenizer.eos_token_id
        self.bos_token_id: int | None = self.hf_tokenizer.bos_token_id
        self._decode = _decode_function(self.hf_tokenizer)
        self.token_bytes = _bytes_function(self.hf_tokenizer)

    @classmethod
    def from_folder(cls, folder: str | Path) -> "Tokenizer":
        """Load the tokenizer from a checkpoint's local folder, without running code from there.

        Raises:
            ValueError: `transformers` cannot load the tokenizer, or would need to run code from the
                checkpoint.
        """
        folder = Path(folder)
        try:
            loader = _tokenizer_class(folder)
            return cls(
                loader.from_pretrained(
                    str(folder), local_files_only=True, trust_remote_code=False, verbose=False
                )
            )
        except Exception as error:  # transformers raises errors of many types, such as KeyError
            cause = " ".join(str(error).split()).rstrip(".") or type(error).__name__
            raise ValueError(
                f"no tokenizer could be loaded from {folder}: put the checkpoint's tokenizer.json "
                "and tokenizer_config.json there, or use skip_tokenizer_init=True and pass token "
                f"ids ({cause})"
            ) from error

    def __len__(self) -> int:
        return self.vocab_size

    def encode(
        self, text: str, *, add_special_tokens: bool = True, last: int | None = None
    ) -> list[int]:
        """Return the token ids of a text.

        Args:
            text: The text.
            add_special_tokens: Whether to add the tokenizer's special tokens for a prompt, such as
                the beginning-of-sequence token.
            last: Return only the last `last` token ids, and encode only the end of a long text. In
                a text without word boundaries, such as a long run of digits, these ids may differ
                from the last ids of the whole text.

        Raises:
            ValueError: The text has a lone surrogate, which UTF-8 cannot represent.
        """
        _check_encodable(text, "prompt")
        return self._encode_last(lambda part: self._encode(part, add_special_tokens), text, last)

    def is_longer(self, text: str, num_tokens: int) -> bool:
        """Return whether the text certainly has more than `num_tokens` tokens.

        The method encodes only the beginning of a long text. If the result is False, the number of
        tokens is unknown. The result is always False for short texts, which are cheap to encode.
        """
        data = text.encode(errors="replace")
        if len(data) <= _BYTES_PER_TOKEN * num_tokens + _SIZE_SLACK:
            return False
        size = 2 * num_tokens + _SIZE_SLACK
        while size < len(data):
            beginning = data[:size].decode(errors="ignore")
            # The last tokens of `beginning` may differ from the tokens of the whole text, because
            # the text is cut there. So require 64 tokens more than `num_tokens`.
            if len(self._encode(beginning, False)) > num_tokens + 64:
                return True
            size *= 4
        return False

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of the tokens, with all their spaces. Unknown ids have no text."""
        return self._decode(list(token_ids), skip_special_tokens)

    @property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat_template` works without an explicit `chat_template`."""
        return self.hf_tokenizer.chat_template is not None

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], **options: Any
    ) -> list[int]:
        """Return the token ids of a conversation. See `write_chat` for the options and errors."""
        return self.encode_chat(self.write_chat(messages, **options))

    def write_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        allow_special_tokens: bool = False,
        max_characters: int | None = None,
        **template_variables: Any,
    ) -> RenderedChat:
        """Render a conversation with the model's chat template.

        Args:
            messages: Dicts with the strings `role` and `content`. Only a message with `tool_calls`
                may omit `content`. The template receives all other keys too. Most templates expect
                the `arguments` of a call as a dict.
            add_generation_prompt: Whether to end with the tokens that begin the assistant's answer.
            continue_final_message: Whether to leave the last message open, so that the model
                continues this message.
            chat_template: A Jinja template to use instead of the model's.
            allow_special_tokens: Whether text of messages and variables, such as `<|im_end|>`, may
                become special tokens. If False, such text is encoded as plain text, so that a user
                cannot forge the end of a message.
            max_characters: Maximum number of characters that the template may write.
            template_variables: Other variables of the template, such as `enable_thinking`, or
                `tools` in OpenAI's format.

        Raises:
            TypeError, ValueError: A message is malformed; there is no chat template; or the
                template fails, refuses the messages, or writes more than `max_characters`.
        """
        if chat_template is None and not self.has_chat_template:
            raise ValueError(
                "this model has no chat template: pass chat_template=, or a plain text prompt"
            )
        check_messages(messages)

        def render(messages: list[dict[str, Any]], variables: dict[str, Any]) -> str:
            tools = variables.get("tools")
            with _limit_output(self._template(chat_template, tools), max_characters):
                return self.hf_tokenizer.apply_chat_template(
                    messages,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    chat_template=chat_template,
                    tokenize=False,
                    **variables,
                )

        conversation, variables = [dict(message) for message in messages], dict(template_variables)
        try:
            if allow_special_tokens:
                return RenderedChat(render(conversation, variables))
            render_escaped = self._escaper.render_escaped
            chat = render_escaped(render, conversation, variables)
            if chat.chunks is None and self._has_hidden_specials(chat.text):
                chat = render_escaped(
                    render, conversation, variables, becomes_special=self._has_hidden_specials
                )
            return chat
        except (jinja2.TemplateError, TypeError) as error:
            raise ValueError(f"the chat template refused the messages: {error}") from error

    def encode_chat(self, chat: RenderedChat, *, last: int | None = None) -> list[int]:
        """Return the token ids of a rendered conversation.

        Args:
            chat: The conversation, as `write_chat` returned it.
            last: Return only the last `last` token ids; see `encode`.
        """
        if chat.chunks is None:
            return self.encode(chat.text, add_special_tokens=False, last=last)
        found: list[list[int]] = []
        left = last
        for i, chunk in reversed(list(enumerate(chat.chunks))):

            def encode(part: str, i: int = i) -> list[int]:
                return self._encode(part, False) if i % 2 else self._encode_as_text(part, i > 0)

            found.append(self._encode_last(encode, chunk, left))
            left = None if left is None else left - len(found[-1])
            if left == 0:
                break
        return [token_id for ids in reversed(found) for token_id in ids]

    def _encode_last(self, encode: EncodeText, text: str, last: int | None) -> list[int]:
        """Return the token ids that the function `encode` returns for the whole text.

        If `last` is an integer, return only the last `last` ids, and encode only the end of `text`
        if that is enough.
        """
        if last is None:
            return encode(text)
        size = _BYTES_PER_TOKEN * last + _SIZE_SLACK
        while 2 * size < len(text):
            part, num_unsure = text_tail(text, size, at_words=self._splits_at_words)
            ids = encode(part)
            if len(ids) >= last + num_unsure:
                return ids[len(ids) - last :]
            size *= 4
        ids = encode(text)
        return ids[max(len(ids) - last, 0) :]

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return self.hf_tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False)

    def _encode_as_text(self, text: str, is_inside: bool) -> list[int]:
        """Return the token ids of a text, without special tokens.

        Args:
            text: The text, which may contain the text of special tokens.
            is_inside: Whether other text precedes `text`. Some tokenizers add a blank at the start
                of a prompt only.
        """
        if not text:
            return []

        def encode(text: str) -> list[int]:
            return self.hf_tokenizer.encode(
                text, add_special_tokens=False, split_special_tokens=True, verbose=False
            )

        ids = encode(text)
        if is_inside and self._has_start_marker:
            line, prefixed = encode("\n"), encode("\n" + text)
            ids = prefixed[len(line) :] if prefixed[: len(line)] == line else ids
        # Some vocabularies contain the text of a special token as an ordinary token too. The
        # tokenizer then returns the special token despite `split_special_tokens`. Cut `text` until
        # no piece contains the whole text of the special token, and encode the pieces separately.
        if len(text) > 1 and not self._control_ids.isdisjoint(ids):
            middle = len(text) // 2
            first, second = text[:middle], text[middle:]
            return self._encode_as_text(first, is_inside) + self._encode_as_text(second, True)
        return ids

    def _has_hidden_specials(self, text: str) -> bool:
        """Return whether encoding `text` gives more special tokens than `text` contains literally.

        This happens if the tokenizer's normalizer turns other characters into the text of a special
        token.
        """
        if not self._normalizes_specials:
            return False
        num_special = sum(map(self._control_ids.__contains__, self._encode(text, False)))
        return num_special > self._escaper.count_special_tokens(text)

    def _template(self, chat_template: str | None, tools: Any) -> jinja2.Template:
        from transformers.utils.chat_template_utils import _compile_jinja_template

        return _compile_jinja_template(self.hf_tokenizer.get_chat_template(chat_template, tools))

    def prepare(self) -> None:
        """Compute all properties that read the vocabulary, so that forked processes share them."""
        _ = self._escaper, self._control_ids, self._splits_at_words

    @functools.cached_property
    def _escaper(self) -> SpecialTokenEscaper:
        added = self.hf_tokenizer.added_tokens_decoder.items()
        flagged = {i: SpecialToken(it.content, it.lstrip, it.rstrip) for i, it in added}
        token_text = self.hf_tokenizer.convert_ids_to_tokens
        return SpecialTokenEscaper(
            flagged.get(i) or SpecialToken(token_text(i)) for i in self.special_token_ids
        )

    @functools.cached_property
    def _control_ids(self) -> frozenset[int]:
        """Ids of all special tokens except the token for unknown characters."""
        hf = self.hf_tokenizer
        others = {hf.bos_token_id, hf.eos_token_id, hf.pad_token_id}
        return self.special_token_ids - ({hf.unk_token_id} - others)

    @functools.cached_property
    def _normalizes_specials(self) -> bool:
        """Whether the tokenizer searches for special tokens in normalized text."""
        backend = getattr(self.hf_tokenizer, "backend_tokenizer", None)
        if backend is not None and backend.normalizer is None:
            return False
        added = self.hf_tokenizer.added_tokens_decoder
        return any(added[i].normalized for i in self.special_token_ids if i in added)

    @functools.cached_property
    def _has_start_marker(self) -> bool:
        """Whether a text is tokenized differently at the start of a prompt than inside a prompt."""
        token_text = self.hf_tokenizer.convert_ids_to_tokens
        prefixed = [self._encode(f"{token_text(i)}a", False) for i in sorted(self._control_ids)[:1]]
        return any(ids[1:] != self._encode("a", False) for ids in prefixed)

    @functools.cached_property
    def _splits_at_words(self) -> bool:
        return splits_at_words(self.hf_tokenizer.get_vocab())


def check_messages(messages: object) -> None:
    """Check that a conversation is a list of messages, each with a role and content.

    Raises:
        TypeError, ValueError: A message is malformed. The error names the message and the key.
    """
    if not isinstance(messages, (list, tuple)):
        raise TypeError(
            f"messages must be a list of {{'role': ..., 'content': ...}}; "
            f"got {type(messages).__name__}"
        )
    if not messages:
        raise ValueError("messages is empty: pass at least one message")
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
        raise ValueError(f"{name}['role'] is empty: pass a role such as 'user'")


def _check_encodable(text: str, name: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} has a lone surrogate (U+{ord(text[error.start]):04X}) at character "
            f"{error.start}: remove it, or decode the original bytes again as UTF-8"
        ) from None


@contextlib.contextmanager
def _limit_output(template: jinja2.Template, max_characters: int | None) -> Iterator[None]:
    """Limit the output of a template and of its macros inside the `with` block.

    Raises:
        ValueError: The template or a macro writes more than `max_characters` characters.
    """
    environment: Any = template.environment
    original_concat = environment.concat

    def concat(pieces: Iterable[str]) -> str:
        kept, left = list[str](), max_characters or 0
        for piece in pieces:
            left -= len(piece)
            if left < 0:
                raise ValueError(f"the chat template wrote more than {max_characters} characters")
            kept.append(piece)
        return "".join(kept)

    if max_characters is not None:
        environment.concat = concat
    try:
        yield
    finally:
        environment.concat = original_concat


def _tokenizer_class(folder: Path) -> Any:
    """Return the `transformers` class that loads the tokenizer of a checkpoint.

    `AutoTokenizer` can load every tokenizer, but takes longer to import. If `tokenizer.json`
    describes the tokenizer completely, return the class that `AutoTokenizer` would choose.
    """
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    is_plain = config.get("tokenizer_class") in _SERIALIZED_CLASSES and "auto_map" not in config
    with _hide_torch_warning():
        import transformers

        if is_plain and (folder / "tokenizer.json").is_file():
            return transformers.PreTrainedTokenizerFast
        return transformers.AutoTokenizer


@contextlib.contextmanager
def _hide_torch_warning() -> Iterator[None]:
    """Hide the warning that PyTorch is missing: `transformers` logs it, but jpaged needs no
    PyTorch.
    """
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
    """Return a function (token ids, skip_special_tokens) -> text.

    The function calls the Rust decoder directly if possible, because the Python method is slower.
    """
    backend = getattr(hf_tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return lambda ids, skip: backend.decode(ids, skip_special_tokens=skip)
    return lambda ids, skip: hf_tokenizer.decode(
        ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
    )


def _bytes_function(hf_tokenizer: Any) -> Callable[[int], bytes] | None:
    """Return a function from a token id to bytes, or None if the decoder is not `ByteLevel`.

    Each character of the `ByteLevel` alphabet stands for one byte. A token with another character,
    such as an added token with a space, stands for its text in UTF-8. Unknown ids have no bytes.
    """
    backend = getattr(hf_tokenizer, "backend_tokenizer", None)
    if backend is None or type(backend.decoder).__name__ != "ByteLevel":
        return None
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    bytes_by_letter = {letter: bytes([byte]) for byte, letter in bytes_to_unicode().items()}

    @functools.cache
    def token_bytes(token_id: int) -> bytes:
        token = backend.id_to_token(token_id) or ""
        parts = [bytes_by_letter.get(character) for character in token]
        return token.encode() if None in parts else b"".join(parts)  # type: ignore[arg-type]

    return token_bytes


_CUT_SEARCH_CHARACTERS = 16384
"""Number of characters before the target position in which `text_tail` searches for a cut."""

_BETWEEN_WORDS = re.compile(r"(?<=[A-Za-z])(?= [A-Za-z])|(?<=\n)(?=[^\W\d_])")
"""Positions before a space between two letters, and between a line break and a letter.

The pre-tokenizers of GPT-2, Llama 3, Qwen and DeepSeek always split at these positions.
"""

_ACROSS_WORDS = re.compile(r"[A-Za-z][ Ġ▁]|[\nĊ][^\sĠĉĊč▁]")
"""Matches inside a vocabulary token if the token contains a boundary between two words.

Vocabularies write a space as " ", "Ġ" or "▁", and a line break as a line break or "Ċ".
"""

_MAX_UNSURE_TOKENS = 1024
"""Number of first tokens that may differ if a text is cut between arbitrary characters.

Later tokens are assumed to equal the tokens of the whole text.
"""


def splits_at_words(vocabulary: Iterable[str]) -> bool:
    """Return whether a vocabulary forces its tokenizer to split every text between words.

    The result is True if no token contains a boundary between two words. The tokenizer then needs
    no pre-tokenizer to split a text between words (as in Llama 2).
    """
    return not any(_ACROSS_WORDS.search(token) for token in vocabulary)


def text_tail(text: str, num_characters: int, *, at_words: bool) -> tuple[str, int]:
    """Return the end of a text, so that the caller can encode it without the rest of the text.

    Args:
        text: The text.
        num_characters: Minimum number of characters to return.
        at_words: Whether to cut between two words. See `splits_at_words`.

    Returns:
        tail: The last `num_characters` characters or more, up to `_CUT_SEARCH_CHARACTERS` more.
        num_unsure: Upper bound for the number of first tokens that may differ from the tokens of
            the whole text. Tokenizers may treat the first word of a text differently.
    """
    end = max(len(text) - num_characters, 0)
    start = max(end - _CUT_SEARCH_CHARACTERS, 0)
    if at_words:
        cuts = [match.start() for match in _BETWEEN_WORDS.finditer(text, start, end)][-2:]
        if len(cuts) == 2:
            begin, first_end = cuts
            return text[begin:], 4 * len(text[begin:first_end].encode()) + 16
    return text[start:], _MAX_UNSURE_TOKENS
