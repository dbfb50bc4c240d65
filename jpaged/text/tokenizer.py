"""Text to token ids and back: a thin layer over the tokenizers of `transformers`.

What the layer adds: no code from a checkpoint is ever run, mistakes in text and messages get an
error that names them, and decoding skips the wrappers that cost more than the decoding.
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
"""Tokenizer classes that mean: `tokenizer.json` just as it is."""

_BYTES_PER_TOKEN = 8
"""More than tokens of any language have on average."""

_SIZE_SLACK = 4096
"""Characters or bytes that cost nothing."""


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
        self.token_bytes = _bytes_function(self.hf_tokenizer)

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

    def encode(
        self, text: str, *, add_special_tokens: bool = True, last: int | None = None
    ) -> list[int]:
        """The token ids of a text, with the special tokens that the tokenizer adds to a prompt.

        Args:
            text: Any.
            add_special_tokens: Such as the one that begins a text.
            last: Only so many at the end. What is far before them is not looked at. They are the
                whole text's where words are: if before them, within some thousand characters,
                there are places between two words at which the tokenizer splits. In a text without
                any (one run of digits, or of a letter) they may be cut otherwise than in the whole.

        Raises:
            ValueError: the text has a lone surrogate, which no encoding can represent.
        """
        _check_encodable(text, "prompt")
        return self._encode_last(lambda part: self._encode(part, add_special_tokens), text, last)

    def is_longer(self, text: str, num_tokens: int) -> bool:
        """Whether a text certainly has more tokens, as its beginning shows.

        Not looked at are texts so short that they can as well be tokenised.
        """
        data = text.encode(errors="replace")
        if len(data) <= _BYTES_PER_TOKEN * num_tokens + _SIZE_SLACK:
            return False
        size = 2 * num_tokens + _SIZE_SLACK
        while size < len(data):
            beginning = data[:size].decode(errors="ignore")
            if len(self._encode(beginning, False)) > num_tokens + 64:  # where it is cut may differ
                return True
            size *= 4
        return False

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of the tokens, spaces as the tokens have them; unknown ids are no text."""
        return self._decode(list(token_ids), skip_special_tokens)

    @property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat_template` works without an explicit `chat_template`."""
        return self.hf_tokenizer.chat_template is not None

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], **options: Any
    ) -> list[int]:
        """The token ids of a conversation; options, errors and the rest as of `write_chat`."""
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
        """A conversation as its template writes it.

        Args:
            messages: Dicts with a `role` and a `content`, both strings; other keys are handed to
                the template. Only a message with `tool_calls` may leave the content out; templates
                take a call's `arguments` as a dict.
            add_generation_prompt: End with the tokens that open the assistant's answer.
            continue_final_message: End in the middle of the last message, for an answer to go on.
            chat_template: A Jinja template to use instead of the model's.
            allow_special_tokens: Let text of messages and variables, such as `<|im_end|>`, become
                special tokens. Otherwise it is tokenised as the text that it is, so that no user
                who writes a message's text can end the message.
            max_characters: Of what the template may write.
            template_variables: More variables of the template, such as `tools`, dicts as OpenAI
                writes them, or `enable_thinking`.

        Raises:
            TypeError, ValueError: a malformed message, no chat template, or a template that
                fails, refuses the messages or writes too much.
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
        """The token ids of a conversation that was written out; `last` as of `encode`."""
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
        """What `encode` makes of a text: all of it, or the last tokens, as of `encode`."""
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
        """The ids of text in which nothing is special.

        Args:
            text: Any.
            is_inside: It does not begin the prompt, where some tokenizers put a blank.
        """
        if not text:
            return []

        def encode(text: str) -> list[int]:
            return self.hf_tokenizer.encode(
                text, add_special_tokens=False, split_special_tokens=True, verbose=False
            )

        ids = encode(text)
        if is_inside and self._has_start_marker:
            line, behind = encode("\n"), encode("\n" + text)
            ids = behind[len(line) :] if behind[: len(line)] == line else ids
        if len(text) > 1 and not self._control_ids.isdisjoint(ids):  # the model itself has it
            middle = len(text) // 2
            first, second = text[:middle], text[middle:]
            return self._encode_as_text(first, is_inside) + self._encode_as_text(second, True)
        return ids

    def _has_hidden_specials(self, text: str) -> bool:
        """Whether a text has special tokens that its characters do not show, as where a tokenizer
        turns other characters into theirs first."""
        if not self._normalizes_specials:
            return False
        num_special = sum(map(self._control_ids.__contains__, self._encode(text, False)))
        return num_special > self._escaper.count_special_tokens(text)

    def _template(self, chat_template: str | None, tools: Any) -> jinja2.Template:
        from transformers.utils.chat_template_utils import _compile_jinja_template

        return _compile_jinja_template(self.hf_tokenizer.get_chat_template(chat_template, tools))

    def prepare(self) -> None:
        """Look through the vocabulary now, not with the first text: forks then share it."""
        _ = self._escaper, self._control_ids, self._splits_at_words

    @functools.cached_property
    def _escaper(self) -> SpecialTokenEscaper:
        added = self.hf_tokenizer.added_tokens_decoder.items()
        flagged = {i: SpecialToken(it.content, it.lstrip, it.rstrip) for i, it in added}
        text_of = self.hf_tokenizer.convert_ids_to_tokens
        return SpecialTokenEscaper(
            flagged.get(i) or SpecialToken(text_of(i)) for i in self.special_token_ids
        )

    @functools.cached_property
    def _control_ids(self) -> frozenset[int]:
        """Special tokens that tell a model something: all but the one for unknown characters."""
        hf = self.hf_tokenizer
        others = {hf.bos_token_id, hf.eos_token_id, hf.pad_token_id}
        return self.special_token_ids - ({hf.unk_token_id} - others)

    @functools.cached_property
    def _normalizes_specials(self) -> bool:
        """Whether special tokens are looked for after characters were changed."""
        backend = getattr(self.hf_tokenizer, "backend_tokenizer", None)
        if backend is not None and backend.normalizer is None:
            return False
        added = self.hf_tokenizer.added_tokens_decoder
        return any(added[i].normalized for i in self.special_token_ids if i in added)

    @functools.cached_property
    def _has_start_marker(self) -> bool:
        """Whether text that begins a prompt is tokenised otherwise than behind a special token."""
        text_of = self.hf_tokenizer.convert_ids_to_tokens
        behind = [self._encode(f"{text_of(i)}a", False) for i in sorted(self._control_ids)[:1]]
        return any(ids[1:] != self._encode("a", False) for ids in behind)

    @functools.cached_property
    def _splits_at_words(self) -> bool:
        return splits_at_words(self.hf_tokenizer.get_vocab())


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


@contextlib.contextmanager
def _limit_output(template: jinja2.Template, max_characters: int | None) -> Iterator[None]:
    """Raise from a template, also from its macros, that writes more than so many characters."""
    environment: Any = template.environment
    before = environment.concat

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
        environment.concat = before


def _tokenizer_class(folder: Path) -> Any:
    """AutoTokenizer, or the class it would pick where that is plain: importing it takes half."""
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
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    byte_of = {letter: bytes([byte]) for byte, letter in bytes_to_unicode().items()}

    @functools.cache
    def token_bytes(token_id: int) -> bytes:
        token = backend.id_to_token(token_id) or ""
        own = [byte_of.get(character) for character in token]
        return token.encode() if None in own else b"".join(own)  # type: ignore[arg-type]

    return token_bytes


_CUT_SEARCH_SIZE = 16384
"""Characters in which a place to cut is looked for."""

_BETWEEN_WORDS = re.compile(r"(?<=[A-Za-z])(?= [A-Za-z])|(?<=\n)(?=[^\W\d_])")
"""Before a blank between two letters, and after a line break before a letter. Pre-tokenizers split
there whatever comes before: those of GPT-2, Llama 3, Qwen and DeepSeek do."""

_ACROSS_WORDS = re.compile(r"[A-Za-z][ Ġ▁]|[\nĊ][^\sĠĉĊč▁]")
"""In a token: one that lies across such a place."""

_MAX_UNSURE_TOKENS = 1024
"""Tokens after which a text cut anywhere is taken to be tokenised as the whole."""


def splits_at_words(vocabulary: Iterable[str]) -> bool:
    """Whether no token lies across a place between words. Then no merge does either, also where
    there is no pre-tokenizer, as in Llama 2."""
    return not any(_ACROSS_WORDS.search(token) for token in vocabulary)


def text_tail(text: str, num_characters: int, *, at_words: bool) -> tuple[str, int]:
    """About so many characters of a text's end, and at its beginning some more.

    Returns:
        The part, and how many of its first tokens may differ from the whole text's: those of the
        words up to the second place at which it can be cut, as tokenizers treat a first word in
        ways of their own. Where there are no such places, a generous number of tokens.
    """
    end = max(len(text) - num_characters, 0)
    start = max(end - _CUT_SEARCH_SIZE, 0)
    if at_words:
        places = [match.start() for match in _BETWEEN_WORDS.finditer(text, start, end)][-2:]
        if len(places) == 2:
            begin, first_end = places
            return text[begin:], 4 * len(text[begin:first_end].encode()) + 16
    return text[start:], _MAX_UNSURE_TOKENS
