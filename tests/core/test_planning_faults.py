"""Test that an error while the scheduler plans for one request ends only that request."""

from collections import Counter
from typing import Any

import pytest
from core_driver import Driver, make_request, make_scheduler
from core_faults import FaultSite, InjectedError, Injector
from core_plans import the
from test_random_groups import Tally, Work

from jpaged.core import scheduler
from jpaged.core.block_manager import BlockManager
from jpaged.core.block_pool import IntegrityError
from jpaged.core.plan import PlanBuilder, StepPlan
from jpaged.core.request import FinishReason
from jpaged.core.swap import SwapSpace

SEEDS = 200
SITES = [
    FaultSite(PlanBuilder, "add_sequence"),
    FaultSite(BlockManager, "append"),
    FaultSite(BlockManager, "admit", 0.1),
    FaultSite(BlockManager, "total_new_blocks"),
    FaultSite(BlockManager, "find_prefix"),
    FaultSite(SwapSpace, "measure_fit", 0.1),
    FaultSite(scheduler, "fork_sequences", 0.1),
    FaultSite(scheduler, "pending_work"),
    FaultSite(scheduler, "set_common_prefix"),
]


class FaultyDriver(Driver):
    """A driver whose `step` may return no plan, because planning the only request has failed."""

    def step(self) -> StepPlan | None:
        plan = self.scheduler.schedule(self.goal)
        failed = () if plan is None else plan.failed
        for request, error in failed:
            assert isinstance(error, InjectedError)
            assert request.finish_reason is FinishReason.ERROR
            assert request not in self.scheduler.unfinished_requests
        self.scheduler.check_integrity()
        if plan is not None:
            assert not {row.sequence.request for row in plan.scheduled} & {r for r, _ in failed}
            self.plans.append(plan)
            self.in_flight.append((plan, *self.device.launch(plan)))
        elif not self.in_flight:
            assert not self.scheduler.has_unfinished_requests
        if len(self.in_flight) > (self.lag if plan is not None else 0):
            self.read()
        return plan


class FaultyWork(Work):
    def _make_driver(self) -> Driver:
        driver = super()._make_driver()
        return FaultyDriver(driver.scheduler, driver.lag, goal=driver.goal)

    def step(self) -> None:
        self.driver.step()


def test_random_errors_while_scheduling_end_only_the_requests_that_caused_them():
    happened: Counter[str] = Counter()
    for seed in range(SEEDS):
        try:
            with Injector(happened).faults(-seed, SITES):
                FaultyWork(seed, Tally()).run()
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
    assert all(happened[site.name] >= 5 for site in SITES), happened


def test_planning_fault_of_one_request_leaves_the_others_running():
    driver = FaultyDriver(make_scheduler(num_blocks=33))
    for name in "123":
        driver.add(make_request(name, 5))
    append = BlockManager.append

    def fail_request_2(manager: BlockManager, sequence: Any, num_tokens: int) -> Any:
        if sequence.request.request_id == "2":
            raise InjectedError
        return append(manager, sequence, num_tokens)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BlockManager, "append", fail_request_2)
        plan = the(driver.step())
    assert [row.sequence.request.request_id for row in plan.scheduled] == ["1"]
    driver.run()
    reasons = [driver.requests[name].finish_reason for name in "123"]
    assert reasons == [FinishReason.LENGTH, FinishReason.ERROR, FinishReason.LENGTH]


def test_scheduling_a_step_raises_if_an_error_leaves_inconsistent_state():
    scheduler = make_scheduler(num_blocks=33)
    scheduler.add(make_request("1", 5))

    def leak_block(manager: BlockManager, *_: Any) -> Any:
        manager.pool.allocate(1)
        raise InjectedError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BlockManager, "append", leak_block)
        with pytest.raises(IntegrityError):
            scheduler.schedule()
