"""Paged attention in plain XLA, for any device.

An online softmax runs over chunks of about 128 keys, gathered through the block table:

    for chunk in the chunks between the sliding window's start and the longest seq_len:
        k, v   = pool[block_tables[:, blocks of the chunk]]    # [.., C, K, H], no repeat for GQA
        scores = q . k, masked by position                     # [.., K, rows, C]
        max, sum, out = update of the running softmax, float32

The loop bounds are computed from the sequence lengths at run time. Memory is therefore one chunk,
and time depends on the lengths, not on the width of the block table. Decode runs one loop for all
sequences. Prefill runs one loop per tile of query rows (see tiles.py).

Masked values are replaced by zero and not multiplied by zero, since an unused slot may hold NaN. In
an FP8 pool, the scale of the keys multiplies the queries and the scale of the values the output.

Online softmax: Milakov and Gimelshein 2018, arXiv:1805.02867. Paged attention: Kwon et al. 2023,
arXiv:2309.06180.
"""

import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention.tiles import first_tiles, tile_map
from pallas_kernels.kv_cache.xla import rope_write_kv
from pallas_kernels.types import unpack_fp8_pairs

# The loop handles `_KEYS_PER_CHUNK` keys per step. With fewer keys, the GEMMs are less efficient on
# a CPU.
_KEYS_PER_CHUNK = 128


def paged_decode_attention(
    q, kv, block_tables, seq_lens, *, scale, soft_cap, sliding_window, scales=None
):
    """Run the public op `paged_decode_attention` in plain XLA."""
    if not q.size:
        return q
    batch, num_heads, head_size = q.shape
    num_kv_heads = kv.k.shape[2]
    rows = q.reshape(batch, num_kv_heads, num_heads // num_kv_heads, head_size)
    first = _window_start(seq_lens - 1, sliding_window)
    out = _attend(
        rows.astype(jnp.float32) * jnp.float32(scale),
        kv,
        block_tables,
        first_key=first,
        row_positions=jnp.broadcast_to((seq_lens - 1)[:, None], rows.shape[::2]),
        num_keys=seq_lens,
        soft_cap=soft_cap,
        sliding_window=sliding_window,
        scales=scales,
    )
    return out.reshape(q.shape).astype(q.dtype)


def paged_verify_attention(
    q, kv, block_tables, seq_lens, *, scale, soft_cap, sliding_window, scales=None
):
    """Run the public op `paged_verify_attention` in plain XLA."""
    if not q.size:
        return q
    batch, num_queries, num_heads, head_size = q.shape
    num_kv_heads = kv.k.shape[2]
    group = num_heads // num_kv_heads
    rows = q.reshape(batch, num_queries, num_kv_heads, group, head_size).transpose(0, 2, 3, 1, 4)
    positions = (seq_lens - num_queries)[:, None] + jnp.arange(num_queries, dtype=jnp.int32)[None]
    out = _attend(
        rows.reshape(batch, num_kv_heads, -1, head_size).astype(jnp.float32) * jnp.float32(scale),
        kv,
        block_tables,
        first_key=_window_start(jnp.maximum(positions[:, 0], 0), sliding_window),
        row_positions=jnp.tile(positions, (1, group)),
        num_keys=seq_lens,
        soft_cap=soft_cap,
        sliding_window=sliding_window,
        scales=scales,
    )
    out = out.reshape(batch, num_kv_heads, group, num_queries, head_size).transpose(0, 3, 1, 2, 4)
    return out.reshape(q.shape).astype(q.dtype)


def rope_decode_attention(
    qkv, kv, block_tables, seq_lens, angles, norms, *, dtype, scales=None, **options
):
    """Run the public op `rope_decode_attention` in plain XLA."""
    position, block_size = jnp.maximum(seq_lens - 1, 0), kv.k.shape[1]
    blocks = jnp.take_along_axis(block_tables, (position // block_size)[:, None], axis=1)[:, 0]
    slots = jnp.where(seq_lens > 0, blocks * block_size + position % block_size, -1)
    q, kv = rope_write_kv(qkv, kv, slots, angles, norms, scales, dtype=dtype)
    q = q.astype(kv.attention_dtype(dtype))
    out = paged_decode_attention(q, kv, block_tables, seq_lens, scales=scales, **options)
    return out.astype(dtype), kv


def paged_prefill_attention(
    q,
    kv,
    block_tables,
    query_start_loc,
    seq_lens,
    *,
    scale,
    soft_cap,
    sliding_window,
    scales=None,
    tile_size=None,
):
    """Run the public op `paged_prefill_attention` in plain XLA.

    `tile_size` is the number of query tokens per tile. If it is None, the batch's mean number of
    tokens per sequence determines it. With a fixed number, the bits of a token's result do not
    depend on the other tokens of the batch.
    """
    if not q.size:
        return q
    num_tokens, num_heads, head_size = q.shape
    num_kv_heads = kv.k.shape[2]
    group = num_heads // num_kv_heads
    tile_size = tile_size or _prefill_tile_size(num_tokens, seq_lens.shape[0])
    tiles = tile_map(seq_lens, query_start_loc, num_tokens, tile_size)
    offsets = jnp.arange(tile_size, dtype=jnp.int32)

    def attend_tile(index, out):
        row0, num_rows = tiles.first_row[index], tiles.num_rows[index]
        position0, sequence = tiles.first_position[index], tiles.sequence[index]
        rows = q.at[row0 + offsets].get(mode="clip").astype(jnp.float32) * jnp.float32(scale)
        rows = rows.reshape(tile_size, num_kv_heads, group, head_size).transpose(1, 2, 0, 3)
        positions = jnp.broadcast_to((position0 + offsets)[None, :], (group, tile_size))
        result = _attend(
            rows.reshape(1, num_kv_heads, group * tile_size, head_size),
            kv,
            block_tables[sequence][None],
            first_key=_window_start(position0, sliding_window)[None],
            row_positions=positions.reshape(1, group * tile_size),
            num_keys=tiles.num_keys[index][None],
            soft_cap=soft_cap,
            sliding_window=sliding_window,
            scales=scales,
        )
        result = result.reshape(num_kv_heads, group, tile_size, head_size).transpose(2, 0, 1, 3)
        result = result.reshape(tile_size, num_heads, head_size).astype(q.dtype)
        # Give the rows after the tile's last token an index outside the array, so that the scatter
        # drops them.
        target = jnp.where(offsets < num_rows, row0 + offsets, num_tokens)
        return out.at[target].set(result, mode="drop", unique_indices=False)

    num_used = first_tiles(query_start_loc, tile_size)[-1]  # all later tiles are padding
    return lax.fori_loop(0, num_used, attend_tile, jnp.zeros_like(q))


def _prefill_tile_size(num_tokens: int, num_sequences: int) -> int:
    """Return the number of query tokens per tile: 32, or fewer if most sequences are short."""
    average = max(1, num_tokens // num_sequences)
    return min(32, max(8, 1 << (average - 1).bit_length()))


def _window_start(position, sliding_window):
    """Return the position of the first key that a query at `position` sees."""
    if sliding_window is None:
        return jnp.zeros_like(position)
    return jnp.maximum(position - jnp.int32(sliding_window - 1), 0)


def _attend(
    q, kv, block_tables, *, first_key, row_positions, num_keys, soft_cap, sliding_window, scales
):
    """Compute attention of R query rows per KV head and sequence; return float32 [B, K, R, H].

    Args:
        q: Queries [B, K, R, H] in float32, multiplied by the attention scale.
        kv: One layer's pool.
        block_tables: Block ids [B, M] of each sequence.
        first_key: Position [B] of the first key that any row of the sequence sees.
        row_positions: Positions [B, R] of the query rows.
        num_keys: Number of keys [B] of each sequence.
        soft_cap, sliding_window, scales: See `paged_decode_attention`.
    """
    q = q if scales is None else q * scales.k.reshape(())
    blocks_per_chunk = max(1, _KEYS_PER_CHUNK // kv.k.shape[1])
    chunk = blocks_per_chunk * kv.k.shape[1]
    padding = -block_tables.shape[1] % blocks_per_chunk
    tables = jnp.pad(block_tables, ((0, 0), (0, padding)))

    def step(index, carry):
        keys, values = _gather(kv, tables, index * blocks_per_chunk, blocks_per_chunk)
        positions = index * chunk + jnp.arange(chunk, dtype=jnp.int32)
        live = positions[None, :] < num_keys[:, None]
        mask = live[:, None, :] & (positions[None, None, :] <= row_positions[:, :, None])
        if sliding_window is not None:
            oldest = row_positions[:, :, None] - jnp.int32(sliding_window)
            mask &= positions[None, None, :] > oldest
        values = jnp.where(live[:, :, None, None], values, jnp.float32(0))
        return _online_softmax(carry, q, keys, values, mask[:, None], soft_cap)

    start, stop = _loop_bounds(first_key, num_keys, chunk)
    row_max = jnp.full(q.shape[:3], -jnp.inf, jnp.float32)
    carry = (row_max, jnp.zeros_like(row_max), jnp.zeros_like(q))
    _, row_sum, out = lax.fori_loop(start, stop, step, carry)
    out = out / jnp.where(row_sum == 0, jnp.float32(1), row_sum)[..., None]
    return out if scales is None else out * scales.v.reshape(())


def _loop_bounds(first_key, num_keys, chunk):
    """Return the range (start, stop) of the chunks that contain the keys that any sequence reads.

    A sequence without keys reads no chunk.
    """
    stop = (jnp.max(num_keys) + (chunk - 1)) // chunk
    start = jnp.min(jnp.where(num_keys > 0, first_key, jnp.iinfo(jnp.int32).max)) // chunk
    return start, stop


def _gather(kv, tables, first_block, num_blocks):
    """Gather keys and values [B, C, K, H] of `num_blocks` block-table columns, in float32."""
    blocks = lax.dynamic_slice_in_dim(tables, first_block, num_blocks, axis=1)
    shape = (tables.shape[0], num_blocks * kv.k.shape[1], *kv.k.shape[2:])
    rows = (pool[blocks].reshape(shape) for pool in kv)
    if kv.is_scaled:
        return (unpack_fp8_pairs(pairs, jnp.float32) for pairs in rows)
    return (pool_rows.astype(jnp.float32) for pool_rows in rows)


def _online_softmax(carry, q, keys, values, mask, soft_cap):
    """Update the running softmax (max, sum, output) with one chunk of C keys.

    `mask` is true where a row sees a key, and broadcasts to [B, K, R, C].
    """
    row_max, row_sum, out = carry
    precision = lax.Precision.HIGHEST
    scores = jnp.einsum("bkrh,bckh->bkrc", q, keys, precision=precision)
    if soft_cap is not None:
        scores = jnp.tanh(scores / jnp.float32(soft_cap)) * jnp.float32(soft_cap)
    mask = jnp.broadcast_to(mask, scores.shape)
    scores = jnp.where(mask, scores, -jnp.inf)
    new_max = jnp.maximum(row_max, jnp.max(scores, axis=-1))
    # Until a row sees its first key, its maximum is -inf, and exp(-inf - -inf) would be NaN.
    safe_max = jnp.where(new_max == -jnp.inf, jnp.float32(0), new_max)
    weights = jnp.exp(scores - safe_max[..., None])
    rescale = jnp.exp(row_max - safe_max)
    row_sum = row_sum * rescale + jnp.sum(weights, axis=-1)
    update = jnp.einsum("bkrc,bckh->bkrh", weights, values, precision=precision)
    return new_max, row_sum, out * rescale[..., None] + update
