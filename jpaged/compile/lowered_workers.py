"""Worker processes that compile lowered programs of a user's model (docs/decisions/0012).

Only the engine's process can trace a user's functions. It stores each lowered program. A worker
compiles the stored program, and the engine then finds the executable in JAX's cache.
"""

import gc
import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue

import jax
from jax import export

from jpaged.compile.builder import store_program
from jpaged.compile.recipes import Recipe
from jpaged.compile.store import ProgramStore, read_payload
from jpaged.compile.workers import NICENESS, EngineSettings, apply_settings, from_json, to_json
from jpaged.processes import Child, exit_with_parent, receive, send
from jpaged.runtime.runtime_config import RuntimeConfig


@dataclass(frozen=True)
class LoweredProgram:
    """A stored program that a worker must compile, sent as JSON.

    Attributes:
        name: Name of the program, as text.
        path: File of the program in the store.
        donate: See `Recipe`.
        options: XLA's compiler options by name.
    """

    name: str
    path: str
    donate: list[str]
    options: dict[str, str]

    def compile(self) -> None:
        """Compile the program. JAX then stores the executable in its cache of compiled programs.

        The lowered text equals the result of `Recipe.lower`, so the engine finds the executable in
        this cache.
        """
        payload = read_payload(Path(self.path))
        if payload is None:
            raise ValueError(f"the stored program {self.path} is missing or damaged")
        exported = export.deserialize(bytearray(payload))

        def run(*arguments, **keywords):
            return exported.call(*arguments, **keywords)

        run.__name__ = exported.fun_name
        shapes = [jax.ShapeDtypeStruct(it.shape, it.dtype) for it in exported.in_avals]
        arguments, keywords = jax.tree.unflatten(exported.in_tree, shapes)
        jitted = jax.jit(run, donate_argnames=self.donate)
        jitted.lower(*arguments, **keywords).compile(dict(self.options))


class LoweredPool:
    """Pool of workers that compile lowered programs, with the interface of `CompilePool`.

    Attributes:
        processes: Started workers.

    Args:
        num_workers: Number of workers; 0 if the engine's process compiles all programs.
        store: Store through which workers get the programs.
        settings: Settings of JAX for the workers.
        report: Function that receives lines of text about the start.
    """

    def __init__(
        self,
        num_workers: int,
        store: ProgramStore | None,
        settings: EngineSettings,
        report: Callable[[str], None],
    ):
        self.processes: list[Child] = []
        self._num_workers = 0 if store is None else num_workers
        self._store, self._settings, self._report = store, settings, report
        self._messages: SimpleQueue[tuple[int, dict[str, str] | None]] = SimpleQueue()
        self._listeners = ThreadPoolExecutor(num_workers or 1)
        self._start_lock, self._closed = threading.Lock(), False
        # Indices of the workers that have ended.
        self._ended: set[int] = set()
        # Whether `_assign` has failed to store a program that calls the user's functions. A thread
        # of `ProgramBuilder` then runs these functions to trace the program. Two threads must not
        # run the user's functions at the same time. Therefore, `_assign` refuses all later programs
        # that call the user's functions, and the thread traces these programs too.
        self._is_refused = False

    def __enter__(self) -> "LoweredPool":
        return self

    def __exit__(self, *_: object) -> None:
        with self._start_lock:
            self._closed = True
        for child in self.processes:
            child.process.kill()
        self._listeners.shutdown()
        for child in self.processes:
            child.kill_and_close()

    def start(self, limits: RuntimeConfig) -> bool:
        """Start no workers, and return False. Only `iter_compiled` starts workers in this class."""
        return False

    def iter_compiled(
        self,
        needed: Sequence[Recipe],
        runtime: RuntimeConfig,
        report_progress: Callable[[int, int], None],
    ) -> Iterator[Recipe]:
        """Yield each recipe when a worker has compiled it, or when no worker will compile it.

        See `CompilePool.iter_compiled` for the arguments.
        """
        if self._store is None or not self._num_workers:
            yield from needed
            return
        missing = [it for it in needed if not self._store.has(it.key)]
        if len(missing) <= self._num_workers:  # a warm start
            yield from needed
            return
        self._start_workers()
        waiting: list[dict[str, Recipe]] = [{} for _ in self.processes]
        new, num_yielded = {recipe.name for recipe in missing}, 0
        for index, recipe in enumerate(needed):
            running = [it for it in range(len(waiting)) if it not in self._ended]
            worker = running[index % len(running)] if running else None
            if recipe.name not in new or worker is None or not self._assign(recipe, worker):
                yield recipe
                num_yielded += 1
            else:
                waiting[worker][repr(recipe.name)] = recipe
            for compiled in self._take_compiled(waiting, block=False):
                yield compiled
                num_yielded += 1
                report_progress(num_yielded, len(needed))
        while any(waiting):
            for compiled in self._take_compiled(waiting, block=True):
                yield compiled
                num_yielded += 1
                report_progress(num_yielded, len(needed))

    def _start_workers(self) -> None:
        with self._start_lock:
            for index in range(0 if self._closed else self._num_workers):
                try:
                    child = Child("jpaged.compile.lowered_workers")
                except (OSError, RuntimeError) as error:  # limit of processes reached
                    self._report(f"a compile worker could not be started: {error}")
                    return
                self.processes.append(child)
                self._listeners.submit(self._listen, index, child)
                _send(child, self._settings)

    def _assign(self, recipe: Recipe, worker: int) -> bool:
        """Store a program and send it to a worker. Return whether a worker will compile it."""
        store, calls_user = self._store, recipe.digest is not None
        if store is None or (calls_user and self._is_refused):
            return False
        if not store_program(recipe, store):
            self._is_refused = self._is_refused or calls_user
            return False
        path, options = str(store.path(recipe.key)), dict(recipe.options)
        program = LoweredProgram(repr(recipe.name), path, list(recipe.donate), options)
        _send(self.processes[worker], program)
        return True

    def _listen(self, worker: int, child: Child) -> None:
        try:
            while (message := receive(child.sock)) is not None:
                self._messages.put((worker, json.loads(message)))
        finally:
            self._messages.put((worker, None))

    def _take_compiled(self, waiting: list[dict[str, Recipe]], *, block: bool) -> Iterator[Recipe]:
        """Yield the recipes that workers have reported, and all recipes of ended workers."""
        try:
            while True:
                worker, message = self._messages.get(block=block)
                if message is None:
                    self._ended.add(worker)
                    yield from waiting[worker].values()
                    waiting[worker].clear()
                    return
                if "failed" in message:
                    self._report(f"a compile worker failed: {message['failed']}")
                recipe = waiting[worker].pop(message["name"], None)
                if recipe is not None:
                    yield recipe
                if block:
                    return
        except Empty:
            return


def _send(child: Child, record: object) -> None:
    # The worker has ended; the thread that listens to the worker reports this.
    with suppress(OSError):
        send(child.sock, to_json(record))


def main(sock: socket.socket) -> None:
    """Run a worker process: compile the programs that the parent sends, and report each program.

    Args:
        sock: Channel to the parent, which sends `EngineSettings` first, then `LoweredProgram`s.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the parent may ignore SIGTERM
    os.nice(NICENESS)
    gc.disable()
    exit_with_parent(sock)
    apply_settings(from_json(receive(sock) or b"", EngineSettings))
    while (message := receive(sock)) is not None:
        program = from_json(message, LoweredProgram)
        report = {"name": program.name}
        try:
            program.compile()
        except Exception as error:
            report["failed"] = f"{type(error).__name__}: {error}"
        send(sock, to_json(report))
    os._exit(0)
