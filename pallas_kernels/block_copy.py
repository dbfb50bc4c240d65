"""Block copy in Pallas Triton: a step's copy-on-write pairs, all layers, K and V, in one launch.

Grid (pair, chunk of a block, array); one program copies one chunk of one block of one array:

    source, target = src[pair], dst[pair]
    if source != target:                        (0, 0) is padding
        arrays[array][target, chunk] = arrays[array][source, chunk]

`array` runs over the K and V pools of all layers; each is an argument of its own, aliased to an
output, and a program takes the branch of its array. Pairs are independent (the public entry demands
it), so programs need no order.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.tuning import MoveConfig


def copy_blocks(pool, src, dst, *, config: MoveConfig, interpret: bool):
    """See the public entry of the same name."""
    arrays, tree = jax.tree.flatten(pool)
    blocks = [array.reshape(array.shape[0], -1) for array in arrays]
    width = blocks[0].shape[1]
    chunk = min(config.chunk, pl.next_power_of_2(width))
    call = pl.pallas_call(
        functools.partial(_kernel, chunk=chunk),
        out_shape=[jax.ShapeDtypeStruct(array.shape, array.dtype) for array in blocks],
        grid=(src.shape[0], pl.cdiv(width, chunk), len(blocks)),
        input_output_aliases={index + 2: index for index in range(len(blocks))},
        compiler_params=plgpu.CompilerParams(num_warps=config.num_warps, num_stages=1),
        interpret=interpret,
        name="copy_blocks",
    )
    copied = call(src, dst, *blocks)
    shape = arrays[0].shape
    return jax.tree.unflatten(tree, [array.reshape(shape) for array in copied])


def _kernel(src_ref, dst_ref, *refs, chunk):
    pools = refs[len(refs) // 2 :]  # the outputs; the inputs are the same memory
    source, target = src_ref[pl.program_id(0)], dst_ref[pl.program_id(0)]
    columns = pl.program_id(1) * chunk + jnp.arange(chunk, dtype=jnp.int32)
    moves = (columns < pools[0].shape[1]) & (source != target)

    for index, pool_ref in enumerate(pools):

        @pl.when(pl.program_id(2) == index)
        def _(pool_ref=pool_ref):
            rows = plgpu.load(
                pool_ref.at[jnp.full_like(columns, source), columns], mask=moves, other=0
            )
            plgpu.store(pool_ref.at[jnp.full_like(columns, target), columns], rows, mask=moves)
