"""LLaMA (Touvron et al. 2023, arXiv:2307.09288) and Mistral (Jiang et al. 2023, arXiv:2310.06825):
rotary positions, RMSNorm, grouped heads, a gated feed-forward.
"""

from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jpaged.models.config import ModelConfig
from jpaged.models.decoder import CausalLM, DecoderLayer
from jpaged.models.layers import Attention, Linear, RMSNorm, activation, product, zeros
from jpaged.models.weights import WeightRule, attention_rules, head_rule, linear_rules
from pallas_kernels import Backend, gated_gemm, gated_silu


class GatedFeedForward(nnx.Module):
    """down(activation(gate(x)) * up(x)); gate and up in one product, weight [D, 2, F]."""

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike):
        width, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_up = GateUp(width, inner, bias=bias, dtype=dtype)
        self.down = Linear(inner, width, bias=bias, dtype=dtype)
        self.activation = config.activation
        self.is_silu = config.activation in ("silu", "swish")

    def __call__(self, x: Float[Array, "T D"], backend: Backend) -> Float[Array, "parts T D"]:
        """The gated perceptron, on each row; in parts to be summed."""
        return self.down.parts(self.gated(x, backend), backend)

    def gated(self, x: Float[Array, "T D"], backend: Backend) -> Float[Array, "T F"]:
        """activation(gate(x)) * up(x), in float32 and then rounded."""
        if self.is_silu and self.gate_up.bias is None:
            return gated_gemm(x, self.gate_up.weight[...], backend=backend)
        gate_up = self.gate_up(x)
        if self.is_silu:
            return gated_silu(gate_up, backend=backend)
        gate = activation(self.activation, gate_up[:, 0])
        return (gate * gate_up[:, 1].astype(gate.dtype)).astype(gate_up.dtype)

    def gated_weights(self) -> tuple[Float[Array, "D 2 F"], Float[Array, "F D"]] | None:
        """Gate and up, and down, if the weights are all there is to it and it gates by SiLU."""
        plain = self.gate_up.bias is None and self.down.bias is None
        if not (plain and self.is_silu):
            return None
        return self.gate_up.weight[...], self.down.weight[...]


class GateUp(nnx.Module):
    """Two projections in one product: weight [D, 2, F], bias [2, F]."""

    def __init__(self, width: int, inner: int, *, bias: bool, dtype: DTypeLike):
        self.weight = zeros(dtype, width, 2, inner)
        self.bias = zeros(dtype, 2, inner) if bias else None

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T 2 F"]:
        """Row 0 of axis 1 is the gate, row 1 the other factor."""
        y = product("td,dcf->tcf", x, self.weight[...])
        return y if self.bias is None else y + self.bias[...][None]


class Llama(CausalLM):
    """LLaMA 1 to 3 and Mistral."""

    attention_class: type[Attention] = Attention

    def make_norm(self, dtype: DTypeLike) -> RMSNorm:
        """An RMSNorm over the hidden size."""
        return RMSNorm(self.config.hidden_size, self.config.norm_eps, dtype=dtype)

    def make_layer(self, layer: int, dtype: DTypeLike) -> DecoderLayer:
        """Grouped attention with rotary positions and a gated feed-forward."""
        return DecoderLayer(
            attention=self.attention_class(self.config, layer, dtype=dtype),
            attention_norm=self.make_norm(dtype),
            mlp=GatedFeedForward(self.config, dtype=dtype),
            mlp_norm=self.make_norm(dtype),
        )

    @staticmethod
    def weight_rules(config: ModelConfig) -> tuple[WeightRule, ...]:
        """Linear weights lie as [out, in] in the checkpoint; q, k, v and gate, up apart."""
        root = r"(?:model\.)?"
        layer, ours = root + r"layers\.(\d+)\.", r"layers.\1."
        return (
            WeightRule(root + r"embed_tokens\.weight", "embed.weight"),
            *attention_rules(config, layer + r"self_attn\.", "o_proj"),
            *_gate_up_rules(layer + r"mlp\.", ours + "mlp.gate_up"),
            *linear_rules(layer + r"mlp\.down_proj", ours + "mlp.down"),
            WeightRule(layer + r"input_layernorm\.weight", ours + "attention_norm.weight"),
            WeightRule(layer + r"post_attention_layernorm\.weight", ours + "mlp_norm.weight"),
            WeightRule(layer + r"self_attn\.rotary_emb\.inv_freq", None),
            WeightRule(root + r"norm\.weight", "final_norm.weight"),
            head_rule(config.tie_word_embeddings),
        )


def _gate_up_rules(pattern: str, target: str) -> tuple[WeightRule, ...]:
    """Gate and up are rows 0 and 1 of the fused weight [D, 2, F] and bias [2, F]."""
    rules = []
    for row, name in enumerate(("gate_proj", "up_proj")):
        weight, bias = rf"{pattern}{name}\.weight", rf"{pattern}{name}\.bias"
        rules.append(WeightRule(weight, target + ".weight", lambda t: t.T[:, None], 1, row))
        rules.append(WeightRule(bias, target + ".bias", lambda t: t[None], 0, row))
    return tuple(rules)
