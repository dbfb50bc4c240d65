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
from jpaged.core.groups import (
    continue_beams,
    is_ready,
    reason_of_search,
    search_on,
)
from jpaged.core.integrity import check_queues, check_sequences
from jpaged.core.limits import SchedulerConfig, check_fits, check_new, max_num_tokens
from jpaged.core.plan import Emitted, StepNews, StepPlan
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
        self._faults: list[tuple[Request, Exception]] = []
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
        self.roster.add(request)

    def finish(self, request_id: str, reason: FinishReason) -> bool:
        """End a request in whatever state it is; tokens still on their way are dropped.

        Returns whether it was unfinished: ending one twice, or an unknown one, does nothing.
        """
        request = self.running.get(request_id) or self.waiting.get(request_id)
        if request is None:
            return False
        self._end(request, reason)
        return True

    def abort(self, request_id: str) -> bool:
        """`finish` at the user's wish."""
        return self.finish(request_id, FinishReason.ABORT)

    def finish_sequence(self, sequence: Sequence, reason: FinishReason) -> None:
        """End one of a request's samples, and the request with the last of them.

        Of one that has ended already, only the reason changes.
        """
        request, has_ended = sequence.request, sequence.finish_reason is not None
        sequence.finish_reason = reason
        if not request.is_finished and not has_ended:
            request.live.remove(sequence)
            self.roster.let_go(sequence)
            if not request.live:
                self._end(request, reason)
        elif request.is_finished and len(request.sequences) == 1:
            request.finish_reason = reason

    # ---- steps

    def schedule(self) -> StepPlan | None:
        """Plan a step that will be launched, or None if nothing can run before the next update.

        With no step in flight and a request unfinished there is always a plan: whoever came first
        fits, since nobody is admitted who does not fit the pool alone, and all others give way.
        Unless planning for it failed: then that request ends with an error, and `take_faults` tells
        why.

        Raises:
            IntegrityError: planning for a request failed and left the books wrong.
        """
        draft = StepDraft(self.config.max_num_batched_tokens)
        self._planner.fill(draft)
        faults = self._planner.take_faults()
        for request in faults:
            draft.drop(request)
            for sequence in request.live:
                self.block_manager.trim(sequence)
            self._end(request, FinishReason.ERROR)
        plan = self._plan(draft) if draft.scheduled or self.swap_space.has_returns else None
        if faults:
            self._faults += faults.items()
            self.check_integrity()  # damage to what all share is not one request's own
        return plan

    def take_faults(self) -> list[tuple[Request, Exception]]:
        """Requests that `schedule` ended with an error since the last call, and why."""
        faults, self._faults = self._faults, []
        return faults

    def update(
        self, plan: StepPlan, sampled: np.ndarray, candidates: Candidates | None = None
    ) -> StepNews:
        """Read a finished step: `sampled[i]` is the token of `plan.scheduled[i]`.

        Plans are read in the order of planning, each once, or ValueError is raised. Rows that do
        not sample, and those of sequences that ended meanwhile, may hold anything. A plan with beam
        searches needs `candidates`, a row each like `sampled`.
        """
        plan.check_update(sampled, self._num_updated, self._num_planned)
        self._num_updated += 1
        emitted: list[Emitted] = []
        searching: dict[Request, None] = {}
        manager, roster = self.block_manager, self.roster
        caches, block_size = manager.prefix_cache is not None, manager.block_size
        for i, (row, token_id) in enumerate(zip(plan.scheduled, sampled.tolist(), strict=True)):
            sequence, start, num_tokens, samples, _ = row
            sequence.num_in_flight_steps -= 1
            if caches and (start + num_tokens) // block_size > sequence.num_chained_blocks:
                manager.register_computed(sequence, start + num_tokens)
            if samples:
                sequence.num_pending_tokens -= 1
                request = sequence.request
                if request.beam is not None:
                    sequence.candidates = _row_of(candidates, i)
                    searching[request] = None
                elif sequence.finish_reason is None:
                    emitted.append(self._read_token(request, sequence, token_id))
            if roster.draining and not sequence.num_in_flight_steps:
                roster.give_back(sequence)
        return StepNews(emitted, [request for request in searching if self._search(request)])

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

    def _read_token(self, request: Request, sequence: Sequence, token_id: int) -> Emitted:
        sequence.token_ids.append(token_id)
        reason = finish_reason_of(request, sequence, token_id)
        if reason is not None:
            self.finish_sequence(sequence, reason)
        return Emitted(sequence, request, token_id, reason)

    def _search(self, request: Request) -> bool:
        """Let a beam search take a step, if all its beams were read."""
        beams = request.live
        if request.is_finished or not all(map(is_ready, beams)):
            return False
        continuations = search_on(request)
        if not continuations:
            self._end(request, reason_of_search(request))
            return True
        self.roster.fork_rows(continue_beams(self.block_manager, request, continuations))
        self.roster.add(request)
        for pruned in set(beams) - set(request.live):
            self.roster.let_go(pruned)
        return True

    # ---- ending

    def _end(self, request: Request, reason: FinishReason) -> None:
        """The request is over, and so are those of its sequences that live."""
        queue = self.running if request.request_id in self.running else self.waiting
        queue.remove(request)
        request.status, request.finish_reason = RequestStatus.FINISHED, reason
        for sequence in request.live:
            sequence.finish_reason = reason
            self.roster.let_go(sequence)
        request.live = []
        self.swap_space.drop(request)


def _row_of(candidates: Candidates | None, index: int) -> Candidates:
    if candidates is None:
        raise ValueError("candidates=None: a step with beam searches is read with its candidates")
    return Candidates(candidates.token_ids[index], candidates.logprobs[index])
