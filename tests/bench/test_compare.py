"""Test the comparison of two runs of a benchmark."""

import argparse
import json
import sys
from pathlib import Path

import pytest

from bench.compare import compare, parse_arguments
from bench.records import record


def document(*rows: dict, benchmark: str = "latency") -> dict:
    return {"benchmark": benchmark, "device": "a chip", "rows": list(rows)}


def row(case: str, ms: float, **more: object) -> dict:
    return {"case": case, "model": "m", "ms": ms, "vllm": 1.0, "reached": True, **more}


def test_compared_rows_are_matched_by_name_and_large_changes_are_marked():
    lines = compare(document(row("C", 2.0), row("D", 4.0)), document(row("D", 4.1), row("C", 3.0)))
    assert [(x["row"], x["figure"], x["before"], x["after"]) for x in lines] == [
        ("C, m", "ms", 2.0, 3.0),
        ("D, m", "ms", 4.0, 4.1),
    ]
    assert [x["ratio"] for x in lines] == pytest.approx([1.5, 1.025])
    assert [x["changed"] for x in lines] == ["+50.0%", ""]
    assert [x["changed"] for x in compare(document(row("D", 4.0)), document(row("D", 4.1)), 0.01)]


def test_rows_with_different_settings_are_not_compared_with_each_other():
    rows = [row("C", 1.0, batch=1), row("C", 2.0, batch=8)]
    lines = compare(document(*rows), document(*rows[::-1]))
    assert [x["row"] for x in lines] == ["C, m, batch 1", "C, m, batch 8"]
    assert [x["changed"] for x in lines] == ["", ""]


def test_rows_with_equal_names_are_matched_in_order_and_missing_rows_are_shown():
    lines = compare(document(row("C", 1.0), row("C", 0.0)), document(row("C", 1.0)))
    assert [(x["row"], x["after"], x["changed"]) for x in lines] == [
        ("C, m", 1.0, ""),
        ("C, m #2", None, "gone"),
    ]
    (line,) = compare(document(row("C", 0.0)), document(row("C", 1.0)))
    assert (line["ratio"], line["changed"]) == (None, "from 0")


def test_compared_rows_may_be_from_different_commits():
    before, after = document(row("C", 1.0, commit="a")), document(row("C", 2.0, commit="b"))
    assert [(x["row"], x["changed"]) for x in compare(before, after)] == [("C, m", "+100.0%")]


def test_recording_some_rows_keeps_the_other_recorded_rows(tmp_path: Path):
    first = record("latency", [row("C", 1.0), row("D", 2.0)], folder=tmp_path)
    old = json.loads(first.read_text())
    for kept in old["rows"]:
        kept.pop("commit", None)
    first.write_text(json.dumps(old | {"commit": "an old one"}))
    new = [row("D", 3.0), row("D", 4.0, format="fp8")]
    path = record("latency", new, folder=tmp_path, by=("case", "model", "format"))
    found = json.loads(path.read_text())["rows"]
    cells = [(it["case"], it.get("format"), it["ms"]) for it in found]
    assert cells == [("C", None, 1.0), ("D", None, 3.0), ("D", "fp8", 4.0)]
    assert [it["commit"] == "an old one" for it in found] == [True, False, False]


def test_results_of_different_benchmarks_are_refused():
    with pytest.raises(ValueError, match="'latency' and 'kernels' are different"):
        compare(document(), document(benchmark="kernels"))


def test_every_benchmark_has_the_compare_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file, ms in zip(files, (1.0, 2.0), strict=True):
        file.write_text(json.dumps(document(row("C", ms))))
    monkeypatch.setattr(sys, "argv", ["bench", "--compare", *map(str, files)])
    with pytest.raises(SystemExit) as exit_info:
        parse_arguments(argparse.ArgumentParser())
    assert exit_info.value.code == 0
    assert "1 of 1 figures changed by more than 3%" in capsys.readouterr().out
    sources = [file.read_text() for file in (Path(__file__).parents[2] / "bench").glob("*.py")]
    writers = [text for text in sources if "import print_table, record" in text]
    assert writers
    assert all("parse_arguments(" in text for text in writers)
