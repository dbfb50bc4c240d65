"""Config and weight rules of OPT (Zhang et al. 2022, arXiv:2205.01068).

OPT-350m differs from the other sizes in two ways. In OPT-350m, a norm follows each residual sum.
Its embedding and its layers have different widths, so projections convert between the two widths.
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
from jpaged.models.linear import linear_rules

# Row of position 0 in the table of learned positions. OPT uses the earlier rows for padding.
POSITION_OFFSET = 2

_TENSOR_NAMES = {
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.output": "self_attn.out_proj",
    "attention_norm": "self_attn_layer_norm",
    "mlp.up": "fc1",
    "mlp.down": "fc2",
    "mlp_norm": "final_layer_norm",
}


def describe(fields: ConfigFields) -> ModelConfig:
    """Read the config of an OPT model."""
    hidden_size, num_layers = fields.integer("hidden_size"), fields.integer("num_hidden_layers")
    pre_norm, has_bias = fields.flag("do_layer_norm_before", True), fields.flag("enable_bias", True)
    is_affine = fields.flag("layer_norm_elementwise_affine", True)
    return ModelConfig(
        model_type="opt",
        vocab_size=fields.integer("vocab_size"),
        embedding_size=fields.optional_integer("word_embed_proj_dim") or hidden_size,
        intermediate_size=fields.integer("ffn_dim"),
        max_position_embeddings=fields.integer("max_position_embeddings"),
        position_offset=POSITION_OFFSET,
        activation=fields.choice("activation_function", "relu", ACTIVATIONS),
        norm_type="layer" if is_affine else "bare_layer",
        # OPT's configs have no epsilon, and its reference implementation uses torch's default.
        norm_eps=1e-5,
        norm_positions=("before",) if pre_norm else ("sum",),
        has_final_norm=pre_norm and not fields.flag("_remove_final_layer_norm", False),
        tie_word_embeddings=fields.flag("tie_word_embeddings", True),
        qkv_bias=has_bias,
        output_bias=has_bias,
        mlp_bias=has_bias,
        **learned_position_config(hidden_size, fields.integer("num_attention_heads"), num_layers),
        **read_tokens_and_dtype(fields, bos=2, eos=2),
    )


def weight_rules(config: ModelConfig) -> WeightRules:
    """Return the rules that map the tensors of an OPT checkpoint to parameters.

    Checkpoints store weights as [out, in], and q, k and v as separate projections.
    """
    outer_projections = [
        (name, it) for name in ("project_in", "project_out") if (it := config.projection(name))
    ]
    rules = [
        WeightRule("decoder.embed_tokens.weight", "embed.weight"),
        WeightRule("decoder.embed_positions.weight", "position_embedding.weight"),
        *(
            rule
            for name, it in outer_projections
            for rule in linear_rules(it, [f"decoder.{name}"], name)
        ),
        *layer_rules(config, "decoder.layers", _TENSOR_NAMES),
        *norm_rules(config, "decoder.final_layer_norm", "final_norm"),
        head_rule(config),
    ]
    return WeightRules(rules, r"model\.")
