"""The loop: schedule -> launch -> read -> update, one step at a time.

In the overlapped loop the step that is read is the one launched a turn ago, so that the device
has its next step waiting; in the synchronous loop it is the step just launched. Both give the same
tokens, but for the rounding of steps that are composed differently.

If a row of a step has a grammar, the step before must be read between the step's layers and its
sampling: the mask of the row depends on the token before it (`ConstrainedSampler`).
"""

import signal
import threading
import time
import traceback
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from weakref import WeakSet

from jpaged.config import LoopMode
from jpaged.core.plan import EmittedToken, SchedulingGoal, StepPlan
from jpaged.core.request import FinishReason, Request, Sequence
from jpaged.core.scheduler import Scheduler
from jpaged.engine.constrained_sampler import ConstrainedSampler
from jpaged.engine.request_state import RequestState
from jpaged.observe.pool_changes import PoolWatch
from jpaged.observe.pool_report import engine_stats
from jpaged.observe.statistics import EngineStats
from jpaged.runtime.model_runner import ModelRunner, UnsampledStep
from jpaged.runtime.results import StepHandle, StepResult, TokenScores
from jpaged.sampling_params import SamplingParams
from jpaged.structured_outputs.mask_client import MaskWorkerClient


@contextmanager
def defer_interrupts() -> Iterator[None]:
    """Let a Ctrl-C that comes inside the block take effect at its end."""
    previous_handler = signal.getsignal(signal.SIGINT)
    if not callable(previous_handler) or threading.current_thread() is not threading.main_thread():
        yield  # nothing would raise here
        return
    interrupts: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda *call: interrupts.append(call))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous_handler)
        if interrupts:
            previous_handler(*interrupts[0])


class EngineLoop:
    """Drives requests from the scheduler through the device and back. Not thread-safe.

    Attributes:
        scheduler: Decides the steps.
        requests: Unfinished requests by id; those whose grammar is not compiled yet, too.
        undelivered: Polled requests that were advanced since they were told of (an ordered set).
        counts: What happened so far, by the names of `EngineStats`.
        watches: Those that look at the pool at present; they note each launched plan. They refer to
            the scheduler, so it is weak: an engine is in no cycle, and a dropped watch is gone.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        mode: LoopMode,
        mask_client: MaskWorkerClient | None = None,
    ):
        self.scheduler = scheduler
        self.requests: dict[str, RequestState] = {}
        self.undelivered: dict[RequestState, None] = {}
        self.counts = Counter(peak_used_blocks=0)
        self.watches: WeakSet[PoolWatch] = WeakSet()
        self._num_steps_by_size = [0] * (len(EngineStats.STEP_SIZES) + 1)
        self._runner, self._mode = runner, mode
        self._constrained_sampler = ConstrainedSampler(
            mask_client, scheduler, runner, mode, self.requests
        )
        self._num_constrained_requests = 0  # requests with a grammar
        self._unsampled_step: UnsampledStep | None = (
            None  # the last step, while its masks are awaited
        )
        self._device_wait_s = 0.0  # for tokens
        self._steps_in_flight: deque[StepHandle] = deque()
        self._failure: str | None = None
        self._is_busy = False
        self._deferred_aborts: list[RequestState] = []  # to be aborted as soon as it is not

    @property
    def has_work(self) -> bool:
        """Whether a request is unfinished or a step unread."""
        return bool(self.requests or self._steps_in_flight or self._unsampled_step)

    def stats(self) -> EngineStats:
        """The pool and the queues now, and counts since the start. O(sequences)."""
        counts = {**self.counts, "num_steps_by_size": tuple(self._num_steps_by_size)}
        return engine_stats(self.scheduler, len(self._constrained_sampler.compiling), counts)

    def check_alive(self) -> None:
        """Raise RuntimeError if a step failed: what the device holds is then unknown."""
        if self._failure is not None:
            message = "the engine failed in an earlier step: make a new one"
            raise RuntimeError(message) from RuntimeError(self._failure)

    def advance(self, goal: SchedulingGoal) -> list[RequestState]:
        """Launch a step, or a burst of them, and read what was launched a turn ago; gives the
        requests that ended.

        Args:
            goal: What the step is to favour; for throughput bursts may be larger.

        Raises:
            RuntimeError: a step failed, now or earlier.
        """
        self.check_alive()
        ended = self._queue_compiled() if self._constrained_sampler.compiling else []
        num_ahead = 0
        if self._unsampled_step is None:  # an interrupt may have left one
            with self._critical_section(fatal=True):
                plans = self._schedule(goal)
                launched = self._launch(plans, goal)
                self._steps_in_flight += launched
                faults = [fault for plan in plans for fault in plan.failed]
                faults += [fault for handle in launched for fault in handle.faults]
                ended += self._update_requests({}, faults)
            num_ahead = len(launched)
        if self._unsampled_step is not None:
            ended += self._sample_constrained(self._unsampled_step, goal)
            num_ahead = 1
        if self._mode is not LoopMode.OVERLAPPED:
            num_ahead = 0
        while len(self._steps_in_flight) > num_ahead:
            ended += self._read_step()
        if not self.scheduler.has_unfinished_requests:
            self.drain()  # the last requests' wasted steps hold blocks until they are read
        return ended

    def drain(self) -> None:
        """Read every step in flight, unless the engine failed."""
        if self._unsampled_step is not None and self._failure is None:
            self._sample_constrained(self._unsampled_step, SchedulingGoal.LATENCY)
        while self._steps_in_flight and self._failure is None:
            self._read_step()

    def add(self, states: Iterable[RequestState]) -> None:
        """Queue requests, in their order; those whose grammars are not compiled yet, as soon as
        these are.

        Raises:
            TypeError, ValueError: one could never run; it changes nothing, and those before it are
                queued.
            RuntimeError: a step failed earlier.
        """
        self.check_alive()
        with self._critical_section():
            for state in states:
                request = state.request
                if request.request_id in self.requests:
                    name = request.request_id
                    raise ValueError(f"request_id {name!r} is in use by an unfinished request")
                constraint = state.constraint
                if constraint is not None and not constraint.is_ready:
                    self.scheduler.check(request)
                    self._constrained_sampler.compiling[state] = constraint
                else:
                    self._enqueue(state)
                self.requests[request.request_id] = state
                self._num_constrained_requests += state.is_constrained
                self.counts["num_prompt_tokens"] += request.sequences[0].num_prompt_tokens

    def _enqueue(self, state: RequestState) -> None:
        """Give the scheduler a request. TypeError, ValueError: it could never run, or its grammar
        could not be compiled; nothing is changed then."""
        state.check_grammar()
        try:
            self.scheduler.add(state.request)
        except Exception:
            self.scheduler.abort(state.request_id)  # does nothing if the scheduler refused it
            raise

    def _queue_compiled(self) -> list[RequestState]:
        """Queue the requests whose grammars are compiled by now; gives those that fail over it."""
        is_idle = not (
            self.scheduler.has_unfinished_requests or self._steps_in_flight or self._unsampled_step
        )
        with self._critical_section():
            failed: dict[RequestState, None] = {}
            for state in self._constrained_sampler.pop_compiled(may_wait=is_idle):
                try:
                    self._enqueue(state)
                except Exception as error:
                    state.request.end_unqueued(FinishReason.ERROR)
                    state.fail(error)
                    failed[state] = None
            return self._update_requests(failed, ())

    def abort(self, state: RequestState) -> None:
        """End a request in any state; one that has ended, or was never added, is left as it is."""
        if self.requests.get(state.request_id) is not state:
            return
        if self._is_busy:  # the garbage collector found a dropped stream in the middle of a step
            self._deferred_aborts.append(state)
            return
        with self._critical_section():
            self._constrained_sampler.compiling.pop(state, None)
            self.scheduler.abort(state.request_id)
            self._retire(state)
            self.undelivered.pop(state, None)

    def _schedule(self, goal: SchedulingGoal) -> list[StepPlan]:
        """What to launch now: the next step, or several while they fit a burst.

        Who waits is to have the place of who ends at once, unless only the end of all counts.
        """
        plans: list[StepPlan] = []
        while (plan := self.scheduler.schedule(goal)) is not None:
            plans.append(plan)
            if len(plans) == self._runner.burst_steps:
                break
            others_wait = goal is SchedulingGoal.LATENCY and self.scheduler.waiting
            if others_wait or self._is_constrained(plan) or not self._runner.fits_burst(plan, goal):
                break
        return plans

    def _is_constrained(self, plan: StepPlan) -> bool:
        """Return whether a row of the plan that samples has a grammar."""
        return self._num_constrained_requests > 0 and any(
            item.is_sampled and self.requests[item.sequence.request.request_id].is_constrained
            for item in plan.scheduled
        )

    def _launch(self, plans: list[StepPlan], goal: SchedulingGoal) -> list[StepHandle]:
        """Launch what `_schedule` gave: as one program, if it is a whole burst. If the last one is
        constrained, only its layers are launched, as `_unsampled_step`."""
        runner = self._runner
        unconstrained = plans[:-1] if plans and self._is_constrained(plans[-1]) else plans
        # All but the last were found to fit, or would have been the last.
        if len(unconstrained) == runner.burst_steps > 1 and runner.fits_burst(
            unconstrained[-1], goal
        ):
            handles = runner.launch_burst(unconstrained, self._request_params)
        else:
            handles = [runner.launch(plan, self._request_params) for plan in unconstrained]
        if len(unconstrained) < len(plans):
            self._unsampled_step = runner.launch_layers(plans[-1], self._request_params)
        for plan in plans:
            self._record_launch(plan)
        return handles

    def _record_launch(self, plan: StepPlan) -> None:
        """Count a step; note it in its requests' metrics and in the watches."""
        counts, manager = self.counts, self.scheduler.block_manager
        counts["num_steps"] += bool(
            plan.scheduled or plan.has_block_moves
        )  # others only tell faults
        if num_tokens := plan.num_new_tokens:
            counts["num_step_tokens"] += num_tokens
            self._num_steps_by_size[bisect_left(EngineStats.STEP_SIZES, num_tokens)] += 1
        num_used = manager.pool.num_usable_blocks - manager.num_free_blocks
        counts["peak_used_blocks"] = max(counts["peak_used_blocks"], num_used)
        counts["num_block_copies"] += len(plan.block_copies)
        counts["num_swapped_out_blocks"] += sum(len(swap.block_ids) for swap in plan.swap_outs)
        counts["num_swapped_in_blocks"] += sum(len(swap.copies) for swap in plan.swap_ins)
        counts["num_preemptions"] += len(plan.preempted_request_ids)
        for request_id in plan.preempted_request_ids:
            if request_id in self.requests:
                self.requests[request_id].metrics.num_preemptions += 1
        now = time.monotonic()
        for item in () if plan.is_decode else plan.scheduled:
            metrics = self.requests[item.sequence.request.request_id].metrics
            if metrics.first_scheduled_time is None:
                metrics.first_scheduled_time = now
                counts["num_cached_tokens"] += item.sequence.num_cached_tokens or 0
        if self.watches:  # to walk through none costs more than to ask
            for watch in tuple(self.watches):
                watch.note(plan)

    def _sample_constrained(self, step: UnsampledStep, goal: SchedulingGoal) -> list[RequestState]:
        """Sample a step whose layers are launched, once all steps before it are read; gives the
        requests that ended. An interrupt while waiting for a step loses nothing."""
        ended, before = [], self._device_wait_s
        while self._steps_in_flight:
            ended += self._read_step()
        with self._critical_section(fatal=True):
            device_wait_s = self._device_wait_s - before
            handle, faults, ended_sequences = self._constrained_sampler.sample(
                step, device_wait_s, goal
            )
            self._unsampled_step = None
            self._steps_in_flight.append(handle)
            tokens = [
                EmittedToken(it, it.request, it.token_ids[-1], None) for it in ended_sequences
            ]
            return ended + self._update_requests(
                self._notify_requests(tokens, handle.plan, None, ended_sequences), faults
            )

    def _request_params(self, request: Request) -> SamplingParams:
        return self.requests[request.request_id].params

    def _read_step(self) -> list[RequestState]:
        """Read the oldest step in flight; gives the requests that it ended. An interrupt while
        waiting for it loses nothing."""
        handle, start = self._steps_in_flight[0], time.perf_counter()
        try:
            result = handle.read()
            self._device_wait_s += time.perf_counter() - start
        except Exception as error:  # not Ctrl-C: the step can be waited for again
            self._record_failure(error)
            raise
        with self._critical_section(fatal=True):
            self._steps_in_flight.popleft()
            constrained = (
                self._constrained_sampler
                if handle is self._constrained_sampler.unread_step
                else None
            )
            if constrained is not None:
                constrained.await_mask_worker()
            failed = (
                self._notify_prompt_logprobs(handle.plan, result) if result.prompt_logprobs else {}
            )
            candidates = None if result.logprobs is None else result.candidates
            update = self.scheduler.update(handle.plan, result.token_ids, candidates)
            self.counts["num_generated_tokens"] += len(update.emitted_tokens)
            ended_sequences = (
                () if constrained is None else constrained.find_ended(update.emitted_tokens)
            )
            # Several samples of one request may end with this step: it is retired after the last.
            advanced = self._notify_requests(
                update.emitted_tokens, handle.plan, result.logprobs, ended_sequences
            )
            if update.advanced_beam_requests:
                advanced |= self._notify_searches(update.advanced_beam_requests)
            return self._update_requests(advanced | failed, update.failed)

    def _update_requests(
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
            if state.is_polled:  # noted here, so that no Ctrl-C loses it
                self.undelivered[state] = None
            if state.request.finish_reason is not None:
                self._retire(state)
                ended.append(state)
        return ended

    def _notify_requests(
        self,
        emitted: list[EmittedToken],
        plan: StepPlan,
        scores: TokenScores | None,
        ended_sequences: Collection[Sequence],
    ) -> dict[RequestState, None]:
        """Tell requests of those of their tokens that they must hear of, such as end sequences in
        `ended_sequences` by their grammars; the requests."""
        notified: dict[RequestState, None] = {}
        requests = self.requests
        scored = () if scores is None else plan.scheduled
        rows = {item.sequence.seq_id: row for row, item in enumerate(scored)}
        for token in emitted:
            sequence, request, _, reason = token
            state = requests[request.request_id]
            if reason is None and state.can_skip_updates and sequence not in ended_sequences:
                continue
            notified[state] = None
            try:
                if state.accept_token(token, scores, rows.get(sequence.seq_id, 0)):
                    # Also where the same token was its last: the stop string wins.
                    self.scheduler.finish_sequence(sequence, FinishReason.STOP)
            except Exception as error:
                self._fail(state, error)
        return notified

    def _notify_searches(self, searched: list[Request]) -> dict[RequestState, None]:
        """Note the time of a beam search's first step; those that are over."""
        ended: dict[RequestState, None] = {}
        for request in searched:
            state = self.requests[request.request_id]
            state.record_first_token()
            if request.is_finished and request.beam is not None:
                hypotheses = request.beam.hypotheses[: state.params.n]
                self.counts["num_generated_tokens"] += sum(
                    len(h.output_token_ids) for h in hypotheses
                )
                ended[state] = None
        return ended

    def _notify_prompt_logprobs(
        self, plan: StepPlan, result: StepResult
    ) -> dict[RequestState, None]:
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
        self.counts["num_finished"] += 1
        self._num_constrained_requests -= state.is_constrained
        del self.requests[state.request_id]

    def _record_failure(self, error: BaseException) -> None:
        """Keep what the error tells, not itself: its frames have this loop, and nothing else of an
        engine is in a cycle."""
        self._failure = "".join(traceback.format_exception(error))

    @contextmanager
    def _critical_section(self, *, fatal: bool = False) -> Iterator[None]:
        """Neither Ctrl-C nor the abort of a stream that is collected breaks into the block; if it
        is `fatal`, all of it happens, or the engine is known to have failed."""
        with defer_interrupts():
            self._is_busy = True
            try:
                yield
            except BaseException as error:
                if fatal:
                    self._record_failure(error)
                raise
            finally:
                self._is_busy = False
            while self._deferred_aborts:
                self.abort(self._deferred_aborts.pop())
