"""Whole generations: what is queued when, and that nothing stays behind."""

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

import pytest

from jpaged.core.block_manager import BlockManager
from jpaged.core.plan import Goal
from jpaged.core.prefix_cache import PrefixCache
from jpaged.core.request import FinishReason
from jpaged.core.scheduler import Scheduler, SchedulerConfig
from jpaged.engine.generation import Generation
from jpaged.engine.preprocessing import CheckedRequest, Preprocessor, Prompt
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


def make_preprocessor() -> Preprocessor:
    limits = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 4}
    return Preprocessor(None, vocab_size=10, eos_token_ids=frozenset(), seed=0, **limits)


def make_jobs(
    prompt_lens: list[int], params: SamplingParams = PLAIN, priority: int = 0
) -> list[CheckedRequest]:
    """All but the last are plain."""
    preprocessor, prompts = make_preprocessor(), [Prompt(token_ids=[1] * n) for n in prompt_lens]
    jobs = [preprocessor.check(prompt, PLAIN) for prompt in prompts[:-1]]
    return [*jobs, preprocessor.check(prompts[-1], params, priority)]


def make_generation(
    num_blocks: int = 5, ends_at: SequenceOf[int] = (2,), **more: bool
) -> tuple[Generation, NullLoop]:
    loop = NullLoop(num_blocks, ends_at, **more)
    return Generation(loop, make_preprocessor()), loop  # pyright: ignore[reportArgumentType]


def test_all_are_queued_before_the_first_step_in_their_order():
    generation, loop = make_generation()
    outputs = generation.complete(make_jobs([5, 15, 1]), Goal.THROUGHPUT)
    assert loop.num_queued == [3, 3]
    assert [len(output.prompt_token_ids) for output in outputs] == [5, 15, 1]
    states = [loop.requests[output.request_id] for output in outputs]
    assert [state.request.arrival for state in states] == [0, 1, 2]


def test_a_request_has_the_arrival_and_the_seed_of_its_check():
    generation, loop = make_generation(ends_at=(4,))
    jobs = make_jobs([4] * 12)
    outputs = generation.complete(jobs, Goal.THROUGHPUT)
    states = [loop.requests[output.request_id] for output in outputs]
    assert [state.metrics.arrival_time for state in states] == [job.arrival_time for job in jobs]
    seeds = [state.request.sequences[0].seed for state in states]
    assert seeds == [job.seed % 2**64 for job in jobs]
    assert len({job.seed for job in jobs}) == 12


@pytest.mark.parametrize("ends_at", [(1,), (2,), (5,)])
def test_all_are_waited_for(ends_at: tuple):
    generation, loop = make_generation(ends_at=ends_at)
    told = list[int]()
    outputs = generation.complete(make_jobs([10, 10, 10]), Goal.THROUGHPUT, told.append)
    assert all(output.finished for output in outputs)
    assert len(loop.num_queued) == ends_at[-1]
    assert sum(told) == len(outputs) == 3


def end_the_last(loop: NullLoop) -> None:
    """Each step ends the last request that is left."""

    def advance(goal: Goal) -> list[RequestState]:
        loop.num_queued.append(len(loop.requests))
        *_, last = (s for s in loop.requests.values() if not s.request.is_finished)
        loop.scheduler.finish(last.request_id, FinishReason.LENGTH)
        return [last]

    loop.advance = advance


def test_an_output_is_made_when_its_request_has_ended(monkeypatch: pytest.MonkeyPatch):
    generation, loop = make_generation()
    end_the_last(loop)
    made, output_of = list[int](), RequestState.output

    def noted(state: RequestState):
        made.append(len(loop.num_queued))
        return output_of(state)

    monkeypatch.setattr(RequestState, "output", noted)
    generation.complete(make_jobs([10, 10, 10]), Goal.THROUGHPUT)
    assert made == [1, 2, 3]


def test_outputs_are_in_the_order_of_their_prompts_whichever_ends_first():
    generation, loop = make_generation()
    end_the_last(loop)
    outputs = generation.complete(make_jobs([10, 9, 8]), Goal.THROUGHPUT)
    assert [len(output.prompt_token_ids) for output in outputs] == [10, 9, 8]
    assert len(loop.num_queued) == 3


def test_an_output_that_cannot_be_made_leaves_none_queued(monkeypatch: pytest.MonkeyPatch):
    generation, loop = make_generation(ends_at=(1, 5))
    monkeypatch.setattr(RequestState, "output", lambda state: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        generation.complete(make_jobs([10, 10, 10]), Goal.THROUGHPUT)
    assert not loop.scheduler.has_unfinished
    assert len(loop.num_queued) == 1


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
    generation, loop = make_generation(num_blocks)
    with pytest.raises(ValueError, match=message):
        generation.complete(make_jobs([10, 10, last], params, priority), Goal.THROUGHPUT)
    assert loop.num_queued == []
    assert not loop.scheduler.has_unfinished


@pytest.mark.parametrize("num_turns", [1, 2, 3])
def test_an_interrupt_leaves_none_queued(num_turns: int):
    generation, loop = make_generation(ends_at=())
    advance = loop.advance

    def interrupted(goal: Goal) -> list[RequestState]:
        if len(loop.num_queued) == num_turns - 1:
            raise KeyboardInterrupt
        return advance(goal)

    loop.advance = interrupted
    with pytest.raises(KeyboardInterrupt):
        generation.complete(make_jobs([10, 10, 10]), Goal.THROUGHPUT)
    assert not loop.scheduler.has_unfinished


def test_nothing_to_do_takes_no_step():
    generation, loop = make_generation()
    assert generation.complete([], Goal.THROUGHPUT) == []
    assert loop.num_queued == []
