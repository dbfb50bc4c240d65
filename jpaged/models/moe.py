"""Configs and weight rules of Mixtral (arXiv:2401.04088) and OLMoE (arXiv:2409.02060).

Weight rules map the tensors of a checkpoint to the parameters of the model.

In both families, every layer has experts. Mixtral has the same attention as Mistral. OLMoE applies
one RMSNorm over all query heads of a token, and another over all key heads.
"""

from jpaged.models.checkpoint import WeightRules
from jpaged.models.config import ModelConfig
from jpaged.models.config_fields import (
    REQUIRED,
    ConfigFields,
    make_rotary_layers,
    read_experts,
    read_rotary_config,
    read_sliding_windows,
    read_tokens_and_dtype,
)
from jpaged.models.experts import ExpertNames
from jpaged.models.llama import TENSOR_NAMES, weight_rules
from jpaged.models.qwen import QK_NORM_NAMES

_MIXTRAL_NAMES = ExpertNames("block_sparse_moe", gate="w1", up="w3", down="w2")


def describe_mixtral(fields: ConfigFields) -> ModelConfig:
    """Read the config of a Mixtral model. Either all layers or no layers have a sliding window."""
    fields.get("num_key_value_heads", REQUIRED)
    common = read_rotary_config(fields, "mixtral")
    common["norm_eps"] = fields.number("rms_norm_eps", 1e-5)
    window = fields.optional_integer("sliding_window")
    kind = "full_attention" if window is None else "sliding_attention"
    layer_types = [kind] * fields.integer("num_hidden_layers")
    # Mixtral computes a softmax over the logits of the chosen experts only. `normalize=True` gives
    # the same result: a softmax over all experts, and then division of the chosen experts' weights
    # by the sum of the chosen experts' weights.
    experts = read_experts(
        fields,
        common,
        width_field="intermediate_size",
        normalize=True,
        count_field="num_local_experts",
    )
    layers = make_rotary_layers(
        fields,
        common,
        read_sliding_windows(fields, window, layer_types, is_fixed=True),
        theta=1e6,
        experts=[experts] * len(layer_types),
    )
    return ModelConfig(**common, layers=layers, **read_tokens_and_dtype(fields, bos=1, eos=2))


def describe_olmoe(fields: ConfigFields) -> ModelConfig:
    """Read the config of an OLMoE model."""
    common = read_rotary_config(fields, "olmoe")
    common["norm_eps"] = fields.number("rms_norm_eps", 1e-5)
    layer_types = ["full_attention"] * fields.integer("num_hidden_layers")
    normalize = fields.flag("norm_topk_prob", False)
    experts = read_experts(fields, common, width_field="intermediate_size", normalize=normalize)
    layers = make_rotary_layers(
        fields,
        common,
        read_sliding_windows(fields, None, layer_types),
        experts=[experts] * len(layer_types),
        qk_norm="projection",
    )
    bias = fields.flag("attention_bias", False)
    tokens = read_tokens_and_dtype(fields, bos=None, eos=50279)
    return ModelConfig(**common, layers=layers, qkv_bias=bias, output_bias=bias, **tokens)


def weight_rules_mixtral(config: ModelConfig) -> WeightRules:
    """Return the rules that map the tensors of a Mixtral checkpoint to parameters.

    The rules of Mistral apply, but the feed-forward rules map experts.
    """
    return weight_rules(config, TENSOR_NAMES, _MIXTRAL_NAMES)


def weight_rules_normed(config: ModelConfig) -> WeightRules:
    """Return the rules that map the tensors of a Qwen3-MoE or OLMoE checkpoint to parameters.

    The rules of LLaMA apply, but the feed-forward rules map experts. More rules map the norms of
    queries and keys.
    """
    return weight_rules(config, TENSOR_NAMES | QK_NORM_NAMES, ExpertNames())
