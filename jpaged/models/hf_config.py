"""Reading a Hugging Face `config.json`: one function a family, and refusal of the unknown."""

from collections.abc import Mapping
from typing import Any, cast

from jpaged.models.config import ModelConfig, RopeConfig, RopeType
from jpaged.models.config_fields import REQUIRED, Fields, refuse, refuse_head_size

ACTIVATIONS = ("relu", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "silu", "swish")
CHECKPOINT_DTYPES = ("float32", "bfloat16", "float16")

# Fields that change the computation of some model, with the values that leave it as it is here.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "quantization_config": (None,),
    "compression_config": (None,),
    "is_encoder_decoder": (None, False),
    "add_cross_attention": (None, False),
    "is_causal": (None, True),
    "use_bidirectional_attention": (None, False),
    "pruned_heads": (None, {}),
    "scale_attn_weights": (None, True),
    "scale_attn_by_inverse_layer_idx": (None, False),
    "reorder_and_upcast_attn": (None, False),
    "partial_rotary_factor": (None, 1.0),
    "rope_interleaved": (None, False),
    "no_rope_layers": (None, []),
    "use_qk_norm": (None, False),
    "qk_layernorm": (None, False),
    "clip_qkv": (None,),
    "attention_chunk_size": (None,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "query_pre_attn_scalar": (None,),
    "attention_multiplier": (None,),
    "embedding_multiplier": (None, 1.0),
    "residual_multiplier": (None, 1.0),
    "logit_scale": (None, 1.0),
    "logits_scaling": (None, 1.0),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "n_routed_experts": (None, 0),
}

_ROPE_NEEDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
_ROPE_KEYS = {
    "rope_theta", "rope_type", "type", "factor", "low_freq_factor", "high_freq_factor",
    "original_max_position_embeddings", "partial_rotary_factor",
}  # fmt: skip


def read_hf_config(config: Mapping[str, Any]) -> ModelConfig:
    """See `ModelConfig.from_hf`."""
    fields = Fields(config)
    read = _READERS[fields.choice("model_type", None, tuple(_READERS))]
    for name, neutral in _NEUTRAL.items():
        if (value := fields.get(name)) not in neutral:
            raise refuse(name, value, " or ".join(map(repr, neutral)))
    model = ModelConfig(**read(fields))
    _check_heads(model)
    return model


def _check_heads(model: ModelConfig) -> None:
    if model.num_heads % model.num_kv_heads:
        wanted = f"divisors of num_attention_heads={model.num_heads}"
        raise refuse("num_key_value_heads", model.num_kv_heads, wanted)
    if model.rope is not None and model.head_size % 2:
        raise refuse_head_size(model.head_size, "even sizes, with rotary embedding")


def _divided_head_size(hidden_size: int, num_heads: int) -> int:
    if hidden_size % num_heads:
        raise refuse("num_attention_heads", num_heads, f"divisors of hidden_size={hidden_size}")
    return hidden_size // num_heads


def _tokens_and_dtype(fields: Fields, *, bos: int | None, eos: int | None) -> dict[str, Any]:
    return {
        "bos_token_id": _bos_token_id(fields.get("bos_token_id", bos)),
        "eos_token_ids": _eos_token_ids(fields.get("eos_token_id", eos)),
        "checkpoint_dtype": _checkpoint_dtype(fields.get("dtype", alias="torch_dtype")),
    }


def _bos_token_id(value: object) -> int | None:
    if value is not None and not isinstance(value, int):
        raise refuse("bos_token_id", value, "an integer, null")
    return value


def _eos_token_ids(value: object) -> tuple[int, ...]:
    ids = value if isinstance(value, list | tuple) else [] if value is None else [value]
    if not all(isinstance(token, int) for token in ids):
        raise refuse("eos_token_id", value, "an integer, a list of integers, null")
    return tuple(cast(list[int], ids))


def _checkpoint_dtype(value: object) -> str | None:
    name = None if value is None else str(value).removeprefix("torch.")
    if name not in (None, *CHECKPOINT_DTYPES):
        raise refuse("dtype", name, ", ".join(CHECKPOINT_DTYPES))
    return name


def _gpt2(fields: Fields) -> dict[str, Any]:
    hidden_size = fields.integer("n_embd", alias="hidden_size")
    num_layers = fields.integer("n_layer", alias="num_hidden_layers")
    num_heads = fields.integer("n_head", alias="num_attention_heads")
    inner = None if fields.get("n_inner") is None else fields.integer("n_inner")
    return {
        "model_type": "gpt2",
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": hidden_size,
        "embedding_size": hidden_size,
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": num_heads,
        "head_size": _divided_head_size(hidden_size, num_heads),
        "intermediate_size": inner or 4 * hidden_size,
        "max_position_embeddings": fields.integer("n_positions", alias="max_position_embeddings"),
        "activation": fields.choice("activation_function", "gelu_new", ACTIVATIONS),
        "norm_eps": fields.number("layer_norm_epsilon", 1e-5),
        "sliding_windows": (None,) * num_layers,
        "rope": None,
        "tie_word_embeddings": fields.flag("tie_word_embeddings", True),
        **_all_biases(True),
        "pre_norm": True,
        "final_norm": True,
        "norm_affine": True,
        **_tokens_and_dtype(fields, bos=50256, eos=50256),
    }


def _opt(fields: Fields) -> dict[str, Any]:
    hidden_size, num_layers = fields.integer("hidden_size"), fields.integer("num_hidden_layers")
    num_heads = fields.integer("num_attention_heads")
    pre_norm = fields.flag("do_layer_norm_before", True)
    return {
        "model_type": "opt",
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": hidden_size,
        "embedding_size": fields.optional_integer("word_embed_proj_dim") or hidden_size,
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": num_heads,
        "head_size": _divided_head_size(hidden_size, num_heads),
        "intermediate_size": fields.integer("ffn_dim"),
        "max_position_embeddings": fields.integer("max_position_embeddings"),
        "activation": fields.choice("activation_function", "relu", ACTIVATIONS),
        "norm_eps": 1e-5,  # torch's default, which the reference implementation keeps
        "sliding_windows": (None,) * num_layers,
        "rope": None,
        "tie_word_embeddings": fields.flag("tie_word_embeddings", True),
        **_all_biases(fields.flag("enable_bias", True)),
        "pre_norm": pre_norm,
        "final_norm": pre_norm and not fields.flag("_remove_final_layer_norm", False),
        "norm_affine": fields.flag("layer_norm_elementwise_affine", True),
        **_tokens_and_dtype(fields, bos=2, eos=2),
    }


def _all_biases(value: bool) -> dict[str, bool]:
    return {"qkv_bias": value, "output_bias": value, "mlp_bias": value}


def _rotary(fields: Fields, model_type: str, default_head_size: int | None = None) -> dict:
    """What llama, mistral, qwen2 and qwen3 have in common."""
    hidden_size, num_layers = fields.integer("hidden_size"), fields.integer("num_hidden_layers")
    num_heads = fields.integer("num_attention_heads")
    max_position_embeddings = fields.integer("max_position_embeddings")
    head_size = fields.optional_integer("head_dim", default_head_size)
    return {
        "model_type": model_type,
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": hidden_size,
        "embedding_size": hidden_size,
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": fields.optional_integer("num_key_value_heads") or num_heads,
        "head_size": head_size or _divided_head_size(hidden_size, num_heads),
        "intermediate_size": fields.integer("intermediate_size"),
        "max_position_embeddings": max_position_embeddings,
        "activation": fields.choice("hidden_act", "silu", ACTIVATIONS),
        "norm_eps": fields.number("rms_norm_eps", 1e-6),
        "rope": _rope(fields, max_position_embeddings),
        "tie_word_embeddings": fields.flag("tie_word_embeddings", False),
        **_all_biases(False),
        "pre_norm": True,
        "final_norm": True,
        "norm_affine": True,
    }


def _llama(fields: Fields) -> dict[str, Any]:
    attention_bias = fields.flag("attention_bias", False)
    common = _rotary(fields, "llama")
    if fields.get("sliding_window") is not None:
        raise refuse("sliding_window", fields.get("sliding_window"), "null, for llama")
    return common | {
        "qkv_bias": attention_bias,
        "output_bias": attention_bias,
        "mlp_bias": fields.flag("mlp_bias", False),
        "sliding_windows": _windows(fields, None, ["full_attention"] * common["num_layers"]),
        **_tokens_and_dtype(fields, bos=1, eos=2),
    }


def _mistral(fields: Fields) -> dict[str, Any]:
    fields.get("num_key_value_heads", REQUIRED)
    common = _rotary(fields, "mistral")
    window = fields.optional_integer("sliding_window", 4096)
    kind = "full_attention" if window is None else "sliding_attention"
    uniform = [kind] * common["num_layers"]
    if fields.get("layer_types") not in (None, uniform):
        raise refuse("layer_types", fields.get("layer_types"), f"{kind} in every layer, here")
    return common | {
        "sliding_windows": _windows(fields, window, uniform),
        **_tokens_and_dtype(fields, bos=1, eos=2),
    }


def _qwen2(fields: Fields) -> dict[str, Any]:
    common = _rotary(fields, "qwen2")
    return common | {"qkv_bias": True} | _qwen_common(fields, common["num_layers"])


def _qwen3(fields: Fields) -> dict[str, Any]:
    attention_bias = fields.flag("attention_bias", False)
    common = _rotary(fields, "qwen3", default_head_size=128)
    biases = {"qkv_bias": attention_bias, "output_bias": attention_bias}
    return common | biases | _qwen_common(fields, common["num_layers"])


def _qwen_common(fields: Fields, num_layers: int) -> dict[str, Any]:
    fields.get("num_key_value_heads", REQUIRED)
    window = None
    if fields.flag("use_sliding_window", False):
        window = fields.optional_integer("sliding_window", 4096)
    first = num_layers
    if window is not None:
        first = fields.get("max_window_layers", 28)
        if type(first) is not int or first < 0:
            raise refuse("max_window_layers", first, "an integer from 0")
    default = ["full_attention" if i < first else "sliding_attention" for i in range(num_layers)]
    return {
        "sliding_windows": _windows(fields, window, default),
        **_tokens_and_dtype(fields, bos=None, eos=None),
    }


def _windows(fields: Fields, window: int | None, default: list[str]) -> tuple[int | None, ...]:
    """One window a layer, from `layer_types` where the config has it."""
    kinds = fields.get("layer_types")
    kinds = default if kinds is None else kinds
    supported = ("full_attention",) if window is None else ("full_attention", "sliding_attention")
    is_list = isinstance(kinds, list | tuple) and len(kinds) == len(default)
    if not is_list or not all(kind in supported for kind in kinds):
        wanted = f"{len(default)} layers of {' or '.join(supported)}"
        raise refuse("layer_types", kinds, f"{wanted} (with sliding_window={window})")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _rope(fields: Fields, max_position_embeddings: int) -> RopeConfig:
    """`rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    values = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    if not isinstance(values, Mapping):
        raise refuse("rope_parameters", values, "an object, null")
    for name in values.keys() - _ROPE_KEYS:
        if values[name] is not None:
            raise refuse(f"rope_parameters.{name}", values[name], ", ".join(sorted(_ROPE_KEYS)))
    rope_type = values.get("rope_type", values.get("type", "default"))
    if rope_type not in tuple(_ROPE_NEEDS):
        raise refuse("rope_type", rope_type, ", ".join(_ROPE_NEEDS))
    if values.get("partial_rotary_factor") not in (None, 1.0):
        raise refuse("partial_rotary_factor", values["partial_rotary_factor"], 1.0)
    rope = Fields(values)
    original = fields.optional_integer("original_max_position_embeddings") or rope.integer(
        "original_max_position_embeddings", max_position_embeddings
    )
    return RopeConfig(
        theta=rope.number("rope_theta", fields.get("rope_theta", 10_000.0)),
        rope_type=cast(RopeType, rope_type),
        original_max_position_embeddings=original if rope_type == "llama3" else 0,
        **{name: rope.number(name) for name in _ROPE_NEEDS[rope_type]},
    )


_READERS = {"gpt2": _gpt2, "opt": _opt, "llama": _llama, "mistral": _mistral}
_READERS |= {"qwen2": _qwen2, "qwen3": _qwen3}
SUPPORTED_MODEL_TYPES = tuple(_READERS)
