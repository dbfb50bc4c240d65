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


class TileMap(NamedTuple):
    """Per tile: its sequence, first row in q, that row's position, number of rows, and of keys.

    The padding rows of q, behind the last sequence's, have tiles too: these have no keys.
    """

    sequence: Int32[Array, "tiles"]
    first_row: Int32[Array, "tiles"]
    first_position: Int32[Array, "tiles"]
    num_rows: Int32[Array, "tiles"]
    num_keys: Int32[Array, "tiles"]


def num_tiles(num_tokens: int, num_sequences: int, tile_size: int) -> int:
    """How many tiles a batch may need at most (static); padding counts as one more sequence."""
    return num_tokens // tile_size + num_sequences + 1


def first_tiles(query_start_loc, tile_size: int):
    """[B + 1]: each sequence's first tile, and the padding's."""
    order = jnp.arange(query_start_loc.shape[0], dtype=jnp.int32)
    return query_start_loc // jnp.int32(tile_size) + order


def tile_map(
    seq_lens: Int32[Array, "B"],
    query_start_loc: Int32[Array, "B+1"],
    num_tokens: int,
    tile_size: int,
) -> TileMap:
    """The map for every tile; tiles that own no token have `num_rows` and `num_keys` 0.

    It depends on nothing of a layer, so XLA computes it once a step for all layers.
    """
    tiles = jnp.arange(num_tiles(num_tokens, seq_lens.shape[0], tile_size), dtype=jnp.int32)
    starts = first_tiles(query_start_loc, tile_size)
    sequence = jnp.searchsorted(starts[1:], tiles, side="right", method="compare_all")
    sequence = sequence.astype(jnp.int32)  # B: padding
    ends = jnp.append(query_start_loc[1:], jnp.int32(num_tokens))
    first_row = query_start_loc[sequence] + (tiles - starts[sequence]) * jnp.int32(tile_size)
    rows_left = ends[sequence] - first_row
    num_rows = jnp.clip(rows_left, 0, tile_size)
    owner = jnp.minimum(sequence, jnp.int32(seq_lens.shape[0] - 1))
    first_position = seq_lens[owner] - rows_left
    has_keys = (num_rows > 0) & (sequence == owner)
    first_position = jnp.where(has_keys, first_position, 0)
    num_keys = jnp.where(has_keys, first_position + num_rows, 0)
    return TileMap(owner, first_row, first_position, num_rows, num_keys)
