"""Test models with FP8 weights, in each layout of a checkpoint that libraries publish."""

import itertools
import json
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import fp8_checkpoints as made
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from fp8_checkpoints import TOKENS, random_model
from harness import Harness, PagedSequence
from hf_models import reference
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from jpaged.models import loader
from jpaged.models.checkpoint import CheckpointError, read_config
from jpaged.models.decoder import Decoder, DecoderLayer, FeedForward
from jpaged.models.formats import UnquantizedFormat
from jpaged.models.fp8 import FP8BlockFormat, FP8StaticTensorFormat
from jpaged.models.registry import read_model_config
from jpaged.models.sharding import make_mesh, shard_slices
from jpaged.models.weight_plan import model_parameters, plan_model
from pallas_kernels import Backend, quantize_rows
from tests.covering import covering
from tests.reference import kernels as reference_kernels

F32 = jnp.float32
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
SMALL = HEADS | {"hidden_size": 64, "intermediate_size": 96}
WIDE = HEADS | {"hidden_size": 256, "intermediate_size": 384}
ODD = {"hidden_size": 192, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32}
ODD |= {"intermediate_size": 320, "tie_word_embeddings": True}


def load(folder: Path, quantization: str | None = None, **options: Any) -> Decoder:
    config = read_model_config(read_config(folder), quantization)
    model = plan_model(folder, config, dtype=F32, **options).load()
    assert isinstance(model, Decoder)
    return model


def logits_of(model: Decoder) -> np.ndarray:
    """Return the logits of all tokens, from one prefill step and two decode steps."""
    harness, sequence = Harness(model), PagedSequence(TOKENS)
    return np.concatenate([harness.step([(sequence, n)])[0] for n in (len(TOKENS) - 2, 1, 1)])


def difference(got: np.ndarray, expected: np.ndarray) -> float:
    """Return the root mean square of the difference, divided by the root mean square of
    `expected`."""
    return float(np.sqrt(np.square(got - expected).mean() / np.square(expected).mean()))


@pytest.mark.parametrize(
    ("weights", "rows"),
    [*itertools.product(["channel", "tensor"], ["token", "static"]), ("block", "group")],
)
def test_checkpoint_gives_the_same_logits_as_the_compressed_tensors_library(
    tmp_path, weights, rows
):
    model = random_model(**(WIDE if weights == "block" else SMALL))
    expected = made.compressed(model, tmp_path, weights, rows)
    ours = load(tmp_path)
    dtypes = {path: array.dtype for path, array in model_parameters(ours).items()}
    assert dtypes["layers.0.mlp.down.weight"] == jnp.float8_e4m3fn
    assert dtypes["embed.weight"] == jnp.float32
    assert difference(logits_of(ours), expected) < 1e-3
    assert difference(made.logits_of(model), expected) > 0.01


@pytest.mark.parametrize("case", ["llama3-biases", "opt-350m", "qwen2", "gemma3"])
def test_projections_of_every_family_can_be_in_fp8(tmp_path, case):
    # transformers' OPT passes rows without a batch axis to fc1 and fc2. compressed-tensors would
    # then compute one scale per number instead of one per row, so the test leaves fc1 and fc2
    # unquantized.
    ignored = ("re:.*fc[12]",) if case == "opt-350m" else ()
    expected = made.compressed(reference(case), tmp_path, "channel", "token", ignored)
    assert difference(logits_of(load(tmp_path)), expected) < 1e-3


@pytest.mark.parametrize(
    ("case", "slab_bytes"),
    covering(["llama3-biases", "opt-350m", "gemma3"], [1000, loader.SLAB_BYTES], strength=1),
)
def test_quantizing_while_loading_equals_an_fp8_checkpoint(tmp_path, monkeypatch, case, slab_bytes):
    reference(case).save_pretrained(tmp_path / "wide")
    made.compressed(reference(case), tmp_path / "fp8", "channel", "token")
    monkeypatch.setattr(loader, "SLAB_BYTES", slab_bytes)
    got = model_parameters(load(tmp_path / "wide", "fp8"))
    expected = model_parameters(load(tmp_path / "fp8"))
    assert got.keys() == expected.keys()
    for path, value in expected.items():
        np.testing.assert_array_equal(got[path].astype(F32), value.astype(F32), err_msg=path)


def test_transposed_weights_are_quantized_while_loading(tmp_path, monkeypatch):
    # The loader reads 100 bytes at a time, less than one output channel of GPT-2.
    monkeypatch.setattr(loader, "SLAB_BYTES", 100)
    model = reference("gpt2")
    model.save_pretrained(tmp_path)
    got = model_parameters(load(tmp_path, "fp8"))
    weight = model.state_dict()["transformer.h.1.mlp.c_fc.weight"].numpy().T
    scale = np.abs(weight).max(1) / np.float32(448)
    np.testing.assert_allclose(got["layers.1.mlp.up.weight_scale"], scale, rtol=2e-7)
    scale = np.asarray(got["layers.1.mlp.up.weight_scale"])[:, None]
    values = got["layers.1.mlp.up.weight"].astype(F32)
    np.testing.assert_array_equal(values, reference_kernels.to_fp8(weight, scale))


@pytest.mark.parametrize(
    ("kind", "count"), covering(["channel", "static", "block", "loaded"], [2, 4], strength=1)
)
def test_tensor_parallel_devices_hold_shards_of_the_same_fp8_weights(tmp_path, kind, count):
    sizes = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2}
    sizes |= {"head_dim": 128, "intermediate_size": 1024, "num_hidden_layers": 1}
    model, quantization = random_model(**sizes), "fp8" if kind == "loaded" else None
    if kind == "loaded":
        model.save_pretrained(tmp_path)
    else:
        rows = {"channel": "token", "static": "static", "block": "group"}[kind]
        made.compressed(model, tmp_path, "block" if kind == "block" else "channel", rows)
    expected = model_parameters(load(tmp_path, quantization))
    sharded = load(tmp_path, quantization, mesh=make_mesh(jax.devices(), count))
    for path, array in model_parameters(sharded).items():
        module, _, name = path.rpartition(".")
        parts = ()
        if module.endswith("qkv") and name != "input_scale":
            kv_heads = 2, 2 // count or 1
            parts = [(8, 8 // count), kv_heads, kv_heads]
        elif module.endswith("gate_up") and name == "weight_scale" and kind == "block":
            parts = [(8, 8 // count)] * 2
        value = np.asarray(expected[path]).astype(np.float32)
        for device_index, shard in enumerate(array.addressable_shards):
            data = np.asarray(shard.data).astype(np.float32)
            for piece in shard_slices(value.shape, data.shape, device_index, count, parts):
                whole, local = (
                    tuple(slice(a, a + n) for a, n in zip(start, piece.shape, strict=True))
                    for start in (piece.unsharded_start, piece.local_start)
                )
                np.testing.assert_array_equal(data[local], value[whole], err_msg=path)


@pytest.mark.parametrize(
    ("count", "field"), [(2, "intermediate_size=384"), (8, "num_attention_heads=8")]
)
def test_devices_cannot_split_a_block_of_weights_that_shares_a_scale(tmp_path, count, field):
    sizes = WIDE | {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64}
    made.compressed(random_model(**sizes), tmp_path, "block", "group")
    with pytest.raises(ValueError, match=f"size={count} .*{field}, whose .*; use 1$"):
        read_model_config(read_config(tmp_path)).shard(count)


def test_weight_with_a_partial_scale_block_loads_on_one_device(tmp_path):
    made.compressed(random_model(**WIDE), tmp_path, "block", "group")
    config = replace(read_model_config(read_config(tmp_path)), num_heads=9, num_kv_heads=3)
    assert config.shard(1) is config
    with pytest.raises(ValueError, match=r"size=2 .*num_attention_heads=9; use 1$"):
        config.shard(2)


BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
BLOCKS |= {"fmt": "e4m3", "modules_to_not_convert": ["lm_head", "model.layers.0.input_layernorm"]}
AUTO = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
AUTO_DYNAMIC = AUTO | {"activation_scheme": "dynamic"}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": None}
MODELOPT |= {"producer": {"name": "modelopt"}, "exclude_modules": ["lm_head", "*layers.1.mlp*"]}
LAYOUTS: dict[str, tuple[dict[str, Any], str, dict[str, Any], dict[str, str]]] = {
    "Qwen3-FP8": (WIDE, "block", BLOCKS, {"scale": "weight_scale_inv"}),
    "Qwen3-FP8, odd widths": (ODD, "block", BLOCKS, {"scale": "weight_scale_inv"}),
    "AutoFP8": (SMALL, "tensor", AUTO, {"scale": "weight_scale", "rows": "input_scale"}),
    "AutoFP8, dynamic": (SMALL, "tensor", AUTO_DYNAMIC, {"scale": "weight_scale"}),
    "transformers, a tensor": (
        SMALL,
        "tensor",
        AUTO | {"weight_block_size": None},
        {"scale": "weight_scale_inv", "rows": "activation_scale"},
    ),
    "ModelOpt": (SMALL, "tensor", MODELOPT, {"scale": "weight_scale", "rows": "input_scale"}),
}
BOUND = 0.1
"""Maximum `difference` from logits whose projections get unquantized inputs. FP8 changes an input
by 2.6 % on average."""


@contextmanager
def edited_config(folder: Path) -> Iterator[dict[str, Any]]:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    yield config
    file.write_text(json.dumps(config))


def change_tensors(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def published(folder: Path, name: str) -> PreTrainedModel:
    sizes, weights, config, names = LAYOUTS[name]
    return made.published(random_model(**sizes), folder, weights, config, **names)


def dense(layer: DecoderLayer) -> FeedForward:
    """Return the feed-forward of a layer without experts."""
    assert isinstance(layer.mlp, FeedForward)
    return layer.mlp


@pytest.mark.parametrize("name", LAYOUTS)
def test_weights_of_published_fp8_checkpoint_formats_dequantize_exactly(tmp_path, name):
    model = published(tmp_path, name)
    ours = load(tmp_path)
    for index, layer in enumerate(ours.layers):
        mlp = dense(layer)
        projections = layer.attention.qkv, layer.attention.output, mlp.gate_up, mlp.down
        for linear, names in zip(projections, NAMES, strict=True):
            paths = [f"model.layers.{index}.{each}.weight" for each in names]
            expected = torch.cat([model.get_parameter(path) for path in paths]).detach().numpy()
            np.testing.assert_array_equal(dequantized(linear), expected)
    assert difference(logits_of(ours), made.logits_of(model)) < BOUND


def test_fused_projections_use_the_largest_static_scale(tmp_path):
    published(tmp_path, "ModelOpt")
    scales = {
        f"model.layers.0.self_attn.{part}_proj.input_scale": torch.tensor(scale)
        for part, scale in {"q": 1.0, "k": 4.0, "v": 2.0}.items()
    }
    change_tensors(tmp_path, lambda tensors: tensors.update(scales))
    weight_format = load(tmp_path).layers[0].attention.qkv.format
    assert isinstance(weight_format, FP8StaticTensorFormat)
    static_scales = weight_format.static_scales
    assert static_scales is not None
    assert static_scales.tolist() == [1.0, 4.0, 2.0]
    _, row_scales = quantize_rows(jnp.ones((3, 64)), static_scales, backend=Backend.XLA)
    assert row_scales.tolist() == [[4.0]] * 3


NAMES = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)


def dequantized(linear: Any) -> np.ndarray:
    """Return the weight [out, in] in float32."""
    projection, weight_format = linear.projection, linear.format
    size_in, width = math.prod(projection.input_shape), math.prod(projection.trailing_shape)
    if isinstance(weight_format, UnquantizedFormat):
        return np.asarray(weight_format.weight[...]).reshape(size_in, -1).T
    weight = np.asarray(weight_format.weight[...].astype(F32)).reshape(-1, size_in)
    scale = np.asarray(weight_format.weight_scale[...])
    if not isinstance(weight_format, FP8BlockFormat):
        return weight * scale.reshape(-1, 1)
    sizes = [size * width for _, size in projection.parts]
    blocks = np.cumsum([0, *(-(-size // 128) for size in sizes)])
    rows = [np.arange(size) // 128 + first for size, first in zip(sizes, blocks, strict=False)]
    return weight * scale[np.concatenate(rows)][:, np.arange(size_in) // 128]


def test_projection_excluded_by_the_checkpoint_is_not_in_fp8(tmp_path):
    published(tmp_path, "ModelOpt")
    first, second = load(tmp_path).layers
    assert dense(first).down.projection.format is FP8StaticTensorFormat
    assert dense(second).down.projection.format is UnquantizedFormat
    assert second.attention.qkv.projection.format is FP8StaticTensorFormat


def test_hf_quant_config_file_of_modelopt_is_read(tmp_path):
    published(tmp_path, "ModelOpt")
    with edited_config(tmp_path) as config:
        fields = config.pop("quantization_config")
    fields.pop("quant_method")
    separate = {"producer": fields.pop("producer"), "quantization": fields}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(separate))
    found = read_model_config(read_config(tmp_path)).quantization
    assert found is not None
    assert found.format is FP8StaticTensorFormat
    assert found.unquantized_paths == ("layers.1.mlp.down", "layers.1.mlp.gate_up")


def with_kv_scales(folder: Path, scales: dict[str, float]) -> None:
    """Write a checkpoint with the KV scales `scales` in layer 0. Its config declares an FP8 KV
    cache."""
    published(folder, "ModelOpt")
    more = {f"model.layers.0.{name}": torch.tensor(value) for name, value in scales.items()}
    change_tensors(folder, lambda tensors: tensors.update(more))
    with edited_config(folder) as config:
        config["quantization_config"]["kv_cache_quant_algo"] = "FP8"


def load_kv_scales(folder: Path) -> dict[str, Any]:
    """Return the KV scales of a model with an FP8 cache."""
    config = replace(read_model_config(read_config(folder)), kv_cache_dtype="float8_e4m3fn")
    found = model_parameters(plan_model(folder, config, dtype=F32).load())
    return {path: array.tolist() for path, array in found.items() if re.search("[kv]_scale", path)}


@pytest.mark.parametrize(
    "scales",
    [
        {"k_scale": 0.5, "v_scale": 0.25},
        {"k_proj.k_scale": 0.5, "v_proj.v_scale": 0.25},
        {"k_proj.output_scale": 0.5, "v_proj.output_scale": 0.25},
        {"attn.k_scale": 0.5, "attn.v_scale": 0.25},
        {"kv_scale": 0.5},
        {"attn.kv_scale": 0.5},
    ],
    ids=lambda scales: ", ".join(scales),
)
def test_kv_scales_are_loaded_only_for_an_fp8_cache(tmp_path, scales):
    with_kv_scales(tmp_path, {f"self_attn.{name}": value for name, value in scales.items()})
    assert "layers.0.attention.k_scale" not in model_parameters(load(tmp_path))
    assert load_kv_scales(tmp_path) == {
        "layers.0.attention.k_scale": [0.5],
        "layers.0.attention.v_scale": [0.25 if len(scales) == 2 else 0.5],
        "layers.1.attention.k_scale": [1.0],
        "layers.1.attention.v_scale": [1.0],
    }


def test_kv_scales_without_a_config_entry_are_refused(tmp_path):
    published(tmp_path, "ModelOpt")
    scales = {f"model.layers.0.self_attn.{kind}_scale": torch.tensor(0.5) for kind in "kv"}
    change_tensors(tmp_path, lambda tensors: tensors.update(scales))
    for reader in (load, load_kv_scales):
        with pytest.raises(CheckpointError, match=r"unknown tensors \(2\): .*k_scale.*v_scale"):
            reader(tmp_path)


@pytest.mark.parametrize(
    ("scales", "complaint"),
    [
        (
            {"self_attn.k_scale": 0.5},
            r"scales without their counterpart .*layers.0.self_attn.k_scale \(its layer has no "
            r"v_scale: fetch the checkpoint again, or load it with kv_cache_dtype='auto'\)",
        ),
        ({"self_attn.v_proj.output_scale": 0.5}, r"v_proj.output_scale \(its layer has no k_scale"),
        (
            {"self_attn.kv_scale": 0.5, "self_attn.k_scale": 0.5, "self_attn.v_scale": 0.5},
            r"filled twice \(2\): layers.0.attention.k_scale by .*k_scale and .*kv_scale, layers",
        ),
        (
            {"self_attn.k_scale": 0.5, "self_attn.attn.k_scale": 0.5, "self_attn.v_scale": 0.5},
            r"filled twice \(1\): layers.0.attention.k_scale by .*k_scale and .*k_scale",
        ),
        *(
            (
                {"self_attn.k_scale": 0.5, "self_attn.v_scale": value},
                rf"layers.0.self_attn.v_scale in model.safetensors holds the scale {value:g}; "
                "scales must be positive and finite",
            )
            for value in (0.0, -1.0, math.nan, math.inf)
        ),
    ],
)
def test_invalid_kv_scales_are_refused(tmp_path, scales, complaint):
    with_kv_scales(tmp_path, scales)
    load(tmp_path)  # the scales are not read, because the KV cache is not FP8
    with pytest.raises(CheckpointError, match=complaint):
        load_kv_scales(tmp_path)


def test_empty_hf_quant_config_is_refused(tmp_path):
    published(tmp_path, "ModelOpt")
    with edited_config(tmp_path) as config:
        config.pop("quantization_config")
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": "FP8"}')
    complaint = r"hf_quant_config\.json has no object 'quantization'"
    with pytest.raises(CheckpointError, match=complaint):
        read_config(tmp_path)


Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda t: t.pop(f"{Q}.weight_scale"), r"missing piece .*attention.qkv.weight_scale along"),
        (lambda t: t.pop(f"{Q}.input_scale"), r"missing piece .*attention.qkv.input_scale along"),
        (
            lambda t: t.update({f"{Q}.weight": t[f"{Q}.weight"].bfloat16()}),
            r"wrong dtypes .*q_proj.weight is BF16, supported are F8_E4M3",
        ),
        (
            lambda t: t.update({"lm_head.weight": t["lm_head.weight"].to(torch.float8_e4m3fn)}),
            r"lm_head.weight is F8_E4M3, supported are F32, F16, BF16",
        ),
        (
            lambda t: t.update({f"{Q}.weight_scale": torch.ones(2)}),
            r"q_proj.weight_scale \[2\] should be \[\]",
        ),
        (lambda t: t.update({f"{Q}.weight_zero": torch.ones(1)}), r"unknown tensors .*weight_zero"),
    ],
)
def test_error_for_mismatched_fp8_tensors_names_the_tensors(tmp_path, change, complaint):
    published(tmp_path, "ModelOpt")
    change_tensors(tmp_path, change)
    with pytest.raises(CheckpointError, match=complaint):
        load(tmp_path)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize(
    ("layout", "tensor", "place"),
    [
        ("ModelOpt", "weight_scale", ()),
        ("ModelOpt", "input_scale", ()),
        ("Qwen3-FP8", "weight_scale_inv", (1, 0)),
    ],
)
def test_zero_negative_or_infinite_scales_are_refused(tmp_path, layout, tensor, place, value):
    published(tmp_path, layout)
    change_tensors(tmp_path, lambda tensors: tensors[f"{Q}.{tensor}"].__setitem__(place, value))
    complaint = f"{Q}.{tensor} in model.safetensors holds the scale {value:g}; scales must be posi"
    with pytest.raises(CheckpointError, match=re.escape(complaint)):
        load(tmp_path)


def test_error_counts_all_wrong_scales_of_a_tensor(tmp_path):
    published(tmp_path, "Qwen3-FP8")
    change_tensors(tmp_path, lambda tensors: tensors[f"{Q}.weight_scale_inv"].fill_(0.0))
    with pytest.raises(CheckpointError, match=r"holds the scale 0, and \d+ more of its numbers"):
        load(tmp_path)


def test_file_truncated_after_reading_its_header_is_refused(tmp_path):
    published(tmp_path, "Qwen3-FP8")
    plan = plan_model(tmp_path, read_model_config(read_config(tmp_path)), dtype=F32)
    file = tmp_path / "model.safetensors"
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size - 5000)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        plan.load()


def test_dummy_weights_can_be_in_fp8(tmp_path):
    published(tmp_path, "AutoFP8")
    logits = logits_of(load(tmp_path, load_format="dummy"))
    assert np.isfinite(logits).all()
    assert logits.std() > 0.01
