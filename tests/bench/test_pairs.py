"""Tests of `bench.pairs`."""

from pathlib import Path

import pytest

from bench.pairs import THIS_CHECKOUT, Worker, measure, summary


def test_ratio_is_the_median_of_the_ratios_of_the_pairs():
    row = summary([[1.0, 1.1], [2.0, 2.0], [4.0, 3.0]])
    assert (row["before_s"], row["after_s"], row["pairs"]) == (2.0, 2.0, 3)
    assert (row["ratio"], row["reached"]) == (1.0, True)
    assert not summary([[1.0, 1.02]])["reached"]


def test_ended_worker_is_an_error_that_names_the_checkout(tmp_path: Path):
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "__init__.py").write_text("raise SystemExit(1)")
    worker = Worker(tmp_path, "embedded", {})
    with pytest.raises(RuntimeError, match=f"the engine of {tmp_path} has ended"):
        worker.wait()
    worker.close()


@pytest.mark.full
def test_engines_of_two_checkouts_serve_the_same_requests():
    options = {"num_blocks": 65, "max_model_len": 64, "compilation_cache_dir": None}
    (row,) = measure(THIS_CHECKOUT, "embedded", 2, {"short": (2, 8, 4)}, **options)
    assert (row["case"], row["pairs"]) == ("short", 2)
    assert 0 < row["ratio"] < 10
