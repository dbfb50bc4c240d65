"""Config and weight rules of Gemma 3's text model (arXiv:2503.19786).

Weight rules map the tensors of a checkpoint to the parameters of the model.

By default, every sixth layer has full attention and all other layers have a sliding window. The two
kinds of layers have different rotary embeddings. RMSNorms precede and follow both attention and
feed-forward; checkpoints store the weights of the norms minus 1.
"""

from dataclasses import replace

from jpaged.models.checkpoint import WeightRules
from jpaged.models.config import LayerConfig, ModelConfig, RopeConfig
from jpaged.models.config_fields import (
    ACTIVATIONS,
    ConfigFields,
    read_rope,
    read_rotary_config,
    read_sliding_windows,
    read_tokens_and_dtype,
)
from jpaged.models.llama import TENSOR_NAMES, weight_rules
from jpaged.models.qwen import QK_NORM_NAMES

# Defaults of transformers. Published configs omit fields whose values equal these defaults.
_DEFAULTS = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": True,
}
# Fields of a multimodal config that take precedence over the same fields of its `text_config`.
_OUTER_FIELDS = ("bos_token_id", "eos_token_id", "tie_word_embeddings", "dtype", "torch_dtype")
_NORM_NAMES = {
    "attention_out_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
}
_PREFIX = r"(?:language_model\.)?(?:model\.)?(?:language_model\.)?"
_HEAD_PREFIX = r"(?:language_model\.)?"
_VISION_TENSORS = r"(?:vision_tower|multi_modal_projector)\..*"


def describe_text(fields: ConfigFields) -> ModelConfig:
    """Read the config of a text-only checkpoint."""
    fields = replace(fields, defaults=_DEFAULTS)
    common, scale = (
        read_rotary_config(fields, "gemma3_text"),
        fields.number("query_pre_attn_scalar", 256),
    )
    activation = fields.choice("hidden_activation", "gelu_pytorch_tanh", ACTIVATIONS)
    pattern = fields.integer("sliding_window_pattern", 6)
    numbers = range(1, fields.integer("num_hidden_layers") + 1)
    layer_types = ["sliding_attention" if i % pattern else "full_attention" for i in numbers]
    windows = read_sliding_windows(
        fields, fields.optional_integer("sliding_window", 4096), layer_types
    )
    cap = fields.optional_number("attn_logit_softcapping")
    bias = fields.flag("attention_bias", False)
    global_rope, local_rope = _read_ropes(fields)
    return ModelConfig(
        **common | {"norm_type": "offset_rms", "activation": activation},
        layers=tuple(
            LayerConfig(scale**-0.5, local_rope if w else global_rope, w, cap, "head")
            for w in windows
        ),
        norm_positions=("before", "after"),
        embedding_scale=common["hidden_size"] ** 0.5,
        final_soft_cap=fields.optional_number("final_logit_softcapping"),
        qkv_bias=bias,
        output_bias=bias,
        **read_tokens_and_dtype(fields, bos=2, eos=1),
    )


def _read_ropes(fields: ConfigFields) -> tuple[RopeConfig, RopeConfig]:
    """Read the rotary embeddings of full-attention layers and of sliding-window layers.

    transformers 5 stores both in `rope_parameters`. transformers 4 stores the first in `rope_theta`
    and `rope_scaling`, and the second in `rope_local_base_freq`.
    """
    prefix = f"{fields.prefix}rope_parameters."
    both = ConfigFields(fields.mapping("rope_parameters"), prefix=prefix)
    global_rope, local_rope = both.mapping("full_attention"), both.mapping("sliding_attention")
    both.refuse_unread()
    scaling = fields.mapping("rope_scaling")
    name = "rope_scaling" if scaling else "rope_parameters.full_attention"
    local_name = "rope_parameters.sliding_attention"
    return (
        read_rope({**global_rope, **scaling}, fields, theta=1e6, name=name),
        read_rope(local_rope, fields, "rope_local_base_freq", name=local_name),
    )


def describe_multimodal(fields: ConfigFields) -> ModelConfig:
    """Read the config of the text model in a checkpoint that also takes images.

    Some fields of the outer config take precedence over the same fields of `text_config`.
    """
    outer = {name: fields.values.get(name) for name in _OUTER_FIELDS}
    outer = {name: value for name, value in outer.items() if value is not None}
    inner = fields.mapping("text_config", required=True)
    text = ConfigFields({**inner, **outer}, prefix="text_config.")
    text.choice("model_type", "gemma3_text", ("gemma3_text",))
    model = describe_text(text)
    text.refuse_unsupported_fields()
    return model


def weight_rules_gemma3(config: ModelConfig) -> WeightRules:
    """Return the rules that map the tensors of a Gemma 3 checkpoint to parameters.

    The rules of LLaMA apply. More rules map the norms of Gemma 3. The tensors of the image encoder
    are ignored.
    """
    rules = weight_rules(config, TENSOR_NAMES | QK_NORM_NAMES | _NORM_NAMES)
    ignored_pattern = f"{rules.ignored_pattern}|{_VISION_TENSORS}"
    return replace(rules, prefix=_PREFIX, head_prefix=_HEAD_PREFIX, ignored_pattern=ignored_pattern)
