"""Random answers that a grammar allows, chosen by its masks alone."""

import random
from pathlib import Path

import numpy as np

from jpaged import StructuredOutputs, Tokenizer
from jpaged.config import EMBEDDED_MODEL
from jpaged.structured_outputs.compiler import GrammarCompiler
from jpaged.structured_outputs.matcher import Matcher

TOKENIZER = Tokenizer.from_folder(Path(EMBEDDED_MODEL))
VOCAB_SIZE = len(TOKENIZER) + 40  # wider than the tokenizer, as many models' logits
EOS = TOKENIZER.eos_token_id or 0
GRAMMARS = GrammarCompiler(TOKENIZER, VOCAB_SIZE, frozenset({EOS}))
ENDING = frozenset({EOS})
CLOSING = set(b'"}]')


def matcher_of(form: StructuredOutputs, ending: frozenset[int] = ENDING) -> Matcher:
    return GRAMMARS.compile(form).matcher(ending)


def allowed(matcher: Matcher, size: int = VOCAB_SIZE) -> set[int]:
    """What may follow; the answer's error, if there is one, is raised."""
    masks = np.zeros((1, -(-size // 32)), np.int32)
    if (error := matcher.fill_mask(masks, 0)) is not None:
        raise error
    bits = np.unpackbits(masks.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def walk(form: StructuredOutputs, seed: int, most: int = 600) -> str | None:
    """An answer's text; None if it does not end in so many tokens."""
    rng, matcher, text = random.Random(seed), matcher_of(form), b""
    for _ in range(most):
        if matcher.is_stopped:
            return text.decode()
        choices = allowed(matcher)
        if EOS in choices and (rng.random() < 0.5 or choices == {EOS}):
            return text.decode()
        tokens = sorted(choices - {EOS})
        of = TOKENIZER.token_bytes
        assert of is not None
        closing = [it for it in tokens if of(it) and of(it)[0] in CLOSING]
        plain = [it for it in tokens if of(it).isascii()]
        usual = plain if plain and rng.random() < 0.9 else tokens
        token = rng.choice(closing if closing and rng.random() < 0.4 else usual)
        matcher.accept(token)
        text += of(token)
    return None


def read(matcher: Matcher, text: str) -> bool:
    """Whether a grammar takes a text as far as it goes, token by token, as its masks say too."""
    for token in TOKENIZER.encode(text, add_special_tokens=False):
        if token not in allowed(matcher):
            return False
        matcher.accept(token)
    return True


def accepts(form: StructuredOutputs, text: str) -> bool:
    """Whether a text is an answer."""
    matcher = matcher_of(form)
    return read(matcher, text) and (matcher.is_stopped or EOS in allowed(matcher))
