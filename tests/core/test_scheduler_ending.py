"""Aborts and ends in every state, refusals, and the census afterwards."""

import re

import numpy as np
import pytest
from core_driver import Driver, make_request, make_scheduler
from core_plans import shape, the

from jpaged.core.block_pool import IntegrityError
from jpaged.core.request import FinishReason, RequestStatus, StopCriteria
from jpaged.core.scheduler import Scheduler, SchedulerConfig


def finish_both_ways(driver: Driver, name: str) -> None:
    request = driver.requests[name]
    assert driver.scheduler.finish(name, FinishReason.ERROR)
    driver.scheduler.check_integrity()
    assert request.status is RequestStatus.FINISHED
    assert request.finish_reason is FinishReason.ERROR
    assert not driver.scheduler.abort(name)
    assert request.finish_reason is FinishReason.ERROR


def released(driver: Driver) -> list[int]:
    return [seq_id for plan in driver.plans for seq_id in plan.released_seq_ids]


def test_aborting_a_waiting_request_releases_no_row():
    driver = Driver(make_scheduler(max_num_seqs=1))
    driver.add(make_request("1", 2))
    driver.add(make_request("2", 2))
    driver.step()
    finish_both_ways(driver, "2")
    driver.add(make_request("3", 2))
    driver.run()
    assert released(driver) == [1]


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_abort_during_chunked_prefill_frees_the_blocks(lag: int):
    driver = Driver(make_scheduler(max_num_batched_tokens=3), lag)
    driver.add(make_request("1", 9))
    driver.step()
    finish_both_ways(driver, "1")
    driver.add(make_request("2", 2))
    driver.run()
    assert released(driver) == [1]
    assert driver.streams["1"] == []


def test_blocks_are_freed_when_the_last_step_in_flight_is_read():
    driver = Driver(make_scheduler(block_size=4), lag=2)
    pool = driver.scheduler.block_manager.pool
    driver.add(make_request("1", 4, max_tokens=9))
    driver.step()
    driver.step()
    assert pool.num_free_blocks == 8
    finish_both_ways(driver, "1")
    assert not driver.scheduler.has_unfinished_requests
    assert driver.scheduler.num_in_flight_steps == 2
    driver.read()
    assert pool.num_free_blocks == 8
    driver.read()
    assert pool.num_free_blocks == 10
    # The tail went first; the never used blocks are still ahead of both.
    assert list(pool.free_block_queue)[-2:] == [2, 1]
    assert driver.streams["1"] == []


def preempted_with_a_pending_token() -> Driver:
    driver = Driver(make_scheduler(num_blocks=5, block_size=2, max_num_seqs=2), lag=2)
    driver.add(make_request("1", 3, max_tokens=5))
    driver.add(make_request("2", 1, max_tokens=5))
    while "2" in driver.scheduler.running or not driver.plans:
        driver.step()
    sequence = driver.requests["2"].sequences[0]
    assert driver.requests["2"].status is RequestStatus.PREEMPTED
    assert sequence.num_pending_tokens >= 1
    return driver


def test_request_waits_for_the_only_block_that_an_aborted_request_returns():
    driver = Driver(make_scheduler(num_blocks=5, block_size=4), lag=1)
    for name in "123":
        driver.add(make_request(name, 4, max_tokens=3))
    driver.step()
    driver.scheduler.abort("3")  # the step in flight still writes its block
    plan = the(driver.step())  # request 1 takes the free block, request 2 needs one too
    assert (shape(plan), plan.preempted_request_ids) == ([(1, 4, 1, True)], ())
    plan = the(driver.step())
    assert (2, 4, 1, True) in shape(plan)  # nothing is computed again
    driver.run()


def test_abort_while_preempted_with_a_pending_token():
    driver = preempted_with_a_pending_token()
    finish_both_ways(driver, "2")
    assert driver.scheduler.sequences.draining
    driver.run()
    assert not driver.scheduler.sequences.draining
    driver.add(make_request("3", 1))
    driver.run()
    assert released(driver) == [2, 1]


def test_preempted_request_continues_with_its_pending_token():
    driver = preempted_with_a_pending_token()
    driver.run()
    assert len(driver.streams["2"]) == 5


def test_pending_token_can_end_a_preempted_request():
    driver = Driver(make_scheduler(num_blocks=6, block_size=2, max_num_seqs=2), lag=3)
    driver.add(make_request("1", 6, max_tokens=5))
    driver.add(make_request("2", 1, max_tokens=2))
    while "2" in driver.scheduler.running or not driver.plans:
        driver.step()
    request = driver.requests["2"]
    assert request.status is RequestStatus.PREEMPTED
    assert request.sequences[0].num_tokens == request.max_num_tokens
    driver.run()
    assert request.finish_reason is FinishReason.LENGTH
    firsts = [r.sequence.seq_id for p in driver.plans for r in p.scheduled if r.start == 0]
    assert firsts == [1, 2]


def test_a_request_id_may_be_used_again_after_its_end():
    driver = Driver(make_scheduler(), lag=1)
    driver.add(make_request("1", 2))
    driver.step()
    driver.scheduler.abort("1")
    with pytest.raises(ValueError, match="seq_id 1 is in use"):
        driver.scheduler.add(make_request("1", 2))
    driver.add(make_request("1", 2, seq_id=2))
    driver.run()


def test_ending_an_unknown_request_does_nothing():
    assert make_scheduler().abort("nobody") is False


def test_an_idle_scheduler_has_no_plan():
    scheduler = make_scheduler()
    assert scheduler.schedule() is None
    assert not scheduler.has_unfinished_requests


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (make_request("2", 0), "prompt_token_ids of request '2' is empty"),
        (make_request("2", 40), "has 40 tokens, and max_model_len=40 leaves no room"),
        (make_request("2", 30, max_tokens=10), "may need 10 blocks .* but the pool has 9"),
        (make_request("1", 2, seq_id=2), "request_id '1' is in use"),
        (make_request("2", 2, seq_id=1), "seq_id 1 is in use"),
    ],
)
def test_request_that_can_never_run_is_refused_without_effect_on_others(request_, message: str):
    driver = Driver(make_scheduler(num_blocks=10, block_size=4, max_model_len=40))
    driver.add(make_request("1", 2))
    with pytest.raises(ValueError, match=message):
        driver.scheduler.add(request_)
    driver.scheduler.check_integrity()
    driver.run()


def test_request_that_just_fits_runs():
    driver = Driver(make_scheduler(num_blocks=10, block_size=4, max_model_len=40), lag=1)
    driver.add(make_request("1", 30, max_tokens=7))  # 36 tokens are fed: nine blocks
    driver.run()
    assert len(driver.streams["1"]) == 7


def test_max_model_len_ends_a_sequence():
    driver = Driver(make_scheduler(num_blocks=11, block_size=4, max_model_len=9), lag=1)
    driver.add(make_request("1", 6, max_tokens=100))
    driver.run()
    assert len(driver.streams["1"]) == 3


def test_updates_out_of_order_are_refused():
    scheduler = make_scheduler()
    scheduler.add(make_request("1", 2))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert first is not None
    assert second is not None
    token = np.zeros(1, np.int32)
    with pytest.raises(ValueError, match="step 0 is the next to update"):
        scheduler.update(second, token)
    with pytest.raises(ValueError, match=re.escape("got shape (2,)")):
        scheduler.update(first, np.zeros(2, np.int32))
    scheduler.update(first, token)
    with pytest.raises(ValueError, match="step 1 is the next to update"):
        scheduler.update(first, token)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1, got 0"),
        ({"max_num_batched_tokens": -1}, "max_num_batched_tokens must be at least 1"),
    ],
)
def test_invalid_scheduler_config_is_refused(changes: dict, message: str):
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 8, "max_model_len": 40}
    with pytest.raises(ValueError, match=message):
        SchedulerConfig(**{**limits, **changes})


@pytest.mark.parametrize(
    ("max_tokens", "min_tokens", "message"),
    [(0, 0, "max_tokens must be"), (3, 4, "min_tokens must lie"), (3, -1, "min_tokens must lie")],
)
def test_invalid_stop_criteria_are_refused(max_tokens: int, min_tokens: int, message: str):
    with pytest.raises(ValueError, match=message):
        StopCriteria(max_tokens, min_tokens)


def running_scheduler() -> Scheduler:
    driver = Driver(make_scheduler(max_num_seqs=2), lag=1)
    for name in "123":
        driver.add(make_request(name, 5))
    driver.step()
    driver.scheduler.abort("1")
    driver.scheduler.check_integrity()
    return driver.scheduler


def damage_status(s: Scheduler) -> None:
    s.running["2"].status = RequestStatus.WAITING


def damage_waiting_status(s: Scheduler) -> None:
    s.waiting["3"].status = RequestStatus.RUNNING


def damage_order(s: Scheduler) -> None:
    s.waiting["3"].arrival_index = 0


def damage_lost(s: Scheduler) -> None:
    s.running.discard(s.running["2"])


def damage_limit(s: Scheduler) -> None:
    s.running["2"].live_sequences.extend(s.waiting["3"].sequences * 2)


def damage_computed(s: Scheduler) -> None:
    s.running["2"].sequences[0].num_computed_tokens = 99


def damage_outgrown(s: Scheduler) -> None:
    s.running["2"].max_num_tokens = 5


def damage_waiting_blocks(s: Scheduler) -> None:
    s.waiting["3"].sequences[0].block_table = [9]


def damage_pending(s: Scheduler) -> None:
    s.running["2"].sequences[0].num_pending_tokens = 2


def damage_draining(s: Scheduler) -> None:
    s.sequences.draining[1].num_in_flight_steps = s.sequences.draining[1].num_pending_tokens = 0


def damage_finished(s: Scheduler) -> None:
    s.running["2"].sequences[0].block_table.clear()


@pytest.mark.parametrize(
    "damage",
    [
        damage_status,
        damage_waiting_status,
        damage_order,
        damage_lost,
        damage_limit,
        damage_computed,
        damage_outgrown,
        damage_waiting_blocks,
        damage_pending,
        damage_draining,
        damage_finished,
    ],
)
def test_check_integrity_finds_damage(damage):
    scheduler = running_scheduler()
    damage(scheduler)
    with pytest.raises(IntegrityError):
        scheduler.check_integrity()
