"""Drives a scheduler over the fake device, synchronously or one step late, checking throughout."""

from collections import deque
from itertools import count

import numpy as np
from core_fake_device import FakeDevice, oracle

from jpaged.core.block_manager import BlockManager
from jpaged.core.plan import Emitted, StepPlan
from jpaged.core.prefix_cache import Digest, PrefixCache, seeded_digest
from jpaged.core.request import FinishReason, Request, StopCriteria
from jpaged.core.scheduler import Scheduler, SchedulerConfig

DIGESTS: dict[str, Digest] = {
    "xxh3": seeded_digest(0),
    "two bits": lambda key: seeded_digest(0)(key) % 4,
    "constant": lambda key: 7,
}
"""A good hash, and two that collide all the time: none may be trusted."""


def make_scheduler(
    num_blocks: int = 11,
    block_size: int = 4,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 16,
    max_model_len: int = 40,
    digest: str | None = None,
) -> Scheduler:
    """`digest` names the prefix cache's; None for no cache."""
    config = SchedulerConfig(max_num_seqs, max_num_batched_tokens, max_model_len)
    cache = None if digest is None else PrefixCache(block_size, DIGESTS[digest])
    return Scheduler(config, BlockManager(num_blocks, block_size, cache))


def make_request(
    name: str,
    prompt: int | list[int],
    max_tokens: int = 4,
    seq_id: int | None = None,
    salt: str | None = None,
    reads: bool = True,
    **stop,
) -> Request:
    """A request; a prompt given as a length is filled from the name, a one-digit number."""
    if isinstance(prompt, int):
        prompt = [(int(name) + i) % 11 for i in range(prompt)]
    criteria = StopCriteria(max_tokens, **stop)
    return Request.from_prompt(
        name,
        prompt,
        criteria,
        seq_ids=count(int(name) if seq_id is None else seq_id),
        cache_salt=salt,
        reads_prefix_cache=reads,
    )


class Driver:
    """`lag` steps are planned before the oldest is read: 0 is the synchronous loop."""

    def __init__(self, scheduler: Scheduler, lag: int = 0):
        self.scheduler, self.lag = scheduler, lag
        manager = scheduler.block_manager
        self.device = FakeDevice(
            manager.block_size,
            scheduler.config.max_num_seqs,
            shares=manager.prefix_cache is not None,
        )
        self.in_flight: deque[tuple[StepPlan, np.ndarray]] = deque()
        self.plans: list[StepPlan] = []
        self.requests: dict[str, Request] = {}
        self.streams: dict[str, list[int]] = {}

    def add(self, request: Request) -> None:
        self.scheduler.add(request)
        self.requests[request.request_id] = request
        self.streams[request.request_id] = []

    def step(self) -> StepPlan | None:
        """One turn of the loop."""
        plan = self.scheduler.schedule()
        self.scheduler.check_integrity()
        if plan is not None:
            self.plans.append(plan)
            self.in_flight.append((plan, self.device.launch(plan)))
            self._check_plan(plan)
        elif not self.in_flight:
            assert not self.scheduler.has_unfinished, "stuck: nothing in flight, nothing planned"
        if len(self.in_flight) > (self.lag if plan is not None else 0):
            self.read()
        return plan

    def read(self) -> list[Emitted]:
        """Update with the oldest step in flight."""
        emitted, _ = self.scheduler.update(*self.in_flight.popleft())
        for sequence, request, token_id, _ in emitted:
            assert request.sequences == [sequence]
            self.streams[request.request_id].append(token_id)
        self.scheduler.check_integrity()
        return emitted

    def _check_plan(self, plan: StepPlan) -> None:
        config = self.scheduler.config
        tokens = [row.num_scheduled_tokens for row in plan.scheduled]
        assert min(tokens) >= 1
        assert plan.num_tokens == sum(tokens) <= config.max_num_batched_tokens
        assert len({row.sequence.seq_id for row in plan.scheduled}) == len(tokens)

    def run(self, max_steps: int = 10_000) -> None:
        """Step until all is done and read, then check streams and census."""
        for _ in range(max_steps):
            if not (self.scheduler.has_unfinished or self.in_flight):
                break
            self.step()
        self.check_end()

    def check_end(self) -> None:
        assert not self.scheduler.has_unfinished
        assert not self.in_flight
        self.scheduler.check_integrity()
        census = self.scheduler.block_manager.pool.census()
        assert census.used == self.scheduler.block_manager.pins.num_blocks
        if self.scheduler.block_manager.prefix_cache is None:
            assert census.cached == 0
        for request in self.requests.values():
            self._check_stream(request)

    def _check_stream(self, request: Request) -> None:
        sequence, stream = request.sequences[0], self.streams[request.request_id]
        assert sequence.output_token_ids == stream
        prompt = sequence.token_ids[: sequence.num_prompt_tokens]
        expected, reason = oracle(prompt, request.stop, self.scheduler.config.max_model_len)
        if request.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
            assert stream == expected[: len(stream)]
        else:
            assert (stream, request.finish_reason) == (expected, reason)
