"""The new token of a decode step, inside the attention kernel: heads of the fused projection summed
from its parts, normalized and rotated in registers, as rope_write.py does it in memory.

What is rotated together lies H / 2 apart, and values in registers cannot be sliced: a head is
loaded twice, the second time with its halves exchanged. All is loaded before anything is computed,
so that a program waits for memory once.
"""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.tile_ops import tile_width


@dataclasses.dataclass(frozen=True)
class Front:
    """Of the projection: heads, parts, the eps of the heads' norms, the dtype rounded to."""

    num_heads: int
    num_kv_heads: int
    num_parts: int
    eps: float | None
    dtype: Any

    @property
    def group(self) -> int:
        """Query heads a KV head."""
        return self.num_heads // self.num_kv_heads


def new_token(front: Front, refs, sequence, kv_head, with_key, pool_dtype):
    """What one KV head has of a sequence's new token, in a kernel.

    Args:
        front: What is known when it is compiled.
        refs: The projection's heads [parts * B * (N + 2K), H], cosines and sines [B, H / 2], and
            where heads are normalized the weights [H] of queries and keys.
        sequence, kv_head: Whose; traced.
        with_key: Whether key and value are wanted; else they are any finite numbers. Traced.
        pool_dtype: Of the results.

    Returns:
        Queries [group, H], key [1, H] and value [1, H]: group in powers of two, H as `tile_width`.
    """
    heads_ref, cos_ref, sin_ref, *weight_refs = refs
    own, exchanged, angle = _columns(heads_ref.shape[1])
    head = jnp.arange(pl.next_power_of_2(front.group), dtype=jnp.int32)
    first = sequence * (front.num_heads + 2 * front.num_kv_heads)
    queries = first + kv_head * front.group + head
    key = jnp.broadcast_to(first + front.num_heads + kv_head, (1,))
    live = head < front.group, jnp.broadcast_to(with_key, (1,))

    def load(rows, live, columns):
        return _load_parts(heads_ref, rows, live, columns, front.num_parts)

    loaded = [
        [load(rows, mask, columns) for columns in (own, exchanged)]
        for rows, mask in zip((queries, key), live, strict=True)
    ]
    value = load(key + front.num_kv_heads, live[1], own)
    cos, sin = (_load_row(ref, sequence, angle) for ref in (cos_ref, sin_ref))
    sin = jnp.where(own < heads_ref.shape[1] // 2, -sin, sin)
    weights = [[_load_weight(ref, columns) for columns in (own, exchanged)] for ref in weight_refs]

    q, k = (
        _rotated(halves, weights[index] if weights else None, cos, sin, front, heads_ref.shape[1])
        for index, halves in enumerate(loaded)
    )
    value = _sum(value, front.dtype)
    return tuple(x.astype(front.dtype).astype(pool_dtype) for x in (q, k, value))


def _columns(size):
    """Of a head: its columns, the same with the halves exchanged, and their angles'."""
    half, column = size // 2, jnp.arange(tile_width(size), dtype=jnp.int32)
    exchanged = jnp.where(column < half, column + half, column - half)
    exchanged = jnp.where(column < size, exchanged, column)
    return column, exchanged, jnp.where(column < half, column, column - half)


def _load_parts(ref, rows, live, columns, num_parts):
    shape = (rows.shape[0], columns.shape[0])
    column = jnp.broadcast_to(columns[None, :], shape)
    mask = jnp.broadcast_to(live[:, None], shape) & (column < ref.shape[1])
    row = jnp.broadcast_to(rows[:, None], shape)
    step = ref.shape[0] // num_parts
    return [
        plgpu.load(ref.at[row + part * step, column], mask=mask, other=0)
        for part in range(num_parts)
    ]


def _load_row(ref, row, columns):
    index = (jnp.full_like(columns, row), columns)
    return plgpu.load(ref.at[index], mask=columns < ref.shape[1], other=0)


def _load_weight(ref, columns):
    weight = plgpu.load(ref.at[columns], mask=columns < ref.shape[0], other=0)
    return weight.astype(jnp.float32)


def _sum(parts, dtype):
    return _rounded(functools.reduce(jnp.add, parts), dtype)


def _rotated(halves, weights, cos, sin, front, size):
    own, exchanged = (_sum(parts, front.dtype) for parts in halves)
    if weights is not None:
        squares = jnp.sum(own * own, axis=1)
        scale = lax.rsqrt(squares / jnp.float32(size) + jnp.float32(front.eps))[:, None]
        own, exchanged = (
            _rounded(half * scale * weight[None, :], front.dtype)
            for half, weight in zip((own, exchanged), weights, strict=True)
        )
    return own * cos[None, :] + exchanged * sin[None, :]


def _rounded(x, dtype):
    return x.astype(dtype).astype(jnp.float32)
