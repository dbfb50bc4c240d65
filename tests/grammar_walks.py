"""Generate random answers from the masks of a grammar."""

import random
from pathlib import Path

import numpy as np

from jpaged import StructuredOutputs, Tokenizer
from jpaged.config import EMBEDDED_MODEL
from jpaged.structured_outputs.compiler import GrammarCompiler
from jpaged.structured_outputs.matcher import Matcher

TOKENIZER = Tokenizer.from_folder(Path(EMBEDDED_MODEL))
VOCAB_SIZE = len(TOKENIZER) + 40  # many models have more logits than their tokenizer has tokens
EOS = TOKENIZER.eos_token_id or 0
GRAMMARS = GrammarCompiler(TOKENIZER, VOCAB_SIZE, frozenset({EOS}))
ENDING = frozenset({EOS})
CLOSING = set(b'"}]')


def matcher_of(spec: StructuredOutputs, ending: frozenset[int] = ENDING) -> Matcher:
    return GRAMMARS.compile(spec).matcher(ending)


def allowed(matcher: Matcher, size: int = VOCAB_SIZE) -> set[int]:
    """Return the ids of the tokens that the grammar allows next.

    Raises:
        GrammarError: The grammar has failed, or allows no token.
    """
    masks = np.zeros((1, -(-size // 32)), np.int32)
    if (error := matcher.fill_mask(masks, 0)) is not None:
        raise error
    bits = np.unpackbits(masks.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def walk(spec: StructuredOutputs, seed: int, max_tokens: int = 600) -> str | None:
    """Return the text of a random answer, or None if it does not end within `max_tokens`."""
    rng, matcher, text = random.Random(seed), matcher_of(spec), b""
    for _ in range(max_tokens):
        if matcher.is_stopped:
            return text.decode()
        choices = allowed(matcher)
        if EOS in choices and (rng.random() < 0.5 or choices == {EOS}):
            return text.decode()
        tokens = sorted(choices - {EOS})
        bytes_of = TOKENIZER.token_bytes
        assert bytes_of is not None
        closing = [it for it in tokens if bytes_of(it) and bytes_of(it)[0] in CLOSING]
        plain = [it for it in tokens if bytes_of(it).isascii()]
        usual = plain if plain and rng.random() < 0.9 else tokens
        token = rng.choice(closing if closing and rng.random() < 0.4 else usual)
        matcher.accept(token)
        text += bytes_of(token)
    return None


def read(matcher: Matcher, text: str) -> bool:
    """Return whether the masks and the matcher accept every token of a text."""
    for token in TOKENIZER.encode(text, add_special_tokens=False):
        if token not in allowed(matcher):
            return False
        matcher.accept(token)
    return True


def accepts(spec: StructuredOutputs, text: str) -> bool:
    """Return whether a text is a complete answer."""
    matcher = matcher_of(spec)
    return read(matcher, text) and (matcher.is_stopped or EOS in allowed(matcher))
