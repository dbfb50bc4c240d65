"""Attention over the paged pool: its inputs in a step, rotary positions, and the module."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32

from jpaged.models.config import FP8_DTYPE, ModelConfig, RopeConfig
from jpaged.models.formats import LinearInput
from jpaged.models.linear import Linear, make_linear
from jpaged.models.norm import RMSNorm, make_norm
from jpaged.models.sharding import PendingAllReduce
from pallas_kernels import (
    Backend,
    HeadNorms,
    KVScales,
    LayerKV,
    paged_decode_attention,
    paged_prefill_attention,
    rope_decode_attention,
    rope_write_kv,
    sum_partials,
    write_kv,
)


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True)
class AttentionInputs:
    """Where the step's tokens stand in the pool; the same for every layer.

    Attributes:
        block_tables: blocks of each sequence, in order.
        seq_lens: tokens of each sequence, this step's included; 0 for a padded sequence.
        slot_mapping: slot (block * S + offset) to which each token's K and V go.
        query_start_loc: where each sequence's tokens begin in the flattened ones, and the end.
            None: a decode step, one token a sequence (T == B).
        backend: attention implementation; static.
        call_shared: calls what other steps have as well, to be lowered once for all (see
            `paged_prefill_attention`); static.
        peer_header: as of `sharding.PendingAllReduce`. A layer has two such sums, in turn: of its heads, and of
            its feed-forward.
    """

    block_tables: Int32[Array, "B M"]
    seq_lens: Int32[Array, "B"]
    slot_mapping: Int32[Array, "T"]
    query_start_loc: Int32[Array, "B+1"] | None
    backend: Backend
    call_shared: Callable | None = None
    peer_header: Int32[Array, "W"] | None = None

    _ARRAY_FIELDS = ("block_tables", "seq_lens", "slot_mapping", "query_start_loc", "peer_header")

    def tree_flatten_with_keys(self):
        """The arrays, by name; the rest is static."""
        keyed = [
            (jax.tree_util.GetAttrKey(name), getattr(self, name)) for name in self._ARRAY_FIELDS
        ]
        return keyed, (self.backend, self.call_shared)

    @classmethod
    def tree_unflatten(cls, static, arrays):
        """Skips `__init__`, since JAX also builds trees of placeholders."""
        self, names = object.__new__(cls), (*cls._ARRAY_FIELDS, "backend", "call_shared")
        vars(self).update(zip(names, (*arrays, *static), strict=True))
        return self


# Cosine and sine of each position's rotation, one a pair of channels (half = H / 2).
RopeAngles = tuple[Float32[Array, "T half"], Float32[Array, "T half"]]


def inverse_frequencies(rope: RopeConfig, head_size: int) -> np.ndarray:
    """Radians a position for each pair of channels, float32 `[H / 2]`, on the host.

    "linear" divides positions by the factor; "llama3" divides the slow frequencies only, with a
    ramp between (Llama 3.1's long-context recipe).
    """
    exponents = np.arange(0, head_size, 2, dtype=np.float32) / np.float32(head_size)
    # numpy's float32 power is an ulp off where torch's is not, and the error grows with position.
    powers = np.float64(rope.theta) ** exponents.astype(np.float64)
    frequencies = np.float32(1) / powers.astype(np.float32)
    if rope.rope_type == "linear":
        return frequencies / np.float32(rope.factor)
    if rope.rope_type == "llama3":
        return _scale_llama3(frequencies, rope)
    return frequencies


def _scale_llama3(frequencies: np.ndarray, rope: RopeConfig) -> np.ndarray:
    """Wavelengths over `original / low` slow down by the factor, under `original / high` stay."""
    low, high = np.float32(rope.low_freq_factor), np.float32(rope.high_freq_factor)
    turns = np.float32(rope.original_max_position_embeddings / (2 * math.pi)) * frequencies
    kept = np.clip((turns - low) / (high - low), np.float32(0), np.float32(1))
    return (np.float32(1) - kept) * frequencies / np.float32(rope.factor) + kept * frequencies


def rope_angles(positions: Int32[Array, "T"], rope: RopeConfig, head_size: int) -> RopeAngles:
    """The rotations of the given positions."""
    frequencies = jnp.asarray(inverse_frequencies(rope, head_size))
    angles = positions.astype(jnp.float32)[:, None] * frequencies[None, :]
    return jnp.cos(angles), jnp.sin(angles)


class Attention(nnx.Module):
    """Self-attention over the pool, as one layer is described.

    Over a pool in FP8 it has `k_scale` and `v_scale`, float32 [1]: see `KVScales`.
    """

    def __init__(self, config: ModelConfig, index: int, *, dtype: DTypeLike):
        self.layer_config = layer_config = config.layers[index]
        self.qkv = cast(Linear, make_linear(config, f"layers.{index}.attention.qkv", dtype))
        self.output = cast(Linear, make_linear(config, f"layers.{index}.attention.output", dtype))
        self.q_norm = (
            make_norm(config, config.head_size, dtype=dtype) if layer_config.qk_norm else None
        )
        self.k_norm = (
            make_norm(config, config.head_size, dtype=dtype) if layer_config.qk_norm else None
        )
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
        """Stores the tokens' K and V, attends; returns the update and the new pool."""
        qkv = self.qkv(x, attention.backend)
        out, kv = self.attend(qkv, kv, attention, angles, x.dtype)
        return self.output.forward_residual(
            out, attention.backend, attention.peer_header, buffer_index=0
        ), kv

    def attend(
        self,
        qkv: Float[Array, "parts T heads H"],
        kv: LayerKV,
        attention: AttentionInputs,
        angles: RopeAngles | None,
        dtype: DTypeLike,
    ) -> tuple[Float[Array, "T N H"], LayerKV]:
        """What lies between the two projections; returns the heads' results and the new pool."""
        options = {
            "scale": self.layer_config.scale,
            "sliding_window": self.layer_config.sliding_window,
            "soft_cap": self.layer_config.soft_cap,
            "scales": self.scales(),
            "backend": attention.backend,
        }
        tables, lens, starts = attention.block_tables, attention.seq_lens, attention.query_start_loc
        if angles is not None and starts is None:
            norms = self.head_norms()
            return rope_decode_attention(
                qkv, kv, tables, lens, angles, norms=norms, dtype=dtype, **options
            )
        q, kv = self.store_kv(qkv, kv, attention, angles, dtype)
        rows = q.astype(kv.attention_dtype(q.dtype))
        if starts is None:
            out = paged_decode_attention(rows, kv, tables, lens, **options)
        else:
            call_shared = attention.call_shared
            out = paged_prefill_attention(
                rows, kv, tables, starts, lens, call_shared=call_shared, **options
            )
        return out.astype(q.dtype), kv

    def store_kv(
        self,
        qkv: Float[Array, "parts T heads H"],
        kv: LayerKV,
        attention: AttentionInputs,
        angles: RopeAngles | None,
        dtype: DTypeLike,
    ) -> tuple[Float[Array, "T N H"], LayerKV]:
        """Queries as they attend, and the pool with the tokens' K and V."""
        slots, backend, scales = attention.slot_mapping, attention.backend, self.scales()
        if angles is not None or kv.head_size % 2 == 0:  # that op takes heads by halves
            options = {"norms": self.head_norms(), "dtype": dtype, "backend": backend}
            return rope_write_kv(qkv, kv, slots, angles, scales=scales, **options)
        heads, num_kv_heads = sum_partials(qkv, dtype), kv.k.shape[2]
        ends = heads.shape[1] - 2 * num_kv_heads, heads.shape[1] - num_kv_heads
        q, k, v = jnp.split(heads, ends, axis=1)
        k, v = k.astype(kv.k.dtype), v.astype(kv.v.dtype)  # in FP8 no head is odd
        return q, write_kv(kv, k, v, slots, backend=backend)

    def scales(self) -> KVScales | None:
        """The scales of its keys and values, over a pool that has them."""
        if self.k_scale is None or self.v_scale is None:
            return None
        return KVScales(self.k_scale[...], self.v_scale[...])

    def head_norms(self) -> HeadNorms | None:
        """The norms of queries and keys before they are rotated, in layers that have them."""
        q, k = self.q_norm, self.k_norm
        if not (isinstance(q, RMSNorm) and isinstance(k, RMSNorm)):
            return None
        return HeadNorms(q.scale, k.scale, q.eps)
