"""Paged decode attention in Pallas Triton, in one launch: one query token a sequence, keys through
a block table.

Grid (KV head, sequence, split); one program:

    q          [R, H]  the KV head's group of query heads, padded to R >= 16 rows in registers:
               given, or made of the fused projection (decode_front.py), with the new token's key
               and value, which the sequence's last split stores and counts in from registers
    tiles      this split's share of the sequence's key tiles, from seq_len read at run time
    for tile:
        rows   = block_table[position // S] ...      gather of `tile_tokens` rows of the pool
        k, v   = pool rows, masked past seq_len      pipelined loads (num_stages)
        max, sum, out = online softmax, in exp2
    one split in use:  out -> the result
    more:  (max, sum, out) -> float32 partials; the split that arrives last merges them all, in
           the order of the splits

How many of its splits a sequence uses is decided at run time, from all lengths: as many as divide
the batch's tiles evenly over `target_programs`. So padded rows cost nothing, a lone sequence has
the whole chip, and a long one among short ones the larger part of it. The others end at once.

Who arrives last is told by a counter for each sequence and KV head, of zeros before the launch and
after it: XLA, to which it is an input, makes it once for all launches of a program.

The KV heads come first in the grid: programs that run side by side then read the neighbouring
columns of the same rows of the pool. Split-KV as in Flash-Decoding (Dao et al. 2023); online
softmax: arXiv:1805.02867; paged attention: arXiv:2309.06180.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import tile_ops
from pallas_kernels.decode_front import Front, NewToken
from pallas_kernels.tuning import DecodeConfig
from pallas_kernels.types import LayerKV

_MERGED_AT_ONCE = 4  # query rows whose partials are in registers together


@dataclasses.dataclass(frozen=True)
class _Spec:
    """What a program knows when it is compiled."""

    front: Front | None
    scale: float
    soft_cap: float | None
    sliding_window: int | None
    config: DecodeConfig
    group: int
    num_kv_heads: int
    block_size: int
    table_width: int
    interpret: bool

    @property
    def num_new(self) -> int:
        """Tokens of a sequence that are not in the pool."""
        return 0 if self.front is None else 1


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
):
    """See the public entry of the same name."""
    spec = _Spec(
        None,
        scale,
        soft_cap,
        sliding_window,
        config,
        group=q.shape[1] // kv.k.shape[2],
        num_kv_heads=kv.k.shape[2],
        block_size=kv.k.shape[1],
        table_width=block_tables.shape[1],
        interpret=interpret,
    )
    rows = q.reshape(-1, q.shape[2])
    out, *_ = _launch(spec, (rows,), kv, block_tables, seq_lens, rows)
    return out.reshape(q.shape)


def rope_decode_attention(
    qkv,
    kv,
    block_tables,
    seq_lens,
    angles,
    norms,
    *,
    dtype,
    scale,
    soft_cap,
    sliding_window,
    config: DecodeConfig,
    interpret: bool,
):
    """See the public entry of the same name."""
    num_parts, batch, total_heads, head_size = qkv.shape
    num_kv_heads = kv.k.shape[2]
    num_heads = total_heads - 2 * num_kv_heads
    spec = _Spec(
        Front(num_heads, num_kv_heads, num_parts, None if norms is None else norms.eps, dtype),
        scale,
        soft_cap,
        sliding_window,
        config,
        group=num_heads // num_kv_heads,
        num_kv_heads=num_kv_heads,
        block_size=kv.k.shape[1],
        table_width=block_tables.shape[1],
        interpret=interpret,
    )
    weights = () if norms is None else (norms.q, norms.k)
    inputs = (qkv.reshape(-1, head_size), *angles, *weights)
    rows = jax.ShapeDtypeStruct((batch * num_heads, head_size), dtype)
    out, k, v, *_ = _launch(spec, inputs, kv, block_tables, seq_lens, rows)
    pool = LayerKV(k.reshape(kv.k.shape), v.reshape(kv.v.shape))
    return out.reshape(batch, num_heads, head_size), pool


def _launch(spec, inputs, kv, block_tables, seq_lens, rows):
    """All outputs: like `rows`, then the pools if they change, then scratch."""
    batch, config = seq_lens.shape[0], spec.config
    pools = [pool.reshape(-1, kv.k.shape[3]) for pool in kv]
    new_pools = pools if spec.num_new else []
    counters, scratch = [], []
    if config.num_splits > 1:
        counters = [jnp.zeros((batch * spec.num_kv_heads,), jnp.int32)]
        row = jax.ShapeDtypeStruct((config.num_splits * rows.shape[0],), jnp.float32)
        scratch = [jax.ShapeDtypeStruct((*row.shape, rows.shape[1]), jnp.float32), row, row]
    call = pl.pallas_call(
        functools.partial(_kernel, spec=spec, num_inputs=len(inputs)),
        out_shape=[_like(array) for array in (rows, *new_pools)] + scratch,
        grid=(spec.num_kv_heads, batch, config.num_splits),
        input_output_aliases={index: index + 1 for index in range(len(new_pools))},
        compiler_params=plgpu.CompilerParams(
            num_warps=config.num_warps, num_stages=config.num_stages
        ),
        interpret=spec.interpret,
        name="paged_decode_attention",
    )
    return call(*pools, block_tables.reshape(-1), seq_lens, *inputs, *counters)


def _like(array):
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def _kernel(k_ref, v_ref, tables_ref, lens_ref, *refs, spec, num_inputs):
    config, inputs, refs = spec.config, refs[:num_inputs], refs[num_inputs:]
    head, sequence, split = (pl.program_id(axis) for axis in range(3))
    counters, refs = refs[: config.num_splits > 1], refs[config.num_splits > 1 :]
    out_ref, *refs = refs
    pool_refs, partials = refs[: 2 * spec.num_new], refs[2 * spec.num_new :]

    head_size, seq_len = out_ref.shape[1], lens_ref[sequence]
    row = jnp.arange(max(16, pl.next_power_of_2(spec.group)), dtype=jnp.int32)
    group_row = (sequence * spec.num_kv_heads + head) * spec.group
    q_rows, live_rows = group_row + row, row < spec.group
    num_keys = seq_len - spec.num_new
    table = sequence * spec.table_width
    pool_rows = functools.partial(
        tile_ops.pool_rows,
        tables_ref,
        table,
        block_size=spec.block_size,
        num_kv_heads=spec.num_kv_heads,
        head=head,
    )

    def fold(tile, carry, q):
        positions = tile * config.tile_tokens + jnp.arange(config.tile_tokens, dtype=jnp.int32)
        live = positions < num_keys
        visible = live
        if spec.sliding_window is not None:
            visible &= positions >= seq_len - spec.sliding_window
        rows = pool_rows(positions, live)
        keys = tile_ops.load_rows(k_ref, rows, head_size, live)
        mask = jnp.broadcast_to(visible[None, :], (row.shape[0], config.tile_tokens))
        scores = tile_ops.scores(q, keys, mask, scale=spec.scale, soft_cap=spec.soft_cap)
        values = tile_ops.load_rows(v_ref, rows, head_size, live)
        return tile_ops.softmax_fold(carry, scores, values)

    def begin(owns_new):
        if spec.front is None:
            q = tile_ops.load_rows(inputs[0], q_rows, head_size, live_rows)
            return q, tile_ops.softmax_start(row.shape[0], head_size)
        token = NewToken(spec.front, inputs, sequence, head, k_ref.dtype)
        q, (k, v) = token.queries(row, live_rows), token.key_and_value(owns_new)
        slot = pool_rows(jnp.maximum(num_keys, 0)[None], owns_new[None])
        for ref, new in zip(pool_refs, (k, v), strict=True):
            tile_ops.store_rows(ref, slot, head_size, new, owns_new[None])
        score = tile_ops.scores_of_one(q, k, scale=spec.scale, soft_cap=spec.soft_cap)
        return q, tile_ops.softmax_start_from(score, v, owns_new)

    def attend(start, stop, owns_new):
        q, carry = begin(owns_new)
        return lax.fori_loop(start, stop, lambda tile, carry: fold(tile, carry, q), carry)

    def finish(carry):
        out = tile_ops.softmax_finish(carry)
        tile_ops.store_rows(out_ref, q_rows, head_size, out, live_rows)

    first, end = _in_sight(seq_len, spec)
    if config.num_splits == 1:
        finish(attend(first, end, seq_len > 0))
        return
    share = _share(lens_ref, seq_len, spec)
    used = jnp.maximum(lax.div(end - first + share - 1, share), 1)
    start = first + split * share

    @pl.when(split < used)
    def _():
        owns_new = (split == used - 1) & (seq_len > 0)
        carry = attend(start, jnp.minimum(start + share, end), owns_new)

        @pl.when(used == 1)
        def _():
            finish(carry)

        @pl.when(used > 1)
        def _():
            rows = q_rows + split * out_ref.shape[0]
            _store_partials(partials, carry, rows, head_size, live_rows)
            counter = sequence * spec.num_kv_heads + head
            _if_last(
                counters[0],
                counter,
                used,
                lambda: _merge(partials, out_ref, group_row, used, spec),
                spec,
            )


def _if_last(counters_ref, counter, count, then: Callable[[], None], spec):
    """Run `then` in the one of `count` programs that comes here last; the others have stored."""
    if not spec.interpret:
        plgpu.debug_barrier()  # all threads' stores, before the one thread that counts
    before = plgpu.atomic_add(counters_ref, (counter,), jnp.int32(1))  # acquires and releases

    @pl.when(before == count - 1)
    def _():
        counters_ref[counter] = jnp.int32(0)
        then()


def _in_sight(seq_len, spec):
    """First and last + 1 key tile in the pool that a sequence sees (or several, elementwise)."""
    tile = jnp.int32(spec.config.tile_tokens)
    end = lax.div(seq_len + jnp.int32(spec.config.tile_tokens - 1 - spec.num_new), tile)
    if spec.sliding_window is None:
        return jnp.zeros_like(end), end
    first = jnp.maximum(seq_len - jnp.int32(spec.sliding_window), jnp.int32(0))
    return lax.div(first, tile), end


def _share(lens_ref, seq_len, spec):
    """Tiles a split of a sequence takes; its last split may have fewer."""
    batch, config = lens_ref.shape[0], spec.config
    row = jnp.arange(pl.next_power_of_2(batch), dtype=jnp.int32)
    lens = plgpu.load(lens_ref.at[row], mask=row < batch, other=0)
    first, end = _in_sight(lens, spec)
    even = pl.cdiv(jnp.sum(end - first) * spec.num_kv_heads, config.target_programs)
    first, end = _in_sight(seq_len, spec)
    least = jnp.maximum(pl.cdiv(end - first, config.num_splits), config.min_tiles)
    return jnp.maximum(even, least)


def _store_partials(partials, carry, rows, head_size, live):
    row_max, row_sum, out = carry
    tile_ops.store_rows(partials[0], rows, head_size, out, live)
    # The interpreter writes old values back where the mask is off; outside the array it does not.
    rows = jnp.where(live, rows, partials[1].shape[0])
    plgpu.store(partials[1].at[rows], row_max, mask=live)
    plgpu.store(partials[2].at[rows], row_sum, mask=live)


def _merge(partials, out_ref, group_row, used, spec):
    """Partials, out [splits * rows, H], max and sum [splits * rows], to the group's output rows."""
    at_once = min(spec.group, _MERGED_AT_ONCE)

    def some(turn, _):
        rows = [turn * at_once + row for row in range(at_once)]
        splits = [
            _load_splits(partials, group_row + row, row < spec.group, used, spec, out_ref)
            for row in rows
        ]
        for row, loaded in zip(rows, splits, strict=True):
            merged = _merged(*loaded)[None]
            target = (group_row + row)[None]
            live = jnp.broadcast_to(jnp.asarray(row < spec.group), (1,))
            tile_ops.store_rows(out_ref, target, out_ref.shape[1], merged, live)
        return _

    lax.fori_loop(0, pl.cdiv(spec.group, at_once), some, None)


def _load_splits(partials, row, inside, used, spec, out_ref):
    """Of one query row: what each split has, and which splits have something."""
    split = jnp.arange(pl.next_power_of_2(spec.config.num_splits), dtype=jnp.int32)
    live = (split < used) & inside  # the others wrote nothing
    rows = split * out_ref.shape[0] + row
    out = tile_ops.load_rows(partials[0], rows, out_ref.shape[1], live)
    load = functools.partial(plgpu.load, mask=live)
    row_max = load(partials[1].at[rows], other=tile_ops.MASKED)
    return out, row_max, load(partials[2].at[rows], other=0), live


def _merged(outs, row_max, row_sum, live):
    weights = jnp.where(live, jnp.exp2(row_max - jnp.max(row_max)), jnp.float32(0))
    total = jnp.sum(weights * row_sum)
    merged = jnp.sum(weights[:, None] * outs, axis=0)
    return merged / jnp.where(total == 0, jnp.float32(1), total)
