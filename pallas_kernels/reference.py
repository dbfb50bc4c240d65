"""Slow and obvious references, in numpy, one function an op: the oracle of every other path.

Each takes numpy (or JAX) arrays and loops over sequences, rows and heads. `dtype` is the precision
of the arithmetic: float64 is the oracle; the pool's own dtype shows the error that a plain
implementation in that dtype has, which is the yardstick for the kernels' errors.
"""

import numpy as np


def paged_decode_attention(
    q,
    kv,
    block_tables,
    seq_lens,
    *,
    scale,
    soft_cap=None,
    sliding_window=None,
    dtype=np.float64,
):
    """One token a sequence, its last; rows [B, N, H]; zeros where seq_len is 0."""
    out = np.zeros(q.shape, dtype)
    for b, seq_len in enumerate(np.asarray(seq_lens)):
        if seq_len:
            keys, values = _gather(kv, block_tables[b], seq_len, dtype)
            row = np.asarray(q[b])
            out[b] = _attend(row, keys, values, seq_len - 1, scale, soft_cap, sliding_window)
    return out


def paged_prefill_attention(
    q,
    kv,
    block_tables,
    query_start_loc,
    seq_lens,
    *,
    scale,
    soft_cap=None,
    sliding_window=None,
    dtype=np.float64,
):
    """Causal; a sequence's tokens are the last of its seq_len; rows [T, N, H]; padding is zeros."""
    out = np.zeros(q.shape, dtype)
    starts = np.asarray(query_start_loc)
    for b, seq_len in enumerate(np.asarray(seq_lens)):
        keys, values = _gather(kv, block_tables[b], seq_len, dtype)
        for t in range(starts[b], starts[b + 1]):
            position = seq_len - (starts[b + 1] - t)
            row = np.asarray(q[t])
            out[t] = _attend(row, keys, values, position, scale, soft_cap, sliding_window)
    return out


def write_kv(kv, k, v, slot_mapping):
    """Token t's key and value go to slot `slot_mapping[t]`; slots outside the pool are dropped."""
    pool_k, pool_v = np.array(kv[0]), np.array(kv[1])
    num_blocks, block_size = pool_k.shape[:2]
    for t, slot in enumerate(np.asarray(slot_mapping)):
        if 0 <= slot < num_blocks * block_size:
            pool_k[slot // block_size, slot % block_size] = np.asarray(k)[t]
            pool_v[slot // block_size, slot % block_size] = np.asarray(v)[t]
    return pool_k, pool_v


def copy_blocks(pool, src, dst):
    """Block dst[i] of every layer, K and V, becomes a copy of block src[i]."""
    layers = [(np.array(k), np.array(v)) for k, v in pool]
    for before, after in zip(pool, layers, strict=True):
        for s, d in zip(np.asarray(src), np.asarray(dst), strict=True):
            after[0][d] = np.asarray(before[0])[s]
            after[1][d] = np.asarray(before[1])[s]
    return layers


def _gather(kv, block_table, seq_len, dtype):
    """The keys and values [seq_len, K, H] of one sequence, through its block table."""
    block_size = kv[0].shape[1]
    positions = np.arange(seq_len)
    blocks = np.asarray(block_table)[positions // block_size]
    keys = np.asarray(kv[0])[blocks, positions % block_size]
    values = np.asarray(kv[1])[blocks, positions % block_size]
    return keys.astype(dtype), values.astype(dtype)


def _attend(q, keys, values, position, scale, soft_cap, sliding_window):
    """One token's query heads [N, H] over the keys it may see: (position - window, position]."""
    first = 0 if sliding_window is None else max(0, position - sliding_window + 1)
    keys, values = keys[first : position + 1], values[first : position + 1]
    q = q.astype(keys.dtype)
    group = q.shape[0] // keys.shape[1]
    out = np.zeros_like(q)
    for n in range(q.shape[0]):
        scores = (keys[:, n // group] @ q[n]) * keys.dtype.type(scale)
        if soft_cap is not None:
            cap = keys.dtype.type(soft_cap)
            scores = np.tanh(scores / cap) * cap
        weights = np.exp(scores - scores.max())
        out[n] = (weights / weights.sum()) @ values[:, n // group]
    return out
