"""Choose XLA's GEMM algorithms: from shipped measurements, or from a few measurements at the start.

XLA has several algorithms for a GEMM (matrix product), and measures which one is fastest. jpaged
ships records of these measurements, which `tools.record_products` writes. A record is valid for one
kind of device, one version of XLA and one version of cuBLAS. The record contains the files in which
XLA stores measurements. It also lists the models whose GEMMs were measured, identified by the
shapes of their weights, and the numbers of rows of these GEMMs.

Without a record, XLA would measure many algorithms for every GEMM and for many other fusions. Only
one process at a time can measure on a device, so the measurements would take most of the time of a
first start. `AutotuningCompiler` therefore measures only GEMMs with many rows, and only the
algorithms of cuBLASLt: with many rows, cuBLASLt's default algorithm can be much slower than the
best one. With fewer rows, a step with default algorithms is as fast (docs/decisions/0013). All
other fusions use XLA's native kernels.
"""

import fcntl
import hashlib
import math
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import msgspec
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from typing_extensions import override

from jpaged.compile.recipes import Recipe
from jpaged.compile.store import write_atomically
from jpaged.models.decoder import Decoder, DecoderLayer, FeedForward
from jpaged.models.sharding import MESH_AXIS, global_shape_struct, wrap_in_shard_map
from jpaged.runtime.programs import SplitModel
from pallas_kernels import Backend

AUTOTUNING_DIR = Path(__file__).parent.parent / "assets" / "autotuning"
"""Folder of the shipped records."""

MIN_MEASURED_ROWS = 192
"""Minimum number of rows of a matrix product that `AutotuningCompiler` measures."""

MAX_WAIT_S = 60.0
"""Maximum time in seconds to wait for other processes that measure. The wait is limited, because a
process that is stopped by SIGSTOP keeps the lock."""

CompilerOptions = dict[str, Any]

CUBLAS_AUTOTUNING: CompilerOptions = {
    "xla_gpu_enable_triton_gemm": False,
    "xla_gpu_experimental_enable_fusion_autotuner": False,
}
NO_AUTOTUNING: CompilerOptions = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_autotune_level": 0}


class Compiler:
    """Compiles lowered programs. While XLA compiles, it measures each matrix product that has no
    stored measurement."""

    key = ""
    """Name of the compiler, for `ProgramBuilder.workspace`. Different compilers make different
    programs from the same text, so the workspace is stored for each compiler."""

    def compile(self, recipe: Recipe, lowered: Any) -> Any:
        """Compile a lowered program, and return the executable.

        Args:
            recipe: Recipe of the program.
            lowered: Result of `recipe.lower`.
        """
        return lowered.compile(dict(recipe.options))


class AutotuningCompiler(Compiler):
    """Compiles programs whose matrix products have no shipped measurements.

    Before the first program with a new number of rows is compiled, its matrix products are measured
    in separate programs. A lock file in `folder` lets only one process measure at a time:
    concurrent measurements would slow each other down.

    If XLA fuses a matrix product differently in the compiled program, XLA measures the fusion
    again. This second measurement is less exact.

    Args:
        model: The model, whose parameters may be shapes instead of arrays.
        backend: Implementation of the kernels.
        folder: Folder in which XLA keeps its measurements; None if XLA keeps them in memory.
    """

    key = "unrecorded"

    def __init__(self, model: nnx.Module, backend: Backend, folder: Path | None):
        self._backend, self._folder = backend, folder
        self._model, self._lock = model, threading.Lock()
        # Paths of the marker files that `_measure` creates after a measurement. If the folder is
        # read-only, no file can be created, and this set alone prevents repeated measurements.
        self._measured: set[Path] = set()
        device = jax.local_devices()[0]
        where = device.device_kind, device.client.platform_version
        facts = weights_digest(SplitModel.of(model).shard_leaves), backend
        self._digest = _digest(facts, jax.__version__, jaxlib.__version__, where)

    @override
    def compile(self, recipe: Recipe, lowered: Any) -> Any:
        _, rows = recipe.gemm_key or ("none", 0)
        if rows < MIN_MEASURED_ROWS:
            return lowered.compile({**recipe.options, **NO_AUTOTUNING})
        self._measure("layer", rows)
        self._measure("head", recipe.num_logits_rows)
        return lowered.compile({**recipe.options, **CUBLAS_AUTOTUNING})

    def _measure(self, part: str, rows: int) -> None:
        done = (self._folder or Path()) / f"{self._digest}-{part}-{rows}.measured"
        with self._lock:
            if done in self._measured:
                return
            if self._folder is None:  # without a folder, XLA keeps its measurements in memory
                measure_gemms(self._model, part, rows, self._backend)
            elif not done.exists():
                with _measurement_lock(self._folder):
                    # While this process waited for the lock, another process may have measured.
                    if not done.exists():
                        measure_gemms(self._model, part, rows, self._backend)
                        with suppress(OSError):
                            done.touch()
            self._measured.add(done)


def measure_gemms(model: Any, part: str, rows: int, backend: Backend) -> int:
    """Make XLA measure the matrix products of a layer or of the output head.

    Matrix products that jpaged's kernels compute are skipped, because XLA does not choose their
    algorithms.

    Args:
        model: The model, whose parameters may be shapes instead of arrays.
        part: "layer" or "head".
        rows: Number of rows of the products.
        backend: Implementation of the kernels.

    Returns:
        Number of programs that were compiled for the measurements.
    """
    head = model.head, lambda it, x: it.logits(x), [(model.config.embedding_size,)]
    steps = [head] if part == "head" else _layer_steps(model, backend)
    one_device_mesh, num_compiled = Mesh(jax.local_devices()[:1], (MESH_AXIS,)), 0
    to_global = partial(global_shape_struct, one_device_mesh, axis=None)
    for module, step, widths in steps:
        split = SplitModel.of(module)
        inputs = [jax.ShapeDtypeStruct((rows, *width), model.dtype) for width in widths]
        arguments, bound = (split.shard_leaves, *inputs), split.bind(step)
        # The all-reduces in the model need a mesh, here of one device.
        if model.config.tensor_parallel_size > 1:
            arguments = jax.tree.map(to_global, arguments)
            bound = wrap_in_shard_map(bound, one_device_mesh, arguments, {}, PartitionSpec())
        lowered = jax.jit(bound).lower(*arguments)
        # If the program has no dot operation, a kernel of jpaged computes the matrix product, and
        # XLA has nothing to measure.
        if "stablehlo.dot" in lowered.as_text():
            lowered.compile(CUBLAS_AUTOTUNING)
            num_compiled += 1
    return num_compiled


GemmStep = tuple[nnx.Module, Callable[..., Any], list[tuple[int, ...]]]
"""A tuple of a module, a function that computes matrix products of the module, and the shapes of
the function's inputs. The shapes leave out the axis of rows."""


def _layer_steps(model: Any, backend: Backend) -> Iterator[GemmStep]:
    """Yield functions that compute the matrix products of one layer of each kind, such as dense and
    sparse.

    A step adds biases and residuals to some products. XLA fuses such an addition with the product,
    and measures the fusion. The functions therefore include these additions.
    """
    layer, config = model.layers[0], model.config
    width, heads = (config.hidden_size,), (config.num_heads, config.head_size)
    yield layer, lambda it, x: it.attention.qkv(x, backend), [width]
    if isinstance(layer.mlp, FeedForward) and layer.mlp.gate_up is None:
        yield layer, lambda it, x, o: _run_after_attention(it, x, o, backend), [width, heads]
        return
    inner = (config.intermediate_size,)
    yield layer, lambda it, o: it.attention.output(o, backend), [heads]
    for layer in {type(it.mlp): it for it in reversed(model.layers)}.values():
        if isinstance(layer.mlp, FeedForward):
            yield layer, lambda it, x: it.mlp.intermediate(x, backend), [width]
            yield layer, lambda it, x: it.mlp.down(x, backend), [inner]
        else:
            # Measure only the router: on a GPU, kernels of jpaged compute the experts, and these
            # kernels take seconds to compile.
            yield layer, lambda it, x: it.mlp.router_logits(x, backend), [width]


def _run_after_attention(layer: DecoderLayer, hidden: Any, heads: Any, backend: Backend) -> Any:
    update = layer.attention.output(heads, backend)
    rows, hidden = layer.mlp_norm.add_norm(hidden, update, backend)
    return layer.attention_norm.add_norm(hidden, layer.mlp(rows, backend), backend)


@contextmanager
def _measurement_lock(folder: Path) -> Iterator[None]:
    """Hold a lock file in `folder`, so that no other process measures at the same time. After
    `MAX_WAIT_S` seconds, or if the lock file cannot be created or locked, continue without the
    lock."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = (folder / "measuring.lock").open("w")
    except OSError:
        yield
        return
    with lock:
        until = time.monotonic() + MAX_WAIT_S
        with suppress(OSError):  # some file systems do not support locks
            while time.monotonic() < until:
                with suppress(BlockingIOError):
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                time.sleep(0.02)
        yield  # leaving the `with` block closes the file, which releases the lock


class GemmRecord(msgspec.Struct, frozen=True):
    """XLA's measurements of matrix products on one kind of device.

    Attributes:
        rows: For each model, the row counts whose matrix products were measured. The keys are
            results of `weights_digest`.
        results: Contents of the files in which XLA stores its measurements. The key is the path of
            the file, relative to XLA's folder of measurements (`autotuning_folder`). In JSON, the
            contents are base64.
    """

    rows: dict[str, list[int]]
    results: dict[str, bytes]

    def covers(self, leaves: Iterable[Any], rows: Iterable[int]) -> bool:
        """Return whether the record has measurements of all matrix products of a model.

        Args:
            leaves: The model's parameters, or their shapes.
            rows: Row counts of the matrix products.
        """
        return set(rows) <= set(self.rows.get(weights_digest(leaves), ()))


EMPTY_RECORD = GemmRecord({}, {})


def make_compiler(model: nnx.Module, backend: Backend, *, has_gemm_record: bool) -> Compiler:
    """Return the compiler for an engine's programs, in the engine's process or in a worker.

    Args:
        model: The model, whose parameters may be shapes instead of arrays.
        backend: Implementation of the kernels.
        has_gemm_record: Whether XLA has nothing to measure: a record covers all matrix products of
            the programs, or the device is a CPU.

    Returns:
        A `Compiler` or an `AutotuningCompiler`. For a user's model, the result is always a
        `Compiler`.
    """
    if has_gemm_record or not isinstance(model, Decoder):
        return Compiler()
    cache = jax.config.values["jax_compilation_cache_dir"]
    folder = None if cache is None or "://" in cache else autotuning_folder(Path(cache))
    return AutotuningCompiler(model, backend, folder)


def weights_digest(leaves: Iterable[Any]) -> str:
    """Return a digest of the shapes and dtypes of a model's weights, which determine the matrix
    products.

    Scalars, such as the scales of the KV cache, are ignored, because no matrix product depends on
    them.
    """
    weights = [leaf for leaf in leaves if math.prod(leaf.shape) > 1]
    return _digest(*sorted((leaf.shape, jnp.dtype(leaf.dtype).name) for leaf in weights))


def _digest(*facts: Any) -> str:
    return hashlib.sha256(repr([*facts]).encode()).hexdigest()[:16]


def install_gemm_record(device: Any) -> GemmRecord:
    """Copy the shipped measurements for a device to the folder in which XLA keeps its measurements.

    Existing files in the folder are not replaced. XLA finds a measurement by the properties of the
    device and the text of the matrix product. XLA uses a measurement only if the version of cuBLAS
    is the recorded version. XLA itself measures all other matrix products.

    Returns:
        The installed record; an empty record if there is no record for the device, or if XLA has no
        writable local folder.
    """
    cache, path = jax.config.values["jax_compilation_cache_dir"], gemm_record_path(device)
    if cache is None or "://" in cache or not path.is_file():
        return EMPTY_RECORD
    try:
        record = read_record(path)
    except (OSError, ValueError) as error:
        warnings.warn(f"the GEMM record {path} is ignored: {error}", stacklevel=2)
        return EMPTY_RECORD
    folder = autotuning_folder(Path(cache))
    try:
        for name, result in record.results.items():
            if not (folder / name).exists():
                write_atomically(folder / name, result)
    except OSError:  # read-only or full
        return EMPTY_RECORD
    return record


def read_record(path: Path) -> GemmRecord:
    """Read a record of measurements from a JSON file.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is damaged, or a key of `GemmRecord.results` is not the relative path
            of a file inside XLA's folder of measurements.
    """
    record = msgspec.json.decode(path.read_bytes(), type=GemmRecord)
    for name in record.results:
        parts = PurePosixPath(name).parts
        if not parts or not name.isprintable() or not {"/", ".."}.isdisjoint(parts):
            raise ValueError(
                f"the record of measurements has {name!r}, not the relative path of a file"
            )
    return record


def gemm_record_path(device: Any) -> Path:
    """Return the path of the recorded GEMM measurements for a device. The file may not exist.

    The path contains the versions of jaxlib and cuBLAS: XLA stores the number of a cuBLAS
    algorithm, and the same number may mean another algorithm in another version.
    """
    kind = device.device_kind.replace(" ", "_").replace("/", "_")
    return AUTOTUNING_DIR / f"{kind}-{jaxlib.__version__}-{_cublas_version()}.json"


def _cublas_version() -> str:
    for name in ("nvidia-cublas", "nvidia-cublas-cu13", "nvidia-cublas-cu12"):
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return "system"  # cuBLAS was not installed from PyPI, so its version is unknown


def autotuning_folder(cache: Path) -> Path:
    """Return the folder in which XLA stores its measurements, inside JAX's compilation cache."""
    return cache / "xla_gpu_per_fusion_autotune_cache_dir"
