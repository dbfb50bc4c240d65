"""Config and weight rules of Qwen2, Qwen2.5 and Qwen3.

The layers are LLaMA's. Qwen2 (arXiv:2407.10671) and Qwen2.5 (arXiv:2412.15115) add biases to q, k
and v. Qwen3 (arXiv:2505.09388) adds an RMSNorm to each query and key head.
"""

from jpaged.models.checkpoint import WeightRules
from jpaged.models.config import (
    REQUIRED,
    ConfigFields,
    ModelConfig,
    field_error,
    make_rotary_layers,
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
    layers = make_rotary_layers(fields, common, _read_sliding_windows(fields), qk_norm=True)
    bias, tokens = (
        fields.flag("attention_bias", False),
        read_tokens_and_dtype(fields, bos=None, eos=None),
    )
    return ModelConfig(**common, layers=layers, qkv_bias=bias, output_bias=bias, **tokens)


def _read_sliding_windows(fields: ConfigFields) -> tuple[int | None, ...]:
    fields.get("num_key_value_heads", REQUIRED)
    num_layers, window = fields.integer("num_hidden_layers"), None
    if fields.flag("use_sliding_window", False):
        window = fields.optional_integer("sliding_window", 4096)
    first = num_layers
    if window is not None:
        first = fields.get("max_window_layers", 28)
        if type(first) is not int or first < 0:
            raise field_error("max_window_layers", first, "an integer from 0")
    layer_types = [
        "full_attention" if i < first else "sliding_attention" for i in range(num_layers)
    ]
    return read_sliding_windows(fields, window, layer_types)


def weight_rules_qwen3(config: ModelConfig) -> WeightRules:
    """Return LLaMA's weight rules with the norms of query and key heads."""
    return weight_rules(config, TENSOR_NAMES | QK_NORM_NAMES)
