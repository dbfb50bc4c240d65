"""The frame of every family: embedding, layers over the pool, final norm, output head."""

from functools import partial

from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32

from jpaged.models.config import ModelConfig
from jpaged.models.decoder_layer import DecoderLayer, Norm, add_norm
from jpaged.models.layer_runs import chain_exchange, run_chain, run_layers
from jpaged.models.layers import AttentionInputs, Embedding
from jpaged.models.rope import rope_angles
from jpaged.models.weights import WeightRule
from pallas_kernels import LayerKV, sum_partials


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
        exchange = chain_exchange(self.layers, hidden, attention)
        run = run_layers if exchange is None else partial(run_chain, exchange)
        hidden, update, new_pool = run(self.layers, hidden, pool, attention, angles)
        if self.final_norm is not None:
            hidden, _ = add_norm(self.final_norm, hidden, update, attention.backend)
        elif update is not None:
            hidden += sum_partials(update, hidden.dtype)
        return hidden, new_pool

    def logits(self, hidden: Float[Array, "R D"]) -> Float32[Array, "R V"]:
        """Scores of every token of the vocabulary for the given hidden states, in float32."""
        head = self.embed if self.lm_head is None else self.lm_head
        return head.logits(hidden)
