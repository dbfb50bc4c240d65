"""How programs are compiled where XLA's measurements of their products are not recorded.

XLA measures two dozen ways to compute a product and two for many another fusion, on a device that
only one process can measure on at a time: most of a cold start. Here it measures products of many
rows alone, by cuBLASLt's algorithms alone, of which its own first choice is up to a quarter slower
than the fastest; of fewer rows that choice is as fast in a step as the one that is the fastest by
itself (docs/decisions/0013). All other fusions are XLA's native kernels.
"""

import fcntl
import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import jax
import jax.numpy as jnp
import jaxlib
from flax import nnx

from jpaged.compile.recipe import Recipe
from jpaged.compile.recipes import SplitModel
from jpaged.models.decoder_layer import DecoderLayer
from jpaged.models.layers import FeedForward
from pallas_kernels import Backend

MEASURED_FROM = 192
"""Rows from which products are measured."""

MAX_WAIT_S = 60.0
"""For other processes that measure; one may have been stopped."""

Options = dict[str, Any]

CUBLAS_MEASURED: Options = {
    "xla_gpu_enable_triton_gemm": False,
    "xla_gpu_experimental_enable_fusion_autotuner": False,
}
NOTHING_MEASURED: Options = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_autotune_level": 0}


class Compiler:
    """Compiles what recipes were lowered to; XLA measures what it does not find recorded."""

    key = ""
    """Tells it from compilers of other programs from the same text."""

    def compile(self, recipe: Recipe, lowered: Any) -> Any:
        """The program."""
        return lowered.compile()


class UnrecordedCompiler(Compiler):
    """Compiles programs whose products are not recorded.

    The products of a number of rows are measured before the first program that has them is
    compiled, by themselves, one after the other in all processes that share the folder, so that
    nobody measures another one's work. What is measured there again, since a program has a product
    in another form, is right too, only less exact.

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
        facts = [(leaf.shape, jnp.dtype(leaf.dtype).name) for leaf in SplitModel.of(model).leaves]
        device = jax.local_devices()[0]
        where = device.device_kind, device.client.platform_version
        text = repr((facts, backend, jax.__version__, jaxlib.__version__, where))
        self._digest = hashlib.sha256(text.encode()).hexdigest()[:16]

    def compile(self, recipe: Recipe, lowered: Any) -> Any:
        """The program; its products are measured first, if they are to be and were not yet."""
        rows = _rows(recipe)
        if rows < MEASURED_FROM:
            return lowered.compile(NOTHING_MEASURED)
        self._measure("layer", rows)
        self._measure("head", _logits_rows(recipe))
        return lowered.compile(CUBLAS_MEASURED)

    def _measure(self, part: str, rows: int) -> None:
        if self._folder is None:  # then by each program alone
            return
        done = self._folder / f"{self._digest}-{part}-{rows}.measured"
        with self._lock:
            if done in self._measured:
                return
            if not done.exists():
                with _alone(self._folder):
                    if not done.exists():  # another process has been at it
                        measure_products(self._model, part, rows, self._backend)
                        with suppress(OSError):
                            done.touch()
            self._measured.add(done)


def measure_products(model: Any, part: str, rows: int, backend: Backend) -> int:
    """Have XLA measure the products of `rows` rows that it computes itself, of a layer or the head.

    Returns:
        How many programs were compiled for it.
    """
    steps = _head_steps(model) if part == "head" else _layer_steps(model, backend)
    num_compiled = 0
    for module, step, widths in steps:
        split = SplitModel.of(module)
        leaf = split.leaves[0]
        inputs = [jax.ShapeDtypeStruct((rows, *width), leaf.dtype) for width in widths]
        lowered = jax.jit(_bound(split, step)).lower(split.leaves, *inputs)
        if "stablehlo.dot" in lowered.as_text():  # not those of own kernels
            lowered.compile(CUBLAS_MEASURED)
            num_compiled += 1
    return num_compiled


Step = tuple[nnx.Module, Callable[..., Any], list[tuple[int, ...]]]
"""A part of a model, what it computes with products, and the widths of its inputs."""


def _layer_steps(model: Any, backend: Backend) -> Iterator[Step]:
    """A layer without its attention, each as programs have it: what XLA fuses with a product, a
    bias or the residual stream, belongs to what it measures."""
    layer, config = model.layers[0], model.config
    width, heads = (config.hidden_size,), (config.num_heads, config.head_size)
    yield layer, lambda it, x: it.attention.qkv(x, backend), [width]
    if isinstance(layer.mlp, FeedForward):
        yield layer, lambda it, x, o: _after_attention(it, x, o, backend), [width, heads]
        return
    inner = (config.intermediate_size,)
    yield layer, lambda it, o: it.attention.output(o, backend), [heads]
    yield layer, lambda it, x: it.mlp.gated(x, backend), [width]
    yield layer, lambda it, x: it.mlp.down.parts(x, backend), [inner]


def _after_attention(layer: DecoderLayer, hidden: Any, heads: Any, backend: Backend) -> Any:
    update = layer.attention.output(heads, backend)
    rows, hidden = layer.mlp_norm.add(hidden, update, backend)
    return layer.attention_norm.add(hidden, layer.mlp(rows, backend), backend)


def _head_steps(model: Any) -> Iterator[Step]:
    head = model.embed if model.lm_head is None else model.lm_head
    yield head, lambda it, x: it.logits(x), [(model.config.embedding_size,)]


def _bound(split: SplitModel, step: Callable[..., Any]) -> Callable[..., Any]:
    def measured_products(leaves, *inputs):
        module = nnx.merge(split.definition, jax.tree.unflatten(split.treedef, leaves))
        return step(module, *inputs)

    return measured_products


def _rows(recipe: Recipe) -> int:
    return 0 if recipe.products is None else recipe.products[1]


def _logits_rows(recipe: Recipe) -> int:
    """Rows of the logits that a forward program leaves."""
    kind, key = recipe.name
    if kind == "prefill":
        return key[1]
    return recipe.keywords["packed"].shape[-2]


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
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
        while not _locked(lock) and time.monotonic() < until:
            time.sleep(0.02)
        yield  # closing the file gives the lock back


def _locked(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # not to be had here
        return True
    return True
