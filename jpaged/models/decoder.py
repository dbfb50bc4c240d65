"""The frame of every family: embedding, layers over the pool, final norm, output head."""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32

from jpaged.models.config import ModelConfig
from jpaged.models.layers import (
    Attention,
    AttentionInputs,
    Embedding,
    LayerNorm,
    RMSNorm,
)
from jpaged.models.rope import RopeAngles, rope_angles
from jpaged.models.weights import WeightRule
from pallas_kernels import (
    Backend,
    LayerKV,
    LayerWeights,
    between_attentions,
    new_exchange,
    sum_parts,
)

Norm = RMSNorm | LayerNorm


@runtime_checkable
class FeedForwardPart(Protocol):
    """A layer's feed-forward."""

    def __call__(self, x: Float[Array, "T D"], backend: Backend) -> Float[Array, "parts T D"]:
        """On each row; in parts to be summed."""
        ...

    def gated_weights(self) -> tuple[Float[Array, "D 2 F"], Float[Array, "F D"]] | None:
        """Gate and up, and down, of a plain gated perceptron; None for others."""
        ...


class DecoderLayer(nnx.Module):
    """Attention and feed-forward, each with a residual sum and a norm before (or after) it."""

    def __init__(
        self,
        *,
        attention: Attention,
        attention_norm: Norm,
        mlp: FeedForwardPart,
        mlp_norm: Norm,
        pre_norm: bool = True,
    ):
        self.attention, self.attention_norm = attention, attention_norm
        self.mlp, self.mlp_norm = mlp, mlp_norm
        self.pre_norm = pre_norm

    def __call__(
        self,
        hidden: Float[Array, "T D"],
        update: Float[Array, "parts T D"] | None,
        kv: LayerKV,
        attention: AttentionInputs,
        angles: RopeAngles | None = None,
    ) -> tuple[Float[Array, "T D"], Float[Array, "parts T D"] | None, LayerKV]:
        """One layer; the residual stream is hidden + sum(update), the last product's output apart.

        Whoever reads the stream adds the update, so that a norm does it in one pass. None stands
        for zeros. Returns the stream after the layer in the same form, and the layer's pool.
        """
        backend = attention.backend
        if self.pre_norm:
            rows, hidden = add_norm(self.attention_norm, hidden, update, backend)
            update, kv = self.attention(rows, kv, attention, angles)
            rows, hidden = self.mlp_norm.add(hidden, update, backend)
            return hidden, self.mlp(rows, backend), kv
        update, kv = self.attention(hidden, kv, attention, angles)
        hidden = self.attention_norm(hidden + sum_parts(update, hidden.dtype))
        update = sum_parts(self.mlp(hidden, backend), hidden.dtype)
        return self.mlp_norm(hidden + update), None, kv

    def link(self, following: "DecoderLayer") -> LayerWeights | None:
        """What lies between this layer's attention and that of the following one, if it is no more
        than `between_attentions` computes."""
        gated, output, qkv = (
            self.mlp.gated_weights(),
            self.attention.output,
            following.attention.qkv,
        )
        norms = self.mlp_norm, following.attention_norm
        plain = self.pre_norm and following.pre_norm and output.bias is None and qkv.bias is None
        alike = all(isinstance(norm, RMSNorm) and norm.eps == norms[0].eps for norm in norms)
        if gated is None or not plain or not alike:
            return None
        matrix, projection = output.weight[...], qkv.weight[...]
        return LayerWeights(
            matrix.reshape(-1, matrix.shape[2]),
            norms[0].weight[...],
            *gated,
            norms[1].weight[...],
            projection.reshape(projection.shape[0], -1),
        )


def add_norm(
    norm: Norm,
    hidden: Float[Array, "T D"],
    update: Float[Array, "parts T D"] | None,
    backend: Backend,
) -> tuple[Float[Array, "T D"], Float[Array, "T D"]]:
    """The norm of hidden + sum(update), and that sum."""
    return (norm(hidden), hidden) if update is None else norm.add(hidden, update, backend)


class CausalLM(nnx.Module):
    """A decoder-only language model whose attention reads and writes the paged pool.

    Families give `make_layer`, `make_norm` and `weight_rules`, and override `embed_tokens` and
    `logits` where theirs differ. Construction is cheap under `nnx.eval_shape`; the parameters are
    zeros until a loader fills them.
    """

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike):
        self.config = config
        self.embed = self.make_embedding(dtype)
        self.layers = nnx.List([self.make_layer(i, dtype) for i in range(config.num_layers)])
        self.final_norm = self.make_norm(dtype) if config.final_norm else None
        self.lm_head = None if config.tie_word_embeddings else self.make_embedding(dtype)

    def make_embedding(self, dtype: DTypeLike) -> Embedding:
        """A vector for each token of the vocabulary: the embedding, or an untied output head."""
        return Embedding(self.config.vocab_size, self.config.embedding_size, dtype=dtype)

    def make_layer(self, layer: int, dtype: DTypeLike) -> DecoderLayer:
        """Layer number `layer`, of the family's parts."""
        raise NotImplementedError

    def make_norm(self, dtype: DTypeLike) -> Norm:
        """The family's norm over the hidden size."""
        raise NotImplementedError

    @staticmethod
    def weight_rules(config: ModelConfig) -> tuple[WeightRule, ...]:
        """Where each tensor of the family's checkpoints goes."""
        raise NotImplementedError

    def embed_tokens(
        self, token_ids: Int32[Array, "T"], positions: Int32[Array, "T"]
    ) -> Float[Array, "T D"]:
        """The residual stream before the first layer."""
        return self.embed(token_ids)

    def __call__(
        self,
        token_ids: Int32[Array, "T"],
        positions: Int32[Array, "T"],
        pool: tuple[LayerKV, ...],
        attention: AttentionInputs,
    ) -> tuple[Float[Array, "T D"], tuple[LayerKV, ...]]:
        """Runs a step's flattened tokens; their K and V go into the pool.

        Args:
            token_ids: the tokens of all sequences, one sequence after the other, then padding.
            positions: each token's place in its sequence, from 0.
            pool: K and V of every layer; donate it to have it updated in place.
            attention: block tables and lengths (see `AttentionInputs`).

        Returns:
            The hidden states after the final norm (padding rows hold anything), and the pool.

        Raises:
            ValueError: the pool has not one entry a layer.
        """
        hidden = self.embed_tokens(token_ids, positions)
        rope, angles = self.config.rope, None
        if rope is not None:
            angles = rope_angles(positions, rope, self.config.head_size)
        exchange = _chain_exchange(self.layers, hidden, attention)
        run = _run_layers if exchange is None else partial(_run_chain, exchange)
        hidden, update, new_pool = run(self.layers, hidden, pool, attention, angles)
        if self.final_norm is not None:
            hidden, _ = add_norm(self.final_norm, hidden, update, attention.backend)
        elif update is not None:
            hidden += sum_parts(update, hidden.dtype)
        return hidden, new_pool

    def logits(self, hidden: Float[Array, "R D"]) -> Float32[Array, "R V"]:
        """Scores of every token of the vocabulary for the given hidden states, in float32."""
        head = self.embed if self.lm_head is None else self.lm_head
        return head.logits(hidden)


def _run_layers(
    layers: Sequence[DecoderLayer],
    hidden: Float[Array, "T D"],
    pool: tuple[LayerKV, ...],
    attention: AttentionInputs,
    angles: RopeAngles | None,
) -> tuple[Float[Array, "T D"], Float[Array, "parts T D"] | None, tuple[LayerKV, ...]]:
    """Layer by layer; returns the stream, the last update and the new pool."""
    update, new_pool = None, []
    for layer, kv in zip(layers, pool, strict=True):
        hidden, update, kv = _run_layer(*nnx.split(layer), hidden, update, kv, attention, angles)
        new_pool.append(kv)
    return hidden, update, tuple(new_pool)


@partial(jax.jit, static_argnums=0)
def _run_layer(
    definition: nnx.GraphDef,
    parameters: Any,  # nnx.State
    hidden: Float[Array, "T D"],
    update: Float[Array, "parts T D"] | None,
    kv: LayerKV,
    attention: AttentionInputs,
    angles: RopeAngles | None,
) -> tuple[Float[Array, "T D"], Float[Array, "parts T D"] | None, LayerKV]:
    """One layer. Inside a step's jit, layers alike are traced and lowered once; XLA inlines the
    calls, so the compiled step is unrolled all the same."""
    return nnx.merge(definition, parameters)(hidden, update, kv, attention, angles)


def _chain_exchange(
    layers: Sequence[DecoderLayer], hidden: Float[Array, "T D"], attention: AttentionInputs
) -> Int32[Array, "W"] | None:
    """The exchange memory of a decode step whose layers run from attention to attention; None
    where each runs by itself."""
    if attention.query_start_loc is not None:
        return None
    links = [layer.link(following) for layer, following in pairwise(layers)]
    if not links or any(link is None for link in links):
        return None
    return new_exchange(links[0], num_tokens=hidden.shape[0], backend=attention.backend)


def _run_chain(
    exchange: Int32[Array, "W"],
    layers: Sequence[DecoderLayer],
    hidden: Float[Array, "T D"],
    pool: tuple[LayerKV, ...],
    attention: AttentionInputs,
    angles: RopeAngles | None,
) -> tuple[Float[Array, "T D"], Float[Array, "parts T D"] | None, tuple[LayerKV, ...]]:
    """As `_run_layers`, in which one op leads from a layer's attention to that of the next."""
    rows = jnp.arange(1, hidden.shape[0] + 1, dtype=jnp.int32)
    num_rows = jnp.max(jnp.where(attention.seq_lens > 0, rows, jnp.int32(0)))
    normed = layers[0].attention_norm(hidden)
    qkv, update, new_pool = layers[0].attention.qkv(normed, attention.backend), None, []
    for index, (layer, kv) in enumerate(zip(layers, pool, strict=True)):
        given = hidden, qkv, kv, attention, angles
        if layer is layers[-1]:
            hidden, update, kv = _run_last(*nnx.split(layer), *given)
        else:
            pair = nnx.split((layer, layers[index + 1]))
            hidden, qkv, exchange, kv = _run_link(*pair, num_rows, exchange, *given)
        new_pool.append(kv)
    return hidden, update, tuple(new_pool)


@partial(jax.jit, static_argnums=0)
def _run_link(
    definition: nnx.GraphDef,
    parameters: Any,  # nnx.State
    num_rows: Int32[Array, ""],
    exchange: Int32[Array, "W"],
    hidden: Float[Array, "T D"],
    qkv: Float[Array, "parts T heads H"],
    kv: LayerKV,
    attention: AttentionInputs,
    angles: RopeAngles | None,
) -> tuple[Float[Array, "T D"], Float[Array, "parts T heads H"], Int32[Array, "W"], LayerKV]:
    """From a layer's projected rows to the next layer's; see `_run_layer` for the jit."""
    layer, following = nnx.merge(definition, parameters)
    out, kv = layer.attention.attend(qkv, kv, attention, angles, hidden.dtype)
    hidden, qkv, exchange = between_attentions(
        out.reshape(out.shape[0], -1),
        hidden,
        layer.link(following),
        num_rows,
        exchange,
        eps=layer.mlp_norm.eps,
        backend=attention.backend,
    )
    heads = following.attention.qkv.weight.shape[1:]
    return hidden, qkv.reshape(*qkv.shape[:2], *heads), exchange, kv


@partial(jax.jit, static_argnums=0)
def _run_last(
    definition: nnx.GraphDef,
    parameters: Any,  # nnx.State
    hidden: Float[Array, "T D"],
    qkv: Float[Array, "parts T heads H"],
    kv: LayerKV,
    attention: AttentionInputs,
    angles: RopeAngles | None,
) -> tuple[Float[Array, "T D"], Float[Array, "parts T D"], LayerKV]:
    """The last layer from its projected rows on."""
    layer, backend = nnx.merge(definition, parameters), attention.backend
    out, kv = layer.attention.attend(qkv, kv, attention, angles, hidden.dtype)
    rows, hidden = layer.mlp_norm.add(hidden, layer.attention.output(out, backend), backend)
    return hidden, layer.mlp(rows, backend), kv
