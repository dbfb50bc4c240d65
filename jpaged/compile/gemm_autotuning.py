"""What XLA measured of ways to compute products, recorded and shipped (`tools.record_products`).

A record is of a kind of device and of versions of XLA and cuBLAS: XLA's own files, and of which
models, by the shapes of their weights, and of how many rows the products are in it.
"""

import hashlib
import json
import warnings
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any

import jax
import jaxlib
from flax import nnx

from jpaged.compile.compiler import Compiler, UnrecordedCompiler
from jpaged.compile.store import write_whole
from pallas_kernels import Backend

AUTOTUNING = Path(__file__).parent.parent / "assets" / "autotuning"
"""Where records are."""


@dataclass(frozen=True)
class Record:
    """What was measured.

    Attributes:
        rows: By the digest of a model's weights: rows of its products.
        results: XLA's files, by their paths in its folder of them.
    """

    rows: Mapping[str, list[int]] = field(default_factory=dict)
    results: Mapping[str, bytes] = field(default_factory=dict)

    def has(self, leaves: Iterable[Any], rows: Iterable[int]) -> bool:
        """Whether a model with such weights has nothing left to measure in steps of such rows."""
        return set(rows) <= set(self.rows.get(weights_digest(leaves), ()))


def make_compiler(model: nnx.Module, backend: Backend, *, recorded: bool) -> Compiler:
    """What compiles an engine's programs, in whichever process.

    Args:
        model: The model, or its shapes.
        backend: The kernels' implementation.
        recorded: Whether XLA has nothing left to measure of the products: it is recorded, or the
            device is a CPU.
    """
    if recorded:
        return Compiler()
    cache = jax.config.values["jax_compilation_cache_dir"]
    folder = None if cache is None or "://" in cache else autotuning_folder(Path(cache))
    return UnrecordedCompiler(model, backend, folder)


def weights_digest(leaves: Iterable[Any]) -> str:
    """Of the shapes and dtypes of a model's weights, which decide what its products are."""
    facts = sorted((leaf.shape, jax.numpy.dtype(leaf.dtype).name) for leaf in leaves)
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def offer_recorded_products(device: Any) -> Record:
    """Let XLA find how products are computed fastest, as recorded on such a device, where it keeps
    its own measurements: it then measures nothing of that. What is there already stays.

    XLA looks each up under the numbers of the device and the text of the product, and takes it if
    the library that was the fastest still has the version it had: it measures all else.

    Returns:
        What XLA finds; nothing if there is no record, or no place for it.
    """
    cache, path = jax.config.values["jax_compilation_cache_dir"], recorded_products(device)
    if cache is None or "://" in cache or not path.is_file():
        return Record()
    try:
        record = read_record(path)
    except (OSError, ValueError) as error:  # XLA measures then
        warnings.warn(f"{path} is not used: {error}", stacklevel=2)
        return Record()
    folder = autotuning_folder(Path(cache))
    try:
        for name, result in record.results.items():
            if not (folder / name).exists():
                write_whole(folder / name, result)
    except OSError:  # for reading alone, or full
        return Record()
    return record


def read_record(path: Path) -> Record:
    """Read a record.

    Raises:
        OSError: it cannot be read.
        ValueError: it is damaged, or names what is not in XLA's folder.
    """
    record = json.loads(path.read_text(encoding="utf-8"))
    rows, results = (_objects(record, name) for name in ("rows", "results"))
    decoded = {_checked_name(name): _decoded(name, result) for name, result in results.items()}
    return Record({model: _integers(model, own) for model, own in rows.items()}, decoded)


def write_record(path: Path, record: Record) -> None:
    """Write a record, a line an entry."""
    results = {name: b64encode(record.results[name]).decode() for name in sorted(record.results)}
    rows = "".join(f"\n{json.dumps(m)}: {json.dumps(record.rows[m])}," for m in sorted(record.rows))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        f'{{"rows": {{{rows.rstrip(",")}\n}},\n"results": {json.dumps(results, indent=0)}}}\n',
        encoding="utf-8",
    )


def _objects(record: object, name: str) -> dict[str, Any]:
    found = record.get(name) if isinstance(record, dict) else None
    if not isinstance(found, dict):
        raise ValueError(f"no {name!r} where they should be")
    return found


def _integers(model: str, rows: object) -> list[int]:
    if not isinstance(rows, list) or not all(type(n) is int for n in rows):
        raise ValueError(f"rows of {model!r} are {rows!r}; a list of integers should be there")
    return rows


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
