"""Logits changed for what a row's text holds: biases, forbidden tokens and penalties.

`adjust_tile` says what a change is, of any tile of logits: plain XLA makes of it what reads it
next, and the kernel here, which chooses the most probable token, has it in registers.

    greedy   grid (chunk, row): the chunk's highest key and the first token that has it; then XLA
             picks the first chunk. A row that is not adjusted loads its logits alone.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float32, Int32

from pallas_kernels.tuning import GreedyConfig

IN_PROMPT, IS_ENDING = 1 << 30, 1 << 29
"""Bits of a token's word: the prompt has it; it may not come as long as the row is EARLY."""

COUNT_MASK = IS_ENDING - 1
"""The rest of the word: how often the output has the token."""

ADJUSTS, BIASED, EARLY = 1, 2, 4
"""Bits of a row's kind: it is adjusted at all; it has biases; its ending tokens are forbidden."""


class Adjustments(NamedTuple):
    """What the tokens of R texts are marked with, and how each of B rows of logits uses that."""

    words: Int32[Array, "R V"]
    biases: Float32[Array, "R V"]
    rows: Int32[Array, "B"]
    kinds: Int32[Array, "B"]
    penalties: Float32[Array, "B 3"]
    """Repetition, presence, frequency."""


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


def greedy_choice(
    logits, adjustments: Adjustments | None, *, config: GreedyConfig, interpret: bool
):
    """As `api.greedy_choice`, of at least one token."""
    keys, tokens = _greedy_parts(logits, adjustments, config, interpret)
    highest = keys.max(axis=1)
    # Chunks are in the order of their tokens, so the lowest token is the first chunk's.
    lowest = jnp.where(keys == highest[:, None], tokens, logits.shape[1]).min(axis=1)
    return jnp.minimum(lowest, logits.shape[1] - 1), _from_key(highest)


def _greedy_parts(logits, adjustments, config, interpret):
    """Of each chunk of each row the highest key and the first token that has it: int32 [B, C]."""
    batch, width = logits.shape
    chunks = pl.cdiv(width, config.chunk)
    part = jax.ShapeDtypeStruct((batch, chunks), jnp.int32)
    arrays = () if adjustments is None else adjustments
    return pl.pallas_call(
        functools.partial(_greedy, width=width, config=config),
        out_shape=(part, part),
        grid=(chunks, batch),
        compiler_params=plgpu.CompilerParams(num_warps=config.warps, num_stages=1),
        interpret=interpret,
        name="greedy_choice",
    )(logits, *arrays)


def _order_key(x):
    """Integers in the order of the floats; zeros are equal, and NaN is above all."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0, jnp.float32(0), x), jnp.int32)
    key = jnp.where(bits >= 0, bits, bits ^ jnp.int32(0x7FFFFFFF))
    return jnp.where(x != x, jnp.int32(np.iinfo(np.int32).max), key)


def _from_key(key):
    """The float of `_order_key`."""
    bits = jnp.where(key >= 0, key, key ^ jnp.int32(0x7FFFFFFF))
    return lax.bitcast_convert_type(bits, jnp.float32)


def _greedy(logits_ref, *refs, width, config):
    *state_refs, keys_ref, tokens_ref = refs
    chunk, row = pl.program_id(0), pl.program_id(1)
    columns = chunk * config.chunk + jnp.arange(config.chunk, dtype=jnp.int32)
    live = columns < width

    def load(ref, own):
        return plgpu.load(ref.at[jnp.full_like(columns, own), columns], mask=live, other=0)

    x = load(logits_ref, row)
    if state_refs:
        words_ref, biases_ref, rows_ref, kinds_ref, penalties_ref = state_refs
        kind, own = kinds_ref[row], rows_ref[row]

        def adjust():
            biases = lax.cond(
                (kind & BIASED) != 0,
                lambda: load(biases_ref, own),
                lambda: jnp.zeros(config.chunk, jnp.float32),
            )
            penalties = (penalties_ref[row, i] for i in range(3))
            return adjust_tile(x, load(words_ref, own), biases, (kind & EARLY) != 0, *penalties)

        x = lax.cond((kind & ADJUSTS) != 0, adjust, lambda: x)
    keys = jnp.where(live, _order_key(x), jnp.int32(np.iinfo(np.int32).min))
    highest = jnp.max(keys)
    keys_ref[row, chunk] = highest
    tokens_ref[row, chunk] = jnp.min(jnp.where(keys == highest, columns, jnp.int32(width)))
