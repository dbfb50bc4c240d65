"""What the scheduler plans where only the end of all counts."""

import pytest
from core_driver import Driver, make_request, make_scheduler, shape

from jpaged.core.plan import Goal
from jpaged.core.scheduler import Scheduler


@pytest.mark.parametrize(
    ("goal", "joined"), [(Goal.LATENCY, [1, 1, 1]), (Goal.THROUGHPUT, [0, 2, 1])]
)
def test_those_who_wait_join_several_at_a_time(goal: Goal, joined: list[int]):
    """Two, of 64 seats; or all who wait, if they are fewer."""
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
    driver = Driver(scheduler, goal=Goal.THROUGHPUT)
    for i, prompt_len in enumerate(prompt_lens):
        driver.add(make_request(str(i), prompt_len, **more))
    return driver


def tokens_by_sequence(driver: Driver, num_steps: int) -> list[dict[int, int]]:
    return [{s: n for s, _, n, _ in shape(driver.step())} for _ in range(num_steps)]


def test_nobody_decodes_beside_prompts_that_fill_the_step():
    """A prompt that was begun goes on; what no longer fills a step is computed beside decoding."""
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


def test_prompts_that_do_not_fill_the_step_join_those_who_decode():
    driver = driver_of(make_scheduler(30, max_num_batched_tokens=10), [6, 6, 6])
    assert tokens_by_sequence(driver, 3) == [{0: 6, 1: 4}, {0: 1, 1: 2, 2: 6}, {0: 1, 1: 1, 2: 1}]
    driver.run()


def test_a_prompt_longer_than_a_step_is_waited_for_by_itself():
    """To its last part, which leaves room."""
    driver = driver_of(make_scheduler(30, max_num_batched_tokens=10), [8, 27])
    expected = [{0: 8, 1: 2}, {1: 10}, {1: 10}, {0: 1, 1: 5}, {0: 1, 1: 1}]
    assert tokens_by_sequence(driver, 5) == expected
    driver.run()


def test_for_latency_all_decode_in_every_step():
    driver = driver_of(make_scheduler(30, max_num_batched_tokens=10), [6, 6, 6, 6])
    driver.goal = Goal.LATENCY
    assert tokens_by_sequence(driver, 2) == [{0: 6, 1: 4}, {0: 1, 1: 2, 2: 6, 3: 1}]
    driver.run()


def test_where_priorities_count_all_decode_in_every_step():
    scheduler = make_scheduler(30, max_num_batched_tokens=10, by_priority=True)
    driver = driver_of(scheduler, [6, 6, 6, 6])
    assert tokens_by_sequence(driver, 2) == [{0: 6, 1: 4}, {0: 1, 1: 2, 2: 6, 3: 1}]
    driver.run()


@pytest.mark.parametrize(
    ("limits", "second"),
    [
        ({}, {1: 2, 2: 6, 3: 2}),
        ({"max_num_seqs": 3}, {0: 1, 1: 2, 2: 6}),  # no seat for the one who would fill it
        ({"num_blocks": 10}, {1: 2, 2: 6, 3: 2}),  # 3 of 9 are taken, 5 needed, and a spare one
        ({"num_blocks": 9}, {0: 1, 1: 2, 2: 6}),
    ],
)
def test_prompts_fill_a_step_only_with_seats_and_blocks_for_all(limits: dict, second: dict):
    given = {"num_blocks": 30, "max_num_batched_tokens": 10, **limits}
    driver = driver_of(make_scheduler(**given), [6, 6, 6, 6])
    assert tokens_by_sequence(driver, 2)[1] == second
    driver.run()


def test_samples_of_one_prompt_fill_no_step():
    """Who comes after them is not looked at, for nobody is passed."""
    driver = driver_of(make_scheduler(30, max_num_seqs=8, max_num_batched_tokens=10), [10])
    driver.add(make_request("1", 6, seq_id=100, n=2))
    driver.add(make_request("2", 6, seq_id=200))
    assert tokens_by_sequence(driver, 2) == [{0: 10}, {0: 1, 100: 5, 200: 4}]
    driver.run()
