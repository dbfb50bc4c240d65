"""Which family describes and loads which `model_type`: a new one is a file and a line here."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from jpaged.models import gemma3, gpt2, llama, opt, qwen
from jpaged.models.checkpoint import WeightRule, WeightRules
from jpaged.models.config import FP8_DTYPE, ConfigFields, ModelConfig
from jpaged.models.quantization import read_quantization

_KV_SCALE_NAMES = (
    r"layers\.\d+\.self_attn\."
    r"(?:(?:attn\.|[kv]_proj\.)?(?:[kv]|kv)_scale|[kv]_proj\.output_scale)"
)
"""Scales for keys and values in FP8, in checkpoints of which the cache is wider."""


class ModelFamily(NamedTuple):
    """A family: how its config is read, and where each tensor of its checkpoints goes."""

    describe: Callable[[ConfigFields], ModelConfig]
    weight_rules: Callable[[ModelConfig], WeightRules]


_FAMILIES = {
    "gpt2": ModelFamily(gpt2.describe, gpt2.weight_rules),
    "opt": ModelFamily(opt.describe, opt.weight_rules),
    "llama": ModelFamily(llama.describe_llama, llama.weight_rules),
    "mistral": ModelFamily(llama.describe_mistral, llama.weight_rules),
    "qwen2": ModelFamily(qwen.describe_qwen2, llama.weight_rules),
    "qwen3": ModelFamily(qwen.describe_qwen3, qwen.weight_rules_qwen3),
    "gemma3_text": ModelFamily(gemma3.describe_text, gemma3.weight_rules_gemma3),
    "gemma3": ModelFamily(gemma3.describe_multimodal, gemma3.weight_rules_gemma3),
}
SUPPORTED_MODEL_TYPES = tuple(_FAMILIES)


def read_model_config(config: Mapping[str, Any], quantization: str | None = None) -> ModelConfig:
    """What the content of a `config.json`, of transformers 4 or 5, describes.

    Fields left out take transformers' defaults, except sizes, which must be there.

    Args:
        config: the content.
        quantization: as of `jpaged.models.quantization.read_quantization`.

    Raises:
        ValueError: a missing or malformed field, or one whose value changes the computation in a
            way that is not implemented; the message has the field, the value and what is supported.
    """
    fields = ConfigFields(config)
    model_type = fields.choice("model_type", None, SUPPORTED_MODEL_TYPES)
    model = _FAMILIES[model_type].describe(fields)
    quantization_fields = fields.optional_nested("quantization_config")
    fields.refuse_unsupported_fields()
    modules = _module_paths(model) if quantization_fields is not None else {}
    return replace(
        model, quantization=read_quantization(quantization_fields, quantization, modules)
    )


def _module_paths(model: ModelConfig) -> dict[str, str]:
    """The paths of projections' parts by their names in checkpoints."""
    found = {}
    for rule in weight_rules(model).rules:
        path, _, last = (rule.target or "").rpartition(".")
        if last == "weight" and model.projection(path) is not None:
            found[rule.source.removesuffix(".weight")] = path
    return found


def weight_rules(config: ModelConfig) -> WeightRules:
    """Where the tensors of the model's checkpoints go."""
    rules = _FAMILIES[config.model_type].weight_rules(config)
    if config.quantization is None or not config.quantization.has_kv_scales:
        return rules
    if config.kv_cache_dtype != FP8_DTYPE:
        return replace(
            rules, ignored_pattern="|".join(filter(None, (rules.ignored_pattern, _KV_SCALE_NAMES)))
        )
    scales = [
        WeightRule(f"layers.{i}.self_attn.{source}", f"layers.{i}.attention.{name}", is_scalar=True)
        for i in range(config.num_layers)
        for name in ("k_scale", "v_scale")
        for source in (name, "kv_scale")  # which is of both
    ]
    return replace(rules, rules=[*rules.rules, *scales])
