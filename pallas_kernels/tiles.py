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
    """Per tile: its sequence, its first token's row in q and its position, its number of rows."""

    sequence: Int32[Array, "tiles"]
    first_row: Int32[Array, "tiles"]
    first_position: Int32[Array, "tiles"]
    num_rows: Int32[Array, "tiles"]


def num_tiles(num_tokens: int, num_sequences: int, tile_size: int) -> int:
    """How many tiles a batch may need at most (static)."""
    return num_tokens // tile_size + num_sequences


def first_tiles(query_start_loc, tile_size: int):
    """[B + 1]: each sequence's first tile, and the end of the last sequence's tiles."""
    order = jnp.arange(query_start_loc.shape[0], dtype=jnp.int32)
    return query_start_loc // jnp.int32(tile_size) + order


def tile_map(
    query_start_loc: Int32[Array, "B1"],
    seq_lens: Int32[Array, "B"],
    num_tokens: int,
    tile_size: int,
) -> TileMap:
    """The map for every tile; tiles that own no token have `num_rows` 0.

    It depends on nothing of a layer, so XLA computes it once a step for all layers.
    """
    num_sequences = seq_lens.shape[0]
    tiles = jnp.arange(num_tiles(num_tokens, num_sequences, tile_size), dtype=jnp.int32)
    starts = first_tiles(query_start_loc, tile_size)
    sequence = jnp.searchsorted(starts[1:], tiles, side="right", method="compare_all")
    sequence = jnp.minimum(sequence.astype(jnp.int32), jnp.int32(num_sequences - 1))
    offset = (tiles - starts[sequence]) * jnp.int32(tile_size)
    first_row = query_start_loc[sequence] + offset
    query_len = query_start_loc[sequence + 1] - query_start_loc[sequence]
    first_position = seq_lens[sequence] - query_len + offset
    num_rows = jnp.clip(query_len - offset, 0, tile_size)
    return TileMap(sequence, first_row, first_position, num_rows)
