"""Test the scoring benchmark on a CPU with few and short prompts."""

import pytest

from bench import scoring
from jpaged import Engine


@pytest.mark.full
def test_scoring_benchmark_compares_the_time_of_each_case_with_the_prefill_time():
    engine = Engine(max_model_len=128, max_num_seqs=8)
    rows = {row["case"]: row for row in scoring.measure(engine, "embedded", 1, 3, 40)}
    assert set(rows) == {"prefill", "ranked", "top 5", "top 5, read", "scored", "completions"}
    assert rows["prefill"]["ratio"] == 1.0
    for row in rows.values():
        assert row["ratio"] == pytest.approx(row["seconds"] / rows["prefill"]["seconds"])


def test_output_head_is_measured_with_each_implementation():
    """The benchmark function itself checks that both implementations give the same results."""
    rows = scoring.measure_head("qwen3-0.6b", 1, 8, 300)
    assert [row["case"] for row in rows] == ["head, op", "head, xla", "head, ranks and top 20"]
