"""Between the fused projection and attention in Pallas Triton, in one launch: norm of the heads,
rotary embedding, keys and values into their slots.

Grid (token, tile of heads); one program:

    first, second = both halves of its heads' rows of qkv, its parts summed and rounded
    q, k: normalized by 1 / rms(head) (where the model does), rounded, then rotated:
          first * cos - second * sin, second * cos + first * sin
    q -> rows of the result; k, v -> rows of the pool at slot_mapping[token]

A head's halves are tiles of their own, since what is rotated together lies H / 2 apart and values
in registers cannot be sliced. The pools are aliased to the outputs, so nothing else moves. A tile
may hold heads of all three kinds: each kind is stored under a mask.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.tuning import RopeConfig
from pallas_kernels.types import LayerKV


def rope_write_kv(
    qkv, kv, slot_mapping, angles, norms, *, dtype, config: RopeConfig, interpret: bool
):
    """See the public entry of the same name."""
    num_parts, num_tokens, total_heads, head_size = qkv.shape
    num_kv_heads = kv.k.shape[2]
    num_heads = total_heads - 2 * num_kv_heads
    tile = min(config.tile_heads, pl.next_power_of_2(total_heads))
    pools = [pool.reshape(-1, head_size) for pool in kv]
    q_shape = jax.ShapeDtypeStruct((num_tokens * num_heads, head_size), dtype)
    call = pl.pallas_call(
        functools.partial(
            _kernel,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            num_parts=num_parts,
            tile=tile,
            eps=None if norms is None else norms.eps,
        ),
        out_shape=[q_shape, *(jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in pools)],
        grid=(num_tokens, pl.cdiv(total_heads, tile)),
        input_output_aliases={0: 1, 1: 2},
        compiler_params=plgpu.CompilerParams(num_warps=config.num_warps, num_stages=1),
        interpret=interpret,
        name="rope_write_kv",
    )
    weights = () if norms is None else (norms.q, norms.k)
    rows = qkv.reshape(-1, head_size)
    q, k, v = call(*pools, rows, slot_mapping, *angles, *weights)
    shape = (num_tokens, num_heads, head_size)
    return q.reshape(shape), LayerKV(k.reshape(kv.k.shape), v.reshape(kv.v.shape))


def _kernel(
    _,
    __,
    qkv_ref,
    slots_ref,
    cos_ref,
    sin_ref,
    *refs,
    num_heads,
    num_kv_heads,
    num_parts,
    tile,
    eps,
):
    *weight_refs, q_ref, k_ref, v_ref = refs
    token, total_heads = pl.program_id(0), num_heads + 2 * num_kv_heads
    head = pl.program_id(1) * tile + jnp.arange(tile, dtype=jnp.int32)
    is_q, is_v = head < num_heads, head >= num_heads + num_kv_heads
    rows, part_rows = token * total_heads + head, qkv_ref.shape[0] // num_parts
    parts = [
        _load_halves(qkv_ref, rows + part * part_rows, head < total_heads)
        for part in range(num_parts)
    ]
    sums = (functools.reduce(jnp.add, same_half) for same_half in zip(*parts, strict=True))
    raw = [half.astype(q_ref.dtype) for half in sums]
    halves = [half.astype(jnp.float32) for half in raw]
    if weight_refs:
        halves = _normalize(halves, weight_refs, is_q, q_ref, eps)
    cos, sin = (_angles(ref, token)[None, :] for ref in (cos_ref, sin_ref))
    first, second = halves
    rotated = (first * cos - second * sin, second * cos + first * sin)
    rotated = [half.astype(q_ref.dtype) for half in rotated]

    _store_halves(q_ref, token * num_heads + head, rotated, is_q)
    slot = slots_ref[token]
    valid = (slot >= 0) & (slot < k_ref.shape[0] // num_kv_heads)
    first_row = slot * num_kv_heads - num_heads
    is_k = (~is_q) & (~is_v)
    _store_halves(k_ref, first_row + head, rotated, is_k & valid)
    is_v &= (head < total_heads) & valid
    _store_halves(v_ref, first_row - num_kv_heads + head, raw, is_v)


def _normalize(halves, weight_refs, is_q, q_ref, eps):
    """RMSNorm of each head in float32, rounded to q's dtype."""
    squares = sum(jnp.sum(half * half, axis=1) for half in halves)
    scale = lax.rsqrt(squares / jnp.float32(q_ref.shape[1]) + jnp.float32(eps))
    weights = zip(*(_load_weights(ref) for ref in weight_refs), strict=True)
    normed = []
    for half, (q_weight, k_weight) in zip(halves, weights, strict=True):
        weight = jnp.where(is_q[:, None], q_weight[None, :], k_weight[None, :])
        rounded = (half * scale[:, None] * weight).astype(q_ref.dtype)
        normed.append(rounded.astype(jnp.float32))
    return normed


def _load_weights(ref):
    """Both halves of a weight [H], in float32."""
    half = ref.shape[0] // 2
    columns = jnp.arange(pl.next_power_of_2(half), dtype=jnp.int32)
    inside = columns < half
    parts = (plgpu.load(ref.at[columns + start], mask=inside, other=0) for start in (0, half))
    return [part.astype(jnp.float32) for part in parts]


def _angles(ref, token):
    half = ref.shape[1]
    columns = jnp.arange(pl.next_power_of_2(half), dtype=jnp.int32)
    index = (jnp.full_like(columns, token), columns)
    return plgpu.load(ref.at[index], mask=columns < half, other=0)


def _load_halves(ref, rows, live):
    """Two tiles [len(rows), next power of two of H / 2]; zeros where not live."""
    tiles = _half_tiles(ref, rows, live)
    return [plgpu.load(ref.at[index], mask=mask, other=0) for index, mask in tiles]


def _store_halves(ref, rows, halves, live):
    # The interpreter writes old values back where the mask is off; outside the array it does not.
    rows = jnp.where(live, rows, ref.shape[0])
    for (index, mask), half in zip(_half_tiles(ref, rows, live), halves, strict=True):
        plgpu.store(ref.at[index], half.astype(ref.dtype), mask=mask)


def _half_tiles(ref, rows, live):
    """Indices and masks of both halves of the rows."""
    half = ref.shape[1] // 2
    shape = (rows.shape[0], pl.next_power_of_2(half))
    columns = lax.broadcasted_iota(jnp.int32, shape, 1)
    mask = jnp.broadcast_to(live[:, None], shape) & (columns < half)
    row = jnp.broadcast_to(rows[:, None], shape)
    return [((row, columns + start), mask) for start in (0, half)]
