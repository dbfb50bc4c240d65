"""A fault in the handling of one request is its own; what all share fails the engine."""

from collections.abc import Callable
from typing import Any

import pytest
from e2e_options import ANSWER, GREEDY, LOOPS, QUESTION, run

from jpaged import Engine, SamplingParams
from jpaged.core.beam import BeamSearch
from jpaged.core.block_manager import BlockManager
from jpaged.core.plan import PlanBuilder
from jpaged.core.scheduler import Scheduler
from jpaged.core.sequence_table import SequenceTable
from jpaged.engine.request_state import RequestState, SampleState
from jpaged.runtime import batch
from tests.covering import covering


def failing(target: Callable[..., Any], is_victim: Callable[..., bool], after: int) -> Any:
    """`target`, which raises for the victim from its call number `after` on."""
    calls = 0

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        if is_victim(*args):
            calls += 1
            if calls > after:
                raise KeyError("injected")
        return target(*args, **kwargs)

    return wrapper


def of_state(state: RequestState, *_: Any) -> bool:
    return state.request_id == "victim"


def of_sequence(_: Any, sequence: Any, *__: Any) -> bool:
    return sequence.request.request_id == "victim"


def of_sample(sample: SampleState, *_: Any) -> bool:
    return sample.sequence.request.request_id == "victim"


def failing_once(target: Callable[..., Any], after: int) -> Any:
    """`target`, whose call number `after` raises once its work is done."""
    calls = 0

    def wrapper(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        result = target(*args, **options)
        if calls == after + 1:
            raise KeyError("injected")
        return result

    return wrapper


FAULTS = {
    "detokenising": (RequestState, "accept_token", of_state),
    "scoring": (SampleState, "accept_scores", of_sample),
    "scoring the prompt": (RequestState, "accept_prompt_logprobs", of_state),
    "ending": (RequestState, "finish", of_state),
    "placing": (PlanBuilder, "add_sequence", of_sequence),
    "blocks": (BlockManager, "append", of_sequence),
    "sharing": (BlockManager, "admit", of_sequence),
}
CALLED_ONCE = ("scoring the prompt", "ending", "sharing")
CALLED_OFTEN = ("detokenising", "scoring", "placing", "blocks")


@pytest.mark.parametrize(
    ("engine", "fault", "after", "n"),
    covering(LOOPS, CALLED_ONCE, [0], [1, 3]) + covering(LOOPS, CALLED_OFTEN, [0, 1, 2], [1, 3]),
    indirect=["engine"],
)
def test_a_fault_ends_one_request_and_no_other(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, fault: str, after: int, n: int
):
    owner, name, is_victim = FAULTS[fault]
    params = SamplingParams(
        n=n,
        temperature=1.5,
        seed=1,
        max_tokens=60,
        logprobs=0,
        prompt_logprobs=0 if name == "accept_prompt_logprobs" else None,
        ignore_eos=True,
    )
    others = [engine.add_request(QUESTION, GREEDY) for _ in range(2)]
    engine.step()
    engine.add_request("x" * 40, params, request_id="victim")
    others += [engine.add_request(QUESTION, GREEDY) for _ in range(2)]
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, failing(getattr(owner, name), is_victim, after))
        last = run(engine)
    assert {each.finish_reason for each in last["victim"].outputs} == {"error"}
    assert [last[other].outputs[0].text for other in others] == [ANSWER] * 4
    engine.check_integrity()
    assert engine.generate(QUESTION, GREEDY)[0].outputs[0].text == ANSWER


def test_a_fault_of_a_sample_that_forks_ends_its_request(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
):
    encode = batch.pack_params

    def fails_for_the_second(params: SamplingParams, seed: int) -> Any:
        if seed == 8:
            raise KeyError("injected")
        return encode(params, seed)

    monkeypatch.setattr(batch, "pack_params", fails_for_the_second)
    params = SamplingParams(n=2, seed=7, temperature=1.0, max_tokens=12, ignore_eos=True)
    engine.add_request(QUESTION, params, request_id="victim")
    other = engine.add_request(QUESTION, GREEDY)
    last = run(engine)
    assert {each.finish_reason for each in last["victim"].outputs} == {"error"}
    assert last[other].outputs[0].text == ANSWER
    engine.check_integrity()


SEARCH_FAULTS = {
    "advancing": (BeamSearch, "advance"),
    "forking": (BlockManager, "fork"),
    "rows": (SequenceTable, "fork_rows"),
}


@pytest.mark.parametrize(
    ("engine", "fault", "after"), covering(LOOPS, SEARCH_FAULTS, [0, 3]), indirect=["engine"]
)
def test_fault_in_a_search_ends_it_only(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, fault: str, after: int
):
    owner, name = SEARCH_FAULTS[fault]
    search = SamplingParams(beam_width=3, max_tokens=20, ignore_eos=True)
    other_search = SamplingParams(beam_width=2, max_tokens=12)
    expected = engine.generate(QUESTION, other_search)[0].outputs[0].text
    engine.add_request(QUESTION, GREEDY, request_id="other")
    engine.add_request("x" * 40, search, request_id="victim")
    engine.add_request(QUESTION, other_search, request_id="search")
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, failing_once(getattr(owner, name), after))
        last = run(engine)
    failed = [key for key in last if last[key].finished and not last[key].outputs]
    assert failed in (["victim"], ["search"])
    assert last["other"].outputs[0].text == ANSWER
    if failed == ["victim"]:
        assert last["search"].outputs[0].text == expected
    engine.check_integrity()


def test_fault_in_sampling_setup_ends_one_request(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    other = engine.add_request(QUESTION, GREEDY)
    strange = SamplingParams(temperature=0.125, max_tokens=20, seed=3)
    victim = engine.add_request(QUESTION, strange)
    encode = failing(batch.pack_params, lambda params, seed: params.temperature == 0.125, 0)
    with monkeypatch.context() as patch:
        patch.setattr(batch, "pack_params", encode)
        last = run(engine)
    assert last[victim].outputs[0].finish_reason == "error"
    assert last[other].outputs[0].text == ANSWER


def test_generate_and_stream_raise_the_fault(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:
        patch.setattr(
            RequestState,
            "accept_token",
            failing(RequestState.accept_token, lambda *_: True, after=1),
        )
        with pytest.raises(RuntimeError, match="failed") as caught:
            engine.generate(QUESTION, GREEDY)
        assert isinstance(caught.value.__cause__, KeyError)
        with pytest.raises(RuntimeError, match="failed"):
            list(engine.stream(QUESTION, GREEDY))
    assert engine.generate(QUESTION, GREEDY)[0].outputs[0].text == ANSWER


def test_fault_while_adding_a_request_leaves_no_trace(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
):
    with monkeypatch.context() as patch:
        add = Scheduler.add

        def add_and_fail(self: Scheduler, request: Any) -> None:
            add(self, request)
            raise KeyError("injected")

        patch.setattr(Scheduler, "add", add_and_fail)
        with pytest.raises(KeyError):
            engine.add_request(QUESTION, GREEDY, request_id="a")
    assert not engine.has_unfinished_requests
    engine.add_request(QUESTION, GREEDY, request_id="a")
    assert run(engine)["a"].outputs[0].text == ANSWER


def test_deltas_report_the_fault(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    engine.add_request(QUESTION, GREEDY, request_id="victim")
    engine.add_request(QUESTION, GREEDY, request_id="other")
    accept = failing(RequestState.take_delta, of_state, after=2)
    found: dict[str, list[Any]] = {"victim": [], "other": []}
    with monkeypatch.context() as patch:
        patch.setattr(RequestState, "take_delta", accept)
        while engine.has_unfinished_requests:
            engine.advance()
            for delta in engine.take_deltas():
                found[delta.request_id].append(delta)
    assert found["victim"][-1].error == "KeyError('injected')"
    assert found["victim"][-1].deltas[0].finish_reason == "error"
    assert "".join(d.text for each in found["other"] for d in each.deltas) == ANSWER
