"""Test which unrecorded GEMMs are measured, where and how often, and the compiler options of
programs."""

import fcntl
import re
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from bench.common import SHAPES, UNRECORDED
from jpaged.compile import gemm_autotuning
from jpaged.compile.gemm_autotuning import (
    CUBLAS_AUTOTUNING,
    MIN_MEASURED_ROWS,
    NO_AUTOTUNING,
    AutotuningCompiler,
    Compiler,
    measure_gemms,
)
from jpaged.compile.recipes import SYNCHRONOUS_COLLECTIVES, Recipe
from jpaged.models.loader import make_abstract_model
from jpaged.models.registry import read_model_config
from jpaged.models.sharding import MESH_AXIS, make_mesh
from pallas_kernels import Backend

GATHER = r" all-gather(-start)?\("
"""A collective in XLA's text."""

GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 128,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 64,
}
SMALL = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
LLAMA = {**SHAPES["llama-3.1-8b"], **SMALL, "head_dim": 32, "intermediate_size": 96}
QWEN2 = {**UNRECORDED["qwen2.5-1.5b"], **SMALL, "intermediate_size": 96}
OPT = {**UNRECORDED["opt-13b"], **SMALL, "ffn_dim": 96, "word_embed_proj_dim": 32}


def model_of(config: dict[str, Any]) -> Any:
    return make_abstract_model(read_model_config(config), jnp.dtype(jnp.float32))


class Lowered:
    """Keeps the options it is compiled with."""

    def __init__(self):
        self.options: list[dict] = []

    def compile(self, options: dict) -> str:
        self.options.append(options)
        return "program"


def prefill(rows: int, seqs: int) -> Recipe:
    return Recipe(("prefill", (rows, seqs)), print, gemm_key=("layers", rows), num_logits_rows=seqs)


def decode(kind: str, rows: int) -> Recipe:
    return Recipe((kind, rows), print, gemm_key=("layers", rows), num_logits_rows=rows)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Return the measured products without compiling anything."""
    found: list[tuple[str, int]] = []
    note = lambda model, part, rows, backend: found.append((part, rows))  # noqa: E731
    monkeypatch.setattr(gemm_autotuning, "measure_gemms", note)
    return found


@pytest.mark.parametrize("options", [CUBLAS_AUTOTUNING, NO_AUTOTUNING, SYNCHRONOUS_COLLECTIVES])
def test_compiler_accepts_the_options(options: dict):
    """It refuses those that it does not."""
    shape = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    assert jax.jit(lambda x: x @ x).lower(shape).compile(options) is not None


def test_only_products_of_many_rows_are_measured(measured: list, tmp_path: Path):
    it, lowered = AutotuningCompiler(model_of(GPT2), Backend.XLA, tmp_path), Lowered()
    for recipe in (
        Recipe(("sample", (256, 0)), print),
        Recipe(("prompt_logprobs", 512), print, gemm_key=("head", 64)),
        decode("decode", 8),
        prefill(128, 8),
    ):
        assert it.compile(recipe, lowered) == "program"
    assert measured == []
    assert lowered.options == [NO_AUTOTUNING] * 4
    assert it.compile(decode("decode_burst", MIN_MEASURED_ROWS), lowered) == "program"
    assert lowered.options[4:] == [CUBLAS_AUTOTUNING]
    assert measured == [("layer", MIN_MEASURED_ROWS), ("head", MIN_MEASURED_ROWS)]


@pytest.mark.parametrize("rows", [8, MIN_MEASURED_ROWS])
def test_program_is_compiled_with_its_own_options(rows: int, measured: list, tmp_path: Path):
    recipe, lowered = replace(decode("decode", rows), options={"own": 1}), Lowered()
    AutotuningCompiler(model_of(GPT2), Backend.XLA, tmp_path).compile(recipe, lowered)
    Compiler().compile(recipe, lowered)
    assert lowered.options == [
        {**(NO_AUTOTUNING if rows < MIN_MEASURED_ROWS else CUBLAS_AUTOTUNING), "own": 1},
        {"own": 1},
    ]


def test_tensor_parallel_programs_use_synchronous_collectives(
    monkeypatch: pytest.MonkeyPatch,
):
    shape = jax.ShapeDtypeStruct((8,), jnp.float32)
    own = Recipe(("sum", None), lambda x: jax.lax.psum(x, MESH_AXIS), (shape,), options={"own": 1})
    assert own.on_mesh(None).options == {"own": 1}
    shared, given = own.on_mesh(make_mesh(jax.devices(), 2)), []
    assert shared.options == {"own": 1, **SYNCHRONOUS_COLLECTIVES}
    assert shared.with_unique_name().options == shared.options
    assert shared.key != replace(shared, options={}).key
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda it, options: given.append(options))
    shared.compile()
    shared.compile(shared.exported())
    assert given == [shared.options] * 2


@pytest.mark.gpu
@pytest.mark.gpu2
def test_collectives_have_no_separate_stream():
    """Without the option they have one where something else may run meanwhile."""
    if jax.default_backend() != "gpu" or jax.device_count() < 2:
        pytest.skip("needs two GPUs")

    def step(x: jax.Array) -> jax.Array:
        return jax.lax.all_gather(x, MESH_AXIS).sum(0) + x @ x @ x

    def are_in_line(recipe: Recipe) -> list[bool]:
        lines = recipe.with_unique_name().compile().as_text().splitlines()
        return ['"is_sync":true' in line for line in lines if re.search(GATHER, line)]

    shape = jax.ShapeDtypeStruct((2048, 2048), jnp.float32)
    shared = Recipe(("gather", None), step, (shape,)).on_mesh(make_mesh(jax.devices(), 2))
    assert are_in_line(shared) == [True]
    assert are_in_line(replace(shared, options={})) == [False]


def test_processes_with_one_folder_measure_each_size_once(measured: list, tmp_path: Path):
    first, second = (AutotuningCompiler(model_of(GPT2), Backend.XLA, tmp_path) for _ in range(2))
    first.compile(prefill(512, 8), Lowered())
    first.compile(prefill(512, 256), Lowered())
    second.compile(prefill(512, 8), Lowered())
    second.compile(prefill(1024, 256), Lowered())
    assert measured == [("layer", 512), ("head", 8), ("head", 256), ("layer", 1024)]
    AutotuningCompiler(model_of(LLAMA), Backend.XLA, tmp_path).compile(prefill(512, 8), Lowered())
    assert measured[4:] == [("layer", 512), ("head", 8)]


def test_without_a_folder_products_are_measured_once_too(measured: list):
    it, lowered = AutotuningCompiler(model_of(GPT2), Backend.XLA, None), Lowered()
    for _ in range(2):
        it.compile(prefill(512, 8), lowered)
    assert measured == [("layer", 512), ("head", 8)]
    assert lowered.options == [CUBLAS_AUTOTUNING] * 2


def test_unwritable_folder_does_not_stop_the_start(measured: list, tmp_path: Path):
    (tmp_path / "file").write_text("")
    it = AutotuningCompiler(model_of(GPT2), Backend.XLA, tmp_path / "file" / "folder")
    assert it.compile(prefill(512, 8), Lowered()) == "program"
    assert measured == [("layer", 512), ("head", 8)]
    it.compile(prefill(512, 8), Lowered())  # nor is anything measured twice for want of a mark
    assert measured == [("layer", 512), ("head", 8)]


def test_measurements_of_another_device_are_not_used(
    measured: list, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    AutotuningCompiler(model_of(GPT2), Backend.XLA, tmp_path).compile(prefill(512, 8), Lowered())
    client = SimpleNamespace(platform_version="another")
    other = SimpleNamespace(device_kind=jax.local_devices()[0].device_kind, client=client)
    monkeypatch.setattr(jax, "local_devices", lambda: [other])
    AutotuningCompiler(model_of(GPT2), Backend.XLA, tmp_path).compile(prefill(512, 8), Lowered())
    assert measured == [("layer", 512), ("head", 8)] * 2


HOLD = """
import fcntl, sys
lock = open(sys.argv[1], "w")
fcntl.flock(lock, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


def test_measuring_process_waits_for_others(measured: list, tmp_path: Path):
    command = [sys.executable, "-c", HOLD, str(tmp_path / "measuring.lock")]
    it, lowered = AutotuningCompiler(model_of(GPT2), Backend.XLA, tmp_path), Lowered()
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        compiling = threading.Thread(target=it.compile, args=(prefill(512, 8), lowered))
        compiling.start()
        compiling.join(0.3)
        assert (measured, lowered.options) == ([], [])
        other.kill()
        compiling.join(60)
    assert lowered.options == [CUBLAS_AUTOTUNING]
    with (tmp_path / "measuring.lock").open("w") as lock:  # given back
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_wait_for_a_measuring_process_is_bounded(
    measured: list, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(gemm_autotuning, "MAX_WAIT_S", 0.1)
    it = AutotuningCompiler(model_of(GPT2), Backend.XLA, tmp_path)
    with (tmp_path / "measuring.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert it.compile(prefill(512, 8), Lowered()) == "program"
    assert measured == [("layer", 512), ("head", 8)]


@pytest.mark.parametrize(
    ("config", "programs", "products"),
    [(GPT2, 2, 4), (OPT, 2, 4), (LLAMA, 4, 4), (QWEN2, 4, 4)],
    ids=["gpt2", "opt", "llama", "qwen2"],
)
def test_measured_products_are_those_of_a_layer(
    config: dict, programs: int, products: int, monkeypatch: pytest.MonkeyPatch
):
    """Queries, keys and values; output; both of the feed-forward; and apart from them the head."""
    texts: list[str] = []

    def compile_(self: Any, options: dict) -> None:
        assert options == CUBLAS_AUTOTUNING
        texts.append(self.as_text())

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile_)
    model = model_of(config)
    assert measure_gemms(model, "layer", 256, Backend.XLA) == programs
    assert sum(text.count("stablehlo.dot_general") for text in texts) == products
    assert all("tensor<256x" in text for text in texts)
    assert measure_gemms(model, "head", 16, Backend.XLA) == 1
    assert "tensor<16x128xf32>" in texts[-1]


def test_tensor_parallel_measurement_uses_the_shard_products(monkeypatch: pytest.MonkeyPatch):
    texts: list[str] = []
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda it, _: texts.append(it.as_text()))
    mesh = make_mesh(jax.devices(), 2)
    model = make_abstract_model(read_model_config(LLAMA), jnp.dtype(jnp.float32), mesh)
    assert measure_gemms(model, "layer", 256, Backend.XLA) > 1
    assert measure_gemms(model, "head", 16, Backend.XLA) == 1
    assert "-> tensor<16x64xf32>" in texts[-1]


def test_products_of_own_kernels_are_not_measured(monkeypatch: pytest.MonkeyPatch):
    class Foreign:
        def lower(self, *_: Any) -> Any:
            text = "stablehlo.custom_call @mosaic_gpu_v2"
            return SimpleNamespace(as_text=lambda: text)

    model = model_of(LLAMA)
    monkeypatch.setattr(gemm_autotuning.jax, "jit", lambda _: Foreign())
    assert measure_gemms(model, "layer", 256, Backend.XLA) == 0
