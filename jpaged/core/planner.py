"""What a step computes: who goes on, who must give way, who may join."""

from jpaged.core.admission import Admission
from jpaged.core.block_manager import NO_CHANGES, BlockChanges, BlockManager
from jpaged.core.draft import StepDraft
from jpaged.core.groups import decodes, fan_out, set_stem, work_of
from jpaged.core.limits import SchedulerConfig
from jpaged.core.plan import Goal
from jpaged.core.queue import RequestQueue
from jpaged.core.request import Request, RequestStatus
from jpaged.core.roster import Roster
from jpaged.core.swap import SwapSpace


class Planner:
    """Fills a step from the scheduler's queues, moving requests between them.

    Running requests go on in the order of rank, as far as the step's budget goes; when blocks run
    out, the last in line gives way. Then, if nobody had to, those who wait may join.

    For throughput they join only if several can, or if the step has prompts anyway. And where their
    prompts fill it nobody decodes meanwhile: a token beside them takes the place of one of theirs,
    and a step with both takes longer than its tokens account for.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        manager: BlockManager,
        swap_space: SwapSpace,
        roster: Roster,
        running: RequestQueue,
        waiting: RequestQueue,
    ):
        self.running, self.waiting = running, waiting
        self._by_priority = config.by_priority
        self._manager, self._swap_space, self._roster = manager, swap_space, roster
        self._admission = Admission(config, manager, swap_space, running)
        self._preempted: list[str] = []
        self._faults: dict[Request, Exception] = {}

    def fill(self, draft: StepDraft) -> None:
        """Place all that the step computes."""
        if self._by_priority and self.waiting:
            head = self.waiting.first
            try:
                self._yield_to_urgent()
            except Exception as error:
                self._note_fault(head, error)
        self._continue_running(draft)
        if not draft.has_preempted and self._may_join(draft):
            self._admit_waiting(draft)

    def take_preempted(self) -> tuple[str, ...]:
        """Ids of the requests preempted since the last call."""
        preempted = tuple(self._preempted)
        self._preempted.clear()
        return preempted

    def take_faults(self) -> dict[Request, Exception]:
        """Requests that could not be planned for, since the last call, and what was in the way.

        They are where they were, perhaps with more blocks than they use.
        """
        faults, self._faults = self._faults, {}
        return faults

    def _continue_running(self, draft: StepDraft) -> None:
        for request in self._who_goes_on(draft):
            # Preemption takes the last first: after one who lost its place all have.
            if self._by_priority and not draft.has_preempted:
                self._admit_waiting(draft, before=request)
            if draft.budget == 0 or request.status is not RequestStatus.RUNNING:
                break
            try:
                if not self._decode_on(draft, request):
                    self._continue(draft, request)
            except Exception as error:
                self._note_fault(request, error)

    def _who_goes_on(self, draft: StepDraft) -> list[Request]:
        """All that run; but where prompts alone fill the step, only the one whose prompt was begun.

        Not if somebody else has more than a token left to compute, who would be passed.
        """
        everyone = list(self.running)
        if draft.goal is Goal.LATENCY or self._by_priority:
            return everyone
        begun = [request for request in everyone[-1:] if not decodes(request)]
        try:
            fill = self._admission.would_fill_a_step(begun, self.waiting, draft.budget)
        except Exception:  # what is wrong with one of those who wait shows as soon as it joins
            fill = False
        if not fill:
            return everyone
        passed = everyone[: len(everyone) - len(begun)]
        return begun if all(map(decodes, passed)) else everyone

    def _may_join(self, draft: StepDraft) -> bool:
        """Whether the step is one for those who wait: for throughput not every one is."""
        if draft.goal is Goal.LATENCY or draft.has_prompts:
            return True
        return self._admission.is_worth_a_step(len(self.waiting))

    def _note_fault(self, request: Request, error: Exception) -> None:
        """What goes wrong with one request is told of, and stops no other."""
        self._faults.setdefault(request, error)

    def _continue(self, draft: StepDraft, request: Request) -> None:
        """Give a running request its share of the step, all of its sequences or none."""
        manager = self._manager
        if request.num_stem_tokens:
            self._roster.fork_rows(fan_out(manager, request))
        work = work_of(request, draft.budget)
        num_blocks = manager.num_new_blocks_of(work)
        if num_blocks and not self._make_room(draft, request, num_blocks):
            return
        for sequence, num_tokens in work:
            changes = manager.append(sequence, num_tokens) if num_blocks else NO_CHANGES
            if not sequence.is_placed:
                sequence.is_placed = True
                draft.joined.add(sequence)
                sequence.num_admitted_tokens = len(sequence.token_ids)
                changes = BlockChanges(tuple(enumerate(sequence.block_table)), changes.copies)
            draft.place(sequence, num_tokens, changes)

    def _decode_on(self, draft: StepDraft, request: Request) -> bool:
        """Give a lone sequence its next token if it has a slot for it already; False if not.

        `_continue` would do the same, but it takes longer, and this is what nearly all sequences of
        nearly all steps want.
        """
        live = request.live
        sequence = live[0]
        known = len(sequence.token_ids) + sequence.num_pending_tokens
        if (
            sequence.num_computed_tokens + 1 != known
            or known >= request.max_num_tokens
            or len(live) > 1
            or request.num_stem_tokens
            or request.beam is not None
            or not sequence.is_placed
            or not self._manager.has_slot(sequence)
        ):
            return False
        draft.place_next(sequence)
        return True

    def _make_room(self, draft: StepDraft, request: Request, num_blocks: int) -> bool:
        """Preempt from the back until `num_blocks` are free; False if `request` cannot go on.

        Blocks about to come back from finished sequences are waited for instead: that costs the
        request one step, a preemption a whole sequence. Until then no one takes blocks before it.
        """
        manager = self._manager
        while not draft.is_starved and num_blocks > manager.num_free_blocks:
            if num_blocks <= manager.num_free_blocks + self._roster.num_returning_blocks():
                draft.is_starved = True
                continue
            draft.has_preempted = True
            if self._preempt_last() is request:
                return False
        return not draft.is_starved

    def _preempt_last(self) -> Request:
        """Take the blocks of the last in line, all of them.

        At once, though steps in flight may write there: whoever gets these blocks writes them in a
        later step, and steps run in the order of their launch. One whose last tokens are only to be
        read yet loses nothing by it: it is not swapped out, and counts as no preemption.
        """
        request = self.running.last
        self.running.remove(request)
        is_complete = all(s.num_tokens >= request.max_num_tokens for s in request.live)
        if not is_complete and self._swap_space.chosen_for(request):
            self._swap_space.swap_out(request)
            request.status = RequestStatus.SWAPPED
        else:
            request.status = RequestStatus.PREEMPTED
        for sequence in request.live:
            if request.status is RequestStatus.PREEMPTED:
                self._manager.free(sequence)
                sequence.num_computed_tokens = 0
            self._roster.leave_row(sequence)
        self.waiting.add(request)
        if not is_complete:
            self._preempted.append(request.request_id)
        return request

    def _yield_to_urgent(self) -> None:
        """Preempt requests of a worse priority than the head of the line until that one fits, if it
        then will."""
        while self.waiting:
            head = self._head()
            less_urgent = [r for r in self.running if r.priority > head.priority]
            if not (less_urgent and head.is_read) or self._admission.has_room(head):
                return
            if not self._admission.would_have_room(head, less_urgent):
                return
            self._preempt_last()

    def _head(self) -> Request:
        """The first in line, its stem settled."""
        head = self.waiting.first
        if head.status is not RequestStatus.SWAPPED:  # that one's stem is in its image
            set_stem(head)
        return head

    def _admit_waiting(self, draft: StepDraft, before: Request | None = None) -> None:
        """Let the head of the line join as long as it may; `before` a runner that it outranks, only
        such a head, so that the less urgent do not take the step's tokens first."""
        while self.waiting and draft.budget and not draft.is_starved:
            head = self.waiting.first
            try:
                if not self._admit_head(draft, before):
                    break
            except Exception as error:
                self._note_fault(head, error)
                break

    def _admit_head(self, draft: StepDraft, before: Request | None) -> bool:
        request = self._head()
        if before is not None and request.priority >= before.priority:
            return False
        # One preempted a moment ago has tokens that are not known here yet.
        if not (request.is_read and self._admission.has_seats(request)):
            return False
        if request.status is RequestStatus.SWAPPED:
            return self._come_back(request)
        return self._join(draft, request)

    def _come_back(self, request: Request) -> bool:
        """Bring a swapped group's blocks back, if they fit; it computes from the next step on."""
        fit = self._admission.find_image(request)
        if fit is not None:
            self._swap_space.swap_in(request, fit)
            self._enter(request)
        return fit is not None

    def _join(self, draft: StepDraft, request: Request) -> bool:
        prefix = self._admission.find_prefix(request)
        if prefix is None:
            return False
        first, manager = request.live[0], self._manager
        self._enter(request)
        manager.admit(first, prefix)
        if first.num_cached_tokens is None:
            first.num_cached_tokens = first.num_computed_tokens
        cache = manager.prefix_cache
        if cache is not None and first.reads_prefix_cache:
            cache.num_query_tokens += len(first.token_ids)
            cache.num_hit_tokens += first.num_computed_tokens
        self._continue(draft, request)
        return True

    def _enter(self, request: Request) -> None:
        self.waiting.remove(request)
        self.running.add(request)
        request.status = RequestStatus.RUNNING
