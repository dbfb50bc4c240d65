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
IS_ADJUSTED, HAS_BIASES, BELOW_MIN_TOKENS = 1, 2, 4
"""Bits of a row's kind: it is adjusted at all; it has biases; its ending tokens are forbidden."""

TOKEN_COLUMN, LOGPROB_COLUMN, RANK_COLUMN, NUM_TOKEN_COLUMNS = range(4)
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

    token_state: Int32[Array, "R V"]
    biases: Float32[Array, "R V"]
    state_rows: Int32[Array, "B"]
    row_flags: Int32[Array, "B"]
    penalties: Float32[Array, "B 3"]


def adjust_tile(logits, token_state, biases, early, repetition, presence, frequency):
    """The logits after biases, forbidden tokens and penalties; shapes that broadcast.

    `biases` may be None.
    """
    x = logits if biases is None else logits + biases
    counts = token_state & COUNT_MASK
    x = jnp.where(early & ((token_state & IS_ENDING) != 0), -jnp.inf, x)
    seen = (token_state & (IN_PROMPT | COUNT_MASK)) != 0
    x = jnp.where(seen, jnp.where(x > 0, x / repetition, x * repetition), x)
    x = x - presence * (counts > 0).astype(jnp.float32)
    return x - frequency * counts.astype(jnp.float32)


def adjust_all_rows(logits, adjustments: Adjustments):
    """All rows, in plain XLA. Rows that need no state all read the last row's, which then comes
    from the chip's cache."""
    token_state, biases, state_rows, row_flags, penalties = adjustments
    last = token_state.shape[0] - 1
    adjusts = (row_flags & IS_ADJUSTED) != 0
    biased = adjusts & ((row_flags & HAS_BIASES) != 0)
    own_state = token_state[jnp.where(adjusts, state_rows, last)]
    own_biases = jnp.where(biased[:, None], biases[jnp.where(biased, state_rows, last)], 0.0)
    early = ((row_flags & BELOW_MIN_TOKENS) != 0)[:, None]
    columns = (penalties[:, i, None] for i in range(3))
    x = adjust_tile(logits, own_state, own_biases, early, *columns)
    return jnp.where(adjusts[:, None], x, logits)
