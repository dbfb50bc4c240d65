"""A process that compiles a share of an engine's programs (`python -m jpaged.compile_worker`).

Its parent is `jpaged.compile_pool`. On its standard input come two lines of JSON: an `Order`, and,
when the pool's size is known, the numbers of the runtime. On its standard output it tells, a line
of JSON each, the programs it has compiled; they are in the caches of lowered and of compiled
programs then. When its input ends, so does it, whatever it does at the moment.
"""

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jpaged.config import EngineConfig
from jpaged.jax_setup import program_store, without_collections
from jpaged.models.config import ModelConfig
from jpaged.models.loader import model_shapes, read_config
from jpaged.runtime.programs import ProgramBuilder
from jpaged.runtime.recipe import Name, Recipe
from jpaged.runtime.recipes import Shapes, SplitModel, recipes, recipes_without_pool
from jpaged.runtime.shared_calls import SharedCalls
from jpaged.runtime_config import RuntimeConfig
from jpaged.sizing import step_buckets
from pallas_kernels import Backend

_NICENESS = 5
"""Behind the engine's own process, which loads the model and sizes the pool meanwhile."""


@dataclass(frozen=True)
class Order:
    """What a worker compiles, all of it fit for JSON.

    Attributes:
        options: Fields of `EngineConfig`.
        folder: The checkpoint's.
        dtype: Of weights and pool.
        settings: JAX's, as they hold where the engine is made.
        client: Options of JAX's client of the device there.
        device_bytes: What that client reserved of the device; XLA schedules programs by it.
        modules: Those that have a part in what programs are made from.
        made_from: The digest of that, as the engine's own process has it.
        share, of: Which share of the programs, of how many.
        threads: Compilations at once.
        limits: Fields of `RuntimeConfig`, the pool's size not settled.
    """

    options: dict[str, Any]
    folder: str
    dtype: str
    settings: dict[str, Any]
    client: dict[str, Any]
    device_bytes: int | None
    modules: list[str]
    made_from: str
    share: int = 0
    of: int = 1
    threads: int = 1
    limits: dict[str, Any] = field(default_factory=dict)


def runtime_of(numbers: Mapping[str, Any]) -> RuntimeConfig:
    """A `RuntimeConfig` from JSON."""
    return RuntimeConfig(**{**numbers, "backend": Backend(numbers["backend"])})


def device_bytes(device: Any) -> int | None:
    """How much of the device JAX's client may use, where it says so."""
    return (device.memory_stats() or {}).get("bytes_limit")


def share_of(made: Iterable[Recipe], share: int, of: int) -> list[Recipe]:
    """Every `of`-th of the programs from `share` on; those that have kernels in common, as sampling
    levels of a batch or batches of as many tokens, count as one and stay together."""
    groups: dict[Name, list[Recipe]] = {}
    for recipe in made:
        kind, key = recipe.name
        groups.setdefault((kind, key[0] if isinstance(key, tuple) else key), []).append(recipe)
    return [recipe for group in list(groups.values())[share::of] for recipe in group]


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
    dtype = jnp.dtype(order.dtype)
    draft = model_shapes(model_config, dtype)
    store = program_store(EngineConfig(**order.options), model_config, draft, device)
    if store is None or store.made_from != order.made_from:
        raise ValueError("its settings or its code are not those of the engine's process")
    if device_bytes(device) != order.device_bytes:
        raise ValueError("its share of the device is not that of the engine's process")
    split, limits = SplitModel.of(draft), runtime_of(order.limits)
    shared = SharedCalls(limits.backend)
    with ProgramBuilder(order.threads, store) as builder:
        shapes = Shapes.of(split, model_config, limits, dtype)
        free = [*recipes_without_pool(split, shapes, limits, step_buckets(limits), shared)]
        builder.add(share_of(free, order.share, order.of))
        runtime, known = wait_for_runtime(), {recipe.name for recipe in free}
        shapes = Shapes.of(split, model_config, runtime, dtype)
        made = recipes(split, shapes, runtime, step_buckets(runtime), shared)
        others = [recipe for recipe in made if recipe.name not in known]
        builder.add(share_of(others, order.share, order.of))
        for name, _ in builder.built():
            yield name


def _take_over(order: Order) -> None:
    """Whatever of the engine's process decides how programs come out."""
    for name, value in order.settings.items():
        if jax.config.values.get(name) != value:
            jax.config.update(name, value)
    client = order.client | {"preallocate": False}  # the share is the engine's, and taken
    jax.config.update("jax_pjrt_client_create_options", client)
    for module in order.modules:
        import_module(module)


def main() -> int:
    """Obey the parent at the other end of the standard streams; the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends this
    os.nice(_NICENESS)
    told = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what others print is not for the parent
    try:
        with without_collections():
            for name in compile_share(Order(**_next_line()), _last_line):
                print(json.dumps({"compiled": repr(name)}), file=told)
    except Exception as error:
        print(json.dumps({"failed": f"{type(error).__name__}: {error}"}), file=told)
        return 1
    return 0


def _next_line() -> dict[str, Any]:
    line = sys.stdin.readline()
    if not line:  # the parent has no use for this process, or is gone
        os._exit(1)
    return json.loads(line)


def _last_line() -> RuntimeConfig:
    """The runtime's numbers; from then on somebody waits for the end of the input."""
    runtime = runtime_of(_next_line())
    threading.Thread(target=_next_line, daemon=True).start()
    return runtime


if __name__ == "__main__":
    os._exit(main())  # with no clearing up, which a thread that reads would hold up
