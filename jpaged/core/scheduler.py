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

from jpaged.core.admission import Admission, SchedulerConfig, check_fits, check_pin_fits
from jpaged.core.block_manager import NO_CHANGES, BlockChanges, BlockManager
from jpaged.core.groups import decodes, fan_out, is_ready, search_on, set_stem, work_of
from jpaged.core.plan import (
    Emitted,
    Goal,
    PlanBuilder,
    ScheduledSequence,
    StepNews,
    StepPlan,
    make_tuple,
)
from jpaged.core.prefix_cache import CHAIN_ENDED
from jpaged.core.request import (
    Candidates,
    FinishReason,
    NoTokenError,
    Request,
    RequestStatus,
    Sequence,
)
from jpaged.core.sequence_table import RequestQueue, SequenceTable, check_queues
from jpaged.core.swap import PressurePolicy, SwapSpace

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
        pressure: PressurePolicy | None = None,
    ):
        self.config = config
        self.block_manager = block_manager
        self.swap_space = SwapSpace(pressure or PressurePolicy(), block_manager)
        self.running = RequestQueue()
        self.waiting = RequestQueue(has_long_line=True)
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
    def has_unfinished(self) -> bool:
        """Whether any request still has tokens to come."""
        return bool(self.running or self.waiting)

    @property
    def unfinished(self) -> tuple[Request, ...]:
        """Requests that have not ended: first those that run, then those that wait."""
        return (*self.running, *self.waiting)

    # ---- requests come and go

    def check(self, request: Request) -> None:
        """ValueError if a request could never run, or its names are in use."""
        name = request.request_id
        if name in self.running or name in self.waiting:
            raise ValueError(f"request_id {name!r} is in use by an unfinished request")
        for sequence in request.sequences:
            if sequence.seq_id in self.sequences.known:
                raise ValueError(f"seq_id {sequence.seq_id} is in use by another sequence")
        request.max_num_tokens = check_fits(self.config, self.block_manager, request)

    def add(self, request: Request) -> None:
        """Queue a request; ValueError, with nothing changed, as `check`."""
        self.check(request)
        request.arrival = self._num_arrived
        self._num_arrived += 1
        self.waiting.add(request)
        for sequence in request.live:
            self.sequences.add(sequence)

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
        """`finish` with the reason of a request that its caller gave up."""
        return self.finish(request_id, FinishReason.ABORT)

    def finish_sequence(self, sequence: Sequence, reason: FinishReason) -> None:
        """End one of a request's samples, and the request with the last of them.

        Of one that has ended already, only the reason changes.
        """
        request, has_ended = sequence.request, sequence.finish_reason is not None
        sequence.finish_reason = reason
        if not request.is_finished and not has_ended:
            request.live.remove(sequence)
            self.sequences.retire(sequence)
            if not request.live:
                self._end(request, reason)
        elif request.is_finished and len(request.sequences) == 1:
            request.finish_reason = reason

    # ---- steps

    def schedule(self, goal: Goal = Goal.LATENCY) -> StepPlan | None:
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
        if self.config.by_priority and self.waiting:
            self._preempt_for_urgent(step)
        self._continue_running(step)
        takes_prompts = goal is Goal.LATENCY or step.has_prompts
        if (
            self.waiting
            and not step.has_preempted
            and (takes_prompts or self._admission.is_worth_a_step(len(self.waiting)))
        ):
            self._admit_waiting(step)
        if step.faults:
            self._end_unplanned(step)
        if not (step.scheduled or self.swap_space.has_returns or self._failed):
            return None
        released, row_forks = self.sequences.take_row_changes()
        plan = StepPlan(
            self._num_planned,
            tuple(step.scheduled),
            released,
            tuple(self._preempted),
            tuple(step.block_copies),
            row_forks,
            *self.swap_space.take_orders(),
            tuple(self._failed),
        )
        self._preempted.clear()
        self._failed.clear()
        self._num_planned += 1
        if step.faults:
            self.check_integrity()  # damage to what all share is not one request's own
        return plan

    def put_back(self, plan: StepPlan, rows: Iterable[int]) -> StepPlan:
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
            scheduled[i] = scheduled[i]._replace(num_scheduled_tokens=0, samples=False)
        return replace(plan, scheduled=tuple(scheduled))

    def update(
        self, plan: StepPlan, sampled: np.ndarray, candidates: Candidates | None = None
    ) -> StepNews:
        """Read a finished step: `sampled[i]` is the token of `plan.scheduled[i]`, or `NO_TOKEN`.

        Rows that do not sample, and those of sequences that ended meanwhile, may hold anything.
        A fault with one request, or a token that could not be sampled for it, ends that request
        alone, and the news tell it.

        Args:
            plan: Plans are read in the order of planning, each once.
            sampled: int [rows].
            candidates: A row each like `sampled`; needed by plans with beam searches.

        Raises:
            ValueError: the plan is not the next to be read, or an array does not fit it.
            IntegrityError: something went wrong with a request and left the books wrong.
        """
        if not self._num_updated == plan.step_id < self._num_planned:
            raise ValueError(
                f"plan of step {plan.step_id} is out of order: step {self._num_updated} is the "
                "next to update"
            )
        if sampled.shape != (len(plan.scheduled),):
            raise ValueError(
                f"sampled must have one token for each of {len(plan.scheduled)} scheduled "
                f"sequences, got shape {sampled.shape}"
            )
        self._num_updated += 1
        emitted: list[Emitted] = []
        offered: list[tuple[Sequence, int]] = []
        manager, sequences = self.block_manager, self.sequences
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
                if sequences.draining and not sequence.num_in_flight_steps:
                    sequences.free(sequence)
            except Exception as error:
                self._fail(request, error)
        searched = self._search(offered, candidates) if offered else []
        failed, self._failed = self._failed, []
        if not all(isinstance(error, NoTokenError) for _, error in failed):
            self.check_integrity()  # damage to what all share is not one request's own
        return StepNews(emitted, searched, failed)

    def check_integrity(self) -> None:
        """Prove the scheduler's books, and the blocks' beneath them; IntegrityError if not."""
        check_queues(self.config.max_num_seqs, self.running, self.waiting)
        self.sequences.check_integrity(self.unfinished, self.num_in_flight_steps)
        self.swap_space.check_integrity(self.unfinished)
        self.block_manager.check_integrity(self.sequences.known.values())

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes: no KV computed so far serves a request that comes later.

        ValueError, with nothing changed, while a prefix is pinned.
        """
        self.block_manager.reset_prefix_cache(self.sequences.known.values())

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
        found = cache.find_chain(token_ids, num_blocks, salt)
        check_pin_fits(manager, num_blocks - manager.pins.num_pinned(found), self.unfinished)
        return manager.pins.pin(found) if len(found) == num_blocks else None

    # ---- planning: requests that run

    def _continue_running(self, step: PlanBuilder) -> None:
        for request in self._runners_of(step):
            # Preemption takes the last first: after one that lost its place all have.
            if self.config.by_priority and not step.has_preempted:
                self._admit_waiting(step, before=request)
            if step.budget == 0 or request.status is not RequestStatus.RUNNING:
                break
            try:
                if not self._decode_on(step, request):
                    self._continue(step, request)
            except Exception as error:
                step.faults.setdefault(request, error)

    def _runners_of(self, step: PlanBuilder) -> list[Request]:
        """All that run; but where prompts alone fill the step, only the one whose prompt was begun.

        Not if another has more than a token left to compute, which would be passed over.
        """
        runners = list(self.running)
        if step.goal is Goal.LATENCY or self.config.by_priority:
            return runners
        begun = [request for request in runners[-1:] if not decodes(request)]
        try:
            fill = self._admission.would_fill_a_step(begun, self.waiting, step.budget)
        except Exception:  # a fault of a waiting request shows as soon as it joins
            fill = False
        if not fill:
            return runners
        passed = runners[: len(runners) - len(begun)]
        return begun if all(map(decodes, passed)) else runners

    def _decode_on(self, step: PlanBuilder, request: Request) -> bool:
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
            or not self.block_manager.has_slot(sequence)
        ):
            return False
        # `known` ends with the token that this step computes: its place is known - 1.
        sequence.num_computed_tokens = known
        sequence.num_pending_tokens += 1
        sequence.num_in_flight_steps += 1
        step.budget -= 1
        step.scheduled.append(make_tuple(ScheduledSequence, (sequence, known - 1, 1, True, ())))
        return True

    def _continue(self, step: PlanBuilder, request: Request) -> None:
        """Give a running request its share of the step, all of its sequences or none."""
        manager = self.block_manager
        if request.num_stem_tokens:
            self.sequences.fork_rows(fan_out(manager, request))
        work = work_of(request, step.budget)
        num_blocks = manager.num_new_blocks_of(work)
        if num_blocks and not self._make_room(step, request, num_blocks):
            return
        for sequence, num_tokens in work:
            changes = manager.append(sequence, num_tokens) if num_blocks else NO_CHANGES
            if not sequence.is_placed:
                sequence.is_placed = True
                step.joined.add(sequence)
                sequence.num_admitted_tokens = len(sequence.token_ids)
                changes = BlockChanges(tuple(enumerate(sequence.block_table)), changes.copies)
            step.place(sequence, num_tokens, changes)

    def _make_room(self, step: PlanBuilder, request: Request, num_blocks: int) -> bool:
        """Preempt from the back until `num_blocks` are free; False if `request` cannot go on.

        Blocks about to come back from finished sequences are waited for instead: that costs the
        request one step, a preemption a whole sequence. Until then no request takes blocks before
        it.
        """
        manager = self.block_manager
        while not step.is_starved and num_blocks > manager.num_free_blocks:
            num_returning = len(manager.blocks_only_of(self.sequences.draining.values()))
            if num_blocks <= manager.num_free_blocks + num_returning:
                step.is_starved = True
            else:
                step.has_preempted = True
                if self._preempt_last() is request:
                    return False
        return not step.is_starved

    def _preempt_last(self) -> Request:
        """Take the blocks of the last running request, all of them.

        At once, though steps in flight may write there: the next holder of these blocks writes them
        in a later step, and steps run in the order of their launch. A request whose last tokens are
        only to be read yet loses nothing by it: it is not swapped out, and counts as no preemption.
        """
        request = self.running.last
        is_complete = all(s.num_tokens >= request.max_num_tokens for s in request.live)
        is_swapped = not is_complete and self.swap_space.chosen_for(request)
        self.running.remove(request)
        if is_swapped:
            self.swap_space.swap_out(request)
            request.status = RequestStatus.SWAPPED
        else:
            request.status = RequestStatus.PREEMPTED
        for sequence in request.live:
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
            set_stem(head)
            while less_urgent := [r for r in self.running if r.priority > head.priority]:
                if not head.is_read or self._admission.find(head) is not None:
                    return
                if not self._admission.would_have_room(head, less_urgent, step.budget):
                    return
                self._preempt_last()
        except Exception as error:
            step.faults.setdefault(head, error)

    def _admit_waiting(self, step: PlanBuilder, before: Request | None = None) -> None:
        """Let the first waiting request join as long as it may; with `before`, a running request,
        only one that outranks it, so that the less urgent do not take the step's tokens first."""
        while self.waiting and step.budget and not step.is_starved:
            head = self.waiting.first
            if before is not None and head.priority >= before.priority:
                break
            try:
                if not self._admit(step, head):
                    break
            except Exception as error:
                step.faults.setdefault(head, error)
                break

    def _admit(self, step: PlanBuilder, request: Request) -> bool:
        """Let a waiting request join the batch, if it fits: with the prefix that is cached, or with
        its image, which travels while this step runs."""
        set_stem(request)
        # One preempted a moment ago has tokens that the host has not read yet.
        fit = self._admission.find(request) if request.is_read else None
        if fit is None:
            return False
        if request.status is RequestStatus.SWAPPED:
            self.swap_space.swap_in(request, fit.hits)
            self._enter(request)
            return True
        first, manager = request.live[0], self.block_manager
        self._enter(request)
        manager.admit(first, fit.hits[0])
        if first.num_cached_tokens is None:
            first.num_cached_tokens = first.num_computed_tokens
        cache = manager.prefix_cache
        if cache is not None and first.reads_prefix_cache:
            cache.num_query_tokens += len(first.token_ids)
            cache.num_hit_tokens += first.num_computed_tokens
        self._continue(step, request)
        return True

    def _enter(self, request: Request) -> None:
        self.waiting.remove(request)
        self.running.add(request)
        request.status = RequestStatus.RUNNING

    # ---- reading

    def _read_token(self, request: Request, sequence: Sequence, token_id: int) -> Emitted:
        """Append a sampled token; a stop token wins over a length reached with the same token."""
        sequence.token_ids.append(token_id)
        stop, reason = request.stop, None
        if token_id in stop.stop_token_ids and sequence.num_output_tokens >= stop.min_tokens:
            reason = FinishReason.STOP
        elif len(sequence.token_ids) >= request.max_num_tokens:
            reason = FinishReason.LENGTH
        if reason is not None:
            self.finish_sequence(sequence, reason)
        return make_tuple(Emitted, (sequence, request, token_id, reason))

    def _search(
        self, offered: list[tuple[Sequence, int]], candidates: Candidates | None
    ) -> list[Request]:
        """Give beams their rows of `candidates`; the beam searches that then took a step, since all
        their beams were read."""
        if candidates is None:
            raise ValueError("candidates=None: a step with a beam search is read with candidates")
        for beam, row in offered:
            beam.candidates = Candidates(candidates.token_ids[row], candidates.logprobs[row])
        searched = []
        for request in dict.fromkeys(beam.request for beam, _ in offered):
            if request.is_finished or not all(map(is_ready, request.live)):
                continue
            try:
                reason = search_on(self.block_manager, self.sequences, request)
                if reason is not None:
                    self._end(request, reason)
                searched.append(request)
            except Exception as error:
                self._fail(request, error)
        return searched

    # ---- finishing

    def _end(self, request: Request, reason: FinishReason) -> None:
        """End a request and its live sequences."""
        self.running.discard(request)
        self.waiting.discard(request)
        request.status, request.finish_reason = RequestStatus.FINISHED, reason
        for sequence in request.live:
            sequence.finish_reason = reason
            self.sequences.retire(sequence)
        request.live = []
        self.swap_space.drop(request)

    def _fail(self, request: Request, error: Exception) -> None:
        """End a request with an error, wherever its handling stopped: perhaps with beams half
        forked or pruned, or in the middle of ending."""
        self._failed.append((request, error))
        request.live = self.sequences.of(request)
        for sequence in request.live:
            sequence.num_chained_blocks = CHAIN_ENDED  # its blocks must serve no other sequence
        self._end(request, FinishReason.ERROR)

    def _end_unplanned(self, step: PlanBuilder) -> None:
        """End the requests for which planning failed; they may hold more blocks than they use."""
        for request, error in step.faults.items():
            step.drop(request)
            for sequence in request.live:
                self.block_manager.trim(sequence)
            self._fail(request, error)

    def _end_without_tokens(self, plan: StepPlan, sampled: np.ndarray) -> None:
        """End the requests of rows that should have sampled a token, before others know what their
        blocks hold."""
        for index in np.flatnonzero(sampled < 0).tolist():
            sequence, _, _, samples, _ = plan.scheduled[index]
            if samples and sequence.finish_reason is None:
                self._fail(sequence.request, NoTokenError(sequence.num_output_tokens))
