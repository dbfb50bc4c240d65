"""The decoder of every model family: embedding, layers, final norm and output head.

The differences between model families are fields of `ModelConfig`. The weight rules of a family map
the tensor names of its checkpoints to parameters.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Float32, Int32

from jpaged.models.attention import Attention, AttentionInputs, RopeAngles, rope_angles
from jpaged.models.checkpoint import WeightRule
from jpaged.models.config import ModelConfig
from jpaged.models.experts import ExpertNames, SparseFeedForward, expert_rules
from jpaged.models.formats import LinearInput
from jpaged.models.linear import (
    Embedding,
    Linear,
    apply_activation,
    linear_rules,
    make_linear,
)
from jpaged.models.norm import Norm, add_norm, make_norm, norm_update
from jpaged.models.sharding import PendingAllReduce, all_gather, reduce_update
from pallas_kernels import Backend, LayerKV, sum_partials

LayersOutput = tuple[
    Float[Array, "T D"], Float[Array, "parts T D"] | PendingAllReduce | None, tuple[LayerKV, ...]
]
"""Output of the layers: hidden states, the last layer's update, and the pool.

The residual stream is the hidden states plus the sum of the update's split-K partials. An update of
None stands for zeros. The sum is left to the next norm, so that one kernel adds and normalizes.
"""


class FeedForward(nnx.Module):
    """The dense feed-forward network of a layer.

    With a gate, the result is `down(activation(gate(x)) * up(x))`. Without a gate, the result is
    `down(activation(up(x)))`.
    """

    def __init__(self, config: ModelConfig, index: int, *, dtype: DTypeLike):
        self.up = make_linear(config, f"layers.{index}.mlp.up", dtype)
        self.gate_up = make_linear(config, f"layers.{index}.mlp.gate_up", dtype)
        self.down = cast(Linear, make_linear(config, f"layers.{index}.mlp.down", dtype))
        self.activation = config.activation

    @property
    def input_projection(self) -> Linear:
        """The first projection of the feed-forward: `gate_up`, or `up` if there is no gate."""
        return cast(Linear, self.up if self.gate_up is None else self.gate_up)

    def __call__(
        self,
        x: LinearInput,
        backend: Backend,
        peer_header: Int32[Array, "W"] | None = None,
        num_tokens: Int32[Array, ""] | None = None,
    ) -> Float[Array, "parts T D"] | PendingAllReduce:
        """Return the feed-forward of each row, as an update of the residual stream.

        The update is a `PendingAllReduce` if `peer_header` (see `AttentionInputs`) is given and the
        down projection has no bias. Otherwise the update consists of split-K partials. All rows are
        computed, so `num_tokens` (see `SparseFeedForward`) is not used.
        """
        return self.down.forward_residual(
            self.intermediate(x, backend), backend, peer_header, buffer_index=1
        )

    def add_norm(
        self,
        norm: Norm,
        hidden: Float[Array, "T D"],
        update: Float[Array, "parts T D"] | PendingAllReduce,
        backend: Backend,
    ) -> tuple[LinearInput, Float[Array, "T D"]]:
        """Add the update to the residual stream, and apply the norm ahead of the feed-forward."""
        return self.input_projection.add_norm(norm, hidden, update, backend)

    def intermediate(self, x: LinearInput, backend: Backend) -> Float[Array, "T F"]:
        """Return the input of the down projection, in x's dtype."""
        if self.gate_up is not None:
            return self.gate_up.forward_gated(x, self.activation, backend)
        up = sum_partials(cast(Linear, self.up)(x, backend), x.dtype)
        return apply_activation(self.activation, up).astype(x.dtype)


class DecoderLayer(nnx.Module):
    """One layer: attention and feed-forward, each with norms and a residual sum.

    `ModelConfig.norm_positions` says where the norms are.
    """

    def __init__(self, config: ModelConfig, index: int, *, dtype: DTypeLike):
        def norm() -> Norm:
            return make_norm(config, config.hidden_size, dtype=dtype)

        self.attention = Attention(config, index, dtype=dtype)
        experts = config.layers[index].experts
        self.mlp = (
            FeedForward(config, index, dtype=dtype)
            if experts is None
            else SparseFeedForward(config, index, experts, dtype=dtype)
        )
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
        """Run the layer, and return the new `hidden`, `update` and `kv`.

        The residual stream before the layer is the sum of the arguments `hidden` and `update`. The
        argument `update` is the output of the previous layer (see `LayersOutput`); the layer's
        first norm adds `update` to `hidden`. The residual stream after the layer is the sum of the
        new `hidden` and the new `update`.
        """
        backend = attention.backend
        # Only sparse layers skip padding rows, so only sparse layers need the number of tokens.
        is_sparse = isinstance(self.mlp, SparseFeedForward)
        num_tokens = attention.num_tokens if is_sparse else None
        options = backend, attention.peer_header, num_tokens
        if "sum" in self.norm_positions:
            update, kv = self.attention(hidden, kv, attention, angles)
            hidden = self.attention_norm(hidden + reduce_update(update, hidden.dtype))
            update = reduce_update(self.mlp(hidden, *options), hidden.dtype)
            return self.mlp_norm(hidden + update), None, kv
        rows, hidden = self.attention.qkv.add_norm(self.attention_norm, hidden, update, backend)
        update, kv = self.attention(rows, kv, attention, angles)
        update = norm_update(self.attention_out_norm, update, hidden.dtype)
        rows, hidden = self.mlp.add_norm(self.mlp_norm, hidden, update, backend)
        update = norm_update(self.mlp_out_norm, self.mlp(rows, *options), hidden.dtype)
        return hidden, update, kv


def run_layers(
    layers: Sequence[DecoderLayer],
    hidden: Float[Array, "T D"],
    pool: tuple[LayerKV, ...],
    attention: AttentionInputs,
    angles: Sequence[RopeAngles | None],
) -> LayersOutput:
    """Run the layers one after another.

    Args:
        layers: Layers of the model, in order.
        hidden: Residual stream before the first layer.
        pool: K and V of each layer.
        attention: Inputs of the attention that are the same in all layers, such as block tables.
        angles: Rotation of the tokens in each layer; None for a layer without rotary embedding.
    """
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
    """Run one layer under `jax.jit`, so that a step traces and lowers equal layers once.

    XLA inlines the calls, so the compiled step contains the code of every layer.
    """
    return nnx.merge(definition, parameters)(hidden, update, kv, attention, angles)


class Decoder(nnx.Module):
    """A decoder-only language model whose attention reads and writes the paged pool.

    Parameters are zeros until the loader fills them. Under `nnx.eval_shape`, the constructor
    allocates no arrays.
    """

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike):
        def make_token_embedding() -> Embedding:
            is_sharded = config.num_embedding_rows < config.vocab_size
            return Embedding(
                config.num_embedding_rows,
                outer,
                dtype=dtype,
                is_sharded=is_sharded,
                batch_invariant=config.batch_invariant,
            )

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
        """Return the residual stream before the first layer, from token and position embeddings.

        Args:
            token_ids: Tokens of the step.
            positions: Position of each token in its sequence, from 0.
            peer_header: See `AttentionInputs`.
        """
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
        """Run the model on the flattened tokens of a step, and write their K and V to the pool.

        Args:
            token_ids: Tokens of all sequences, one sequence after another, then padding.
            positions: Position of each token in its sequence, from 0.
            pool: K and V of each layer. Donate the pool to update it in place.
            attention: Block tables, lengths and slots of the sequences.
            run_layers: Function that runs the layers, with the arguments and the result of
                `run_layers` in this module. The function may fuse layers to be faster.

        Returns:
            The hidden states after the final norm, and the updated pool. Hidden states of padding
            tokens are undefined.

        Raises:
            ValueError: The number of entries in `pool` is not the number of layers.
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

    def logits(
        self, hidden: Float[Array, "R D"], backend: Backend = Backend.XLA
    ) -> Float32[Array, "R V"]:
        """Return one float32 logit per token of the vocabulary for each row of hidden states.

        If `head.is_sharded`, each device returns the logits of the device's shard of the
        vocabulary. `backend` has an effect only if the model is batch-invariant. Otherwise, XLA
        computes the matrix product.
        """
        hidden = hidden if self.project_out is None else self.project_out.forward(hidden)
        logits, cap = self.head.logits(hidden, backend), self.config.final_soft_cap
        return logits if cap is None else jnp.tanh(logits / jnp.float32(cap)) * jnp.float32(cap)

    def target_logprobs(
        self, hidden: Float[Array, "R D"], targets: Int32[Array, "R"], backend: Backend
    ) -> tuple[Float32[Array, "R"], Bool[Array, "R"]] | None:
        """Return the log-probability of one token per row of hidden states.

        The logits are never all in memory. If `head.is_sharded`, each device computes its shard of
        the vocabulary, and the shards are combined in the order of the devices.

        Args:
            hidden: Hidden states after the final norm.
            targets: One token id per row.
            backend: Implementation of the kernels.

        Returns:
            The log-probabilities, and whether no other token of the row is more probable. None if
            the model is batch-invariant, because scores of prompt tokens must then have the same
            bits as scores of generated tokens, which are computed from whole rows of logits.
        """
        if self.config.batch_invariant:
            return None
        hidden = hidden if self.project_out is None else self.project_out.forward(hidden)
        scores = self.head.target_scores(hidden, targets, self.config.final_soft_cap, backend)
        largest, total, target = scores
        if self.head.is_sharded:
            parts = all_gather(jnp.stack(scores, axis=1)[None], axis=0)  # [devices, R, 3]
            largest = parts[:, :, 0].max(axis=0)
            total = (parts[:, :, 1] * jnp.exp(parts[:, :, 0] - largest[None])).sum(axis=0)
            target = parts[:, :, 2].sum(axis=0)
        return target - largest - jnp.log(total), target >= largest

    def on_each_device(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function` itself: the whole step runs on each device already."""
        return function

    @property
    def is_vocab_sharded(self) -> bool:
        """Whether each device computes the logits of only its shard of the vocabulary."""
        return self.head.is_sharded

    @property
    def head(self) -> Embedding:
        """The table that computes the logits: `lm_head`, or the token embedding if tied."""
        return self.embed if self.lm_head is None else self.lm_head


def layer_rules(
    config: ModelConfig,
    layers_name: str,
    names: Mapping[str, str | Sequence[str]],
    *,
    transposed: bool = True,
    expert_names: ExpertNames | None = None,
) -> list[WeightRule]:
    """Return the rules that map checkpoint tensors to the parameters of all layers.

    Args:
        config: Config of the model.
        layers_name: Name of the list of layers in the checkpoint.
        names: For each path of a projection or norm in `DecoderLayer`, the module's name within a
            layer of the checkpoint. A fused projection has several names if its parts are separate
            modules in the checkpoint.
        transposed: See `linear_rules`.
        expert_names: Names of the sparse feed-forward in a layer of the checkpoint; None if all
            layers are dense.
    """
    rules = list[WeightRule]()
    for index in range(config.num_layers):
        experts = config.layers[index].experts
        if experts is not None and expert_names is not None:
            source, target = f"{layers_name}.{index}", f"layers.{index}.mlp"
            rules += expert_rules(config, index, source, target, expert_names)
        for path, modules in names.items():
            if experts is not None and path.startswith("mlp."):
                continue
            modules = [modules] if isinstance(modules, str) else modules
            sources = [f"{layers_name}.{index}.{name}" for name in modules]
            target = f"layers.{index}.{path}"
            if (projection := config.projection(target)) is not None:
                rules += linear_rules(projection, sources, target, transposed=transposed)
            else:
                rules += norm_rules(config, sources[0], target)
    return rules


def norm_rules(config: ModelConfig, source: str, target: str) -> list[WeightRule]:
    """Return the rules that map the checkpoint's norm `source` to the norm at path `target`."""
    addend = 1.0 if config.norm_type == "offset_rms" else 0.0
    weight = WeightRule(source + ".weight", target + ".weight", addend=addend)
    return [weight, WeightRule(source + ".bias", target + ".bias")]


def head_rule(config: ModelConfig) -> WeightRule:
    """Return the rule of the output head's weight.

    If the head is tied to the token embedding, the rule ignores the head's tensor in the
    checkpoint.
    """
    return WeightRule("lm_head.weight", None if config.tie_word_embeddings else "lm_head.weight")
