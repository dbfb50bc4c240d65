"""A process that compiles a share of an engine's programs: what `jpaged.compile.workers` starts.

On its standard input come two lines of JSON: an `Order`, and, when the pool's size is known, the
numbers of the runtime. On a pipe of its own it tells, a line of JSON each, the programs it has
compiled; they are in the caches of lowered and of compiled programs then. When its input ends, so
does it, whatever it does at the moment.
"""

import gc
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import jax
import jax.numpy as jnp

from jpaged.compile.builder import ProgramBuilder
from jpaged.compile.gemm_autotuning import make_compiler
from jpaged.compile.jax_setup import program_store
from jpaged.compile.recipe import Name, Recipe
from jpaged.compile.recipes import Shapes, SplitModel, recipes, recipes_without_pool
from jpaged.compile.shared_calls import SharedCalls
from jpaged.compile.sizing import step_buckets
from jpaged.models.config import ModelConfig
from jpaged.models.loader import model_shapes, read_config
from jpaged.runtime.runtime_config import RuntimeConfig
from pallas_kernels import Backend

_NICENESS = 5
"""Behind the engine's own process, which loads the model and sizes the pool meanwhile."""

_SECONDS = {
    "decode": (5.5, 0.0),
    "decode_burst": (8.0, 0.0),
    "prefill": (5.0, 4.5),
    "sample": (1.0, 0.0),
}
"""What a processor takes to compile a program of a kind, and once more what those that stay
together have in common (Qwen3-0.6B, H200: bench/NOTES.md). Shares are made equal by it."""

_SECONDS_OF_OTHERS = 0.5, 0.0


@dataclass(frozen=True)
class Order:
    """What a worker compiles, all of it fit for JSON.

    Attributes:
        cache: The engine's `compilation_cache_dir`.
        folder: The checkpoint's.
        dtype: Of weights and pool.
        settings: JAX's, as they hold where the engine is made.
        client: Options of JAX's client of the device there.
        modules: Those that have a part in what programs are made from.
        made_from: The digest of that, as the engine's own process has it.
        tied: Whether the output head is the embedding; None: as config.json says.
        share, of: Which share of the programs, of how many.
        threads: Compilations at once.
        limits: Fields of `RuntimeConfig`, the pool's size not settled.
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
    share: int = 0
    of: int = 1
    threads: int = 1
    limits: dict[str, Any] = field(default_factory=dict)
    recorded: bool = True


def runtime_of(numbers: Mapping[str, Any]) -> RuntimeConfig:
    """A `RuntimeConfig` from JSON."""
    return RuntimeConfig(**{**numbers, "backend": Backend(numbers["backend"])})


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
    kind, _ = group[0].name
    each, shared = _SECONDS.get(kind, _SECONDS_OF_OTHERS)
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
    model_config = ModelConfig.from_hf(read_config(Path(order.folder)))
    if order.tied is not None:
        model_config = replace(model_config, tie_word_embeddings=order.tied)
    dtype = jnp.dtype(order.dtype)
    draft = model_shapes(model_config, dtype)
    store = program_store(order.cache, model_config, draft, device)
    if store is None or store.made_from != order.made_from:
        raise ValueError("settings, code or share of the device are not the engine's process's")
    split, limits = SplitModel.of(draft), runtime_of(order.limits)
    shared = SharedCalls(limits.backend)

    def own(recipes_of: Callable[..., Iterable[Recipe]], runtime: RuntimeConfig) -> list[Recipe]:
        shapes = Shapes.of(split, model_config, runtime, dtype)
        made = recipes_of(split, shapes, runtime, step_buckets(runtime), shared)
        return share_of(made, order.share, order.of)

    compiler = make_compiler(draft, limits.backend, recorded=order.recorded)
    with ProgramBuilder(order.threads, store, compiler=compiler) as builder:
        builder.add(own(recipes_without_pool, limits))
        builder.add(own(recipes, wait_for_runtime()))
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


def main(pipe: int) -> None:
    """Obey the parent at the other end of the standard input; tell it by `pipe`. Never returns."""
    os.set_inheritable(pipe, False)  # or a compiler that XLA starts would hold it open
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # whatever the parent does with it
    os.nice(_NICENESS)
    gc.disable()  # tracing makes millions of objects, and the process ends with them
    lines: SimpleQueue[str] = SimpleQueue()
    threading.Thread(target=_read, args=(lines,), daemon=True).start()
    code = 0
    with os.fdopen(pipe, "w", buffering=1) as told:
        try:
            order = Order(**json.loads(lines.get()))
            for name in compile_share(order, lambda: runtime_of(json.loads(lines.get()))):
                print(json.dumps({"compiled": repr(name)}), file=told)
        except Exception as error:
            code = 1
            print(json.dumps({"failed": f"{type(error).__name__}: {error}"}), file=told)
    os._exit(code)  # with no clearing up, which the thread that reads would hold up


def _read(lines: SimpleQueue[str]) -> None:
    """To the end of the input: the parent has no use for this process then, or is gone."""
    for line in sys.stdin:
        lines.put(line)
    os._exit(1)
