"""Test the order and clean-up of generations, with programs that always sample the same token."""

import signal
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from bench.null_device import Clock, make_engine, runtime_of
from jpaged import Engine, RequestOutput, SamplingParams
from jpaged.config import LoopMode
from jpaged.core.plan import StepPlan
from jpaged.core.request import Request
from jpaged.core.scheduler import Scheduler
from jpaged.engine import engine as engine_module
from jpaged.engine.request_state import RequestState
from jpaged.runtime.results import StepHandle

MAX_MODEL_LEN, BLOCK_SIZE, BUDGET = 16, 4, 16


@pytest.fixture(params=[*LoopMode])
def engine(request: pytest.FixtureRequest) -> Engine:
    return new_engine(mode=request.param)


def new_engine(num_blocks: int = 5, mode: LoopMode = LoopMode.OVERLAPPED) -> Engine:
    runtime = replace(
        runtime_of(4),
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=BUDGET,
    )
    return make_engine(runtime, Clock(), mode)


def limit(max_tokens: int = 4, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, **more)


def prompts(*lengths: int) -> list[list[int]]:
    return [[1] * length for length in lengths]


def is_idle(engine: Engine) -> bool:
    engine.check_integrity()
    stats = engine.stats()
    return not (engine.has_unfinished_requests or stats.num_used_blocks)


def test_generate_queues_all_requests_in_order_before_the_first_step(engine: Engine):
    queued: list[int] = []

    def count(plans: Sequence[StepPlan]) -> None:
        queued.append(engine.stats().num_running + engine.stats().num_waiting)

    with engine.record_steps(count) as steps:
        outputs = engine.generate(prompts(5, 12, 1), limit())
    assert queued[0] == 3
    assert [len(output.prompt_token_ids) for output in outputs] == [5, 12, 1]
    rows = [row for launch in steps.launches for row in launch.plans[0].scheduled]
    requests = {row.sequence.request.request_id: row.sequence.request for row in rows}
    assert [requests[output.request_id].arrival_index for output in outputs] == [0, 1, 2]


def test_each_request_gets_a_different_seed_and_its_arrival_time(engine: Engine):
    with engine.record_steps() as steps:
        outputs = engine.generate(prompts(*[4] * 12), limit())
    rows = [row for launch in steps.launches for row in launch.plans[0].scheduled]
    assert len({row.sequence.seed for row in rows}) == 12
    times = [output.metrics.arrival_time for output in outputs if output.metrics is not None]
    assert times == sorted(times)
    assert len(times) == 12


def test_generate_shows_the_progress_of_all_requests(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
):
    counts: list[int] = []

    class Bar(engine_module.tqdm):
        def update(self, n: float | None = 1) -> bool | None:
            counts.append(int(n or 0))
            return super().update(n)

    monkeypatch.setattr(engine_module, "tqdm", Bar)
    outputs = engine.generate(prompts(10, 10, 10), [limit(n) for n in (5, 2, 4)])
    assert [len(output.outputs[0].token_ids) for output in outputs] == [5, 2, 4]
    assert all(output.finished for output in outputs)
    assert sum(counts) == 3
    assert is_idle(engine)


def test_generate_makes_each_output_when_its_request_ends(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
):
    made, make_output = [], RequestState.output

    def record_output(state: RequestState):
        made.append((state.params.max_tokens, engine.has_work))
        return make_output(state)

    monkeypatch.setattr(RequestState, "output", record_output)
    outputs = engine.generate(prompts(3, 3, 3), [limit(n) for n in (8, 5, 2)])
    assert made == [(2, True), (5, True), (8, False)]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [8, 5, 2]


def test_error_while_an_output_is_made_aborts_all_other_requests(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(RequestState, "output", lambda state: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.generate(prompts(3, 3, 3), [limit(n) for n in (2, 8, 8)])
    assert engine.stats().num_finished == 3
    engine.abort_all()  # waits for the last step
    assert is_idle(engine)


@pytest.mark.parametrize(
    ("num_blocks", "last", "params", "priority", "message"),
    [
        (5, 16, limit(), 0, "leaves no room for an output token"),
        (5, 8, limit(), 1, "priority=1 .* has no effect.*scheduling_policy='priority'"),
        (5, 8, limit(8, n=4), 0, "4 sequences., but the pool has 4"),
        (4, 12, limit(), 0, "may need 4 blocks"),
    ],
)
def test_generate_starts_no_request_if_it_refuses_the_last_one(
    num_blocks: int, last: int, params: SamplingParams, priority: int, message: str
):
    engine = new_engine(num_blocks)
    with pytest.raises(ValueError, match=message):
        engine.generate(prompts(8, 8, last), [limit(), limit(), params], priority=[0, 0, priority])
    with pytest.raises(ValueError, match=message):
        engine.add_request(prompts(last)[0], params, priority=priority)
    assert engine.stats().num_steps == 0
    assert is_idle(engine)


@pytest.mark.parametrize("num_reads", [1, 2, 3])
def test_interrupted_generate_aborts_all_requests(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, num_reads: int
):
    read, calls = StepHandle.read, []

    def interrupted(handle: StepHandle) -> Any:
        calls.append(handle)
        if len(calls) == num_reads:
            raise KeyboardInterrupt
        return read(handle)

    with monkeypatch.context() as patch:
        patch.setattr(StepHandle, "read", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.generate(prompts(10, 10, 10), limit(6))
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_finished) == (0, 0, 3)
    engine.abort_all()  # waits for the running step
    assert is_idle(engine)
    assert len(engine.generate(prompts(2), limit())[0].outputs[0].token_ids) == 4


def test_stream_delta_contains_all_tokens_since_the_previous_delta(engine: Engine):
    stream = engine.stream([1], limit(n=2, temperature=1.0))
    first = next(stream)
    engine.advance()
    second = next(stream)
    assert (first.index, second.index) == (0, 1)
    assert len(second.token_ids) == len(first.token_ids) + 1
    rest = list(stream)
    assert [sum(len(d.token_ids) for d in (first, second, *rest) if d.index == i) for i in (0, 1)]
    assert [delta.index for delta in rest if delta.finished] == [0, 1]


def test_refused_request_does_not_occupy_its_id(engine: Engine):
    for params in (limit(beam_width=2), limit(n=1, best_of=2, temperature=1.0)):
        with pytest.raises(ValueError, match="cannot be streamed"):
            engine.stream([1], params)
    with pytest.raises(TypeError, match="priority='now' must be an integer"):
        engine.add_request([1], limit(), priority="now")  # pyright: ignore[reportArgumentType]
    assert engine.add_request([1], limit()) == "request-0"


def test_empty_request_list_is_refused_before_any_step(engine: Engine):
    with pytest.raises(ValueError, match="prompts is empty"):
        engine.generate([], limit())
    assert engine.stats().num_steps == 0


def test_stream_interrupted_while_queued_is_aborted(engine: Engine):
    add = Scheduler.add

    def pressed(self: Scheduler, request: Request) -> None:
        add(self, request)
        signal.raise_signal(signal.SIGINT)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scheduler, "add", pressed)
        with pytest.raises(KeyboardInterrupt) as interrupted:
            engine.stream([1, 2], limit(12))
    stats = engine.stats()
    assert interrupted.tb is not None  # the traceback keeps the objects of the call alive
    assert (stats.num_running, stats.num_waiting) == (0, 0)


def test_abort_discards_a_finished_output_before_engine_step_returns_it(engine: Engine):
    engine.add_request([1, 2], limit(2), request_id="a")
    engine.generate([[1] * 3], limit(8))
    engine.abort("a")
    assert engine.step() == []
    engine.add_request([1, 2], limit(2), request_id="a")
    engine.generate([[1] * 3], limit(8))
    engine.add_request([1, 2], limit(2), request_id="a")  # uses the id again
    engine.abort("a")
    assert [(each.request_id, each.finished) for each in engine.step()] == [("a", True)]


def test_error_while_the_output_of_a_request_is_made_ends_only_that_request(engine: Engine):
    output = RequestState.output

    def broken(self: RequestState) -> RequestOutput:
        if self.request_id == "a":
            raise KeyError("x")
        return output(self)

    for name in "ab":
        engine.add_request([1], limit(3, n=2, temperature=1.0), request_id=name)
    reasons: dict[str, list[str | None]] = {"a": [], "b": []}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RequestState, "output", broken)
        while engine.has_unfinished_requests:
            for each in engine.step():
                reasons[each.request_id] += [answer.finish_reason for answer in each.outputs]
    assert reasons["a"] == ["error"] * 2
    assert reasons["b"][-2:] == ["length"] * 2
