"""Test which requests are refused. The bound is exact: a request that fits runs to its end despite
preemptions."""

import pytest
from core_driver import Driver, make_request, make_scheduler
from core_plans import num_free
from core_swapped import COSTS

from jpaged.core.admission import check_pin_fits
from jpaged.core.beam import BeamSearch
from jpaged.core.request import Request, Sequence
from jpaged.core.swap import PreemptionMode, PreemptionPolicy

REFUSALS = [
    (make_request("2", 2, n=5, seq_id=10), "runs 5 sequences, but max_num_seqs=4: lower n"),
    (
        make_request("2", 2, beam=BeamSearch(5), seq_id=10),
        "runs 5 sequences, but max_num_seqs=4: lower n, best_of or beam_width",
    ),
    (  # four full blocks are shared, and each sample has two more
        make_request("2", 17, max_tokens=8, n=3, seq_id=10),
        r"may need 10 blocks \(17 prompt tokens, max_tokens=8, 3 sequences\), but the pool has 9: "
        "raise num_blocks or lower max_tokens, n or beam_width",
    ),
    (
        make_request("2", 17, max_tokens=8, beam=BeamSearch(3), seq_id=10),
        "may need 10 blocks .* 3 sequences",
    ),
    (  # one id of the group's is taken
        make_request("2", 2, n=3, seq_id=0),
        "seq_id 1 is in use",
    ),
    (make_request("2", 2, priority=1), "priority=1 of request '2' has no effect"),
]


@pytest.mark.parametrize(("request_", "message"), REFUSALS)
def test_groups_that_can_never_run_are_refused(request_: Request, message: str):
    driver = Driver(make_scheduler(num_blocks=10, block_size=4, max_num_seqs=4))
    driver.add(make_request("1", 2))
    with pytest.raises(ValueError, match=message):
        driver.scheduler.add(request_)
    driver.scheduler.check_integrity()
    driver.run()


def test_priority_is_refused_without_priority_scheduling():
    driver = Driver(make_scheduler(by_priority=True))
    driver.add(make_request("1", 2, priority=-7))
    driver.run()


@pytest.mark.parametrize("group", [1, 2, 4, BeamSearch(2), BeamSearch(4)], ids=str)
@pytest.mark.parametrize(
    ("prompt", "max_tokens", "block_size", "each", "shared_by_samples", "shared_by_beams"),
    [
        (1, 1, 4, 1, 0, 0),
        (4, 6, 4, 3, 0, 1),  # samples compute the prompt's last token each
        (5, 3, 4, 2, 1, 1),
        (5, 4, 4, 2, 1, 1),  # the last token needs no slot
        (5, 6, 4, 3, 1, 1),
        (6, 5, 1, 10, 5, 6),
        (7, 9, 3, 5, 2, 2),
    ],
)
@pytest.mark.parametrize("mode", PreemptionMode)
def test_the_largest_group_that_fits_runs_to_its_end(
    group: int | BeamSearch,
    prompt: int,
    max_tokens: int,
    block_size: int,
    each: int,
    shared_by_samples: int,
    shared_by_beams: int,
    mode: PreemptionMode,
):
    width = group if isinstance(group, int) else group.width
    shared = shared_by_samples if isinstance(group, int) else shared_by_beams
    needed = shared + width * (each - shared)

    def driver_of(num_blocks: int) -> Driver:
        policy = PreemptionPolicy(mode, 99, COSTS)
        scheduler = make_scheduler(
            num_blocks + 1, block_size, max_num_seqs=5, pressure=policy, by_priority=True
        )
        driver = Driver(scheduler, lag=1)
        search = None if isinstance(group, int) else BeamSearch(group.width)
        samples = width if search is None else 1
        driver.add(
            make_request("1", prompt, max_tokens, n=samples, beam=search, seq_id=10, priority=1)
        )
        return driver

    if needed > 1:
        with pytest.raises(ValueError, match=f"may need {needed} blocks"):
            driver_of(needed - 1)
    driver_of(needed).run()
    driver = driver_of(needed)
    for name in "2345":  # now and then it must give way
        for _ in range(3):
            driver.step()
        driver.add(make_request(name, min(needed * block_size, 12), max_tokens=1))
    driver.run()
    assert num_free(driver) == needed


def pinned(num_blocks: int) -> Driver:
    """Twelve tokens of 0 are pinned, in three blocks."""
    driver = Driver(make_scheduler(num_blocks + 1, block_size=4, digest="xxh3"))
    driver.add(make_request("1", [0] * 12, max_tokens=1))
    driver.run()
    manager = driver.scheduler.block_manager
    manager.pins.pin(manager.find_prefix(Sequence(99, [0] * 12, 12), 12))
    return driver


@pytest.mark.parametrize("group", [2, BeamSearch(2)], ids=str)
def test_pinned_prefix_counts_at_most_the_prompt_of_a_group(group: int | BeamSearch):
    # Two of the pinned blocks are shared, and each needs two blocks more.
    search = None if isinstance(group, int) else group
    request = make_request("2", [0] * 9, 8, n=2 if search is None else 1, beam=search, seq_id=10)
    with pytest.raises(ValueError, match=r"may need 4 blocks .* the pool has 3 in addition to 3"):
        pinned(6).add(request)
    driver = pinned(7)
    driver.add(request)
    driver.run()


def test_samples_compute_the_last_token_of_a_pinned_prompt():
    # Pin the whole prompt. Its samples share all blocks except the last.
    request = make_request("2", [0] * 12, 1, n=2, seq_id=10)
    with pytest.raises(ValueError, match=r"may need 2 blocks .* the pool has 1 in addition to 3"):
        pinned(4).add(request)
    driver = pinned(5)
    driver.add(request)
    driver.run()


def test_partly_computed_swapped_prompt_counts_only_computed_pinned_blocks():
    manager = pinned(7).scheduler.block_manager
    waiting = Sequence(98, [0] * 13, 13)
    assert manager.num_pinned_prefix_blocks(waiting) == 3
    swapped = Sequence(99, [0] * 13, 13, num_computed_tokens=8, host_block_table=[0, 1])
    assert manager.num_pinned_prefix_blocks(swapped) == 2


def test_a_pin_must_leave_room_for_a_group():
    driver = Driver(make_scheduler(num_blocks=8, block_size=4, digest="xxh3"))
    driver.add(make_request("1", 5, max_tokens=6, n=2, seq_id=10))  # one block, and two of each
    manager = driver.scheduler.block_manager
    check_pin_fits(manager, 2, driver.scheduler.unfinished_requests)
    with pytest.raises(ValueError, match="leaves 4, but request '1' may need 5"):
        check_pin_fits(manager, 3, driver.scheduler.unfinished_requests)
    driver.run()


def test_pinning_blocks_of_one_sample_saves_the_group_nothing():
    driver = Driver(make_scheduler(num_blocks=10, block_size=4, digest="xxh3"))
    driver.add(make_request("1", 5, max_tokens=8, n=2, seq_id=10))  # one block, and two of each
    while len(driver.streams["1"]) < 4:
        driver.step()
    manager, first = driver.scheduler.block_manager, driver.requests["1"].live_sequences[0]
    pin = manager.pins.pin(manager.find_prefix(first))
    assert manager.pins.num_blocks == 2  # the prompt's, which all share, and one that none does
    check_pin_fits(manager, 3, driver.scheduler.unfinished_requests)
    with pytest.raises(ValueError, match="leaves 3, but request '1' may need 4"):
        check_pin_fits(manager, 4, driver.scheduler.unfinished_requests)
    driver.run()
    manager.pins.unpin(pin)
