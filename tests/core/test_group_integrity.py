"""check_integrity finds damage in the records of groups, rows and images."""

from collections.abc import Callable

import pytest
from core_driver import Driver, make_request, make_scheduler
from core_plans import status

from jpaged.core.block_pool import IntegrityError
from jpaged.core.request import FinishReason, Request, RequestStatus, Sequence, SwapEntry
from jpaged.core.scheduler import Scheduler
from jpaged.core.swap import PreemptionMode, PreemptionPolicy


@pytest.fixture
def scheduler() -> Scheduler:
    """Request 1 runs, 2 (two samples) is swapped out, 3 waits."""
    policy = PreemptionPolicy(PreemptionMode.SWAP, num_host_blocks=4)
    driver = Driver(make_scheduler(num_blocks=8, block_size=2, pressure=policy), lag=1)
    driver.add(make_request("1", 4, max_tokens=7))
    driver.add(make_request("2", 4, max_tokens=4, seq_id=10, n=2))
    driver.add(make_request("3", 4, max_tokens=4, seq_id=20, n=2))
    while status(driver, "2") != "swapped":
        driver.step()
    driver.scheduler.check_integrity()
    return driver.scheduler


def running(s: Scheduler) -> Request:
    return s.running["1"]


def swapped(s: Scheduler) -> Request:
    return s.waiting["2"]


def waiting(s: Scheduler) -> Request:
    return s.waiting["3"]


def damage_image_lost(s: Scheduler) -> None:
    s.swap_space.num_used_host_blocks -= swapped(s).swap_entry.num_blocks  # pyright: ignore
    swapped(s).swap_entry = None


def damage_image_of_one_that_waits(s: Scheduler) -> None:
    waiting(s).swap_entry = SwapEntry(9, 0)


def damage_image_of_one_that_runs(s: Scheduler) -> None:
    running(s).swap_entry = SwapEntry(9, 0)


def damage_host_blocks(s: Scheduler) -> None:
    s.swap_space.num_used_host_blocks += 1


def damage_host_space(s: Scheduler) -> None:
    swapped(s).swap_entry.num_blocks += 2  # pyright: ignore
    s.swap_space.num_used_host_blocks += 2


def damage_image_table(s: Scheduler) -> None:
    swapped(s).live_sequences[0].host_block_table.pop()


def damage_blocks_while_out(s: Scheduler) -> None:
    swapped(s).live_sequences[0].block_table.append(s.block_manager.pool.allocate(1)[0])


def damage_image_table_of_one_that_runs(s: Scheduler) -> None:
    running(s).live_sequences[0].host_block_table = [0]


def damage_image_table_of_one_that_waits(s: Scheduler) -> None:
    waiting(s).live_sequences[1].host_block_table = [0]


def damage_computed_while_waiting(s: Scheduler) -> None:
    waiting(s).live_sequences[1].num_computed_tokens = 1


def damage_row_while_waiting(s: Scheduler) -> None:
    swapped(s).live_sequences[1].has_row = True


def damage_status_swapped(s: Scheduler) -> None:
    waiting(s).status = RequestStatus.SWAPPED


def damage_status_lost(s: Scheduler) -> None:
    swapped(s).status = RequestStatus.PREEMPTED


def damage_ended_and_alive(s: Scheduler) -> None:
    running(s).live_sequences[0].finish_reason = FinishReason.STOP


def damage_no_sequence(s: Scheduler) -> None:
    sequence = running(s).live_sequences.pop()
    del s.sequences.by_id[sequence.seq_id]
    s.block_manager.free(sequence)


def damage_forgotten_sample(s: Scheduler) -> None:
    del s.sequences.by_id[11]


def damage_sequence_of_nobody(s: Scheduler) -> None:
    s.sequences.by_id[99] = Sequence(99, [1], 1)


def damage_two_places(s: Scheduler) -> None:
    waiting(s).live_sequences.append(waiting(s).live_sequences[0])


def damage_more_in_flight_than_planned(s: Scheduler) -> None:
    running(s).live_sequences[0].num_in_flight_steps = 9


DAMAGES = [function for name, function in globals().items() if name.startswith("damage_")]


@pytest.mark.parametrize("damage", DAMAGES)
def test_check_integrity_finds_damage_in_groups(
    scheduler: Scheduler, damage: Callable[[Scheduler], None]
):
    damage(scheduler)
    with pytest.raises(IntegrityError):
        scheduler.check_integrity()


def test_check_integrity_counts_rows_by_group():
    driver = Driver(make_scheduler(max_num_seqs=3))
    driver.add(make_request("1", 4, n=3, seq_id=10))
    driver.step()
    request = driver.requests["1"]
    extra = Sequence(13, [*request.live_sequences[0].token_ids], 4, request)
    request.live_sequences.append(extra)
    driver.scheduler.sequences.add(extra)
    with pytest.raises(IntegrityError, match="4 sequences run, max_num_seqs=3"):
        driver.scheduler.check_integrity()


def test_check_integrity_finds_a_request_waiting_for_a_later_one():
    driver = Driver(make_scheduler(max_num_seqs=1))
    driver.add(make_request("1", 4))
    driver.add(make_request("2", 4))
    driver.step()
    driver.requests["1"].arrival_index = 5
    with pytest.raises(IntegrityError, match="'2' came before '1' and waits for it"):
        driver.scheduler.check_integrity()
