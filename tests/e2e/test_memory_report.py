"""Test the memory report and the block map of a running engine."""

import pytest
from e2e_options import Engines

from bench import worst_case
from jpaged import BlockInfo, BlockState, Engine, MemoryReport, SamplingParams


def blocks_of(engine: Engine, request_id: str) -> list[BlockInfo]:
    return [info for info in engine.block_map().values() if request_id in info.request_ids]


def test_samples_share_and_free_their_prompt_blocks(engines: Engines):
    engine = engines()
    engine.reset_prefix_cache()
    params = SamplingParams(n=3, max_tokens=9, ignore_eos=True, seed=0)
    name = engine.add_request(list(range(40)), params)
    savings = []
    while engine.has_unfinished_requests:
        engine.step()
        report = engine.memory_report()
        assert isinstance(report, MemoryReport)
        assert report.num_waste_slots == engine.stats().num_waste_slots
        # If the block tables have 9 entries in total, each of the 3 samples holds two shared blocks
        # of the prompt and one other block.
        if report.num_logical_blocks == 9:
            assert sorted(info.ref_cnt for info in blocks_of(engine, name)) == [1, 1, 1, 3, 3]
            savings.append(report.shared_savings)
    assert savings
    assert set(savings) == {1 - 5 / 9}
    assert blocks_of(engine, name) == []
    states = [info.state for info in engine.block_map().values()]
    report = engine.memory_report()
    assert states.count(BlockState.CACHED) * 16 == report.num_cached_slots > 0
    assert states.count(BlockState.USED) == report.num_token_slots == 0


def test_worst_case_memory_benchmark_runs_and_rejects_empty_prompts(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(worst_case, "AS_VLLM", {"max_num_seqs": 6, "max_model_len": 40})
    assert worst_case.run(engines()) > 0
    monkeypatch.setattr(worst_case, "AS_VLLM", {"max_num_seqs": 2, "max_model_len": 8})
    with pytest.raises(ValueError, match="empty"):
        worst_case.run(engines())
