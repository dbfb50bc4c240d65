"""The tokenizer of the bundled model: each byte is a token, and the id is the value of the byte.

A small model can therefore see letters and digits, which helps it to spell, to reverse words and to
calculate. Decoding the tokens of a text gives the same text. The ids above 255 are special tokens.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from jpaged.config import EMBEDDED_MODEL

ENDOFTEXT, IM_START, IM_END = 256, 257, 258
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
SPECIAL_TOKENS += [f"<|reserved_{i}|>" for i in range(5)]
VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)
EOS_TOKEN_IDS = [IM_END, ENDOFTEXT]

CHAT_TEMPLATE = (EMBEDDED_MODEL / "chat_template.jinja").read_text()


def _byte_symbols() -> list[str]:
    """Return the printable character that stands for each byte in GPT-2's byte-level vocabulary."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def build_tokenizer() -> Tokenizer:
    """Build a byte-level tokenizer without merges and with eight special tokens."""
    vocab = {symbol: byte for byte, symbol in enumerate(_byte_symbols())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    return tokenizer


def save_tokenizer(folder: Path, max_length: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
    }
    build_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
