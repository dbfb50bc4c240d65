"""Test the ends of requests in every state, and the refusal of invalid requests and updates."""

import re
from collections.abc import Callable

import numpy as np
import pytest
from core_driver import Driver, driver_of, make_request, make_scheduler
from core_plans import shape, the

from jpaged.core.block_pool import IntegrityError
from jpaged.core.request import FinishReason, RequestStatus, StopCriteria
from jpaged.core.scheduler import SchedulerConfig


def finish_once(driver: Driver, name: str) -> None:
    """Finish a request, and check that an abort has no effect afterwards."""
    request = driver.requests[name]
    assert driver.scheduler.finish(name, FinishReason.ERROR)
    driver.scheduler.check_integrity()
    assert request.status is RequestStatus.FINISHED
    assert request.finish_reason is FinishReason.ERROR
    assert not driver.scheduler.abort(name)
    assert request.finish_reason is FinishReason.ERROR


def released_rows(driver: Driver) -> list[int]:
    return [seq_id for plan in driver.plans for seq_id in plan.released_seq_ids]


def test_aborting_a_waiting_request_releases_no_batch_row():
    driver = driver_of(make_request("1", 2), make_request("2", 2), max_num_seqs=1)
    driver.step()
    finish_once(driver, "2")
    driver.add(make_request("3", 2))
    driver.run()
    assert released_rows(driver) == [1]


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_abort_during_chunked_prefill_frees_the_blocks(lag: int):
    driver = driver_of(make_request("1", 9), lag=lag, max_num_batched_tokens=3)
    driver.step()
    finish_once(driver, "1")
    driver.add(make_request("2", 2))
    driver.run()
    assert released_rows(driver) == [1]
    assert driver.streams["1"] == []


def test_ended_request_keeps_its_blocks_until_the_results_of_its_last_step_are_read():
    driver = driver_of(make_request("1", 4, max_tokens=9), lag=2, block_size=4)
    pool = driver.scheduler.block_manager.pool
    driver.step()
    driver.step()
    assert pool.num_free_blocks == 8
    finish_once(driver, "1")
    assert not driver.scheduler.has_unfinished_requests
    assert driver.scheduler.num_in_flight_steps == 2
    driver.read()
    assert pool.num_free_blocks == 8
    driver.read()
    assert pool.num_free_blocks == 10
    # A sequence frees the last block of its table first, so the first block of the table is reused
    # last.
    assert list(pool.free_block_queue)[-2:] == [2, 1]
    assert driver.streams["1"] == []


def test_request_waits_for_the_block_of_an_aborted_request():
    requests = (make_request(name, 4, max_tokens=3) for name in "123")
    driver = driver_of(*requests, lag=1, num_blocks=5)
    driver.step()
    driver.scheduler.abort("3")  # the step in flight still writes to the block of request 3
    plan = the(driver.step())  # Only one block is free. Request 1 gets this block.
    assert (shape(plan), plan.preempted_request_ids) == ([(1, 4, 1, True)], ())
    plan = the(driver.step())
    # Request 2 was not preempted, so it computes only one token.
    assert (2, 4, 1, True) in shape(plan)
    driver.run()


def test_preempted_request_that_fails_is_freed_when_its_last_step_in_flight_ends():
    requests = (make_request(name, n, max_tokens=5) for name, n in (("1", 3), ("2", 1)))
    driver = driver_of(*requests, lag=2, num_blocks=5, block_size=2, max_num_seqs=2)
    assert driver.step_until_preemption().preempted_request_ids == ("2",)
    assert driver.requests["2"].sequences[0].num_pending_tokens >= 1
    finish_once(driver, "2")
    assert driver.scheduler.sequences.draining
    driver.run()
    assert not driver.scheduler.sequences.draining
    driver.add(make_request("3", 1))
    driver.run()
    assert released_rows(driver) == [2, 1]


def test_preempted_request_finishes_when_the_host_reads_the_last_token():
    requests = make_request("1", 6, max_tokens=5), make_request("2", 1, max_tokens=2)
    driver = driver_of(*requests, lag=3, num_blocks=6, block_size=2, max_num_seqs=2)
    while "2" in driver.scheduler.running or not driver.plans:
        driver.step()
    request = driver.requests["2"]
    assert request.status is RequestStatus.PREEMPTED
    assert request.sequences[0].num_tokens == request.max_num_tokens
    driver.run()
    assert request.finish_reason is FinishReason.LENGTH
    firsts = [r.sequence.seq_id for p in driver.plans for r in p.scheduled if r.start == 0]
    assert firsts == [1, 2]


def test_request_id_may_be_reused_after_the_request_has_finished():
    driver = driver_of(make_request("1", 2), lag=1)
    driver.step()
    driver.scheduler.abort("1")
    with pytest.raises(ValueError, match="seq_id 1 is in use"):
        driver.scheduler.add(make_request("1", 2))
    driver.add(make_request("1", 2, seq_id=2))
    driver.run()


def test_idle_scheduler_has_no_plan_and_no_request_to_abort():
    scheduler = make_scheduler()
    assert scheduler.schedule() is None
    assert not scheduler.has_unfinished_requests
    assert scheduler.abort("unknown") is False


def test_max_model_len_ends_a_sequence():
    driver = driver_of(make_request("1", 6, max_tokens=100), lag=1, max_model_len=9)
    driver.run()
    assert len(driver.streams["1"]) == 3


def test_updates_out_of_order_or_of_wrong_shape_are_refused():
    scheduler = make_scheduler()
    scheduler.add(make_request("1", 2))
    first, second = the(scheduler.schedule()), the(scheduler.schedule())
    token = np.zeros(1, np.int32)
    with pytest.raises(ValueError, match="step 0 is the next to update"):
        scheduler.update(second, token)
    with pytest.raises(ValueError, match=re.escape("sampled_token_ids has shape (2,)")):
        scheduler.update(first, np.zeros(2, np.int32))
    scheduler.update(first, token)
    with pytest.raises(ValueError, match="step 1 is the next to update"):
        scheduler.update(first, token)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SchedulerConfig(0, 8, 40), "max_num_seqs must be at least 1, got 0"),
        (lambda: SchedulerConfig(4, -1, 40), "max_num_batched_tokens must be at least 1"),
        (lambda: StopCriteria(0), "max_tokens must be"),
        (lambda: StopCriteria(3, 4), "min_tokens must lie"),
        (lambda: StopCriteria(3, -1), "min_tokens must lie"),
    ],
)
def test_invalid_config_or_stop_criteria_are_refused(make: Callable[[], object], message: str):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    "damage",
    [
        "running.status = RequestStatus.WAITING",
        "waiting.status = RequestStatus.RUNNING",
        "waiting.arrival_index = 0",
        "scheduler.running.discard(running)",
        "running.live_sequences.extend(waiting.sequences * 2)",
        "running.sequences[0].num_computed_tokens = 99",
        "running.max_num_tokens = 5",
        "waiting.sequences[0].block_table = [9]",
        "running.sequences[0].num_pending_tokens = 2",
        "draining.num_in_flight_steps = draining.num_pending_tokens = 0",
        "running.sequences[0].block_table.clear()",
    ],
)
def test_check_integrity_finds_damaged_scheduler_state(damage: str):
    driver = driver_of(*(make_request(name, 5) for name in "123"), lag=1, max_num_seqs=2)
    driver.step()
    scheduler = driver.scheduler
    scheduler.abort("1")
    scheduler.check_integrity()
    names = {
        "RequestStatus": RequestStatus,
        "scheduler": scheduler,
        "running": scheduler.running["2"],
        "waiting": scheduler.waiting["3"],
        "draining": scheduler.sequences.draining[1],
    }
    exec(damage, names)
    with pytest.raises(IntegrityError):
        scheduler.check_integrity()
