"""Self-attention over the paged pool: the inputs of a step, rotary embedding, and the module."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32

from jpaged.models.config import FP8_DTYPE, ModelConfig, RopeConfig
from jpaged.models.formats import LinearInput
from jpaged.models.layer_calls import trace_once
from jpaged.models.linear import Linear, make_linear
from jpaged.models.norm import Norm, RMSNorm, make_norm, normalize_rows
from jpaged.models.sharding import PendingAllReduce, all_mean
from pallas_kernels import (
    Backend,
    HeadNorms,
    KVScales,
    LayerKV,
    map_row_tiles,
    paged_decode_attention,
    paged_prefill_attention,
    paged_verify_attention,
    rope_decode_attention,
    rope_write_kv,
    sum_partials,
    write_kv,
)


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True)
class AttentionInputs:
    """Block tables, lengths and slots of a step's sequences; every layer takes the same inputs.

    Attributes:
        block_tables: Block ids of each sequence, in order.
        seq_lens: Number of tokens of each sequence, including the tokens of this step; 0 for a
            padding sequence.
        slot_mapping: Slot of the pool to which each token's K and V are written: block id * block
            size + offset in the block.
        query_start_loc: Index at which each sequence begins in the flattened tokens, and the end of
            the last sequence. None in a decode step, which has one token for each of the B
            sequences (T == B).
        backend: Implementation of the kernels. Static.
        call_shared: Function that calls code shared by several programs, so that the code is
            lowered once (see `paged_prefill_attention`). None: call the code directly. Static.
        peer_header: Addresses of the memory through which kernels all-reduce over the devices (see
            `sharding.PendingAllReduce`). None: XLA runs the all-reduces. In each layer, attention
            uses buffer 0 of that memory, and the feed-forward uses buffer 1.
        num_queries: Number of tokens per sequence (Q) in a step that verifies drafts, whose tokens
            are flattened (T == B * Q); 1 in other steps. Static.
    """

    block_tables: Int32[Array, "B M"]
    seq_lens: Int32[Array, "B"]
    slot_mapping: Int32[Array, "T"]
    query_start_loc: Int32[Array, "B+1"] | None
    backend: Backend
    call_shared: Callable | None = None
    peer_header: Int32[Array, "W"] | None = None
    num_queries: int = 1

    @property
    def num_tokens(self) -> Int32[Array, ""]:
        """Number of token rows up to the last row of a running sequence.

        Rows of finished sequences are counted if they are before that row. The rows after it are
        padding.
        """
        if self.query_start_loc is not None:
            return self.query_start_loc[-1]
        ends = jnp.arange(1, self.seq_lens.shape[0] + 1, dtype=jnp.int32) * self.num_queries
        return jnp.max(jnp.where(self.seq_lens > 0, ends, 0))

    _ARRAY_FIELDS = ("block_tables", "seq_lens", "slot_mapping", "query_start_loc", "peer_header")

    _STATIC_FIELDS = ("backend", "call_shared", "num_queries")

    def tree_flatten_with_keys(self):
        """Return the array fields as (key, array) pairs, and the static fields."""
        keyed = [
            (jax.tree_util.GetAttrKey(name), getattr(self, name)) for name in self._ARRAY_FIELDS
        ]
        return keyed, (self.backend, self.call_shared, self.num_queries)

    @classmethod
    def tree_unflatten(cls, static, arrays):
        """Rebuild the inputs from their static fields and array fields.

        Skip `__init__`: JAX may pass placeholders, which runtime type checks would reject.
        """
        self, names = object.__new__(cls), (*cls._ARRAY_FIELDS, *cls._STATIC_FIELDS)
        vars(self).update(zip(names, (*arrays, *static), strict=True))
        return self


# Cosines and sines of the rotation angles: one row per token, and one column per pair of channels,
# so `half` is H / 2.
RopeAngles = tuple[Float32[Array, "T half"], Float32[Array, "T half"]]


def invariant_inputs(attention: AttentionInputs) -> AttentionInputs:
    """Return inputs with which decode and verify steps run the prefill kernel.

    Batch-invariant attention must use the same kernel in prefill, decode and verify steps. The
    length of a padding sequence is set to `num_queries`, and the sequence reads the null block.
    """
    if attention.query_start_loc is not None:
        return attention
    lens, num_queries = attention.seq_lens, attention.num_queries
    starts = jnp.arange(lens.shape[0] + 1, dtype=jnp.int32) * num_queries
    lens = jnp.maximum(lens, jnp.int32(num_queries))
    return replace(attention, seq_lens=lens, query_start_loc=starts)


def _mean_square(
    heads: Float32[Array, "T heads H"], *, batch_invariant: bool
) -> Float32[Array, "T 1 1"]:
    """Return the mean square of each token: the mean over all channels of all heads of the
    token."""

    def compute(heads: Float32[Array, "T heads H"]) -> Float32[Array, "T 1 1"]:
        return jnp.mean(heads * heads, axis=(1, 2), keepdims=True)

    return map_row_tiles(compute, heads) if batch_invariant else compute(heads)


def inverse_frequencies(rope: RopeConfig, head_size: int) -> np.ndarray:
    """Return the rotation of each channel pair in radians per position, float32 [H / 2].

    The rope type "linear" divides all frequencies by `rope.factor`. The rope types "llama3" and
    "yarn" divide low frequencies by the factor, keep high frequencies, and interpolate between low
    and high ones, each by its own formula.
    """
    exponents = np.arange(0, head_size, 2, dtype=np.float32) / np.float32(head_size)
    # Compute the power in float64. In float32, numpy's result can differ from torch's by one ulp,
    # and the error of the angle grows with the position.
    powers = np.float64(rope.theta) ** exponents.astype(np.float64)
    frequencies = np.float32(1) / powers.astype(np.float32)
    if rope.rope_type == "linear":
        return frequencies / np.float32(rope.factor)
    if rope.rope_type == "llama3":
        return _scale_llama3(frequencies, rope)
    if rope.rope_type == "yarn":
        return _scale_yarn(frequencies, rope)
    return frequencies


def _scale_llama3(frequencies: np.ndarray, rope: RopeConfig) -> np.ndarray:
    """Divide the low frequencies by the factor, as Llama 3.1 does.

    `turns` is the number of rotations within the original context length. Frequencies with at most
    `low_freq_factor` turns are divided by the factor, and frequencies with at least
    `high_freq_factor` turns are kept. Frequencies between these limits are interpolated linearly.
    """
    low, high = np.float32(rope.low_freq_factor), np.float32(rope.high_freq_factor)
    turns = np.float32(rope.original_max_position_embeddings / (2 * math.pi)) * frequencies
    kept = np.clip((turns - low) / (high - low), np.float32(0), np.float32(1))
    return (np.float32(1) - kept) * frequencies / np.float32(rope.factor) + kept * frequencies


def _scale_yarn(frequencies: np.ndarray, rope: RopeConfig) -> np.ndarray:
    """Divide the low frequencies by the factor, as YaRN does (Peng et al. 2023, arXiv:2309.00071).

    Each frequency rotates a pair of channels; the frequencies decrease with the index of the pair.
    Up to index `low`, a pair makes at least `beta_fast` rotations within the original context
    length, and keeps its frequency. From index `high` on, a pair makes at most `beta_slow`
    rotations, and its frequency is divided by the factor. Between `low` and `high`, the frequencies
    are interpolated linearly.
    """
    num_pairs = len(frequencies)
    low, high = (
        num_pairs
        * math.log(rope.original_max_position_embeddings / (turns * 2 * math.pi))
        / math.log(rope.theta)
        for turns in (rope.beta_fast, rope.beta_slow)
    )
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * num_pairs - 1)
    high = low + 0.001 if low == high else high
    ramp = (np.arange(num_pairs, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
    kept = np.float32(1) - np.clip(ramp, np.float32(0), np.float32(1))
    return frequencies / np.float32(rope.factor) * (np.float32(1) - kept) + frequencies * kept


def rope_angles(positions: Int32[Array, "T"], rope: RopeConfig, head_size: int) -> RopeAngles:
    """Return cosine and sine of the rotation angle of each position and channel pair.

    Both are multiplied by `rope.attention_factor`.
    """
    frequencies = jnp.asarray(inverse_frequencies(rope, head_size))
    angles = positions.astype(jnp.float32)[:, None] * frequencies[None, :]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if rope.attention_factor == 1.0:
        return cos, sin
    factor = jnp.float32(rope.attention_factor)
    return cos * factor, sin * factor


def attend_paged(
    q: Float[Array, "T N H"], kv: LayerKV, attention: AttentionInputs, **options: Any
) -> Float[Array, "T N H"]:
    """Compute attention of a step's queries over a layer's pool, for any kind of step.

    Args:
        q: Queries of the step's tokens.
        kv: The layer's pool, which already holds the step's tokens.
        attention: Inputs of the step.
        options: Other keyword arguments of the attention ops.

    Returns:
        The output of each query head, in q's dtype.
    """
    rows = q.astype(kv.attention_dtype(q.dtype))
    tables, lens, starts = attention.block_tables, attention.seq_lens, attention.query_start_loc
    if starts is not None:
        call_shared = attention.call_shared
        out = paged_prefill_attention(
            rows, kv, tables, starts, lens, call_shared=call_shared, **options
        )
    elif attention.num_queries > 1:
        queries = rows.reshape(-1, attention.num_queries, *rows.shape[1:])
        out = paged_verify_attention(queries, kv, tables, lens, **options).reshape(rows.shape)
    else:
        out = paged_decode_attention(rows, kv, tables, lens, **options)
    return out.astype(q.dtype)


@trace_once
def attend_projected(
    qkv: Float[Array, "parts T heads H"],
    kv: LayerKV,
    attention: AttentionInputs,
    angles: RopeAngles | None,
    norms: HeadNorms | None,
    scales: KVScales | None,
    *,
    dtype: DTypeLike,
    batch_invariant: bool,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
) -> tuple[Float[Array, "T N H"], LayerKV]:
    """Write the tokens' K and V to the pool, and compute attention, from the projected QKV heads.

    Args:
        qkv: Split-K partials of each token's query heads, key heads and value heads.
        kv: The layer's pool, to which the tokens' K and V are written.
        attention: Inputs of the step.
        angles: Rotation of each token; None to skip the rotation.
        norms: Norms of each query and key head; None for no norms.
        scales: Scales of an FP8 pool.
        dtype: Dtype of the queries and of the result.
        batch_invariant: Whether a token's bits must not depend on the other tokens of the step.
        scale, sliding_window, soft_cap: Options of the attention ops.

    Returns:
        The output of each query head before the output projection, and the updated pool.
    """
    backend, is_decode = attention.backend, attention.query_start_loc is None
    options: dict[str, Any] = {"scale": scale, "soft_cap": soft_cap}
    options["sliding_window"] = sliding_window
    if batch_invariant:
        options["batch_invariant"] = True
    elif angles is not None and is_decode and attention.num_queries == 1:
        tables, lens = attention.block_tables, attention.seq_lens
        options |= {"norms": norms, "dtype": dtype, "scales": scales, "backend": backend}
        return rope_decode_attention(qkv, kv, tables, lens, angles, **options)
    if batch_invariant and backend is Backend.XLA and norms is not None:
        q, k, v = split_heads(qkv, kv.k.shape[2], dtype)
        q, k = (
            normalize_rows(it, weight, norms.eps, batch_invariant=True)
            for it, weight in ((q, norms.q), (k, norms.k))
        )
        qkv, norms = jnp.concatenate([q, k, v], axis=1)[None], None
    q, kv = _store_projected(qkv, kv, attention, angles, norms, dtype, scales)
    step = invariant_inputs(attention) if batch_invariant else attention
    return attend_paged(q, kv, step, scales=scales, backend=backend, **options), kv


def _store_projected(
    qkv: Float[Array, "parts T heads H"],
    kv: LayerKV,
    attention: AttentionInputs,
    angles: RopeAngles | None,
    norms: HeadNorms | None,
    dtype: DTypeLike,
    scales: KVScales | None,
) -> tuple[Float[Array, "T N H"], LayerKV]:
    """Normalize and rotate queries and keys, and write K and V to the pool.

    Returns:
        The queries in `dtype`, and the updated pool.
    """
    slots, backend = attention.slot_mapping, attention.backend
    if angles is not None or kv.head_size % 2 == 0:  # rope_write_kv refuses odd head sizes
        options = {"norms": norms, "dtype": dtype, "scales": scales, "backend": backend}
        return rope_write_kv(qkv, kv, slots, angles, **options)
    q, k, v = split_heads(qkv, kv.k.shape[2], dtype)
    if norms is not None:
        q = normalize_rows(q, norms.q, norms.eps, batch_invariant=False)
        k = normalize_rows(k, norms.k, norms.eps, batch_invariant=False)
    # Only a head size that is not divisible by 2 leads to these lines. An FP8 pool needs an even
    # head size, so this pool is not FP8, and K and V need no FP8 scales.
    k, v = k.astype(kv.k.dtype), v.astype(kv.v.dtype)
    return q, write_kv(kv, k, v, slots, backend=backend)


def split_heads(
    qkv: Float[Array, "parts T heads H"], num_kv_heads: int, dtype: DTypeLike
) -> list[Float[Array, "T _ H"]]:
    """Return the query, key and value heads in `dtype`, from their split-K partials."""
    heads = sum_partials(qkv, dtype)
    ends = heads.shape[1] - 2 * num_kv_heads, heads.shape[1] - num_kv_heads
    return jnp.split(heads, ends, axis=1)


class Attention(nnx.Module):
    """Self-attention of one layer over the paged pool.

    For an FP8 pool, `k_scale` and `v_scale` are the scales of keys and values, each float32 [1]
    (see `KVScales`). For other pools, both scales are None.
    """

    def __init__(self, config: ModelConfig, index: int, *, dtype: DTypeLike):
        self.layer_config = layer_config = config.layers[index]
        self.batch_invariant = config.batch_invariant
        self.qkv = cast(Linear, make_linear(config, f"layers.{index}.attention.qkv", dtype))
        self.output = cast(Linear, make_linear(config, f"layers.{index}.attention.output", dtype))

        def head_norm(num_heads: int) -> Norm | None:
            if layer_config.qk_norm is None:
                return None
            count = num_heads if layer_config.qk_norm == "projection" else 1
            return make_norm(config, count * config.head_size, dtype=dtype)

        self.q_norm, self.k_norm = head_norm(config.num_heads), head_norm(config.num_kv_heads)
        self.is_shared = config.tensor_parallel_size > 1
        is_scaled = config.kv_cache_dtype == FP8_DTYPE
        self.k_scale = nnx.Param(jnp.ones((1,), jnp.float32)) if is_scaled else None
        self.v_scale = nnx.Param(jnp.ones((1,), jnp.float32)) if is_scaled else None

    def __call__(
        self,
        x: LinearInput,
        kv: LayerKV,
        attention: AttentionInputs,
        angles: RopeAngles | None = None,
    ) -> tuple[Float[Array, "parts T D"] | PendingAllReduce, LayerKV]:
        """Write the tokens' K and V to the layer's pool, and compute attention.

        Returns:
            The update of the residual stream, and the layer's updated pool.
        """
        qkv = self.qkv(x, attention.backend)
        out, kv = self.attend(qkv, kv, attention, angles, x.dtype)
        return self.output.forward_residual(
            out, attention.backend, attention.peer_header, buffer_index=0
        ), kv

    def _normalize_projections(
        self, qkv: Float[Array, "parts T heads H"], dtype: DTypeLike
    ) -> Float[Array, "new_parts T heads H"]:
        """Apply the norms over all query heads and over all key heads, if the layer has them.

        With several devices, the mean square of a token covers the heads of all devices.
        """
        if self.layer_config.qk_norm != "projection":
            return qkv
        norms = cast(RMSNorm, self.q_norm), cast(RMSNorm, self.k_norm)
        heads = sum_partials(qkv, dtype)
        num_q, num_k = (norm.scale.shape[0] // heads.shape[2] for norm in norms)
        q, k, v = jnp.split(heads, (num_q, num_q + num_k), axis=1)
        squares = [
            _mean_square(it.astype(jnp.float32), batch_invariant=self.batch_invariant)
            for it in (q, k)
        ]
        means = jnp.concatenate(squares, axis=1)
        means = all_mean(means) if self.is_shared else means  # q and k share one all-reduce
        scales = [jax.lax.rsqrt(means[:, i : i + 1] + norm.eps) for i, norm in enumerate(norms)]
        q, k = (
            (it.astype(jnp.float32) * scale).astype(dtype) * norm.scale.reshape(1, *it.shape[1:])
            for it, scale, norm in zip((q, k), scales, norms, strict=True)
        )
        return jnp.concatenate([q, k, v], axis=1)[None]

    def attend(
        self,
        qkv: Float[Array, "parts T heads H"],
        kv: LayerKV,
        attention: AttentionInputs,
        angles: RopeAngles | None,
        dtype: DTypeLike,
    ) -> tuple[Float[Array, "T N H"], LayerKV]:
        """Compute attention from the projected queries, keys and values.

        Args:
            qkv: Split-K partials of each token's query heads, key heads and value heads.
            kv: The layer's pool, to which the tokens' K and V are written.
            attention: Inputs of the step.
            angles: Rotation of each token; None to skip the rotation.
            dtype: Dtype of the queries and of the result.

        Returns:
            The output of each query head before the output projection, and the updated pool.
        """
        config = self.layer_config
        return attend_projected(
            self._normalize_projections(qkv, dtype),
            kv,
            attention,
            angles,
            self.head_norms(),
            self.scales(),
            dtype=dtype,
            batch_invariant=self.batch_invariant,
            scale=config.scale,
            sliding_window=config.sliding_window,
            soft_cap=config.soft_cap,
        )

    def scales(self) -> KVScales | None:
        """Return the scales of keys and values; None if the pool is not FP8."""
        if self.k_scale is None or self.v_scale is None:
            return None
        return KVScales(self.k_scale[...], self.v_scale[...])

    def head_norms(self) -> HeadNorms | None:
        """Return the RMSNorm parameters of query and key heads; None if heads have no RMSNorm."""
        q, k = self.q_norm, self.k_norm
        if self.layer_config.qk_norm != "head":
            return None
        if not (isinstance(q, RMSNorm) and isinstance(k, RMSNorm)):
            return None
        return HeadNorms(q.scale, k.scale, q.eps)
