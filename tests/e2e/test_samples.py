"""Test requests with several samples: equality with single requests, and shared blocks."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from e2e_options import SINGLE_STEP_LOOPS, Engines

from jpaged import Engine, SamplingParams
from jpaged.core.plan import StepPlan
from jpaged.outputs import CompletionOutput, RequestOutput
from tests.covering import covering

PROMPT = "Count from 3 to 7"
# 100 tokens fill six blocks of 16 tokens. A seventh block holds the last 4 tokens.
STORY = list(range(20, 120))
# At a low temperature, all samples would be equal, because one token is far more likely than the
# others at each position.
WARM = SamplingParams(temperature=3.0, max_tokens=24, seed=7)


@pytest.fixture(params=[*SINGLE_STEP_LOOPS])
def engine(engines: Engines, shallow_folder: Path, request: pytest.FixtureRequest) -> Engine:
    return engines(shallow_folder, **SINGLE_STEP_LOOPS[request.param])


def alone(engine: Engine, prompt: object, params: SamplingParams) -> list[CompletionOutput]:
    """Return the outputs of separate requests: one request for each sample that `params` asks for.

    The seed of each request is `params.seed` plus the index of the sample.
    """
    seeds = range(params.seed or 0, (params.seed or 0) + params.num_samples)
    each = [replace(params, n=1, best_of=None, seed=seed % 2**64) for seed in seeds]
    return [engine.generate(prompt, own)[0].outputs[0] for own in each]


def check_same(got: list[CompletionOutput], want: list[CompletionOutput]) -> None:
    for mine, other in zip(got, want, strict=True):
        assert mine.token_ids == other.token_ids
        assert mine.text == other.text
        assert (mine.finish_reason, mine.stop_reason) == (other.finish_reason, other.stop_reason)
        if mine.cumulative_logprob is not None and other.cumulative_logprob is not None:
            expected = pytest.approx(other.cumulative_logprob, abs=1e-4, rel=1e-5)
            assert mine.cumulative_logprob == expected
        if mine.logprobs is not None and other.logprobs is not None:
            check_same_logprobs(mine, other)


def check_same_logprobs(got: CompletionOutput, want: CompletionOutput) -> None:
    for mine, other in zip(got.logprobs or (), want.logprobs or (), strict=True):
        assert [*mine] == [*other]
        assert [it.logprob for it in mine.values()] == pytest.approx(
            [it.logprob for it in other.values()], abs=1e-4, rel=1e-5
        )


def outputs_of(engine: Engine, prompt: object, params: SamplingParams) -> list[CompletionOutput]:
    (output,) = engine.generate(prompt, params)
    assert output.finished
    return output.outputs


KINDS = {
    "plain": WARM,
    "logprobs": replace(WARM, logprobs=2, prompt_logprobs=1),
    "penalties": replace(
        WARM, logprobs=0, presence_penalty=1.0, repetition_penalty=1.3, min_tokens=5
    ),
    "truncated": replace(WARM, top_p=0.95, top_k=20, temperature=5.0),
    "greatest seed": replace(WARM, seed=2**64 - 2),
}


PROMPTS = [
    pytest.param(PROMPT, id="short"),
    pytest.param([5], id="one token"),
    pytest.param(STORY, id="chunked"),
]


@pytest.mark.parametrize(
    ("engine", "prompt", "kind"),
    covering(SINGLE_STEP_LOOPS, PROMPTS, KINDS, strength=1),
    indirect=["engine"],
)
def test_sample_equals_a_single_request_with_its_seed(engine: Engine, prompt: object, kind: str):
    params = replace(KINDS[kind], n=4)
    got = outputs_of(engine, prompt, params)
    assert [o.index for o in got] == [0, 1, 2, 3]
    check_same(got, alone(engine, prompt, params))
    assert len({tuple(o.token_ids) for o in got}) > 1
    assert {o.cumulative_logprob is None for o in got} == {params.logprobs is None}


def test_unseeded_samples_differ(engine: Engine):
    got = outputs_of(engine, STORY, SamplingParams(n=4, temperature=5.0, ignore_eos=True))
    assert len({tuple(o.token_ids) for o in got}) == 4


def test_best_of_returns_the_highest_cumulative_logprobs(engine: Engine):
    params = replace(WARM, n=2, best_of=6, logprobs=1)
    samples = alone(engine, PROMPT, params)
    ranked = sorted(samples, key=lambda o: -(o.cumulative_logprob or 0.0))
    got = outputs_of(engine, PROMPT, params)
    assert [o.index for o in got] == [0, 1]
    check_same(got, ranked[:2])
    silent = outputs_of(engine, PROMPT, replace(params, logprobs=None))
    assert [o.logprobs for o in silent] == [None, None]
    check_same(silent, ranked[:2])
    everyone = outputs_of(engine, PROMPT, replace(params, n=6))
    check_same(everyone, samples)  # the samples are not ranked, because all are returned


def test_samples_end_independently(engine: Engine):
    params = replace(WARM, n=6, max_tokens=64)
    got = outputs_of(engine, PROMPT, params)
    assert len({len(o.token_ids) for o in got}) > 1
    check_same(got, alone(engine, PROMPT, params))


def test_stop_string_ends_only_the_sample_that_contains_it(engine: Engine):
    params = replace(WARM, n=4, ignore_eos=True, temperature=5.0)
    free = outputs_of(engine, PROMPT, params)
    stop = next(t for t in free[2].text if all(t not in free[i].text for i in (0, 1, 3)))
    got = outputs_of(engine, PROMPT, replace(params, stop=stop))
    assert (got[2].finish_reason, got[2].stop_reason) == ("stop", stop)
    assert got[2].text == free[2].text[: free[2].text.index(stop)]
    check_same([got[i] for i in (0, 1, 3)], [free[i] for i in (0, 1, 3)])
    check_same(got, alone(engine, PROMPT, replace(params, stop=stop)))


@pytest.mark.parametrize("best_of", [None, 4])
def test_streamed_deltas_join_to_the_samples(engine: Engine, best_of: int | None):
    params = replace(WARM, n=4, best_of=best_of, max_tokens=64, logprobs=1)
    deltas = list(engine.stream(PROMPT, params))
    order = [d.index for d in deltas]
    assert order != sorted(order)  # deltas of the samples are interleaved
    samples = outputs_of(engine, PROMPT, params)
    check_same(samples, outputs_of(engine, PROMPT, replace(params, best_of=None)))
    for i, sample in enumerate(samples):
        own = [d for d in deltas if d.index == i]
        assert "".join(d.text for d in own) == sample.text
        assert [t for d in own for t in d.token_ids] == list(sample.token_ids)
        assert sum(len(d.logprobs or ()) for d in own) == len(sample.token_ids)
        assert [d.finished for d in own] == [False] * (len(own) - 1) + [True]
        assert own[-1].finish_reason == sample.finish_reason
    assert not engine.has_unfinished_requests


def test_step_returns_all_samples_or_the_best_samples_so_far(engine: Engine):
    everyone = engine.add_request(PROMPT, replace(WARM, n=3))
    best = engine.add_request(PROMPT, replace(WARM, n=2, best_of=3))
    seen: dict[str, list[RequestOutput]] = {everyone: [], best: []}
    while engine.has_unfinished_requests:
        for output in engine.step():
            seen[output.request_id].append(output)
    assert {len(o.outputs) for o in seen[everyone]} == {3}
    for output in seen[best]:
        assert [o.index for o in output.outputs] == [0, 1]
        first, second = (o.cumulative_logprob or 0.0 for o in output.outputs)
        assert first >= second
    assert [o.finished for o in seen[best]] == [False] * (len(seen[best]) - 1) + [True]
    check_same(seen[everyone][-1].outputs, alone(engine, PROMPT, replace(WARM, n=3)))


MIXED = [
    SamplingParams(temperature=0.0, max_tokens=20),
    replace(WARM, seed=3),
    replace(WARM, n=3, seed=11, logprobs=1),
    SamplingParams(beam_width=3, n=3, max_tokens=20),
    SamplingParams(temperature=0.0, max_tokens=20, logprobs=2, prompt_logprobs=1),
    replace(WARM, n=2, best_of=4, frequency_penalty=0.5, logit_bias={40: 2.0}),
    SamplingParams(beam_width=2, n=1, max_tokens=9, length_penalty=0.0, early_stopping=True),
    replace(WARM, allowed_token_ids=[40, 50, 60], n=2, seed=5),
]


@pytest.mark.parametrize("num_blocks", [129, 24], ids=["roomy", "tight"])
def test_mixed_batch_gives_the_answers_of_single_requests(
    engines: Engines, shallow_folder: Path, num_blocks: int
):
    engine = engines(shallow_folder, num_blocks=num_blocks)
    prompts = [PROMPT, STORY, PROMPT, "Reverse stone", STORY[:50], PROMPT, STORY, [7]]
    together = engine.generate(prompts, MIXED)
    for prompt, params, output in zip(prompts, MIXED, together, strict=True):
        check_same(output.outputs, outputs_of(engine, prompt, params))


@pytest.mark.full
@pytest.mark.parametrize("kind", ["penalties", "truncated"])
def test_padding_rows_of_the_logits_change_no_answer(
    engines: Engines, shallow_folder: Path, kind: str
):
    """The logits of a step of 33 to 48 sequences are padded to 64 rows."""
    engine = engines(shallow_folder, max_num_seqs=64, num_blocks=300)
    own = [replace(KINDS[kind], seed=i, ignore_eos=True, max_tokens=30) for i in range(40)]
    with engine.record_steps() as steps:
        together = engine.generate([PROMPT] * 40, own)
    sizes = {(it.batch_size("decode"), it.batch_size("sample")) for it in steps.launches}
    assert (48, 64) in sizes
    for params, output in zip(own, together, strict=True):
        check_same(output.outputs, outputs_of(engines(shallow_folder), PROMPT, params))


def test_samples_compute_their_prompt_once_and_share_its_blocks(engines: Engines):
    engine = engines(enable_prefix_caching=False)
    computed, used = list[int](), list[int]()

    def count(plans: Sequence[StepPlan]) -> None:
        for item in [item for plan in plans for item in plan.scheduled]:
            end = min(item.start + item.num_scheduled_tokens, len(STORY))
            computed.append(max(end - item.start, 0))
        used.append(engine.stats().num_used_blocks)

    before = engine.stats()
    with engine.record_steps(count):
        engine.generate(STORY, SamplingParams(n=4, max_tokens=20, ignore_eos=True))
    after = engine.stats()
    # The last prompt token is computed once per sample, and all other prompt tokens only once.
    assert sum(computed) == len(STORY) - 1 + 4
    # Each sample writes tokens 97 to 119, in two blocks that no other sample uses.
    assert max(used) == 6 + 4 * 2
    # Three samples copy the partial seventh block before they write. The last sample writes to the
    # original block.
    assert after.num_block_copies - before.num_block_copies == 3
    assert after.num_prompt_tokens - before.num_prompt_tokens == len(STORY)
    assert after.num_generated_tokens - before.num_generated_tokens == 80


def test_request_with_the_lowest_priority_value_runs_first(engines: Engines, shallow_folder: Path):
    engine = engines(shallow_folder, scheduling_policy="priority", max_num_seqs=1)
    names = [engine.add_request(PROMPT, WARM, priority=p) for p in (2, -1, 0)]
    ended = []
    while engine.has_unfinished_requests:
        ended += [output.request_id for output in engine.step() if output.finished]
    assert ended == [names[1], names[2], names[0]]
    both = engine.generate([PROMPT] * 2, WARM, priority=[1, 0])
    times: list[Any] = [output.metrics for output in both]
    assert times[1].first_token_time < times[0].first_token_time
