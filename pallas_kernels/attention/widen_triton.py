"""A step's blocks of a pool in FP8 as one of the queries' dtype would have them, for a kernel that
multiplies what the copy engine put into shared memory and has no place to convert it.

Sequences with rows have their blocks side by side in a pool of their own, in order, as long as all
of a sequence fit its `max_blocks`; the later ones stay where they are. Numbers are converted, not
multiplied by their scale, so nothing is rounded.

Grid (programs,): each takes parts of the blocks in turn,

    block  = first, first + programs, ...            of those that are in use
    source = source_map[block]                       made once a step, for all layers
    wide_k[block], wide_v[block] = k[source], v[source]

so that what a step does not need of the room costs nothing.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Int32

from pallas_kernels.attention.tuning import WideningConfig
from pallas_kernels.types import LayerKV, unpack_fp8_pairs


class WideBlocks(NamedTuple):
    """The pool, and who is where in it.

    Attributes:
        kv: [room, S, K, H]; blocks that no sequence has are whatever was in memory.
        block_tables, query_start_loc, seq_lens: of the sequences that have all their blocks there;
            the rows of the others are padding.
        rest: the starts of the others, before which no sequence has rows.
    """

    kv: LayerKV
    block_tables: Int32[Array, "B M"]
    query_start_loc: Int32[Array, "B+1"]
    seq_lens: Int32[Array, "B"]
    remaining_start_loc: Int32[Array, "B+1"]


def widen_blocks(
    kv, block_tables, query_start_loc, seq_lens, *, dtype, config: WideningConfig, interpret: bool
) -> WideBlocks:
    """The blocks of the first sequences with rows, as many as have room.

    Args:
        kv: one layer's pool in FP8.
        block_tables, query_start_loc, seq_lens: as of `paged_prefill_attention`.
        dtype: of the wide blocks.
        config: its launch, and the room in blocks.
        interpret: without a GPU.
    """
    block_size, max_blocks = kv.k.shape[1], config.max_blocks
    starts, num_fitting, source, used = _plan_blocks(
        block_tables, query_start_loc, seq_lens, block_size, max_blocks
    )
    wide = _convert(kv, source, used, dtype, config, interpret)
    column = jnp.arange(block_tables.shape[1], dtype=jnp.int32)
    border = query_start_loc[num_fitting]
    sequence_index = jnp.arange(seq_lens.shape[0], dtype=jnp.int32)
    fields = (
        starts[:, None] + column[None, :],
        jnp.minimum(query_start_loc, border),
        jnp.where(sequence_index < num_fitting, seq_lens, 0),
        jnp.maximum(query_start_loc, border),
    )
    # Else XLA computes them anew wherever they are read, which takes it seconds to compile.
    return WideBlocks(wide, *lax.optimization_barrier(fields))


def _plan_blocks(block_tables, query_start_loc, seq_lens, block_size, max_blocks):
    """First wide block of each sequence, how many sequences fit, which block of the pool each wide
    one is [room], and how many of these there are [1]."""
    batch = seq_lens.shape[0]
    has_rows = query_start_loc[1:] > query_start_loc[:-1]
    counts = jnp.where(has_rows, pl.cdiv(seq_lens, block_size), 0)
    counts = lax.optimization_barrier(counts)  # as in `widen_blocks`
    ends = jnp.cumsum(counts)
    starts, fits = ends - counts, ends <= max_blocks
    block = jnp.arange(max_blocks, dtype=jnp.int32)
    owner = jnp.searchsorted(ends, block, side="right", method="compare_all").astype(jnp.int32)
    owner = jnp.minimum(owner, batch - 1)
    entry = jnp.clip(block - starts[owner], 0, block_tables.shape[1] - 1)
    used = jnp.max(jnp.where(fits, ends, 0), keepdims=True)
    return starts, jnp.sum(fits.astype(jnp.int32)), block_tables[owner, entry], used


def _convert(kv, source, used, dtype, config, interpret):
    pools = [pool.reshape(pool.shape[0], -1) for pool in kv]
    width = pools[0].shape[1]
    chunk = min(config.chunk // 2, pl.next_power_of_2(width))
    call = pl.pallas_call(
        functools.partial(_kernel, chunk=chunk, num_programs=config.num_programs),
        out_shape=[jax.ShapeDtypeStruct((config.max_blocks, 2 * width), dtype)] * 2,
        grid=(config.num_programs,),
        compiler_params=plgpu.CompilerParams(num_warps=config.num_warps, num_stages=1),
        interpret=interpret,
        name="widen_blocks",
    )
    wide = call(*pools, source, used)
    return LayerKV(*(pool.reshape(-1, *kv.k.shape[1:3], kv.head_size) for pool in wide))


def _kernel(k_ref, v_ref, source_ref, used_ref, wide_k_ref, wide_v_ref, *, chunk, num_programs):
    width, program = k_ref.shape[1], pl.program_id(0)
    parts = pl.cdiv(width, chunk)
    own, own_wide = (jnp.arange(size, dtype=jnp.int32) for size in (chunk, 2 * chunk))

    def convert(turn, none):
        item = program + turn * num_programs
        block, part = lax.div(item, jnp.int32(parts)), lax.rem(item, jnp.int32(parts))
        columns, wide_columns = part * chunk + own, part * 2 * chunk + own_wide
        mask, wide_mask = None, None
        if width % chunk:
            mask, wide_mask = columns < width, wide_columns < 2 * width
        row = jnp.full_like(columns, source_ref[block])
        target = jnp.full_like(wide_columns, block), wide_columns
        loaded = [
            plgpu.load(ref.at[row, columns], mask=mask, other=None if mask is None else 0)
            for ref in (k_ref, v_ref)
        ]
        for wide_ref, tile in zip((wide_k_ref, wide_v_ref), loaded, strict=True):
            wide = unpack_fp8_pairs(tile, wide_ref.dtype)
            plgpu.store(wide_ref.at[target], wide, mask=wide_mask)
        return none

    turns = lax.div(used_ref[0] * parts - program + (num_programs - 1), jnp.int32(num_programs))
    lax.fori_loop(0, turns, convert, None)
