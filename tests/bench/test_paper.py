"""Every figure of the paper runs from the command line, and what it prints can be true."""

import json
import math
import re
import sys
from pathlib import Path

import pytest

from bench.paper import __main__ as cli
from bench.paper import measures, published, report
from bench.paper.measures import Case, Settings
from bench.paper.report import Figure, compared

QUICK = Settings(quick=True, processes=1, **cli.QUICK)


@pytest.mark.parametrize(("knee", "guess"), [(10.0, 10.0), (10.0, 1.0), (3.0, 40.0), (9.99, 10.0)])
def test_the_search_finds_the_knee_from_either_side(knee: float, guess: float):
    rate, tried = measures.search(lambda rate: rate / knee, 1.0, guess, 1.25, 0.02)
    assert knee / 1.02 <= rate < knee
    assert all(latency == at / knee for at, latency in tried.items())
    assert len(tried) < 25


def test_a_latency_that_never_crosses_is_said():
    with pytest.raises(ValueError, match="never crosses 1 s a token, from 2/s"):
        measures.search(lambda rate: 0.5, 1.0, 2.0, 1.25, 0.02)


def test_crossings_are_read_between_points():
    curve = ((1.0, 0.1), (2.0, 0.1), (4.0, 10.0), (5.0, 20.0))
    assert measures.crossing(curve, 1.0) == pytest.approx(3.0)
    assert measures.crossing(curve, 30.0) is None
    assert measures.crossing(curve, 0.01) is None


def test_ratios_to_ranges_are_one_inside():
    assert compared(4.0, 3.0) == {"paper": "4", "ours": 3.0, "ratio": 0.75}
    assert compared((1.7, 2.7), 2.0)["ratio"] == 1.0
    assert compared((1.7, 2.7), 3.4)["ratio"] == pytest.approx(3.4 / 2.7)
    assert compared((1.7, 2.7), 0.85) == {"paper": "1.7 to 2.7", "ours": 0.85, "ratio": 0.5}
    assert compared((None, 22.0), 11.0) == {"paper": "up to 22", "ours": 11.0, "ratio": 1.0}
    assert compared(None, 5.0) == {"paper": published.PLOT_ONLY, "ours": 5.0, "ratio": None}
    assert compared((20.0, 26.0), None)["ratio"] is None


def test_json_has_no_number_that_json_lacks(tmp_path: Path):
    figure = Figure(
        "11", "t", [{"ours": math.inf, "paper": math.nan}], {"case": Case("chat")}, None
    )
    report.show(figure, out=tmp_path, pictures=True, facts={"how": "simulated"})
    (path,) = tmp_path.iterdir()
    document = json.loads(path.read_text(encoding="utf-8"), parse_constant=pytest.fail)
    assert document["rows"] == [{"ours": None, "paper": None}]
    assert document["case"]["workload"] == "chat"
    assert document["device"] == "no device"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--figure", "3"], r"--figure 3: not a figure; give of all, table1, 1, 2, 11"),
        (["--figure", "12", "x"], r"--figure x: not a figure"),
        ([], "required: --figure"),
        (["--figure", "2", "--simulate", "--device"], "not allowed with"),
        (["--figure", "2", "--seconds", "0"], "--seconds: must be a positive number .* not '0'"),
        (["--figure", "2", "--seconds", "nan"], "--seconds: must be a positive number"),
        (["--figure", "2", "--seconds", "ten"], "--seconds: must be a positive number .* 'ten'"),
        (["--figure", "2", "--processes", "-1"], "--processes: must be an integer of at least 1"),
        (["--figure", "2", "--seeds", "1,x"], "--seeds: must be integers .* not '1,x'"),
        (["--figure", "2", "--seeds", "-1"], "--seeds"),
        (["--figure", "2", "--alpaca", "/absent.jsonl"], "cannot read the trace file '/absent"),
    ],
)
def test_mistakes_are_named_before_anything_runs(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(cli, "make", lambda *_: pytest.fail("something ran"))
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    error = " ".join(capsys.readouterr().err.split())
    assert re.search(named, error), error


def test_without_matplotlib_the_remedy_is_told(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit):
        cli.main(["--figure", "11", "--quick"])
    error = capsys.readouterr().err
    assert 'pip install "jpaged[bench]"' in error
    assert "--no-pictures" in error
