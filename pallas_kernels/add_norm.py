"""Residual sum and RMSNorm in Pallas Triton, in one launch.

Grid (row,); one program:

    update = update[0, row] + update[1, row] + ..., rounded     (the parts of a split product)
    total  = hidden[row] + update, rounded                      -> the new residual stream
    normed = total / rms(total) * weight, float32, rounded      -> the next projection's input

XLA makes two or three kernels of this: the parts' sum, the residual's, and a reduction that reads
it again.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.tuning import NormConfig


def add_rms_norm(hidden, update, weight, *, eps, config: NormConfig, interpret: bool):
    """See the public entry of the same name."""
    shape = jax.ShapeDtypeStruct(hidden.shape, hidden.dtype)
    return tuple(
        pl.pallas_call(
            functools.partial(_kernel, eps=eps),
            out_shape=[shape, shape],
            grid=(hidden.shape[0],),
            compiler_params=plgpu.CompilerParams(num_warps=config.num_warps, num_stages=1),
            interpret=interpret,
            name="add_rms_norm",
        )(hidden, update, weight)
    )


def _kernel(hidden_ref, update_ref, weight_ref, normed_ref, total_ref, *, eps):
    size, num_parts = hidden_ref.shape[1], update_ref.shape[0]
    columns = jnp.arange(pl.next_power_of_2(size), dtype=jnp.int32)
    inside = columns < size
    index = (jnp.full_like(columns, pl.program_id(0)), columns)

    def load(ref, index):
        return plgpu.load(ref.at[index], mask=inside, other=0).astype(jnp.float32)

    dtype = total_ref.dtype
    parts = [load(update_ref, (jnp.full_like(columns, s), *index)) for s in range(num_parts)]
    update = functools.reduce(jnp.add, parts).astype(dtype)
    total = (load(hidden_ref, index) + update.astype(jnp.float32)).astype(dtype)
    plgpu.store(total_ref.at[index], total, mask=inside)
    wide = total.astype(jnp.float32)
    scale = lax.rsqrt(jnp.sum(wide * wide) / jnp.float32(size) + jnp.float32(eps))
    normed = wide * scale * load(weight_ref, columns)
    plgpu.store(normed_ref.at[index], normed.astype(normed_ref.dtype), mask=inside)
