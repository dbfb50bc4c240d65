"""Logit adjustments: biases, tokens forbidden before `min_tokens`, and penalties.

`adjust_tile` defines the adjustments for a tile of logits. Plain XLA fuses `adjust_tile` with the
next op. The Triton kernel of the greedy choice applies it in registers.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

IN_PROMPT, IS_ENDING = 1 << 30, 1 << 29
"""Bits of `Adjustments.token_state`.

`IN_PROMPT`: the prompt contains the token. `IS_ENDING`: the token ends the output, so it is
forbidden in rows with the flag `BELOW_MIN_TOKENS`.
"""
COUNT_MASK = IS_ENDING - 1
"""Mask of the low bits of `Adjustments.token_state`: how often the output contains the token."""
IS_ADJUSTED, HAS_BIASES, BELOW_MIN_TOKENS = 1, 2, 4
"""Bits of `Adjustments.row_flags`.

`IS_ADJUSTED`: the row has any adjustment. `HAS_BIASES`: the row has biases. `BELOW_MIN_TOKENS`: the
row's output has fewer than `min_tokens` tokens, so tokens that end the output are forbidden.
"""

TOKEN_COLUMN, LOGPROB_COLUMN, RANK_COLUMN, KEPT_MASS_COLUMN, NUM_TOKEN_COLUMNS = range(5)
"""Column indices in the result of `token_scores`, and the number of these columns.

The columns of the most probable tokens start at index `NUM_TOKEN_COLUMNS`.
"""


class Adjustments(NamedTuple):
    """Adjustments of B rows of logits, with the per-token state of R sequences.

    Attributes:
        token_state: For each sequence and token, the output count (`COUNT_MASK`) and the bits
            `IN_PROMPT` and `IS_ENDING`.
        biases: Biases added to the logits; read only for rows with the flag `HAS_BIASES`.
        state_rows: For each row of logits, the index of its sequence in `token_state` and `biases`.
        row_flags: For each row of logits, the bits `IS_ADJUSTED`, `HAS_BIASES` and
            `BELOW_MIN_TOKENS`.
        penalties: For each row of logits, the repetition, presence and frequency penalties.
    """

    token_state: Int32[Array, "R V"]
    biases: Float32[Array, "R V"]
    state_rows: Int32[Array, "B"]
    row_flags: Int32[Array, "B"]
    penalties: Float32[Array, "B 3"]


def adjust_tile(logits, token_state, biases, early, repetition, presence, frequency):
    """Apply biases, forbidden tokens and penalties to logits.

    All arguments broadcast with the logits.

    Args:
        logits: Float32 logits.
        token_state: State of each token, as in `Adjustments`.
        biases: Biases to add, or None.
        early: Whether the output is too short, so that tokens with `IS_ENDING` are forbidden.
        repetition, presence, frequency: Penalties.
    """
    x = logits if biases is None else logits + biases
    counts = token_state & COUNT_MASK
    x = jnp.where(early & ((token_state & IS_ENDING) != 0), -jnp.inf, x)
    seen = (token_state & (IN_PROMPT | COUNT_MASK)) != 0
    x = jnp.where(seen, jnp.where(x > 0, x / repetition, x * repetition), x)
    x = x - presence * (counts > 0).astype(jnp.float32)
    return x - frequency * counts.astype(jnp.float32)


def adjust_all_rows(logits, adjustments: Adjustments):
    """Adjust the logits of all rows in plain XLA.

    All rows without adjustments read the same row of the state, the last one, so that the row stays
    in the cache.
    """
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
