"""Configure all tests: tiers, strict JAX, shape checks at run time, a shared compilation cache."""

import gc
import os
import resource
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from functools import cache, lru_cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

# Set this before torch is imported. Torch's threads would busy-wait on processors that other test
# processes need.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Compiling takes most of the time of the tests, so skip most of LLVM's optimizations, also in
# processes that tests start. XLA's own passes still run: some tests examine their result.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# On a CPU, XLA compiles a fifth faster without fusion emitters. XLA ends the process if it does not
# know a flag, so set the flag only for the JAX version with which it was tried.
if version("jax").startswith("0.10."):
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_use_fusion_emitters=false")

from jaxtyping import install_import_hook

# Install the hook before the first import of these packages. Their functions then check the shapes
# of their arrays.
TYPED = ["jpaged.models", "jpaged.runtime", "jpaged.compile", "pallas_kernels"]
install_import_hook(TYPED, "beartype.beartype")

import pytest  # noqa: E402

import jpaged  # noqa: E402  jpaged imports JAX only when an engine is created

MAX_KEPT_ENGINES = 8
"""Maximum number of engines that are kept for other tests. XLA crashes at Linux's limit of 65,530
memory maps, and an engine on a CPU takes about 1,300."""

MAX_PROCESSOR_SECONDS = 45.0
"""Maximum CPU time in seconds of one test of the default tier, including its fixtures. In CI, a
test that needs more fails. The same test needs up to twice the CPU time on a slower machine, so
keep a test below 20 seconds."""

MAX_GROWTH = 2 * 2**30
"""Number of bytes by which a test process may grow. At the end of a test module that exceeds it,
the process drops its engines and programs. Without this limit, a process grows to 6 GiB."""

_STARTED = pytest.StashKey[float]()
_ENGINES = pytest.StashKey[Callable[[], None]]()
_RESIDENT = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the command-line option `--tier`."""
    parser.addoption(
        "--tier",
        choices=("default", "full"),
        default="default",
        help="full: also run the tests marked `full` (products of options, all sizes, random runs)",
    )


@pytest.hookimpl(optionalhook=True)  # pytest-xdist may be missing
def pytest_xdist_auto_num_workers() -> int:
    """Return the number of processes for `-n auto`: one more than the number of processors.

    Tests of servers spend half of their time waiting.
    """
    return len(os.sched_getaffinity(0)) + 1


def pytest_configure(config: pytest.Config) -> None:
    """Pass the tier to `covering.num_examples`, and let SIGINT raise KeyboardInterrupt.

    A shell makes background processes ignore SIGINT, but some tests send it.
    """
    os.environ["JPAGED_TEST_TIER"] = str(config.getoption("tier"))
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.disable()  # until all modules are imported


def pytest_pycollect_makemodule(module_path: Path) -> None:
    """Configure JAX before the first test module that may use JAX is imported.

    Tests in `tests/core` never use JAX, and start in half the time if JAX is not imported.
    """
    if "core" not in module_path.parts:
        _configure_jax()


@cache
def _configure_jax() -> None:
    """Let JAX refuse implicit dtype and rank promotion, and create eight CPU devices."""
    import jax

    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_num_cpu_devices", 8)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests marked `full` in the default tier.

    Tests marked `gpu` run in every tier, because the tiers limit CPU time only. A test that the
    command line names (`file::test`) runs in every tier too.
    """
    if config.getoption("tier") == "full":
        return
    named = [arg.partition("::") for arg in config.args if "::" in arg]
    names = [((config.invocation_params.dir / file).resolve(), name) for file, _, name in named]

    def is_full(item: pytest.Item) -> bool:
        name = item.nodeid.partition("::")[2]
        is_named = any(item.path == file and name.startswith(start) for file, start in names)
        return bool(item.get_closest_marker("full")) and not (
            is_named or item.get_closest_marker("gpu")
        )

    deselected = {item for item in items if is_full(item)}
    if deselected:
        config.hook.pytest_deselected(items=[*deselected])
        items[:] = [item for item in items if item not in deselected]


def pytest_collection_finish() -> None:
    """Freeze the collected modules and tests, so that the garbage collector skips them, and collect
    garbage rarely: tracing creates objects that are not garbage."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


def _processor_seconds() -> float:
    """Return the CPU seconds of this process and of the ended children that it has waited for."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Disable most of XLA's optimizations, except for tests that run on a GPU.

    An environment variable applies the same setting to processes that the test starts.
    """
    item.stash[_STARTED] = _processor_seconds()
    on_gpu = item.get_closest_marker("gpu") is not None
    jax: Any = sys.modules.get("jax")
    if item.get_closest_marker("gpu2") is not None:
        on_gpu = jax.default_backend() == "gpu"
    if jax is not None:
        jax.config.update("jax_disable_most_optimizations", not on_gpu)
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "0" if on_gpu else "1"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """In CI, fail a test of the default tier that uses too much CPU time."""
    report = yield
    if call.when == "teardown" and report.passed and "CI" in os.environ:
        seconds = _processor_seconds() - item.stash.get(_STARTED, _processor_seconds())
        others = any(item.get_closest_marker(name) for name in ("full", "gpu", "gpu2", "soak"))
        if seconds > MAX_PROCESSOR_SECONDS and not others:
            report.outcome = "failed"
            report.longrepr = (
                f"{item.nodeid} used {seconds:.0f} s of CPU time; the limit in the default tier is "
                f"{MAX_PROCESSOR_SECONDS:g} s: make the test smaller, or mark it `full`"
            )
    return report


def _resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * resource.getpagesize()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Drop engines and compiled programs after a module if they take too much memory."""
    is_last = nextitem is None or nextitem.path != item.path
    jax: Any = sys.modules.get("jax")
    stash, before = item.config.stash, item.config.stash.get(_RESIDENT, 2**30)
    if jax is not None and is_last and _resident_bytes() > before + MAX_GROWTH:
        stash.get(_ENGINES, lambda: None)()
        gc.collect()
        jax.clear_caches()
        stash[_RESIDENT] = _resident_bytes()  # higher than at the start


@pytest.fixture
def jax_settings() -> Iterator[None]:
    """Restore JAX's settings after a test that changes them."""
    import jax

    before = dict(jax.config.values)
    yield
    for name, value in before.items():
        if jax.config.values[name] != value:
            jax.config.update(name, value)


@pytest.fixture(scope="session", autouse=True)
def compilation_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder for compiled programs that all processes of a test run share.

    JAX writes files of this folder in place, so a process may read an incomplete file. JAX then
    warns, which pyproject.toml ignores, and compiles the program again. A test that kills a process
    during compilation passes another folder to that process.
    """
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "jax-cache"
    if "jax" not in sys.modules:
        return folder
    import jax

    for name, value in {
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }.items():
        jax.config.update(name, value)
    return folder


@pytest.fixture(scope="session")
def kept_engines(
    compilation_cache: Path, pytestconfig: pytest.Config
) -> Callable[..., "jpaged.Engine"]:
    """Return a function that returns an engine with given options, and reuses earlier engines."""
    make = partial(jpaged.Engine, compilation_cache_dir=compilation_cache)
    kept = lru_cache(MAX_KEPT_ENGINES)(make)
    pytestconfig.stash[_ENGINES] = kept.cache_clear
    return kept
