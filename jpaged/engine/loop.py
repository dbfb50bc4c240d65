"""The loop: schedule -> launch -> read -> update, one step at a time.

In the overlapped loop the step that is read is the one launched a turn ago, so that the device
has its next step waiting; in the synchronous loop it is the step just launched. Both give the same
tokens, but for the rounding of steps that are composed differently.

Where a row of a step obeys a grammar, what it may sample depends on the token before it: then the
step's layers are launched, the step before is read meanwhile, and the sampling follows with a mask.
In the overlapped loop a thread sends the tokens, as soon as the device has them, to a process that
makes the masks; rows whose masks take long may sit the step out, and are computed again
(`WaitBudget`).
"""

import signal
import threading
import time
import traceback
from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from types import FrameType
from typing import Any
from weakref import WeakSet

from jpaged.config import LoopMode
from jpaged.core.block_manager import BlockManager
from jpaged.core.plan import Emitted, Goal, StepPlan
from jpaged.core.request import FinishReason, Request, Sequence
from jpaged.core.scheduler import Scheduler
from jpaged.engine.request_state import RequestState
from jpaged.observe.pool_changes import PoolWatch
from jpaged.observe.pool_report import num_waste_slots
from jpaged.observe.statistics import EngineStats
from jpaged.runtime.model_runner import ModelRunner, UnsampledStep
from jpaged.runtime.results import StepHandle, StepResult, TokenScores
from jpaged.sampling_params import SamplingParams
from jpaged.text.grammar import GrammarError
from jpaged.text.mask_process import Answer, Constraint, Items, MaskProcess, WaitBudget

_COMPILING_WAIT = 0.005
"""Seconds that a turn with nothing else to do waits for a grammar."""

_LONGEST_WAIT = 1.0
"""Maximum seconds that a step waits for a running mask worker if some rows cannot skip the step and
all rows have a grammar."""

_LATE = (
    "structured_outputs: the mask worker did not answer in time, and this request cannot skip a "
    "step: retry"
)


@contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Let a Ctrl-C that comes inside the block take effect at its end."""
    before = signal.getsignal(signal.SIGINT)
    if not callable(before) or threading.current_thread() is not threading.main_thread():
        yield  # nothing would raise here
        return
    came: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda *call: came.append(call))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            before(*came[0])


@dataclass
class LoopCounts:
    """What happened since the start, by the names of `EngineStats`."""

    peak_used_blocks: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_block_copies: int = 0
    num_swapped_out_blocks: int = 0
    num_swapped_in_blocks: int = 0
    num_generated_tokens: int = 0
    num_steps: int = 0
    num_step_tokens: int = 0
    num_steps_by_size: list[int] = field(
        default_factory=lambda: [0] * (len(EngineStats.STEP_SIZES) + 1)
    )
    num_finished: int = 0

    def note_plan(self, plan: StepPlan, manager: BlockManager) -> None:
        """Count a step that is launched now."""
        self.num_steps += bool(plan.scheduled or plan.moves_blocks)  # others only tell of faults
        if num_tokens := plan.num_new_tokens:
            self.num_step_tokens += num_tokens
            self.num_steps_by_size[bisect_left(EngineStats.STEP_SIZES, num_tokens)] += 1
        self.num_preemptions += len(plan.preempted)
        num_used_blocks = manager.pool.num_usable_blocks - manager.num_free_blocks
        self.peak_used_blocks = max(self.peak_used_blocks, num_used_blocks)
        self.num_block_copies += len(plan.block_copies)
        self.num_swapped_out_blocks += sum(len(order.block_ids) for order in plan.swap_outs)
        self.num_swapped_in_blocks += sum(len(order.places) for order in plan.swap_ins)


class EngineLoop:
    """Drives requests from the scheduler through the device and back. Not thread-safe.

    Attributes:
        scheduler: Decides the steps.
        requests: Unfinished requests by id; those whose grammar is not compiled yet, too.
        undelivered: Polled requests that were advanced since they were told of (an ordered set).
        counts: What happened so far.
        watches: Those that look at the pool at present; they note each launched plan. They refer to
            the scheduler, so it is weak: an engine is in no cycle, and a dropped watch is gone.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        mode: LoopMode,
        masks: MaskProcess | None = None,
    ):
        self.scheduler = scheduler
        self.requests: dict[str, RequestState] = {}
        self.undelivered: dict[RequestState, None] = {}
        self.counts = LoopCounts()
        self.watches: WeakSet[PoolWatch] = WeakSet()
        self._runner = runner
        self._mode = mode
        self._masks: Any = masks  # no request is constrained where there is none
        self._wait_budget = WaitBudget()
        self._seconds_waited = 0.0  # for tokens
        self._compiling: dict[RequestState, Constraint] = {}  # not queued yet
        self._num_constrained = 0  # requests with a grammar
        self._unsampled: UnsampledStep | None = None  # the last one, if its masks are awaited
        self._in_flight: deque[StepHandle] = deque()
        self._failure: str | None = None
        self._is_busy = False
        self._dropped: list[RequestState] = []  # to be aborted as soon as it is not

    @property
    def has_work(self) -> bool:
        """Whether a request is unfinished or a step unread."""
        return bool(
            self.scheduler.has_unfinished or self._in_flight or self._unsampled or self._compiling
        )

    def stats(self) -> EngineStats:
        """The pool and the queues now, and counts since the start. O(sequences)."""
        scheduler, swap = self.scheduler, self.scheduler.swap_space
        manager, cache = scheduler.block_manager, scheduler.block_manager.prefix_cache
        counts: dict[str, Any] = vars(self.counts).copy()
        counts["num_steps_by_size"] = tuple(self.counts.num_steps_by_size)
        return EngineStats(
            **counts,
            block_size=manager.block_size,
            num_blocks=manager.pool.num_usable_blocks,
            num_free_blocks=manager.num_free_blocks,
            num_waste_slots=num_waste_slots(scheduler),
            num_running=len(scheduler.running),
            num_running_seqs=scheduler.running.num_seats,
            num_waiting=len(scheduler.waiting) + len(self._compiling),
            num_swapped=scheduler.num_swapped,
            prefix_cache_queries=0 if cache is None else cache.num_query_tokens,
            prefix_cache_hits=0 if cache is None else cache.num_hit_tokens,
            num_cached_blocks=manager.pool.num_cached_blocks,
            num_pinned_blocks=manager.pins.num_blocks,
            num_host_blocks=swap.policy.num_host_blocks,
            num_used_host_blocks=swap.num_used_blocks,
        )

    def check_alive(self) -> None:
        """Raise RuntimeError if a step failed: what the device holds is then unknown."""
        if self._failure is not None:
            message = "the engine failed in an earlier step: make a new one"
            raise RuntimeError(message) from RuntimeError(self._failure)

    def advance(self, goal: Goal) -> list[RequestState]:
        """Launch a step, or a burst of them, and read what was launched a turn ago; gives the
        requests that ended.

        Args:
            goal: What the step is to favour; for throughput bursts may be larger.

        Raises:
            RuntimeError: a step failed, now or earlier.
        """
        self.check_alive()
        ended = self._queue_compiled() if self._compiling else []
        num_ahead = 0
        if self._unsampled is None:  # an interrupt may have left one
            with self._undisturbed(fatal=True):
                plans = self._schedule(goal)
                launched = self._launch(plans, goal)
                self._in_flight += launched
                faults = [fault for plan in plans for fault in plan.failed]
                faults += [fault for handle in launched for fault in handle.faults]
                ended += self._settle({}, faults)
            num_ahead = len(launched)
        if self._unsampled is not None:
            ended += self._sample_masked()
            num_ahead = 1
        if self._mode is not LoopMode.OVERLAPPED:
            num_ahead = 0
        while len(self._in_flight) > num_ahead:
            ended += self._read()
        if not self.scheduler.has_unfinished:
            self.drain()  # the last requests' wasted steps hold blocks until they are read
        return ended

    def drain(self) -> None:
        """Read every step in flight, unless the engine failed."""
        if self._unsampled is not None and self._failure is None:
            self._sample_masked()
        while self._in_flight and self._failure is None:
            self._read()

    def add(self, states: Iterable[RequestState]) -> None:
        """Queue requests, in their order; those whose grammars are not compiled yet, as soon as
        these are.

        Raises:
            TypeError, ValueError: one could never run; it changes nothing, and those before it are
                queued.
            RuntimeError: a step failed earlier.
        """
        self.check_alive()
        with self._undisturbed():
            for state in states:
                request = state.request
                if request.request_id in self.requests:
                    name = request.request_id
                    raise ValueError(f"request_id {name!r} is in use by an unfinished request")
                constraint = state.constraint
                if constraint is not None and not constraint.is_ready:
                    self.scheduler.check(request)
                    self._compiling[state] = constraint
                else:
                    self._queue(state)
                self.requests[request.request_id] = state
                self._num_constrained += state.is_constrained
                self.counts.num_prompt_tokens += request.sequences[0].num_prompt_tokens

    def _queue(self, state: RequestState) -> None:
        """Give the scheduler a request. TypeError, ValueError: it could never run, or its grammar
        could not be compiled; nothing is changed then."""
        state.check_grammar()
        try:
            self.scheduler.add(state.request)
        except (TypeError, ValueError):  # refused: nothing is changed
            raise
        except Exception:
            self.scheduler.abort(state.request_id)
            raise

    def _queue_compiled(self) -> list[RequestState]:
        """Queue the requests whose grammars are compiled by now; those that end over it. Where
        nothing else is to do, the first one's is waited for, but not for long."""
        if not (self.scheduler.has_unfinished or self._in_flight or self._unsampled):
            next(iter(self._compiling.values())).wait(_COMPILING_WAIT)
        with self._undisturbed():
            failed: dict[RequestState, None] = {}
            for state in [it for it, constraint in self._compiling.items() if constraint.is_ready]:
                del self._compiling[state]
                try:
                    self._queue(state)
                except Exception as error:
                    state.request.end_unqueued(FinishReason.ERROR)
                    state.fail(error)
                    failed[state] = None
            return self._settle(failed, ())

    def abort(self, state: RequestState) -> None:
        """End a request in any state; one that has ended, or was never added, is left as it is."""
        if self.requests.get(state.request_id) is not state:
            return
        if self._is_busy:  # the garbage collector found a dropped stream in the middle of a step
            self._dropped.append(state)
            return
        with self._undisturbed():
            self._compiling.pop(state, None)
            self.scheduler.abort(state.request_id)
            self._retire(state)
            self.undelivered.pop(state, None)

    def _schedule(self, goal: Goal) -> list[StepPlan]:
        """What to launch now: the next step, or several while they fit a burst.

        Who waits is to have the place of who ends at once, unless only the end of all counts.
        """
        plans: list[StepPlan] = []
        while (plan := self.scheduler.schedule(goal)) is not None:
            plans.append(plan)
            if len(plans) == self._runner.burst_steps:
                break
            others_wait = goal is Goal.LATENCY and self.scheduler.waiting
            if others_wait or not self._fits_burst(plan, goal):
                break
        return plans

    def _fits_burst(self, plan: StepPlan, goal: Goal) -> bool:
        return not self._is_constrained(plan) and self._runner.fits_burst(plan, goal)

    def _is_constrained(self, plan: StepPlan) -> bool:
        """Whether a grammar decides what a row of the plan may sample."""
        return self._num_constrained > 0 and any(
            item.samples and self.requests[item.sequence.request.request_id].is_constrained
            for item in plan.scheduled
        )

    def _launch(self, plans: list[StepPlan], goal: Goal) -> list[StepHandle]:
        """Launch what `_schedule` gave: as one program, if it is a whole burst. If the last one's
        sampling needs masks, it is left as `_unsampled`."""
        runner = self._runner
        # All but the last were found to fit, or would have been the last.
        if len(plans) == runner.burst_steps > 1 and self._fits_burst(plans[-1], goal):
            handles = runner.launch_burst(plans, self._params_of)
        else:
            masked = plans[-1:] if plans and self._is_constrained(plans[-1]) else []
            free = plans[: len(plans) - len(masked)]
            handles = [runner.launch(plan, self._params_of) for plan in free]
            for plan in masked:
                self._unsampled = runner.launch_layers(plan, self._params_of)
        for plan in plans:
            self.counts.note_plan(plan, self.scheduler.block_manager)
            if self.watches:  # to walk through none costs more than to ask
                for watch in tuple(self.watches):
                    watch.note(plan)
            for request_id in plan.preempted:
                if request_id in self.requests:
                    self.requests[request_id].metrics.num_preemptions += 1
            if not plan.is_decode:
                self._note_first_scheduled(plan)
        return handles

    def _sample_masked(self) -> list[RequestState]:
        """Sample the step whose layers are launched, with masks: all steps before it are read for
        them. Gives the requests that ended. An interrupt while waiting for one loses nothing."""
        ended, before = [], self._seconds_waited
        while self._in_flight:
            ended += self._read()
        self._wait_budget.begin(self._seconds_waited - before)
        with self._undisturbed(fatal=True):
            if (step := self._unsampled) is None:
                return ended
            items, complete = self._answers_of(step), dict[RequestState, None]()
            if items:
                handle, faults, complete = self._launch_masked(step, items)
            else:
                handle, faults = self._runner.launch_sampling(step), []
            self._unsampled = None
            self._in_flight.append(handle)
            return ended + self._settle(complete, [*faults, *handle.faults])

    def _launch_masked(
        self, step: UnsampledStep, items: Items
    ) -> tuple[StepHandle, list[tuple[Request, Exception]], dict[RequestState, None]]:
        """Sample a step with masks, and have the mask worker make the next masks.

        Returns:
            The step's handle; each request that fails, with its error; the requests with an answer
            that the tokens of earlier steps have completed. Tokens sampled in the rows of the last
            two are dropped.
        """
        may_leave = partial(self._should_stop_waiting, step, items)
        allowed, over, late = self._masks.gather(items, step.num_rows, may_leave)
        self._wait_budget.note_step()
        leaving = {items[i][1] for i in late if self._can_skip(step, items[i][1])}
        if leaving:
            rows = [i for i, row in enumerate(step.places.tolist()) if row in leaving]
            step = replace(step, plan=self.scheduler.put_back(step.plan, rows))
        handle = self._runner.launch_sampling(step, allowed)
        ahead = self._mode is LoopMode.OVERLAPPED and not handle.is_shared
        self._masks.start({*late, *(i for i, _ in over)}, handle.read_rows, ahead=ahead)
        faults = [(i, error) for i, error in over if error is not None]
        faults += [(i, GrammarError(_LATE)) for i in late if items[i][1] not in leaving]
        complete = [step.scheduled[items[i][1]].sequence for i, error in over if error is None]
        return (
            handle,
            [(self._request_at(step, items[i][1]), error) for i, error in faults],
            self._complete(complete),
        )

    def _complete(self, sequences: Iterable[Sequence]) -> dict[RequestState, None]:
        """End samples whose grammars allow nothing after tokens that were read earlier."""
        told: dict[RequestState, None] = {}
        for sequence in sequences:
            request = sequence.request
            state = self.requests[request.request_id]
            told[state] = None
            token = Emitted(sequence, request, sequence.token_ids[-1], None)
            try:
                if state.accept(token, None, 0):
                    self.scheduler.finish_sequence(sequence, FinishReason.STOP)
            except Exception as error:
                self._fail(state, error)
        return told

    def _answers_of(self, step: UnsampledStep) -> list[tuple[Answer, int]]:
        """Return the step's unfinished answers with grammars, each with its row.

        Rows of finished answers are left out: their tokens are dropped.
        """
        items: list[tuple[Answer, int]] = []
        for row, item in enumerate(step.scheduled):
            sequence = item.sequence
            if item.samples and sequence.finish_reason is None:
                answer = self.requests[sequence.request.request_id].answer_of(sequence)
                if answer is not None:
                    items.append((answer, row))
        return items

    def _should_stop_waiting(
        self, step: UnsampledStep, items: Items, late: SequenceOf[int], heavy: Collection[int]
    ) -> bool:
        """Return whether the step stops waiting for late masks. Then each late row skips the step,
        and the rows that cannot skip it fail.

        Args:
            step: Its layers are launched.
            items: The step's answers with grammars.
            late: Indices in `items` of the answers without a mask.
            heavy: Indices among `late` of the heavy answers.
        """
        masks, num_rows = self._masks, len(step.scheduled)
        has_others, has_plain = len(late) < num_rows, len(items) < num_rows
        if has_others:
            is_late = masks.seconds_left == 0
        else:  # a request that arrives would have to wait
            is_late = masks.seconds_waited >= masks.longest_wait
        if not is_late:
            if not has_others or self._mode is not LoopMode.OVERLAPPED:
                return False
            share = (len(late) - len(heavy)) / num_rows
            if not self._wait_budget.is_over(share, has_plain=has_plain):
                return False
        staying = {i for i in late if not self._can_skip(step, items[i][1])}
        if not staying or not is_late:
            return not staying
        # On a busy machine the mask worker may just have had no CPU time.
        is_busy = masks.is_running and not (has_others and staying.issubset(heavy))
        is_busy = is_busy and not has_plain  # which wait no longer, whatever the reason
        return not is_busy or masks.seconds_waited >= _LONGEST_WAIT

    def _can_skip(self, step: UnsampledStep, row: int) -> bool:
        """Return whether a row can skip the step, so that a later step computes its token again.

        A row can if it decodes one token, is its request's only unfinished sequence, and the
        request adjusts no logits (penalties, biases, forbidden tokens).
        """
        item = step.scheduled[row]
        sequence, request = item.sequence, item.sequence.request
        return (
            item.start >= sequence.num_admitted_tokens
            and item.num_scheduled_tokens == 1
            and len(request.live) == 1
            and not self._params_of(request).adjusts_logits
        )

    def _request_at(self, step: UnsampledStep, row: int) -> Request:
        return step.scheduled[row].sequence.request

    def _params_of(self, request: Request) -> SamplingParams:
        return self.requests[request.request_id].params

    def _note_first_scheduled(self, plan: StepPlan) -> None:
        now = time.monotonic()
        for item in plan.scheduled:
            metrics = self.requests[item.sequence.request.request_id].metrics
            if metrics.first_scheduled_time is None:
                metrics.first_scheduled_time = now
                self.counts.num_cached_tokens += item.sequence.num_cached_tokens or 0

    def _read(self) -> list[RequestState]:
        """Read the oldest step in flight; gives the requests that it ended. An interrupt while
        waiting for it loses nothing."""
        handle, start = self._in_flight[0], time.perf_counter()
        try:
            result = handle.read()
            self._seconds_waited += time.perf_counter() - start
        except Exception as error:  # not Ctrl-C: the step can be waited for again
            self._note_failure(error)
            raise
        with self._undisturbed(fatal=True):
            self._in_flight.popleft()
            over: set[Answer] = self._masks.await_taken() if self._masks is not None else set()
            ill = self._tell_prompts(handle.plan, result) if result.prompt_logprobs else {}
            candidates = None if result.logprobs is None else result.candidates
            news = self.scheduler.update(handle.plan, result.token_ids, candidates)
            self.counts.num_generated_tokens += len(news.emitted)
            # Several samples of one request may end with this step: it is retired after the last.
            advanced = self._tell(news.emitted, handle.plan, result.logprobs, over)
            if news.searched:
                advanced |= self._tell_searches(news.searched)
            return self._settle(advanced | ill, news.failed)

    def _settle(
        self, advanced: dict[RequestState, None], faults: Iterable[tuple[Request, Exception]]
    ) -> list[RequestState]:
        """Fail the requests in `faults`, mark them and the `advanced` ones as undelivered, and
        retire those that have ended, which are returned."""
        for request, error in faults:
            state = self.requests.get(request.request_id)
            if state is not None and state.request is request:
                self._fail(state, error)
                advanced[state] = None
        ended = []
        for state in advanced:
            if state.polled:  # noted here, so that no Ctrl-C loses it
                self.undelivered[state] = None
            if state.request.finish_reason is not None:
                self._retire(state)
                ended.append(state)
        return ended

    def _tell(
        self,
        emitted: list[Emitted],
        plan: StepPlan,
        scores: TokenScores | None,
        over: set[Answer],
    ) -> dict[RequestState, None]:
        """Tell requests of those of their tokens that they must hear of, such as end the answers in
        `over`; the requests."""
        told: dict[RequestState, None] = {}
        requests = self.requests
        scored = () if scores is None else plan.scheduled
        rows = {item.sequence.seq_id: row for row, item in enumerate(scored)}
        for token in emitted:
            sequence, request, _, reason = token
            state = requests[request.request_id]
            ends = over and state.answer_of(sequence) in over
            if reason is FinishReason.LENGTH and not ends and state.is_constrained:
                answer = state.answer_of(sequence)
                ends = answer is not None and self._masks.await_end(answer)
            if reason is None and state.is_quiet and not ends:
                continue
            told[state] = None
            try:
                if state.accept(token, scores, rows.get(sequence.seq_id, 0)):
                    # Also where the same token was its last: the stop string wins.
                    self.scheduler.finish_sequence(sequence, FinishReason.STOP)
            except Exception as error:
                self._fail(state, error)
        return told

    def _tell_searches(self, searched: list[Request]) -> dict[RequestState, None]:
        """Note the time of a beam search's first step; those that are over."""
        over: dict[RequestState, None] = {}
        for request in searched:
            state = self.requests[request.request_id]
            state.note_first_token()
            if request.is_finished and request.beam is not None:
                found = request.beam.hypotheses[: state.params.n]
                self.counts.num_generated_tokens += sum(len(h.output_token_ids) for h in found)
                over[state] = None
        return over

    def _tell_prompts(self, plan: StepPlan, result: StepResult) -> dict[RequestState, None]:
        """Give requests what the step scored of their prompts; those that fail over it."""
        failed: dict[RequestState, None] = {}
        for item in plan.scheduled:
            request = item.sequence.request
            scores = result.prompt_logprobs.get(item.sequence.seq_id)
            state = self.requests.get(request.request_id)
            if scores is not None and state is not None and state.request is request:
                try:
                    state.accept_prompt_logprobs(item, scores)
                except Exception as error:
                    self._fail(state, error)
                    failed[state] = None
        return failed

    def _fail(self, state: RequestState, error: Exception) -> None:
        """What goes wrong with one request ends it with an error, and no other."""
        state.fail(error)
        self.scheduler.finish(state.request_id, FinishReason.ERROR)

    def _retire(self, state: RequestState) -> None:
        try:
            state.finish()
        except Exception as error:
            self._fail(state, error)
        self.counts.num_finished += 1
        self._num_constrained -= state.is_constrained
        del self.requests[state.request_id]

    def _note_failure(self, error: BaseException) -> None:
        """Keep what the error tells, not itself: its frames have this loop, and nothing else of an
        engine is in a cycle."""
        self._failure = "".join(traceback.format_exception(error))

    @contextmanager
    def _undisturbed(self, *, fatal: bool = False) -> Iterator[None]:
        """Neither Ctrl-C nor the abort of a stream that is collected breaks into the block; if it
        is `fatal`, all of it happens, or the engine is known to have failed."""
        with deferred_interrupts():
            self._is_busy = True
            try:
                yield
            except BaseException as error:
                if fatal:
                    self._note_failure(error)
                raise
            finally:
                self._is_busy = False
            while self._dropped:
                self.abort(self._dropped.pop())
