"""Choose an engine's sizes and build its programs while the engine starts.

This is the only module of `jpaged.compile` that `jpaged.engine` imports.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jpaged.compile.builder import ProgramBuilder, ThreadSettings
from jpaged.compile.gemm_autotuning import install_gemm_record, make_compiler
from jpaged.compile.lowered_workers import LoweredPool
from jpaged.compile.recipes import Recipes, SharedCalls
from jpaged.compile.sizing import Sizing, SizingResult
from jpaged.compile.store import open_program_store, prepare_jax, with_usable_cache
from jpaged.compile.workers import (
    CompilePool,
    EngineSettings,
    choose_num_workers,
    has_writable_cache,
    make_compile_jobs,
)
from jpaged.config import EngineConfig
from jpaged.errors import format_count
from jpaged.models.jax_model import JaxModelPlan
from jpaged.models.weight_plan import ModelPlan
from jpaged.processes import can_start_python
from jpaged.runtime.programs import Programs, SplitModel
from pallas_kernels import select_backend

__all__ = ["Compilation", "SizingResult", "prepare_jax", "with_usable_cache"]


class Compilation:
    """Background work of an engine's start: sizing the engine and building its programs.

    The object is a context manager. The work begins on entry. On exit, all threads and processes of
    the work are ended.

    Args:
        config: Options of the engine.
        folder: Checkpoint folder; None for a user's model.
        plan: Plan of the model. The weights of a checkpoint are not loaded yet.
        dtype: Dtype of the weights, and of the pool if the model sets no other dtype.
        devices: Devices of the engine. Weights must not be loaded to the devices yet.
        report: Function that receives lines of text about the start.

    Raises:
        ValueError: Options contradict each other, or the weights alone exceed the device memory.
    """

    def __init__(
        self,
        config: EngineConfig,
        folder: Path | None,
        plan: ModelPlan | JaxModelPlan,
        dtype: jnp.dtype,
        devices: Sequence[Any],
        report: Callable[[str], None],
    ):
        device, model = devices[0], plan.config
        backend = select_backend(device.platform)
        self._split, self._shared = SplitModel.of(plan.abstract_model), SharedCalls(backend)
        if isinstance(plan, JaxModelPlan):
            self._split = replace(self._split, digests=plan.digests())
        self._sizing = Sizing(config, model, self._split, dtype, devices)
        self._report, self._num_reported = report, 0
        shard_config = model.shard(len(devices))
        store = open_program_store(
            config.compilation_cache_dir, shard_config, plan.abstract_model, device
        )
        has_gemm_record = is_autotuned(device, self._split, self._sizing)
        compiler = make_compiler(plan.abstract_model, backend, has_gemm_record=has_gemm_record)
        self._builder = ProgramBuilder(os.cpu_count() or 1, store, self._report_progress, compiler)
        self._workers: CompilePool | LoweredPool
        if isinstance(plan, JaxModelPlan):
            count = choose_num_workers(config, device, has_gemm_record=has_gemm_record)
            # A stored program does not name its devices, so workers compile only programs for a
            # single device.
            can_use_workers = len(devices) == 1 and has_writable_cache() and can_start_python()
            count = count if can_use_workers else 0
            self._workers = LoweredPool(count, store, EngineSettings.read(), report)
            self._stack = ExitStack()
            return
        jobs = []
        # The workers need a checkpoint, from which they read the model's sizes.
        if folder is not None:
            model_options = {
                "tie_word_embeddings": plan.config.tie_word_embeddings,
                "kv_cache_dtype": plan.config.kv_cache_dtype,
                "has_gemm_record": has_gemm_record,
            }
            jobs = make_compile_jobs(config, folder, dtype, device, store, **model_options)
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
        """Wait for the engine's sizes, and return them.

        Raises:
            ValueError: The configured engine does not fit in memory.
        """
        return self._sizing_future.result()

    def programs(self) -> Programs:
        """Wait for all programs, and return them by name."""
        self._add_future.result()
        return self._builder.programs()

    def _run_sizing(self) -> SizingResult:
        # `Sizing.workspace` starts the worker processes if it has to compile a program.
        sizing, start = self._sizing, self._workers.start
        return sizing.fit(sizing.workspace(self._builder, self._shared, start))

    def _add_programs(self) -> None:
        runtime, _, shapes = self.wait_for_sizes()
        needed = [*Recipes(self._split, shapes, runtime, self._shared)]
        self._builder.add(self._workers.iter_compiled(needed, runtime, self._report_progress))

    def _report_progress(self, done: int, total: int) -> None:
        """Report the number of compiled programs after every tenth program and after the last.

        Never report a lower number than before. After the last program, also report the number of
        programs that were loaded from the cache of an earlier start.
        """
        # If a worker has compiled a program, this process loads the program from JAX's cache. The
        # report counts such programs as compiled, not as loaded.
        num_loaded = 0 if self._workers.processes else self._builder.num_loaded
        num_compiled, num_all, is_last = done - num_loaded, total - num_loaded, done == total
        if num_compiled > self._num_reported and (is_last or num_compiled % 10 == 0):
            self._num_reported = num_compiled
            self._report(f"compiled {num_compiled} of {format_count(num_all, 'program')}")
        if is_last and num_loaded:
            self._report(f"loaded {format_count(num_loaded, 'program')}")


def is_autotuned(device: Any, split: SplitModel, sizing: Sizing) -> bool:
    """Install the shipped GEMM measurements for a device, and return whether XLA needs no further
    measurements.

    XLA needs no further measurements on a CPU, or if the shipped measurements cover all matrix
    products of the steps.

    Args:
        device: One of the engine's devices.
        split: The model, split into its definition and its parameters. The parameters may be shapes
            instead of arrays.
        sizing: Sizing of the engine, which determines the row counts of the matrix products.
    """
    record = install_gemm_record(device)
    return device.platform == "cpu" or record.covers(split.shard_leaves, sizing.gemm_row_counts)
