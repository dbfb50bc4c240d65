"""Attention over the paged KV pool: decode, verification of drafts, and prefill (ragged batch).

The public ops check their arguments and choose an implementation for the backend:

    paged_decode_attention     xla.py, or decode_triton.py
    rope_decode_attention      likewise, with rotary embedding and the KV write in the same op
    paged_verify_attention     xla.py, or decode_triton.py with several queries per sequence
    paged_prefill_attention    xla.py; on a GPU prefill_hopper.py where its conditions hold (over an
                               FP8 pool after widen_triton.py), otherwise prefill_triton.py. Leading
                               one-token sequences of larger batches go through decode_triton.py.
"""

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
from pallas_kernels.gemm.xla import TILE_ROWS
from pallas_kernels.kv_cache import check_rope
from pallas_kernels.tuning import device_kind
from pallas_kernels.types import Backend, HeadNorms, KVScales, LayerKV

MAX_VERIFY_QUERIES = 8
"""Maximum number of queries per sequence (Q) of `paged_verify_attention`."""


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
    """Compute attention of one new token per sequence over the sequence's paged keys and values.

    Args:
        q: Queries of the new tokens. N is a multiple of the pool's K heads. The dtype is the
            pool's; over an FP8 pool it is bfloat16, float16 or float32.
        kv: One layer's pool [P, S, K, H], which already holds the new tokens. Slots that no
            sequence owns may hold anything, including NaN.
        block_tables: Block ids of each sequence, in order. Entries past the sequence's length are
            ignored.
        seq_lens: Number of tokens of each sequence, including the new token. 0 marks a padding row.
        scale: Factor of the scores, usually 1 / sqrt(H).
        backend: The implementation to run.
        soft_cap: If set, each score becomes `soft_cap * tanh(score / soft_cap)`.
        sliding_window: If set, the token at position p sees the keys at positions greater than
            p - sliding_window and at most p.
        scales: Scales of an FP8 pool, by which stored keys and values are multiplied. None means
            scales of 1.

    Returns:
        Attention outputs [B, N, H] in the dtype of q. Padding rows are zeros.

    Raises:
        ValueError: Shapes do not fit each other, a size or number is out of range, or scales are
            given for a pool that is not in FP8.
        TypeError: A dtype is not supported or differs from the pool's.
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
    """Run `rope_write_kv` and `paged_decode_attention` as one op, for one new token per sequence.

    The new token is the last of its sequence. The key and value of the token are stored in the slot
    of position `seq_len - 1`. Padding rows have a `seq_len` of 0 and store nothing.

    Args:
        qkv: Fused projection of each token as split-K partials (see `split_k_gemm`): N query heads,
            K key heads, K value heads. The op first sums and rounds the partials.
        kv: One layer's pool [P, S, K, H] with all earlier tokens. Updated in place if donated.
        block_tables, seq_lens, scale, backend, soft_cap, sliding_window, scales: See
            `paged_decode_attention`.
        angles, norms, dtype: See `rope_write_kv`. Attention computes in the pool's dtype, or in
            `dtype` over an FP8 pool.

    Returns:
        Attention outputs [B, N, H] in `dtype`, zeros for padding rows; and the updated pool.

    Raises:
        ValueError: Shapes do not fit each other, a size or number is out of range, or scales are
            given for a pool that is not in FP8.
        TypeError: A dtype is not bfloat16, float16 or float32, or angles are not float32.
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
    batch_invariant: bool = False,
) -> Float[Array, "T N H"]:
    """Compute causal attention of a ragged batch of new tokens over their paged sequences.

    Rows `query_start_loc[b]:query_start_loc[b + 1]` of q are the last tokens of sequence b. The
    pool already holds all `seq_lens[b]` tokens of the sequence. A sequence with one row is a decode
    row. Put the decode rows first: on a GPU, the decode kernel computes the leading decode rows of
    a batch of more than 8 sequences.

    Args:
        q: Flattened queries, with the dtypes that `paged_decode_attention` takes. Rows from
            `query_start_loc[B]` on are padding.
        kv: One layer's pool [P, S, K, H], which already holds the new tokens. Slots that no
            sequence owns may hold anything, including NaN.
        block_tables: Block ids of each sequence, in order. Entries past the sequence's length are
            ignored.
        query_start_loc: First row of each sequence, and the end of the last one: [B + 1], from 0,
            not decreasing. A padding sequence repeats the last value.
        seq_lens: Number of tokens of each sequence, including the new tokens. 0 for a padding
            sequence.
        scale, backend, soft_cap, sliding_window, scales: See `paged_decode_attention`.
        call_shared: Called as `call_shared(function, *arrays)`; must return `function(*arrays)`.
            `function` is the part of the op that does not depend on the number of sequences.
            Programs for different numbers of sequences can therefore share its lowered code.
        batch_invariant: Whether a token's bits must not depend on the other tokens of the batch:
            one kernel then computes all rows, decode rows too. On a GPU, prefill_hopper.py must
            support the shapes.

    Returns:
        Attention outputs [T, N, H] in the dtype of q. Padding rows are zeros.

    Raises:
        ValueError: Shapes do not fit each other, a size or number is out of range, or scales are
            given for a pool that is not in FP8.
        TypeError: A dtype is not supported or differs from the pool's.
    """
    backend = Backend(backend)
    options = {"scale": scale, "soft_cap": soft_cap, "sliding_window": sliding_window}
    check_attention(q, kv, block_tables, seq_lens, backend, **options)
    check_prefill(query_start_loc, seq_lens)
    options["scales"] = checks.resolve_pool_scales(kv, scales)
    if backend is Backend.XLA or not q.size:
        arrays = (q, kv, block_tables, query_start_loc, seq_lens)
        tile_size = TILE_ROWS if batch_invariant else None
        return xla.paged_prefill_attention(*arrays, tile_size=tile_size, **options)
    splits = tuning.should_split_decode_rows(num_tokens=q.shape[0], batch=seq_lens.shape[0])
    if batch_invariant or not splits:
        if batch_invariant:
            _check_batch_invariant(q, kv, options, backend)
        arrays = q, kv, block_tables, query_start_loc, seq_lens
        has_few_queries = batch_invariant and q.shape[0] <= MAX_VERIFY_QUERIES * seq_lens.shape[0]
        launch = {"has_few_queries": has_few_queries}
        return _launch_prefill(*arrays, options, backend, call_shared, **launch)
    remaining_start_loc, decode_lens = split_decode_rows(seq_lens, query_start_loc)
    out = _launch_prefill(
        q, kv, block_tables, remaining_start_loc, seq_lens, options, backend, call_shared
    )
    return _launch_decode(q, kv, block_tables, decode_lens, options, backend, into=out)


def paged_verify_attention(
    q: Float[Array, "B Q N H"],
    kv: LayerKV,
    block_tables: Int32[Array, "B M"],
    seq_lens: Int32[Array, "B"],
    *,
    scale: float,
    backend: Backend,
    soft_cap: float | None = None,
    sliding_window: int | None = None,
    scales: KVScales | None = None,
) -> Float[Array, "B Q N H"]:
    """Compute causal attention of the last Q tokens of each sequence.

    Query j of a sequence is at position `seq_len - Q + j`. Each key is read once for all queries.

    Args:
        q: Queries of the last tokens, with the dtypes that `paged_decode_attention` takes. Q is a
            power of two, at most `MAX_VERIFY_QUERIES`.
        kv: One layer's pool [P, S, K, H], which already holds the tokens. Slots that no sequence
            owns may hold anything, including NaN.
        block_tables: Block ids of each sequence, in order.
        seq_lens: Number of tokens of each sequence, including all Q: at least Q, or 0 for a padding
            row.
        scale, backend, soft_cap, sliding_window, scales: See `paged_decode_attention`.

    Returns:
        Attention outputs [B, Q, N, H] in the dtype of q. Padding rows are zeros.

    Raises:
        ValueError: Shapes do not fit each other, a size or number is out of range, or scales are
            given for a pool that is not in FP8.
        TypeError: A dtype is not supported or differs from the pool's.
    """
    backend = Backend(backend)
    options = {"scale": scale, "soft_cap": soft_cap, "sliding_window": sliding_window}
    check_verify(q, block_tables)
    rows = q.reshape(-1, *q.shape[2:])
    check_attention(rows, kv, block_tables, seq_lens, backend, **options)
    options["scales"] = checks.resolve_pool_scales(kv, scales)
    if backend is Backend.XLA or not q.size:
        return xla.paged_verify_attention(q, kv, block_tables, seq_lens, **options)
    config = _decode_config(kv, block_tables, backend)
    interpret = backend is Backend.INTERPRET
    return decode_triton.paged_verify_attention(
        q, kv, block_tables, seq_lens, **options, config=config, interpret=interpret
    )


def _launch_decode(q, kv, block_tables, seq_lens, options, backend, into=None):
    config = _decode_config(kv, block_tables, backend)
    launch = {"config": config, "interpret": backend is Backend.INTERPRET, "into": into}
    return decode_triton.paged_decode_attention(q, kv, block_tables, seq_lens, **options, **launch)


def _check_batch_invariant(q, kv, options, backend):
    """Raise ValueError if no batch-invariant kernel supports the arguments on this GPU.

    The only such kernel is prefill_hopper.py.
    """
    is_plain_causal = all(options[name] is None for name in ("soft_cap", "sliding_window"))
    supported = tuning.runs_hopper_prefill(
        head_size=q.shape[2],
        itemsize=q.dtype.itemsize,
        device_kind=device_kind(backend),
        block_size=kv.k.shape[1],
        is_plain_causal=is_plain_causal,
    )
    if kv.is_scaled or not supported:
        raise ValueError(
            f"batch_invariant: no kernel for q {q.dtype}{list(q.shape)} and a pool "
            f"{kv.k.dtype}{list(kv.k.shape)}: use a Hopper GPU, a 2-byte dtype, heads of 128 "
            "numbers, blocks of 8 to 256 tokens, and neither a sliding window nor a soft cap"
        )


def _launch_prefill(
    q,
    kv,
    block_tables,
    query_start_loc,
    seq_lens,
    options,
    backend,
    call_shared,
    has_few_queries=False,
):
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
            launch["has_few_queries"] = has_few_queries
            return prefill_hopper.paged_prefill_attention(*arrays, **launch)
        config = _widening_config(q, kv)
        wide = widen_triton.widen_blocks(*arrays[1:], dtype=q.dtype, config=config, interpret=False)
        into = prefill_hopper.paged_prefill_attention(q, *wide[:4], **launch)
        if block_tables.size <= config.max_blocks:
            return into
        # The Triton kernel below handles the sequences whose FP8 blocks were not converted.
        arrays = (q, kv, block_tables, wide.remaining_start_loc, seq_lens)
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
    """Check the arguments that decode and prefill attention share: queries, pool, sequences."""
    check_attention_context(kv, block_tables, seq_lens, backend, scale, soft_cap, sliding_window)
    num_kv_heads, head_size = kv.k.shape[2], kv.head_size
    dtypes = checks.FLOAT_DTYPES if kv.is_scaled else kv.k.dtype
    checks.check_array("q", q, "[rows, N, H]", dtypes)
    if q.shape[2] != head_size:
        raise ValueError(
            f"q has head size {q.shape[2]} and the pool {head_size}: pass arrays with the same "
            "head size"
        )
    if q.shape[1] % num_kv_heads:
        raise ValueError(
            f"q has {q.shape[1]} query heads: the number must be a multiple of the pool's "
            f"{num_kv_heads} KV heads"
        )
    if q.shape[0] and not block_tables.shape[0]:
        raise ValueError(
            f"block_tables is empty, but q has {q.shape[0]} rows: pass one block table per sequence"
        )


def check_decode(q, block_tables):
    """Check that q has exactly one row per sequence."""
    if q.shape[0] != block_tables.shape[0]:
        raise ValueError(
            f"q has {q.shape[0]} rows for {block_tables.shape[0]} block tables: pass one row per "
            "sequence, or use paged_prefill_attention for more"
        )


def check_verify(q, block_tables):
    """Raise ValueError unless q [B, Q, N, H] has a supported Q and one row per block table."""
    if q.ndim != 4 or q.shape[0] != block_tables.shape[0]:
        raise ValueError(
            f"q has shape {q.shape}: pass [B, Q, N, H] with B={block_tables.shape[0]}, one row for "
            "each row of block_tables"
        )
    num_queries = q.shape[1]
    if not 1 <= num_queries <= MAX_VERIFY_QUERIES or num_queries & (num_queries - 1):
        raise ValueError(
            f"q has {num_queries} queries per sequence: pass a power of two, at most "
            f"{MAX_VERIFY_QUERIES}"
        )


def check_prefill(query_start_loc, seq_lens):
    """Check that `query_start_loc` has one entry more than there are sequences."""
    sizes = {"B + 1": seq_lens.shape[0] + 1}
    checks.check_array("query_start_loc", query_start_loc, "[B + 1]", jnp.int32, **sizes)


def check_rope_decode(qkv, kv, block_tables, seq_lens, angles, norms, dtype, backend, **scalars):
    """Check the arguments of `rope_decode_attention`, which documents the errors.

    `scalars` are `scale`, `soft_cap` and `sliding_window`.
    """
    check_attention_context(kv, block_tables, seq_lens, backend, **scalars)
    check_rope(qkv, kv, angles, norms, dtype)
    checks.check_array("seq_lens", seq_lens, "[B]", jnp.int32, B=qkv.shape[1])


def check_attention_context(kv, block_tables, seq_lens, backend, scale, soft_cap, sliding_window):
    """Check pool, sequences and score options, and whether the backend supports the head size."""
    head_size, max_head_size = checks.check_pool(kv)["H"], backend.max_head_size
    if max_head_size is not None and head_size > max_head_size:
        raise ValueError(
            f"head size {head_size} (kv.k.shape[3]) must be from 1 to {max_head_size} for backend "
            f"{backend.value!r}: use 'xla' for larger heads"
        )
    sizes = checks.check_array("block_tables", block_tables, "[B, M]", jnp.int32)
    checks.check_array("seq_lens", seq_lens, "[B]", jnp.int32, **sizes)
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"scale is {scale}: pass a positive finite number, such as 1 / sqrt(H)")
    if soft_cap is not None and not (math.isfinite(soft_cap) and soft_cap > 0):
        raise ValueError(f"soft_cap is {soft_cap}: pass a positive finite number, or None")
    if sliding_window is not None and sliding_window <= 0:
        raise ValueError(f"sliding_window is {sliding_window}: pass a positive number, or None")
