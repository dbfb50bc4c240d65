"""Test compile workers: their jobs, failures, messages and exits."""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from start_helpers import FLOAT32, Start, names

from jpaged import processes
from jpaged.compile.workers import (
    CompileJob,
    CompilePool,
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


def ignore_progress(*_: int) -> None:
    pass


def compile_all(pool: CompilePool, start: Start) -> list[str]:
    """Return the sorted names of the programs that the workers or this process compiled."""
    return names(pool.iter_compiled(start.recipes, start.runtime, ignore_progress))


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


def start_unsized(pool, limits):  # as on a GPU, where the KV pool is sized during the start
    events.update(["start"])
    return start(pool, replace(limits, num_blocks=0))


start, CompilePool.start = CompilePool.start, start_unsized
compilation.is_autotuned = lambda *_: False  # as on a GPU
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


def start_engine(folder: Path) -> tuple[list[Any], str]:
    """Start an engine with workers in a new process, and return what it printed and logged."""
    model, cache = folder / "model", folder / "cache"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(ONE_LAYER), encoding="utf-8")
    ended = subprocess.run(
        [sys.executable, "-c", ENGINE_START, str(cache), str(model)],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    return json.loads(ended.stdout), ended.stderr


def check_first_start(folder: Path) -> tuple[list[int], int]:
    """Start an engine, and check that its compile workers compiled all programs of the engine.

    Return the generated tokens, and the number of programs in JAX's cache.
    """
    (tokens, starts, hits, misses), log = start_engine(folder)
    (total,) = {int(n) for n in re.findall(r"compiled (\d+) of \1 programs", log)}
    assert (starts, hits) == (1, total)
    assert "worker failed" not in log
    return tokens, total + misses


def test_engine_finds_programs_that_workers_compiled(tmp_path: Path):
    check_first_start(tmp_path)


@pytest.mark.full
def test_second_start_finds_all_programs_and_starts_no_worker(tmp_path: Path):
    tokens, num_programs = check_first_start(tmp_path)
    assert start_engine(tmp_path)[0] == [tokens, 0, num_programs, 0]


def test_worker_with_another_digest_of_the_code_compiles_nothing(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Only the test process adds type checks to jpaged's functions, so the workers have another
    digest of the code.

    Also, the path of the checkpoint is not valid UTF-8, and the workers write ASCII output.
    """
    folder = tmp_path / "modèle-caf\udce9"
    folder.mkdir()
    shutil.copy(EMBEDDED_MODEL / "config.json", folder)
    start.jobs = [replace(job, folder=str(folder)) for job in start.jobs]
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    with start.pool() as pool:
        assert pool.start(start.runtime)
        assert compile_all(pool, start) == names(start.recipes)
    # Both workers report that their code differs from the engine's code. A worker compares the
    # code only after it has read the checkpoint's config.json.
    assert sum("code, settings or device memory" in line for line in start.said) == 2
    assert not any(start.store.has(recipe.key) for recipe in start.recipes)


def test_engine_compiles_the_programs_of_a_killed_worker(start: Start):
    with start.pool() as pool:
        pool.start(start.runtime)
        for child in pool.processes:
            child.kill()
        assert compile_all(pool, start) == names(start.recipes)


def raise_no_thread(_: object) -> None:
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [(sys, "executable", "/nowhere/python"), (threading.Thread, "start", raise_no_thread)],
    ids=["no process", "no thread"],
)
def test_engine_compiles_all_programs_if_no_worker_can_start(
    owner: Any, name: str, value: Any, start: Start, monkeypatch: pytest.MonkeyPatch
):
    descriptors = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(owner, name, value)
    with start.pool() as pool:
        assert not pool.start(start.runtime)
        assert compile_all(pool, start) == names(start.recipes)
    (said,) = start.said
    assert "a compile worker could not be started" in said
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
    """Replace the compile workers by fake processes, one for each list in `arguments`.

    A list contains the command-line arguments of its process. The first argument is the message to
    send, as hexadecimal text. With "waits" as the second argument, the process runs until its
    channel closes; otherwise it exits.
    """
    left = iter(arguments)

    def command(module: str, channel: int) -> list[str]:
        return [sys.executable, "-c", FAKE_WORKER, str(channel), *next(left)]

    monkeypatch.setattr(processes, "child_command", command)


def test_programs_reported_before_a_worker_failed_are_not_compiled_again(
    start: Start, monkeypatch: pytest.MonkeyPatch
):
    done = [repr(recipe.name) for recipe in start.recipes[:2]]
    sent = b"".join(frame_message(to_json({"compiled": name})) for name in done)
    truncated = frame_message(to_json({"compiled": "cut"}))[:-3]
    sent += frame_message(to_json({"level": "info"})) + truncated
    counts: list[int] = []
    start_fakes(monkeypatch, [sent.hex()], [sent.hex()])
    with start.pool() as pool:
        found = [*pool.iter_compiled(start.recipes, start.runtime, lambda n, _: counts.append(n))]
    assert [repr(recipe.name) for recipe in found[:2]] == done
    assert names(found) == names(start.recipes)
    assert counts == [*range(1, len(found) + 1)]


def test_engine_does_not_wait_for_the_programs_of_an_ended_worker(
    start: Start, monkeypatch: pytest.MonkeyPatch
):
    """The first worker ends immediately. The second worker runs and never sends a message."""
    start_fakes(monkeypatch, [""], ["", "waits"])
    first = select_worker_recipes(start.recipes, 0, 2)
    with start.pool() as pool:
        pool.start(start.runtime)
        found = pool.iter_compiled(start.recipes, start.runtime, ignore_progress)
        assert names(next(found) for _ in first) == names(first)


@pytest.fixture(scope="module")
def job_and_limits(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    script = Path(__file__).parent.with_name("start_helpers.py")
    output = subprocess.check_output([sys.executable, script, tmp_path_factory.mktemp("cache")])
    return output.splitlines()


@pytest.mark.parametrize(
    "num_messages",
    [
        pytest.param(0, id="without a job"),
        pytest.param(1, marks=pytest.mark.full, id="without limits"),
        pytest.param(2, id="while it compiles"),
    ],
)
def test_worker_ends_when_its_channel_closes(num_messages: int, job_and_limits: list[bytes]):
    child = Child("jpaged.compile.workers")
    for message in job_and_limits[:num_messages]:
        send(child.sock, message)
    child.sock.close()
    assert child.exit_code(60) == 1


def test_worker_ends_after_an_invalid_message():
    child = Child("jpaged.compile.workers")
    send(child.sock, b"\xe9")
    assert b"UnicodeDecodeError" in (receive(child.sock) or b"")
    assert child.exit_code(60) == 1
    child.kill_and_close()


def test_stdout_of_modules_that_a_worker_imports_goes_to_stderr(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    package = tmp_path / "jpaged"
    package.mkdir()
    (package / "__init__.py").write_text("import os; os.write(1, b'a banner\\n')")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    child = Child("jpaged.compile.workers", stderr=subprocess.PIPE)
    assert child.process.stderr is not None
    with child.process.stderr as errors:
        assert errors.readline() == b"a banner\n"
    child.kill_and_close()


def test_closed_pool_of_compile_workers_starts_no_worker(start: Start):
    """Another thread computes the size of the KV pool, and then calls `CompilePool.start`. By then,
    the pool of compile workers may be closed."""
    with start.pool() as pool:
        pass
    assert not pool.start(start.runtime)
    assert compile_all(pool, start) == names(start.recipes)
    assert pool.processes == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 8),
        ({"client_options": "memory_fraction:0.9;preallocate:true"}, 8),
        ({"cores": 192}, 14),
        ({"cores": 192, "reserved": 180 * GIB}, 16),
        ({"cores": 5}, 2),
        ({"num_compile_workers": 0}, 0),
        ({"num_compile_workers": 3}, 3),
        ({"reserved": 22 * GIB}, 2),
        ({"has_gemm_record": False}, 8),
        ({"has_gemm_record": False, "reserved": 72 * GIB}, 4),
        ({"has_gemm_record": False, "cores": 192}, 8),
        ({"client_options": {"memory_fraction": 1.0}, "reserved": 24 * GIB}, 0),
        ({"client_options": None, "reserved": 24 * GIB}, 0),
        ({"reserved": None}, 0),
        ({"platform": "cpu", "reserved": None}, 0),
    ],
)
@pytest.mark.usefixtures("jax_settings")
def test_number_of_workers_follows_cores_and_memory(
    changes: dict[str, Any], expected: int, monkeypatch: pytest.MonkeyPatch
):
    facts: dict[str, Any] = {
        "platform": "gpu",
        "cores": 16,
        "reserved": 126 * GIB,
        "client_options": {"memory_fraction": 0.9},
        "num_compile_workers": None,
        "has_gemm_record": True,
    }
    facts |= changes
    jax.config.update("jax_pjrt_client_create_options", facts["client_options"])
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(facts["cores"]))
    stats = facts["reserved"] and {"bytes_limit": facts["reserved"]}
    device = SimpleNamespace(platform=facts["platform"], memory_stats=lambda: stats)
    config = EngineConfig(num_compile_workers=facts["num_compile_workers"])
    found = choose_num_workers(config, device, has_gemm_record=facts["has_gemm_record"])
    assert found == expected


def make_jobs(start: Start, **options: Any) -> list[CompileJob]:
    config, device = EngineConfig(num_compile_workers=2, **options), jax.local_devices()[0]
    return make_compile_jobs(
        config, EMBEDDED_MODEL, FLOAT32, device, start.store, has_gemm_record=True
    )


def test_worker_jobs_use_the_tensor_parallel_size_of_the_engine(start: Start):
    assert [job.num_devices for job in make_jobs(start, tensor_parallel_size=2)] == [2, 2]


def test_disabled_cache_starts_no_worker(start: Start, monkeypatch: pytest.MonkeyPatch):
    assert len(make_jobs(start)) == 2
    for owner, name, value in (
        (os, "access", lambda *_: False),
        (sys, "executable", None),
        (start, "store", None),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            assert make_jobs(start) == []
    jax.config.update("jax_compilation_cache_dir", None)
    assert make_jobs(start) == []


def test_worker_messages_are_json(start: Start):
    first, second = start.jobs
    assert (first.worker_index, second.worker_index, first.num_workers) == (0, 1, 2)
    for record in (replace(first, limits=start.runtime), start.runtime):
        assert from_json(to_json(record), type(record)) == record
