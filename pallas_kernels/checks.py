"""Argument checks of the public entries.

They see static facts only (shapes, dtypes, Python numbers), so they cost nothing inside `jax.jit`
and hold for tracers. Each error names the parameter, its value and the remedy.
"""

import math

import jax.numpy as jnp

DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
MIN_HEAD_SIZE, MAX_HEAD_SIZE = 32, 256
MIN_BLOCK_SIZE, MAX_BLOCK_SIZE = 8, 128


def check_pool(kv, name="kv"):
    """Refuse a pool of a wrong rank, dtype, block size or head size."""
    k, v = kv
    _check_rank(f"{name}.k", k, 4, "[P, S, K, H]")
    _check_shape(f"{name}.v", v, k.shape, f"{name}.k's shape")
    if k.dtype not in DTYPES:
        raise TypeError(f"{name}.k has dtype {k.dtype}; make the pool bfloat16, float16 or float32")
    _check_dtype(f"{name}.v", v, k.dtype, f"{name}.k's dtype")
    _check_range("block size", f"{name}.k.shape[1]", k.shape[1], MIN_BLOCK_SIZE, MAX_BLOCK_SIZE)
    _check_range("head size", f"{name}.k.shape[3]", k.shape[3], MIN_HEAD_SIZE, MAX_HEAD_SIZE)


def check_attention(q, kv, block_tables, seq_lens, scale, soft_cap, sliding_window):
    """What decode and prefill attention have in common."""
    check_pool(kv)
    num_kv_heads, head_size = kv.k.shape[2:]
    _check_rank("q", q, 3, "[rows, N, H]")
    _check_dtype("q", q, kv.k.dtype, "the pool's dtype; cast it first")
    if q.shape[2] != head_size:
        raise ValueError(
            f"q has head size {q.shape[2]} and the pool {head_size}; they must be equal"
        )
    if q.shape[1] % num_kv_heads:
        raise ValueError(
            f"q has {q.shape[1]} query heads, not a multiple of the pool's {num_kv_heads} KV heads"
        )
    _check_int32("block_tables", block_tables, 2, "[B, M]")
    _check_int32("seq_lens", seq_lens, 1, "[B]")
    _check_shape("seq_lens", seq_lens, block_tables.shape[:1], "block_tables' first axis")
    _check_scalars(scale, soft_cap, sliding_window)
    if q.shape[0] and not block_tables.shape[0]:
        raise ValueError(f"block_tables has no rows for q's {q.shape[0]}; give one row a sequence")


def check_decode(q, block_tables):
    """One query row a sequence."""
    if q.shape[0] != block_tables.shape[0]:
        raise ValueError(
            f"q has {q.shape[0]} rows for {block_tables.shape[0]} block tables; "
            "decode takes one token a sequence (use paged_prefill_attention for more)"
        )


def check_prefill(query_start_loc, seq_lens):
    """One more start than there are sequences."""
    _check_int32("query_start_loc", query_start_loc, 1, "[B + 1]")
    want = (seq_lens.shape[0] + 1,)
    _check_shape("query_start_loc", query_start_loc, want, "one entry more than seq_lens")


def check_write(kv, k, v, slot_mapping):
    """New keys and values fit the pool's rows."""
    check_pool(kv)
    _check_int32("slot_mapping", slot_mapping, 1, "[T]")
    want = (*slot_mapping.shape, *kv.k.shape[2:])
    for name, array in (("k", k), ("v", v)):
        _check_shape(name, array, want, "[tokens of slot_mapping, pool's KV heads, head size]")
        _check_dtype(name, array, kv.k.dtype, "the pool's dtype; cast it first")


def check_copy(pool, src, dst):
    """Every layer has the same pool shape, every source a destination."""
    if not pool:
        raise ValueError("pool has no layers; pass one LayerKV a layer")
    for index, layer in enumerate(pool):
        check_pool(layer, f"pool[{index}]")
        _check_shape(f"pool[{index}].k", layer.k, pool[0].k.shape, "pool[0].k's shape")
        _check_dtype(f"pool[{index}].k", layer.k, pool[0].k.dtype, "pool[0].k's dtype")
    _check_int32("src", src, 1, "[C]")
    _check_int32("dst", dst, 1, "[C]")
    _check_shape("dst", dst, src.shape, "src's shape")


def _check_rank(name, array, rank, axes):
    if array.ndim != rank:
        raise ValueError(f"{name} has shape {tuple(array.shape)}; it must be {axes}")


def _check_shape(name, array, want, why):
    if tuple(array.shape) != tuple(want):
        raise ValueError(f"{name} has shape {tuple(array.shape)}; it must be {tuple(want)} ({why})")


def _check_dtype(name, array, want, why):
    if array.dtype != want:
        raise TypeError(f"{name} has dtype {array.dtype}; it must be {want} ({why})")


def _check_int32(name, array, rank, axes):
    _check_rank(name, array, rank, axes)
    _check_dtype(name, array, jnp.int32, "indices are int32; cast it first")


def _check_range(what, name, value, low, high):
    if not low <= value <= high or value % 8:
        raise ValueError(f"{what} {value} ({name}) must be a multiple of 8 from {low} to {high}")


def _check_scalars(scale, soft_cap, sliding_window):
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"scale is {scale}; it must be positive and finite, as 1 / sqrt(H)")
    if soft_cap is not None and not (math.isfinite(soft_cap) and soft_cap > 0):
        raise ValueError(f"soft_cap is {soft_cap}; it must be positive and finite, or None")
    if sliding_window is not None and sliding_window <= 0:
        raise ValueError(f"sliding_window is {sliding_window}; it must be positive, or None")
