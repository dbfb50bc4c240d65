"""Test the block map (one entry per block) and the memory report (numbers of slots and blocks)."""

from collections import Counter
from dataclasses import FrozenInstanceError

import pytest
from core_driver import driver_of, make_request, make_scheduler
from core_swapped import swapped_out
from covering import num_examples
from hypothesis import settings
from hypothesis.stateful import invariant
from test_scheduler_machine import MACHINE_SETTINGS, SchedulerMachine

from jpaged.core.scheduler import Scheduler
from jpaged.observe.pool_report import (
    BlockInfo,
    BlockState,
    MemoryReport,
    block_map,
    memory_report,
    num_waste_slots,
)


def slots(report: MemoryReport) -> tuple[int, ...]:
    """Return the numbers of token, reserved, fragmented, cached and free slots."""
    return (
        report.num_token_slots,
        report.num_reserved_slots,
        report.num_fragmented_slots,
        report.num_cached_slots,
        report.num_free_slots,
    )


def test_memory_report_of_an_idle_pool():
    scheduler = make_scheduler(num_blocks=4, block_size=4)
    free = [BlockInfo(i, BlockState.FREE, 0, 0, (), False, None) for i in (1, 2, 3)]
    assert block_map(scheduler) == {info.block_id: info for info in free}
    report = memory_report(scheduler)
    assert slots(report) == (0, 0, 0, 0, 12)
    assert (report.num_blocks, report.block_size, report.num_slots) == (3, 4, 12)
    assert report.shared_savings == report.waste == 0.0


def test_memory_report_of_one_sequence():
    driver = driver_of(make_request("1", 6, max_tokens=9), num_blocks=5)
    driver.step()
    infos = block_map(driver.scheduler)
    assert infos[1] == BlockInfo(1, BlockState.USED, 1, 4, ("1",), False, None)
    assert infos[2] == BlockInfo(2, BlockState.USED, 1, 2, ("1",), False, None)
    states = [infos[block_id].state for block_id in (1, 2, 3, 4)]
    assert states == [BlockState.USED] * 2 + [BlockState.FREE] * 2
    report = memory_report(driver.scheduler)
    assert slots(report) == (6, 2, 0, 0, 8)
    assert (report.num_logical_blocks, report.num_physical_blocks) == (2, 2)
    assert report.waste == 2 / 8
    assert report.num_waste_slots == num_waste_slots(driver.scheduler) == 2


def test_memory_report_counts_slots_after_the_last_token_as_fragmented():
    # The second of two output tokens is never an input of the model, so it needs no slot.
    driver = driver_of(make_request("1", 6, max_tokens=2), num_blocks=5, lag=1)
    driver.step()
    report = memory_report(driver.scheduler)
    assert (slots(report), report.num_waste_slots) == ((6, 1, 1, 0, 8), 2)
    driver.scheduler.abort("1")  # the host has not read the results of the step yet
    report = memory_report(driver.scheduler)
    assert (slots(report), report.num_waste_slots) == ((6, 0, 2, 0, 8), 2)
    assert block_map(driver.scheduler)[2].request_ids == ("1",)
    driver.read()
    assert slots(memory_report(driver.scheduler)) == (0, 0, 0, 0, 16)


def test_block_map_shows_freed_full_blocks_as_cached():
    driver = driver_of(make_request("1", 6, max_tokens=1), num_blocks=5, digest="constant")
    driver.run()
    infos = block_map(driver.scheduler)
    assert infos[1] == BlockInfo(1, BlockState.CACHED, 0, 4, (), False, 7)
    assert infos[2] == BlockInfo(2, BlockState.FREE, 0, 0, (), False, None)
    assert slots(memory_report(driver.scheduler)) == (0, 0, 0, 4, 12)


def test_memory_report_counts_shared_prompt_blocks_once():
    driver = driver_of(make_request("1", 9, max_tokens=4, n=3), num_blocks=11)
    while not driver.streams["1/2"]:
        driver.step()
    # Each sample holds the two full blocks of the prompt and a third block.
    info = block_map(driver.scheduler)[1]
    assert (info.ref_cnt, info.request_ids) == (3, ("1",))
    report = memory_report(driver.scheduler)
    assert (report.num_logical_blocks, report.num_physical_blocks) == (9, 5)
    assert report.shared_savings == pytest.approx(4 / 9)
    assert slots(report) == (8 + 3 * 1, 3 * 3, 0, 0, 5 * 4)


def test_block_map_lists_all_requests_that_share_a_block():
    first = make_request("1", list(range(9)), max_tokens=5)
    driver = driver_of(first, num_blocks=11, digest="xxh3")
    driver.step()
    driver.add(make_request("2", list(range(9)), max_tokens=5))
    driver.step()
    infos = block_map(driver.scheduler)
    assert infos[1].request_ids == infos[2].request_ids == ("1", "2")
    assert infos[1].content_hash == driver.scheduler.block_manager.pool.blocks[1].cache_entry.digest  # pyright: ignore
    assert memory_report(driver.scheduler).shared_savings == pytest.approx(2 / 6)


def test_pinned_blocks_without_a_request_are_reported_as_used_but_not_as_shared():
    driver = driver_of(make_request("1", 9, max_tokens=1), num_blocks=5, digest="xxh3")
    driver.run()
    manager = driver.scheduler.block_manager
    sequence = make_request("1", 9).sequences[0]
    pin = manager.pins.pin(manager.find_prefix(sequence))
    info = block_map(driver.scheduler)[1]
    assert (info.state, info.is_pinned, info.ref_cnt) == (BlockState.USED, True, 1)
    assert (info.num_filled_slots, info.request_ids) == (4, ())
    report = memory_report(driver.scheduler)
    assert slots(report) == (8, 0, 0, 0, 8)
    assert (report.num_pinned_blocks, report.num_logical_blocks, report.shared_savings) == (2, 0, 0)
    manager.pins.unpin(pin)
    assert slots(memory_report(driver.scheduler)) == (0, 0, 0, 8, 8)


def test_memory_report_counts_host_blocks():
    driver = swapped_out()
    report = memory_report(driver.scheduler)
    assert (report.num_host_blocks, report.num_used_host_blocks) == (8, 2)
    assert {r for info in block_map(driver.scheduler).values() for r in info.request_ids} == {"1"}


def test_fields_of_a_memory_report_cannot_be_assigned():
    with pytest.raises(FrozenInstanceError):
        memory_report(make_scheduler()).num_blocks = 3  # pyright: ignore[reportAttributeAccessIssue]


def check_accounts(scheduler: Scheduler) -> None:
    """Count the slots in the block tables, and check that the block map and the memory report have
    the same numbers."""
    manager, infos = scheduler.block_manager, block_map(scheduler)
    size, block_counts = manager.block_size, manager.pool.block_counts()
    assert [*infos] == list(range(1, block_counts.total + 1))
    counts = Counter(info.state for info in infos.values())
    assert (counts[BlockState.FREE], counts[BlockState.USED], counts[BlockState.CACHED]) == (
        block_counts[:3]
    )
    filled, fillable = _count_slots(scheduler)
    for info in infos.values():
        _check_info(info, filled, size, manager.pins.holder_counts[info.block_id])
    report = memory_report(scheduler)
    assert sum(slots(report)) == report.num_slots == block_counts.total * size
    assert min(slots(report)) >= 0
    used = [info for info in infos.values() if info.state is BlockState.USED]
    assert report.num_token_slots == sum(info.num_filled_slots for info in used)
    assert report.num_used_slots == size * len(used)
    assert report.num_reserved_slots == len(fillable - filled)
    assert report.num_waste_slots == num_waste_slots(scheduler)
    assert report.num_pinned_blocks == sum(info.is_pinned for info in infos.values())
    assert report.num_physical_blocks == sum(bool(info.request_ids) for info in used)
    pins = sum(manager.pins.holder_counts.values())
    assert report.num_logical_blocks == sum(info.ref_cnt for info in used) - pins
    assert 0 <= report.shared_savings < 1


def _count_slots(scheduler: Scheduler) -> tuple[set, set]:
    """Return two sets of slots (block_id, offset): the slots that hold a token, and the slots that
    are reserved for later tokens."""
    size = scheduler.block_manager.block_size
    filled, fillable = set(), set()
    for sequence in scheduler.sequences.by_id.values():
        for position in range(len(sequence.block_table) * size):
            slot = sequence.block_table[position // size], position % size
            if position < sequence.num_computed_tokens:
                filled.add(slot)
            elif sequence.finish_reason is None and position < sequence.request.max_num_tokens - 1:
                fillable.add(slot)
    return filled, fillable


def _check_info(info: BlockInfo, filled: set, block_size: int, num_pins: int) -> None:
    offsets = [offset for block_id, offset in filled if block_id == info.block_id]
    is_known_full = num_pins > 0 or info.state is BlockState.CACHED
    assert info.num_filled_slots == (block_size if is_known_full else len(offsets))
    assert (info.state is BlockState.USED) == (info.ref_cnt > 0)
    assert info.is_pinned == (num_pins > 0)
    assert bool(info.request_ids) == bool(offsets)
    assert info.state is not BlockState.CACHED or info.content_hash is not None
    assert info.state is not BlockState.FREE or info.content_hash is None


class AccountedMachine(SchedulerMachine):
    """Run random requests, and check the block map and the memory report after each step."""

    @invariant()
    def accounts_add_up(self):
        check_accounts(self.driver.scheduler)


TestAccounts = AccountedMachine.TestCase
TestAccounts.settings = settings(MACHINE_SETTINGS, max_examples=num_examples(150))
