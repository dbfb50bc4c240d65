"""Test the headline benchmark, the contiguous decoder with a trace, and the cost of paging."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bench import headline, paging_cost
from bench.contiguous import BATCHINGS, Decoder, load
from bench.contiguous_steps import Model
from bench.headline import QUICK, Served, run_on_decoder, sustained, with_ratios
from bench.paper import traces
from bench.paper.measures import Settings
from bench.paper.traces import TraceRequest

DECODER: dict[str, Any] = {
    "max_len": 128,
    "max_batched_tokens": 64,
    "launch_steps": (1,),
    "arrivals": True,
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("tiny")
    small = {"model_type": "gpt2", "n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 128}
    (folder / "config.json").write_text(json.dumps(small | {"n_positions": 128}))
    return load(folder, load_format="dummy")[0]


@pytest.mark.parametrize("batching", ["static", "slabs"])
def test_contiguous_decoder_serves_the_requests_of_a_trace_as_they_arrive(
    batching: str, tiny: Model
):
    decoder = Decoder(tiny, batching, num_slots=2, **DECODER)
    decoder.generate([[1]], [2])  # compiles the programs
    trace = [TraceRequest(arrival, 3, 10) for arrival in (0.0, 0.01, 0.2)]
    start = time.monotonic()
    served = run_on_decoder(decoder, trace)
    took = time.monotonic() - start
    assert 0.2 < served.seconds <= took
    assert served.output_tokens_per_s == pytest.approx(30 / served.seconds)
    assert 0 < served.normalized_latency <= took / 10
    assert 0.5 < served.mean_batch <= 2
    assert not served.gave_up
    assert decoder.num_unfinished == 0


def test_contiguous_decoder_stops_a_run_early_above_the_latency_limit(tiny: Model):
    decoder = Decoder(tiny, "slabs", num_slots=1, **DECODER)
    trace = [TraceRequest(0.0, 3, 100) for _ in range(50)]
    served = run_on_decoder(decoder, trace, give_up_at=1e-5)
    assert served.gave_up
    assert served.normalized_latency > 1e-5
    assert decoder.num_unfinished == 0


def test_sustained_rate_is_the_rate_at_which_latency_exceeds_the_threshold():
    def serve(trace: Sequence[TraceRequest], give_up_at: float | None) -> Served:
        seconds = 20.0 if give_up_at is None else trace[-1].arrival
        rate = len(trace) / seconds
        # The latency jumps from 0.1 to 0.9 s per token at 10 requests per second.
        return Served(0.1 if rate < 10 else 0.9, 10 * rate, rate / 2, seconds, gave_up=rate >= 10)

    settings = Settings(seeds=(0, 1, 2), tolerance=0.02)
    sizes = headline.dataclasses.replace(QUICK, seconds=100.0)
    source = traces.of_dataset("alpaca")
    row = sustained(serve, source, sizes, 0.2, settings)
    assert 9 < row["lowest"] <= row["sustained_per_s"] <= row["highest"] < 11
    assert row["output_tokens_per_s"] == pytest.approx(20 * row["sequences"])
    assert row["threshold_s"] == 0.2


def test_interrupted_rate_search_reuses_recorded_runs(tmp_path: Path):
    served = []

    def serve(trace: Sequence[TraceRequest], limit: float | None) -> Served:
        served.append((trace, limit))
        return Served(float(len(served)), 1.0, 2.0, 3.0, gave_up=limit is not None)

    file, trace = tmp_path / "kept", [TraceRequest(0.5, 3, 10)]
    other = [TraceRequest(0.5, 3, 11)]
    first = headline.kept(serve, file, "ours")
    before = [first(trace, None), first(trace, 0.1), first(other, None), first(trace, None)]
    assert len(served) == 3
    again = headline.kept(serve, file, "ours")
    assert [again(trace, None), again(trace, 0.1), again(other, None)] == before[:3]
    assert len(served) == 3
    headline.kept(serve, file, "another system")(trace, None)
    assert len(served) == 4


def test_ratios_compare_systems_with_the_same_request_lengths():
    rows = [
        {"lengths": "sharegpt", "system": "ours", "sustained_per_s": 6.0},
        {"lengths": "sharegpt", "system": "orca_max", "sustained_per_s": 2.0},
        {"lengths": "alpaca", "system": "orca_max", "sustained_per_s": 3.0},
    ]
    found = with_ratios(rows)
    assert [row["ours_over_it"] for row in found] == [1.0, 3.0, None]
    assert [row["to_reach"] for row in found] == [None, 2.7, None]


def test_paging_cost_is_relative_to_the_faster_of_two_contiguous_decoders():
    seconds = {("A", "engine"): [3.3, 3.0], ("A", "static"): [4.0], ("A", "slabs"): [3.0]}
    answers = {("A", "engine"): [[1, 2], [3]], ("A", "slabs"): [[1, 2], [4]], ("A", "static"): []}
    row = paging_cost.row_of("embedded", "A", seconds, answers)
    assert row["faster_batching"] == "slabs"
    assert row["paging_costs"] == pytest.approx(0.05)
    assert row["same_answers"] == 0.5
    assert (row["engine_slowest_s"], row["engine_fastest_s"]) == (3.3, 3.0)


@pytest.mark.full
def test_engine_and_contiguous_decoder_give_the_same_answers():
    setting = paging_cost.Setting("embedded", ("A",), 0.01, repeats=1, num_seqs=4, max_len=256)
    found = [paging_cost.time_system(name, setting)["A"] for name in ("engine", *BATCHINGS)]
    assert all(times.answers == found[0].answers for times in found)
    assert [len(times.seconds) for times in found] == [1, 1, 1]  # without the first run (warm-up)


@pytest.mark.parametrize("case", paging_cost.CASES)
def test_requests_of_a_benchmark_case_have_at_most_max_len_tokens(case: str):
    work = paging_cost.work_of(case, 0.1, 100, 512, seed=0)
    assert len(work.prompts) == len(work.outputs) > 0
    pairs = zip(work.prompts, work.outputs, strict=True)
    assert all(len(prompt) + output <= 512 and output >= 1 for prompt, output in pairs)


def test_other_systems_cannot_be_measured_before_jpaged_sets_the_latency_threshold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    given = ["--quick", "--system", "orca_max", "--lengths", "alpaca", "--output", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["headline", *given])
    with pytest.raises(SystemExit):
        headline.main()
    assert "--system ours first" in capsys.readouterr().err
