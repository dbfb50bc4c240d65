"""Tests of `bench.pairs`."""

from pathlib import Path

import pytest

from bench.pairs import THIS_CHECKOUT, Worker, measure, summarize


def test_ratio_of_a_case_is_the_median_ratio_of_its_pairs():
    row = summarize([[1.0, 1.1], [2.0, 2.0], [4.0, 3.0]])
    assert (row["other_s"], row["this_s"], row["pairs"]) == (2.0, 2.0, 3)
    assert (row["ratio"], row["reached"]) == (1.0, True)
    assert not summarize([[1.0, 1.02]])["reached"]


def test_error_names_the_checkout_whose_process_has_ended(tmp_path: Path):
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "__init__.py").write_text("raise SystemExit(1)")
    worker = Worker(tmp_path, "embedded", {})
    with pytest.raises(RuntimeError, match=f"the process of {tmp_path} ended early"):
        worker.read_line()
    with pytest.raises(RuntimeError, match="ended early"):
        worker.run((1, 8, 4), seed=0)
    worker.close()


@pytest.mark.full
def test_engines_of_two_checkouts_serve_the_same_requests():
    options = {"num_blocks": 65, "max_model_len": 64, "compilation_cache_dir": None}
    (row,) = measure(THIS_CHECKOUT, "embedded", 2, {"short": (2, 8, 4)}, **options)
    assert (row["case"], row["pairs"]) == ("short", 2)
    assert 0 < row["ratio"] < 10
