"""Check that no request waits longer than a maximum number of steps."""

import math

from core_driver import Driver

from jpaged.core.plan import SchedulingGoal, StepPlan
from jpaged.core.request import Request, RequestStatus


class Turn:
    """Check that the unfinished request with the lowest `sort_key` finishes within a maximum number
    of steps.

    The scheduler serves this request first. With `SchedulingGoal.THROUGHPUT`, a step does not count
    if prompts of other requests use the whole token budget of the step.
    """

    def __init__(self, driver: Driver):
        self.driver = driver
        self.first: Request | None = None
        self.steps_left = 0.0
        self.was_running = False
        self.num_plans = 0

    def before_step(self) -> None:
        scheduler = self.driver.scheduler
        first = min(scheduler.unfinished_requests, key=lambda r: r.sort_key, default=None)
        if first is not self.first:
            self.first, self.steps_left = first, self.bound(first) if first else 0.0
        self.steps_left -= 1
        self.num_plans = len(self.driver.plans)
        self.was_running = first is not None and first.status is RequestStatus.RUNNING
        assert first is None or self.steps_left >= 0, f"{first.request_id} starves"

    def _fills_up_with_others(self, plan: StepPlan) -> bool:
        """Return whether prompts of other requests use the whole token budget of the step."""
        is_full = plan.num_tokens == self.driver.scheduler.config.max_num_batched_tokens
        of_first = any(row.sequence.request is self.first for row in plan.scheduled)
        # Ignore the first row of the step, because it may recompute tokens of a preempted request.
        new = plan.scheduled[1:]
        no_row_decodes = all(row.start < row.sequence.num_prompt_tokens for row in new)
        is_throughput = self.driver.goal is SchedulingGoal.THROUGHPUT
        return is_throughput and is_full and no_row_decodes and not of_first

    def bound(self, request: Request) -> float:
        """Return the maximum number of steps until `request` has finished, if the scheduler serves
        this request first."""
        budget = self.driver.scheduler.config.max_num_batched_tokens
        most = request.max_num_tokens
        launches = math.ceil(most / budget)  # the common prefix
        num_decode_steps = most - request.sequences[0].num_prompt_tokens + 1
        launches += num_decode_steps * math.ceil(request.num_rows / budget)
        if request.status in (RequestStatus.PREEMPTED, RequestStatus.RUNNING):
            launches += math.ceil(request.num_rows * most / budget)  # recomputing
        return (launches + 2) * (self.driver.lag + 2) * self.driver.burst

    def after_step(self) -> None:
        self.steps_left += any(map(self._fills_up_with_others, self.driver.plans[self.num_plans :]))
        lost = (RequestStatus.PREEMPTED, RequestStatus.SWAPPED)
        is_preempted = self.first is not None and self.first.status in lost
        assert not (self.was_running and is_preempted), "the first in line was preempted"
