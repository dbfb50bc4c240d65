"""What a config.json says of a checkpoint's FP8: `quantization_config`.

Read are the layouts in which such checkpoints are published: compressed-tensors', the one of
transformers' own FP8 (in blocks, or AutoFP8's), and NVIDIA ModelOpt's. Every field that is not
understood is refused by name.
"""

import fnmatch
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jpaged.models.config import ConfigFields, QuantizationConfig, field_error
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
"""Values of `quant_method`; `hf_quant_config.json` has ModelOpt's without it."""

_MODULE_PREFIXES = ("", "model.", "transformer.", "model.decoder.", "decoder.")
_MODULE_PREFIXES += ("language_model.model.", "model.language_model.", "language_model.")
"""What may stand before a module's name in weight rules, in the names of ignored modules."""

_IGNORED_FIELDS = {
    "compressed-tensors": {"global_compression_ratio", "version", "quantization_status"},
    "fp8": {"expert_dtype"},
    "modelopt": {"producer", "config_groups", "version"},
}
"""Fields that change nothing, or say again what others say."""


class _QuantizationLayout(NamedTuple):
    format: type[WeightFormat]
    is_ignored: Callable[[Sequence[str]], bool]  # of a module, by any of the names it may have
    has_kv_scales: bool


def read_quantization(
    fields: ConfigFields | None, requested: str | None, paths_by_name: Mapping[str, str]
) -> QuantizationConfig | None:
    """In which format the projections are.

    Args:
        fields: of the config's `quantization_config`, if it has one.
        asked: one of `QUANTIZATION_METHODS`; None for what the config says. "fp8" also for weights that are not
            in FP8 yet.
        modules: paths of the projections' parts by their names in weight rules.

    Raises:
        ValueError: a field is not understood, or something else is asked for than the config has.
    """
    if fields is None:
        if requested in (None, "fp8"):
            return None if requested is None else QuantizationConfig(FP8Format)
        raise ValueError(
            f"quantization={requested!r}, but config.json has no quantization_config: leave it unset, "
            "or give 'fp8' to bring the weights to FP8 as they are loaded"
        )
    method = fields.choice("quant_method", None, QUANTIZATION_METHODS)
    layout = _READERS[method](fields)
    if requested == "fp8" and layout.format is UnquantizedFormat:
        layout = layout._replace(format=FP8Format)
    elif requested not in (None, method):
        have = (
            "weights are not in FP8"
            if layout.format is UnquantizedFormat
            else "weights are in FP8 already"
        )
        raise ValueError(
            f"quantization={requested!r}, but the checkpoint's {have}, as {method!r} has them: leave "
            "quantization unset"
        )
    fields.ignore(_IGNORED_FIELDS[method])
    fields.refuse_unread()
    return QuantizationConfig(
        layout.format, _unquantized_paths(layout, paths_by_name), layout.has_kv_scales
    )


def _unquantized_paths(
    layout: _QuantizationLayout, paths_by_name: Mapping[str, str]
) -> tuple[str, ...]:
    """The paths of projections that are not in FP8; parts that are fused agree."""
    parts: dict[str, dict[str, bool]] = {}
    for name, path in paths_by_name.items():
        parts.setdefault(path, {})[name] = layout.is_ignored([it + name for it in _MODULE_PREFIXES])
    for own in parts.values():
        if len(set(own.values())) > 1:
            some = " and ".join(name for name, ignored in own.items() if ignored)
            raise ValueError(
                f"model config: quantization_config leaves {some} as they are, but not all of "
                f"{', '.join(own)}, which are computed together: a checkpoint must treat them alike"
            )
    return tuple(sorted(path for path, own in parts.items() if all(own.values())))


def _read_compressed_tensors(fields: ConfigFields) -> _QuantizationLayout:
    formats = ("float-quantized", "naive-quantized")
    is_kv_only = (
        fields.get("config_groups") == {}
    )  # of a checkpoint with scales for the cache alone
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
    weights, rows = (_read_scheme(group, each) for each in ("weights", "input_activations"))
    group.refuse_unread()
    found = _FORMAT_BY_SCHEMES.get((weights, rows))
    if found is None:
        wanted = " or ".join(f"{w[0]} with {r[0]}" for w, r in _FORMAT_BY_SCHEMES)
        asked = f"{weights} with {rows}"
        raise field_error(f"{group.prefix}weights.strategy", asked, f"weights a {wanted}")

    def is_ignored(names: Sequence[str]) -> bool:
        is_target = any(_matches_pattern(each, targets) for each in names)
        return not is_target or any(_matches_pattern(each, ignored) for each in names)

    return _QuantizationLayout(found, is_ignored, _has_kv_scales(fields))


class _ScaleScheme(NamedTuple):
    """What has a scale together, and whether it is taken of each row as it comes."""

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
    """How compressed-tensors describes numbers, which must be in FP8."""
    if group.get(name) is None:
        raise field_error(group.prefix + name, None, "an object (weights alone in FP8 are not)")
    own = group.nested(name)
    strategy, is_dynamic = own.get("strategy"), own.get("dynamic", False)
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
        if (value := own.get(key, choices[0])) not in choices:
            raise field_error(own.prefix + key, value, " or ".join(map(str, choices)))
    own.ignore({"observer", "observer_kwargs"})  # of how scales were found
    own.refuse_unread()
    return _ScaleScheme(str(strategy), is_dynamic is True)


def _matches_pattern(module: str, patterns: Sequence[str]) -> bool:
    """As compressed-tensors has it: a name, an expression after "re:", or the class of all."""
    for pattern in patterns:
        if pattern.startswith("re:"):
            if _compile_pattern(pattern.removeprefix("re:"), "ignore").match(module):
                return True
        elif pattern in (module, "Linear"):
            return True
    return False


def _read_fp8(fields: ConfigFields) -> _QuantizationLayout:
    """Of transformers, and AutoFP8 before it."""
    fields.choice("fmt", "e4m3", (None, "e4m3"))
    fields.choice("scale_fmt", "float", (None, "float"))
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
    """Whether the checkpoint has a scale for the keys of each layer, and one for the values."""
    scheme = fields.get("kv_cache_scheme")
    if scheme in (None, "static"):
        return scheme is not None
    own = fields.nested("kv_cache_scheme")
    wanted = {"num_bits": 8, "type": "float", "dynamic": False}
    wanted |= {"symmetric": True, "strategy": "tensor", "group_size": None}
    for name, value in wanted.items():
        if own.get(name, value) != value:
            raise field_error(own.prefix + name, own.get(name), value)
    return True


def _read_name_list(fields: ConfigFields, name: str) -> list[str]:
    value = fields.get(name)
    value = [] if value is None else value
    if not isinstance(value, list | tuple) or not all(isinstance(each, str) for each in value):
        raise field_error(fields.prefix + name, value, "a list of names")
    return list(value)


def _compile_pattern(pattern: str, name: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise field_error(f"quantization_config.{name}", pattern, "expressions of re") from error
