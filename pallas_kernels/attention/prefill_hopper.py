"""Ragged paged prefill attention in Pallas Mosaic GPU, for Hopper (compute capability 9.0).

One launch for a whole ragged batch. A tile is a window of `128 // M` rows of q, cut down to the
rows of ONE sequence (tiles.py has the map), times a set of M query heads of one KV head, M being a
power of 2 that suits the group: 128 matrix rows, member by member. A group that is no multiple of M
has its last head more than once in its last set. As many programs as the GPU has SMs each take
tiles in turn, last first; a program is three warpgroups:

    loader             for each of its tiles: copies of q, one a member; for each key tile, one copy
                       a block of keys and of values (the bulk copy engine, through the block
                       table); of a block longer than a key tile, the tile's part of it
    two consumers      of 64 matrix rows each; weights = softmax(q . keys) of the first key tile
      for key tiles:     issue scores = q . keys of the NEXT one; issue out += weights . values
                         once the scores are there: their weights, while the values' GEMM runs
                         once that is done: out rescaled if need be, the weights rounded
      out -> the tile's own rows

So a consumer's softmax runs under its own GEMM and under the other's. Weights are exp2 of scores
relative to a reference, which is the row's greatest score so far, or up to 2^8 less: as long as no
score exceeds it by more, nothing is rescaled and threads need not agree on a maximum. Each thread
sums weights of its own until the tile is done. The next key tile of a tile's last one is the first
of the next tile: nothing drains.
Blocks past the end of a sequence are read from outside the pool, which gives zeros; slots past the
end inside its last block are zeroed in the copy, for 0 * NaN is NaN.
Pools have the dtype of the queries, since nothing converts what was copied before the GEMMs read
it: of a scaled pool widen_triton.py makes one first, whose scales are factors of the scores and of
the output.
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

TILE_ROWS = 128  # matrix rows of a tile
CONSUMER_ROWS = TILE_ROWS // 2  # of one consumer warpgroup
NUM_STAGES = 2  # tiles of keys, and of values, in flight
_LOG2_E = math.log2(math.e)
# Rows one by one, so that any number of them can be copied out.
_ROW_TRANSFORMS = (plgpu.TilingTransform((1, 64)), plgpu.SwizzleTransform(128))
_STRIP_COLUMNS = 8  # columns of the least array with the layout of GEMMs
_RESCALE_THRESHOLD_LOG2 = (
    8.0  # by which scores may exceed what they are relative to, as a power of two
)
_NUM_FIELDS = 8  # int32 numbers a tile, and before the first tile's
_MIN_METADATA_SIZE = 2**16  # of 256 sequences with 128 blocks each


class _PrefillSpec(NamedTuple):
    """What a program knows when it is compiled; `heads_per_tile` are the query heads of a tile."""

    scale: float
    group: int
    heads_per_tile: int
    num_kv_heads: int
    head_size: int
    block_size: int


def paged_prefill_attention(
    q, kv, block_tables, query_start_loc, seq_lens, *, scale, scales=None, call_shared=None
):
    """See the public entry of the same name; no soft cap and no window, and `scales` are those of
    the pool that the blocks were widened from."""
    (num_tokens, num_heads, head_size), (_, block_size, num_kv_heads, _) = q.shape, kv.k.shape
    group = num_heads // num_kv_heads
    heads_per_tile = choose_heads_per_tile(group, num_tokens)
    spec = _PrefillSpec(scale, group, heads_per_tile, num_kv_heads, head_size, block_size)
    window = TILE_ROWS // heads_per_tile
    # Windows are whole tiles of q: the padding costs a copy, which a step's bucket never needs.
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
    """The kernel over rows of all heads; inside a step's jit it is traced and lowered once."""
    copies = max(1, KEY_TILE // spec.block_size)

    def scratch(*shape, transforms=ops.SWIZZLE_TRANSFORMS):
        return plgpu.SMEM(shape, q.dtype, transforms=transforms)

    def barriers(num_arrivals):
        return plgpu.Barrier(num_arrivals=num_arrivals, num_barriers=NUM_STAGES)

    call = plgpu.kernel(
        functools.partial(_kernel, spec=spec),
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(NUM_PROGRAMS,),
        grid_names=("program",),
        num_threads=3,
        thread_name="warp_group",
        scratch_types={
            "q_smem": scratch(NUM_STAGES, TILE_ROWS, spec.head_size),
            "k_smem": scratch(NUM_STAGES, KEY_TILE, spec.head_size),
            "v_smem": scratch(NUM_STAGES, KEY_TILE, spec.head_size),
            "out_smem": scratch(2, CONSUMER_ROWS, spec.head_size, transforms=_ROW_TRANSFORMS),
            "q_full": barriers(spec.heads_per_tile),
            "k_full": barriers(copies),
            "v_full": barriers(copies),
            "q_empty": barriers(2),
            "k_empty": barriers(2),
            "v_empty": barriers(2),
        },
        compiler_params=ops.COMPILER_PARAMS,
        kernel_name="paged_prefill_attention_hopper",
    )
    return call(q, k, v, numbers, *scales)


def choose_heads_per_tile(group, num_tokens):
    """Query heads that share a tile: that power of 2 with which a step has the least tiles.

    Few heads divide a group of any size (6: 2, 7: 1), and so leave no row of a tile idle; many make
    for tiles of few tokens, of which sequences fill all but their last one. Each set of heads loads
    the group's keys, mostly from the L2. The step is taken to hold eight sequences, so that those
    with more and with fewer have the same kernel.
    """

    def num_tiles(heads_per_tile):
        return -(-group // heads_per_tile) * (num_tokens / 8 * heads_per_tile / TILE_ROWS + 0.75)

    return min((16, 8, 4, 2, 1), key=num_tiles)


def _pack_metadata(block_tables, query_start_loc, seq_lens, num_rows, window):
    """The number of tiles, flattened [tiles, 8] of what a program reads of each, the block tables.

    One array, made here: Mosaic GPU wants its buffers on 256 bytes, and XLA passes a slice of an
    argument, which the tables are in a step, as it lies. Its size is rounded up much, so that
    batches of other sizes have the same kernel: it is compiled in a second, one at a time.
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
    scale, group, heads_per_tile, num_kv_heads, head_size, block_size = spec
    *scale_refs, out_ref = refs
    window = TILE_ROWS // heads_per_tile
    program, warp_group = lax.axis_index("program"), lax.axis_index("warp_group")
    num_tiles = metadata_ref[0]
    sets_per_group = -(-group // heads_per_tile)
    num_sets = num_kv_heads * sets_per_group
    num_items = num_tiles * num_sets
    num_rounds = lax.div(num_items - program + (NUM_PROGRAMS - 1), jnp.int32(NUM_PROGRAMS))

    def item_fields(round_index):
        """Of this program's item: set of heads, then the tile's fields. Past the last, the last."""
        index = jnp.minimum(round_index, num_rounds - 1)
        item = index * NUM_PROGRAMS + program
        tile_index = num_tiles - 1 - lax.div(item, jnp.int32(num_sets))
        head_set = lax.rem(item, jnp.int32(num_sets))
        return head_set, *(metadata_ref[(tile_index + 1) * _NUM_FIELDS + f] for f in range(6))

    def head_column(head_set, member):
        """The first column of a member of a set; a group's last stands in for those it lacks."""
        kv_head = lax.div(head_set, jnp.int32(sets_per_group))
        own = lax.rem(head_set, jnp.int32(sets_per_group)) * heads_per_tile + member
        return (kv_head * group + jnp.minimum(own, group - 1)) * head_size

    def num_key_tiles(fields):
        return lax.div(fields[3] + fields[5] + (KEY_TILE - 1), jnp.int32(KEY_TILE))

    def stage_index(step):
        return lax.rem(step, jnp.int32(NUM_STAGES))

    @pl.when((warp_group == 2) & (num_rounds > 0))
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
                    if block_size > KEY_TILE:  # a block has several key tiles
                        row += lax.rem(position, jnp.int32(block_size))
                    # Outside the pool, the copy engine fills in zeros.
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
                # Past the last item, one key tile that the last GEMMs ask for.
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

    @pl.when((warp_group < 2) & (num_rounds > 0))
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
            """Weights in float32, reference and sums after them, and whether any reference grew.

            shift: columns at or before row token + shift are seen; None: all.
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
            """out + weights . values of this step; the next step's weights, reference and sums."""
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
            out, _, weights, grown, row_sum, grew = ends  # arrays, not references as its type says

            def rescaled(out):
                return out * lax.broadcast_in_dim(jnp.exp2(reference - grown), out.shape, [0])

            out = lax.cond(grew != 0, rescaled, lambda out: out, out)
            return weights.astype(q_ref.dtype), grown, row_sum, out

        def last_gemms(weights, out, step, q_stage):
            """out + weights . values of a tile's last step, and the next tile's first scores."""
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
            """Zero the rows from `live` on where the sequence ends inside a block.

            Both warpgroups write the same values, so neither waits for the other.
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
            full = jnp.maximum(full - 1, 0)  # the first one has been seen to
            carry = lax.fori_loop(0, full, functools.partial(fold_next, masked=False), carry)
            carry = lax.fori_loop(full, last, functools.partial(fold_next, masked=True), carry)

            # The last key tile; the scores that follow belong to the next item.
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
        plgpu.barrier_wait(v_full.at[stage_index(step)])  # no copy outlives the program
        plgpu.wait_smem_to_gmem(0)


def _split_strips(array):
    """Of the columns; each thread has the same elements of all of them."""
    return [array[:, i : i + _STRIP_COLUMNS] for i in range(0, array.shape[1], _STRIP_COLUMNS)]


def _reduce_in_pairs(operation, arrays):
    """All arrays in one; a power of 2 of them. No operation waits for more than it needs."""
    while len(arrays) > 1:
        arrays = [operation(*arrays[i : i + 2]) for i in range(0, len(arrays), 2)]
    return arrays[0]


def _any_positive_in_warp(array):
    """1 in warps with a positive number in an array [HALF, _STRIP], else 0. What a warp
    does by it may not wait for other warps.

    Rows that are not the tile's own may have NaN; these are passed over, since a thread has two
    rows, and the other one may be its own.
    """

    def body(_, array):
        most = functools.reduce(ops.Value.maximum, ops.thread_elements(array))
        text = (
            "{ .reg .pred p; setp.gt.f32 p, $1, 0f00000000; vote.sync.any.pred p, p, 0xffffffff; "
            "selp.b32 $0, 1, 0, p; }"
        )
        (found,) = ops.ptx(text, most, out=[ops.int32()])
        return mgpu.FragmentedArray.splat(found.ir, (), is_signed=True)

    kind = plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT)
    return plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA,), return_type=kind)(body)(array)


def _force_evaluation(sums):
    """Keeps a wait that comes next behind the sums [HALF, _STRIP] of weights, which are never
    negative: else the assembler moves all that leads to them behind it, away from the GEMM that
    is waited for."""

    def body(_, sums):
        tests = ["setp.lt.f32 p, $0, 0f00000000;"]
        values = ops.thread_elements(sums)
        tests += [f"setp.lt.or.f32 p, ${i}, 0f00000000, p;" for i in range(1, len(values))]
        ops.ptx("{ .reg .pred p; " + " ".join(tests) + " @p nanosleep.u32 0; }", *values)
        return ()

    plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA,), return_type=())(body)(sums)


def _copy_row_range(source, target, start, count):
    """Copies rows start to start + count of both; sizes of copies are static, so by powers of 2."""
    size = source.shape[0]
    while size:

        @pl.when(count & size != 0)
        def _copy(start=start, size=size):
            plgpu.copy_smem_to_gmem(source.at[pl.ds(start, size)], target.at[pl.ds(start, size)])

        start = start + (count & size)
        size //= 2
