"""Convert the blocks that a prefill step reads from an FP8 pool to the dtype of its queries.

prefill_hopper.py copies keys and values into shared memory and multiplies them there without a
conversion, so an FP8 pool needs this kernel first. The converted (wide) blocks form a pool of
`max_blocks` blocks, in the order of the sequences that have query rows. A sequence is converted
only if all of its blocks fit. The remaining sequences use the Triton kernel over the FP8 pool.
Numbers are not multiplied by their scale, so the conversion is exact.

Grid (programs,). An item is a part of a block; each program converts every `num_programs`-th item:

    for item in program, program + num_programs, ... below the items of all used blocks:
        block, part = divmod(item, parts per block)
        source = source_map[block]                   computed once per step, for all layers
        wide_k[block, part], wide_v[block, part] = k[source, part], v[source, part]

The loop ends at the last used block, so unused blocks cost nothing.
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
    """Blocks that were converted from FP8 to a wider dtype, and the batch that reads them.

    Attributes:
        kv: Pool of converted blocks [max_blocks, S, K, H]. Unused blocks are uninitialized memory.
        block_tables, query_start_loc, seq_lens: Batch of the sequences whose blocks were converted.
            The rows of all other sequences are padding.
        remaining_start_loc: `query_start_loc` of the sequences whose blocks were not converted;
            the converted sequences have no rows in it.
    """

    kv: LayerKV
    block_tables: Int32[Array, "B M"]
    query_start_loc: Int32[Array, "B+1"]
    seq_lens: Int32[Array, "B"]
    remaining_start_loc: Int32[Array, "B+1"]


def widen_blocks(
    kv, block_tables, query_start_loc, seq_lens, *, dtype, config: WideningConfig, interpret: bool
) -> WideBlocks:
    """Convert the FP8 blocks of the first sequences of the batch.

    Sequences without query rows are skipped. The function converts all blocks of a sequence or
    none, and stops before the total exceeds `config.max_blocks`.

    Args:
        kv: One layer's pool in FP8.
        block_tables, query_start_loc, seq_lens: See `paged_prefill_attention`.
        dtype: Dtype of the converted blocks.
        config: Launch parameters.
        interpret: Whether to run in the Pallas interpreter.
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
    # Without the optimization barrier, XLA would recompute the block tables and lengths at every
    # use, which takes seconds to compile.
    return WideBlocks(wide, *lax.optimization_barrier(fields))


def _plan_blocks(block_tables, query_start_loc, seq_lens, block_size, max_blocks):
    """Assign converted (wide) blocks to sequences.

    Returns:
        The first wide block of each sequence [B]; the number of sequences whose blocks all fit; the
        FP8 pool's block from which each wide block is converted [max_blocks]; and the number of
        used wide blocks [1].
    """
    batch = seq_lens.shape[0]
    has_rows = query_start_loc[1:] > query_start_loc[:-1]
    counts = jnp.where(has_rows, pl.cdiv(seq_lens, block_size), 0)
    # Without the optimization barrier, XLA would recompute the number of blocks per sequence at
    # every use, which takes seconds to compile.
    counts = lax.optimization_barrier(counts)
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
    offsets, wide_offsets = (jnp.arange(size, dtype=jnp.int32) for size in (chunk, 2 * chunk))

    def convert(round_index, none):
        item = program + round_index * num_programs
        block, part = lax.div(item, jnp.int32(parts)), lax.rem(item, jnp.int32(parts))
        columns, wide_columns = part * chunk + offsets, part * 2 * chunk + wide_offsets
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

    num_rounds = lax.div(
        used_ref[0] * parts - program + (num_programs - 1), jnp.int32(num_programs)
    )
    lax.fori_loop(0, num_rounds, convert, None)
