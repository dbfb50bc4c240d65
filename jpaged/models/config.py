"""What a model is: `ModelConfig`, and how its family reads it from the fields of a `config.json`.

A family's `describe(fields)` reads each field through `Fields`, whose errors name field, value and
what is supported, and returns a `ModelConfig`. Fields that change the computation of some model
and that the family does not read must have a value that leaves the computation as it is.
"""

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from reprlib import Repr
from typing import Any, Literal, cast

from jpaged.models.formats import Format, Projection

RopeType = Literal["default", "linear", "llama3"]
NormKind = Literal["rms", "offset_rms", "layer", "bare_layer"]
NormPlace = Literal["before", "after", "sum"]

FP8_DTYPE = "float8_e4m3fn"
"""Of a KV pool in FP8."""

MAX_SHARES = 8
"""Most devices that share a model."""


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: base and scaling.

    `factor` serves "linear" and "llama3"; the other three fields "llama3" alone.
    """

    theta: float
    rope_type: RopeType = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0


@dataclass(frozen=True)
class LayerConfig:
    """The attention of one layer.

    Attributes:
        scale: factor of the dot products of queries and keys.
        rope: rotary embedding; None for models with learned positions.
        sliding_window: keys that a query sees, itself included; None for all earlier ones.
        soft_cap: scores become `soft_cap * tanh(scores / soft_cap)`.
        qk_norm: an RMSNorm of each query and key head before it is rotated.
    """

    scale: float
    rope: RopeConfig | None = None
    sliding_window: int | None = None
    soft_cap: float | None = None
    qk_norm: bool = False


@dataclass(frozen=True)
class Quantization:
    """In which format a model's projections are kept.

    Attributes:
        format: `Plain` if only the KV cache has scales.
        plain: paths of the projections that are kept as they are.
        has_kv_scales: the checkpoint has scales for keys and values in FP8.
    """

    format: type[Format]
    plain: tuple[str, ...] = ()
    has_kv_scales: bool = False


@dataclass(frozen=True)
class ModelConfig:
    """Everything the computation of a model depends on, and its special tokens.

    Attributes:
        model_type: Hugging Face's name of the family.
        head_size: width of one head; `num_heads * head_size` need not be `hidden_size`.
        activation: Hugging Face's name of the feed-forward activation.
        layers: the attention of each layer.
        gated: the feed-forward is `down(activation(gate(x)) * up(x))`, else without the gate.
        norm: "rms"; "offset_rms", whose checkpoints hold its scale less 1, kept here as the scale
            in float32; "layer"; "bare_layer", without weight and bias.
        norm_eps: epsilon of every norm.
        norms: where the norms of a layer's attention and feed-forward are: "before" each, or on the
            residual "sum" that follows it; and "after" it, before that sum.
        final_norm: a norm follows the last layer.
        embedding_size: width of the token embedding; 0 for `hidden_size`. Where it differs, there
            are projections between the two.
        embedding_scale: factor of token embeddings, rounded to their dtype.
        position_offset: row of position 0 in the table of learned positions; None without one.
        final_soft_cap: logits become `final_soft_cap * tanh(logits / final_soft_cap)`.
        tie_word_embeddings: the output head is the token embedding.
        qkv_bias, output_bias, mlp_bias: which projections have biases.
        eos_token_ids: tokens that end a text; empty when the config names none.
        checkpoint_dtype: dtype the config declares for the weights ("bfloat16" ...), or None.
        quantization: in which format projections are; None: as all other weights.
        kv_cache_dtype: dtype of the KV pool, where it is not that of the weights; no field of a
            checkpoint's config.
        num_shares: devices that share the model; with several this is what one of them computes,
            with its own number of heads and its own part of the intermediate size.
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
    gated: bool
    norm: NormKind
    norm_eps: float
    tie_word_embeddings: bool
    norms: tuple[NormPlace, ...] = ("before",)
    final_norm: bool = True
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
    quantization: Quantization | None = None
    kv_cache_dtype: str | None = None
    num_shares: int = 1

    def __post_init__(self):
        object.__setattr__(self, "embedding_size", self.embedding_size or self.hidden_size)

    def share(self, count: int) -> "ModelConfig":
        """What each of `count` devices computes of the model (`jpaged.models.sharding`).

        Devices beyond the number of KV heads have a KV head together.

        Raises:
            ValueError: heads or widths cannot be shared by so many, or this is a share already.
        """
        if self.num_shares > 1:
            raise ValueError(f"num_shares={self.num_shares}: a share is not shared again")
        if count == 1:
            return self
        if wrong := self._not_shared(count):
            fitting = [n for n in range(1, MAX_SHARES + 1) if not self._not_shared(n)]
            raise ValueError(
                f"tensor_parallel_size={count} does not go with the model's {wrong}; "
                f"use {' or '.join(map(str, fitting))}"
            )
        return replace(
            self,
            num_heads=self.num_heads // count,
            num_kv_heads=max(self.num_kv_heads // count, 1),
            intermediate_size=self.intermediate_size // count,
            num_shares=count,
        )

    def _not_shared(self, count: int) -> str | None:
        """The first size that so many devices cannot share, if any."""
        if count == 1:  # whole, whatever its blocks of scales are
            return None
        kv_heads = self.num_kv_heads
        if self.num_heads % count:
            return f"num_attention_heads={self.num_heads}"
        if kv_heads % count and count % kv_heads:
            return f"num_key_value_heads={kv_heads}"
        if self.intermediate_size % count:
            return f"intermediate_size={self.intermediate_size}"
        group = 1 if self.quantization is None else self.quantization.format.scaled_rows
        own_kv_heads = max(kv_heads // count, 1)
        for name, whole, own in (
            ("num_attention_heads", self.num_heads, self.num_heads // count * self.head_size),
            ("num_key_value_heads", kv_heads, own_kv_heads * self.head_size),
            ("intermediate_size", self.intermediate_size, self.intermediate_size // count),
        ):
            if own % group:
                return f"{name}={whole}, whose weights have a scale for each {group} rows"
        return None

    @property
    def table_rows(self) -> int:
        """Rows of a token table that each device has: all of them where devices cannot share."""
        shared = not self.vocab_size % self.num_shares
        return self.vocab_size // self.num_shares if shared else self.vocab_size

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return len(self.layers)

    def projection(self, path: str) -> Projection | None:
        """The projection of that path, as `layers.3.mlp.down`, in the format that it has; None if
        there is none."""
        _, _, in_layer = path.removeprefix("layers.").partition(".")
        found = self.projections.get(in_layer if path.startswith("layers.") else path)
        kept = self.quantization
        if found is None or kept is None or path in kept.plain:
            return found
        return replace(found, format=kept.format)

    @property
    def projections(self) -> dict[str, Projection]:
        """The projections, their formats aside, by their paths: in each layer, and those between
        the widths of embedding and layers, where these differ."""
        width, inner, head = self.hidden_size, self.intermediate_size, self.head_size
        is_shared = self.num_shares > 1
        heads = (("q", self.num_heads), ("k", self.num_kv_heads), ("v", self.num_kv_heads))
        projections = {
            "attention.qkv": Projection((width,), heads, (head,), self.qkv_bias),
            "attention.output": Projection(
                (self.num_heads, head), (("output", width),), (), self.output_bias, is_shared
            ),
            "mlp.down": Projection((inner,), (("down", width),), (), self.mlp_bias, is_shared),
        }
        if self.gated:
            halves = (("gate", 1), ("up", 1))
            projections["mlp.gate_up"] = Projection((width,), halves, (inner,), self.mlp_bias)
        else:
            projections["mlp.up"] = Projection((width,), (("up", inner),), (), self.mlp_bias)
        if (outer := self.embedding_size) != width:
            projections["project_in"] = Projection((outer,), (("output", width),))
            projections["project_out"] = Projection((width,), (("output", outer),))
        return projections

    @property
    def sizes(self) -> str:
        """The fields that decide how large the parameters are, by their names in a config."""
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
        return ", ".join(f"{name}={value}" for name, value in sizes.items())


# ------------------------------------------------------------------------------------- fields

REQUIRED = object()
ACTIVATIONS = ("relu", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "silu", "swish")
CHECKPOINT_DTYPES = ("float32", "bfloat16", "float16")

# The largest that a field can be: several times what any model has, and little enough that what
# the field stands for takes little memory before it is compared with the checkpoint and the device.
_MOST = {
    **dict.fromkeys(("num_hidden_layers", "n_layer"), 1024),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_key_value_heads", "head_dim"), 2**14),
    **dict.fromkeys(("hidden_size", "n_embd", "word_embed_proj_dim"), 2**20),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner"), 2**22),
    "vocab_size": 2**24,
}
_MOST_OF_OTHERS = 2**30  # positions and tokens, which are counted in 32 bits

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
_shown = Repr()
_shown.maxlong = _shown.maxstring = _shown.maxother = 100


def refuse(field: str, value: object, supported: object) -> ValueError:
    """The error for a field whose value is not supported."""
    shown = _shown.repr(value)  # a file may hold anything, deep and long
    return ValueError(f"model config: {field}={shown} is not supported; supported: {supported}")


def refuse_head_size(value: int, supported: str) -> ValueError:
    """The same for a head size, which is a field of its own or follows from two others."""
    derived = "where it is missing it is hidden_size / num_attention_heads"
    return refuse("head_dim", value, f"{supported} ({derived})")


@dataclass
class Fields:
    """Typed access to a config; every error names field and value.

    Attributes:
        values: content of the file, or of an object in it.
        defaults: values of missing fields, before those that the methods are given.
        prefix: what stands before names in errors: "quantization_config." of an object under it.
    """

    values: Mapping[str, Any]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    prefix: str = ""
    _read: set[str] = field(default_factory=set)

    def get(self, name: str, default: Any = None, *, alias: str = "") -> Any:
        """The value under `name` or `alias`; the default if it is missing, None if it is null."""
        self._read.add(name)
        for values in (self.values, self.defaults):
            for key in (name, alias):
                if key in values:
                    return values[key]
        if default is REQUIRED:
            name = self.prefix + name
            raise ValueError(f"model config: {name} is missing; add it to config.json")
        return default

    def integer(self, name: str, default: Any = REQUIRED, *, alias: str = "") -> int:
        """An integer from 1 to the field's most."""
        value, most = self.get(name, default, alias=alias), _MOST.get(name, _MOST_OF_OTHERS)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise refuse(self.prefix + name, value, f"integers from 1 to {most}")
        return value

    def optional_integer(self, name: str, default: int | None = None) -> int | None:
        """An integer from 1, or None for null."""
        return None if self.get(name, default) is None else self.integer(name, default)

    def number(self, name: str, default: Any = REQUIRED) -> float:
        """A finite number above 0."""
        value = self.get(name, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value <= sys.float_info.max:
            raise refuse(self.prefix + name, value, "finite numbers above 0")
        return float(value)

    def optional_number(self, name: str) -> float | None:
        """A finite number above 0, or None for null."""
        return None if self.get(name) is None else self.number(name)

    def flag(self, name: str, default: bool) -> bool:
        """A boolean; null means the default."""
        value = self.get(name, default)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise refuse(self.prefix + name, value, "true, false")
        return value

    def choice(self, name: str, default: Any, choices: Sequence[Any]) -> Any:
        """One of `choices`."""
        value = self.get(name, default)
        if value not in choices:
            supported = ", ".join("null" if it is None else str(it) for it in choices)
            raise refuse(self.prefix + name, value, supported)
        return value

    def mapping(self, name: str, *, required: bool = False) -> Mapping[str, Any]:
        """An object; an empty one where it is missing or null, unless it is required."""
        value = self.get(name, REQUIRED) if required else self.get(name) or {}
        if not isinstance(value, Mapping):
            raise refuse(self.prefix + name, value, "an object")
        return value

    def ignore(self, names: Collection[str]) -> None:
        """Take fields as read that make no difference."""
        self._read.update(names)

    def refuse_unread(self) -> None:
        """Refuse what `values` has besides what was read."""
        for key in self.values.keys() - self._read:
            if self.values[key] is not None:
                supported = ", ".join(sorted(self._read))
                raise refuse(self.prefix + key, self.values[key], supported)

    def optional_nested(self, name: str) -> "Fields | None":
        """The fields of the object of that name; None where it is missing or null."""
        return None if self.get(name) is None else self.nested(name)

    def nested(self, name: str) -> "Fields":
        """The fields of the object of that name, which must be there."""
        value, name = self.get(name, REQUIRED), self.prefix + name
        if not isinstance(value, Mapping):
            raise refuse(name, value, "an object")
        return Fields(value, prefix=name + ".")

    def check_unread(self) -> None:
        """Refuse fields that change the computation and that were not read."""
        for name, neutral in _NEUTRAL.items():
            if name not in self._read and (value := self.values.get(name)) not in neutral:
                raise refuse(self.prefix + name, value, " or ".join(map(repr, neutral)))


# ------------------------------------------------------------------- what several families read


def tokens_and_dtype(fields: Fields, *, bos: int | None, eos: int | None) -> dict[str, Any]:
    """Special tokens and the checkpoint's dtype."""
    bos_id, eos_ids = fields.get("bos_token_id", bos), fields.get("eos_token_id", eos)
    if bos_id is not None and not isinstance(bos_id, int):
        raise refuse("bos_token_id", bos_id, "an integer, null")
    ids = eos_ids if isinstance(eos_ids, list | tuple) else [] if eos_ids is None else [eos_ids]
    if not all(isinstance(token, int) for token in ids):
        raise refuse("eos_token_id", eos_ids, "an integer, a list of integers, null")
    dtype = fields.get("dtype", alias="torch_dtype")
    dtype = None if dtype is None else str(dtype).removeprefix("torch.")
    if dtype not in (None, *CHECKPOINT_DTYPES):
        raise refuse("dtype", dtype, ", ".join(CHECKPOINT_DTYPES))
    return {"bos_token_id": bos_id, "eos_token_ids": tuple(ids), "checkpoint_dtype": dtype}


def divided_head_size(hidden_size: int, num_heads: int) -> int:
    """The head size of models whose heads share the hidden size."""
    if hidden_size % num_heads:
        raise refuse("num_attention_heads", num_heads, f"divisors of hidden_size={hidden_size}")
    return hidden_size // num_heads


def learned_positions(hidden_size: int, num_heads: int, num_layers: int) -> dict[str, Any]:
    """GPT-2 and OPT: heads that share the hidden size, and attention without rotation."""
    head_size = divided_head_size(hidden_size, num_heads)
    return {
        "hidden_size": hidden_size,
        "num_heads": num_heads,
        "num_kv_heads": num_heads,
        "head_size": head_size,
        "layers": (LayerConfig(head_size**-0.5),) * num_layers,
        "gated": False,
    }


def rotary(fields: Fields, model_type: str, default_head_size: int | None = None) -> dict[str, Any]:
    """LLaMA and those after it: all of their description but the layers and the special tokens."""
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    num_kv_heads = fields.optional_integer("num_key_value_heads") or num_heads
    head_size = fields.optional_integer("head_dim", default_head_size)
    head_size = head_size or divided_head_size(hidden_size, num_heads)
    if num_heads % num_kv_heads:
        wanted = f"divisors of num_attention_heads={num_heads}"
        raise refuse("num_key_value_heads", num_kv_heads, wanted)
    if head_size % 2:
        raise refuse_head_size(head_size, "even sizes, with rotary embedding")
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
        "gated": True,
        "norm": "rms",
        "norm_eps": fields.number("rms_norm_eps", 1e-6),
        "tie_word_embeddings": fields.flag("tie_word_embeddings", False),
    }


def _num_positions(fields: Fields) -> int:
    """How many positions there are. Vicuna's configs have in `max_position_embeddings` those before
    a linear scaling, and the scaled number in `max_sequence_length`."""
    num_positions = fields.integer("max_position_embeddings")
    rope = fields.mapping(_rope_name(fields))
    if rope.get("rope_type", rope.get("type")) != "linear":
        return num_positions
    return max(num_positions, fields.optional_integer("max_sequence_length") or 0)


def _rope_name(fields: Fields) -> str:
    """The field that has the rope table's own ones."""
    names = "rope_scaling", "rope_parameters"
    return next((name for name in names if fields.get(name)), names[1])


def rotary_layers(
    fields: Fields, common: Mapping[str, Any], windows: Sequence[int | None], **changes: Any
) -> tuple[LayerConfig, ...]:
    """Layers with one rope table and one scale, and a window each."""
    name = _rope_name(fields)
    rope = read_rope(fields.mapping(name), fields, name=name)
    scale = common["head_size"] ** -0.5
    return tuple(LayerConfig(scale, rope, window, **changes) for window in windows)


def read_windows(
    fields: Fields, window: int | None, default: Sequence[str]
) -> tuple[int | None, ...]:
    """One window a layer, from `layer_types` where the config has it."""
    kinds = fields.get("layer_types")
    kinds = default if kinds is None else kinds
    supported = ("full_attention",) if window is None else ("full_attention", "sliding_attention")
    is_list = isinstance(kinds, list | tuple) and len(kinds) == len(default)
    if not is_list or not all(kind in supported for kind in kinds):
        wanted = f"{len(default)} layers of {' or '.join(supported)}"
        raise refuse("layer_types", kinds, f"{wanted} (with sliding_window={window})")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


_ROPE_NEEDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
_ROPE_KEYS = {
    "rope_theta", "rope_type", "type", "factor", "low_freq_factor", "high_freq_factor",
    "original_max_position_embeddings", "partial_rotary_factor",
}  # fmt: skip


def read_rope(
    values: Mapping[str, Any],
    fields: Fields,
    theta_name: str = "rope_theta",
    theta: float = 10_000.0,
    name: str = "rope_parameters",
) -> RopeConfig:
    """One rope table.

    Args:
        values: its own fields: of `rope_parameters` (transformers 5) or `rope_scaling` (before).
        fields: the config's, which have theta under `theta_name` where `values` lack it.
        theta_name: as above.
        theta: where neither has it.
        name: the field that has `values`, for errors.
    """
    rope = Fields(values, prefix=f"{fields.prefix}{name}.")
    kind = "rope_type" if "rope_type" in values else "type"
    rope_type = values.get(kind, "default")
    if rope_type not in tuple(_ROPE_NEEDS):
        raise refuse(rope.prefix + kind, rope_type, ", ".join(_ROPE_NEEDS))
    for key in values.keys() - _ROPE_KEYS:
        if values[key] is not None:
            raise refuse(rope.prefix + key, values[key], ", ".join(sorted(_ROPE_KEYS)))
    if values.get("partial_rotary_factor") not in (None, 1.0):
        given = values["partial_rotary_factor"]
        raise refuse(f"{rope.prefix}partial_rotary_factor", given, 1.0)
    original, most = 0, fields.integer("max_position_embeddings")
    if rope_type == "llama3":
        of_all = fields.optional_integer("original_max_position_embeddings")
        original = of_all or rope.integer("original_max_position_embeddings", most)
    own_theta = "rope_theta" in values
    return RopeConfig(
        theta=rope.number("rope_theta") if own_theta else fields.number(theta_name, theta),
        rope_type=cast(RopeType, rope_type),
        original_max_position_embeddings=original,
        **{name: rope.number(name) for name in _ROPE_NEEDS[rope_type]},
    )
