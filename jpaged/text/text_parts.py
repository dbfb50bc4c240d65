"""Where a text can be cut so that what follows is tokenised as it is in the whole text."""

import re
from collections.abc import Iterable

_REACH = 16384
"""Characters in which a place to cut is looked for."""

_BETWEEN_WORDS = re.compile(r"(?<=[A-Za-z])(?= [A-Za-z])|(?<=\n)(?=[^\W\d_])")
"""Before a blank between two letters, and after a line break before a letter. Pre-tokenizers split
there whatever comes before: those of GPT-2, Llama 3, Qwen and DeepSeek do."""

_ACROSS_WORDS = re.compile(r"[A-Za-z][ Ġ▁]|[\nĊ][^\sĠĉĊč▁]")
"""In a token: one that lies across such a place."""

_UNKNOWN = 1024
"""Tokens after which a text cut anywhere is taken to be tokenised as the whole."""


def splits_at_words(vocabulary: Iterable[str]) -> bool:
    """Whether no token lies across a place between words. Then no merge does either, also where
    there is no pre-tokenizer, as in Llama 2."""
    return not any(_ACROSS_WORDS.search(token) for token in vocabulary)


def end_part(text: str, num_characters: int, *, at_words: bool) -> tuple[str, int]:
    """About so many characters of a text's end, and at its beginning some more.

    Returns:
        The part, and how many of its first tokens may differ from the whole text's: those of the
        words up to the second place at which it can be cut, as tokenizers treat a first word in
        ways of their own. Where there are no such places, a generous number of tokens.
    """
    end = max(len(text) - num_characters, 0)
    start = max(end - _REACH, 0)
    if at_words:
        places = [match.start() for match in _BETWEEN_WORDS.finditer(text, start, end)][-2:]
        if len(places) == 2:
            begin, first_end = places
            return text[begin:], 4 * len(text[begin:first_end].encode()) + 16
    return text[start:], _UNKNOWN
