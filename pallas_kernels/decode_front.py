"""The new token of a decode step, inside the attention kernel: heads of the fused projection summed
from its parts, normalized and rotated in registers, as rope_write.py does it in memory.

What is rotated together lies H / 2 apart, and values in registers cannot be sliced: a head is
loaded twice, the second time with its halves exchanged.
"""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu


@dataclasses.dataclass(frozen=True)
class Front:
    """Of the projection: its heads, its parts, the eps of the heads' norms, the dtype rounded to."""

    num_heads: int
    num_kv_heads: int
    num_parts: int
    eps: float | None
    dtype: Any


class NewToken:
    """A sequence's new token, as one KV head sees it; used while a kernel is traced.

    Its references: the projection's heads [parts * B * (N + 2K), H], the cosines and sines
    [B, H / 2], and where heads are normalized the weights [H] of queries and keys.
    """

    def __init__(self, front: Front, refs, sequence, kv_head, pool_dtype):
        self.front, self.pool_dtype = front, pool_dtype
        self.heads_ref, self.cos_ref, self.sin_ref, *self.weight_refs = refs
        total_heads = front.num_heads + 2 * front.num_kv_heads
        self.part_rows = self.heads_ref.shape[0] // front.num_parts
        self.sequence, self.kv_head, self.first_row = sequence, kv_head, sequence * total_heads

    def queries(self, row, live):
        """[rows, next power of two of H] of the pool's dtype."""
        group = self.front.num_heads // self.front.num_kv_heads
        rows = self.first_row + self.kv_head * group + row
        return self._rotated(rows, live, 0).astype(self.pool_dtype)

    def key_and_value(self, wanted):
        """Two [1, next power of two of H] of the pool's dtype; anything finite if not wanted."""
        rows = (self.first_row + self.front.num_heads + self.kv_head)[None]
        key = self._rotated(rows, wanted[None], 1)
        value = self._load(rows + self.front.num_kv_heads, wanted[None], exchanged=False)
        return key.astype(self.pool_dtype), value.astype(self.pool_dtype)

    def _rotated(self, rows, live, weight):
        own, other = (self._load(rows, live, exchanged) for exchanged in (False, True))
        if self.weight_refs:
            squares = jnp.sum(own * own, axis=1)
            size = jnp.float32(self.heads_ref.shape[1])
            scale = lax.rsqrt(squares / size + jnp.float32(self.front.eps))[:, None]
            own, other = (
                self._round(half * scale * self._weight(weight, exchanged))
                for half, exchanged in ((own, False), (other, True))
            )
        column = self._column()
        half = self.heads_ref.shape[1] // 2
        angle = jnp.where(column < half, column, column - half)
        cos, sin = (self._angle(ref, angle) for ref in (self.cos_ref, self.sin_ref))
        sin = jnp.where(column < half, -sin, sin)
        return self._round(own * cos[None, :] + other * sin[None, :])

    def _load(self, rows, live, exchanged):
        """Heads summed over the parts and rounded, in float32; zeros where not live."""
        column = self._column(exchanged)
        shape = (rows.shape[0], column.shape[0])
        columns = jnp.broadcast_to(column[None, :], shape)
        mask = jnp.broadcast_to(live[:, None], shape) & (columns < self.heads_ref.shape[1])

        def part(number):
            row = jnp.broadcast_to((rows + number * self.part_rows)[:, None], shape)
            return plgpu.load(self.heads_ref.at[row, columns], mask=mask, other=0)

        parts = [part(number) for number in range(self.front.num_parts)]
        return self._round(functools.reduce(jnp.add, parts))

    def _round(self, x):
        return x.astype(self.front.dtype).astype(jnp.float32)

    def _weight(self, number, exchanged):
        column = self._column(exchanged)
        ref = self.weight_refs[number]
        weight = plgpu.load(ref.at[column], mask=column < ref.shape[0], other=0)
        return weight.astype(jnp.float32)[None, :]

    def _angle(self, ref, column):
        row = jnp.full_like(column, self.sequence)
        return plgpu.load(ref.at[row, column], mask=column < ref.shape[1], other=0)

    def _column(self, exchanged=False):
        """Columns of a head, or of its halves exchanged."""
        size = self.heads_ref.shape[1]
        column = jnp.arange(pl.next_power_of_2(size), dtype=jnp.int32)
        if not exchanged:
            return column
        half = size // 2
        swapped = jnp.where(column < half, column + half, column - half)
        return jnp.where(column < size, swapped, column)
