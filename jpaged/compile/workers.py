"""Processes that compile shares of an engine's programs for its start (docs/decisions/0012).

Within one process tracing holds Python's lock, and XLA compiles a Mosaic kernel only while it
compiles nothing else; several processes have a lock and a compiler each. What they compile reaches
the engine through the caches on disk, as in a second start. A program that no worker tells of, for
whatever reason, is compiled in the engine's own process.
"""

import json
import operator
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import jax
import jax.numpy as jnp

from jpaged.compile.recipe import Recipe
from jpaged.compile.store import ProgramStore, device_bytes, settings, traced_modules
from jpaged.compile.worker import Order, share_of
from jpaged.config import EngineConfig
from jpaged.runtime.runtime_config import RuntimeConfig

MAX_WORKERS = 8
_CPUS_A_WORKER = 2
_MAX_THREADS = 4
_DEVICE_BYTES_A_WORKER = 2**30
"""What a process's context and programs take of a GPU, and some more."""
_DEVICE_BYTES_A_MEASURER = 3 * 2**29
"""With the products it measures."""

_WORKER = """
import json, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which ends this
sys.path[:] = json.loads(sys.argv[1])
from jpaged.compile.worker import main
main(int(sys.argv[2]))
"""


def choose_workers(config: EngineConfig, device: Any, *, recorded: bool) -> int:
    """How many processes are to compile beside the engine's own.

    Args:
        config: The caller's wishes.
        device: What the engine runs on.
        recorded: As of `make_compiler`; if not, each worker measures some products itself, and
            needs room for their factors.
    """
    if config.num_compile_workers is not None:
        return config.num_compile_workers
    if device.platform == "cpu":
        return 0
    held, fraction = device_bytes(device) or 0, _client_options().get("memory_fraction")
    if fraction is None:  # nobody knows what is left of the device
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
) -> list[Order]:
    """One for each worker, to make the programs that this thread would right after its store.

    Args:
        config: The caller's wishes.
        folder: The checkpoint's.
        dtype: Of weights and pool.
        device: What the engine runs on.
        store: Where workers leave what they lower, and the engine finds it.
        recorded: Whether XLA has nothing left to measure of the products: it is recorded, or the
            device is a CPU.
        tied: Whether the output head is the embedding; None: as config.json says.

    Returns:
        None at all where what workers compile would not be found, or no Python is to be had.
    """
    num_workers = choose_workers(config, device, recorded=recorded)
    is_frozen = getattr(sys, "frozen", False)  # then that is the caller's own program
    if not num_workers or store is None or not _caches() or not sys.executable or is_frozen:
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
        of=num_workers,
        threads=max(2, min(_MAX_THREADS, _processors() // num_workers)),
        recorded=recorded,
    )
    return [replace(whole, share=share) for share in range(num_workers)]


@dataclass(frozen=True)
class _Worker:
    process: subprocess.Popen[str]
    listener: threading.Thread


class CompilePool:
    """Workers that compile an engine's programs; a context that leaves no process behind.

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
        self._orders, self._store, self._say = orders, store, say
        self._errors = None if verbose else subprocess.DEVNULL
        self._tried, self._workers = False, list[_Worker]()
        self._starting, self._closed = threading.Lock(), False
        self._told: SimpleQueue[tuple[int, dict[str, str] | None]] = SimpleQueue()

    def __enter__(self) -> "CompilePool":
        return self

    def __exit__(self, *_: object) -> None:
        with self._starting:  # another thread may be at it; there are no more after this
            self._closed = True
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.listener.join()
            with suppress(OSError), worker.process:  # waits, and closes what leads there
                pass

    def start(self, limits: RuntimeConfig) -> bool:
        """Begin with the programs that have no part in the pool; False if there are no workers."""
        self._tried = True
        with self._starting:
            if self._closed:
                return False
            for order in self._orders:
                try:
                    self._start_one(replace(order, limits=asdict(limits)))
                except (OSError, RuntimeError) as error:  # no more processes, or threads
                    self._say(f"no process to compile in could be started: {error}")
                    break
        return bool(self._workers)

    def compiled(
        self,
        recipes: Iterable[Recipe],
        runtime: RuntimeConfig,
        progress: Callable[[int, int], None],
    ) -> Iterator[Recipe]:
        """All of `recipes`, each when a worker has compiled it, or when none will.

        Workers that were not started are now if there is much to do.
        """
        needed = list(recipes)
        if not self._tried and self._is_cold(needed):
            self.start(runtime)
        for worker in self._workers:
            _send(worker.process, asdict(runtime))
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
        pipe, theirs = os.pipe()
        listener = threading.Thread(target=self._listen, args=(order.share, pipe), daemon=True)
        try:
            process = subprocess.Popen(
                worker_command(theirs),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                pass_fds=[theirs],
                text=True,
            )
        except OSError:
            os.close(pipe)
            raise
        finally:
            os.close(theirs)
        try:
            listener.start()
        except RuntimeError:
            os.close(pipe)
            process.kill()
            process.communicate()
            raise
        self._workers.append(_Worker(process, listener))
        _send(process, asdict(order))

    def _listen(self, share: int, pipe: int) -> None:
        try:
            with suppress(ValueError), os.fdopen(pipe) as told:  # a line may be cut short
                for line in told:
                    self._told.put((share, json.loads(line)))
        finally:
            self._told.put((share, None))

    def _names_told(self, needed: Sequence[Recipe]) -> Iterator[str]:
        """As workers tell them, and of a share all when its worker has ended or was not started."""
        running = len(self._workers)
        for order in self._orders[running:] if running else ():
            yield from self._left(order.share, needed)
        while running:
            share, told = self._told.get()
            if told is None:
                running -= 1
                yield from self._left(share, needed)
            elif "failed" in told:
                self._say(f"a process that compiles has ended: {told['failed']}")
            else:
                yield told["compiled"]

    def _left(self, share: int, needed: Sequence[Recipe]) -> Iterator[str]:
        return (repr(recipe.name) for recipe in share_of(needed, share, len(self._orders)))


def worker_command(pipe: int) -> list[str]:
    """A worker's command line: it finds modules where this process does, and tells by `pipe`."""
    path = [entry for entry in sys.path if isinstance(entry, str)]
    return [sys.executable, "-P", "-c", _WORKER, json.dumps(path), str(pipe)]


def _send(process: subprocess.Popen[str], line: dict[str, Any]) -> None:
    with suppress(OSError, ValueError):  # it has ended, and the listener says so
        print(json.dumps(line, default=operator.index), file=process.stdin, flush=True)


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
