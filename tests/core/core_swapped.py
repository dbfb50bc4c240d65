"""A request that is swapped out, to begin with."""

from core_driver import Driver, make_request, make_scheduler

from jpaged.core.swap import PreemptionCosts, PreemptionMode, PreemptionPolicy

COSTS = PreemptionCosts(((8, 1.0),), ((1, 0.1), (4, 0.9)))
"""Of a few tokens and blocks, so that now the one way of preemption costs less and now the other.
"""
SWAP = PreemptionPolicy(PreemptionMode.SWAP, num_host_blocks=8)


def swapped_out(lag: int = 0, digest: str | None = None, policy: PreemptionPolicy = SWAP) -> Driver:
    """The first has just taken a fourth block, and the second, of six tokens, gave its two up."""
    scheduler = make_scheduler(num_blocks=6, block_size=4, pressure=policy, digest=digest)
    driver = Driver(scheduler, lag)
    driver.add(make_request("1", 7, max_tokens=8))
    driver.add(make_request("2", 1, max_tokens=8))
    while not driver.plans or not driver.plans[-1].preempted_request_ids:
        driver.step()
    return driver
