"""Tiny random `transformers` models by case, and jpaged models with the same weights."""

import functools

import jax.numpy as jnp
import numpy as np
import torch
import transformers
from flax import nnx
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from jpaged.models.config import ModelConfig
from jpaged.models.decoder import Decoder
from jpaged.models.registry import read_model_config, weight_rules
from jpaged.models.weight_plan import model_parameters, with_parameters

transformers.logging.set_verbosity_error()

_COMMON = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
_COMMON |= {"max_position_embeddings": 128, "bos_token_id": 0, "eos_token_id": 1}
_OPT = _COMMON | {"model_type": "opt", "ffn_dim": 96}
_GATED = _COMMON | {"intermediate_size": 48, "num_key_value_heads": 1}
_GQA = _GATED | {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_bias": True}
_LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0}
_LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 32}
_YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0}
_YARN |= {"original_max_position_embeddings": 32}
_MOE = {"model_type": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 2}
_GEMMA3 = {"model_type": "gemma3_text", "head_dim": 32, "sliding_window": 5}

# Configurations of tiny models. Together, the cases of a model family cover all options of the
# family.
CASES: dict[str, dict] = {
    "gpt2": _COMMON | {"model_type": "gpt2"},
    "gpt2-untied-inner": _COMMON
    | {"model_type": "gpt2", "n_inner": 40, "layer_norm_epsilon": 0.01}
    | {"tie_word_embeddings": False, "num_attention_heads": 16},  # head size 4
    "opt": _OPT,
    "opt-350m": _OPT | {"do_layer_norm_before": False, "word_embed_proj_dim": 32},
    "opt-bare": _OPT
    | {
        "enable_bias": False,
        "layer_norm_elementwise_affine": False,
        "_remove_final_layer_norm": True,
        "tie_word_embeddings": False,
        "activation_function": "gelu",
    },
    "llama": _GATED | {"model_type": "llama", "tie_word_embeddings": True},
    "llama3-biases": _GQA
    | {"model_type": "llama", "head_dim": 48, "mlp_bias": True}
    | {"rope_parameters": _LLAMA3, "rms_norm_eps": 0.01},
    "llama-linear-mha": _GATED
    | {
        "model_type": "llama",
        "num_key_value_heads": 2,
        "head_dim": 6,
        "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
    },
    "mistral-window": _GATED | {"model_type": "mistral", "sliding_window": 5, "head_dim": 40},
    "qwen2": _GATED
    | {"model_type": "qwen2", "tie_word_embeddings": True, "num_attention_heads": 8},
    "qwen2-layer-types": _GATED
    | {
        "model_type": "qwen2",
        "num_hidden_layers": 3,
        "use_sliding_window": True,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "qwen3": _GATED | {"model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": True},
    "qwen3-biases": _GQA
    | {"model_type": "qwen3", "head_dim": 48}
    | {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    "qwen3_moe": _GATED
    | _MOE
    | {"norm_topk_prob": True, "head_dim": 32, "num_hidden_layers": 3}
    | {"decoder_sparse_step": 2, "moe_intermediate_size": 24},
    "qwen3_moe-yarn": _GQA
    | _MOE
    | {"model_type": "qwen3_moe", "mlp_only_layers": [1], "moe_intermediate_size": 24}
    | {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
    | {"rope_parameters": _YARN, "tie_word_embeddings": True},
    "mixtral": _GATED | {"model_type": "mixtral", "num_local_experts": 5, "sliding_window": 6},
    "olmoe": _GQA | _MOE | {"model_type": "olmoe"},
    "llama-yarn": _GATED
    | {"model_type": "llama", "head_dim": 32}
    | {"rope_parameters": _YARN | {"mscale": 0.7, "mscale_all_dim": 0.4, "truncate": False}},
    "mistral-yarn": _GATED
    | {"model_type": "mistral", "sliding_window": None, "head_dim": 32}
    | {"rope_parameters": _YARN | {"attention_factor": 1.3, "beta_fast": 4.0, "beta_slow": 0.5}},
    "qwen2-yarn": _GATED | {"model_type": "qwen2", "rope_parameters": _YARN},
    "qwen3-yarn": _GATED | {"model_type": "qwen3", "head_dim": 32, "rope_parameters": _YARN},
    "gemma3": _GATED | _GEMMA3 | {"query_pre_attn_scalar": 24, "sliding_window_pattern": 2},
    "gemma3-scaled": _GQA
    | _GEMMA3
    | {
        "tie_word_embeddings": False,
        "final_logit_softcapping": 3.0,
        "layer_types": ["full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 3e4},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    },
}

IN_FULL_TIER = {
    *("qwen3_moe", "mixtral", "llama-yarn", "mistral-yarn", "qwen2-yarn", "qwen3-yarn"),
}
"""Cases that only the full tier compares with `transformers`. The other cases cover the same
options."""


def hf_config(case: str) -> PreTrainedConfig:
    values = dict(CASES[case])
    return AutoConfig.for_model(values.pop("model_type"), **values)


def config_of(case: str) -> ModelConfig:
    return read_model_config(hf_config(case).to_dict())


@functools.cache
def reference(case: str) -> PreTrainedModel:
    """Return a `transformers` model for the configuration `case`. Every parameter has random
    values."""
    torch.manual_seed(sum(map(ord, case)))
    model = AutoModelForCausalLM.from_config(hf_config(case), attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_scale = parameter.ndim == 1 and name.endswith("weight")
            scale = 0.3 if parameter.ndim == 1 else 1.5 * parameter.shape[-1] ** -0.5
            parameter.normal_(1.0 if is_scale else 0.0, scale)
    return model


@functools.cache
def ours(case: str, dtype: type = jnp.float32) -> Decoder:
    """Return a jpaged model for the configuration `case`, with the same weights as the model that
    `reference` returns."""
    tensors = {name: tensor.numpy() for name, tensor in reference(case).state_dict().items()}
    return build(config_of(case), tensors, dtype)


def build(
    config: ModelConfig,
    tensors: dict[str, np.ndarray],
    dtype: type,
    filled: dict[str, float] | None = None,
) -> Decoder:
    """Return a model with the weights `tensors`. The model's table of tensor names maps tensors to
    parameters; the loader is not used.

    Args:
        config: The model's sizes.
        tensors: The tensors of a checkpoint by name.
        dtype: The dtype of the parameters.
        filled: Constants for parameters that have no tensor. The key is the last part of the
            parameter's name, such as "k_scale".
    """
    model = nnx.eval_shape(lambda: Decoder(config, dtype=dtype))
    rules, specs = weight_rules(config), model_parameters(model)
    arrays = {name: np.full(spec.shape, np.nan, np.float32) for name, spec in specs.items()}
    for name, tensor in tensors.items():
        rule = rules.find(name)
        assert rule is not None
        if rule.target is None:
            continue
        whole, piece = arrays[rule.target], tensor
        if rule.shape is not None and rule.file_axes is not None:
            order = [axis for axes in rule.file_axes for axis in axes]
            in_file = tensor.reshape([rule.shape[axis] for axis in order])
            piece = in_file.transpose(np.argsort(order))
        whole = whole.swapaxes(0, rule.axis)[rule.start : rule.start + piece.shape[rule.axis]]
        assert whole.swapaxes(0, rule.axis).shape == piece.shape
        whole[...] = piece.swapaxes(0, rule.axis) + rule.addend
    for name, array in arrays.items():
        array[...] = (filled or {}).get(name.rpartition(".")[2], array)
        assert not np.isnan(array).any(), f"{name} is not filled"
    values = {name: jnp.asarray(arrays[name], spec.dtype) for name, spec in specs.items()}
    filled_model = with_parameters(model, values)
    assert isinstance(filled_model, Decoder)
    return filled_model
