"""The loop: schedule -> launch -> read -> update, one step at a time.

In the overlapped loop the step that is read is the one launched a turn ago, so that the device
always has its next step waiting; in the synchronous loop it is the step just launched. Both give
the same tokens.
"""

import time
import traceback
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from jpaged.config import LoopMode
from jpaged.core.plan import Emitted, Goal, StepPlan
from jpaged.core.request import FinishReason, Request
from jpaged.core.scheduler import Scheduler
from jpaged.engine.interrupts import deferred_interrupts
from jpaged.engine.loop_counts import LoopCounts
from jpaged.engine.request_state import RequestState
from jpaged.runtime.model_runner import ModelRunner, StepHandle, StepResult, TokenScores
from jpaged.sampling_params import SamplingParams


class EngineLoop:
    """Drives requests from the scheduler through the device and back. Not thread-safe.

    Attributes:
        scheduler: Decides the steps.
        requests: Unfinished requests by id.
        undelivered: Polled requests that were advanced since they were told of (an ordered set).
        counts: What happened so far.
    """

    def __init__(self, scheduler: Scheduler, runner: ModelRunner, mode: LoopMode):
        self.scheduler = scheduler
        self.requests: dict[str, RequestState] = {}
        self.undelivered: dict[RequestState, None] = {}
        self.counts = LoopCounts()
        self._runner = runner
        self._mode = mode
        self._states: dict[Request, RequestState] = {}
        self._sampling: dict[Request, SamplingParams] = {}
        self._in_flight: deque[StepHandle] = deque()
        self._failure: str | None = None
        self._is_busy = False
        self._dropped: list[RequestState] = []  # to be aborted as soon as it is not

    @property
    def has_work(self) -> bool:
        """Whether a request is unfinished or a step unread."""
        return bool(self.scheduler.has_unfinished or self._in_flight)

    def check_alive(self) -> None:
        """Raise RuntimeError if a step failed: what the device holds is then unknown."""
        if self._failure is not None:
            message = "the engine failed in an earlier step: make a new one"
            raise RuntimeError(message) from RuntimeError(self._failure)

    def add(self, states: Iterable[RequestState]) -> None:
        """Queue requests, in their order.

        Raises:
            TypeError, ValueError: one could never run; it changes nothing, and those before it are
                queued.
            RuntimeError: a step failed earlier.
        """
        self.check_alive()
        with self._undisturbed():
            for state in states:
                self._add(state)

    def abort(self, state: RequestState) -> None:
        """End a request in any state; one that has ended, or was never added, is left as it is."""
        if state.request not in self._states:
            return
        if self._is_busy:  # the garbage collector found a dropped stream in the middle of a step
            self._dropped.append(state)
            return
        with self._undisturbed():
            self.scheduler.abort(state.request_id)
            self._retire(state)
            self.undelivered.pop(state, None)

    def advance(self, goal: Goal) -> list[RequestState]:
        """Launch a step, or a burst of them, and read what was launched a turn ago; gives the
        requests that ended.

        Args:
            goal: What the step is to favour; for throughput bursts may be larger.

        Raises:
            RuntimeError: a step failed, now or earlier.
        """
        self.check_alive()
        with self._whole():
            plans = self._plan(goal)
            self._launch(plans, goal)
            ended = self._settle(
                self._take_faults(fault for plan in plans for fault in plan.failed)
            )
        num_ahead = len(plans) if self._mode is LoopMode.OVERLAPPED else 0
        while len(self._in_flight) > num_ahead:
            ended += self._consume()
        if not self.scheduler.has_unfinished:
            self.drain()  # the last requests' wasted steps hold blocks until they are read
        return ended

    def drain(self) -> None:
        """Read every step in flight, unless the engine failed."""
        while self._in_flight and self._failure is None:
            self._consume()

    def _add(self, state: RequestState) -> None:
        request = state.request
        try:
            self.scheduler.add(request)
        except (TypeError, ValueError):  # refused: nothing is changed
            raise
        except Exception:
            self.scheduler.abort(request.request_id)
            raise
        self.requests[request.request_id] = self._states[request] = state
        self._sampling[request] = state.params
        self.counts.prompt_tokens += request.sequences[0].num_prompt_tokens

    def _plan(self, goal: Goal) -> list[StepPlan]:
        """What to launch now: the next step, or several while they fit a burst.

        Who waits is to have the place of who ends at once, unless only the end of all counts.
        """
        plans: list[StepPlan] = []
        while (plan := self.scheduler.schedule(goal)) is not None:
            plans.append(plan)
            is_whole = len(plans) == self._runner.burst_steps
            others_wait = goal is Goal.LATENCY and self.scheduler.num_waiting
            if is_whole or others_wait or not self._runner.fits_burst(plan, goal):
                break
        return plans

    def _launch(self, plans: list[StepPlan], goal: Goal) -> None:
        """Launch what `_plan` gave: as one program, if it is a whole burst."""
        runner = self._runner
        # All but the last were found to fit, or would have been the last.
        if len(plans) == runner.burst_steps > 1 and runner.fits_burst(plans[-1], goal):
            self._in_flight += runner.launch_burst(plans, self._sampling)
        else:
            self._in_flight += [runner.launch(plan, self._sampling) for plan in plans]
        for plan in plans:
            self._note_launched(plan)

    def _note_launched(self, plan: StepPlan) -> None:
        manager = self.scheduler.block_manager
        self.counts.note_plan(plan, manager.pool.num_usable_blocks - manager.num_free_blocks)
        for request_id in plan.preempted:
            if request_id in self.requests:
                self.requests[request_id].metrics.num_preemptions += 1
        if not plan.is_decode:
            self._note_first_scheduled(plan)

    def _note_first_scheduled(self, plan: StepPlan) -> None:
        now = time.monotonic()
        for item in plan.scheduled:
            metrics = self._states[item.sequence.request].metrics
            if metrics.first_scheduled_time is None:
                metrics.first_scheduled_time = now
                self.counts.cached_tokens += item.sequence.num_cached_tokens or 0

    def _consume(self) -> list[RequestState]:
        """Read the oldest step in flight; gives the requests that it ended. An interrupt while
        waiting for it loses nothing."""
        handle = self._in_flight[0]
        try:
            result = handle.read()
        except Exception as error:  # not Ctrl-C: the step can be waited for again
            self._note_failure(error)
            raise
        with self._whole():
            self._in_flight.popleft()
            ill = self._take_prompt_logprobs(handle, result)
            news = self.scheduler.update(handle.plan, result.token_ids, result.candidates)
            self.counts.generated_tokens += len(news.emitted)
            rows = _rows_of(handle.plan) if result.logprobs is not None else {}
            # Several samples of one request may end with this step: it is retired after the last.
            advanced = dict.fromkeys(self._tell_all(news.emitted, result.logprobs, rows))
            advanced |= dict.fromkeys(self._searched(news.searched))
            advanced |= dict.fromkeys([*ill, *self._take_faults(news.failed)])
            return self._settle(advanced)

    def _settle(self, advanced: Iterable[RequestState]) -> list[RequestState]:
        """These have news; those of them that are over."""
        ended = []
        for state in advanced:
            if state.polled:  # noted here, so that no Ctrl-C loses it
                self.undelivered[state] = None
            if state.request.is_finished:
                self._retire(state)
                ended.append(state)
        return ended

    def _tell_all(
        self, emitted: list[Emitted], scores: TokenScores | None, rows: dict[int, int]
    ) -> Iterator[RequestState]:
        """Tell requests of those of their tokens that they must hear of; the requests."""
        states = self._states
        for token in emitted:
            state = states[token.request]
            if token.finish_reason is not None or not state.is_quiet:
                self._tell(state, token, scores, rows.get(token.sequence.seq_id, 0))
                yield state

    def _tell(
        self, state: RequestState, token: Emitted, scores: TokenScores | None, row: int
    ) -> None:
        try:
            if state.accept(token, scores, row):
                # Also where the same token was its last: the stop string wins.
                self.scheduler.finish_sequence(token.sequence, FinishReason.STOP)
        except Exception as error:
            self._fail(state, error)

    def _fail(self, state: RequestState, error: Exception) -> None:
        """What goes wrong with one request ends it with an error, and no other."""
        state.fail(error)
        self.scheduler.finish(state.request_id, FinishReason.ERROR)

    def _take_faults(self, faults: Iterable[tuple[Request, Exception]]) -> list[RequestState]:
        """The requests that could not be planned for, sampled or read; they are over."""
        failed: dict[RequestState, None] = {}
        for request, error in [*faults, *self._runner.take_faults()]:
            state = self._states.get(request)
            if state is not None:
                failed[state] = None
                self._fail(state, error)
        return list(failed)

    def _searched(self, requests: list[Request]) -> Iterator[RequestState]:
        """Those of the beam searches that are over."""
        for request in requests:
            state = self._states[request]
            state.note_first_token()
            if request.is_finished and request.beam is not None:
                found = request.beam.hypotheses[: state.params.n]
                self.counts.generated_tokens += sum(len(each.output_token_ids) for each in found)
                yield state

    def _take_prompt_logprobs(self, handle: StepHandle, result: StepResult) -> list[RequestState]:
        """Give requests what the step scored of their prompts; those that fail over it."""
        failed = []
        for item in handle.plan.scheduled if result.prompt_logprobs else ():
            scores = result.prompt_logprobs.get(item.sequence.seq_id)
            state = self._states.get(item.sequence.request)
            if scores is not None and state is not None:
                try:
                    state.accept_prompt_logprobs(item, scores)
                except Exception as error:
                    self._fail(state, error)
                    failed.append(state)
        return failed

    def _retire(self, state: RequestState) -> None:
        try:
            state.finish()
        except Exception as error:
            self._fail(state, error)
        self.counts.finished += 1
        del self._sampling[state.request], self._states[state.request]
        del self.requests[state.request_id]

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """All of the block happens, or the engine is known to have failed."""
        with self._undisturbed():
            try:
                yield
            except BaseException as error:
                self._note_failure(error)
                raise

    def _note_failure(self, error: BaseException) -> None:
        """Keep what the error tells, not itself: its frames have this loop, and nothing else of an
        engine is in a cycle."""
        self._failure = "".join(traceback.format_exception(error))

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """Neither Ctrl-C nor the abort of a stream that is collected breaks into the block."""
        with deferred_interrupts():
            self._is_busy = True
            try:
                yield
            finally:
                self._is_busy = False
            while self._dropped:
                self.abort(self._dropped.pop())


def _rows_of(plan: StepPlan) -> dict[int, int]:
    return {item.sequence.seq_id: row for row, item in enumerate(plan.scheduled)}
