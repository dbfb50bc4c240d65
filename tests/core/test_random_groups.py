"""Run random requests with several samples in small block pools, with many preemptions and aborts.
Check that rare events happen."""

import random
from collections import Counter
from collections.abc import Sequence
from itertools import count

import pytest
from core_driver import DIGESTS, Driver, make_scheduler
from core_swapped import COSTS
from core_turn import Turn

from jpaged.core.beam import BeamSearch
from jpaged.core.plan import SchedulingGoal, StepPlan
from jpaged.core.request import FinishReason, Request, RequestStatus, StopCriteria
from jpaged.core.swap import PreemptionMode, PreemptionPolicy

LOST = (RequestStatus.PREEMPTED, RequestStatus.SWAPPED)

EXPECTED = (
    "request added, search",
    "request added, several samples",
    "request refused",
    "request ended while waiting",
    "request ended while running",
    "request ended while preempted",
    "request ended while swapped",
    "request ended between the chunks of its common prefix",
    "request ended with a finished sample",
    "sample ended while waiting",
    "sample ended while running",
    "sample ended while preempted",
    "sample ended while swapped",
    "sample ended between the chunks of its common prefix",
    "swapped out",
    "swapped out with steps in flight",
    "swapped in",
    "swapped in by a plan that does nothing else",
    "swapped in with hits in the prefix cache",
    "swap entry dropped",
    "swap entry of shared blocks",
    "recomputed",
    "recomputed, several sequences",
    "preempted by priority",
    "row forked",
    "block copied",
    "cache reset",
    "cache reset while swapped",
)


class Tally(Counter[str]):
    """Counts events by name."""

    def note_end(self, what: str, request: Request) -> None:
        self[f"{what} ended while {request.status}"] += 1
        if request.num_common_prefix_tokens and request.status is RequestStatus.RUNNING:
            has_row = request.live_sequences[0].has_row
            self[f"{what} ended between the chunks of its common prefix"] += has_row
        if 0 < len(request.live_sequences) < len(request.sequences):
            self[f"{what} ended with a finished sample"] += 1

    def note_plan(self, plan: StepPlan, requests: dict[str, Request]) -> None:
        self["swapped out"] += len(plan.swap_outs)
        self["swapped in"] += len(plan.swap_ins)
        self["swapped in by a plan that does nothing else"] += not plan.scheduled
        self["swap entry dropped"] += len(plan.dropped_swap_entry_ids)
        self["row forked"] += len(plan.row_forks)
        self["block copied"] += len(plan.block_copies)
        for request in (requests[name] for name in plan.preempted_request_ids):
            is_lost = request.status is RequestStatus.PREEMPTED
            self["recomputed"] += is_lost
            self["recomputed, several sequences"] += is_lost and len(request.live_sequences) > 1
            if request.swap_entry is not None:
                num_blocks = sum(len(s.host_block_table) for s in request.live_sequences)
                self["swap entry of shared blocks"] += num_blocks > request.swap_entry.num_blocks
                self["swapped out with steps in flight"] += not request.is_fully_read

    def note_hits(self, plan: StepPlan, sizes: dict[int, int]) -> None:
        sizes.update((out.swap_entry_id, len(out.block_ids)) for out in plan.swap_outs)
        for swap_entry_id, copies in plan.swap_ins:
            self["swapped in with hits in the prefix cache"] += len(copies) < sizes[swap_entry_id]


class Work:
    """Run a scheduler with random requests and events, which depend on the seed."""

    def __init__(self, seed: int, tally: Tally):
        self.random, self.tally, self.goal = random.Random(seed), tally, [*SchedulingGoal][seed % 2]
        self.driver = self._make_driver()
        self.turn = Turn(self.driver)
        self.num_added = 0
        self.swap_entry_sizes: dict[int, int] = {}

    def _make_driver(self) -> Driver:
        pick = self.random
        block_size, max_model_len = pick.randint(1, 5), pick.randint(6, 24)
        most = -(-max_model_len // block_size)
        num_host_blocks = pick.choice([most, 3 * most, 8 * most])
        mode = pick.choice([*PreemptionMode, PreemptionMode.SWAP])
        scheduler = make_scheduler(
            num_blocks=pick.randint(most + 1, 4 * most),
            block_size=block_size,
            max_num_seqs=pick.randint(2, 9),
            max_num_batched_tokens=pick.randint(1, 26),
            max_model_len=max_model_len,
            digest=pick.choice([None, *DIGESTS]),
            pressure=PreemptionPolicy(mode, num_host_blocks, COSTS),
            by_priority=pick.random() < 0.3,
        )
        return Driver(scheduler, pick.randint(0, 2), goal=self.goal)

    def run(self) -> None:
        events = (self.end_request, self.end_sample, self.reset, self.read)
        for _ in range(self.random.randint(10, 60)):
            if self.random.random() < 0.35 and len(self.driver.scheduler.unfinished_requests) < 8:
                self.add()
            if self.random.random() < 0.15:
                self.random.choice(events)()
                self.driver.scheduler.check_integrity()
            self.step()
        while self.driver.scheduler.has_unfinished_requests:
            self.step()
        self.driver.run()

    def step(self) -> None:
        self.turn.before_step()
        plan = self.driver.step()
        self.turn.after_step()
        if plan is not None:
            self.tally.note_plan(plan, self.driver.requests)
            self.tally.note_hits(plan, self.swap_entry_sizes)
            running = list(self.driver.scheduler.running)
            for request in (self.driver.requests[name] for name in plan.preempted_request_ids):
                later = [r for r in running if r.arrival_index > request.arrival_index]
                is_outranked = any(r.sort_key < request.sort_key for r in later)
                self.tally["preempted by priority"] += is_outranked

    def add(self) -> None:
        self.num_added += 1
        try:
            request = self._make_request()
            self.driver.add(request)
        except ValueError:
            self.tally["request refused"] += 1
        else:
            self.tally["request added, search"] += request.beam is not None
            self.tally["request added, several samples"] += len(request.live_sequences) > 1

    def _make_request(self) -> Request:
        pick, config = self.random, self.driver.scheduler.config
        length = pick.randint(1, config.max_model_len * 2 // 3)
        common = ([1, 2, 3] * 6 + [pick.randint(0, 1)] + [4, 5] * 3)[:length]
        prompt = common if pick.random() < 0.5 else pick.choices(range(11), k=length)
        max_tokens = pick.randint(1, 20)
        stop_ids = frozenset(pick.sample(range(11), pick.randint(0, 1)))
        beam = self._make_search() if pick.random() < 0.25 else None
        return Request.from_prompt(
            f"r{self.num_added}",
            prompt,
            StopCriteria(max_tokens, pick.randint(0, max_tokens), stop_ids),
            seq_id_counter=count(self.num_added * 10**6),
            num_samples=pick.choice([1, 1, pick.randint(2, 6)]) if beam is None else 1,
            beam=beam,
            priority=pick.randint(-1, 1) if config.has_priorities else 0,
            cache_salt=pick.choice([None, None, "a"]),
            first_scored_position=pick.randint(1, len(prompt)) if self.num_added % 7 == 0 else None,
        )

    def _make_search(self) -> BeamSearch:
        return BeamSearch(
            self.random.randint(1, 5),
            length_penalty=self.random.choice([-0.5, 0.0, 1.0, 2.0]),
            early_stopping=self.random.choice([False, True, "never"]),
            end_token_ids=frozenset(self.random.sample(range(11), self.random.randint(0, 2))),
        )

    def prefer_rare(self, requests: Sequence[Request]) -> Sequence[Request]:
        """Return only the rare requests in 70% of the calls, else all requests.

        Rare requests are preempted or have samples with a common prefix. If `requests` contains no
        rare request, return all requests.
        """
        rare = [r for r in requests if r.num_common_prefix_tokens or r.status in LOST]
        return rare if rare and self.random.random() < 0.7 else requests

    def end_request(self) -> None:
        scheduler = self.driver.scheduler
        if scheduler.unfinished_requests:
            request = self.random.choice(self.prefer_rare(scheduler.unfinished_requests))
            self.tally.note_end("request", request)
            scheduler.finish(request.request_id, FinishReason.ABORT)

    def end_sample(self) -> None:
        scheduler = self.driver.scheduler
        requests = [r for r in scheduler.unfinished_requests if r.beam is None]
        if requests:
            request = self.random.choice(self.prefer_rare(requests))
            sequence = self.random.choice(request.live_sequences)
            self.tally.note_end("sample", request)
            scheduler.finish_sequence(sequence, FinishReason.ABORT)

    def reset(self) -> None:
        scheduler = self.driver.scheduler
        self.tally["cache reset"] += 1
        self.tally["cache reset while swapped"] += scheduler.num_swapped > 0
        self.driver.reset_prefix_cache()

    def read(self) -> None:
        if self.driver.in_flight:
            self.driver.read()


@pytest.mark.parametrize(
    ("num_seeds", "fewest"), [(200, 2), pytest.param(3000, 40, marks=pytest.mark.soak)]
)
def test_random_requests_with_samples_in_small_pools_get_the_expected_tokens(
    num_seeds: int, fewest: int
):
    tally = Tally()
    for seed in range(num_seeds):
        try:
            Work(seed, tally).run()
        except Exception as error:
            error.add_note(f"seed {seed}: Work({seed}, Tally()).run() repeats it")
            raise
    rare = {event: tally[event] for event in EXPECTED if tally[event] < fewest}
    assert not rare, f"hardly ever happened: {rare}"
