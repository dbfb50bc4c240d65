"""Test that an error while the scheduler reads step results ends only one request."""

import random
from collections import Counter
from typing import Any

import pytest
from core_driver import Driver, driver_of, make_request, make_scheduler
from core_faults import FaultSite, InjectedError, Injector
from core_plans import tables, the
from test_random_groups import Tally, Work

from jpaged.core.beam import BeamSearch
from jpaged.core.block_manager import BlockManager
from jpaged.core.block_pool import IntegrityError
from jpaged.core.plan import NO_TOKEN, EmittedToken
from jpaged.core.request import FinishReason, NoTokenError, Request, Sequence
from jpaged.core.scheduler import Scheduler
from jpaged.core.sequence_table import SequenceTable

SEEDS = 200
SITES = [
    FaultSite(BlockManager, "register_full_blocks", 0.02),
    FaultSite(Scheduler, "finish_sequence", 0.05),
    FaultSite(SequenceTable, "release_row", 0.02),
    FaultSite(SequenceTable, "retire", 0.02),
    FaultSite(SequenceTable, "free", 0.02),
    FaultSite(BlockManager, "free", 0.02),
    FaultSite(BeamSearch, "advance", 0.02),
    FaultSite(SequenceTable, "add", 0.1),
    FaultSite(BlockManager, "fork", 0.05),
    FaultSite(SequenceTable, "fork_rows", 0.1),
]


class FaultyDriver(Driver):
    """A driver that injects faults while it reads step results, and drops some sampled tokens."""

    injector = Injector(Counter())
    num_lost = 0

    def read(self) -> list[EmittedToken]:
        plan, sampled, candidates = self.in_flight.popleft()
        lost = [i for i, row in enumerate(plan.scheduled) if self.loses_token(row.sequence)]
        sampled[lost] = NO_TOKEN
        sequences = [plan.scheduled[i].sequence for i in lost if plan.scheduled[i].is_sampled]
        expected = {s.request for s in sequences if s.finish_reason is None}
        self.in_flight.appendleft((plan, sampled, candidates))
        self.injector.on = True
        emitted = super().read()
        self.injector.on = False
        self.check_faults(expected)
        return emitted

    def loses_token(self, sequence: Sequence) -> bool:
        return random.Random(f"{sequence.seq_id} {sequence.num_tokens}").random() < 0.005

    def check_faults(self, expected: set[Request]) -> None:
        faults, self.failed = self.failed, []
        for request, error in faults:
            assert request.finish_reason is FinishReason.ERROR
            assert request not in self.scheduler.unfinished_requests
            assert isinstance(error, (InjectedError, NoTokenError))
        assert expected <= {request for request, _ in faults}
        self.num_lost += len(expected)

    def _check_stream(self, request: Request, sequence: Sequence) -> None:
        if request.finish_reason is not FinishReason.ERROR:
            super()._check_stream(request, sequence)


class FaultyWork(Work):
    def __init__(self, seed: int, injector: Injector):
        self.injector = injector
        super().__init__(seed, Tally())

    def _make_driver(self) -> Driver:
        driver = super()._make_driver()
        self.faulty = FaultyDriver(driver.scheduler, driver.lag)
        self.faulty.injector = self.injector
        return self.faulty


def test_random_faults_while_reading_step_results_end_only_the_affected_requests():
    happened: Counter[str] = Counter()
    num_lost = 0
    for seed in range(SEEDS):
        injector = Injector(happened, on=False)
        try:
            with injector.faults(-seed, SITES), injector.spared(Scheduler, "_fail_request"):
                work = FaultyWork(seed, injector)
                work.run()
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
        num_lost += work.faulty.num_lost
    assert all(happened[site.name] >= 5 for site in SITES), happened
    assert num_lost >= 20


def fail_once(target: Any, calls_before: int, is_done: bool) -> Any:
    calls = 0

    def wrapper(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls != calls_before + 1:
            return target(*args, **options)
        if is_done:
            target(*args, **options)
        raise InjectedError

    return wrapper


@pytest.mark.parametrize(
    ("owner", "name", "calls_before"),
    [
        (BeamSearch, "advance", 1),
        (SequenceTable, "add", 3),
        (BlockManager, "fork", 0),
        (BlockManager, "fork", 1),
        (SequenceTable, "fork_rows", 1),
        (SequenceTable, "retire", 0),
        (BlockManager, "free", 0),
    ],
)
@pytest.mark.parametrize("is_done", [False, True])
@pytest.mark.parametrize("lag", [0, 1])
def test_fault_in_a_beam_search_ends_no_other_request(
    owner: Any, name: str, calls_before: int, is_done: bool, lag: int
):
    driver = Driver(make_scheduler(num_blocks=33, max_num_seqs=8), lag)
    driver.add(make_request("1", 6, max_tokens=20, beam=BeamSearch(4), seq_id=10))
    driver.add(make_request("2", 5, max_tokens=20))
    driver.add(make_request("3", 5, max_tokens=6, beam=BeamSearch(2), seq_id=50))
    search = driver.requests["1"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, fail_once(getattr(owner, name), calls_before, is_done))
        while not (failed := driver.failed):
            driver.step()
    assert [request.request_id for request, _ in failed] in (["1"], ["3"])
    assert search.is_finished == (failed[0][0] is search)
    assert tables(driver, failed[0][0].request_id) == []
    driver.run()
    reasons = [driver.requests[name].finish_reason for name in "123"]
    assert reasons.count(FinishReason.ERROR) == 1


def test_beam_search_ends_if_the_model_returns_no_token_for_a_beam():
    search = make_request("1", 6, max_tokens=9, beam=BeamSearch(2), seq_id=10)
    driver = driver_of(search, make_request("2", 5, max_tokens=9), lag=1, num_blocks=33)
    rows: list[int] = []
    while not rows:
        driver.step()
        plan, sampled, _ = driver.in_flight[0]
        rows = [i for i, item in enumerate(plan.scheduled) if item.sequence.seq_id == 11]
    sampled[rows] = NO_TOKEN
    driver.read()
    ((request, error),) = driver.failed
    assert (request, type(error)) == (driver.requests["1"], NoTokenError)
    assert "NaN or infinite" in str(error)
    driver.run()
    assert driver.requests["2"].finish_reason is FinishReason.LENGTH


def test_blocks_of_a_prompt_are_not_cached_if_no_token_is_sampled():
    driver = driver_of(make_request("1", list(range(9))), lag=1, num_blocks=33, digest="xxh3")
    driver.step()
    driver.in_flight[0][1][:] = NO_TOKEN
    driver.step()  # the driver launches a second step, then reads the results of the first step
    assert len(driver.in_flight) == 1
    driver.add(make_request("2", list(range(9))))
    driver.run()
    assert [driver.requests[name].finish_reason for name in "12"] == ["error", "length"]
    assert driver.requests["2"].sequences[0].num_cached_tokens == 0


def test_reading_step_results_raises_if_an_error_leaves_inconsistent_state():
    driver = Driver(make_scheduler(num_blocks=33))
    driver.add(make_request("1", 6, max_tokens=9, beam=BeamSearch(2), seq_id=10))

    def leak_block(manager: BlockManager, *_: Any) -> Any:
        manager.pool.allocate(1)
        raise InjectedError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BlockManager, "fork", leak_block)
        plan = the(driver.scheduler.schedule())
        result = driver.device.launch(plan)
        with pytest.raises(IntegrityError):
            driver.scheduler.update(plan, *result)
