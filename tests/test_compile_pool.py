"""Processes that compile for an engine's start: what they take on, refuse and leave behind."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from start_helpers import FLOAT32, Start, names

from jpaged.compile_pool import CompilePool, choose_workers, make_orders
from jpaged.compile_worker import Order, compile_share, share_of
from jpaged.config import EngineConfig
from jpaged.runtime.recipe import Recipe

GIB = 2**30


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    changed = "jax_compilation_cache_dir", "jax_pjrt_client_create_options"
    before = {name: jax.config.values[name] for name in changed}
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    yield Start(tmp_path)
    for name, value in before.items():
        jax.config.update(name, value)


def processes(pool: CompilePool) -> list[subprocess.Popen]:
    return [worker.process for worker in pool._workers]


ENGINE_START = """
import json, sys
from collections import Counter
import jax

events = Counter()
jax.monitoring.register_event_listener(lambda name, **_: events.update([name.split("/")[-1]]))
from jpaged import Engine, SamplingParams

engine = Engine(
    max_num_seqs=2, verbose=True, compilation_cache_dir=sys.argv[1], num_compile_workers=2
)
greedy = SamplingParams(temperature=0.0, max_tokens=8)
text = engine.generate("Count from 1 to 20", greedy)[0].outputs[0].text
print(json.dumps({"hits": events["cache_hits"], "misses": events["cache_misses"], "text": text}))
"""


@pytest.mark.slow
def test_what_workers_compile_the_engine_finds(tmp_path: Path):
    """In a process of its own: the tests' has code with checks in it, which workers have not."""
    first, second = (
        subprocess.run(
            [sys.executable, "-c", ENGINE_START, str(tmp_path)],
            capture_output=True,
            text=True,
            check=True,
            timeout=300,
        )
        for _ in range(2)
    )
    cold, warm = json.loads(first.stdout), json.loads(second.stdout)
    (total,) = {int(n) for n in re.findall(r"compiled (\d+) of \1 programs", first.stderr)}
    assert cold["hits"] == total
    assert warm == {"hits": total + cold["misses"], "misses": 0, "text": cold["text"]}
    assert "left to this process" not in first.stderr + second.stderr


def test_a_worker_that_would_make_other_programs_makes_none(start: Start):
    """Here code has the tests' checks in it, which it has not in a worker."""
    with start.pool() as pool:
        assert pool.start(start.runtime)
        found = names(pool.compiled(start.recipes, start.runtime, pytest.fail))
    assert found == names(start.recipes)
    assert sum("its settings or its code" in line for line in start.said) == 2
    assert start.said[-1] == f"{len(found)} of {len(found)} programs are left to this process"
    assert not any(start.store.has(recipe.key) for recipe in start.recipes)


def test_another_share_of_the_device_is_another_program(start: Start):
    order = replace(start.orders[0], device_bytes=7, limits=asdict(start.runtime))
    with pytest.raises(ValueError, match="its share of the device"):
        next(compile_share(order, lambda: start.runtime))


def test_what_a_lost_worker_had_is_compiled_here(start: Start):
    with start.pool() as pool:
        pool.start(start.runtime)
        for process in processes(pool):
            process.kill()
        found = names(pool.compiled(start.recipes, start.runtime, pytest.fail))
    assert found == names(start.recipes)


def test_without_processes_all_is_compiled_here(start: Start, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with start.pool() as pool:
        assert not pool.start(start.runtime)
        assert len([*pool.compiled(start.recipes, start.runtime, pytest.fail)]) == len(
            start.recipes
        )
    assert "could be started" in start.said[0]


def test_who_leaves_in_the_middle_leaves_no_process(start: Start):
    with start.pool() as pool:
        pool.start(start.runtime)
        running = processes(pool)
    assert [process.returncode for process in running] == [-9, -9]


@pytest.fixture(scope="module")
def order_and_runtime(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    script = Path(__file__).with_name("start_helpers.py")
    told = subprocess.check_output([sys.executable, script, tmp_path_factory.mktemp("cache")])
    return told.decode().splitlines(keepends=True)


@pytest.mark.parametrize("lines", [0, 1, 2], ids=["no order", "no runtime", "at work"])
def test_a_worker_ends_with_its_input(lines: int, order_and_runtime: list[str]):
    """The engine's process may be gone for good, without a word."""
    process = subprocess.run(
        [sys.executable, "-m", "jpaged.compile_worker"],
        input="".join(order_and_runtime[:lines]),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (process.stdout, process.returncode) == ("", 1)


def named(*names: tuple) -> list[Recipe]:
    return [Recipe(name, print) for name in names]


def test_shares_are_all_programs_once_and_kernels_in_common_stay_together():
    made = named(
        ("decode", 8),
        ("prefill", (64, 8)),
        ("sample", (8, 0)),
        ("prefill", (128, 8)),
        ("prefill", (64, 256)),
        ("sample", (8, 1)),
        ("load_row", None),
    )
    shares = [[recipe.name for recipe in share_of(made, i, 2)] for i in range(2)]
    assert shares == [
        [("decode", 8), ("sample", (8, 0)), ("sample", (8, 1)), ("load_row", None)],
        [("prefill", (64, 8)), ("prefill", (64, 256)), ("prefill", (128, 8))],
    ]


@pytest.mark.parametrize(
    ("platform", "reserved", "share", "measured", "asked", "expected"),
    [
        ("gpu", 126 * GIB, 0.9, True, None, 8),
        ("gpu", 126 * GIB, 0.9, False, None, 0),
        ("gpu", 126 * GIB, 0.9, False, 3, 3),
        ("gpu", 22 * GIB, 0.9, True, None, 2),
        ("gpu", 24 * GIB, 1.0, True, None, 0),
        ("gpu", None, 0.9, True, None, 0),
        ("cpu", None, 0.9, True, None, 0),
    ],
)
def test_as_many_workers_as_processors_and_memory_allow(
    platform: str,
    reserved: int | None,
    share: float,
    measured: bool,
    asked: int | None,
    expected: int,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    stats = {"bytes_limit": reserved} if reserved else None
    device = SimpleNamespace(platform=platform, memory_stats=lambda: stats)
    config = EngineConfig(gpu_memory_utilization=share, num_compile_workers=asked)
    assert choose_workers(config, device, measured=measured) == expected


def test_nothing_kept_is_no_worker(tmp_path: Path):
    config = EngineConfig(compilation_cache_dir=None, num_compile_workers=2)
    nothing = SimpleNamespace()
    assert make_orders(config, tmp_path, FLOAT32, nothing, None, measured=True) == []


def test_orders_are_fit_for_json(start: Start):
    first, second = start.orders
    assert (first.share, second.share, first.of) == (0, 1, 2)
    order = Order(**json.loads(json.dumps(asdict(first), default=str)))
    assert order == replace(first, options=order.options)
