"""Logits changed for what a row's text holds: biases, forbidden tokens and penalties.

`adjust_tile` says what a change is, of any tile of logits: plain XLA makes of it what reads it
next, and the kernel of the greedy choice has it in registers.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

IN_PROMPT, IS_ENDING = 1 << 30, 1 << 29
"""Bits of a token's word: the prompt has it; it may not come as long as the row is EARLY."""
COUNT_MASK = IS_ENDING - 1
"""The rest of the word: how often the output has the token."""
ADJUSTS, BIASED, EARLY = 1, 2, 4
"""Bits of a row's kind: it is adjusted at all; it has biases; its ending tokens are forbidden."""

TOKEN_COLUMN, LOGPROB_COLUMN, RANK_COLUMN, NUM_FACTS = range(4)
"""Columns of a row of scores, and how many there are before its most probable tokens."""


class Adjustments(NamedTuple):
    """What the tokens of R texts are marked with, and how each of B rows of logits uses that.

    Attributes:
        words: Of each text and token its word (`COUNT_MASK`, `IN_PROMPT`, `IS_ENDING`).
        biases: Added to the logits; read of rows that are BIASED.
        rows: Each row's text.
        kinds: Bits ADJUSTS, BIASED, EARLY.
        penalties: Repetition, presence, frequency.
    """

    words: Int32[Array, "R V"]
    biases: Float32[Array, "R V"]
    rows: Int32[Array, "B"]
    kinds: Int32[Array, "B"]
    penalties: Float32[Array, "B 3"]


def adjust_tile(logits, words, biases, early, repetition, presence, frequency):
    """The logits after biases, forbidden tokens and penalties; shapes that broadcast.

    `biases` may be None.
    """
    x = logits if biases is None else logits + biases
    counts = words & COUNT_MASK
    x = jnp.where(early & ((words & IS_ENDING) != 0), -jnp.inf, x)
    seen = (words & (IN_PROMPT | COUNT_MASK)) != 0
    x = jnp.where(seen, jnp.where(x > 0, x / repetition, x * repetition), x)
    x = x - presence * (counts > 0).astype(jnp.float32)
    return x - frequency * counts.astype(jnp.float32)


def all_adjusted(logits, adjustments: Adjustments):
    """All rows, in plain XLA. Rows that need no state all read the last row's, which then comes
    from the chip's cache."""
    words, biases, rows, kinds, penalties = adjustments
    last = words.shape[0] - 1
    adjusts = (kinds & ADJUSTS) != 0
    biased = adjusts & ((kinds & BIASED) != 0)
    own_words = words[jnp.where(adjusts, rows, last)]
    own_biases = jnp.where(biased[:, None], biases[jnp.where(biased, rows, last)], 0.0)
    early = ((kinds & EARLY) != 0)[:, None]
    columns = (penalties[:, i, None] for i in range(3))
    x = adjust_tile(logits, own_words, own_biases, early, *columns)
    return jnp.where(adjusts[:, None], x, logits)
