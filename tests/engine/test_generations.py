"""Whole generations: what is queued when, and that nothing stays behind."""

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

import pytest

from jpaged.core.block_manager import BlockManager
from jpaged.core.plan import Goal
from jpaged.core.prefix_cache import PrefixCache
from jpaged.core.request import FinishReason, Sequence
from jpaged.core.scheduler import Scheduler, SchedulerConfig
from jpaged.engine.generation import Driver
from jpaged.engine.inputs import Prompt
from jpaged.engine.preprocessing import Intake, Job
from jpaged.engine.request_state import RequestState
from jpaged.sampling_params import SamplingParams

MAX_MODEL_LEN, BLOCK_SIZE = 16, 4
PLAIN = SamplingParams(max_tokens=4)
GROUP = SamplingParams(max_tokens=4, n=2)
RANKED = SamplingParams(max_tokens=4, best_of=2)
SEARCH = SamplingParams(max_tokens=4, beam_width=2)


class NullLoop:
    """Queues requests as an engine's loop does, and computes nothing: some steps end all that
    is queued."""

    def __init__(self, num_blocks: int, ends_at: SequenceOf[int], *, by_priority: bool = False):
        config = SchedulerConfig(4, 10, MAX_MODEL_LEN, by_priority)
        self.manager = BlockManager(num_blocks, BLOCK_SIZE, PrefixCache(BLOCK_SIZE))
        self.scheduler = Scheduler(config, self.manager)
        self.requests: dict[str, RequestState] = {}
        self.num_queued: list[int] = []  # at each step, since the start
        self.ends_at = ends_at

    def add(self, states: Iterable[RequestState]) -> None:
        for state in states:
            self.scheduler.add(state.request)
            self.requests[state.request_id] = state

    def advance(self, goal: Goal) -> list[RequestState]:
        self.num_queued.append(len(self.requests))
        if len(self.num_queued) not in self.ends_at:
            return []
        ended = [s for s in self.requests.values() if not s.request.is_finished]
        for state in ended:
            self.scheduler.finish(state.request_id, FinishReason.LENGTH)
        return ended

    def abort(self, state: RequestState) -> None:
        self.scheduler.abort(state.request_id)


def make_intake() -> Intake:
    limits = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 4}
    return Intake(None, vocab_size=10, eos_token_ids=frozenset(), seed=0, **limits)


def make_jobs(
    prompt_lens: list[int], params: SamplingParams = PLAIN, priority: int = 0
) -> list[Job]:
    """All but the last are plain."""
    intake, prompts = make_intake(), [Prompt(token_ids=[1] * n) for n in prompt_lens]
    jobs = [intake.make_job(prompt, PLAIN) for prompt in prompts[:-1]]
    return [*jobs, intake.make_job(prompts[-1], params, priority)]


def make_driver(
    num_blocks: int = 5, ends_at: SequenceOf[int] = (2,), **more: bool
) -> tuple[Driver, NullLoop]:
    loop = NullLoop(num_blocks, ends_at, **more)
    return Driver(loop, make_intake()), loop  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("prompt_lens", "num_queued"),
    [
        ([4, 4, 4, 4, 4], [3, 5]),  # 8 of the step's 10 tokens are not all of it
        ([5, 5, 5], [2, 3]),
        ([15, 1], [1, 2]),
        ([1, 1, 1, 1, 1], [4, 5]),  # as many sequences as a step has
        ([4] * 12, [3, 7, 11, 12]),
        ([4, 4], [2]),
    ],
)
def test_what_fills_a_step_is_queued_before_it_and_more_while_it_runs(
    prompt_lens: list[int], num_queued: list[int]
):
    driver, loop = make_driver(ends_at=(len(num_queued),))
    outputs = driver.complete(make_jobs(prompt_lens), Goal.THROUGHPUT)
    assert loop.num_queued == num_queued
    assert [len(output.prompt_token_ids) for output in outputs] == prompt_lens
    states = [loop.requests[output.request_id] for output in outputs]
    assert [state.request.arrival for state in states] == list(range(len(states)))


def test_what_is_told_of_a_request_does_not_depend_on_when_it_is_queued():
    driver, loop = make_driver(ends_at=(4,))
    jobs = make_jobs([4] * 12)
    outputs = driver.complete(jobs, Goal.THROUGHPUT)
    states = [loop.requests[output.request_id] for output in outputs]
    assert [state.metrics.arrival_time for state in states] == [job.arrival_time for job in jobs]
    seeds = [state.request.sequences[0].seed for state in states]
    assert seeds == [job.seed % 2**64 for job in jobs]
    assert len({job.seed for job in jobs}) == 12


@pytest.mark.parametrize("ends_at", [(2,), (5,), (1, 2), (1, 5)])
def test_all_are_waited_for_also_if_the_first_end_before_others_are_queued(ends_at: tuple):
    driver, loop = make_driver(ends_at=ends_at)
    told = list[int]()
    outputs = driver.complete(make_jobs([10, 10, 10]), Goal.THROUGHPUT, told.append)
    assert all(output.finished for output in outputs)
    assert len(loop.num_queued) == ends_at[-1]
    assert sum(told) == len(outputs) == 3


def test_an_output_is_made_when_its_request_has_ended(monkeypatch: pytest.MonkeyPatch):
    driver, loop = make_driver(ends_at=(1, 5))
    made, output_of = list[int](), RequestState.output

    def noted(state: RequestState):
        made.append(len(loop.num_queued))
        return output_of(state)

    monkeypatch.setattr(RequestState, "output", noted)
    driver.complete(make_jobs([10, 10, 10]), Goal.THROUGHPUT)
    assert made == [1, 5, 5]


def test_outputs_are_in_the_order_of_their_prompts_whoever_ends_first():
    driver, loop = make_driver()

    def end_the_last(goal: Goal) -> list[RequestState]:
        loop.num_queued.append(len(loop.requests))
        if loop.num_queued == [1]:  # before the others are queued
            return []
        *_, last = (s for s in loop.requests.values() if not s.request.is_finished)
        loop.scheduler.finish(last.request_id, FinishReason.LENGTH)
        return [last]

    loop.advance = end_the_last
    outputs = driver.complete(make_jobs([10, 9, 8]), Goal.THROUGHPUT)
    assert [len(output.prompt_token_ids) for output in outputs] == [10, 9, 8]
    assert len(loop.num_queued) == 4


def test_an_output_that_cannot_be_made_leaves_none_queued(monkeypatch: pytest.MonkeyPatch):
    driver, loop = make_driver(ends_at=(1, 5))
    monkeypatch.setattr(RequestState, "output", lambda state: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        driver.complete(make_jobs([10, 10, 10]), Goal.THROUGHPUT)
    assert not loop.scheduler.has_unfinished
    assert len(loop.num_queued) == 1


@pytest.mark.parametrize(
    ("params", "priority"),
    [(GROUP, 0), (RANKED, 0), (SEARCH, 0), (PLAIN, -1)],
    ids=["group", "ranked", "search", "rank"],
)
def test_where_one_may_be_refused_or_goes_first_all_are_queued_at_once(
    params: SamplingParams, priority: int
):
    driver, loop = make_driver(num_blocks=40, by_priority=True)
    driver.complete(make_jobs([10, 10, 10], params, priority), Goal.THROUGHPUT)
    assert loop.num_queued == [3, 3]


def test_in_a_pool_that_does_not_hold_the_longest_sequence_all_are_queued_at_once():
    driver, loop = make_driver(num_blocks=4)
    driver.complete(make_jobs([8, 8, 8]), Goal.THROUGHPUT)
    assert loop.num_queued == [3, 3]


@pytest.mark.parametrize(
    ("prompt_lens", "num_queued"),
    [([8, 8, 8, 8], [4, 4]), ([5, 8, 8, 8], [4, 4]), ([4, 3, 3, 8], [3, 4])],
)
def test_where_a_prefix_is_cached_few_do_not_fill_a_step(
    prompt_lens: list[int], num_queued: list[int]
):
    """Unless the prompts that fill it are too short to find it."""
    driver, loop = make_driver()
    before = Sequence(99, [1] * BLOCK_SIZE, BLOCK_SIZE)
    loop.manager.append(before, BLOCK_SIZE)
    loop.manager.register_computed(before, BLOCK_SIZE)
    loop.manager.free(before)
    driver.complete(make_jobs(prompt_lens), Goal.THROUGHPUT)
    assert loop.num_queued == num_queued


@pytest.mark.parametrize(
    ("num_blocks", "last", "params", "priority", "message"),
    [
        (5, 16, PLAIN, 0, "leaves no room for an output token"),
        (5, 8, PLAIN, 1, "priority=1 .* has no effect"),
        (5, 8, SamplingParams(max_tokens=8, n=4), 0, "4 sequences. and the pool has 4"),
        (4, 12, PLAIN, 0, "may need 4 blocks"),
    ],
)
def test_if_the_last_is_refused_none_is_started(
    num_blocks: int, last: int, params: SamplingParams, priority: int, message: str
):
    driver, loop = make_driver(num_blocks)
    with pytest.raises(ValueError, match=message):
        driver.complete(make_jobs([10, 10, last], params, priority), Goal.THROUGHPUT)
    assert loop.num_queued == []
    assert not loop.scheduler.has_unfinished


@pytest.mark.parametrize("num_turns", [1, 2, 3])
def test_an_interrupt_leaves_none_queued(num_turns: int):
    driver, loop = make_driver(ends_at=())
    advance = loop.advance

    def interrupted(goal: Goal) -> list[RequestState]:
        if len(loop.num_queued) == num_turns - 1:
            raise KeyboardInterrupt
        return advance(goal)

    loop.advance = interrupted
    with pytest.raises(KeyboardInterrupt):
        driver.complete(make_jobs([10, 10, 10]), Goal.THROUGHPUT)
    assert not loop.scheduler.has_unfinished


def test_nothing_to_do_takes_no_step():
    driver, loop = make_driver()
    assert driver.complete([], Goal.THROUGHPUT) == []
    assert loop.num_queued == []
