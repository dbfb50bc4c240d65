"""Test which block ids preemption by swapping copies and frees."""

import pytest
from core_driver import Driver, driver_of, make_request, make_requests, make_scheduler
from core_plans import forks, num_free, samples, shape, status, tables, the, updates
from core_swapped import SWAP, swapped_out

from jpaged.core.admission import Admission
from jpaged.core.prefix_cache import REGISTRATION_ENDED
from jpaged.core.request import FinishReason, Sequence
from jpaged.core.sequence_table import RequestQueue


def test_sequence_is_swapped_out_and_in():
    driver = swapped_out()
    plan = driver.plans[-1]
    assert (plan.preempted_request_ids, plan.released_seq_ids) == (("2",), (2,))
    assert plan.swap_outs == ((1, (3, 5)),)
    assert updates(plan) == [((3, 5),)]  # the swap-out reads block 5 before request 1 writes to it
    (sequence,) = samples(driver, "2")
    assert (status(driver, "2"), driver.scheduler.num_swapped) == ("swapped", 1)
    assert (sequence.num_computed_tokens, sequence.host_block_table) == (6, [0, 1])
    assert (tables(driver, "2"), driver.scheduler.swap_space.num_used_host_blocks) == ([[]], 2)
    driver.step()
    assert driver.requests["1"].is_finished
    plan = the(driver.step())  # this step swaps in request 2, and computes no tokens
    assert (shape(plan), plan.num_tokens) == ([], 0)
    assert plan.swap_ins == ((1, ((0, 3), (1, 5))),)
    assert driver.scheduler.swap_space.num_used_host_blocks == 0
    plan = the(driver.step())
    assert (shape(plan), plan.is_decode) == ([(2, 6, 1, True)], False)
    assert updates(plan) == [((0, 3), (1, 5))]
    driver.run()


@pytest.mark.parametrize("lag", [1, 2])
def test_swapped_out_request_is_swapped_in_only_after_all_its_results_are_read(lag: int):
    driver = swapped_out(lag)
    (sequence,) = samples(driver, "2")
    computed = sequence.num_computed_tokens
    assert computed == 6
    while status(driver, "2") == "swapped":
        driver.step()
    assert (sequence.num_pending_tokens, sequence.num_in_flight_steps) == (0, 0)
    assert (sequence.num_computed_tokens, len(sequence.token_ids)) == (6, 7)
    driver.run()


def swapped_group() -> Driver:
    requests = make_request("1", 3, max_tokens=8), make_request("2", 4, seq_id=10, n=2)
    driver = driver_of(*requests, num_blocks=8, block_size=2, pressure=SWAP)
    driver.step_until_preemption()
    return driver


def test_blocks_shared_by_samples_are_swapped_once_and_shared_again():
    driver = swapped_group()
    assert driver.plans[-2].block_copies == ((4, 5),)
    assert driver.plans[-1].swap_outs == ((1, (3, 5, 4)),)
    assert [s.host_block_table for s in samples(driver, "2")] == [[0, 1], [0, 2]]
    while not driver.plans[-1].swap_ins:
        driver.step()
    ((_, copies),) = driver.plans[-1].swap_ins
    assert [host_block for host_block, _ in copies] == [0, 1, 2]
    shared, first, second = (block_id for _, block_id in copies)
    assert tables(driver, "2") == [[shared, first], [shared, second]]
    blocks = driver.scheduler.block_manager.pool.blocks
    assert [blocks[block_id].ref_cnt for block_id in (shared, first, second)] == [2, 1, 1]
    driver.run()


def test_sample_that_ends_while_swapped_out_is_not_swapped_in():
    driver = swapped_group()
    driver.scheduler.finish_sequence(samples(driver, "2")[0], FinishReason.ABORT)
    assert driver.scheduler.swap_space.num_used_host_blocks == 3  # the whole swap entry
    plan = the(driver.step())
    assert plan.swap_ins == ((1, ((0, 7), (2, 5))),)
    assert tables(driver, "2") == [[7, 5]]
    driver.run()


@pytest.mark.parametrize("sample_by_sample", [False, True])
def test_swap_entry_of_an_ended_request_is_dropped(sample_by_sample: bool):
    driver = swapped_group()
    if sample_by_sample:
        for sequence in samples(driver, "2"):
            driver.scheduler.finish_sequence(sequence, FinishReason.ABORT)
    else:
        driver.scheduler.abort("2")
    assert driver.scheduler.swap_space.num_used_host_blocks == 0
    plan = the(driver.step())
    assert (plan.dropped_swap_entry_ids, plan.swap_ins) == ((1,), ())
    driver.run()


def test_swap_out_is_cancelled_if_the_request_is_aborted_before_the_next_plan():
    scheduler = make_scheduler(num_blocks=5, block_size=4, max_num_seqs=2, pressure=SWAP)
    driver = Driver(scheduler, lag=2)
    driver.add(make_request("1", 7, max_tokens=3))
    driver.add(make_request("2", 1, max_tokens=6))
    for _ in range(4):
        driver.step()
    assert scheduler.schedule() is None  # request 2 preempts itself
    assert status(driver, "2") == "swapped"
    scheduler.abort("2")
    assert scheduler.swap_space.pop_swap_changes() == ((), (), ())
    driver.run()


@pytest.mark.parametrize("is_pinned", [False, True])
def test_swap_in_copies_no_cached_block(is_pinned: bool):
    driver = swapped_out(digest="xxh3")
    manager, (sequence,) = driver.scheduler.block_manager, samples(driver, "2")
    pin = manager.pins.pin(manager.find_prefix(sequence)) if is_pinned else None
    driver.step()
    plan = the(driver.step())
    assert plan.swap_ins == ((1, ((1, 5),)),)  # block 3 is still cached
    assert tables(driver, "2") == [[3, 5]]
    assert (sequence.num_registered_blocks, sequence.num_computed_tokens) == (1, 6)
    assert manager.pool.blocks[3].ref_cnt == 1 + is_pinned
    driver.run()
    if pin is not None:
        manager.pins.unpin(pin)
        driver.check_end()


def test_swap_in_copies_nothing_if_all_blocks_are_cached():
    driver = Driver(make_scheduler(num_blocks=4, block_size=2, pressure=SWAP, digest="xxh3"))
    driver.add(make_request("1", 1, max_tokens=4))
    driver.add(make_request("2", 1, max_tokens=6))
    while status(driver, "2") != "swapped":
        driver.step()
    while status(driver, "2") == "swapped":
        plan = the(driver.step())
    assert plan.swap_ins[0] == (1, ())
    driver.run()


def test_swap_in_copies_a_partly_filled_block_even_if_full_blocks_are_cached():
    driver = swapped_out(digest="xxh3")
    manager, (sequence,) = driver.scheduler.block_manager, samples(driver, "2")
    sequence.token_ids.append(0)
    # Register block 5 as if another sequence had computed all eight tokens.
    block = manager.pool.blocks[5]
    parent = manager.find_prefix(sequence, 4)[0].cache_entry
    assert manager.prefix_cache is not None
    assert parent is not None
    assert block.cache_entry is None
    manager.prefix_cache.register(block, parent.entry_id, sequence.token_ids[4:])
    assert [b.block_id for b in manager.find_prefix(sequence, 8)] == [3, 5]
    driver.scheduler.abort("1")
    assert num_free(driver) == 5
    assert driver.scheduler.swap_space.measure_fit(driver.requests["2"]).hits == [
        [manager.pool.blocks[3]]
    ]


def test_swapped_out_request_is_swapped_in_without_cached_blocks_after_a_cache_reset():
    driver = swapped_out(digest="xxh3")
    (sequence,) = samples(driver, "2")
    driver.scheduler.reset_prefix_cache()
    manager, other = driver.scheduler.block_manager, Sequence(99, sequence.token_ids[:4], 4)
    driver.scheduler.abort("1")
    manager.append(other, 4)
    other.num_computed_tokens = 4
    manager.register_full_blocks(other, 4)
    swap_space, request = driver.scheduler.swap_space, driver.requests["2"]
    swap_space.swap_in(request, swap_space.measure_fit(request).hits)
    # The block in the prefix cache may have been computed with other weights, so request 2 does not
    # use this block.
    assert manager.find_prefix(other, 4)
    assert sequence.block_table[0] != other.block_table[0]
    assert sequence.num_registered_blocks == REGISTRATION_ENDED


def test_sequence_swapped_out_during_a_cache_reset_is_never_cached():
    driver = swapped_out(digest="xxh3")
    driver.scheduler.reset_prefix_cache()
    driver.step()
    plan = the(driver.step())
    assert plan.swap_ins == ((1, ((0, 3), (1, 5))),)  # all blocks
    driver.run()
    manager, history = driver.scheduler.block_manager, samples(driver, "2")[0].token_ids
    assert manager.find_prefix(Sequence(99, history, 1)) == []


def test_sequence_swapped_out_after_a_cache_reset_is_never_cached():
    driver = driver_of(*make_requests((7, 8), (1, 8)), num_blocks=6, pressure=SWAP, digest="xxh3")
    for _ in range(5):
        driver.step()
    driver.scheduler.reset_prefix_cache()
    driver.run()
    assert [len(plan.swap_ins) for plan in driver.plans].count(1) == 1
    history = samples(driver, "2")[0].token_ids
    assert driver.scheduler.block_manager.find_prefix(Sequence(99, history, 1)) == []


def test_prefix_can_be_pinned_before_the_host_reads_tokens_of_a_swapped_out_sequence():
    scheduler = make_scheduler(
        num_blocks=9, max_model_len=28, block_size=4, digest="xxh3", pressure=SWAP
    )
    driver, pin = Driver(scheduler, lag=1, burst=4), None
    driver.add(make_request("1", 11, max_tokens=10))
    driver.add(make_request("2", 6, max_tokens=8))
    (first,), (second,) = samples(driver, "1"), samples(driver, "2")
    while not scheduler.num_swapped:
        driver.step()
        pin = pin or scheduler.pin_prefix(first.token_ids[:4])
    assert len(second.token_ids) < second.num_computed_tokens
    for each in pin, scheduler.pin_prefix(first.token_ids[:8]):
        if each is not None:
            scheduler.block_manager.pins.unpin(each)
    driver.run()


def test_no_request_is_admitted_before_the_first_swapped_out_request():
    driver = swapped_out()
    driver.add(make_request("3", 1, max_tokens=2))
    assert num_free(driver) == 1
    plan = the(driver.step())
    assert (shape(plan), status(driver, "3")) == ([(1, 13, 1, True)], "waiting")
    plan = the(driver.step())  # the third request joins immediately
    assert (len(plan.swap_ins), shape(plan)) == (1, [(3, 0, 1, True)])
    driver.run()


def test_swap_in_leaves_one_free_block_for_running_requests():
    driver = swapped_out()
    scheduler, request = driver.scheduler, driver.requests["2"]
    scheduler.abort("1")
    taken = scheduler.block_manager.pool.allocate(3)
    # The swap-in needs two blocks. If another request runs, a third block must stay free.
    assert num_free(driver) == 2
    running = RequestQueue()
    running.add(make_request("3", 1))
    books = scheduler.config, scheduler.block_manager, scheduler.swap_space
    alone, shared = Admission(*books, RequestQueue()), Admission(*books, running)
    assert shared.find_fit(request) is None
    assert alone.find_fit(request) == ([[]], 2)
    request.live_sequences.append(sample := Sequence(99, [1], 1, host_block_table=[2]))
    assert alone.find_fit(request) is None
    # the scheduler checks again whether the request fits, because a sample has ended
    request.live_sequences.remove(sample)
    assert alone.find_fit(request) == ([[]], 2)
    scheduler.block_manager.pool.free(taken)
    assert shared.find_fit(request) == ([[]], 2)
    driver.run()


def test_request_is_swapped_out_while_the_common_prefix_of_its_samples_is_computed():
    limits = {"num_blocks": 8, "block_size": 2, "max_num_batched_tokens": 4}
    request = make_request("1", 6, max_tokens=2, seq_id=10, n=2, priority=1)
    driver = driver_of(request, pressure=SWAP, by_priority=True, **limits)
    assert shape(driver.step()) == [(10, 0, 4, False)]
    driver.add(make_request("2", 11, max_tokens=1))
    plan = the(driver.step())
    assert plan.swap_outs == ((1, (1, 2)),)
    assert [s.host_block_table for s in samples(driver, "1")] == [[0, 1], []]
    while status(driver, "1") == "swapped":
        plan = the(driver.step())
    assert len(plan.swap_ins[0].copies) == 2
    plan = the(driver.step())
    assert (shape(plan), forks(plan)) == ([(10, 4, 1, False)], [])
    plan = the(driver.step())
    assert (shape(plan), forks(plan)) == ([(10, 5, 1, True), (11, 5, 1, True)], [(10, 11)])
    driver.run()


def test_swap_in_of_a_shared_partly_filled_block_needs_one_more_block():
    first = make_request("1", 4, max_tokens=1, seq_id=10, n=4)
    second = make_request("2", 3, max_tokens=2, seq_id=20, n=2)
    limits = {"num_blocks": 6, "max_num_seqs": 6, "max_num_batched_tokens": 8}
    driver = driver_of(first, second, pressure=SWAP, **limits)
    driver.step()
    # Copies on write of request 1 take the blocks that request 2 needs.
    plan = the(driver.step())
    assert (plan.preempted_request_ids, len(plan.block_copies)) == (("2",), 3)
    assert [s.host_block_table for s in samples(driver, "2")] == [[0], [0]]
    assert driver.requests["1"].is_finished
    pool = driver.scheduler.block_manager.pool
    taken = pool.allocate(4)
    # One block is free, but a second block is needed to copy a shared block before a write.
    assert driver.scheduler.schedule() is None
    pool.free(taken)
    plan = the(driver.step())
    assert len(plan.swap_ins) == 1
    plan = the(driver.step())
    assert (shape(plan), len(plan.block_copies)) == ([(20, 2, 1, True), (21, 2, 1, True)], 1)
    driver.run()
