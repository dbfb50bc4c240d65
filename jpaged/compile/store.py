"""Store lowered programs on disk, and set up JAX's cache of compiled programs.

A lowered program is stored in the format of `jax.export`. The file name is a digest of everything
that the program depends on: the code of the steps, the shapes, the model, the settings and versions
of JAX, and the device (docs/decisions/0008). For a user's model, the digest covers the lowered text
of the user's functions instead of their code. If a stored file cannot be read, the program is
traced again.
"""

import hashlib
import inspect
import marshal
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any
from uuid import uuid4

import flax
import jax
import jaxlib
from flax import nnx
from jax import export

from jpaged.config import DEFAULT_COMPILATION_CACHE, EngineConfig
from jpaged.models.jax_model import StepModel
from jpaged.models.sizes import ModelSizes
from pallas_kernels import select_backend

MAX_STORE_BYTES = 256 * 2**20
"""Maximum total size in bytes of the files in a store. Above it, the least recently used files are
deleted."""

_TRACED_MODULES = ("jpaged.models", "jpaged.runtime", "jpaged.compile.recipes", "pallas_kernels")
_SETTING_PREFIXES = ("XLA_", "TF_", "TRITON_", "NVIDIA_")
_IGNORED_PREFIXES = ("TF_CPP_", "NVIDIA_VISIBLE_", "NVIDIA_DRIVER_", "NVIDIA_REQUIRE_")
"""Prefixes of environment variables that programs do not depend on. These variables set what is
logged, and which GPUs a container has."""
_CACHE_PREFIXES = ("_abc_", "__msgspec_")
"""Prefixes of class attributes in which libraries cache data. The digest of the code ignores these
attributes."""
_DIGEST_BYTES = 32


class ProgramStore:
    """Store of lowered programs in a folder.

    Args:
        folder: Folder of the store; created by the first write.
        dependencies: Object on which all programs depend in addition to code, shapes and JAX. The
            digest in the name of every stored file covers the `repr` of this object.
        device: Device that the programs run on.
    """

    def __init__(self, folder: Path, dependencies: Any, device: Any):
        self._folder, self._can_save = folder, True
        self._common_digest = _digest(
            repr(dependencies), _describe_environment(device), _code_digest()
        )

    @property
    def dependency_digest(self) -> str:
        """Digest of everything that all programs of the store depend on, as hexadecimal text."""
        return self._common_digest.hex()

    def has(self, key: str) -> bool:
        """Return whether the store has a file for `key`, even a damaged one."""
        return self.path(key).is_file()

    def load(self, key: str) -> export.Exported | None:
        """Return the program stored under `key`; None if the file is missing or damaged."""
        payload = self._read(key)
        if payload is None:
            return None
        try:
            return export.deserialize(bytearray(payload))
        except Exception as error:  # JAX raises errors of many types if a stored file is invalid
            warnings.warn(
                f"a stored program cannot be loaded, and is traced again: {error}", stacklevel=2
            )
            return None

    def save(self, key: str, exported: export.Exported) -> None:
        """Store a program. If the write fails, warn, and store no further programs."""
        if not self._can_save:
            return
        try:
            self._write(key, bytes(exported.serialize()))
        except Exception as error:  # serializing or writing failed
            self._can_save = False
            warnings.warn(f"programs are not stored: {error}", stacklevel=2)

    def load_or_compute(self, key: str, compute: Callable[[], int]) -> int:
        """Return the number stored under `key`. If no number is stored, call `compute`, and store
        the result."""
        payload = self._read(key)
        if payload is not None and payload.isdigit():
            return int(payload)
        value = compute()
        with suppress(OSError):
            self._write(key, str(value).encode())
        return value

    def prune(self, max_bytes: int = MAX_STORE_BYTES) -> None:
        """Delete the least recently used files until the store has at most `max_bytes`."""
        with suppress(OSError):  # another process may have deleted the file
            found = [(file.stat(), file) for file in self._folder.iterdir()]
            excess = sum(stat.st_size for stat, _ in found) - max_bytes
            for stat, file in sorted(found, key=lambda item: item[0].st_mtime):
                if excess <= 0:
                    break
                file.unlink(missing_ok=True)
                excess -= stat.st_size

    def path(self, key: str) -> Path:
        """Return the path of the file for `key`. The file may not exist yet."""
        return self._folder / _digest(self._common_digest, key).hex()

    def _read(self, key: str) -> bytes | None:
        return read_payload(self.path(key))

    def _write(self, key: str, payload: bytes) -> None:
        write_atomically(self.path(key), _digest(payload) + payload)


def read_payload(path: Path) -> bytes | None:
    """Return the content of a store's file without its digest; None if missing or damaged."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    with suppress(OSError):  # the folder may be read-only
        os.utime(path)
    digest, payload = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    return payload if _digest(payload) == digest else None


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file atomically, and create its folder if necessary.

    A reader, even in another process, sees either the previous file or the complete new file.

    Raises:
        OSError: The file cannot be written. No partial file remains.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f".{uuid4().hex}")
    try:
        draft.write_bytes(content)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _digest(*parts: str | bytes) -> bytes:
    hashed = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        hashed.update(len(data).to_bytes(8, "little") + data)
    return hashed.digest()


def traced_modules() -> list[str]:
    """Return the sorted names of the imported modules whose code the steps contain."""
    roots = tuple(f"{root}." for root in _TRACED_MODULES)
    return sorted(name for name in sys.modules if f"{name}.".startswith(roots))


def jax_settings() -> dict[str, Any]:
    """Return the values of JAX's settings in this thread, by name.

    The result omits cache settings, because compiled programs do not depend on cache settings. The
    result also omits the options of JAX's device client. The only client option that affects
    programs is the fraction of device memory. Instead of this option, program digests include the
    resulting number of bytes (`device_memory_bytes`).
    """
    values = jax.config.values.items()
    return {
        name: getattr(jax.config, name, value)
        for name, value in values
        if "cache" not in name and name != "jax_pjrt_client_create_options"
    }


def device_memory_bytes(device: Any) -> int | None:
    """Return the bytes of device memory that JAX's client may use; None if the device has no limit.

    XLA's scheduling of a program depends on this limit.
    """
    return (device.memory_stats() or {}).get("bytes_limit")


def _describe_environment(device: Any) -> str:
    """Return a text of the versions, settings and device properties that programs depend on."""
    variables = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(_SETTING_PREFIXES) and not name.startswith(_IGNORED_PREFIXES)
    }
    versions = sys.version, jax.__version__, jaxlib.__version__, flax.__version__
    client = device.client
    # `core_count` is the number of streaming multiprocessors (SMs) of a GPU. Programs depend on the
    # number, because some kernels launch one thread block per SM. A shared GPU may have fewer SMs
    # than other GPUs of the same kind.
    cores = getattr(device, "core_count", None)
    chip = (
        client.platform,
        client.platform_version,
        device.device_kind,
        cores,
        device_memory_bytes(device),
    )
    mesh = jax.sharding.get_abstract_mesh()
    return repr((sorted(jax_settings().items()), sorted(variables.items()), versions, chip, mesh))


def _code_digest() -> bytes:
    """Return a digest of the modules whose code the steps contain. The digest covers the files of
    the modules, and their functions and constants in memory, which may have been patched."""
    modules = [sys.modules[name] for name in traced_modules()]
    tables = sorted((Path(sys.modules["pallas_kernels"].__path__[0]) / "tuned").glob("*.json"))
    files = [Path(module.__file__) for module in modules if module.__file__] + tables
    parts = [part for module in modules for part in _module_parts(module)]
    return _digest(*(file.read_bytes() for file in files), *parts)


def _module_parts(module: ModuleType) -> Iterator[bytes]:
    for name, value in sorted(vars(module).items()):
        if name.startswith("__"):
            continue
        yield name.encode()
        if inspect.isclass(value) and value.__module__ == module.__name__:
            for attribute, member in sorted(vars(value).items()):
                if not attribute.startswith(_CACHE_PREFIXES):
                    yield attribute.encode()
                    yield _value_part(member)
        else:
            yield from _constant_parts(value) if name.isupper() else (_value_part(value),)


def _constant_parts(value: object) -> Iterator[bytes]:
    """Yield the bytes to hash for a module's constant, such as a dict or a tuple."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield repr(key).encode()
            yield from _constant_parts(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _constant_parts(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for each in fields(value):
            yield from _constant_parts(getattr(value, each.name))
    else:
        yield _value_part(value)


def _value_part(value: object) -> bytes:
    """Return the bytes to hash for a value: the code of a function, the `repr` of a plain value, or
    the type name of any other value."""
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    elif isinstance(value, property):
        value = value.fget
    function = inspect.unwrap(value) if callable(value) else value
    if isinstance(function, FunctionType):
        # Version 2 of the marshal format: later versions have back references, which vary between
        # runs.
        return marshal.dumps(function.__code__, 2)
    plain = isinstance(value, (bool, int, float, str, bytes, type(None)))
    return repr(value).encode() if plain else type(value).__name__.encode()


CLIENT_VARIABLE = "XLA_PYTHON_CLIENT_USE_TFRT_GPU_CLIENT"
"""Environment variable of JAX that selects the GPU client, unless a client option selects it."""


def with_usable_cache(config: EngineConfig) -> EngineConfig:
    """Create the cache folder for compiled programs. Return the configuration with a cache folder
    that the engine can use.

    If the folder is read-only, warn, and return the configuration unchanged. If the folder is the
    default folder and cannot even be read, warn, and set `compilation_cache_dir` to None.

    Raises:
        ValueError: A folder other than the default can be neither written nor read.
    """
    cache = config.compilation_cache_dir
    if cache is None:
        return config
    folder = Path(os.path.expanduser(cache))
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return config
    except (OSError, ValueError) as error:  # ValueError: invalid characters
        problem = f"compilation_cache_dir={str(cache)!r} cannot be written to ({error})"
    remedy = "pass a writable folder, or None to compile at every start"
    if os.path.isdir(folder) and os.access(folder, os.R_OK | os.X_OK):  # False for any error
        warnings.warn(
            f"{problem}: every start compiles the programs that are not in the folder; {remedy}",
            stacklevel=2,
        )
        return config
    if str(cache) != DEFAULT_COMPILATION_CACHE:
        raise ValueError(f"{problem}: {remedy}")
    warnings.warn(f"{problem}: every start compiles all programs; {remedy}", stacklevel=2)
    return replace(config, compilation_cache_dir=None)


def prepare_jax(config: EngineConfig) -> None:
    """Set JAX's client options and cache folder for an engine, unless they are set already.

    The client options take effect only if the process has not used a device before.

    By default, JAX reserves three quarters of a GPU's memory. `gpu_memory_utilization` replaces
    this fraction. Unless the environment variable `CLIENT_VARIABLE` is set, the function also
    selects the device client that launches programs from a separate thread. With this client, a
    launch blocks the engine's thread for less time, which makes steps of small models faster
    (docs/performance.md).

    Args:
        config: Options of the engine.
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


def open_program_store(
    cache: str | Path | None, model_config: ModelSizes, model: nnx.Module, device: Any
) -> ProgramStore | None:
    """Return the store of an engine's lowered programs.

    The name of a stored file is a digest. The digest covers the code of the model classes in
    `jpaged`, and the functions that a user passes to `JaxModel` (`Recipe.digest`). The digest does
    not cover a model class that is defined outside `jpaged`, so the programs of this class are not
    stored.

    Args:
        cache: The engine's `compilation_cache_dir`.
        model_config: Configuration of one device's shard of the model.
        model: The model, whose parameters may be shapes instead of arrays.
        device: Device that the programs run on.

    Returns:
        The store; None if `cache` is None, or if the model's class is defined outside `jpaged`.
    """
    is_known = isinstance(model, StepModel) and type(model).__module__.startswith("jpaged.")
    if cache is None or not is_known:
        return None
    folder = Path(os.path.expanduser(cache)) / "programs"
    return ProgramStore(folder, (model_config, select_backend(device.platform)), device)
