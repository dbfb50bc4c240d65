"""Test multi-step decode: one program runs several decode steps. New requests start between such
programs."""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from e2e_options import Engines, answers, run, take_steps
from test_samples import check_same_logprobs
from test_under_pressure import params

from jpaged import Engine, SamplingParams
from jpaged.core.plan import StepPlan
from jpaged.engine.step_recorder import StepRecorder
from jpaged.runtime.model_runner import ModelRunner
from jpaged.runtime.results import StepHandle
from tools.tiny.world import sample_examples

BURST = 3
PROMPT = "Count from 3 to 20"
GREEDY_30 = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
PROMPTS = [e.prompt for e in sample_examples(11, 200) if len(e.prompt + e.completion) < 60][:20]


@pytest.fixture
def engine(engines: Engines) -> Engine:
    return engines(num_scheduler_steps=BURST)


@pytest.fixture
def launched(engine: Engine) -> Iterator[list[int]]:
    """Return a list. Each launch of a program appends its number of decode steps to the list."""
    counts: list[int] = []
    with engine.record_steps(lambda plans: counts.append(len(plans))):
        yield counts


def answers_in_single_steps(
    engines: Engines, folder: Path, prompts: list[str], kinds: list[SamplingParams]
) -> list[list[tuple]]:
    engine = engines(folder, async_scheduling=False, max_model_len=120)
    return answers(engine.generate(prompts, kinds))


@pytest.mark.parametrize(
    ("num_blocks", "max_num_seqs", "count"),
    [
        pytest.param(129, 8, 20, marks=pytest.mark.soak, id="few"),
        pytest.param(25, 8, 12, marks=pytest.mark.full, id="few-tight"),
        pytest.param(300, 20, 20, marks=pytest.mark.soak, id="more"),
        pytest.param(60, 20, 20, marks=pytest.mark.full, id="more-tight"),
    ],
)
def test_multi_step_decode_gives_the_same_answers_as_single_steps(
    engines: Engines, shallow_folder: Path, num_blocks: int, max_num_seqs: int, count: int
):
    options = {"num_blocks": num_blocks, "max_num_seqs": max_num_seqs, "max_model_len": 120}
    bursts = engines(shallow_folder, num_scheduler_steps=BURST, **options)
    prompts, kinds = PROMPTS[:count], [params(i) for i in range(count)]
    want = answers_in_single_steps(engines, shallow_folder, prompts, kinds)
    assert answers(bursts.generate(prompts, kinds)) == want
    for prompt, kind, expected in zip(prompts[:8], kinds, want, strict=False):
        assert answers(bursts.generate(prompt, kind)) == [expected]


SMALL_POOL: dict[str, Any] = {
    "num_scheduler_steps": BURST,
    "num_blocks": 25,
    "max_model_len": 120,
    "scheduling_policy": "priority",
}


@pytest.mark.full
@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_arrivals_and_aborts_at_random_steps_change_no_answer(
    engines: Engines, shallow_folder: Path, mode: str
):
    """The requests have several priorities, and the block pool is small. The test also checks that
    a multi-step decode neither copies nor swaps KV blocks."""
    bursts = engines(shallow_folder, preemption_mode=mode, **SMALL_POOL)
    kinds = [params(i) for i in range(len(PROMPTS))]
    want = answers_in_single_steps(engines, shallow_folder, PROMPTS, kinds)
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
            ended |= {int(o.request_id): answers([o])[0] for o in bursts.step() if o.finished}
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


@pytest.mark.parametrize("mode", ["swap", pytest.param("recompute", marks=pytest.mark.full)])
def test_waiting_and_preempted_requests_finish_despite_multi_step_decode(
    engines: Engines, shallow_folder: Path, mode: str
):
    bursts = engines(shallow_folder, preemption_mode=mode, **SMALL_POOL)
    waiting: list[int] = []

    def note(plans: Sequence[StepPlan]) -> None:
        if len(plans) == BURST:
            waiting.append(bursts.stats().num_waiting)

    kinds = [
        SamplingParams(temperature=i % 2, top_k=5, seed=i, max_tokens=10 + i, ignore_eos=True)
        for i in range(len(PROMPTS))
    ]
    want = answers_in_single_steps(engines, shallow_folder, PROMPTS, kinds)
    before = bursts.stats().num_preemptions
    with bursts.record_steps(note):
        outputs = bursts.generate(PROMPTS, kinds, priority=[i % 3 for i in range(len(PROMPTS))])
    assert answers(outputs) == want
    assert bursts.stats().num_preemptions > before
    assert max(waiting) > 0


@pytest.mark.parametrize("own", [{"temperature": 0.0}, {"temperature": 1.0, "top_k": 5, "seed": 1}])
@pytest.mark.parametrize("max_tokens", [1, 2, BURST + 1, 2 * BURST + 1, 20])
def test_single_request_uses_multi_step_decode_until_its_last_token(
    engine: Engine, launched: list[int], own: dict[str, Any], max_tokens: int
):
    given = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **own)
    (output,) = engine.generate(PROMPT, given)
    assert len(output.outputs[0].token_ids) == max_tokens
    after_prefill = max_tokens - 1
    assert launched.count(BURST) == after_prefill // BURST
    assert sum(launched[1:]) == after_prefill  # no additional step


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
def test_multi_step_decode_gives_the_same_logprobs_and_penalized_tokens_as_single_steps(
    engines: Engines, engine: Engine, launched: list[int], own: dict[str, Any]
):
    given = SamplingParams(temperature=0.0, max_tokens=3 * BURST + 1, ignore_eos=True, **own)
    single = engines(async_scheduling=False)
    found, want = (it.generate(PROMPTS[:6], given) for it in (engine, single))
    assert launched.count(BURST) >= 3
    assert answers(found) == answers(want)
    for one, other in zip(found, want, strict=True):
        for mine, its in zip(one.outputs, other.outputs, strict=True):
            assert (mine.logprobs is None) == ("logprobs" not in own)
            check_same_logprobs(mine, its)


def test_beam_search_and_sampling_with_logprobs_do_not_use_multi_step_decode(
    engine: Engine, launched: list[int]
):
    for kind in (SamplingParams(max_tokens=9, beam_width=2), SamplingParams(logprobs=1)):
        engine.generate(PROMPT, kind)
    assert set(launched) == {1}


MANY = {"num_scheduler_steps": BURST, "num_blocks": 600, "max_num_seqs": 48, "max_model_len": 120}


@pytest.fixture
def many(engines: Engines, shallow_folder: Path) -> Iterator[StepRecorder]:
    """Start an engine with the options `MANY`, and yield the recorder of its steps."""
    with engines(shallow_folder, **MANY).record_steps() as steps:
        yield steps


def burst_shapes(steps: StepRecorder) -> list[tuple[int, ...]]:
    """Return one tuple per multi-step decode: the batch size of the compiled program, then the
    number of sequences in each decode step."""
    return [
        (size, *(len(plan.scheduled) for plan in launch.plans))
        for launch in steps.launches
        if (size := launch.batch_size("decode_burst")) is not None
    ]


@pytest.mark.full
def test_only_generate_uses_multi_step_decode_for_large_batches(
    engines: Engines, shallow_folder: Path, many: StepRecorder
):
    """`Engine.step` decodes a large batch one step at a time, so that new requests can start soon.
    `Engine.generate` knows all requests from the start."""
    engine = engines(shallow_folder, **MANY)
    prompts = [*PROMPTS, *PROMPTS]
    kinds = [
        SamplingParams(temperature=i % 2, top_k=5, seed=i, max_tokens=20 + i, ignore_eos=True)
        for i in range(len(prompts))
    ]
    want = answers_in_single_steps(engines, shallow_folder, prompts, kinds)
    assert answers(engine.generate(prompts, kinds)) == want
    sizes = [size for size, *_ in burst_shapes(many)]
    assert sizes == sorted(sizes, reverse=True)
    assert set(sizes) == {48, 32, 8}
    many.launches.clear()
    ids = [engine.add_request(*job) for job in zip(prompts, kinds, strict=True)]
    last = run(engine)
    assert answers([last[it] for it in ids]) == want
    assert {size for size, *_ in burst_shapes(many)} == {32, 8}


def test_batch_size_of_a_multi_step_decode_fits_its_largest_step(
    engines: Engines, shallow_folder: Path, many: StepRecorder
):
    """Later steps of a multi-step decode have fewer sequences if requests finish."""
    engine = engines(shallow_folder, **MANY)
    ends = [6] + [8] * 4 + [14] * 6
    given = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in ends]
    outputs = engine.generate(["2 + 3 ="] * len(ends), given)
    assert [len(output.outputs[0].token_ids) for output in outputs] == ends
    assert burst_shapes(many) == [(32, 11, 11, 11), (32, 11, 10, 10), (8, 6, 6, 6), (8, 6, 6, 6)]


def test_multi_step_decode_of_a_batch_gives_the_same_tokens_as_single_requests(
    engine: Engine, launched: list[int]
):
    """The request with random sampling ends before the greedy request."""
    short = SamplingParams(temperature=100.0, seed=1, max_tokens=BURST, ignore_eos=True)
    long = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    prompts, given = [PROMPT, "2 + 3 ="], [short, long]
    alone = [answers(engine.generate(*job))[0] for job in zip(prompts, given, strict=True)]
    launched.clear()
    assert answers(engine.generate(prompts, given)) == alone
    assert launched[:2] == [1, BURST]


def test_waiting_request_prevents_multi_step_decode(engine: Engine, launched: list[int]):
    short, long = (SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (10, 40))
    prompts, kinds = ["2 + 3 ="] * 9, [short] + [long] * 8
    for prompt, own in zip(prompts, kinds, strict=True):
        engine.add_request(prompt, own)
    run(engine)
    first = launched.index(BURST)
    assert first > 9
    assert set(launched[:first]) == {1}
    launched.clear()
    engine.generate(prompts, kinds)
    assert launched.index(BURST) < 9


def test_new_request_starts_right_after_the_current_multi_step_decode(
    engine: Engine, launched: list[int]
):
    engine.add_request(PROMPT, GREEDY_30)
    take_steps(engine, 4)
    assert launched[-1] == BURST
    engine.add_request("2 + 3 =", GREEDY_30)
    engine.step()
    assert launched[-1] == 1  # one step for the new prompt and the first request
    engine.step()
    assert launched[-1] == BURST  # both requests
    engine.abort_all()


def test_abort_during_a_multi_step_decode_frees_all_blocks(engine: Engine, launched: list[int]):
    for i in range(3):
        engine.add_request(f"Count from {i} to 20", GREEDY_30, request_id=str(i))
    take_steps(engine, 4)
    assert launched[-1] == BURST
    engine.abort("1")
    engine.check_integrity()
    lengths = {name: len(it.outputs[0].token_ids) for name, it in run(engine).items()}
    assert lengths == {"0": 30, "2": 30}


@pytest.mark.parametrize(
    ("owner", "name"), [(ModelRunner, "launch_burst"), (StepHandle, "read")], ids=["launch", "read"]
)
def test_failed_multi_step_decode_fails_the_engine(
    new_engine: Engines, monkeypatch: pytest.MonkeyPatch, owner: type, name: str
):
    engine, target = new_engine(num_scheduler_steps=BURST), getattr(owner, name)

    def fails(*given: Any) -> Any:
        if name == "launch_burst" or len(steps.launches[-1].plans) == BURST:
            raise RuntimeError("injected")
        return target(*given)

    monkeypatch.setattr(owner, name, fails)
    with engine.record_steps() as steps, pytest.raises(RuntimeError, match="injected"):
        engine.generate([PROMPT] * 2, GREEDY_30)
    with pytest.raises(RuntimeError, match="failed in an earlier step"):
        engine.step()
    engine.abort_all()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
