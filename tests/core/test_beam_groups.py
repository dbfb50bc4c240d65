"""Test plans of the scheduler for a beam search of width 2."""

import core_fake_device
import numpy as np
import pytest
from core_driver import Driver, make_request, make_scheduler
from core_plans import forks, num_free, shape, status, tables, the, updates

from jpaged.core.beam import BeamSearch
from jpaged.core.request import BeamCandidates, FinishReason
from jpaged.core.swap import PreemptionMode, PreemptionPolicy

PROMPT = [9, 9, 9, 9, 9, 9]
PROBABILITIES = {
    (): {1: 0.5, 2: 0.4, 3: 0.1},
    (1,): {4: 0.4, 5: 0.3, 6: 0.3},
    # The beam with the tokens (2, 4) has the probability 0.36, and the beam (1, 4) has 0.2.
    (2,): {4: 0.9, 5: 0.05, 6: 0.05},
    (1, 4): {7: 0.4, 8: 0.3, 9: 0.3},
    # The two best beams with three tokens extend the beam (2, 4), so the beam (1, 4) is dropped.
    (2, 4): {7: 0.5, 8: 0.4, 9: 0.1},
}
OTHERWISE = {0: 0.6, 1: 0.3, 2: 0.1}


def candidates_of(token_ids: list[int]) -> BeamCandidates:
    following = PROBABILITIES.get(tuple(token_ids[len(PROMPT) :]), OTHERWISE)
    return BeamCandidates(
        np.array(list(following), np.int32), np.log(np.array(list(following.values()), np.float32))
    )


@pytest.fixture(autouse=True)
def table(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(core_fake_device, "candidates_of", candidates_of)


def add_search(driver: Driver, name: str = "1", max_tokens: int = 4, **options) -> None:
    search = BeamSearch(2, **options)
    driver.add(make_request(name, PROMPT, max_tokens, seq_id=10, beam=search))


def beams(driver: Driver, name: str = "1") -> list[tuple[int, ...]]:
    """Return the output tokens of the live beams, best first."""
    return [tuple(beam.output_token_ids) for beam in driver.requests[name].live_sequences]


def answers(driver: Driver, name: str = "1") -> list[tuple[int, ...]]:
    search = driver.requests[name].beam
    assert search is not None
    return [hypothesis.output_token_ids for hypothesis in search.hypotheses]


def test_beam_search_forks_and_drops_beams_and_copies_partly_filled_blocks():
    driver = Driver(make_scheduler(block_size=4))
    add_search(driver)
    plan = the(driver.step())
    # Only one beam exists, and it computes the whole prompt.
    assert shape(plan) == [(10, 0, 6, True)]
    assert beams(driver) == [(1,), (2,)]
    assert tables(driver, "1") == [[1, 2], [1, 2]]

    plan = the(driver.step())
    assert forks(plan) == [(10, 11)]
    assert shape(plan) == [(10, 6, 1, True), (11, 6, 1, True)]
    assert (plan.block_copies, updates(plan)) == (((2, 3),), [((1, 3),), ()])
    assert plan.is_decode
    assert beams(driver) == [(2, 4), (1, 4)]  # The beam that starts with token 2 is now the best.
    assert tables(driver, "1") == [[1, 2], [1, 3]]

    plan = the(driver.step())
    assert shape(plan) == [(11, 7, 1, True), (10, 7, 1, True)]
    assert (forks(plan), plan.block_copies, updates(plan)) == ([], (), [(), ()])
    assert beams(driver) == [(2, 4, 7), (2, 4, 8)]
    assert tables(driver, "1") == [[1, 2], [1, 2]]
    # The search has dropped the beam with the output tokens 1 and 4, and has freed its block 3.
    assert num_free(driver) == 8

    plan = the(driver.step())
    assert (plan.released_seq_ids, forks(plan)) == ((10,), [(11, 12)])
    assert (plan.block_copies, updates(plan)) == ((), [((2, 4),), ((2, 5),)])
    driver.run()
    assert answers(driver) == [(2, 4, 7, 0), (2, 4, 8, 0)]
    assert driver.requests["1"].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("pruned", [0, 1])
def test_beam_without_continuation_frees_its_blocks(pruned: int, monkeypatch: pytest.MonkeyPatch):
    other = 1 - pruned
    following = {(1 + pruned,): {4: 0.1, 5: 0.1}, (1 + other,): {6: 0.6, 7: 0.4}}
    monkeypatch.setattr(__name__ + ".PROBABILITIES", PROBABILITIES | following)
    driver = Driver(make_scheduler(block_size=4))
    add_search(driver)
    driver.step()
    lost = driver.requests["1"].live_sequences[pruned]
    driver.step()
    assert beams(driver) == [(1 + other, 6), (1 + other, 7)]
    assert lost.block_table == []
    assert num_free(driver) == 8
    assert the(driver.step()).released_seq_ids == (lost.seq_id,)
    driver.run()


@pytest.mark.parametrize("lag", [1, 2])
def test_next_step_of_a_beam_search_waits_for_the_results_of_the_previous_step(lag: int):
    driver = Driver(make_scheduler(block_size=4), lag)
    add_search(driver)
    plans = [driver.step() for _ in range(6)]
    assert [plan and shape(plan) for plan in plans] == [
        [(10, 0, 6, True)],
        None,
        [(10, 6, 1, True), (11, 6, 1, True)],
        None,
        [(11, 7, 1, True), (10, 7, 1, True)],
        None,
    ]
    driver.run()


def test_end_tokens_in_all_beams_end_the_search():
    driver = Driver(make_scheduler(block_size=4))
    add_search(driver, max_tokens=9, early_stopping=True, end_token_ids=frozenset({7, 8}))
    driver.run()
    assert answers(driver) == [(2, 4, 7), (2, 4, 8)]
    assert driver.requests["1"].finish_reason is FinishReason.STOP
    assert len(driver.plans) == 3


def test_beam_search_waits_until_all_beams_were_computed():
    driver = Driver(make_scheduler(block_size=4, max_num_batched_tokens=1))
    add_search(driver)
    while not driver.plans or not driver.plans[-1].scheduled[0].is_sampled:
        driver.step()
    assert shape(driver.step()) == [(10, 6, 1, True)]
    assert beams(driver) == [(1,), (2,)]
    assert driver.requests["1"].live_sequences[0].candidates is not None
    assert shape(driver.step()) == [(11, 6, 1, True)]
    assert beams(driver) == [(2, 4), (1, 4)]
    driver.run()


def preempted_in_flight(policy: PreemptionPolicy) -> Driver:
    """Return a driver that has just preempted request 2, a beam search of width 2.

    The host has not read the results of the last step with request 2 yet.
    """
    scheduler = make_scheduler(block_size=2, num_blocks=9, pressure=policy)
    driver = Driver(scheduler, lag=1)
    driver.add(make_request("1", 2, max_tokens=11))
    add_search(driver, "2", max_tokens=5)
    for _ in range(5):
        driver.step()
    assert beams(driver, "2") == [(2, 4), (1, 4)]
    plan = scheduler.schedule()
    assert plan is not None
    driver.in_flight.append((plan, *driver.device.launch(plan)))
    driver.plans.append(plan)
    assert plan.preempted_request_ids == ("2",)
    assert [beam.num_in_flight_steps for beam in driver.requests["2"].live_sequences] == [1, 1]
    return driver


def test_preempted_beams_are_recomputed_only_after_their_last_results_are_read():
    driver = preempted_in_flight(PreemptionPolicy())
    assert driver.plans[-1].released_seq_ids == (11, 10)
    driver.read()
    assert beams(driver, "2") == [(2, 4, 7), (2, 4, 8)]
    assert tables(driver, "2") == [[], []]
    while status(driver, "2") == "preempted":
        plan = driver.step()
    assert shape(plan) == [(11, 0, 8, False)]  # recomputes the common prefix
    driver.read()
    plan = the(driver.step())
    assert (forks(plan), plan.block_copies) == ([(11, 12)], ())
    assert shape(plan) == [(11, 8, 1, True), (12, 8, 1, True)]
    driver.run()
    assert answers(driver, "2")[0] == (2, 4, 7, 0, 0)


def test_swap_in_skips_a_block_that_only_a_pruned_beam_used():
    driver = preempted_in_flight(PreemptionPolicy(PreemptionMode.SWAP, 8))
    (swap_out,) = driver.plans[-1].swap_outs
    assert len(swap_out.block_ids) == 5
    live = driver.requests["2"].live_sequences
    assert [beam.host_block_table for beam in live] == [[0, 1, 2, 3], [0, 1, 2, 4]]
    driver.read()
    assert beams(driver, "2") == [(2, 4, 7), (2, 4, 8)]
    live = driver.requests["2"].live_sequences
    assert [beam.host_block_table for beam in live] == [[0, 1, 2, 3]] * 2
    driver.scheduler.check_integrity()
    while status(driver, "2") == "swapped":
        plan = driver.step()
    ((_, copies),) = the(plan).swap_ins
    # Only the pruned beam used host block 4.
    assert [host_block for host_block, _ in copies] == [0, 1, 2, 3]
    plan = the(driver.step())
    assert (shape(plan), forks(plan)) == ([(11, 8, 1, True), (12, 8, 1, True)], [])
    assert not plan.is_decode
    driver.run()
    assert answers(driver, "2")[0] == (2, 4, 7, 0, 0)


@pytest.mark.parametrize("mode", [PreemptionMode.RECOMPUTE, PreemptionMode.SWAP])
def test_preempted_beam_search_can_be_aborted_before_its_last_results_are_read(
    mode: PreemptionMode,
):
    driver = preempted_in_flight(PreemptionPolicy(mode, 8))
    driver.scheduler.abort("2")
    driver.scheduler.check_integrity()
    driver.run()
    assert num_free(driver) == 8


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("num_steps", range(8))
@pytest.mark.parametrize("budget", [1, 4, 16])
def test_beam_search_can_be_aborted_at_any_time(lag: int, num_steps: int, budget: int):
    driver = Driver(make_scheduler(block_size=4, max_num_batched_tokens=budget), lag)
    add_search(driver)
    for _ in range(num_steps):
        driver.step()
    driver.scheduler.abort("1")
    driver.scheduler.check_integrity()
    driver.run()
    assert num_free(driver) == 10


def test_nan_logits_end_a_beam_search_with_an_error(monkeypatch: pytest.MonkeyPatch):
    nothing = BeamCandidates(np.arange(3, dtype=np.int32), np.full(3, np.nan, np.float32))
    monkeypatch.setattr(core_fake_device, "candidates_of", lambda token_ids: nothing)
    driver = Driver(make_scheduler())
    add_search(driver)
    driver.run()
    assert driver.requests["1"].finish_reason is FinishReason.ERROR
    assert answers(driver) == []


def test_scheduler_update_of_a_beam_search_requires_candidates():
    driver = Driver(make_scheduler())
    add_search(driver)
    plan = the(driver.scheduler.schedule())
    with pytest.raises(ValueError, match="pass the candidates of a step"):
        driver.scheduler.update(plan, np.zeros(1, np.int32))
