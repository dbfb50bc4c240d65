"""Ragged paged prefill attention in Pallas Mosaic GPU, for Hopper (compute capability 9.0).

One launch handles the whole ragged batch. A tile has 128 matrix rows: a window of `128 // M` rows
of q, limited to the rows of ONE sequence (`tiles.window_map`), times a set of M query heads of one
KV head. M is a power of 2 (`choose_heads_per_tile`). Matrix rows are ordered by head, then token.
If M does not divide the group of query heads, the last set repeats the group's last head.
In this file, a window is this range of rows of q. The kernel has no sliding window.

With `has_few_queries`, a tile has 64 matrix rows, and a program has one consumer warpgroup.

The grid has a fixed number of programs (`NUM_PROGRAMS`), one per SM. A work item is one tile with
one head set. A program processes one work item per round: every `NUM_PROGRAMS`-th item, starting
with the items of the last tile. A program has three warpgroups:

    loader             for each tile: copies of q, one per head; for each key tile: one bulk copy
                       of keys and one of values per block, through the block table. If a block is
                       longer than a key tile, only the key tile's part is copied.
    two consumers      64 matrix rows each; weights = softmax(q . keys) of the first key tile
      for key tiles:     issue scores = q . keys of the NEXT key tile; issue out += weights . values
                         when the scores are done: compute their weights, while the values' GEMM
                         still runs
                         when that GEMM is done: rescale out if necessary, round the weights
      out -> the rows of the tile

A consumer's softmax therefore overlaps with its own GEMM and with the other consumer's GEMMs. After
the last key tile of a tile comes the first key tile of the next tile, so the pipeline never drains.

Weights are exp2(score - reference), with one reference score per row. The reference is at least
the row's maximum score so far, minus 8 (in log2). Until a score exceeds the reference by more than
8, nothing is rescaled and threads need not agree on a maximum. Each thread sums its weights
separately until the tile ends.

For blocks past the end of a sequence, the copy reads outside the pool, which yields zeros. Slots
past the end inside the last block are set to zero in shared memory, because 0 * NaN is NaN.

Keys and values must have the dtype of the queries, since the GEMMs read the copies directly. For an
FP8 pool, widen_triton.py first converts the blocks; the scales then multiply scores and output.

FlashAttention-3 (arXiv:2407.08608) over paged keys (arXiv:2309.06180).
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import hopper_ops as ops
from pallas_kernels.attention.tile_ops import MASKED_SCORE
from pallas_kernels.attention.tiles import window_map
from pallas_kernels.attention.tuning import HOPPER_KEY_TILE as KEY_TILE
from pallas_kernels.attention.tuning import REFERENCE_NUM_CORES as NUM_PROGRAMS

CONSUMER_ROWS = 64  # A consumer warpgroup computes 64 rows of a matrix tile.
NUM_CONSUMERS = 2  # A program has two consumer warpgroups, or one if sequences have few tokens.
TILE_ROWS = NUM_CONSUMERS * CONSUMER_ROWS  # maximum number of matrix rows of a tile
NUM_STAGES = 2  # Shared memory has two pipeline stages each for q, keys and values.
_LOG2_E = math.log2(math.e)
# Layout of the output in shared memory: tiles of one row, so that any range of rows can be copied.
_ROW_TRANSFORMS = (plgpu.TilingTransform((1, 64)), plgpu.SwizzleTransform(128))
# The narrowest array with wgmma's accumulator layout has `_STRIP_COLUMNS` columns.
_STRIP_COLUMNS = 8
# Softmax subtracts a reference score from all scores of a row. If a score exceeds the reference by
# more than `_RESCALE_THRESHOLD_LOG2` (in log2), the reference grows and the output is rescaled.
_RESCALE_THRESHOLD_LOG2 = 8.0
# Each tile has `_NUM_FIELDS` int32 words of metadata. The metadata array begins with a header of
# `_NUM_FIELDS` words; its first word is the number of tiles.
_NUM_FIELDS = 8
# The metadata array has at least `_MIN_METADATA_SIZE` int32 words, which is enough for 256
# sequences of 128 blocks.
_MIN_METADATA_SIZE = 2**16


class _PrefillSpec(NamedTuple):
    """Static parameters of the Hopper prefill kernel.

    Attributes:
        scale: Factor of the scores.
        group: Number of query heads per KV head.
        heads_per_tile: Number of query heads in a tile.
        num_kv_heads: Number of KV heads.
        head_size: Elements of a head.
        block_size: Tokens of a block.
        num_consumers: Number of consumer warpgroups, each for 64 rows of a tile.
    """

    scale: float
    group: int
    heads_per_tile: int
    num_kv_heads: int
    head_size: int
    block_size: int
    num_consumers: int


def paged_prefill_attention(
    q,
    kv,
    block_tables,
    query_start_loc,
    seq_lens,
    *,
    scale,
    scales=None,
    call_shared=None,
    has_few_queries=False,
):
    """Run the public op `paged_prefill_attention` in Mosaic GPU.

    The kernel has no soft cap and no sliding window.

    `scales`, if given, are the scales of the FP8 pool from which the blocks of `kv` were converted.
    With `has_few_queries`, a tile has 64 matrix rows instead of 128. Smaller tiles are faster if
    most sequences have few new tokens, because fewer matrix rows are unused. Both tile sizes give
    the same bits.
    """
    (num_tokens, num_heads, head_size), (_, block_size, num_kv_heads, _) = q.shape, kv.k.shape
    group = num_heads // num_kv_heads
    if has_few_queries:  # Every set of query heads loads the keys again, so large sets are faster.
        num_consumers, heads_per_tile = 1, min(pl.next_power_of_2(group), CONSUMER_ROWS // 8)
    else:
        num_consumers, heads_per_tile = NUM_CONSUMERS, choose_heads_per_tile(group, num_tokens)
    spec = _PrefillSpec(
        scale, group, heads_per_tile, num_kv_heads, head_size, block_size, num_consumers
    )
    window = num_consumers * CONSUMER_ROWS // heads_per_tile
    # A tile reads `window` consecutive rows of q, so pad q to a multiple of `window` rows. Batches
    # of the engine get no padding here, because their sizes are already multiples of `window`.
    num_rows = -(-num_tokens // window) * window
    padded = (
        q if num_rows == num_tokens else jnp.pad(q, ((0, num_rows - num_tokens), (0, 0), (0, 0)))
    )
    numbers = _pack_metadata(block_tables, query_start_loc, seq_lens, num_rows, window)
    k, v = (pool.reshape(-1, num_kv_heads * head_size) for pool in kv)
    arrays = (padded.reshape(num_rows, -1), k, v, numbers, *(scales or ()))
    attend = functools.partial(_attend, spec=spec)
    out = attend(*arrays) if call_shared is None else call_shared(attend, *arrays)
    return out[:num_tokens].reshape(q.shape)


@functools.partial(jax.jit, static_argnames="spec")
def _attend(q, k, v, numbers, *scales, spec):
    """Launch the kernel over q [rows, N * H] and pools [slots, K * H].

    The function is jitted so that a step traces and lowers it once for all layers.
    """
    copies, tile_rows = max(1, KEY_TILE // spec.block_size), spec.num_consumers * CONSUMER_ROWS

    def scratch(*shape, transforms=ops.SWIZZLE_TRANSFORMS):
        return plgpu.SMEM(shape, q.dtype, transforms=transforms)

    def barriers(num_arrivals):
        return plgpu.Barrier(num_arrivals=num_arrivals, num_barriers=NUM_STAGES)

    call = plgpu.kernel(
        functools.partial(_kernel, spec=spec),
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(NUM_PROGRAMS,),
        grid_names=("program",),
        num_threads=spec.num_consumers + 1,
        thread_name="warp_group",
        scratch_types={
            "q_smem": scratch(NUM_STAGES, tile_rows, spec.head_size),
            "k_smem": scratch(NUM_STAGES, KEY_TILE, spec.head_size),
            "v_smem": scratch(NUM_STAGES, KEY_TILE, spec.head_size),
            "out_smem": scratch(
                spec.num_consumers, CONSUMER_ROWS, spec.head_size, transforms=_ROW_TRANSFORMS
            ),
            "q_full": barriers(spec.heads_per_tile),
            "k_full": barriers(copies),
            "v_full": barriers(copies),
            "q_empty": barriers(spec.num_consumers),
            "k_empty": barriers(spec.num_consumers),
            "v_empty": barriers(spec.num_consumers),
        },
        compiler_params=ops.COMPILER_PARAMS,
        kernel_name="paged_prefill_attention_hopper",
    )
    return call(q, k, v, numbers, *scales)


def choose_heads_per_tile(group, num_tokens):
    """Return the number of query heads per tile: the power of 2 that gives the fewest tiles.

    `group` is the number of query heads per KV head. If the number of heads per tile does not
    divide `group`, the last set of heads leaves matrix rows unused. Small numbers divide `group`
    more often. On the other hand, a tile with many heads has room for fewer tokens. The last tile
    of a sequence, which may have few tokens, then has fewer unused rows.

    Each set of heads loads the keys again, mostly from L2. The estimate assumes that every batch
    has eight sequences, so that batches with different numbers of sequences share one kernel.
    """

    def num_tiles(heads_per_tile):
        return -(-group // heads_per_tile) * (num_tokens / 8 * heads_per_tile / TILE_ROWS + 0.75)

    return min((16, 8, 4, 2, 1), key=num_tiles)


def _pack_metadata(block_tables, query_start_loc, seq_lens, num_rows, window):
    """Copy the number of tiles, the tile fields [tiles, 8], and the block tables into one array.

    Mosaic GPU needs buffers that are aligned to 256 bytes. The engine's block tables are a slice of
    a larger array, and XLA may pass this slice unaligned. The copy is always aligned.

    The size of the result is rounded up generously, so that batches of different sizes share one
    kernel. Each kernel takes about a second to compile.

    Returns:
        int32 array: 8 words for the number of tiles, 8 words per tile, block tables, padding.
    """
    tiles = window_map(seq_lens, query_start_loc, num_rows, window)
    first_table = _NUM_FIELDS + tiles.window_index.shape[0] * _NUM_FIELDS
    columns = [
        tiles.sequence * jnp.int32(block_tables.shape[1]) + jnp.int32(first_table),
        tiles.window_index * jnp.int32(window),
        tiles.first_position,
        tiles.begin,
        tiles.end,
        tiles.seq_len,
    ]
    fields = jnp.stack(
        columns + [jnp.zeros_like(tiles.window_index)] * (_NUM_FIELDS - len(columns)), axis=1
    )
    head = jnp.zeros(_NUM_FIELDS, jnp.int32).at[0].set(tiles.num_tiles)
    numbers = jnp.concatenate([head, fields.reshape(-1), block_tables.reshape(-1)])
    size = max(_MIN_METADATA_SIZE, pl.next_power_of_2(numbers.size))
    return jnp.pad(numbers, (0, size - numbers.size))


def _kernel(
    q_ref,
    k_ref,
    v_ref,
    metadata_ref,
    *refs,
    q_smem,
    k_smem,
    v_smem,
    out_smem,
    q_full,
    k_full,
    v_full,
    q_empty,
    k_empty,
    v_empty,
    spec,
):
    scale, group, heads_per_tile, num_kv_heads, head_size, block_size, num_consumers = spec
    *scale_refs, out_ref = refs
    window = num_consumers * CONSUMER_ROWS // heads_per_tile
    program, warp_group = lax.axis_index("program"), lax.axis_index("warp_group")
    num_tiles = metadata_ref[0]
    sets_per_group = -(-group // heads_per_tile)
    num_sets = num_kv_heads * sets_per_group
    num_items = num_tiles * num_sets
    num_rounds = lax.div(num_items - program + (NUM_PROGRAMS - 1), jnp.int32(NUM_PROGRAMS))

    def item_fields(round_index):
        """Return the fields of this program's work item number `round_index`.

        The fields are the index of the head set, then the six metadata fields of the tile. A number
        past the program's last work item gives the fields of the last work item.
        """
        index = jnp.minimum(round_index, num_rounds - 1)
        item = index * NUM_PROGRAMS + program
        tile_index = num_tiles - 1 - lax.div(item, jnp.int32(num_sets))
        head_set = lax.rem(item, jnp.int32(num_sets))
        return head_set, *(metadata_ref[(tile_index + 1) * _NUM_FIELDS + f] for f in range(6))

    def head_column(head_set, member):
        """Return the first column in q of query head number `member` of a head set.

        A head set consists of up to `heads_per_tile` query heads of one KV head. If the KV head has
        fewer query heads left, its last query head fills the rest of the set.
        """
        kv_head = lax.div(head_set, jnp.int32(sets_per_group))
        group_member = lax.rem(head_set, jnp.int32(sets_per_group)) * heads_per_tile + member
        return (kv_head * group + jnp.minimum(group_member, group - 1)) * head_size

    def num_key_tiles(fields):
        return lax.div(fields[3] + fields[5] + (KEY_TILE - 1), jnp.int32(KEY_TILE))

    def stage_index(step):
        return lax.rem(step, jnp.int32(NUM_STAGES))

    @pl.when((warp_group == num_consumers) & (num_rounds > 0))
    def _load():
        plgpu.set_max_registers(24, action="decrease")
        size = min(block_size, KEY_TILE)
        copies = KEY_TILE // size

        def load_q(index, fields, half):
            stage = stage_index(index)
            pl.when(index >= NUM_STAGES)(lambda: plgpu.barrier_wait(q_empty.at[stage]))
            head_set, _, first_row = fields[:3]
            for member in range(heads_per_tile):

                @pl.when(half == member % 2)
                def _copy(member=member):
                    columns = pl.ds(head_column(head_set, member), head_size)
                    plgpu.copy_gmem_to_smem(
                        q_ref.at[pl.ds(first_row, window), columns],
                        q_smem.at[stage, pl.ds(member * window, window)],
                        q_full.at[stage],
                    )

        def load_all(ref, smem, full, empty, half, with_q):
            def load_tile(index, step, fields):
                stage = stage_index(step)
                table, seq_len = fields[1], fields[6]
                kv_head = lax.div(fields[0], jnp.int32(sets_per_group))
                rows = []
                for i in range(-(-copies // 2)):
                    position = index * KEY_TILE + (i * 2 + half) * size
                    entry = table + lax.div(position, jnp.int32(block_size))
                    row = metadata_ref[jnp.minimum(entry, metadata_ref.shape[0] - 1)] * block_size
                    # If a block is longer than a key tile, it contains several key tiles.
                    if block_size > KEY_TILE:
                        row += lax.rem(position, jnp.int32(block_size))
                    # Past the end of a sequence, pass a row outside the pool: the Tensor Memory
                    # Accelerator (TMA) then writes zeros.
                    rows.append(jnp.where(position < seq_len, row, ref.shape[0]))
                pl.when(step >= NUM_STAGES)(lambda: plgpu.barrier_wait(empty.at[stage]))
                for i, row in enumerate(rows):

                    def copy(i=i, row=row):
                        plgpu.copy_gmem_to_smem(
                            ref.at[pl.ds(row, size), pl.ds(kv_head * head_size, head_size)],
                            smem.at[stage, pl.ds((i * 2 + half) * size, size)],
                            full.at[stage],
                        )

                    if copies == 1:
                        pl.when(half == 0)(copy)
                    else:
                        copy()

            def load_item(index, step):
                fields = item_fields(index)
                if with_q:
                    load_q(index, fields, half)
                # After the program's last work item, load one more key tile. `last_gemms` always
                # multiplies q by the first key tile of the next work item. The product of this
                # additional key tile is not used.
                steps = jnp.where(index < num_rounds, num_key_tiles(fields), 1)

                def load_step(i, step):
                    load_tile(i, step, fields)
                    return step + 1

                return lax.fori_loop(0, steps, load_step, step)

            lax.fori_loop(0, num_rounds + 1, load_item, jnp.int32(0))

        @plgpu.warp_map
        def _warp(warp):
            half = lax.rem(warp, jnp.int32(2))
            keys, values = (k_ref, k_smem, k_full, k_empty), (v_ref, v_smem, v_full, v_empty)
            pl.when(warp < 2)(lambda: load_all(*keys, half, with_q=False))
            pl.when(warp >= 2)(lambda: load_all(*values, half, with_q=True))

    @pl.when((warp_group < num_consumers) & (num_rounds > 0))
    def _compute():
        plgpu.set_max_registers(240, action="increase")
        first = warp_group * CONSUMER_ROWS
        matrix_row = plgpu.layout_cast(
            lax.broadcasted_iota(jnp.int32, (CONSUMER_ROWS, KEY_TILE), 0), plgpu.Layout.WGMMA
        )
        matrix_column = plgpu.layout_cast(
            lax.broadcasted_iota(jnp.int32, (CONSUMER_ROWS, KEY_TILE), 1), plgpu.Layout.WGMMA
        )
        my_out = out_smem.at[warp_group]
        k_scale, v_scale = [ref[0] for ref in scale_refs] or (1.0, 1.0)
        factor = scale * _LOG2_E * k_scale

        def wgmma_zeros(*shape):
            layout = plgpu.Layout.WGMMA if len(shape) == 2 else plgpu.Layout.WGMMA.reduce(1)
            return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)

        def my_q(stage):
            return q_smem.at[stage, pl.ds(pl.multiple_of(first, CONSUMER_ROWS), CONSUMER_ROWS)]

        def softmax(scores, reference, row_sum, shift):
            """Compute the softmax weights of one key tile.

            A weight is exp2(score - reference score), where both scores are in log2. The reference
            score of a row is the row's running maximum over the key tiles, but it is updated only
            if it would rise by more than `_RESCALE_THRESHOLD_LOG2`.

            Args:
                scores: Products q . keys [CONSUMER_ROWS, KEY_TILE], not yet scaled to log2.
                reference: Reference score of each row before this key tile.
                row_sum: Partial sums of the earlier weights [CONSUMER_ROWS, _STRIP_COLUMNS].
                shift: Position of the first query token, minus the position of the first key.
                    Query token t sees the keys 0 to t + `shift` of the key tile. With None, all
                    tokens see all keys.

            Returns:
                The float32 weights, the new `reference`, the new `row_sum`, and an int32: 1 if the
                reference score of any row in the warp changed, else 0.
            """
            if shift is not None:
                token = (matrix_row + first) & (window - 1)
                scores = jnp.where(matrix_column <= token + shift, scores, MASKED_SCORE)
            strip_max = _reduce_in_pairs(jnp.maximum, _split_strips(scores))

            def grow(reference, row_sum):
                row_max = jnp.max(strip_max, axis=1) * factor
                grown = jnp.where(row_max > reference + _RESCALE_THRESHOLD_LOG2, row_max, reference)
                rescale = jnp.exp2(reference - grown)
                return grown, row_sum * lax.broadcast_in_dim(rescale, row_sum.shape, [0])

            limit = lax.broadcast_in_dim(reference + _RESCALE_THRESHOLD_LOG2, strip_max.shape, [0])
            grew = _any_positive_in_warp(strip_max * factor - limit)
            reference, row_sum = lax.cond(grew != 0, grow, lambda *same: same, reference, row_sum)
            shifts = lax.broadcast_in_dim(reference, scores.shape, [0])
            weights = jnp.exp2(scores * factor - shifts)
            return (
                weights,
                reference,
                functools.reduce(jnp.add, _split_strips(weights), row_sum),
                grew,
            )

        def fold(carry, step, q_stage, shift):
            """Add weights @ values of key tile `step` to out; compute the next tile's weights.

            Args:
                carry: The weights of this key tile, `reference` and `row_sum` (see `softmax`), and
                    the output, which is not yet divided by the sum of the weights.
                step: Index of this key tile in the loader's order.
                q_stage: Pipeline stage that holds q.
                shift: Argument of `softmax` for the next key tile.

            Returns:
                The carry for the next key tile.
            """
            weights, reference, row_sum, out = carry
            value_stage, key_stage = stage_index(step), stage_index(step + 1)

            def issue(refs):
                out_acc, scores_acc, *results = refs
                plgpu.wgmma(scores_acc, my_q(q_stage), k_smem.at[key_stage].transpose((1, 0)))
                plgpu.wgmma(out_acc, weights, v_smem.at[value_stage])
                scores = plgpu.wgmma_accumulator_load(scores_acc, wait_n=1)
                plgpu.barrier_arrive(k_empty.at[key_stage])
                following = softmax(scores, reference, row_sum, shift)
                for ref, result in zip(results, following, strict=True):
                    ref[...] = result
                _force_evaluation(following[2])
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(v_empty.at[value_stage])

            plgpu.barrier_wait(v_full.at[value_stage])
            plgpu.barrier_wait(k_full.at[key_stage])
            no_scores = wgmma_zeros(CONSUMER_ROWS, KEY_TILE)
            start = plgpu.ACC.init(out), plgpu.ACC.init(no_scores)
            ends: Any = pl.run_state(issue)((*start, no_scores, reference, row_sum, jnp.int32(0)))
            # `run_state` is typed to return references, but returns arrays.
            out, _, weights, grown, row_sum, grew = ends

            def rescaled(out):
                return out * lax.broadcast_in_dim(jnp.exp2(reference - grown), out.shape, [0])

            out = lax.cond(grew != 0, rescaled, lambda out: out, out)
            return weights.astype(q_ref.dtype), grown, row_sum, out

        def last_gemms(weights, out, step, q_stage):
            """Run a work item's last GEMM, and the first GEMM of the program's next work item.

            The last GEMM adds weights @ values of the last key tile to `out`. The first GEMM
            computes the scores q @ keys of the next work item's first key tile.

            Returns:
                `out`, and the scores.
            """
            value_stage, key_stage = stage_index(step), stage_index(step + 1)

            def issue(refs):
                out_acc, scores_acc = refs
                plgpu.wgmma(out_acc, weights, v_smem.at[value_stage])
                plgpu.wgmma(scores_acc, my_q(q_stage), k_smem.at[key_stage].transpose((1, 0)))
                plgpu.wgmma_wait(1)
                plgpu.barrier_arrive(v_empty.at[value_stage])
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(k_empty.at[key_stage])

            plgpu.barrier_wait(k_full.at[key_stage])
            ends: Any = pl.run_state(issue)(
                (plgpu.ACC.init(out), plgpu.ACC.init(wgmma_zeros(CONSUMER_ROWS, KEY_TILE)))
            )
            return ends

        def zero_tail_values(stage, live, seq_len):
            """Set row `live` and all later rows of a value tile to 0.

            These rows are past the end of the sequence. If the sequence ends at the end of a block,
            the loader has already written the zeros. Both consumer warpgroups write the same zeros,
            so the warpgroups need no barrier.
            """

            @pl.when((live < KEY_TILE) & (lax.rem(seq_len, jnp.int32(block_size)) != 0))
            def _clean():
                for start in range(0, KEY_TILE, CONSUMER_ROWS):
                    rows = v_smem.at[stage, pl.ds(start, CONSUMER_ROWS)]
                    row = plgpu.layout_cast(
                        lax.broadcasted_iota(jnp.int32, (CONSUMER_ROWS, head_size), 0),
                        plgpu.Layout.WGMMA,
                    )
                    values = plgpu.layout_cast(rows[...], plgpu.Layout.WGMMA)
                    rows[...] = jnp.where(row < live - start, values, jnp.zeros_like(values))
                plgpu.commit_smem()

        def compute_item(index, carry):
            scores, step, fields = carry
            head_set, _, first_row, first_position, begin, end, seq_len = fields
            q_stage = stage_index(index)
            last = num_key_tiles(fields) - 1
            full = lax.div(jnp.maximum(first_position + begin + 1, 0), jnp.int32(KEY_TILE))
            full = jnp.minimum(full, last)

            def fold_next(i, carry, masked):
                shift = first_position - (i + 1) * KEY_TILE if masked else None
                return fold(carry, step + i, q_stage, shift)

            reference = plgpu.layout_cast(
                jnp.full((CONSUMER_ROWS,), MASKED_SCORE, jnp.float32), plgpu.Layout.WGMMA.reduce(1)
            )
            sums = wgmma_zeros(CONSUMER_ROWS, _STRIP_COLUMNS)
            weights, reference, sums, _ = softmax(scores, reference, sums, first_position)
            carry = (
                weights.astype(q_ref.dtype),
                reference,
                sums,
                wgmma_zeros(CONSUMER_ROWS, head_size),
            )
            # The loops below compute the softmax weights of every key tile except the first, whose
            # weights are computed above.
            full = jnp.maximum(full - 1, 0)
            carry = lax.fori_loop(0, full, functools.partial(fold_next, masked=False), carry)
            carry = lax.fori_loop(full, last, functools.partial(fold_next, masked=True), carry)

            # Finish the last key tile of this work item. `last_gemms` issues two GEMMs that
            # overlap: weights @ values of this work item, and q @ keys for the first key tile of
            # the next work item.
            plgpu.barrier_arrive(q_empty.at[q_stage])
            next_fields = item_fields(index + 1)
            weights, _, sums, out = carry
            inverse = lax.broadcast_in_dim(v_scale / jnp.sum(sums, axis=1), out.shape, [0])
            step = step + last
            plgpu.barrier_wait(v_full.at[stage_index(step)])
            zero_tail_values(stage_index(step), seq_len - last * KEY_TILE, seq_len)

            plgpu.barrier_wait(q_full.at[1 - q_stage])
            out, scores = last_gemms(weights, out, step, 1 - q_stage)
            store((out * inverse).astype(q_ref.dtype), head_set, first_row, begin, end)
            return scores, step + 1, next_fields

        def store(out, head_set, first_row, begin, end):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            my_out[...] = out
            plgpu.commit_smem()
            box = min(window, CONSUMER_ROWS)
            boxes = []
            for i in range(CONSUMER_ROWS // box):
                row = first + i * box
                member, token = lax.div(row, jnp.int32(window)), lax.rem(row, jnp.int32(window))
                columns = pl.ds(head_column(head_set, member), head_size)
                target = out_ref.at[pl.ds(first_row + token, box), columns]
                boxes.append((my_out.at[pl.ds(i * box, box)], target, token))
            whole = (begin == 0) & (end == window)

            @pl.when(whole)
            def _copy_whole():
                for source, target, _ in boxes:
                    plgpu.copy_smem_to_gmem(source, target)

            @pl.when(~whole)
            def _copy_rows():
                for source, target, token in boxes:
                    low, high = (jnp.clip(edge - token, 0, box) for edge in (begin, end))
                    _copy_row_range(source, target, low, high - low)

        fields = item_fields(0)
        plgpu.barrier_wait(q_full.at[0])
        plgpu.barrier_wait(k_full.at[0])

        def first_scores(acc):
            plgpu.wgmma(acc, my_q(0), k_smem.at[0].transpose((1, 0)))
            return acc[...]

        scores = pl.run_scoped(first_scores, plgpu.ACC((CONSUMER_ROWS, KEY_TILE), jnp.float32))
        plgpu.barrier_arrive(k_empty.at[0])
        carry = scores, jnp.int32(0), fields
        _, step, _ = lax.fori_loop(0, num_rounds, compute_item, carry)
        # A program must not end before its last copies have arrived.
        plgpu.barrier_wait(v_full.at[stage_index(step)])
        plgpu.wait_smem_to_gmem(0)


def _split_strips(array):
    """Split an array into strips of `_STRIP_COLUMNS` columns.

    A thread holds the same elements of every strip, so combining strips needs no exchange.
    """
    return [array[:, i : i + _STRIP_COLUMNS] for i in range(0, array.shape[1], _STRIP_COLUMNS)]


def _reduce_in_pairs(operation, arrays):
    """Reduce 2, 4, 8, ... arrays to one, as a balanced tree with short dependency chains."""
    while len(arrays) > 1:
        arrays = [operation(*arrays[i : i + 2]) for i in range(0, len(arrays), 2)]
    return arrays[0]


def _any_positive_in_warp(array):
    """Return, in each warp, 1 if the warp's part of `array` has a positive number, else 0.

    The array has the shape [CONSUMER_ROWS, _STRIP_COLUMNS]. Warps may get different results, so
    code that depends on the result must not wait for other warps. NaN counts as not positive. An
    unused row that holds NaN does not hide positive numbers in other rows.
    """

    def body(_, array):
        max_value = functools.reduce(ops.Value.maximum, ops.thread_elements(array))
        text = (
            "{ .reg .pred p; setp.gt.f32 p, $1, 0f00000000; vote.sync.any.pred p, p, 0xffffffff; "
            "selp.b32 $0, 1, 0, p; }"
        )
        (found,) = ops.ptx(text, max_value, out=[ops.int32()])
        return mgpu.FragmentedArray.splat(found.ir, (), is_signed=True)

    kind = plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT)
    return plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA,), return_type=kind)(body)(array)


def _force_evaluation(sums):
    """Make the assembler compute `sums` [CONSUMER_ROWS, _STRIP_COLUMNS] before the next wait.

    Otherwise the assembler moves the softmax behind the wait for the GEMM, and softmax and GEMM no
    longer overlap. The function emits a branch that is taken if a sum is negative. Sums of softmax
    weights are never negative, but the assembler must compute the sums to test them.
    """

    def body(_, sums):
        tests = ["setp.lt.f32 p, $0, 0f00000000;"]
        values = ops.thread_elements(sums)
        tests += [f"setp.lt.or.f32 p, ${i}, 0f00000000, p;" for i in range(1, len(values))]
        ops.ptx("{ .reg .pred p; " + " ".join(tests) + " @p nanosleep.u32 0; }", *values)
        return ()

    plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA,), return_type=())(body)(sums)


def _copy_row_range(source, target, start, count):
    """Copy rows `start` to `start + count` of `source` to the same rows of `target`.

    The size of a copy is static, so `count` rows are copied in parts of powers of 2.
    """
    size = source.shape[0]
    while size:

        @pl.when(count & size != 0)
        def _copy(start=start, size=size):
            plgpu.copy_smem_to_gmem(source.at[pl.ds(start, size)], target.at[pl.ds(start, size)])

        start = start + (count & size)
        size //= 2
