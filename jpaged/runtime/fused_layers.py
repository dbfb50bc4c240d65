"""Fuse the layers of a decode step: one kernel computes everything between two attentions.

For each step, this module decides whether to fuse the layers. The decision depends on the weights
and norms of the layers, and on `pallas_kernels.new_exchange_memory`.
"""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from jpaged.models.attention import AttentionInputs, RopeAngles
from jpaged.models.decoder import DecoderLayer, LayersOutput, run_layers
from jpaged.models.experts import SparseFeedForward
from jpaged.models.linear import is_silu
from jpaged.models.norm import RMSNorm
from pallas_kernels import Backend, FusedLayerWeights, LayerKV, fused_layer, new_exchange_memory


def run_layers_fused(
    layers: Sequence[DecoderLayer],
    hidden: Float[Array, "T D"],
    pool: tuple[LayerKV, ...],
    attention: AttentionInputs,
    angles: Sequence[RopeAngles | None],
) -> LayersOutput:
    """Run the layers of a decode step, with fused layers if possible.

    If the layers cannot be fused, `jpaged.models.decoder.run_layers` runs them. Arguments and
    result are the same as for `run_layers`.
    """
    exchange = _make_exchange_memory(layers, hidden, attention.backend)
    if exchange is None:
        return run_layers(layers, hidden, pool, attention, angles)
    rows = jnp.arange(1, hidden.shape[0] + 1, dtype=jnp.int32)
    lens = attention.seq_lens
    if attention.num_queries > 1:
        lens = lens.repeat(attention.num_queries)
    num_rows = jnp.max(jnp.where(lens > 0, rows, jnp.int32(0)))
    normed = layers[0].attention_norm(hidden)
    qkv, update, new_pool = layers[0].attention.qkv(normed, attention.backend), None, []
    for index, (layer, kv, layer_angles) in enumerate(zip(layers, pool, angles, strict=True)):
        inputs = hidden, qkv, kv, attention, layer_angles
        if layer is layers[-1]:
            hidden, update, kv = _run_last_layer(*nnx.split(layer), *inputs)
        else:
            pair = nnx.split((layer, layers[index + 1]))
            hidden, qkv, exchange, kv = _run_fused_layer(*pair, num_rows, exchange, *inputs)
        new_pool.append(kv)
    return hidden, update, tuple(new_pool)


def _make_exchange_memory(
    layers: Sequence[DecoderLayer], hidden: Float[Array, "T D"], backend: Backend
) -> Int32[Array, "W"] | None:
    """Return the memory through which thread blocks of a fused layer exchange data; None if the
    layers cannot be fused."""
    weights = [fused_layer_weights(layer, following) for layer, following in pairwise(layers)]
    first = weights[0] if weights else None
    if first is None or any(it is None for it in weights):
        return None
    return new_exchange_memory(first, num_tokens=hidden.shape[0], backend=backend)


def fused_layer_weights(layer: DecoderLayer, following: DecoderLayer) -> FusedLayerWeights | None:
    """Return the weights used between the attention of `layer` and the attention of `following`.

    Return None if `fused_layer` cannot compute everything between the two attentions.
    """
    first, second, mlp = layer.mlp_norm, following.attention_norm, layer.mlp
    if isinstance(mlp, SparseFeedForward) or isinstance(following.mlp, SparseFeedForward):
        return None
    if not (isinstance(first, RMSNorm) and isinstance(second, RMSNorm)) or mlp.gate_up is None:
        return None
    is_supported = layer.norm_positions == following.norm_positions == ("before",) and is_silu(
        mlp.activation
    )
    output, gate_up, down = (
        layer.attention.output.dense_weight(),
        mlp.gate_up.dense_weight(),
        mlp.down.dense_weight(),
    )
    qkv = following.attention.qkv.dense_weight()
    if output is None or gate_up is None or down is None or qkv is None:
        return None
    if not is_supported or first.eps != second.eps:
        return None
    return FusedLayerWeights(
        output.reshape(-1, output.shape[-1]),
        first.scale,
        gate_up,
        down,
        second.scale,
        qkv.reshape(qkv.shape[0], -1),
    )


@partial(jax.jit, static_argnums=0)
def _run_fused_layer(
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
    """Compute one layer's attention, and everything up to the next layer's attention.

    The function is jitted, so that equal layers are traced once.
    """
    layer, following = nnx.merge(definition, parameters)
    out, kv = layer.attention.attend(qkv, kv, attention, angles, hidden.dtype)
    hidden, qkv, exchange = fused_layer(
        out.reshape(out.shape[0], -1),
        hidden,
        cast(FusedLayerWeights, fused_layer_weights(layer, following)),
        num_rows,
        exchange,
        eps=layer.mlp_norm.eps,
        backend=attention.backend,
    )
    heads = following.attention.qkv.projection.output_shape
    return hidden, qkv.reshape(*qkv.shape[:2], *heads), exchange, kv


@partial(jax.jit, static_argnums=0)
def _run_last_layer(
    definition: nnx.GraphDef,
    parameters: Any,  # nnx.State
    hidden: Float[Array, "T D"],
    qkv: Float[Array, "qkv_parts T heads H"],
    kv: LayerKV,
    attention: AttentionInputs,
    angles: RopeAngles | None,
) -> tuple[Float[Array, "T D"], Float[Array, "parts T D"], LayerKV]:
    """Compute the last layer from `qkv`, its projected queries, keys and values."""
    layer, backend = nnx.merge(definition, parameters), attention.backend
    out, kv = layer.attention.attend(qkv, kv, attention, angles, hidden.dtype)
    rows, hidden = layer.mlp_norm.add_norm(hidden, layer.attention.output(out, backend), backend)
    return hidden, layer.mlp(rows, backend), kv
