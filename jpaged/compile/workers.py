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
from jpaged.compile.store import ProgramStore, device_bytes, program_store, settings, traced_modules
from jpaged.config import EngineConfig
from jpaged.models.checkpoint import read_config
from jpaged.models.loader import model_shapes
from jpaged.models.registry import read_model_config
from jpaged.models.sharding import make_mesh
from jpaged.processes import Child, end_with_parent, has_python, receive, send
from jpaged.runtime.programs import Name, Shapes, SplitModel
from jpaged.runtime.runtime_config import RuntimeConfig
from jpaged.runtime.steps import PROGRAMS

T = TypeVar("T")

_NICENESS = 5
"""Behind the engine's own process, which loads the model and sizes the pool meanwhile."""


@dataclass(frozen=True)
class Order:
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

    cache: str
    folder: str
    dtype: str
    settings: dict[str, Any]
    client: dict[str, Any]
    modules: list[str]
    made_from: str
    tied: bool | None = None
    quantization: str | None = None
    kv_cache_dtype: str | None = None
    num_devices: int = 1
    share: int = 0
    of: int = 1
    threads: int = 1
    limits: RuntimeConfig | None = None
    recorded: bool = True


def share_of(made: Iterable[Recipe], share: int, of: int) -> list[Recipe]:
    """A share of an engine's programs, of `of` that take about as long.

    Dealt out first is what needs no pool, so those are the same shares by themselves, then the
    longest. Programs that have kernels in common, as sampling levels of a batch or batches of as
    many tokens, stay together.
    """
    groups: dict[Name, list[Recipe]] = {}
    for recipe in made:
        kind, key = recipe.name
        groups.setdefault((kind, key[0] if isinstance(key, tuple) else key), []).append(recipe)
    shares, loads = [list[Recipe]() for _ in range(of)], [0.0] * of
    for group in sorted(groups.values(), key=lambda it: (it[0].needs_pool, -_seconds(it))):
        least = loads.index(min(loads))
        shares[least] += group
        loads[least] += _seconds(group)
    return shares[share]


def _seconds(group: list[Recipe]) -> float:
    each, shared = PROGRAMS[group[0].name[0]].compile_seconds
    return each * len(group) + shared


def compile_share(order: Order, wait_for_runtime: Callable[[], RuntimeConfig]) -> Iterator[Name]:
    """Compile a share of an engine's programs: first those that have no part in the pool.

    Args:
        order: What to compile.
        wait_for_runtime: Brings the runtime's numbers when they are known.

    Yields:
        The name of each program that is compiled.

    Raises:
        ValueError: here programs would be made from something else than in the engine's process.
    """
    _take_over(order)
    device = jax.local_devices()[0]
    model_config = read_model_config(read_config(Path(order.folder)), order.quantization)
    model_config = replace(model_config, kv_cache_dtype=order.kv_cache_dtype)
    if order.tied is not None:
        model_config = replace(model_config, tie_word_embeddings=order.tied)
    dtype = jnp.dtype(order.dtype)
    mesh = make_mesh(jax.local_devices(), order.num_devices)
    own = model_config.share(order.num_devices)
    draft = model_shapes(model_config, dtype, mesh)
    store = program_store(order.cache, own, draft, device)
    if store is None or store.made_from != order.made_from:
        raise ValueError("settings, code or share of the device are not the engine's process's")
    split, limits = SplitModel.of(draft), cast(RuntimeConfig, order.limits)
    shared = SharedCalls(limits.backend)

    def made(runtime: RuntimeConfig) -> Recipes:
        return Recipes(split, Shapes.of(own, runtime, dtype, mesh), runtime, shared)

    compiler = make_compiler(draft, limits.backend, recorded=order.recorded)
    with ProgramBuilder(order.threads, store, compiler=compiler) as builder:
        builder.add(share_of(made(limits).without_pool(), order.share, order.of))
        builder.add(share_of(made(wait_for_runtime()), order.share, order.of))
        for name, _ in builder.built():
            yield name


def _take_over(order: Order) -> None:
    """Whatever of the engine's process decides how programs come out, and where they are kept."""
    for name, value in order.settings.items():
        if jax.config.values.get(name) != value:
            jax.config.update(name, value)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # nothing is in vain
    client = order.client | {"preallocate": False}  # the share is the engine's, and taken
    jax.config.update("jax_pjrt_client_create_options", client)
    for module in order.modules:
        import_module(module)


def main(sock: socket.socket) -> None:
    """Compile what the parent orders, and report each program that is done, which is in both caches
    by then. Never returns.

    Two messages come: an `Order`, and later the runtime's numbers.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # whatever the parent does with it
    os.nice(_NICENESS)
    gc.disable()  # tracing makes millions of objects, and the process ends with them
    end_with_parent(sock)
    code = 0
    try:
        order = from_json(receive(sock) or b"", Order)  # at the end, this fails
        for name in compile_share(order, lambda: from_json(receive(sock) or b"", RuntimeConfig)):
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
_CPUS_A_WORKER = 2
_MAX_THREADS = 4
_DEVICE_BYTES_A_WORKER = 2**30
"""What a process's context and programs take of a GPU, and some more."""
_DEVICE_BYTES_A_MEASURER = 7 * 2**28
"""With the products it measures."""


def choose_workers(config: EngineConfig, device: Any, *, recorded: bool) -> int:
    """How many processes compile in addition to the engine's own. Unless products are `recorded`
    (see `Order`), each measures some itself, and needs room for their factors."""
    if config.num_compile_workers is not None:
        return config.num_compile_workers
    if device.platform == "cpu":
        return 0
    held, fraction = device_bytes(device) or 0, _client_options().get("memory_fraction")
    if fraction is None:  # what is left of the device is not known
        return 0
    left = held / float(fraction) - held
    most = min(MAX_WORKERS, _processors() // _CPUS_A_WORKER)
    bytes_each = _DEVICE_BYTES_A_WORKER if recorded else _DEVICE_BYTES_A_MEASURER
    return int(min(most, left // bytes_each))


def make_orders(
    config: EngineConfig,
    folder: Path,
    dtype: jnp.dtype,
    device: Any,
    store: ProgramStore | None,
    *,
    recorded: bool,
    tied: bool | None = None,
    kv_cache_dtype: str | None = None,
) -> list[Order]:
    """One for each worker, to make the programs that this thread would right after its store; none
    where what workers compile would not be found, or no Python is to be had.

    Args:
        config: The caller's wishes.
        device: What the engine runs on.
        store: Where workers leave what they lower, and the engine finds it.
        folder, dtype, recorded, tied, kv_cache_dtype: As of `Order`.
    """
    num_workers = choose_workers(config, device, recorded=recorded)
    if not num_workers or store is None or not _caches() or not has_python():
        return []
    whole = Order(
        cache=str(config.compilation_cache_dir),
        folder=str(folder),
        dtype=dtype.name,
        settings=_plain_settings(),
        client=_client_options(),
        modules=traced_modules(),
        made_from=store.made_from,
        tied=tied,
        quantization=config.quantization,
        kv_cache_dtype=kv_cache_dtype,
        num_devices=config.tensor_parallel_size,
        of=num_workers,
        threads=max(2, min(_MAX_THREADS, _processors() // num_workers)),
        recorded=recorded,
    )
    return [replace(whole, share=share) for share in range(num_workers)]


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
        orders: Sequence[Order],
        store: ProgramStore | None,
        say: Callable[[str], None],
        *,
        verbose: bool = False,
    ):
        self.processes: list[Child] = []
        self._orders, self._store, self._say = orders, store, say
        self._errors = None if verbose else subprocess.DEVNULL
        self._tried, self._starting, self._closed = False, threading.Lock(), False
        self._listeners = ThreadPoolExecutor(len(orders) or 1)
        self._told: SimpleQueue[tuple[int, dict[str, str] | None]] = SimpleQueue()

    def __enter__(self) -> "CompilePool":
        return self

    def __exit__(self, *_: object) -> None:
        with self._starting:  # another thread may be at it; there are no more after this
            self._closed = True
        for child in self.processes:  # all of them, before one is waited for
            child.process.kill()
        self._listeners.shutdown()
        for child in self.processes:
            child.end()

    def start(self, limits: RuntimeConfig) -> bool:
        """Begin with the programs that have no part in the pool; False if there are no workers."""
        self._tried = True
        with self._starting:
            try:
                for order in () if self._closed else self._orders:
                    self._start_one(replace(order, limits=limits))
            except (OSError, RuntimeError) as error:  # no more processes, or threads
                self._say(f"no process to compile in could be started: {error}")
        return bool(self.processes)

    def compiled(
        self,
        needed: Sequence[Recipe],
        runtime: RuntimeConfig,
        progress: Callable[[int, int], None],
    ) -> Iterator[Recipe]:
        """All of `needed`, each when a worker has compiled it, or when none will.

        Workers that were not started are now if there is much to do.
        """
        if not self._tried and self._is_cold(needed):
            self.start(runtime)
        for child in self.processes:
            _send(child, runtime)
        waiting = {repr(recipe.name): recipe for recipe in needed}
        for name in self._names_told(needed):
            if name in waiting:
                yield waiting.pop(name)
                progress(len(needed) - len(waiting), len(needed))
        yield from waiting.values()

    def _is_cold(self, recipes: Sequence[Recipe]) -> bool:
        if self._store is None or not self._orders:
            return False
        missing = [recipe for recipe in recipes if not self._store.has(recipe.key)]
        return len(missing) > len(self._orders)

    def _start_one(self, order: Order) -> None:
        child = Child("jpaged.compile.workers", errors=self._errors)
        try:
            self._listeners.submit(self._listen, order.share, child)
        except RuntimeError:
            child.end()
            raise
        self.processes.append(child)
        _send(child, order)

    def _listen(self, share: int, child: Child) -> None:
        try:
            while (message := receive(child.sock)) is not None:
                self._told.put((share, json.loads(message)))
        finally:
            self._told.put((share, None))

    def _names_told(self, needed: Sequence[Recipe]) -> Iterator[str]:
        """As workers tell them, and of a share all when its worker has ended or was not started."""
        running = len(self.processes)
        for order in self._orders[running:] if running else ():
            yield from self._left(order.share, needed)
        while running:
            share, told = self._told.get()
            if told is None:
                running -= 1
                yield from self._left(share, needed)
            elif "failed" in told:
                self._say(f"a process that compiles has ended: {told['failed']}")
            elif "compiled" in told:
                yield told["compiled"]

    def _left(self, share: int, needed: Sequence[Recipe]) -> Iterator[str]:
        return (repr(recipe.name) for recipe in share_of(needed, share, len(self._orders)))


def _send(child: Child, record: Order | RuntimeConfig) -> None:
    with suppress(OSError):  # it has ended, and the listener says so
        send(child.sock, to_json(record))


def _processors() -> int:
    """Those that this process may use, where the system tells."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _caches() -> bool:
    """Whether what a worker compiles is kept, and found again."""
    folder = jax.config.values["jax_compilation_cache_dir"]
    if not folder or not jax.config.values["jax_enable_compilation_cache"]:
        return False
    return "://" in folder or os.access(folder, os.W_OK)


def _plain_settings() -> dict[str, Any]:
    """JAX's settings that JSON has, caches' included; if another one matters, workers will see that
    theirs differs."""
    caches = {name: value for name, value in jax.config.values.items() if "cache" in name}
    plain = (bool, int, float, str, type(None))
    return {name: it for name, it in (settings() | caches).items() if isinstance(it, plain)}


def _client_options() -> dict[str, Any]:
    """As JAX reads them."""
    options = jax.config.values["jax_pjrt_client_create_options"]
    if isinstance(options, str):
        return dict(pair.split(":", 1) for pair in options.split(";") if ":" in pair)
    return dict(options or {})
