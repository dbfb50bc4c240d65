"""`ModelConfig`, which describes a model, and the dataclasses that it consists of.

`jpaged.models.config_fields` has the functions that read a model's `config.json`.
"""

from dataclasses import dataclass, field, replace
from typing import Literal

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
