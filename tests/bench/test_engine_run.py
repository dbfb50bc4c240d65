"""The paper's allocators under the real engine: the same tokens, and traces in real time."""

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.paper import traces
from bench.paper.engine_run import EngineWorkload, Server, make_server, run_on_engine
from bench.paper.traces import TraceRequest
from jpaged import Engine, SamplingParams

# As the end-to-end tests' engines, so that all share compiled programs.
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


@pytest.mark.parametrize("system", ["orca_oracle", "fastertransformer"])
def test_contiguous_ranges_give_the_same_tokens(
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
def test_a_trace_in_real_time(system: str, options: dict[str, Any], servers: Callable[..., Server]):
    server = servers(system)
    trace, width = make_trace(60, 0.4), sum(options.values()) or 1
    run = run_on_engine(server, trace, **options)
    outputs = np.array([request.output_len for request in trace])
    assert run.num_finished == len(trace) > 10
    assert run.num_output_tokens == width * outputs.sum()
    prompts = sum(request.prompt_len for request in trace)
    if not options:
        once = prompts + outputs.sum() - len(trace)
        assert run.num_computed_tokens - run.num_recomputed_tokens == once
    assert np.all(run.arrivals <= run.first_tokens)
    assert np.all(run.first_tokens <= run.finishes)
    latencies = (run.finishes - run.arrivals) / outputs
    assert run.normalized_latency == pytest.approx(latencies.mean())
    assert sum(run.memory.values()) == pytest.approx(100)
    assert (run.shared_savings > 0) == (width > 1)
    assert server.engine.stats().num_free_blocks == NUM_BLOCKS


def test_giving_up_leaves_the_server_idle(servers: Callable[..., Server]):
    server, trace = servers("orca_oracle"), make_trace(60, 0.4)
    run = run_on_engine(server, trace, give_up_at=1e-6)
    assert run.gave_up
    assert run.normalized_latency > 1e-6
    assert server.engine.stats().num_free_blocks == NUM_BLOCKS
    assert run_on_engine(server, trace[:3]).num_finished == 3


def test_a_conversation_goes_on_with_what_was_answered(servers: Callable[..., Server]):
    rounds = [TraceRequest(0.0, 40, 30, ((0, 0, 40),)), TraceRequest(0.5, 90, 2, ((0, 0, 90),))]
    work = EngineWorkload(rounds, "ours", 1, None, 256)
    before = work.prompt(1)
    work.note_answer(0, 0, [7, 8])
    work.note_answer(0, 2, [9])
    assert work.prompt(1) == [*before[:40], 7, 8, 9, *before[43:]]
    assert work.prompt(0) == before[:40]
    run = run_on_engine(servers("ours", prefix_caching=True), rounds)
    assert run.num_hit_tokens == 64  # of 69 computed: four blocks of 16
