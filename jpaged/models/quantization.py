"""Read `quantization_config` of a config.json, which describes an FP8 checkpoint.

Three layouts are supported: compressed-tensors, the FP8 layout of transformers (128 x 128 blocks or
AutoFP8), and NVIDIA ModelOpt. An unsupported field raises an error that names the field.
"""

import fnmatch
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jpaged.models.config import QuantizationConfig
from jpaged.models.config_fields import ConfigFields, field_error
from jpaged.models.formats import UnquantizedFormat, WeightFormat
from jpaged.models.fp8 import (
    FP8BlockFormat,
    FP8ChannelFormat,
    FP8Format,
    FP8StaticChannelFormat,
    FP8StaticTensorFormat,
    FP8TensorFormat,
)
from pallas_kernels import FP8_GROUP_SIZE

QUANTIZATION_METHODS = ("compressed-tensors", "fp8", "modelopt")
"""Supported values of `quant_method`. ModelOpt's `hf_quant_config.json` has no such field."""

_MODULE_PREFIXES = ("", "model.", "transformer.", "model.decoder.", "decoder.")
_MODULE_PREFIXES += ("language_model.model.", "model.language_model.", "language_model.")
"""Prefixes that a list of ignored modules may put before a module's name."""

_IGNORED_FIELDS: dict[str, set[str]] = {
    "compressed-tensors": {"global_compression_ratio", "version", "quantization_status"},
    "fp8": set(),
    "modelopt": {"producer", "config_groups", "version"},
}
"""Fields that do not change the computation, or that repeat other fields."""


class _QuantizationLayout(NamedTuple):
    format: type[WeightFormat]
    # Function that takes all names that the config may use for a module. It returns whether the
    # module stays unquantized.
    is_ignored: Callable[[Sequence[str]], bool]
    has_kv_scales: bool


def read_quantization(
    fields: ConfigFields | None, requested: str | None, paths_by_name: Mapping[str, str]
) -> QuantizationConfig | None:
    """Return how the projections and the KV cache are quantized; None if they are not.

    Args:
        fields: Fields of `quantization_config`; None if the config has no such object.
        requested: One of `QUANTIZATION_METHODS`; None to follow the config. "fp8" also quantizes
            unquantized weights while they are loaded.
        paths_by_name: Maps the names of a checkpoint's linear modules, without ".weight", to the
            paths of projections. Several modules may map to one fused projection.

    Raises:
        ValueError: A field is unsupported, or `requested` contradicts the config.
    """
    if fields is None:
        if requested in (None, "fp8"):
            return None if requested is None else QuantizationConfig(FP8Format)
        raise ValueError(
            f"quantization={requested!r}, but config.json has no quantization_config: leave "
            "quantization unset, or use 'fp8' to quantize the weights to FP8 while they are loaded"
        )
    method = fields.choice("quant_method", None, QUANTIZATION_METHODS)
    layout = _READERS[method](fields)
    if requested == "fp8" and layout.format is UnquantizedFormat:
        layout = layout._replace(format=FP8Format)
    elif requested not in (None, method):
        state = (
            "weights are not in FP8"
            if layout.format is UnquantizedFormat
            else "weights are in FP8 already"
        )
        raise ValueError(
            f"quantization={requested!r}, but the checkpoint's {state} (its quant_method is "
            f"{method!r}): leave quantization unset"
        )
    fields.ignore(_IGNORED_FIELDS[method])
    fields.refuse_unread()
    return QuantizationConfig(
        layout.format, _unquantized_paths(layout, paths_by_name), layout.has_kv_scales
    )


def _unquantized_paths(
    layout: _QuantizationLayout, paths_by_name: Mapping[str, str]
) -> tuple[str, ...]:
    """Return the paths of the projections that are not quantized.

    Raises:
        ValueError: Only some parts of a fused projection are quantized, or only some projections of
            a layer's experts.
    """
    parts: dict[str, dict[str, bool]] = {}
    for name, path in paths_by_name.items():
        parts.setdefault(path, {})[name] = layout.is_ignored([it + name for it in _MODULE_PREFIXES])
    for ignored_by_name in parts.values():
        if len(set(ignored_by_name.values())) > 1:
            ignored_names = " and ".join(
                name for name, ignored in ignored_by_name.items() if ignored
            )
            raise ValueError(
                f"model config: the projections {', '.join(ignored_by_name)} are computed "
                f"together, but quantization_config leaves only {ignored_names} unquantized: use "
                "a checkpoint that quantizes all of these projections or none"
            )
    return tuple(
        sorted(path for path, ignored_by_name in parts.items() if all(ignored_by_name.values()))
    )


def _read_compressed_tensors(fields: ConfigFields) -> _QuantizationLayout:
    formats = ("float-quantized", "naive-quantized")
    # If `config_groups` is empty, only the KV cache is quantized.
    is_kv_only = fields.get("config_groups") == {}
    fields.choice("format", formats[0], ("dense", *formats) if is_kv_only else formats)
    for name in ("sparsity_config", "transform_config"):
        if (value := fields.get(name)) not in (None, {}):
            raise field_error(fields.prefix + name, value, "{}")
    if is_kv_only:
        fields.ignore({"ignore"})
        return _QuantizationLayout(UnquantizedFormat, lambda names: False, _has_kv_scales(fields))
    groups = fields.nested("config_groups")
    if len(groups.values) != 1:
        raise field_error(fields.prefix + "config_groups", groups.values, "a single group")
    group = groups.nested(*groups.values)
    group.choice("format", formats[0], (None, *formats))
    targets, ignored = _read_name_list(group, "targets"), _read_name_list(fields, "ignore")
    if (value := group.get("output_activations")) is not None:
        raise field_error(f"{group.prefix}output_activations", value, "null")
    weights, activations = (_read_scheme(group, each) for each in ("weights", "input_activations"))
    group.refuse_unread()
    weight_format = _FORMAT_BY_SCHEMES.get((weights, activations))
    if weight_format is None:
        wanted = " or ".join(f"{w[0]} with {r[0]}" for w, r in _FORMAT_BY_SCHEMES)
        given = f"{weights} with {activations}"
        raise field_error(
            f"{group.prefix}weights.strategy", given, f"weights with activations: {wanted}"
        )

    def is_ignored(names: Sequence[str]) -> bool:
        is_target = any(_matches_pattern(each, targets) for each in names)
        return not is_target or any(_matches_pattern(each, ignored) for each in names)

    return _QuantizationLayout(weight_format, is_ignored, _has_kv_scales(fields))


class _ScaleScheme(NamedTuple):
    """How FP8 scales are chosen: which numbers share a scale, and whether every step computes new
    scales.

    Attributes:
        strategy: Set of numbers that share one scale: a whole "tensor", a "channel" (one output of
            the weight), a "token" (one row of activations), a "block" of the weight or a "group" of
            consecutive numbers in a row.
        is_dynamic: Whether each step computes the scales. Otherwise, the checkpoint holds them.
    """

    strategy: str
    is_dynamic: bool


_FORMAT_BY_SCHEMES = {
    (_ScaleScheme("channel", False), _ScaleScheme("token", True)): FP8ChannelFormat,
    (_ScaleScheme("channel", False), _ScaleScheme("tensor", False)): FP8StaticChannelFormat,
    (_ScaleScheme("tensor", False), _ScaleScheme("token", True)): FP8TensorFormat,
    (_ScaleScheme("tensor", False), _ScaleScheme("tensor", False)): FP8StaticTensorFormat,
    (_ScaleScheme("block", False), _ScaleScheme("group", True)): FP8BlockFormat,
}


def _read_scheme(group: ConfigFields, name: str) -> _ScaleScheme:
    """Return how a compressed-tensors config chooses the FP8 scales of weights or activations.

    Args:
        group: A group of the config's `config_groups`.
        name: "weights" or "input_activations".

    Raises:
        ValueError: The config describes a quantization other than FP8, or an unsupported field.
    """
    if group.get(name) is None:
        raise field_error(
            group.prefix + name,
            None,
            "an object that describes FP8 quantization (weights and input_activations must both "
            "be objects)",
        )
    scheme_fields = group.nested(name)
    strategy, is_dynamic = scheme_fields.get("strategy"), scheme_fields.get("dynamic", False)
    wanted: dict[str, Sequence[Any]] = {
        "num_bits": (8,),
        "type": ("float",),
        "symmetric": (True,),
        "dynamic": (True, False),
        "strategy": ("channel", "tensor", "token", "block", "group"),
        "block_structure": ([FP8_GROUP_SIZE] * 2,) if strategy == "block" else (None,),
        "group_size": (FP8_GROUP_SIZE,) if strategy == "group" else (None,),
        "actorder": (None,),
        "scale_dtype": (None,),
        "zp_dtype": (None, "torch.float8_e4m3fn"),
    }
    for key, choices in wanted.items():
        if (value := scheme_fields.get(key, choices[0])) not in choices:
            raise field_error(scheme_fields.prefix + key, value, " or ".join(map(str, choices)))
    # The observer fields say how the scales were computed. The checkpoint contains the scales, so
    # ignore these fields.
    scheme_fields.ignore({"observer", "observer_kwargs"})
    scheme_fields.refuse_unread()
    return _ScaleScheme(str(strategy), is_dynamic is True)


def _matches_pattern(module: str, patterns: Sequence[str]) -> bool:
    """Return whether a module matches any pattern, in the syntax of compressed-tensors.

    A pattern is a module's name, a regular expression after "re:", or the class name "Linear",
    which matches every module.
    """
    for pattern in patterns:
        if pattern.startswith("re:"):
            if _compile_pattern(pattern.removeprefix("re:"), "ignore").match(module):
                return True
        elif pattern in (module, "Linear"):
            return True
    return False


def _read_fp8(fields: ConfigFields) -> _QuantizationLayout:
    """Read the FP8 layout of transformers and AutoFP8."""
    fields.choice("fmt", "e4m3", (None, "e4m3"))
    fields.choice("scale_fmt", "float", (None, "float"))
    fields.choice("expert_dtype", "fp8", (None, "fp8"))
    if (value := fields.get("modules_to_convert")) not in (None, []):
        raise field_error(f"{fields.prefix}modules_to_convert", value, "null")
    fields.choice("dequantize", False, (None, False))
    is_static = fields.choice("activation_scheme", "dynamic", ("dynamic", "static")) == "static"
    block = fields.get("weight_block_size")
    if block is not None and (block != [FP8_GROUP_SIZE] * 2 or is_static):
        wanted = f"[{FP8_GROUP_SIZE}, {FP8_GROUP_SIZE}] with activation_scheme='dynamic', or null"
        raise field_error(f"{fields.prefix}weight_block_size", block, wanted)
    ignored = [
        *_read_name_list(fields, "modules_to_not_convert"),
        *_read_name_list(fields, "ignored_layers"),
    ]
    name = "modules_to_not_convert"
    starts = [_compile_pattern(rf"(?:{each})(?:(?<=\.)|(?=\.|$))", name) for each in ignored]

    def is_ignored(names: Sequence[str]) -> bool:
        ends = any(name.endswith(each) for name in names for each in ignored)
        return ends or any(start.match(name) for name in names for start in starts)

    tensor_format = FP8StaticTensorFormat if is_static else FP8TensorFormat
    return _QuantizationLayout(
        tensor_format if block is None else FP8BlockFormat, is_ignored, _has_kv_scales(fields)
    )


def _read_modelopt(fields: ConfigFields) -> _QuantizationLayout:
    fields.choice("quant_algo", None, ("FP8",))
    has_kv_scales = fields.choice("kv_cache_quant_algo", None, (None, "FP8")) is not None
    ignored = [*_read_name_list(fields, "exclude_modules"), *_read_name_list(fields, "ignore")]

    def is_ignored(names: Sequence[str]) -> bool:
        return any(fnmatch.fnmatchcase(name, each) for name in names for each in ignored)

    return _QuantizationLayout(
        FP8StaticTensorFormat, is_ignored, _has_kv_scales(fields) or has_kv_scales
    )


_READERS = {
    "compressed-tensors": _read_compressed_tensors,
    "fp8": _read_fp8,
    "modelopt": _read_modelopt,
}


def _has_kv_scales(fields: ConfigFields) -> bool:
    """Return whether each layer of the checkpoint has scales for an FP8 KV cache."""
    scheme = fields.get("kv_cache_scheme")
    if scheme in (None, "static"):
        return scheme is not None
    scheme_fields = fields.nested("kv_cache_scheme")
    wanted = {"num_bits": 8, "type": "float", "dynamic": False}
    wanted |= {"symmetric": True, "strategy": "tensor", "group_size": None}
    for name, value in wanted.items():
        if scheme_fields.get(name, value) != value:
            raise field_error(scheme_fields.prefix + name, scheme_fields.get(name), value)
    return True


def _read_name_list(fields: ConfigFields, name: str) -> list[str]:
    value = fields.get(name)
    value = [] if value is None else value
    if not isinstance(value, list | tuple) or not all(isinstance(each, str) for each in value):
        raise field_error(fields.prefix + name, value, "a list of strings")
    return list(value)


def _compile_pattern(pattern: str, name: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise field_error(
            f"quantization_config.{name}", pattern, "Python regular expressions"
        ) from error
