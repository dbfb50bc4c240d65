"""LLaMA (Touvron et al. 2023, arXiv:2307.09288) and Mistral (Jiang et al. 2023, arXiv:2310.06825):
rotary positions, RMSNorm, grouped heads, a gated feed-forward.
"""

from collections.abc import Mapping, Sequence

from jpaged.models.checkpoint import WeightRule, WeightRules
from jpaged.models.config import (
    REQUIRED,
    Fields,
    ModelConfig,
    read_windows,
    refuse,
    rotary,
    rotary_layers,
    tokens_and_dtype,
)
from jpaged.models.decoder import head_rule, layer_rules, norm_rules

NAMES: dict[str, str | Sequence[str]] = {
    "attention_norm": "input_layernorm",
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.output": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down": "mlp.down_proj",
}


def describe_llama(fields: Fields) -> ModelConfig:
    """LLaMA 1 to 3."""
    common, bias = rotary(fields, "llama"), fields.flag("attention_bias", False)
    if fields.get("sliding_window") is not None:
        raise refuse("sliding_window", fields.get("sliding_window"), "null, for llama")
    kinds = ["full_attention"] * fields.integer("num_hidden_layers")
    return ModelConfig(
        **common,
        layers=rotary_layers(fields, common, read_windows(fields, None, kinds)),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False),
        **tokens_and_dtype(fields, bos=1, eos=2),
    )


def describe_mistral(fields: Fields) -> ModelConfig:
    """Mistral: a sliding window in every layer, or in none."""
    fields.get("num_key_value_heads", REQUIRED)
    common, window = rotary(fields, "mistral"), fields.optional_integer("sliding_window", 4096)
    kind = "full_attention" if window is None else "sliding_attention"
    kinds = [kind] * fields.integer("num_hidden_layers")
    if fields.get("layer_types") not in (None, kinds):
        raise refuse("layer_types", fields.get("layer_types"), f"{kind} in every layer, here")
    return ModelConfig(
        **common,
        layers=rotary_layers(fields, common, read_windows(fields, window, kinds)),
        **tokens_and_dtype(fields, bos=1, eos=2),
    )


def weight_rules(
    config: ModelConfig, names: Mapping[str, str | Sequence[str]] = NAMES
) -> WeightRules:
    """Linear weights lie as [out, in] in the checkpoint; q, k, v and gate, up apart.

    Args:
        config: the model's.
        names: as of `layer_rules`.
    """
    rules = [
        WeightRule("embed_tokens.weight", "embed.weight"),
        *layer_rules(config, "layers", names),
        *norm_rules(config, "norm", "final_norm"),
        head_rule(config),
    ]
    return WeightRules(rules, r"model\.", r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
