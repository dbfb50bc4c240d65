"""Test the drafters of speculative decoding, and the functions that append tokens to batch rows on
the device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.config import SpeculativeConfig
from jpaged.core.plan import NO_DRAFT, NO_TOKEN, REJECTED
from jpaged.runtime.drafting import (
    DraftInputs,
    NgramDrafter,
    RowTokens,
    append_tokens,
    load_tokens,
    make_drafter,
    pack_tokens,
    resolve_lengths,
)


def ngram_reference(tokens: list[int], drafter: NgramDrafter) -> list[int]:
    """Compute n-gram drafts in plain Python: find the longest suffix that also occurs earlier in
    the tokens, and return the tokens after its latest earlier occurrence."""
    size = len(tokens)
    for length in range(min(drafter.max_ngram, size - 1), drafter.min_ngram - 1, -1):
        for start in range(size - length - 1, -1, -1):
            if tokens[start : start + length] == tokens[size - length :]:
                following = tokens[start + length :]
                drafts = [following[i % len(following)] for i in range(drafter.max_drafts)]
                return drafts + [NO_DRAFT] * (drafter.num_drafts - drafter.max_drafts)
    return [NO_DRAFT] * drafter.num_drafts


@pytest.mark.parametrize(
    "drafter",
    [
        NgramDrafter(3, 3, 1, 4),
        NgramDrafter(7, 5, 2, 3),
        NgramDrafter(1, 1, 3, 3),
        NgramDrafter(7, 7, 1, 16),
    ],
    ids=str,
)
def test_ngram_drafter_equals_a_plain_python_reference(drafter: NgramDrafter):
    rng = np.random.default_rng(0)
    lengths = np.array([0, 1, 2, 3, 5, *rng.integers(2, 41, 60)], np.int32)
    vocabulary = rng.integers(1, 5, len(lengths))[:, None]
    # Tokens after the end of a sequence are undefined.
    history = (rng.integers(0, 1000, (len(lengths), 40)) % vocabulary).astype(np.int32)
    found = jax.jit(drafter)(DraftInputs(jnp.asarray(history), jnp.asarray(lengths)))
    rows = zip(history.tolist(), lengths.tolist(), strict=True)
    expected = [ngram_reference(row[:length], drafter) for row, length in rows]
    np.testing.assert_array_equal(found, expected)
    assert (np.array(expected) >= 0).any()


def test_ngram_drafter_takes_the_latest_match_and_repeats_its_continuation():
    history = jnp.asarray(
        [[1, 2, 9, 1, 2, 8, 1, 2, 0, 0], [5, 6, 5, 6, 5, 6, 0, 0, 0, 0]], jnp.int32
    )
    inputs = DraftInputs(history, jnp.asarray([8, 6], jnp.int32))
    drafts = NgramDrafter(7, 7, 1, 4)(inputs)
    assert drafts.tolist() == [[8, 1, 2, 8, 1, 2, 8], [5, 6, 5, 6, 5, 6, 5]]


def test_number_of_drafts_is_padded_to_1_3_or_7():
    configs = [SpeculativeConfig(num_speculative_tokens=number) for number in range(1, 8)]
    assert [it.num_padded_drafts for it in configs] == [1, 3, 3, 7, 7, 7, 7]
    config = SpeculativeConfig(num_speculative_tokens=5, prompt_lookup_max=6, prompt_lookup_min=2)
    assert make_drafter(config) == NgramDrafter(7, 5, 2, 6)


def test_token_history_contains_loaded_and_appended_tokens():
    row_tokens = RowTokens(jnp.zeros(4, jnp.int32), jnp.zeros((4, 6), jnp.int32))
    for entries in pack_tokens({2: [7, 8, 9], 0: [5]}, padding_row=3, max_model_len=6):
        row_tokens = load_tokens(row_tokens, jnp.asarray(entries))
    tokens = jnp.asarray([[4, 3, REJECTED], [6, NO_TOKEN, NO_DRAFT], [1, 1, 1]], jnp.int32)
    rows, lengths = jnp.asarray([2, 0, 1], jnp.int32), jnp.asarray([3, 1, -1], jnp.int32)
    lengths_after, history = append_tokens(row_tokens, rows, lengths, tokens)
    assert history[:3].tolist() == [[5, 6, 0, 0, 0, 0], [0] * 6, [7, 8, 9, 4, 3, 0]]
    assert lengths_after[:3].tolist() == [2, 0, 5]  # row 1 exceeds its limit


def test_sequence_length_that_the_host_does_not_know_is_read_from_the_device():
    seq_lens = jnp.asarray([5, -1, -1, 0], jnp.int32)
    limits = jnp.asarray([8, 9, 8, 0], jnp.int32)
    lengths = jnp.asarray([7, 9, 9, 3], jnp.int32)
    assert resolve_lengths(seq_lens, limits, lengths).tolist() == [5, 9, -1, 0]
