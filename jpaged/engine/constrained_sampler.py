"""Samples the steps in which a row has a grammar, with masks from the mask worker.

The mask of such a row depends on the token before it. So the loop launches the layers of the step,
reads the step before, and then samples here. In the overlapped loop, a thread sends the sampled
tokens to the mask worker as soon as the device has them. A row whose mask is late may skip the
step: a later step computes its token again.
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
"""Maximum seconds that a turn with nothing else to do waits for a grammar."""

_MAX_MASK_WAIT_S = 1.0
"""Maximum seconds that a step waits for the masks of rows that cannot skip the step. It applies
while the mask worker runs, if all rows have a grammar or the goal is throughput."""

_MAX_LATE_FRACTION = 0.25
"""Maximum share of late rows for which the waiting time is proportional to the share."""

_MAX_STEP_S = 0.05
"""Maximum duration of a step in seconds, as `WaitBudget` counts it. A longer time between two steps
includes a pause."""


def _late_mask_error() -> GrammarError:
    return GrammarError(
        "structured_outputs",
        ": the mask worker did not answer in time, and this request cannot skip a step",
        remedy="retry",
        kind=ErrorKind.UNAVAILABLE,
    )


class ConstrainedSampler:
    """Samples steps for the loop. Requests without a grammar never call it.

    `requests` are the loop's unfinished requests by id. `mask_client` is None if none can have a grammar.

    Attributes:
        compiling: Requests that the loop queues when their grammars are compiled, in their order.
        unread: The last step that was sampled with masks, until it is read.
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
        self._ended_answers = set[
            Answer
        ]()  # answers that end with the tokens of the step being read

    def pop_compiled(self, *, may_wait: bool) -> list[RequestState]:
        """Remove the requests from `compiling` whose grammars are compiled, or cannot be."""
        if may_wait:  # nothing else is to do
            next(iter(self.compiling.values())).wait(_MAX_COMPILE_WAIT_S)
        compiled = [state for state, constraint in self.compiling.items() if constraint.is_ready]
        for state in compiled:
            del self.compiling[state]
        return compiled

    def sample(
        self, step: UnsampledStep, device_wait_s: float, goal: SchedulingGoal
    ) -> tuple[StepHandle, list[RequestFault], list[Sequence]]:
        """Sample a step with masks, and have the mask worker make the next masks.

        Args:
            step: The step. Its layers must be launched, and all steps before it must be read.
            slack: Seconds that the host has just waited for the device.
            goal: With `SchedulingGoal.THROUGHPUT`, rows without a grammar also wait for a busy mask worker.

        Returns:
            The step's handle; the requests that fail, each with its error; and the sequences whose
            grammars were complete before this step. The step's tokens for these requests and
            sequences are dropped.
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
        """Wait until the mask worker has the tokens of the `unread_step` step, which is being read. An
        interrupt must not break in."""
        self.unread_step, self._ended_answers = None, self._mask_client.await_taken()

    def find_ended(self, emitted: Iterable[EmittedToken]) -> set[Sequence]:
        """Return the sequences of `emitted` whose answers end with the token just read: their
        grammars are complete, or failed."""
        found, ended, self._ended_answers = set[Sequence](), self._ended_answers, set()
        for sequence, _, _, reason in emitted:
            is_last = reason is FinishReason.LENGTH
            answer = self._sequence_answer(sequence) if ended or is_last else None
            if answer in ended or (is_last and answer and self._mask_client.await_end(answer)):
                found.add(sequence)
        return found

    def _sequence_answer(self, sequence: Sequence) -> Answer | None:
        """Return the answer that a sequence's next token must fit; None without a grammar."""
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
        """Return whether the step stops waiting for late masks. Then each late row skips the step,
        and the rows that cannot skip it fail.

        Args:
            step, items: The step, and its answers with grammars.
            goal: As of `sample`.
            late: Indices in `items` of the answers without a mask.
            heavy: Indices among `late` of the heavy answers.
        """
        mask_client, num_rows = self._mask_client, len(step.scheduled)
        has_ready_rows, has_unconstrained_rows = len(late) < num_rows, len(items) < num_rows
        if has_ready_rows:
            is_late = mask_client.seconds_left == 0
        else:  # a request that arrives would have to wait
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
        # On a busy machine the mask worker may just have had no CPU time.
        is_busy = mask_client.is_running and not (has_ready_rows and cannot_skip.issubset(heavy))
        # Streams without a grammar wait no longer, whatever the reason.
        is_busy = is_busy and (goal is SchedulingGoal.THROUGHPUT or not has_unconstrained_rows)
        return not is_busy or mask_client.seconds_waited >= _MAX_MASK_WAIT_S

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
            and len(request.live_sequences) == 1
            and not self._requests[request.request_id].params.adjusts_logits
        )


class WaitBudget:
    """Limits how long a step waits for late masks while the mask worker answers.

    A step first waits as long as the host has just waited for the device. Meanwhile the device
    computes the layers of the step. A step then waits longer:

    - If at most a quarter of the rows are late: by (share of late rows) x (duration of a step). For
      all rows together, this costs as much as skipping the step costs the late rows.
    - If more rows are late: by the duration of a step. Rows without a grammar then keep at least
      half of their speed. If all rows have a grammar, this budget sets no limit.

    Late rows whose grammar takes milliseconds for a token (`AnswerState.HEAVY`) do not count.
    """

    def __init__(self):
        self._wait_start = self._step_start = time.perf_counter()
        self._device_wait_s = self._step_s = 0.0

    def begin_wait(self, device_wait_s: float) -> None:
        """Start the budget of a step, for which the host has just waited `device_wait_s` seconds for the
        device."""
        self._wait_start, self._device_wait_s = time.perf_counter(), device_wait_s

    def is_spent(self, late_fraction: float, *, has_unconstrained_rows: bool) -> bool:
        """Return whether the step has used up its waiting time.

        Args:
            share: Late rows as a share of the step's rows, 0 to 1, without rows of heavy answers.
            has_plain: Whether the step has rows without a grammar.
        """
        if late_fraction > _MAX_LATE_FRACTION:
            late_fraction = 1.0 if has_unconstrained_rows else float("inf")
        seconds = self._device_wait_s + (late_fraction and late_fraction * self._step_s)
        return time.perf_counter() - self._wait_start >= seconds

    def end_wait(self) -> None:
        """Note that the step has stopped waiting. Measure the time from the end of the previous
        step's wait to the beginning of this wait."""
        now = time.perf_counter()
        seconds = (
            self._wait_start - self._step_start
        )  # without waits, or each would lengthen the next
        self._step_s = min(max(0.0, seconds), _MAX_STEP_S)
        self._step_start = now
