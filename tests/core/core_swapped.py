"""A driver with a request that is swapped out."""

from core_driver import Driver, driver_of, make_request

from jpaged.core.swap import PreemptionCosts, PreemptionMode, PreemptionPolicy

# With these costs, swapping is cheaper than recomputing for some sequences of the tests. For
# others, it is more expensive.
COSTS = PreemptionCosts(((8, 1.0),), ((1, 0.1), (4, 0.9)))
SWAP = PreemptionPolicy(PreemptionMode.SWAP, num_host_blocks=8)


def swapped_out(lag: int = 0, digest: str | None = None, policy: PreemptionPolicy = SWAP) -> Driver:
    """Return a driver that has just preempted request 2, because request 1 needed a block."""
    requests = make_request("1", 7, max_tokens=8), make_request("2", 1, max_tokens=8)
    driver = driver_of(*requests, lag=lag, num_blocks=6, pressure=policy, digest=digest)
    driver.step_until_preemption()
    return driver
