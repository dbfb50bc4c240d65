"""What an engine's start sets in its process: JAX's own settings, caches, the garbage collector."""

import gc
import os
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from jpaged.compile.store import ProgramStore
from jpaged.config import COMPILATION_CACHE, EngineConfig
from jpaged.models.config import ModelConfig
from pallas_kernels import select_backend

CLIENT_VARIABLE = "XLA_PYTHON_CLIENT_USE_TFRT_GPU_CLIENT"
"""JAX's, read where the options of its client do not say."""


@contextmanager
def without_collections() -> Iterator[None]:
    """Hold the garbage collector while an engine starts, and let it have nothing to walk after.

    Tracing makes millions of objects that it would walk in vain. What earlier engines left, arrays
    on the device among it, is collected first. Unless the caller has switched the collector off,
    all else that is there then, modules above all, and what the start makes, tens of thousands of
    blocks among it, is taken out of its rounds: walking either takes a tenth of a second and more,
    in which no step is launched. An engine is in no cycle, so it is freed all the same.
    """
    gc.collect()
    enabled = gc.isenabled()
    if enabled:
        gc.freeze()
    gc.disable()
    try:
        yield
        if enabled:
            gc.collect()
            gc.freeze()
    finally:
        if enabled:
            gc.enable()


def with_usable_cache(config: EngineConfig) -> EngineConfig:
    """The configuration, its folder of compiled programs made; without one if that is the default
    and cannot be used. Warns of what is not kept.

    Raises:
        ValueError: a folder that was asked for cannot be used.
    """
    cache = config.compilation_cache_dir
    if cache is None:
        return config
    folder = Path(os.path.expanduser(cache))
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return config
    except (OSError, ValueError) as error:  # ValueError: no name of a folder
        why = f"compilation_cache_dir={str(cache)!r} cannot be written to ({error})"
    remedy = "give a folder that can, or None to compile at each start"
    if os.path.isdir(folder) and os.access(folder, os.R_OK | os.X_OK):  # False for any error
        warnings.warn(f"{why}: what it lacks is compiled at each start; {remedy}", stacklevel=2)
        return config
    if str(cache) != COMPILATION_CACHE:
        raise ValueError(f"{why}: {remedy}")
    warnings.warn(f"{why}, so that each start compiles all; {remedy}", stacklevel=2)
    return replace(config, compilation_cache_dir=None)


def prepare_jax(config: EngineConfig) -> None:
    """JAX's own settings, which take effect if the process has not used a device before.

    JAX reserves three quarters of a GPU by default; the share the caller asked for replaces that.
    Once a device is in use its reservation stays, and the memory account starts from it. The client
    that dispatches from a thread of its own is asked for, unless JAX's own variable says which: a
    small model's device waits for the engine's thread, and a launch takes that thread 1.0 ms with
    this client and 1.25 to 1.8 with the other (Qwen3-0.6B, 256 sequences: bench/NOTES.md).
    """
    if jax.config.values["jax_pjrt_client_create_options"] is None:
        options: dict[str, Any] = {"memory_fraction": float(config.gpu_memory_utilization)}
        if CLIENT_VARIABLE not in os.environ:
            options["use_tfrt_gpu_client"] = True
        jax.config.update("jax_pjrt_client_create_options", options)
    cache = config.compilation_cache_dir
    if cache is not None and jax.config.values["jax_compilation_cache_dir"] is None:
        jax.config.update("jax_compilation_cache_dir", os.path.expanduser(cache))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def program_store(
    cache: str | Path | None, model_config: ModelConfig, model: nnx.Module, device: Any
) -> ProgramStore | None:
    """Where programs are kept in `cache`, if they may be: only of models whose code is ours."""
    if cache is None or not type(model).__module__.startswith("jpaged."):
        return None
    folder = Path(os.path.expanduser(cache)) / "programs"
    return ProgramStore(folder, (model_config, select_backend(device.platform)), device)
