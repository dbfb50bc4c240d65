"""The scheduler: deciding each step which request computes how many tokens.

There are no phases. A sequence has `num_computed_tokens` catching up with its tokens, and a step
gives it some of the difference: a whole prompt, a chunk of one, one token of decoding, or its
history again after a preemption. `schedule` assumes its plan will be launched, so the next step
can be planned before the sampled tokens of this one were read:

    synchronous: plan = schedule(); run(plan); update(plan, tokens)
    overlapped:  plan = schedule(); launch(plan); update(previous plan, previous tokens)
"""

import numpy as np

from jpaged.core.accounts import num_waste_slots
from jpaged.core.block_manager import BlockManager
from jpaged.core.draft import StepDraft
from jpaged.core.ending import Endings
from jpaged.core.errors import NoTokenError
from jpaged.core.groups import (
    continue_beams,
    is_ready,
    reason_of_search,
    search_on,
)
from jpaged.core.integrity import check_queues, check_sequences
from jpaged.core.limits import SchedulerConfig, check_fits, check_new, max_num_tokens
from jpaged.core.plan import Emitted, Goal, StepNews, StepPlan, make_tuple
from jpaged.core.planner import Planner
from jpaged.core.queue import RequestQueue
from jpaged.core.request import Candidates, FinishReason, Request, RequestStatus, Sequence
from jpaged.core.roster import Roster
from jpaged.core.stop import finish_reason_of
from jpaged.core.swap import PressurePolicy, SwapSpace

__all__ = ["Scheduler", "SchedulerConfig"]


class Scheduler:
    """Decides steps, and owns every unfinished request and its blocks.

    `running` and `waiting` are in the order of rank: priority, then arrival. The last of `running`
    is preempted first and then heads `waiting`, from which no one is skipped. Among requests of one
    priority, whoever runs came before whoever waits.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        block_manager: BlockManager,
        pressure: PressurePolicy | None = None,
    ):
        self.config = config
        self.block_manager = block_manager
        self.swap_space = SwapSpace(pressure or PressurePolicy(), block_manager)
        self.running = RequestQueue()
        self.waiting = RequestQueue()
        self.roster = Roster(block_manager)
        self._planner = Planner(
            config, block_manager, self.swap_space, self.roster, self.running, self.waiting
        )
        self._endings = Endings((self.running, self.waiting), self.roster, self.swap_space)
        self._num_arrived = self._num_planned = self._num_updated = 0

    @property
    def num_running(self) -> int:
        """Requests in the batch."""
        return len(self.running)

    @property
    def num_waiting(self) -> int:
        """Requests waiting for a place in the batch, preempted ones counted."""
        return len(self.waiting)

    @property
    def num_swapped(self) -> int:
        """Those of the waiting whose KV is in host memory."""
        return sum(request.status is RequestStatus.SWAPPED for request in self.waiting)

    @property
    def num_waste_slots(self) -> int:
        """Slots of held blocks that no computed token fills, shared ones once."""
        return num_waste_slots(self)

    @property
    def num_in_flight_steps(self) -> int:
        """Steps planned and not read yet."""
        return self._num_planned - self._num_updated

    @property
    def has_unfinished(self) -> bool:
        """Whether any request still has tokens to come."""
        return bool(self.running or self.waiting)

    @property
    def unfinished(self) -> tuple[Request, ...]:
        """Requests that have not ended: first those that run, then those that wait."""
        return (*self.running, *self.waiting)

    def is_unfinished(self, request_id: str) -> bool:
        """Whether the request is known and has not ended."""
        return request_id in self.running or request_id in self.waiting

    # ---- requests come and go

    def add(self, request: Request) -> None:
        """Queue a request; ValueError, with nothing changed, if it could never run."""
        check_new(self.config, request, self.is_unfinished, self.roster.known)
        check_fits(self.config, self.block_manager, request)
        request.max_num_tokens = max_num_tokens(self.config, request)
        request.arrival = self._num_arrived
        self._num_arrived += 1
        self.waiting.add(request)
        for sequence in request.live:
            self.roster.add(sequence)

    def finish(self, request_id: str, reason: FinishReason) -> bool:
        """End a request in whatever state it is; tokens still on their way are dropped.

        Returns whether it was unfinished: ending one twice, or an unknown one, does nothing.
        """
        request = self.running.get(request_id) or self.waiting.get(request_id)
        if request is None:
            return False
        self._endings.end(request, reason)
        return True

    def abort(self, request_id: str) -> bool:
        """`finish` at the user's wish."""
        return self.finish(request_id, FinishReason.ABORT)

    def finish_sequence(self, sequence: Sequence, reason: FinishReason) -> None:
        """End one of a request's samples, and the request with the last of them.

        Of one that has ended already, only the reason changes.
        """
        self._endings.end_sequence(sequence, reason)

    # ---- steps

    def schedule(self, goal: Goal = Goal.LATENCY) -> StepPlan | None:
        """Plan a step that will be launched, or None if nothing can run before the next update.

        For throughput those who wait join several at a time, and others may wait for their prompts
        (see `Planner`).

        With no step in flight and a request unfinished there is always a plan: whoever came first
        fits, since nobody is admitted who does not fit the pool alone, and all others give way.
        Unless planning for it failed: then that request ends with an error, and `take_faults` tells
        why.

        Raises:
            IntegrityError: planning for a request failed and left the books wrong.
        """
        draft = StepDraft(self.config.max_num_batched_tokens, goal)
        self._planner.fill(draft)
        faults = self._planner.take_faults()
        for request in faults:
            draft.drop(request)
            for sequence in request.live:
                self.block_manager.trim(sequence)
            self._endings.fail(request, faults[request])
        plan = self._plan(draft) if draft.scheduled or self.swap_space.has_returns else None
        if faults:
            self.check_integrity()  # damage to what all share is not one request's own
        return plan

    def take_faults(self) -> list[tuple[Request, Exception]]:
        """Requests that were ended with an error since the last call, and why."""
        return self._endings.take_faults()

    def update(
        self, plan: StepPlan, sampled: np.ndarray, candidates: Candidates | None = None
    ) -> StepNews:
        """Read a finished step: `sampled[i]` is the token of `plan.scheduled[i]`, or `NO_TOKEN`.

        Rows that do not sample, and those of sequences that ended meanwhile, may hold anything.
        What goes wrong with a request, or that no token could be sampled for it, ends that request
        alone; `take_faults` tells why.

        Args:
            plan: Plans are read in the order of planning, each once.
            sampled: int [rows].
            candidates: A row each like `sampled`; needed by plans with beam searches.

        Raises:
            ValueError: the plan is not the next to be read, or an array does not fit it.
            IntegrityError: something went wrong with a request and left the books wrong.
        """
        plan.check_update(sampled, self._num_updated, self._num_planned)
        self._num_updated += 1
        emitted: list[Emitted] = []
        offered: list[tuple[Sequence, int]] = []
        num_broken = self._endings.num_broken
        manager, roster = self.block_manager, self.roster
        caches, block_size = manager.prefix_cache is not None, manager.block_size
        if len(sampled) and sampled.min() < 0:
            self._end_without_tokens(plan, sampled)
        for i, (row, token_id) in enumerate(zip(plan.scheduled, sampled.tolist(), strict=True)):
            sequence, start, num_tokens, samples, _ = row
            request = sequence.request
            sequence.num_in_flight_steps -= 1
            if samples:
                sequence.num_pending_tokens -= 1
            try:
                if caches and (start + num_tokens) // block_size > sequence.num_chained_blocks:
                    manager.register_computed(sequence, start + num_tokens)
                if samples and sequence.finish_reason is None:
                    if request.beam is not None:
                        offered.append((sequence, i))
                    else:
                        emitted.append(self._read_token(request, sequence, token_id))
                if roster.draining and not sequence.num_in_flight_steps:
                    roster.give_back(sequence)
            except Exception as error:
                self._endings.fail(request, error)
        searched = self._search_on(offered, candidates)
        if self._endings.num_broken > num_broken:
            self.check_integrity()  # damage to what all share is not one request's own
        return StepNews(emitted, searched)

    def check_integrity(self) -> None:
        """Prove the scheduler's books, and the blocks' beneath them; IntegrityError if not."""
        check_queues(self.config.max_num_seqs, self.running, self.waiting)
        known = self.roster.known
        check_sequences(known, self.unfinished, self.roster.draining, self.num_in_flight_steps)
        self.swap_space.check_integrity(self.unfinished)
        self.block_manager.check_integrity(known.values())

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes: no KV computed so far serves a request that comes later.

        ValueError, with nothing changed, while a prefix is pinned.
        """
        self.block_manager.reset_prefix_cache(self.roster.known.values())

    # ---- inside

    def _plan(self, draft: StepDraft) -> StepPlan:
        released, row_forks = self.roster.take_row_changes()
        plan = StepPlan(
            self._num_planned,
            tuple(draft.scheduled),
            released,
            self._planner.take_preempted(),
            tuple(draft.block_copies),
            row_forks,
            *self.swap_space.take_orders(),
        )
        self._num_planned += 1
        return plan

    def _end_without_tokens(self, plan: StepPlan, sampled: np.ndarray) -> None:
        """End the requests of rows that should have sampled a token, before others know what their
        blocks hold."""
        for index in np.flatnonzero(sampled < 0).tolist():
            sequence, _, _, samples, _ = plan.scheduled[index]
            if samples and sequence.finish_reason is None:
                error = NoTokenError(sequence.num_output_tokens)
                self._endings.fail(sequence.request, error)

    def _read_token(self, request: Request, sequence: Sequence, token_id: int) -> Emitted:
        sequence.token_ids.append(token_id)
        reason = finish_reason_of(request, sequence, token_id)
        if reason is not None:
            self.finish_sequence(sequence, reason)
        return make_tuple(Emitted, (sequence, request, token_id, reason))

    def _search_on(
        self, offered: list[tuple[Sequence, int]], candidates: Candidates | None
    ) -> list[Request]:
        """Give beams their rows of `candidates`; the searches that then took a step."""
        if not offered:
            return []
        if candidates is None:
            raise ValueError("candidates=None: a step with a beam search is read with candidates")
        for beam, row in offered:
            beam.candidates = Candidates(candidates.token_ids[row], candidates.logprobs[row])
        requests = dict.fromkeys(beam.request for beam, _ in offered)
        return [request for request in requests if self._search(request)]

    def _search(self, request: Request) -> bool:
        """Let a beam search take a step, if all its beams were read."""
        if request.is_finished or not all(map(is_ready, request.live)):
            return False
        try:
            continuations = search_on(request)
            if continuations:
                continue_beams(self.block_manager, self.roster, request, continuations)
            else:
                self._endings.end(request, reason_of_search(request))
        except Exception as error:
            self._endings.fail(request, error)
            return False
        return True
