"""Test plans of the scheduler with speculative decoding."""

import numpy as np
import pytest
from core_driver import make_request, make_scheduler
from core_plans import queue_of, shape, the, updates
from core_speculation import RandomSpeculation, SpeculativeDriver
from test_watch import Replica

from jpaged.core.plan import NO_DRAFT, NO_TOKEN, REJECTED, StepPlan
from jpaged.core.request import FinishReason, NoTokenError
from jpaged.core.scheduler import Scheduler
from jpaged.core.speculation import MIN_PLAIN_STEPS, NUM_TRIAL_STEPS, Speculation
from jpaged.observe.pool_changes import CACHED


def speculative_scheduler(num_drafts: int = 3, rate: float = 1.0, **options) -> Scheduler:
    scheduler = make_scheduler(**options)
    scheduler.speculation = RandomSpeculation(num_drafts, rate=rate)
    scheduler.block_manager.has_reservations = True
    return scheduler


def decoding(scheduler: Scheduler, name: str = "1", length: int = 3, **options) -> StepPlan:
    """Add a request, compute its prompt, sample token 9, and return the plan of the next step."""
    scheduler.add(make_request(name, length, **options))
    plan = the(scheduler.schedule())
    scheduler.update(plan, np.array([9]))
    return the(scheduler.schedule())


def read(scheduler: Scheduler, plan: StepPlan, *rows: list[int]) -> list[int]:
    """Pass the tokens of each row to the scheduler. Return the tokens that the scheduler emits."""
    tokens = np.array(rows)
    emitted = scheduler.update(plan, tokens).emitted_tokens
    for column in tokens.T[1:]:
        emitted += scheduler.append_accepted(plan, column).emitted_tokens
    scheduler.check_integrity()
    return [token.token_id for token in emitted]


def test_verify_step_reserves_slots_for_all_drafts():
    scheduler = speculative_scheduler(max_model_len=40)
    plan = decoding(scheduler, max_tokens=20)
    assert shape(plan) == [(1, 3, 1, True)]
    # The last token is in slot 3. The drafts are in the slots 4 to 6, which are in the second
    # block.
    assert (plan.num_drafts, plan.limits, updates(plan)) == (3, (8,), [((1, 2),)])
    [sequence] = scheduler.running["1"].sequences
    assert sequence.block_table == [1, 2]
    # The next step may write three drafts after the four tokens that this step may return.
    plan = the(scheduler.schedule())
    assert (shape(plan), plan.limits, updates(plan)) == ([(1, 4, 1, True)], (12,), [((2, 3),)])


def test_scheduler_update_appends_several_accepted_tokens():
    scheduler = speculative_scheduler()
    plan = decoding(scheduler, max_tokens=20)
    assert read(scheduler, plan, [1, 2, 3, REJECTED]) == [1, 2, 3]
    [sequence] = scheduler.running["1"].sequences
    assert sequence.output_token_ids == [9, 1, 2, 3]
    assert (sequence.num_computed_tokens, sequence.num_pending_drafts) == (6, 0)
    assert shape(scheduler.schedule()) == [(1, 6, 1, True)]


def test_row_whose_verify_step_returned_no_token_is_computed_again():
    scheduler = speculative_scheduler()
    plan = decoding(scheduler, max_tokens=20)
    assert read(scheduler, plan, [NO_DRAFT] * 4) == []
    assert shape(scheduler.schedule()) == [(1, 3, 1, True)]


def test_request_fails_if_its_logits_are_not_finite_after_a_draft():
    scheduler = speculative_scheduler()
    plan = decoding(scheduler, max_tokens=20)
    tokens = np.array([[1, NO_TOKEN, NO_DRAFT, NO_DRAFT]])
    assert not scheduler.update(plan, tokens).failed
    [(request, error)] = scheduler.append_accepted(plan, tokens[:, 1]).failed
    assert (request.request_id, str(error)) == ("1", str(NoTokenError(2)))


@pytest.mark.parametrize(
    ("stop", "outputs", "reason"),
    [
        ({"stop_token_ids": frozenset([2])}, [9, 1, 2], FinishReason.STOP),
        ({"stop_token_ids": frozenset([2]), "min_tokens": 4}, [9, 1, 2, 3, 2], FinishReason.STOP),
        ({}, [9, 1, 2, 3, 2], None),
    ],
)
def test_stop_token_cuts_the_accepted_drafts(
    stop: dict, outputs: list[int], reason: FinishReason | None
):
    scheduler = speculative_scheduler()
    plan = decoding(scheduler, max_tokens=20, **stop)
    sequence = plan.scheduled[0].sequence
    read(scheduler, plan, [1, 2, 3, 2])
    assert (sequence.output_token_ids, sequence.finish_reason) == (outputs, reason)


def test_sequence_can_be_ended_between_two_accepted_tokens():
    """A stop string ends the sequence, and the tokens after it are dropped."""
    scheduler = speculative_scheduler()
    plan = decoding(scheduler, max_tokens=20)
    tokens, sequence = np.array([[1, 2, 3, 4]]), plan.scheduled[0].sequence
    scheduler.update(plan, tokens)
    scheduler.append_accepted(plan, tokens[:, 1])
    scheduler.finish_sequence(sequence, FinishReason.STOP)
    assert not scheduler.append_accepted(plan, tokens[:, 2]).emitted_tokens
    assert sequence.output_token_ids == [9, 1, 2]
    scheduler.check_integrity()


def test_last_output_token_gets_no_slot_in_a_verify_step():
    """The last output token needs no slot, because no step computes its KV."""
    scheduler = speculative_scheduler(num_drafts=7)
    plan = decoding(scheduler, max_tokens=5)
    assert plan.limits == (3 + 5 - 1,)
    read(scheduler, plan, [1, 2, 3, 4, REJECTED, NO_DRAFT, NO_DRAFT, NO_DRAFT])
    assert not scheduler.has_unfinished_requests


def test_row_keeps_its_reserved_blocks_when_drafts_are_rejected():
    scheduler = speculative_scheduler()
    plan = decoding(scheduler, max_tokens=20)
    read(scheduler, plan, [1, REJECTED, REJECTED, REJECTED])
    plan = the(scheduler.schedule())
    assert (updates(plan), plan.limits) == ([()], (8,))


def test_waiting_request_gets_blocks_that_were_reserved_for_drafts():
    """While a request waits, the scheduler frees the blocks that were reserved for drafts, and
    reserves no others."""
    scheduler = speculative_scheduler(num_blocks=7, max_model_len=20)
    first = decoding(scheduler, length=8, max_tokens=8)
    assert (updates(first), queue_of(scheduler.block_manager)) == ([((2, 3),)], [4, 5, 6])
    # This step may write to a fourth block if all drafts of the first step are accepted.
    second = the(scheduler.schedule())
    assert (updates(second), queue_of(scheduler.block_manager)) == ([((3, 4),)], [5, 6])
    read(scheduler, first, [1, REJECTED, REJECTED, REJECTED])
    read(scheduler, second, [1, REJECTED, REJECTED, REJECTED])
    scheduler.add(make_request("2", 12, max_tokens=2))
    plan = the(scheduler.schedule())
    # Request 2 needs three blocks, and one more must stay free. Block 4 was reserved for drafts of
    # request 1 and holds no tokens, so the scheduler frees it.
    assert shape(plan)[0] == (1, 10, 1, True)
    assert scheduler.running["1"].sequences[0].block_table == [1, 2, 3]
    assert not scheduler.waiting or queue_of(scheduler.block_manager)[0] == 4


def test_drafts_never_preempt_a_request():
    """Two sequences need all blocks of the pool, so drafts only use free slots of these blocks."""
    driver = SpeculativeDriver(
        speculative_scheduler(num_blocks=6, max_model_len=20), lag=1, acceptance=1.0
    )
    driver.add(make_request("1", 4, max_tokens=6))
    driver.add(make_request("2", 5, max_tokens=4))
    driver.run()
    assert not any(plan.preempted_request_ids for plan in driver.plans)
    assert driver.device.num_accepted > 0


def test_urgent_request_takes_blocks_reserved_for_drafts_before_it_preempts():
    scheduler = speculative_scheduler(7, num_blocks=9, max_model_len=32, by_priority=True)
    plans = [decoding(scheduler, length=8, max_tokens=20, priority=1), the(scheduler.schedule())]
    for plan in plans:
        read(scheduler, plan, [1] + [REJECTED] * 7)
    assert queue_of(scheduler.block_manager) == [7, 8]
    scheduler.add(make_request("2", 12, max_tokens=2))
    plan = the(scheduler.schedule())
    assert plan.preempted_request_ids == ()
    assert shape(plan) == [(2, 0, 12, True), (1, 10, 1, True)]


def test_step_reserves_at_most_as_many_blocks_per_row_as_the_plan_can_send():
    """The plan's array on the device has room for only a few new blocks per row.

    The drafts of several steps in flight may need more blocks.
    """
    scheduler = speculative_scheduler(num_blocks=12, block_size=1, max_model_len=11)
    scheduler.add(make_request("1", 3, max_tokens=8))
    scheduler.update(the(scheduler.schedule()), np.array([9]))
    scheduler.add(make_request("2", 9, max_tokens=2))
    plan = the(scheduler.schedule())
    assert (plan.limits, updates(plan)) == ((4,), [((3, 4),)])  # request 2 waits for blocks
    scheduler.abort("2")
    plan = the(scheduler.schedule())
    assert (plan.limits, updates(plan)) == ((8,), [((4, 5), (5, 6), (6, 7), (7, 8))])


def test_scheduler_plans_no_drafts_for_a_request_that_disallows_drafts():
    scheduler = speculative_scheduler()
    plan = decoding(scheduler, max_tokens=20)
    assert plan.num_drafts == 3
    read(scheduler, plan, [1, REJECTED, REJECTED, REJECTED])
    scheduler.running["1"].takes_drafts = False
    assert the(scheduler.schedule()).num_drafts == 0


def test_decode_rows_have_no_drafts_in_a_step_with_a_prompt():
    scheduler = speculative_scheduler()
    plan = decoding(scheduler, max_tokens=20)
    scheduler.add(make_request("2", 4))
    mixed = the(scheduler.schedule())
    assert (len(mixed.scheduled), mixed.num_drafts, mixed.is_decode) == (2, 0, False)
    assert scheduler.speculation is not None
    assert scheduler.speculation.num_mixed_steps == 1
    read(scheduler, plan, [1, 2, REJECTED, REJECTED])
    scheduler.update(mixed, np.array([3, 4]))
    assert scheduler.running["1"].sequences[0].block_table == [1, 2]
    scheduler.check_integrity()


def test_pool_watch_reports_a_cached_block_evicted_by_a_reservation_for_drafts():
    """The test reserves a cached block for drafts and frees it again between two updates of the
    `PoolWatch`. The block is then empty, although the `PoolWatch` never found it in a block table.
    """
    scheduler = speculative_scheduler(max_model_len=20, digest="xxh3")
    read(scheduler, decoding(scheduler, "1", 7, max_tokens=2), [1, *[NO_DRAFT] * 3])
    plan, manager = decoding(scheduler, "2", 3, max_tokens=9), scheduler.block_manager
    read(scheduler, plan, [1, REJECTED, REJECTED, REJECTED])
    [sequence], pool = scheduler.running["2"].sequences, manager.pool
    # freed blocks are reused last
    pool.free(pool.allocate(manager.num_free_blocks - pool.num_cached_blocks))
    replica = Replica(scheduler)
    replica.update()
    evicted = queue_of(manager)[0]
    assert replica.counts[evicted] == CACHED
    manager.trim(sequence)
    manager.reserve(sequence, 20, 2)
    assert sequence.block_table[-1] == evicted
    manager.trim(sequence)
    replica.update()
    replica.check()


def verify(policy: Speculation, num_accepted: int, num_rows: int = 4) -> None:
    row = [1] * (1 + num_accepted) + [REJECTED] * (3 - num_accepted)
    policy.record(np.array([row] * num_rows))


def test_speculative_decoding_pauses_for_some_steps_if_no_draft_is_accepted():
    policy = Speculation(3, [(8, 1.2)])
    for _ in range(NUM_TRIAL_STEPS):
        assert policy.choose_num_drafts(4) == 3
        verify(policy, 0)
    choices = [policy.choose_num_drafts(4) for _ in range(MIN_PLAIN_STEPS + 1)]
    assert choices == [0] * MIN_PLAIN_STEPS + [3]  # the scheduler tries drafts again


def test_verification_continues_while_accepted_drafts_outweigh_its_cost():
    policy = Speculation(3, [(8, 1.2), (64, 2.5)])
    for _ in range(100):
        assert policy.choose_num_drafts(8) == 3
        verify(policy, 1)
    # For these batch sizes, a verify step costs more than 2 plain steps, but it returns only 2
    # tokens per row.
    assert policy.choose_num_drafts(9) == 0
    assert policy.choose_num_drafts(65) == 0
    assert (policy.num_draft_tokens, policy.num_accepted_tokens) == (1200, 400)
