"""Test scheduling by priority and the sorted request queue."""

import pytest
from core_driver import Driver, driver_of, make_request
from core_plans import shape, status, the

from jpaged.core.admission import Admission
from jpaged.core.block_manager import GroupFit
from jpaged.core.block_pool import IntegrityError
from jpaged.core.request import Request
from jpaged.core.sequence_table import RequestQueue
from jpaged.core.swap import PreemptionMode, PreemptionPolicy


def make_driver(*requests: Request, lag: int = 0, **limits) -> Driver:
    return driver_of(*requests, lag=lag, **{"by_priority": True, **limits})


def statuses(driver: Driver) -> list[str]:
    return [status(driver, name) for name in driver.requests]


def test_urgent_requests_are_served_first():
    driver = make_driver(max_num_seqs=1)
    for name, priority in (("1", 2), ("2", 0), ("3", 1), ("4", 0)):
        driver.add(make_request(name, 2, max_tokens=1, priority=priority))
    assert [r.request_id for r in driver.scheduler.unfinished_requests] == ["2", "4", "3", "1"]
    assert [shape(driver.step())[0][0] for _ in range(4)] == [2, 4, 3, 1]
    driver.run()


def test_requests_of_equal_priority_are_served_in_order_of_arrival_without_preemption():
    driver = make_driver(max_num_seqs=1)
    for name in "123":
        driver.add(make_request(name, 2, max_tokens=2, priority=5))
    driver.run()
    assert [r.sequence.seq_id for p in driver.plans for r in p.scheduled] == [1, 1, 2, 2, 3, 3]
    assert not any(p.preempted_request_ids for p in driver.plans)


def test_urgent_request_preempts_the_least_urgent_request_if_no_batch_row_is_free():
    driver = make_driver(max_num_seqs=3)
    for name, priority in (("1", 1), ("2", 3), ("3", 2)):
        driver.add(make_request(name, 2, max_tokens=9, priority=priority))
    driver.step()
    driver.add(make_request("4", 2, max_tokens=2, priority=0, n=2, seq_id=10))
    plan = the(driver.step())
    assert plan.preempted_request_ids == ("2", "3")
    assert shape(plan) == [(10, 0, 1, False), (1, 2, 1, True)]
    assert statuses(driver) == ["running", "preempted", "preempted", "running"]
    driver.run()


def test_urgent_request_preempts_the_least_urgent_request_if_too_few_blocks_are_free():
    driver = make_driver(num_blocks=7)
    driver.add(make_request("1", 8, max_tokens=4, priority=1))
    driver.add(make_request("2", 8, max_tokens=4, priority=2))
    driver.step()
    driver.add(make_request("3", 8, max_tokens=2))
    plan = the(driver.step())
    assert (plan.preempted_request_ids, plan.released_seq_ids) == (("2",), (2,))
    assert [row[0] for row in shape(plan)] == [3, 1]
    driver.run()


def test_no_request_is_preempted_if_the_urgent_request_fits_without_preemption():
    driver = make_driver(make_request("1", 8, max_tokens=4, priority=1))
    driver.step()
    driver.add(make_request("2", 8, max_tokens=2))
    assert the(driver.step()).preempted_request_ids == ()
    assert statuses(driver) == ["running", "running"]
    driver.run()


@pytest.mark.parametrize(("by_priority", "priorities"), [(True, (1, 2)), (False, (0, 0))])
def test_request_of_equal_or_lower_priority_preempts_no_other_request(
    by_priority: bool, priorities: tuple[int, int]
):
    first = make_request("1", 8, priority=priorities[0])
    driver = make_driver(first, by_priority=by_priority, max_num_seqs=1)
    driver.step()
    driver.add(make_request("2", 8, priority=priorities[1]))
    driver.run()
    assert not any(plan.preempted_request_ids for plan in driver.plans)


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("mode", [PreemptionMode.RECOMPUTE, PreemptionMode.SWAP])
def test_preempted_request_resumes_and_gives_the_same_answer(lag: int, mode: PreemptionMode):
    policy = PreemptionPolicy(mode, 8)
    first = make_request("1", 5, max_tokens=6, priority=1, n=2, seq_id=10)
    driver = make_driver(first, lag=lag, max_num_seqs=2, pressure=policy)
    for _ in range(3):
        driver.step()
    driver.add(make_request("2", 5, max_tokens=2, priority=-1))
    plan = the(driver.step())
    assert plan.preempted_request_ids == ("1",)
    assert bool(plan.swap_outs) == (mode is PreemptionMode.SWAP)
    driver.run()
    assert [len(stream) for stream in driver.streams.values()] == [6, 6, 2]


def queue_of(
    *ranks: tuple[int, int], has_fast_front: bool = False
) -> tuple[RequestQueue, list[Request]]:
    queue, requests = RequestQueue(has_fast_front=has_fast_front), []
    for place, (priority, arrival_index) in enumerate(ranks):
        request = make_request(str(place), 1, priority=priority)
        request.arrival_index = arrival_index
        requests.append(request)
        queue.add(request)
        queue.check_integrity()
    return queue, requests


@pytest.mark.parametrize("has_fast_front", [False, True])
def test_request_queue_stays_sorted(has_fast_front: bool):
    ranks = (0, 5), (0, 7), (0, 3), (1, 4), (-1, 9), (0, 6)
    queue, requests = queue_of(*ranks, has_fast_front=has_fast_front)
    assert [r.request_id for r in queue] == ["4", "2", "0", "5", "1", "3"]
    assert (queue.first, queue.last) == (requests[4], requests[3])
    assert (len(queue), "5" in queue, "6" in queue) == (6, True, False)
    assert queue["5"] is queue.get("5") is requests[5]
    assert queue.get("6") is None
    for take_out in (queue.remove, queue.discard):
        take_out(requests[4])
        assert (queue.first, len(queue)) == (requests[2], 5)
    with pytest.raises(IntegrityError, match="'4' is not in its queue"):
        queue.remove(requests[4])
    queue.discard(requests[0])
    assert ("0" in queue, len(queue)) == (False, 4)


@pytest.mark.parametrize("ranks", [[(0, 1), (0, 1)], [(1, 1), (0, 2)], [(0, 2), (0, 1)]])
def test_integrity_check_finds_a_request_queue_in_the_wrong_order(ranks: list[tuple[int, int]]):
    queue, requests = queue_of((0, 0), (0, 1), (0, 2))
    for request, rank in zip(requests[1:], ranks, strict=True):
        request.priority, request.arrival_index = rank
    with pytest.raises(IntegrityError, match="is queued after it"):
        queue.check_integrity()


def test_urgent_requests_get_the_token_budget_of_a_step_first():
    first = make_request("1", 30, max_tokens=2, priority=1)
    driver = make_driver(first, max_num_batched_tokens=4, num_blocks=30)
    driver.step()
    driver.add(make_request("2", 3, max_tokens=2))
    assert shape(driver.step()) == [(2, 0, 3, True), (1, 4, 1, False)]
    driver.run()


def test_no_request_is_preempted_if_the_urgent_request_would_still_not_fit():
    driver = make_driver(max_num_seqs=4, num_blocks=30)
    for name, priority in (("1", 0), ("2", 0), ("3", 5), ("4", 5)):
        driver.add(make_request(name, 2, max_tokens=4, priority=priority))
    driver.step()
    # Request 5 needs four batch rows. Preempting requests 3 and 4 would free only two.
    driver.add(make_request("5", 2, max_tokens=2, priority=1, n=4, seq_id=50))
    assert the(driver.step()).preempted_request_ids == ()
    driver.run()
    assert [plan.preempted_request_ids for plan in driver.plans if plan.preempted_request_ids] == []


def test_blocks_shared_with_preempted_requests_are_counted_once():
    limits = {"num_blocks": 20, "max_num_batched_tokens": 128, "max_model_len": 72}
    driver = make_driver(digest="xxh3", **limits)
    common = [(7 * i) % 11 for i in range(40)]
    driver.add(make_request("1", [3] * 17, max_tokens=40))
    driver.add(make_request("2", [*common, 1], max_tokens=30, priority=1))
    driver.step()
    driver.step()
    driver.add(make_request("3", common + [2] * 20, max_tokens=4))
    assert the(driver.step()).preempted_request_ids == ()
    assert statuses(driver) == ["running", "running", "waiting"]
    driver.run()


def test_no_request_is_preempted_if_too_few_blocks_would_remain_for_running_requests():
    driver = make_driver(num_blocks=14, max_num_batched_tokens=128, max_model_len=48)
    driver.add(make_request("1", [3] * 8, max_tokens=12))
    driver.add(make_request("2", [4] * 8, max_tokens=12))
    driver.add(make_request("3", [5] * 9, max_tokens=12, priority=1))
    driver.step()
    driver.add(make_request("4", [6] * 32, max_tokens=4))
    assert the(driver.step()).preempted_request_ids == ()
    driver.run()


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_urgent_request_preempts_as_soon_as_part_of_its_prompt_is_cached(lag: int):
    limits = {"num_blocks": 13, "block_size": 8, "max_num_seqs": 2, "max_model_len": 96}
    driver = make_driver(lag=lag, digest="xxh3", **limits)
    common = [(7 * i) % 11 for i in range(9)]
    driver.add(make_request("1", common, max_tokens=60))
    driver.add(make_request("2", [5] * 9, max_tokens=60, priority=1))
    driver.step()
    driver.add(make_request("3", common[:8] + [1] * 65, max_tokens=2))
    for _ in range(lag + 1):
        assert status(driver, "3") == "waiting"
        driver.step()
    assert status(driver, "3") == "running"
    driver.run()


def test_urgent_request_preempts_a_victim_after_blocks_of_the_victim_are_unpinned():
    limits = {"num_blocks": 21, "max_num_batched_tokens": 128, "max_model_len": 72}
    driver = make_driver(digest="xxh3", **limits)
    common = [(7 * i) % 11 for i in range(16)]
    driver.add(make_request("9", [*common, 1], max_tokens=1))
    driver.run()
    pin = driver.scheduler.pin_prefix(common)
    assert pin is not None
    driver.add(make_request("1", [3] * 29, max_tokens=20))
    driver.add(make_request("2", [*common, 5], max_tokens=16, priority=1))
    driver.step()
    driver.add(make_request("3", [2] * 33, max_tokens=2))
    driver.step()
    assert status(driver, "3") == "waiting"
    driver.scheduler.block_manager.pins.unpin(pin)
    assert the(driver.step()).preempted_request_ids == ("2",)
    assert status(driver, "3") == "running"
    driver.run()


def test_scheduler_checks_only_once_whether_preempting_would_free_enough_blocks(
    monkeypatch: pytest.MonkeyPatch,
):
    driver = make_driver(num_blocks=20, max_num_batched_tokens=128, max_model_len=72)
    driver.add(make_request("1", 40, max_tokens=24))
    driver.add(make_request("2", 16, max_tokens=24, priority=1))
    driver.step()
    driver.add(make_request("3", 60, max_tokens=4))
    measured: list[str] = []
    measure_fit = Admission.measure_fit

    def record_request(self: Admission, request: Request) -> GroupFit:
        measured.append(request.request_id)
        return measure_fit(self, request)

    monkeypatch.setattr(Admission, "measure_fit", record_request)
    for _ in range(4):  # request 2 allocates one block in these steps
        assert the(driver.step()).preempted_request_ids == ()
    # The scheduler has computed twice whether request 3 fits: without preemption, and with
    # preemption of request 2.
    assert measured == ["3", "3"]
    monkeypatch.undo()
    driver.run()
