"""Worker processes that compile programs while an engine starts (docs/decisions/0012).

Threads of one process would not be fast enough: tracing holds the GIL, and XLA compiles a Mosaic
kernel only while the process compiles nothing else. Therefore each worker process compiles some of
the programs, and writes these programs to the caches on disk. The engine's process loads the
programs from there, and compiles every program that no worker reports as compiled.
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
from jpaged.models.registry import read_model_config
from jpaged.models.sharding import make_mesh
from jpaged.models.weight_plan import make_abstract_model
from jpaged.processes import Child, can_start_python, exit_with_parent, receive, send
from jpaged.runtime.programs import DeviceShapes, ProgramName, SplitModel
from jpaged.runtime.runtime_config import RuntimeConfig
from jpaged.runtime.step_programs import PROGRAMS

T = TypeVar("T")

NICENESS = 5
"""Niceness of workers. The engine's process gets CPU time first, because it loads the model and
sizes the pool at the same time."""


@dataclass(frozen=True)
class CompileJob:
    """Instructions for one worker process, sent as JSON.

    Attributes:
        cache_dir: The engine's `compilation_cache_dir`.
        folder: Checkpoint folder.
        dtype: Dtype of the weights.
        jax_settings: JAX's settings in the thread that creates the engine.
        client_options: Options of JAX's device client in the engine's process.
        modules: Names of the modules whose code the steps contain.
        dependency_digest: `ProgramStore.dependency_digest` in the engine's process.
        tie_word_embeddings: Whether the output head has the weights of the embedding; None to read
            it from config.json.
        quantization: The engine's `quantization`.
        kv_cache_dtype: `kv_cache_dtype` of the `ModelConfig`.
        enable_expert_parallel: `enable_expert_parallel` of the `ModelConfig`.
        batch_invariant: The engine's `batch_invariant`.
        num_devices: Number of tensor-parallel devices.
        worker_index: Index of the worker.
        num_workers: Number of workers.
        num_threads: Number of threads that compile programs.
        limits: Sizes and limits of the runtime without the size of the KV pool; None until the
            worker is started.
        has_gemm_record: Whether XLA has no matrix products to measure, because a record covers all
            of them or the device is a CPU.
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
    enable_expert_parallel: bool = False
    batch_invariant: bool = False
    num_devices: int = 1
    worker_index: int = 0
    num_workers: int = 1
    num_threads: int = 1
    limits: RuntimeConfig | None = None
    has_gemm_record: bool = True


def select_worker_recipes(
    recipes: Iterable[Recipe], worker_index: int, num_workers: int
) -> list[Recipe]:
    """Return the programs that one worker compiles. The programs are distributed so that all
    workers take about equally long.

    Programs that share kernels form a group, such as the programs of one batch size that differ in
    their sampling features. Each group goes to the worker with the lowest total of estimated
    compile times.

    First, the function assigns the groups that do not depend on the size of the KV pool. Their
    assignment is thus the same before and after that size is known. Then the function assigns the
    other groups. In both passes, it starts with the group that has the longest estimated compile
    time.

    Args:
        recipes: Recipes of the programs of all workers.
        worker_index: Index of the worker.
        num_workers: Number of workers.
    """
    groups: dict[ProgramName, list[Recipe]] = {}
    for recipe in recipes:
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
    """Compile one worker's programs. First compile the programs that do not depend on the number of
    KV blocks, because the engine may not have chosen that number yet.

    Args:
        job: Job of the worker.
        wait_for_runtime: Function that waits for the engine's sizes and returns them.

    Yields:
        Name of each compiled program.

    Raises:
        ValueError: The worker has different code, settings or devices than the engine's process, so
            the engine could not use the worker's programs.
    """
    apply_settings(job)
    for module in job.modules:
        import_module(module)
    device = jax.local_devices()[0]
    model_config = read_model_config(read_config(Path(job.folder)), job.quantization)
    options = {
        "kv_cache_dtype": job.kv_cache_dtype,
        "enable_expert_parallel": job.enable_expert_parallel,
        "batch_invariant": job.batch_invariant,
    }
    model_config = replace(model_config, **options)
    if job.tie_word_embeddings is not None:
        model_config = replace(model_config, tie_word_embeddings=job.tie_word_embeddings)
    dtype = jnp.dtype(job.dtype)
    mesh = make_mesh(jax.local_devices(), job.num_devices)
    shard_config = model_config.shard(job.num_devices)
    draft = make_abstract_model(model_config, dtype, mesh)
    store = open_program_store(job.cache_dir, shard_config, draft, device)
    if store is None or store.dependency_digest != job.dependency_digest:
        raise ValueError(
            "this worker cannot compile programs for the engine: its code, settings or device "
            "memory differ from those of the engine's process"
        )
    split, limits = SplitModel.of(draft), cast(RuntimeConfig, job.limits)
    shared_calls = SharedCalls(limits.backend)

    def make_recipes(runtime: RuntimeConfig) -> Recipes:
        return Recipes(
            split, DeviceShapes.of(shard_config, runtime, dtype, mesh), runtime, shared_calls
        )

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


@dataclass(frozen=True)
class EngineSettings:
    """JAX settings of the engine's process, which a worker receives as JSON.

    Attributes:
        jax_settings: See `CompileJob`.
        client_options: See `CompileJob`.
    """

    jax_settings: dict[str, Any]
    client_options: dict[str, Any]

    @staticmethod
    def read() -> "EngineSettings":
        """Return the settings of the current thread."""
        return EngineSettings(_json_settings(), _client_options())


def apply_settings(settings: EngineSettings | CompileJob) -> None:
    """Apply the JAX settings of the engine's process."""
    for name, value in settings.jax_settings.items():
        if jax.config.values.get(name) != value:
            jax.config.update(name, value)
    # By default, JAX does not cache programs that compile fast.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    # Do not preallocate device memory: the engine's process has already reserved the configured
    # fraction of the memory.
    client_options = settings.client_options | {"preallocate": False}
    jax.config.update("jax_pjrt_client_create_options", client_options)


def main(sock: socket.socket) -> None:
    """Run a worker process: compile the parent's job, report each compiled program, and exit.

    The parent sends a `CompileJob`, and later the `RuntimeConfig`. The worker reports a program
    after it has written the program to the program store and to JAX's cache.

    Args:
        sock: Channel to the parent.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the parent may ignore SIGTERM
    os.nice(NICENESS)
    gc.disable()  # tracing creates millions of objects, so garbage collections are slow
    exit_with_parent(sock)
    code = 0
    try:
        # If the channel is closed, `receive` returns None, and `from_json` raises an error.
        job = from_json(receive(sock) or b"", CompileJob)
        for name in run_compile_job(job, lambda: from_json(receive(sock) or b"", RuntimeConfig)):
            send(sock, to_json({"compiled": repr(name)}))
    except Exception as error:
        code = 1
        with suppress(OSError):
            send(sock, to_json({"failed": f"{type(error).__name__}: {error}"}))
    os._exit(code)  # exit without waiting for other threads


def to_json(record: object) -> bytes:
    """Encode an object as JSON. Strings are escaped to ASCII, because a path may not be valid
    UTF-8."""
    return json.dumps(msgspec.to_builtins(record, enc_hook=operator.index)).encode()


def from_json(message: bytes, kind: type[T]) -> T:
    """Decode a JSON message into an object of type `kind`. The message is a result of `to_json`."""
    return msgspec.convert(json.loads(message), type=kind)


MAX_WORKERS = 16
_CPUS_PER_WORKER = 2
_MAX_THREADS = 4
_DEVICE_BYTES_PER_WORKER = 2**30
"""Number of bytes of device memory for the GPU context and the programs of one worker."""
_MEASURING_WORKER_DEVICE_BYTES = 7 * 2**28
"""Number of bytes of device memory for one worker that also measures matrix products."""


def choose_num_workers(config: EngineConfig, device: Any, *, has_gemm_record: bool) -> int:
    """Return the number of workers to start; 0 if the engine's process compiles all programs.

    Args:
        config: Options of the engine. `num_compile_workers` overrides the default.
        device: One of the engine's devices.
        has_gemm_record: See `CompileJob`. If False, workers measure matrix products, so each worker
            needs more device memory.
    """
    if config.num_compile_workers is not None:
        return config.num_compile_workers
    if device.platform == "cpu":
        return 0
    held, fraction = device_memory_bytes(device) or 0, _client_options().get("memory_fraction")
    if fraction is None:  # without `memory_fraction`, the free device memory is unknown
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
    """Return one job per worker; the jobs contain the JAX settings of the current thread.

    The result is empty if `choose_num_workers` returns 0 or if no Python interpreter is known.
    Workers pass programs to the engine through the program store and JAX's cache. The result is
    therefore also empty if `store` is None or if the cache is not writable.

    Args:
        config: Options of the engine.
        folder: See `CompileJob`.
        dtype: Dtype of the weights.
        device: One of the engine's devices.
        store: Store of lowered programs, through which workers pass programs to the engine.
        has_gemm_record: See `CompileJob`.
        tie_word_embeddings: See `CompileJob`.
        kv_cache_dtype: See `CompileJob`.
    """
    num_workers = choose_num_workers(config, device, has_gemm_record=has_gemm_record)
    if not num_workers or store is None or not has_writable_cache() or not can_start_python():
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
        enable_expert_parallel=config.enable_expert_parallel,
        batch_invariant=config.batch_invariant,
        num_devices=config.tensor_parallel_size,
        num_workers=num_workers,
        num_threads=max(2, min(_MAX_THREADS, _num_available_cpus() // num_workers)),
        has_gemm_record=has_gemm_record,
    )
    return [replace(template, worker_index=worker_index) for worker_index in range(num_workers)]


class CompilePool:
    """Starts and stops the workers that compile an engine's programs.

    The pool is a context manager that kills all workers on exit.

    Attributes:
        processes: Started workers, in the order of their jobs.

    Args:
        jobs: One job per worker. Without jobs, the engine's process compiles all programs.
        store: Store to which workers write lowered programs.
        report: Function that receives lines of text about the start.
        verbose: Whether to show the stderr output of workers.
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
        with self._start_lock:  # another thread may be starting workers
            self._closed = True
        for child in self.processes:  # first kill all workers, then wait for each worker
            child.process.kill()
        self._listeners.shutdown()
        for child in self.processes:
            child.kill_and_close()

    def start(self, limits: RuntimeConfig) -> bool:
        """Start the workers. A worker first compiles programs that do not depend on the pool size.

        Args:
            limits: Sizes and limits of the runtime; the size of the KV pool is not known yet.

        Returns:
            Whether at least one worker was started.
        """
        self._was_started = True
        with self._start_lock:
            try:
                for job in () if self._closed else self._jobs:
                    self._start_worker(replace(job, limits=limits))
            # The system's limit of processes or threads is reached.
            except (OSError, RuntimeError) as error:
                self._report(
                    "a compile worker could not be started, so the engine's process compiles its "
                    f"programs: {error}"
                )
        return bool(self.processes)

    def iter_compiled(
        self,
        needed: Sequence[Recipe],
        runtime: RuntimeConfig,
        report_progress: Callable[[int, int], None],
    ) -> Iterator[Recipe]:
        """Yield each recipe when a worker has compiled it, or when no worker will compile it.

        The method starts the workers if they are not running and many programs are missing in the
        store.

        Args:
            needed: Recipes of all programs of the engine.
            runtime: Sizes and limits of the runtime, including the size of the KV pool.
            report_progress: Function that is called with the number of recipes yielded so far and
                the number of all recipes.
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
        """Yield the name of each program that a worker reports.

        If a worker has ended or was not started, yield the names of all programs of that worker.
        The engine's process must then compile these programs.
        """
        running = len(self.processes)
        for job in self._jobs[running:] if running else ():
            yield from self._worker_program_names(job.worker_index, needed)
        while running:
            worker_index, message = self._messages.get()
            if message is None:
                running -= 1
                yield from self._worker_program_names(worker_index, needed)
            elif "failed" in message:
                self._report(f"a compile worker failed: {message['failed']}")
            elif "compiled" in message:
                yield message["compiled"]

    def _worker_program_names(self, worker_index: int, needed: Sequence[Recipe]) -> Iterator[str]:
        return (
            repr(recipe.name)
            for recipe in select_worker_recipes(needed, worker_index, len(self._jobs))
        )


def _send(child: Child, record: CompileJob | RuntimeConfig) -> None:
    # The worker has ended; the thread that listens to the worker reports this.
    with suppress(OSError):
        send(child.sock, to_json(record))


def _num_available_cpus() -> int:
    """Return the number of CPUs that this process may use; if unknown, the number of all CPUs."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def has_writable_cache() -> bool:
    """Return whether JAX's compilation cache is enabled and its folder is writable."""
    folder = jax.config.values["jax_compilation_cache_dir"]
    if not folder or not jax.config.values["jax_enable_compilation_cache"]:
        return False
    return "://" in folder or os.access(folder, os.W_OK)


def _json_settings() -> dict[str, Any]:
    """Return JAX's settings for the workers, by name, including the settings of caches.

    Workers receive the settings as JSON, so the result leaves out every setting whose value JSON
    cannot represent. If such a setting has another value in a worker of a `CompileJob`, the
    worker's `dependency_digest` differs, and the worker refuses the job.
    """
    caches = {name: value for name, value in jax.config.values.items() if "cache" in name}
    plain = (bool, int, float, str, type(None))
    return {name: it for name, it in (jax_settings() | caches).items() if isinstance(it, plain)}


def _client_options() -> dict[str, Any]:
    """Return the options of JAX's device client, parsed as JAX parses them."""
    options = jax.config.values["jax_pjrt_client_create_options"]
    if isinstance(options, str):
        return dict(pair.split(":", 1) for pair in options.split(";") if ":" in pair)
    return dict(options or {})
