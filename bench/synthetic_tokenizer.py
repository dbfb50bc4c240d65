"""A synthetic byte-level tokenizer with any vocabulary size, for models with random weights."""

from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_SPACE = "Ġ"
"""The character that stands for a space in byte-level vocabularies."""


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write the tokenizer files `tokenizer.json` and `tokenizer_config.json` to `folder`.

    The vocabulary consists of the 256 bytes and of random words of 2 to 8 letters. Two thirds of
    the words begin with a space.
    """
    tokens = dict.fromkeys(sorted(pre_tokenizers.ByteLevel.alphabet()))
    rng = np.random.RandomState(0)
    while len(tokens) < vocab_size:
        letters = rng.randint(0, len(_LETTERS), rng.randint(2, 9))
        word = "".join(_LETTERS[i] for i in letters)
        tokens[(_SPACE if rng.randint(3) else "") + word] = None
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
