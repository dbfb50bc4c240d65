"""What the model families share: inputs of attention, norms, projections, embedding, attention.

Parameters are made in the model dtype and so is every activation between layers; norms and feed-
forward activations compute in float32.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32

from jpaged.models.config import ModelConfig
from jpaged.models.rope import RopeAngles, apply_rope
from pallas_kernels import (
    Backend,
    LayerKV,
    paged_decode_attention,
    paged_prefill_attention,
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
    """

    block_tables: Int32[Array, "B M"]
    seq_lens: Int32[Array, "B"]
    slot_mapping: Int32[Array, "T"]
    query_start_loc: Int32[Array, "B+1"] | None
    backend: Backend

    _ARRAYS = ("block_tables", "seq_lens", "slot_mapping", "query_start_loc")

    def tree_flatten_with_keys(self):
        """The arrays, by name; the back end is static."""
        keyed = [(jax.tree_util.GetAttrKey(name), getattr(self, name)) for name in self._ARRAYS]
        return keyed, self.backend

    @classmethod
    def tree_unflatten(cls, backend, arrays):
        """Skips `__init__`, since JAX also builds trees of placeholders."""
        self = object.__new__(cls)
        for name, value in zip((*cls._ARRAYS, "backend"), (*arrays, backend), strict=True):
            object.__setattr__(self, name, value)
        return self


def activation(name: str, x: Float[Array, "..."]) -> Float32[Array, "..."]:
    """A feed-forward activation by its Hugging Face name, computed in float32."""
    x = x.astype(jnp.float32)
    if name == "relu":
        return jax.nn.relu(x)
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
        wide = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        weight = jnp.broadcast_to(self.weight[...].astype(jnp.float32), x.shape)
        return (wide * scale * weight).astype(x.dtype)


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


class Linear(nnx.Module):
    """x @ weight + bias, weight [in, out]."""

    def __init__(self, size_in: int, size_out: int, *, bias: bool, dtype: DTypeLike):
        self.weight = zeros(dtype, size_in, size_out)
        self.bias = zeros(dtype, size_out) if bias else None

    def __call__(self, x: Float[Array, "T size_in"]) -> Float[Array, "T size_out"]:
        """The projection of each row."""
        y = product("ti,io->to", x, self.weight[...])
        return y if self.bias is None else y + self.bias[...][None]


class QKVProjection(nnx.Module):
    """Queries, keys and values in one product: weight [D, N + 2K, H], bias [N + 2K, H]."""

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike):
        heads = config.num_heads + 2 * config.num_kv_heads
        self.weight = zeros(dtype, config.hidden_size, heads, config.head_size)
        self.bias = zeros(dtype, heads, config.head_size) if config.qkv_bias else None
        self.splits = (config.num_heads, config.num_heads + config.num_kv_heads)

    def __call__(
        self, x: Float[Array, "T D"]
    ) -> tuple[Float[Array, "T N H"], Float[Array, "T K H"], Float[Array, "T K H"]]:
        """Queries, keys and values of each token, by head."""
        qkv = product("td,dnh->tnh", x, self.weight[...])
        if self.bias is not None:
            qkv += self.bias[...][None]
        q, k, v = jnp.split(qkv, self.splits, axis=1)
        return q, k, v


class OutputProjection(nnx.Module):
    """Heads back to the residual width: weight [N, H, D], bias [D]."""

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike):
        self.weight = zeros(dtype, config.num_heads, config.head_size, config.hidden_size)
        self.bias = zeros(dtype, config.hidden_size) if config.output_bias else None

    def __call__(self, x: Float[Array, "T N H"]) -> Float[Array, "T D"]:
        """The sum of all heads' projections."""
        y = product("tnh,nhd->td", x, self.weight[...])
        return y if self.bias is None else y + self.bias[...][None]


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

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        """The perceptron, on each row."""
        return self.down(activation(self.activation, self.up(x)).astype(x.dtype))


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
    ) -> tuple[Float[Array, "T D"], LayerKV]:
        """Stores the tokens' K and V, attends; returns the update and the new pool."""
        q, k, v = self.qkv(x)
        q, k = self.normalize(q, k)
        if angles is not None:
            q, k = apply_rope(q, angles), apply_rope(k, angles)
        out, kv = paged_attention(
            q, k, v, kv, attention, scale=self.scale, sliding_window=self.sliding_window
        )
        return self.output(out), kv

    def normalize(
        self, q: Float[Array, "T N H"], k: Float[Array, "T K H"]
    ) -> tuple[Float[Array, "T N H"], Float[Array, "T K H"]]:
        """What a family does to queries and keys before they are rotated: here nothing."""
        return q, k


def paged_attention(
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    kv: LayerKV,
    attention: AttentionInputs,
    *,
    scale: float,
    sliding_window: int | None,
) -> tuple[Float[Array, "T N H"], LayerKV]:
    """Writes the step's k and v into the pool and attends to all of each sequence's tokens.

    Computes in the pool's dtype; the result has q's. Returns it and the pool after the write.
    """
    backend, pool_dtype = attention.backend, kv.k.dtype
    k, v = k.astype(pool_dtype), v.astype(pool_dtype)
    kv = write_kv(kv, k, v, attention.slot_mapping, backend=backend)
    options = {"scale": scale, "sliding_window": sliding_window, "backend": backend}
    tables, lens, starts = attention.block_tables, attention.seq_lens, attention.query_start_loc
    rows = q.astype(pool_dtype)
    if starts is None:
        out = paged_decode_attention(rows, kv, tables, lens, **options)
    else:
        out = paged_prefill_attention(rows, kv, tables, starts, lens, **options)
    return out.astype(q.dtype), kv
