"""Where programs are kept: lowered ones in a store of ours, compiled ones in JAX's own cache.

A lowered program is kept as `jax.export` serialises it, under a digest of all that it is made from:
the code in memory that steps are traced from, the shapes, the model, the settings and versions of
JAX, the device (docs/decisions/0008). What cannot be read is traced again.
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
from jpaged.models.config import ModelConfig
from pallas_kernels import select_backend

MAX_STORE_BYTES = 256 * 2**20
"""Of all programs in a folder; those not used for longest are deleted."""

_TRACED_MODULES = ("jpaged.models", "jpaged.runtime", "jpaged.compile.recipes", "pallas_kernels")
_SETTING_PREFIXES = ("XLA_", "TF_", "TRITON_", "NVIDIA_")
_IGNORED_PREFIXES = ("TF_CPP_", "NVIDIA_VISIBLE_", "NVIDIA_DRIVER_", "NVIDIA_REQUIRE_")
"""What is logged, and which GPUs a container has: no program depends on it."""
_CACHE_PREFIXES = ("_abc_", "__msgspec_")  # which others leave in classes
_DIGEST_BYTES = 32


class ProgramStore:
    """A folder of lowered programs.

    Args:
        folder: Where they are; made if it is not there.
        made_from: What all programs of an engine depend on besides code, shapes and JAX; its `repr`
            must tell one from another.
        device: What they run on.
    """

    def __init__(self, folder: Path, made_from: Any, device: Any):
        self._folder, self._can_save = folder, True
        self._common_digest = _digest(
            repr(made_from), _describe_environment(device), _code_digest()
        )

    @property
    def dependency_digest(self) -> str:
        """The digest of what all its programs depend on."""
        return self._common_digest.hex()

    def has(self, key: str) -> bool:
        """Whether there is a program under `key`, damaged or not."""
        return self._path(key).is_file()

    def load(self, key: str) -> export.Exported | None:
        """The program kept under `key`, or None."""
        payload = self._read(key)
        if payload is None:
            return None
        try:
            return export.deserialize(bytearray(payload))
        except Exception as error:  # whatever a file of the right digest may still be
            warnings.warn(f"a stored program is traced again: {error}", stacklevel=2)
            return None

    def save(self, key: str, exported: export.Exported) -> None:
        """Keep a program; what cannot be kept is told once."""
        if not self._can_save:
            return
        try:
            self._write(key, bytes(exported.serialize()))
        except Exception as error:  # some programs cannot be kept, some folders not be written
            self._can_save = False
            warnings.warn(f"programs are not kept: {error}", stacklevel=2)

    def load_or_compute(self, key: str, compute: Callable[[], int]) -> int:
        """A number kept under `key`, computed if it is not."""
        payload = self._read(key)
        if payload is not None and payload.isdigit():
            return int(payload)
        value = compute()
        with suppress(OSError):
            self._write(key, str(value).encode())
        return value

    def prune(self, max_bytes: int = MAX_STORE_BYTES) -> None:
        """Delete what was not used for longest until `max_bytes` are left."""
        with suppress(OSError):  # another process may do the same
            found = [(file.stat(), file) for file in self._folder.iterdir()]
            excess = sum(stat.st_size for stat, _ in found) - max_bytes
            for stat, file in sorted(found, key=lambda item: item[0].st_mtime):
                if excess <= 0:
                    break
                file.unlink(missing_ok=True)
                excess -= stat.st_size

    def _path(self, key: str) -> Path:
        return self._folder / _digest(self._common_digest, key).hex()

    def _read(self, key: str) -> bytes | None:
        path = self._path(key)
        try:
            content = path.read_bytes()
        except OSError:
            return None
        with suppress(OSError):  # others' folder may be for reading alone
            os.utime(path)
        digest, payload = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        return payload if _digest(payload) == digest else None

    def _write(self, key: str, payload: bytes) -> None:
        write_atomically(self._path(key), _digest(payload) + payload)


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file, its folder made if it is not there, in one go: a reader, in another
    process too, finds all of it or what was there before.

    Raises:
        OSError: it cannot be written; then nothing is left of it.
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
    """The modules in memory that steps are traced from, sorted."""
    roots = tuple(f"{root}." for root in _TRACED_MODULES)
    return sorted(name for name in sys.modules if f"{name}.".startswith(roots))


def jax_settings() -> dict[str, Any]:
    """JAX's settings as they hold in this thread, less what no program depends on: where it caches,
    and how its client takes its share of the device; how large that is counts by itself."""
    values = jax.config.values.items()
    return {
        name: getattr(jax.config, name, value)
        for name, value in values
        if "cache" not in name and name != "jax_pjrt_client_create_options"
    }


def device_memory_bytes(device: Any) -> int | None:
    """How much of the device JAX's client may use, where it says so; XLA schedules by it."""
    return (device.memory_stats() or {}).get("bytes_limit")


def _describe_environment(device: Any) -> str:
    """Versions, settings and the device."""
    variables = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(_SETTING_PREFIXES) and not name.startswith(_IGNORED_PREFIXES)
    }
    versions = sys.version, jax.__version__, jaxlib.__version__, flax.__version__
    client = device.client
    # Some kernels have a program a core, and a device may be lent with fewer than its kind has.
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
    """A digest of the modules that steps are traced from: their files, and what they hold now,
    where a function or number may have been replaced."""
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
    """Yield the parts of a constant, such as a table of records."""
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
    """Functions by their code, plain values as they are, all else by its type."""
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    elif isinstance(value, property):
        value = value.fget
    function = inspect.unwrap(value) if callable(value) else value
    if isinstance(function, FunctionType):
        return marshal.dumps(function.__code__, 2)  # version 2 has no back references, which vary
    plain = isinstance(value, (bool, int, float, str, bytes, type(None)))
    return repr(value).encode() if plain else type(value).__name__.encode()


CLIENT_VARIABLE = "XLA_PYTHON_CLIENT_USE_TFRT_GPU_CLIENT"
"""JAX's, read where the options of its client do not say."""


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
        problem = f"compilation_cache_dir={str(cache)!r} cannot be written to ({error})"
    remedy = "give a folder that can, or None to compile at each start"
    if os.path.isdir(folder) and os.access(folder, os.R_OK | os.X_OK):  # False for any error
        warnings.warn(f"{problem}: what it lacks is compiled at each start; {remedy}", stacklevel=2)
        return config
    if str(cache) != DEFAULT_COMPILATION_CACHE:
        raise ValueError(f"{problem}: {remedy}")
    warnings.warn(f"{problem}, so that each start compiles all; {remedy}", stacklevel=2)
    return replace(config, compilation_cache_dir=None)


def prepare_jax(config: EngineConfig) -> None:
    """JAX's own settings, which take effect if the process has not used a device before.

    JAX reserves three quarters of a GPU by default; the share the caller asked for replaces that.
    Once a device is in use its reservation stays, and the memory account starts from it. The client
    that dispatches from a thread of its own is asked for, unless JAX's own variable says which: a
    small model's device waits for the engine's thread, and a launch takes that thread 1.0 ms with
    this client and 1.25 to 1.8 with the other (Qwen3-0.6B, 256 sequences: docs/performance.md).
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
    cache: str | Path | None, model_config: ModelConfig, model: nnx.Module, device: Any
) -> ProgramStore | None:
    """Where programs are kept in `cache`, if they may be: only of models whose code is ours."""
    if cache is None or not type(model).__module__.startswith("jpaged."):
        return None
    folder = Path(os.path.expanduser(cache)) / "programs"
    return ProgramStore(folder, (model_config, select_backend(device.platform)), device)
