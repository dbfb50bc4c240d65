"""Which GEMM algorithms XLA takes: measurements that ship, or few made here.

A record (`tools.record_products`) is of a kind of device and of versions of XLA and cuBLAS: XLA's
own files, and of which models, by the shapes of their weights, and of how many rows the products
are in it.

Without one, XLA would measure two dozen ways to compute a product and two for many another fusion,
on a device that only one process can measure on at a time: most of a cold start. Here it measures
products of many rows alone, by cuBLASLt's algorithms alone, of which its own first choice is up to
a quarter slower than the fastest; of fewer rows that choice is as fast in a step as the one that is
the fastest by itself (docs/decisions/0013). All other fusions are XLA's native kernels.
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

from jpaged.compile.recipes import Recipe
from jpaged.compile.store import write_atomically
from jpaged.models.decoder import DecoderLayer
from jpaged.models.sharding import MESH_AXIS, global_shape_struct, wrap_in_shard_map
from jpaged.runtime.programs import SplitModel
from pallas_kernels import Backend

AUTOTUNING_DIR = Path(__file__).parent.parent / "assets" / "autotuning"
"""Where records are."""

MIN_MEASURED_ROWS = 192
"""Rows from which products are measured."""

MAX_WAIT_S = 60.0
"""For other processes that measure; one may have been stopped."""

CompilerOptions = dict[str, Any]

CUBLAS_AUTOTUNING: CompilerOptions = {
    "xla_gpu_enable_triton_gemm": False,
    "xla_gpu_experimental_enable_fusion_autotuner": False,
}
NO_AUTOTUNING: CompilerOptions = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_autotune_level": 0}


class Compiler:
    """Compiles what recipes were lowered to; XLA measures what it does not find recorded."""

    key = ""
    """Tells it from compilers of other programs from the same text."""

    def compile(self, recipe: Recipe, lowered: Any) -> Any:
        """The program."""
        return lowered.compile(dict(recipe.options))


class AutotuningCompiler(Compiler):
    """Compiles programs whose products are not recorded.

    The products of a number of rows are measured before the first program that has them is
    compiled, by themselves, one after the other in all processes that share the folder, so that
    none measures another one's work. A product that a program has in another form is measured
    again with it, which is right too, only less exact.

    Args:
        model: The model, or its shapes.
        backend: The kernels' implementation.
        folder: Where XLA keeps its measurements; None if it does not.
    """

    key = "unrecorded"

    def __init__(self, model: nnx.Module, backend: Backend, folder: Path | None):
        self._backend, self._folder = backend, folder
        self._model, self._lock = model, threading.Lock()
        self._measured: set[Path] = set()  # here or by others; a folder may not keep marks
        device = jax.local_devices()[0]
        where = device.device_kind, device.client.platform_version
        facts = weights_digest(SplitModel.of(model).shard_leaves), backend
        self._digest = _digest(facts, jax.__version__, jaxlib.__version__, where)

    def compile(self, recipe: Recipe, lowered: Any) -> Any:
        """The program; its products are measured first, if they are to be and were not yet."""
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
            if self._folder is None:  # XLA has it in this process's memory then
                measure_gemms(self._model, part, rows, self._backend)
            elif not done.exists():
                with _measurement_lock(self._folder):
                    if not done.exists():  # another process has been at it
                        measure_gemms(self._model, part, rows, self._backend)
                        with suppress(OSError):
                            done.touch()
            self._measured.add(done)


def measure_gemms(model: Any, part: str, rows: int, backend: Backend) -> int:
    """Have XLA measure the products of `rows` rows that it computes itself, of a layer or the head.

    Returns:
        How many programs were compiled for it.
    """
    head = model.head, lambda it, x: it.logits(x), [(model.config.embedding_size,)]
    steps = [head] if part == "head" else _layer_steps(model, backend)
    one_device_mesh, num_compiled = Mesh(jax.local_devices()[:1], (MESH_AXIS,)), 0
    placed = partial(global_shape_struct, one_device_mesh, axis=None)
    for module, step, widths in steps:
        split = SplitModel.of(module)
        inputs = [jax.ShapeDtypeStruct((rows, *width), model.dtype) for width in widths]
        arguments, bound = (split.shard_leaves, *inputs), split.bind(step)
        if model.config.tensor_parallel_size > 1:  # its sums over devices are of one
            arguments = jax.tree.map(placed, arguments)
            bound = wrap_in_shard_map(bound, one_device_mesh, arguments, {}, PartitionSpec())
        lowered = jax.jit(bound).lower(*arguments)
        if "stablehlo.dot" in lowered.as_text():  # not those of own kernels
            lowered.compile(CUBLAS_AUTOTUNING)
            num_compiled += 1
    return num_compiled


GemmStep = tuple[nnx.Module, Callable[..., Any], list[tuple[int, ...]]]
"""A part of a model, what it computes with products, and the widths of its inputs."""


def _layer_steps(model: Any, backend: Backend) -> Iterator[GemmStep]:
    """A layer without its attention, each as programs have it: what XLA fuses with a product, a
    bias or the residual stream, belongs to what it measures."""
    layer, config = model.layers[0], model.config
    width, heads = (config.hidden_size,), (config.num_heads, config.head_size)
    yield layer, lambda it, x: it.attention.qkv(x, backend), [width]
    if layer.mlp.gate_up is None:
        yield layer, lambda it, x, o: _run_after_attention(it, x, o, backend), [width, heads]
        return
    inner = (config.intermediate_size,)
    yield layer, lambda it, o: it.attention.output(o, backend), [heads]
    yield layer, lambda it, x: it.mlp.intermediate(x, backend), [width]
    yield layer, lambda it, x: it.mlp.down(x, backend), [inner]


def _run_after_attention(layer: DecoderLayer, hidden: Any, heads: Any, backend: Backend) -> Any:
    update = layer.attention.output(heads, backend)
    rows, hidden = layer.mlp_norm.add_norm(hidden, update, backend)
    return layer.attention_norm.add_norm(hidden, layer.mlp(rows, backend), backend)


@contextmanager
def _measurement_lock(folder: Path) -> Iterator[None]:
    """While no other process that shares the folder is here; after `MAX_WAIT_S`, or where the
    system has no such lock, all the same."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = (folder / "measuring.lock").open("w")
    except OSError:
        yield
        return
    with lock:
        until = time.monotonic() + MAX_WAIT_S
        with suppress(OSError):  # there may be no such lock here
            while time.monotonic() < until:
                with suppress(BlockingIOError):
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                time.sleep(0.02)
        yield  # closing the file gives the lock back


class GemmRecord(msgspec.Struct, frozen=True):
    """What was measured.

    Attributes:
        rows: By the digest of a model's weights: rows of its products.
        results: XLA's files, by their paths in its folder of them; in JSON in base 64.
    """

    rows: dict[str, list[int]]
    results: dict[str, bytes]

    def covers(self, leaves: Iterable[Any], rows: Iterable[int]) -> bool:
        """Whether a model with such weights has nothing left to measure in steps of such rows."""
        return set(rows) <= set(self.rows.get(weights_digest(leaves), ()))


EMPTY_RECORD = GemmRecord({}, {})


def make_compiler(model: nnx.Module, backend: Backend, *, has_gemm_record: bool) -> Compiler:
    """What compiles an engine's programs, in whichever process.

    Args:
        model: The model, or its shapes.
        backend: The kernels' implementation.
        recorded: Whether XLA has nothing left to measure of the products: it is recorded, or the
            device is a CPU.
    """
    if has_gemm_record:
        return Compiler()
    cache = jax.config.values["jax_compilation_cache_dir"]
    folder = None if cache is None or "://" in cache else autotuning_folder(Path(cache))
    return AutotuningCompiler(model, backend, folder)


def weights_digest(leaves: Iterable[Any]) -> str:
    """Of the shapes and dtypes of a model's weights, which decide what its products are; single
    numbers, as the scales of its KV are, have no part in them."""
    weights = [leaf for leaf in leaves if math.prod(leaf.shape) > 1]
    return _digest(*sorted((leaf.shape, jnp.dtype(leaf.dtype).name) for leaf in weights))


def _digest(*facts: Any) -> str:
    return hashlib.sha256(repr([*facts]).encode()).hexdigest()[:16]


def install_gemm_record(device: Any) -> GemmRecord:
    """Let XLA find how products are computed fastest, as recorded on such a device, where it keeps
    its own measurements: it then measures nothing of that. What is there already stays.

    XLA looks each up under the numbers of the device and the text of the product, and takes it if
    the library that was the fastest still has the version it had: it measures all else.

    Returns:
        What XLA finds; nothing if there is no record, or no place for it.
    """
    cache, path = jax.config.values["jax_compilation_cache_dir"], gemm_record_path(device)
    if cache is None or "://" in cache or not path.is_file():
        return EMPTY_RECORD
    try:
        record = read_record(path)
    except (OSError, ValueError) as error:  # XLA measures then
        warnings.warn(f"{path} is not used: {error}", stacklevel=2)
        return EMPTY_RECORD
    folder = autotuning_folder(Path(cache))
    try:
        for name, result in record.results.items():
            if not (folder / name).exists():
                write_atomically(folder / name, result)
    except OSError:  # for reading alone, or full
        return EMPTY_RECORD
    return record


def read_record(path: Path) -> GemmRecord:
    """Read a record.

    Raises:
        OSError: it cannot be read.
        ValueError: it is damaged, or names what is not in XLA's folder.
    """
    record = msgspec.json.decode(path.read_bytes(), type=GemmRecord)
    for name in record.results:
        parts = PurePosixPath(name).parts
        if not parts or not name.isprintable() or not {"/", ".."}.isdisjoint(parts):
            raise ValueError(f"{name!r} is no file in a folder")
    return record


def gemm_record_path(device: Any) -> Path:
    """Where such a device's products are recorded, if they are: for the same XLA and cuBLAS, of
    whose algorithms XLA keeps a number, which says nothing in another version."""
    kind = device.device_kind.replace(" ", "_").replace("/", "_")
    return AUTOTUNING_DIR / f"{kind}-{jaxlib.__version__}-{_cublas_version()}.json"


def _cublas_version() -> str:
    for name in ("nvidia-cublas", "nvidia-cublas-cu13", "nvidia-cublas-cu12"):
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return "system"  # that of a CUDA installed otherwise


def autotuning_folder(cache: Path) -> Path:
    """Where XLA keeps its measurements within JAX's compilation cache."""
    return cache / "xla_gpu_per_fusion_autotune_cache_dir"
