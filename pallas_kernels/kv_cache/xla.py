"""Writes and copies in the KV pool in plain XLA.

Writes are in place where the pool is donated, but for bfloat16 on a CPU: XLA's CPU compiler has no
bfloat16 scatter (nor dynamic update) and converts the whole pool to float32 and back. Keep pools on
a CPU in another dtype.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.gemm.fp8 import to_fp8
from pallas_kernels.gemm.xla import sum_partials
from pallas_kernels.norm import rms_norm
from pallas_kernels.types import LayerKV, pack_fp8_pairs


def to_pool_dtype(x, dtype, scale):
    """Keys or values as a pool of `dtype` has them, which is scaled if there is a `scale`."""
    return x.astype(dtype) if scale is None else pack_fp8_pairs(to_fp8(x, scale))


def write_kv(kv, k, v, slot_mapping, scales=None):
    """See the public entry of the same name."""
    num_blocks, block_size = kv.k.shape[:2]
    if scales is not None:
        k_scale, v_scale = (scale.reshape(()) for scale in scales)
        k, v = to_pool_dtype(k, kv.k.dtype, k_scale), to_pool_dtype(v, kv.v.dtype, v_scale)
    # A negative index would wrap around in JAX; outside the pool it is dropped.
    slots = jnp.where(slot_mapping < 0, num_blocks * block_size, slot_mapping)
    block, offset = slots // block_size, slots % block_size
    return LayerKV(
        kv.k.at[block, offset].set(k, mode="drop"), kv.v.at[block, offset].set(v, mode="drop")
    )


def rope_write_kv(qkv, kv, slot_mapping, angles, norms, scales=None, *, dtype):
    """See the public entry of the same name."""
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
    """Rotary embedding of heads [T, heads, H] in the halves layout, in float32; x's dtype out."""
    cos, sin = (angle[:, None, :] for angle in angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


def copy_blocks(pool, src, dst):
    """See the public entry of the same name."""
    return jax.tree.map(lambda blocks: blocks.at[dst].set(blocks[src], mode="drop"), pool)
