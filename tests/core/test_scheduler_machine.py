"""Random work on the scheduler, over a device that knows whose KV is where, against an oracle."""

import math
from collections.abc import Callable
from itertools import count, takewhile

from core_driver import DIGESTS, Driver, make_scheduler
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jpaged.core.limits import check_pin_fits
from jpaged.core.request import FinishReason, Request, RequestStatus, Sequence, StopCriteria
from jpaged.core.scheduler import Scheduler


@st.composite
def limits(draw: Callable) -> dict:
    """Arguments of make_scheduler, down to one block of one token."""
    max_model_len = draw(st.integers(2, 24))
    block_size = draw(st.integers(1, 5))
    most = 2 + 3 * max_model_len // (2 * block_size)  # half as much again as one sequence needs
    return {
        "num_blocks": draw(st.integers(max(2, most // 2), most)),
        "block_size": block_size,
        "max_num_seqs": draw(st.integers(1, 5)),
        "max_num_batched_tokens": draw(st.integers(1, 26)),
        "max_model_len": max_model_len,
        "digest": draw(st.sampled_from([None, "xxh3", *DIGESTS])),
    }


@st.composite
def stops(draw: Callable) -> StopCriteria:
    max_tokens = draw(st.integers(1, 20))
    stop_ids = draw(st.frozensets(st.integers(0, 10), max_size=1))
    return StopCriteria(max_tokens, draw(st.integers(0, max_tokens)), stop_ids)


# Anything, and what many have in common: all the beginnings of one text, and of nearly the same.
prompts = st.lists(st.integers(0, 10), max_size=9) | st.builds(
    lambda length, odd: ([1, 2, 3] * 6 + [odd] + [4, 5] * 3)[:length],
    st.integers(1, 20),
    st.integers(0, 1),
)
salts = st.sampled_from([None, None, "a", "b"])
arrivals = st.lists(st.tuples(prompts, stops(), salts), min_size=1, max_size=4)


def fits(scheduler: Scheduler, prompt: list[int], stop: StopCriteria, num_shared: int = 0) -> bool:
    """Who may be refused, said once more: all tokens but the last need a slot, and `num_shared`
    pinned blocks are there already."""
    max_model_len, manager = scheduler.config.max_model_len, scheduler.block_manager
    longest = min(len(prompt) + stop.max_tokens, max_model_len)
    num_blocks = manager.pool.num_usable_blocks - manager.pins.num_blocks + num_shared
    num_slots = num_blocks * manager.block_size
    return 1 <= len(prompt) < max_model_len and longest - 1 <= num_slots


class Turn:
    """Bounds the wait of whoever is first in line: the next one is then bounded too."""

    def __init__(self, driver: Driver):
        self.driver = driver
        self.first: Request | None = None
        self.steps_left = 0.0
        self.was_running = False

    def before_step(self) -> None:
        scheduler = self.driver.scheduler
        line = [*scheduler.running, *scheduler.waiting]
        first = line[0] if line else None
        if first is not self.first:
            self.first, self.steps_left = first, self.bound(first) if first else 0.0
        self.steps_left -= 1
        self.was_running = first is not None and first.status is RequestStatus.RUNNING
        assert first is None or self.steps_left >= 0, f"{first.request_id} starves"

    def bound(self, request: Request) -> float:
        """Every launch of its own, each followed by at most `lag + 1` steps of waiting."""
        most, budget = request.max_num_tokens, self.driver.scheduler.config.max_num_batched_tokens
        launches = math.ceil(most / budget) + most - request.sequences[0].num_prompt_tokens
        return (launches + 1) * (self.driver.lag + 2)

    def after_step(self) -> None:
        is_preempted = self.first is not None and self.first.status is RequestStatus.PREEMPTED
        assert not (self.was_running and is_preempted), "the first in line was preempted"


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come, go and end in every order; the rest must not notice."""

    @initialize(limits=limits(), lag=st.integers(0, 2))
    def start(self, limits: dict, lag: int):
        self.driver = Driver(make_scheduler(**limits), lag)
        self.turn = Turn(self.driver)
        self.num_added = 0
        self.pins: dict[int, tuple[list[int], str | None]] = {}

    @rule(arrivals=arrivals)
    def arrive(self, arrivals: list):
        for prompt, stop, salt in arrivals:
            self.add(prompt, stop, salt)

    @precondition(lambda self: self.driver.streams)
    @rule(data=st.data(), more=st.lists(st.integers(0, 10), min_size=1, max_size=3))
    def go_on(self, data: st.DataObject, more: list[int]):
        """A conversation's next turn: an earlier request's prompt, its answer so far, and more."""
        earlier = self.driver.requests[data.draw(st.sampled_from([*self.driver.streams]))]
        sequence = earlier.sequences[0]
        self.add(sequence.token_ids + more, earlier.stop, sequence.cache_salt)

    @rule()
    def reset(self):
        scheduler = self.driver.scheduler
        if scheduler.block_manager.pins:
            return
        scheduler.reset_prefix_cache()
        self.driver.device.spoil(scheduler.block_manager.pool)

    def add(self, prompt: list[int], stop: StopCriteria, salt: str | None):
        self.num_added += 1
        name = f"request-{self.num_added}"
        request = Request.from_prompt(
            name,
            prompt,
            stop,
            seq_ids=count(self.num_added),
            cache_salt=salt,
            reads_prefix_cache=self.num_added % 7 > 0,
        )
        accepted = True
        try:
            self.driver.add(request)
        except ValueError:
            accepted = False
        num_shared = self.num_shared(request.sequences[0])
        assert accepted == fits(self.driver.scheduler, prompt, stop, num_shared)

    def num_shared(self, sequence: Sequence) -> int:
        """Pinned blocks that a new sequence will find."""
        size = self.driver.scheduler.block_manager.block_size
        most = (len(sequence.token_ids) - 1) // size if sequence.reads_prefix_cache else 0
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
        """The host may also catch up with the device."""
        self.driver.read()

    @precondition(lambda self: self.driver.scheduler.has_unfinished)
    @rule(data=st.data(), reason=st.sampled_from([FinishReason.ABORT, FinishReason.ERROR]))
    def finish(self, data: st.DataObject, reason: FinishReason):
        scheduler = self.driver.scheduler
        name = data.draw(st.sampled_from([r.request_id for r in scheduler.unfinished]))
        assert scheduler.finish(name, reason)
        assert not scheduler.abort(name)

    @precondition(lambda self: self.driver.scheduler.block_manager.prefix_cache)
    @rule(prompt=prompts, salt=salts)
    def pin(self, prompt: list[int], salt: str | None):
        """Whatever of a prefix is there may be pinned, as long as everybody still fits."""
        scheduler = self.driver.scheduler
        manager = scheduler.block_manager
        most = len(prompt) // manager.block_size
        found = manager.prefix_cache.find_chain(prompt, most, salt)  # pyright: ignore
        pins = manager.pins
        num_new = len(found) - pins.num_pinned(found)
        left = manager.pool.num_usable_blocks - pins.num_blocks - num_new
        needs = [self.num_needed(request) for request in scheduler.unfinished]
        try:
            check_pin_fits(manager, num_new, scheduler.unfinished)
        except ValueError:
            assert max(needs) > left
        else:
            assert max(needs, default=0) <= left
            tokens = prompt[: len(found) * manager.block_size]
            self.pins[pins.pin(found)] = tokens, salt

    def num_needed(self, request: Request) -> int:
        manager, sequence = self.driver.scheduler.block_manager, request.sequences[0]
        needed = manager.num_blocks_for(request.max_num_tokens - 1)
        if not sequence.block_table:
            return needed - self.num_shared(sequence)
        return needed - len(manager.pins.holders.keys() & sequence.block_table)

    @precondition(lambda self: self.pins)
    @rule()
    def unpin(self):
        pin = next(iter(self.pins))
        del self.pins[pin]
        self.driver.scheduler.block_manager.pins.unpin(pin)

    @invariant()
    def books_add_up(self):
        self.driver.scheduler.check_integrity()

    def teardown(self):
        if not hasattr(self, "driver"):
            return
        while self.driver.scheduler.has_unfinished or self.driver.in_flight:
            self.step(1)
        self.driver.check_end()
        self.check_releases()

    def check_releases(self) -> None:
        """Each stay in the batch is reported once, all but those that ended after the last plan."""
        rows = [row for plan in self.driver.plans for row in plan.scheduled]
        stays = [r.sequence.seq_id for r in rows if r.block_updates and not r.block_updates[0][0]]
        released = [seq_id for plan in self.driver.plans for seq_id in plan.released]
        remaining = list(self.driver.device.tables)
        assert sorted(stays) == sorted(released + remaining)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=160,
    stateful_step_count=15,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    limits(),
    st.lists(st.tuples(prompts, stops(), salts, st.integers(0, 4)), min_size=1, max_size=6),
)
def test_both_loops_give_the_same_tokens(limits: dict, work: list):
    """The same arrivals, read at once or one or two steps late."""
    streams = []
    for lag in (0, 1, 2):
        driver = Driver(make_scheduler(**limits), lag)
        for seq_id, (prompt, stop, salt, pause) in enumerate(work):
            if fits(driver.scheduler, prompt, stop):
                request = Request.from_prompt(
                    str(seq_id), prompt, stop, seq_ids=count(seq_id), cache_salt=salt
                )
                driver.add(request)
            for _ in range(pause):
                driver.step()
        driver.run()
        streams.append(driver.streams)
    assert streams[0] == streams[1] == streams[2]
