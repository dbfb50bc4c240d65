"""The scheduler: decides for each step which request computes how many tokens.

There are no phases. A sequence has `num_computed_tokens` catching up with its tokens, and a step
gives it some of the difference: a whole prompt, a chunk of one, one token of decoding, or its
history again after a preemption. `schedule` assumes its plan will be launched, so the next step
can be planned before the sampled tokens of this one were read:

    synchronous: plan = schedule(); run(plan); update(plan, tokens)
    overlapped:  plan = schedule(); launch(plan); update(previous plan, previous tokens)
"""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from jpaged.core.admission import Admission, SchedulerConfig, check_pin_fits, check_request_fits
from jpaged.core.block_manager import NO_CHANGES, BlockChanges, BlockManager
from jpaged.core.groups import (
    advance_beam_search,
    fork_sequences,
    is_beam_ready,
    is_decoding,
    pending_work,
    set_common_prefix,
)
from jpaged.core.plan import (
    EmittedToken,
    PlanBuilder,
    ScheduledSequence,
    SchedulingGoal,
    StepPlan,
    StepUpdate,
    make_tuple,
)
from jpaged.core.prefix_cache import REGISTRATION_ENDED
from jpaged.core.request import (
    BeamCandidates,
    FinishReason,
    NoTokenError,
    Request,
    RequestStatus,
    Sequence,
)
from jpaged.core.sequence_table import RequestQueue, SequenceTable, check_queues
from jpaged.core.swap import PreemptionPolicy, SwapSpace

__all__ = ["Scheduler", "SchedulerConfig"]


class Scheduler:
    """Decides steps, and owns every unfinished request and its blocks.

    `running` and `waiting` are in the order of rank: priority, then arrival. The last of `running`
    is preempted first and then heads `waiting`, in which no request overtakes another. Among
    requests of one priority, all that run arrived before all that wait.

    Attributes:
        config: The limits of a step and of a sequence.
        block_manager: The block tables and the pool.
        swap_space: The images of preempted requests in host memory.
        running: Requests in the batch.
        waiting: Requests not in the batch, preempted ones first among their priority.
        sequences: Every sequence of an unfinished request, and those that drain.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        block_manager: BlockManager,
        preemption_policy: PreemptionPolicy | None = None,
    ):
        self.config = config
        self.block_manager = block_manager
        self.swap_space = SwapSpace(preemption_policy or PreemptionPolicy(), block_manager)
        self.running = RequestQueue()
        self.waiting = RequestQueue(has_fast_front=True)
        self.sequences = SequenceTable(block_manager)
        self._admission = Admission(config, block_manager, self.swap_space, self.running)
        self._num_arrived = self._num_planned = self._num_updated = 0
        self._preempted: list[str] = []  # since the last plan
        self._failed: list[tuple[Request, Exception]] = []  # since the last plan or update

    @property
    def num_swapped(self) -> int:
        """Waiting requests whose KV is in host memory."""
        return sum(request.status is RequestStatus.SWAPPED for request in self.waiting)

    @property
    def num_in_flight_steps(self) -> int:
        """Steps planned and not read yet."""
        return self._num_planned - self._num_updated

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether any request still has tokens to come."""
        return bool(self.running or self.waiting)

    @property
    def unfinished_requests(self) -> tuple[Request, ...]:
        """Requests that have not ended: first those that run, then those that wait."""
        return (*self.running, *self.waiting)

    # ---- requests come and go

    def check(self, request: Request) -> None:
        """ValueError if a request could never run, or its names are in use."""
        name = request.request_id
        if name in self.running or name in self.waiting:
            raise ValueError(f"request_id {name!r} is in use by an unfinished request")
        for sequence in request.sequences:
            if sequence.seq_id in self.sequences.by_id:
                raise ValueError(f"seq_id {sequence.seq_id} is in use by another sequence")
        request.max_num_tokens = check_request_fits(self.config, self.block_manager, request)

    def add(self, request: Request) -> None:
        """Queue a request; ValueError, with nothing changed, as `check`."""
        self.check(request)
        request.arrival_index = self._num_arrived
        self._num_arrived += 1
        self.waiting.add(request)
        for sequence in request.live_sequences:
            self.sequences.add(sequence)

    def finish(self, request_id: str, reason: FinishReason) -> bool:
        """End a request in whatever state it is; tokens still on their way are dropped.

        Returns whether it was unfinished: ending one twice, or an unknown one, does nothing.
        """
        request = self.running.get(request_id) or self.waiting.get(request_id)
        if request is None:
            return False
        self._finish_request(request, reason)
        return True

    def abort(self, request_id: str) -> bool:
        """`finish` with the reason of a request that its caller gave up."""
        return self.finish(request_id, FinishReason.ABORT)

    def finish_sequence(self, sequence: Sequence, reason: FinishReason) -> None:
        """End one of a request's samples, and the request with the last of them.

        Of one that has ended already, only the reason changes.
        """
        request, has_ended = sequence.request, sequence.finish_reason is not None
        sequence.finish_reason = reason
        if not request.is_finished and not has_ended:
            request.live_sequences.remove(sequence)
            self.sequences.retire(sequence)
            if not request.live_sequences:
                self._finish_request(request, reason)
        elif request.is_finished and len(request.sequences) == 1:
            request.finish_reason = reason

    # ---- steps

    def schedule(self, goal: SchedulingGoal = SchedulingGoal.LATENCY) -> StepPlan | None:
        """Plan a step that will be launched, or None if nothing can run before the next update.

        Running requests go on in the order of rank, as far as the step's budget of tokens goes;
        when blocks run out, the last of them is preempted. Then, if none was, waiting requests may
        join.

        For throughput they join only if several can, or if the step computes prompts anyway. And
        where their prompts fill the step no sequence decodes in it: a decode token takes the place
        of a prompt token, and a step with both takes longer than its tokens account for.

        With no step in flight and a request unfinished there is always a plan: the first request
        fits the pool alone, since `add` refuses others, and all the rest are preempted for it.
        A request for which planning fails ends with an error, and the plan tells it.

        Raises:
            IntegrityError: planning for a request failed and left the books wrong.
        """
        step = PlanBuilder(self.config.max_num_batched_tokens, goal)
        if self.config.has_priorities and self.waiting:
            self._preempt_for_urgent(step)
        self._continue_running(step)
        takes_prompts = goal is SchedulingGoal.LATENCY or step.has_prompts
        if (
            self.waiting
            and not step.has_preempted
            and (takes_prompts or self._admission.is_prefill_worthwhile(len(self.waiting)))
        ):
            self._admit_waiting(step)
        if step.planning_errors:
            self._fail_unplanned(step)
        if not (step.scheduled or self.swap_space.has_swap_ins or self._failed):
            return None
        released_seq_ids, row_forks = self.sequences.pop_row_changes()
        plan = StepPlan(
            self._num_planned,
            tuple(step.scheduled),
            released_seq_ids,
            tuple(self._preempted),
            tuple(step.block_copies),
            row_forks,
            *self.swap_space.pop_swap_changes(),
            tuple(self._failed),
        )
        self._preempted.clear()
        self._failed.clear()
        self._num_planned += 1
        if step.planning_errors:
            self.check_integrity()  # damage to what all share is not one request's own
        return plan

    def postpone_rows(self, plan: StepPlan, rows: Iterable[int]) -> StepPlan:
        """Let some decode rows of the plan made last sample nothing: their sequences compute the
        same token again in the next step, and what the host knows of them it tells the device.

        Args:
            plan: Launched, or about to be; all before it are read.
            rows: Places in `plan.scheduled`: lone sequences that run.

        Returns:
            The plan, as it is to be read.
        """
        scheduled = list(plan.scheduled)
        for i in rows:
            sequence = scheduled[i].sequence
            sequence.num_computed_tokens -= 1
            sequence.num_pending_tokens -= 1
            self.block_manager.trim(sequence)
            scheduled[i] = scheduled[i]._replace(num_scheduled_tokens=0, is_sampled=False)
        return replace(plan, scheduled=tuple(scheduled))

    def update(
        self,
        plan: StepPlan,
        sampled_token_ids: np.ndarray,
        candidates: BeamCandidates | None = None,
    ) -> StepUpdate:
        """Read a finished step: `sampled_token_ids[i]` is the token of `plan.scheduled[i]`, or `NO_TOKEN`.

        Rows that do not sample, and those of sequences that ended meanwhile, may hold anything.
        A fault with one request, or a token that could not be sampled for it, ends that request
        alone, and the news tell it.

        Args:
            plan: Plans are read in the order of planning, each once.
            sampled: int [rows].
            candidates: A row each like `sampled_token_ids`; needed by plans with beam searches.

        Raises:
            ValueError: the plan is not the next to be read, or an array does not fit it.
            IntegrityError: something went wrong with a request and left the books wrong.
        """
        if not self._num_updated == plan.step_id < self._num_planned:
            raise ValueError(
                f"plan of step {plan.step_id} is out of order: step {self._num_updated} is the "
                "next to update"
            )
        if sampled_token_ids.shape != (len(plan.scheduled),):
            raise ValueError(
                f"sampled must have one token for each of {len(plan.scheduled)} scheduled "
                f"sequences, got shape {sampled_token_ids.shape}"
            )
        self._num_updated += 1
        emitted: list[EmittedToken] = []
        beam_rows: list[tuple[Sequence, int]] = []
        manager, sequences = self.block_manager, self.sequences
        is_caching, block_size = manager.prefix_cache is not None, manager.block_size
        if len(sampled_token_ids) and sampled_token_ids.min() < 0:
            self._fail_without_tokens(plan, sampled_token_ids)
        for i, (row, token_id) in enumerate(
            zip(plan.scheduled, sampled_token_ids.tolist(), strict=True)
        ):
            sequence, start, num_tokens, is_sampled, _ = row
            request = sequence.request
            sequence.num_in_flight_steps -= 1
            if is_sampled:
                sequence.num_pending_tokens -= 1
            try:
                if (
                    is_caching
                    and (start + num_tokens) // block_size > sequence.num_registered_blocks
                ):
                    manager.register_full_blocks(sequence, start + num_tokens)
                if is_sampled and sequence.finish_reason is None:
                    if request.beam is not None:
                        beam_rows.append((sequence, i))
                    else:
                        emitted.append(self._append_token(request, sequence, token_id))
                if sequences.draining and not sequence.num_in_flight_steps:
                    sequences.free(sequence)
            except Exception as error:
                self._fail_request(request, error)
        advanced_beam_requests = (
            self._advance_beam_searches(beam_rows, candidates) if beam_rows else []
        )
        failed, self._failed = self._failed, []
        if not all(isinstance(error, NoTokenError) for _, error in failed):
            self.check_integrity()  # damage to what all share is not one request's own
        return StepUpdate(emitted, advanced_beam_requests, failed)

    def check_integrity(self) -> None:
        """Prove the scheduler's books, and the blocks' beneath them; IntegrityError if not."""
        check_queues(self.config.max_num_seqs, self.running, self.waiting)
        self.sequences.check_integrity(self.unfinished_requests, self.num_in_flight_steps)
        self.swap_space.check_integrity(self.unfinished_requests)
        self.block_manager.check_integrity(self.sequences.by_id.values())

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes: no KV computed so far serves a request that comes later.

        ValueError, with nothing changed, while a prefix is pinned.
        """
        self.block_manager.reset_prefix_cache(self.sequences.by_id.values())

    def pin_prefix(self, token_ids: list[int], salt: str | None = None) -> int | None:
        """Pin the blocks of a prefix, `token_ids` of whole blocks, if all are cached: the pin's
        number, or None with nothing changed.

        ValueError if there is no prefix cache, or an unfinished request could not run to its end in
        the blocks that the pin leaves.
        """
        manager, cache = self.block_manager, self.block_manager.prefix_cache
        if cache is None:
            raise ValueError("pin_prefix needs enable_prefix_caching=True")
        num_blocks = len(token_ids) // manager.block_size
        found = cache.find_longest_prefix(token_ids, num_blocks, salt)
        check_pin_fits(
            manager, num_blocks - manager.pins.num_pinned(found), self.unfinished_requests
        )
        return manager.pins.pin(found) if len(found) == num_blocks else None

    # ---- planning: requests that run

    def _continue_running(self, step: PlanBuilder) -> None:
        for request in self._requests_to_continue(step):
            # Preemption takes the last first: after one that lost its place all have.
            if self.config.has_priorities and not step.has_preempted:
                self._admit_waiting(step, before=request)
            if step.token_budget == 0 or request.status is not RequestStatus.RUNNING:
                break
            try:
                if not self._schedule_decode(step, request):
                    self._schedule_request(step, request)
            except Exception as error:
                step.planning_errors.setdefault(request, error)

    def _requests_to_continue(self, step: PlanBuilder) -> list[Request]:
        """All that run; but where prompts alone fill the step, only the one whose prompt was begun.

        Not if another has more than a token left to compute, which would be passed over.
        """
        runners = list(self.running)
        if step.goal is SchedulingGoal.LATENCY or self.config.has_priorities:
            return runners
        partial_prefills = [request for request in runners[-1:] if not is_decoding(request)]
        try:
            fill = self._admission.would_fill_step(
                partial_prefills, self.waiting, step.token_budget
            )
        except Exception:  # a fault of a waiting request shows as soon as it joins
            fill = False
        if not fill:
            return runners
        passed = runners[: len(runners) - len(partial_prefills)]
        return partial_prefills if all(map(is_decoding, passed)) else runners

    def _schedule_decode(self, step: PlanBuilder, request: Request) -> bool:
        """Give a lone sequence its next token if it has a slot for it already; False if not.

        `_schedule_request` would do the same, but it takes longer, and this is what nearly all sequences of
        nearly all steps want.
        """
        live_sequences = request.live_sequences
        sequence = live_sequences[0]
        known = len(sequence.token_ids) + sequence.num_pending_tokens
        if (
            sequence.num_computed_tokens + 1 != known
            or known >= request.max_num_tokens
            or len(live_sequences) > 1
            or request.num_common_prefix_tokens
            or request.beam is not None
            or not sequence.has_row
            or not self.block_manager.has_free_slot(sequence)
        ):
            return False
        # `known` ends with the token that this step computes: its place is known - 1.
        sequence.num_computed_tokens = known
        sequence.num_pending_tokens += 1
        sequence.num_in_flight_steps += 1
        step.token_budget -= 1
        step.scheduled.append(make_tuple(ScheduledSequence, (sequence, known - 1, 1, True, ())))
        return True

    def _schedule_request(self, step: PlanBuilder, request: Request) -> None:
        """Give a running request its share of the step, all of its sequences or none."""
        manager = self.block_manager
        if request.num_common_prefix_tokens:
            self.sequences.fork_rows(fork_sequences(manager, request))
        work = pending_work(request, step.token_budget)
        num_blocks = manager.total_new_blocks(work)
        if num_blocks and not self._make_room(step, request, num_blocks):
            return
        for sequence, num_tokens in work:
            changes = manager.append(sequence, num_tokens) if num_blocks else NO_CHANGES
            if not sequence.has_row:
                sequence.has_row = True
                step.joined_sequences.add(sequence)
                sequence.num_admitted_tokens = len(sequence.token_ids)
                changes = BlockChanges(tuple(enumerate(sequence.block_table)), changes.copies)
            step.add_sequence(sequence, num_tokens, changes)

    def _make_room(self, step: PlanBuilder, request: Request, num_blocks: int) -> bool:
        """Preempt from the back until `num_blocks` are free; False if `request` cannot go on.

        Blocks about to come back from finished sequences are waited for instead: that costs the
        request one step, a preemption a whole sequence. Until then no request takes blocks before
        it.
        """
        manager = self.block_manager
        while not step.is_waiting_for_blocks and num_blocks > manager.num_free_blocks:
            num_returning = len(manager.exclusive_blocks(self.sequences.draining.values()))
            if num_blocks <= manager.num_free_blocks + num_returning:
                step.is_waiting_for_blocks = True
            else:
                step.has_preempted = True
                if self._preempt_last() is request:
                    return False
        return not step.is_waiting_for_blocks

    def _preempt_last(self) -> Request:
        """Take the blocks of the last running request, all of them.

        At once, though steps in flight may write there: the next holder of these blocks writes them
        in a later step, and steps run in the order of their launch. A request whose last tokens are
        only to be read yet loses nothing by it: it is not swapped out, and counts as no preemption.
        """
        request = self.running.last
        is_complete = all(s.num_tokens >= request.max_num_tokens for s in request.live_sequences)
        is_swapped = not is_complete and self.swap_space.should_swap(request)
        self.running.remove(request)
        if is_swapped:
            self.swap_space.swap_out(request)
            request.status = RequestStatus.SWAPPED
        else:
            request.status = RequestStatus.PREEMPTED
        for sequence in request.live_sequences:
            if request.status is RequestStatus.PREEMPTED:
                self.block_manager.free(sequence)
                sequence.num_computed_tokens = 0
            self.sequences.release_row(sequence)
        self.waiting.add(request)
        if not is_complete:
            self._preempted.append(request.request_id)
        return request

    # ---- planning: requests that wait

    def _preempt_for_urgent(self, step: PlanBuilder) -> None:
        """Preempt requests of a worse priority than the first waiting one until that one fits, if
        it then will."""
        head = self.waiting.first
        try:
            set_common_prefix(head)
            while less_urgent := [r for r in self.running if r.priority > head.priority]:
                if not head.is_fully_read or self._admission.find_fit(head) is not None:
                    return
                if not self._admission.would_fit_after_preemption(
                    head, less_urgent, step.token_budget
                ):
                    return
                self._preempt_last()
        except Exception as error:
            step.planning_errors.setdefault(head, error)

    def _admit_waiting(self, step: PlanBuilder, before: Request | None = None) -> None:
        """Let the first waiting request join as long as it may; with `before`, a running request,
        only one that outranks it, so that the less urgent do not take the step's tokens first."""
        while self.waiting and step.token_budget and not step.is_waiting_for_blocks:
            head = self.waiting.first
            if before is not None and head.priority >= before.priority:
                break
            try:
                if not self._admit(step, head):
                    break
            except Exception as error:
                step.planning_errors.setdefault(head, error)
                break

    def _admit(self, step: PlanBuilder, request: Request) -> bool:
        """Let a waiting request join the batch, if it fits: with the prefix that is cached, or with
        its image, which travels while this step runs."""
        set_common_prefix(request)
        # One preempted a moment ago has tokens that the host has not read yet.
        fit = self._admission.find_fit(request) if request.is_fully_read else None
        if fit is None:
            return False
        if request.status is RequestStatus.SWAPPED:
            self.swap_space.swap_in(request, fit.hits)
            self._move_to_running(request)
            return True
        first, manager = request.live_sequences[0], self.block_manager
        self._move_to_running(request)
        manager.admit(first, fit.hits[0])
        if first.num_cached_tokens is None:
            first.num_cached_tokens = first.num_computed_tokens
        cache = manager.prefix_cache
        if cache is not None and first.reads_prefix_cache:
            cache.num_query_tokens += len(first.token_ids)
            cache.num_hit_tokens += first.num_computed_tokens
        self._schedule_request(step, request)
        return True

    def _move_to_running(self, request: Request) -> None:
        self.waiting.remove(request)
        self.running.add(request)
        request.status = RequestStatus.RUNNING

    # ---- reading

    def _append_token(self, request: Request, sequence: Sequence, token_id: int) -> EmittedToken:
        """Append a sampled token; a stop token wins over a length reached with the same token."""
        sequence.token_ids.append(token_id)
        stop_criteria, reason = request.stop_criteria, None
        if (
            token_id in stop_criteria.stop_token_ids
            and sequence.num_output_tokens >= stop_criteria.min_tokens
        ):
            reason = FinishReason.STOP
        elif len(sequence.token_ids) >= request.max_num_tokens:
            reason = FinishReason.LENGTH
        if reason is not None:
            self.finish_sequence(sequence, reason)
        return make_tuple(EmittedToken, (sequence, request, token_id, reason))

    def _advance_beam_searches(
        self, beam_rows: list[tuple[Sequence, int]], candidates: BeamCandidates | None
    ) -> list[Request]:
        """Give beams their rows of `candidates`; the beam searches that then took a step, since all
        their beams were read."""
        if candidates is None:
            raise ValueError("candidates=None: a step with a beam search is read with candidates")
        for beam, row in beam_rows:
            beam.candidates = BeamCandidates(candidates.token_ids[row], candidates.logprobs[row])
        advanced_beam_requests = []
        for request in dict.fromkeys(beam.request for beam, _ in beam_rows):
            if request.is_finished or not all(map(is_beam_ready, request.live_sequences)):
                continue
            try:
                reason = advance_beam_search(self.block_manager, self.sequences, request)
                if reason is not None:
                    self._finish_request(request, reason)
                advanced_beam_requests.append(request)
            except Exception as error:
                self._fail_request(request, error)
        return advanced_beam_requests

    # ---- finishing

    def _finish_request(self, request: Request, reason: FinishReason) -> None:
        """End a request and its live sequences."""
        self.running.discard(request)
        self.waiting.discard(request)
        request.status, request.finish_reason = RequestStatus.FINISHED, reason
        for sequence in request.live_sequences:
            sequence.finish_reason = reason
            self.sequences.retire(sequence)
        request.live_sequences = []
        self.swap_space.drop(request)

    def _fail_request(self, request: Request, error: Exception) -> None:
        """End a request with an error, wherever its handling stopped: perhaps with beams half
        forked or pruned, or in the middle of ending."""
        self._failed.append((request, error))
        request.live_sequences = self.sequences.find_by_request(request)
        for sequence in request.live_sequences:
            sequence.num_registered_blocks = (
                REGISTRATION_ENDED  # its blocks must serve no other sequence
            )
        self._finish_request(request, FinishReason.ERROR)

    def _fail_unplanned(self, step: PlanBuilder) -> None:
        """End the requests for which planning failed; they may hold more blocks than they use."""
        for request, error in step.planning_errors.items():
            step.remove_request(request)
            for sequence in request.live_sequences:
                self.block_manager.trim(sequence)
            self._fail_request(request, error)

    def _fail_without_tokens(self, plan: StepPlan, sampled_token_ids: np.ndarray) -> None:
        """End the requests of rows that should have sampled a token, before others know what their
        blocks hold."""
        for index in np.flatnonzero(sampled_token_ids < 0).tolist():
            sequence, _, _, is_sampled, _ = plan.scheduled[index]
            if is_sampled and sequence.finish_reason is None:
                self._fail_request(sequence.request, NoTokenError(sequence.num_output_tokens))
