"""Model families by `model_type`. A new family needs a module and an entry in `_FAMILIES`."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from jpaged.models import gemma3, gpt2, llama, moe, opt, qwen
from jpaged.models.checkpoint import WeightRule, WeightRules
from jpaged.models.config import FP8_DTYPE, ModelConfig
from jpaged.models.config_fields import ConfigFields
from jpaged.models.expert_formats import expert_format
from jpaged.models.quantization import read_quantization

_KV_SCALE_NAMES = (
    r"layers\.\d+\.self_attn\."
    r"(?:(?:attn\.|[kv]_proj\.)?(?:[kv]|kv)_scale|[kv]_proj\.output_scale)"
)
"""Matches the names of KV-cache scales, which are ignored unless the KV cache is FP8."""


class ModelFamily(NamedTuple):
    """Functions of a model family.

    Attributes:
        describe: Reads the family's config.
        weight_rules: Returns the rules that map the tensors of a checkpoint to parameters.
    """

    describe: Callable[[ConfigFields], ModelConfig]
    weight_rules: Callable[[ModelConfig], WeightRules]


_FAMILIES = {
    "gpt2": ModelFamily(gpt2.describe, gpt2.weight_rules),
    "opt": ModelFamily(opt.describe, opt.weight_rules),
    "llama": ModelFamily(llama.describe_llama, llama.weight_rules),
    "mistral": ModelFamily(llama.describe_mistral, llama.weight_rules),
    "qwen2": ModelFamily(qwen.describe_qwen2, llama.weight_rules),
    "qwen3": ModelFamily(qwen.describe_qwen3, qwen.weight_rules_qwen3),
    "qwen3_moe": ModelFamily(qwen.describe_qwen3_moe, moe.weight_rules_normed),
    "mixtral": ModelFamily(moe.describe_mixtral, moe.weight_rules_mixtral),
    "olmoe": ModelFamily(moe.describe_olmoe, moe.weight_rules_normed),
    "gemma3_text": ModelFamily(gemma3.describe_text, gemma3.weight_rules_gemma3),
    "gemma3": ModelFamily(gemma3.describe_multimodal, gemma3.weight_rules_gemma3),
}
SUPPORTED_MODEL_TYPES = tuple(_FAMILIES)


def read_model_config(config: Mapping[str, Any], quantization: str | None = None) -> ModelConfig:
    """Return the `ModelConfig` for the content of a `config.json` of transformers 4 or 5.

    Missing fields take the defaults of transformers. Sizes are required.

    Args:
        config: Content of `config.json`.
        quantization: Requested quantization method; None to follow `config` (see
            `jpaged.models.quantization.read_quantization`).

    Raises:
        ValueError: A field is missing or malformed, or its value would change the computation in
            an unsupported way. The message names the field, its value and the supported values.
    """
    fields = ConfigFields(config)
    model_type = fields.choice("model_type", None, SUPPORTED_MODEL_TYPES)
    model = _FAMILIES[model_type].describe(fields)
    quantization_fields = fields.optional_nested("quantization_config")
    fields.refuse_unsupported_fields()
    modules = _module_paths(model) if quantization_fields is not None else {}
    found = read_quantization(quantization_fields, quantization, modules)
    model = replace(model, quantization=found)
    for index, layer in enumerate(model.layers):
        if layer.experts is not None:
            expert_format(model, index)  # raise an error if experts do not support the format
    return model


def _module_paths(model: ModelConfig) -> dict[str, str]:
    """Map each module name of the model's checkpoints to the path of the projection that it fills.

    All experts of a layer share one path, so only the first expert is listed. If another expert has
    another format, the loader refuses the checkpoint because of a wrong dtype.
    """
    paths = {}
    for rule in weight_rules(model).rules:
        path, _, param_name = (rule.target or "").rpartition(".")
        name = rule.source.removesuffix(".weight")
        if rule.expert == 0:
            paths[name] = f"{path}.experts"
        elif param_name == "weight" and model.projection(path) is not None:
            paths[name] = path
    return paths


def weight_rules(config: ModelConfig) -> WeightRules:
    """Return the rules that map the tensors of the model's checkpoints to parameters."""
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
        # The tensor `kv_scale` holds one scale for both keys and values.
        for source in (name, "kv_scale")
    ]
    return replace(rules, rules=[*rules.rules, *scales])
