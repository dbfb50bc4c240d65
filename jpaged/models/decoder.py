"""The model of every family: embedding, layers over the pool, final norm, output head.

What differs between families is in `ModelConfig`, and the names of their checkpoints' tensors in
their weight rules.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32

from jpaged.models.attention import Attention, AttentionInputs, RopeAngles, rope_angles
from jpaged.models.checkpoint import WeightRule
from jpaged.models.config import ModelConfig
from jpaged.models.formats import LinearInput
from jpaged.models.linear import (
    Embedding,
    Linear,
    apply_activation,
    linear_rules,
    make_linear,
)
from jpaged.models.norm import Norm, add_norm, make_norm, norm_update
from jpaged.models.sharding import PendingAllReduce, reduce_update
from pallas_kernels import Backend, LayerKV, sum_partials

LayersOutput = tuple[
    Float[Array, "T D"], Float[Array, "parts T D"] | PendingAllReduce | None, tuple[LayerKV, ...]
]
"""What layers make of the residual stream: the stream is the first array plus the sum of the second
(None stands for zeros), so that the norm that reads it next adds in the same pass; and the pool."""


class FeedForward(nnx.Module):
    """A layer's perceptron: down(activation(up(x))), or down(activation(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, index: int, *, dtype: DTypeLike):
        self.up = make_linear(config, f"layers.{index}.mlp.up", dtype)
        self.gate_up = make_linear(config, f"layers.{index}.mlp.gate_up", dtype)
        self.down = cast(Linear, make_linear(config, f"layers.{index}.mlp.down", dtype))
        self.activation = config.activation

    @property
    def input_projection(self) -> Linear:
        """The projection that its rows go to."""
        return cast(Linear, self.up if self.gate_up is None else self.gate_up)

    def __call__(
        self, x: LinearInput, backend: Backend, peer_header: Int32[Array, "W"] | None = None
    ) -> Float[Array, "parts T D"] | PendingAllReduce:
        """The perceptron, on each row; in split-K partials. `peer_header` is as of `AttentionInputs`."""
        return self.down.forward_residual(
            self.intermediate(x, backend), backend, peer_header, buffer_index=1
        )

    def intermediate(self, x: LinearInput, backend: Backend) -> Float[Array, "T F"]:
        """What the last projection is given."""
        if self.gate_up is not None:
            return self.gate_up.forward_gated(x, self.activation, backend)
        up = sum_partials(cast(Linear, self.up)(x, backend), x.dtype)
        return apply_activation(self.activation, up).astype(x.dtype)


class DecoderLayer(nnx.Module):
    """Attention and feed-forward, each with a residual sum, and norms where the model has them."""

    def __init__(self, config: ModelConfig, index: int, *, dtype: DTypeLike):
        def norm() -> Norm:
            return make_norm(config, config.hidden_size, dtype=dtype)

        self.attention = Attention(config, index, dtype=dtype)
        self.mlp = FeedForward(config, index, dtype=dtype)
        self.norm_positions = config.norm_positions
        self.attention_norm, self.mlp_norm = norm(), norm()
        has_out_norms = "after" in config.norm_positions
        self.attention_out_norm = norm() if has_out_norms else None
        self.mlp_out_norm = norm() if has_out_norms else None

    def __call__(
        self,
        hidden: Float[Array, "T D"],
        update: Float[Array, "parts T D"] | PendingAllReduce | None,
        kv: LayerKV,
        attention: AttentionInputs,
        angles: RopeAngles | None = None,
    ) -> tuple[Float[Array, "T D"], Float[Array, "parts T D"] | PendingAllReduce | None, LayerKV]:
        """One layer; takes and returns the residual stream as `LayersOutput` has it, and its own pool."""
        backend, peer_header = attention.backend, attention.peer_header
        if "sum" in self.norm_positions:
            update, kv = self.attention(hidden, kv, attention, angles)
            hidden = self.attention_norm(hidden + reduce_update(update, hidden.dtype))
            update = reduce_update(self.mlp(hidden, backend, peer_header), hidden.dtype)
            return self.mlp_norm(hidden + update), None, kv
        qkv, input_projection = self.attention.qkv, self.mlp.input_projection
        rows, hidden = qkv.add_norm(self.attention_norm, hidden, update, backend)
        update, kv = self.attention(rows, kv, attention, angles)
        update = norm_update(self.attention_out_norm, update, hidden.dtype)
        rows, hidden = input_projection.add_norm(self.mlp_norm, hidden, update, backend)
        update = norm_update(self.mlp_out_norm, self.mlp(rows, backend, peer_header), hidden.dtype)
        return hidden, update, kv


def run_layers(
    layers: Sequence[DecoderLayer],
    hidden: Float[Array, "T D"],
    pool: tuple[LayerKV, ...],
    attention: AttentionInputs,
    angles: Sequence[RopeAngles | None],
) -> LayersOutput:
    """Layer by layer; `angles` has the rotations of each."""
    update, new_pool = None, []
    for layer, kv, layer_angles in zip(layers, pool, angles, strict=True):
        hidden, update, kv = _run_layer(
            *nnx.split(layer), hidden, update, kv, attention, layer_angles
        )
        new_pool.append(kv)
    return hidden, update, tuple(new_pool)


@partial(jax.jit, static_argnums=0)
def _run_layer(
    definition: nnx.GraphDef,
    parameters: Any,  # nnx.State
    hidden: Float[Array, "T D"],
    update: Float[Array, "parts T D"] | PendingAllReduce | None,
    kv: LayerKV,
    attention: AttentionInputs,
    angles: RopeAngles | None,
) -> tuple[Float[Array, "T D"], Float[Array, "parts T D"] | PendingAllReduce | None, LayerKV]:
    """One layer. Inside a step's jit, layers alike are traced and lowered once; XLA inlines the
    calls, so the compiled step is unrolled all the same."""
    return nnx.merge(definition, parameters)(hidden, update, kv, attention, angles)


class Decoder(nnx.Module):
    """A decoder-only language model whose attention reads and writes the paged pool.

    Construction is cheap under `nnx.eval_shape`. The loader fills the parameters, zeros at first.
    """

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike):
        def make_token_embedding() -> Embedding:
            is_sharded = config.num_embedding_rows < config.vocab_size
            return Embedding(config.num_embedding_rows, outer, dtype=dtype, is_sharded=is_sharded)

        inner, outer, offset = config.hidden_size, config.embedding_size, config.position_offset
        layers, rows = range(config.num_layers), config.max_position_embeddings + (offset or 0)
        tied = config.tie_word_embeddings
        self.config, self.dtype = config, jnp.dtype(dtype)
        self.embed = make_token_embedding()
        self.position_embedding = None if offset is None else Embedding(rows, inner, dtype=dtype)
        self.project_in = make_linear(config, "project_in", dtype)
        self.layers = nnx.List([DecoderLayer(config, i, dtype=dtype) for i in layers])
        self.final_norm = make_norm(config, inner, dtype=dtype) if config.has_final_norm else None
        self.project_out = make_linear(config, "project_out", dtype)
        self.lm_head = None if tied else make_token_embedding()

    def embed_tokens(
        self,
        token_ids: Int32[Array, "T"],
        positions: Int32[Array, "T"],
        peer_header: Int32[Array, "W"] | None = None,
    ) -> Float[Array, "T D"]:
        """The residual stream before the first layer. `peer_header` is as of `AttentionInputs`."""
        hidden, config = self.embed(token_ids, peer_header), self.config
        if config.embedding_scale is not None:
            hidden *= jnp.asarray(config.embedding_scale, hidden.dtype)
        if self.project_in is not None:
            hidden = self.project_in.forward(hidden)
        if self.position_embedding is None:
            return hidden
        if config.position_offset:
            positions += jnp.int32(config.position_offset)
        return hidden + self.position_embedding(positions)

    def __call__(
        self,
        token_ids: Int32[Array, "T"],
        positions: Int32[Array, "T"],
        pool: tuple[LayerKV, ...],
        attention: AttentionInputs,
        run_layers: Callable[..., LayersOutput] = run_layers,
    ) -> tuple[Float[Array, "T D"], tuple[LayerKV, ...]]:
        """Runs a step's flattened tokens; their K and V go into the pool.

        Args:
            token_ids: the tokens of all sequences, one sequence after the other, then padding.
            positions: each token's place in its sequence, from 0.
            pool: K and V of every layer; donate it to have it updated in place.
            attention: block tables and lengths (see `AttentionInputs`).
            run_layers: runs the layers, with this module's `run_layers` as its contract; one that
                fuses what they compute gives the same results faster.

        Returns:
            The hidden states after the final norm (padding rows hold anything), and the pool.

        Raises:
            ValueError: the pool has not one entry a layer.
        """
        peer_header = attention.peer_header
        hidden, head_size = (
            self.embed_tokens(token_ids, positions, peer_header),
            self.config.head_size,
        )
        ropes = [layer.rope for layer in self.config.layers]
        tables = {r: rope_angles(positions, r, head_size) for r in dict.fromkeys(ropes) if r}
        angles = [None if rope is None else tables[rope] for rope in ropes]
        hidden, update, new_pool = run_layers(self.layers, hidden, pool, attention, angles)
        if self.final_norm is not None:
            hidden, _ = add_norm(self.final_norm, hidden, update, attention.backend)
        elif update is not None:
            hidden += reduce_update(update, hidden.dtype)
        return hidden, new_pool

    def logits(self, hidden: Float[Array, "R D"]) -> Float32[Array, "R V"]:
        """Scores of every token for the given hidden states, in float32: of the device's own part
        of the vocabulary where devices share the table (`head.is_sharded`)."""
        hidden = hidden if self.project_out is None else self.project_out.forward(hidden)
        logits, cap = self.head.logits(hidden), self.config.final_soft_cap
        return logits if cap is None else jnp.tanh(logits / jnp.float32(cap)) * jnp.float32(cap)

    @property
    def head(self) -> Embedding:
        """The table that gives the logits."""
        return self.embed if self.lm_head is None else self.lm_head


def layer_rules(
    config: ModelConfig,
    layers_name: str,
    names: Mapping[str, str | Sequence[str]],
    *,
    transposed: bool = True,
) -> list[WeightRule]:
    """How layers come from a checkpoint.

    Args:
        config: the model's.
        layers: what the list of layers is called there.
        names: of every projection and norm by its path in `DecoderLayer`, the name in a layer
            there; several for a projection whose parts lie apart.
        transposed: as of `linear_rules`.
    """
    rules = list[WeightRule]()
    for index in range(config.num_layers):
        for path, own in names.items():
            own = [own] if isinstance(own, str) else own
            sources = [f"{layers_name}.{index}.{name}" for name in own]
            target = f"layers.{index}.{path}"
            if (projection := config.projection(target)) is not None:
                rules += linear_rules(projection, sources, target, transposed=transposed)
            else:
                rules += norm_rules(config, sources[0], target)
    return rules


def norm_rules(config: ModelConfig, source: str, target: str) -> list[WeightRule]:
    """How a norm comes from a checkpoint, where it is called `source`."""
    addend = 1.0 if config.norm_type == "offset_rms" else 0.0
    weight = WeightRule(source + ".weight", target + ".weight", addend=addend)
    return [weight, WeightRule(source + ".bias", target + ".bias")]


def head_rule(config: ModelConfig) -> WeightRule:
    """The output head; a tied one may be stored as a copy of the embedding, which is ignored."""
    return WeightRule("lm_head.weight", None if config.tie_word_embeddings else "lm_head.weight")
