"""The test tiers, strict JAX, run-time shape checks, and one compilation cache for a whole run."""

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

# Before torch, the oracle, is imported: its threads spin on cores that other test processes need.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Compiling takes most of the time of the tests, so machine code is optimised little, also in
# processes that tests start. XLA's passes before that, which some tests examine, stay on.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# XLA's older emitters for a CPU compile a fifth faster. A process ends over a flag that its XLA
# does not know, so this is for the JAX that the flag was tried with.
if version("jax").startswith("0.10."):
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_use_fusion_emitters=false")

from jaxtyping import install_import_hook

# Before the first import of either package: every function with arrays checks their shapes.
TYPED = ["jpaged.models", "jpaged.runtime", "jpaged.compile", "pallas_kernels"]
install_import_hook(TYPED, "beartype.beartype")

import pytest  # noqa: E402

import jpaged  # noqa: E402  imports JAX only when an engine is asked for

MAX_KEPT_ENGINES = 8
"""XLA crashes at Linux's limit of 65,530 memory maps; an engine on a CPU takes about 1,300."""

MAX_PROCESSOR_SECONDS = 30.0
"""Processor time of one test of the default tier, fixtures included. In CI a test that needs more
fails."""

MAX_GROWTH = 2 * 2**30
"""Bytes by which a test process may grow before it drops its engines and programs after a module.
Without a limit a process of the default tier grows to 6 GiB."""

_STARTED = pytest.StashKey[float]()
_ENGINES = pytest.StashKey[Callable[[], None]]()
_RESIDENT = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--tier`."""
    parser.addoption(
        "--tier",
        choices=("default", "full"),
        default="default",
        help="full: also run the tests marked `full` (products of options, all sizes, random runs)",
    )


@pytest.hookimpl(optionalhook=True)  # there may be no xdist
def pytest_xdist_auto_num_workers() -> int:
    """Return the number of processes of `-n auto`: one more than there are processors, since tests
    of servers wait half of their time."""
    return len(os.sched_getaffinity(0)) + 1


def pytest_configure(config: pytest.Config) -> None:
    """Tell `covering.num_examples` the tier, and restore Ctrl-C, which some tests send: a shell
    ignores it in processes of the background."""
    os.environ["JPAGED_TEST_TIER"] = str(config.getoption("tier"))
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_pycollect_makemodule(module_path: Path) -> None:
    """Configure JAX before the first test module that may use it. `tests/core` never does, and
    starts in half the time without."""
    if "core" not in module_path.parts:
        _configure_jax()


@cache
def _configure_jax() -> None:
    """Make type and rank promotion errors, and split the processor into eight devices."""
    import jax

    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_num_cpu_devices", 8)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests marked `full` in the default tier.

    Tests on a GPU run in every tier: the tiers bound the processor's time. A test that the command
    names runs too.
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


def _processor_seconds() -> float:
    """Return the processor time of this process and of the children that it has waited for."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Optimise programs for a GPU as for users, also in processes that a test starts."""
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
                f"{MAX_PROCESSOR_SECONDS:g} s: make it smaller, or mark it `full`"
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
        stash[_RESIDENT] = _resident_bytes()  # the allocator keeps some


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
    """Return the folder of compiled programs that all processes of a run and their servers share.

    JAX writes its files in place. A file that is read half written fails zlib's check, gives a
    warning that pyproject.toml ignores, and is compiled again. A test that kills a process while it
    compiles gives that process another folder.
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
    """Return a function that makes an engine, or returns a kept engine of the same options."""
    make = partial(jpaged.Engine, compilation_cache_dir=compilation_cache)
    kept = lru_cache(MAX_KEPT_ENGINES)(make)
    pytestconfig.stash[_ENGINES] = kept.cache_clear
    return kept
