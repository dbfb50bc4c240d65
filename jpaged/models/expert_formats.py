"""Weight formats of experts: how their weights are stored, loaded, split and multiplied.

`expert_format` returns the format of the experts of a layer. An instance holds the weights of all
experts of one layer that are on the device. Experts are quantized and rounded like the dense
projections of the same checkpoint (`jpaged.models.formats`, `jpaged.models.fp8`).
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float
from typing_extensions import override

from jpaged.models.checkpoint import ScaleAxis, WeightRule
from jpaged.models.config import ExpertsConfig, ModelConfig, expert_path
from jpaged.models.formats import (
    BatchInvariantFormat,
    UnquantizedFormat,
    WeightFormat,
    zero_param,
)
from jpaged.models.fp8 import (
    FP8BlockFormat,
    FP8ChannelFormat,
    FP8Format,
    FP8TensorFormat,
    num_blocks,
)
from jpaged.models.sharding import all_max
from pallas_kernels import (
    FP8,
    FP8_GROUP_SIZE,
    Backend,
    Routing,
    block_scaled_expert_down_gemm,
    block_scaled_expert_gated_gemm,
    expert_down_gemm,
    expert_gated_gemm,
    quantize_rows,
    scaled_expert_down_gemm,
    scaled_expert_gated_gemm,
)


class ExpertSource(NamedTuple):
    """A name in a checkpoint under which the weight of one expert or of all experts is stored.

    Attributes:
        name: Name of the module of one expert's projection, such as
            "layers.0.mlp.experts.3.up_proj". If the weights of all experts are stacked, name of
            the tensor, such as "layers.0.mlp.experts.gate_up_proj".
        parameter: Parameter that the weight fills.
        part: Index of the projection within the parameter: 1 for an up projection, otherwise 0.
        expert: Index of the expert; None if the weights of all experts are stacked.
    """

    name: str
    parameter: Literal["gate_up", "down"]
    part: int = 0
    expert: int | None = None

    @property
    def weight_name(self) -> str:
        """Name of the weight's tensor."""
        return self.name if self.expert is None else self.name + ".weight"


class ExpertFormat(nnx.Module):
    """Base class of the weight formats of experts.

    The parameters are `gate_up` and `down`; subclasses add further parameters. With several
    devices, each device holds either some of the experts, or all experts with a shard of their
    width.
    """

    def __init__(self, config: ModelConfig, experts: ExpertsConfig, dtype: DTypeLike):
        self.batch_invariant = config.batch_invariant
        has_all_experts = experts.num_local_experts == experts.num_experts
        self.is_width_sharded = config.tensor_parallel_size > 1 and has_all_experts

    @classmethod
    @abstractmethod
    def rules(
        cls, config: ModelConfig, experts: ExpertsConfig, source: ExpertSource, target: str
    ) -> list[WeightRule]:
        """Return the rules that map a weight of the checkpoint, and its scales, to parameters.

        Args:
            config: Config of the model.
            experts: Experts of the layer.
            source: Description of the weight, with the weight's name in the checkpoint and the name
                of the parameter that the weight fills.
            target: Path of the `SparseFeedForward` module that has the parameter.
        """

    @classmethod
    def float_rules(
        cls, config: ModelConfig, experts: ExpertsConfig, source: ExpertSource, target: str
    ) -> list[WeightRule]:
        """Return the rules that map the unquantized weight at `source` to parameters.

        A format whose parameters are quantized overrides this method. See `rules` for the
        arguments.
        """
        return cls.rules(config, experts, source, target)

    @classmethod
    def state_rules(
        cls, config: ModelConfig, experts: ExpertsConfig, target: str
    ) -> list[WeightRule]:
        """Return the rules that load the weights from the `nnx.State` of an unquantized model.

        The state stores the weights as `UnquantizedExpertFormat` does, and the rules quantize them
        to this format. `UnquantizedExpertFormat` returns an empty list: its weights are copied. See
        `rules` for the arguments.
        """
        return []

    @abstractmethod
    def __call__(
        self, x: Float[Array, "T D"], routing: Routing, backend: Backend
    ) -> Float[Array, "T D"]:
        """Return for each row the weighted sum of the experts that the router chose. The sums of
        the devices are not added here."""


class UnquantizedExpertFormat(ExpertFormat):
    """Unquantized weights in the model's dtype: `gate_up` [E, D, 2, F] and `down` [E, F, D].

    E is the number of experts on the device, D the model's width, and F the width of one expert.
    """

    def __init__(self, config: ModelConfig, experts: ExpertsConfig, dtype: DTypeLike):
        super().__init__(config, experts, dtype)
        count, width, inner = _sizes(config, experts)
        self.gate_up = zero_param(dtype, count, width, 2, inner)
        self.down = zero_param(dtype, count, inner, width)

    @override
    @classmethod
    def rules(
        cls, config: ModelConfig, experts: ExpertsConfig, source: ExpertSource, target: str
    ) -> list[WeightRule]:
        count, width, inner = _sizes(config, experts)
        is_gate_up, is_stacked = source.parameter == "gate_up", source.expert is None
        first = count if is_stacked else 1
        if is_gate_up:
            shape = first, width, 2 if is_stacked else 1, inner
            file_axes = ((0,), (2, 3), (1,)) if is_stacked else ((3, 0, 2), (1,))
        else:
            shape = first, inner, width
            file_axes = ((0,), (2,), (1,)) if is_stacked else ((2, 0), (1,))
        layout = _layout(source, shape, file_axes, axis=2 if is_gate_up else 1)
        return [WeightRule(source.weight_name, f"{target}.{source.parameter}", **layout)]

    @override
    def __call__(
        self, x: Float[Array, "T D"], routing: Routing, backend: Backend
    ) -> Float[Array, "T D"]:
        options = {"backend": backend, "batch_invariant": self.batch_invariant}
        gate_up = self.gate_up[...]
        gate_up = gate_up.reshape(*gate_up.shape[:2], -1)
        inner = expert_gated_gemm(x, gate_up, routing, **options)
        return expert_down_gemm(inner, self.down[...], routing, **options)


class FP8ExpertFormat(ExpertFormat):
    """FP8 weights with one scale per output. Each row of activations has one dynamic scale.

    E is the number of experts on the device, D the model's width, and F the width of one expert.
    The weights are `gate_up` [E, 2, F, D] and `down` [E, D, F]; the scales are
    `gate_up_weight_scale` [E, 2, F] and `down_weight_scale` [E, D] in float32. This class quantizes
    the weights of an unquantized checkpoint while they are loaded.
    """

    is_grouped: ClassVar[bool] = False
    """Whether blocks of a weight and groups of a row have scales."""

    def __init__(self, config: ModelConfig, experts: ExpertsConfig, dtype: DTypeLike):
        super().__init__(config, experts, dtype)
        count, width, inner = _sizes(config, experts)
        self.gate_up = zero_param(FP8, count, 2, inner, width)
        self.down = zero_param(FP8, count, width, inner)
        gate_up, down = self._scale_shapes(inner, width)
        self.gate_up_weight_scale = zero_param(jnp.float32, count, 2, *gate_up)
        self.down_weight_scale = zero_param(jnp.float32, count, *down)

    def _scale_shapes(self, inner: int, width: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of one expert's scales. The first shape is for the gate and for the up
        projection, the second for the down projection."""
        return (inner,), (width,)

    @override
    @classmethod
    def rules(
        cls, config: ModelConfig, experts: ExpertsConfig, source: ExpertSource, target: str
    ) -> list[WeightRule]:
        return cls.float_rules(config, experts, source, target)

    @override
    @classmethod
    def float_rules(
        cls, config: ModelConfig, experts: ExpertsConfig, source: ExpertSource, target: str
    ) -> list[WeightRule]:
        layout, path = (
            _fp8_layout(source, *_sizes(config, experts)),
            f"{target}.{source.parameter}",
        )
        return [cls._quantizing_rule(WeightRule(source.weight_name, path, **layout))]

    @override
    @classmethod
    def state_rules(
        cls, config: ModelConfig, experts: ExpertsConfig, target: str
    ) -> list[WeightRule]:
        count, width, inner = _sizes(config, experts)
        layouts = {
            "gate_up": ((count, 2, inner, width), ((0,), (3,), (1,), (2,))),
            "down": ((count, width, inner), ((0,), (2,), (1,))),
        }
        return [
            cls._quantizing_rule(WeightRule(path, path, *layout))
            for path, layout in ((f"{target}.{name}", it) for name, it in layouts.items())
        ]

    @classmethod
    def _quantizing_rule(cls, rule: WeightRule) -> WeightRule:
        """Return a copy of `rule` that quantizes the weight to FP8 while it is loaded."""
        return replace(rule, scale_path=f"{rule.target}_weight_scale")

    @override
    def __call__(
        self, x: Float[Array, "T D"], routing: Routing, backend: Backend
    ) -> Float[Array, "T D"]:
        gated, down = scaled_expert_gated_gemm, scaled_expert_down_gemm
        if self.is_grouped:
            gated, down = block_scaled_expert_gated_gemm, block_scaled_expert_down_gemm
        options: dict[str, Any] = {"dtype": x.dtype, "backend": backend}
        weight, scale = self.gate_up[...], self.gate_up_weight_scale[...]
        weight = weight.reshape(weight.shape[0], -1, weight.shape[3])
        scale = scale.reshape(scale.shape[0], -1, *scale.shape[3:])
        values, row_scale = self._quantize(x, backend)
        inner = gated(values, weight, row_scale, scale, routing, **options)
        # If the devices split the width of each expert, one scale per row needs the maximum over
        # all devices. A scale per group of numbers needs no other device, because a whole group is
        # on one device.
        is_split = self.is_width_sharded and not self.is_grouped
        values, row_scale = self._quantize(inner, backend, all_max if is_split else None)
        scale = self.down_weight_scale[...]
        return down(values, self.down[...], row_scale, scale, routing, **options)

    def _quantize(
        self, rows: jax.Array, backend: Backend, reduce_max: Any = None
    ) -> tuple[jax.Array, jax.Array]:
        """Quantize rows to FP8. Return the quantized rows and their scales. The scales are [T], or
        [T, groups] if `is_grouped`."""
        options = {"grouped": self.is_grouped, "reduce_max": reduce_max, "backend": backend}
        values, scale = quantize_rows(rows, **options)
        return values, scale if self.is_grouped else scale[:, 0]


class FP8ChannelExpertFormat(FP8ExpertFormat):
    """`FP8ExpertFormat` for checkpoints with one scale per output, and a tensor for each expert."""

    is_per_tensor: ClassVar[bool] = False
    """Whether one scale covers all outputs of a projection of an expert."""

    @override
    @classmethod
    def rules(
        cls, config: ModelConfig, experts: ExpertsConfig, source: ExpertSource, target: str
    ) -> list[WeightRule]:
        if source.expert is None:
            return []  # no published checkpoint of this format stacks experts
        count, width, inner = _sizes(config, experts)
        path, axes = f"{target}.{source.parameter}", (2, 0, 1)
        shape = 1, 1, inner
        if source.parameter == "down":
            shape, axes = (1, width), (1, 0)
        # In the checkpoint, a projection has a single scale, or scales of shape [outputs, 1].
        file_axes = None if cls.is_per_tensor else (axes, ())
        scale_layout = _layout(source, shape, file_axes, axis=1)
        scale_layout["is_scalar"] = cls.is_per_tensor
        layout = _fp8_layout(source, count, width, inner)
        return [
            WeightRule(source.weight_name, path, **layout),
            WeightRule(source.name + ".weight_scale", path + "_weight_scale", **scale_layout),
        ]


class FP8TensorExpertFormat(FP8ChannelExpertFormat):
    """`FP8ExpertFormat` for checkpoints with one scale per projection of an expert."""

    is_per_tensor = True


class FP8BlockExpertFormat(FP8ExpertFormat):
    """FP8 weights with one scale per 128 x 128 block.

    A row of activations has one scale per 128 consecutive numbers.

    The weights' scales are `gate_up_weight_scale` [E, 2, blocks of F, blocks of D] and
    `down_weight_scale` [E, blocks of D, blocks of F]. The last block of an axis may be smaller.
    """

    is_grouped = True

    @override
    def _scale_shapes(self, inner: int, width: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        inner, width = num_blocks(inner), num_blocks(width)
        return (inner, width), (width, inner)

    @override
    @classmethod
    def rules(
        cls, config: ModelConfig, experts: ExpertsConfig, source: ExpertSource, target: str
    ) -> list[WeightRule]:
        count, width, inner = _sizes(config, experts)
        if source.expert is None and inner % FP8_GROUP_SIZE:
            return []  # a scale block could span gate and up weights
        path, suffix = (
            f"{target}.{source.parameter}",
            "_scale_inv" if source.expert is None else ".weight_scale",
        )
        layout = _fp8_layout(source, count, width, inner)
        scale_layout = _fp8_layout(source, count, num_blocks(width), num_blocks(inner))
        return [
            WeightRule(source.weight_name, path, **layout),
            WeightRule(source.name + suffix, path + "_weight_scale", **scale_layout),
        ]

    @override
    @classmethod
    def _quantizing_rule(cls, rule: WeightRule) -> WeightRule:
        shape = rule.shape or ()
        axes = [
            ScaleAxis((size,), start=rule.offsets.get(axis, 0))
            for axis, size in enumerate(shape[:-2])
        ]
        axes += [ScaleAxis((size,), FP8_GROUP_SIZE) for size in shape[-2:]]
        return replace(super()._quantizing_rule(rule), scale_axes=tuple(axes))


def _sizes(config: ModelConfig, experts: ExpertsConfig) -> tuple[int, int, int]:
    """Return the number of experts on the device, the model's width and the experts' width."""
    return experts.num_local_experts, config.hidden_size, experts.intermediate_size


def _fp8_layout(source: ExpertSource, count: int, width: int, inner: int) -> dict[str, Any]:
    """Return arguments of `WeightRule` for a weight that fills an FP8 parameter.

    The parameter is `gate_up` [E, 2, F, D] or `down` [E, D, F].

    Args:
        source: Which weight of the checkpoint it is.
        count: Number of experts on the device (E).
        width: Width of the model (D).
        inner: Width of one expert (F).
    """
    is_gate_up, is_stacked = source.parameter == "gate_up", source.expert is None
    first = count if is_stacked else 1
    if is_gate_up:
        shape = first, 2 if is_stacked else 1, inner, width
        file_axes = ((0,), (1, 2), (3,)) if is_stacked else ((2, 0, 1), (3,))
    else:
        shape = first, width, inner
        file_axes = ((0,), (1,), (2,)) if is_stacked else ((1, 0), (2,))
    return _layout(source, shape, file_axes, axis=1)


def _layout(
    source: ExpertSource,
    shape: tuple[int, ...],
    file_axes: Sequence[Sequence[int]] | None,
    *,
    axis: int,
) -> dict[str, Any]:
    """Return arguments of `WeightRule` for a weight or its scales.

    Args:
        source: Which weight of the checkpoint it is.
        shape: See `WeightRule`.
        file_axes: See `WeightRule`.
        axis: Axis of the parameter along which the projections of one expert are concatenated.
    """
    layout: dict[str, Any] = {"shape": shape, "file_axes": file_axes}
    if source.expert is None:
        return layout | {"is_alternative": True}
    return layout | {"axis": axis, "start": source.part, "expert": source.expert}


_EXPERT_FORMATS: dict[type[WeightFormat], type[ExpertFormat]] = {
    UnquantizedFormat: UnquantizedExpertFormat,
    BatchInvariantFormat: UnquantizedExpertFormat,
    FP8Format: FP8ExpertFormat,
    FP8ChannelFormat: FP8ChannelExpertFormat,
    FP8TensorFormat: FP8TensorExpertFormat,
    FP8BlockFormat: FP8BlockExpertFormat,
}
"""Format of experts by the format of dense projections in the same checkpoint."""


def expert_format(config: ModelConfig, index: int) -> type[ExpertFormat]:
    """Return the format of the experts of layer `index`.

    Raises:
        ValueError: Experts do not support the format of the model's other projections.
    """
    weight_format = config.weight_format(expert_path(index))
    found = _EXPERT_FORMATS.get(weight_format)
    if found is None:
        raise ValueError(
            f"model config: quantization_config has static scales of activations "
            f"({weight_format.name}), which the experts of model_type={config.model_type!r} do not "
            "support: use a checkpoint with dynamic scales, or the unquantized checkpoint with "
            "quantization='fp8'"
        )
    return found
