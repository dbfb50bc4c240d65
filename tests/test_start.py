"""Test the start of an engine: compilation during loading, early errors, cleanup after errors."""

import json
import subprocess
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jpaged.compile import compilation
from jpaged.compile.builder import ProgramBuilder
from jpaged.compile.compilation import Compilation
from jpaged.compile.gemm_autotuning import GemmRecord
from jpaged.compile.recipes import Recipe
from jpaged.compile.sizing import Sizing
from jpaged.config import EMBEDDED_MODEL, EngineConfig
from jpaged.engine import startup
from jpaged.models.checkpoint import read_config
from jpaged.models.registry import read_model_config
from jpaged.models.weight_plan import ModelPlan, plan_model
from pallas_kernels import Backend

OPTIONS: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 64}


class LoadingError(Exception):
    """Raised by a test while the model loads, to end the start of an engine."""


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Return an event that is set when programs are added to the `ProgramBuilder`."""
    event, add = threading.Event(), ProgramBuilder.add

    def set_and_add(*arguments: Any, **keywords: Any) -> None:
        event.set()
        add(*arguments, **keywords)

    monkeypatch.setattr(ProgramBuilder, "add", set_and_add)
    return event


def fail_load(monkeypatch: pytest.MonkeyPatch, before: Callable[[], object]) -> None:
    """Replace `ModelPlan.load` by a function that calls `before` and raises `LoadingError`."""

    def load(*_: Any, **__: Any) -> None:
        before()
        raise LoadingError

    monkeypatch.setattr(ModelPlan, "load", load)


@pytest.mark.parametrize("recorded", [True, False])
def test_programs_are_built_while_the_model_loads(
    recorded: bool, added: threading.Event, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(GemmRecord, "covers", lambda *_: recorded)
    seen: list[bool] = []
    fail_load(monkeypatch, lambda: seen.append(added.wait(60)))
    with pytest.raises(LoadingError):
        startup.build_parts(EngineConfig(compilation_cache_dir=None, **OPTIONS))
    assert seen == [True]


def test_missing_model_folder_is_refused_before_the_device_starts(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(startup.jax, "local_devices", lambda: pytest.fail("the device started"))
    with pytest.raises(ValueError, match=r"model='/absent' is not a folder"):
        startup.build_parts(EngineConfig(model="/absent", compilation_cache_dir=None))


def gpt2(folder: Path, width: int) -> dict[str, Any]:
    """Return the options of an engine for a random GPT-2 with hidden size `width` and two heads."""
    config = {"model_type": "gpt2", "vocab_size": 64, "n_embd": width, "n_head": 2, "n_layer": 1}
    (folder / "config.json").write_text(json.dumps(config | {"n_positions": 64}))
    random = {"skip_tokenizer_init": True, "load_format": "dummy", "compilation_cache_dir": None}
    return {**OPTIONS, **random, "model": folder}


def test_unsupported_head_size_is_refused_before_the_model_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    loads: list[bool] = []
    fail_load(monkeypatch, lambda: loads.append(True))
    message = r"head_dim=6 .* multiples of 4, with kv_cache_dtype='fp8'"
    with pytest.raises(ValueError, match=message):
        startup.build_parts(EngineConfig(**gpt2(tmp_path, 12), kv_cache_dtype="fp8"))
    assert not loads
    config = EngineConfig(**gpt2(tmp_path, 528))
    with pytest.raises(LoadingError):
        startup.build_parts(config)
    assert loads.pop()
    monkeypatch.setattr(startup, "select_backend", lambda _: Backend.TRITON)
    with pytest.raises(ValueError, match=r"head_dim=264 .* 1 to 256 on a GPU, .*hidden_size / num"):
        startup.build_parts(config)
    assert not loads


class Gpu:
    """A fake GPU with the fields that the engine reads before it loads the model."""

    platform, device_kind = "gpu", "NVIDIA GPU"

    def __init__(self, compute_capability: str):
        self.compute_capability = compute_capability


@pytest.mark.parametrize(
    ("capability", "has_float8"),
    [("8.0", False), ("8.6", False), ("8.9", True), ("9.0", True), ("10.0", True)],
)
def test_fp8_cache_on_a_gpu_without_float8_is_refused_before_loading(
    capability: str, has_float8: bool, monkeypatch: pytest.MonkeyPatch
):
    reads: list[bool] = []

    def plan(*_: Any, **__: Any) -> None:
        reads.append(True)
        raise LoadingError

    monkeypatch.setattr(startup, "plan_model", plan)
    monkeypatch.setattr(startup.jax, "local_devices", lambda: [Gpu(capability)])
    error = LoadingError if has_float8 else ValueError
    message = None if has_float8 else "needs a GPU of .* 8.9 or more .* NVIDIA GPU has .*'auto'"
    for name in ("fp8", "fp8_e4m3"):
        with pytest.raises(error, match=message):
            startup.build_parts(EngineConfig(kv_cache_dtype=name, compilation_cache_dir=None))
    assert bool(reads) == has_float8
    with pytest.raises(LoadingError):
        startup.build_parts(EngineConfig(compilation_cache_dir=None))


@pytest.fixture
def cache(tmp_path: Path, jax_settings: None) -> Path:
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    return tmp_path


def test_failed_load_leaves_no_process_and_no_thread(cache: Path, monkeypatch: pytest.MonkeyPatch):
    before, processes, all_started = threading.active_count(), [], threading.Event()

    class Process(subprocess.Popen):
        def __init__(self, *arguments: Any, **keywords: Any):
            super().__init__(*arguments, **keywords)
            processes.append(self)
            if len(processes) == 2:
                all_started.set()

    monkeypatch.setattr(subprocess, "Popen", Process)
    fail_load(monkeypatch, lambda: all_started.wait(60))
    config = EngineConfig(compilation_cache_dir=cache, num_compile_workers=2, **OPTIONS)
    with pytest.raises(LoadingError):
        startup.build_parts(config)
    assert [process.returncode for process in processes] == [-9, -9]
    assert threading.active_count() == before


def test_start_reports_compiled_and_loaded_programs(cache: Path, monkeypatch: pytest.MonkeyPatch):
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    monkeypatch.setattr(Sizing, "workspace", lambda *_: 0)
    model, float32 = read_model_config(read_config(EMBEDDED_MODEL)), jnp.dtype(jnp.float32)
    plan = plan_model(EMBEDDED_MODEL, model, dtype=float32)
    config = EngineConfig(compilation_cache_dir=cache, **OPTIONS)

    def progress_of(num_programs: int) -> list[str]:
        shape = jax.ShapeDtypeStruct((4,), float32)
        recipes = [Recipe(("add", i), partial(jnp.add, i), (shape,)) for i in range(num_programs)]
        monkeypatch.setattr(compilation, "Recipes", lambda *_: recipes)
        lines, devices = list[str](), jax.local_devices()[:1]
        with Compilation(config, EMBEDDED_MODEL, plan, float32, devices, lines.append) as made:
            assert len(made.programs()) == num_programs
        return lines

    assert progress_of(11) == ["compiled 10 of 11 programs", "compiled 11 of 11 programs"]
    assert progress_of(11) == ["loaded 11 programs"]
    assert progress_of(12) == ["compiled 1 of 1 program", "loaded 11 programs"]
    assert progress_of(1) == ["loaded 1 program"]


def test_startup_phase_that_takes_no_time_is_not_reported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    times = iter([1.0, 1.004, 2.0, 2.25])
    monkeypatch.setattr(startup, "time", SimpleNamespace(monotonic=lambda: next(times)))
    log = startup.ProgressLog(True)
    for name in ("resting", "working"):
        with log.phase(name):
            pass
    assert capsys.readouterr().err == "jpaged: working took 0.25 s\n"
