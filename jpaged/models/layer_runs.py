"""Running a model's layers over a step: each by itself, or from one attention to the next."""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from jpaged.models.decoder_layer import DecoderLayer
from jpaged.models.layers import AttentionInputs
from jpaged.models.rope import RopeAngles
from pallas_kernels import LayerKV, fused_layer, new_exchange


def run_layers(
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


def chain_exchange(
    layers: Sequence[DecoderLayer], hidden: Float[Array, "T D"], attention: AttentionInputs
) -> Int32[Array, "W"] | None:
    """The exchange memory of a decode step whose layers run from attention to attention; None
    where each runs by itself."""
    if attention.query_start_loc is not None:
        return None
    links = [layer.link(following) for layer, following in pairwise(layers)]
    first = links[0] if links else None
    if first is None or any(link is None for link in links):
        return None
    return new_exchange(first, num_tokens=hidden.shape[0], backend=attention.backend)


def run_chain(
    exchange: Int32[Array, "W"],
    layers: Sequence[DecoderLayer],
    hidden: Float[Array, "T D"],
    pool: tuple[LayerKV, ...],
    attention: AttentionInputs,
    angles: RopeAngles | None,
) -> tuple[Float[Array, "T D"], Float[Array, "parts T D"] | None, tuple[LayerKV, ...]]:
    """As `run_layers`, in which one op leads from a layer's attention to that of the next."""
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
) -> tuple[Float[Array, "T D"], Float[Array, "next_parts T heads H"], Int32[Array, "W"], LayerKV]:
    """From a layer's projected rows to the next layer's; see `_run_layer` for the jit."""
    layer, following = nnx.merge(definition, parameters)
    out, kv = layer.attention.attend(qkv, kv, attention, angles, hidden.dtype)
    hidden, qkv, exchange = fused_layer(
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
    qkv: Float[Array, "qkv_parts T heads H"],
    kv: LayerKV,
    attention: AttentionInputs,
    angles: RopeAngles | None,
) -> tuple[Float[Array, "T D"], Float[Array, "parts T D"], LayerKV]:
    """The last layer from its projected rows on."""
    layer, backend = nnx.merge(definition, parameters), attention.backend
    out, kv = layer.attention.attend(qkv, kv, attention, angles, hidden.dtype)
    rows, hidden = layer.mlp_norm.add(hidden, layer.attention.output(out, backend), backend)
    return hidden, layer.mlp(rows, backend), kv
