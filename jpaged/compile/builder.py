"""Trace, lower and compile an engine's programs in background threads.

All programs are compiled before the engine serves requests. A launch calls a compiled executable,
so a launch with an unexpected shape raises an error instead of compiling a new program.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from threading import Event, local
from typing import Any, ParamSpec, TypeVar

import jax
from jax import export

from jpaged.compile.gemm_autotuning import Compiler
from jpaged.compile.recipes import Recipe
from jpaged.compile.store import ProgramStore
from jpaged.runtime.programs import ProgramName, Programs

P = ParamSpec("P")
T = TypeVar("T")


class ThreadSettings:
    """JAX settings of the thread that creates this object. `run` applies the settings in another
    thread.

    Includes only settings that JAX can override in a single thread.
    """

    def __init__(self):
        self._values = _read_thread_settings()

    def run(self, work: Callable[P, T], *args: P.args, **keywords: P.kwargs) -> T:
        """Call `work` in the current thread with the stored JAX settings, and return the result."""
        current = _read_thread_settings()
        with ExitStack() as stack:
            for name, value in self._values.items():
                if value is not current[name] and value != current[name]:
                    stack.enter_context(_setting_context(name)(value))
            return work(*args, **keywords)


def _read_thread_settings() -> Mapping[str, Any]:
    names = [name for name in jax.config.values if _setting_context(name) is not None]
    return {name: getattr(jax.config, name) for name in names}


def _setting_context(name: str) -> Any:
    """Return JAX's function that creates a context manager for the setting `name`; None if JAX has
    no such function for the setting."""
    return getattr(jax, name.removeprefix("jax_"), None)


_CACHE_REQUEST_EVENT = "/jax/compilation_cache/compile_requests_use_cache"
_CACHE_HIT_EVENT = "/jax/compilation_cache/cache_hits"

_NUM_MEASURING_THREADS = 32
"""Number of threads that compile programs with matrix products. Many of these threads may only
wait, while `AutotuningCompiler` measures matrix products."""


class ProgramBuilder:
    """Builder of programs in background threads.

    The builder is a context manager. On exit, it cancels programs that no thread has started to
    build, and waits for its threads.

    Tracing and lowering hold the GIL, so one thread traces and lowers all programs in the order in
    which they were added. Compiling releases the GIL, so other threads compile many programs
    concurrently. All threads use the JAX settings of the thread that creates the builder.

    Args:
        num_threads: Number of threads that compile programs without matrix products.
            `_NUM_MEASURING_THREADS` other threads compile programs with matrix products.
        store: Store of lowered programs; None to trace every program.
        report_progress: Function that `programs` calls with the number of programs built so far and
            the number of all programs.
        compiler: Compiler of the lowered programs; None for a `Compiler`.
    """

    def __init__(
        self,
        num_threads: int,
        store: ProgramStore | None = None,
        report_progress: Callable[[int, int], None] = lambda done, total: None,
        compiler: Compiler | None = None,
    ):
        self._store, self._report_progress = store, report_progress
        self._compiler = compiler or Compiler()
        self._settings = ThreadSettings()
        self._tracer, self._compilers = ThreadPoolExecutor(1), ThreadPoolExecutor(num_threads)
        self._measurers = ThreadPoolExecutor(_NUM_MEASURING_THREADS)
        self._futures: dict[ProgramName, Future[Any]] = {}
        self._loaded: set[ProgramName] = set()
        # For each thread: whether JAX's cache contained the program that the thread looked up last.
        self._last_lookup = local()
        self._closed = False
        self._may_compile = Event()
        self._may_compile.set()

    def __enter__(self) -> "ProgramBuilder":
        jax.monitoring.register_event_listener(self._note_lookup)
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        jax.monitoring.unregister_event_listener(self._note_lookup)
        pools = self._tracer, self._compilers, self._measurers
        # First cancel the work of all pools, then wait for each pool.
        for wait_for in (False, True):
            for pool in pools:
                pool.shutdown(wait=wait_for, cancel_futures=True)

    @property
    def num_loaded(self) -> int:
        """Number of added programs that were loaded from JAX's cache on disk so far."""
        return len(self._loaded & self._futures.keys())

    def add(self, recipes: Iterable[Recipe]) -> None:
        """Start to build the programs of `recipes`. Ignore a recipe whose name was added before."""
        for recipe in recipes:
            if recipe.name in self._futures:
                continue
            traced = self._submit(self._tracer, lower, recipe, self._store)
            pool = self._compilers if recipe.gemm_key is None else self._measurers
            self._futures[recipe.name] = self._submit(
                pool, self._compile_when_allowed, recipe, traced
            )

    def iter_built(self) -> Iterator[tuple[ProgramName, Any]]:
        """Yield the name and the executable of each added program as soon as it is compiled."""
        names = {compiled: name for name, compiled in self._futures.items()}
        for compiled in as_completed(names):
            yield names[compiled], compiled.result()

    def programs(self) -> Programs:
        """Wait for all added programs, and return them by name."""
        built = {}
        for name, program in self.iter_built():
            built[name] = program
            self._report_progress(len(built), len(self._futures))
        if self._store is not None:
            self._store.prune()
        return built

    def workspace(self, recipes: Iterable[Recipe], while_compiling: Callable[[], None]) -> int:
        """Return the total bytes of temporaries and newly allocated outputs of several programs.

        The store keeps the result. If the store has no result, the method compiles the programs of
        `recipes` and calls `while_compiling`, which may add other programs to the builder. The
        added programs are traced and lowered meanwhile, but not compiled until the programs of
        `recipes` are compiled. Otherwise, a program of `recipes` with a Mosaic kernel would wait
        for all added programs: XLA compiles a Mosaic kernel only while the process compiles nothing
        else.

        Args:
            recipes: Recipes of the programs. A recipe is a step function and the shapes of its
                arguments.
            while_compiling: Function that is called while the programs of `recipes` are compiled.
        """
        renamed = [recipe.with_unique_name() for recipe in recipes]

        def compute() -> int:
            self._may_compile.clear()
            try:
                compiling = [self._compile_for_workspace(recipe) for recipe in renamed]
                while_compiling()
                return sum(_workspace_bytes(future.result()) for future in compiling)
            finally:
                self._may_compile.set()

        if self._store is None:
            return compute()
        key = f"workspace of {[recipe.key for recipe in renamed]} {self._compiler.key}"
        return self._store.load_or_compute(key, compute)

    def _submit(self, pool: ThreadPoolExecutor, work: Callable[..., T], *args: Any) -> Future[T]:
        return pool.submit(self._settings.run, work, *args)

    def _compile_for_workspace(self, recipe: Recipe) -> Future[Any]:
        traced = self._submit(self._tracer, recipe.lower)
        # Do not compile in the threads of `_compilers`: all of them may be waiting in
        # `_compile_when_allowed` until this recipe is compiled.
        return self._submit(self._measurers, self._compile, recipe, traced)

    def _compile(self, recipe: Recipe, traced: Future[Any]) -> Any:
        lowered = traced.result()
        if self._closed:
            raise CancelledError
        self._last_lookup.was_hit = False
        program = self._compiler.compile(recipe, lowered)
        if self._last_lookup.was_hit:
            self._loaded.add(recipe.name)
        return program

    def _note_lookup(self, event: str, **_: object) -> None:
        """Record whether JAX's cache had a program. JAX calls this method in the thread that
        compiles the program."""
        if event == _CACHE_REQUEST_EVENT:
            self._last_lookup.was_hit = False
        elif event == _CACHE_HIT_EVENT:
            self._last_lookup.was_hit = True

    def _compile_when_allowed(self, recipe: Recipe, traced: Future[Any]) -> Any:
        self._may_compile.wait()
        return self._compile(recipe, traced)


def lower(recipe: Recipe, store: ProgramStore | None) -> Any:
    """Return the lowered program of a recipe.

    With a store, load the exported program, or trace the recipe and store the exported program.
    Then lower the exported program, even if the recipe was just traced: JAX's cache finds an
    executable by the lowered text, and lowering the recipe directly would give a different text.

    Args:
        recipe: The recipe to lower.
        store: Store of exported programs; None to trace and lower the recipe directly.
    """
    if store is None:
        return recipe.lower()
    exported = store.load(recipe.key)
    if exported is None:
        exported = _export(recipe)
        if exported is None:
            return recipe.lower()
        store.save(recipe.key, exported)
    return recipe.lower(exported)


def store_program(recipe: Recipe, store: ProgramStore) -> bool:
    """Store a program unless it is stored already, and return whether the store has it."""
    if not store.has(recipe.key) and (exported := _export(recipe)) is not None:
        store.save(recipe.key, exported)
    return store.has(recipe.key)


def _export(recipe: Recipe) -> export.Exported | None:
    """Return the exported program; None if JAX cannot export a user's functions.

    JAX refuses, for example, callbacks to Python and kernels of other libraries.
    """
    try:
        return recipe.exported()
    except Exception as error:
        if recipe.digest is None:
            raise
        name = f"{recipe.name[0]} program"
        warnings.warn(
            f"the {name} is not stored, and is traced at each start: {error}", stacklevel=2
        )
        return None


def _workspace_bytes(compiled: Any) -> int:
    analysis = compiled.memory_analysis()
    if analysis is None:
        return 0
    fresh_outputs = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return analysis.temp_size_in_bytes + fresh_outputs
