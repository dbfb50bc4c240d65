"""Test that an exception in the handling of one request ends only that request."""

from collections.abc import Callable
from typing import Any

import pytest
from e2e_options import ANSWER, GREEDY, LOOPS, QUESTION, generate_text, run, text, updates

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
    """Return a wrapper of `target`. The first `after` calls for the request `VICTIM` succeed. Later
    calls for this request raise an error."""
    calls = 0

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        if is_victim(*args):
            calls += 1
            if calls > after:
                raise KeyError("injected")
        return target(*args, **kwargs)

    return wrapper


def is_victim_state(state: RequestState, *_: Any) -> bool:
    return state.request_id == "victim"


def is_victim_sequence(_: Any, sequence: Any, *__: Any) -> bool:
    return sequence.request.request_id == "victim"


def is_victim_sample(sample: SampleState, *_: Any) -> bool:
    return is_victim_sequence(None, sample.sequence)


def failing_once(target: Callable[..., Any], after: int) -> Any:
    """Return a wrapper of `target` that raises an error in one call, after `target` has returned.

    Args:
        target: The function to call.
        after: Number of calls that succeed before the failing call. Later calls succeed too.
    """
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
    "detokenize": (RequestState, "accept_token", is_victim_state),
    "score": (SampleState, "accept_scores", is_victim_sample),
    "score the prompt": (RequestState, "accept_prompt_logprobs", is_victim_state),
    "finish": (RequestState, "finish", is_victim_state),
    "schedule": (PlanBuilder, "add_sequence", is_victim_sequence),
    "append a block": (BlockManager, "append", is_victim_sequence),
    "admit": (BlockManager, "admit", is_victim_sequence),
}
CALLED_ONCE = ("score the prompt", "finish", "admit")
CALLED_OFTEN = ("detokenize", "score", "schedule", "append a block")


@pytest.mark.parametrize(
    ("engine", "fault", "after", "n"),
    covering(LOOPS, CALLED_ONCE, [0], [1, 3]) + covering(LOOPS, CALLED_OFTEN, [0, 1, 2], [1, 3]),
    indirect=["engine"],
)
def test_error_in_a_request_ends_only_that_request(
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
    assert [text(last[other]) for other in others] == [ANSWER] * 4
    engine.check_integrity()
    assert generate_text(engine) == ANSWER


@pytest.mark.parametrize(("n", "bad_seed"), [(1, 7), (2, 8)], ids=["only sample", "forked sample"])
def test_error_in_the_setup_of_a_sample_ends_only_its_request(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, n: int, bad_seed: int
):
    fails = failing(batch.pack_params, lambda params, seed: seed == bad_seed, after=0)
    monkeypatch.setattr(batch, "pack_params", fails)
    params = SamplingParams(n=n, seed=7, temperature=1.0, max_tokens=12, ignore_eos=True)
    victim = engine.add_request(QUESTION, params)
    other = engine.add_request(QUESTION, GREEDY)
    last = run(engine)
    assert {each.finish_reason for each in last[victim].outputs} == {"error"}
    assert text(last[other]) == ANSWER
    engine.check_integrity()


SEARCH_FAULTS = {
    "advance": (BeamSearch, "advance"),
    "fork blocks": (BlockManager, "fork"),
    "fork rows": (SequenceTable, "fork_rows"),
}


@pytest.mark.parametrize(
    ("engine", "fault", "after"), covering(LOOPS, SEARCH_FAULTS, [0, 3]), indirect=["engine"]
)
def test_error_in_a_beam_search_ends_only_that_search(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, fault: str, after: int
):
    owner, name = SEARCH_FAULTS[fault]
    search = SamplingParams(beam_width=3, max_tokens=20, ignore_eos=True)
    other_search = SamplingParams(beam_width=2, max_tokens=12)
    expected = generate_text(engine, other_search)
    engine.add_request(QUESTION, GREEDY, request_id="other")
    engine.add_request("x" * 40, search, request_id="victim")
    engine.add_request(QUESTION, other_search, request_id="search")
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, failing_once(getattr(owner, name), after))
        last = run(engine)
    failed = [key for key in last if last[key].finished and not last[key].outputs]
    assert failed in (["victim"], ["search"])
    assert text(last["other"]) == ANSWER
    if failed == ["victim"]:
        assert text(last["search"]) == expected
    engine.check_integrity()


def test_generate_and_stream_raise_the_error_of_a_request(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
):
    fails = failing(RequestState.accept_token, lambda *_: True, after=1)
    with monkeypatch.context() as patch:
        patch.setattr(RequestState, "accept_token", fails)
        with pytest.raises(RuntimeError, match="failed") as caught:
            engine.generate(QUESTION, GREEDY)
        assert isinstance(caught.value.__cause__, KeyError)
        with pytest.raises(RuntimeError, match="failed"):
            list(engine.stream(QUESTION, GREEDY))
    assert generate_text(engine) == ANSWER


def test_request_that_fails_while_it_is_added_is_removed(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
):
    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, "add", failing_once(Scheduler.add, 0))
        with pytest.raises(KeyError):
            engine.add_request(QUESTION, GREEDY, request_id="a")
    assert not engine.has_unfinished_requests
    engine.add_request(QUESTION, GREEDY, request_id="a")
    assert text(run(engine)["a"]) == ANSWER


def test_last_update_of_a_request_reports_its_error(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
):
    found: dict[str, list[Any]] = {"victim": [], "other": []}
    for name in found:
        engine.add_request(QUESTION, GREEDY, request_id=name)
    fails = failing(RequestState.take_delta, is_victim_state, after=2)
    with monkeypatch.context() as patch:
        patch.setattr(RequestState, "take_delta", fails)
        for update in updates(engine):
            found[update.request_id].append(update)
    assert found["victim"][-1].error == "KeyError('injected')"
    assert found["victim"][-1].deltas[0].finish_reason == "error"
    assert "".join(d.text for each in found["other"] for d in each.deltas) == ANSWER
