"""Test plans of the scheduler: prompt chunks, mixed steps, admission and preemption."""

import random
from typing import Any

import pytest
from core_driver import Driver, driver_of, make_request, make_requests, make_scheduler
from core_plans import shape, the, updates

from jpaged.core.beam import BeamSearch
from jpaged.core.plan import StepPlan
from jpaged.core.request import RequestStatus
from jpaged.core.scheduler import Scheduler


def tables(driver: Driver) -> list[list[int]]:
    return [r.sequences[0].block_table for r in driver.scheduler.running]


def test_scheduler_plans_a_prefill_step_and_then_decode_steps():
    driver = driver_of(make_request("1", 6, max_tokens=4), block_size=4)
    plan = the(driver.step())
    assert shape(plan) == [(1, 0, 6, True)]
    assert (plan.step_id, plan.num_tokens, plan.is_decode) == (0, 6, False)
    assert plan.scheduled[0].block_updates == ((0, 1), (1, 2))
    plans = [driver.step() for _ in range(3)]
    assert [shape(p) for p in plans] == [[(1, 6, 1, True)], [(1, 7, 1, True)], [(1, 8, 1, True)]]
    assert [p.scheduled[0].block_updates for p in plans if p] == [(), (), ((2, 3),)]
    assert all(p.is_decode for p in plans if p)
    assert driver.step() is None
    driver.check_end()


def test_chunked_prefill_stays_within_the_token_budget():
    driver = driver_of(make_request("1", 12, max_tokens=2), block_size=4, max_num_batched_tokens=5)
    plans = [driver.step() for _ in range(4)]
    assert [shape(p) for p in plans] == [
        [(1, 0, 5, False)],
        [(1, 5, 5, False)],
        [(1, 10, 2, True)],
        [(1, 12, 1, True)],
    ]
    # Each step allocates only the blocks that its chunk needs.
    updates = [p.scheduled[0].block_updates for p in plans if p]
    assert updates == [((0, 1), (1, 2)), ((2, 3),), (), ((3, 4),)]
    driver.run()


def test_mixed_step_has_all_decode_rows_and_fills_up_with_prompt_chunks():
    driver = driver_of(*make_requests((3, 6), (10, 3)), block_size=4, max_num_batched_tokens=6)
    plans = [driver.step() for _ in range(4)]
    assert [shape(p) for p in plans] == [
        [(1, 0, 3, True), (2, 0, 3, False)],
        [(1, 3, 1, True), (2, 3, 5, False)],
        [(1, 4, 1, True), (2, 8, 2, True)],
        [(1, 5, 1, True), (2, 10, 1, True)],
    ]
    assert [p.is_decode for p in plans if p] == [False, False, False, True]
    # `num_new_tokens` is the number of tokens in prompt chunks, plus one sampled token for each
    # finished prompt and each decode row.
    assert [p.num_new_tokens for p in plans if p] == [3 + 1 + 3, 1 + 5, 1 + 2 + 1, 1 + 1]
    driver.run()


def test_sequence_postponed_in_one_step_gets_the_same_token_in_a_later_step():
    driver = Driver(make_scheduler(block_size=4, digest="xxh3"), lag=1)
    for name in "12":
        driver.add(make_request(name, 3, max_tokens=6))
    driver.step()
    assert shape(driver.step()) == [(1, 3, 1, True), (2, 3, 1, True)]
    assert driver.postpone_rows(lambda rows: rows[:1]) == [0]
    assert shape(driver.step()) == [(1, 3, 1, True), (2, 4, 1, True)]
    assert [len(driver.streams[name]) for name in "12"] == [1, 2]
    first, second = (driver.requests[name].sequences[0] for name in "12")
    # The decode token of `first` was postponed to the last step, whose results the host has not
    # read. The full block of `first` is therefore not in the prefix cache yet.
    assert (first.num_registered_blocks, second.num_registered_blocks) == (0, 1)
    assert driver.postpone_rows(lambda rows: rows) == [0, 1]
    assert shape(driver.step()) == [(1, 3, 1, True), (2, 4, 1, True)]
    driver.run()
    assert [len(driver.streams[name]) for name in "12"] == [6, 6]


def test_scheduler_plans_a_step_before_the_host_reads_the_previous_results():
    driver = driver_of(make_request("1", 3, max_tokens=3), lag=1, block_size=4)
    sequence = driver.requests["1"].sequences[0]
    assert shape(driver.step()) == [(1, 0, 3, True)]
    assert (len(sequence.token_ids), sequence.num_pending_tokens) == (3, 1)
    assert shape(driver.step()) == [(1, 3, 1, True)]
    assert (len(sequence.token_ids), sequence.num_pending_tokens) == (4, 1)
    assert shape(driver.step()) == [(1, 4, 1, True)]
    # The steps planned so far sample all `max_tokens` tokens.
    assert driver.step() is None
    driver.run()


def test_request_that_samples_a_stop_token_has_one_more_step_in_flight():
    stop = frozenset(range(11))
    synchronous, overlapped = Driver(make_scheduler()), Driver(make_scheduler(), lag=1)
    for driver in (synchronous, overlapped):
        driver.add(make_request("1", 3, max_tokens=9, stop_token_ids=stop))
        driver.run()
    assert synchronous.streams == overlapped.streams
    assert (len(synchronous.plans), len(overlapped.plans)) == (1, 2)


@pytest.mark.parametrize(("min_tokens", "expected"), [(0, 1), (1, 1), (3, 3)])
def test_min_tokens_counts_the_stop_token(min_tokens: int, expected: int):
    driver = Driver(make_scheduler())
    stop = frozenset(range(11))
    driver.add(make_request("1", 3, 9, min_tokens=min_tokens, stop_token_ids=stop))
    driver.run()
    assert len(driver.streams["1"]) == expected


@pytest.mark.parametrize(("prompt", "is_decode"), [(1, [False, True]), (5, [False, False, True])])
def test_step_that_computes_only_the_last_prompt_token_is_not_a_decode_step(
    prompt: int, is_decode: list[bool]
):
    driver = driver_of(make_request("1", prompt), max_num_batched_tokens=4)
    assert [the(driver.step()).is_decode for _ in is_decode] == is_decode


def test_requests_beyond_max_num_seqs_wait_in_order():
    driver = Driver(make_scheduler(max_num_seqs=2))
    for name in "123":
        driver.add(make_request(name, 2, max_tokens=2))
    assert shape(driver.step()) == [(1, 0, 2, True), (2, 0, 2, True)]
    assert (len(driver.scheduler.running), len(driver.scheduler.waiting)) == (2, 1)
    driver.step()
    plan = the(driver.step())
    assert shape(plan) == [(3, 0, 2, True)]
    assert plan.released_seq_ids == (1, 2)
    driver.run()


def test_no_request_overtakes_the_first_waiting_request():
    driver = driver_of(make_request("1", 8, max_tokens=3), num_blocks=6, block_size=4)
    # Request 2 needs three blocks, and one more must stay free.
    driver.add(make_request("2", 12, max_tokens=3))
    driver.add(make_request("3", 1, max_tokens=3))
    assert shape(driver.step()) == [(1, 0, 8, True)]
    assert [r.request_id for r in driver.scheduler.waiting] == ["2", "3"]
    driver.run()
    assert [p.preempted_request_ids for p in driver.plans if p.preempted_request_ids] == []


def test_last_arrived_request_is_preempted_and_recomputed():
    driver = driver_of(*make_requests((7, 8), (1, 8)), num_blocks=6, block_size=4)
    driver.step()
    assert tables(driver) == [[1, 2], [3]]
    for _ in range(5):
        driver.step()
    assert tables(driver) == [[1, 2, 4], [3, 5]]
    plan = the(driver.step())  # request 1 needs a fourth block, so request 2 is preempted
    assert shape(plan) == [(1, 12, 1, True)]
    assert (plan.preempted_request_ids, plan.released_seq_ids) == (("2",), (2,))
    assert plan.scheduled[0].block_updates == ((3, 5),)  # freed by request 2
    second = driver.requests["2"]
    assert second.status is RequestStatus.PREEMPTED
    assert (second.sequences[0].num_computed_tokens, second.sequences[0].block_table) == (0, [])
    # Request 2 joins when three blocks are free: it needs two, and one more must stay free.
    assert shape(driver.step()) == [(1, 13, 1, True)]
    plan = the(driver.step())
    assert shape(plan) == [(2, 0, 7, True)]
    assert (plan.preempted_request_ids, plan.released_seq_ids) == ((), (1,))
    assert plan.scheduled[0].block_updates == ((0, 3), (1, 5))
    driver.run()


def test_preempted_requests_resume_in_order_of_arrival():
    driver = driver_of(
        *make_requests((2, 9), (1, 9), (1, 9)), lag=1, num_blocks=7, block_size=2, max_num_seqs=3
    )
    driver.run()
    assert [p.preempted_request_ids for p in driver.plans if p.preempted_request_ids] == [
        ("3",),
        ("2",),
        ("3",),
    ]
    firsts = [r.sequence.seq_id for p in driver.plans for r in p.scheduled if r.start == 0]
    assert firsts == [1, 2, 3, 2, 3, 3]


def test_last_arrived_request_can_preempt_itself():
    driver = driver_of(*make_requests((3, 4), (1, 4)), num_blocks=5, block_size=2, max_num_seqs=2)
    driver.step()
    driver.step()
    plan = the(driver.step())
    assert shape(plan) == [(1, 4, 1, True)]
    assert (plan.preempted_request_ids, plan.released_seq_ids) == (("2",), (2,))
    assert plan.scheduled[0].block_updates == ((2, 4),)  # the last free block
    driver.run()


def test_request_waits_for_blocks_of_a_finished_request_instead_of_preempting():
    driver = Driver(make_scheduler(num_blocks=5, block_size=4, max_num_seqs=2), lag=1)
    stop = frozenset(range(11))
    driver.add(make_request("1", 7, max_tokens=5, stop_token_ids=stop, min_tokens=2))
    driver.add(make_request("2", 2, max_tokens=7))
    for _ in range(3):
        driver.step()
    # Request 1 has finished, but the step in flight still writes to its blocks. The scheduler frees
    # these blocks only when the host has read the results of that step.
    assert driver.requests["1"].is_finished
    assert tables(driver) == [[3]]
    assert driver.scheduler.block_manager.num_free_blocks == 0
    assert driver.step() is None
    plan = the(driver.step())
    assert shape(plan) == [(2, 4, 1, True)]
    assert (plan.preempted_request_ids, plan.released_seq_ids) == ((), (1,))
    driver.run()


def test_preempted_request_recomputes_all_its_tokens():
    driver = driver_of(
        *make_requests((3, 3), (1, 6), (1, 1)), lag=1, num_blocks=5, block_size=2, max_num_seqs=2
    )
    for _ in range(2):
        driver.step()
    second = driver.requests["2"].sequences[0]
    plan = the(driver.step())
    assert plan.preempted_request_ids == ("2",)
    assert (len(second.token_ids), second.num_pending_tokens) == (3, 0)
    driver.run()
    rejoined = [
        r for p in driver.plans for r in p.scheduled if r.sequence is second and not r.start
    ]
    assert [r.num_scheduled_tokens for r in rejoined] == [1, 3]


def test_preempted_request_resumes_only_after_the_host_reads_the_last_sampled_token():
    driver = driver_of(*make_requests((7, 3), (1, 6)), lag=2, num_blocks=5, max_num_seqs=2)
    for _ in range(4):
        driver.step()
    sequence = driver.requests["2"].sequences[0]
    assert driver.step() is None  # request 2 needs a second block and preempts itself
    assert driver.requests["2"].status is RequestStatus.PREEMPTED
    assert driver.requests["1"].is_finished
    assert driver.scheduler.block_manager.num_free_blocks == 4
    assert sequence.num_pending_tokens == 1
    assert driver.step() is None
    plan = the(driver.step())
    assert shape(plan) == [(2, 0, 5, True)]
    assert (plan.preempted_request_ids, plan.released_seq_ids) == (("2",), (2, 1))
    driver.run()


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("seed", range(20))
def test_fast_path_for_decode_steps_makes_the_same_plan_as_the_general_path(
    monkeypatch: pytest.MonkeyPatch, seed: int, lag: int
):
    """Compare both paths on random requests with samples, beams, prefix hits and preemptions."""
    schedule_decode = Scheduler._schedule_decode
    taken: list[bool] = []

    def record_decode(*args: Any) -> bool:
        taken.append(may_take and schedule_decode(*args))
        return taken[-1]

    def run() -> list[StepPlan]:
        rng = random.Random(seed)
        digest = rng.choice([None, "xxh3"])
        driver = Driver(make_scheduler(num_blocks=rng.choice([13, 30]), digest=digest), lag)
        for number in range(9):
            kinds: list[dict[str, Any]] = [{}, {}, {"n": 2}, {"beam": BeamSearch(2)}]
            prompt, most = rng.randint(1, 14), rng.randint(1, 12)
            kind = rng.choice(kinds)
            driver.add(make_request(str(number), prompt, most, seq_id=1000 * number, **kind))
            for _ in range(rng.randint(0, 6)):
                driver.step()
            if rng.random() < 0.2:
                driver.scheduler.abort(str(rng.randint(0, number)))
        driver.run()
        return driver.plans

    monkeypatch.setattr(Scheduler, "_schedule_decode", record_decode)
    may_take = True
    plans = run()
    assert any(taken)
    assert not all(taken)
    may_take = False
    for plan, expected in zip(plans, run(), strict=True):
        assert shape(plan) == shape(expected)
        assert updates(plan) == updates(expected)
        assert plan.block_copies == expected.block_copies
        assert plan.preempted_request_ids == expected.preempted_request_ids
