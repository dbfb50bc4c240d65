"""Test reading `quantization_config` of config.json, and the errors for unsupported values."""

import re
from dataclasses import replace
from typing import Any

import pytest

from jpaged.models.config import ModelConfig
from jpaged.models.expert_formats import expert_format
from jpaged.models.formats import Projection, UnquantizedFormat, WeightFormat
from jpaged.models.fp8 import (
    FP8BlockFormat,
    FP8ChannelFormat,
    FP8Format,
    FP8StaticChannelFormat,
    FP8StaticTensorFormat,
    FP8TensorFormat,
)
from jpaged.models.registry import read_model_config, weight_rules

LLAMA: dict[str, Any] = {"model_type": "llama", "vocab_size": 48, "hidden_size": 256}
LLAMA |= {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
LLAMA |= {"intermediate_size": 512, "max_position_embeddings": 16}
WEIGHTS = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
WEIGHTS |= {"strategy": "channel", "observer": "minmax", "observer_kwargs": {}, "actorder": None}
ROWS = WEIGHTS | {"strategy": "token", "dynamic": True, "observer": None}
GROUP: dict[str, Any] = {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": ROWS}
GROUP |= {"output_activations": None}
COMPRESSED: dict[str, Any] = {"quant_method": "compressed-tensors", "format": "float-quantized"}
COMPRESSED |= {"quantization_status": "compressed", "global_compression_ratio": 1.46}
COMPRESSED |= {"version": "0.9.1", "sparsity_config": {}, "transform_config": {}}
COMPRESSED |= {"kv_cache_scheme": None, "ignore": ["lm_head"], "config_groups": {"group_0": GROUP}}
BLOCKS: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
BLOCKS |= {"weight_block_size": [128, 128]}
MODELOPT: dict[str, Any] = {"quant_method": "modelopt", "quant_algo": "FP8"}
MODELOPT |= {"kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
MODELOPT |= {"producer": {"name": "modelopt", "version": "0.25"}}
KV_CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}


def read(config: dict[str, Any] | None, asked: str | None = None, **fields: Any) -> ModelConfig:
    return read_model_config(LLAMA | fields | {"quantization_config": config}, asked)


def group(**changes: Any) -> dict[str, Any]:
    """Return the configuration `COMPRESSED`, with `changes` applied to its only group of layers."""
    return COMPRESSED | {"config_groups": {"group_0": GROUP | changes}}


def formats(config: ModelConfig) -> dict[str, type[WeightFormat]]:
    """Return the weight format of each quantized projection by the projection's path."""
    paths = [f"layers.{i}.{path}" for i in range(3) for path in config.projections]
    found = {path: config.projection(path) for path in paths}
    assert all(isinstance(it, Projection) for it in found.values())
    return {
        path: it.format for path, it in found.items() if it and it.format is not UnquantizedFormat
    }


@pytest.mark.parametrize(
    ("config", "expected", "has_kv_scales"),
    [
        (COMPRESSED, FP8ChannelFormat, False),
        (group(input_activations=ROWS | {"strategy": "tensor", "dynamic": False}),
         FP8StaticChannelFormat, False),
        (group(weights=WEIGHTS | {"strategy": "tensor"}), FP8TensorFormat, False),
        (group(weights=WEIGHTS | {"strategy": "block", "block_structure": [128, 128]},
               input_activations=ROWS | {"strategy": "group", "group_size": 128}),
         FP8BlockFormat, False),
        (COMPRESSED | {"kv_cache_scheme": KV_CACHE}, FP8ChannelFormat, True),
        (BLOCKS, FP8BlockFormat, False),
        (BLOCKS | {"weight_block_size": None}, FP8TensorFormat, False),
        (BLOCKS | {"weight_block_size": None, "activation_scheme": "static"},
         FP8StaticTensorFormat, False),
        (MODELOPT, FP8StaticTensorFormat, True),
        (MODELOPT | {"kv_cache_quant_algo": None}, FP8StaticTensorFormat, False),
    ],
)  # fmt: skip
def test_published_quantization_layouts_are_read(
    config: dict[str, Any], expected: type[WeightFormat], has_kv_scales: bool
):
    model = read(config)
    assert model.quantization is not None
    assert model.quantization.has_kv_scales == has_kv_scales
    assert len(formats(model)) == 12
    assert set(formats(model).values()) == {expected}


def test_unquantized_checkpoint_is_quantized_only_on_request():
    assert formats(read(None)) == {}
    assert set(formats(read(None, "fp8")).values()) == {FP8Format}


def test_quantization_config_with_only_kv_scales_is_read():
    config = {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}}
    config |= {"kv_cache_scheme": KV_CACHE, "ignore": []}
    for asked, expected in ((None, set()), ("compressed-tensors", set()), ("fp8", {FP8Format})):
        model = read(config, asked)
        assert set(formats(model).values()) == expected
        assert model.quantization is not None
        assert model.quantization.has_kv_scales
    with pytest.raises(ValueError, match="quantization='modelopt'"):
        read(config, "modelopt")
    with pytest.raises(ValueError, match="format"):
        read(config | {"format": "int-quantized"})


def test_requested_quantization_must_match_the_checkpoint():
    assert read(COMPRESSED, "compressed-tensors") == read(COMPRESSED)
    with pytest.raises(ValueError, match=r"quantization='fp8', but .* is 'compressed-tensors'\)"):
        read(COMPRESSED, "fp8")
    with pytest.raises(ValueError, match=r"quantization='modelopt', but config.json has no"):
        read(None, "modelopt")


MOE = LLAMA | {"model_type": "qwen3_moe", "head_dim": 64, "moe_intermediate_size": 384}
MOE |= {"num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": [0]}
MIXTRAL = LLAMA | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
GATES = [f"model.layers.{i}.mlp.gate" for i in (1, 2)]
STATIC_ROWS = ROWS | {"strategy": "tensor", "dynamic": False}


def read_experts(config: dict[str, Any] | None, asked: str | None = None, fields: Any = MOE) -> Any:
    """Return the name of the format of each layer's experts; None for dense layers."""
    model = read_model_config(fields | {"quantization_config": config}, asked)
    return [
        None if layer.experts is None else expert_format(model, index).__name__
        for index, layer in enumerate(model.layers)
    ]


@pytest.mark.parametrize(
    ("config", "asked", "expected"),
    [
        (None, None, "UnquantizedExpertFormat"),
        (None, "fp8", "FP8ExpertFormat"),
        (COMPRESSED | {"ignore": ["lm_head", "re:.*mlp.gate$"]}, None, "FP8ChannelExpertFormat"),
        (COMPRESSED | {"ignore": ["lm_head", *GATES]}, None, "FP8ChannelExpertFormat"),
        (group(weights=WEIGHTS | {"strategy": "tensor"}), None, "FP8TensorExpertFormat"),
        (BLOCKS | {"modules_to_not_convert": ["lm_head", *GATES]}, None, "FP8BlockExpertFormat"),
        (MODELOPT | {"exclude_modules": ["*.experts.*"]}, None, "UnquantizedExpertFormat"),
    ],
)
def test_experts_have_the_format_of_their_checkpoint(config: Any, asked: Any, expected: str):
    assert read_experts(config, asked) == [None, expected, expected]


@pytest.mark.parametrize(
    "config",
    [
        COMPRESSED | {"ignore": ["re:.*layers.1.mlp.*"]},
        BLOCKS | {"modules_to_not_convert": ["model.layers.1.mlp.experts"]},
    ],
)
def test_ignored_experts_of_a_layer_stay_unquantized(config: dict[str, Any]):
    first, second = read_experts(config)[1:]
    assert first == "UnquantizedExpertFormat"
    assert second.startswith("FP8")


def test_projections_of_one_expert_must_have_the_same_quantization():
    with pytest.raises(ValueError, match=r"leaves only .*experts.0.gate_proj unquantized"):
        read_experts(COMPRESSED | {"ignore": ["re:.*experts.*gate.*"]})
    with pytest.raises(ValueError, match=r"leaves only .*experts.0.w2 unquantized"):
        read_experts(BLOCKS | {"ignored_layers": ["w2"]}, None, MIXTRAL)


@pytest.mark.parametrize(
    ("fields", "config", "name", "expected"),
    [
        (MIXTRAL, COMPRESSED, "layers.2.block_sparse_moe.experts.3.w3.weight_scale",
         ("layers.2.mlp.gate_up_weight_scale", 3, 1)),
        (MIXTRAL, BLOCKS, "layers.2.block_sparse_moe.experts.3.w2.weight_scale_inv",
         ("layers.2.mlp.down_weight_scale", 3, 0)),
        (MOE | {"moe_intermediate_size": 256}, BLOCKS, "layers.1.mlp.experts.down_proj_scale_inv",
         ("layers.1.mlp.down_weight_scale", None, 0)),
    ],
)  # fmt: skip
def test_expert_scales_have_the_tensor_names_of_the_model_family(fields, config, name, expected):
    model = read_model_config(fields | {"quantization_config": config})
    rule = weight_rules(model).find(f"model.{name}")
    assert rule is not None
    assert (rule.target, rule.expert, rule.start) == expected


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (group(input_activations=STATIC_ROWS), "fp8_channel_static"),
        (BLOCKS | {"weight_block_size": None, "activation_scheme": "static"}, "fp8_tensor_static"),
        (MODELOPT, "fp8_tensor_static"),
    ],
)
def test_static_scales_of_experts_are_refused(config: dict[str, Any], name: str):
    complaint = rf"has static scales of activations \({name}\), which the experts of model_type='qw"
    with pytest.raises(ValueError, match=complaint):
        read_model_config(MOE | {"quantization_config": config})


SPLIT = {"quantization_config": BLOCKS, "head_dim": 128, "num_key_value_heads": 4}
SPLIT |= {"intermediate_size": 512}


def test_devices_do_not_split_scale_blocks_of_experts():
    model = read_model_config(MOE | SPLIT)
    wrong = (
        r"moe_intermediate_size=384 of an expert, whose .* one scale per 128 rows; use 1, or set"
    )
    with pytest.raises(
        ValueError, match=f"size=2 cannot split the model's {wrong} enable_expert_p"
    ):
        model.shard(2)
    shard = replace(model, enable_expert_parallel=True).shard(2)
    assert shard.experts is not None
    assert shard.experts.num_local_experts == 2
    assert read_model_config(MOE | SPLIT | {"moe_intermediate_size": 512}).shard(2).experts
    sparse = MOE | SPLIT | {"mlp_only_layers": [], "moe_intermediate_size": 512}
    assert read_model_config(sparse | {"intermediate_size": 100}).shard(2).experts
    unquantized = BLOCKS | {"ignored_layers": [".*mlp.*"]}
    assert read_model_config(MOE | SPLIT | {"quantization_config": unquantized}).shard(2).experts


ONLY_FIRST_DOWN = {"layers.0.mlp.down"}


@pytest.mark.parametrize(
    ("config", "unquantized"),
    [
        (COMPRESSED | {"ignore": ["model.layers.0.mlp.down_proj"]}, ONLY_FIRST_DOWN),
        (COMPRESSED | {"ignore": ["re:.*[.]0[.]mlp.down_proj$"]}, ONLY_FIRST_DOWN),
        (COMPRESSED | {"ignore": ["model.layers.0.mlp"]}, set()),
        (COMPRESSED | {"ignore": ["re:.*q_proj", "re:.*k_proj", "re:.*v_proj"]},
         {f"layers.{i}.attention.qkv" for i in range(3)}),
        (group(targets=["re:.*mlp.*"]),
         {f"layers.{i}.attention.{each}" for i in range(3) for each in ("qkv", "output")}),
        (group(targets=[r"re:model\.layers\.[12]\..*", "model.layers.0.self_attn.o_proj"]),
         {"layers.0.attention.qkv", "layers.0.mlp.gate_up", "layers.0.mlp.down"}),
        (BLOCKS | {"modules_to_not_convert": ["model.layers.0.mlp.down_proj"]}, ONLY_FIRST_DOWN),
        (BLOCKS | {"modules_to_not_convert": ["layers.0.mlp.down_proj"]}, ONLY_FIRST_DOWN),
        (BLOCKS | {"modules_to_not_convert": ["model.layers.0.mlp"]},
         {"layers.0.mlp.down", "layers.0.mlp.gate_up"}),
        (BLOCKS | {"modules_to_not_convert": ["model.layers.0.mlp.down"]}, set()),
        (BLOCKS | {"modules_to_not_convert": ["model.layers.0.input_layernorm"]}, set()),
        (BLOCKS | {"ignored_layers": ["model.layers.0.mlp.down_proj"]}, ONLY_FIRST_DOWN),
        (MODELOPT | {"exclude_modules": ["model.layers.0.mlp.down*"]}, ONLY_FIRST_DOWN),
        (MODELOPT | {"exclude_modules": ["model.layers.0.mlp.down"]}, set()),
    ],
)  # fmt: skip
def test_ignored_modules_stay_unquantized(config: dict[str, Any], unquantized: set[str]):
    paths = {f"layers.{i}.{path}" for i in range(3) for path in read(None).projections}
    assert paths - formats(read(config)).keys() == unquantized


def test_fused_projections_must_have_the_same_quantization():
    ignored = ["model.layers.1.self_attn.q_proj"]
    with pytest.raises(ValueError, match=r"leaves only layers.1.self_attn.q_proj unquantized"):
        read(COMPRESSED | {"ignore": ignored})


def test_quantization_of_the_text_model_in_a_multimodal_checkpoint_is_read():
    text = {key: value for key, value in LLAMA.items() if key != "model_type"}
    text |= {"head_dim": 64, "model_type": "gemma3_text", "rms_norm_eps": 1e-6}
    config: dict[str, Any] = {"model_type": "gemma3", "text_config": text}
    name = "model.language_model.layers.0.mlp.down_proj"
    model = read_model_config(
        config | {"quantization_config": COMPRESSED | {"ignore": ["re:vision_tower.*", name]}}
    )
    assert model.quantization is not None
    assert model.quantization.unquantized_paths == ("layers.0.mlp.down",)
    with pytest.raises(ValueError, match="quantization_config"):
        read_model_config({**config, "text_config": text | {"quantization_config": COMPRESSED}})


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({}, "quant_method=None"),
        (BLOCKS | {"quant_method": "gptq"}, "quant_method='gptq'"),
        (BLOCKS | {"activation_scheme": "never"}, "activation_scheme='never'"),
        (BLOCKS | {"activation_scheme": "static"}, "weight_block_size=[128, 128]"),
        (BLOCKS | {"weight_block_size": [64, 128]}, "weight_block_size=[64, 128]"),
        (BLOCKS | {"weight_block_size": 128}, "weight_block_size=128"),
        (BLOCKS | {"fmt": "e5m2"}, "fmt='e5m2'"),
        (BLOCKS | {"scale_fmt": "ue8m0"}, "scale_fmt='ue8m0'"),
        (BLOCKS | {"modules_to_convert": ["embed"]}, "modules_to_convert=['embed']"),
        (BLOCKS | {"modules_to_not_convert": "lm_head"}, "modules_to_not_convert='lm_head'"),
        (BLOCKS | {"modules_to_not_convert": ["("]}, "modules_to_not_convert='(?:()"),
        (BLOCKS | {"rotate": True}, "rotate=True"),
        (BLOCKS | {"expert_dtype": "fp4"}, "expert_dtype='fp4'"),
        (BLOCKS | {"dequantize": True}, "dequantize=True"),
        ({"quant_method": "modelopt", "exclude_modules": ["lm_head"]}, "quant_algo=None"),
        (COMPRESSED | {"format": "pack-quantized"}, "format='pack-quantized'"),
        (COMPRESSED | {"sparsity_config": {"format": "sparse"}}, "sparsity_config={"),
        (COMPRESSED | {"transform_config": {"a": {}}}, "transform_config={"),
        (COMPRESSED | {"config_groups": None}, "config_groups=None"),
        (COMPRESSED | {"config_groups": {"a": {}, "b": {}}}, "config_groups={"),
        (COMPRESSED | {"config_groups": {"a": []}}, "config_groups.a=[]"),
        (COMPRESSED | {"ignore": ["re:("]}, "ignore='('"),
        (COMPRESSED | {"kv_cache_scheme": KV_CACHE | {"num_bits": 4}},
         "kv_cache_scheme.num_bits=4"),
        (COMPRESSED | {"kv_cache_scheme": KV_CACHE | {"strategy": "attn_head"}},
         "kv_cache_scheme.strategy='attn_head'"),
        (COMPRESSED | {"kv_cache_scheme": 8}, "kv_cache_scheme=8"),
        (group(input_activations=None), "group_0.input_activations=None"),
        (group(weights=None), "group_0.weights=None"),
        (group(output_activations=ROWS), "group_0.output_activations={"),
        (group(weights=WEIGHTS | {"num_bits": 4}), "group_0.weights.num_bits=4"),
        (group(weights=WEIGHTS | {"type": "int"}), "group_0.weights.type='int'"),
        (group(weights=WEIGHTS | {"symmetric": False}), "group_0.weights.symmetric=False"),
        (group(weights=WEIGHTS | {"strategy": "block", "block_structure": [1, 2]}),
         "group_0.weights.block_structure=[1, 2]"),
        (group(weights=WEIGHTS | {"rotated": True}), "group_0.weights.rotated=True"),
        (group(input_activations=ROWS | {"dynamic": "local"}), "activations.dynamic='local'"),
        (group(input_activations=ROWS | {"strategy": "tensor"}), "group_0.weights.strategy="),
        (group(weights=WEIGHTS | {"dynamic": True}), "group_0.weights.strategy="),
        (group(zeros=1), "group_0.zeros=1"),
        (MODELOPT | {"quant_algo": "NVFP4"}, "quant_algo='NVFP4'"),
        (MODELOPT | {"kv_cache_quant_algo": "NVFP4"}, "kv_cache_quant_algo='NVFP4'"),
        (MODELOPT | {"has_zero_point": True}, "has_zero_point=True"),
    ],
)  # fmt: skip
def test_error_for_an_unknown_quantization_field_names_the_field(
    config: dict[str, Any], field: str
):
    with pytest.raises(ValueError, match=re.escape(field)) as error:
        read(config)
    assert str(error.value).startswith("model config: quantization_config.")
