"""Config and weight rules of Qwen2, Qwen2.5, Qwen3 and Qwen3-MoE.

Weight rules map the tensors of a checkpoint to the parameters of the model.

The layers equal LLaMA layers, with these differences. Qwen2 (arXiv:2407.10671) and Qwen2.5
(arXiv:2412.15115) add biases to q, k and v. Qwen3 (arXiv:2505.09388) adds an RMSNorm to each query
and key head. Qwen3-MoE replaces the feed-forward of some or all layers by experts.
"""

from collections.abc import Mapping
from typing import Any

from jpaged.models.checkpoint import WeightRules
from jpaged.models.config import ExpertsConfig, ModelConfig
from jpaged.models.config_fields import (
    REQUIRED,
    ConfigFields,
    field_error,
    make_rotary_layers,
    read_experts,
    read_rotary_config,
    read_sliding_windows,
    read_tokens_and_dtype,
)
from jpaged.models.llama import TENSOR_NAMES, weight_rules

QK_NORM_NAMES = {"attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm"}


def describe_qwen2(fields: ConfigFields) -> ModelConfig:
    """Read the config of a Qwen2 or Qwen2.5 model."""
    common = read_rotary_config(fields, "qwen2")
    layers = make_rotary_layers(fields, common, _read_sliding_windows(fields))
    tokens = read_tokens_and_dtype(fields, bos=None, eos=None)
    return ModelConfig(**common, layers=layers, qkv_bias=True, **tokens)


def describe_qwen3(fields: ConfigFields) -> ModelConfig:
    """Read the config of a dense Qwen3 model."""
    common = read_rotary_config(fields, "qwen3", default_head_size=128)
    layers = make_rotary_layers(fields, common, _read_sliding_windows(fields), qk_norm="head")
    bias, tokens = (
        fields.flag("attention_bias", False),
        read_tokens_and_dtype(fields, bos=None, eos=None),
    )
    return ModelConfig(**common, layers=layers, qkv_bias=bias, output_bias=bias, **tokens)


def describe_qwen3_moe(fields: ConfigFields) -> ModelConfig:
    """Read the config of a Qwen3 model with experts."""
    fields.get("num_key_value_heads", REQUIRED)
    common = read_rotary_config(fields, "qwen3_moe")
    has_window = fields.flag("use_sliding_window", False)
    window = fields.optional_integer("sliding_window", 4096) if has_window else None
    # In dense Qwen models, max_window_layers says which layers have a sliding window. In Qwen3-MoE,
    # max_window_layers has no effect: all layers have the same window.
    kind = "full_attention" if window is None else "sliding_attention"
    layer_types = [kind] * fields.integer("num_hidden_layers")
    layers = make_rotary_layers(
        fields,
        common,
        read_sliding_windows(fields, window, layer_types, is_fixed=True),
        experts=_read_layer_experts(fields, common),
        qk_norm="head",
    )
    bias, tokens = (
        fields.flag("attention_bias", False),
        read_tokens_and_dtype(fields, bos=None, eos=None),
    )
    return ModelConfig(**common, layers=layers, qkv_bias=bias, output_bias=bias, **tokens)


def _read_layer_experts(
    fields: ConfigFields, common: Mapping[str, Any]
) -> list[ExpertsConfig | None]:
    """Return the settings of each layer's experts; None for a dense layer."""
    normalize = fields.flag("norm_topk_prob", False)
    experts = read_experts(fields, common, width_field="moe_intermediate_size", normalize=normalize)
    num_layers, step = fields.integer("num_hidden_layers"), fields.integer("decoder_sparse_step", 1)
    dense = fields.get("mlp_only_layers")
    dense = [] if dense is None else dense
    if not isinstance(dense, list | tuple) or not all(type(index) is int for index in dense):
        raise field_error("mlp_only_layers", dense, "a list of layer indices")
    return [
        experts if index not in dense and (index + 1) % step == 0 else None
        for index in range(num_layers)
    ]


def _read_sliding_windows(fields: ConfigFields) -> tuple[int | None, ...]:
    fields.get("num_key_value_heads", REQUIRED)
    num_layers, window = fields.integer("num_hidden_layers"), None
    if fields.flag("use_sliding_window", False):
        window = fields.optional_integer("sliding_window", 4096)
    first = num_layers
    if window is not None:
        first = fields.get("max_window_layers", 28)
        if type(first) is not int or first < 0:
            raise field_error("max_window_layers", first, "an integer of at least 0")
    layer_types = [
        "full_attention" if i < first else "sliding_attention" for i in range(num_layers)
    ]
    return read_sliding_windows(fields, window, layer_types)


def weight_rules_qwen3(config: ModelConfig) -> WeightRules:
    """Return the rules that map the tensors of a Qwen3 checkpoint to parameters.

    The rules of LLaMA apply. More rules map the norms of queries and keys.
    """
    return weight_rules(config, TENSOR_NAMES | QK_NORM_NAMES)
