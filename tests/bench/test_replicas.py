"""Test the benchmark of replicas against one tensor-parallel engine."""

from collections.abc import Callable

import pytest

from bench.replicas import OUTPUT_LEN, Answered, answer, median_of, row_of
from jpaged import Engine


def test_benchmark_assumes_that_n_replicas_have_n_times_the_throughput_of_one():
    row = row_of(8, replica=Answered(2.0, 1e-3), shared=Answered(1.0, 2e-3))
    assert row["replicas_tokens_per_s"] == pytest.approx(8 * OUTPUT_LEN / 2)
    assert row["shared_tokens_per_s"] == pytest.approx(8 * OUTPUT_LEN)
    assert row["shared_over_replicas"] == pytest.approx(2.0)
    assert row["shared_ms_a_token"] == pytest.approx(1e3 / OUTPUT_LEN)
    assert (row["replica_host_ms_a_step"], row["shared_host_ms_a_step"]) == (1.0, 2.0)


@pytest.mark.full
def test_benchmark_reports_wall_time_and_host_time_of_an_engine(
    kept_engines: Callable[..., Engine],
):
    options = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 256}
    engine = kept_engines(skip_tokenizer_init=True, num_blocks=129, **options)
    found = [answer(engine, 3, seed=0), median_of(engine, 2, repeats=1)]
    assert all(0 < it.host_seconds < it.seconds for it in found)
