"""Pieces that the attention kernels share, all on values in registers.

Arrays are seen as matrices of rows of H elements (a free reshape outside the kernel): q's row is
token * N + head, the pool's is (block * S + offset) * K + KV head. Tiles have power-of-two sides,
and 16 columns at least: those past the head size are masked. A masked-out score is a large negative
number instead of -inf, so that a row with no key yet needs no special case: what it gathers
meanwhile is scaled by exp2(MASKED - score) = 0 as soon as it sees its first key.
"""

import math

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

MASKED = -1e30
_LOG2_E = math.log2(math.e)
_MIN_WIDTH = 16  # of either factor of a tensor core's GEMM


def tile_width(head_size):
    """Columns of a tile of heads: the next power of two, 16 at least."""
    return max(_MIN_WIDTH, pl.next_power_of_2(head_size))


def load_rows(ref, rows, head_size, live=None):
    """Tile [len(rows), tile_width(head_size)] of a matrix; zeros where not live and past the head
    size."""
    index, mask = _tile_index(rows, head_size, live)
    if mask is None:
        return plgpu.load(ref.at[index])
    return plgpu.load(ref.at[index], mask=mask, other=0)


def store_rows(ref, rows, head_size, value, live):
    """The inverse of `load_rows`, in ref's dtype."""
    # The interpreter writes old values back where the mask is off, over rows just written if their
    # indices meet; outside the matrix it writes nothing.
    rows = jnp.where(live, rows, ref.shape[0])
    index, mask = _tile_index(rows, head_size, live)
    plgpu.store(ref.at[index], value.astype(ref.dtype), mask=mask)


def repeat_rows(x, repeats):
    """Each entry along the first axis so many times, one after the other; of powers of two."""
    shape = (x.shape[0], repeats, *x.shape[1:])
    axes = (0, *range(2, len(shape)))
    return lax.broadcast_in_dim(x, shape, axes).reshape(-1, *x.shape[1:])


def pool_rows(tables_ref, first_entry, positions, live, *, block_size, num_kv_heads, head):
    """Pool rows of the keys at `positions`; `first_entry` is where the block table starts."""
    size = jnp.int32(block_size)
    # Not // and %: they also handle negative numbers, which costs instructions.
    entries = first_entry + lax.div(positions, size)
    if live is None:
        blocks = plgpu.load(tables_ref.at[entries])
    else:
        blocks = plgpu.load(tables_ref.at[entries], mask=live, other=0)
    return (blocks * size + lax.rem(positions, size)) * num_kv_heads + head


def scores(q, keys, mask, *, scale, soft_cap):
    """q . keys in units of log2 e, float32 [rows, keys]; mask (or None) is of that shape."""
    product = plgpu.dot(q, keys.T, precision=lax.Precision.HIGHEST)
    result = _scaled(product, scale, soft_cap)
    return result if mask is None else jnp.where(mask, result, jnp.float32(MASKED))


def scores_of_one(q, key, *, scale, soft_cap):
    """The same for one key [1, H]: float32 [rows]."""
    products = q.astype(jnp.float32) * key.astype(jnp.float32)
    return _scaled(jnp.sum(products, axis=1), scale, soft_cap)


def _scaled(product, scale, soft_cap):
    if soft_cap is None:
        return product * jnp.float32(scale * _LOG2_E)
    capped = jnp.tanh(product * jnp.float32(scale / soft_cap))
    return capped * jnp.float32(soft_cap * _LOG2_E)


def softmax_start(num_rows, head_size):
    """Running (max, sum, output) before the first key."""
    row_max = jnp.full((num_rows,), MASKED, jnp.float32)
    out = jnp.zeros((num_rows, tile_width(head_size)), jnp.float32)
    return row_max, jnp.zeros((num_rows,), jnp.float32), out


def softmax_start_from(score, value, seen):
    """The same after one key, of `score` [rows] and `value` [1, H], if that is seen."""
    shape = (score.shape[0], value.shape[1])
    out = jnp.broadcast_to(value.astype(jnp.float32), shape)
    row_sum = jnp.where(seen, jnp.ones_like(score), jnp.zeros_like(score))
    out = jnp.where(seen, out, jnp.zeros_like(out))
    return jnp.where(seen, score, jnp.full_like(score, MASKED)), row_sum, out


def softmax_fold(carry, tile_scores, values):
    """Fold one tile of keys into the running (max, sum, output)."""
    row_max, row_sum, out = carry
    new_max = jnp.maximum(row_max, jnp.max(tile_scores, axis=1))
    rescale = jnp.exp2(row_max - new_max)
    weights = jnp.exp2(tile_scores - new_max[:, None])
    row_sum = row_sum * rescale + jnp.sum(weights, axis=1)
    update = plgpu.dot(weights.astype(values.dtype), values, precision=lax.Precision.HIGHEST)
    return new_max, row_sum, out * rescale[:, None] + update


def softmax_finish(carry):
    """The output rows; zeros for rows that saw no key."""
    _, row_sum, out = carry
    return out / jnp.where(row_sum == 0, jnp.float32(1), row_sum)[:, None]


def _tile_index(rows, head_size, live):
    """Indices and mask of a tile: every index has the tile's full shape, as Pallas wants it."""
    width = tile_width(head_size)
    shape = (rows.shape[0], width)
    columns = lax.broadcasted_iota(jnp.int32, shape, 1)
    mask = None if live is None else jnp.broadcast_to(live[:, None], shape)
    if width != head_size:
        inside = columns < head_size
        mask = inside if mask is None else mask & inside
    return (jnp.broadcast_to(rows[:, None], shape), columns), mask
