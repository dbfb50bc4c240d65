"""Test that the tile maps of prefill contain each query row exactly once."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention.tiles import split_decode_rows, tile_map, window_map
from tests.covering import covering


def _ragged(seed):
    """Return a random ragged batch.

    Returns:
        Lengths of the sequences, numbers of new tokens, `query_start_loc`, and the number of rows
        including padding.
    """
    rng = np.random.default_rng(seed)
    query_lens = rng.choice([0, 1, 2, 7, 8, 9, 31, 32, 33, 64], size=6)
    seq_lens = query_lens + np.where(query_lens > 0, rng.integers(0, 50, size=6), 0)
    starts = np.concatenate([[0], np.cumsum(query_lens)])
    return seq_lens, query_lens, starts, int(starts[-1]) + int(rng.integers(0, 40))


@pytest.mark.parametrize(("seed", "tile_size"), covering(range(4), [1, 8, 32], strength=1))
def test_tile_map_puts_every_query_row_in_exactly_one_tile(tile_size, seed):
    seq_lens, query_lens, starts, num_tokens = _ragged(seed)
    tiles = tile_map(
        jnp.asarray(seq_lens, jnp.int32), jnp.asarray(starts, jnp.int32), num_tokens, tile_size
    )
    owners = np.full(num_tokens, -1)
    for sequence, row, position, rows, keys in np.stack(tiles).T:
        assert (owners[row : row + rows] == -1).all()
        is_padding = rows > 0 and row >= starts[-1]
        owners[row : row + rows] = len(seq_lens) if is_padding else sequence
        if rows and not is_padding:
            assert position == seq_lens[sequence] - (starts[sequence + 1] - row)
            assert keys == position + rows
        else:
            assert keys == 0
    expected = np.repeat(np.arange(7), [*query_lens, num_tokens - starts[-1]])
    np.testing.assert_array_equal(owners, expected)


@pytest.mark.parametrize(("seed", "window"), covering(range(4), [8, 32], strength=1))
def test_tiles_in_aligned_row_ranges_contain_every_query_row_exactly_once(window, seed):
    seq_lens, query_lens, starts, num_tokens = _ragged(seed)
    tiles = window_map(
        jnp.asarray(seq_lens, jnp.int32), jnp.asarray(starts, jnp.int32), num_tokens, window
    )
    *columns, num_tiles = (np.asarray(field) for field in tiles)
    owners = np.full(num_tokens, -1)
    for sequence, index, position, begin, end, seq_len in np.stack(columns).T[:num_tiles]:
        assert 0 <= begin < end <= window
        rows = slice(index * window + begin, index * window + end)
        assert (owners[rows] == -1).all()
        is_padding = rows.start >= starts[-1]
        owners[rows] = len(seq_lens) if is_padding else sequence
        assert seq_len == (0 if is_padding else seq_lens[sequence])
        if not is_padding:
            assert position + begin == seq_len - (starts[sequence + 1] - rows.start)
    expected = np.repeat(np.arange(7), [*query_lens, num_tokens - starts[-1]])
    np.testing.assert_array_equal(owners, expected)


@pytest.mark.parametrize(
    ("query_lens", "tile_size"),
    covering([[1, 1, 1, 9, 1, 0], [1] * 40, [1] * 40 + [70, 0, 0], [4, 1]], [8, 32], strength=1),
)
def test_leading_decode_rows_get_no_prefill_tile(query_lens, tile_size):
    """Each row after the leading decode rows is in one tile of `tile_map`, and in one tile of
    `window_map`."""
    batch = len(query_lens)
    num_decode_rows = next((i for i, n in enumerate(query_lens) if n != 1), batch)
    starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    seq_lens = jnp.asarray(np.array(query_lens) * 3, jnp.int32)
    num_tokens = int(starts[-1]) + 5
    rest, lens = split_decode_rows(seq_lens, jnp.asarray(starts))
    assert lens.tolist() == [3] * num_decode_rows + [0] * (batch - num_decode_rows)
    seen = np.zeros((2, num_tokens), int)
    for _, row, _, rows, _ in np.stack(tile_map(seq_lens, rest, num_tokens, tile_size)).T:
        seen[0, row : row + rows] += 1
    *columns, num_tiles = (np.asarray(f) for f in window_map(seq_lens, rest, num_tokens, tile_size))
    for _, index, _, begin, end, _ in np.stack(columns).T[:num_tiles]:
        seen[1, index * tile_size + begin : index * tile_size + end] += 1
    assert seen.tolist() == [[0] * num_decode_rows + [1] * (num_tokens - num_decode_rows)] * 2
