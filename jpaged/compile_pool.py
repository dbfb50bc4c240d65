"""Processes that compile shares of an engine's programs for its start (docs/decisions/0012).

Within one process tracing holds Python's lock, and XLA compiles a Mosaic kernel only while it
compiles nothing else; several processes have a lock and a compiler each. What they compile reaches
the engine through the caches on disk, as in a second start. A program that no worker tells of, for
whatever reason, is compiled in the engine's own process.
"""

import json
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

from jpaged.compile_worker import Order, device_bytes
from jpaged.config import EngineConfig
from jpaged.runtime.program_store import ProgramStore, settings, traced_modules
from jpaged.runtime.recipe import Recipe
from jpaged.runtime_config import RuntimeConfig

_CPUS_A_WORKER = 2
_DEVICE_BYTES_A_WORKER = 2**30
"""What a process's context and programs take of a GPU, and some more."""


def choose_workers(config: EngineConfig, device: Any, *, measured: bool) -> int:
    """How many processes are to compile beside the engine's own.

    Args:
        config: The caller's wishes.
        device: What the engine runs on.
        measured: XLA finds all that it would measure on the device; processes that measure at once
            would measure each other.
    """
    if config.num_compile_workers is not None:
        return config.num_compile_workers
    if device.platform == "cpu" or not measured:
        return 0
    held = device_bytes(device) or 0
    left = held / config.gpu_memory_utilization - held
    return int(min((os.cpu_count() or 1) // _CPUS_A_WORKER, left // _DEVICE_BYTES_A_WORKER))


def make_orders(
    config: EngineConfig,
    folder: Path,
    dtype: jnp.dtype,
    device: Any,
    store: ProgramStore | None,
    *,
    measured: bool,
) -> list[Order]:
    """One for each worker, to make the programs that this thread would right after its store.

    Args:
        config: The caller's wishes.
        folder: The checkpoint's.
        dtype: Of weights and pool.
        device: What the engine runs on.
        store: Where workers leave what they lower, and the engine finds it; without it there are
            none.
        measured: As of `choose_workers`.
    """
    num_workers = choose_workers(config, device, measured=measured)
    if store is None or not num_workers:
        return []
    whole = Order(
        options=asdict(config) | {"model": str(folder)},
        folder=str(folder),
        dtype=dtype.name,
        settings=_plain_settings(),
        client=_client_options(),
        device_bytes=device_bytes(device),
        modules=traced_modules(),
        made_from=store.made_from,
        of=num_workers,
        threads=max(2, (os.cpu_count() or 1) // num_workers),
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
    """

    def __init__(
        self, orders: Sequence[Order], store: ProgramStore | None, say: Callable[[str], None]
    ):
        self._orders, self._store, self._say = orders, store, say
        self._workers: list[_Worker] = []
        self._told: SimpleQueue[dict[str, str] | None] = SimpleQueue()  # None: one has ended

    def __enter__(self) -> "CompilePool":
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.listener.join()
            with suppress(OSError), worker.process:  # waits, and closes what leads there
                pass

    def start(self, limits: RuntimeConfig) -> bool:
        """Begin with the programs that have no part in the pool; False if there are no workers."""
        for order in self._orders:
            try:
                self._start_one(replace(order, limits=asdict(limits)))
            except OSError as error:
                self._say(f"no process to compile in could be started: {error}")
                break
        return bool(self._workers)

    def compiled(
        self,
        recipes: Iterable[Recipe],
        runtime: RuntimeConfig,
        progress: Callable[[int, int], None],
    ) -> Iterator[Recipe]:
        """All of `recipes`, each when a worker has compiled it, those that none does at the end.

        Workers that were not started are now if there is much to do.
        """
        waiting = {repr(recipe.name): recipe for recipe in recipes}
        total = len(waiting)
        if not self._workers and self._is_cold(waiting.values()):
            self.start(runtime)
        for worker in self._workers:
            _send(worker.process, asdict(runtime))
        for name in self._names_told():
            if name in waiting:
                yield waiting.pop(name)
                progress(total - len(waiting), total)
        if self._workers and waiting:
            self._say(f"{len(waiting)} of {total} programs are left to this process")
        yield from waiting.values()

    def _is_cold(self, recipes: Iterable[Recipe]) -> bool:
        if self._store is None or not self._orders:
            return False
        missing = [recipe for recipe in recipes if not self._store.has(recipe.key)]
        return len(missing) > len(self._orders)

    def _start_one(self, order: Order) -> None:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "jpaged.compile_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if order.options["verbose"] else subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
            text=True,
        )
        listener = threading.Thread(target=self._listen, args=(process,), daemon=True)
        self._workers.append(_Worker(process, listener))
        listener.start()
        _send(process, asdict(order))

    def _listen(self, process: subprocess.Popen[str]) -> None:
        for line in process.stdout or ():
            self._told.put(json.loads(line))
        self._told.put(None)

    def _names_told(self) -> Iterator[str]:
        running = len(self._workers)
        while running:
            told = self._told.get()
            if told is None:
                running -= 1
            elif "failed" in told:
                self._say(f"a process that compiles has ended: {told['failed']}")
            else:
                yield told["compiled"]


def _send(process: subprocess.Popen[str], line: dict[str, Any]) -> None:
    with suppress(OSError):  # it has ended, and the listener says so
        print(json.dumps(line, default=str), file=process.stdin, flush=True)


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
