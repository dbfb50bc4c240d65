"""Paged decode attention in Pallas Triton: one query token a sequence, keys through a block table.

Grid (KV head, sequence, split); one program:

    q          [R, H]  the KV head's group of query heads, padded to R >= 16 rows in registers
    tiles      this split's share of the sequence's key tiles, from seq_len read at run time
    for tile:
        rows   = block_table[position // S] ...      gather of `tile_tokens` rows of the pool
        k, v   = pool rows, masked past seq_len      pipelined loads (num_stages)
        max, sum, out = online softmax, in exp2
    one split:    out -> the result
    more splits:  (max, sum, out) -> float32 partials; a second kernel, one program a query head,
                  merges them

How many of its splits a sequence uses is decided at run time, from all lengths: as many as divide
the batch's tiles evenly over `target_programs`. So padded rows cost nothing, a lone sequence has
the whole chip, and a long one among short ones the larger part of it. The others end at once.

With `into`, the first rows of q are the sequences', in order, and `into` is the result of all rows
so far: the rows of sequences that have keys are written there in place, and no others.

The KV heads come first in the grid: programs that run side by side then read the neighbouring
columns of the same rows of the pool. Split-KV as in Flash-Decoding (Dao et al. 2023); online
softmax: arXiv:1805.02867; paged attention: arXiv:2309.06180.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import tile_ops
from pallas_kernels.tuning import DecodeConfig


def paged_decode_attention(
    q,
    kv,
    block_tables,
    seq_lens,
    *,
    scale,
    soft_cap,
    sliding_window,
    config: DecodeConfig,
    interpret: bool,
    into=None,
):
    """See the public entry of the same name."""
    num_heads, head_size = q.shape[1:]
    batch, num_kv_heads, splits = seq_lens.shape[0], kv.k.shape[2], config.num_splits
    kernel = functools.partial(
        _kernel,
        scale=scale,
        soft_cap=soft_cap,
        sliding_window=sliding_window,
        config=config,
        group=num_heads // num_kv_heads,
        num_kv_heads=num_kv_heads,
        block_size=kv.k.shape[1],
        table_width=block_tables.shape[1],
    )
    rows = q.reshape(-1, head_size)
    targets = () if into is None else (into.reshape(rows.shape),)
    # Whichever kernel comes last writes in place.
    written, merged = (targets, ()) if splits == 1 else ((), targets)
    call = pl.pallas_call(
        kernel,
        out_shape=_out_shape(rows, batch * num_heads, splits),
        grid=(num_kv_heads, batch, splits),
        input_output_aliases={5: 0} if written else {},
        compiler_params=plgpu.CompilerParams(
            num_warps=config.num_warps, num_stages=config.num_stages
        ),
        interpret=interpret,
        name="paged_decode_attention",
    )
    k, v = (pool.reshape(-1, head_size) for pool in kv)
    result = call(rows, k, v, block_tables.reshape(-1), seq_lens, *written)
    if splits == 1:
        return result[0].reshape(q.shape)
    options = {
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "sliding_window": sliding_window,
        "config": config,
    }
    return _combine(result, seq_lens, rows, merged, options, interpret).reshape(q.shape)


def _out_shape(q, num_rows, splits):
    """Of q's rows, of which `num_rows` are the sequences' own."""
    if splits == 1:
        return (jax.ShapeDtypeStruct(q.shape, q.dtype),)
    row = jax.ShapeDtypeStruct((splits * num_rows,), jnp.float32)
    return jax.ShapeDtypeStruct((splits * num_rows, q.shape[1]), jnp.float32), row, row


def _kernel(
    q_ref,
    k_ref,
    v_ref,
    tables_ref,
    lens_ref,
    *refs,
    scale,
    soft_cap,
    sliding_window,
    config,
    group,
    num_kv_heads,
    block_size,
    table_width,
):
    head, sequence, split = (pl.program_id(axis) for axis in range(3))
    head_size, seq_len = q_ref.shape[1], lens_ref[sequence]
    row = jnp.arange(max(16, pl.next_power_of_2(group)), dtype=jnp.int32)
    q_rows = (sequence * num_kv_heads + head) * group + row

    def fold(tile, carry, q):
        positions = tile * config.tile_tokens + jnp.arange(config.tile_tokens, dtype=jnp.int32)
        live = positions < seq_len
        visible = live
        if sliding_window is not None:
            visible &= positions >= seq_len - sliding_window
        rows = tile_ops.pool_rows(
            tables_ref,
            sequence * table_width,
            positions,
            live,
            block_size=block_size,
            num_kv_heads=num_kv_heads,
            head=head,
        )
        keys = tile_ops.load_rows(k_ref, rows, head_size, live)
        mask = jnp.broadcast_to(visible[None, :], (row.shape[0], config.tile_tokens))
        scores = tile_ops.scores(q, keys, mask, scale=scale, soft_cap=soft_cap)
        values = tile_ops.load_rows(v_ref, rows, head_size, live)
        return tile_ops.softmax_fold(carry, scores, values)

    def attend(start, stop):
        q = tile_ops.load_rows(q_ref, q_rows, head_size, row < group)
        begin = tile_ops.softmax_start(row.shape[0], head_size)
        return lax.fori_loop(start, stop, lambda tile, carry: fold(tile, carry, q), begin)

    first, end = _in_sight(seq_len, sliding_window, config)
    if config.num_splits == 1:
        out = tile_ops.softmax_finish(attend(first, end))
        *into, out_ref = refs
        live = row < group
        tile_ops.store_rows(out_ref, q_rows, head_size, out, live & (seq_len > 0) if into else live)
        return
    share = _share(lens_ref, seq_len, num_kv_heads, sliding_window, config)
    start = first + split * share

    @pl.when(start < end)
    def _():
        carry = attend(start, jnp.minimum(start + share, end))
        rows = q_rows + split * (refs[0].shape[0] // config.num_splits)
        _store_partials(refs, carry, rows, head_size, row < group)


def _in_sight(seq_len, sliding_window, config):
    """First and last + 1 key tile that a sequence sees (or several, elementwise)."""
    end = lax.div(seq_len + jnp.int32(config.tile_tokens - 1), jnp.int32(config.tile_tokens))
    if sliding_window is None:
        return jnp.zeros_like(end), end
    first = jnp.maximum(seq_len - jnp.int32(sliding_window), jnp.int32(0))
    return lax.div(first, jnp.int32(config.tile_tokens)), end


def _share(lens_ref, seq_len, num_kv_heads, sliding_window, config):
    """Tiles a split of a sequence takes, from 1; its last split may have fewer."""
    batch = lens_ref.shape[0]
    row = jnp.arange(pl.next_power_of_2(batch), dtype=jnp.int32)
    lens = plgpu.load(lens_ref.at[row], mask=row < batch, other=0)
    first, end = _in_sight(lens, sliding_window, config)
    even = pl.cdiv(jnp.sum(end - first) * num_kv_heads, config.target_programs)
    first, end = _in_sight(seq_len, sliding_window, config)
    return jnp.maximum(jnp.maximum(even, pl.cdiv(end - first, config.num_splits)), 1)


def _store_partials(out_refs, carry, rows, head_size, live):
    row_max, row_sum, out = carry
    tile_ops.store_rows(out_refs[0], rows, head_size, out, live)
    plgpu.store(out_refs[1].at[rows], row_max, mask=live)
    plgpu.store(out_refs[2].at[rows], row_sum, mask=live)


def _combine(partials, seq_lens, q, into, options, interpret):
    """Merge partials, out [splits * rows, H], max and sum [splits * rows], to rows of q's shape."""
    return pl.pallas_call(
        functools.partial(_combine_kernel, **options),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(seq_lens.shape[0] * options["num_heads"],),
        input_output_aliases={4: 0} if into else {},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="paged_decode_combine",
    )(*partials, seq_lens, *into)


def _combine_kernel(
    out_ref,
    max_ref,
    sum_ref,
    lens_ref,
    *refs,
    num_heads,
    num_kv_heads,
    sliding_window,
    config,
):
    *into, merged_ref = refs
    num_rows, head_size = out_ref.shape[0] // config.num_splits, out_ref.shape[1]
    row = pl.program_id(0)
    seq_len = lens_ref[row // num_heads]
    first, end = _in_sight(seq_len, sliding_window, config)
    share = _share(lens_ref, seq_len, num_kv_heads, sliding_window, config)
    used = lax.div(end - first + share - 1, share)
    split = jnp.arange(pl.next_power_of_2(config.num_splits), dtype=jnp.int32)
    live = split < used  # the others wrote nothing
    rows = jnp.where(live, split * num_rows + row, row)
    row_max = plgpu.load(max_ref.at[rows], mask=live, other=tile_ops.MASKED)
    weights = jnp.where(live, jnp.exp2(row_max - jnp.max(row_max)), jnp.float32(0))
    total = jnp.sum(weights * plgpu.load(sum_ref.at[rows], mask=live, other=0))
    outs = tile_ops.load_rows(out_ref, rows, head_size, live)
    merged = jnp.sum(weights[:, None] * outs, axis=0)
    merged = merged / jnp.where(total == 0, jnp.float32(1), total)
    columns = jnp.arange(merged.shape[0], dtype=jnp.int32)
    plgpu.store(
        merged_ref.at[jnp.full_like(columns, row), columns],
        merged.astype(merged_ref.dtype),
        mask=(columns < head_size) & (seq_len > 0) if into else columns < head_size,
    )
