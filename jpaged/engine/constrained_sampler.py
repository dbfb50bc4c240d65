"""Sampling for steps in which at least one row has a grammar.

The mask of a row with a grammar depends on the previous token of the row. The engine loop therefore
launches the layers of the step, waits for the tokens of the previous step, and then calls
`ConstrainedSampler.sample`. In the overlapped loop, a thread sends the sampled tokens to the mask
worker as soon as the device has computed the tokens. If the mask of a row is late, the row may skip
the step. A later step then computes the row's token again.
"""

import time
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from functools import partial
from typing import Any

from jpaged.config import LoopMode
from jpaged.core.plan import EmittedToken, SchedulingGoal
from jpaged.core.request import FinishReason, Sequence
from jpaged.core.scheduler import Scheduler
from jpaged.engine.request_state import RequestState
from jpaged.errors import ErrorKind
from jpaged.runtime.model_runner import ModelRunner, RequestFault, UnsampledStep
from jpaged.runtime.results import StepHandle
from jpaged.structured_outputs.mask_client import Answer, AnswerRows, Constraint, MaskWorkerClient
from jpaged.structured_outputs.matcher import GrammarError

_MAX_COMPILE_WAIT_S = 0.005
"""Maximum time in seconds that the engine loop waits for a grammar to compile, if no request is
running."""

_MAX_MASK_WAIT_S = 1.0
"""Maximum time in seconds that a step waits for the masks of rows that cannot skip the step.

This limit applies while the mask worker is running, and only if every row has a grammar or the goal
is throughput.
"""

_MAX_LATE_FRACTION = 0.25
"""Up to this fraction of rows with late masks, a step may wait longer in proportion to the
fraction. `WaitBudget` describes the rule for more late rows."""

_MAX_STEP_S = 0.05
"""Upper limit in seconds for the step durations that `WaitBudget` measures. A longer interval
between two steps includes idle time."""


def _late_mask_error() -> GrammarError:
    return GrammarError(
        "structured_outputs",
        ": the mask worker did not answer in time, and this request cannot skip a step",
        remedy="retry the request",
        kind=ErrorKind.UNAVAILABLE,
    )


class ConstrainedSampler:
    """Samples the steps in which at least one row has a grammar.

    Args:
        mask_client: Client of the mask worker; None if no request can have a grammar.
        scheduler: Scheduler that planned the steps. If a row skips a step because its mask is late,
            the scheduler plans the row again in a later step.
        runner: Model runner that launches the sampling.
        mode: Whether the engine loop is overlapped or synchronous.
        requests: Unfinished requests of the loop, by request id.

    Attributes:
        compiling: Requests that wait until their grammars are compiled, in order of arrival.
        unread_step: Step that was sampled with masks, and whose tokens the engine loop has not
            received yet; None if there is no such step.
    """

    def __init__(
        self,
        mask_client: MaskWorkerClient | None,
        scheduler: Scheduler,
        runner: ModelRunner,
        mode: LoopMode,
        requests: Mapping[str, RequestState],
    ):
        self.compiling: dict[RequestState, Constraint] = {}
        self.unread_step: StepHandle | None = None
        self._mask_client: Any = mask_client
        self._scheduler, self._runner, self._requests = scheduler, runner, requests
        self._is_overlapped = mode is LoopMode.OVERLAPPED
        self._wait_budget = WaitBudget()
        # Answers that end with a token of the last step, because the grammar is complete or has
        # failed. `await_mask_worker` sets this set, and `find_ended` uses and clears the set.
        self._ended_answers = set[Answer]()

    def pop_compiled(self, *, may_wait: bool) -> list[RequestState]:
        """Remove and return the requests of `compiling` whose grammar has compiled or has failed to
        compile.

        Args:
            may_wait: Whether to wait up to `_MAX_COMPILE_WAIT_S` for the grammar of the first
                request. If true, `compiling` must not be empty.
        """
        if may_wait:
            next(iter(self.compiling.values())).wait(_MAX_COMPILE_WAIT_S)
        compiled = [state for state, constraint in self.compiling.items() if constraint.is_ready]
        for state in compiled:
            del self.compiling[state]
        return compiled

    def sample(
        self, step: UnsampledStep, device_wait_s: float, goal: SchedulingGoal
    ) -> tuple[StepHandle, list[RequestFault], list[Sequence]]:
        """Launch the sampling of a step, with a mask of the allowed tokens for each grammar.

        The masks come from the mask worker, which is a separate process. Also request the masks of
        the next tokens from the mask worker.

        Args:
            step: The step to sample. The layers of the step must be launched, and the host must
                have received the tokens of all earlier steps.
            device_wait_s: Seconds that the host has just waited for the device.
            goal: With `SchedulingGoal.THROUGHPUT`, a step may wait longer for a busy mask worker,
                even if some rows of the step have no grammar.

        Returns:
            The handle of the launched step; the requests that fail, each with its error; and the
            sequences whose grammars were complete before this step. The caller must drop the step's
            tokens for these requests and sequences.
        """
        items = [
            (answer, row)
            for row, (sequence, _, _, is_sampled, _) in enumerate(step.scheduled)
            if is_sampled and sequence.finish_reason is None
            if (answer := self._sequence_answer(sequence)) is not None
        ]
        if not items:
            handle = self._runner.launch_sampling(step)
            return handle, list(handle.faults), []
        self._wait_budget.begin_wait(device_wait_s)
        should_stop = partial(self._should_stop_waiting, step, items, goal)
        allowed, ended, late = self._mask_client.gather_masks(items, step.num_rows, should_stop)
        self._wait_budget.end_wait()
        skipping_rows = {items[i][1] for i in late if self._can_skip(step, items[i][1])}
        if skipping_rows:
            rows = [i for i, row in enumerate(step.row_indices.tolist()) if row in skipping_rows]
            step = replace(step, plan=self._scheduler.postpone_rows(step.plan, rows))
        handle = self.unread_step = self._runner.launch_sampling(step, allowed)
        send_now = self._is_overlapped and not handle.is_tensor_parallel
        self._mask_client.request_masks(
            {*late, *(i for i, _ in ended)}, handle.read_row_tokens, send_now=send_now
        )
        sequences = [step.scheduled[row].sequence for _, row in items]
        faults = [(sequences[i].request, error) for i, error in ended if error is not None]
        cannot_skip = [i for i in late if items[i][1] not in skipping_rows]
        faults += [(sequences[i].request, _late_mask_error()) for i in cannot_skip]
        completed = [sequences[i] for i, error in ended if error is None]
        return handle, [*faults, *handle.faults], completed

    def await_mask_worker(self) -> None:
        """Wait until the mask worker has received the sampled tokens of `unread_step`.

        The engine loop calls this method when the loop itself has received these tokens. If the
        mask worker does not respond, the wait ends after a limited time.

        The caller must delay a Ctrl-C (`defer_interrupts`) during this call.
        """
        self.unread_step, self._ended_answers = None, self._mask_client.await_tokens_received()

    def find_ended(self, emitted: Iterable[EmittedToken]) -> set[Sequence]:
        """Return the sequences of `emitted` whose answers end with the emitted token.

        An answer ends when its grammar is complete, or when its grammar fails.
        """
        found, ended, self._ended_answers = set[Sequence](), self._ended_answers, set()
        for sequence, _, _, reason in emitted:
            is_last = reason is FinishReason.LENGTH
            answer = self._sequence_answer(sequence) if ended or is_last else None
            if answer in ended or (is_last and answer and self._mask_client.await_end(answer)):
                found.add(sequence)
        return found

    def _sequence_answer(self, sequence: Sequence) -> Answer | None:
        """Return the answer that holds the grammar state of `sequence`; None without a grammar."""
        state = self._requests[sequence.request.request_id]
        return state.samples[sequence.index].answer if state.is_constrained else None

    def _should_stop_waiting(
        self,
        step: UnsampledStep,
        items: AnswerRows,
        goal: SchedulingGoal,
        late: SequenceOf[int],
        heavy: Collection[int],
    ) -> bool:
        """Return whether the step must stop waiting for late masks. A mask is late if the mask
        worker has not made the mask yet.

        If the function returns True, each row with a late mask skips the step. If a row with a late
        mask cannot skip the step, the request of the row fails.

        Args:
            step: The step to sample.
            items: Pairs (answer, row), one for each row of the step with a grammar. The answer
                identifies the grammar's state in the mask worker.
            goal: Scheduling goal of the step.
            late: Indices in `items` of the rows with late masks.
            heavy: Indices in `items` of the rows with late masks and slow grammars
                (`AnswerState.HEAVY`).
        """
        mask_client, num_rows = self._mask_client, len(step.scheduled)
        has_ready_rows, has_unconstrained_rows = len(late) < num_rows, len(items) < num_rows
        if has_ready_rows:
            is_late = mask_client.seconds_left == 0
        else:
            # The masks of all rows are late, so without a wait the step could sample nothing.
            # Limit the wait, because new requests can join the batch only after the wait.
            is_late = mask_client.seconds_waited >= mask_client.max_wait_s
        if not is_late:
            may_skip = has_ready_rows and self._is_overlapped
            late_fraction = (len(late) - len(heavy)) / num_rows
            if not (
                may_skip
                and self._wait_budget.is_spent(
                    late_fraction, has_unconstrained_rows=has_unconstrained_rows
                )
            ):
                return False
        cannot_skip = {i for i in late if not self._can_skip(step, items[i][1])}
        if not cannot_skip or not is_late:
            return not cannot_skip
        # On a busy machine, the mask worker may be late only because it got no CPU time. The step
        # then waits longer, up to `_MAX_MASK_WAIT_S`.
        is_busy = mask_client.is_running and not (has_ready_rows and cannot_skip.issubset(heavy))
        # The longer wait also delays rows without a grammar. If the step has such rows, wait longer
        # only for the throughput goal.
        is_busy = is_busy and (goal is SchedulingGoal.THROUGHPUT or not has_unconstrained_rows)
        return not is_busy or mask_client.seconds_waited >= _MAX_MASK_WAIT_S

    def _can_skip(self, step: UnsampledStep, row: int) -> bool:
        """Return whether a row can skip the sampling of this step. A later step then computes the
        row again, and samples the token.

        The row must decode exactly one token, and its sequence must be the only unfinished sequence
        of the request. The request must not adjust logits with penalties, biases or forbidden
        tokens.
        """
        item = step.scheduled[row]
        sequence, request = item.sequence, item.sequence.request
        return (
            item.start >= sequence.num_admitted_tokens
            and item.num_scheduled_tokens == 1
            and len(request.live_sequences) == 1
            and not self._requests[request.request_id].params.adjusts_logits
        )


class WaitBudget:
    """Limits how long the sampling of a step waits for late masks while other rows are ready.

    A mask is late if the mask worker has not sent it yet. `ConstrainedSampler` has further limits,
    such as for a mask worker that does not respond.

    The device computes the layers of the step during the wait. A wait therefore costs little until
    the layers are done. The basic budget is an estimate of the time until then: it equals the time
    that the host has just waited for the device. The budget then grows as follows:

    - If at most 25 % of the rows have late masks, the budget grows by the fraction of late rows,
      multiplied by a step's duration. The total waiting time of all rows then equals the total time
      that the late rows would lose if they skipped the step.
    - If more rows are late, the budget grows by the duration of a step. Rows without a grammar then
      keep at least half of their speed. If all rows have a grammar, the budget is unlimited.

    Late rows whose grammars take milliseconds per token (`AnswerState.HEAVY`) do not count as late.
    """

    def __init__(self):
        self._wait_start = self._step_start = time.perf_counter()
        self._device_wait_s = self._step_s = 0.0

    def begin_wait(self, device_wait_s: float) -> None:
        """Start to measure how long a step waits for late masks.

        Args:
            device_wait_s: Seconds that the host has just waited for the device.
        """
        self._wait_start, self._device_wait_s = time.perf_counter(), device_wait_s

    def is_spent(self, late_fraction: float, *, has_unconstrained_rows: bool) -> bool:
        """Return whether the step has used up the time that it may wait for late masks.

        Args:
            late_fraction: Fraction of the step's rows whose masks are late, 0 to 1. Rows with slow
                grammars (`AnswerState.HEAVY`) do not count as late.
            has_unconstrained_rows: Whether the step contains rows without a grammar.
        """
        if late_fraction > _MAX_LATE_FRACTION:
            late_fraction = 1.0 if has_unconstrained_rows else float("inf")
        seconds = self._device_wait_s + (late_fraction and late_fraction * self._step_s)
        return time.perf_counter() - self._wait_start >= seconds

    def end_wait(self) -> None:
        """Record that a step has stopped waiting for masks, and measure the duration of a step.

        The duration is the time from the end of the previous step's wait to the start of this
        step's wait. The duration thus excludes all waits for masks.
        """
        now = time.perf_counter()
        # `is_spent` allows a longer wait for masks if a step takes longer. If the duration of a
        # step included the wait for masks, each wait would make the next wait longer.
        seconds = self._wait_start - self._step_start
        self._step_s = min(max(0.0, seconds), _MAX_STEP_S)
        self._step_start = now
