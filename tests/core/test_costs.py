import math

import pytest

from jpaged.core.costs import PreemptionCosts

COSTS = PreemptionCosts(((64, 1.0), (128, 1.5), (256, 2.5)), ((8, 0.1), (32, 0.25)))


@pytest.mark.parametrize(
    ("num_tokens", "seconds"),
    [(0, 0.0), (1, 1.0), (64, 1.0), (65, 1.5), (256, 2.5), (257, 3.5), (800, 3 * 2.5 + 1.0)],
)
def test_recompute_takes_the_largest_steps_and_one_for_the_rest(num_tokens: int, seconds: float):
    assert math.isclose(COSTS.recompute(num_tokens), seconds)


@pytest.mark.parametrize(
    ("num_blocks", "one_way"), [(0, 0.0), (1, 0.1), (9, 0.25), (32, 0.25), (70, 0.6)]
)
def test_swap_counts_both_ways(num_blocks: int, one_way: float):
    assert math.isclose(COSTS.swap(num_blocks), 2 * one_way)


@pytest.mark.parametrize("times", [(), ((0, 1.0),), ((8, 1.0), (8, 2.0)), ((8, -1.0),)])
def test_bad_times_are_refused(times):
    with pytest.raises(ValueError, match="swap_seconds="):
        PreemptionCosts(((64, 1.0),), times)
    with pytest.raises(ValueError, match="prefill_seconds="):
        PreemptionCosts(times, ((8, 1.0),))
