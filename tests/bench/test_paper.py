"""Test the figures of the PagedAttention paper and the command that makes them."""

import io
import itertools
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from matplotlib import image

import bench
from bench.paper import __main__ as cli
from bench.paper import (
    figures_ablation,
    figures_memory,
    figures_serving,
    measures,
    progress,
    published,
    report,
)
from bench.paper.measures import Case, Settings
from bench.paper.report import Figure, compared
from bench.paper.traces import TraceRequest


def run_figure(number: str, folder: Path) -> dict[str, Any]:
    """Make a figure by a quick simulation, check its picture, and return its JSON."""
    cli.main(["--figure", number, "--quick", "--processes", "1", "--out", str(folder)])
    (path,) = folder.glob("*.json")
    document = json.loads(path.read_text(encoding="utf-8"))
    assert document["benchmark"] == f"paper_{number}"
    assert document["settings"]["quick"]
    assert document["rows"]
    (picture,) = folder.glob("*.png")
    pixels = image.imread(picture)
    assert pixels.shape[1] > 400
    is_drawn = pixels[..., :3].min(axis=-1) < 0.9
    assert 0.02 < float(is_drawn.mean()) < 0.9, "the picture is neither empty nor covered"
    assert picture.stat().st_size < 150_000
    return document


def cells(document: dict[str, Any], *names: str) -> dict[Any, Any]:
    """Return a dict of the values in the column `ours`, one per row.

    A key is a tuple of the same row's values in the columns that `names` lists.
    """
    rows = document["rows"]
    found = {tuple(row[name] for name in names): row["ours"] for row in rows}
    assert len(found) == len(rows), f"several rows have the same {names}"
    return found


def rates(document: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Check each latency curve against the latency threshold. Return the sustained rates by panel
    and by system."""
    found = {}
    for panel in document["panels"]:
        for sustained in panel["systems"].values():
            latencies = dict(map(tuple, sustained["curve"]))
            assert latencies[sustained["rate"]] < sustained["threshold"]
            assert max(latencies.values()) >= sustained["threshold"], "the curve ends too early"
            assert len(latencies) >= 3
        systems = panel["systems"].items()
        found[panel["panel"]] = {name: sustained["rate"] for name, sustained in systems}
    return found


def test_table_1_matches_the_paper(tmp_path: Path):
    document = run_figure("table1", tmp_path)
    assert len(document["rows"]) == 6
    assert all(row["ratio"] == pytest.approx(1, rel=0.02) for row in document["rows"])
    assert document["device"] == "no device"


@pytest.mark.full
def test_figure_1_paging_holds_less_memory_per_request(tmp_path: Path):
    document = run_figure("1", tmp_path)
    by_system: dict[str, list[dict]] = {}
    for row in document["rows"]:
        assert 0 < row["batch"] <= row["seats"]
        by_system.setdefault(row["system"], []).append(row)
    most, ours = by_system["Orca (Max)"], by_system["jpaged"]
    for reserved, paged in zip(most, ours, strict=True):
        assert paged["KV memory held, %"] < 0.5 * reserved["KV memory held, %"]
        # Orca (Max) reserves 128 of 981 blocks for each request.
        held = 100 * 128 / 981 * reserved["batch"]
        assert reserved["KV memory held, %"] == pytest.approx(held, rel=0.1)
    assert ours[-1]["ours"] > 4 * ours[0]["ours"], "throughput grows with the batch"


def test_figure_2_memory_shares_add_up_to_at_most_100_percent(tmp_path: Path):
    shares = cells(run_figure("2", tmp_path), "lengths", "system", "share")
    systems = ["Orca (Max)", "Orca (Pow2)", "Orca (Oracle)", "jpaged"]
    names = list(figures_memory.SHARE_LABELS.values())
    for lengths, system in itertools.product(("sharegpt", "alpaca"), systems):
        assert 0 < sum(shares[lengths, system, name] for name in names) <= 100.001
    tokens = [shares["sharegpt", system, "token states"] for system in systems[:3]]
    assert tokens == sorted(tokens)
    internal = [shares["sharegpt", system, "internal fragmentation"] for system in systems]
    assert internal[0] > internal[1] > internal[2]
    assert max(internal[2:]) < 1, "reserved slots are filled"
    waste = {w: shares[w, "jpaged", "waste of held blocks"] for w in ("sharegpt", "alpaca")}
    assert 0 < waste["sharegpt"] <= figures_memory.MOST_WASTE_PERCENT < waste["alpaca"] < 15
    for lengths, share in waste.items():
        formula = shares[lengths, "jpaged", "the same by formula, half a block a sequence"]
        assert share == pytest.approx(formula, rel=0.25)


def test_figure_11_has_the_mean_lengths_of_the_paper(tmp_path: Path):
    rows = run_figure("11", tmp_path)["rows"]
    assert [row["ratio"] for row in rows] == pytest.approx([1.0] * 4, rel=0.12)
    assert all(row["median"] < row["ours"] for row in rows)


def test_measured_rates_are_stored_and_reused_with_the_same_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    found = measures.Sustained(2.0, 1.5, 2.5, 0.1, ((1.0, 0.05), (2.0, 0.09)), (1.8, None))
    asked: list[Case] = []
    monkeypatch.setattr(measures, "sustain", lambda case, settings: asked.append(case) or found)
    monkeypatch.setattr(measures, "_sustained", {})
    keep, cases = tmp_path / "kept.jsonl", [Case("alpaca"), Case("alpaca", "orca_max")]
    settings = Settings(how="measured", seeds=(0,), keep=keep)
    assert measures.sustain_all(cases[:1], settings) == {cases[0]: found}
    monkeypatch.setattr(measures, "_sustained", {})
    assert measures.sustain_all(cases, settings) == dict.fromkeys(cases, found)
    assert asked == cases
    measures.sustain_all(cases, Settings(how="measured", seeds=(1,), keep=keep))
    assert asked == 2 * cases


@pytest.mark.full
def test_figure_12_jpaged_sustains_the_highest_rate(tmp_path: Path):
    document = run_figure("12", tmp_path)
    for systems in rates(document).values():
        assert list(systems) == list(published.SYSTEMS)
        assert systems["ours"] >= 0.95 * max(systems.values())
        # With `--quick`, the search finds a sustained rate only to within a factor of 1.5.
        assert systems["fastertransformer"] <= 1.5 * min(systems.values())
        assert systems["orca_max"] <= systems["orca_oracle"]
    assert document["device"] == "simulated NVIDIA H200"
    rows = [row for row in document["rows"] if row["paper"] not in (None, published.PLOT_ONLY)]
    assert {row["system"] for row in rows} >= {"Orca (Max)", "Orca (Oracle)"}
    assert all(0.3 < row["ratio"] < 3 for row in rows)


@pytest.mark.full
def test_figure_13_paging_has_the_largest_batch(tmp_path: Path):
    document = run_figure("13", tmp_path)
    batches = cells(document, "lengths", "system")
    for lengths, paper in published.BATCHED.items():
        own = [batches[lengths, published.LABELS[system]] for system in paper]
        assert own == sorted(own)
        assert own[0] == pytest.approx(paper["orca_max"], rel=0.15), "15.7 K slots hold 7 of 2,048"
    for row in document["rows"]:
        rate = document["sustained"][row["lengths"]]["rate"]
        assert row["req/s"] == pytest.approx(document["fixed_fraction"] * rate, rel=1e-4)
        assert row["paper's req/s"] == published.BATCHED_RATE[row["lengths"]]


@pytest.mark.full
def test_figure_14_sharing_blocks_raises_the_rate(tmp_path: Path):
    found = rates(run_figure("14", tmp_path))
    assert {name.split(",")[0] for name in found} == {"parallel sampling", "beam search"}
    assert all(systems["ours"] > systems["orca_oracle"] for systems in found.values())


@pytest.mark.full
def test_figure_15_more_samples_save_more_memory(tmp_path: Path):
    saved = cells(run_figure("15", tmp_path), "lengths", "decoding", "width")
    for lengths, decoding in itertools.product(("sharegpt", "alpaca"), ("parallel", "beam")):
        assert saved[lengths, decoding, 2] < saved[lengths, decoding, 6] < 100
    for lengths, width in itertools.product(("sharegpt", "alpaca"), (2, 6)):
        assert saved[lengths, "beam", width] > saved[lengths, "parallel", width] > 0
    assert saved["alpaca", "parallel", 2] == pytest.approx(6.09, rel=0.4)


@pytest.mark.full
def test_figure_16_a_longer_prefix_raises_the_rate_more(tmp_path: Path):
    found = rates(run_figure("16", tmp_path))
    short, long = (systems["ours"] / systems["orca_oracle"] for systems in found.values())
    assert 1 < short < long


@pytest.mark.full
def test_figure_17_runs_with_and_without_a_prefix_cache(tmp_path: Path):
    (systems,) = rates(run_figure("17", tmp_path)).values()
    assert set(systems) == {*published.ORCAS, "ours", figures_serving.WITH_CACHE}
    assert systems["ours"] > max(systems[name] for name in published.ORCAS)


def test_figure_18a_compares_two_attention_kernels_or_says_not_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    document = run_figure("18a", tmp_path / "quick")
    assert document["device"] == "cpu"
    assert "as a smoke test" in document["notes"][0]
    for row in document["rows"]:
        assert min(row["paged us"], row["contiguous us"]) > 0
        overhead = 100 * (row["paged us"] / row["contiguous us"] - 1)
        assert row["ours"] == pytest.approx(overhead, rel=1e-3)
    monkeypatch.setattr(figures_ablation, "RESULTS", tmp_path / "none")
    cli.main(["--figure", "18a", "--out", str(tmp_path / "simulated")])
    assert "NOT MEASURED: this figure needs an NVIDIA GPU" in capsys.readouterr().out
    (path,) = (tmp_path / "simulated").iterdir()
    assert {row["ours"] for row in json.loads(path.read_text(encoding="utf-8"))["rows"]} == {None}


@pytest.mark.full
def test_figure_18b_large_blocks_waste_memory(tmp_path: Path):
    document = run_figure("18b", tmp_path)
    for lengths in ("sharegpt", "alpaca"):
        rows = [row for row in document["rows"] if row["lengths"] == lengths]
        assert [row["block size"] for row in rows] == [1, 16, 256]
        assert rows[0]["waste, %"] == 0
        assert rows[0]["waste, %"] < rows[1]["waste, %"] < rows[2]["waste, %"] < 100
        assert min(row["ratio"] for row in rows) == 1
        assert rows[2]["batch"] < rows[1]["batch"], "fewer fit"


def test_figures_19_compare_recomputation_and_swapping(tmp_path: Path):
    times = run_figure("19a", tmp_path / "a")
    for row in times["rows"]:
        both = row["recompute ms"], row["swap out + in ms"]
        assert row["ours"] == pytest.approx(both[0] / both[1], rel=1e-4)
        assert 1 < min(both) < max(both) < 10_000
    served = run_figure("19b", tmp_path / "b")
    for row in served["rows"]:
        ratio = row["recompute, s/token"] / row["swap, s/token"]
        assert row["ours"] == pytest.approx(ratio, rel=1e-4)
    assert any(row["recomputes"] > 0 and row["swaps"] > 0 for row in served["rows"])


def test_figure_all_makes_every_figure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    made: list[str] = []

    def make(number: str, settings: Settings) -> Figure:
        assert settings == Settings(processes=3, seconds=20.0, seeds=(4, 5))
        made.append(number)
        return Figure(number, "", [{"ours": 1}], {}, None)

    monkeypatch.setattr(cli, "make", make)
    options = ["--processes", "3", "--seconds", "20", "--seeds", "4,5", "--out", str(tmp_path)]
    cli.main(["--figure", "all", *options])
    listed = ["table1", "1", "2", *map(str, range(11, 18)), "18a", "18b", "19a", "19b"]
    assert made == listed
    assert len(list(tmp_path.glob("*.json"))) == len(listed)


def test_rate_search_on_a_device_starts_at_the_simulated_rate(monkeypatch: pytest.MonkeyPatch):
    served = []

    def run(case, rate, seed, settings, give_up_at):
        served.append((settings.how, rate))
        knee = 10.0 if settings.how == "simulated" else 10.4
        return SimpleNamespace(latency=rate / knee)

    monkeypatch.setattr(measures, "run", run)
    monkeypatch.setattr(measures, "saturate", lambda case, settings: SimpleNamespace(rate=30.0))
    monkeypatch.setattr(measures, "threshold_of", lambda case, settings: 1.0)
    settings = Settings(how="measured", seeds=(0, 1), tolerance=0.05, fractions=(0.5,))
    found = measures.sustain(Case("sharegpt"), settings)
    rates = [rate for how, rate in served if how == "measured"]
    assert found.rate == pytest.approx(10.4, rel=0.05)
    assert found.threshold == 1.0
    assert rates[0] == pytest.approx(10.0, rel=0.05)
    assert len(rates) <= 4 + 3 + 1


def test_each_system_is_measured_at_the_highest_request_rate_that_the_simulation_sustains(
    monkeypatch: pytest.MonkeyPatch,
):
    rates = {system: 1.0 + i for i, system in enumerate(published.SYSTEMS)}
    served = []

    def sustain_all(cases, settings):
        assert settings.how == "simulated"
        return {case: SimpleNamespace(rate=rates[case.system]) for case in cases}

    def run_cases(jobs, settings):
        ((case, rate),) = jobs
        served.append((settings.how, case.workload, case.system, rate))
        off = 1.2 if (settings.how, case.system) == ("measured", "orca_max") else 1.0
        return [SimpleNamespace(latency=off, output_tokens_per_s=2.0, batch=rate)]

    monkeypatch.setattr(figures_serving, "sustain_all", sustain_all)
    monkeypatch.setattr(figures_serving, "run_cases", run_cases)
    monkeypatch.setattr(figures_serving, "device_of", lambda settings: "a device")
    figure = figures_serving.knees_alpaca(Settings(how="measured"))
    for how in ("measured", "simulated"):
        cases = [("alpaca", system, rate) for system, rate in rates.items()]
        assert [case for run_how, *case in served if run_how == how] == [list(it) for it in cases]
    assert len(figure.rows) == 3 * len(rates)
    assert figure.number == "knees_alpaca"
    assert "the worst is 16.7%: NOT reached" in figure.notes[0]


@pytest.mark.parametrize(("knee", "guess"), [(10.0, 10.0), (10.0, 1.0), (3.0, 40.0), (9.99, 10.0)])
def test_search_finds_the_rate_at_the_latency_threshold_from_either_side(knee: float, guess: float):
    rate, tried = measures.search(lambda rate: rate / knee, 1.0, guess, 1.25, 0.02)
    assert knee / 1.02 <= rate < knee
    assert all(latency == at / knee for at, latency in tried.items())
    assert len(tried) < 25


def test_search_raises_if_the_latency_does_not_cross_the_threshold():
    with pytest.raises(ValueError, match="does not cross 1 s per token at rates around 2 "):
        measures.search(lambda rate: 0.5, 1.0, 2.0, 1.25, 0.02)


def test_measured_rate_exceeds_the_throughput_by_at_most_the_estimated_percentage():
    threshold, seconds = 0.5, 100.0

    # Requests have 10 tokens each, and are served in order of arrival, 5 requests per second.
    def latency_at(rate: float) -> float:
        num_waiting_at_end = seconds * (rate - 5)
        return (0.2 + max(num_waiting_at_end, 0) / 5 / 2) / 10

    rate, _ = measures.search(latency_at, threshold, 5.0, 1.25, 0.001)
    trace = [TraceRequest(0.0, 5, 10)] * 20
    excess = measures.most_excess(trace, threshold, seconds)
    assert measures.most_excess(trace, threshold, 5.0) == math.inf
    assert 0 < 100 * (rate / 5 - 1) <= excess
    assert excess == pytest.approx(100 * (rate / 5 - 1), rel=0.2)


@pytest.mark.parametrize(("threshold", "rate"), [(1.0, 3.0), (30.0, None), (0.01, None)])
def test_rate_where_latency_crosses_the_threshold_is_interpolated(
    threshold: float, rate: float | None
):
    curve = ((1.0, 0.1), (2.0, 0.1), (4.0, 10.0), (5.0, 20.0))
    assert measures.crossing(curve, threshold) == pytest.approx(rate)


def test_ratio_of_a_value_to_a_range_is_1_inside_the_range():
    assert compared(4.0, 3.0) == {"paper": "4", "ours": 3.0, "ratio": 0.75}
    assert compared((1.7, 2.7), 2.0)["ratio"] == 1.0
    assert compared((1.7, 2.7), 3.4)["ratio"] == pytest.approx(3.4 / 2.7)
    assert compared((1.7, 2.7), 0.85) == {"paper": "1.7 to 2.7", "ours": 0.85, "ratio": 0.5}
    assert compared((None, 22.0), 11.0) == {"paper": "up to 22", "ours": 11.0, "ratio": 1.0}
    assert compared(None, 5.0) == {"paper": published.PLOT_ONLY, "ours": 5.0, "ratio": None}
    assert compared((20.0, 26.0), None)["ratio"] is None


def test_infinite_and_nan_numbers_become_null_in_json(tmp_path: Path):
    rows = [{"ours": math.inf, "paper": math.nan}]
    figure = Figure("11", "t", rows, {"case": Case("chat")}, None)
    report.show(figure, out=tmp_path, pictures=True, facts={"how": "simulated"})
    (path,) = tmp_path.iterdir()
    document = json.loads(path.read_text(encoding="utf-8"), parse_constant=pytest.fail)
    assert document["rows"] == [{"ours": None, "paper": None}]
    assert document["case"]["workload"] == "chat"
    assert document["device"] == "no device"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--figure", "3"], r"--figure 3: unknown figure; pass some of all, table1, 1, 2, 11"),
        (["--figure", "12", "x"], r"--figure x: unknown figure"),
        (["--figrue", "12"], "error: unknown option --figrue: did you mean --figure\\?$"),
        (["--figure", "agreement"], "--figure agreement compares .*: add --device"),
        (["--figure", "knees_alpaca"], "--figure knees_alpaca compares .*: add --device"),
        ([], "required: --figure"),
        (["--figure", "2", "--simulate", "--device"], "not allowed with"),
        (["--figure", "2", "--seconds", "0"], "--seconds: must be a positive number, not '0'"),
        (["--figure", "2", "--seconds", "nan"], "--seconds: must be a positive number"),
        (["--figure", "2", "--seconds", "ten"], "--seconds: must be a positive number, not 'ten'"),
        (["--figure", "2", "--processes", "-1"], "--processes: must be an integer of at least 1"),
        (["--figure", "2", "--seeds", "1,x"], "--seeds: must be integers .* not '1,x'"),
        (["--figure", "2", "--seeds", "-1"], "--seeds"),
        (["--figure", "12", "--models", "7b"], "--models: invalid choice: '7b'"),
        (["--figure", "12", "--keep", "a"], "--keep a needs rates measured on a device"),
        (["--figure", "12", "--device", "--keep", "/absent/a"], "folder /absent; create it first"),
        (["--figure", "12", "--tolerance", "1"], "must be less than 1, not '1'"),
        (["--figure", "12", "--models", "66b", "--device"], "--device and --quick need 13b"),
        (["--figure", "2", "--alpaca", "/absent.jsonl"], "cannot read the trace file '/absent"),
    ],
)
def test_invalid_options_are_refused_before_any_run(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(cli, "make", lambda *_: pytest.fail("something ran"))
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    error = " ".join(capsys.readouterr().err.split())
    assert re.search(named, error), error


@pytest.mark.parametrize("script", ["paper", "serving"])
@pytest.mark.parametrize("package", ["aiohttp", "tabulate"])
def test_missing_bench_packages_give_a_one_line_error(script: str, package: str, tmp_path: Path):
    code = f"import sys; sys.modules[{package!r}] = None"
    (tmp_path / "sitecustomize.py").write_text(code, encoding="utf-8")
    root = str(Path(bench.__file__).parent.parent)
    done = subprocess.run(
        [sys.executable, "-m", f"bench.{script}", "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=root,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), root])},
    )
    message = f'error: the benchmarks need {package}: pip install "jpaged[bench]"\n'
    assert (done.returncode, done.stdout, done.stderr) == (1, "", message)


@pytest.mark.parametrize("num_processes", [1, 2])
def test_progress_counts_finished_runs(num_processes: int, capsys: pytest.CaptureFixture):
    settings = Settings(processes=num_processes)
    assert measures.run_all(math.sqrt, [9, 4, 1], settings, "roots") == [3, 2, 1]
    first, *_ = capsys.readouterr().err.splitlines()
    assert first == "roots: 0 of 3 after 0 s, no estimate yet"
    assert measures.run_all(math.sqrt, [9], settings, "roots") == [3]
    assert not capsys.readouterr().err
    with pytest.raises(ValueError, match="math domain"):
        measures.run_all(math.sqrt, [9, -1, 1], settings, "roots")


def test_progress_without_a_terminal_prints_lines_at_growing_intervals(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    now = 0
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now))
    with progress.Progress("runs", 30) as shown:
        for now in range(1, 61):
            shown.show(now // 4)
    assert capsys.readouterr().err.splitlines() == [
        "runs: 0 of 30 after 0 s, no estimate yet",
        "runs: 2 of 30 after 10 s, about 140 s left",
        "runs: 3 of 30 after 15 s, about 135 s left",
        "runs: 5 of 30 after 23 s, about 115 s left",
        "runs: 8 of 30 after 35 s, about 96 s left",
        "runs: 13 of 30 after 53 s, about 69 s left",
    ]


def test_progress_on_a_terminal_is_a_bar_with_an_estimate(monkeypatch: pytest.MonkeyPatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress.Progress("runs", 4) as shown:
        shown.show(2)
    assert "\n" not in terminal.getvalue().rstrip("\n")
    assert re.search(r"\rruns:  50%.* 2/4 \[00:\d\d<00:\d\d", terminal.getvalue())


def test_missing_matplotlib_error_names_the_extra(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit):
        cli.main(["--figure", "11", "--quick"])
    error = capsys.readouterr().err
    assert 'pip install "jpaged[bench]"' in error
    assert "--no-pictures" in error
