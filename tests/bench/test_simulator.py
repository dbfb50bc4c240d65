"""Test that the serving simulator conserves tokens and time under every allocator."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from bench.paper import traces
from bench.paper.allocators import SYSTEMS
from bench.paper.device_model import MODELS, Coefficients, DeviceModel
from bench.paper.simulator import Run, simulate
from bench.paper.traces import TraceRequest

STEP = 0.01
DEVICE = DeviceModel(
    "a hundredth of a second a step, and a millisecond a transfer",
    MODELS["opt-13b"],
    Coefficients(
        step=STEP,
        layer=0.0,
        bandwidth=math.inf,
        rate=math.inf,
        kv_bandwidth=math.inf,
        prefill_rate=math.inf,
        element=0.0,
        swap=1e-3,
        swap_bandwidth=math.inf,
    ),
)
SMALL: dict[str, Any] = {"max_num_seqs": 16, "max_num_batched_tokens": 256, "max_model_len": 256}


def make_trace(rate: float, seconds: float = 20.0, seed: int = 0) -> list[TraceRequest]:
    source = traces.log_normal("small", (20.0, 30.0), 128)
    return traces.poisson(source, rate, seconds, seed)


def num_tokens_once(run: Run, trace: list[TraceRequest], width: int, *, is_apart: bool) -> int:
    """Return how many tokens a run computes if it recomputes none. The last token of a sequence is
    never computed. The samples of a request share the prompt except its last token. With
    `is_apart`, each sample is a separate request, and the samples share nothing.
    """
    prompts = np.array([request.prompt_len for request in trace])
    outputs = np.array([request.output_len for request in trace])
    if is_apart:
        return int(np.sum(width * (prompts + outputs - 1)))
    return int(np.sum(prompts - 1 + width * outputs))


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{system: (system, {}) for system in SYSTEMS},
    "small blocks": ("ours", {"block_size": 1}),
    "swapped": ("ours", {"preemption": "swap"}),
    "samples": ("ours", {"num_samples": 3}),
    "samples swapped": ("ours", {"num_samples": 3, "preemption": "swap"}),
    "samples, orca": ("orca_oracle", {"num_samples": 3}),
    "beams, orca": ("orca_oracle", {"beam_width": 3}),
}


@pytest.mark.parametrize("name", CASES)
def test_simulation_conserves_tokens_and_time(name: str):
    system, options = CASES[name]
    width = options.get("num_samples") or options.get("beam_width") or 1
    trace = make_trace(60 / width, 5.0)
    run = simulate(trace, system, DEVICE, num_slots=512, **SMALL, **options)
    check_conserved(run, trace, width)
    once = num_tokens_once(run, trace, width, is_apart=system != "ours")
    assert run.num_computed_tokens - run.num_recomputed_tokens == once
    has_preempted = system == "ours" and "swap" not in options.values()
    # At this request rate, the pool is too small for the system "ours", so it preempts requests.
    assert (run.num_preemptions > 0) == (system == "ours")
    assert (run.num_recomputed_tokens > 0) == has_preempted
    assert (run.swapped_bytes > 0) == ("swap" in options.values())


def check_conserved(run: Run, trace: list[TraceRequest], width: int) -> None:
    outputs = np.array([r.output_len for r in trace])
    assert run.num_finished == run.num_requests == len(trace)
    assert run.num_output_tokens == width * outputs.sum()
    assert run.num_prompt_tokens == sum(r.prompt_len for r in trace)
    assert np.all(run.first_tokens >= run.arrivals + STEP)
    assert np.all(run.finishes - run.first_tokens >= STEP * (outputs - 1) - 1e-9)
    latencies = (run.finishes - run.arrivals) / outputs
    assert run.normalized_latency == pytest.approx(latencies.mean())
    assert run.seconds == pytest.approx(run.finishes.max() - trace[0].arrival)
    assert STEP * run.num_steps - 1e-9 <= run.busy_seconds <= run.seconds + 1e-9
    assert sum(run.memory.values()) == pytest.approx(100)
    assert min(run.memory.values()) >= 0
    assert 0 < run.memory_held <= 100 + 1e-9
    # By Little's law, the mean batch is at most (total time of all requests / busy time).
    most = (run.finishes - run.arrivals).sum() / run.busy_seconds
    assert 0 < run.mean_batch <= most + 1e-9


def test_simulated_beams_finish_and_share_blocks():
    trace = make_trace(3, 4)
    run = simulate(trace, "ours", DEVICE, num_slots=1024, beam_width=3, **SMALL)
    check_conserved(run, trace, 3)
    assert run.shared_savings > 20


def test_single_request_takes_one_step_per_prompt_chunk_and_token():
    trace = [TraceRequest(1.0, 300, 5), TraceRequest(9.0, 4, 1)]
    options: dict[str, Any] = SMALL | {"max_model_len": 512}
    run = simulate(trace, "ours", DEVICE, num_slots=1024, **options)
    # The first prompt takes two steps of at most 256 tokens; each further token takes one step.
    assert run.first_tokens == pytest.approx([1 + 2 * STEP, 9 + STEP])
    assert run.finishes == pytest.approx([1 + 6 * STEP, 9 + STEP])
    assert (run.num_steps, run.busy_seconds) == (7, pytest.approx(7 * STEP))
    assert run.normalized_latency == pytest.approx((6 * STEP / 5 + STEP) / 2)


@pytest.mark.parametrize("system", ["ours", "orca_max"])
def test_mean_kv_memory_use_ignores_idle_time(system: str):
    trace = [TraceRequest(at, 16, 193) for at in (0.0, 0.0, 1000.0)]
    options: dict[str, Any] = SMALL | {"max_num_seqs": 1, "num_slots": 512}
    run = simulate(trace, system, DEVICE, **options)
    if system == "orca_max":
        # The request reserves a range of 256 of the 512 slots.
        assert run.memory_held == pytest.approx(50)
        assert run.memory["free"] == pytest.approx(50)
    else:
        # A request takes one step of 16 tokens and 192 steps of one token. Meanwhile it holds 1 to
        # 13 of the 32 blocks.
        assert run.memory_held == pytest.approx(100 * 7 / 32, rel=0.1)
        assert run.memory_held == pytest.approx(100 - run.memory["free"])
    assert run.seconds > 1000


def test_arriving_request_waits_for_the_running_and_the_planned_step():
    trace = [TraceRequest(0.0, 4, 40), TraceRequest(0.101, 4, 2)]
    run = simulate(trace, "ours", DEVICE, num_slots=1024, **SMALL)
    # The second request arrives at 0.101 s. At this time a step runs, and the next step, from 0.11
    # s to 0.12 s, is planned already. So the step from 0.12 s to 0.13 s computes the prompt.
    assert run.first_tokens[1] == pytest.approx(0.13)


def test_step_waits_until_its_blocks_are_swapped_in():
    trace, options = make_trace(40, 5.0), {"num_slots": 512, "preemption": "swap", **SMALL}
    slow = replace(DEVICE, coefficients=replace(DEVICE.coefficients, swap=0.1))
    fast, late = (simulate(trace, "ours", device, **options) for device in (DEVICE, slow))
    assert late.num_preemptions > 0
    assert late.busy_seconds > fast.busy_seconds + 0.1 * late.num_preemptions / 2


def test_simulation_stops_early_only_above_the_latency_limit():
    trace = make_trace(60, 8)
    options: dict[str, Any] = {"num_slots": 512, **SMALL}
    whole = simulate(trace, "ours", DEVICE, **options)
    just = whole.normalized_latency
    assert not simulate(trace, "ours", DEVICE, give_up_at=1.001 * just, **options).gave_up
    early = simulate(trace, "ours", DEVICE, give_up_at=just / 2, **options)
    assert early.gave_up
    assert just / 2 < early.normalized_latency < just
    assert early.num_steps < whole.num_steps
    assert np.isnan(early.finishes).any()


def test_simulator_reuses_cached_prefixes_of_other_requests_and_of_earlier_chat_turns():
    shared = traces.with_prefix(make_trace(10, 5), 64)
    options: dict[str, Any] = {"num_slots": 4096, **SMALL, "max_model_len": 512}
    apart = simulate(shared, "ours", DEVICE, **options)
    run = simulate(shared, "ours", DEVICE, prefix_caching=True, **options)
    assert apart.num_hit_tokens == 0
    # Up to three requests arrive before the prefix is computed.
    assert run.num_hit_tokens >= 64 * (len(shared) - 3)
    assert run.num_computed_tokens == apart.num_computed_tokens - run.num_hit_tokens
    # The second prompt begins with the first prompt and its answer.
    rounds = [TraceRequest(0.0, 40, 30, ((0, 0, 40),)), TraceRequest(9.0, 90, 2, ((0, 0, 90),))]
    run = simulate(rounds, "ours", DEVICE, prefix_caching=True, **options)
    # 69 tokens are computed. Four full blocks of 16 tokens are cached.
    assert run.num_hit_tokens == 64


def test_systems_that_reserve_more_memory_run_smaller_batches():
    trace = make_trace(16, 8)
    batches = [
        simulate(trace, system, DEVICE, num_slots=1024, **SMALL).mean_batch_of_steps
        for system in SYSTEMS
    ]
    assert batches == sorted(batches)
    assert batches[1] <= 4  # The pool of 1,024 slots has room for four ranges of 256.


def test_simulator_refuses_unservable_traces_and_options():
    trace = make_trace(1)
    with pytest.raises(ValueError, match="trace is not in the order of arrival"):
        simulate(trace[::-1], "ours", DEVICE, num_slots=1024, **SMALL)
    with pytest.raises(ValueError, match="num_samples=2 and beam_width are both set"):
        simulate(trace, "ours", DEVICE, num_slots=1024, num_samples=2, beam_width=2, **SMALL)
    with pytest.raises(ValueError, match="the pool has 4: raise num_blocks"):
        simulate([TraceRequest(0.0, 60, 9)], "ours", DEVICE, num_slots=64, **SMALL)
