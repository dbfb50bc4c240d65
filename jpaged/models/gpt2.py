"""Config and weight rules of GPT-2 (Radford et al. 2019).

GPT-2 has learned positions and the activation GELU. In each layer, one LayerNorm precedes the
attention and another precedes the feed-forward.
"""

from jpaged.models.checkpoint import WeightRule, WeightRules
from jpaged.models.config import ModelConfig
from jpaged.models.config_fields import (
    ACTIVATIONS,
    ConfigFields,
    learned_position_config,
    read_tokens_and_dtype,
)
from jpaged.models.decoder import head_rule, layer_rules, norm_rules

_TENSOR_NAMES = {
    "attention_norm": "ln_1",
    "attention.qkv": "attn.c_attn",
    "attention.output": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}


def describe(fields: ConfigFields) -> ModelConfig:
    """Read the config of a GPT-2 model."""
    hidden_size = fields.integer("n_embd", alias="hidden_size")
    num_layers = fields.integer("n_layer", alias="num_hidden_layers")
    num_heads = fields.integer("n_head", alias="num_attention_heads")
    inner = None if fields.get("n_inner") is None else fields.integer("n_inner")
    return ModelConfig(
        model_type="gpt2",
        vocab_size=fields.integer("vocab_size"),
        intermediate_size=inner or 4 * hidden_size,
        max_position_embeddings=fields.integer("n_positions", alias="max_position_embeddings"),
        position_offset=0,
        activation=fields.choice("activation_function", "gelu_new", ACTIVATIONS),
        norm_type="layer",
        norm_eps=fields.number("layer_norm_epsilon", 1e-5),
        tie_word_embeddings=fields.flag("tie_word_embeddings", True),
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        **learned_position_config(hidden_size, num_heads, num_layers),
        **read_tokens_and_dtype(fields, bos=50256, eos=50256),
    )


def weight_rules(config: ModelConfig) -> WeightRules:
    """Return the rules that map the tensors of a GPT-2 checkpoint to parameters.

    Checkpoints store weights as [in, out], and q, k and v as one fused projection.
    """
    rules = [
        WeightRule("wte.weight", "embed.weight"),
        WeightRule("wpe.weight", "position_embedding.weight"),
        *layer_rules(config, "h", _TENSOR_NAMES, transposed=False),
        *norm_rules(config, "ln_f", "final_norm"),
        head_rule(config),
    ]
    causal_masks = r"h\.\d+\.attn\.(?:masked_)?bias"
    return WeightRules(rules, r"transformer\.", causal_masks)
