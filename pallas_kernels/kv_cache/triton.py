"""Writes and copies in the KV pool in Pallas Triton, one launch per op.

The pools are aliased to the outputs, so that the kernels update them in place.

write_kv        Grid (token, chunk of columns); a slot is one row of K * H elements:
                    slot = slot_mapping[token]
                    pool_k[slot, chunk], pool_v[slot, chunk] = k[token, chunk], v[token, chunk]
rope_write_kv   Grid (tile of tokens, tile of heads). The heads of a tile are all query heads, all
                key heads, or all value heads. One program, for its tokens and heads:
                    first, second = halves of the rows of qkv; partials are summed and rounded
                    for q and k: multiply by 1 / rms(head) and the norm's weight if the model has
                        head norms, round, then rotate if the model does:
                        first * cos - second * sin, second * cos + first * sin
                    q -> rows of the result; k, v -> rows of the pool at slot_mapping[token]
                In an FP8 pool, k and v are divided by their scales, rounded and packed in pairs
                (`xla.to_pool_dtype`). No pair crosses the middle of a head.
                The halves of a head are separate tiles: the rotation combines columns that are half
                a head apart, and Triton cannot slice a tile in registers.
copy_blocks     Grid (pair, chunk of a block, array). `array` is the index of a K or V pool of any
                layer. Each pool is a separate argument, and a program branches to its array:
                    source, target = src[pair], dst[pair]
                    if source != target:                        (0, 0) is padding
                        arrays[array][target, chunk] = arrays[array][source, chunk]
                The public op requires independent pairs, so programs may run in any order.
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
    """Launch parameters of `write_kv` and `copy_blocks`.

    Attributes:
        chunk: Elements that a program moves.
        num_warps: Warps per program.
    """

    chunk: int = 2048
    num_warps: int = 4


@dataclasses.dataclass(frozen=True)
class RopeWriteConfig:
    """Launch parameters of `rope_write_kv`.

    Attributes:
        tile_rows: Rows per program, a power of two; a row is one head of one token.
        num_warps: Warps per program.
    """

    tile_rows: int
    num_warps: int = 4


def move_config(op: str, *, head_size: int, itemsize: int, device_kind: str = "") -> MoveConfig:
    """Return the launch parameters of `op`, "write" or "copy"."""
    return tuning.apply_tuned_config(op, head_size, itemsize, device_kind, MoveConfig())


def rope_write_config(*, head_size: int, itemsize: int, device_kind: str = "") -> RopeWriteConfig:
    """Return the launch parameters of `rope_write_kv`.

    A tile has about 1,024 elements. Each thread handles eight, which are one 16-byte load in
    bfloat16.
    """
    config = RopeWriteConfig(max(1, 1024 // pl.next_power_of_2(head_size)))
    return tuning.apply_tuned_config("rope_write", head_size, itemsize, device_kind, config)


def write_kv(kv, k, v, slot_mapping, scales, *, config: MoveConfig, interpret: bool):
    """Run the public op `write_kv` in Pallas Triton."""
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
        pool_columns = pl.program_id(1) * row.size + jnp.arange(row.size, dtype=jnp.int32)
        target = jnp.full_like(pool_columns, jnp.where(valid, slot, 0)), pool_columns
        plgpu.store(pool_ref.at[target], row, mask=(pool_columns < pool_ref.shape[1]) & valid)


def rope_write_kv(
    qkv, kv, slot_mapping, angles, norms, scales, *, dtype, config: RopeWriteConfig, interpret: bool
):
    """Run the public op `rope_write_kv` in Pallas Triton."""
    _, num_tokens, total_heads, head_size = qkv.shape
    num_kv_heads = kv.k.shape[2]
    num_heads = total_heads - 2 * num_kv_heads
    # `tile_heads` divides the number of KV heads, and therefore the number of query heads. So every
    # tile has only query heads, only key heads, or only value heads.
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
    tile_row = jnp.arange(tile_tokens * tile_heads, dtype=jnp.int32)
    token = pl.program_id(0) * tile_tokens + tile_row // tile_heads
    first_head = pl.program_id(1) * tile_heads
    head = first_head + tile_row % tile_heads
    live = token < num_tokens
    rows = token * total_heads + head
    partials = [
        _load_halves(qkv_ref, rows + first_row, live)
        for first_row in range(0, qkv_ref.shape[0], num_tokens * total_heads)
    ]
    sums = (functools.reduce(jnp.add, same_half) for same_half in zip(*partials, strict=True))
    halves = [half.astype(q_ref.dtype) for half in sums]

    def rotate_heads(weight_ref):
        float_halves = [half.astype(jnp.float32) for half in halves]
        first, second = (
            float_halves if weight_ref is None else _normalize(float_halves, weight_ref, q_ref, eps)
        )
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
        # Round to the queries' dtype first, so that keys do not depend on the pool's dtype.
        rotated_k = [half.astype(q_ref.dtype) for half in rotate_heads(k_weight)]
        store_kv(k_ref, rotated_k, first_k, k_scale)

    @pl.when(first_head >= first_v)
    def _values():
        store_kv(v_ref, halves, first_v, v_scale)


def _normalize(halves, weight_ref, q_ref, eps):
    """Apply RMSNorm to each head.

    Args:
        halves: The first and the second half of each head's channels, float32 [rows, W] each. A row
            is one head of one token. W is H / 2 rounded up to a power of two.
        weight_ref: Weights of the norm [H].
        q_ref: Output array of the queries. Only the dtype and the head size are used.
        eps: Number that is added to the mean square.

    Returns:
        The two halves of each normalized head's channels, in float32. Each value is first rounded
        to the dtype of `q_ref`.
    """
    squares = sum(jnp.sum(half * half, axis=1) for half in halves)
    scale = lax.rsqrt(squares / jnp.float32(q_ref.shape[1]) + jnp.float32(eps))
    weights = _load_weights(weight_ref)
    normed = (half * scale[:, None] * w[None, :] for half, w in zip(halves, weights, strict=True))
    return [half.astype(q_ref.dtype).astype(jnp.float32) for half in normed]


def _load_weights(ref):
    """Load both halves of a weight [H] in float32."""
    half = ref.shape[0] // 2
    columns = jnp.arange(pl.next_power_of_2(half), dtype=jnp.int32)
    inside = columns < half
    halves = (plgpu.load(ref.at[columns + start], mask=inside, other=0) for start in (0, half))
    return [each.astype(jnp.float32) for each in halves]


def _load_angles(ref, token, live):
    """Load the cosines or the sines of each row's token; zeros for rows where `live` is false.

    The result is [len(token), W], where W is H / 2 rounded up to a power of two.
    """
    half = ref.shape[1]
    shape = (token.shape[0], pl.next_power_of_2(half))
    columns = lax.broadcasted_iota(jnp.int32, shape, 1)
    mask = jnp.broadcast_to(live[:, None], shape) & (columns < half)
    index = jnp.broadcast_to(token[:, None], shape), columns
    return plgpu.load(ref.at[index], mask=mask, other=0)


def _load_halves(ref, rows, live):
    """Load both halves of each head's channels; zeros for rows where `live` is false.

    Each half is [len(rows), W], where W is H / 2 rounded up to a power of two.
    """
    tiles = _half_tiles(ref, rows, live)
    return [plgpu.load(ref.at[index], mask=mask, other=0) for index, mask in tiles]


def _store_halves(ref, rows, halves, live, scale=None):
    # The Pallas interpreter also stores masked rows, and could overwrite new values with old ones.
    # It ignores rows past the end of the array, so masked rows get an index past the end.
    rows = jnp.where(live, rows, ref.shape[0])
    for (index, mask), half in zip(_half_tiles(ref, rows, live), halves, strict=True):
        plgpu.store(ref.at[index], to_pool_dtype(half, ref.dtype, scale), mask=mask)


def _half_tiles(ref, rows, live):
    """Return two (index, mask) pairs, which select the left and the right half of each row."""
    half = ref.shape[1] // 2
    shape = (rows.shape[0], pl.next_power_of_2(half))
    columns = lax.broadcasted_iota(jnp.int32, shape, 1)
    mask = jnp.broadcast_to(live[:, None], shape) & (columns < half)
    row = jnp.broadcast_to(rows[:, None], shape)
    return [((row, columns + start), mask) for start in (0, half)]


def copy_blocks(pool, src, dst, *, config: MoveConfig, interpret: bool):
    """Run the public op `copy_blocks` in Pallas Triton."""
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
    # The second half of the references are the outputs, which alias the inputs.
    pools = refs[len(refs) // 2 :]
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
