"""Test the autotuning of GEMMs when no measurements for them ship with jpaged, and the compiler
options of programs."""

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

from bench.common import SHAPES, SPARSE, UNRECORDED
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
from jpaged.models.registry import read_model_config
from jpaged.models.sharding import MESH_AXIS, make_mesh
from jpaged.models.weight_plan import make_abstract_model
from pallas_kernels import Backend

GPT2 = {"model_type": "gpt2", "vocab_size": 128, "n_positions": 64}
GPT2 |= {"n_embd": 32, "n_layer": 2, "n_head": 2}
SMALL = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
LLAMA = {**SHAPES["llama-3.1-8b"], **SMALL, "head_dim": 32, "intermediate_size": 96}
QWEN2 = {**UNRECORDED["qwen2.5-1.5b"], **SMALL, "intermediate_size": 96}
QWEN3_MOE = {**SPARSE["qwen3-30b-a3b"], **SMALL, "num_experts": 4, "num_experts_per_tok": 2}
OPT = {**UNRECORDED["opt-13b"], **SMALL, "ffn_dim": 96, "word_embed_proj_dim": 32}


def model_of(config: dict[str, Any]) -> Any:
    return make_abstract_model(read_model_config(config), jnp.dtype(jnp.float32))


class FakeLowered:
    """A lowered program that records the options of each call of `compile`."""

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
    """Replace `measure_gemms` with a function that records its calls, and return the list of calls.

    A call is recorded as a pair: the part of the model ("layer" or "head"), and the number of rows.
    """
    found: list[tuple[str, int]] = []

    def record(model: Any, part: str, rows: int, backend: Backend) -> None:
        found.append((part, rows))

    monkeypatch.setattr(gemm_autotuning, "measure_gemms", record)
    return found


def compiler(folder: Path | None, config: dict[str, Any] = GPT2) -> AutotuningCompiler:
    return AutotuningCompiler(model_of(config), Backend.XLA, folder)


@pytest.mark.parametrize("options", [CUBLAS_AUTOTUNING, NO_AUTOTUNING, SYNCHRONOUS_COLLECTIVES])
def test_xla_accepts_the_compiler_options(options: dict):
    shape = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    assert jax.jit(lambda x: x @ x).lower(shape).compile(options) is not None


def test_only_gemms_with_many_rows_are_measured(measured: list, tmp_path: Path):
    autotuning, lowered = compiler(tmp_path), FakeLowered()
    for recipe in (
        Recipe(("sample", (256, 0)), print),
        Recipe(("prompt_logprobs", 512), print, gemm_key=("head", 64)),
        decode("decode", 8),
        prefill(128, 8),
    ):
        assert autotuning.compile(recipe, lowered) == "program"
    assert measured == []
    assert lowered.options == [NO_AUTOTUNING] * 4
    assert autotuning.compile(decode("decode_burst", MIN_MEASURED_ROWS), lowered) == "program"
    assert lowered.options[4:] == [CUBLAS_AUTOTUNING]
    assert measured == [("layer", MIN_MEASURED_ROWS), ("head", MIN_MEASURED_ROWS)]


@pytest.mark.parametrize("rows", [8, MIN_MEASURED_ROWS])
def test_options_of_a_program_are_added_to_the_compiler_options(
    rows: int, measured: list, tmp_path: Path
):
    recipe, lowered = replace(decode("decode", rows), options={"own": 1}), FakeLowered()
    compiler(tmp_path).compile(recipe, lowered)
    Compiler().compile(recipe, lowered)
    assert lowered.options == [
        {**(NO_AUTOTUNING if rows < MIN_MEASURED_ROWS else CUBLAS_AUTOTUNING), "own": 1},
        {"own": 1},
    ]


def test_tensor_parallel_programs_use_synchronous_collectives(monkeypatch: pytest.MonkeyPatch):
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
def test_collectives_run_on_the_stream_of_the_step():
    """`on_mesh` adds the options `SYNCHRONOUS_COLLECTIVES` to a program. Without these options, XLA
    runs a collective on a separate stream if another operation can run concurrently."""
    if jax.default_backend() != "gpu" or jax.device_count() < 2:
        pytest.skip("needs two GPUs")

    def step(x: jax.Array) -> jax.Array:
        return jax.lax.all_gather(x, MESH_AXIS).sum(0) + x @ x @ x

    def are_synchronous(recipe: Recipe) -> list[bool]:
        text = recipe.with_unique_name().compile().as_text()
        gathers = re.findall(r".* all-gather(?:-start)?\(.*", text)
        return ['"is_sync":true' in line for line in gathers]

    shape = jax.ShapeDtypeStruct((2048, 2048), jnp.float32)
    shared = Recipe(("gather", None), step, (shape,)).on_mesh(make_mesh(jax.devices(), 2))
    assert are_synchronous(shared) == [True]
    assert are_synchronous(replace(shared, options={})) == [False]


def test_processes_that_share_a_folder_measure_each_gemm_size_once(measured: list, tmp_path: Path):
    first, second = compiler(tmp_path), compiler(tmp_path)
    first.compile(prefill(512, 8), FakeLowered())
    first.compile(prefill(512, 256), FakeLowered())
    second.compile(prefill(512, 8), FakeLowered())
    second.compile(prefill(1024, 256), FakeLowered())
    assert measured == [("layer", 512), ("head", 8), ("head", 256), ("layer", 1024)]
    compiler(tmp_path, LLAMA).compile(prefill(512, 8), FakeLowered())
    assert measured[4:] == [("layer", 512), ("head", 8)]


@pytest.mark.parametrize("folder", [None, "file/folder"])
def test_gemms_are_measured_only_once_if_no_folder_can_store_the_measurements(
    folder: str | None, measured: list, tmp_path: Path
):
    (tmp_path / "file").write_text("")
    autotuning, lowered = compiler(tmp_path / folder if folder else None), FakeLowered()
    for _ in range(2):
        assert autotuning.compile(prefill(512, 8), lowered) == "program"
    assert measured == [("layer", 512), ("head", 8)]
    assert lowered.options == [CUBLAS_AUTOTUNING] * 2


def test_measurements_of_another_device_are_not_used(
    measured: list, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    compiler(tmp_path).compile(prefill(512, 8), FakeLowered())
    client = SimpleNamespace(platform_version="another")
    other = SimpleNamespace(device_kind=jax.local_devices()[0].device_kind, client=client)
    monkeypatch.setattr(jax, "local_devices", lambda: [other])
    compiler(tmp_path).compile(prefill(512, 8), FakeLowered())
    assert measured == [("layer", 512), ("head", 8)] * 2


HOLD = """
import fcntl, sys
lock = open(sys.argv[1], "w")
fcntl.flock(lock, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


def test_process_waits_while_another_process_measures_gemms(measured: list, tmp_path: Path):
    command = [sys.executable, "-c", HOLD, str(tmp_path / "measuring.lock")]
    autotuning, lowered = compiler(tmp_path), FakeLowered()
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        compiling = threading.Thread(target=autotuning.compile, args=(prefill(512, 8), lowered))
        compiling.start()
        compiling.join(0.3)
        assert (measured, lowered.options) == ([], [])
        other.kill()
        compiling.join(60)
    assert lowered.options == [CUBLAS_AUTOTUNING]
    # The compiler has released the lock, so this process gets it immediately.
    with (tmp_path / "measuring.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_process_measures_gemms_if_another_process_holds_the_lock_too_long(
    measured: list, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(gemm_autotuning, "MAX_WAIT_S", 0.1)
    with (tmp_path / "measuring.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert compiler(tmp_path).compile(prefill(512, 8), FakeLowered()) == "program"
    assert measured == [("layer", 512), ("head", 8)]


@pytest.mark.parametrize(
    ("config", "programs", "products"),
    [(GPT2, 2, 4), (OPT, 2, 4), (LLAMA, 4, 4), (QWEN2, 4, 4), (QWEN3_MOE, 3, 3)],
    ids=["gpt2", "opt", "llama", "qwen2", "qwen3_moe"],
)
def test_all_gemms_of_a_layer_and_the_head_are_measured(
    config: dict, programs: int, products: int, monkeypatch: pytest.MonkeyPatch
):
    """A layer has four GEMMs. One computes queries, keys and values, one computes the attention
    output, and two are in the feed-forward network. A layer with experts has three GEMMs,
    because kernels of jpaged compute the experts."""
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


def test_tensor_parallel_gemms_are_measured_with_the_sizes_of_a_shard(
    monkeypatch: pytest.MonkeyPatch,
):
    texts: list[str] = []
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda it, _: texts.append(it.as_text()))
    mesh = make_mesh(jax.devices(), 2)
    model = make_abstract_model(read_model_config(LLAMA), jnp.dtype(jnp.float32), mesh)
    assert measure_gemms(model, "layer", 256, Backend.XLA) > 1
    assert measure_gemms(model, "head", 16, Backend.XLA) == 1
    assert "-> tensor<16x64xf32>" in texts[-1]


def test_gemms_of_pallas_kernels_are_not_measured(monkeypatch: pytest.MonkeyPatch):
    lowered = SimpleNamespace(as_text=lambda: "stablehlo.custom_call @mosaic_gpu_v2")
    jitted, model = SimpleNamespace(lower=lambda *_: lowered), model_of(LLAMA)
    monkeypatch.setattr(gemm_autotuning.jax, "jit", lambda _: jitted)
    assert measure_gemms(model, "layer", 256, Backend.XLA) == 0
