"""Writes and copies in the KV pool in plain XLA.

Writes are in place if the pool is donated, except for bfloat16 pools on a CPU. XLA's CPU compiler
has no bfloat16 scatter or dynamic update, so it converts the whole pool to float32 and back. On a
CPU, use a pool of another dtype.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.gemm.fp8 import to_fp8
from pallas_kernels.gemm.xla import sum_partials
from pallas_kernels.norm import rms_norm
from pallas_kernels.types import LayerKV, pack_fp8_pairs


def to_pool_dtype(x, dtype, scale):
    """Convert keys or values to the pool's `dtype`, or to packed FP8 pairs if `scale` is given."""
    return x.astype(dtype) if scale is None else pack_fp8_pairs(to_fp8(x, scale))


def write_kv(kv, k, v, slot_mapping, scales=None):
    """Run the public op `write_kv` in plain XLA."""
    num_blocks, block_size = kv.k.shape[:2]
    if scales is not None:
        k_scale, v_scale = (scale.reshape(()) for scale in scales)
        k, v = to_pool_dtype(k, kv.k.dtype, k_scale), to_pool_dtype(v, kv.v.dtype, v_scale)
    # JAX would count negative slots from the end. Move them past the end of the pool instead, where
    # the scatter drops them.
    slots = jnp.where(slot_mapping < 0, num_blocks * block_size, slot_mapping)
    block, offset = slots // block_size, slots % block_size
    return LayerKV(
        kv.k.at[block, offset].set(k, mode="drop"), kv.v.at[block, offset].set(v, mode="drop")
    )


def rope_write_kv(qkv, kv, slot_mapping, angles, norms, scales=None, *, dtype):
    """Run the public op `rope_write_kv` in plain XLA."""
    num_kv_heads = kv.k.shape[2]
    qkv = sum_partials(qkv, dtype)
    num_heads = qkv.shape[1] - 2 * num_kv_heads
    q, k, v = jnp.split(qkv, (num_heads, num_heads + num_kv_heads), axis=1)
    if norms is not None:
        q, k = rms_norm(q, norms.q, eps=norms.eps), rms_norm(k, norms.k, eps=norms.eps)
    if angles is not None:
        q, k = rotate(q, angles), rotate(k, angles)
    if scales is None:
        k, v = k.astype(kv.k.dtype), v.astype(kv.v.dtype)
    return q, write_kv(kv, k, v, slot_mapping, scales)


def rotate(x, angles):
    """Apply rotary embedding to heads [T, heads, H]; channels i and i + H / 2 form a pair.

    The rotation computes in float32 and returns the dtype of x.
    """
    cos, sin = (angle[:, None, :] for angle in angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


def copy_blocks(pool, src, dst):
    """Run the public op `copy_blocks` in plain XLA."""
    return jax.tree.map(lambda blocks: blocks.at[dst].set(blocks[src], mode="drop"), pool)
