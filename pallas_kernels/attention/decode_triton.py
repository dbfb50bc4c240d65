"""Paged decode attention in Pallas Triton, in one launch: one or a few last tokens per sequence.

Grid (KV head, work item). A work item is one split of one sequence's keys. Its program computes:

    q          [R, H]  the query heads of the KV head, padded to R >= 16 rows in registers. Either
               an argument, or computed from the fused projection (`_load_new_token`). In that case
               the last split of a sequence also stores the new key and value, and attends to them
               from registers.
    for tile in the key tiles of this split:
        rows   = block_table[position // S] ...      gather `tile_tokens` rows of the pool
        k, v   = pool rows, masked past seq_len      pipelined loads (num_stages)
        max, sum, out = online softmax, in exp2
    if the sequence has one split:  out -> the result
    otherwise:                      (max, sum, out) -> float32 partials; the split that finishes
                                    last merges the partials of all splits, in their order

The number of splits per sequence depends on the lengths of all sequences. By default the plan
divides the key tiles of the batch evenly over `target_programs`: padding rows cost nothing, and a
single long sequence is spread over the whole GPU. If the batch alone fills the GPU, the plan splits
only sequences well above the mean length. The longest sequences start first, so that no long one
still runs when all others are done (longest processing time first: Graham 1969).

The plan (`decode_plan`) is computed once per step. A grid of B * `num_splits` items would start
many programs without work, and starting a program takes time.

An atomic counter for each sequence and KV head finds the split that finishes last. That split
resets the counter. The counters are therefore zero before and after every launch, and XLA creates
this input once for all launches of a program.

With `into`, q's first rows belong to the sequences, in order. The kernel writes the outputs of
sequences that have keys into `into`, in place, and leaves all other rows of `into` unchanged.

With Q queries per sequence (`DecodeSpec.num_queries`), a program handles the query heads of all Q
tokens, token by token. It reads each key tile once for all of these heads. Query j is at position
`seq_len - Q + j` and sees the keys up to its own position. While the group of heads has fewer than
16 rows, further queries cost no tensor-core work.

KV heads are the first axis of the grid, so that concurrent programs read neighbouring columns of
the same pool rows. Split-KV: Flash-Decoding (Dao et al. 2023). Online softmax: arXiv:1805.02867.
Paged attention: arXiv:2309.06180.
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

# A merge step handles at most `_MAX_MERGED_HEADS` query heads, one per warp.
_MAX_MERGED_HEADS = 4
# The partials of a merge step take at most `_MAX_MERGE_REGISTERS` registers per thread.
_MAX_MERGE_REGISTERS = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeSpec(tile_ops.AttentionSpec):
    """Static parameters of the decode kernel.

    Attributes:
        config: Launch parameters.
        num_queries: Number of queries per sequence (Q). `num_heads` counts the heads of all
            queries.
        in_place: Whether the kernel writes its output rows into the argument `into`.
        num_partials: Number of split-K partials of the fused projection, from which the kernel
            computes the queries. 0 if the kernel takes finished queries instead.
        eps: Epsilon of the RMSNorm of query and key heads; None without these norms.
        dtype: Dtype to which the sum of the fused projection's partials is rounded.
    """

    config: DecodeConfig
    num_queries: int = 1
    in_place: bool = False
    num_partials: int = 0
    eps: float | None = None
    dtype: Any = None

    @property
    def num_new_tokens(self) -> int:
        """Number of tokens per sequence that the pool does not hold yet: 0 or 1."""
        return min(self.num_partials, 1)

    @property
    def num_rows(self) -> int:
        """Number of rows of the score tile: the query heads per KV head, padded to 16 or more."""
        return max(16, pl.next_power_of_2(self.group))

    @property
    def rows_per_head(self) -> int:
        """Number of rows of the score tile per query head.

        The kernel stores the result of the first row of each head. The other rows pad the tile to
        16 rows, the minimum of a tensor core.
        """
        return self.num_rows // pl.next_power_of_2(self.group)

    @property
    def merge_shape(self) -> tuple[int, int]:
        """Shape [query heads, columns] of the partial outputs that one merge step handles."""
        heads = min(pl.next_power_of_2(self.group), _MAX_MERGED_HEADS)
        return heads, self.width

    @property
    def splits_per_merge(self) -> int:
        """Maximum number of splits that one merge step handles, limited by registers."""
        room = _MAX_MERGE_REGISTERS * 32 * self.config.num_warps // math.prod(self.merge_shape)
        return max(1, min(room, pl.next_power_of_2(self.config.num_splits)))


def paged_decode_attention(q, kv, block_tables, seq_lens, *, into=None, scales=None, **options):
    """Run the public op `paged_decode_attention` in Pallas Triton.

    `options` are fields of `DecodeSpec`. `into` is an optional array, shaped like q, that receives
    the outputs. The kernel does not change the rows of `into` whose sequences have no keys.
    """
    spec = DecodeSpec.for_pool(q.shape[1], kv, block_tables, in_place=into is not None, **options)
    rows = q.reshape(-1, q.shape[2])
    inputs = (rows,) if into is None else (rows, into.reshape(rows.shape))
    out, *_ = _launch(spec, inputs, kv, block_tables, seq_lens, rows, scales)
    return out.reshape(q.shape)


def paged_verify_attention(q, kv, block_tables, seq_lens, *, scales=None, **options):
    """Run the public op `paged_verify_attention` in Pallas Triton.

    `options` are fields of `DecodeSpec`.
    """
    batch, num_queries, num_heads, head_size = q.shape
    num_kv_heads = kv.k.shape[2]
    # The kernel expects consecutive rows for the query heads of a KV head, so move the axis of
    # queries behind the axis of KV heads.
    by_kv_head = q.reshape(batch, num_queries, num_kv_heads, -1, head_size).swapaxes(1, 2)
    rows = by_kv_head.reshape(-1, head_size)
    options |= {"num_queries": num_queries}
    spec = DecodeSpec.for_pool(num_queries * num_heads, kv, block_tables, **options)
    out, *_ = _launch(spec, (rows,), kv, block_tables, seq_lens, rows, scales)
    return out.reshape(by_kv_head.shape).swapaxes(1, 2).reshape(q.shape)


def rope_decode_attention(
    qkv, kv, block_tables, seq_lens, angles, norms, *, dtype, scales=None, **options
):
    """Run the public op `rope_decode_attention` in Pallas Triton.

    `options` are fields of `DecodeSpec`.
    """
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
    """Launch the kernel.

    Returns:
        The outputs, shaped like `rows`; then the two pools, if the kernel writes them; then scratch
        arrays, which callers ignore.
    """
    config, counters, scratch = spec.config, [], []
    plan = decode_plan(block_tables, seq_lens, spec)
    pools = [pool.reshape(-1, pool.shape[3]) for pool in kv]
    new_pools = pools if spec.num_new_tokens else []
    if config.num_splits > 1:
        counters = [jnp.zeros((seq_lens.shape[0] * spec.num_kv_heads,), jnp.int32)]
        row = jax.ShapeDtypeStruct((plan.shape[0] * spec.num_heads,), jnp.float32)
        scratch = [jax.ShapeDtypeStruct((*row.shape, rows.shape[1]), jnp.float32), row, row]
    # The call below passes the two pools, the block tables and the plan before `inputs`. If the
    # kernel writes in place, the last array of `inputs` is `into`.
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
    """A row of the plan: one split of one sequence's keys, for every KV head.

    The fields are scalars, or arrays with one element for each row of the plan.

    Attributes:
        sequence: Index of the sequence in the batch.
        seq_len: Length of the sequence in tokens.
        start, stop: Range of the key tiles of this split.
        split: Index of the split within its sequence.
        num_splits: Number of splits of the sequence; 0 marks an unused work item.
        slot: Pool slot of the sequence's last token.
    """

    sequence: Any
    seq_len: Any
    start: Any
    stop: Any
    split: Any
    num_splits: Any
    slot: Any


@functools.partial(jax.jit, static_argnums=2)
def decode_plan(block_tables, seq_lens, spec):
    """Return the work items of one KV head as rows [items, 8], the longest sequences first.

    All layers of a step use the same plan, so XLA computes the plan once per step.
    """
    batch, config = seq_lens.shape[0], spec.config
    first, end = _visible_tiles(seq_lens, spec)
    tiles = end - first
    split_tiles = jnp.maximum(_even_split_tiles(tiles, spec), _min_split_tiles(tiles, spec))
    used = jnp.maximum(pl.cdiv(tiles, split_tiles), 1)
    first_item = _first_items_longest_first(tiles, used)
    last = jnp.maximum(seq_lens - 1, 0)
    block = jnp.take_along_axis(block_tables, (last // spec.block_size)[:, None], axis=1)[:, 0]

    # If the tiles could be divided evenly, there would be at most `_max_even_splits` splits. The
    # last split of a sequence may be shorter than the others, which adds at most one split per
    # sequence.
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
    """Number the work items of all sequences, longer sequences first, and return the index of each
    sequence's first work item [B].

    `tiles` [B] are the lengths in key tiles, `used` [B] the numbers of work items. XLA compiles a
    sum over a B x B comparison to one kernel. A sort and a prefix sum would be several kernels.
    """
    row = jnp.arange(tiles.shape[0], dtype=jnp.int32)
    equal = (tiles[None, :] == tiles[:, None]) & (row[None, :] < row[:, None])
    before = equal | (tiles[None, :] > tiles[:, None])
    return jnp.sum(jnp.where(before, used[None, :], 0), axis=1)


def _even_split_tiles(tiles, spec):
    """Return the number of key tiles per split that divides the batch evenly among the programs.

    `tiles` [B] are the numbers of key tiles of the sequences. If the config sets
    `split_percent_of_mean`, a split has that percentage of the mean length instead.
    """
    if spec.config.split_percent_of_mean is None:
        return pl.cdiv(jnp.sum(tiles) * spec.num_kv_heads, spec.config.target_programs)
    live = jnp.maximum(jnp.sum((tiles > 0).astype(jnp.int32)), 1)
    return pl.cdiv(jnp.sum(tiles) * spec.config.split_percent_of_mean, 100 * live)


def _min_split_tiles(tiles, spec):
    """Return the minimum number of key tiles per split [B], for sequences of `tiles` [B] tiles.

    A sequence may have at most `num_splits` splits. A sequence of more than `splits_per_merge`
    tiles gets at least two tiles per split. Splits of one tile would need a second merge step,
    which takes longer than the computation of a tile.
    """
    min_tiles = jnp.maximum(pl.cdiv(tiles, spec.config.num_splits), 1)
    return jnp.maximum(min_tiles, jnp.minimum(pl.cdiv(tiles, spec.splits_per_merge), 2))


def _max_even_splits(batch, spec):
    """Return the maximum total number of splits of all sequences, per KV head, if all splits have
    the same length."""
    if spec.config.split_percent_of_mean is None:
        return spec.config.target_programs // spec.num_kv_heads
    return pl.cdiv(100 * batch, spec.config.split_percent_of_mean)


def _visible_tiles(seq_lens, spec):
    """Return each sequence's range (start [B], stop [B]) of key tiles that the queries see.

    Only keys that are already in the pool count.
    """
    tile = spec.config.tile_tokens
    end = (seq_lens + (tile - 1 - spec.num_new_tokens)) // tile
    if spec.sliding_window is None:
        return jnp.zeros_like(end), end
    first_key = seq_lens - (spec.sliding_window + spec.num_queries - 1)
    return jnp.maximum(first_key, 0) // tile, end


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
    # A tensor core needs at least 16 rows. With fewer heads, each head gets several rows, and only
    # the first row of each head is live.
    row = jnp.arange(spec.num_rows, dtype=jnp.int32)
    group_head = lax.div(row, jnp.int32(spec.rows_per_head))
    live_rows = (group_head < spec.group) & (lax.rem(row, jnp.int32(spec.rows_per_head)) == 0)

    def fold(tile, carry, q):
        positions = tile * config.tile_tokens + jnp.arange(config.tile_tokens, dtype=jnp.int32)
        live = positions < num_keys

        def mask():
            if spec.num_queries > 1:
                query = lax.div(group_head, jnp.int32(spec.group // spec.num_queries))
                last_key = (seq_len - spec.num_queries + query)[:, None]
                visible = positions[None, :] <= last_key
                if spec.sliding_window is not None:
                    visible &= positions[None, :] > last_key - spec.sliding_window
                return visible
            visible = live
            if spec.sliding_window is not None:
                visible &= positions >= seq_len - spec.sliding_window
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
            item_row = item_index * spec.num_heads + group_row
            _store_partials(partials, carry, item_row + group_head, live_rows)
            counter = item.sequence * spec.num_kv_heads + head

            @pl.when(_is_last_program(counters[0], counter, item.num_splits, spec))
            def _():
                first_partial = item_row - item.split * spec.num_heads
                _merge_partials(partials, out_ref, first_partial, first_row, item.num_splits, spec)


def _load_work_item(plan_ref, item_index):
    """Load row `item_index` of the plan as scalars."""
    columns = map(jnp.int32, range(len(_WorkItem._fields)))
    field_refs = (plan_ref.at[item_index, column] for column in columns)
    return _WorkItem(
        *(plgpu.load(field_ref, eviction_policy=tile_ops.EVICT_LAST) for field_ref in field_refs)
    )


def _is_last_program(counters_ref, counter, count, spec):
    """Count the programs that call this function, and return whether this program is the last of
    `count`.

    The last call resets the counter to 0. The last program sees everything that the other programs
    stored before their calls.
    """
    if not spec.interpret:
        # One thread increments the counter for the whole program, so all threads must have stored
        # their results before.
        plgpu.debug_barrier()
    # The atomic add has acquire and release semantics.
    before = plgpu.atomic_add(counters_ref, (counter,), jnp.int32(1))
    is_last = before == count - 1

    @pl.when(is_last)
    def _():
        counters_ref[counter] = jnp.int32(0)

    return is_last


def _store_partials(partials, carry, rows, live):
    row_max, row_sum, out = carry
    tile_ops.store_rows(partials[0], rows, out, live)
    # The Pallas interpreter also stores masked rows, and could overwrite new values with old ones.
    # It ignores rows past the end of the array, so masked rows get an index past the end.
    rows = jnp.where(live, rows, partials[1].shape[0])
    plgpu.store(partials[1].at[rows], row_max, mask=live)
    plgpu.store(partials[2].at[rows], row_sum, mask=live)


def _merge_partials(partials, out_ref, first_partial, first_row, num_splits, spec):
    """Merge the results of a sequence's splits into the output rows of one KV head's query heads.

    `partials` are three float32 arrays with one row per work item and query head: outputs
    [items * N, H], maxima [items * N] and sums [items * N]. A work item is one split.
    """
    heads, at_once = spec.merge_shape[0], spec.splits_per_merge
    zeros = jnp.zeros(spec.merge_shape, jnp.float32)
    start = jnp.full_like(zeros, tile_ops.MASKED_SCORE), zeros, zeros

    def merge_heads(head_tile, _):
        first_head = head_tile * heads

        def fold(index, carry):
            first = index * at_once
            rows = first_partial + first_head + first * spec.num_heads
            live = num_splits - first, spec.group - first_head
            return _fold_partials(partials, rows, live, carry, spec)

        num_steps = lax.div(num_splits + (at_once - 1), jnp.int32(at_once))
        _max, total, out = lax.fori_loop(0, num_steps, fold, start)
        out = out / jnp.where(total == 0, jnp.float32(1), total)
        head = first_head + jnp.arange(heads, dtype=jnp.int32)
        tile_ops.store_rows(out_ref, first_row + head, out, head < spec.group)

    lax.fori_loop(0, pl.cdiv(spec.group, heads), merge_heads, None)


def _fold_partials(partials, first_row, live, carry, spec):
    """Merge the partials of up to `splits_per_merge` splits into the running (max, sum, out).

    The running values have the shape [heads, H]. `live` is (number of remaining splits, number of
    remaining heads); loads beyond them are masked.

    All loads are issued before any result is needed, and sums stay within a thread or a warp. Heads
    and columns are loaded as one axis, so that one warp holds a head's columns of all splits. The
    maxima are loaded twice, once per axis order, to avoid moving them between threads.
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
    """Return two int32 arrays of a 2-D `shape`: each element's row index, and its column index."""
    return tuple(lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))


def _split_weights(maxima, axis):
    """Return each split's weight exp2(max - largest max), and the largest max along `axis`."""
    top = jnp.max(maxima, axis=axis)
    return jnp.exp2(maxima - jnp.expand_dims(top, axis)), top


def _combine_states(one, other):
    """Combine two softmax states (max, sum, out) of the same heads into one."""
    top = jnp.maximum(one[0], other[0])
    weight, other_weight = (jnp.exp2(each[0] - top) for each in (one, other))
    return top, one[1] * weight + other[1] * other_weight, one[2] * weight + other[2] * other_weight


# --- Loading queries, key and value of a new token from the fused projection -------------------


def _load_new_token(spec, refs, sequence, kv_head, with_key, pool_dtype, scales):
    """Load the queries, the key and the value of a sequence's new token for one KV head.

    The function rotates the queries and the key (RoPE). If the model has RMSNorms of query and key
    heads, the function applies the norms first.

    Args:
        spec: Static parameters of the kernel.
        refs: References of the fused projection [partials * B * (N + 2K), H], the cosines
            [B, H / 2] and the sines [B, H / 2]. If there are head norms, the norm weights [H] of
            queries and of keys follow.
        sequence: Index of the sequence in the batch, traced.
        kv_head: Index of the KV head, traced.
        with_key: Whether to load key and value, traced. If false, the returned key and value are
            arbitrary finite numbers.
        pool_dtype: Dtype of the pool and of the results. For an FP8 pool, the queries have the
            dtype of the projection, and the key and value are in FP8.
        scales: Scales of keys and values in an FP8 pool; (None, None) for other pools.

    Returns:
        Queries [group, H], key [1, H] and value [1, H]. Key and value are rounded as the pool
        stores them. The group is padded to a power of two, H to `spec.width`.
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
    """Return three index arrays [width], which give the columns that rotary embedding combines for
    each column of a head.

    For a column c of the head, the first array holds c. The second array holds the column that is
    rotated together with c: c + size / 2 or c - size / 2. The third array holds the column of the
    cosine and the sine.
    """
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
