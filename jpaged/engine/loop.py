"""The engine's loop: plan a step, launch the step, and pass the sampled tokens to the requests.

In each iteration, the overlapped loop launches a step, and then waits for the tokens of the step
that the previous iteration launched. The device thus always has another step queued. The
synchronous loop waits for the step that it has just launched. Both loops produce the same tokens,
apart from rounding differences between batches of different composition.

If a row of a step has a grammar, the mask of the row depends on its previous token. The loop then
launches the layers of the step, waits for the previous step, and launches the sampling (see
`ConstrainedSampler`).
"""

import signal
import threading
import time
import traceback
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from types import FrameType
from weakref import WeakSet

from jpaged.config import LoopMode
from jpaged.core.plan import EmittedToken, SchedulingGoal, StepPlan
from jpaged.core.request import FinishReason, Request, Sequence
from jpaged.core.scheduler import Scheduler
from jpaged.engine.constrained_sampler import ConstrainedSampler
from jpaged.engine.request_state import RequestState
from jpaged.models.live_weights import WriteFunction
from jpaged.observe.pool_changes import PoolWatch
from jpaged.observe.pool_report import engine_stats
from jpaged.observe.statistics import EngineStats
from jpaged.runtime.model_runner import ModelRunner, UnsampledStep
from jpaged.runtime.results import StepHandle, StepResult, TokenScores
from jpaged.sampling_params import SamplingParams
from jpaged.structured_outputs.mask_client import MaskWorkerClient


@contextmanager
def defer_interrupts() -> Iterator[None]:
    """Delay a Ctrl-C that arrives inside the `with` block until the block ends."""
    previous_handler = signal.getsignal(signal.SIGINT)
    if not callable(previous_handler) or threading.current_thread() is not threading.main_thread():
        yield  # no handler is needed: Python raises KeyboardInterrupt only in the main thread
        return
    interrupts: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda *call: interrupts.append(call))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous_handler)
        if interrupts:
            previous_handler(*interrupts[0])


class PauseMode(StrEnum):
    """How a pause treats unfinished requests. The modes have the same names as in vLLM."""

    KEEP = "keep"  # unfinished requests continue after the pause
    WAIT = "wait"  # the pause begins when all unfinished requests have finished
    ABORT = "abort"  # unfinished requests end, and keep the tokens that they have


class EngineLoop:
    """Runs the steps of an engine, and passes the sampled tokens to the requests. Not thread-safe.

    Args:
        scheduler: Scheduler that plans the steps.
        runner: Model runner that launches the steps.
        mode: Whether the loop launches a step before (`LoopMode.OVERLAPPED`) or after
            (`LoopMode.SYNCHRONOUS`) the tokens of the previous step arrive.
        mask_client: Client of the mask worker; None without grammars.
        shared_parameters: Names of the model's parameters if the caller owns their arrays, and may
            thus delete or donate them; empty if the engine owns the arrays.

    Attributes:
        scheduler: Scheduler that plans the steps.
        requests: Unfinished requests by id, including requests whose grammars are being compiled.
        undelivered: Requests with updates that `Engine.step` or `Engine.take_deltas` has not
            returned yet, as an ordered set.
        counts: Number of events of each kind since the start. The keys are names of `EngineStats`
            fields.
        watches: Pool watches, which record the block copies of each launched plan. The set holds
            weak references: a watch leaves the set when the caller drops the watch, and no
            reference cycle keeps the engine in memory.
        weights_version: Version number of the weights that later steps use.
        is_paused: Whether `pause` was called, so that no step may be launched.
        is_sleeping: Whether `sleep` has freed the pool, so that no step may be launched.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        mode: LoopMode,
        mask_client: MaskWorkerClient | None = None,
        shared_parameters: tuple[str, ...] = (),
    ):
        self.scheduler = scheduler
        self.requests: dict[str, RequestState] = {}
        self.undelivered: dict[RequestState, None] = {}
        self.counts = Counter(peak_used_blocks=0)
        self.watches: WeakSet[PoolWatch] = WeakSet()
        self.weights_version = 0
        self.is_paused = self.is_sleeping = False
        self._has_weights = True
        self._num_steps_by_size = [0] * (len(EngineStats.STEP_SIZES) + 1)
        self._runner, self._mode = runner, mode
        self._shared_parameters = shared_parameters
        self._constrained_sampler = ConstrainedSampler(
            mask_client, scheduler, runner, mode, self.requests
        )
        self._num_constrained_requests = 0
        # Step that waits for grammar masks before its tokens can be sampled. The layers of the step
        # are already launched. None if no step waits for masks.
        self._unsampled_step: UnsampledStep | None = None
        self._device_wait_s = 0.0  # total time that the host has waited for the device
        self._steps_in_flight: deque[StepHandle] = deque()
        self._failure: str | None = None
        self._is_busy = False  # whether a `_critical_section` is active
        self._deferred_aborts: list[RequestState] = []  # requests to abort later

    @property
    def has_work(self) -> bool:
        """Whether a request is unfinished or a step is in flight."""
        return bool(self.requests or self._steps_in_flight or self._unsampled_step)

    def stats(self) -> EngineStats:
        """Return the state of the pool and the queues, and counts since the start. Takes time
        proportional to the number of sequences."""
        counts = {**self.counts, "num_steps_by_size": tuple(self._num_steps_by_size)}
        return engine_stats(self.scheduler, len(self._constrained_sampler.compiling), counts)

    def check_alive(self) -> None:
        """Raise RuntimeError if a step has failed, because the contents of device memory are then
        unknown."""
        if self._failure is not None:
            message = "the engine failed in an earlier step: create a new engine"
            raise RuntimeError(message) from RuntimeError(self._failure)

    def advance(self, goal: SchedulingGoal) -> list[RequestState]:
        """Launch new steps, and finish the steps that the previous call launched.

        The new steps are one step, or a burst (several decode steps in one launch). To finish a
        step, wait for the sampled tokens and pass the tokens to the requests. The synchronous loop
        also finishes the steps that this call launches.

        Args:
            goal: Goal of the steps. With `SchedulingGoal.THROUGHPUT`, large batches may run as
                bursts too, not only small batches.

        Returns:
            The requests that ended.

        Raises:
            RuntimeError: The engine is paused, or this step or an earlier step failed.
        """
        self.check_running()
        if self._shared_parameters:
            self._check_parameters_exist()
        ended = self._queue_compiled() if self._constrained_sampler.compiling else []
        num_ahead = 0
        # Launch new steps, unless an interrupted call has left a step that must be sampled first.
        if self._unsampled_step is None:
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
            # No request is left, but steps may still be in flight. Finish these steps, to free the
            # KV blocks of the requests.
            self.drain()
        return ended

    def drain(self) -> None:
        """Wait for all steps in flight, and pass the sampled tokens to the requests.

        Do nothing if the engine has failed.
        """
        if self._unsampled_step is not None and self._failure is None:
            self._sample_constrained(self._unsampled_step, SchedulingGoal.LATENCY)
        while self._steps_in_flight and self._failure is None:
            self._read_step()

    @property
    def can_advance(self) -> bool:
        """Whether the engine is awake, not paused, and has weights."""
        return not (self.is_paused or self.is_sleeping) and self._has_weights

    def check_running(self) -> None:
        """Raise RuntimeError if the engine cannot launch steps now."""
        if self._failure is not None:
            self.check_alive()
        if self.is_sleeping:
            raise RuntimeError("the engine is sleeping: call wake_up()")
        if self.is_paused:
            raise RuntimeError("the engine is paused: call resume()")
        if not self._has_weights:
            raise RuntimeError("sleep(level=2) has freed the weights: call update_weights")

    def pause(self, mode: PauseMode, *, recompute: bool) -> None:
        """Finish the steps in flight, and launch no more steps until `resume`.

        Args:
            mode: Whether unfinished requests continue after the pause, finish before it, or end.
            recompute: Whether to free the KV of the unfinished requests.

        Raises:
            RuntimeError: A step failed, or `mode` is WAIT and the engine is paused already.
        """
        self.check_alive()
        if mode is PauseMode.ABORT:
            self._abort_requests()
        while mode is PauseMode.WAIT and self.has_work:
            self.advance(SchedulingGoal.LATENCY)
        self.drain()
        self.check_alive()
        with self._critical_section(fatal=True):
            self.is_paused = True
            if recompute:
                self.scheduler.drop_kv()

    def _abort_requests(self) -> None:
        """End all requests. `Engine.step` and `Engine.take_deltas` later return the tokens that the
        ended requests already have."""
        with self._critical_section():
            aborted = list(self.requests.values())
            for state in aborted:
                if self._constrained_sampler.compiling.pop(state, None) is None:
                    self.scheduler.abort(state.request_id)
                else:
                    state.request.end_unqueued(FinishReason.ABORT)
            self._update_requests(dict.fromkeys(aborted), ())

    def resume(self) -> None:
        """Launch steps again. Do nothing if the engine is not paused.

        Raises:
            RuntimeError: An earlier step failed, or a parameter was deleted.
        """
        self.check_alive()
        self._check_parameters_exist()
        self.is_paused = False

    def sleep(self, release: Callable | None) -> None:
        """Free the KV pool, and optionally the weights.

        If requests are unfinished, the engine must be paused. These requests compute all their
        tokens again after `wake_up`.

        Args:
            release: Function that frees the weights (see `ModelRunner.release_parameters`). None
                keeps the weights.

        Raises:
            ValueError: A prefix is pinned.
            RuntimeError: An earlier step failed.
        """
        self.drain()
        self.check_alive()
        self.scheduler.reset_prefix_cache()
        with self._critical_section(fatal=True):
            if not self.is_sleeping:
                self.scheduler.drop_kv()
                self._runner.free_pool()
                self.is_sleeping = True
            if release is not None and self._has_weights:
                self._has_weights = False
                self._runner.release_parameters(release)

    def wake_up(self) -> None:
        """Allocate the pool again. If the memory does not suffice, the engine keeps sleeping."""
        self.check_alive()
        if self.is_sleeping:
            with self._critical_section():
                self._runner.restore_pool()
                self.is_sleeping = False

    def _check_parameters_exist(self) -> None:
        """Pause if the caller has deleted or donated a parameter that the engine shares.

        Raises:
            RuntimeError: A parameter was deleted. The engine is paused and keeps its requests.
        """
        index = self._runner.find_deleted_parameter() if self._shared_parameters else None
        if index is not None:
            self.pause(PauseMode.KEEP, recompute=False)
            raise RuntimeError(
                f"{self._shared_parameters[index]} was deleted or donated to another function, so "
                "the engine is paused and keeps its requests: call update_weights with arrays that "
                "exist, then resume()"
            )

    def update_weights(self, write: WriteFunction, version: int | None) -> None:
        """Finish the steps in flight, then replace the weights.

        The engine must be paused if requests are unfinished. These requests keep their KV. Later
        requests never share KV that the old weights computed.

        A Ctrl-C is delayed until all weights are written. If an error occurs while weights are
        written, the engine cannot be used any more, because some weights are old and others are
        new.

        Args:
            write: Function that writes checked parameters.
            version: Version number of the new weights; None for the current number plus 1.

        Raises:
            ValueError: A prefix is pinned while a request is unfinished. The weights are unchanged.
            RuntimeError: An earlier step failed.
        """
        self.drain()
        self.check_alive()
        self.scheduler.check_pins_allow_new_weights()
        with self._critical_section(fatal=True):
            self._runner.update_parameters(write)
            self._has_weights = True
            self.scheduler.end_sharing()
            self.weights_version = self.weights_version + 1 if version is None else version
            for state in self.requests.values():
                state.start_version(self.weights_version)

    def add(self, states: Iterable[RequestState]) -> None:
        """Queue requests in the order of `states`.

        A request with a grammar enters the queue once the grammar is compiled.

        Raises:
            TypeError, ValueError: A request can never run, or its id is in use. Earlier requests of
                `states` are queued; this request and all later ones are not.
            RuntimeError: An earlier step failed.
        """
        self.check_alive()
        with self._critical_section():
            for state in states:
                request = state.request
                if request.request_id in self.requests:
                    name = request.request_id
                    raise ValueError(
                        f"request_id {name!r} is in use by an unfinished request: pass another id"
                    )
                constraint = state.constraint
                if constraint is not None and not constraint.is_ready:
                    self.scheduler.check(request)
                    self._constrained_sampler.compiling[state] = constraint
                else:
                    self._enqueue(state)
                self.requests[request.request_id] = state
                state.start_version(self.weights_version)
                self._num_constrained_requests += state.is_constrained
                self.counts["num_prompt_tokens"] += request.sequences[0].num_prompt_tokens

    def _enqueue(self, state: RequestState) -> None:
        """Pass a request to the scheduler.

        Raises:
            TypeError, ValueError: The request can never run, or its grammar failed to compile. The
                scheduler is unchanged.
        """
        state.check_grammar()
        try:
            self.scheduler.add(state.request)
        except Exception:
            # If the scheduler has refused the request, `abort` does nothing.
            self.scheduler.abort(state.request_id)
            raise

    def _queue_compiled(self) -> list[RequestState]:
        """Queue the requests whose grammars are compiled, and return the requests that fail."""
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
        """End a request in any state. Do nothing if the request has ended or was never added."""
        if self.requests.get(state.request_id) is not state:
            return
        # If the caller drops a stream, the stream's finalizer calls this method. Python may run the
        # finalizer at any point, even while a method of this object is in a critical section. Then
        # only record the abort: `_critical_section` executes it when the section ends.
        if self._is_busy:
            self._deferred_aborts.append(state)
            return
        with self._critical_section():
            self._constrained_sampler.compiling.pop(state, None)
            self.scheduler.abort(state.request_id)
            self._retire(state)
            self.undelivered.pop(state, None)

    def _schedule(self, goal: SchedulingGoal) -> list[StepPlan]:
        """Return the plans of the next steps; an empty list if no step can be launched now.

        The list has several plans only if they may form a burst: decode steps that are launched as
        one program. If `goal` is `LATENCY` and requests are waiting, return at most one plan. A
        waiting request can then join the batch as soon as another request ends.
        """
        plans: list[StepPlan] = []
        while (plan := self.scheduler.schedule(goal)) is not None:
            plans.append(plan)
            if len(plans) == self._runner.burst_steps:
                break
            others_wait = goal is SchedulingGoal.LATENCY and self.scheduler.waiting
            if others_wait or self._is_constrained(plan) or not self._runner.fits_burst(plan, goal):
                break
            if plan.num_drafts != plans[0].num_drafts:
                break
        return plans

    def _is_constrained(self, plan: StepPlan) -> bool:
        """Return whether the plan samples a row with a grammar."""
        return self._num_constrained_requests > 0 and any(
            item.is_sampled and self.requests[item.sequence.request.request_id].is_constrained
            for item in plan.scheduled
        )

    def _launch(self, plans: list[StepPlan], goal: SchedulingGoal) -> list[StepHandle]:
        """Launch the plans that `_schedule` returned, and return the handles of the launched steps.

        Plans without a grammar are launched as one program if they form a full burst (`burst_steps`
        plans), and one by one otherwise. Only the last plan may have rows with a grammar. The
        sampling of that plan must wait for the masks of these rows. The method therefore launches
        only the layers of the model for that plan, and stores the step in `_unsampled_step`.
        """
        runner = self._runner
        unconstrained = plans[:-1] if plans and self._is_constrained(plans[-1]) else plans
        # A burst runs several decode steps as one program, so every plan must pass `fits_burst`.
        # `_schedule` has checked all plans except the last one, so check the last plan here.
        if (
            len(unconstrained) == runner.burst_steps > 1
            and runner.fits_burst(unconstrained[-1], goal)
            and unconstrained[-1].num_drafts == unconstrained[0].num_drafts
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
        """Record a launched step in `counts`, in the metrics of the step's requests, and in
        `watches`."""
        counts, manager = self.counts, self.scheduler.block_manager
        # Do not count a plan as a step if it has neither sequences nor block moves: such a plan
        # only reports failed requests.
        counts["num_steps"] += bool(plan.scheduled or plan.has_block_moves)
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
        if self.watches:  # testing an empty WeakSet costs less than iterating over it
            for watch in tuple(self.watches):
                watch.note(plan)

    def _sample_constrained(self, step: UnsampledStep, goal: SchedulingGoal) -> list[RequestState]:
        """Launch the sampling of a step whose layers are launched already. Return the requests that
        ended.

        First wait for all earlier steps, because the masks depend on the tokens of these steps. If
        a Ctrl-C interrupts the wait, the next call continues where this call stopped.
        """
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
        """Wait for the oldest step in flight, and pass the sampled tokens to the requests.

        If a Ctrl-C interrupts the wait, the step stays in flight, and the next call waits again.

        Returns:
            The requests that ended.
        """
        handle, start = self._steps_in_flight[0], time.perf_counter()
        try:
            result = handle.read()
            self._device_wait_s += time.perf_counter() - start
        # Do not catch KeyboardInterrupt, which is no failure: the next call waits for the step
        # again.
        except Exception as error:
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
            # Notify all requests of their tokens before any request is removed: several samples of
            # one request may end in the same step.
            advanced = self._notify_requests(
                update.emitted_tokens, handle.plan, result.logprobs, ended_sequences
            )
            if handle.plan.num_drafts:
                advanced |= self._append_accepted(handle.plan, result, update.failed)
            if update.advanced_beam_requests:
                advanced |= self._notify_searches(update.advanced_beam_requests)
            return self._update_requests(advanced | failed, update.failed)

    def _append_accepted(
        self, plan: StepPlan, result: StepResult, failed: list[tuple[Request, Exception]]
    ) -> dict[RequestState, None]:
        """Append the accepted drafts of a verify step. Return the requests that were notified of
        new tokens.

        A stop string may end a sequence before all its accepted drafts are appended.

        Args:
            plan: Plan of the verify step. The first token of each sequence is appended already.
            result: Result of the step.
            failed: List to which the function adds the requests that failed.
        """
        notified: dict[RequestState, None] = {}
        scores = result.draft_logprobs or (None,) * plan.num_drafts
        for token_ids, logprobs in zip(result.token_ids.T[1:], scores, strict=True):
            update = self.scheduler.append_accepted(plan, token_ids)
            self.counts["num_generated_tokens"] += len(update.emitted_tokens)
            notified |= self._notify_requests(update.emitted_tokens, plan, logprobs, ())
            failed += update.failed
        return notified

    def _update_requests(
        self, advanced: dict[RequestState, None], faults: Iterable[tuple[Request, Exception]]
    ) -> list[RequestState]:
        """End the requests in `faults` with an error, and remove all ended requests from
        `requests`.

        If the user submitted an updated request with `Engine.add_request`, the method also adds the
        request to `undelivered`. `Engine.step` then returns the output of the request.

        Args:
            advanced: Requests that received an update.
            faults: Requests that failed, each with its error.

        Returns:
            The requests that ended.
        """
        for request, error in faults:
            state = self.requests.get(request.request_id)
            if state is not None and state.request is request:
                self._fail(state, error)
                advanced[state] = None
        ended = []
        for state in advanced:
            if state.is_polled:
                # The caller holds a critical section here, so that a Ctrl-C cannot lose the update.
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
        """Pass the emitted tokens to their requests, and return the notified requests.

        A request with `can_skip_updates` is notified only of the last token of each sequence.

        Args:
            emitted: Sampled tokens that the host has received.
            plan: Plan of the step that sampled the tokens.
            scores: Log-probabilities of the step; None if no request asked for log-probabilities.
            ended_sequences: Sequences whose grammars ended the answer.
        """
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
                    # The token completed a stop string or the grammar. If the token also reached
                    # the maximum length, STOP replaces the finish reason LENGTH.
                    self.scheduler.finish_sequence(sequence, FinishReason.STOP)
            except Exception as error:
                self._fail(state, error)
        return notified

    def _notify_searches(self, searched: list[Request]) -> dict[RequestState, None]:
        """Record the time of the first token of each beam search. Return the beam searches that
        ended."""
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
        """Pass the prompt log-probabilities of a step to the requests. Return the requests that
        failed."""
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
        """End one request with an error. Other requests are not affected."""
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
        """Mark the engine as failed, and keep the text of the error.

        The error object is not kept: its traceback refers to this loop, and the reference cycle
        would keep the engine's memory allocated.
        """
        self._failure = "".join(traceback.format_exception(error))

    @contextmanager
    def _critical_section(self, *, fatal: bool = False) -> Iterator[None]:
        """Delay a Ctrl-C, and the aborts of dropped streams, until the `with` block ends.

        Args:
            fatal: Whether an exception inside the block marks the engine as failed.
        """
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
