"""Test that the README and the benchmark page show the recorded results."""

import json
from pathlib import Path

import pytest

from bench import headline, readme_table
from bench.paper import __main__ as cli
from bench.readme_table import (
    BEGIN,
    BENCHMARKS,
    END,
    FIGURES,
    README,
    render_benchmarks,
    render_figures,
    render_readme,
)


def test_readme_has_the_committed_results():
    text = README.read_text(encoding="utf-8")
    assert render_readme(text) == text, "run python -m bench.readme_table --write"
    assert len(text.splitlines()) <= 120


def test_figures_page_has_the_committed_results():
    text = FIGURES.read_text(encoding="utf-8")
    assert render_figures(text) == text, "run python -m bench.readme_table --write"


def test_benchmark_page_has_the_committed_results():
    text = BENCHMARKS.read_text(encoding="utf-8")
    assert render_benchmarks(text) == text, "run python -m bench.readme_table --write"
    assert readme_table.FIGURE.findall(text) == [
        *readme_table.COMPARISONS,
        *cli.AGREEMENTS,
        *cli.FIGURES,
    ]


def test_figure_without_results_says_not_run_yet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(readme_table, "RESULTS", tmp_path)
    for name in ("12", *readme_table.COMPARISONS):
        begin, end = f"a\n<!-- figure {name} -->\n", f"\n<!-- end of figure {name} -->\nb"
        assert render_benchmarks(f"{begin}stale{end}") == f"{begin}*Not run yet.*{end}"
    with pytest.raises(ValueError, match="lacks <!-- figure N -->"):
        render_benchmarks("no place")


def test_benchmark_page_shows_the_recorded_results_of_table_1_of_the_paper(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(readme_table, "RESULTS", tmp_path)
    cli.main(["--figure", "table1", "--no-pictures", "--seeds", "7", "--out", str(tmp_path)])
    page = render_benchmarks("<!-- figure table1 -->\n<!-- end of figure table1 -->")
    assert "| OPT-13B  | KV cache slots | 15700   | 15,729 | 1 " in page
    assert "- no device; commit " in page
    path = tmp_path / "paper_table1_no-device.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    document |= {"figure": "12", "device": "simulated NVIDIA H200"}
    path.write_text(json.dumps(document), encoding="utf-8")
    page = render_benchmarks("<!-- figure table1 -->\n<!-- end of figure table1 -->")
    assert "- simulated NVIDIA H200; traces of 3600 s, seeds 7; commit " in page


def test_updating_the_readme_changes_only_the_text_between_markers():
    rendered = render_figures(f"before\n{BEGIN}\nstale\n{END}\nafter")
    assert rendered.startswith(f"before\n{BEGIN}\n|")
    assert rendered.endswith(f"|\n{END}\nafter")
    assert "stale" not in rendered


def test_readme_without_markers_is_refused():
    with pytest.raises(ValueError, match="lacks"):
        render_figures(f"{END} {BEGIN}")


def test_every_system_of_the_headline_benchmark_has_a_display_name():
    assert set(readme_table.SYSTEM_NAMES) == set(headline.ALL_SYSTEMS)
