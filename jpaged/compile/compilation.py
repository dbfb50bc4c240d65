"""The door of this folder: an engine's numbers settled and its programs built while it starts."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jpaged.compile.builder import ProgramBuilder, ThreadSettings
from jpaged.compile.gemm_autotuning import make_compiler, offer_recorded_products
from jpaged.compile.recipes import Recipes, SharedCalls
from jpaged.compile.sizing import Sized, Sizing
from jpaged.compile.store import prepare_jax, program_store, with_usable_cache
from jpaged.compile.workers import CompilePool, make_orders
from jpaged.config import EngineConfig
from jpaged.errors import counted
from jpaged.models.loader import ModelPlan
from jpaged.runtime.programs import Programs, SplitModel
from pallas_kernels import select_backend

__all__ = ["Compilation", "Sized", "prepare_jax", "with_usable_cache"]


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
        say: Callable[[str], None],
    ):
        device, model = devices[0], plan.config
        backend = select_backend(device.platform)
        self._split, self._shared = SplitModel.of(plan.shapes), SharedCalls(backend)
        self._sizing = Sizing(config, model, self._split, dtype, devices)
        self._say, self._told = say, 0
        own = model.share(len(devices))
        store = program_store(config.compilation_cache_dir, own, plan.shapes, device)
        recorded = nothing_to_measure(device, self._split, self._sizing)
        compiler = make_compiler(plan.shapes, backend, recorded=recorded)
        self._builder = ProgramBuilder(os.cpu_count() or 1, store, self._tell_progress, compiler)
        known = {"tied": model.tie_word_embeddings, "kv_cache_dtype": model.kv_cache_dtype}
        orders = make_orders(config, folder, dtype, device, store, recorded=recorded, **known)
        self._workers = CompilePool(orders, store, say, verbose=config.verbose)
        self._stack = ExitStack()

    def __enter__(self) -> "Compilation":
        with ExitStack() as stack:
            threads = stack.enter_context(ThreadPoolExecutor(2))
            stack.enter_context(self._workers)
            stack.enter_context(self._builder)
            run = ThreadSettings().run
            self._sized: Future[Sized] = threads.submit(run, self._size)
            self._added: Future[None] = threads.submit(run, self._add_programs)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def sized(self) -> Sized:
        """Wait until every number is settled.

        Raises:
            ValueError: the engine as configured does not fit.
        """
        return self._sized.result()

    def programs(self) -> Programs:
        """Wait for every program."""
        self._added.result()
        return self._builder.programs()

    def _size(self) -> Sized:
        """Where that needs a compilation, workers begin meanwhile."""
        sizing, start = self._sizing, self._workers.start
        return sizing.fit(sizing.workspace(self._builder, self._shared, start))

    def _add_programs(self) -> None:
        runtime, _, shapes = self.sized()
        needed = [*Recipes(self._split, shapes, runtime, self._shared)]
        self._builder.add(self._workers.compiled(needed, runtime, self._tell_progress))

    def _tell_progress(self, done: int, total: int) -> None:
        """Report how many programs this start has compiled: at each tenth program, and at the end.

        The reported number never falls. At the end, also report how many programs an earlier start
        had compiled.
        """
        # Programs that workers compile also come from JAX's cache, but this start compiled them.
        num_loaded = 0 if self._workers.processes else self._builder.num_loaded
        num_compiled, num_all, is_last = done - num_loaded, total - num_loaded, done == total
        if num_compiled > self._told and (is_last or num_compiled % 10 == 0):
            self._told = num_compiled
            self._say(f"compiled {num_compiled} of {counted(num_all, 'program')}")
        if is_last and num_loaded:
            self._say(f"loaded {counted(num_loaded, 'program')}")


def nothing_to_measure(device: Any, split: SplitModel, sizing: Sizing) -> bool:
    """Whether XLA would measure nothing of the products of steps: measurements that ship are given
    to it first."""
    record = offer_recorded_products(device)
    return device.platform == "cpu" or record.has(split.own_leaves, sizing.step_rows)
