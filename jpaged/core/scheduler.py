"""The scheduler: first come, first served, deciding each step who computes how many tokens.

There are no phases. A sequence has `num_computed_tokens` catching up with its tokens, and a step
gives it some of the difference: a whole prompt, a chunk of one, one token of decoding, or its
history again after a preemption. `schedule` assumes its plan will be launched, so the next step
can be planned before the sampled tokens of this one were read:

    synchronous: plan = schedule(); run(plan); update(plan, tokens)
    overlapped:  plan = schedule(); launch(plan); update(previous plan, previous tokens)
"""

from collections import Counter, OrderedDict
from itertools import chain

import numpy as np

from jpaged.core.admission import Admission
from jpaged.core.block_manager import NO_CHANGES, BlockManager
from jpaged.core.block_pool import KVBlock
from jpaged.core.draft import StepDraft
from jpaged.core.integrity import check_queues, check_sequences
from jpaged.core.limits import SchedulerConfig, check_fits, check_new, max_num_tokens
from jpaged.core.plan import Emitted, StepPlan
from jpaged.core.request import FinishReason, Request, RequestStatus, Sequence
from jpaged.core.stop import finish_reason_of

__all__ = ["Scheduler", "SchedulerConfig"]


class Scheduler:
    """Decides steps, and owns every unfinished request and its blocks.

    `running` and `waiting` are in order of arrival, and whoever runs came before whoever waits:
    the last of `running` is preempted first and then heads `waiting`, and no one is skipped.
    """

    def __init__(self, config: SchedulerConfig, block_manager: BlockManager):
        self.config = config
        self.block_manager = block_manager
        self.running: dict[str, Request] = {}
        self.waiting: OrderedDict[str, Request] = OrderedDict()
        # Finished, but steps in flight may still write their blocks.
        self.draining: dict[int, Sequence] = {}
        self._admission = Admission(config, block_manager)
        self._owners: dict[int, Request] = {}  # of each sequence that is unfinished or draining
        self._released: list[int] = []
        self._preempted: list[str] = []
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
    def num_waste_slots(self) -> int:
        """Slots of running sequences' blocks that no computed token fills."""
        held = filled = 0
        for request in self.running.values():
            for sequence in request.sequences:
                held += len(sequence.block_table)
                filled += sequence.num_computed_tokens
        return held * self.block_manager.block_size - filled

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
        """Requests that have not ended, in order of arrival."""
        return (*self.running.values(), *self.waiting.values())

    def is_unfinished(self, request_id: str) -> bool:
        """Whether the request is known and has not ended."""
        return request_id in self.running or request_id in self.waiting

    # ---- requests come and go

    def add(self, request: Request) -> None:
        """Queue a request; ValueError, with nothing changed, if it could never run."""
        check_new(request, self.is_unfinished, self._owners)
        check_fits(self.config, self.block_manager, request)
        request.max_num_tokens = max_num_tokens(self.config, request)
        request.arrival = self._num_arrived
        self._num_arrived += 1
        self.waiting[request.request_id] = request
        for sequence in request.sequences:
            self._owners[sequence.seq_id] = request

    def finish(self, request_id: str, reason: FinishReason) -> bool:
        """End a request in whatever state it is; tokens still on their way are dropped.

        Returns whether it was unfinished: ending one twice, or an unknown one, does nothing.
        """
        request = self.running.get(request_id) or self.waiting.get(request_id)
        if request is None:
            return False
        self._retire(request, reason)
        return True

    def abort(self, request_id: str) -> bool:
        """`finish` at the user's wish."""
        return self.finish(request_id, FinishReason.ABORT)

    # ---- steps

    def schedule(self) -> StepPlan | None:
        """Plan a step that will be launched, or None if nothing can run before the next update.

        With no step in flight and a request unfinished there is always a plan: whoever came first
        fits, since nobody is admitted who does not fit the pool alone, and all others give way.
        """
        draft = StepDraft(self.config.max_num_batched_tokens)
        self._continue_running(draft)
        if not (draft.has_preempted or draft.is_starved):
            self._admit_waiting(draft)
        return self._plan(draft) if draft.scheduled else None

    def update(self, plan: StepPlan, sampled: np.ndarray) -> list[Emitted]:
        """Read a finished step: `sampled[i]` is the token of `plan.scheduled[i]`.

        Plans are read in the order of planning, each once, or ValueError is raised. Rows that do
        not sample, and those of requests that ended meanwhile, may hold anything.
        """
        plan.check_update(sampled, self._num_updated, self._num_planned)
        self._num_updated += 1
        emitted, manager = [], self.block_manager
        caches, block_size = manager.prefix_cache is not None, manager.block_size
        for row, token_id in zip(plan.scheduled, sampled.tolist(), strict=True):
            sequence, start, num_tokens, samples, _ = row
            sequence.num_in_flight_steps -= 1
            if caches and (start + num_tokens) // block_size > sequence.num_chained_blocks:
                manager.register_computed(sequence, start + num_tokens)
            if samples:
                sequence.num_pending_tokens -= 1
                request = self._owners[sequence.seq_id]
                if request.status is not RequestStatus.FINISHED:
                    emitted.append(self._read_token(request, sequence, token_id))
            if self.draining and not sequence.num_in_flight_steps:
                self._give_back(sequence)
        return emitted

    def check_integrity(self) -> None:
        """Prove the scheduler's books, and the blocks' beneath them; IntegrityError if not."""
        check_queues(self.config.max_num_seqs, self.running, self.waiting)
        sequences = self._sequences()
        check_sequences(sequences, self.draining, self._owners, self.num_in_flight_steps)
        self.block_manager.check_integrity(sequences)

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes: no KV computed so far serves a request that comes later.

        ValueError, with nothing changed, while a prefix is pinned.
        """
        self.block_manager.reset_prefix_cache(self._sequences())

    def _sequences(self) -> list[Sequence]:
        """All that are unfinished or draining."""
        unfinished = [s for request in self.unfinished for s in request.sequences]
        return unfinished + list(self.draining.values())

    # ---- planning

    def _continue_running(self, draft: StepDraft) -> None:
        num_new_blocks = self.block_manager.num_new_blocks
        for request in list(self.running.values()):
            # Preemption takes the last first: after one who lost its place all have.
            if draft.budget == 0 or request.status is not RequestStatus.RUNNING:
                break
            sequence = request.sequences[0]
            known = sequence.num_tokens
            if known >= request.max_num_tokens:
                continue  # complete once its pending token is read
            num_tokens = min(known - sequence.num_computed_tokens, draft.budget)
            num_blocks = num_new_blocks(sequence, num_tokens)
            if num_blocks == 0:
                draft.place(sequence, num_tokens, NO_CHANGES)
            elif self._make_room(draft, request, num_blocks):
                changes = self.block_manager.append(sequence, num_tokens)
                draft.place(sequence, num_tokens, changes)

    def _make_room(self, draft: StepDraft, request: Request, num_blocks: int) -> bool:
        """Preempt from the back until `num_blocks` are free; False if `request` cannot go on.

        Blocks about to come back from finished sequences are waited for instead: that costs the
        request one step, a preemption a whole sequence. Until then no one takes blocks before it.
        """
        manager = self.block_manager
        while not draft.is_starved and num_blocks > manager.num_free_blocks:
            if num_blocks <= manager.num_free_blocks + self._num_returning_blocks():
                draft.is_starved = True
            elif self._preempt_last(draft) is request:
                return False
        return not draft.is_starved

    def _num_returning_blocks(self) -> int:
        tables = (sequence.block_table for sequence in self.draining.values())
        held, blocks = Counter(chain.from_iterable(tables)), self.block_manager.pool.blocks
        return sum(blocks[block_id].ref_cnt == count for block_id, count in held.items())

    def _preempt_last(self, draft: StepDraft) -> Request:
        request_id, request = self.running.popitem()
        self.waiting[request_id] = request
        self.waiting.move_to_end(request_id, last=False)
        request.status = RequestStatus.PREEMPTED
        for sequence in request.sequences:
            # At once, though steps in flight may write there: whoever gets these blocks writes
            # them in a later step, and steps run in the order of their launch.
            self.block_manager.free(sequence)
            sequence.num_computed_tokens = 0
            self._released.append(sequence.seq_id)
        self._preempted.append(request_id)
        draft.has_preempted = True
        return request

    def _admit_waiting(self, draft: StepDraft) -> None:
        while self.waiting and draft.budget and self.num_running < self.config.max_num_seqs:
            request = next(iter(self.waiting.values()))
            sequence = request.sequences[0]
            # The spare block keeps the newcomer from being preempted by the next one to grow.
            found = self._admission.find(sequence, draft.budget, int(bool(self.running)))
            if found is None:
                break
            del self.waiting[request.request_id]
            self.running[request.request_id] = request
            request.status = RequestStatus.RUNNING
            self._join(draft, sequence, *found)

    def _join(self, draft: StepDraft, sequence: Sequence, prefix: list[KVBlock]) -> None:
        sequence.num_admitted_tokens = known = len(sequence.token_ids)
        num_cached_tokens = len(prefix) * self.block_manager.block_size
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = num_cached_tokens
        cache = self.block_manager.prefix_cache
        if cache is not None and sequence.reads_prefix_cache:
            cache.num_query_tokens += known
            cache.num_hit_tokens += num_cached_tokens
        num_tokens = min(known - num_cached_tokens, draft.budget)
        changes = self.block_manager.allocate(sequence, num_tokens, prefix)
        draft.place(sequence, num_tokens, changes)

    def _plan(self, draft: StepDraft) -> StepPlan:
        plan = StepPlan(
            self._num_planned,
            tuple(draft.scheduled),
            tuple(self._released),
            tuple(self._preempted),
            tuple(draft.block_copies),
        )
        self._num_planned += 1
        self._released.clear()
        self._preempted.clear()
        return plan

    # ---- ending

    def _read_token(self, request: Request, sequence: Sequence, token_id: int) -> Emitted:
        sequence.token_ids.append(token_id)
        reason = finish_reason_of(request, sequence, token_id)
        if reason is not None:
            self._retire(request, reason)
        return Emitted(sequence, request, token_id, reason)

    def _retire(self, request: Request, reason: FinishReason) -> None:
        was_running = self.running.pop(request.request_id, None) is not None
        if not was_running:
            del self.waiting[request.request_id]
        request.status, request.finish_reason = RequestStatus.FINISHED, reason
        for sequence in request.sequences:
            self.draining[sequence.seq_id] = sequence
            if was_running:
                self._released.append(sequence.seq_id)
            if not sequence.num_in_flight_steps:
                self._give_back(sequence)

    def _give_back(self, sequence: Sequence) -> None:
        """Free a finished sequence's blocks and forget it; others are left alone."""
        if self.draining.pop(sequence.seq_id, None) is not None:
            self.block_manager.free(sequence)
            sequence.num_computed_tokens = 0
            del self._owners[sequence.seq_id]
