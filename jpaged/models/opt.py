"""OPT (Zhang et al. 2022, arXiv:2205.01068), with OPT-350m's norms after each part and projections
between the widths of embedding and layers.
"""

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32

from jpaged.models.config import ModelConfig
from jpaged.models.decoder import CausalLM, DecoderLayer
from jpaged.models.layers import Attention, Embedding, FeedForward, LayerNorm, Linear
from jpaged.models.weights import (
    WeightRule,
    attention_rules,
    head_rule,
    linear_rules,
    transposed,
)

# The first rows of the position table stand for padding; position 0 is row 2.
POSITION_OFFSET = 2


class OPT(CausalLM):
    """OPT, of any size."""

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike):
        super().__init__(config, dtype=dtype)
        rows = config.max_position_embeddings + POSITION_OFFSET
        inner, outer = config.hidden_size, config.embedding_size
        self.position_embedding = Embedding(rows, inner, dtype=dtype)
        same, options = inner == outer, {"bias": False, "dtype": dtype}
        self.project_in = None if same else Linear(outer, inner, **options)
        self.project_out = None if same else Linear(inner, outer, **options)

    def make_norm(self, dtype: DTypeLike) -> LayerNorm:
        """A LayerNorm, with or without weight and bias."""
        size, eps = self.config.hidden_size, self.config.norm_eps
        return LayerNorm(size, eps, dtype=dtype, affine=self.config.norm_affine)

    def make_layer(self, layer: int, dtype: DTypeLike) -> DecoderLayer:
        """Multi-head attention and a two-layer perceptron."""
        return DecoderLayer(
            attention=Attention(self.config, layer, dtype=dtype),
            attention_norm=self.make_norm(dtype),
            mlp=FeedForward(self.config, dtype=dtype),
            mlp_norm=self.make_norm(dtype),
            pre_norm=self.config.pre_norm,
        )

    def embed_tokens(
        self, token_ids: Int32[Array, "T"], positions: Int32[Array, "T"]
    ) -> Float[Array, "T D"]:
        """Token vectors, projected to the layers' width, plus position vectors."""
        tokens = self.embed(token_ids)
        tokens = tokens if self.project_in is None else self.project_in(tokens)
        return tokens + self.position_embedding(positions + jnp.int32(POSITION_OFFSET))

    def logits(self, hidden: Float[Array, "R D"]) -> Float32[Array, "R V"]:
        """Scores in float32; hidden states go through the projection out first, if there is one."""
        return super().logits(hidden if self.project_out is None else self.project_out(hidden))

    @staticmethod
    def weight_rules(config: ModelConfig) -> tuple[WeightRule, ...]:
        """Linear weights lie as [out, in] in the checkpoint; q, k, v apart."""
        root, part = r"(?:model\.)?decoder\.", r"\.(weight|bias)"
        layer, ours = root + r"layers\.(\d+)\.", r"layers.\1."
        return (
            WeightRule(root + r"embed_tokens\.weight", "embed.weight"),
            WeightRule(root + r"embed_positions\.weight", "position_embedding.weight"),
            WeightRule(root + r"(project_in|project_out)\.weight", r"\1.weight", transposed),
            *attention_rules(config, layer + r"self_attn\.", "out_proj"),
            WeightRule(layer + "self_attn_layer_norm" + part, ours + r"attention_norm.\2"),
            *linear_rules(layer + "fc1", ours + "mlp.up"),
            *linear_rules(layer + "fc2", ours + "mlp.down"),
            WeightRule(layer + "final_layer_norm" + part, ours + r"mlp_norm.\2"),
            WeightRule(root + "final_layer_norm" + part, r"final_norm.\1"),
            head_rule(config.tie_word_embeddings),
        )
