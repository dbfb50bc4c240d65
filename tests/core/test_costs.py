"""Test the estimated seconds for swapping or recomputing a preempted request."""

import math

import pytest

from jpaged.core.swap import PreemptionCosts

COSTS = PreemptionCosts(((64, 1.0), (128, 1.5), (256, 2.5)), ((8, 0.1), (32, 0.25)))


@pytest.mark.parametrize(
    ("num_tokens", "seconds"),
    [(0, 0.0), (1, 1.0), (64, 1.0), (65, 1.5), (256, 2.5), (257, 3.5), (800, 3 * 2.5 + 1.0)],
)
def test_recompute_cost_is_the_sum_of_the_steps_that_compute_the_tokens(
    num_tokens: int, seconds: float
):
    assert math.isclose(COSTS.recompute_cost(num_tokens), seconds)


@pytest.mark.parametrize(
    ("num_blocks", "one_way"), [(0, 0.0), (1, 0.1), (8, 0.1), (20, 0.175), (32, 0.25), (72, 0.5)]
)
def test_swap_cost_includes_both_directions(num_blocks: int, one_way: float):
    assert math.isclose(COSTS.swap_cost(num_blocks), 2 * one_way)


def test_swap_cost_scales_with_blocks_after_one_measurement():
    costs = PreemptionCosts(((64, 1.0),), ((8, 0.1),))
    assert [round(costs.swap_cost(n), 9) for n in (1, 8, 20)] == [0.2, 0.2, 0.5]


def test_extrapolated_cost_of_a_large_swap_is_close_to_the_measured_time():
    """Extrapolate from 256 to 1,024 blocks, with swap times of Qwen3-0.6B on an H200."""
    milliseconds = {64: 3.81, 256: 10.16, 1024: 35.58}
    costs = PreemptionCosts(((64, 1.0),), tuple((n, milliseconds[n]) for n in (64, 256)))
    assert math.isclose(costs.swap_cost(1024) / 2, milliseconds[1024], rel_tol=0.01)


def test_estimated_swap_cost_never_falls_with_more_blocks():
    noisy = PreemptionCosts(((64, 1.0),), ((8, 0.3), (16, 0.2)))
    assert noisy.swap_cost(100) == noisy.swap_cost(16)


@pytest.mark.parametrize("times", [(), ((0, 1.0),), ((8, 1.0), (8, 2.0)), ((8, -1.0),)])
def test_empty_unsorted_or_negative_times_are_refused(times):
    with pytest.raises(ValueError, match="swap_seconds="):
        PreemptionCosts(((64, 1.0),), times)
    with pytest.raises(ValueError, match="prefill_seconds="):
        PreemptionCosts(times, ((8, 1.0),))
