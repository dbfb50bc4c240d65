"""`ModelConfig`, and functions that read it from a `config.json`.

A family's `describe(fields)` reads fields through `ConfigFields` and returns a `ModelConfig`.
Errors name the field, its value and the supported values. Some fields change the computation of
some models. A family that does not read such a field accepts only values that leave the family's
computation unchanged.
"""

import math
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from reprlib import Repr
from typing import Any, Literal, cast

from jpaged.models.formats import (
    BatchInvariantFormat,
    Projection,
    UnquantizedFormat,
    WeightFormat,
)

RopeType = Literal["default", "linear", "llama3", "yarn"]
QKNorm = Literal["head", "projection"]
NormType = Literal["rms", "offset_rms", "layer", "bare_layer"]
NormPosition = Literal["before", "after", "sum"]

FP8_DTYPE = "float8_e4m3fn"
"""Dtype of an FP8 KV pool."""

MAX_TENSOR_PARALLEL_SIZE = 8
"""Maximum number of tensor-parallel devices."""


@dataclass(frozen=True)
class RopeConfig:
    """Settings of a rotary position embedding: its base and its scaling.

    All rope types but "default" use `factor`. "llama3" and "yarn" use
    `original_max_position_embeddings`. Only "llama3" uses `low_freq_factor` and `high_freq_factor`.
    Only "yarn" uses the other fields.

    Attributes:
        beta_fast: A channel pair keeps its frequency if it makes at least `beta_fast` rotations
            within the original context length.
        beta_slow: The frequency of a channel pair is divided by `factor` if the pair makes at most
            `beta_slow` rotations. Frequencies between the two limits are interpolated.
        truncate: Whether the range of interpolated frequencies ends at whole channel pairs.
        attention_factor: Factor that multiplies cosine and sine, and thereby rotated queries and
            keys.
    """

    theta: float
    rope_type: RopeType = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0


@dataclass(frozen=True)
class ExpertsConfig:
    """Settings of the experts of a sparse feed-forward.

    Attributes:
        num_experts: Number of experts of the layer, on all devices.
        num_experts_per_token: Number of experts that the router chooses for each token.
        intermediate_size: Width of one expert. On tensor-parallel devices that split the width, it
            is the width of the device's shard.
        normalize: Whether the routing weights of a token are divided by their sum.
        num_local_experts: Number of experts on the device. It is below `num_experts` if each device
            holds only some of the experts.
        count_field, width_field: Names in config.json of `num_experts` and `intermediate_size`.
    """

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int
    normalize: bool
    num_local_experts: int = 0
    count_field: str = field(default="num_experts", compare=False)
    width_field: str = field(default="moe_intermediate_size", compare=False)

    def __post_init__(self):
        object.__setattr__(self, "num_local_experts", self.num_local_experts or self.num_experts)

    def shard(self, count: int, by_expert: bool) -> "ExpertsConfig":
        """Return the settings of the experts that one of `count` devices holds.

        Args:
            count: Number of devices.
            by_expert: Whether each device holds some whole experts. Otherwise each device holds all
                experts, and the devices split the width of each.
        """
        if by_expert:
            return replace(self, num_local_experts=self.num_experts // count)
        return replace(self, intermediate_size=self.intermediate_size // count)


@dataclass(frozen=True)
class LayerConfig:
    """Settings of one layer: its attention, and whether its feed-forward is dense or sparse.

    Attributes:
        scale: Factor of the dot products of queries and keys.
        rope: Rotary embedding; None for models with learned positions.
        sliding_window: Number of keys that a query sees, including the query's own position. None:
            the query sees all earlier keys.
        soft_cap: Cap that turns scores into `soft_cap * tanh(scores / soft_cap)`; None for no cap.
        qk_norm: RMSNorm of queries and keys before the rotation: "head" normalizes each head, and
            "projection" all heads of a token together; None for no norm.
        experts: Experts of the sparse feed-forward; None for a dense feed-forward.
    """

    scale: float
    rope: RopeConfig | None = None
    sliding_window: int | None = None
    soft_cap: float | None = None
    qk_norm: QKNorm | None = None
    experts: ExpertsConfig | None = None


@dataclass(frozen=True)
class QuantizationConfig:
    """Quantization of a model's projections and KV cache.

    Attributes:
        format: Format of the quantized projections; `UnquantizedFormat` if only the KV cache has
            scales.
        unquantized_paths: Paths of the projections that are not quantized.
        has_kv_scales: Whether the checkpoint has the scales of an FP8 KV cache.
        has_float_tensors: Whether `update_weights` got unquantized tensors, which are then
            quantized to `format`. Always False when an engine starts, because the loader of
            checkpoint files cannot compute block scales.
    """

    format: type[WeightFormat]
    unquantized_paths: tuple[str, ...] = ()
    has_kv_scales: bool = False
    has_float_tensors: bool = False


@dataclass(frozen=True)
class ModelConfig:
    """Description of a model: everything that determines its computation, and its special tokens.

    Attributes:
        model_type: Hugging Face's name of the family.
        head_size: Width of one head; `num_heads * head_size` may differ from `hidden_size`.
        activation: Hugging Face's name of the feed-forward activation.
        layers: Settings of each layer.
        is_gated: Whether the feed-forward is `down(activation(gate(x)) * up(x))` rather than
            `down(activation(up(x)))`.
        norm_type: "rms" for RMSNorm; "offset_rms" for RMSNorm whose checkpoints store the weight
            minus 1 (the parameter is the weight, in float32); "layer" for LayerNorm; "bare_layer"
            for LayerNorm without weight and bias.
        norm_eps: Epsilon of every norm.
        norm_positions: Positions of the norms relative to attention and feed-forward: "before"
            normalizes the input, "after" the output before the residual sum, and "sum" the result
            of the residual sum.
        has_final_norm: Whether a norm follows the last layer.
        embedding_size: Width of the token embedding; 0 stands for `hidden_size`. If the two widths
            differ, the model has projections between them.
        embedding_scale: Factor of token embeddings, rounded to their dtype; None for no factor.
        position_offset: Row of position 0 in the table of learned positions; None without a table.
        final_soft_cap: Cap that turns logits into `final_soft_cap * tanh(logits / final_soft_cap)`;
            None for no cap.
        tie_word_embeddings: Whether the output head is the token embedding.
        qkv_bias, output_bias, mlp_bias: Whether these projections have biases.
        eos_token_ids: Tokens that end a text; empty if the config has no such token.
        checkpoint_dtype: Dtype of the weights according to the config, such as "bfloat16"; None if
            the config has no dtype.
        quantization: Quantization of the projections and the KV cache; None for no quantization.
        kv_cache_dtype: Dtype of the KV pool; None for the dtype of the weights. Set by an engine
            option, not by config.json.
        enable_expert_parallel: Whether each tensor-parallel device holds some whole experts,
            instead of a shard of every expert. Set by an engine option, not by config.json.
        batch_invariant: Whether a token's bits must not depend on the other tokens of a step. Set
            by an engine option.
        tensor_parallel_size: Number of tensor-parallel devices. If larger than 1, the numbers of
            heads, `intermediate_size` and the experts describe the shard of one device.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    intermediate_size: int
    max_position_embeddings: int
    activation: str
    layers: tuple[LayerConfig, ...]
    is_gated: bool
    norm_type: NormType
    norm_eps: float
    tie_word_embeddings: bool
    norm_positions: tuple[NormPosition, ...] = ("before",)
    has_final_norm: bool = True
    embedding_size: int = 0
    embedding_scale: float | None = None
    position_offset: int | None = None
    final_soft_cap: float | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    checkpoint_dtype: str | None = None
    quantization: QuantizationConfig | None = None
    kv_cache_dtype: str | None = None
    enable_expert_parallel: bool = False
    batch_invariant: bool = False
    tensor_parallel_size: int = 1

    def __post_init__(self):
        object.__setattr__(self, "embedding_size", self.embedding_size or self.hidden_size)

    def shard(self, count: int) -> "ModelConfig":
        """Return the config of the shard that each of `count` tensor-parallel devices computes.

        If the devices outnumber the KV heads, several devices hold the same KV head.

        Raises:
            ValueError: `count` devices cannot split the model, or this config is a shard already.
        """
        if self.tensor_parallel_size > 1:
            raise ValueError(
                f"tensor_parallel_size is {self.tensor_parallel_size}: call this "
                "method on the configuration of the whole model, not of a shard"
            )
        if count == 1:
            return self
        if wrong := self._indivisible_size(count):
            sizes = range(1, MAX_TENSOR_PARALLEL_SIZE + 1)
            fitting = [n for n in sizes if not self._indivisible_size(n)]
            by_expert = replace(self, enable_expert_parallel=True)
            remedy = (
                ", or set enable_expert_parallel" if not by_expert._indivisible_size(count) else ""
            )
            raise ValueError(
                f"tensor_parallel_size={count} cannot split the model's {wrong}; "
                f"use {' or '.join(map(str, fitting))}{remedy}"
            )
        return replace(
            self,
            num_heads=self.num_heads // count,
            num_kv_heads=max(self.num_kv_heads // count, 1),
            intermediate_size=self.intermediate_size // count,
            layers=tuple(self._shard_layer(layer, count) for layer in self.layers),
            tensor_parallel_size=count,
        )

    def _shard_layer(self, layer: LayerConfig, count: int) -> LayerConfig:
        if layer.experts is None:
            return layer
        return replace(layer, experts=layer.experts.shard(count, self.enable_expert_parallel))

    def _indivisible_size(self, count: int) -> str | None:
        """Return the first size of the model that `count` devices cannot split, or None."""
        if count == 1:  # one device holds the whole model, so every size is allowed
            return None
        kv_heads = self.num_kv_heads
        if self.num_heads % count:
            return f"num_attention_heads={self.num_heads}"
        if kv_heads % count and count % kv_heads:
            return f"num_key_value_heads={kv_heads}"
        has_dense_layer = any(layer.experts is None for layer in self.layers)
        if has_dense_layer and self.intermediate_size % count:
            return f"intermediate_size={self.intermediate_size}"
        experts = self.experts
        if experts is not None and self.enable_expert_parallel:
            if experts.num_experts % count:
                return f"{experts.count_field}={experts.num_experts}"
        elif experts is not None:
            width = f"{experts.width_field}={experts.intermediate_size} of an expert"
            if experts.intermediate_size % count:
                return width
            if experts.intermediate_size // count % (rows := self._expert_rows_per_scale()):
                return f"{width}, whose weights have one scale per {rows} rows"
        rows_per_scale = (
            1 if self.quantization is None else self.quantization.format.outputs_per_scale
        )
        shard_kv_heads = max(kv_heads // count, 1)
        sizes = [
            ("num_attention_heads", self.num_heads, self.num_heads // count * self.head_size),
            ("num_key_value_heads", kv_heads, shard_kv_heads * self.head_size),
        ]
        if has_dense_layer:
            inner = self.intermediate_size
            sizes.append(("intermediate_size", inner, inner // count))
        for name, total, shard_rows in sizes:
            if shard_rows % rows_per_scale:
                return f"{name}={total}, whose weights have one scale per {rows_per_scale} rows"
        return None

    def _expert_rows_per_scale(self) -> int:
        """Return how many consecutive outputs of an expert share one scale."""
        layers = enumerate(self.layers)
        paths = [expert_path(index) for index, layer in layers if layer.experts is not None]
        return max(self.weight_format(path).outputs_per_scale for path in paths)

    @property
    def num_embedding_rows(self) -> int:
        """Number of token-embedding rows on each device. If `vocab_size` is not divisible by the
        number of devices, each device holds all rows."""
        shared = not self.vocab_size % self.tensor_parallel_size
        return self.vocab_size // self.tensor_parallel_size if shared else self.vocab_size

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.layers)

    @property
    def experts(self) -> ExpertsConfig | None:
        """Settings of the experts, which all sparse layers share; None if all layers are dense."""
        return next((layer.experts for layer in self.layers if layer.experts is not None), None)

    def projection(self, path: str) -> Projection | None:
        """Return the projection at `path`, such as `layers.3.mlp.down`, with its weight format.

        Return None if the model has no projection at `path`.
        """
        is_in_layer = path.startswith("layers.")
        index, _, in_layer = path.removeprefix("layers.").partition(".")
        found = self.projections.get(in_layer if is_in_layer else path)
        if is_in_layer and in_layer.startswith("mlp.") and self.layers[int(index)].experts:
            return None
        if found is None:
            return None
        options = {"has_float_tensors": self.has_float_tensors}
        return replace(found, format=self.weight_format(path), **options)

    @property
    def has_float_tensors(self) -> bool:
        """See `QuantizationConfig.has_float_tensors`."""
        return self.quantization is not None and self.quantization.has_float_tensors

    def weight_format(self, path: str) -> type[WeightFormat]:
        """Return the weight format of the projection or of the experts at `path`.

        `expert_path` returns the path of a layer's experts.
        """
        if self.batch_invariant:
            return BatchInvariantFormat
        quantization = self.quantization
        if quantization is None or path in quantization.unquantized_paths:
            return UnquantizedFormat
        return quantization.format

    @property
    def projections(self) -> dict[str, Projection]:
        """Projections by path, without their weight formats.

        A path within a layer, such as `mlp.down`, has no layer number. `project_in` and
        `project_out` exist only if `embedding_size` differs from `hidden_size`. Paths that begin
        with `mlp.` exist only in layers with a dense feed-forward.
        """
        width, inner, head = self.hidden_size, self.intermediate_size, self.head_size
        is_shared = self.tensor_parallel_size > 1
        heads = (("q", self.num_heads), ("k", self.num_kv_heads), ("v", self.num_kv_heads))
        projections = {
            "attention.qkv": Projection((width,), heads, (head,), self.qkv_bias),
            "attention.output": Projection(
                (self.num_heads, head), (("output", width),), (), self.output_bias, is_shared
            ),
            "mlp.down": Projection((inner,), (("down", width),), (), self.mlp_bias, is_shared),
        }
        if self.is_gated:
            gate_and_up = (("gate", 1), ("up", 1))
            projections["mlp.gate_up"] = Projection((width,), gate_and_up, (inner,), self.mlp_bias)
        else:
            projections["mlp.up"] = Projection((width,), (("up", inner),), (), self.mlp_bias)
        if (outer := self.embedding_size) != width:
            projections["project_in"] = Projection((outer,), (("output", width),))
            projections["project_out"] = Projection((width,), (("output", outer),))
        return projections

    @property
    def size_summary(self) -> str:
        """Text for an error that lists the model's sizes, with the field names of config.json."""
        sizes = {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_size,
            "intermediate_size": self.intermediate_size,
            "max_position_embeddings": self.max_position_embeddings,
        }
        if self.experts is not None:
            sizes |= {
                self.experts.count_field: self.experts.num_experts,
                self.experts.width_field: self.experts.intermediate_size,
            }
        return "config.json says " + ", ".join(f"{name}={value}" for name, value in sizes.items())


def expert_path(index: int) -> str:
    """Return the path of the experts of layer `index`. `ModelConfig.weight_format` takes this
    path."""
    return f"layers.{index}.mlp.experts"


# ------------------------------------------------------------------------------------- fields

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

# Config fields, each with the values that do not change the computation. Another value is an error
# if the model family does not read the field.
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

    Vicuna's configs store the number before linear scaling in `max_position_embeddings`, and the
    scaled number in `max_sequence_length`. For YaRN, the result is at least the original number of
    positions times the factor.
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
