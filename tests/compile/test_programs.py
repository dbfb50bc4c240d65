"""Test the program builder: order, progress reports, failures and JAX settings of its threads."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jpaged.compile.builder import ProgramBuilder, ThreadSettings
from jpaged.compile.gemm_autotuning import Compiler
from jpaged.compile.recipes import Recipe
from jpaged.compile.store import ProgramStore
from jpaged.runtime.sampler import SamplerLevel

ALWAYS = [(name, None) for name in ("load_rows", "load_bias", "copy_blocks", "fork_rows")]


class FakeRecipe(Recipe):
    """A `Recipe` for tests: its "compilation" calls the function of the recipe."""

    def lower(self, exported: Any = None) -> Any:
        label = f"{self.name[0]} {self.name[1]}"
        said, trace = self.arguments
        said.append(f"lower {label}")
        trace()

        def compile_(options: dict) -> SimpleNamespace:
            said.append(f"compile {label}")
            assert options == self.options
            self.function()
            said.append(f"compiled {label}")
            sizes = {"output_size_in_bytes": 7, "alias_size_in_bytes": 5, "temp_size_in_bytes": 40}
            return SimpleNamespace(name=self.name, memory_analysis=lambda: SimpleNamespace(**sizes))

        return SimpleNamespace(compile=compile_)

    def with_unique_name(self) -> Recipe:
        return replace(self, name=("draft", self.name[1]))

    @property
    def key(self) -> str:
        return repr(self.name)


class Log:
    """A list of messages about lowered and compiled programs.

    `recipe` returns a `FakeRecipe` (the inputs of a compilation) that appends to the list.
    """

    def __init__(self):
        self.said: list[str] = []

    def recipe(
        self, name: tuple, gemm_key: Any = None, work: Any = lambda: None, trace: Any = lambda: None
    ) -> Recipe:
        options = {"own": name}
        return FakeRecipe(name, work, (self.said, trace), gemm_key=gemm_key, options=options)

    def index(self, line: str) -> int:
        return self.said.index(line)


def test_programs_are_reported_and_found_by_name():
    log, counts = Log(), []
    names = [*ALWAYS, ("decode", 8), ("sample", (8, SamplerLevel.GREEDY))]
    with ProgramBuilder(2, report_progress=lambda *count: counts.append(count)) as builder:
        builder.add(map(log.recipe, names))
        builder.add([log.recipe(("decode", 8))])  # the same name again
        programs = builder.programs()
    assert {program.name for program in programs.values()} == {*programs} == {*names}
    assert counts == [(i + 1, 6) for i in range(6)]
    assert log.said.count("lower decode 8") == 1


def test_program_that_waits_for_gemm_measurements_delays_no_other_program():
    log, free = Log(), threading.Event()
    recipes = [
        log.recipe(("prefill", (8, 1)), ("layers", 1), work=free.wait),
        log.recipe(("prefill", (8, 2)), ("layers", 1)),
        log.recipe(("decode", 1), ("layers", 2)),
    ]
    with ProgramBuilder(1) as builder:
        builder.add([*recipes, *map(log.recipe, ALWAYS)])
        others = ("prefill (8, 2)", "decode 1", "fork_rows None")
        while not {f"compiled {other}" for other in others} <= {*log.said}:
            time.sleep(0.001)
        free.set()
        builder.programs()
    assert log.said[-1] == "compiled prefill (8, 1)"


def test_each_program_is_reported_as_soon_as_it_is_compiled():
    log, free = Log(), threading.Event()
    with ProgramBuilder(2) as builder:
        builder.add([log.recipe(("decode", 9), work=free.wait), log.recipe(("decode", 1))])
        built = builder.iter_built()
        first, _ = next(built)
        free.set()
        assert [first, *(name for name, _ in built)] == [("decode", 1), ("decode", 9)]
        assert len([*builder.iter_built()]) == 2


def test_programs_that_determine_the_workspace_size_are_compiled_first():
    log, free = Log(), threading.Event()
    drafts = [log.recipe(("prefill", 1), work=free.wait), log.recipe(("sample", 1))]
    others = [log.recipe(name) for name in ALWAYS]

    def release() -> None:
        while "lower fork_rows None" not in log.said:
            time.sleep(0.001)
        free.set()

    watcher = threading.Thread(target=release)
    watcher.start()
    with ProgramBuilder(8) as builder:
        assert builder.workspace(drafts, lambda: builder.add(others)) == 2 * (40 + 7 - 5)
        builder.programs()
    watcher.join()
    first_other = min(log.index(f"compile {kind} None") for kind, _ in ALWAYS)
    assert log.index("compiled draft 1") < first_other


def test_temporary_memory_of_programs_is_measured_with_the_compiler_of_the_engine(tmp_path: Path):
    log = Log()

    class Other(Compiler):
        key = "other"

        def compile(self, recipe: Recipe, lowered: Any) -> Any:
            log.said.append(f"other {recipe.name[0]} {recipe.name[1]}")
            return super().compile(recipe, lowered)

    store = ProgramStore(tmp_path, None, jax.local_devices()[0])
    for compiler in (Other(), None, Other()):
        with ProgramBuilder(2, store, compiler=compiler) as builder:
            builder.workspace([log.recipe(("prefill", 1))], lambda: None)
    with ProgramBuilder(2, compiler=Other()) as builder:
        builder.add(map(log.recipe, ALWAYS))
        builder.programs()
    assert log.said.count("compile draft 1") == 2
    by_other = sorted(said for said in log.said if said.startswith("other"))
    assert by_other == sorted(["other draft 1", *(f"other {kind} None" for kind, _ in ALWAYS)])


def test_compile_failure_is_raised_and_stops_all_work():
    def fail() -> None:
        raise ValueError("does not compile")

    log, before = Log(), threading.active_count()
    recipes = [log.recipe(("prefill", i), ("layers", 1), work=fail) for i in range(3)]
    with ProgramBuilder(2) as builder:
        builder.add(recipes)
        with pytest.raises(ValueError, match="does not compile"):
            builder.workspace([log.recipe(("prefill", 9), work=fail)], lambda: None)
        with pytest.raises(ValueError, match="does not compile"):
            builder.programs()
    assert threading.active_count() == before


def test_closed_builder_starts_no_further_program():
    """The end of the `with` block closes the builder, also after an error or a Ctrl-C.

    The builder then waits for the program that is being traced, and starts no other program.
    """
    log, before = Log(), threading.active_count()
    tracing, free = threading.Event(), threading.Event()

    def trace() -> None:
        tracing.set()
        free.wait()

    drafts = [log.recipe(("prefill", 1), trace=trace), log.recipe(("sample", 1))]
    with ThreadPoolExecutor(2) as pool, ProgramBuilder(1) as builder:
        others = list(map(log.recipe, ALWAYS))
        workspace = pool.submit(builder.workspace, drafts, lambda: builder.add(others))
        tracing.wait()
        pool.submit(lambda: (time.sleep(0.3), free.set()))
    assert workspace.exception() is not None
    assert log.said == ["lower draft 1"]
    assert threading.active_count() == before


class TracedRecipe(Recipe):
    """A `Recipe` for tests: instead of compiling a program, it returns the lowered text."""

    def lower(self, exported: Any = None) -> Any:
        text = super().lower(exported).as_text()
        return SimpleNamespace(compile=lambda options: text)


@pytest.mark.parametrize(("setting", "is_highest"), [(None, False), ("highest", True)])
def test_programs_are_traced_with_the_jax_settings_of_the_creating_thread(
    setting: str | None, is_highest: bool
):
    shape = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    recipe = TracedRecipe(("decode", 8), lambda x: x @ x, (shape,))
    with jax.default_matmul_precision(setting), ProgramBuilder(2) as builder:
        builder.add([recipe, *map(Log().recipe, ALWAYS)])
        text = builder.programs()["decode", 8]
    assert ("HIGHEST" in text) is is_highest


def test_run_applies_the_stored_jax_settings_and_restores_the_previous_settings():
    def read_settings() -> tuple[bool, str | None, str | None]:
        config: Any = jax.config
        guard = config.jax_transfer_guard_host_to_device
        return config.jax_debug_nans, config.jax_default_matmul_precision, guard

    with (
        jax.debug_nans(True),
        jax.default_matmul_precision("float32"),
        jax.transfer_guard_host_to_device("log"),
    ):
        settings, expected = ThreadSettings(), read_settings()
    assert expected == (True, "float32", "log") != read_settings()
    with ThreadPoolExecutor(1) as pool:
        before = pool.submit(read_settings).result()
        assert pool.submit(settings.run, read_settings).result() == expected
        assert pool.submit(read_settings).result() == before
