"""Test the scheduler with each of the paper's allocators on random requests."""

import random
from itertools import count

import pytest
from core_driver import Driver

from bench.paper.allocators import SYSTEMS, OrcaMax, make_manager
from jpaged.core.plan import SchedulingGoal
from jpaged.core.request import Request, StopCriteria
from jpaged.core.scheduler import Scheduler, SchedulerConfig

SEEDS = 12


@pytest.mark.parametrize("system", SYSTEMS)
def test_requests_end_and_free_their_memory_with_each_allocator(system: str):
    most_held = 0
    for seed in range(SEEDS):
        pick = random.Random(seed)
        block_size, max_model_len = pick.randint(1, 5), pick.randint(6, 30)
        longest = 1 << (-(-max_model_len // block_size) - 1).bit_length()
        num_blocks = 1 + longest + pick.randint(0, 4 * longest)
        config = SchedulerConfig(pick.randint(1, 8), pick.randint(8, 40), max_model_len)
        manager = make_manager(system, num_blocks, block_size, max_model_len, prefix_caching=False)
        driver = Driver(
            Scheduler(config, manager), pick.randint(0, 2), goal=[*SchedulingGoal][seed % 2]
        )
        for name in range(20):
            driver.add(make_request(name, pick, max_model_len))
            for _ in range(pick.randint(0, 3)):
                driver.step()
                most_held = max(most_held, len(driver.scheduler.running))
            if pick.random() < 0.1 and driver.scheduler.unfinished_requests:
                driver.scheduler.abort(pick.choice(driver.scheduler.unfinished_requests).request_id)
        driver.run()
        assert manager.pool.block_counts().free == num_blocks - 1
        if isinstance(manager, OrcaMax):
            assert manager.ranges.num_free == num_blocks - 1
            assert not manager.reservations
            assert not any(plan.preempted_request_ids for plan in driver.plans)
    assert most_held > 2  # with at least one seed, several requests run at the same time


def make_request(name: int, pick: random.Random, max_model_len: int) -> Request:
    prompt = [pick.randint(0, 10) for _ in range(pick.randint(1, max_model_len - 1))]
    stop = StopCriteria(
        pick.randint(1, 20), 0, frozenset(pick.sample(range(11), pick.randint(0, 1)))
    )
    return Request.from_prompt(str(name), prompt, stop, seq_id_counter=count(name))
