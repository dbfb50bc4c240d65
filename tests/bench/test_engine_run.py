"""Test the paper's allocators in the real engine, and compare its runs with the simulator."""

import dataclasses
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.paper import engine_run, traces
from bench.paper.device_model import device_model
from bench.paper.engine_run import EngineWorkload, Server, make_server, run_on_engine
from bench.paper.simulator import Padding, simulate
from bench.paper.traces import TraceRequest
from jpaged import Engine, SamplingParams
from jpaged.config import EngineConfig
from jpaged.core.plan import StepPlan
from jpaged.engine.startup import EngineParts, build_parts
from jpaged.runtime.buckets import make_buckets

# These are the options of the end-to-end tests, so that all tests share the compiled programs.
SMALL: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 256}
NUM_BLOCKS = 128


@pytest.fixture(scope="module")
def servers(compilation_cache: Path) -> Callable[..., Server]:
    def make(system: str, **options: Any) -> Server:
        options |= {"compilation_cache_dir": compilation_cache, **SMALL}
        return make_server(system, num_slots=16 * NUM_BLOCKS, **options)

    return lru_cache(make)


def make_trace(rate: float, seconds: float) -> list[TraceRequest]:
    return traces.poisson(traces.log_normal("small", (20.0, 10.0), 64), rate, seconds, 0)


@pytest.mark.full
@pytest.mark.parametrize("system", ["orca_oracle", "fastertransformer"])
def test_engine_generates_the_same_tokens_with_contiguous_allocators(
    system: str, servers: Callable[..., Server], kept_engines: Callable[..., Engine]
):
    rng = np.random.RandomState(0)
    prompts = [rng.randint(0, 256, n).tolist() for n in (1, 5, 16, 17, 40, 70, 100, 3, 9, 33)]
    params = [SamplingParams(temperature=0.0, max_tokens=4 + 3 * i) for i in range(len(prompts))]
    expected = kept_engines(None, num_blocks=1 + NUM_BLOCKS, **SMALL).generate(prompts, params)
    engine = servers(system).engine
    for prompt, each in zip(prompts[:3], params, strict=False):
        engine.add_request(prompt, each)
    engine.step()
    for info in engine.block_tables():
        first = info.block_table[0]
        assert info.block_table == tuple(range(first, first + len(info.block_table)))
    engine.check_integrity()
    engine.abort_all()
    outputs = engine.generate(prompts, params)
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in expected]
    engine.check_integrity()
    assert engine.stats().num_free_blocks == NUM_BLOCKS


@pytest.mark.parametrize(
    ("system", "options"),
    [("ours", {}), ("orca_oracle", {}), ("ours", {"num_samples": 2}), ("ours", {"beam_width": 2})],
    ids=str,
)
def test_engine_serves_a_trace_in_real_time(
    system: str, options: dict[str, Any], servers: Callable[..., Server]
):
    server = servers(system)
    trace, width = make_trace(60, 0.4), sum(options.values()) or 1
    run = run_on_engine(server, trace, **options)
    outputs = np.array([request.output_len for request in trace])
    assert run.num_finished == len(trace) > 10
    assert run.num_output_tokens == width * outputs.sum()
    if not options:
        once = sum(request.prompt_len for request in trace) + outputs.sum() - len(trace)
        assert run.num_computed_tokens - run.num_recomputed_tokens == once
    assert np.all(run.arrivals <= run.first_tokens)
    assert np.all(run.first_tokens <= run.finishes)
    latencies = (run.finishes - run.arrivals) / outputs
    assert run.normalized_latency == pytest.approx(latencies.mean())
    assert sum(run.memory.values()) == pytest.approx(100)
    assert (run.shared_savings > 0) == (width > 1)
    assert server.engine.stats().num_free_blocks == NUM_BLOCKS


class Clock:
    """Replace the module `time` by a clock that advances only while the engine waits or sleeps."""

    def __init__(self, start: float):
        self.now = start

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += max(seconds, 1e-9)  # Time must advance even if the sleep takes 0 s.


class ModelledRunner:
    """A model runner whose steps take, on a `Clock`, the time that the device model predicts."""

    def __init__(self, runner: Any, clock: Clock):
        self._runner, self._clock, self._free = runner, clock, 0.0
        limits = SMALL["max_num_seqs"], SMALL["max_num_batched_tokens"]
        self._padding = Padding(make_buckets(*limits, few_programs=True))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def launch(self, plan: StepPlan, sampling: Any) -> Any:
        handle = self._runner.launch(plan, sampling)
        seconds = DEVICE.step_seconds(self._padding.work_of(plan)) if plan.scheduled else 0.0
        self._free = max(self._free, self._clock.now) + seconds
        return ModelledHandle(handle, self._clock, self._free)


class ModelledHandle:
    def __init__(self, handle: Any, clock: Clock, end: float):
        self.plan, self.faults, self._handle = handle.plan, handle.faults, handle
        self._clock, self._end = clock, end

    def read(self) -> Any:
        self._clock.now = max(self._clock.now, self._end)
        return self._handle.read()


DEVICE = device_model("opt-13b")


FULL = [pytest.param(it, marks=pytest.mark.full) for it in ("orca_oracle", "fastertransformer")]


@pytest.mark.parametrize("system", ["ours", *FULL])
def test_simulator_and_engine_have_the_same_request_times(
    system: str, compilation_cache: Path, monkeypatch: pytest.MonkeyPatch
):
    """The engine and the simulator serve the same trace with the same step times.

    The host's work takes no time in either.
    """
    clock = Clock(time.monotonic())

    def build_modelled(config: EngineConfig) -> EngineParts:
        """Return `EngineParts` with a scheduler that uses only 20 blocks of the pool."""
        parts = build_parts(config)
        few = dataclasses.replace(parts.runtime_config, num_blocks=21)
        runner = ModelledRunner(parts.runner, clock)
        return dataclasses.replace(parts, runner=runner, runtime_config=few)

    monkeypatch.setattr(engine_run, "build_parts", build_modelled)
    options = {"compilation_cache_dir": compilation_cache, **SMALL}
    server = make_server(system, num_slots=16 * NUM_BLOCKS, **options)
    trace = make_trace(70, 0.8)
    with monkeypatch.context() as patched:
        patched.setattr(time, "monotonic", clock.monotonic)
        patched.setattr(time, "sleep", clock.sleep)
        real = run_on_engine(server, trace)
    simulated = simulate(trace, system, DEVICE, num_slots=320, **SMALL)
    for name in ("first_tokens", "finishes"):
        times = getattr(real, name), getattr(simulated, name)
        np.testing.assert_allclose(*times, rtol=0, atol=1e-6, err_msg=name)
    for name in ("num_steps", "num_computed_tokens", "num_preemptions", "num_output_tokens"):
        assert getattr(real, name) == getattr(simulated, name), name
    assert real.mean_batch == pytest.approx(simulated.mean_batch, rel=0.05)
    assert real.memory == pytest.approx(simulated.memory, abs=3)


def test_server_is_idle_after_a_run_that_stops_early(servers: Callable[..., Server]):
    server, trace = servers("orca_oracle"), make_trace(60, 0.4)
    run = run_on_engine(server, trace, give_up_at=1e-6)
    assert run.gave_up
    assert run.normalized_latency > 1e-6
    assert server.engine.stats().num_free_blocks == NUM_BLOCKS
    assert run_on_engine(server, trace[:3]).num_finished == 3


def test_prompt_of_the_next_conversation_round_contains_the_previous_answer(
    servers: Callable[..., Server],
):
    rounds = [TraceRequest(0.0, 40, 30, ((0, 0, 40),)), TraceRequest(2.0, 90, 2, ((0, 0, 90),))]
    work = EngineWorkload(rounds, "ours", 1, None, 256)
    before = work.prompt(1)
    work.note_answer(0, 0, [7, 8])
    work.note_answer(0, 2, [9])
    assert work.prompt(1) == [*before[:40], 7, 8, 9, *before[43:]]
    assert work.prompt(0) == before[:40]
    run = run_on_engine(servers("ours", prefix_caching=True), rounds)
    # 69 tokens are computed. Four full blocks of 16 tokens are cached.
    assert run.num_hit_tokens == 64
