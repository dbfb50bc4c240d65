"""Test which programs of a start each worker compiles."""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import pytest
from start_helpers import FLOAT32, Start

from jpaged.compile import workers
from jpaged.compile.recipes import Recipe
from jpaged.compile.store import open_program_store
from jpaged.compile.workers import make_compile_jobs, run_compile_job, select_worker_recipes
from jpaged.config import EMBEDDED_MODEL, EngineConfig
from jpaged.models.checkpoint import read_config
from jpaged.models.loader import make_abstract_model
from jpaged.models.registry import read_model_config


def named(*names: tuple) -> list[Recipe]:
    poolless = "sample", "prompt_logprobs"
    return [Recipe(name, print, needs_pool=name[0] not in poolless) for name in names]


def test_each_program_is_assigned_once_and_shared_kernels_stay_together():
    made = named(
        ("decode", 8),
        ("prefill", (64, 8)),
        ("sample", (8, 0)),
        ("prefill", (128, 8)),
        ("prefill", (64, 256)),
        ("sample", (8, 1)),
        ("load_rows", None),
    )
    shares = [[recipe.name for recipe in select_worker_recipes(made, i, 2)] for i in range(2)]
    assert shares == [
        [("sample", (8, 0)), ("sample", (8, 1)), ("prefill", (128, 8)), ("decode", 8)],
        [("prefill", (64, 8)), ("prefill", (64, 256)), ("load_rows", None)],
    ]


class ReachedError(Exception):
    """The worker is about to make programs."""


def test_worker_reads_whether_the_head_is_tied(
    tmp_path: Path, jax_settings: None, monkeypatch: pytest.MonkeyPatch
):
    """The config says it is; the engine has found another in the checkpoint."""

    def reach(*_: Any) -> None:
        raise ReachedError

    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    runtime, device = Start(tmp_path).runtime, jax.local_devices()[0]
    said = read_model_config(read_config(EMBEDDED_MODEL))
    found = replace(said, tie_word_embeddings=False)
    store = open_program_store(tmp_path, found, make_abstract_model(found, FLOAT32), device)
    config = EngineConfig(compilation_cache_dir=tmp_path, num_compile_workers=1)
    make = partial(
        make_compile_jobs, config, EMBEDDED_MODEL, FLOAT32, device, store, has_gemm_record=False
    )
    monkeypatch.setattr(workers, "select_worker_recipes", reach)
    for tie_word_embeddings, error in (
        (False, ReachedError),
        (None, ValueError),
        (True, ValueError),
    ):
        (job,) = make(tie_word_embeddings=tie_word_embeddings)
        job = replace(job, limits=runtime)
        with pytest.raises(error):
            next(run_compile_job(job, lambda: runtime))


def test_worker_reads_the_dtype_of_the_pool(
    tmp_path: Path, jax_settings: None, monkeypatch: pytest.MonkeyPatch
):
    given: list[Recipe] = []

    def reach(made: Iterable[Recipe], *_: Any) -> None:
        given.extend(made)
        raise ReachedError

    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    runtime, device = Start(tmp_path).runtime, jax.local_devices()[0]
    said = read_model_config(read_config(EMBEDDED_MODEL))
    asked = replace(said, kv_cache_dtype="float8_e4m3fn")
    store = open_program_store(tmp_path, asked, make_abstract_model(asked, FLOAT32), device)
    config = EngineConfig(compilation_cache_dir=tmp_path, num_compile_workers=1)
    make = partial(
        make_compile_jobs, config, EMBEDDED_MODEL, FLOAT32, device, store, has_gemm_record=True
    )
    (job,) = make(kv_cache_dtype="float8_e4m3fn")
    job = replace(job, limits=runtime)
    monkeypatch.setattr(workers, "select_worker_recipes", reach)
    with pytest.raises(ReachedError):
        next(run_compile_job(job, lambda: runtime))
    assert given
    with pytest.raises(ValueError, match="of the worker and of the engine's process differ"):
        next(run_compile_job(replace(job, kv_cache_dtype=None), lambda: runtime))
