import dataclasses

import pytest

from jpaged import CompletionOutput, RequestOutput
from jpaged.observe.statistics import EngineStats, RequestMetrics
from jpaged.outputs import Logprob, TextDelta


def test_delta_prints_as_its_text_and_knows_whether_it_is_the_last():
    delta = TextDelta("héllo", token_ids=(1, 2), request_id="r")
    assert f"{delta}" == str(delta) == "héllo"
    assert not delta.finished
    assert TextDelta("", finish_reason="stop", stop_reason="END").finished


def test_completion_is_finished_once_it_has_a_finish_reason():
    completion = CompletionOutput(0, "hi", [5, 6], -0.5, [{5: Logprob(-0.5, 1, "hi")}])
    assert not completion.finished
    assert dataclasses.replace(completion, finish_reason="length").finished
    output = RequestOutput("r", None, [1], None, [completion], finished=False)
    assert output.num_cached_tokens == 0
    assert output.metrics is None


def test_outputs_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        TextDelta("x").text = "y"  # type: ignore[misc]


def test_engine_stats_compute_usage_and_waste_of_the_pool():
    stats = EngineStats(
        block_size=16, num_blocks=10, num_free_blocks=6, peak_used_blocks=5, num_waste_slots=8
    )
    assert stats.num_used_blocks == 4
    assert stats.kv_cache_usage == pytest.approx(0.4)
    assert stats.waste == pytest.approx(8 / 64)


def test_usage_and_waste_of_an_empty_pool_are_zero():
    stats = EngineStats(block_size=16, num_blocks=0, num_free_blocks=0, peak_used_blocks=0)
    assert stats.kv_cache_usage == stats.waste == 0.0


def test_time_to_first_token_is_none_before_the_first_token():
    metrics = RequestMetrics(arrival_time=1.0)
    assert metrics.time_to_first_token is None
    metrics.first_token_time = 1.5
    assert metrics.time_to_first_token == pytest.approx(0.5)
