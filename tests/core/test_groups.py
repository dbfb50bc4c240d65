"""Test the plans of requests with several samples."""

import pytest
from core_driver import Driver, driver_of, make_request, make_scheduler
from core_plans import forks, num_free, samples, shape, status, tables, the, updates

from jpaged.core.groups import common_prefix_length
from jpaged.core.request import FinishReason, Sequence


def test_samples_share_the_prompt_and_copy_its_last_block():
    driver = driver_of(make_request("1", 6, max_tokens=4, seq_id=10, n=3), block_size=4)
    plan = the(driver.step())  # each sample computes the last token of the prompt itself
    assert shape(plan) == [(10, 0, 5, False)]
    assert (forks(plan), plan.block_copies, plan.is_decode) == ([], (), False)
    assert tables(driver, "1") == [[1, 2], [], []]
    plan = the(driver.step())
    assert forks(plan) == [(10, 11), (10, 12)]
    assert shape(plan) == [(10, 5, 1, True), (11, 5, 1, True), (12, 5, 1, True)]
    assert plan.block_copies == ((2, 3), (2, 4))  # the last sample writes to block 2 without a copy
    assert updates(plan) == [((1, 3),), ((1, 4),), ()]
    assert plan.is_decode
    assert tables(driver, "1") == [[1, 3], [1, 4], [1, 2]]
    plan = the(driver.step())
    assert (forks(plan), plan.block_copies, updates(plan)) == ([], (), [(), (), ()])
    driver.run()
    assert num_free(driver) == 10
    assert len({tuple(stream) for stream in driver.streams.values()}) == 3


def test_many_requests_fork_their_samples_in_one_step():
    driver = Driver(make_scheduler(300, 4, max_num_seqs=144, max_num_batched_tokens=144))
    for name in "123456789":
        driver.add(make_request(name, 3, max_tokens=3, seq_id=16 * int(name), n=16))
    driver.step()
    plan = the(driver.step())
    assert (len(plan.scheduled), len(plan.block_copies)) == (144, 9 * 15)
    driver.run()


@pytest.mark.parametrize(
    ("prompt", "num_shared", "forked", "copies", "expected"),
    [
        (1, 0, [], (), [[1], [2]]),
        (4, 3, [(10, 11)], ((1, 2),), [[2], [1]]),
        (5, 4, [(10, 11)], (), [[1, 2], [1, 3]]),
    ],
)
def test_samples_share_all_prompt_tokens_except_the_last(
    prompt: int, num_shared: int, forked: list, copies: tuple, expected: list
):
    driver = driver_of(make_request("1", prompt, seq_id=10, n=2))
    if num_shared > 0:
        assert shape(driver.step()) == [(10, 0, num_shared, False)]
    plan = the(driver.step())
    assert shape(plan) == [(10, num_shared, 1, True), (11, num_shared, 1, True)]
    assert (forks(plan), plan.block_copies, plan.is_decode) == (forked, copies, num_shared > 0)
    assert tables(driver, "1") == expected
    assert the(driver.step()).block_copies == ()
    driver.run()


def test_samples_of_a_cached_prompt_start_in_one_step_without_a_fork():
    driver = driver_of(make_request("1", list(range(9)), max_tokens=1), block_size=4, digest="xxh3")
    driver.run()
    driver.add(make_request("2", list(range(9)), max_tokens=2, seq_id=10, n=2))
    plan = the(driver.step())
    assert forks(plan) == []
    assert shape(plan) == [(10, 8, 1, True), (11, 8, 1, True)]
    assert updates(plan) == [((0, 1), (1, 2), (2, 4)), ((0, 1), (1, 2), (2, 5))]
    assert not plan.is_decode
    assert [sequence.num_cached_tokens for sequence in samples(driver, "2")] == [8, None]
    driver.run()


def test_sample_that_ends_early_frees_its_block_and_batch_row():
    driver = Driver(make_scheduler(block_size=4, max_num_seqs=2))
    driver.add(make_request("1", 6, max_tokens=4, seq_id=10, n=2))
    driver.add(make_request("2", 2, max_tokens=2))
    driver.step()
    driver.step()
    assert tables(driver, "1") == [[1, 3], [1, 2]]
    assert (num_free(driver), status(driver, "2")) == (7, "waiting")
    driver.scheduler.finish_sequence(samples(driver, "1")[0], FinishReason.STOP)
    assert num_free(driver) == 8  # block 1 is still shared
    plan = the(driver.step())
    assert plan.released_seq_ids == (10,)
    assert shape(plan) == [(11, 6, 1, True), (2, 0, 2, True)]
    assert not driver.requests["1"].is_finished
    driver.scheduler.finish_sequence(samples(driver, "1")[1], FinishReason.ABORT)
    assert driver.requests["1"].finish_reason is FinishReason.ABORT
    assert [s.finish_reason for s in samples(driver, "1")] == [FinishReason.STOP, "abort"]


def test_ending_a_sample_twice_changes_only_its_finish_reason():
    driver = driver_of(make_request("1", 6, max_tokens=4, seq_id=10, n=2), block_size=4)
    driver.step()
    driver.step()
    first, second = samples(driver, "1")
    driver.scheduler.finish_sequence(first, FinishReason.STOP)
    before = num_free(driver)
    driver.scheduler.finish_sequence(first, FinishReason.ABORT)
    assert (first.finish_reason, second.finish_reason) == (FinishReason.ABORT, None)
    assert num_free(driver) == before
    assert driver.requests["1"].live_sequences == [second]
    driver.run()


@pytest.mark.parametrize(("n", "expected"), [(1, FinishReason.ERROR), (2, FinishReason.STOP)])
def test_new_finish_reason_of_a_single_sample_becomes_the_finish_reason_of_the_request(
    n: int, expected: FinishReason
):
    driver = driver_of(make_request("1", 3, max_tokens=4, seq_id=10, n=n))
    driver.step()
    driver.step()
    for sequence in samples(driver, "1"):
        driver.scheduler.finish_sequence(sequence, FinishReason.STOP)
    assert driver.requests["1"].finish_reason is FinishReason.STOP
    driver.scheduler.finish_sequence(samples(driver, "1")[0], FinishReason.ERROR)
    assert samples(driver, "1")[0].finish_reason is FinishReason.ERROR
    assert driver.requests["1"].finish_reason is expected
    driver.scheduler.check_integrity()


def test_step_with_a_small_token_budget_computes_only_some_samples_of_a_request():
    driver = Driver(make_scheduler(block_size=4, max_num_batched_tokens=2))
    driver.add(make_request("1", 4, max_tokens=2, seq_id=10, n=3))
    assert shape(driver.step()) == [(10, 0, 2, False)]
    assert shape(driver.step()) == [(10, 2, 1, False)]
    # All three samples could start, but the step may compute only two tokens.
    plan = the(driver.step())
    assert forks(plan) == [(10, 11), (10, 12)]
    assert shape(plan) == [(10, 3, 1, True), (11, 3, 1, True)]
    assert tables(driver, "1") == [[2], [3], [1]]
    assert shape(driver.step()) == [(10, 4, 1, True), (11, 4, 1, True)]
    assert shape(driver.step()) == [(12, 3, 1, True)]
    driver.run()


def test_next_step_of_two_samples_is_planned_before_the_previous_results_are_read():
    driver = driver_of(make_request("1", 6, max_tokens=3, seq_id=10, n=2), lag=1, block_size=4)
    plans = [driver.step() for _ in range(4)]
    assert [shape(plan) for plan in plans] == [
        [(10, 0, 5, False)],
        [(10, 5, 1, True), (11, 5, 1, True)],
        [(10, 6, 1, True), (11, 6, 1, True)],
        [(10, 7, 1, True), (11, 7, 1, True)],
    ]
    assert [forks(plan) for plan in plans] == [[], [(10, 11)], [], []]
    assert driver.step() is None
    driver.run()


def test_preempted_samples_recompute_their_common_prefix_once_and_fork():
    driver = Driver(make_scheduler(block_size=2, num_blocks=8))
    driver.add(make_request("1", 3, max_tokens=8))
    driver.add(make_request("2", 4, max_tokens=4, seq_id=10, n=2))
    driver.step()
    driver.step()
    assert tables(driver, "2") == [[3, 5], [3, 4]]
    plan = the(driver.step())
    assert (plan.preempted_request_ids, plan.released_seq_ids) == (("2",), (10, 11))
    assert tables(driver, "2") == [[], []]
    while status(driver, "2") == "preempted":
        plan = the(driver.step())
    # The common prefix is the whole prompt, because each sample has an output token.
    assert shape(plan) == [(10, 0, 4, False)]
    plan = the(driver.step())
    assert forks(plan) == [(10, 11)]
    assert shape(plan) == [(10, 4, 1, True), (11, 4, 1, True)]
    assert tables(driver, "2") == [[4, 3, 5], [4, 3, 7]]
    driver.run()


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_next_sample_computes_the_common_prefix_if_the_first_sample_ends(lag: int):
    driver = Driver(make_scheduler(block_size=4, max_num_batched_tokens=3), lag)
    driver.add(make_request("1", 8, max_tokens=3, seq_id=10, n=3))
    driver.step()
    driver.scheduler.finish_sequence(samples(driver, "1")[0], FinishReason.ABORT)
    plan = the(driver.step())
    assert (shape(plan), plan.released_seq_ids) == ([(11, 0, 3, False)], (10,))
    driver.run()
    assert [forks(plan) for plan in driver.plans if plan.row_forks] == [[(11, 12)]]
    assert [len(stream) for stream in driver.streams.values()] == [0, 3, 3]


def driver_with_waiting_forks() -> Driver:
    """Return a driver whose forked samples wait for blocks of an aborted request."""
    driver = Driver(make_scheduler(num_blocks=5, block_size=4, max_num_batched_tokens=8), lag=1)
    driver.add(make_request("1", 4, max_tokens=1, seq_id=10, n=3))
    driver.add(make_request("2", 5, seq_id=20))
    driver.step()
    driver.scheduler.abort("2")
    assert driver.scheduler.schedule() is None
    assert tables(driver, "1") == [[1], [1], [1]]
    return driver


@pytest.mark.parametrize(("ended", "expected"), [(None, [(10, 11), (10, 12)]), (1, [(10, 12)])])
def test_forked_samples_wait_for_free_blocks(ended: int | None, expected: list[tuple[int, int]]):
    driver = driver_with_waiting_forks()
    if ended is not None:
        driver.scheduler.finish_sequence(samples(driver, "1")[ended], FinishReason.ABORT)
    driver.read()
    plan = the(driver.step())
    assert (forks(plan), plan.released_seq_ids) == (expected, (20,))
    driver.run()


def test_samples_that_wait_for_blocks_can_start_after_the_first_sample_is_aborted():
    driver = driver_with_waiting_forks()
    driver.scheduler.finish_sequence(samples(driver, "1")[0], FinishReason.ABORT)
    driver.read()
    plan = the(driver.step())
    assert (forks(plan), plan.released_seq_ids) == ([], (20, 10))
    assert shape(plan) == [(11, 3, 1, True), (12, 3, 1, True)]
    assert updates(plan) == [((0, 4),), ((0, 1),)]
    assert not plan.is_decode
    driver.run()


def test_request_waits_until_batch_rows_for_all_its_samples_are_free():
    driver = Driver(make_scheduler(max_num_seqs=4))
    driver.add(make_request("1", 2, max_tokens=2, n=2, seq_id=10))
    driver.add(make_request("2", 2, max_tokens=2, n=3, seq_id=20))
    driver.add(make_request("3", 2, max_tokens=2))
    driver.step()
    assert [status(driver, name) for name in "123"] == ["running", "waiting", "waiting"]
    driver.run()
    joined = [r.sequence.request.request_id for p in driver.plans for r in p.scheduled]
    assert list(dict.fromkeys(joined)) == ["1", "2", "3"]


@pytest.mark.parametrize(("num_blocks", "expected"), [(6, "waiting"), (7, "running")])
def test_request_is_admitted_only_if_all_its_samples_fit(num_blocks: int, expected: str):
    # Request 2 needs two blocks for its prompt and a third block for a copy of the partly filled
    # block. A fourth block must stay free for the running request 1.
    requests = make_request("1", 5, 3), make_request("2", 6, 2, n=2, seq_id=10)
    driver = driver_of(*requests, num_blocks=num_blocks)
    driver.step()
    assert status(driver, "2") == expected
    driver.run()


def test_waiting_request_is_admitted_after_one_of_its_samples_is_aborted():
    driver = Driver(make_scheduler(num_blocks=6, block_size=4))
    driver.add(make_request("1", 5, max_tokens=3))
    driver.add(make_request("2", 6, max_tokens=2, n=2, seq_id=10))
    driver.step()
    assert (num_free(driver), status(driver, "2")) == (3, "waiting")
    driver.scheduler.finish_sequence(samples(driver, "2")[1], FinishReason.ABORT)
    driver.step()
    assert status(driver, "2") == "running"
    driver.run()


def test_no_request_is_admitted_while_a_running_request_waits_for_blocks():
    driver = Driver(make_scheduler(num_blocks=6, block_size=4, max_num_seqs=6), lag=1)
    driver.add(make_request("1", 4, max_tokens=1, seq_id=10, n=4))
    driver.add(make_request("2", 5, seq_id=20))
    driver.step()
    driver.scheduler.abort("2")
    driver.add(make_request("3", 1))
    # Two blocks would suffice for request 3, but request 1 waits for three.
    assert num_free(driver) == 2
    assert driver.scheduler.schedule() is None
    assert (num_free(driver), status(driver, "3")) == (2, "waiting")
    driver.read()
    driver.step()
    assert tables(driver, "1") == [[4], [5], [3], [1]]
    driver.run()


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ([[1, 2, 3], [1, 2, 3]], 3),
        ([[1, 2, 3], [1, 2], [1, 2, 3, 4]], 2),
        ([[1, 2, 3], [1, 9, 3], [1, 2, 3]], 1),
        ([[5, 1], [4, 1]], 0),
    ],
)
def test_common_prefix_length_of_several_sequences(texts: list[list[int]], expected: int):
    assert common_prefix_length([Sequence(0, text, 1) for text in texts]) == expected
