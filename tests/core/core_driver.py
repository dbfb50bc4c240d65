"""A driver that runs a scheduler on the fake device and checks its state after each step."""

from collections import deque
from collections.abc import Callable
from itertools import count

import numpy as np
from core_fake_device import FakeDevice, beam_oracle, oracle

from jpaged.core.beam import BeamSearch
from jpaged.core.block_manager import BlockManager
from jpaged.core.plan import EmittedToken, ScheduledSequence, SchedulingGoal, StepPlan
from jpaged.core.prefix_cache import HashFunction, PrefixCache, seeded_hash_function
from jpaged.core.request import (
    BeamCandidates,
    FinishReason,
    Request,
    RequestStatus,
    Sequence,
    StopCriteria,
)
from jpaged.core.scheduler import Scheduler, SchedulerConfig
from jpaged.core.swap import PreemptionPolicy

DIGESTS: dict[str, HashFunction] = {
    "xxh3": seeded_hash_function(0),
    # With four hash values, most keys have the same hash as other keys.
    "two bits": lambda key: seeded_hash_function(0)(key) % 4,
    "constant": lambda key: 7,
}


def make_scheduler(
    num_blocks: int = 11,
    block_size: int = 4,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 16,
    max_model_len: int = 40,
    digest: str | None = None,
    pressure: PreemptionPolicy | None = None,
    by_priority: bool = False,
) -> Scheduler:
    """Return a scheduler. `digest` names the hash function of the prefix cache; with None, the
    scheduler has no prefix cache."""
    config = SchedulerConfig(max_num_seqs, max_num_batched_tokens, max_model_len, by_priority)
    cache = None if digest is None else PrefixCache(block_size, DIGESTS[digest])
    return Scheduler(config, BlockManager(num_blocks, block_size, cache), pressure)


def make_request(
    name: str,
    prompt: int | list[int],
    max_tokens: int = 4,
    seq_id: int | None = None,
    salt: str | None = None,
    scored_from: int | None = None,
    n: int = 1,
    beam: BeamSearch | None = None,
    priority: int = 0,
    **stop,
) -> Request:
    """Return a request. If `prompt` is a number of tokens, the tokens depend on `name` only."""
    if isinstance(prompt, int):
        prompt = [(int(name) + i) % 11 for i in range(prompt)]
    criteria = StopCriteria(max_tokens, **stop)
    return Request.from_prompt(
        name,
        prompt,
        criteria,
        seq_id_counter=count(int(name) if seq_id is None else seq_id),
        cache_salt=salt,
        first_scored_position=scored_from,
        num_samples=n,
        beam=beam,
        priority=priority,
    )


def make_requests(*sizes: tuple[int, int]) -> list[Request]:
    """Return requests "1", "2" ... with the given (prompt length, max_tokens)."""
    return [make_request(str(i), *size) for i, size in enumerate(sizes, start=1)]


class Driver:
    """Run the plans of a scheduler on the fake device, `burst` plans per launch.

    The driver reads the results of a launch after `lag` later launches.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        lag: int = 0,
        burst: int = 1,
        goal: SchedulingGoal = SchedulingGoal.LATENCY,
    ):
        self.scheduler, self.lag, self.burst, self.goal = scheduler, lag, burst, goal
        manager = scheduler.block_manager
        self.device = FakeDevice(
            manager.block_size,
            scheduler.config.max_num_seqs,
            shares=manager.prefix_cache is not None,
            num_host_blocks=scheduler.swap_space.policy.num_host_blocks,
        )
        self.in_flight: deque[tuple[StepPlan, np.ndarray, BeamCandidates | None]] = deque()
        self.plans: list[StepPlan] = []
        self.failed: list[tuple[Request, Exception]] = []
        self.requests: dict[str, Request] = {}
        # Output tokens of each sample. The samples of request "a" have the keys "a", "a/1", "a/2".
        self.streams: dict[str, list[int]] = {}

    def add(self, request: Request) -> None:
        self.scheduler.add(request)
        self.requests[request.request_id] = request
        for sequence in request.sequences:
            self.streams[_stream_name(sequence)] = []

    def step(self) -> StepPlan | None:
        """Plan and launch `burst` steps, read the results of an older launch if they are due, and
        return the first new plan."""
        plan = self._plan()
        for _ in range(self.burst - 1):
            self._plan()
        if plan is None and not self.in_flight:
            assert not self.scheduler.has_unfinished_requests, "no plan and no step in flight"
        num_ahead = self.lag * self.burst if plan is not None else 0
        for _ in range(min(self.burst, len(self.in_flight) - num_ahead)):
            self.read()
        return plan

    def step_until_preemption(self) -> StepPlan:
        """Step until a plan preempts requests, and return that plan."""
        while not self.plans or not self.plans[-1].preempted_request_ids:
            self.step()
        return self.plans[-1]

    def _plan(self) -> StepPlan | None:
        plan = self.scheduler.schedule(self.goal)
        self.scheduler.check_integrity()
        if plan is not None:
            self.plans.append(plan)
            self.failed += plan.failed
            self.in_flight.append((plan, *self.device.launch(plan)))
            self._check_plan(plan)
        return plan

    def read(self) -> list[EmittedToken]:
        """Pass the results of the oldest step in flight to the scheduler."""
        emitted, _, failed = self.scheduler.update(*self.in_flight.popleft())
        self.failed += failed
        for sequence, request, token_id, _ in emitted:
            assert sequence.request is request
            self.streams[_stream_name(sequence)].append(token_id)
        self.scheduler.check_integrity()
        return emitted

    def postpone_rows(self, choose: Callable[[list[int]], list[int]]) -> list[int]:
        """Postpone some decode rows of the newest step: a later step computes the rows' tokens.

        `choose` gets the indices of the rows that may be postponed, and returns the indices of the
        rows to postpone. Return the result of `choose`. The results of all older steps are read
        first.
        """
        while len(self.in_flight) > 1:
            self.read()
        plan, sampled, found = self.in_flight.pop()
        rows = choose([i for i, row in enumerate(plan.scheduled) if self._may_postpone(row)])
        for i in rows:
            sampled[i] = self.device.unsample(plan.scheduled[i].sequence)
        self.in_flight.append((self.scheduler.postpone_rows(plan, rows), sampled, found))
        self.scheduler.check_integrity()
        return rows

    def _may_postpone(self, row: ScheduledSequence) -> bool:
        sequence, request = row.sequence, row.sequence.request
        runs = request.status is RequestStatus.RUNNING and request.beam is None
        decodes = row.start >= sequence.num_admitted_tokens and row.num_scheduled_tokens == 1
        return runs and decodes and row.is_sampled and request.live_sequences == [sequence]

    def _check_plan(self, plan: StepPlan) -> None:
        config = self.scheduler.config
        tokens = [row.num_scheduled_tokens for row in plan.scheduled]
        assert min(tokens, default=1) >= 1
        assert plan.scheduled or plan.swap_ins or plan.failed, "the plan is empty"
        assert plan.num_tokens == sum(tokens) <= config.max_num_batched_tokens
        assert len({row.sequence.seq_id for row in plan.scheduled}) == len(tokens)

    def reset_prefix_cache(self) -> None:
        """Reset the prefix cache. The fake device also deletes the KV of free blocks, except of
        blocks that a swap-out must read."""
        self.scheduler.reset_prefix_cache()
        entries = [r.swap_entry for r in self.scheduler.unfinished_requests if r.swap_entry]
        if all(entry.swap_entry_id in self.device.swap_entries for entry in entries):
            self.device.spoil(self.scheduler.block_manager.pool)

    def run(self, max_steps: int = 10_000) -> None:
        """Run steps until all requests have finished. Then check their tokens, and check that all
        blocks are free."""
        for _ in range(max_steps):
            if not (self.scheduler.has_unfinished_requests or self.in_flight):
                break
            self.step()
        self.check_end()

    def check_end(self) -> None:
        assert not self.scheduler.has_unfinished_requests
        assert not self.in_flight
        self.scheduler.check_integrity()
        block_counts = self.scheduler.block_manager.pool.block_counts()
        assert block_counts.used == self.scheduler.block_manager.pins.num_blocks
        if self.scheduler.block_manager.prefix_cache is None:
            assert block_counts.cached == 0
        assert self.scheduler.swap_space.num_used_host_blocks == 0
        dropped, _, _ = self.scheduler.swap_space.pop_swap_changes()
        assert self.device.swap_entries.keys() == set(dropped), "a swap entry is left"
        for request in self.requests.values():
            self._check_request(request)

    def _check_request(self, request: Request) -> None:
        for sequence in request.sequences if request.beam is None else ():
            self._check_stream(request, sequence)
        cut_short = request.finish_reason in (FinishReason.ABORT, FinishReason.ERROR)
        if request.beam is not None and not cut_short:
            self._check_search(request, request.beam)

    def _check_stream(self, request: Request, sequence: Sequence) -> None:
        stream = self.streams[_stream_name(sequence)]
        assert sequence.output_token_ids == stream
        prompt = sequence.token_ids[: sequence.num_prompt_tokens]
        max_model_len = self.scheduler.config.max_model_len
        expected, reason = oracle(prompt, request.stop_criteria, max_model_len, sequence.index)
        if sequence.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
            assert stream == expected[: len(stream)]
        else:
            assert (stream, sequence.finish_reason) == (expected, reason)

    def _check_search(self, request: Request, search: BeamSearch) -> None:
        sequence = request.sequences[0]
        prompt = sequence.token_ids[: sequence.num_prompt_tokens]
        max_tokens = request.max_num_tokens - len(prompt)
        assert search.hypotheses == beam_oracle(prompt, fresh_search(search), max_tokens)


def driver_of(*requests: Request, lag: int = 0, **limits) -> Driver:
    """Return a driver whose scheduler has the options `limits` and contains the given requests."""
    driver = Driver(make_scheduler(**limits), lag)
    for request in requests:
        driver.add(request)
    return driver


def fresh_search(search: BeamSearch) -> BeamSearch:
    """Return a new beam search with the options of `search`."""
    return BeamSearch(
        search.width,
        length_penalty=search.length_penalty,
        early_stopping=search.early_stopping,
        end_token_ids=search.end_token_ids,
    )


def _stream_name(sequence: Sequence) -> str:
    name = sequence.request.request_id
    return f"{name}/{sequence.index}" if sequence.index else name
