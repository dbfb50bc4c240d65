"""Test `jpaged calibrate`, which measures FP8 scales of keys and values on a text."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from e2e_options import ANSWER, Engines, generate_text, scores
from flax import nnx
from safetensors.numpy import load_file

from jpaged.calibrate.__main__ import main
from jpaged.calibrate.scales import SCALES_FILE_NAME, calibrate, compute_scales
from jpaged.config import EMBEDDED_MODEL
from jpaged.models.checkpoint import CheckpointError, read_config
from jpaged.models.registry import read_model_config
from jpaged.models.weight_plan import plan_model
from jpaged.text.tokenizer import Tokenizer

NUMBERS = "\n".join(f"What is {n} + {7 * n}?\n{8 * n}" for n in range(40, 60))
WORDS = (
    "Count from 1 to 30\n" + ", ".join(map(str, range(1, 31))) + "\nSort the letters of plum\nlmpu"
)
TEXT = f"{NUMBERS}\n{WORDS}"
PROMPTS = [NUMBERS[:200], NUMBERS[-200:], WORDS]
LENGTH = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Calibrate the FP8 scales of keys and values on `TEXT`, for the model that ships with jpaged.
    Return the folder with the model and the scales."""
    folder = tmp_path_factory.mktemp("calibrated")
    calibrate(EMBEDDED_MODEL, TEXT, folder, length=LENGTH)
    return folder


def test_scales_are_absmax_over_448_rounded_up_to_powers_of_2(folder: Path):
    """The expected scales come from the keys and values that `transformers` computes for the same
    sequences."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        EMBEDDED_MODEL, dtype=torch.float32, attn_implementation="eager"
    )
    first, *rest = Tokenizer.from_folder(EMBEDDED_MODEL).encode(TEXT)
    found = []
    for start in range(0, len(rest), LENGTH - 1):
        ids = torch.tensor([[first, *rest[start : start + LENGTH - 1]]])
        with torch.no_grad():
            cache = model(ids, use_cache=True).past_key_values
        found.append(
            [[float(it.keys.abs().max()), float(it.values.abs().max())] for it in cache.layers]
        )
    assert len(found) > 3
    largest = np.max(found, axis=0)
    tensors = load_file(folder / SCALES_FILE_NAME)
    assert len(tensors) == largest.size
    for layer, pair in enumerate(largest):
        for kind, value in zip("kv", pair, strict=True):
            (scale,) = tensors[f"model.layers.{layer}.self_attn.{kind}_scale"]
            assert value / 448 <= scale * (1 + 1e-4) < 2 * value / 448 * (1 + 1e-3)
            assert np.log2(scale) % 1 == 0


def test_calibrated_scale_of_a_layer_of_zeros_is_1_and_infinite_values_are_refused():
    largest = np.array([[0.0, 448.0], [1000.0, 7.0]], np.float32)
    np.testing.assert_array_equal(compute_scales(largest), [[1.0, 1.0], [4.0, 2.0**-6]])
    with pytest.raises(ValueError, match="the values of layer 1 are not finite"):
        compute_scales(np.array([[1.0, 1.0], [1.0, np.inf]], np.float32))


@pytest.mark.full
def test_calibrated_fp8_scales_are_at_least_as_accurate_as_scales_of_1(
    engines: Engines, folder: Path
):
    options: dict[str, Any] = {"enable_prefix_caching": False}
    wide = scores(engines(**options), PROMPTS)
    drifts = [
        np.abs(scores(engines(model, kv_cache_dtype="fp8", **options), PROMPTS) - wide).mean()
        for model in (None, folder)
    ]
    assert 0 < drifts[1] <= 1.02 * drifts[0]
    engine = engines(folder, kv_cache_dtype="fp8", **options)
    assert generate_text(engine) == ANSWER


def test_calibrated_scales_change_nothing_without_an_fp8_cache(engines: Engines, folder: Path):
    options: dict[str, Any] = {"enable_prefix_caching": False}
    calibrated, plain = (scores(engines(it, **options), PROMPTS) for it in (folder, None))
    np.testing.assert_array_equal(calibrated, plain)


def test_compressed_tensors_library_reads_the_saved_config(folder: Path):
    library = pytest.importorskip("compressed_tensors.quantization")
    content = read_config(folder)["quantization_config"]
    read = library.QuantizationConfig.model_validate(content)
    assert read.kv_cache_scheme.num_bits == 8
    assert read.kv_cache_scheme.strategy == "tensor"
    assert not read.config_groups


def test_calibration_keeps_the_fp8_config_and_the_names_of_the_weight_files(tmp_path: Path):
    source, folder = tmp_path / "source", tmp_path / "folder"
    source.mkdir()
    for file in EMBEDDED_MODEL.iterdir():
        name = file.name.replace("model.safetensors", "part-1.safetensors")
        (source / name).write_bytes(file.read_bytes())
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "modules_to_not_convert": ["model"]}
    (source / "config.json").write_text(json.dumps(config))
    scales = calibrate(source, WORDS, folder, length=LENGTH)
    assert list(scales) == [f"layers.{i}" for i in range(config["num_hidden_layers"])]
    kept = read_config(folder)["quantization_config"]
    assert kept.pop("kv_cache_scheme")["dynamic"] is False
    assert kept == config["quantization_config"]
    assert (folder / "part-1.safetensors").resolve() == source / "part-1.safetensors"
    found = read_model_config(read_config(folder)).quantization
    assert found is not None
    assert found.has_kv_scales


def test_opt_model_loads_with_calibrated_scales(tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 64, "num_hidden_layers": 2}
    opt = transformers.OPTConfig(
        vocab_size=264, num_attention_heads=2, max_position_embeddings=128, **sizes
    )
    source, folder = tmp_path / "opt", tmp_path / "folder"
    transformers.OPTForCausalLM(opt).save_pretrained(source)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (source / name).write_bytes((EMBEDDED_MODEL / name).read_bytes())
    scales = calibrate(source, WORDS, folder, length=LENGTH)
    config = read_model_config(read_config(folder))
    plan_model(folder, config, dtype=jnp.float32)
    narrow = replace(config, kv_cache_dtype="float8_e4m3fn")
    state = nnx.state(plan_model(folder, narrow, dtype=jnp.float32).load())
    found = {
        ".".join(map(str, path[:2])): leaf[...].item()
        for path, leaf in nnx.to_flat_state(state)
        if path[-1] == "k_scale"
    }
    assert found == {layer: pair[0] for layer, pair in scales.items()}


@pytest.mark.parametrize(
    ("existing", "message"),
    [
        ("weights.safetensors", r"weights.safetensors: rename this file, because"),
        (SCALES_FILE_NAME, f"contains {SCALES_FILE_NAME}: rename this file, because"),
    ],
)
def test_calibrate_refuses_a_checkpoint_file_with_the_name_of_an_output_file(
    tmp_path: Path, existing: str, message: str
):
    source = tmp_path / "source"
    shutil.copytree(EMBEDDED_MODEL, source)
    (source / existing).write_bytes(b"")
    with pytest.raises(CheckpointError, match=message):
        calibrate(source, WORDS, tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"text": ""}, "the text has no tokens"),
        ({"length": 1}, "length=1 must be at least 2"),
        ({"folder": EMBEDDED_MODEL}, "exists and is not an empty folder: pass a new folder"),
        ({"dtype": "int8"}, "dtype="),
    ],
)
def test_invalid_calibration_is_refused_before_writing(tmp_path: Path, change, words):
    options: dict[str, Any] = {"text": WORDS, "folder": tmp_path / "new", **change}
    with pytest.raises(ValueError, match=words):
        calibrate(EMBEDDED_MODEL, **options)
    assert not (tmp_path / "new").exists()


def test_calibrate_refuses_a_checkpoint_with_scales_and_changes_nothing(
    folder: Path, tmp_path: Path
):
    with pytest.raises(CheckpointError, match="has scales of keys and values: load it as it is"):
        calibrate(folder, WORDS, tmp_path / "new")


def test_calibrate_command_prints_the_scales(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "text.txt").write_text(WORDS)
    arguments = [str(EMBEDDED_MODEL), str(tmp_path / "text.txt"), str(tmp_path / "new")]
    assert main([*arguments, "--length", str(LENGTH)]) == 0
    out = capsys.readouterr().out
    assert "layers.5: k_scale 0.0" in out
    assert 'load it with kv_cache_dtype="fp8"' in out
    assert main(arguments) == 1
    assert capsys.readouterr().err.startswith(f"error: {tmp_path / 'new'} already exists")
