"""GPT-2 (Radford et al. 2019): learned positions, LayerNorm before each part, GELU."""

from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32

from jpaged.models.config import ModelConfig
from jpaged.models.decoder import CausalLM, DecoderLayer
from jpaged.models.layers import Attention, Embedding, FeedForward, LayerNorm
from jpaged.models.weights import WeightRule, by_heads, head_rule


class GPT2(CausalLM):
    """GPT-2, of any size."""

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike):
        super().__init__(config, dtype=dtype)
        rows = config.max_position_embeddings
        self.position_embedding = Embedding(rows, config.hidden_size, dtype=dtype)

    def make_norm(self, dtype: DTypeLike) -> LayerNorm:
        """A LayerNorm with weight and bias."""
        return LayerNorm(self.config.hidden_size, self.config.norm_eps, dtype=dtype)

    def make_layer(self, layer: int, dtype: DTypeLike) -> DecoderLayer:
        """Multi-head attention and a two-layer perceptron."""
        return DecoderLayer(
            attention=Attention(self.config, layer, dtype=dtype),
            attention_norm=self.make_norm(dtype),
            mlp=FeedForward(self.config, dtype=dtype),
            mlp_norm=self.make_norm(dtype),
        )

    def embed_tokens(
        self, token_ids: Int32[Array, "T"], positions: Int32[Array, "T"]
    ) -> Float[Array, "T D"]:
        """Token plus position vectors."""
        return self.embed(token_ids) + self.position_embedding(positions)

    @staticmethod
    def weight_rules(config: ModelConfig) -> tuple[WeightRule, ...]:
        """Linear weights lie as [in, out] in the checkpoint already, and q, k, v are fused."""
        n, h = config.num_heads, config.head_size
        root, part = r"(?:transformer\.)?", r"\.(weight|bias)"
        layer, ours = root + r"h\.(\d+)\.", r"layers.\1."
        return (
            WeightRule(root + r"wte\.weight", "embed.weight"),
            WeightRule(root + r"wpe\.weight", "position_embedding.weight"),
            WeightRule(layer + "ln_1" + part, ours + r"attention_norm.\2"),
            WeightRule(layer + r"attn\.c_attn\.weight", ours + "attention.qkv.weight",
                       by_heads(3 * n, h, axis=1)),
            WeightRule(layer + r"attn\.c_attn\.bias", ours + "attention.qkv.bias",
                       by_heads(3 * n, h)),
            WeightRule(layer + r"attn\.c_proj\.weight", ours + "attention.output.weight",
                       by_heads(n, h)),
            WeightRule(layer + r"attn\.c_proj\.bias", ours + "attention.output.bias"),
            WeightRule(layer + r"attn\.(?:masked_)?bias", None),  # causal-mask buffers
            WeightRule(layer + "ln_2" + part, ours + r"mlp_norm.\2"),
            WeightRule(layer + r"mlp\.c_fc" + part, ours + r"mlp.up.\2"),
            WeightRule(layer + r"mlp\.c_proj" + part, ours + r"mlp.down.\2"),
            WeightRule(root + "ln_f" + part, r"final_norm.\1"),
            head_rule(config.tie_word_embeddings),
        )  # fmt: skip
