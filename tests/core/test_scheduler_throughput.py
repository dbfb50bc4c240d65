"""Test plans with the throughput goal."""

import pytest
from core_driver import Driver, make_request, make_scheduler
from core_plans import shape

from jpaged.core import admission
from jpaged.core.plan import SchedulingGoal
from jpaged.core.request import RequestStatus
from jpaged.core.scheduler import Scheduler
from jpaged.core.swap import PreemptionMode, PreemptionPolicy


@pytest.mark.parametrize(
    ("goal", "joined"),
    [(SchedulingGoal.LATENCY, [1, 1, 1]), (SchedulingGoal.THROUGHPUT, [0, 2, 1])],
)
def test_waiting_requests_join_several_at_a_time(goal: SchedulingGoal, joined: list[int]):
    scheduler = make_scheduler(300, max_num_seqs=64, max_num_batched_tokens=256)
    driver = Driver(scheduler, goal=goal)
    for i in range(64 + 3):
        driver.add(make_request(str(i), [1, 2, 3], max_tokens=30))
    driver.step()
    found = []
    for i in (5, 7, 9):
        assert scheduler.abort(str(i))
        plan = driver.step()
        assert plan is not None
        found.append(sum(row.start == 0 for row in plan.scheduled))
    assert found == joined
    driver.run()


def driver_of(scheduler: Scheduler, prompt_lens: list[int], **more) -> Driver:
    driver = Driver(scheduler, goal=SchedulingGoal.THROUGHPUT)
    for i, prompt_len in enumerate(prompt_lens):
        driver.add(make_request(str(i), prompt_len, **more))
    return driver


def tokens_by_sequence(driver: Driver, num_steps: int) -> list[dict[int, int]]:
    return [{s: n for s, _, n, _ in shape(driver.step())} for _ in range(num_steps)]


def test_no_row_decodes_in_a_step_that_prompts_fill():
    """A prompt that was begun goes on; what no longer fills a step is computed with decoding."""
    scheduler = make_scheduler(30, max_num_seqs=6, max_num_batched_tokens=10)
    driver = driver_of(scheduler, [6, 6, 6, 6, 6], max_tokens=3)
    assert [shape(driver.step()) for _ in range(5)] == [
        [(0, 0, 6, True), (1, 0, 4, False)],
        [(1, 4, 2, True), (2, 0, 6, True), (3, 0, 2, False)],
        [(3, 2, 4, True), (4, 0, 6, True)],
        [(0, 6, 1, True), (1, 6, 1, True), (2, 6, 1, True), (3, 6, 1, True), (4, 6, 1, True)],
        [(0, 7, 1, True), (1, 7, 1, True), (2, 7, 1, True), (3, 7, 1, True), (4, 7, 1, True)],
    ]
    driver.run()


def test_prompts_that_do_not_fill_a_step_join_decoding_rows():
    driver = driver_of(make_scheduler(30, max_num_batched_tokens=10), [6, 6, 6])
    assert tokens_by_sequence(driver, 3) == [{0: 6, 1: 4}, {0: 1, 1: 2, 2: 6}, {0: 1, 1: 1, 2: 1}]
    driver.run()


@pytest.mark.parametrize("digest", [None, "xxh3"])
def test_prompt_longer_than_a_step_is_computed_alone(digest: str | None):
    """To its last part, which leaves room."""
    driver = driver_of(make_scheduler(30, max_num_batched_tokens=10, digest=digest), [8, 27])
    expected = [{0: 8, 1: 2}, {1: 10}, {1: 10}, {0: 1, 1: 5}, {0: 1, 1: 1}]
    assert tokens_by_sequence(driver, 5) == expected
    driver.run()


def test_latency_goal_decodes_all_rows_in_each_step():
    driver = driver_of(make_scheduler(30, max_num_batched_tokens=10), [6, 6, 6, 6])
    driver.goal = SchedulingGoal.LATENCY
    assert tokens_by_sequence(driver, 2) == [{0: 6, 1: 4}, {0: 1, 1: 2, 2: 6, 3: 1}]
    driver.run()


def test_priority_policy_decodes_all_rows_in_each_step():
    scheduler = make_scheduler(30, max_num_batched_tokens=10, by_priority=True)
    driver = driver_of(scheduler, [6, 6, 6, 6])
    assert tokens_by_sequence(driver, 2) == [{0: 6, 1: 4}, {0: 1, 1: 2, 2: 6, 3: 1}]
    driver.run()


@pytest.mark.parametrize(
    ("limits", "second"),
    [
        ({}, {1: 2, 2: 6, 3: 2}),
        (
            {"max_num_seqs": 3},
            {0: 1, 1: 2, 2: 6},
        ),  # no row is free for the request that would fill the step
        # 3 are taken, 5 are needed, and 2 for those that run.
        ({"num_blocks": 1 + 10}, {1: 2, 2: 6, 3: 2}),
        ({"num_blocks": 1 + 9}, {0: 1, 1: 2, 2: 6, 3: 1}),
    ],
)
def test_prompts_fill_a_step_only_with_rows_and_blocks_for_all(limits: dict, second: dict):
    given = {"num_blocks": 30, "max_num_batched_tokens": 10, **limits}
    driver = driver_of(make_scheduler(**given), [6, 6, 6, 6])
    assert tokens_by_sequence(driver, 2)[1] == second
    driver.run()


def test_samples_of_one_prompt_do_not_fill_a_step():
    """Later requests are not looked at, for none is passed."""
    driver = driver_of(make_scheduler(30, max_num_seqs=8, max_num_batched_tokens=10), [10])
    driver.add(make_request("1", 6, seq_id=100, n=2))
    driver.add(make_request("2", 6, seq_id=200))
    assert tokens_by_sequence(driver, 2) == [{0: 10}, {0: 1, 100: 5, 200: 4}]
    driver.run()


def test_no_request_overtakes_a_partly_computed_group():
    driver = driver_of(make_scheduler(30, max_num_seqs=8, max_num_batched_tokens=10), [])
    driver.add(make_request("0", 25, seq_id=0, n=2))
    for i in (2, 3, 4):
        driver.add(make_request(str(i), 6))
    expected = [{0: 10}, {0: 10}, {0: 4, 2: 6}, {0: 1, 1: 1, 2: 1, 3: 6, 4: 1}]
    assert tokens_by_sequence(driver, 4) == expected
    driver.run()


def test_cached_tokens_do_not_fill_a_step():
    """Running sequences decode in the same steps."""
    scheduler = make_scheduler(30, max_num_batched_tokens=10, digest="xxh3")
    driver = driver_of(scheduler, [])
    prompt = [7] * 9
    for name in "0123":
        driver.add(make_request(name, prompt))
    assert tokens_by_sequence(driver, 2) == [{0: 9, 1: 1}, {0: 1, 1: 8, 2: 1}]
    driver.run()


def test_requests_that_ignore_the_cache_fill_a_step_with_cached_tokens():
    scheduler = make_scheduler(30, max_num_batched_tokens=10, digest="xxh3")
    driver = driver_of(scheduler, [])
    for name in "0123":
        driver.add(make_request(name, [7] * 9, reads=False))
    assert tokens_by_sequence(driver, 2) == [{0: 9, 1: 1}, {1: 8, 2: 2}]
    driver.run()


def test_prompt_within_one_block_has_no_cached_prefix():
    """The last token is computed in any case."""
    driver = driver_of(make_scheduler(30, max_num_batched_tokens=8, digest="xxh3"), [])
    for name in "0123":
        driver.add(make_request(name, [7] * 4))
    assert tokens_by_sequence(driver, 2) == [{0: 4, 1: 4}, {2: 4, 3: 4}]
    driver.run()


@pytest.mark.parametrize("policy", [None, PreemptionPolicy(PreemptionMode.SWAP, num_host_blocks=8)])
def test_preempted_request_alone_does_not_stop_decoding(policy: PreemptionPolicy | None):
    """No sequence waits for the requests behind it either."""
    driver = driver_of(make_scheduler(1 + 12, max_num_batched_tokens=10, pressure=policy), [])
    for name, prompt_len, max_tokens in (("0", 3, 20), ("1", 25, 7), ("2", 11, 9)):
        driver.add(make_request(name, prompt_len, max_tokens))
    while not driver.plans or not driver.plans[-1].preempted_request_ids:
        driver.step()
    driver.add(make_request("3", 10))
    back = driver.requests["2"]
    while back.status is not RequestStatus.RUNNING:
        assert 0 in tokens_by_sequence(driver, 1)[0]
    driver.run()


@pytest.fixture
def two_of_four(monkeypatch: pytest.MonkeyPatch) -> None:
    """Number of rows that must be free for a step with prompts."""
    monkeypatch.setattr(admission, "ROWS_PER_FREE_ROW", 2)


@pytest.mark.usefixtures("two_of_four")
def test_too_few_prompts_do_not_fill_a_step():
    driver = driver_of(make_scheduler(30, max_num_batched_tokens=10), [3, 3, 3])
    driver.step()
    for name in "34":
        driver.add(make_request(name, 10))
    assert tokens_by_sequence(driver, 1) == [{0: 1, 1: 1, 2: 1}]
    driver.run()


@pytest.mark.usefixtures("two_of_four")
def test_partly_computed_prompt_fills_a_step():
    driver = driver_of(make_scheduler(30, max_num_batched_tokens=10), [3, 3, 27, 9, 9])
    assert tokens_by_sequence(driver, 3) == [{0: 3, 1: 3, 2: 4}, {2: 10}, {2: 10}]
    driver.run()
