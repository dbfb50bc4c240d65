"""Strict JAX and run-time shape checks for every test, and what keeps the whole run short."""

import gc
import os
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from pathlib import Path

# Before torch, the oracle, is imported: its threads spin on cores that other test processes need.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from jaxtyping import install_import_hook

# Before the first import of either package: every function with arrays checks their shapes.
TYPED = ["jpaged.models", "jpaged.runtime", "jpaged.compile", "pallas_kernels"]
install_import_hook(TYPED, "beartype.beartype")

import jax  # noqa: E402
import pytest  # noqa: E402

import jpaged  # noqa: E402  loads an engine's modules where a test asks for one

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

QUICK_TO_COMPILE = {"compile", "examples", "kernels", "models", "runtime", "tools"}
"""Folders whose tests run most programs once."""

MAX_KEPT_ENGINES = 8
"""An engine's programs take some 1,300 memory maps of a CPU's process, which Linux gives 65,530:
at the last one XLA crashes."""


def pytest_collection_finish() -> None:
    """Spare the garbage collector what stays to the end: the modules and all tests."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Machine code is optimised little where most programs run once: compiling is what takes the
    time. What XLA makes of a program before that, which some tests look at, stays as it is.

    Programs for a GPU, and those of engines that answer many requests, are compiled as for users.
    """
    quick = item.path.parent.name in QUICK_TO_COMPILE and not item.get_closest_marker("gpu")
    jax.config.update("jax_disable_most_optimizations", quick)


@pytest.fixture
def jax_settings() -> Iterator[None]:
    """Puts back what a test changes of JAX's settings."""
    before = dict(jax.config.values)
    yield
    for name, value in before.items():
        if jax.config.values[name] != value:
            jax.config.update(name, value)


@pytest.fixture(scope="session")
def compilation_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Engines of the same shapes compile once, in each of pytest's processes: JAX writes a cache's
    files in place, and what another process reads half written is a warning, so an error. Whoever
    is killed while it starts, and may leave such a file, has a folder of its own."""
    return tmp_path_factory.getbasetemp() / "jax-cache"


@pytest.fixture(scope="session")
def kept_engines(compilation_cache: Path) -> Callable[..., "jpaged.Engine"]:
    """Makes an engine of a model and options, or gives the one of them used not long ago."""
    make = partial(jpaged.Engine, compilation_cache_dir=compilation_cache)
    return lru_cache(MAX_KEPT_ENGINES)(make)
