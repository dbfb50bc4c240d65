"""Strict JAX and run-time shape checks for every test, and what keeps the whole run short."""

import gc
import os
import signal
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from pathlib import Path

# Before torch, the oracle, is imported: its threads spin on cores that other test processes need.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Machine code is optimised little, here and in processes that tests start: compiling takes most of
# their time. What XLA makes of a program before that, which some tests look at, stays as it is.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

from jaxtyping import install_import_hook

# Before the first import of either package: every function with arrays checks their shapes.
TYPED = ["jpaged.models", "jpaged.runtime", "jpaged.compile", "pallas_kernels"]
install_import_hook(TYPED, "beartype.beartype")

import jax  # noqa: E402
import pytest  # noqa: E402

import jpaged  # noqa: E402  loads an engine's modules where a test asks for one

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_num_cpu_devices", 8)  # all on this processor: for models that are shared

MAX_KEPT_ENGINES = 8
"""An engine's programs take some 1,300 memory maps of a CPU's process, which Linux gives 65,530:
at the last one XLA crashes."""


def pytest_configure() -> None:
    """Hear Ctrl-C, which tests send: a shell has what it starts in the background ignore it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Spare the garbage collector what stays to the end: the modules and all tests."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Programs for a GPU are compiled as for users, in processes that a test starts too."""
    on_gpu = item.get_closest_marker("gpu") is not None
    if item.get_closest_marker("gpu2") is not None:
        on_gpu = jax.default_backend() == "gpu"
    jax.config.update("jax_disable_most_optimizations", not on_gpu)
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "0" if on_gpu else "1"


@pytest.fixture
def jax_settings() -> Iterator[None]:
    """Puts back what a test changes of JAX's settings."""
    before = dict(jax.config.values)
    yield
    for name, value in before.items():
        if jax.config.values[name] != value:
            jax.config.update(name, value)


@pytest.fixture(scope="session", autouse=True)
def compilation_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compiled programs of the whole run: of all pytest's processes and of the servers they start.

    JAX writes its files in place. What is read half written fails zlib's check, gives a warning
    that pyproject.toml ignores, and is compiled anew. A process that a test kills while it starts,
    and that may leave such a file, has a folder of its own.
    """
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "jax-cache"
    for name, value in {
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }.items():
        jax.config.update(name, value)
    return folder


@pytest.fixture(scope="session")
def kept_engines(compilation_cache: Path) -> Callable[..., "jpaged.Engine"]:
    """Makes an engine of a model and options, or gives the one of them used not long ago."""
    make = partial(jpaged.Engine, compilation_cache_dir=compilation_cache)
    return lru_cache(MAX_KEPT_ENGINES)(make)
