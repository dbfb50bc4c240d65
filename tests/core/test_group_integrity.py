"""Test that check_integrity finds damage in the state of groups, rows and swap entries."""

import pytest
from core_driver import driver_of, make_request
from core_plans import status

from jpaged.core import request as request_module
from jpaged.core.block_pool import IntegrityError
from jpaged.core.request import Sequence
from jpaged.core.scheduler import Scheduler
from jpaged.core.swap import PreemptionMode, PreemptionPolicy


@pytest.mark.parametrize(
    "damage",
    [
        "space.num_used_host_blocks -= swapped.swap_entry.num_blocks; swapped.swap_entry = None",
        "waiting.swap_entry = SwapEntry(9, 0)",
        "running.swap_entry = SwapEntry(9, 0)",
        "space.num_used_host_blocks += 1",
        "space.num_used_host_blocks += 2; swapped.swap_entry.num_blocks += 2",
        "swapped.live_sequences[0].host_block_table.pop()",
        "swapped.live_sequences[0].block_table += scheduler.block_manager.pool.allocate(1)",
        "running.live_sequences[0].host_block_table = [0]",
        "waiting.live_sequences[1].host_block_table = [0]",
        "waiting.live_sequences[1].num_computed_tokens = 1",
        "swapped.live_sequences[1].has_row = True",
        "waiting.status = RequestStatus.SWAPPED",
        "swapped.status = RequestStatus.PREEMPTED",
        "running.live_sequences[0].finish_reason = FinishReason.STOP",
        "end_running_sequence(scheduler)",
        "del scheduler.sequences.by_id[11]",
        "scheduler.sequences.by_id[99] = Sequence(99, [1], 1)",
        "waiting.live_sequences.append(waiting.live_sequences[0])",
        "running.live_sequences[0].num_in_flight_steps = 9",
    ],
)
def test_check_integrity_finds_damage_in_requests_with_several_samples(damage: str):
    requests = (
        make_request("1", 4, max_tokens=7),
        make_request("2", 4, max_tokens=4, seq_id=10, n=2),
        make_request("3", 4, max_tokens=4, seq_id=20, n=2),
    )
    policy = PreemptionPolicy(PreemptionMode.SWAP, num_host_blocks=4)
    driver = driver_of(*requests, lag=1, num_blocks=8, block_size=2, pressure=policy)
    while status(driver, "2") != "swapped":
        driver.step()
    scheduler = driver.scheduler
    scheduler.check_integrity()
    running, swapped, waiting = requests
    names = {
        **vars(request_module),
        "end_running_sequence": end_running_sequence,
        "scheduler": scheduler,
        "space": scheduler.swap_space,
        "running": running,
        "swapped": swapped,
        "waiting": waiting,
    }
    exec(damage, names)
    with pytest.raises(IntegrityError):
        scheduler.check_integrity()


def end_running_sequence(scheduler: Scheduler) -> None:
    """Remove the only sequence of the running request, but keep the request in its queue."""
    sequence = scheduler.running["1"].live_sequences.pop()
    del scheduler.sequences.by_id[sequence.seq_id]
    scheduler.block_manager.free(sequence)


def test_check_integrity_counts_batch_rows_per_request():
    request = make_request("1", 4, n=3, seq_id=10)
    driver = driver_of(request, max_num_seqs=3)
    driver.step()
    extra = Sequence(13, [*request.live_sequences[0].token_ids], 4, request)
    request.live_sequences.append(extra)
    driver.scheduler.sequences.add(extra)
    with pytest.raises(IntegrityError, match="4 sequences run, max_num_seqs=3"):
        driver.scheduler.check_integrity()


def test_check_integrity_finds_a_request_waiting_behind_a_later_request():
    driver = driver_of(make_request("1", 4), make_request("2", 4), max_num_seqs=1)
    driver.step()
    driver.requests["1"].arrival_index = 5
    with pytest.raises(IntegrityError, match="'2' came before '1' and waits for it"):
        driver.scheduler.check_integrity()
