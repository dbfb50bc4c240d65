"""Ragged paged prefill attention in Pallas Triton, in one launch for the whole ragged batch.

Grid (KV head, tile). A tile is `tile_rows // G` query tokens of ONE sequence times the G query
heads of the KV head (`tiles.tile_map`). Keys and values are therefore read once per KV head, not
once per query head:

    q            [tile_rows, H]; row r is token r // G, head r % G (G padded to a power of 2)
    for key tiles entirely before the tile's first token:  no mask
        max, sum, out = online softmax, in exp2
    for the remaining key tiles:                           causal mask, keys past the end are zeros
        max, sum, out = likewise
    out -> the tile's rows; tiles of padding rows have no keys and write zeros

With a sliding window, the loop starts at the window of the tile's first token and masks every tile.
With `into`, the kernel writes into that array and keeps the rows before the first sequence.
Tiles run in reverse order: a sequence's last tiles have the most keys, and short tiles at the end
fill the gaps.

FlashAttention-2 (arXiv:2307.08691) over paged keys (arXiv:2309.06180).
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.attention import tile_ops
from pallas_kernels.attention.tiles import tile_map
from pallas_kernels.attention.tuning import PrefillConfig


def paged_prefill_attention(
    q,
    kv,
    block_tables,
    query_start_loc,
    seq_lens,
    *,
    config: PrefillConfig,
    interpret: bool,
    scales=None,
    into=None,
    **options,
):
    """Run the public op `paged_prefill_attention` in Pallas Triton.

    `options` are fields of `AttentionSpec`. `into` is an optional array, shaped like q, that
    receives the outputs. The rows before `query_start_loc[0]` keep the values of `into`.
    """
    num_tokens, num_heads, head_size = q.shape
    spec = tile_ops.AttentionSpec.for_pool(
        num_heads, kv, block_tables, interpret=interpret, **options
    )
    tile_size = max(1, config.tile_rows // pl.next_power_of_2(spec.group))
    tiles = jnp.stack(tile_map(seq_lens, query_start_loc, num_tokens, tile_size))
    k, v = (pool.reshape(-1, pool.shape[3]) for pool in kv)
    arrays = (q.reshape(-1, head_size), k, v, block_tables.reshape(-1), tiles, *(scales or ()))
    arrays += () if into is None else (into.reshape(-1, head_size),)
    sizes = {"tile_size": tile_size, "tile_tokens": config.tile_tokens}
    call = pl.pallas_call(
        functools.partial(_kernel, is_scaled=scales is not None, spec=spec, **sizes),
        out_shape=jax.ShapeDtypeStruct((num_tokens * num_heads, head_size), q.dtype),
        grid=(spec.num_kv_heads, tiles.shape[1]),
        input_output_aliases={} if into is None else {len(arrays) - 1: 0},
        compiler_params=plgpu.CompilerParams(
            num_warps=config.num_warps, num_stages=config.num_stages
        ),
        interpret=interpret,
        name="paged_prefill_attention",
    )
    return call(*arrays).reshape(q.shape)


def _kernel(
    q_ref, k_ref, v_ref, tables_ref, tiles_ref, *refs, tile_size, tile_tokens, is_scaled, spec
):
    out_ref = refs[-1]
    k_scale, v_scale = [ref[0] for ref in refs[: 2 * is_scaled]] or (None, None)
    head, tile = pl.program_id(0), pl.num_programs(1) - 1 - pl.program_id(1)
    group, sliding_window = spec.group, spec.sliding_window
    sequence, first_row, first_position, num_rows, num_keys = (
        tiles_ref[field, tile] for field in range(5)
    )
    padded_group = pl.next_power_of_2(group)
    row = jnp.arange(tile_size * padded_group, dtype=jnp.int32)
    token, member = row // padded_group, row % padded_group
    mine = (token < num_rows) & (member < group)
    q_rows = ((first_row + token) * spec.num_kv_heads + head) * group + member
    q = tile_ops.load_rows(q_ref, q_rows, spec.width, mine)

    def fold(index, carry, masked):
        positions = index * tile_tokens + jnp.arange(tile_tokens, dtype=jnp.int32)
        live = positions < num_keys if masked else None

        def mask():
            return (
                _visibility_mask(positions, first_position + token, sliding_window)
                if masked
                else None
            )

        refs = k_ref, v_ref, tables_ref
        return tile_ops.fold_keys(
            carry, q, refs, sequence, head, positions, live, mask, spec, k_scale
        )

    start, full, stop = _key_tile_range(first_position, num_keys, tile_tokens, sliding_window)
    carry = tile_ops.softmax_start(row.shape[0], spec.width)
    q, carry = tile_ops.begin_folds(q, carry, spec)
    if sliding_window is None:
        carry = lax.fori_loop(start, full, functools.partial(fold, masked=False), carry)
    carry = lax.fori_loop(full, stop, functools.partial(fold, masked=True), carry)
    carry = tile_ops.end_folds(carry, v_scale)
    tile_ops.store_rows(out_ref, q_rows, tile_ops.softmax_finish(carry), mine)


def _visibility_mask(key_positions, row_positions, sliding_window):
    """Return which keys each row sees [rows, keys]: causal, limited to the sliding window."""
    shape = (row_positions.shape[0], key_positions.shape[0])
    keys = jnp.broadcast_to(key_positions[None, :], shape)
    rows = jnp.broadcast_to(row_positions[:, None], shape)
    mask = keys <= rows
    return mask if sliding_window is None else mask & (keys > rows - sliding_window)


def _key_tile_range(first_position, num_keys, tile_tokens, sliding_window):
    """Return the key tiles that a tile of queries sees: (first, first that needs a mask, stop)."""
    stop = pl.cdiv(num_keys, tile_tokens)
    if sliding_window is None:
        # A key tile needs no mask if its last key is at or before the tile's first query.
        return jnp.int32(0), jnp.minimum((first_position + 1) // tile_tokens, stop), stop
    start = jnp.maximum(first_position - (sliding_window - 1), 0) // tile_tokens
    return start, start, stop
