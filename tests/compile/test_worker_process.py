"""Test which programs each compile worker compiles, and which model options the worker uses."""

from collections.abc import Iterable
from dataclasses import replace
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
from jpaged.models.registry import read_model_config
from jpaged.models.weight_plan import make_abstract_model


def named(*names: tuple) -> list[Recipe]:
    poolless = "sample", "prompt_logprobs"
    return [Recipe(name, print, needs_pool=name[0] not in poolless) for name in names]


def test_programs_are_split_over_workers_and_programs_with_the_same_kernels_stay_together():
    prefills = [("prefill", sizes) for sizes in ((64, 8), (128, 8), (64, 256))]
    made = named(
        *(("decode", 8), prefills[0], ("sample", (8, 0)), *prefills[1:]),
        *(("sample", (8, 1)), ("load_rows", None)),
    )
    shares = [[recipe.name for recipe in select_worker_recipes(made, i, 2)] for i in range(2)]
    assert shares == [
        [("sample", (8, 0)), ("sample", (8, 1)), ("prefill", (128, 8)), ("decode", 8)],
        [("prefill", (64, 8)), ("prefill", (64, 256)), ("load_rows", None)],
    ]


class ReachedError(Exception):
    """Raised when the worker begins to compile programs."""


@pytest.mark.usefixtures("jax_settings")
@pytest.mark.parametrize(
    ("field", "value", "wrong_values"),
    [("tie_word_embeddings", False, [None, True]), ("kv_cache_dtype", "float8_e4m3fn", [None])],
)
def test_worker_uses_the_model_options_of_its_job(
    field: str, value: Any, wrong_values: list, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """One field of the engine's model differs from config.json. The worker must use the value in
    its job, not the value in config.json."""
    given: list[Recipe] = []

    def reach(recipes: Iterable[Recipe], *_: Any) -> None:
        given.extend(recipes)
        raise ReachedError

    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    runtime, device = Start(tmp_path).runtime, jax.local_devices()[0]
    model = replace(read_model_config(read_config(EMBEDDED_MODEL)), **{field: value})
    store = open_program_store(tmp_path, model, make_abstract_model(model, FLOAT32), device)
    config = EngineConfig(compilation_cache_dir=tmp_path, num_compile_workers=1)
    options: dict[str, Any] = {field: value, "has_gemm_record": True}
    (job,) = make_compile_jobs(config, EMBEDDED_MODEL, FLOAT32, device, store, **options)
    job = replace(job, limits=runtime)
    monkeypatch.setattr(workers, "select_worker_recipes", reach)
    with pytest.raises(ReachedError):
        next(run_compile_job(job, lambda: runtime))
    assert given
    for wrong in wrong_values:
        with pytest.raises(ValueError, match="differ from those of the engine's process"):
            next(run_compile_job(replace(job, **{field: wrong}), lambda: runtime))
