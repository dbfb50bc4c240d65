"""Test plans of the scheduler with a prefix cache."""

import pytest
from core_driver import Driver, make_request, make_scheduler
from core_plans import the

from jpaged.core.plan import StepPlan
from jpaged.core.request import RequestStatus, Sequence


def make_driver(lag: int = 0, **limits) -> Driver:
    return Driver(make_scheduler(**{"digest": "xxh3", **limits}), lag)


def rows(plan: StepPlan | None) -> list[tuple[int, int, int]]:
    """Return (seq_id, start, num_scheduled_tokens) of each row."""
    return [(r.sequence.seq_id, r.start, r.num_scheduled_tokens) for r in the(plan).scheduled]


def hits(driver: Driver, token_ids: list[int]) -> list[int]:
    found = driver.scheduler.block_manager.find_prefix(Sequence(99, token_ids, len(token_ids)))
    return [block.block_id for block in found]


PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9]


@pytest.mark.parametrize("num_tokens", [1, 2])
def test_request_computes_only_tokens_after_its_cached_prefix(num_tokens: int):
    driver = make_driver()
    driver.add(make_request("1", PROMPT, max_tokens=2))
    driver.run()
    driver.add(make_request("2", PROMPT[:8] + [0] * num_tokens, max_tokens=2))
    plan = the(driver.step())
    assert rows(plan) == [(2, 8, num_tokens)]
    assert plan.scheduled[0].block_updates == ((0, 1), (1, 2), (2, 4))
    assert not plan.is_decode  # the host supplies the tokens
    assert driver.requests["2"].sequences[0].num_cached_tokens == 8
    driver.run()
    cache = driver.scheduler.block_manager.prefix_cache
    assert cache is not None
    assert (cache.num_query_tokens, cache.num_hit_tokens) == (17 + num_tokens, 8)


def test_reusing_an_unused_cached_block_takes_it_from_the_free_blocks():
    driver = make_driver(num_blocks=5)
    driver.add(make_request("1", PROMPT, max_tokens=1))
    driver.run()
    driver.add(make_request("2", [0], max_tokens=2))
    driver.step()
    # Request 3 must wait. It needs three blocks: two blocks with its cached prefix, and a new one.
    # The cached blocks have no user and count as free, so three blocks are free. The request would
    # take all of them, but one block must stay free for request 2, which is running.
    driver.add(make_request("3", PROMPT, max_tokens=1))
    assert rows(driver.step()) == [(2, 1, 1)]
    assert rows(driver.step()) == [(3, 8, 1)]
    driver.run()


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_full_blocks_enter_the_prefix_cache_when_the_host_reads_the_step_results(lag: int):
    driver = make_driver(lag)
    driver.add(make_request("1", PROMPT, max_tokens=9))
    for _ in range(lag):
        driver.step()
        assert hits(driver, PROMPT) == []
    driver.step()
    assert hits(driver, PROMPT) == [1, 2]
    driver.add(make_request("2", PROMPT, max_tokens=9))
    plan = driver.step()
    assert rows(plan)[-1] == (2, 8, 1)
    assert driver.scheduler.block_manager.pool.blocks[1].ref_cnt == 2
    driver.run()


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_generated_tokens_are_cached_for_the_next_chat_turn(lag: int):
    driver = make_driver(lag)
    driver.add(make_request("1", PROMPT, max_tokens=8))
    driver.run()
    history = driver.requests["1"].sequences[0].token_ids
    # The KV of the last token was never computed, so four blocks are full.
    assert len(history) == 17
    driver.add(make_request("2", [*history, 5]))
    assert rows(driver.step()) == [(2, 16, 2)]
    driver.run()


def test_kv_of_a_stop_token_is_cached_if_the_next_step_was_already_launched():
    driver = make_driver(lag=1)
    driver.add(make_request("1", PROMPT[:7], max_tokens=9, stop_token_ids=frozenset(range(11))))
    driver.run()
    history = driver.requests["1"].sequences[0].token_ids
    assert (len(history), len(driver.plans)) == (8, 2)
    # The second step has computed the KV of the stop token, so block 2 is full.
    assert hits(driver, [*history, 0]) == [1, 2]


@pytest.mark.parametrize("lag", [1, 2])
def test_aborted_prompt_leaves_its_computed_blocks_in_the_cache(lag: int):
    driver = make_driver(lag, max_num_batched_tokens=8)
    driver.add(make_request("1", [*PROMPT, *PROMPT], max_tokens=2))
    driver.step()
    driver.scheduler.abort("1")
    assert hits(driver, PROMPT) == []
    driver.run()
    assert hits(driver, [*PROMPT, *PROMPT]) == [1, 2]


def test_preempted_request_recomputes_only_the_tokens_that_are_not_cached():
    driver = make_driver(num_blocks=6)
    driver.add(make_request("1", [1, 2, 3, 4, 5, 6, 7], max_tokens=8))
    driver.add(make_request("2", [9, 9, 9, 9], max_tokens=8))
    while driver.requests["2"].status is not RequestStatus.PREEMPTED:
        driver.step()
    second = driver.requests["2"].sequences[0]
    known = len(second.token_ids)
    while second.seq_id not in {seq_id for seq_id, _, _ in rows(driver.plans[-1])}:
        driver.step()
    assert rows(driver.plans[-1])[-1] == (2, 4, known - 4)
    assert second.num_cached_tokens == 0  # at the first admission
    driver.run()


def test_request_that_reads_no_cached_blocks_adds_its_blocks_to_the_cache():
    driver = make_driver()
    for name in "12":
        driver.add(make_request(name, PROMPT, max_tokens=2, scored_from=1))
        assert rows(driver.step()) == [(int(name), 0, 9)]
        driver.run()
    driver.add(make_request("3", PROMPT, max_tokens=2))
    assert rows(driver.step()) == [(3, 8, 1)]
    driver.run()
    cache = driver.scheduler.block_manager.prefix_cache
    assert cache is not None
    assert (cache.num_query_tokens, cache.num_hit_tokens) == (9, 8)


@pytest.mark.parametrize(("scored_from", "num_cached"), [(4, 0), (5, 4), (8, 4), (9, 8)])
def test_request_with_prompt_logprobs_takes_only_cached_blocks_before_the_first_scored_token(
    scored_from: int, num_cached: int
):
    """The token before the first scored token must be computed. A block has 4 tokens."""
    driver = make_driver()
    driver.add(make_request("1", PROMPT, max_tokens=2))
    driver.run()
    driver.add(make_request("2", PROMPT, max_tokens=2, scored_from=scored_from))
    assert rows(driver.step()) == [(2, num_cached, 9 - num_cached)]
    driver.run()


def test_waiting_request_fits_when_a_prefix_that_it_shares_is_cached():
    driver = make_driver(num_blocks=7)
    driver.add(make_request("1", [*PROMPT[:8], 1], max_tokens=4))
    driver.add(make_request("2", [*PROMPT[:8], 2, 3, 4, 5, 6], max_tokens=3))
    # Request 2 needs four blocks, and one must stay free. Only three are free, so request 2 must
    # share two cached blocks.
    assert rows(driver.step()) == [(1, 0, 9)]
    assert rows(driver.step()) == [(1, 9, 1), (2, 8, 5)]
    driver.run()


def test_waiting_request_is_checked_again_only_after_blocks_were_freed(
    monkeypatch: pytest.MonkeyPatch,
):
    driver = make_driver(num_blocks=8)
    manager = driver.scheduler.block_manager
    lookups, find = [], manager.find_prefix
    monkeypatch.setattr(
        manager, "find_prefix", lambda s, most: lookups.append(s.seq_id) or find(s, most)
    )
    driver.add(make_request("1", PROMPT, max_tokens=14))
    driver.add(make_request("2", [0] * 20, max_tokens=2))
    driver.run()
    # Three lookups: for the admission of request 1, for the refusal of request 2, and for the
    # admission of request 2 after the end of request 1.
    assert lookups == [1, 2, 2]


def test_finished_request_does_not_free_shared_blocks():
    driver = make_driver(lag=2, num_blocks=8)
    driver.add(make_request("1", PROMPT, max_tokens=12))
    for _ in range(3):
        driver.step()
    driver.add(make_request("2", PROMPT, max_tokens=12))
    driver.step()
    driver.scheduler.abort("1")
    assert len(driver.scheduler.sequences.draining[1].block_table) == 3
    draining = driver.scheduler.sequences.draining.values()
    assert len(driver.scheduler.block_manager.exclusive_blocks(draining)) == 1
    driver.run()


def test_step_in_flight_during_a_cache_reset_caches_no_blocks():
    driver = make_driver(lag=1)
    driver.add(make_request("1", PROMPT, max_tokens=9))
    driver.step()
    driver.scheduler.reset_prefix_cache()
    driver.run()
    assert hits(driver, driver.requests["1"].sequences[0].token_ids) == []
    driver.add(make_request("2", PROMPT, max_tokens=9))
    driver.run()
    assert len(hits(driver, PROMPT)) == 2
