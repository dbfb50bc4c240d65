"""Tile maps of ragged prefill: the query tokens and the sequence of each tile.

Each map divides the T flattened tokens of B sequences into tiles, and each tile belongs to one
sequence:

    tile_map     tiles of `tile_size` tokens that start at the sequence's first token. The first
                 tile of sequence b is `query_start_loc[b] // tile_size + b`, which leaves room for
                 the `ceil(length / tile_size)` tiles of every sequence. The map needs no prefix
                 sum, and the number of tiles is static. Some tiles stay empty.
    window_map   tiles that are aligned in q (windows), without empty tiles in between. A window
                 that several sequences share gives one tile for each sequence.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int32


def split_decode_rows(
    seq_lens: Int32[Array, "B"], query_start_loc: Int32[Array, "B+1"]
) -> tuple[Int32[Array, "B+1"], Int32[Array, "B"]]:
    """Separate the leading one-token sequences (decode rows) from the rest of a ragged batch.

    Row i of q belongs to decode sequence i.

    Returns:
        `query_start_loc` for prefill, in which the decode sequences have no rows; and `seq_lens`
        for decode, in which all other sequences have length 0.
    """
    batch = seq_lens.shape[0]
    sequence_index = jnp.arange(batch, dtype=jnp.int32)
    is_longer = query_start_loc[1:] - query_start_loc[:-1] != 1
    num_rows = jnp.min(jnp.where(is_longer, sequence_index, jnp.int32(batch)))
    return jnp.maximum(query_start_loc, num_rows), jnp.where(sequence_index < num_rows, seq_lens, 0)


class TileMap(NamedTuple):
    """Tiles of a ragged batch, each with rows of at most one sequence (see `tile_map`).

    The padding rows after the last sequence have tiles too, with no keys.

    Attributes:
        sequence: Index of the tile's sequence.
        first_row: First row of the tile in q.
        first_position: Position of the tile's first row in its sequence.
        num_rows: Number of query tokens; 0 in an empty tile.
        num_keys: Number of keys that the tile's last row sees.
    """

    sequence: Int32[Array, "tiles"]
    first_row: Int32[Array, "tiles"]
    first_position: Int32[Array, "tiles"]
    num_rows: Int32[Array, "tiles"]
    num_keys: Int32[Array, "tiles"]


def max_tiles(num_tokens: int, num_sequences: int, tile_size: int) -> int:
    """Return the maximum number of tiles of a batch. The padding rows count as one more
    sequence."""
    return num_tokens // tile_size + num_sequences + 1


def first_tiles(query_start_loc, tile_size: int):
    """Return the index of the first tile of each sequence [B + 1]. The last entry is the index of
    the first tile of the padding rows."""
    sequence_index = jnp.arange(query_start_loc.shape[0], dtype=jnp.int32)
    return query_start_loc // jnp.int32(tile_size) + sequence_index


def tile_map(
    seq_lens: Int32[Array, "B"],
    query_start_loc: Int32[Array, "B+1"],
    num_tokens: int,
    tile_size: int,
) -> TileMap:
    """Divide a ragged batch of `num_tokens` rows into tiles of at most `tile_size` rows.

    Empty tiles have `num_rows` and `num_keys` 0. All layers of a step use the same map, so XLA
    computes the map once per step.
    """
    tiles = jnp.arange(max_tiles(num_tokens, seq_lens.shape[0], tile_size), dtype=jnp.int32)
    starts = first_tiles(query_start_loc, tile_size)
    sequence = jnp.searchsorted(starts[1:], tiles, side="right", method="compare_all")
    # Sequences have the indices 0 to B - 1. Tiles of the padding rows after the last sequence get
    # the index B.
    sequence = sequence.astype(jnp.int32)
    ends = jnp.append(query_start_loc[1:], jnp.int32(num_tokens))
    first_row = query_start_loc[sequence] + (tiles - starts[sequence]) * jnp.int32(tile_size)
    rows_left = ends[sequence] - first_row
    # Rows of q before the first sequence, if there are any, belong to no sequence.
    num_rows = jnp.where(tiles < starts[sequence], 0, jnp.clip(rows_left, 0, tile_size))
    owner = jnp.minimum(sequence, jnp.int32(seq_lens.shape[0] - 1))
    first_position = seq_lens[owner] - rows_left
    has_keys = (num_rows > 0) & (sequence == owner)
    first_position = jnp.where(has_keys, first_position, 0)
    num_keys = jnp.where(has_keys, first_position + num_rows, 0)
    return TileMap(owner, first_row, first_position, num_rows, num_keys)


class WindowMap(NamedTuple):
    """Tiles of a ragged batch: a tile has the rows of one sequence in one window of q.

    A window is a fixed number of rows, and starts at a multiple of that number. Padding rows have
    tiles too, with a `seq_len` of 0. The entries from index `num_tiles` on are undefined.

    Attributes:
        sequence: Index of the tile's sequence.
        window_index: Index of the window in q.
        first_position: Position in the sequence that row 0 of the window has; negative if the
            sequence starts inside the window.
        begin, end: Range of the tile's rows within the window.
        seq_len: Number of tokens of the sequence.
        num_tiles: Number of valid tiles.
    """

    sequence: Int32[Array, "tiles"]
    window_index: Int32[Array, "tiles"]
    first_position: Int32[Array, "tiles"]
    begin: Int32[Array, "tiles"]
    end: Int32[Array, "tiles"]
    seq_len: Int32[Array, "tiles"]
    num_tiles: Int32[Array, ""]


def window_map(
    seq_lens: Int32[Array, "B"],
    query_start_loc: Int32[Array, "B+1"],
    num_tokens: int,
    window: int,
) -> WindowMap:
    """Divide a ragged batch of `num_tokens` rows into tiles within windows of `window` rows.

    If several sequences have rows in a window, each of these sequences gets a tile. The first
    `num_tiles` tiles are never empty, so a kernel can divide them evenly among its programs.
    """
    size, batch = jnp.int32(window), seq_lens.shape[0]
    starts = query_start_loc
    ends = jnp.append(query_start_loc[1:], jnp.int32(num_tokens))
    first_window = starts // size
    counts = jnp.where(ends > starts, (ends - 1) // size - first_window + 1, 0)
    lasts = jnp.cumsum(counts)
    tiles = jnp.arange(-(-num_tokens // window) + batch, dtype=jnp.int32)
    owner = jnp.searchsorted(lasts, tiles, side="right", method="compare_all").astype(jnp.int32)
    # Sequences have the indices 0 to `batch` - 1. Tiles of the padding rows after the last sequence
    # get the index `batch`.
    owner = jnp.minimum(owner, batch)
    first_row = (first_window[owner] + tiles - (lasts - counts)[owner]) * size
    end = jnp.clip(ends[owner] - first_row, 0, window)
    sequence = jnp.minimum(owner, batch - 1)
    seq_len = jnp.where(owner == sequence, seq_lens[sequence], 0)
    first_position = jnp.where(owner == sequence, seq_len - ends[owner] + first_row, 0)
    return WindowMap(
        sequence=sequence,
        window_index=first_row // size,
        first_position=first_position,
        begin=jnp.clip(starts[owner] - first_row, 0, window),
        end=end,
        seq_len=seq_len,
        num_tiles=lasts[-1],
    )
