"""Several decode steps in one launch: the same answers, and arriving requests are not kept out."""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from e2e_options import Engines
from test_under_pressure import answers, params

from jpaged import Engine, SamplingParams
from jpaged.core.plan import StepPlan
from jpaged.engine.step_recorder import StepRecorder
from jpaged.runtime.model_runner import ModelRunner
from jpaged.runtime.results import StepHandle
from tools.tiny.world import sample_examples

BURST = 3
PROMPTS = [e.prompt for e in sample_examples(11, 200) if len(e.prompt + e.completion) < 60][:20]


@pytest.fixture
def engine(engines: Engines) -> Engine:
    return engines(num_scheduler_steps=BURST)


@pytest.fixture
def launched(engine: Engine) -> Iterator[list[int]]:
    """How many steps each launch had."""
    counts: list[int] = []
    with engine.record_steps(lambda plans: counts.append(len(plans))):
        yield counts


@pytest.mark.parametrize(
    ("num_blocks", "max_num_seqs", "count"),
    [
        pytest.param(129, 8, 20, marks=pytest.mark.soak, id="few"),
        pytest.param(25, 8, 12, marks=pytest.mark.full, id="few-tight"),
        pytest.param(300, 20, 20, marks=pytest.mark.soak, id="more"),
        pytest.param(60, 20, 20, marks=pytest.mark.full, id="more-tight"),
    ],
)
def test_bursts_give_the_answers_of_single_steps(
    engines: Engines, shallow_folder: Path, num_blocks: int, max_num_seqs: int, count: int
):
    """All kinds of decoding, whole batches and each request alone."""
    options = {"num_blocks": num_blocks, "max_num_seqs": max_num_seqs, "max_model_len": 120}
    bursts = engines(shallow_folder, num_scheduler_steps=BURST, **options)
    single = engines(shallow_folder, async_scheduling=False, max_model_len=120)
    prompts, kinds = PROMPTS[:count], [params(i) for i in range(count)]
    want = [answers(output) for output in single.generate(prompts, kinds)]
    assert [answers(output) for output in bursts.generate(prompts, kinds)] == want
    for prompt, own, expected in zip(prompts[:8], kinds, want, strict=False):
        assert answers(bursts.generate(prompt, own)[0]) == expected


@pytest.mark.parametrize("mode", ["swap", pytest.param("recompute", marks=pytest.mark.full)])
def test_arrivals_and_aborts_at_random_steps_change_no_answer(
    engines: Engines, shallow_folder: Path, mode: str
):
    """In a tight pool, some before others, some aborted; no burst has a step that moves blocks."""
    bursts = engines(
        shallow_folder,
        num_scheduler_steps=BURST,
        num_blocks=25,
        max_model_len=120,
        scheduling_policy="priority",
        preemption_mode=mode,
    )
    single = engines(shallow_folder, async_scheduling=False, max_model_len=120)
    kinds = [params(i) for i in range(len(PROMPTS))]
    want = [answers(output) for output in single.generate(PROMPTS, kinds)]
    rng, to_come, ended, aborted = random.Random(0), [*range(len(PROMPTS))], {}, set()
    before = bursts.stats().num_preemptions
    with bursts.record_steps() as steps:
        while to_come or bursts.has_unfinished_requests:
            if to_come and rng.random() < 0.4:
                index = to_come.pop()
                priority = rng.randrange(3)
                bursts.add_request(
                    PROMPTS[index], kinds[index], request_id=str(index), priority=priority
                )
            ended |= {int(o.request_id): answers(o) for o in bursts.step() if o.finished}
            bursts.check_integrity()
            running = [i for i in range(len(PROMPTS)) if i not in (*to_come, *ended, *aborted)]
            if running and rng.random() < 0.03:
                aborted.add(index := rng.choice(running))
                bursts.abort(str(index))
    launches = [launch.plans for launch in steps.launches]
    assert {len(plans) for plans in launches} == {1, BURST}
    moving = [plans for plans in launches if any(it.has_block_moves for it in plans)]
    assert moving
    assert all(len(plans) == 1 for plans in moving)
    assert all(it.is_decode for plans in launches if len(plans) == BURST for it in plans)
    assert aborted
    assert bursts.stats().num_preemptions > before
    assert ended == {i: want[i] for i in range(len(PROMPTS)) if i not in aborted}


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_waiting_and_preempted_requests_finish_next_to_bursts(
    engines: Engines, shallow_folder: Path, mode: str
):
    options: dict[str, Any] = {"num_blocks": 25, "max_model_len": 120, "preemption_mode": mode}
    options |= {"num_scheduler_steps": BURST, "scheduling_policy": "priority"}
    bursts = engines(shallow_folder, **options)
    single = engines(shallow_folder, async_scheduling=False, max_model_len=120)
    waiting: list[int] = []

    def note(plans: Sequence[StepPlan]) -> None:
        if len(plans) == BURST:
            waiting.append(bursts.stats().num_waiting)

    kinds = [
        SamplingParams(temperature=i % 2, top_k=5, seed=i, max_tokens=10 + i, ignore_eos=True)
        for i in range(len(PROMPTS))
    ]
    want = [answers(output) for output in single.generate(PROMPTS, kinds)]
    before = bursts.stats().num_preemptions
    with bursts.record_steps(note):
        outputs = bursts.generate(PROMPTS, kinds, priority=[i % 3 for i in range(len(PROMPTS))])
    assert [answers(output) for output in outputs] == want
    assert bursts.stats().num_preemptions > before
    assert max(waiting) > 0


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


@pytest.mark.parametrize(
    "own",
    [
        {"logprobs": 3},
        {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.5},
        {"logit_bias": {70: 100.0}, "min_tokens": 7},
        {"logprobs": 0, "allowed_token_ids": [*range(60, 90)]},
        {"logprobs": 2, "presence_penalty": 1.0},
    ],
    ids=str,
)
def test_scores_and_penalties_are_those_of_single_steps(
    engines: Engines, engine: Engine, launched: list[int], own: dict[str, Any]
):
    """A burst counts each token before it chooses the next."""
    given = SamplingParams(temperature=0.0, max_tokens=3 * BURST + 1, ignore_eos=True, **own)
    single = engines(async_scheduling=False)
    found, want = (it.generate(PROMPTS[:6], given) for it in (engine, single))
    assert launched.count(BURST) >= 3
    for one, other in zip(found, want, strict=True):
        assert answers(one) == answers(other)
        for mine, its in zip(one.outputs, other.outputs, strict=True):
            assert (mine.logprobs is None) == ("logprobs" not in own)
            pairs = zip(mine.logprobs or (), its.logprobs or (), strict=True)
            for candidates, expected in pairs:
                assert [*candidates] == [*expected]
                mine_, its_ = ([x.logprob for x in it.values()] for it in (candidates, expected))
                assert mine_ == pytest.approx(its_, abs=1e-4)


def test_steps_that_need_the_host_are_not_in_bursts(engine: Engine, launched: list[int]):
    """A search of beams; and what no level of bursts does."""
    kinds: list[dict[str, Any]] = [{"beam_width": 2, "temperature": 0.0}, {"logprobs": 1}]
    for own in kinds:
        engine.generate("Count from 3 to 20", SamplingParams(max_tokens=9, **own))
    assert set(launched) == {1}


MANY = {"num_scheduler_steps": BURST, "num_blocks": 600, "max_num_seqs": 48, "max_model_len": 120}


@pytest.fixture
def many(engines: Engines, shallow_folder: Path) -> Iterator[StepRecorder]:
    """Records an engine of `MANY`."""
    with engines(shallow_folder, **MANY).record_steps() as steps:
        yield steps


def shapes_of(steps: StepRecorder) -> list[tuple[int, ...]]:
    """Each burst's batch size, and the sequences of its steps."""
    return [
        (size, *(len(plan.scheduled) for plan in launch.plans))
        for launch in steps.launches
        if (size := launch.batch_size("decode_burst")) is not None
    ]


@pytest.mark.full
def test_whole_generations_run_many_sequences_in_bursts(
    engines: Engines, shallow_folder: Path, many: StepRecorder
):
    """In a generation, not in steps: another may come between these."""
    engine = engines(shallow_folder, **MANY)
    single = engines(shallow_folder, async_scheduling=False, max_model_len=120)
    prompts = [*PROMPTS, *PROMPTS]
    kinds = [
        SamplingParams(temperature=i % 2, top_k=5, seed=i, max_tokens=20 + i, ignore_eos=True)
        for i in range(len(prompts))
    ]
    want = [answers(output) for output in single.generate(prompts, kinds)]
    assert [answers(output) for output in engine.generate(prompts, kinds)] == want
    sizes = [size for size, *_ in shapes_of(many)]
    assert sizes == sorted(sizes, reverse=True)
    assert set(sizes) == {48, 32, 8}
    many.launches.clear()
    for i, (prompt, own) in enumerate(zip(prompts, kinds, strict=True)):
        engine.add_request(prompt, own, request_id=str(i))
    ended: dict[int, Any] = {}
    while engine.has_unfinished_requests:
        ended |= {int(o.request_id): answers(o) for o in engine.step() if o.finished}
    assert [ended[i] for i in range(len(prompts))] == want
    assert {size for size, *_ in shapes_of(many)} == {32, 8}


def test_a_burst_is_as_large_as_its_largest_step(
    engines: Engines, shallow_folder: Path, many: StepRecorder
):
    """A request's last step leaves the later ones of a burst smaller."""
    engine = engines(shallow_folder, **MANY)
    ends = [6] + [8] * 4 + [14] * 6
    given = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in ends]
    outputs = engine.generate(["2 + 3 ="] * len(ends), given)
    assert [len(output.outputs[0].token_ids) for output in outputs] == ends
    assert shapes_of(many) == [(32, 11, 11, 11), (32, 11, 10, 10), (8, 6, 6, 6), (8, 6, 6, 6)]


def test_a_burst_samples_at_the_level_of_any_of_its_steps(engine: Engine, launched: list[int]):
    """Also if the one that needs it ends before the others."""
    short = SamplingParams(temperature=100.0, seed=1, max_tokens=BURST, ignore_eos=True)
    long = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    prompts, given = ["Count from 3 to 20", "2 + 3 ="], [short, long]
    alone = [answers(engine.generate(*job)[0]) for job in zip(prompts, given, strict=True)]
    launched.clear()
    assert [answers(output) for output in engine.generate(prompts, given)] == alone
    assert launched[:2] == [1, BURST]


def test_waiting_request_prevents_bursts(engine: Engine, launched: list[int]):
    short, long = (SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (10, 40))
    prompts, kinds = ["2 + 3 ="] * 9, [short] + [long] * 8
    for prompt, own in zip(prompts, kinds, strict=True):
        engine.add_request(prompt, own)
    while engine.has_unfinished_requests:
        engine.step()
    first = launched.index(BURST)
    assert first > 9
    assert set(launched[:first]) == {1}
    launched.clear()
    engine.generate(prompts, kinds)
    assert launched.index(BURST) < 9


def test_new_request_joins_at_the_next_launch(engine: Engine, launched: list[int]):
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


def test_abort_during_a_burst_frees_all_blocks(engine: Engine, launched: list[int]):
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


@pytest.mark.parametrize(
    ("owner", "name"), [(ModelRunner, "launch_burst"), (StepHandle, "read")], ids=["launch", "read"]
)
def test_a_burst_that_fails_fails_the_engine(
    new_engine: Engines, monkeypatch: pytest.MonkeyPatch, owner: type, name: str
):
    engine, target = new_engine(num_scheduler_steps=BURST), getattr(owner, name)

    def fails(*given: Any) -> Any:
        if name == "launch_burst" or len(steps.launches[-1].plans) == BURST:
            raise RuntimeError("injected")
        return target(*given)

    monkeypatch.setattr(owner, name, fails)
    given = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    with engine.record_steps() as steps, pytest.raises(RuntimeError, match="injected"):
        engine.generate(["Count from 3 to 20"] * 2, given)
    with pytest.raises(RuntimeError, match="failed in an earlier step"):
        engine.step()
    engine.abort_all()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
