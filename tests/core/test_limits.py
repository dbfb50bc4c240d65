"""Test that a request is refused if it can never run, and accepted otherwise."""

import pytest
from core_driver import Driver, driver_of, make_request
from core_plans import num_free
from core_swapped import COSTS

from jpaged.core.admission import check_pin_fits
from jpaged.core.beam import BeamSearch
from jpaged.core.request import Request, Sequence
from jpaged.core.swap import PreemptionMode, PreemptionPolicy

REFUSALS = [
    (make_request("2", 0), "prompt_token_ids of request '2' is empty"),
    (make_request("2", 40), "has 40 tokens, and max_model_len=40 leaves no room"),
    (make_request("2", 30, max_tokens=10), "may need 10 blocks .* but the pool has 9"),
    (make_request("1", 2, seq_id=2), "request_id '1' is in use"),
    (make_request("2", 2, n=3, seq_id=0), "seq_id 1 is in use"),
    (make_request("2", 2, n=5, seq_id=10), "runs 5 sequences, but max_num_seqs=4: lower n"),
    (
        make_request("2", 2, beam=BeamSearch(5), seq_id=10),
        "runs 5 sequences, but max_num_seqs=4: lower n, best_of or beam_width",
    ),
    (  # The three samples share four blocks. Each sample needs two more blocks.
        make_request("2", 17, max_tokens=8, n=3, seq_id=10),
        r"may need 10 blocks \(17 prompt tokens, max_tokens=8, 3 sequences\), but the pool has 9: "
        "raise num_blocks or lower max_tokens, n or beam_width",
    ),
    (
        make_request("2", 17, max_tokens=8, beam=BeamSearch(3), seq_id=10),
        "may need 10 blocks .* 3 sequences",
    ),
    (make_request("2", 2, priority=1), "priority=1 of request '2' has no effect"),
]


@pytest.mark.parametrize(("request_", "message"), REFUSALS)
def test_request_that_can_never_run_is_refused_without_side_effects(
    request_: Request, message: str
):
    driver = driver_of(make_request("1", 2), num_blocks=10)
    with pytest.raises(ValueError, match=message):
        driver.scheduler.add(request_)
    driver.scheduler.check_integrity()
    driver.run()


def test_negative_priority_is_accepted_with_priority_scheduling():
    driver = driver_of(make_request("1", 2, priority=-7), by_priority=True)
    driver.run()


@pytest.mark.parametrize("group", [1, 2, 4, BeamSearch(2), BeamSearch(4)], ids=str)
@pytest.mark.parametrize(
    ("prompt", "max_tokens", "block_size", "each", "shared_by_samples", "shared_by_beams"),
    [
        (1, 1, 4, 1, 0, 0),
        (4, 6, 4, 3, 0, 1),  # each sample computes the last prompt token itself
        (5, 3, 4, 2, 1, 1),
        (5, 4, 4, 2, 1, 1),  # the last output token needs no slot
        (5, 6, 4, 3, 1, 1),
        (6, 5, 1, 10, 5, 6),
        (7, 9, 3, 5, 2, 2),
    ],
)
@pytest.mark.parametrize("mode", PreemptionMode)
def test_request_can_finish_even_if_its_sequences_need_every_block_of_the_pool(
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

    def group_driver(num_blocks: int) -> Driver:
        limits = {"num_blocks": num_blocks + 1, "block_size": block_size, "max_num_seqs": 5}
        request = group_request("1", prompt, max_tokens, group, priority=1)
        policy = PreemptionPolicy(mode, 99, COSTS)
        return driver_of(request, lag=1, pressure=policy, by_priority=True, **limits)

    if needed > 1:
        with pytest.raises(ValueError, match=f"may need {needed} blocks"):
            group_driver(needed - 1)
    group_driver(needed).run()
    driver = group_driver(needed)
    for name in "2345":  # more urgent requests preempt the request with several samples
        for _ in range(3):
            driver.step()
        driver.add(make_request(name, min(needed * block_size, 12), max_tokens=1))
    driver.run()
    assert num_free(driver) == needed


def group_request(
    name: str, prompt: int | list[int], max_tokens: int, group: int | BeamSearch, **options
) -> Request:
    """Return a request. If `group` is a number, the request has this many samples; if it is a
    `BeamSearch`, the request has a new beam search of the same width."""
    if isinstance(group, int):
        return make_request(name, prompt, max_tokens, n=group, seq_id=10, **options)
    search = BeamSearch(group.width)
    return make_request(name, prompt, max_tokens, beam=search, seq_id=10, **options)


def driver_with_pins(num_blocks: int) -> Driver:
    """Return a driver whose block manager has pinned three blocks. These blocks hold a prefix of
    twelve tokens, and each token id is 0."""
    request = make_request("1", [0] * 12, max_tokens=1)
    driver = driver_of(request, num_blocks=num_blocks + 1, digest="xxh3")
    driver.run()
    manager = driver.scheduler.block_manager
    manager.pins.pin(manager.find_prefix(Sequence(99, [0] * 12, 12), 12))
    return driver


@pytest.mark.parametrize(
    ("group", "prompt", "max_tokens", "needed"),
    [
        (2, 9, 8, 4),
        (BeamSearch(2), 9, 8, 4),
        # This request shares two of the three pinned blocks.
        (2, 12, 1, 2),
    ],
    ids=str,
)
def test_request_with_a_pinned_prefix_needs_fewer_additional_blocks(
    group: int | BeamSearch, prompt: int, max_tokens: int, needed: int
):
    request = group_request("2", [0] * prompt, max_tokens, group)
    message = rf"may need {needed} blocks .* the pool has {needed - 1} in addition to 3"
    with pytest.raises(ValueError, match=message):
        driver_with_pins(3 + needed - 1).add(request)
    driver = driver_with_pins(3 + needed)
    driver.add(request)
    driver.run()


def test_swapped_out_sequence_reuses_pinned_blocks_only_up_to_its_last_computed_token():
    manager = driver_with_pins(7).scheduler.block_manager
    waiting = Sequence(98, [0] * 13, 13)
    assert manager.num_pinned_prefix_blocks(waiting) == 3
    swapped = Sequence(99, [0] * 13, 13, num_computed_tokens=8, host_block_table=[0, 1])
    assert manager.num_pinned_prefix_blocks(swapped) == 2


def test_pinning_a_prefix_is_refused_if_too_few_blocks_remain_for_a_request():
    # The samples share one block, and each sample needs two more blocks.
    request = make_request("1", 5, max_tokens=6, n=2, seq_id=10)
    driver = driver_of(request, num_blocks=8, digest="xxh3")
    manager = driver.scheduler.block_manager
    check_pin_fits(manager, 2, driver.scheduler.unfinished_requests)
    with pytest.raises(ValueError, match="leaves 4, but request '1' may need 5"):
        check_pin_fits(manager, 3, driver.scheduler.unfinished_requests)
    driver.run()


def test_request_needs_fewer_blocks_only_if_all_its_samples_share_a_pinned_block():
    # The samples share one block, and each sample needs two more blocks.
    request = make_request("1", 5, max_tokens=8, n=2, seq_id=10)
    driver = driver_of(request, num_blocks=10, digest="xxh3")
    while len(driver.streams["1"]) < 4:
        driver.step()
    manager, first = driver.scheduler.block_manager, driver.requests["1"].live_sequences[0]
    pin = manager.pins.pin(manager.find_prefix(first))
    assert manager.pins.num_blocks == 2  # the pin holds a prompt block and a block of one sample
    check_pin_fits(manager, 3, driver.scheduler.unfinished_requests)
    with pytest.raises(ValueError, match="leaves 3, but request '1' may need 4"):
        check_pin_fits(manager, 4, driver.scheduler.unfinished_requests)
    driver.run()
    manager.pins.unpin(pin)
