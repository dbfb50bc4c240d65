"""Test whether a preempted request is swapped or recomputed."""

import pytest
from core_driver import driver_of, make_request
from core_plans import num_free, samples, shape, status, the
from core_swapped import swapped_out

from jpaged.core.block_manager import BlockManager
from jpaged.core.swap import PreemptionCosts, PreemptionMode, PreemptionPolicy, SwapSpace


def test_request_is_recomputed_if_swap_space_is_full():
    driver = swapped_out(policy=PreemptionPolicy(PreemptionMode.SWAP, num_host_blocks=1))
    assert (status(driver, "2"), driver.plans[-1].swap_outs) == ("preempted", ())
    driver.run()
    driver = swapped_out(policy=PreemptionPolicy(PreemptionMode.SWAP, num_host_blocks=2))
    assert status(driver, "2") == "swapped"
    driver.run()


def test_free_swap_space_excludes_the_blocks_of_existing_swap_entries():
    manager = BlockManager(11, 4)
    space = SwapSpace(PreemptionPolicy(PreemptionMode.SWAP, num_host_blocks=5), manager)
    first, second = make_request("1", 12), make_request("2", 12)
    for request in (first, second):
        manager.append(request.live_sequences[0], 12)
        request.live_sequences[0].num_computed_tokens = 12
    assert space.should_swap(second)  # the swap entry needs three of the five host blocks
    space.swap_out(first)
    assert (space.num_used_host_blocks, space.should_swap(second)) == (3, False)
    space.drop(first)
    assert (space.num_used_host_blocks, space.should_swap(second)) == (0, True)


@pytest.mark.parametrize(
    ("recompute_seconds", "expected"), [(1.0, "preempted"), (1.1, "swapped"), (0.9, "preempted")]
)
def test_auto_preemption_chooses_the_cheaper_mode(recompute_seconds: float, expected: str):
    # To recompute the preempted request, the device computes six tokens. To swap the request, two
    # blocks are copied to the host and back. If both cost the same, the request is recomputed.
    costs = PreemptionCosts(((6, recompute_seconds), (7, 9.0)), ((1, 0.1), (2, 0.5), (3, 9.0)))
    driver = swapped_out(policy=PreemptionPolicy(PreemptionMode.AUTO, 8, costs))
    assert status(driver, "2") == expected
    driver.run()


def test_auto_preemption_counts_tokens_shared_by_samples_once():
    # To recompute the preempted request, the device computes five tokens: three that the samples
    # share, and one of each sample. To swap the request, three blocks are copied.
    costs = PreemptionCosts(((5, 0.1), (6, 9.0)), ((3, 0.1),))
    policy = PreemptionPolicy(PreemptionMode.AUTO, 8, costs)
    requests = make_request("1", 3, max_tokens=8), make_request("2", 4, seq_id=10, n=2)
    driver = driver_of(*requests, num_blocks=8, block_size=2, pressure=policy)
    driver.step_until_preemption()
    assert status(driver, "2") == "preempted"
    driver.run()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((PreemptionMode.SWAP, -1), "num_host_blocks must not be negative, got -1"),
        ((PreemptionMode.AUTO, 4), "preemption mode 'auto' needs costs"),
    ],
)
def test_invalid_preemption_policy_is_refused(arguments: tuple, message: str):
    with pytest.raises(ValueError, match=message):
        PreemptionPolicy(*arguments)


@pytest.mark.parametrize("mode", [PreemptionMode.SWAP, PreemptionMode.RECOMPUTE])
def test_request_without_tokens_to_compute_is_preempted_without_a_swap(mode: PreemptionMode):
    policy = PreemptionPolicy(mode, num_host_blocks=20)
    requests = make_request("1", 2, max_tokens=6), make_request("2", 2, max_tokens=3)
    driver = driver_of(*requests, lag=1, num_blocks=5, block_size=2, pressure=policy)
    for _ in range(3):
        driver.step()
    assert num_free(driver) == 0
    # The host has not read the last sampled token yet.
    assert samples(driver, "2")[0].num_tokens == 5
    plan = the(driver.step())
    assert shape(plan) == [(1, 4, 1, True)]
    assert (plan.preempted_request_ids, plan.swap_outs, plan.released_seq_ids) == ((), (), (2,))
    driver.run()
