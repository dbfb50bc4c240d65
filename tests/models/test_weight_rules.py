"""Test which model parameter each tensor name of a checkpoint maps to."""

import pytest
from hf_models import CASES, config_of, reference

from jpaged.models.config import ModelConfig
from jpaged.models.registry import weight_rules


def targets(config: ModelConfig, name: str) -> list[str | None]:
    """Return a list with the parameter to which a tensor name maps: [None] if the loader ignores
    the tensor, [] if the name is unknown."""
    rule = weight_rules(config).find(name)
    return [] if rule is None else [rule.target]


@pytest.mark.parametrize("case", CASES)
def test_tensor_names_may_lack_the_prefix_of_the_base_model(case):
    config, model = config_of(case), reference(case)
    for name, _ in model.base_model.named_parameters():
        bare = targets(config, name)
        assert bare, name
        assert bare == targets(config, f"{model.base_model_prefix}.{name}")


@pytest.mark.parametrize(
    ("case", "name"),
    [
        ("gpt2", "h.0.attn.bias"),
        ("gpt2", "transformer.h.11.attn.masked_bias"),
        ("gpt2", "lm_head.weight"),
        ("opt", "lm_head.weight"),
        ("llama", "model.layers.1.self_attn.rotary_emb.inv_freq"),
        ("llama", "lm_head.weight"),
        ("gemma3", "language_model.model.layers.1.self_attn.rotary_emb.inv_freq"),
        ("gemma3", "language_model.lm_head.weight"),
        ("gemma3", "vision_tower.vision_model.embeddings.patch_embedding.weight"),
        ("gemma3", "model.multi_modal_projector.mm_soft_emb_norm.weight"),
    ],
)
def test_known_tensors_that_are_not_needed_are_ignored(case, name):
    assert targets(config_of(case), name) == [None]


@pytest.mark.parametrize("case", ["gpt2-untied-inner", "opt-bare", "llama3-biases", "qwen3-biases"])
def test_an_untied_head_is_a_parameter(case):
    assert targets(config_of(case), "lm_head.weight") == ["lm_head.weight"]


@pytest.mark.parametrize(
    ("case", "name"),
    [
        ("gpt2", "transformer.h.0.crossattention.c_attn.weight"),
        ("gpt2", "transformer.lm_head.weight"),
        ("opt", "model.lm_head.weight"),
        ("llama", "model.lm_head.weight"),
        ("llama3-biases", "model.lm_head.weight"),
        ("gemma3", "model.language_model.lm_head.weight"),
        ("llama", "model.layers.0.self_attn.q_norm.weight"),
        ("llama", "model.layers.0.mlp.experts.0.gate_proj.weight"),
        ("qwen3", "xmodel.norm.weight"),
        ("qwen3", "model.layers.0.input_layernorm.weight_scale"),
    ],
)
def test_unknown_tensor_names_match_no_parameter(case, name):
    assert targets(config_of(case), name) == []
