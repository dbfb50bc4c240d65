"""Test the drawing of a pool's blocks, and the text of its memory report."""

from dataclasses import replace
from typing import Any

import pytest

from jpaged.observe import pool_text
from jpaged.observe.pool_report import BlockInfo, BlockState, MemoryReport
from jpaged.observe.pool_text import LEGEND, BusyPoolSampler, describe_report, draw_blocks
from jpaged.observe.statistics import EngineStats

FREE = BlockInfo(0, BlockState.FREE, 0, 0, (), False, None)
CACHED = BlockInfo(0, BlockState.CACHED, 0, 4, (), False, 1)
FULL = BlockInfo(0, BlockState.USED, 1, 4, ("a",), False, None)
PARTLY = replace(FULL, num_filled_slots=3)
REPORT = MemoryReport(
    block_size=4,
    num_blocks=1000,
    num_token_slots=1007,
    num_reserved_slots=3,
    num_fragmented_slots=2,
    num_cached_slots=40,
    num_free_slots=2948,
    num_logical_blocks=400,
    num_physical_blocks=250,
    num_pinned_blocks=4,
    num_host_blocks=0,
    num_used_host_blocks=0,
)


def pool_of(*infos: BlockInfo) -> dict[int, BlockInfo]:
    return {i: replace(info, block_id=i) for i, info in enumerate(infos, 1)}


def test_each_state_of_a_block_has_a_different_mark():
    shared, by_many = replace(PARTLY, ref_cnt=3), replace(FULL, ref_cnt=10)
    pinned = replace(FULL, ref_cnt=2, is_pinned=True)
    lines = draw_blocks(pool_of(FULL, PARTLY, shared, by_many, pinned, CACHED, FREE), 4)
    assert lines == [f"pool      {LEGEND}", "        1 #+3*Po."]


def test_consecutive_rows_of_free_blocks_are_drawn_as_one_line():
    lines = draw_blocks(pool_of(FULL, *[FREE] * 200, CACHED, *[FREE] * 100), 4)
    assert lines[1:] == [
        "        1 #" + "." * 63,
        "      ... 128 free",
        "      193 " + "." * 9 + "o" + "." * 54,
        "      ... 46 free",
    ]

    assert draw_blocks(pool_of(*[FREE] * 70_000), 4)[1:] == ["      ... 70,000 free"]


def test_every_block_is_drawn_if_the_drawing_has_at_most_16_lines():
    assert draw_blocks(pool_of(*[FULL] * 1024), 4)[-1] == "      961 " + "#" * 64


def test_blocks_that_do_not_fit_in_16_lines_are_counted_by_state():
    lines = draw_blocks(pool_of(*[FREE] * 640, *[FULL] * 1000, *[CACHED] * 30, FREE), 4)
    assert len(lines) == 1 + 16
    assert lines[1:3] == ["      ... 640 free", "      641 " + "#" * 64]
    assert lines[-1] == "      ... 135 more: 1 free, 104 used, 30 cached"
    assert max(map(len, lines)) < 100


def test_memory_report_is_formatted_in_lines():
    assert describe_report(REPORT) == [
        "slots     1,007 with tokens, 3 reserved, 2 never filled, 40 cached, 2,948 free",
        "sharing   250 blocks instead of 400: 37.5% saved; 4 pinned",
    ]
    assert describe_report(replace(REPORT, num_host_blocks=9, num_used_host_blocks=3))[2:] == [
        "host      3 of 9 blocks used"
    ]
    of_one = describe_report(replace(REPORT, num_physical_blocks=1, num_host_blocks=1))
    assert of_one[1].startswith("sharing   1 block instead of ")
    assert of_one[2] == "host      0 of 1 block used"


class FakeEngine:
    """An engine whose memory reports are all different. Making a block map takes one second of the
    simulated clock `now`."""

    num_reports = num_maps = 0
    now = 100.0

    def block_map(self) -> dict[int, BlockInfo]:
        self.num_maps += 1
        self.now += 1
        return pool_of(FULL, *[PARTLY] * self.num_maps)

    def memory_report(self) -> MemoryReport:
        self.num_reports += 1
        return replace(REPORT, num_token_slots=self.num_reports)


def stats(num_used: int) -> EngineStats:
    return EngineStats(block_size=4, num_blocks=9, num_free_blocks=9 - num_used, peak_used_blocks=9)


def test_block_map_is_refreshed_only_after_changes_and_at_a_limited_rate(
    monkeypatch: pytest.MonkeyPatch,
):
    engine: Any = FakeEngine()
    monkeypatch.setattr(pool_text.time, "perf_counter", lambda: engine.now)
    pool = BusyPoolSampler(engine)
    assert pool.format_lines() == []
    pool.record(stats(2))
    pool.record(stats(2))  # nothing changed
    pool.record(stats(3))  # too early
    assert (engine.num_maps, pool.seconds_spent) == (1, 1.0)
    assert pool.format_lines()[0].startswith("slots     3 with tokens")
    assert pool.format_lines()[-1] == "        1 #+"
    engine.now += 10
    pool.record(stats(3))
    assert (engine.num_maps, pool.seconds_spent) == (2, 2.0)
    assert pool.format_lines()[-1] == "        1 #++"
