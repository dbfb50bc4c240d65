"""What goes into the KV pool: new keys and values, with or without norm and rotation, and copies
of blocks.

Pools are updated in place when the caller's jit donates them.
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
    """Store new tokens' keys and values, token t in slot `slot_mapping[t]` = block * S + offset.

    Padding tokens go to the null block (slots 0 to S - 1); a slot outside the pool is dropped. Two
    tokens may share a slot in the null block only. A pool in FP8 stores what `KVScales` tells,
    with `scales` of one if none are given. Returns the pool, updated in place if donated.

    Raises:
        ValueError: shapes that do not fit the pool, or scales for a pool that has none.
        TypeError: k or v not of the pool's dtype; for a pool in FP8 not bfloat16, float16 or
            float32.
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
    """Normalize and rotate new tokens' queries and keys; store keys and values as `write_kv` does.

    Norm and rotation compute in float32 and each rounds to `dtype`; what is stored is then cast to
    the pool's, or scaled. Rotary embedding: Su et al. 2021, arXiv:2104.09864, in the halves layout.

    Args:
        qkv: of each token N query heads, K key heads, K value heads, as split-K partials, which
            are summed and rounded first (see `split_k_gemm`).
        kv: one layer's pool [P, S, K, H]; updated in place if donated.
        slot_mapping: as of `write_kv`.
        angles: cosine and sine of each token's rotation, for channels i and i + H / 2; None where
            nothing is rotated.
        backend: which implementation runs.
        norms: RMSNorm of the query and key heads before the rotation; `dtype` or float32.
        dtype: of the queries; qkv's if None.
        scales: as of `write_kv`.

    Returns:
        The queries, and the pool.

    Raises:
        ValueError: shapes that do not fit the pool or each other, or scales for a pool that has
            none.
        TypeError: dtypes other than bfloat16, float16 or float32; angles not float32.
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
    """Copy block src[i] over block dst[i], in every layer, keys and values, for all pairs at once.

    Pairs are unordered: no block may be both a source and a destination, or a destination twice;
    padding pairs are (0, 0), and ids must lie in the pool (no back end checks values). Returns the
    pool, updated in place if donated.

    Raises:
        ValueError: no layers, layers of different shapes, src and dst of different lengths.
        TypeError: layers of different dtypes.
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
    """New keys and values fit the pool's rows."""
    pool = checks.check_pool(kv)
    sizes = {"K": pool["K"], "H": pool["H"]}
    sizes |= checks.check_array("slot_mapping", slot_mapping, "[T]", jnp.int32)
    dtypes = checks.FLOAT_DTYPES if kv.is_scaled else kv.k.dtype
    checks.check_array("k", k, "[T, K, H]", dtypes, **sizes)
    checks.check_array("v", v, "[T, K, H]", dtypes, **sizes)


def check_rope_write(qkv, kv, slot_mapping, angles, norms, dtype):
    """What `check_rope` demands, and a slot for each token."""
    check_rope(qkv, kv, angles, norms, dtype)
    checks.check_array("slot_mapping", slot_mapping, "[T]", jnp.int32, T=qkv.shape[1])


def check_rope(qkv, kv, angles, norms, dtype):
    """Fused projections hold the pool's heads and at least one query head for each; angles and
    norms fit them."""
    pool = checks.check_pool(kv)
    num_kv_heads, head_size = pool["K"], pool["H"]
    checks.check_partials("qkv", qkv, "[partials, T, N + 2K, H]", dtype)
    num_tokens, num_heads = qkv.shape[1], qkv.shape[2] - 2 * num_kv_heads
    if head_size % 2:
        raise ValueError(
            f"head size {head_size} (kv.k.shape[3]) must be even: channels are rotated in pairs"
        )
    if kv.is_scaled and head_size % 4:
        raise ValueError(
            f"head size {head_size} (2 * kv.k.shape[3]) must be a multiple of 4: channels are "
            "rotated by halves, and either half is stored in pairs of FP8"
        )
    if qkv.shape[3] != head_size:
        raise ValueError(
            f"qkv has head size {qkv.shape[3]} and the pool {head_size}; they must be equal"
        )
    if num_heads <= 0 or num_heads % num_kv_heads:
        raise ValueError(
            f"qkv has {qkv.shape[2]} heads; with the pool's {num_kv_heads} KV heads it must have "
            "twice as many and a multiple of them for the queries"
        )
    for name, angle in zip(("angles[0]", "angles[1]"), angles or (), strict=angles is not None):
        sizes = {"T": num_tokens, "H / 2": head_size // 2}
        checks.check_array(name, angle, "[T, H / 2]", jnp.float32, **sizes)
    if norms is not None:
        for name, weight in (("norms.q", norms.q), ("norms.k", norms.k)):
            checks.check_array(name, weight, "[H]", (dtype, jnp.float32), H=head_size)
        checks.check_eps("norms.eps", norms.eps)


def check_copy(pool, src, dst):
    """Every layer has the same pool shape, every source a destination."""
    if not pool:
        raise ValueError("pool has no layers; pass one LayerKV a layer")
    checks.check_pool(pool[0], "pool[0]")
    sizes = dict(zip("PSKH", pool[0].k.shape, strict=True))
    for index, layer in enumerate(pool[1:], 1):
        checks.check_array(f"pool[{index}].k", layer.k, "[P, S, K, H]", pool[0].k.dtype, **sizes)
        checks.check_array(f"pool[{index}].v", layer.v, "[P, S, K, H]", pool[0].k.dtype, **sizes)
    sizes = checks.check_array("src", src, "[C]", jnp.int32)
    checks.check_array("dst", dst, "[C]", jnp.int32, **sizes)
