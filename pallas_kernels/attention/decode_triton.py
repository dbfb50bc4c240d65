"""Paged decode attention in Pallas Triton, in one launch: one query token a sequence, keys through
a block table.

Grid (KV head, item); an item is a split of a sequence, and one program of it:

    q          [R, H]  the KV head's group of query heads, repeated to R >= 16 rows in registers:
               given, or made of the fused projection (`_load_new_token`), with the new token's key
               and value, which the sequence's last split stores and counts in from registers
    for tile of this split's share of the sequence's key tiles:
        rows   = block_table[position // S] ...      gather of `tile_tokens` rows of the pool
        k, v   = pool rows, masked past seq_len      pipelined loads (num_stages)
        max, sum, out = online softmax, in exp2
    a sequence of one split:  out -> the result
    of more:  (max, sum, out) -> float32 partials; the split that arrives last merges them all, in
              the order of the splits

How many splits a sequence has is decided at run time, from all lengths: as many as divide the
batch's tiles evenly over `target_programs`. So padded rows cost nothing, a lone sequence has the
whole chip, and a long one among short ones the larger part of it. Of sequences enough to fill the
chip only those well above the mean are split. The longest start first, so that none is left over
when the others are done (longest processing time first: Graham 1969).

The plan of the items is made once a step: of B sequences at `num_splits` each few would have
something to do, and starting programs that have nothing takes time too.

Who arrives last is told by a counter for each sequence and KV head, of zeros before the launch and
after it: XLA, to which it is an input, makes it once for all launches of a program.

With `into`, the first rows of q are the sequences', in order, and `into` is the result of all rows
so far: the rows of sequences that have keys are written there in place, and no others.

The KV heads come first in the grid: programs that run side by side then read the neighbouring
columns of the same rows of the pool. Split-KV as in Flash-Decoding (Dao et al. 2023); online
softmax: arXiv:1805.02867; paged attention: arXiv:2309.06180.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.attention import tile_ops
from pallas_kernels.attention.tuning import DecodeConfig
from pallas_kernels.gemm.fp8 import to_fp8
from pallas_kernels.types import LayerKV, pack_fp8_pairs

# Of the partials that are merged together: query heads, one a warp, and registers a thread.
_MAX_MERGED_HEADS = 4
_MAX_MERGE_REGISTERS = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeSpec(tile_ops.AttentionSpec):
    """What a program knows when it is compiled.

    Attributes:
        in_place: The result is written into the one that `into` was.
        num_partials: Of the fused projection that has the new tokens; 0: queries are given.
        eps: Of the norms of the projection's heads; None: there are none.
        dtype: That the projection is rounded to.
    """

    config: DecodeConfig
    in_place: bool = False
    num_partials: int = 0
    eps: float | None = None
    dtype: Any = None

    @property
    def num_new_tokens(self) -> int:
        """Tokens of a sequence that are not in the pool."""
        return min(self.num_partials, 1)

    @property
    def num_rows(self) -> int:
        """Rows of the scores."""
        return max(16, pl.next_power_of_2(self.group))

    @property
    def rows_per_head(self) -> int:
        """Rows a query head."""
        return self.num_rows // pl.next_power_of_2(self.group)

    @property
    def merge_shape(self) -> tuple[int, int]:
        """Of partial outputs that a program merges at a time: query heads, columns."""
        heads = min(pl.next_power_of_2(self.group), _MAX_MERGED_HEADS)
        return heads, self.width

    @property
    def splits_per_merge(self) -> int:
        """Whose partials are merged at a time."""
        room = _MAX_MERGE_REGISTERS * 32 * self.config.num_warps // math.prod(self.merge_shape)
        return max(1, min(room, pl.next_power_of_2(self.config.num_splits)))


def paged_decode_attention(q, kv, block_tables, seq_lens, *, into=None, scales=None, **options):
    """See the public entry of the same name; `options` are fields of `DecodeSpec`."""
    spec = DecodeSpec.for_pool(q.shape[1], kv, block_tables, in_place=into is not None, **options)
    rows = q.reshape(-1, q.shape[2])
    inputs = (rows,) if into is None else (rows, into.reshape(rows.shape))
    out, *_ = _launch(spec, inputs, kv, block_tables, seq_lens, rows, scales)
    return out.reshape(q.shape)


def rope_decode_attention(
    qkv, kv, block_tables, seq_lens, angles, norms, *, dtype, scales=None, **options
):
    """See the public entry of the same name; `options` are fields of `DecodeSpec`."""
    num_partials, batch, total_heads, head_size = qkv.shape
    num_heads = total_heads - 2 * kv.k.shape[2]
    eps, weights = (None, ()) if norms is None else (norms.eps, (norms.q, norms.k))
    new = {"num_partials": num_partials, "eps": eps, "dtype": dtype}
    spec = DecodeSpec.for_pool(num_heads, kv, block_tables, **new, **options)
    inputs = (qkv.reshape(-1, head_size), *angles, *weights)
    rows = jax.ShapeDtypeStruct((batch * num_heads, head_size), dtype)
    out, k, v, *_ = _launch(spec, inputs, kv, block_tables, seq_lens, rows, scales)
    pool = LayerKV(k.reshape(kv.k.shape), v.reshape(kv.v.shape))
    return out.reshape(batch, num_heads, head_size), pool


def _launch(spec, inputs, kv, block_tables, seq_lens, rows, scales):
    """All outputs: like `rows`, then the pools if they change, then scratch."""
    config, counters, scratch = spec.config, [], []
    plan = decode_plan(block_tables, seq_lens, spec)
    pools = [pool.reshape(-1, pool.shape[3]) for pool in kv]
    new_pools = pools if spec.num_new_tokens else []
    if config.num_splits > 1:
        counters = [jnp.zeros((seq_lens.shape[0] * spec.num_kv_heads,), jnp.int32)]
        row = jax.ShapeDtypeStruct((plan.shape[0] * spec.num_heads,), jnp.float32)
        scratch = [jax.ShapeDtypeStruct((*row.shape, rows.shape[1]), jnp.float32), row, row]
    # Inputs are the two pools, the block tables, the plan, then these, `into` the last of them.
    aliases = {index: index + 1 for index in range(len(new_pools))}
    if spec.in_place:
        aliases[len(pools) + 1 + len(inputs)] = 0
    call = pl.pallas_call(
        functools.partial(_kernel, spec=spec, num_inputs=len(inputs)),
        out_shape=[jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (rows, *new_pools, *scratch)],
        grid=(spec.num_kv_heads, plan.shape[0]),
        input_output_aliases=aliases,
        compiler_params=plgpu.CompilerParams(
            num_warps=config.num_warps, num_stages=config.num_stages
        ),
        interpret=spec.interpret,
        name="paged_decode_attention",
    )
    return call(*pools, block_tables.reshape(-1), plan, *inputs, *(scales or ()), *counters)


class _WorkItem(NamedTuple):
    """A split of a sequence, the same for all KV heads; a row of the plan, or a program's own."""

    sequence: Any
    seq_len: Any
    start: Any  # its key tiles
    stop: Any
    split: Any
    num_splits: Any  # that the sequence uses; 0: nothing to do
    slot: Any  # of the sequence's last token


@functools.partial(jax.jit, static_argnums=2)
def decode_plan(block_tables, seq_lens, spec):
    """[items, 8]: what each program of a KV head does, the longest sequences first.

    It depends on nothing of a layer, so XLA makes it once a step for all layers.
    """
    batch, config = seq_lens.shape[0], spec.config
    first, end = _visible_tiles(seq_lens, spec)
    tiles = end - first
    split_tiles = jnp.maximum(_even_split_tiles(tiles, spec), _min_split_tiles(tiles, spec))
    used = jnp.maximum(pl.cdiv(tiles, split_tiles), 1)
    first_item = _first_items_longest_first(tiles, used)
    last = jnp.maximum(seq_lens - 1, 0)
    block = jnp.take_along_axis(block_tables, (last // spec.block_size)[:, None], axis=1)[:, 0]

    # No more than a batch's even shares, and the rest of each sequence.
    max_items = min(batch * config.num_splits, _max_even_splits(batch, spec) + batch)
    item = jnp.arange(max_items, dtype=jnp.int32)
    owns = (first_item[None, :] <= item[:, None]) & (item[:, None] < (first_item + used)[None, :])
    sequence = jnp.sum(jnp.where(owns, jnp.arange(batch, dtype=jnp.int32), 0), axis=1)
    split = item - first_item[sequence]
    start = first[sequence] + split * split_tiles[sequence]
    rows = _WorkItem(
        sequence,
        seq_lens[sequence],
        start,
        jnp.minimum(start + split_tiles[sequence], end[sequence]),
        split,
        jnp.where(item < jnp.sum(used), used[sequence], 0),
        (block * spec.block_size + last % spec.block_size)[sequence],
    )
    return jnp.stack([*rows, jnp.zeros_like(item)], axis=1).astype(jnp.int32)


def _first_items_longest_first(tiles, used):
    """Each sequence's first item, if those with the most tiles come first.

    One sum of B x B numbers, where sorting and summing up would be several kernels.
    """
    row = jnp.arange(tiles.shape[0], dtype=jnp.int32)
    equal = (tiles[None, :] == tiles[:, None]) & (row[None, :] < row[:, None])
    before = equal | (tiles[None, :] > tiles[:, None])
    return jnp.sum(jnp.where(before, used[None, :], 0), axis=1)


def _even_split_tiles(tiles, spec):
    """Tiles of a split, for sequences of so many."""
    if spec.config.split_percent_of_mean is None:
        return pl.cdiv(jnp.sum(tiles) * spec.num_kv_heads, spec.config.target_programs)
    live = jnp.maximum(jnp.sum((tiles > 0).astype(jnp.int32)), 1)
    return pl.cdiv(jnp.sum(tiles) * spec.config.split_percent_of_mean, 100 * live)


def _min_split_tiles(tiles, spec):
    """Tiles of a split, of sequences with so many: a second one before merging takes a turn more,
    which takes longer than a tile."""
    min_tiles = jnp.maximum(pl.cdiv(tiles, spec.config.num_splits), 1)
    return jnp.maximum(min_tiles, jnp.minimum(pl.cdiv(tiles, spec.splits_per_merge), 2))


def _max_even_splits(batch, spec):
    """Most of them in a batch, of one KV head."""
    if spec.config.split_percent_of_mean is None:
        return spec.config.target_programs // spec.num_kv_heads
    return pl.cdiv(100 * batch, spec.config.split_percent_of_mean)


def _visible_tiles(seq_lens, spec):
    """First and last + 1 key tile in the pool that each sequence sees."""
    tile = spec.config.tile_tokens
    end = (seq_lens + (tile - 1 - spec.num_new_tokens)) // tile
    if spec.sliding_window is None:
        return jnp.zeros_like(end), end
    return jnp.maximum(seq_lens - spec.sliding_window, 0) // tile, end


def _kernel(k_ref, v_ref, tables_ref, plan_ref, *refs, spec, num_inputs):
    config, inputs, refs = spec.config, refs[:num_inputs], refs[num_inputs:]
    scale_refs, refs = refs[: 2 * spec.is_scaled], refs[2 * spec.is_scaled :]
    scales = k_scale, v_scale = [ref[0] for ref in scale_refs] or (None, None)
    counters, refs = refs[: config.num_splits > 1], refs[config.num_splits > 1 :]
    out_ref, *refs = refs
    pool_refs, partials = refs[: 2 * spec.num_new_tokens], refs[2 * spec.num_new_tokens :]
    head, item_index = pl.program_id(0), pl.program_id(1)
    item = _load_work_item(plan_ref, item_index)

    seq_len = item.seq_len
    num_keys = seq_len - spec.num_new_tokens
    group_row = head * spec.group
    first_row = item.sequence * spec.num_heads + group_row
    # A tensor core takes 16 rows: a head is repeated where the group has fewer.
    row = jnp.arange(spec.num_rows, dtype=jnp.int32)
    group_head = lax.div(row, jnp.int32(spec.rows_per_head))
    live_rows = (group_head < spec.group) & (lax.rem(row, jnp.int32(spec.rows_per_head)) == 0)

    def fold(tile, carry, q):
        positions = tile * config.tile_tokens + jnp.arange(config.tile_tokens, dtype=jnp.int32)
        live = positions < num_keys
        visible = live
        if spec.sliding_window is not None:
            visible &= positions >= seq_len - spec.sliding_window

        def mask():
            return jnp.broadcast_to(visible[None, :], (spec.num_rows, config.tile_tokens))

        refs = k_ref, v_ref, tables_ref
        return tile_ops.fold_keys(
            carry, q, refs, item.sequence, head, positions, live, mask, spec, k_scale
        )

    def begin():
        if not spec.num_new_tokens:
            q = tile_ops.load_rows(inputs[0], first_row + group_head, spec.width, live_rows)
            return q, tile_ops.softmax_start(spec.num_rows, spec.width)
        owns_new = (item.split == item.num_splits - 1) & (seq_len > 0)
        q, k, v = _load_new_token(spec, inputs, item.sequence, head, owns_new, k_ref.dtype, scales)
        slot = (item.slot * spec.num_kv_heads + head)[None]
        for ref, new in zip(pool_refs, (k, v), strict=True):
            row = pack_fp8_pairs(new) if spec.is_scaled else new
            tile_ops.store_rows(ref, slot, row, owns_new[None])
        score = tile_ops.single_key_scores(q, k, spec, k_scale)
        q, score = (tile_ops.repeat_rows(x, spec.rows_per_head) for x in (q, score))
        return q, tile_ops.softmax_start_from(score, v, owns_new)

    def attend():
        q, carry = tile_ops.begin_folds(*begin(), spec)
        carry = lax.fori_loop(item.start, item.stop, lambda tile, c: fold(tile, c, q), carry)
        return tile_ops.end_folds(carry, v_scale)

    def finish(carry):
        out = tile_ops.softmax_finish(carry)
        live = live_rows & (seq_len > 0) if spec.in_place else live_rows
        tile_ops.store_rows(out_ref, first_row + group_head, out, live)

    if config.num_splits == 1:
        finish(attend())
        return

    @pl.when(item.num_splits > 0)
    def _():
        carry = attend()

        @pl.when(item.num_splits == 1)
        def _():
            finish(carry)

        @pl.when(item.num_splits > 1)
        def _():
            own = item_index * spec.num_heads + group_row
            _store_partials(partials, carry, own + group_head, live_rows)
            counter = item.sequence * spec.num_kv_heads + head

            @pl.when(_is_last_program(counters[0], counter, item.num_splits, spec))
            def _():
                own_first = own - item.split * spec.num_heads
                _merge_partials(partials, out_ref, own_first, first_row, item.num_splits, spec)


def _load_work_item(plan_ref, item_index):
    """The item of the program of that number."""
    columns = map(jnp.int32, range(len(_WorkItem._fields)))
    field_refs = (plan_ref.at[item_index, column] for column in columns)
    return _WorkItem(
        *(plgpu.load(field_ref, eviction_policy=tile_ops.EVICT_LAST) for field_ref in field_refs)
    )


def _is_last_program(counters_ref, counter, count, spec):
    """Whether all others of `count` programs have come here, with what they stored before."""
    if not spec.interpret:
        plgpu.debug_barrier()  # all threads' stores, before the one thread that counts
    before = plgpu.atomic_add(counters_ref, (counter,), jnp.int32(1))  # acquires and releases
    is_last = before == count - 1

    @pl.when(is_last)
    def _():
        counters_ref[counter] = jnp.int32(0)

    return is_last


def _store_partials(partials, carry, rows, live):
    row_max, row_sum, out = carry
    tile_ops.store_rows(partials[0], rows, out, live)
    # The interpreter writes old values back where the mask is off; outside the array it does not.
    rows = jnp.where(live, rows, partials[1].shape[0])
    plgpu.store(partials[1].at[rows], row_max, mask=live)
    plgpu.store(partials[2].at[rows], row_sum, mask=live)


def _merge_partials(partials, out_ref, first_partial, first_row, num_splits, spec):
    """Partials, out [items * N, H], max and sum [items * N], to the group's output rows."""
    heads, at_once = spec.merge_shape[0], spec.splits_per_merge
    zeros = jnp.zeros(spec.merge_shape, jnp.float32)
    start = jnp.full_like(zeros, tile_ops.MASKED_SCORE), zeros, zeros

    def merge_heads(turn, _):
        first_head = turn * heads

        def fold(index, carry):
            first = index * at_once
            rows = first_partial + first_head + first * spec.num_heads
            live = num_splits - first, spec.group - first_head
            return _fold_partials(partials, rows, live, carry, spec)

        turns = lax.div(num_splits + (at_once - 1), jnp.int32(at_once))
        _max, total, out = lax.fori_loop(0, turns, fold, start)
        out = out / jnp.where(total == 0, jnp.float32(1), total)
        head = first_head + jnp.arange(heads, dtype=jnp.int32)
        tile_ops.store_rows(out_ref, first_row + head, out, head < spec.group)

    lax.fori_loop(0, pl.cdiv(spec.group, heads), merge_heads, None)


def _fold_partials(partials, first_row, live, carry, spec):
    """Merge some splits of some heads, `live` of both, into the running (max, sum, out) [heads, H].

    Nothing waits for anything but the loads, which are all on their way at once. That takes tiles
    whose sums stay within a thread or a warp: a warp has a head's columns in all splits if heads
    and columns are one axis when they are loaded, and maxima and sums are loaded with the splits
    as columns. What both need, both compute.
    """
    (heads, width), at_once = spec.merge_shape, spec.splits_per_merge
    split, column = _axis_indices((at_once, heads * width))
    head, column = lax.div(column, jnp.int32(width)), lax.rem(column, jnp.int32(width))
    inside = (split < live[0]) & (head < live[1]) & (column < spec.head_size)
    rows = first_row + split * spec.num_heads + head
    outs = plgpu.load(partials[0].at[rows, column], mask=inside, other=0)
    outs = outs.reshape(at_once, heads, width)

    def load(ref, head, split, other):
        rows = first_row + split * spec.num_heads + head
        return plgpu.load(ref.at[rows], mask=(split < live[0]) & (head < live[1]), other=other)

    head, split = _axis_indices((heads, at_once))
    weights, top = _split_weights(load(partials[1], head, split, tile_ops.MASKED_SCORE), axis=1)
    total = jnp.sum(weights * load(partials[2], head, split, 0), axis=1)
    split, head = _axis_indices((at_once, heads))
    weights, _ = _split_weights(load(partials[1], head, split, tile_ops.MASKED_SCORE), axis=0)
    out = jnp.sum(weights[:, :, None] * outs, axis=0)
    top, total = (jnp.broadcast_to(x[:, None], out.shape) for x in (top, total))
    return _combine_states(carry, (top, total, out))


def _axis_indices(shape):
    """The index along each of two axes."""
    return tuple(lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))


def _split_weights(maxima, axis):
    """Of each split, and the maximum of all."""
    top = jnp.max(maxima, axis=axis)
    return jnp.exp2(maxima - jnp.expand_dims(top, axis)), top


def _combine_states(one, other):
    """Two (max, sum, out) of the same heads as one."""
    top = jnp.maximum(one[0], other[0])
    weight, more = (jnp.exp2(each[0] - top) for each in (one, other))
    return top, one[1] * weight + other[1] * more, one[2] * weight + other[2] * more


# --- the new token -----------------------------------------------------------------------------


def _load_new_token(spec, refs, sequence, kv_head, with_key, pool_dtype, scales):
    """What one KV head has of a sequence's new token.

    Args:
        spec: What is known when it is compiled.
        refs: The projection's heads [partials * B * (N + 2K), H], cosines and sines [B, H / 2], and
            where heads are normalized the weights [H] of queries and keys.
        sequence, kv_head: Whose; traced.
        with_key: Whether key and value are wanted; else they are any finite numbers. Traced.
        pool_dtype: Of the results, but over a scaled pool: queries are of the projection's there,
            key and value in FP8.
        scales: A scaled pool's; else None, twice.

    Returns:
        Queries [group, H], key [1, H] and value [1, H], as stored: group in powers of two, H as
        `spec.width`.
    """
    heads_ref, cos_ref, sin_ref, *weight_refs = refs
    own, exchanged, angle = _rope_columns(heads_ref.shape[1], spec.width)
    head = jnp.arange(pl.next_power_of_2(spec.group), dtype=jnp.int32)
    first = sequence * (spec.num_heads + 2 * spec.num_kv_heads)
    queries = first + kv_head * spec.group + head
    key = jnp.broadcast_to(first + spec.num_heads + kv_head, (1,))
    live = head < spec.group, jnp.broadcast_to(with_key, (1,))

    def load(rows, live, columns):
        return _load_partials(heads_ref, rows, live, columns, spec.num_partials)

    loaded = [
        [load(rows, mask, columns) for columns in (own, exchanged)]
        for rows, mask in zip((queries, key), live, strict=True)
    ]
    value = load(key + spec.num_kv_heads, live[1], own)
    cos, sin = (_load_row(ref, sequence, angle) for ref in (cos_ref, sin_ref))
    sin = jnp.where(own < heads_ref.shape[1] // 2, -sin, sin)
    weights = [[_load_weight(ref, columns) for columns in (own, exchanged)] for ref in weight_refs]

    q, k = (
        _rotate_heads(halves, weights[index] if weights else None, cos, sin, spec)
        for index, halves in enumerate(loaded)
    )
    value = _sum_partials(value, spec.dtype)
    q, k, value = (x.astype(spec.dtype) for x in (q, k, value))
    if spec.is_scaled:
        return q, *(to_fp8(x, scale) for x, scale in zip((k, value), scales, strict=True))
    return tuple(x.astype(pool_dtype) for x in (q, k, value))


def _rope_columns(size, width):
    """Of a head: its columns, the same with the halves exchanged, and their angles'."""
    half, column = size // 2, jnp.arange(width, dtype=jnp.int32)
    exchanged = jnp.where(column < half, column + half, column - half)
    exchanged = jnp.where(column < size, exchanged, column)
    return column, exchanged, jnp.where(column < half, column, column - half)


def _load_partials(ref, rows, live, columns, num_partials):
    shape = (rows.shape[0], columns.shape[0])
    column = jnp.broadcast_to(columns[None, :], shape)
    mask = jnp.broadcast_to(live[:, None], shape) & (column < ref.shape[1])
    row = jnp.broadcast_to(rows[:, None], shape)
    step = ref.shape[0] // num_partials
    return [
        plgpu.load(ref.at[row + partial * step, column], mask=mask, other=0)
        for partial in range(num_partials)
    ]


def _load_row(ref, row, columns):
    values = ref.at[jnp.full_like(columns, row), columns]
    inside = columns < ref.shape[1]
    return plgpu.load(values, mask=inside, other=0, eviction_policy=tile_ops.EVICT_LAST)


def _load_weight(ref, columns):
    weight = plgpu.load(ref.at[columns], mask=columns < ref.shape[0], other=0)
    return weight.astype(jnp.float32)


def _sum_partials(partials, dtype):
    return _round_to_dtype(functools.reduce(jnp.add, partials), dtype)


def _rotate_heads(halves, weights, cos, sin, spec):
    own, exchanged = (_sum_partials(partials, spec.dtype) for partials in halves)
    if weights is not None:
        squares = jnp.sum(own * own, axis=1)
        scale = lax.rsqrt(squares / jnp.float32(spec.head_size) + jnp.float32(spec.eps))[:, None]
        own, exchanged = (
            _round_to_dtype(half * scale * weight[None, :], spec.dtype)
            for half, weight in zip((own, exchanged), weights, strict=True)
        )
    return own * cos[None, :] + exchanged * sin[None, :]


def _round_to_dtype(x, dtype):
    return x.astype(dtype).astype(jnp.float32)
