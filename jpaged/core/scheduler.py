"""The scheduler: choose the requests of each step, and how many tokens each of them computes.

Prefill and decode are scheduled alike. A step computes tokens that a sequence has not computed yet:
a whole prompt, a chunk of a prompt or one decode token. After a preemption, all tokens are computed
again. `schedule` assumes that its plan is launched, so the next step can be planned before the
sampled tokens of this step are read:

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
    NO_TOKEN,
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
from jpaged.core.speculation import Speculation
from jpaged.core.swap import PreemptionPolicy, SwapSpace
from jpaged.errors import format_count

__all__ = ["Scheduler", "SchedulerConfig"]


class Scheduler:
    """Plans steps, and owns all unfinished requests and their blocks.

    Both queues are sorted by priority, then arrival. The last running request is preempted first,
    and becomes the first waiting request of its priority. No waiting request overtakes another.
    Among requests of one priority, all running requests arrived before all waiting requests.

    With speculative decoding, a step returns up to `1 + num_drafts` tokens per sequence, or none.
    The scheduler assumes the lowest possible number of tokens until `update` receives the step's
    tokens. The device knows the actual number, and stops a sequence at the sequence's limit
    (`StepPlan.limits`). The scheduler reserves blocks for drafts only while no request waits for
    blocks.

    Attributes:
        config: Limits of the scheduler.
        block_manager: Block tables and the pool of blocks.
        swap_space: Swap entries of preempted requests in host memory.
        running: Requests in the batch.
        waiting: Requests that are not in the batch.
        sequences: Sequences of unfinished requests, and ended sequences that are not freed yet.
        speculation: When to verify drafts; None without speculative decoding.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        block_manager: BlockManager,
        preemption_policy: PreemptionPolicy | None = None,
        speculation: Speculation | None = None,
    ):
        self.config, self.speculation = config, speculation
        self.block_manager = block_manager
        block_manager.has_reservations = speculation is not None
        self.swap_space = SwapSpace(preemption_policy or PreemptionPolicy(), block_manager)
        self.running = RequestQueue()
        self.waiting = RequestQueue(has_fast_front=True)
        self.sequences = SequenceTable(block_manager)
        self._admission = Admission(config, block_manager, self.swap_space, self.running)
        self._num_arrived = self._num_planned = self._num_updated = 0
        # Ids of requests that were preempted after the last plan was made.
        self._preempted: list[str] = []
        # Requests that failed after the last call of `schedule` or `update`.
        self._failed: list[tuple[Request, Exception]] = []

    @property
    def num_swapped(self) -> int:
        """Number of waiting requests whose KV is in host memory."""
        return sum(request.status is RequestStatus.SWAPPED for request in self.waiting)

    @property
    def num_in_flight_steps(self) -> int:
        """Number of planned steps whose sampled tokens `update` has not received yet."""
        return self._num_planned - self._num_updated

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether any request is running or waiting."""
        return bool(self.running or self.waiting)

    @property
    def unfinished_requests(self) -> tuple[Request, ...]:
        """Running requests, then waiting requests."""
        return (*self.running, *self.waiting)

    # ---- adding and ending requests

    def check(self, request: Request) -> None:
        """Check whether a new request can run, and set its `max_num_tokens`.

        Raises:
            ValueError: The request could never run, or one of its ids is in use.
        """
        name = request.request_id
        if name in self.running or name in self.waiting:
            raise ValueError(
                f"request_id {name!r} is in use by an unfinished request: use another id"
            )
        for sequence in request.sequences:
            if sequence.seq_id in self.sequences.by_id:
                raise ValueError(
                    f"seq_id {sequence.seq_id} is in use by another sequence: use another id"
                )
        request.max_num_tokens = check_request_fits(self.config, self.block_manager, request)

    def add(self, request: Request) -> None:
        """Add a request to the waiting queue.

        Raises:
            ValueError: `check` refuses the request; the queue is unchanged.
        """
        self.check(request)
        request.arrival_index = self._num_arrived
        self._num_arrived += 1
        self.waiting.add(request)
        for sequence in request.live_sequences:
            self.sequences.add(sequence)

    def finish(self, request_id: str, reason: FinishReason) -> bool:
        """End a request in any state. Sampled tokens that are not read yet are dropped.

        Returns:
            True if the request was unfinished. False, with no effect, if its id is unknown or the
            request has ended already.
        """
        request = self.running.get(request_id) or self.waiting.get(request_id)
        if request is None:
            return False
        self._finish_request(request, reason)
        return True

    def abort(self, request_id: str) -> bool:
        """End a request with `FinishReason.ABORT`; see `finish`."""
        return self.finish(request_id, FinishReason.ABORT)

    def finish_sequence(self, sequence: Sequence, reason: FinishReason) -> None:
        """End one sample, and the request if no live sample is left.

        If the sample has ended already, only its finish reason changes.
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
        """Plan the next step, which the caller must launch.

        Running requests continue in queue order until the token budget is spent. If blocks run out,
        the last running request is preempted. Waiting requests may join unless a request was
        preempted in this step. If planning fails for a request, the request ends with an error that
        `StepPlan.failed` lists.

        With `SchedulingGoal.THROUGHPUT`, waiting requests join only if several can, or if the step
        computes prompts anyway. If prompts alone fill the step, no sequence decodes in it. A step
        with prompt and decode tokens would take longer than its number of tokens suggests.

        Returns:
            The plan, or None if nothing can run before the next `update`. Never None while a
            request is unfinished and no step is in flight: the first request fits the pool alone,
            and all others can be preempted for it.

        Raises:
            IntegrityError: Planning failed for a request and left an inconsistent state.
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
        num_drafts, limits = 0, ()
        if self.speculation is not None and step.scheduled:
            num_drafts = self._choose_num_drafts(self.speculation, step)
            limits = self._reserve_slots(step, num_drafts)
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
            num_drafts,
            limits,
        )
        self._preempted.clear()
        self._failed.clear()
        self._num_planned += 1
        if step.planning_errors:
            # A request has failed: check that the state of all other requests is intact.
            self.check_integrity()
        return plan

    def postpone_rows(self, plan: StepPlan, rows: Iterable[int]) -> StepPlan:
        """Postpone the tokens of some decode rows of the last plan to a later step.

        Args:
            plan: Plan that `schedule` returned last. No earlier step may be in flight.
            rows: Indices of the rows in `plan.scheduled`. The request of each row must have a
                single sequence.

        Returns:
            A plan in which these rows compute and sample no token. Pass this plan to `update`
            instead of `plan`.
        """
        scheduled = list(plan.scheduled)
        for i in rows:
            sequence = scheduled[i].sequence
            _settle(sequence, num_tokens=0)
            self.block_manager.trim(sequence)
            scheduled[i] = scheduled[i]._replace(num_scheduled_tokens=0, is_sampled=False)
        return replace(plan, scheduled=tuple(scheduled))

    def update(
        self,
        plan: StepPlan,
        sampled_token_ids: np.ndarray,
        candidates: BeamCandidates | None = None,
    ) -> StepUpdate:
        """Append the sampled tokens of a finished step, and end completed sequences.

        A step that verifies draft tokens may return several tokens per sequence. In this case, the
        method appends only the first token of each sequence. The caller then passes the second
        token of each sequence to `append_accepted`, then the third, and so on. Between these calls,
        the caller may end sequences.

        An error of one request, or a missing token (`NO_TOKEN`), ends only that request.
        `StepUpdate.failed` lists such requests.

        Args:
            plan: The oldest plan that has not been passed to `update` yet.
            sampled_token_ids: int [rows]; sampled token of each sequence in `plan.scheduled`.
                Ignored for rows that do not sample and for sequences that have ended. For a verify
                step, int [rows, 1 + plan.num_drafts]: the tokens of a row, followed by `REJECTED`
                or `NO_DRAFT`. A row that begins with `NO_DRAFT` returns no token.
            candidates: Next-token candidates, one row per scheduled sequence. Required if the step
                sampled for a beam search.

        Raises:
            ValueError: An older plan must be passed first, or an array has the wrong shape.
            IntegrityError: An error of a request left an inconsistent state.
        """
        self._check_update(plan, sampled_token_ids)
        self._num_updated += 1
        if plan.limits:
            self._settle_rows(plan, sampled_token_ids)
            sampled_token_ids = sampled_token_ids.reshape(len(plan.scheduled), -1)[:, 0]
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
                if plan.limits:
                    # With speculative decoding, `start` in the plan may be wrong, because earlier
                    # steps may have accepted drafts. The host has read these steps by now, so
                    # `token_ids` gives the correct value. If the sequence had no free slot, the
                    # step sampled no token for the sequence, and `token_id` is below `NO_TOKEN`.
                    start, is_sampled = len(sequence.token_ids) - 1, token_id >= NO_TOKEN
                    num_tokens = int(is_sampled)
                else:
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
            # A request has failed: check that the state of all other requests is intact.
            self.check_integrity()
        return StepUpdate(emitted, advanced_beam_requests, failed)

    def _check_update(self, plan: StepPlan, sampled_token_ids: np.ndarray) -> None:
        """Check the arguments of `update`.

        Raises:
            ValueError: An older plan must be passed first, or `sampled_token_ids` has the wrong
                shape.
        """
        if not self._num_updated == plan.step_id < self._num_planned:
            raise ValueError(
                f"plan of step {plan.step_id} is out of order: step {self._num_updated} is the "
                "next to update"
            )
        shape = (len(plan.scheduled), *([1 + plan.num_drafts] if plan.num_drafts else []))
        if sampled_token_ids.shape != shape:
            raise ValueError(
                f"the plan has {len(plan.scheduled)} scheduled sequences and {plan.num_drafts} "
                f"drafts per sequence, but sampled_token_ids has shape {sampled_token_ids.shape}: "
                "pass shape (sequences,) for 0 drafts, otherwise (sequences, 1 + drafts)"
            )

    def append_accepted(self, plan: StepPlan, token_ids: np.ndarray) -> StepUpdate:
        """Append the tokens of one draft position of a verify step.

        Args:
            plan: Plan of the verify step, which was the last plan passed to `update`.
            token_ids: int [rows]; a column of the array that `update` received. The columns must
                be passed in order.

        Raises:
            IntegrityError: An error of a request left an inconsistent state.
        """
        emitted: list[EmittedToken] = []
        for row, token_id in zip(plan.scheduled, token_ids.tolist(), strict=True):
            sequence = row.sequence
            if token_id < NO_TOKEN or sequence.finish_reason is not None:
                continue
            try:
                if token_id == NO_TOKEN:
                    raise NoTokenError(sequence.num_output_tokens)
                self.block_manager.register_full_blocks(sequence, len(sequence.token_ids))
                # If the sequence was preempted, `num_computed_tokens` is 0 and must stay 0.
                if sequence.num_computed_tokens:
                    sequence.num_computed_tokens += 1
                emitted.append(self._append_token(sequence.request, sequence, token_id))
            except Exception as error:
                self._fail_request(sequence.request, error)
        failed, self._failed = self._failed, []
        if not all(isinstance(error, NoTokenError) for _, error in failed):
            self.check_integrity()
        return StepUpdate(emitted, [], failed)

    def _settle_rows(self, plan: StepPlan, token_ids: np.ndarray) -> None:
        """Correct the token counts of the sequences of a speculative step, in which a row may have
        returned no token. `append_accepted` counts accepted drafts later.
        """
        token_ids = token_ids.reshape(len(plan.scheduled), -1)
        has_token = (token_ids[:, 0] >= NO_TOKEN).tolist()
        for row, num_tokens in zip(plan.scheduled, has_token, strict=True):
            if row.is_sampled:
                _settle(row.sequence, num_tokens)
                row.sequence.num_pending_drafts -= plan.num_drafts
        if plan.num_drafts and self.speculation is not None:
            self.speculation.record(token_ids)

    def check_integrity(self) -> None:
        """Check that queues, sequences, swap entries and blocks are consistent.

        Raises:
            IntegrityError: An inconsistency was found.
        """
        speculates = self.speculation is not None
        check_queues(self.config.max_num_seqs, self.running, self.waiting, speculates=speculates)
        self.sequences.check_integrity(self.unfinished_requests, self.num_in_flight_steps)
        self.swap_space.check_integrity(self.unfinished_requests)
        self.block_manager.check_integrity(self.sequences.by_id.values())

    def reset_prefix_cache(self) -> None:
        """Clear the prefix cache. Later requests cannot share KV that was computed before.

        Raises:
            ValueError: A prefix is pinned; the cache is unchanged.
        """
        self.block_manager.reset_prefix_cache(self.sequences.by_id.values())

    def check_pins_allow_new_weights(self) -> None:
        """Check that the weights may be replaced now.

        After an update, no request can share the pinned blocks, because the old weights computed
        the KV in these blocks. The blocks that are not pinned may be too few for an unfinished
        request.

        Raises:
            ValueError: A prefix is pinned while a request is unfinished.
        """
        if (num_pins := len(self.block_manager.pins)) and self.has_unfinished_requests:
            raise ValueError(
                "the weights cannot be replaced while the engine has "
                f"{format_count(num_pins, 'pinned prefix', 'pinned prefixes')} and unfinished "
                "requests: unpin the prefixes, or finish the requests first"
            )

    def end_sharing(self) -> None:
        """Clear the prefix cache. Later requests cannot share KV that was computed before.

        Pinned blocks stay allocated. Call this only when no step is in flight.
        """
        self.block_manager.end_sharing(self.sequences.by_id.values())

    def drop_kv(self) -> None:
        """Free the KV of all unfinished requests, on the device and in host memory.

        The requests compute their tokens again later. Call this only when no step is in flight.
        """
        while self.running:
            self._preempt_last(may_swap=False)
        for request in self.waiting:
            if request.status is RequestStatus.SWAPPED:
                self.swap_space.drop(request)
                request.status = RequestStatus.PREEMPTED
                for sequence in request.live_sequences:
                    sequence.host_block_table = []
                    self.block_manager.free(sequence)
                    sequence.num_computed_tokens = 0

    def pin_prefix(self, token_ids: list[int], salt: str | None = None) -> int | None:
        """Pin the cached blocks of a prefix.

        Args:
            token_ids: Tokens of the prefix, which must fill whole blocks.
            salt: Cache salt of the sequences that may use the prefix.

        Returns:
            Id of the pin, or None if a block of the prefix is not cached.

        Raises:
            ValueError: Prefix caching is off, or the blocks that remain are too few for an
                unfinished request.
        """
        manager, cache = self.block_manager, self.block_manager.prefix_cache
        if cache is None:
            raise ValueError(
                "pin_prefix needs enable_prefix_caching=True: set it in the engine's options"
            )
        num_blocks = len(token_ids) // manager.block_size
        found = cache.find_longest_prefix(token_ids, num_blocks, salt)
        check_pin_fits(
            manager, num_blocks - manager.pins.num_pinned(found), self.unfinished_requests
        )
        return manager.pins.pin(found) if len(found) == num_blocks else None

    # ---- planning of running requests

    def _continue_running(self, step: PlanBuilder) -> None:
        for request in self._requests_to_continue(step):
            if self.config.has_priorities and not step.has_preempted:
                self._admit_waiting(step, before=request)
            # Requests are preempted from the end of the queue. So if this request was preempted,
            # all later requests were preempted too.
            if step.token_budget == 0 or request.status is not RequestStatus.RUNNING:
                break
            try:
                if not self._schedule_decode(step, request):
                    self._schedule_request(step, request)
            except Exception as error:
                step.planning_errors.setdefault(request, error)

    def _requests_to_continue(self, step: PlanBuilder) -> list[Request]:
        """Return the running requests that the step continues: usually all running requests.

        The step computes only prompts if all of these conditions hold:

        - The goal of the step is throughput, and priorities are off.
        - Prompts alone can fill the step.
        - All running requests before the last one are decoding.

        The result is then the last running request if its prompt is partly computed, otherwise
        empty.
        """
        running_requests = list(self.running)
        if step.goal is SchedulingGoal.LATENCY or self.config.has_priorities:
            return running_requests
        partial_prefills = [
            request for request in running_requests[-1:] if not is_decoding(request)
        ]
        try:
            fills_step = self._admission.would_fill_step(
                partial_prefills, self.waiting, step.token_budget
            )
        except Exception:  # `_admit_waiting` hits the same error again, and ends the request
            fills_step = False
        if not fills_step:
            return running_requests
        others = running_requests[: len(running_requests) - len(partial_prefills)]
        return partial_prefills if all(map(is_decoding, others)) else running_requests

    def _schedule_decode(self, step: PlanBuilder, request: Request) -> bool:
        """Schedule one decode token of a request, if this needs no new block.

        This is a fast path of `_schedule_request` for the most frequent case.

        Returns:
            False, with no effect, if the request needs `_schedule_request`.
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
        sequence.num_computed_tokens = known
        sequence.num_pending_tokens += 1
        sequence.num_in_flight_steps += 1
        step.token_budget -= 1
        step.scheduled.append(make_tuple(ScheduledSequence, (sequence, known - 1, 1, True, ())))
        return True

    def _schedule_request(self, step: PlanBuilder, request: Request) -> None:
        """Schedule tokens of all sequences of a running request, or none if blocks are missing."""
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
        """Preempt running requests, last first, until `num_blocks` blocks are free.

        If sequences that have ended will free enough blocks after the steps in flight, no request
        is preempted, and `request` waits for these blocks. The wait delays `request` by a step, but
        a preemption costs far more. No other request takes new blocks during the wait.

        Returns:
            Whether `request` can continue in this step.
        """
        manager = self.block_manager
        if num_blocks > manager.num_free_blocks:
            self._trim_reservations()
        while not step.is_waiting_for_blocks and num_blocks > manager.num_free_blocks:
            num_returning = len(manager.exclusive_blocks(self.sequences.draining.values()))
            if num_blocks <= manager.num_free_blocks + num_returning:
                step.is_waiting_for_blocks = True
            else:
                step.has_preempted = True
                if self._preempt_last() is request:
                    return False
        return not step.is_waiting_for_blocks

    def _preempt_last(self, *, may_swap: bool = True) -> Request:
        """Preempt the last running request: free all its blocks, or swap them out if `may_swap`.

        The blocks are free immediately, although steps in flight may still write to them. This is
        safe because steps run in launch order, and the next holder writes in a later step. A
        request whose tokens are all sampled is neither swapped out nor reported as preempted: it
        needs no more steps.
        """
        request = self.running.last
        for sequence in request.live_sequences if self.speculation is not None else ():
            self.block_manager.trim(sequence)
        is_complete = all(s.num_tokens >= request.max_num_tokens for s in request.live_sequences)
        is_swapped = may_swap and not is_complete and self.swap_space.should_swap(request)
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

    # ---- planning of drafts

    def _choose_num_drafts(self, speculation: Speculation, step: PlanBuilder) -> int:
        """Return the number of drafts per row of a step; 0 if the step must be a plain step."""
        num_decoding = sum(
            row.is_sampled
            and row.num_scheduled_tokens == 1
            and row.start >= row.sequence.num_admitted_tokens
            for row in step.scheduled
        )
        if num_decoding < len(step.scheduled):
            speculation.num_mixed_steps += num_decoding > 0
            return 0
        if not all(row.sequence.request.takes_drafts for row in step.scheduled):
            return 0
        return speculation.choose_num_drafts(num_decoding)

    def _reserve_slots(self, step: PlanBuilder, num_drafts: int) -> tuple[int, ...]:
        """Reserve blocks for drafts, and return for each row the number of tokens that have slots.

        The blocks for the row's next token are allocated already. No block for drafts is allocated
        if a request waits for blocks, or if the running sequences might lack blocks in the next
        step. The device drops drafts that have no slot in a block.
        """
        manager, limits = self.block_manager, []
        # The array that sends the plan to the device has room for `max_updates` new blocks per row.
        max_updates = 1 + manager.num_blocks_for(num_drafts)
        num_spare = manager.num_free_blocks - self.running.num_rows
        if step.has_preempted or step.is_waiting_for_blocks or self._waits_for_blocks:
            num_spare = 0
        for i, row in enumerate(step.scheduled):
            sequence = row.sequence
            max_slots = sequence.request.max_num_tokens - 1
            if row.is_sampled and sequence.request.beam is None:
                wanted = sequence.num_computed_tokens + sequence.num_pending_drafts + num_drafts
                most = max(min(num_spare, max_updates - len(row.block_updates)), 0)
                found = manager.reserve(sequence, min(wanted, max_slots), most)
                num_spare -= len(found.updates)
                sequence.num_pending_drafts += num_drafts
                if found.updates:
                    updates = row.block_updates + found.updates
                    step.scheduled[i] = row._replace(block_updates=updates)
            limits.append(min(len(sequence.block_table) * manager.block_size, max_slots))
        return tuple(limits)

    @property
    def _waits_for_blocks(self) -> bool:
        """Whether the first waiting request waits for blocks rather than for batch rows."""
        return bool(self.waiting) and self._admission.num_free_rows >= self.waiting.first.num_rows

    def _trim_reservations(self) -> bool:
        """Free the unused blocks that were reserved for drafts. Return whether a block was freed.

        Blocks that a step in flight can write to stay allocated.
        """
        before = self.block_manager.num_free_blocks
        if self.speculation is not None:
            for sequence in self.sequences.by_id.values():
                self.block_manager.trim(sequence)
        return self.block_manager.num_free_blocks > before

    # ---- planning of waiting requests

    def _preempt_for_urgent(self, step: PlanBuilder) -> None:
        """Preempt requests of lower priority until the first waiting request fits.

        If preempting all of them would not free enough blocks, no request is preempted.
        """
        head = self.waiting.first
        try:
            set_common_prefix(head)
            while less_urgent := [r for r in self.running if r.priority > head.priority]:
                if not head.is_fully_read or self._admission.find_fit(head) is not None:
                    return
                if self._waits_for_blocks and self._trim_reservations():
                    continue  # call `find_fit` again, because blocks were freed
                if not self._admission.would_fit_after_preemption(
                    head, less_urgent, step.token_budget
                ):
                    return
                self._preempt_last()
        except Exception as error:
            step.planning_errors.setdefault(head, error)

    def _admit_waiting(self, step: PlanBuilder, before: Request | None = None) -> None:
        """Admit waiting requests in queue order, until a request must wait.

        Args:
            step: Step to which the requests are added.
            before: Running request that is scheduled next. If given, only requests of higher
                priority are admitted, so that they get tokens before this request.
        """
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
        """Admit a waiting request, or return False if rows or blocks are missing.

        A new request computes its first tokens in this step. A swapped-out request starts in the
        next step, because its blocks are copied while this step runs.
        """
        set_common_prefix(request)
        # A preempted request must wait until the host has read all its sampled tokens, because
        # these tokens are needed to recompute the KV.
        fit = self._admission.find_fit(request) if request.is_fully_read else None
        if fit is None and request.is_fully_read and self._waits_for_blocks:
            fit = self._admission.find_fit(request) if self._trim_reservations() else None
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
        if cache is not None and (limit := first.max_cached_tokens) != 0:
            cache.num_query_tokens += len(first.token_ids) if limit is None else limit
            cache.num_hit_tokens += first.num_computed_tokens
        self._schedule_request(step, request)
        return True

    def _move_to_running(self, request: Request) -> None:
        self.waiting.remove(request)
        self.running.add(request)
        request.status = RequestStatus.RUNNING

    # ---- reading sampled tokens

    def _append_token(self, request: Request, sequence: Sequence, token_id: int) -> EmittedToken:
        """Append a sampled token, and end the sequence if a stop criterion is met.

        If a stop token also reaches the maximum length, the finish reason is STOP.
        """
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
        """Store the candidates of beams, and advance each beam search whose beams are all ready.

        Args:
            beam_rows: Beams that the step sampled, each with its row in `candidates`.
            candidates: Next-token candidates of all rows.

        Returns:
            Requests whose beam search took a step.
        """
        if candidates is None:
            raise ValueError(
                "candidates is None, but the step sampled for a beam search: "
                "pass the candidates of a step with beams"
            )
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

    # ---- ending requests

    def _finish_request(self, request: Request, reason: FinishReason) -> None:
        self.running.discard(request)
        self.waiting.discard(request)
        request.status, request.finish_reason = RequestStatus.FINISHED, reason
        for sequence in request.live_sequences:
            sequence.finish_reason = reason
            self.sequences.retire(sequence)
        request.live_sequences = []
        self.swap_space.drop(request)

    def _fail_request(self, request: Request, error: Exception) -> None:
        """End a request after an error, even if the error occurred while the request was ending."""
        self._failed.append((request, error))
        request.live_sequences = self.sequences.find_by_request(request)
        for sequence in request.live_sequences:
            # The request's KV may be wrong, so keep its blocks out of the prefix cache.
            sequence.num_registered_blocks = REGISTRATION_ENDED
        self._finish_request(request, FinishReason.ERROR)

    def _fail_unplanned(self, step: PlanBuilder) -> None:
        """End the requests for which planning failed, and remove them from the step."""
        for request, error in step.planning_errors.items():
            step.remove_request(request)
            for sequence in request.live_sequences:
                self.block_manager.trim(sequence)
            self._fail_request(request, error)

    def _fail_without_tokens(self, plan: StepPlan, sampled_token_ids: np.ndarray) -> None:
        """Fail the requests for which the step could not sample a token (`NO_TOKEN`).

        Call this before `register_full_blocks`, so that the prefix cache does not get the blocks of
        the failed requests.
        """
        for index in np.flatnonzero(sampled_token_ids == NO_TOKEN).tolist():
            sequence, _, _, is_sampled, _ = plan.scheduled[index]
            if is_sampled and sequence.finish_reason is None:
                self._fail_request(sequence.request, NoTokenError(sequence.num_output_tokens))


def _settle(sequence: Sequence, num_tokens: int) -> None:
    """Correct a sequence's token counts once the number of sampled tokens is known.

    Args:
        sequence: Sequence that the step computed.
        num_tokens: Number of tokens that the step sampled for the sequence: 1 or 0. If it is 0, a
            later step computes the sequence's last token again.
    """
    sequence.num_pending_tokens -= 1
    # If the sequence was preempted, `num_computed_tokens` is 0 and must stay 0.
    if sequence.num_computed_tokens:
        sequence.num_computed_tokens += num_tokens - 1
