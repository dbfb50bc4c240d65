"""Config and weight rules of LLaMA (arXiv:2307.09288) and Mistral (arXiv:2310.06825).

Both have rotary embedding, RMSNorm, grouped-query attention and a gated feed-forward.
"""

from collections.abc import Mapping, Sequence

from jpaged.models.checkpoint import WeightRule, WeightRules
from jpaged.models.config import ModelConfig
from jpaged.models.config_fields import (
    REQUIRED,
    ConfigFields,
    field_error,
    make_rotary_layers,
    read_rotary_config,
    read_sliding_windows,
    read_tokens_and_dtype,
)
from jpaged.models.decoder import head_rule, layer_rules, norm_rules
from jpaged.models.experts import ExpertNames

TENSOR_NAMES: dict[str, str | Sequence[str]] = {
    "attention_norm": "input_layernorm",
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.output": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down": "mlp.down_proj",
}


def describe_llama(fields: ConfigFields) -> ModelConfig:
    """Read the config of a LLaMA model, versions 1 to 3."""
    common, bias = read_rotary_config(fields, "llama"), fields.flag("attention_bias", False)
    if fields.get("sliding_window") is not None:
        raise field_error(
            "sliding_window", fields.get("sliding_window"), "null for model_type llama"
        )
    layer_types = ["full_attention"] * fields.integer("num_hidden_layers")
    return ModelConfig(
        **common,
        layers=make_rotary_layers(fields, common, read_sliding_windows(fields, None, layer_types)),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False),
        **read_tokens_and_dtype(fields, bos=1, eos=2),
    )


def describe_mistral(fields: ConfigFields) -> ModelConfig:
    """Read the config of a Mistral model. Either all layers or no layers have a sliding window."""
    fields.get("num_key_value_heads", REQUIRED)
    common, window = (
        read_rotary_config(fields, "mistral"),
        fields.optional_integer("sliding_window", 4096),
    )
    kind = "full_attention" if window is None else "sliding_attention"
    layer_types = [kind] * fields.integer("num_hidden_layers")
    if fields.get("layer_types") not in (None, layer_types):
        raise field_error(
            "layer_types", fields.get("layer_types"), f"a list with one {kind} per layer"
        )
    return ModelConfig(
        **common,
        layers=make_rotary_layers(
            fields, common, read_sliding_windows(fields, window, layer_types)
        ),
        **read_tokens_and_dtype(fields, bos=1, eos=2),
    )


def weight_rules(
    config: ModelConfig,
    names: Mapping[str, str | Sequence[str]] = TENSOR_NAMES,
    expert_names: ExpertNames | None = None,
) -> WeightRules:
    """Return the rules that map the tensors of LLaMA and similar checkpoints to parameters.

    Checkpoints store weights as [out, in]. The projections q, k, v, gate and up are separate.

    Args:
        config: Config of the model.
        names: See `layer_rules`.
        expert_names: See `layer_rules`.
    """
    rules = [
        WeightRule("embed_tokens.weight", "embed.weight"),
        *layer_rules(config, "layers", names, expert_names=expert_names),
        *norm_rules(config, "norm", "final_norm"),
        head_rule(config),
    ]
    return WeightRules(rules, r"model\.", r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
