"""What an engine's start sets in its process: JAX's own settings, caches, the garbage collector."""

import gc
import json
import os
import warnings
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any

import jax
import jaxlib
from flax import nnx

from jpaged.config import EngineConfig
from jpaged.models.config import ModelConfig
from jpaged.runtime.program_store import ProgramStore, write_whole
from pallas_kernels import select_backend

AUTOTUNING = Path(__file__).parent / "assets" / "autotuning"
"""What `tools.record_products` recorded: for a kind of device and versions of XLA and cuBLAS a file
of XLA's own files, by name, their bytes in base 64."""


@contextmanager
def without_collections() -> Iterator[None]:
    """Hold the garbage collector: tracing makes millions of objects that it would walk in vain.

    What earlier engines left, arrays on the device among it, is collected first.
    """
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def prepare_jax(config: EngineConfig) -> None:
    """JAX's own settings, which take effect if the process has not used a device before.

    JAX reserves three quarters of a GPU by default; the share the caller asked for replaces that.
    Once a device is in use its reservation stays, and the memory account starts from it.
    """
    if jax.config.values["jax_pjrt_client_create_options"] is None:
        fraction = {"memory_fraction": float(config.gpu_memory_utilization)}
        jax.config.update("jax_pjrt_client_create_options", fraction)
    cache = config.compilation_cache_dir
    if cache is not None and jax.config.values["jax_compilation_cache_dir"] is None:
        folder = Path(os.path.expanduser(cache))
        with suppress(OSError):  # JAX goes on without
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def offer_recorded_products(device: Any) -> bool:
    """Let XLA find how products are computed fastest, as recorded on such a device, where it keeps
    its own measurements: it then measures nothing of that. What is there already stays.

    Returns:
        Whether XLA finds them.

    XLA looks each up under the numbers of the device and the text of the product, and takes it if
    the library that was the fastest still has the version it had: it measures all else.
    """
    cache, recorded = jax.config.values["jax_compilation_cache_dir"], recorded_products(device)
    if cache is None or "://" in cache or not recorded.is_file():
        return False
    try:
        results = read_record(recorded)
    except (OSError, ValueError) as error:  # XLA measures then
        warnings.warn(f"{recorded} is not used: {error}", stacklevel=2)
        return False
    folder = autotuning_folder(Path(cache))
    try:
        for name, result in results.items():
            if not (folder / name).exists():
                write_whole(folder / name, result)
    except OSError:  # for reading alone, or full
        return False
    return True


def read_record(path: Path) -> dict[str, bytes]:
    """A record's files of XLA's, by their paths in its folder of them.

    Raises:
        OSError: it cannot be read.
        ValueError: it is damaged, or names what is not in that folder.
    """
    record = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(record, dict):
        raise ValueError(f"a {type(record).__name__} where files by name should be")
    return {_checked_name(name): _decoded(name, result) for name, result in record.items()}


def _checked_name(name: str) -> str:
    parts = PurePosixPath(name).parts
    if not parts or not name.isprintable() or not {"/", ".."}.isdisjoint(parts):
        raise ValueError(f"{name!r} is no file in a folder")
    return name


def _decoded(name: str, result: object) -> bytes:
    if not isinstance(result, str):
        raise ValueError(f"{name!r} is a {type(result).__name__}; text in base 64 should be there")
    return b64decode(result, validate=True)


def recorded_products(device: Any) -> Path:
    """Where such a device's products are recorded, if they are: for the same XLA and cuBLAS, of
    whose algorithms XLA keeps a number, which says nothing in another version."""
    kind = device.device_kind.replace(" ", "_").replace("/", "_")
    return AUTOTUNING / f"{kind}-{jaxlib.__version__}-{_cublas_version()}.json"


def _cublas_version() -> str:
    for name in ("nvidia-cublas", "nvidia-cublas-cu13", "nvidia-cublas-cu12"):
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return "system"  # that of a CUDA installed otherwise


def autotuning_folder(cache: Path) -> Path:
    """Where XLA keeps its measurements within JAX's compilation cache."""
    return cache / "xla_gpu_per_fusion_autotune_cache_dir"


def program_store(
    config: EngineConfig, model_config: ModelConfig, model: nnx.Module, device: Any
) -> ProgramStore | None:
    """Where compiled programs are kept, if they may be: only of models whose code is ours."""
    cache = config.compilation_cache_dir
    if cache is None or not type(model).__module__.startswith("jpaged."):
        return None
    folder = Path(os.path.expanduser(cache)) / "programs"
    return ProgramStore(folder, (model_config, select_backend(device.platform)), device)
