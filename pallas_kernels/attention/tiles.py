"""The tile map of ragged prefill: which query tokens of which sequence each tile owns.

T flattened tokens of B sequences are cut into tiles of `tile_size` query tokens, none shared by
two sequences. Sequence b's first tile is `query_start_loc[b] // tile_size + b`: whatever the
lengths, that leaves room for its `ceil(length / tile_size)` tiles before the next sequence's first
one, so the map needs no prefix sum and the number of tiles, `T // tile_size + B`, is static.
A few tiles own nothing.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int32


def split_decode_rows(
    seq_lens: Int32[Array, "B"], query_start_loc: Int32[Array, "B+1"]
) -> tuple[Int32[Array, "B+1"], Int32[Array, "B"]]:
    """Take the leading one-token sequences, whose row is their own index, out of a ragged batch.

    Returns the starts of what is left, in which those have no rows and no sequence has the first
    rows; and for a decode over these rows the lengths, 0 for all other sequences.
    """
    batch = seq_lens.shape[0]
    sequence_index = jnp.arange(batch, dtype=jnp.int32)
    is_longer = query_start_loc[1:] - query_start_loc[:-1] != 1
    num_rows = jnp.min(jnp.where(is_longer, sequence_index, jnp.int32(batch)))
    return jnp.maximum(query_start_loc, num_rows), jnp.where(sequence_index < num_rows, seq_lens, 0)


class TileMap(NamedTuple):
    """Per tile: its sequence, first row in q, that row's position, number of rows, and of keys.

    The padding rows of q, behind the last sequence's, have tiles too: these have no keys.
    """

    sequence: Int32[Array, "tiles"]
    first_row: Int32[Array, "tiles"]
    first_position: Int32[Array, "tiles"]
    num_rows: Int32[Array, "tiles"]
    num_keys: Int32[Array, "tiles"]


def max_tiles(num_tokens: int, num_sequences: int, tile_size: int) -> int:
    """How many tiles a batch may need at most (static); padding counts as one more sequence."""
    return num_tokens // tile_size + num_sequences + 1


def first_tiles(query_start_loc, tile_size: int):
    """[B + 1]: each sequence's first tile, and the padding's."""
    sequence_index = jnp.arange(query_start_loc.shape[0], dtype=jnp.int32)
    return query_start_loc // jnp.int32(tile_size) + sequence_index


def tile_map(
    seq_lens: Int32[Array, "B"],
    query_start_loc: Int32[Array, "B+1"],
    num_tokens: int,
    tile_size: int,
) -> TileMap:
    """The map for every tile; tiles that own no token have `num_rows` and `num_keys` 0.

    It depends on nothing of a layer, so XLA computes it once a step for all layers.
    """
    tiles = jnp.arange(max_tiles(num_tokens, seq_lens.shape[0], tile_size), dtype=jnp.int32)
    starts = first_tiles(query_start_loc, tile_size)
    sequence = jnp.searchsorted(starts[1:], tiles, side="right", method="compare_all")
    sequence = sequence.astype(jnp.int32)  # B: padding
    ends = jnp.append(query_start_loc[1:], jnp.int32(num_tokens))
    first_row = query_start_loc[sequence] + (tiles - starts[sequence]) * jnp.int32(tile_size)
    rows_left = ends[sequence] - first_row
    # Rows before the first sequence's, if any, belong to none.
    num_rows = jnp.where(tiles < starts[sequence], 0, jnp.clip(rows_left, 0, tile_size))
    owner = jnp.minimum(sequence, jnp.int32(seq_lens.shape[0] - 1))
    first_position = seq_lens[owner] - rows_left
    has_keys = (num_rows > 0) & (sequence == owner)
    first_position = jnp.where(has_keys, first_position, 0)
    num_keys = jnp.where(has_keys, first_position + num_rows, 0)
    return TileMap(owner, first_row, first_position, num_rows, num_keys)


class WindowMap(NamedTuple):
    """Tiles that are aligned in q: a window of rows, cut down to the rows of one sequence.

    Tile i < num_tiles owns rows `begin` to `end` of window `window`; the window's row 0 would be at
    `first_position`, which is negative if the sequence begins in the window. Padding rows have
    tiles too, with no keys and a `seq_len` of 0. The tiles from num_tiles on mean nothing.
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
    """The tiles of `num_tokens` rows in windows of `window` rows, none shared by two sequences.

    Packed: no tile before num_tiles is empty, for kernels that share them out evenly.
    """
    size, batch = jnp.int32(window), seq_lens.shape[0]
    starts = query_start_loc
    ends = jnp.append(query_start_loc[1:], jnp.int32(num_tokens))
    first_window = starts // size
    counts = jnp.where(ends > starts, (ends - 1) // size - first_window + 1, 0)
    lasts = jnp.cumsum(counts)
    tiles = jnp.arange(-(-num_tokens // window) + batch, dtype=jnp.int32)
    owner = jnp.searchsorted(lasts, tiles, side="right", method="compare_all").astype(jnp.int32)
    owner = jnp.minimum(owner, batch)  # batch: padding
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
