"""The door of this folder: an engine's numbers settled and its programs built while it starts."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jpaged.compile.builder import ProgramBuilder, ThreadSettings
from jpaged.compile.gemm_autotuning import install_gemm_record, make_compiler
from jpaged.compile.recipes import Recipes, SharedCalls
from jpaged.compile.sizing import Sizing, SizingResult
from jpaged.compile.store import open_program_store, prepare_jax, with_usable_cache
from jpaged.compile.workers import CompilePool, make_compile_jobs
from jpaged.config import EngineConfig
from jpaged.errors import format_count
from jpaged.models.loader import ModelPlan
from jpaged.runtime.programs import Programs, SplitModel
from pallas_kernels import select_backend

__all__ = ["Compilation", "SizingResult", "prepare_jax", "with_usable_cache"]


class Compilation:
    """Settles an engine's numbers and builds its programs, in the background, as a context.

    It begins on entry and leaves no thread and no process behind.

    Args:
        config: The caller's wishes.
        folder: The checkpoint's.
        plan: The model, not loaded yet.
        dtype: Of the weights, and of the pool unless the model has another.
        devices: What the engine runs on, before the weights are there.
        say: Tells a line about the start.

    Raises:
        ValueError: the numbers asked for do not go together, or the weights alone do not fit.
    """

    def __init__(
        self,
        config: EngineConfig,
        folder: Path,
        plan: ModelPlan,
        dtype: jnp.dtype,
        devices: Sequence[Any],
        report: Callable[[str], None],
    ):
        device, model = devices[0], plan.config
        backend = select_backend(device.platform)
        self._split, self._shared = SplitModel.of(plan.abstract_model), SharedCalls(backend)
        self._sizing = Sizing(config, model, self._split, dtype, devices)
        self._report, self._num_reported = report, 0
        own = model.shard(len(devices))
        store = open_program_store(config.compilation_cache_dir, own, plan.abstract_model, device)
        has_gemm_record = is_autotuned(device, self._split, self._sizing)
        compiler = make_compiler(plan.abstract_model, backend, has_gemm_record=has_gemm_record)
        self._builder = ProgramBuilder(os.cpu_count() or 1, store, self._report_progress, compiler)
        model_options = {
            "tie_word_embeddings": model.tie_word_embeddings,
            "kv_cache_dtype": model.kv_cache_dtype,
        }
        jobs = make_compile_jobs(
            config, folder, dtype, device, store, has_gemm_record=has_gemm_record, **model_options
        )
        self._workers = CompilePool(jobs, store, report, verbose=config.verbose)
        self._stack = ExitStack()

    def __enter__(self) -> "Compilation":
        with ExitStack() as stack:
            threads = stack.enter_context(ThreadPoolExecutor(2))
            stack.enter_context(self._workers)
            stack.enter_context(self._builder)
            run = ThreadSettings().run
            self._sizing_future: Future[SizingResult] = threads.submit(run, self._run_sizing)
            self._add_future: Future[None] = threads.submit(run, self._add_programs)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def wait_for_sizes(self) -> SizingResult:
        """Wait until every number is settled.

        Raises:
            ValueError: the engine as configured does not fit.
        """
        return self._sizing_future.result()

    def programs(self) -> Programs:
        """Wait for every program."""
        self._add_future.result()
        return self._builder.programs()

    def _run_sizing(self) -> SizingResult:
        """Where that needs a compilation, workers begin meanwhile."""
        sizing, start = self._sizing, self._workers.start
        return sizing.fit(sizing.workspace(self._builder, self._shared, start))

    def _add_programs(self) -> None:
        runtime, _, shapes = self.wait_for_sizes()
        needed = [*Recipes(self._split, shapes, runtime, self._shared)]
        self._builder.add(self._workers.iter_compiled(needed, runtime, self._report_progress))

    def _report_progress(self, done: int, total: int) -> None:
        """Report how many programs this start has compiled: at each tenth program, and at the end.

        The reported number never falls. At the end, also report how many programs an earlier start
        had compiled.
        """
        # Programs that workers compile also come from JAX's cache, but this start compiled them.
        num_loaded = 0 if self._workers.processes else self._builder.num_loaded
        num_compiled, num_all, is_last = done - num_loaded, total - num_loaded, done == total
        if num_compiled > self._num_reported and (is_last or num_compiled % 10 == 0):
            self._num_reported = num_compiled
            self._report(f"compiled {num_compiled} of {format_count(num_all, 'program')}")
        if is_last and num_loaded:
            self._report(f"loaded {format_count(num_loaded, 'program')}")


def is_autotuned(device: Any, split: SplitModel, sizing: Sizing) -> bool:
    """Whether XLA would measure nothing of the products of steps: measurements that ship are given
    to it first."""
    record = install_gemm_record(device)
    return device.platform == "cpu" or record.covers(split.shard_leaves, sizing.gemm_row_counts)
