"""Functions that read a `ModelConfig` from a `config.json`.

A family's `describe(fields)` reads fields through `ConfigFields` and returns a `ModelConfig`.
Errors name the field, its value and the supported values. Some fields change the computation of
some models. A family that does not read such a field accepts only values that leave the family's
computation unchanged.
"""

import math
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from reprlib import Repr
from typing import Any, cast

from jpaged.models.config import ExpertsConfig, LayerConfig, RopeConfig, RopeType

REQUIRED = object()
ACTIVATIONS = ("relu", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "silu", "swish")
CHECKPOINT_DTYPES = ("float32", "bfloat16", "float16")

# Maximum values of config fields, far above the values of real models. Without maxima, a wrong
# config could exhaust the memory before it is compared with the checkpoint.
_MAX_FIELD_VALUES = {
    **dict.fromkeys(("num_hidden_layers", "n_layer"), 1024),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_key_value_heads", "head_dim"), 2**14),
    **dict.fromkeys(("hidden_size", "n_embd", "word_embed_proj_dim"), 2**20),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "moe_intermediate_size"), 2**22),
    **dict.fromkeys(("num_experts", "num_local_experts", "num_experts_per_tok"), 2**14),
    "vocab_size": 2**24,
}
# Maximum value of each config field that `_MAX_FIELD_VALUES` does not list. The maximum is below
# 2**31, because positions and token ids are 32-bit integers.
_DEFAULT_MAX_VALUE = 2**30

# Maps config fields to their neutral values: values with which the model computes as if the field
# were missing. If a model family does not read the field, any other value of it is an error.
_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
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
    "n_shared_experts": (None, 0),
    "shared_expert_intermediate_size": (None, 0),
    "routed_scaling_factor": (None, 1.0),
}
_value_repr = Repr()
_value_repr.maxlong = _value_repr.maxstring = _value_repr.maxother = 100


def field_error(field: str, value: object, supported: object) -> ValueError:
    """Return the error for a config field whose value is not supported."""
    shown = _value_repr.repr(value)  # shorten the value, which may be long or deeply nested
    return ValueError(f"model config: {field}={shown} is not supported; supported: {supported}")


def head_size_error(value: int, supported: str) -> ValueError:
    """Return the error for an unsupported `head_dim`, which may be derived from other fields."""
    derived = "if head_dim is missing, it is hidden_size / num_attention_heads"
    return field_error("head_dim", value, f"{supported} ({derived})")


@dataclass
class ConfigFields:
    """Typed access to the fields of a config; every error names the field and its value.

    Attributes:
        values: Content of config.json, or of an object in it.
        defaults: Default values of missing fields. They take precedence over the `default` argument
            of a method.
        prefix: Text that errors put before a field's name, such as "quantization_config." for a
            field of the object `quantization_config`.
    """

    values: Mapping[str, Any]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    prefix: str = ""
    _read_names: set[str] = field(default_factory=set)

    def get(self, name: str, default: Any = None, *, alias: str = "") -> Any:
        """Return the value of the field `name`; None if the field is null.

        If the field is missing, return the value of the field `alias`. If that field is missing
        too, return `default`, or raise ValueError if `default` is REQUIRED.
        """
        self._read_names.add(name)
        for values in (self.values, self.defaults):
            for key in (name, alias):
                if key in values:
                    return values[key]
        if default is REQUIRED:
            name = self.prefix + name
            raise ValueError(f"model config: {name} is missing; add it to config.json")
        return default

    def integer(self, name: str, default: Any = REQUIRED, *, alias: str = "") -> int:
        """Return an integer field. Raise ValueError unless it is from 1 to the field's maximum."""
        value, max_value = (
            self.get(name, default, alias=alias),
            _MAX_FIELD_VALUES.get(name, _DEFAULT_MAX_VALUE),
        )
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= max_value:
            raise field_error(self.prefix + name, value, f"integers from 1 to {max_value}")
        return value

    def optional_integer(self, name: str, default: int | None = None) -> int | None:
        """Return an integer field as `integer` does, or None if the field is null."""
        return None if self.get(name, default) is None else self.integer(name, default)

    def number(self, name: str, default: Any = REQUIRED) -> float:
        """Return a number field as a float. Raise ValueError unless it is finite and above 0."""
        value = self.get(name, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value <= sys.float_info.max:
            raise field_error(self.prefix + name, value, "finite numbers above 0")
        return float(value)

    def optional_number(self, name: str) -> float | None:
        """Return a number field as `number` does, or None if the field is missing or null."""
        return None if self.get(name) is None else self.number(name)

    def flag(self, name: str, default: bool) -> bool:
        """Return a boolean field; null means the default."""
        value = self.get(name, default)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise field_error(self.prefix + name, value, "true, false")
        return value

    def choice(self, name: str, default: Any, choices: Sequence[Any]) -> Any:
        """Return a field whose value must be one of `choices`."""
        value = self.get(name, default)
        if value not in choices:
            supported = ", ".join("null" if it is None else str(it) for it in choices)
            raise field_error(self.prefix + name, value, supported)
        return value

    def mapping(self, name: str, *, required: bool = False) -> Mapping[str, Any]:
        """Return the fields of a nested object. If the object is missing and `required` is false,
        return no fields."""
        value = self.get(name, REQUIRED) if required else self.get(name) or {}
        if not isinstance(value, Mapping):
            raise field_error(self.prefix + name, value, "an object")
        return value

    def ignore(self, names: Collection[str]) -> None:
        """Make `refuse_unread` and `refuse_unsupported_fields` accept the fields `names`."""
        self._read_names.update(names)

    def refuse_unread(self) -> None:
        """Raise ValueError if any non-null field of `values` has not been read."""
        for key in self.values.keys() - self._read_names:
            if self.values[key] is not None:
                supported = ", ".join(sorted(self._read_names))
                raise field_error(self.prefix + key, self.values[key], supported)

    def optional_nested(self, name: str) -> "ConfigFields | None":
        """Return the fields of the object called `name`; None if it is missing or null."""
        return None if self.get(name) is None else self.nested(name)

    def nested(self, name: str) -> "ConfigFields":
        """Return the fields of the object called `name`, which is required."""
        value, name = self.get(name, REQUIRED), self.prefix + name
        if not isinstance(value, Mapping):
            raise field_error(name, value, "an object")
        return ConfigFields(value, prefix=name + ".")

    def refuse_unsupported_fields(self) -> None:
        """Raise ValueError if a field that was not read would change the computation."""
        for name, neutral in _NEUTRAL_VALUES.items():
            if name not in self._read_names and (value := self.values.get(name)) not in neutral:
                raise field_error(self.prefix + name, value, " or ".join(map(repr, neutral)))


# --------------------------------------------------------------------- readers of several families


def read_tokens_and_dtype(
    fields: ConfigFields, *, bos: int | None, eos: int | None
) -> dict[str, Any]:
    """Return the special tokens and the checkpoint's dtype, as arguments of `ModelConfig`.

    Args:
        fields: Fields of the config.
        bos: Default of `bos_token_id`.
        eos: Default of `eos_token_id`.
    """
    bos_id, eos_ids = fields.get("bos_token_id", bos), fields.get("eos_token_id", eos)
    if bos_id is not None and not isinstance(bos_id, int):
        raise field_error("bos_token_id", bos_id, "an integer, or null")
    ids = eos_ids if isinstance(eos_ids, list | tuple) else [] if eos_ids is None else [eos_ids]
    if not all(isinstance(token, int) for token in ids):
        raise field_error("eos_token_id", eos_ids, "an integer, a list of integers, or null")
    dtype = fields.get("dtype", alias="torch_dtype")
    dtype = None if dtype is None else str(dtype).removeprefix("torch.")
    if dtype not in (None, *CHECKPOINT_DTYPES):
        raise field_error("dtype", dtype, ", ".join(CHECKPOINT_DTYPES))
    return {"bos_token_id": bos_id, "eos_token_ids": tuple(ids), "checkpoint_dtype": dtype}


def derive_head_size(hidden_size: int, num_heads: int) -> int:
    """Return hidden_size / num_heads, the head size if the config has no field for it."""
    if hidden_size % num_heads:
        raise field_error(
            "num_attention_heads", num_heads, f"divisors of hidden_size={hidden_size}"
        )
    return hidden_size // num_heads


def learned_position_config(hidden_size: int, num_heads: int, num_layers: int) -> dict[str, Any]:
    """Return the `ModelConfig` arguments that GPT-2 and OPT share.

    Positions are learned, so attention has no rotary embedding. The feed-forward has no gate.
    """
    head_size = derive_head_size(hidden_size, num_heads)
    return {
        "hidden_size": hidden_size,
        "num_heads": num_heads,
        "num_kv_heads": num_heads,
        "head_size": head_size,
        "layers": (LayerConfig(head_size**-0.5),) * num_layers,
        "is_gated": False,
    }


def read_rotary_config(
    fields: ConfigFields, model_type: str, default_head_size: int | None = None
) -> dict[str, Any]:
    """Return the `ModelConfig` arguments that models with rotary embedding share.

    Args:
        fields: Fields of the config.
        model_type: Hugging Face's name of the family.
        default_head_size: Default of `head_dim`; None for hidden_size / num_attention_heads.
    """
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    num_kv_heads = fields.optional_integer("num_key_value_heads") or num_heads
    head_size = fields.optional_integer("head_dim", default_head_size)
    head_size = head_size or derive_head_size(hidden_size, num_heads)
    if num_heads % num_kv_heads:
        wanted = f"divisors of num_attention_heads={num_heads}"
        raise field_error("num_key_value_heads", num_kv_heads, wanted)
    if head_size % 2:
        raise head_size_error(head_size, "even sizes, because RoPE rotates pairs of numbers")
    return {
        "model_type": model_type,
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": hidden_size,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_size": head_size,
        "intermediate_size": fields.integer("intermediate_size"),
        "max_position_embeddings": _num_positions(fields),
        "activation": fields.choice("hidden_act", "silu", ACTIVATIONS),
        "is_gated": True,
        "norm_type": "rms",
        "norm_eps": fields.number("rms_norm_eps", 1e-6),
        "tie_word_embeddings": fields.flag("tie_word_embeddings", False),
    }


def _num_positions(fields: ConfigFields) -> int:
    """Return the number of positions that the model supports.

    In Vicuna's configs, `max_position_embeddings` is the number before linear scaling, and
    `max_sequence_length` is the number after it. For YaRN, the result is at least the original
    number of positions times the factor.
    """
    num_positions = fields.integer("max_position_embeddings")
    name = _rope_field_name(fields)
    rope = fields.mapping(name)
    rope_type = rope.get("rope_type", rope.get("type"))
    if rope_type == "yarn":
        config = read_rope(rope, fields, name=name)
        scaled = min(config.original_max_position_embeddings * config.factor, _DEFAULT_MAX_VALUE)
        return max(num_positions, math.floor(scaled))
    if rope_type != "linear":
        return num_positions
    return max(num_positions, fields.optional_integer("max_sequence_length") or 0)


def _rope_field_name(fields: ConfigFields) -> str:
    """Return the name of the config field that holds the rotary embedding's settings."""
    names = "rope_scaling", "rope_parameters"
    return next((name for name in names if fields.get(name)), names[1])


def make_rotary_layers(
    fields: ConfigFields,
    common: Mapping[str, Any],
    windows: Sequence[int | None],
    *,
    theta: float = 10_000.0,
    experts: Sequence[ExpertsConfig | None] = (),
    **changes: Any,
) -> tuple[LayerConfig, ...]:
    """Return the `LayerConfig` of each layer, for models in which all layers share one rotary
    embedding.

    Args:
        fields: Fields of the config.
        common: Result of `read_rotary_config`.
        windows: Sliding window of each layer; None for full attention.
        theta: Default of `rope_theta`.
        experts: Experts of each layer; empty if all layers are dense.
        changes: Other fields of every `LayerConfig`.
    """
    name = _rope_field_name(fields)
    rope = read_rope(fields.mapping(name), fields, theta=theta, name=name)
    scale = common["head_size"] ** -0.5
    return tuple(
        LayerConfig(scale, rope, window, experts=layer_experts, **changes)
        for window, layer_experts in zip(windows, experts or [None] * len(windows), strict=True)
    )


def read_experts(
    fields: ConfigFields,
    common: Mapping[str, Any],
    *,
    width_field: str,
    normalize: bool,
    count_field: str = "num_experts",
) -> ExpertsConfig:
    """Read the experts of a sparse feed-forward.

    Args:
        fields: Fields of the config.
        common: Result of `read_rotary_config`.
        width_field: Name of the config field that holds the width of one expert.
        normalize: See `ExpertsConfig`.
        count_field: Name of the config field that holds the number of experts.
    """
    # transformers 5 saves the number of experts as num_local_experts.
    name = count_field if count_field in fields.values else "num_local_experts"
    name = name if name in fields.values else count_field
    fields.ignore(("num_experts", "num_local_experts"))
    num_experts = fields.integer(name)
    for other in ("num_experts", "num_local_experts"):
        if fields.values.get(other, num_experts) != num_experts:
            raise field_error(other, fields.values[other], f"{name}={num_experts}")
    num_choices = fields.integer("num_experts_per_tok")
    if num_choices > num_experts:
        raise field_error(
            "num_experts_per_tok", num_choices, f"integers from 1 to {name}={num_experts}"
        )
    if common["activation"] not in ("silu", "swish"):
        raise field_error("hidden_act", common["activation"], "silu for models with experts")
    return ExpertsConfig(
        num_experts,
        num_choices,
        fields.integer(width_field),
        normalize,
        count_field=name,
        width_field=width_field,
    )


def read_sliding_windows(
    fields: ConfigFields, window: int | None, default: Sequence[str], *, is_fixed: bool = False
) -> tuple[int | None, ...]:
    """Return the sliding window of each layer; None for layers with full attention.

    Args:
        fields: Fields of the config.
        window: Size of the sliding window; None if the model has no sliding window.
        default: Layer types of a config without `layer_types`.
        is_fixed: Whether transformers ignores the field `layer_types`. If so, a value other than
            `default` raises an error.
    """
    layer_types = fields.get("layer_types")
    layer_types = default if layer_types is None else layer_types
    supported = ("full_attention",) if window is None else ("full_attention", "sliding_attention")
    is_list = isinstance(layer_types, list | tuple) and len(layer_types) == len(default)
    if is_fixed and is_list and [*layer_types] != [*default]:
        wanted = f"{default[0]} in every layer (with sliding_window={window})"
        raise field_error("layer_types", layer_types, wanted)
    if not is_list or not all(kind in supported for kind in layer_types):
        wanted = f"{len(default)} layers of {' or '.join(supported)}"
        raise field_error("layer_types", layer_types, f"{wanted} (with sliding_window={window})")
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


_REQUIRED_ROPE_FIELDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
}
_ROPE_FIELDS = {
    "rope_theta", "rope_type", "type", "factor", "low_freq_factor", "high_freq_factor",
    "original_max_position_embeddings", "partial_rotary_factor",
}  # fmt: skip
_MIN_BETA, _MAX_BETA = 1e-3, 1e6  # limits of beta_slow and beta_fast
_YARN_FIELDS = {
    "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate",
}  # fmt: skip


def read_rope(
    values: Mapping[str, Any],
    fields: ConfigFields,
    theta_name: str = "rope_theta",
    theta: float = 10_000.0,
    name: str = "rope_parameters",
) -> RopeConfig:
    """Read the settings of a rotary embedding.

    Args:
        values: Content of `rope_parameters` (transformers 5) or `rope_scaling` (transformers 4).
        fields: Fields of the config.
        theta_name: Name of the config field that holds theta if `values` has no `rope_theta`.
        theta: Default of theta.
        name: Name of the config field that holds `values`, for errors.
    """
    rope = ConfigFields(values, prefix=f"{fields.prefix}{name}.")
    kind = "rope_type" if "rope_type" in values else "type"
    rope_type = values.get(kind, "default")
    if rope_type not in tuple(_REQUIRED_ROPE_FIELDS):
        raise field_error(rope.prefix + kind, rope_type, ", ".join(_REQUIRED_ROPE_FIELDS))
    supported = _ROPE_FIELDS | (_YARN_FIELDS if rope_type == "yarn" else set())
    for key in values.keys() - supported:
        if values[key] is not None:
            raise field_error(rope.prefix + key, values[key], ", ".join(sorted(supported)))
    if values.get("partial_rotary_factor") not in (None, 1.0):
        given = values["partial_rotary_factor"]
        raise field_error(f"{rope.prefix}partial_rotary_factor", given, 1.0)
    original, max_positions = 0, fields.integer("max_position_embeddings")
    if rope_type in ("llama3", "yarn"):
        outer_value = fields.optional_integer("original_max_position_embeddings")
        original = outer_value or rope.integer("original_max_position_embeddings", max_positions)
    has_theta = "rope_theta" in values
    theta = rope.number("rope_theta") if has_theta else fields.number(theta_name, theta)
    if rope_type == "yarn" and theta <= 1:
        raise field_error("rope_theta", theta, "numbers above 1 for the rope type yarn")
    return RopeConfig(
        theta=theta,
        rope_type=cast(RopeType, rope_type),
        original_max_position_embeddings=original,
        **{name: rope.number(name) for name in _REQUIRED_ROPE_FIELDS[rope_type]},
        **(_read_yarn(rope, max_positions / original) if rope_type == "yarn" else {}),
    )


def _read_yarn(rope: ConfigFields, default_factor: float) -> dict[str, Any]:
    """Read the `RopeConfig` fields that only YaRN uses (Peng et al. 2023, arXiv:2309.00071).

    Args:
        rope: Fields of the rotary embedding.
        default_factor: Value to use if `factor` is null.
    """
    is_given = rope.get("factor", REQUIRED) is not None
    factor = rope.number("factor") if is_given else default_factor
    if factor < 1:
        raise field_error(
            f"{rope.prefix}factor", factor, "numbers of at least 1 for the rope type yarn"
        )
    beta_fast = rope.optional_number("beta_fast") or 32.0
    beta_slow = rope.optional_number("beta_slow") or 1.0
    if not _MIN_BETA <= beta_slow <= _MAX_BETA:
        wanted = f"numbers from {_MIN_BETA} to {_MAX_BETA}"
        raise field_error(f"{rope.prefix}beta_slow", beta_slow, wanted)
    if not beta_slow <= beta_fast <= _MAX_BETA:
        wanted = f"numbers from beta_slow={beta_slow} to {_MAX_BETA}"
        raise field_error(f"{rope.prefix}beta_fast", beta_fast, wanted)
    attention_factor = rope.optional_number("attention_factor")
    if attention_factor is None:
        numerator, denominator = 1.0, 0.0
        if rope.get("mscale") and rope.get("mscale_all_dim"):
            numerator, denominator = rope.number("mscale"), rope.number("mscale_all_dim")
        growth = 0.1 * math.log(factor)
        attention_factor = (growth * numerator + 1.0) / (growth * denominator + 1.0)
    return {
        "factor": factor,
        "beta_fast": beta_fast,
        "beta_slow": beta_slow,
        "truncate": rope.flag("truncate", True),
        "attention_factor": attention_factor,
    }
