"""Several decode steps in one launch: the same answers, and who comes meanwhile is not kept out."""

from typing import Any

import pytest
from conftest import Engines
from test_under_pressure import answers, params

from jpaged import Engine, SamplingParams
from tools.tiny.world import sample_examples

BURST = 3
PROMPTS = [e.prompt for e in sample_examples(11, 200) if len(e.prompt + e.completion) < 60][:32]


@pytest.fixture
def engine(engines: Engines) -> Engine:
    return engines(num_scheduler_steps=BURST)


@pytest.fixture
def launched(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many steps each launch had."""
    runner, counts = engine._loop._runner, []
    burst, single = runner._launch_burst, runner.launch

    def note(launch: Any, plans: Any, sampling: Any) -> Any:
        counts.append(len(plans) if isinstance(plans, list) else 1)
        return launch(plans, sampling)

    monkeypatch.setattr(runner, "_launch_burst", lambda *args: note(burst, *args))
    monkeypatch.setattr(runner, "launch", lambda *args: note(single, *args))
    return counts


@pytest.mark.parametrize("num_blocks", [129, 25], ids=["roomy", "tight"])
def test_every_answer_is_that_of_single_steps(engines: Engines, num_blocks: int):
    """All kinds of decoding, whole batches and each request alone."""
    options = {"num_blocks": num_blocks, "max_model_len": 120}
    bursts = engines(num_scheduler_steps=BURST, **options)
    single = engines(async_scheduling=False, max_model_len=120)
    kinds = [params(i) for i in range(len(PROMPTS))]
    want = [answers(output) for output in single.generate(PROMPTS, kinds)]
    assert [answers(output) for output in bursts.generate(PROMPTS, kinds)] == want
    for prompt, own, expected in zip(PROMPTS[:8], kinds, want, strict=False):
        assert answers(bursts.generate(prompt, own)[0]) == expected


@pytest.mark.parametrize("own", [{"temperature": 0.0}, {"temperature": 1.0, "top_k": 5, "seed": 1}])
@pytest.mark.parametrize("max_tokens", [1, 2, BURST + 1, 2 * BURST + 1, 20])
def test_one_request_runs_in_bursts_to_its_last_token(
    engine: Engine, launched: list[int], own: dict[str, Any], max_tokens: int
):
    whole: dict[str, Any] = {"max_tokens": max_tokens, "ignore_eos": True, **own}
    given = SamplingParams(**whole)
    (output,) = engine.generate("Count from 3 to 20", given)
    assert len(output.outputs[0].token_ids) == max_tokens
    after_prefill = max_tokens - 1
    assert launched.count(BURST) == after_prefill // BURST
    assert sum(launched[1:]) == after_prefill  # no step too many


def test_what_needs_its_own_state_runs_step_by_step(engine: Engine, launched: list[int]):
    kinds: list[dict[str, Any]] = [{"logprobs": 1}, {"presence_penalty": 0.5}, {"beam_width": 2}]
    for own in kinds:
        engine.generate("Count from 3 to 20", SamplingParams(max_tokens=9, **own))
    assert set(launched) == {1}


def test_who_comes_joins_at_the_next_launch(engine: Engine, launched: list[int]):
    given = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    engine.add_request("Count from 3 to 20", given, request_id="first")
    for _ in range(4):
        engine.step()
    assert launched[-1] == BURST
    engine.add_request("2 + 3 =", given, request_id="second")
    engine.step()
    assert launched[-1] == 1  # its prompt, and the first one's next token
    engine.step()
    assert launched[-1] == BURST  # both
    engine.abort_all()


def test_an_abort_within_a_burst_leaves_nothing(engine: Engine, launched: list[int]):
    given = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    for i in range(3):
        engine.add_request(f"Count from {i} to 20", given, request_id=str(i))
    for _ in range(4):
        engine.step()
    assert launched[-1] == BURST
    engine.abort("1")
    engine.check_integrity()
    finished: dict[str, int] = {}
    while engine.has_unfinished_requests:
        for output in engine.step():
            finished[output.request_id] = len(output.outputs[0].token_ids)
    assert finished == {"0": 30, "2": 30}
