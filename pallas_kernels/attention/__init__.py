"""Attention over the paged KV pool: of one new token a sequence, and of a ragged batch of them."""

import math
from collections.abc import Callable

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels import checks
from pallas_kernels.attention import (
    decode_triton,
    prefill_hopper,
    prefill_triton,
    tuning,
    widen_triton,
    xla,
)
from pallas_kernels.attention.tiles import split_decode_rows
from pallas_kernels.kv_cache import check_rope
from pallas_kernels.tuning import device_kind
from pallas_kernels.types import Backend, HeadNorms, KVScales, LayerKV


def paged_decode_attention(
    q: Float[Array, "B N H"],
    kv: LayerKV,
    block_tables: Int32[Array, "B M"],
    seq_lens: Int32[Array, "B"],
    *,
    scale: float,
    backend: Backend,
    soft_cap: float | None = None,
    sliding_window: int | None = None,
    scales: KVScales | None = None,
) -> Float[Array, "B N H"]:
    """Attention of one new token a sequence over its paged keys and values.

    Args:
        q: queries, of the pool's dtype, over a pool in FP8 bfloat16, float16 or float32; N is a
            multiple of the pool's K heads.
        kv: one layer's pool [P, S, K, H]; the new token is already in it. Slots that no sequence
            owns may hold anything, NaN included.
        block_tables: the blocks of each sequence, in order; entries past its length are ignored.
        seq_lens: tokens of each sequence, the new one included; 0 marks a padded row.
        scale: factor of the scores, usually 1 / sqrt(H).
        backend: which implementation runs.
        soft_cap: scores become `soft_cap * tanh(scores / soft_cap)`.
        sliding_window: the token at position p sees keys at (p - sliding_window, p].
        scales: what the keys and values of a pool in FP8 are multiplied by; ones if None.

    Returns:
        [B, N, H] of q's dtype; zeros for padded rows.

    Raises:
        ValueError: inconsistent shapes, a head size, block size or number out of range, or scales
            for a pool that has none.
        TypeError: dtypes that differ or are not bfloat16, float16 or float32.
    """
    backend = Backend(backend)
    options = {"scale": scale, "soft_cap": soft_cap, "sliding_window": sliding_window}
    check_attention(q, kv, block_tables, seq_lens, backend, **options)
    check_decode(q, block_tables)
    options["scales"] = checks.resolve_pool_scales(kv, scales)
    if backend is Backend.XLA or not q.size:
        return xla.paged_decode_attention(q, kv, block_tables, seq_lens, **options)
    return _launch_decode(q, kv, block_tables, seq_lens, options, backend)


def rope_decode_attention(
    qkv: Float[Array, "partials B heads H"],
    kv: LayerKV,
    block_tables: Int32[Array, "B M"],
    seq_lens: Int32[Array, "B"],
    angles: tuple[Float32[Array, "B half"], Float32[Array, "B half"]],
    *,
    scale: float,
    backend: Backend,
    norms: HeadNorms | None = None,
    dtype: DTypeLike | None = None,
    soft_cap: float | None = None,
    sliding_window: int | None = None,
    scales: KVScales | None = None,
) -> tuple[Float[Array, "B N H"], LayerKV]:
    """`rope_write_kv` and `paged_decode_attention` in one, for one new token a sequence.

    The new token is a sequence's last: its key and value go to the slot that the block table has
    for position `seq_len - 1`. Padded rows, of `seq_len` 0, store nothing.

    Args:
        qkv: of each token N query heads, K key heads, K value heads, as split-K partials, which
            are summed and rounded first (see `split_k_gemm`).
        kv: one layer's pool [P, S, K, H], with all earlier tokens; updated in place if donated.
        block_tables, seq_lens, scale, backend, soft_cap, sliding_window, scales: as of
            `paged_decode_attention`.
        angles, norms, dtype: as of `rope_write_kv`. Attention computes in the pool's dtype, but in
            `dtype` over a pool in FP8.

    Returns:
        [B, N, H] of `dtype`, zeros for padded rows; and the pool.

    Raises:
        ValueError: inconsistent shapes, a head size, block size or number out of range, or scales
            for a pool that has none.
        TypeError: dtypes other than bfloat16, float16 or float32; angles not float32.
    """
    dtype = jnp.dtype(qkv.dtype if dtype is None else dtype)
    backend = Backend(backend)
    arrays = (qkv, kv, block_tables, seq_lens, angles, norms)
    options = {"scale": scale, "soft_cap": soft_cap, "sliding_window": sliding_window}
    check_rope_decode(*arrays, dtype, backend, **options)
    options["scales"] = checks.resolve_pool_scales(kv, scales)
    if backend is Backend.XLA or not qkv.size:
        return xla.rope_decode_attention(*arrays, dtype=dtype, **options)
    config = _decode_config(kv, block_tables, backend)
    interpret = backend is Backend.INTERPRET
    return decode_triton.rope_decode_attention(
        *arrays, dtype=dtype, **options, config=config, interpret=interpret
    )


def paged_prefill_attention(
    q: Float[Array, "T N H"],
    kv: LayerKV,
    block_tables: Int32[Array, "B M"],
    query_start_loc: Int32[Array, "B+1"],
    seq_lens: Int32[Array, "B"],
    *,
    scale: float,
    backend: Backend,
    soft_cap: float | None = None,
    sliding_window: int | None = None,
    scales: KVScales | None = None,
    call_shared: Callable | None = None,
) -> Float[Array, "T N H"]:
    """Causal attention of a ragged batch of new tokens, with any earlier context in the pool.

    Sequence b owns rows `query_start_loc[b]:query_start_loc[b + 1]` of q; they are the last of its
    `seq_lens[b]` tokens and already in the pool. A one-token sequence is a decode row riding along;
    those that come before all longer ones run at the speed of `paged_decode_attention` on a GPU,
    where the batch has more than a few sequences.

    Args:
        q: flattened queries, of a dtype as for `paged_decode_attention`; rows from
            `query_start_loc[B]` on are padding.
        kv: one layer's pool [P, S, K, H]; slots that no sequence owns may hold anything.
        block_tables: the blocks of each sequence, in order; entries past its length are ignored.
        query_start_loc: [B + 1], not decreasing, from 0; a padded sequence repeats the last value.
        seq_lens: tokens of each sequence, context and new ones; 0 for a padded sequence.
        scale, backend, soft_cap, sliding_window, scales: as of `paged_decode_attention`.
        shared: called as `call_shared(function, *arrays)` for what another number of sequences would
            have as well, if there is such a thing, to return `function(*arrays)`.

    Returns:
        [T, N, H] of q's dtype; zeros for padding rows.

    Raises:
        ValueError: inconsistent shapes, a head size, block size or number out of range, or scales
            for a pool that has none.
        TypeError: dtypes that differ or are not bfloat16, float16 or float32.
    """
    backend = Backend(backend)
    options = {"scale": scale, "soft_cap": soft_cap, "sliding_window": sliding_window}
    check_attention(q, kv, block_tables, seq_lens, backend, **options)
    check_prefill(query_start_loc, seq_lens)
    options["scales"] = checks.resolve_pool_scales(kv, scales)
    if backend is Backend.XLA or not q.size:
        arrays = (q, kv, block_tables, query_start_loc, seq_lens)
        return xla.paged_prefill_attention(*arrays, **options)
    if not tuning.should_split_decode_rows(num_tokens=q.shape[0], batch=seq_lens.shape[0]):
        return _launch_prefill(
            q, kv, block_tables, query_start_loc, seq_lens, options, backend, call_shared
        )
    remaining_start_loc, decode_lens = split_decode_rows(seq_lens, query_start_loc)
    out = _launch_prefill(
        q, kv, block_tables, remaining_start_loc, seq_lens, options, backend, call_shared
    )
    return _launch_decode(q, kv, block_tables, decode_lens, options, backend, into=out)


def _launch_decode(q, kv, block_tables, seq_lens, options, backend, into=None):
    config = _decode_config(kv, block_tables, backend)
    launch = {"config": config, "interpret": backend is Backend.INTERPRET, "into": into}
    return decode_triton.paged_decode_attention(q, kv, block_tables, seq_lens, **options, **launch)


def _launch_prefill(q, kv, block_tables, query_start_loc, seq_lens, options, backend, call_shared):
    arrays = (q, kv, block_tables, query_start_loc, seq_lens)
    facts = {
        "head_size": q.shape[2],
        "itemsize": q.dtype.itemsize,
        "device_kind": device_kind(backend),
    }
    is_plain_causal = all(options[name] is None for name in ("soft_cap", "sliding_window"))
    into = None
    if tuning.runs_hopper_prefill(
        block_size=kv.k.shape[1], is_plain_causal=is_plain_causal, **facts
    ):
        launch = {
            "scale": options["scale"],
            "scales": options["scales"],
            "call_shared": call_shared,
        }
        if not kv.is_scaled:
            return prefill_hopper.paged_prefill_attention(*arrays, **launch)
        config = _widening_config(q, kv)
        wide = widen_triton.widen_blocks(*arrays[1:], dtype=q.dtype, config=config, interpret=False)
        into = prefill_hopper.paged_prefill_attention(q, *wide[:4], **launch)
        if block_tables.size <= config.max_blocks:
            return into
        arrays = (
            q,
            kv,
            block_tables,
            wide.remaining_start_loc,
            seq_lens,
        )  # of sequences without room
    facts["group"] = q.shape[1] // kv.k.shape[2]
    config = tuning.prefill_config(num_tokens=q.shape[0], batch=seq_lens.shape[0], **facts)
    launch = {"config": config, "interpret": backend is Backend.INTERPRET, "into": into}
    return prefill_triton.paged_prefill_attention(*arrays, **options, **launch)


def _widening_config(q, kv):
    _, block_size, num_kv_heads, _ = kv.k.shape
    sizes = {"block_size": block_size, "num_kv_heads": num_kv_heads, "head_size": kv.head_size}
    return tuning.widening_config(num_tokens=q.shape[0], itemsize=q.dtype.itemsize, **sizes)


def _decode_config(kv, block_tables, backend):
    return tuning.decode_config(
        batch=block_tables.shape[0],
        num_kv_heads=kv.k.shape[2],
        max_context=block_tables.shape[1] * kv.k.shape[1],
        head_size=kv.head_size,
        itemsize=kv.itemsize,
        device_kind=device_kind(backend),
    )


def check_attention(q, kv, block_tables, seq_lens, backend, *, scale, soft_cap, sliding_window):
    """What decode and prefill attention have in common."""
    check_attention_context(kv, block_tables, seq_lens, backend, scale, soft_cap, sliding_window)
    num_kv_heads, head_size = kv.k.shape[2], kv.head_size
    dtypes = checks.FLOAT_DTYPES if kv.is_scaled else kv.k.dtype
    checks.check_array("q", q, "[rows, N, H]", dtypes)
    if q.shape[2] != head_size:
        raise ValueError(
            f"q has head size {q.shape[2]} and the pool {head_size}; they must be equal"
        )
    if q.shape[1] % num_kv_heads:
        raise ValueError(
            f"q has {q.shape[1]} query heads, not a multiple of the pool's {num_kv_heads} KV heads"
        )
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
    sizes = {"B + 1": seq_lens.shape[0] + 1}
    checks.check_array("query_start_loc", query_start_loc, "[B + 1]", jnp.int32, **sizes)


def check_rope_decode(qkv, kv, block_tables, seq_lens, angles, norms, dtype, backend, **scalars):
    """Fused projections of one token a sequence."""
    check_attention_context(kv, block_tables, seq_lens, backend, **scalars)
    check_rope(qkv, kv, angles, norms, dtype)
    checks.check_array("seq_lens", seq_lens, "[B]", jnp.int32, B=qkv.shape[1])


def check_attention_context(kv, block_tables, seq_lens, backend, scale, soft_cap, sliding_window):
    """A pool whose heads the back end's attention takes, its sequences, and the scores' numbers."""
    head_size, max_head_size = checks.check_pool(kv)["H"], backend.max_head_size
    if max_head_size is not None and head_size > max_head_size:
        raise ValueError(
            f"head size {head_size} (kv.k.shape[3]) must be from 1 to {max_head_size} for the back end "
            f"{backend.value!r}; 'xla' takes any"
        )
    sizes = checks.check_array("block_tables", block_tables, "[B, M]", jnp.int32)
    checks.check_array("seq_lens", seq_lens, "[B]", jnp.int32, **sizes)
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"scale is {scale}; it must be positive and finite, as 1 / sqrt(H)")
    if soft_cap is not None and not (math.isfinite(soft_cap) and soft_cap > 0):
        raise ValueError(f"soft_cap is {soft_cap}; it must be positive and finite, or None")
    if sliding_window is not None and sliding_window <= 0:
        raise ValueError(f"sliding_window is {sliding_window}; it must be positive, or None")
