"""Run random requests on the scheduler and the fake device, and check their tokens."""

import math
from collections.abc import Callable
from itertools import count, takewhile
from unittest.mock import patch

import pytest
from core_driver import DIGESTS, Driver, fresh_search, make_scheduler
from core_swapped import COSTS
from core_turn import Turn
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jpaged.core import admission
from jpaged.core.beam import BeamSearch
from jpaged.core.plan import SchedulingGoal
from jpaged.core.request import FinishReason, Request, Sequence, StopCriteria
from jpaged.core.scheduler import Scheduler
from jpaged.core.swap import PreemptionMode, PreemptionPolicy

MACHINE_SETTINGS = settings(
    stateful_step_count=15, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@st.composite
def limits(draw: Callable) -> dict:
    """Draw random arguments of `make_scheduler`. The pool may be as small as one block."""
    max_model_len = draw(st.integers(2, 24))
    block_size = draw(st.integers(1, 5))
    # The pool has at most 1.5 times the blocks that a sequence of `max_model_len` tokens needs.
    most = 2 + 3 * max_model_len // (2 * block_size)
    return {
        "num_blocks": draw(st.integers(max(2, most // 2), most)),
        "block_size": block_size,
        "max_num_seqs": draw(st.integers(1, 5)),
        "max_num_batched_tokens": draw(st.integers(1, 26)),
        "max_model_len": max_model_len,
        "digest": draw(st.sampled_from([None, "xxh3", *DIGESTS])),
        "pressure": draw(pressures),
        "by_priority": draw(st.booleans()),
    }


@st.composite
def stops(draw: Callable) -> StopCriteria:
    max_tokens = draw(st.integers(1, 20))
    stop_ids = draw(st.frozensets(st.integers(0, 10), max_size=1))
    return StopCriteria(max_tokens, draw(st.integers(0, max_tokens)), stop_ids)


@st.composite
def searches(draw: Callable) -> BeamSearch:
    return BeamSearch(
        draw(st.integers(1, 4)),
        length_penalty=draw(st.sampled_from([-0.5, 0.0, 1.0, 2.0])),
        early_stopping=draw(st.sampled_from([False, True, "never"])),
        end_token_ids=draw(st.frozensets(st.integers(0, 10), max_size=2)),
    )


pressures = st.none() | st.builds(
    PreemptionPolicy,
    st.sampled_from(PreemptionMode),
    st.integers(0, 12),
    st.just(COSTS),
)
# A request has one sequence, several samples, or a beam search.
groups = st.just(1) | st.integers(2, 4) | searches()

# Prompts are random, or prefixes of two texts that differ in one token.
prompts = st.lists(st.integers(0, 10), max_size=9) | st.builds(
    lambda length, odd: ([1, 2, 3] * 6 + [odd] + [4, 5] * 3)[:length],
    st.integers(1, 20),
    st.integers(0, 1),
)
salts = st.sampled_from([None, None, "a", "b"])
arrivals = st.lists(
    st.tuples(prompts, stops(), salts, groups, st.integers(-1, 2)), min_size=1, max_size=4
)


def num_rows(group: int | BeamSearch) -> int:
    return group if isinstance(group, int) else group.width


def num_needed_blocks(
    scheduler: Scheduler, prompt: list[int], stop: StopCriteria, group: int | BeamSearch
) -> int:
    """Return the maximum number of blocks of a request. The last token of a sequence needs no slot.
    Beams share the full blocks of the prompt. Samples share the full blocks of the prompt without
    its last token.
    """
    size = scheduler.block_manager.block_size
    longest = min(len(prompt) + stop.max_tokens, scheduler.config.max_model_len)
    each = math.ceil((longest - 1) / size)
    shared = (len(prompt) - isinstance(group, int)) // size
    return shared + num_rows(group) * (each - shared)


def fits(
    scheduler: Scheduler,
    prompt: list[int],
    stop: StopCriteria,
    group: int | BeamSearch = 1,
    num_shared: int = 0,
) -> bool:
    """Return whether the scheduler must accept a request."""
    manager = scheduler.block_manager
    if not 1 <= len(prompt) < scheduler.config.max_model_len:
        return False
    if num_rows(group) > scheduler.config.max_num_seqs:
        return False
    num_blocks = manager.pool.num_usable_blocks - manager.pins.num_blocks + num_shared
    return num_needed_blocks(scheduler, prompt, stop, group) <= num_blocks


def make(name: str, arrival: tuple, seq_id: int, scored_from: int | None = None) -> Request:
    prompt, stop, salt, group, priority = arrival
    is_search = isinstance(group, BeamSearch)
    return Request.from_prompt(
        name,
        prompt,
        stop,
        seq_id_counter=count(seq_id),
        cache_salt=salt,
        first_scored_position=scored_from,
        num_samples=1 if is_search else group,
        beam=fresh_search(group) if is_search else None,
        priority=priority,
    )


class SchedulerMachine(RuleBasedStateMachine):
    """A state machine that applies random operations to a scheduler and checks all sampled tokens.

    The operations include adding and ending requests, pinning prefixes and reading step results.
    """

    @initialize(
        limits=limits(),
        lag=st.integers(0, 2),
        burst=st.sampled_from([1, 1, 3]),
        goal=st.sampled_from(SchedulingGoal),
        rows_per_free_row=st.integers(1, 5),
    )
    def start(
        self, limits: dict, lag: int, burst: int, goal: SchedulingGoal, rows_per_free_row: int
    ):
        self.driver = Driver(make_scheduler(**limits), lag, burst, goal)
        # With the default of ROWS_PER_FREE_ROW, requests would never wait for free rows in batches
        # as small as these.
        self.patch = patch.object(admission, "ROWS_PER_FREE_ROW", rows_per_free_row)
        self.patch.start()
        self.turn = Turn(self.driver)
        self.num_added = 0
        self.pins: dict[int, tuple[list[int], str | None]] = {}

    @rule(arrivals=arrivals)
    def arrive(self, arrivals: list):
        for arrival in arrivals:
            self.add(arrival)

    @precondition(lambda self: self.driver.requests)
    @rule(data=st.data(), more=st.lists(st.integers(0, 10), min_size=1, max_size=3))
    def go_on(self, data: st.DataObject, more: list[int]):
        """Add a request whose prompt consists of all tokens of an earlier request, followed by
        `more`."""
        earlier = self.driver.requests[data.draw(st.sampled_from([*self.driver.requests]))]
        sequence = earlier.sequences[0]
        self.add((sequence.token_ids + more, earlier.stop_criteria, sequence.cache_salt, 1, 0))

    @rule()
    def reset(self):
        if not self.driver.scheduler.block_manager.pins:
            self.driver.reset_prefix_cache()

    def add(self, arrival: tuple):
        self.num_added += 1
        prompt, stop, salt, group, priority = arrival
        scheduler = self.driver.scheduler
        arrival = (prompt, stop, salt, group, priority if scheduler.config.has_priorities else 0)
        scored_from = 1 + self.num_added % max(len(prompt), 1) if self.num_added % 7 == 0 else None
        request = make(f"request-{self.num_added}", arrival, 10**6 * self.num_added, scored_from)
        accepted = True
        try:
            self.driver.add(request)
        except ValueError:
            accepted = False
        num_shared = self.num_shared(request.sequences[0])
        assert accepted == fits(scheduler, prompt, stop, group, num_shared)

    def num_shared(self, sequence: Sequence) -> int:
        """Return the number of pinned blocks that a new sequence shares."""
        size = self.driver.scheduler.block_manager.block_size
        limit = sequence.max_cached_tokens
        most = (len(sequence.token_ids) - 1 if limit is None else limit) // size
        shared = [0]
        for tokens, salt in self.pins.values() if most > 0 else ():
            pairs = zip(sequence.token_ids, tokens, strict=False)
            common = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
            shared.append(common // size if salt == sequence.cache_salt else 0)
        return min(max(shared), most)

    @rule(num_steps=st.integers(1, 9))
    def step(self, num_steps: int):
        for _ in range(num_steps):
            self.turn.before_step()
            self.driver.step()
            self.turn.after_step()

    @precondition(lambda self: self.driver.in_flight)
    @rule()
    def read(self):
        """Read the results of a step in flight."""
        self.driver.read()

    @precondition(lambda self: self.driver.in_flight)
    @rule(data=st.data())
    def postpone_rows(self, data: st.DataObject):
        self.driver.postpone_rows(
            lambda rows: data.draw(st.lists(st.sampled_from(rows), unique=True)) if rows else []
        )

    @precondition(lambda self: self.driver.scheduler.has_unfinished_requests)
    @rule(data=st.data(), reason=st.sampled_from([FinishReason.ABORT, FinishReason.ERROR]))
    def finish(self, data: st.DataObject, reason: FinishReason):
        scheduler = self.driver.scheduler
        name = data.draw(st.sampled_from([r.request_id for r in scheduler.unfinished_requests]))
        assert scheduler.finish(name, reason)
        assert not scheduler.abort(name)

    @precondition(
        lambda self: any(r.beam is None for r in self.driver.scheduler.unfinished_requests)
    )
    @rule(data=st.data())
    def finish_sample(self, data: st.DataObject):
        """End one sample, as the engine does when a stop string is found."""
        scheduler = self.driver.scheduler
        requests = [r for r in scheduler.unfinished_requests if r.beam is None]
        sequence = data.draw(st.sampled_from([s for r in requests for s in r.live_sequences]))
        scheduler.finish_sequence(sequence, FinishReason.ABORT)
        request = sequence.request
        assert (request in scheduler.unfinished_requests) == bool(request.live_sequences)

    @precondition(lambda self: self.driver.scheduler.block_manager.prefix_cache)
    @rule(prompt=prompts, salt=salts)
    def pin(self, prompt: list[int], salt: str | None):
        """Pin a cached prefix. If a request would then no longer fit, check that the pin is
        refused."""
        scheduler = self.driver.scheduler
        manager, pins = scheduler.block_manager, scheduler.block_manager.pins
        num_blocks = len(prompt) // manager.block_size
        found = manager.prefix_cache.find_longest_prefix(prompt, num_blocks, salt)  # pyright: ignore
        tokens = prompt[: len(found) * manager.block_size]
        left = manager.pool.num_usable_blocks - pins.num_blocks
        left -= len(found) - pins.num_pinned(found)
        needs = [self.num_needed(request) for request in scheduler.unfinished_requests]
        if max(needs, default=0) > left:
            with pytest.raises(ValueError, match="pinning"):
                scheduler.pin_prefix(tokens, salt)
            return
        pin = scheduler.pin_prefix(tokens, salt)
        assert pin is not None
        self.pins[pin] = tokens, salt

    def num_needed(self, request: Request) -> int:
        scheduler = self.driver.scheduler
        sequence, manager = request.live_sequences[0], scheduler.block_manager
        prompt = sequence.token_ids[: sequence.num_prompt_tokens]
        group = request.beam or request.num_rows
        needed = num_needed_blocks(scheduler, prompt, request.stop_criteria, group)
        num_shared = self.num_shared(sequence)
        if sequence.block_table:
            limit, table = sequence.max_cached_tokens, sequence.block_table
            found = table if limit is None else table[: limit // manager.block_size]
            num_shared = len(manager.pins.holder_counts.keys() & found)
        if request.num_rows > 1:
            num_shared_tokens = len(prompt) - (request.beam is None)
            num_shared = min(num_shared, num_shared_tokens // manager.block_size)
        return needed - num_shared

    @precondition(lambda self: self.pins)
    @rule()
    def unpin(self):
        pin = next(iter(self.pins))
        del self.pins[pin]
        self.driver.scheduler.block_manager.pins.unpin(pin)

    @invariant()
    def state_is_consistent(self):
        self.driver.scheduler.check_integrity()

    def teardown(self):
        if not hasattr(self, "driver"):
            return
        try:
            while self.driver.scheduler.has_unfinished_requests or self.driver.in_flight:
                self.step(1)
            self.driver.check_end()
            self.check_releases()
        finally:
            self.patch.stop()

    def check_releases(self) -> None:
        """Check that plans release each batch row once, and never a row that is still in use."""
        joined, released, batch = [], [], set[int]()
        for plan in self.driver.plans:
            released += plan.released_seq_ids
            batch -= set(plan.released_seq_ids)
            rows = {child.seq_id for _, child in plan.row_forks}
            rows |= {row.sequence.seq_id for row in plan.scheduled}
            joined += rows - batch
            batch |= rows
        assert sorted(joined) == sorted([*released, *self.driver.device.tables])


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(MACHINE_SETTINGS, max_examples=300)


@pytest.mark.soak
class TestSchedulerMachineSoak(SchedulerMachine.TestCase):
    """`SchedulerMachine` with many more random examples."""

    settings = settings(MACHINE_SETTINGS, max_examples=10_000)
