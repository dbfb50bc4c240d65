"""Test plans of the scheduler with `SchedulingGoal.THROUGHPUT`."""

import pytest
from core_driver import Driver, driver_of, make_request, make_scheduler
from core_plans import shape, the

from jpaged.core import admission
from jpaged.core.plan import SchedulingGoal
from jpaged.core.request import RequestStatus
from jpaged.core.swap import PreemptionMode, PreemptionPolicy


@pytest.mark.parametrize(
    ("goal", "joined"),
    [(SchedulingGoal.LATENCY, [1, 1, 1]), (SchedulingGoal.THROUGHPUT, [0, 2, 1])],
)
def test_waiting_requests_are_admitted_several_at_a_time(goal: SchedulingGoal, joined: list[int]):
    scheduler = make_scheduler(300, max_num_seqs=64, max_num_batched_tokens=256)
    driver = Driver(scheduler, goal=goal)
    for i in range(64 + 3):
        driver.add(make_request(str(i), [1, 2, 3], max_tokens=30))
    driver.step()
    found = []
    for i in (5, 7, 9):
        assert scheduler.abort(str(i))
        found.append(sum(row.start == 0 for row in the(driver.step()).scheduled))
    assert found == joined
    driver.run()


def throughput_driver(*prompt_lens: int, **limits) -> Driver:
    requests = (make_request(str(i), length) for i, length in enumerate(prompt_lens))
    driver = driver_of(*requests, **{"num_blocks": 30, "max_num_batched_tokens": 10, **limits})
    driver.goal = SchedulingGoal.THROUGHPUT
    return driver


def check_steps(driver: Driver, *expected: dict[int, int]) -> None:
    """Check how many tokens of each sequence the next steps compute, then run to the end.

    `expected` has a dict from sequence ids to numbers of tokens for each step.
    """
    assert [{s: n for s, _, n, _ in shape(driver.step())} for _ in expected] == [*expected]
    driver.run()


def test_decoding_pauses_while_prompts_use_the_whole_token_budget():
    driver = throughput_driver(6, 6, 6, 6, 6, max_num_seqs=6)
    assert [shape(driver.step()) for _ in range(5)] == [
        [(0, 0, 6, True), (1, 0, 4, False)],
        [(1, 4, 2, True), (2, 0, 6, True), (3, 0, 2, False)],
        [(3, 2, 4, True), (4, 0, 6, True)],
        [(0, 6, 1, True), (1, 6, 1, True), (2, 6, 1, True), (3, 6, 1, True), (4, 6, 1, True)],
        [(0, 7, 1, True), (1, 7, 1, True), (2, 7, 1, True), (3, 7, 1, True), (4, 7, 1, True)],
    ]
    driver.run()


def test_prompts_that_do_not_fill_a_step_are_computed_together_with_decode_rows():
    driver = throughput_driver(6, 6, 6)
    check_steps(driver, {0: 6, 1: 4}, {0: 1, 1: 2, 2: 6}, {0: 1, 1: 1, 2: 1})


@pytest.mark.parametrize("digest", [None, "xxh3"])
def test_prompt_longer_than_a_step_is_computed_alone(digest: str | None):
    driver = throughput_driver(8, 27, digest=digest)
    check_steps(driver, {0: 8, 1: 2}, {1: 10}, {1: 10}, {0: 1, 1: 5}, {0: 1, 1: 1})


@pytest.mark.parametrize(
    ("goal", "by_priority"), [(SchedulingGoal.LATENCY, False), (SchedulingGoal.THROUGHPUT, True)]
)
def test_each_step_decodes_all_sequences_if_the_goal_is_latency_or_requests_have_priorities(
    goal: SchedulingGoal, by_priority: bool
):
    driver = throughput_driver(6, 6, 6, 6, by_priority=by_priority)
    driver.goal = goal
    check_steps(driver, {0: 6, 1: 4}, {0: 1, 1: 2, 2: 6, 3: 1})


@pytest.mark.parametrize(
    ("limits", "second"),
    [
        ({}, {1: 2, 2: 6, 3: 2}),
        ({"max_num_seqs": 3}, {0: 1, 1: 2, 2: 6}),
        # The pool has 10 blocks. Running requests hold 3, the new prompts need 5, and 2 must stay
        # free.
        ({"num_blocks": 1 + 10}, {1: 2, 2: 6, 3: 2}),
        ({"num_blocks": 1 + 9}, {0: 1, 1: 2, 2: 6, 3: 1}),
    ],
)
def test_prompts_fill_a_step_only_if_rows_and_blocks_suffice(limits: dict, second: dict):
    check_steps(throughput_driver(6, 6, 6, 6, **limits), {0: 6, 1: 4}, second)


def test_step_with_two_samples_of_one_prompt_counts_the_prompt_once():
    driver = throughput_driver(10, max_num_seqs=8)
    driver.add(make_request("1", 6, seq_id=100, n=2))
    driver.add(make_request("2", 6, seq_id=200))
    check_steps(driver, {0: 10}, {0: 1, 100: 5, 200: 4})


def test_no_request_overtakes_a_partly_computed_request_with_two_samples():
    driver = throughput_driver(max_num_seqs=8)
    driver.add(make_request("0", 25, seq_id=0, n=2))
    for name in "234":
        driver.add(make_request(name, 6))
    check_steps(driver, {0: 10}, {0: 10}, {0: 4, 2: 6}, {0: 1, 1: 1, 2: 1, 3: 6, 4: 1})


@pytest.mark.parametrize(("scored_from", "second"), [(None, {0: 1, 1: 8, 2: 1}), (1, {1: 8, 2: 2})])
def test_decoding_pauses_only_for_prompts_that_are_not_in_the_prefix_cache(
    scored_from: int | None, second: dict
):
    driver = throughput_driver(digest="xxh3")
    for name in "0123":
        driver.add(make_request(name, [7] * 9, scored_from=scored_from))
    check_steps(driver, {0: 9, 1: 1}, second)


def test_prompt_within_one_block_has_no_cached_prefix():
    driver = throughput_driver(max_num_batched_tokens=8, digest="xxh3")
    for name in "0123":
        driver.add(make_request(name, [7] * 4))
    check_steps(driver, {0: 4, 1: 4}, {2: 4, 3: 4})


@pytest.mark.parametrize("policy", [None, PreemptionPolicy(PreemptionMode.SWAP, num_host_blocks=8)])
def test_decoding_continues_while_only_preempted_requests_wait(policy: PreemptionPolicy | None):
    driver = throughput_driver(num_blocks=1 + 12, pressure=policy)
    for name, prompt_len, max_tokens in (("0", 3, 20), ("1", 25, 7), ("2", 11, 9)):
        driver.add(make_request(name, prompt_len, max_tokens))
    driver.step_until_preemption()
    driver.add(make_request("3", 10))
    while driver.requests["2"].status is not RequestStatus.RUNNING:
        assert 0 in [row[0] for row in shape(driver.step())]
    driver.run()


@pytest.fixture
def two_free_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the scheduler admit prompts only if at least 2 of the 4 batch rows are free."""
    monkeypatch.setattr(admission, "ROWS_PER_FREE_ROW", 2)


@pytest.mark.usefixtures("two_free_rows")
def test_prompts_wait_until_enough_batch_rows_are_free():
    driver = throughput_driver(3, 3, 3)
    driver.step()
    for name in "34":
        driver.add(make_request(name, 10))
    check_steps(driver, {0: 1, 1: 1, 2: 1})


@pytest.mark.usefixtures("two_free_rows")
def test_partly_computed_prompt_takes_all_tokens_of_the_next_steps():
    check_steps(throughput_driver(3, 3, 27, 9, 9), {0: 3, 1: 3, 2: 4}, {2: 10}, {2: 10})
