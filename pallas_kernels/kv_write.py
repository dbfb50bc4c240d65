"""KV write in Pallas Triton: a step's new keys and values into their slots, in one launch.

Grid (token, column chunk); one program:

    slot = slot_mapping[token]
    pool_k[slot, chunk], pool_v[slot, chunk] = k[token, chunk], v[token, chunk]

A slot is one row of K * H elements. The pools are aliased to the outputs, so nothing else moves.
With q/k norm and rotary embedding before the store: rope_write.py.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.tuning import MoveConfig
from pallas_kernels.types import LayerKV


def write_kv(kv, k, v, slot_mapping, *, config: MoveConfig, interpret: bool):
    """See the public entry of the same name."""
    num_tokens, width = k.shape[0], k.shape[1] * k.shape[2]
    chunk = min(config.chunk, pl.next_power_of_2(width))
    pools = [pool.reshape(-1, width) for pool in kv]
    call = pl.pallas_call(
        functools.partial(_kernel, chunk=chunk),
        out_shape=[jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in pools],
        grid=(num_tokens, pl.cdiv(width, chunk)),
        input_output_aliases={0: 0, 1: 1},
        compiler_params=plgpu.CompilerParams(num_warps=config.num_warps, num_stages=1),
        interpret=interpret,
        name="write_kv",
    )
    new_rows = [rows.reshape(num_tokens, width) for rows in (k, v)]
    return LayerKV(*(pool.reshape(kv.k.shape) for pool in call(*pools, *new_rows, slot_mapping)))


def _kernel(_, __, k_ref, v_ref, slots_ref, pool_k_ref, pool_v_ref, *, chunk):
    token = pl.program_id(0)
    slot = slots_ref[token]
    columns = pl.program_id(1) * chunk + jnp.arange(chunk, dtype=jnp.int32)
    inside = columns < k_ref.shape[1]
    valid = (slot >= 0) & (slot < pool_k_ref.shape[0])
    source = (jnp.full_like(columns, token), columns)
    target = (jnp.full_like(columns, jnp.where(valid, slot, 0)), columns)
    for new_ref, pool_ref in ((k_ref, pool_k_ref), (v_ref, pool_v_ref)):
        row = plgpu.load(new_ref.at[source], mask=inside, other=0)
        plgpu.store(pool_ref.at[target], row, mask=inside & valid)
