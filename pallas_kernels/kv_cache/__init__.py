"""Ops that write the KV pool: store keys and values, rotate and store, copy blocks.

The public ops check their arguments, then run xla.py or triton.py, depending on the backend. Pools
are updated in place if the caller's jit donates them.
"""

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels import checks
from pallas_kernels.kv_cache import triton, xla
from pallas_kernels.tuning import device_kind
from pallas_kernels.types import Backend, HeadNorms, KVScales, LayerKV


def write_kv(
    kv: LayerKV,
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    slot_mapping: Int32[Array, "T"],
    *,
    backend: Backend,
    scales: KVScales | None = None,
) -> LayerKV:
    """Store the keys and values of new tokens in the pool.

    Args:
        kv: One layer's pool [P, S, K, H].
        k, v: Keys and values of the new tokens, in the pool's dtype. Over an FP8 pool their dtype
            is bfloat16, float16 or float32.
        slot_mapping: Slot of each token: block id * S + offset. Padding tokens use a slot of the
            null block (0 to S - 1). A token with a slot outside the pool is not stored. Two tokens
            may share a slot only in the null block.
        backend: The implementation to run.
        scales: Scales of an FP8 pool, by which keys and values are divided. None means scales of 1.

    Returns:
        The pool, updated in place if donated.

    Raises:
        ValueError: Shapes do not fit the pool, or scales are given for a pool that is not in FP8.
        TypeError: The dtype of k or v is not supported or differs from the pool's.
    """
    check_write(kv, k, v, slot_mapping)
    scales, backend = checks.resolve_pool_scales(kv, scales), Backend(backend)
    if backend is Backend.XLA or not k.size:
        return xla.write_kv(kv, k, v, slot_mapping, scales)
    return triton.write_kv(kv, k, v, slot_mapping, scales, **_launch_options("write", kv, backend))


def rope_write_kv(
    qkv: Float[Array, "partials T heads H"],
    kv: LayerKV,
    slot_mapping: Int32[Array, "T"],
    angles: tuple[Float32[Array, "T half"], Float32[Array, "T half"]] | None,
    *,
    backend: Backend,
    norms: HeadNorms | None = None,
    dtype: DTypeLike | None = None,
    scales: KVScales | None = None,
) -> tuple[Float[Array, "T N H"], LayerKV]:
    """Normalize and rotate the queries and keys of new tokens, and store keys and values.

    Norm and rotation compute in float32, and each rounds its result to `dtype`. Keys and values are
    then cast to the pool's dtype; for an FP8 pool, they are divided by the scales and rounded. The
    rotation (rotary embedding: Su et al. 2021, arXiv:2104.09864) pairs channels i and i + H / 2.

    Args:
        qkv: Fused projection of each token as split-K partials (see `split_k_gemm`): N query heads,
            K key heads, K value heads. The op first sums and rounds the partials.
        kv: One layer's pool [P, S, K, H], updated in place if donated.
        slot_mapping: Slot of each token; see `write_kv`.
        angles: Cosines and sines of the rotation of each token and pair of channels. None means no
            rotation.
        backend: The implementation to run.
        norms: RMSNorm of query and key heads, applied before the rotation. The weights are float32
            or of `dtype`.
        dtype: Dtype of the queries. None means the dtype of qkv.
        scales: Scales of an FP8 pool; see `write_kv`.

    Returns:
        The queries and the updated pool.

    Raises:
        ValueError: Shapes do not fit each other, or scales are given for a pool that is not in FP8.
        TypeError: A dtype is not bfloat16, float16 or float32, or angles are not float32.
    """
    dtype = jnp.dtype(qkv.dtype if dtype is None else dtype)
    check_rope_write(qkv, kv, slot_mapping, angles, norms, dtype)
    scales, backend = checks.resolve_pool_scales(kv, scales), Backend(backend)
    arrays = (qkv, kv, slot_mapping, angles, norms, scales)
    if backend is Backend.XLA or not qkv.size:
        return xla.rope_write_kv(*arrays, dtype=dtype)
    facts = {"head_size": qkv.shape[3], "itemsize": qkv.dtype.itemsize}
    config = triton.rope_write_config(**facts, device_kind=device_kind(backend))
    interpret = backend is Backend.INTERPRET
    return triton.rope_write_kv(*arrays, dtype=dtype, config=config, interpret=interpret)


def copy_blocks(
    pool: tuple[LayerKV, ...],
    src: Int32[Array, "C"],
    dst: Int32[Array, "C"],
    *,
    backend: Backend,
) -> tuple[LayerKV, ...]:
    """Copy block src[i] to block dst[i] for each i, in the keys and values of every layer.

    Copies run in any order. Therefore no block may be both a source and a destination, and no block
    may be a destination twice. Only the padding pair (0, 0) may occur any number of times. No
    backend checks that block ids lie in the pool.

    Returns:
        The pool, updated in place if donated.

    Raises:
        ValueError: The pool has no layers, layers differ in shape, or src and dst in length.
        TypeError: Layers differ in dtype.
    """
    check_copy(pool, src, dst)
    backend = Backend(backend)
    if backend is Backend.XLA or not src.size:
        return xla.copy_blocks(pool, src, dst)
    return triton.copy_blocks(pool, src, dst, **_launch_options("copy", pool[0], backend))


def _launch_options(op, kv, backend):
    facts = {"head_size": kv.head_size, "itemsize": kv.itemsize}
    config = triton.move_config(op, **facts, device_kind=device_kind(backend))
    return {"config": config, "interpret": backend is Backend.INTERPRET}


def check_write(kv, k, v, slot_mapping):
    """Check that new keys, values and their slots fit the pool."""
    pool = checks.check_pool(kv)
    sizes = {"K": pool["K"], "H": pool["H"]}
    sizes |= checks.check_array("slot_mapping", slot_mapping, "[T]", jnp.int32)
    dtypes = checks.FLOAT_DTYPES if kv.is_scaled else kv.k.dtype
    checks.check_array("k", k, "[T, K, H]", dtypes, **sizes)
    checks.check_array("v", v, "[T, K, H]", dtypes, **sizes)


def check_rope_write(qkv, kv, slot_mapping, angles, norms, dtype):
    """Check the arguments of `rope_write_kv`, including that each token has one slot."""
    check_rope(qkv, kv, angles, norms, dtype)
    checks.check_array("slot_mapping", slot_mapping, "[T]", jnp.int32, T=qkv.shape[1])


def check_rope(qkv, kv, angles, norms, dtype):
    """Check that the fused projection fits the pool, and that angles and norms fit the projection.

    The pool has K KV heads. The projection must hold K key heads, K value heads, and a multiple of
    K query heads.
    """
    pool = checks.check_pool(kv)
    num_kv_heads, head_size = pool["K"], pool["H"]
    checks.check_partials("qkv", qkv, "[partials, T, N + 2K, H]", dtype)
    num_tokens, num_heads = qkv.shape[1], qkv.shape[2] - 2 * num_kv_heads
    if head_size % 2:
        raise ValueError(
            f"head size {head_size} (kv.k.shape[3]) must be even, because rotary embedding rotates "
            "pairs of channels"
        )
    if kv.is_scaled and head_size % 4:
        raise ValueError(
            f"head size {head_size} (2 * kv.k.shape[3]) must be a multiple of 4: rotation splits a "
            "head into two halves, and each half is stored in pairs of FP8 numbers"
        )
    if qkv.shape[3] != head_size:
        raise ValueError(
            f"qkv has head size {qkv.shape[3]} and the pool {head_size}: pass arrays with the same "
            "head size"
        )
    if num_heads <= 0 or num_heads % num_kv_heads:
        raise ValueError(
            f"qkv has {qkv.shape[2]} heads for a pool with K = {num_kv_heads} KV heads: qkv must "
            "have K key heads, K value heads, and a multiple of K query heads"
        )
    for name, angle in zip(("angles[0]", "angles[1]"), angles or (), strict=angles is not None):
        sizes = {"T": num_tokens, "H / 2": head_size // 2}
        checks.check_array(name, angle, "[T, H / 2]", jnp.float32, **sizes)
    if norms is not None:
        for name, weight in (("norms.q", norms.q), ("norms.k", norms.k)):
            checks.check_array(name, weight, "[H]", (dtype, jnp.float32), H=head_size)
        checks.check_eps("norms.eps", norms.eps)


def check_copy(pool, src, dst):
    """Check that all layers have the same pool shape, and that src and dst have equal length."""
    if not pool:
        raise ValueError("pool has no layers: pass one LayerKV per layer")
    checks.check_pool(pool[0], "pool[0]")
    sizes = dict(zip("PSKH", pool[0].k.shape, strict=True))
    for index, layer in enumerate(pool[1:], 1):
        checks.check_array(f"pool[{index}].k", layer.k, "[P, S, K, H]", pool[0].k.dtype, **sizes)
        checks.check_array(f"pool[{index}].v", layer.v, "[P, S, K, H]", pool[0].k.dtype, **sizes)
    sizes = checks.check_array("src", src, "[C]", jnp.int32)
    checks.check_array("dst", dst, "[C]", jnp.int32, **sizes)
