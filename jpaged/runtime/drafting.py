"""Drafters for speculative decoding, and the device's record of the tokens of each row.

A drafter is a pure function on the device: it proposes the next tokens of each row from the state
of the rows. `verify_step` calls the drafter, and accepts a draft if the model samples the same
token.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32

from jpaged.config import SpeculativeConfig
from jpaged.core.plan import NO_DRAFT
from jpaged.runtime.sampler import TOKENS_PER_LOAD


class RowTokens(NamedTuple):
    """Tokens of the running sequences, stored on the device with one row per sequence.

    Only an engine with speculative decoding has this state: the host reads accepted drafts one step
    late, so only the device knows the current length of a row. Row R-1 is the padding row.
    """

    lengths: Int32[Array, "R"]
    """Number of prompt and output tokens of each row."""
    history: Int32[Array, "R C"]
    """Tokens of each row in order. Entries from the row's length on are undefined."""


class DraftInputs(NamedTuple):
    """State of the rows of a batch, from which a drafter proposes tokens."""

    history: Int32[Array, "B C"]
    """Tokens of each row in order, including the token that was sampled last."""
    lengths: Int32[Array, "B"]
    """Number of tokens of each row; 0 for padding."""


@dataclass(frozen=True)
class NgramDrafter:
    """Drafter that assumes that a sequence repeats itself (prompt lookup).

    The drafter finds the longest suffix of the sequence that also occurs earlier in the sequence.
    The suffix has `min_ngram` to `max_ngram` tokens. The latest earlier occurrence is the match,
    and the drafts are the tokens that follow the match. If the sequence ends before there are
    enough drafts, the drafts start again from the first token after the match.

    Attributes:
        num_drafts: Number of drafts that a verify step has room for.
        max_drafts: Maximum number of drafts to propose.
        min_ngram: Minimum number of tokens of a match.
        max_ngram: Maximum number of tokens of a match.
    """

    num_drafts: int
    max_drafts: int
    min_ngram: int
    max_ngram: int

    def __call__(self, inputs: DraftInputs) -> Int32[Array, "B k"]:
        """Return the drafts of each row. Unused entries at the end are `NO_DRAFT`."""
        history, lengths = inputs
        width = history.shape[1]
        position = jnp.arange(width, dtype=jnp.int32)[None]
        lengths = lengths[:, None]
        # `num_equal` is the length of the longest match that ends at each position. A match is a
        # run of at most `max_ngram` tokens that equals the last tokens of the row.
        num_equal, is_equal = jnp.zeros_like(history), position < lengths - 1
        for back in range(self.max_ngram):
            at = jnp.maximum(lengths - 1 - back, 0)
            last = jnp.take_along_axis(history, at, axis=1)
            earlier = jnp.pad(history, ((0, 0), (back, 0)))[:, :width]
            is_equal &= (earlier == last) & (position >= back) & (lengths > back)
            num_equal += is_equal.astype(jnp.int32)
        # Find the maximum of (length of the match, position), which is the longest match; of
        # equally long matches, the latest.
        is_match = num_equal >= self.min_ngram
        best = jnp.max(jnp.where(is_match, num_equal * width + position, -1), axis=1, keepdims=True)
        first = best % width + 1
        period = jnp.maximum(lengths - first, 1)
        offset = jnp.arange(self.num_drafts, dtype=jnp.int32)[None]
        found = jnp.take_along_axis(
            history, jnp.minimum(first + offset % period, width - 1), axis=1
        )
        is_draft = (best >= 0) & (offset < self.max_drafts)
        return jnp.where(is_draft, found, NO_DRAFT)


Drafter = NgramDrafter


def make_drafter(config: SpeculativeConfig) -> Drafter:
    """Return the drafter for an engine's options of speculative decoding."""
    return NgramDrafter(
        num_drafts=config.num_padded_drafts,
        max_drafts=config.num_speculative_tokens,
        min_ngram=config.prompt_lookup_min,
        max_ngram=config.prompt_lookup_max,
    )


def are_accepted(drafts: Int32[Array, "B"], token_ids: Int32[Array, "B"]) -> Bool[Array, "B"]:
    """Return for each row whether the drafted token equals the sampled token.

    The model samples the token for the position of the draft. `bench/speculative.py` replaces the
    function to accept drafts at a given rate.
    """
    return drafts == token_ids


def pack_tokens(
    rows: Mapping[int, Sequence[int]], padding_row: int, max_model_len: int
) -> Iterator[np.ndarray]:
    """Yield arrays of a fixed size, int32 [3, E], with the tokens of new sequences.

    The caller passes each array to `load_tokens`, as the argument `entries`.

    Args:
        rows: Tokens of each new sequence, by index of the sequence's row in `RowTokens`.
        padding_row: Index of the padding row. Unused columns of the last array name this row.
        max_model_len: Maximum number of tokens in a row. Unused columns have this number as their
            position. The position is out of bounds, so `load_tokens` drops unused columns.
    """
    sizes = [len(tokens) for tokens in rows.values()]
    owners = np.repeat(np.array([*rows], np.int32), sizes)
    positions = np.concatenate([np.arange(size, dtype=np.int32) for size in sizes])
    tokens = np.concatenate([np.array(tokens, np.int32) for tokens in rows.values()])
    for start in range(0, len(owners), TOKENS_PER_LOAD):
        chunk = slice(start, start + TOKENS_PER_LOAD)
        entries = np.zeros((3, TOKENS_PER_LOAD), np.int32)
        entries[0], entries[1] = padding_row, max_model_len
        entries[:, : len(owners[chunk])] = owners[chunk], positions[chunk], tokens[chunk]
        yield entries


def load_tokens(row_tokens: RowTokens, entries: Int32[Array, "three E"]) -> RowTokens:
    """Write the tokens of new sequences to `row_tokens.history`.

    The function does not change the lengths of rows. Each step sets the lengths of the rows that it
    computes.

    Args:
        row_tokens: Tokens of all running sequences. XLA updates the arrays in place if the caller
            donates the arrays.
        entries: Array from `pack_tokens` with E entries. Each entry is a column: the sequence's row
            in `row_tokens`, a position in the row, and the token to store there.
    """
    rows, positions, tokens = entries
    history = row_tokens.history.at[rows, positions].set(tokens, mode="drop")
    return row_tokens._replace(history=history)


def resolve_lengths(
    seq_lens: Int32[Array, "B"], limits: Int32[Array, "B"], lengths: Int32[Array, "B"]
) -> Int32[Array, "B"]:
    """Return the length of each batch row in tokens. The step skips rows with a result of -1.

    The result is -1 if a row has more tokens than slots.

    Args:
        seq_lens: Lengths that the host knows; 0 for padding. If the host does not know a length,
            the value is -1, and the function takes the length from `lengths`.
        limits: Number of tokens for which each row has slots.
        lengths: Lengths that the device has stored.
    """
    actual = jnp.where(seq_lens < 0, lengths, seq_lens)
    return jnp.where(actual <= limits, actual, -1)


def append_tokens(
    row_tokens: RowTokens,
    rows: Int32[Array, "B"],
    lengths: Int32[Array, "B"],
    token_ids: Int32[Array, "B Q"],
) -> RowTokens:
    """Append the tokens of a step to the rows of `row_tokens`.

    Args:
        row_tokens: Tokens of all running sequences.
        rows: For each sequence of the batch, the index of the sequence's row in `row_tokens`.
        lengths: Number of tokens of each sequence before the step. If the number is -1, the
            sequence's row stays unchanged.
        token_ids: Tokens to append to each sequence, followed by negative values as padding.
    """
    padding_row, width = row_tokens.lengths.shape[0] - 1, row_tokens.history.shape[1]
    rows = jnp.where(lengths >= 0, rows, padding_row)
    is_token = (token_ids >= 0) & (lengths >= 0)[:, None]
    new_lengths = jnp.maximum(lengths, 0) + is_token.sum(axis=1, dtype=jnp.int32)
    offset = jnp.arange(token_ids.shape[1], dtype=jnp.int32)[None]
    positions = jnp.where(is_token, lengths[:, None] + offset, width)
    return RowTokens(
        row_tokens.lengths.at[rows].set(new_lengths),
        row_tokens.history.at[rows[:, None], positions].set(token_ids, mode="drop"),
    )
