"""Builds an engine's programs: traced and lowered one by one, compiled many at once.

Programs are compiled ahead of time and called as compiled executables, so that nothing can compile
while serving: a shape that was not foreseen is an error, not a pause.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from threading import Event, local
from typing import Any, ParamSpec, TypeVar

import jax

from jpaged.compile.gemm_autotuning import Compiler
from jpaged.compile.recipes import Recipe
from jpaged.compile.store import ProgramStore
from jpaged.runtime.programs import ProgramName, Programs

P = ParamSpec("P")
T = TypeVar("T")


class ThreadSettings:
    """The settings of the thread that makes this, as far as JAX lets a thread have its own."""

    def __init__(self):
        self._values = _thread_settings()

    def run(self, work: Callable[P, T], *args: P.args, **keywords: P.kwargs) -> T:
        """Call `work` under these settings, in whatever thread."""
        present = _thread_settings()
        with ExitStack() as stack:
            for name, value in self._values.items():
                if value is not present[name] and value != present[name]:
                    stack.enter_context(_setting_context(name)(value))
            return work(*args, **keywords)


def _thread_settings() -> Mapping[str, Any]:
    names = [name for name in jax.config.values if _setting_context(name) is not None]
    return {name: getattr(jax.config, name) for name in names}


def _setting_context(name: str) -> Any:
    """What sets it for a block of code, if there is such a thing."""
    return getattr(jax, name.removeprefix("jax_"), None)


_CACHE_REQUEST_EVENT = "/jax/compilation_cache/compile_requests_use_cache"
_CACHE_HIT_EVENT = "/jax/compilation_cache/cache_hits"

_NUM_MEASURING_THREADS = 32
"""Threads that compile programs with matrix products, which may wait to be measured."""


class ProgramBuilder:
    """Builds programs in the background; a context that leaves nothing running behind.

    Tracing and lowering hold Python's lock, so one thread does both, in the order of adding;
    compiling does not, so many programs are compiled at once while that goes on. All threads work
    under the settings of JAX that hold where the builder is made.

    Args:
        threads: Compilations at once of programs without matrix products; the others, which may
            wait for their products to be measured, come on top.
        store: Where earlier engines left what they traced and lowered.
        progress: Called with (built so far, all) while a caller waits.
        compiler: What compiles them.
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
        self._last_lookup = local()  # of each thread, whether JAX's cache had the program
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
        for wait_for in (False, True):  # all are told before one is waited for
            for pool in pools:
                pool.shutdown(wait=wait_for, cancel_futures=True)

    @property
    def num_loaded(self) -> int:
        """The number of programs so far that came compiled from JAX's cache on disk."""
        return len(self._loaded & self._futures.keys())

    def add(self, recipes: Iterable[Recipe]) -> None:
        """Begin with these, unless their like was added before."""
        for recipe in recipes:
            if recipe.name in self._futures:
                continue
            traced = self._submit(self._tracer, lower, recipe, self._store)
            pool = self._compilers if recipe.gemm_key is None else self._measurers
            self._futures[recipe.name] = self._submit(
                pool, self._compile_when_allowed, recipe, traced
            )

    def iter_built(self) -> Iterator[tuple[ProgramName, Any]]:
        """Each that was added, as soon as it is compiled."""
        names = {compiled: name for name, compiled in self._futures.items()}
        for compiled in as_completed(names):
            yield names[compiled], compiled.result()

    def programs(self) -> Programs:
        """Wait for all that were added."""
        built = {}
        for name, program in self.iter_built():
            built[name] = program
            self._report_progress(len(built), len(self._futures))
        if self._store is not None:
            self._store.prune()
        return built

    def workspace(self, recipes: Iterable[Recipe], while_compiling: Callable[[], None]) -> int:
        """Bytes of temporaries and fresh outputs of `recipes` as compiled, kept as a number.

        If it is not yet, `while_compiling` is called. What that adds is traced and lowered behind them,
        and compiled later: XLA compiles a Mosaic kernel only while the process compiles nothing
        else, so `recipes` would wait for all of it.
        """
        drafts = [recipe.with_unique_name() for recipe in recipes]

        def compute() -> int:
            self._may_compile.clear()
            try:
                compiling = [self._compile_draft(draft) for draft in drafts]
                while_compiling()
                return sum(_workspace_bytes(future.result()) for future in compiling)
            finally:
                self._may_compile.set()

        if self._store is None:
            return compute()
        key = f"workspace of {[draft.key for draft in drafts]} {self._compiler.key}"
        return self._store.load_or_compute(key, compute)

    def _submit(self, pool: ThreadPoolExecutor, work: Callable[..., T], *args: Any) -> Future[T]:
        return pool.submit(self._settings.run, work, *args)

    def _compile_draft(self, draft: Recipe) -> Future[Any]:
        traced = self._submit(self._tracer, draft.lower)
        # All of the compilers' threads may wait in `_compile_when_allowed`, and so for the drafts.
        return self._submit(self._measurers, self._compile, draft, traced)

    def _compile(self, recipe: Recipe, traced: Future[Any]) -> Any:
        """Compile it when it is traced."""
        lowered = traced.result()
        if self._closed:
            raise CancelledError
        self._last_lookup.was_hit = False
        program = self._compiler.compile(recipe, lowered)
        if self._last_lookup.was_hit:
            self._loaded.add(recipe.name)
        return program

    def _note_lookup(self, event: str, **_: object) -> None:
        """Note whether JAX's cache had a program. JAX calls this in the thread that compiles."""
        if event == _CACHE_REQUEST_EVENT:
            self._last_lookup.was_hit = False
        elif event == _CACHE_HIT_EVENT:
            self._last_lookup.was_hit = True

    def _compile_when_allowed(self, recipe: Recipe, traced: Future[Any]) -> Any:
        self._may_compile.wait()
        return self._compile(recipe, traced)


def lower(recipe: Recipe, store: ProgramStore | None) -> Any:
    """With a store, what was exported is lowered in every start, the first one too: only so is it
    the same to JAX's own cache."""
    if store is None:
        return recipe.lower()
    exported = store.load(recipe.key)
    if exported is None:
        exported = recipe.exported()
        store.save(recipe.key, exported)
    return recipe.lower(exported)


def _workspace_bytes(compiled: Any) -> int:
    analysis = compiled.memory_analysis()
    if analysis is None:
        return 0
    fresh_outputs = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return analysis.temp_size_in_bytes + fresh_outputs
