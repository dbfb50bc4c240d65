"""The public ops: checked arguments, then the back end asked for. Nothing outside this package
knows which implementation runs.

All arrays are arguments and all results are returned; the pools of `write_kv`, `rope_write_kv`,
`rope_decode_attention` and `copy_blocks` are updated in place when the caller's jit donates them.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Float32, Int32

from pallas_kernels import (
    add_norm,
    adjusted,
    between_hopper,
    block_copy,
    checks,
    gated_gemm_hopper,
    kv_write,
    paged_decode,
    paged_prefill,
    paged_prefill_hopper,
    product_hopper,
    rope_write,
    scores,
    silu,
    thread_ops,
    truncation,
    tuning,
    tuning_hopper,
    xla,
    xla_choice,
    xla_truncation,
)
from pallas_kernels.adjusted import Adjustments
from pallas_kernels.scores import NUM_FACTS
from pallas_kernels.tiles import decode_rows_apart
from pallas_kernels.types import (
    Backend,
    HeadNorms,
    LayerKV,
    LayerSizes,
    LayerWeights,
    select_backend,
)
from pallas_kernels.xla_choice import first_maximum

__all__ = [
    "NUM_FACTS",
    "Adjustments",
    "Backend",
    "HeadNorms",
    "LayerKV",
    "LayerWeights",
    "add_rms_norm",
    "adjusted_logits",
    "between_attentions",
    "copy_blocks",
    "first_maximum",
    "gated_product",
    "gated_silu",
    "greedy_scores",
    "new_exchange",
    "paged_decode_attention",
    "paged_prefill_attention",
    "product_parts",
    "rms_norm",
    "rope_decode_attention",
    "rope_write_kv",
    "select_backend",
    "sum_parts",
    "token_scores",
    "truncation_mask",
    "write_kv",
]


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
) -> Float[Array, "B N H"]:
    """Attention of one new token a sequence over its paged keys and values.

    Args:
        q: queries, of the pool's dtype; N is a multiple of the pool's K heads.
        kv: one layer's pool [P, S, K, H]; the new token is already in it. Slots that no sequence
            owns may hold anything, NaN included.
        block_tables: the blocks of each sequence, in order; entries past its length are ignored.
        seq_lens: tokens of each sequence, the new one included; 0 marks a padded row.
        scale: factor of the scores, usually 1 / sqrt(H).
        backend: which implementation runs.
        soft_cap: scores become `soft_cap * tanh(scores / soft_cap)`.
        sliding_window: the token at position p sees keys at (p - sliding_window, p].

    Returns:
        [B, N, H] of q's dtype; zeros for padded rows.

    Raises:
        ValueError: inconsistent shapes, or a head size, block size or number out of range.
        TypeError: dtypes that differ or are not bfloat16, float16 or float32.
    """
    backend = Backend(backend)
    scalars = (scale, soft_cap, sliding_window)
    checks.check_attention(q, kv, block_tables, seq_lens, backend, scalars)
    checks.check_decode(q, block_tables)
    options = {"scale": scale, "soft_cap": soft_cap, "sliding_window": sliding_window}
    if backend is Backend.XLA or not q.size:
        return xla.paged_decode_attention(q, kv, block_tables, seq_lens, **options)
    return _decode(q, kv, block_tables, seq_lens, options, backend)


def rope_decode_attention(
    qkv: Float[Array, "parts B heads H"],
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
) -> tuple[Float[Array, "B N H"], LayerKV]:
    """`rope_write_kv` and `paged_decode_attention` in one, for one new token a sequence.

    The new token is a sequence's last: its key and value go to the slot that the block table has
    for position `seq_len - 1`. Padded rows, of `seq_len` 0, store nothing.

    Args:
        qkv: of each token N query heads, K key heads, K value heads, in parts that are summed and
            rounded first (see `product_parts`).
        kv: one layer's pool [P, S, K, H], with all earlier tokens; updated in place if donated.
        block_tables, seq_lens, scale, backend, soft_cap, sliding_window: as of
            `paged_decode_attention`.
        angles, norms, dtype: as of `rope_write_kv`. Attention computes in the pool's dtype.

    Returns:
        [B, N, H] of `dtype`, zeros for padded rows; and the pool.

    Raises:
        ValueError: inconsistent shapes, or a head size, block size or number out of range.
        TypeError: dtypes other than bfloat16, float16 or float32; angles not float32.
    """
    dtype = jnp.dtype(qkv.dtype if dtype is None else dtype)
    scalars = (scale, soft_cap, sliding_window)
    backend = Backend(backend)
    arrays = (qkv, kv, block_tables, seq_lens, angles, norms)
    checks.check_rope_decode(*arrays, dtype, backend, scalars)
    options = {"scale": scale, "soft_cap": soft_cap, "sliding_window": sliding_window}
    if backend is Backend.XLA or not qkv.size:
        return xla.rope_decode_attention(*arrays, dtype=dtype, **options)
    config = _decode_config(kv, block_tables, backend)
    interpret = backend is Backend.INTERPRET
    return paged_decode.rope_decode_attention(
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
    shared: Callable | None = None,
) -> Float[Array, "T N H"]:
    """Causal attention of a ragged batch of new tokens, with any earlier context in the pool.

    Sequence b owns rows `query_start_loc[b]:query_start_loc[b + 1]` of q; they are the last of its
    `seq_lens[b]` tokens and already in the pool. A one-token sequence is a decode row riding along;
    those that come before all longer ones run at the speed of `paged_decode_attention` on a GPU,
    where the batch has more than a few sequences.

    Args:
        q: flattened queries, of the pool's dtype; rows from `query_start_loc[B]` on are padding.
        kv: one layer's pool [P, S, K, H]; slots that no sequence owns may hold anything.
        block_tables: the blocks of each sequence, in order; entries past its length are ignored.
        query_start_loc: [B + 1], not decreasing, from 0; a padded sequence repeats the last value.
        seq_lens: tokens of each sequence, context and new ones; 0 for a padded sequence.
        scale: factor of the scores, usually 1 / sqrt(H).
        backend: which implementation runs.
        soft_cap: scores become `soft_cap * tanh(scores / soft_cap)`.
        sliding_window: the token at position p sees keys at (p - sliding_window, p].
        shared: called as `shared(function, *arrays)` for what another number of sequences would
            have as well, if there is such a thing, to return `function(*arrays)`.

    Returns:
        [T, N, H] of q's dtype; zeros for padding rows.

    Raises:
        ValueError: inconsistent shapes, or a head size, block size or number out of range.
        TypeError: dtypes that differ or are not bfloat16, float16 or float32.
    """
    backend = Backend(backend)
    scalars = (scale, soft_cap, sliding_window)
    checks.check_attention(q, kv, block_tables, seq_lens, backend, scalars)
    checks.check_prefill(query_start_loc, seq_lens)
    options = {"scale": scale, "soft_cap": soft_cap, "sliding_window": sliding_window}
    if backend is Backend.XLA or not q.size:
        arrays = (q, kv, block_tables, query_start_loc, seq_lens)
        return xla.paged_prefill_attention(*arrays, **options)
    if not tuning.takes_decode_rows_apart(num_tokens=q.shape[0], batch=seq_lens.shape[0]):
        return _prefill(q, kv, block_tables, query_start_loc, seq_lens, options, backend, shared)
    rest, decode_lens = decode_rows_apart(seq_lens, query_start_loc)
    out = _prefill(q, kv, block_tables, rest, seq_lens, options, backend, shared)
    return _decode(q, kv, block_tables, decode_lens, options, backend, into=out)


def write_kv(
    kv: LayerKV,
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    slot_mapping: Int32[Array, "T"],
    *,
    backend: Backend,
) -> LayerKV:
    """Store new tokens' keys and values, token t in slot `slot_mapping[t]` = block * S + offset.

    Padding tokens go to the null block (slots 0 to S - 1); a slot outside the pool is dropped. Two
    tokens may share a slot in the null block only. Returns the pool, updated in place if donated.

    Raises:
        ValueError: shapes that do not fit the pool.
        TypeError: k or v not of the pool's dtype.
    """
    checks.check_write(kv, k, v, slot_mapping)
    backend = Backend(backend)
    if backend is Backend.XLA or not k.size:
        return xla.write_kv(kv, k, v, slot_mapping)
    return kv_write.write_kv(
        kv,
        k,
        v,
        slot_mapping,
        config=_move_config("write", kv, backend),
        interpret=backend is Backend.INTERPRET,
    )


def rope_write_kv(
    qkv: Float[Array, "parts T heads H"],
    kv: LayerKV,
    slot_mapping: Int32[Array, "T"],
    angles: tuple[Float32[Array, "T half"], Float32[Array, "T half"]] | None,
    *,
    backend: Backend,
    norms: HeadNorms | None = None,
    dtype: DTypeLike | None = None,
) -> tuple[Float[Array, "T N H"], LayerKV]:
    """Normalize and rotate new tokens' queries and keys; store keys and values as `write_kv` does.

    Norm and rotation compute in float32 and each rounds to `dtype`; what is stored is then cast to
    the pool's. Rotary embedding: Su et al. 2021, arXiv:2104.09864, in the halves layout.

    Args:
        qkv: of each token N query heads, K key heads, K value heads, in parts that are summed and
            rounded first (see `product_parts`).
        kv: one layer's pool [P, S, K, H]; updated in place if donated.
        slot_mapping: as of `write_kv`.
        angles: cosine and sine of each token's rotation, for channels i and i + H / 2; None where
            nothing is rotated.
        backend: which implementation runs.
        norms: RMSNorm of the query and key heads before the rotation; `dtype` or float32.
        dtype: of the queries; qkv's if None.

    Returns:
        The queries, and the pool.

    Raises:
        ValueError: shapes that do not fit the pool or each other.
        TypeError: dtypes other than bfloat16, float16 or float32; angles not float32.
    """
    dtype = jnp.dtype(qkv.dtype if dtype is None else dtype)
    checks.check_rope_write(qkv, kv, slot_mapping, angles, norms, dtype)
    backend = Backend(backend)
    if backend is Backend.XLA or not qkv.size:
        return xla.rope_write_kv(qkv, kv, slot_mapping, angles, norms, dtype=dtype)
    config = tuning.rope_config(
        head_size=qkv.shape[3], itemsize=qkv.dtype.itemsize, device_kind=_device_kind(backend)
    )
    interpret = backend is Backend.INTERPRET
    return rope_write.rope_write_kv(
        qkv, kv, slot_mapping, angles, norms, dtype=dtype, config=config, interpret=interpret
    )


def add_rms_norm(
    hidden: Float[Array, "T D"],
    update: Float[Array, "parts T D"],
    weight: Float[Array, "D"],
    *,
    eps: float,
    backend: Backend,
) -> tuple[Float[Array, "T D"], Float[Array, "T D"]]:
    """`total = hidden + sum(update)`, both rounded; returns `rms_norm(total)` and total.

    The update comes in parts (see `product_parts`), of hidden's dtype or float32; so is the weight.

    Raises:
        ValueError: shapes that differ; an eps out of range.
        TypeError: dtypes that differ or are not bfloat16, float16 or float32.
    """
    checks.check_add_norm(hidden, update, weight, eps)
    backend = Backend(backend)
    if backend is Backend.XLA or not hidden.size:
        return xla.add_rms_norm(hidden, update, weight, eps=eps)
    config = tuning.norm_config(size=hidden.shape[1], itemsize=update.dtype.itemsize)
    interpret = backend is Backend.INTERPRET
    return add_norm.add_rms_norm(
        hidden, update, weight, eps=eps, config=config, interpret=interpret
    )


def gated_silu(gate_up: Float[Array, "T 2 F"], *, backend: Backend) -> Float[Array, "T F"]:
    """silu(gate) * up of rows that hold gate and up, in float32 and then rounded (SwiGLU: Shazeer
    2020, arXiv:2002.05202). Plain XLA where that is faster: see `tuning.gated_config`.

    Raises:
        ValueError: a shape other than [T, 2, F].
        TypeError: a dtype other than bfloat16, float16 or float32.
    """
    checks.check_gated(gate_up)
    backend = Backend(backend)
    config = tuning.gated_config(num_tokens=gate_up.shape[0], size=gate_up.shape[2])
    if backend is Backend.XLA or not gate_up.size or config is None:
        return xla.gated_silu(gate_up)
    return silu.gated_silu(gate_up, config=config, interpret=backend is Backend.INTERPRET)


def product_parts(
    x: Float[Array, "T C"], weight: Float[Array, "C D"], *, backend: Backend
) -> Float[Array, "parts T D"]:
    """x @ weight in parts, whose sum it is: along C, as many as the shapes read fastest with.

    Few rows by a narrow weight use the whole chip only with C split over programs. Whoever takes
    the product next sums the parts, where XLA would sum them in a kernel of its own. One part is of
    x's dtype; several are float32. Accumulates in float32.

    Raises:
        ValueError: shapes that do not fit.
        TypeError: dtypes that differ or are not bfloat16, float16 or float32.
    """
    checks.check_product(x, weight)
    backend = Backend(backend)
    if backend is Backend.XLA:
        return xla.product_parts(x, weight, 1)
    config = _hopper_product_config(x, weight.shape, backend)
    if config is not None:
        return product_hopper.product_parts(x, weight, config=config)
    num_parts = tuning.product_parts(
        num_tokens=x.shape[0],
        depth=x.shape[1],
        width=weight.shape[1],
        itemsize=x.dtype.itemsize,
    )
    return xla.product_parts(x, weight, num_parts)


def gated_product(
    x: Float[Array, "T D"], weight: Float[Array, "D 2 F"], *, backend: Backend
) -> Float[Array, "T F"]:
    """silu(x @ weight[:, 0]) * (x @ weight[:, 1]), the activation in float32 (SwiGLU: Shazeer 2020,
    arXiv:2002.05202). Accumulates in float32; x's dtype out.

    On Hopper GPUs one kernel, where it is faster than XLA's product and `gated_silu` of that, which
    rounds the product's rows in between.

    Raises:
        ValueError: shapes that do not fit.
        TypeError: dtypes that differ or are not bfloat16, float16 or float32.
    """
    checks.check_gated_product(x, weight)
    backend = Backend(backend)
    config = _hopper_product_config(x, weight.shape, backend)
    if config is not None:
        return product_hopper.gated_product(x, weight, config=config)
    gemm_config = _hopper_gemm_config(x, weight.shape, backend)
    if gemm_config is not None:
        return gated_gemm_hopper.gated_product(x, weight, config=gemm_config)
    return gated_silu(xla.gate_up(x, weight), backend=backend)


def sum_parts(parts: Float[Array, "parts *axes"], dtype: DTypeLike) -> Float[Array, "*axes"]:
    """A product from its parts, added in float32."""
    return xla.sum_parts(parts, dtype)


def rms_norm(
    x: Float[Array, "*rows D"], weight: Float[Array, "D"], *, eps: float
) -> Float[Array, "*rows D"]:
    """x / rms(x) * weight over the last axis, in float32, x's dtype out (arXiv:1910.07467).

    Plain XLA everywhere: it makes one kernel of it.
    """
    return xla.rms_norm(x, weight, eps=eps)


def new_exchange(
    weights: LayerWeights, *, num_tokens: int, backend: Backend
) -> Int32[Array, "W"] | None:
    """What `between_attentions` of a step's first layer takes as its exchange memory.

    None where the op gains nothing over those it stands for, or cannot run as one: on other devices
    than Hopper GPUs, before JAX 0.11, in other dtypes than bfloat16, for another number of rows
    than 8, for a stream 2,048 wide or wider, or for widths that are not multiples of 128.
    """
    plan = _between_plan(weights, num_tokens, Backend(backend))
    if plan is None:
        return None
    return jnp.full((plan[0].words,), thread_ops.EMPTY, jnp.int32)


def between_attentions(
    attended: Float[Array, "T C"],
    hidden: Float[Array, "T D"],
    weights: LayerWeights,
    num_rows: Int32[Array, ""],
    exchange: Int32[Array, "W"],
    *,
    eps: float,
    backend: Backend,
) -> tuple[Float[Array, "T D"], Float[Array, "parts T Q"], Int32[Array, "W"]]:
    """From one layer's attention to the next one's, for the few rows of a small decode step.

    hidden + attended @ output, RMSNorm, silu(gate) * up, its sum with the stream after down,
    the next RMSNorm, the next layer's fused projection; SiLU and norms in float32.

    Args:
        attended: what the layer's heads have attended to, side by side.
        hidden: the residual stream before the layer.
        weights: of the layer, and the next one's norm and projection.
        num_rows: rows that matter, the first ones; the results' other rows may hold anything.
        exchange: from `new_exchange` or the step's op before this one; used up.
        eps: of both norms, under the root.
        backend: which implementation runs.

    Returns:
        The stream after the layer; the next layer's queries, keys and values, in parts to be
        summed; the exchange memory for the step's next op of the same sizes and rows.
        Deterministic.

    Raises:
        ValueError: shapes that do not fit.
        TypeError: dtypes that differ or are not bfloat16, float16 or float32.
    """
    checks.check_between(attended, hidden, weights, num_rows, exchange, eps)
    plan = _between_plan(weights, hidden.shape[0], Backend(backend))
    if plan is None:
        return *xla.between_attentions(attended, hidden, weights, eps=eps), exchange
    if exchange.shape != (plan[0].words,):
        raise ValueError(
            f"exchange has {exchange.shape[0]} words, this layer needs {plan[0].words}: "
            "make it by new_exchange, with this layer's weights and rows"
        )
    return between_hopper.between_attentions(
        attended, hidden, weights, num_rows, exchange, eps=eps, plan=plan[0], config=plan[1]
    )


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
    checks.check_copy(pool, src, dst)
    backend = Backend(backend)
    if backend is Backend.XLA or not src.size:
        return xla.copy_blocks(pool, src, dst)
    return block_copy.copy_blocks(
        pool,
        src,
        dst,
        config=_move_config("copy", pool[0], backend),
        interpret=backend is Backend.INTERPRET,
    )


def truncation_mask(
    logits: Float32[Array, "B V"],
    *,
    temperature: Float32[Array, "B"],
    min_p: Float32[Array, "B"],
    top_k: Int32[Array, "B"],
    top_p: Float32[Array, "B"],
    backend: Backend,
) -> Bool[Array, "B V"]:
    """The tokens that min-p, top-k and top-p, in this order, keep.

    Exact and without a sort. Tokens as probable as the least probable one kept are kept too, and
    the most probable one always is. What a row keeps depends on no other row.

    Args:
        logits: finite or minus infinity; one of each row is finite.
        temperature: positive; the logits are divided by it, for min-p and top-p to count with.
        min_p: leave out tokens less probable than this share of the most probable one; 0 is off.
        top_k: keep so many; 0, or V and more, is off.
        top_p: keep the fewest most probable tokens that have this share of the probability that
            min-p and top-k left; 1 is off.
        backend: which implementation runs.

    Raises:
        ValueError: shapes that do not fit.
        TypeError: dtypes other than float32, and int32 of top_k.
    """
    checks.check_truncation(logits, temperature, min_p, top_k, top_p)
    backend = Backend(backend)
    if not logits.size:
        return jnp.ones(logits.shape, jnp.bool_)
    highest = logits.max(axis=1, keepdims=True)
    relative = (logits - highest) / temperature[:, None]
    probable = relative >= jnp.log(min_p)[:, None]  # log(0) = -inf keeps all
    top_k = jnp.where(top_k < logits.shape[1], top_k, 0)
    if backend is Backend.XLA:
        weights = jnp.where(probable, jnp.exp(relative), 0.0)
        threshold = xla_truncation.truncation_threshold(logits, weights, top_k, top_p)
    else:
        log2_e = math.log2(math.e)
        threshold = truncation.truncation_threshold(
            logits,
            jnp.stack([highest[:, 0], log2_e / temperature, jnp.log2(min_p), top_p], axis=1),
            top_k,
            config=tuning.TruncationConfig(),
            interpret=backend is Backend.INTERPRET,
        )
    return probable & (logits >= threshold[:, None])


def adjusted_logits(
    logits: Float32[Array, "B V"], adjustments: Adjustments, *, backend: Backend
) -> Float32[Array, "B V"]:
    """The logits after biases, forbidden tokens and penalties, in the rows that are adjusted.

    On a GPU plain XLA, which makes it part of what reads it.

    Raises:
        ValueError: shapes that do not fit.
        TypeError: logits not float32.
    """
    checks.check_adjustments(logits, adjustments)
    if Backend(backend) is Backend.XLA:
        return xla_choice.adjusted_logits(logits, adjustments)
    return adjusted.all_adjusted(logits, adjustments)


def greedy_scores(
    logits: Float32[Array, "B V"],
    adjustments: Adjustments | None,
    wanted: Bool[Array, "B"],
    count: int,
    *,
    backend: Backend,
) -> Int32[Array, "B W"]:
    """`token_scores` of each row's first maximum after its adjustments: the token first in a row,
    -1 where the highest logit is not finite. The scores are those of the unchanged logits.

    Rows that are not adjusted read no state, and cost what they cost without adjustments.

    Args:
        logits: of V tokens.
        adjustments: what changes them first; None for nothing.
        wanted, count, backend: as of `token_scores`.

    Raises:
        ValueError: shapes that do not fit; a negative count.
        TypeError: logits not float32.
    """
    checks.check_adjustments(logits, adjustments)
    checks.check_scores(logits, None, wanted, count)
    backend, count = Backend(backend), min(count, logits.shape[1])
    if backend is Backend.XLA or not logits.size or not count:
        return xla_choice.greedy_scores(logits, adjustments, wanted, count)
    interpret = backend is Backend.INTERPRET
    options = {"config": tuning.ScoresConfig(), "interpret": interpret}
    return scores.token_scores(logits, None, wanted, count, adjustments=adjustments, **options)


def token_scores(
    logits: Float32[Array, "T V"],
    token_ids: Int32[Array, "T"],
    wanted: Bool[Array, "T"],
    count: int,
    *,
    backend: Backend,
) -> Int32[Array, "T W"]:
    """How probable tokens are, and which ones are most: without a sort, and packed, since each
    array that a step gives back takes its host tens of microseconds.

    A row is: the token as given, its log-probability, its rank (how many tokens are at least as
    probable: 1 is the most probable); then L = min(count, V) times a token and its
    log-probability, the most probable first and of equal ones the one with the lowest id
    (`jax.lax.top_k`'s order). W = NUM_FACTS + 2 L; log-probabilities are float32 by their bits.

    Args:
        logits: of V tokens.
        token_ids: one a row; of one outside the vocabulary the log-probability and rank mean
            nothing.
        wanted: rows to fill; of others only the token is defined, and where no row is wanted next
            to nothing is computed.
        count: most probable tokens of each row.
        backend: which implementation runs.

    Raises:
        ValueError: shapes that do not fit; a negative count.
        TypeError: logits not float32.
    """
    checks.check_scores(logits, token_ids, wanted, count)
    backend, count = Backend(backend), min(count, logits.shape[1])
    if backend is Backend.XLA or not logits.size or not count:
        return xla_choice.token_scores(logits, token_ids, wanted, count)
    config, interpret = tuning.ScoresConfig(), backend is Backend.INTERPRET
    return scores.token_scores(logits, token_ids, wanted, count, config=config, interpret=interpret)


def _decode(q, kv, block_tables, seq_lens, options, backend, into=None):
    config = _decode_config(kv, block_tables, backend)
    launch = {"config": config, "interpret": backend is Backend.INTERPRET, "into": into}
    return paged_decode.paged_decode_attention(q, kv, block_tables, seq_lens, **options, **launch)


def _prefill(q, kv, block_tables, query_start_loc, seq_lens, options, backend, shared):
    arrays = (q, kv, block_tables, query_start_loc, seq_lens)
    facts = {
        "head_size": q.shape[2],
        "itemsize": q.dtype.itemsize,
        "device_kind": _device_kind(backend),
    }
    plain = options["soft_cap"] is None and options["sliding_window"] is None
    hopper = tuning_hopper.prefill_config(block_size=kv.k.shape[1], plain=plain, **facts)
    if hopper is not None:
        launch = {"scale": options["scale"], "config": hopper, "shared": shared}
        return paged_prefill_hopper.paged_prefill_attention(*arrays, **launch)
    facts["group"] = q.shape[1] // kv.k.shape[2]
    config = tuning.prefill_config(num_tokens=q.shape[0], batch=seq_lens.shape[0], **facts)
    launch = {"config": config, "interpret": backend is Backend.INTERPRET}
    return paged_prefill.paged_prefill_attention(*arrays, **options, **launch)


def _decode_config(kv, block_tables, backend):
    return tuning.decode_config(
        batch=block_tables.shape[0],
        num_kv_heads=kv.k.shape[2],
        max_context=block_tables.shape[1] * kv.k.shape[1],
        head_size=kv.k.shape[3],
        itemsize=kv.k.dtype.itemsize,
        device_kind=_device_kind(backend),
    )


def _move_config(op, kv, backend):
    head_size, itemsize = kv.k.shape[3], kv.k.dtype.itemsize
    kind = _device_kind(backend)
    return tuning.move_config(op, head_size=head_size, itemsize=itemsize, device_kind=kind)


def _hopper_product_config(x, weight_shape, backend):
    """Of a product by a weight [D, F], or by one [D, 2, F]; or None."""
    facts = _product_facts(x, weight_shape, backend)
    return tuning_hopper.product_config(num_factors=len(weight_shape) - 1, **facts)


def _hopper_gemm_config(x, weight_shape, backend):
    """Of a gated product by a weight [D, 2, F]; or None."""
    return tuning_hopper.gated_gemm_config(**_product_facts(x, weight_shape, backend))


def _product_facts(x, weight_shape, backend):
    return {
        "num_tokens": x.shape[0],
        "depth": x.shape[1],
        "width": weight_shape[-1],
        "itemsize": x.dtype.itemsize,
        "num_cores": _num_cores(backend),
        "device_kind": _device_kind(backend),
    }


def _between_plan(weights, num_tokens, backend):
    """The Hopper kernel's plan and config, or None."""
    if jax.__version_info__ < (0, 11):  # whose Mosaic GPU kernels have no mutable arguments
        return None
    sizes, dtype = LayerSizes.of(weights), weights.output.dtype.name
    facts = {"device_kind": _device_kind(backend), "num_cores": _num_cores(backend)}
    config = tuning_hopper.between_config(sizes, num_tokens=num_tokens, dtype=dtype, **facts)
    return None if config is None else (between_hopper.Plan(sizes, config.num_programs), config)


def _device_kind(backend):
    """The name of the GPU traced for, or nothing."""
    device = _device(backend)
    return "" if device is None else device.device_kind


def _num_cores(backend):
    """Its SMs, where they are known."""
    device = _device(backend)
    return getattr(device, "num_cores", None) or getattr(device, "core_count", None)


def _device(backend):
    """The GPU traced for: an abstract mesh's device where one is set, else the first one here."""
    if backend is not Backend.TRITON:
        return None
    return jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]
