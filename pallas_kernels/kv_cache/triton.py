"""Writes and copies in the KV pool in Pallas Triton, each in one launch. The pools are aliased to
the outputs, so nothing else moves.

write_kv        grid (token, chunk of columns); a slot is one row of K * H elements:
                    slot = slot_mapping[token]
                    pool_k[slot, chunk], pool_v[slot, chunk] = k[token, chunk], v[token, chunk]
rope_write_kv   grid (tile of tokens, tile of heads); heads of a tile are all queries, all keys or
                all values. One program, for its heads of its tokens:
                    first, second = both halves of their rows of qkv, its partials summed, rounded
                    q, k: normalized by 1 / rms(head) (where the model does), rounded, then rotated
                          (likewise): first * cos - second * sin, second * cos + first * sin
                    q -> rows of the result; k, v -> rows of the pool at slot_mapping[token]
                Into a scaled pool k and v go divided by their scales, rounded, in pairs
                (`xla.to_pool_dtype`), of which either half has a whole number.
                A head's halves are tiles of their own, since what is rotated together lies H / 2
                apart and values in registers cannot be sliced.
copy_blocks     grid (pair, chunk of a block, array); `array` runs over the K and V pools of all
                layers, each an argument of its own, and a program takes the branch of its array:
                    source, target = src[pair], dst[pair]
                    if source != target:                        (0, 0) is padding
                        arrays[array][target, chunk] = arrays[array][source, chunk]
                Pairs are independent (the public entry demands it): programs need no order.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import tuning
from pallas_kernels.kv_cache.xla import to_pool_dtype
from pallas_kernels.types import LayerKV


@dataclasses.dataclass(frozen=True)
class MoveConfig:
    """Of a write or a copy: elements a program moves, warps."""

    chunk: int = 2048
    num_warps: int = 4


@dataclasses.dataclass(frozen=True)
class RopeWriteConfig:
    """Of a write after rotation: rows (heads of tokens; a power of two) a program, warps."""

    tile_rows: int
    num_warps: int = 4


def move_config(op: str, *, head_size: int, itemsize: int, device_kind: str = "") -> MoveConfig:
    """For `op`, "write" or "copy": 2,048 elements a program keep any GPU's memory busy."""
    return tuning.apply_tuned_config(op, head_size, itemsize, device_kind, MoveConfig())


def rope_write_config(*, head_size: int, itemsize: int, device_kind: str = "") -> RopeWriteConfig:
    """Whole heads of 1,024 elements in all: eight a thread, a 16-byte load in bfloat16."""
    config = RopeWriteConfig(max(1, 1024 // pl.next_power_of_2(head_size)))
    return tuning.apply_tuned_config("rope_write", head_size, itemsize, device_kind, config)


def write_kv(kv, k, v, slot_mapping, scales, *, config: MoveConfig, interpret: bool):
    """See the public entry of the same name."""
    num_tokens, width = k.shape[0], k.shape[1] * k.shape[2]
    chunk = min(config.chunk, pl.next_power_of_2(width))
    pools = [pool.reshape(-1, pool.shape[2] * pool.shape[3]) for pool in kv]
    call = pl.pallas_call(
        functools.partial(_write_kernel, chunk=chunk),
        out_shape=[jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in pools],
        grid=(num_tokens, pl.cdiv(width, chunk)),
        input_output_aliases={0: 0, 1: 1},
        compiler_params=plgpu.CompilerParams(num_warps=config.num_warps, num_stages=1),
        interpret=interpret,
        name="write_kv",
    )
    new_rows = [rows.reshape(num_tokens, width) for rows in (k, v)]
    written = call(*pools, *new_rows, slot_mapping, *(scales or ()))
    return LayerKV(*(pool.reshape(kv.k.shape) for pool in written))


def _write_kernel(_, __, k_ref, v_ref, slots_ref, *refs, chunk):
    *scale_refs, pool_k_ref, pool_v_ref = refs
    token = pl.program_id(0)
    slot = slots_ref[token]
    columns = pl.program_id(1) * chunk + jnp.arange(chunk, dtype=jnp.int32)
    inside = columns < k_ref.shape[1]
    valid = (slot >= 0) & (slot < pool_k_ref.shape[0])
    source = (jnp.full_like(columns, token), columns)
    scales = [ref[0] for ref in scale_refs] or (None, None)
    given = (k_ref, v_ref), (pool_k_ref, pool_v_ref), scales
    for new_ref, pool_ref, scale in zip(*given, strict=True):
        row = plgpu.load(new_ref.at[source], mask=inside, other=0)
        row = to_pool_dtype(row, pool_ref.dtype, scale)
        own = pl.program_id(1) * row.size + jnp.arange(row.size, dtype=jnp.int32)
        target = jnp.full_like(own, jnp.where(valid, slot, 0)), own
        plgpu.store(pool_ref.at[target], row, mask=(own < pool_ref.shape[1]) & valid)


def rope_write_kv(
    qkv, kv, slot_mapping, angles, norms, scales, *, dtype, config: RopeWriteConfig, interpret: bool
):
    """See the public entry of the same name."""
    _, num_tokens, total_heads, head_size = qkv.shape
    num_kv_heads = kv.k.shape[2]
    num_heads = total_heads - 2 * num_kv_heads
    # What divides the KV heads divides the query heads too, so that a tile's are of one kind.
    tile_heads = min(config.tile_rows, num_kv_heads & -num_kv_heads)
    tile_tokens = config.tile_rows // tile_heads
    pools = [pool.reshape(-1, pool.shape[3]) for pool in kv]
    q_shape = jax.ShapeDtypeStruct((num_tokens * num_heads, head_size), dtype)
    call = pl.pallas_call(
        functools.partial(
            _rope_write_kernel,
            num_kv_heads=num_kv_heads,
            tile=(tile_tokens, tile_heads),
            eps=None if norms is None else norms.eps,
        ),
        out_shape=[q_shape, *(jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in pools)],
        grid=(pl.cdiv(num_tokens, tile_tokens), total_heads // tile_heads),
        input_output_aliases={0: 1, 1: 2},
        compiler_params=plgpu.CompilerParams(num_warps=config.num_warps, num_stages=1),
        interpret=interpret,
        name="rope_write_kv",
    )
    weights = () if norms is None else (norms.q, norms.k)
    rows = qkv.reshape(-1, head_size)
    q, k, v = call(*pools, rows, slot_mapping, *(scales or ()), *(angles or ()), *weights)
    shape = (num_tokens, num_heads, head_size)
    return q.reshape(shape), LayerKV(k.reshape(kv.k.shape), v.reshape(kv.v.shape))


def _rope_write_kernel(_, __, qkv_ref, slots_ref, *refs, num_kv_heads, tile, eps):
    *input_refs, q_ref, k_ref, v_ref = refs
    is_scaled = LayerKV(k_ref, v_ref).is_scaled
    scale_refs, input_refs = input_refs[: 2 * is_scaled], input_refs[2 * is_scaled :]
    k_scale, v_scale = [ref[0] for ref in scale_refs] or (None, None)
    num_weights = 0 if eps is None else 2
    angle_refs, weight_refs = (
        input_refs[: len(input_refs) - num_weights],
        input_refs[len(input_refs) - num_weights :],
    )
    (tile_tokens, tile_heads), num_tokens = tile, slots_ref.shape[0]
    num_heads = q_ref.shape[0] // num_tokens
    total_heads = num_heads + 2 * num_kv_heads
    own_row = jnp.arange(tile_tokens * tile_heads, dtype=jnp.int32)
    token = pl.program_id(0) * tile_tokens + own_row // tile_heads
    first_head = pl.program_id(1) * tile_heads
    head = first_head + own_row % tile_heads
    live = token < num_tokens
    rows = token * total_heads + head
    partials = [
        _load_halves(qkv_ref, rows + first_row, live)
        for first_row in range(0, qkv_ref.shape[0], num_tokens * total_heads)
    ]
    sums = (functools.reduce(jnp.add, same_half) for same_half in zip(*partials, strict=True))
    halves = [half.astype(q_ref.dtype) for half in sums]

    def rotate_heads(weight_ref):
        own = [half.astype(jnp.float32) for half in halves]
        first, second = own if weight_ref is None else _normalize(own, weight_ref, q_ref, eps)
        if not angle_refs:
            return first, second
        cos, sin = (_load_angles(ref, token, live) for ref in angle_refs)
        return first * cos - second * sin, second * cos + first * sin

    def store_kv(pool_ref, values, first_of_kind, scale):
        slot = plgpu.load(slots_ref.at[token], mask=live, other=-1)
        valid = (slot >= 0) & (slot < pool_ref.shape[0] // num_kv_heads)
        _store_halves(pool_ref, slot * num_kv_heads + head - first_of_kind, values, valid, scale)

    q_weight, k_weight = weight_refs or (None, None)
    first_k, first_v = num_heads, num_heads + num_kv_heads

    @pl.when(first_head < first_k)
    def _queries():
        _store_halves(q_ref, token * num_heads + head, rotate_heads(q_weight), live)

    @pl.when((first_head >= first_k) & (first_head < first_v))
    def _keys():
        # Rounded as the queries are, whatever the pool's dtype.
        rotated_k = [half.astype(q_ref.dtype) for half in rotate_heads(k_weight)]
        store_kv(k_ref, rotated_k, first_k, k_scale)

    @pl.when(first_head >= first_v)
    def _values():
        store_kv(v_ref, halves, first_v, v_scale)


def _normalize(halves, weight_ref, q_ref, eps):
    """RMSNorm of each head in float32, rounded to q's dtype."""
    squares = sum(jnp.sum(half * half, axis=1) for half in halves)
    scale = lax.rsqrt(squares / jnp.float32(q_ref.shape[1]) + jnp.float32(eps))
    weights = _load_weights(weight_ref)
    normed = (half * scale[:, None] * w[None, :] for half, w in zip(halves, weights, strict=True))
    return [half.astype(q_ref.dtype).astype(jnp.float32) for half in normed]


def _load_weights(ref):
    """Both halves of a weight [H], in float32."""
    half = ref.shape[0] // 2
    columns = jnp.arange(pl.next_power_of_2(half), dtype=jnp.int32)
    inside = columns < half
    halves = (plgpu.load(ref.at[columns + start], mask=inside, other=0) for start in (0, half))
    return [each.astype(jnp.float32) for each in halves]


def _load_angles(ref, token, live):
    """Cosines or sines of each row's token, [len(token), next power of two of H / 2]; zeros where
    not live."""
    half = ref.shape[1]
    shape = (token.shape[0], pl.next_power_of_2(half))
    columns = lax.broadcasted_iota(jnp.int32, shape, 1)
    mask = jnp.broadcast_to(live[:, None], shape) & (columns < half)
    index = jnp.broadcast_to(token[:, None], shape), columns
    return plgpu.load(ref.at[index], mask=mask, other=0)


def _load_halves(ref, rows, live):
    """Two tiles [len(rows), next power of two of H / 2]; zeros where not live."""
    tiles = _half_tiles(ref, rows, live)
    return [plgpu.load(ref.at[index], mask=mask, other=0) for index, mask in tiles]


def _store_halves(ref, rows, halves, live, scale=None):
    # The interpreter writes old values back where the mask is off; outside the array it does not.
    rows = jnp.where(live, rows, ref.shape[0])
    for (index, mask), half in zip(_half_tiles(ref, rows, live), halves, strict=True):
        plgpu.store(ref.at[index], to_pool_dtype(half, ref.dtype, scale), mask=mask)


def _half_tiles(ref, rows, live):
    """Indices and masks of both halves of the rows."""
    half = ref.shape[1] // 2
    shape = (rows.shape[0], pl.next_power_of_2(half))
    columns = lax.broadcasted_iota(jnp.int32, shape, 1)
    mask = jnp.broadcast_to(live[:, None], shape) & (columns < half)
    row = jnp.broadcast_to(rows[:, None], shape)
    return [((row, columns + start), mask) for start in (0, half)]


def copy_blocks(pool, src, dst, *, config: MoveConfig, interpret: bool):
    """See the public entry of the same name."""
    arrays, tree = jax.tree.flatten(pool)
    blocks = [array.reshape(array.shape[0], -1) for array in arrays]
    width = blocks[0].shape[1]
    chunk = min(config.chunk, pl.next_power_of_2(width))
    call = pl.pallas_call(
        functools.partial(_copy_kernel, chunk=chunk),
        out_shape=[jax.ShapeDtypeStruct(array.shape, array.dtype) for array in blocks],
        grid=(src.shape[0], pl.cdiv(width, chunk), len(blocks)),
        input_output_aliases={index + 2: index for index in range(len(blocks))},
        compiler_params=plgpu.CompilerParams(num_warps=config.num_warps, num_stages=1),
        interpret=interpret,
        name="copy_blocks",
    )
    copied = call(src, dst, *blocks)
    shape = arrays[0].shape
    return jax.tree.unflatten(tree, [array.reshape(shape) for array in copied])


def _copy_kernel(src_ref, dst_ref, *refs, chunk):
    pools = refs[len(refs) // 2 :]  # the outputs; the inputs are the same memory
    source, target = src_ref[pl.program_id(0)], dst_ref[pl.program_id(0)]
    columns = pl.program_id(1) * chunk + jnp.arange(chunk, dtype=jnp.int32)
    moves = (columns < pools[0].shape[1]) & (source != target)

    for index, pool_ref in enumerate(pools):

        @pl.when(pl.program_id(2) == index)
        def _(pool_ref=pool_ref):
            rows = plgpu.load(
                pool_ref.at[jnp.full_like(columns, source), columns], mask=moves, other=0
            )
            plgpu.store(pool_ref.at[jnp.full_like(columns, target), columns], rows, mask=moves)
