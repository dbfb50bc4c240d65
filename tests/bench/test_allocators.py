"""Compare the buddy allocator with a naive model, and test the managers that use it."""

from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.paper.allocators import (
    SYSTEMS,
    BuddyAllocator,
    OrcaMax,
    RequestLevel,
    make_manager,
    token_states,
)
from jpaged.core.block_pool import IntegrityError, OutOfBlocksError
from jpaged.core.request import Request, StopCriteria
from jpaged.core.scheduler import Scheduler, SchedulerConfig
from jpaged.observe.pool_report import memory_report


class NaiveBuddies:
    """A simple model of the buddy allocator, which checks for every possible range whether it is
    free."""

    def __init__(self, size: int):
        self.size, self.taken = size, dict[int, int]()

    def ranges(self, length: int) -> list[int]:
        """Return the start indices of all possible ranges of `length` blocks.

        Each range lies within one of the `root_ranges`, and starts at a multiple of `length`.
        """
        return [
            start
            for root, root_length in self.root_ranges()
            if length <= root_length
            for start in range(root, root + root_length, length)
        ]

    def root_ranges(self) -> list[tuple[int, int]]:
        """Divide the empty pool into ranges whose lengths are different powers of two, longest
        first."""
        found, start = [], 0
        for bit in reversed(range(self.size.bit_length())):
            if self.size & 1 << bit:
                found.append((start, 1 << bit))
                start += 1 << bit
        return found

    def is_free(self, start: int, length: int) -> bool:
        return all(start + length <= s or s + n <= start for s, n in self.taken.items())

    def free_ranges(self) -> list[tuple[int, int]]:
        """Return all free ranges that are not part of a longer free range."""
        found, length = [], 1 << self.size.bit_length()
        while length := length // 2:
            for start in self.ranges(length):
                is_inside = any(s <= start < s + n for s, n in found)
                if self.is_free(start, length) and not is_inside:
                    found.append((start, length))
        return sorted(found)

    def allocate(self, length: int) -> int | None:
        rounded = next(n for n in (1 << i for i in range(12)) if n >= length)
        fitting = [(n, start) for start, n in self.free_ranges() if n >= rounded]
        if not fitting:
            return None
        _, start = min(fitting)
        self.taken[start] = rounded
        return start


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 45),
    moves=st.lists(st.tuples(st.booleans(), st.integers(0, 40)), min_size=20, max_size=60),
)
def test_buddy_allocator_splits_and_joins_ranges_like_a_naive_model(
    size: int, moves: list[tuple[bool, int]]
):
    buddies, naive, lengths = BuddyAllocator(size), NaiveBuddies(size), dict[int, int]()
    assert buddies.longest == max(n for _, n in naive.root_ranges())
    for is_taking, number in moves:
        if is_taking:
            length = 1 + number % 20 // (1 + number % 3)  # short ranges are more frequent
            expected = naive.allocate(length)
            assert buddies.fits(length) == (expected is not None)
            if expected is None:
                with pytest.raises(OutOfBlocksError):
                    buddies.allocate(length)
            else:
                assert buddies.allocate(length) == expected
                lengths[expected] = length
        elif lengths:
            start = sorted(lengths)[number % len(lengths)]
            buddies.free(start, lengths.pop(start))
            del naive.taken[start]
        assert buddies.free_ranges() == naive.free_ranges()
        assert buddies.num_free + sum(naive.taken.values()) == size
    for start, length in lengths.items():
        buddies.free(start, length)
    assert buddies.free_ranges() == sorted(naive.root_ranges())


BLOCK_SIZE, MAX_MODEL_LEN = 4, 64


def make_scheduler(system: str, num_blocks: int = 65, max_num_seqs: int = 8) -> Scheduler:
    config = SchedulerConfig(max_num_seqs, 128, MAX_MODEL_LEN)
    manager = make_manager(system, num_blocks, BLOCK_SIZE, MAX_MODEL_LEN, prefix_caching=False)
    return Scheduler(config, manager)


def make_request(name: int, prompt: int, output: int) -> Request:
    stop = StopCriteria(output)
    return Request.from_prompt(str(name), [1] * prompt, stop, seq_id_counter=count(name))


def step(scheduler: Scheduler) -> None:
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.check_integrity()
    scheduler.update(plan, np.ones(len(plan.scheduled), np.int64))
    scheduler.check_integrity()


@pytest.mark.parametrize(
    ("system", "reserved"),
    [("orca_max", 64), ("orca_pow2", 10 + 16), ("orca_oracle", 10 + 9), ("fastertransformer", 64)],
)
def test_request_reserves_as_many_blocks_as_in_the_paper(system: str, reserved: int):
    scheduler = make_scheduler(system)
    manager = scheduler.block_manager
    scheduler.add(make_request(0, 10, 9))
    step(scheduler)
    assert isinstance(manager, OrcaMax)
    (held,) = manager.reservations.values()
    blocks = -(-reserved // BLOCK_SIZE)
    assert (held.num_slots, held.num_blocks) == (reserved, blocks)
    assert scheduler.unfinished_requests[0].live_sequences[0].block_table == [1, 2, 3]
    # The engine has computed 10 of the 18 tokens that need a slot. The request has 19 tokens, but
    # the last token is never computed.
    rounded = held.num_rounded_blocks * BLOCK_SIZE
    states = token_states(manager, memory_report(scheduler), is_full=False)
    assert states == (10, 8, reserved - 18, rounded - reserved, 256 - rounded)


def test_orca_pow2_reserves_at_most_max_model_len():
    scheduler = make_scheduler("orca_pow2")
    scheduler.add(make_request(0, 30, 33))
    step(scheduler)
    assert isinstance(scheduler.block_manager, OrcaMax)
    assert scheduler.block_manager.reservations[0].num_slots == MAX_MODEL_LEN


def test_paged_block_manager_reserves_no_slots():
    scheduler = make_scheduler("ours")
    scheduler.add(make_request(0, 10, 9))
    step(scheduler)
    states = token_states(scheduler.block_manager, memory_report(scheduler), is_full=True)
    assert states == (10, 2, 0, 256 - 12, 0)


def test_fastertransformer_admits_no_request_until_the_whole_batch_ends():
    # The pool has 32 blocks: two ranges of 16.
    scheduler = make_scheduler("fastertransformer", num_blocks=33)
    for name, output in enumerate((3, 6, 2)):
        scheduler.add(make_request(name, 5, output))
    running = []
    while scheduler.has_unfinished_requests:
        step(scheduler)
        running.append([request.request_id for request in scheduler.running])
    assert running == [["0", "1"]] * 2 + [["1"]] * 3 + [[], ["2"], []]
    manager = scheduler.block_manager
    assert isinstance(manager, RequestLevel)
    assert manager.ranges.num_free == 32
    assert not manager.reservations


def test_fastertransformer_admits_no_request_while_a_batch_decodes_despite_free_memory():
    scheduler = make_scheduler("fastertransformer")  # four ranges
    scheduler.add(make_request(0, 5, 4))
    step(scheduler)
    scheduler.add(make_request(1, 5, 1))
    for num_waiting in (1, 1, 1, 0):
        step(scheduler)
        assert len(scheduler.waiting) == num_waiting


def test_fastertransformer_batch_admits_requests_during_several_prefill_steps():
    # The pool has room for four ranges, and a step computes up to 128 tokens.
    scheduler = make_scheduler("fastertransformer")
    for name in range(5):
        scheduler.add(make_request(name, 50, 9))
    running = []
    for _ in range(4):
        step(scheduler)
        running.append(len(scheduler.running))
    assert running == [3, 4, 4, 4]
    assert len(scheduler.waiting) == 1


def test_integrity_check_finds_a_block_table_outside_its_reserved_range():
    scheduler = make_scheduler("orca_oracle")
    scheduler.add(make_request(0, 10, 9))
    step(scheduler)
    manager = scheduler.block_manager
    assert isinstance(manager, OrcaMax)
    held = manager.reservations[0]
    held.first_block += 8
    with pytest.raises(IntegrityError):
        scheduler.check_integrity()
    held.first_block -= 8
    manager.ranges.free(held.first_block - 1, 1)
    with pytest.raises(IntegrityError, match="overlap"):
        scheduler.check_integrity()


def test_contiguous_block_managers_refuse_unsupported_settings_and_requests():
    with pytest.raises(ValueError, match="max_model_len=64 needs 16 contiguous blocks"):
        make_manager("orca_max", 16, 4, 64, prefix_caching=False)
    with pytest.raises(ValueError, match="'orca' is unknown: pass one of fastertransformer"):
        make_manager("orca", 65, 4, 64, prefix_caching=False)
    for system in SYSTEMS:
        if system != "ours":
            with pytest.raises(ValueError, match="has no prefix cache"):
                make_manager(system, 65, 4, 64, prefix_caching=True)
    scheduler = make_scheduler("orca_max")
    request = Request.from_prompt(
        "0", [1, 2], StopCriteria(3), seq_id_counter=count(), num_samples=2
    )
    scheduler.add(request)
    plan = scheduler.schedule()
    assert plan is not None
    ((failed, error),) = plan.failed
    assert failed is request
    assert "make each sequence a request" in str(error)
