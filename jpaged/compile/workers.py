"""Processes that compile shares of an engine's programs for its start (docs/decisions/0012).

Within one process tracing holds Python's lock, and XLA compiles a Mosaic kernel only while it
compiles nothing else; several processes have a lock and a compiler each. What they compile reaches
the engine through the caches on disk, as in a second start. A program that no worker tells of, for
whatever reason, is compiled in the engine's own process.
"""

import gc
import json
import operator
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import msgspec

from jpaged.compile.builder import ProgramBuilder
from jpaged.compile.gemm_autotuning import make_compiler
from jpaged.compile.recipes import Recipe, Recipes, SharedCalls
from jpaged.compile.store import (
    ProgramStore,
    device_memory_bytes,
    jax_settings,
    open_program_store,
    traced_modules,
)
from jpaged.config import EngineConfig
from jpaged.models.checkpoint import read_config
from jpaged.models.loader import make_abstract_model
from jpaged.models.registry import read_model_config
from jpaged.models.sharding import make_mesh
from jpaged.processes import Child, can_start_python, exit_with_parent, receive, send
from jpaged.runtime.programs import DeviceShapes, ProgramName, SplitModel
from jpaged.runtime.runtime_config import RuntimeConfig
from jpaged.runtime.steps import PROGRAMS

T = TypeVar("T")

_NICENESS = 5
"""Behind the engine's own process, which loads the model and sizes the pool meanwhile."""


@dataclass(frozen=True)
class CompileJob:
    """What a worker compiles, all of it fit for JSON.

    Attributes:
        cache: The engine's `compilation_cache_dir`.
        folder: The checkpoint's.
        dtype: Of the weights.
        settings: JAX's, as they hold where the engine is made.
        client: Options of JAX's client of the device there.
        modules: Those that have a part in what programs are made from.
        made_from: The digest of that, as the engine's own process has it.
        tied: Whether the output head is the embedding; None: as config.json says.
        quantization: The engine's.
        kv_cache_dtype: As of `ModelConfig`.
        num_devices: Devices that share the model.
        share, of: Which share of the programs, of how many.
        threads: Compilations at once.
        limits: The runtime's numbers, the pool's size not settled; set when a worker is started.
        recorded: Whether XLA has nothing left to measure of the products: it is recorded, or the
            device is a CPU.
    """

    cache_dir: str
    folder: str
    dtype: str
    jax_settings: dict[str, Any]
    client_options: dict[str, Any]
    modules: list[str]
    dependency_digest: str
    tie_word_embeddings: bool | None = None
    quantization: str | None = None
    kv_cache_dtype: str | None = None
    num_devices: int = 1
    worker_index: int = 0
    num_workers: int = 1
    num_threads: int = 1
    limits: RuntimeConfig | None = None
    has_gemm_record: bool = True


def select_worker_recipes(
    made: Iterable[Recipe], worker_index: int, num_workers: int
) -> list[Recipe]:
    """A share of an engine's programs, of `of` that take about as long.

    Dealt out first is what needs no pool, so those are the same shares by themselves, then the
    longest. Programs that have kernels in common, as sampling levels of a batch or batches of as
    many tokens, stay together.
    """
    groups: dict[ProgramName, list[Recipe]] = {}
    for recipe in made:
        kind, key = recipe.name
        groups.setdefault((kind, key[0] if isinstance(key, tuple) else key), []).append(recipe)
    shares, loads = [list[Recipe]() for _ in range(num_workers)], [0.0] * num_workers
    for group in sorted(groups.values(), key=lambda it: (it[0].needs_pool, -_group_seconds(it))):
        least = loads.index(min(loads))
        shares[least] += group
        loads[least] += _group_seconds(group)
    return shares[worker_index]


def _group_seconds(group: list[Recipe]) -> float:
    each, shared = PROGRAMS[group[0].name[0]].compile_seconds
    return each * len(group) + shared


def run_compile_job(
    job: CompileJob, wait_for_runtime: Callable[[], RuntimeConfig]
) -> Iterator[ProgramName]:
    """Compile a share of an engine's programs: first those that have no part in the pool.

    Args:
        order: What to compile.
        wait_for_runtime: Brings the runtime's numbers when they are known.

    Yields:
        The name of each program that is compiled.

    Raises:
        ValueError: here programs would be made from something else than in the engine's process.
    """
    _apply_engine_settings(job)
    device = jax.local_devices()[0]
    model_config = read_model_config(read_config(Path(job.folder)), job.quantization)
    model_config = replace(model_config, kv_cache_dtype=job.kv_cache_dtype)
    if job.tie_word_embeddings is not None:
        model_config = replace(model_config, tie_word_embeddings=job.tie_word_embeddings)
    dtype = jnp.dtype(job.dtype)
    mesh = make_mesh(jax.local_devices(), job.num_devices)
    own = model_config.shard(job.num_devices)
    draft = make_abstract_model(model_config, dtype, mesh)
    store = open_program_store(job.cache_dir, own, draft, device)
    if store is None or store.dependency_digest != job.dependency_digest:
        raise ValueError("settings, code or share of the device are not the engine's process's")
    split, limits = SplitModel.of(draft), cast(RuntimeConfig, job.limits)
    shared_calls = SharedCalls(limits.backend)

    def make_recipes(runtime: RuntimeConfig) -> Recipes:
        return Recipes(split, DeviceShapes.of(own, runtime, dtype, mesh), runtime, shared_calls)

    compiler = make_compiler(draft, limits.backend, has_gemm_record=job.has_gemm_record)
    with ProgramBuilder(job.num_threads, store, compiler=compiler) as builder:
        builder.add(
            select_worker_recipes(
                make_recipes(limits).without_pool(), job.worker_index, job.num_workers
            )
        )
        builder.add(
            select_worker_recipes(
                make_recipes(wait_for_runtime()), job.worker_index, job.num_workers
            )
        )
        for name, _ in builder.iter_built():
            yield name


def _apply_engine_settings(job: CompileJob) -> None:
    """Whatever of the engine's process decides how programs come out, and where they are kept."""
    for name, value in job.jax_settings.items():
        if jax.config.values.get(name) != value:
            jax.config.update(name, value)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # nothing is in vain
    client_options = job.client_options | {
        "preallocate": False
    }  # the share is the engine's, and taken
    jax.config.update("jax_pjrt_client_create_options", client_options)
    for module in job.modules:
        import_module(module)


def main(sock: socket.socket) -> None:
    """Compile what the parent orders, and report each program that is done, which is in both caches
    by then. Never returns.

    Two messages come: an `CompileJob`, and later the runtime's numbers.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # whatever the parent does with it
    os.nice(_NICENESS)
    gc.disable()  # tracing makes millions of objects, and the process ends with them
    exit_with_parent(sock)
    code = 0
    try:
        job = from_json(receive(sock) or b"", CompileJob)  # at the end, this fails
        for name in run_compile_job(job, lambda: from_json(receive(sock) or b"", RuntimeConfig)):
            send(sock, to_json({"compiled": repr(name)}))
    except Exception as error:
        code = 1
        with suppress(OSError):
            send(sock, to_json({"failed": f"{type(error).__name__}: {error}"}))
    os._exit(code)  # with no clearing up, which other threads would hold up


def to_json(record: object) -> bytes:
    """Return a record as JSON in ASCII, which holds paths that are not UTF-8 too."""
    return json.dumps(msgspec.to_builtins(record, enc_hook=operator.index)).encode()


def from_json(message: bytes, kind: type[T]) -> T:
    """Return the record that `to_json` was given."""
    return msgspec.convert(json.loads(message), type=kind)


MAX_WORKERS = 16
_CPUS_PER_WORKER = 2
_MAX_THREADS = 4
_DEVICE_BYTES_PER_WORKER = 2**30
"""What a process's context and programs take of a GPU, and some more."""
_MEASURING_WORKER_DEVICE_BYTES = 7 * 2**28
"""With the products it measures."""


def choose_num_workers(config: EngineConfig, device: Any, *, has_gemm_record: bool) -> int:
    """How many processes compile in addition to the engine's own. Unless products are `has_gemm_record`
    (see `CompileJob`), each measures some itself, and needs room for their factors."""
    if config.num_compile_workers is not None:
        return config.num_compile_workers
    if device.platform == "cpu":
        return 0
    held, fraction = device_memory_bytes(device) or 0, _client_options().get("memory_fraction")
    if fraction is None:  # what is left of the device is not known
        return 0
    left = held / float(fraction) - held
    most = min(MAX_WORKERS, _num_available_cpus() // _CPUS_PER_WORKER)
    bytes_each = _DEVICE_BYTES_PER_WORKER if has_gemm_record else _MEASURING_WORKER_DEVICE_BYTES
    return int(min(most, left // bytes_each))


def make_compile_jobs(
    config: EngineConfig,
    folder: Path,
    dtype: jnp.dtype,
    device: Any,
    store: ProgramStore | None,
    *,
    has_gemm_record: bool,
    tie_word_embeddings: bool | None = None,
    kv_cache_dtype: str | None = None,
) -> list[CompileJob]:
    """One for each worker, to make the programs that this thread would right after its store; none
    where what workers compile would not be found, or no Python is to be had.

    Args:
        config: The caller's wishes.
        device: What the engine runs on.
        store: Where workers leave what they lower, and the engine finds it.
        folder, dtype, recorded, tied, kv_cache_dtype: As of `CompileJob`.
    """
    num_workers = choose_num_workers(config, device, has_gemm_record=has_gemm_record)
    if not num_workers or store is None or not _has_writable_cache() or not can_start_python():
        return []
    template = CompileJob(
        cache_dir=str(config.compilation_cache_dir),
        folder=str(folder),
        dtype=dtype.name,
        jax_settings=_json_settings(),
        client_options=_client_options(),
        modules=traced_modules(),
        dependency_digest=store.dependency_digest,
        tie_word_embeddings=tie_word_embeddings,
        quantization=config.quantization,
        kv_cache_dtype=kv_cache_dtype,
        num_devices=config.tensor_parallel_size,
        num_workers=num_workers,
        num_threads=max(2, min(_MAX_THREADS, _num_available_cpus() // num_workers)),
        has_gemm_record=has_gemm_record,
    )
    return [replace(template, worker_index=worker_index) for worker_index in range(num_workers)]


class CompilePool:
    """Workers that compile an engine's programs; a context that leaves no process behind.

    Attributes:
        processes: Those that were started, one an order.

    Args:
        orders: One a worker; without any, all is left to the engine's own process.
        store: Where they leave what they lower.
        say: Tells a line about the start.
        verbose: Let what workers write on stderr through.
    """

    def __init__(
        self,
        jobs: Sequence[CompileJob],
        store: ProgramStore | None,
        report: Callable[[str], None],
        *,
        verbose: bool = False,
    ):
        self.processes: list[Child] = []
        self._jobs, self._store, self._report = jobs, store, report
        self._stderr = None if verbose else subprocess.DEVNULL
        self._was_started, self._start_lock, self._closed = False, threading.Lock(), False
        self._listeners = ThreadPoolExecutor(len(jobs) or 1)
        self._messages: SimpleQueue[tuple[int, dict[str, str] | None]] = SimpleQueue()

    def __enter__(self) -> "CompilePool":
        return self

    def __exit__(self, *_: object) -> None:
        with self._start_lock:  # another thread may be at it; there are no more after this
            self._closed = True
        for child in self.processes:  # all of them, before one is waited for
            child.process.kill()
        self._listeners.shutdown()
        for child in self.processes:
            child.kill_and_close()

    def start(self, limits: RuntimeConfig) -> bool:
        """Begin with the programs that have no part in the pool; False if there are no workers."""
        self._was_started = True
        with self._start_lock:
            try:
                for job in () if self._closed else self._jobs:
                    self._start_worker(replace(job, limits=limits))
            except (OSError, RuntimeError) as error:  # no more processes, or threads
                self._report(f"no process to compile in could be started: {error}")
        return bool(self.processes)

    def iter_compiled(
        self,
        needed: Sequence[Recipe],
        runtime: RuntimeConfig,
        report_progress: Callable[[int, int], None],
    ) -> Iterator[Recipe]:
        """All of `needed`, each when a worker has compiled it, or when none will.

        Workers that were not started are now if there is much to do.
        """
        if not self._was_started and self._is_cache_cold(needed):
            self.start(runtime)
        for child in self.processes:
            _send(child, runtime)
        waiting = {repr(recipe.name): recipe for recipe in needed}
        for name in self._reported_names(needed):
            if name in waiting:
                yield waiting.pop(name)
                report_progress(len(needed) - len(waiting), len(needed))
        yield from waiting.values()

    def _is_cache_cold(self, recipes: Sequence[Recipe]) -> bool:
        if self._store is None or not self._jobs:
            return False
        missing = [recipe for recipe in recipes if not self._store.has(recipe.key)]
        return len(missing) > len(self._jobs)

    def _start_worker(self, job: CompileJob) -> None:
        child = Child("jpaged.compile.workers", stderr=self._stderr)
        try:
            self._listeners.submit(self._listen, job.worker_index, child)
        except RuntimeError:
            child.kill_and_close()
            raise
        self.processes.append(child)
        _send(child, job)

    def _listen(self, worker_index: int, child: Child) -> None:
        try:
            while (message := receive(child.sock)) is not None:
                self._messages.put((worker_index, json.loads(message)))
        finally:
            self._messages.put((worker_index, None))

    def _reported_names(self, needed: Sequence[Recipe]) -> Iterator[str]:
        """As workers tell them, and of a share all when its worker has ended or was not started."""
        running = len(self.processes)
        for job in self._jobs[running:] if running else ():
            yield from self._worker_program_names(job.worker_index, needed)
        while running:
            worker_index, message = self._messages.get()
            if message is None:
                running -= 1
                yield from self._worker_program_names(worker_index, needed)
            elif "failed" in message:
                self._report(f"a process that compiles has ended: {message['failed']}")
            elif "compiled" in message:
                yield message["compiled"]

    def _worker_program_names(self, worker_index: int, needed: Sequence[Recipe]) -> Iterator[str]:
        return (
            repr(recipe.name)
            for recipe in select_worker_recipes(needed, worker_index, len(self._jobs))
        )


def _send(child: Child, record: CompileJob | RuntimeConfig) -> None:
    with suppress(OSError):  # it has ended, and the listener says so
        send(child.sock, to_json(record))


def _num_available_cpus() -> int:
    """Those that this process may use, where the system tells."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _has_writable_cache() -> bool:
    """Whether what a worker compiles is kept, and found again."""
    folder = jax.config.values["jax_compilation_cache_dir"]
    if not folder or not jax.config.values["jax_enable_compilation_cache"]:
        return False
    return "://" in folder or os.access(folder, os.W_OK)


def _json_settings() -> dict[str, Any]:
    """JAX's settings that JSON has, caches' included; if another one matters, workers will see that
    theirs differs."""
    caches = {name: value for name, value in jax.config.values.items() if "cache" in name}
    plain = (bool, int, float, str, type(None))
    return {name: it for name, it in (jax_settings() | caches).items() if isinstance(it, plain)}


def _client_options() -> dict[str, Any]:
    """As JAX reads them."""
    options = jax.config.values["jax_pjrt_client_create_options"]
    if isinstance(options, str):
        return dict(pair.split(":", 1) for pair in options.split(";") if ":" in pair)
    return dict(options or {})
