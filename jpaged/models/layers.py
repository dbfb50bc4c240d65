"""What the model families share: inputs of attention, norms, projections, embedding, attention.

Parameters are made in the model dtype and so is every activation between layers; norms and feed-
forward activations compute in float32.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32

from jpaged.models.config import ModelConfig
from jpaged.models.rope import RopeAngles
from pallas_kernels import (
    Backend,
    HeadNorms,
    LayerKV,
    add_rms_norm,
    paged_decode_attention,
    paged_prefill_attention,
    rms_norm,
    rope_decode_attention,
    rope_write_kv,
    split_k_gemm,
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
        shared: calls what other steps have as well, to be lowered once for all (see
            `paged_prefill_attention`); static.
    """

    block_tables: Int32[Array, "B M"]
    seq_lens: Int32[Array, "B"]
    slot_mapping: Int32[Array, "T"]
    query_start_loc: Int32[Array, "B+1"] | None
    backend: Backend
    shared: Callable | None = None

    _ARRAYS = ("block_tables", "seq_lens", "slot_mapping", "query_start_loc")

    def tree_flatten_with_keys(self):
        """The arrays, by name; the rest is static."""
        keyed = [(jax.tree_util.GetAttrKey(name), getattr(self, name)) for name in self._ARRAYS]
        return keyed, (self.backend, self.shared)

    @classmethod
    def tree_unflatten(cls, static, arrays):
        """Skips `__init__`, since JAX also builds trees of placeholders."""
        self = object.__new__(cls)
        names, values = (*cls._ARRAYS, "backend", "shared"), (*arrays, *static)
        for name, value in zip(names, values, strict=True):
            object.__setattr__(self, name, value)
        return self


def activation(name: str, x: Float[Array, "..."]) -> Float[Array, "..."]:
    """A feed-forward activation by its Hugging Face name, in float32; "relu", which rounds nothing,
    in x's dtype, so that XLA computes it within the product before it."""
    if name == "relu":
        return jax.nn.relu(x)
    x = x.astype(jnp.float32)
    if name in ("silu", "swish"):
        return jax.nn.silu(x)
    if name == "gelu":
        return jax.nn.gelu(x, approximate=False)
    return jax.nn.gelu(x, approximate=True)


def product(
    subscripts: str,
    x: Float[Array, "..."],
    weight: Float[Array, "..."],
    out: DTypeLike | None = None,
) -> Float[Array, "..."]:
    """An einsum of activations and weights of one dtype, accumulated in float32.

    float32 models keep full precision where a GPU would round the factors to TF32.
    """
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    out = x.dtype if out is None else out
    return jnp.einsum(subscripts, x, weight, precision=precision, preferred_element_type=out)


def biased_parts(
    x: Float[Array, "T C"],
    weight: Float[Array, "C D"],
    bias: nnx.Param | None,
    backend: Backend,
) -> Float[Array, "parts T D"]:
    """A product in parts to be summed; in one if there is a bias, of any shape with D elements.

    As a row of D the bias is added within XLA's product.
    """
    parts = split_k_gemm(x, weight, backend=backend)
    if bias is None:
        return parts
    return (sum_partials(parts, x.dtype) + bias[...].reshape(1, -1))[None]


def zeros(dtype: DTypeLike, *shape: int) -> nnx.Param:
    """A parameter to be filled by the loader; costs nothing under `nnx.eval_shape`."""
    return nnx.Param(jnp.zeros(shape, dtype))


class RMSNorm(nnx.Module):
    """x / rms(x) * weight over the last axis (Zhang and Sennrich 2019, arXiv:1910.07467)."""

    def __init__(self, size: int, eps: float, *, dtype: DTypeLike):
        self.weight = zeros(dtype, size)
        self.eps = eps

    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        """Each row over its root mean square, in float32; x's dtype out."""
        return rms_norm(x, self.weight[...], eps=self.eps)

    def add(
        self, hidden: Float[Array, "T D"], update: Float[Array, "parts T D"], backend: Backend
    ) -> tuple[Float[Array, "T D"], Float[Array, "T D"]]:
        """The norm of hidden + sum(update), and that sum."""
        return add_rms_norm(hidden, update, self.weight[...], eps=self.eps, backend=backend)


class LayerNorm(nnx.Module):
    """(x - mean) / std over the last axis, with weight and bias if `affine`."""

    def __init__(self, size: int, eps: float, *, dtype: DTypeLike, affine: bool = True):
        self.weight = zeros(dtype, size) if affine else None
        self.bias = zeros(dtype, size) if affine else None
        self.eps = eps

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        """Each row with mean 0 and variance 1, in float32; x's dtype out."""
        wide = x.astype(jnp.float32)
        wide -= jnp.mean(wide, axis=-1, keepdims=True)
        wide *= jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        if self.weight is not None and self.bias is not None:
            wide *= self.weight[...].astype(jnp.float32)[None]
            wide += self.bias[...].astype(jnp.float32)[None]
        return wide.astype(x.dtype)

    def add(
        self, hidden: Float[Array, "T D"], update: Float[Array, "parts T D"], backend: Backend
    ) -> tuple[Float[Array, "T D"], Float[Array, "T D"]]:
        """The norm of hidden + sum(update), and that sum."""
        hidden += sum_partials(update, hidden.dtype)
        return self(hidden), hidden


class Linear(nnx.Module):
    """x @ weight + bias, weight [in, out]."""

    def __init__(self, size_in: int, size_out: int, *, bias: bool, dtype: DTypeLike):
        self.weight = zeros(dtype, size_in, size_out)
        self.bias = zeros(dtype, size_out) if bias else None

    def __call__(self, x: Float[Array, "T size_in"]) -> Float[Array, "T size_out"]:
        """The projection of each row."""
        y = product("ti,io->to", x, self.weight[...])
        return y if self.bias is None else y + self.bias[...][None]

    def parts(
        self, x: Float[Array, "T size_in"], backend: Backend
    ) -> Float[Array, "parts T size_out"]:
        """The projection in parts, for one who sums them anyway; in one if there is a bias."""
        return biased_parts(x, self.weight[...], self.bias, backend)


class QKVProjection(nnx.Module):
    """Queries, keys and values in one product: weight [D, N + 2K, H], bias [N + 2K, H]."""

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike):
        heads = config.num_heads + 2 * config.num_kv_heads
        self.weight = zeros(dtype, config.hidden_size, heads, config.head_size)
        self.bias = zeros(dtype, heads, config.head_size) if config.qkv_bias else None

    def __call__(self, x: Float[Array, "T D"], backend: Backend) -> Float[Array, "parts T heads H"]:
        """Of each token N query heads, K key heads, K value heads; in parts to be summed."""
        weight = self.weight[...]
        parts = biased_parts(x, weight.reshape(weight.shape[0], -1), self.bias, backend)
        return parts.reshape(*parts.shape[:2], *weight.shape[1:])


class OutputProjection(nnx.Module):
    """Heads back to the residual width: weight [N, H, D], bias [D]."""

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike):
        self.weight = zeros(dtype, config.num_heads, config.head_size, config.hidden_size)
        self.bias = zeros(dtype, config.hidden_size) if config.output_bias else None

    def __call__(self, x: Float[Array, "T N H"], backend: Backend) -> Float[Array, "parts T D"]:
        """The sum of all heads' projections; in parts to be summed."""
        weight = self.weight[...]
        rows, weight = x.reshape(x.shape[0], -1), weight.reshape(-1, weight.shape[2])
        return biased_parts(rows, weight, self.bias, backend)


class Embedding(nnx.Module):
    """A table [rows, D] of token or position vectors; as an output head, its own transpose."""

    def __init__(self, rows: int, size: int, *, dtype: DTypeLike):
        self.weight = zeros(dtype, rows, size)

    def __call__(self, ids: Int32[Array, "T"]) -> Float[Array, "T D"]:
        """The rows `ids`; an id out of range reads the nearest row."""
        return jnp.take(self.weight[...], ids, axis=0, mode="clip")

    def logits(self, hidden: Float[Array, "R D"]) -> Float32[Array, "R V"]:
        """Dot products with every row, in float32."""
        return product("rd,vd->rv", hidden, self.weight[...], out=jnp.float32)


class FeedForward(nnx.Module):
    """The two-layer perceptron of GPT-2 and OPT: down(activation(up(x)))."""

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike):
        sizes = config.hidden_size, config.intermediate_size
        self.up = Linear(*sizes, bias=config.mlp_bias, dtype=dtype)
        self.down = Linear(*sizes[::-1], bias=config.mlp_bias, dtype=dtype)
        self.activation = config.activation

    def __call__(self, x: Float[Array, "T D"], backend: Backend) -> Float[Array, "parts T D"]:
        """The perceptron, on each row; in parts to be summed."""
        up = sum_partials(self.up.parts(x, backend), x.dtype)
        inner = activation(self.activation, up).astype(x.dtype)
        return self.down.parts(inner, backend)

    def gated_weights(self) -> None:
        """None, for it has no gate (see `GatedFeedForward`)."""


class Attention(nnx.Module):
    """Self-attention over the pool, with rotary positions where the model has them."""

    def __init__(self, config: ModelConfig, layer: int, *, dtype: DTypeLike):
        self.qkv = QKVProjection(config, dtype=dtype)
        self.output = OutputProjection(config, dtype=dtype)
        self.scale = config.attention_scale
        self.sliding_window = config.sliding_windows[layer]

    def __call__(
        self,
        x: Float[Array, "T D"],
        kv: LayerKV,
        attention: AttentionInputs,
        angles: RopeAngles | None = None,
    ) -> tuple[Float[Array, "parts T D"], LayerKV]:
        """Stores the tokens' K and V, attends; returns the update and the new pool."""
        qkv = self.qkv(x, attention.backend)
        out, kv = self.attend(qkv, kv, attention, angles, x.dtype)
        return self.output(out, attention.backend), kv

    def attend(
        self,
        qkv: Float[Array, "parts T heads H"],
        kv: LayerKV,
        attention: AttentionInputs,
        angles: RopeAngles | None,
        dtype: DTypeLike,
    ) -> tuple[Float[Array, "T N H"], LayerKV]:
        """What lies between the two projections; returns the heads' results and the new pool."""
        options = {"scale": self.scale, "sliding_window": self.sliding_window}
        if angles is not None and attention.query_start_loc is None:
            return rope_decode_attention(
                qkv,
                kv,
                attention.block_tables,
                attention.seq_lens,
                angles,
                norms=self.head_norms(),
                dtype=dtype,
                backend=attention.backend,
                **options,
            )
        q, kv = self.store(qkv, kv, attention, angles, dtype)
        return paged_attention(q, kv, attention, **options), kv

    def store(
        self,
        qkv: Float[Array, "parts T heads H"],
        kv: LayerKV,
        attention: AttentionInputs,
        angles: RopeAngles | None,
        dtype: DTypeLike,
    ) -> tuple[Float[Array, "T N H"], LayerKV]:
        """Queries as they attend, and the pool with the tokens' K and V."""
        slots, backend = attention.slot_mapping, attention.backend
        if angles is not None or kv.k.shape[3] % 2 == 0:  # that op takes heads by halves
            options = {"norms": self.head_norms(), "dtype": dtype, "backend": backend}
            return rope_write_kv(qkv, kv, slots, angles, **options)
        heads, num_kv_heads = sum_partials(qkv, dtype), kv.k.shape[2]
        ends = heads.shape[1] - 2 * num_kv_heads, heads.shape[1] - num_kv_heads
        q, k, v = jnp.split(heads, ends, axis=1)
        k, v = k.astype(kv.k.dtype), v.astype(kv.v.dtype)
        return q, write_kv(kv, k, v, slots, backend=backend)

    def head_norms(self) -> HeadNorms | None:
        """The norms of queries and keys before they are rotated, in families that have them."""
        return None


def paged_attention(
    q: Float[Array, "T N H"],
    kv: LayerKV,
    attention: AttentionInputs,
    *,
    scale: float,
    sliding_window: int | None,
) -> Float[Array, "T N H"]:
    """Attends to all of each sequence's tokens, the step's own included.

    Computes in the pool's dtype; the result has q's.
    """
    options = {"scale": scale, "sliding_window": sliding_window, "backend": attention.backend}
    tables, lens, starts = attention.block_tables, attention.seq_lens, attention.query_start_loc
    rows = q.astype(kv.k.dtype)
    if starts is None:
        out = paged_decode_attention(rows, kv, tables, lens, **options)
    else:
        shared = attention.shared
        out = paged_prefill_attention(rows, kv, tables, starts, lens, shared=shared, **options)
    return out.astype(q.dtype)
