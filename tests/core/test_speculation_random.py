"""Run random requests in small pools with speculative decoding, whose drafts are randomly wrong."""

import random
from collections import Counter

import pytest
from core_driver import Driver
from core_speculation import RandomSpeculation, SpeculativeDevice, SpeculativeDriver
from test_random_groups import Tally, Work

EXPECTED = (
    "draft accepted",
    "draft rejected",
    "draft without a slot",
    "row stopped at its limit",
    "swapped out with steps in flight",
    "swapped in with hits in the prefix cache",
    "recomputed",
    "block copied",
    "row forked",
    "mixed step",
)


class SpeculativeWork(Work):
    """Random requests and events as in `test_random_groups`, with speculative decoding."""

    def _make_driver(self) -> Driver:
        driver, pick = super()._make_driver(), random.Random(self.random.random())
        scheduler = driver.scheduler
        num_drafts, rate = pick.choice([1, 3, 7]), pick.choice([0.5, 0.9, 1.0])
        scheduler.speculation = RandomSpeculation(num_drafts, pick.randint(0, 99), rate)
        scheduler.block_manager.has_reservations = True
        acceptance, lag = pick.choice([0.0, 0.4, 0.8, 1.0]), pick.choice([0, 1, 1, 2, 4])
        return SpeculativeDriver(scheduler, lag, 1, driver.goal, acceptance)


def count_work(num_seeds: int, first: int = 0) -> Counter[str]:
    tally = Tally()
    for seed in range(first, first + num_seeds):
        try:
            work = SpeculativeWork(seed, tally)
            work.run()
        except Exception as error:
            error.add_note(f"seed {seed}: SpeculativeWork({seed}, Tally()).run() repeats it")
            raise
        device, speculation = work.driver.device, work.driver.scheduler.speculation
        assert isinstance(device, SpeculativeDevice)
        assert speculation is not None
        tally["draft accepted"] += device.num_accepted
        tally["draft rejected"] += device.num_rejected
        tally["draft without a slot"] += device.num_cut
        tally["row stopped at its limit"] += device.num_stopped_rows
        tally["mixed step"] += speculation.num_mixed_steps
        tally["step"] += len(work.driver.plans)
    return tally


@pytest.mark.parametrize(
    ("num_seeds", "fewest"), [(200, 2), pytest.param(3000, 40, marks=pytest.mark.soak)]
)
def test_speculative_decoding_with_random_drafts_changes_no_token(num_seeds: int, fewest: int):
    """The fake device raises if a step reads the KV of a rejected draft."""
    tally = count_work(num_seeds)
    rare = {event: tally[event] for event in EXPECTED if tally[event] < fewest}
    assert not rare, f"hardly ever happened: {rare}"
