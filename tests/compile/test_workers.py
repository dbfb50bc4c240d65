"""Processes that compile for an engine's start: what they take on, refuse and leave behind."""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from start_helpers import FLOAT32, Start, names

from jpaged import processes
from jpaged.compile.workers import (
    CompileJob,
    choose_num_workers,
    from_json,
    make_compile_jobs,
    select_worker_recipes,
    to_json,
)
from jpaged.config import EMBEDDED_MODEL, EngineConfig
from jpaged.processes import Child, frame_message, receive, send

GIB = 2**30


@pytest.fixture
def start(tmp_path: Path, jax_settings: None) -> Start:
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    return Start(tmp_path)


def untold(*_: int) -> None:
    """Progress that is not wanted."""


ONE_LAYER = {
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
ENGINE_START = """
import json, sys
from collections import Counter
from dataclasses import replace
import jax

events = Counter()
jax.monitoring.register_event_listener(lambda name, **_: events.update([name.split("/")[-1]]))
from jpaged import Engine, SamplingParams
from jpaged.compile import compilation
from jpaged.compile.workers import CompilePool


def start_unsized(pool, limits):  # as on a GPU, where the pool is sized meanwhile
    events.update(["start"])
    return start(pool, replace(limits, num_blocks=0))


start, CompilePool.start = CompilePool.start, start_unsized
compilation.nothing_to_measure = lambda *_: False  # as on a GPU
engine = Engine(
    sys.argv[2],
    load_format="dummy",
    skip_tokenizer_init=True,
    max_num_seqs=2,
    max_model_len=64,
    swap_space=0.001,
    preemption_mode="swap",
    verbose=True,
    compilation_cache_dir=sys.argv[1],
    num_compile_workers=2,
)
greedy = SamplingParams(temperature=0.0, max_tokens=8)
tokens = engine.generate([5, 6, 7], greedy)[0].outputs[0].token_ids
print(json.dumps([[*tokens], *(events[it] for it in ("start", "cache_hits", "cache_misses"))]))
"""


def test_engine_finds_programs_that_workers_compiled(tmp_path: Path):
    model, cache = tmp_path / "model", tmp_path / "cache"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(ONE_LAYER), encoding="utf-8")
    first, second = (
        subprocess.run(
            [sys.executable, "-c", ENGINE_START, str(cache), str(model)],
            capture_output=True,
            text=True,
            check=True,
            timeout=300,
        )
        for _ in range(2)
    )
    tokens, starts, hits, misses = json.loads(first.stdout)
    (total,) = {int(n) for n in re.findall(r"compiled (\d+) of \1 programs", first.stderr)}
    assert (starts, hits) == (1, total)
    assert "worker failed" not in first.stderr
    assert json.loads(second.stdout) == [tokens, 0, total + misses, 0]


@pytest.mark.full
def test_worker_with_another_digest_compiles_nothing(start: Start):
    """Here code has the tests' checks in it, which it has not in a worker."""
    with start.pool() as pool:
        assert pool.start(start.runtime)
        found = names(pool.iter_compiled(start.recipes, start.runtime, untold))
    assert found == names(start.recipes)
    assert sum("code, settings or device memory" in line for line in start.said) == 2
    assert not any(start.store.has(recipe.key) for recipe in start.recipes)


def test_workers_accept_any_checkpoint_path(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The name is not UTF-8, and Python's standard encoding is ASCII."""
    folder = tmp_path / "modèle-caf\udce9"
    folder.mkdir()
    shutil.copy(EMBEDDED_MODEL / "config.json", folder)
    start.jobs = [replace(job, folder=str(folder)) for job in start.jobs]
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    with start.pool() as pool:
        assert pool.start(start.runtime)
        found = names(pool.iter_compiled(start.recipes, start.runtime, untold))
    assert found == names(start.recipes)
    # The workers have read config.json in this folder, so the digest includes it.
    assert sum("code, settings or device memory" in line for line in start.said) == 2
    assert not any(start.store.has(recipe.key) for recipe in start.recipes)


def test_programs_of_a_lost_worker_are_compiled_by_the_engine(start: Start):
    with start.pool() as pool:
        pool.start(start.runtime)
        for child in pool.processes:
            child.kill()
        found = names(pool.iter_compiled(start.recipes, start.runtime, untold))
    assert found == names(start.recipes)


def test_engine_compiles_all_programs_without_workers(
    start: Start, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with start.pool() as pool:
        assert not pool.start(start.runtime)
        assert len([*pool.iter_compiled(start.recipes, start.runtime, untold)]) == len(
            start.recipes
        )
    (said,) = start.said
    assert "a compile worker could not be started" in said


def test_engine_compiles_all_programs_without_threads(
    start: Start, monkeypatch: pytest.MonkeyPatch
):
    def refuse(_: object) -> None:
        raise RuntimeError("can't start new thread")

    descriptors = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with start.pool() as pool:
        assert not pool.start(start.runtime)
        found = names(pool.iter_compiled(start.recipes, start.runtime, untold))
    assert found == names(start.recipes)
    assert len(start.said) == 1
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_aborted_start_ends_all_workers(start: Start):
    with start.pool() as pool:
        pool.start(start.runtime)
        running = pool.processes
    assert [child.process.returncode for child in running] == [-9, -9]


FAKE_WORKER = """
import socket, sys
channel = socket.socket(fileno=int(sys.argv[1]))
channel.sendall(bytes.fromhex(sys.argv[2]))
while "waits" in sys.argv and channel.recv(1000):
    pass
"""


def start_fakes(monkeypatch: pytest.MonkeyPatch, *arguments: list[str]) -> None:
    """Start fake workers, one of each list of arguments: what it sends, and whether it waits."""
    left = iter(arguments)

    def command(module: str, channel: int) -> list[str]:
        return [sys.executable, "-c", FAKE_WORKER, str(channel), *next(left)]

    monkeypatch.setattr(processes, "child_command", command)


def test_programs_reported_by_a_lost_worker_are_not_compiled_again(
    start: Start, monkeypatch: pytest.MonkeyPatch
):
    done = [repr(recipe.name) for recipe in start.recipes[:2]]
    sent = b"".join(frame_message(to_json({"compiled": name})) for name in done)
    sent += (
        frame_message(to_json({"level": "info"})) + frame_message(to_json({"compiled": "cut"}))[:-3]
    )
    told: list[int] = []
    start_fakes(monkeypatch, [sent.hex()], [sent.hex()])
    with start.pool() as pool:
        found = [*pool.iter_compiled(start.recipes, start.runtime, lambda n, _: told.append(n))]
    assert [repr(recipe.name) for recipe in found[:2]] == done
    assert names(found) == names(start.recipes)
    assert told == [*range(1, len(found) + 1)]


def test_engine_does_not_wait_for_an_ended_worker(start: Start, monkeypatch: pytest.MonkeyPatch):
    """The others may take long: this one never says a word."""
    start_fakes(monkeypatch, [""], ["", "waits"])
    first = select_worker_recipes(start.recipes, 0, 2)
    with start.pool() as pool:
        pool.start(start.runtime)
        found = pool.iter_compiled(start.recipes, start.runtime, untold)
        assert names(next(found) for _ in first) == names(first)


@pytest.fixture(scope="module")
def order_and_runtime(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    script = Path(__file__).parent.with_name("start_helpers.py")
    told = subprocess.check_output([sys.executable, script, tmp_path_factory.mktemp("cache")])
    return told.splitlines()


@pytest.mark.parametrize(
    "num_messages",
    [
        pytest.param(0, id="no order"),
        pytest.param(1, marks=pytest.mark.full, id="no runtime"),
        pytest.param(2, id="at work"),
    ],
)
def test_a_worker_ends_when_its_channel_closes(num_messages: int, order_and_runtime: list[bytes]):
    """The engine's process may be gone for good, without a word."""
    child = Child("jpaged.compile.workers")
    for message in order_and_runtime[:num_messages]:
        send(child.sock, message)
    child.sock.close()
    assert child.exit_code(60) == 1


def test_worker_ends_after_an_invalid_message():
    child = Child("jpaged.compile.workers")
    send(child.sock, b"\xe9")
    assert b"UnicodeDecodeError" in (receive(child.sock) or b"")
    assert child.exit_code(60) == 1
    child.kill_and_close()


def test_output_of_imported_modules_goes_to_stderr(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    package = tmp_path / "jpaged"
    package.mkdir()
    (package / "__init__.py").write_text("import os; os.write(1, b'a banner\\n')")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    child = Child("jpaged.compile.workers", stderr=subprocess.PIPE)
    assert child.process.stderr is not None
    with child.process.stderr as errors:
        assert errors.readline() == b"a banner\n"
    child.kill_and_close()


def test_after_the_end_no_worker_is_started(start: Start):
    """A thread may come to it late."""
    with start.pool() as pool:
        pass
    assert not pool.start(start.runtime)
    assert names(pool.iter_compiled(start.recipes, start.runtime, untold)) == names(start.recipes)
    assert pool.processes == []


@pytest.mark.parametrize(
    ("platform", "processors", "reserved", "options", "has_gemm_record", "asked", "expected"),
    [
        ("gpu", 16, 126 * GIB, {"memory_fraction": 0.9}, True, None, 8),
        ("gpu", 16, 126 * GIB, "memory_fraction:0.9;preallocate:true", True, None, 8),
        ("gpu", 192, 126 * GIB, {"memory_fraction": 0.9}, True, None, 14),
        ("gpu", 192, 180 * GIB, {"memory_fraction": 0.9}, True, None, 16),
        ("gpu", 5, 126 * GIB, {"memory_fraction": 0.9}, True, None, 2),
        ("gpu", 16, 126 * GIB, {"memory_fraction": 0.9}, True, 0, 0),
        ("gpu", 16, 126 * GIB, {"memory_fraction": 0.9}, True, 3, 3),
        ("gpu", 16, 22 * GIB, {"memory_fraction": 0.9}, True, None, 2),
        ("gpu", 16, 126 * GIB, {"memory_fraction": 0.9}, False, None, 8),
        ("gpu", 16, 72 * GIB, {"memory_fraction": 0.9}, False, None, 4),
        ("gpu", 192, 126 * GIB, {"memory_fraction": 0.9}, False, None, 8),
        ("gpu", 16, 24 * GIB, {"memory_fraction": 1.0}, True, None, 0),
        ("gpu", 16, 24 * GIB, None, True, None, 0),
        ("gpu", 16, None, {"memory_fraction": 0.9}, True, None, 0),
        ("cpu", 16, None, {"memory_fraction": 0.9}, True, None, 0),
    ],
)
def test_number_of_workers_follows_cores_and_memory(
    platform: str,
    processors: int,
    reserved: int | None,
    options: Any,
    has_gemm_record: bool,
    asked: int | None,
    expected: int,
    monkeypatch: pytest.MonkeyPatch,
    client_options: Callable[[Any], None],
):
    client_options(options)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(processors))
    stats = {"bytes_limit": reserved} if reserved else None
    device = SimpleNamespace(platform=platform, memory_stats=lambda: stats)
    config = EngineConfig(num_compile_workers=asked)
    assert choose_num_workers(config, device, has_gemm_record=has_gemm_record) == expected


@pytest.fixture
def client_options(jax_settings: None) -> Callable[[Any], None]:
    return partial(jax.config.update, "jax_pjrt_client_create_options")


def orders_of(start: Start) -> list[CompileJob]:
    config = EngineConfig(num_compile_workers=2)
    device = jax.local_devices()[0]
    return make_compile_jobs(
        config, EMBEDDED_MODEL, FLOAT32, device, start.store, has_gemm_record=True
    )


def test_workers_compile_for_the_same_number_of_devices(start: Start):
    config, device = EngineConfig(tensor_parallel_size=2), jax.local_devices()[0]
    config = replace(config, num_compile_workers=2)
    jobs = make_compile_jobs(
        config, EMBEDDED_MODEL, FLOAT32, device, start.store, has_gemm_record=True
    )
    assert [job.num_devices for job in jobs] == [2, 2]


def test_disabled_cache_starts_no_worker(start: Start, monkeypatch: pytest.MonkeyPatch):
    assert len(orders_of(start)) == 2
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda *_: False)
        assert orders_of(start) == []
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", None)
        assert orders_of(start) == []
    with monkeypatch.context() as patch:
        patch.setattr(start, "store", None)
        assert orders_of(start) == []
    jax.config.update("jax_compilation_cache_dir", None)
    assert orders_of(start) == []


def test_worker_messages_are_json(start: Start):
    first, second = start.jobs
    assert (first.worker_index, second.worker_index, first.num_workers) == (0, 1, 2)
    for record in (replace(first, limits=start.runtime), start.runtime):
        assert from_json(to_json(record), type(record)) == record
