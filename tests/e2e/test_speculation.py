"""Test that speculative decoding changes no token, for all request parameters, and despite aborts
and preemption."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from e2e_options import LOOPS, Engines, answers
from test_under_pressure import params

from jpaged import Engine, SamplingParams, StructuredOutputs
from jpaged.config import LogprobsMode, SpeculativeConfig
from jpaged.core.plan import StepPlan
from jpaged.core.speculation import Speculation
from tests.covering import covering
from tools.tiny.world import sample_examples

NGRAM = SpeculativeConfig(method="ngram", num_speculative_tokens=3, prompt_lookup_max=4)
PROMPTS = [e.prompt for e in sample_examples(11, 200) if len(e.prompt + e.completion) < 60][:16]
REPEATING = [
    "Copy: apple, pear, plum, apple, pear, plum, apple, pear,",
    "1 2 3 4 1 2 3 4 1 2 3 4 1 2",
    "the cat sat on the mat. the cat sat on the mat. the cat",
]


@pytest.fixture(autouse=True)
def _always_verify(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the scheduler verify the maximum number of drafts in every step, regardless of the
    costs."""
    choose = Speculation.choose_num_drafts

    def choose_always(self: Speculation, num_rows: int) -> int:
        self._costs, self._num_read_steps = ((10**6, 0.0),), 0
        return choose(self, num_rows)

    monkeypatch.setattr(Speculation, "choose_num_drafts", choose_always)


def check_same(speculative: Engine, plain: Engine, prompts: list[Any], kinds: list) -> None:
    want = answers(plain.generate(prompts, kinds))
    accepted = speculative.stats().num_accepted_tokens
    assert answers(speculative.generate(prompts, kinds)) == want
    assert speculative.stats().num_accepted_tokens > accepted


FEATURES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0},
    "truncated": {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "penalties": {"temperature": 0.5, "repetition_penalty": 1.1, "frequency_penalty": 0.1},
    "bias": {"temperature": 0.0, "logit_bias": {5: 2.0}, "min_tokens": 8},
    "samples": {"temperature": 0.9, "n": 3},
    "best": {"temperature": 0.9, "n": 1, "best_of": 2},
    "stop": {"temperature": 0.0, "stop": ["e", "1"]},
    "stop included": {"temperature": 1.0, "stop": ["a"], "include_stop_str_in_output": True},
    "long": {"temperature": 0.0, "max_tokens": 150, "ignore_eos": True},
}


def is_in_default_tier(feature: str, loop: str, num_drafts: int) -> bool:
    """Return whether the default tier runs this test.

    The default tier tests the feature "greedy" with one engine, and all other features with a
    second engine, so that few programs are compiled.
    """
    engine = ("synchronous", 7) if feature == "greedy" else ("overlapped", 3)
    return (loop, num_drafts) == engine


@pytest.mark.parametrize(
    ("feature", "loop", "num_drafts"),
    covering(FEATURES, LOOPS, [1, 3, 7], strength=0, keep=is_in_default_tier),
)
def test_speculative_decoding_changes_no_token(
    engines: Engines, shallow_folder: Path, feature: str, loop: str, num_drafts: int
):
    options = {"speculative_config": replace(NGRAM, num_speculative_tokens=num_drafts)}
    speculative = engines(shallow_folder, **options, **LOOPS[loop])
    plain = engines(shallow_folder)
    given = {"max_tokens": 50, **FEATURES[feature]}
    kinds = [SamplingParams(seed=i, **given) for i in range(len(REPEATING))]
    check_same(speculative, plain, REPEATING, kinds)
    check_same(speculative, plain, PROMPTS, [SamplingParams(seed=1, **given)] * len(PROMPTS))


@pytest.mark.parametrize(
    "mode",
    [
        "processed_logprobs",
        *(
            pytest.param(it.value, marks=pytest.mark.full)
            for it in LogprobsMode
            if it is not LogprobsMode.PROCESSED_LOGPROBS
        ),
    ],
)
def test_logprobs_belong_to_the_accepted_tokens(engines: Engines, shallow_folder: Path, mode: str):
    """With speculation, scores may be rounded differently, because a step computes more rows."""
    speculative = engines(shallow_folder, speculative_config=NGRAM, logprobs_mode=mode)
    plain = engines(shallow_folder, logprobs_mode=mode)
    given = {"max_tokens": 40, "logprobs": 2, "seed": 3, "stop": "4 1", "ignore_eos": True}
    kinds = [SamplingParams(**given, **FEATURES[it]) for it in ("bias", "truncated", "penalties")]
    check_same(speculative, plain, REPEATING, kinds)
    found, want = (it.generate(REPEATING, kinds) for it in (speculative, plain))
    for one, other in zip(found, want, strict=True):
        scores, expected = one.outputs[0].logprobs, other.outputs[0].logprobs
        assert scores is not None
        assert expected is not None
        assert [[*row] for row in scores] == [[*row] for row in expected]
        for row, wanted in zip(scores, expected, strict=True):
            for entry, other_entry in zip(row.values(), wanted.values(), strict=True):
                assert entry.logprob == pytest.approx(other_entry.logprob, abs=1e-4)
                assert entry.kept_mass == pytest.approx(other_entry.kept_mass, abs=1e-5)
        total = one.outputs[0].cumulative_logprob
        assert total == pytest.approx(other.outputs[0].cumulative_logprob, rel=1e-4, abs=1e-3)


@pytest.mark.parametrize(
    ("mode", "loop", "block_size", "num_prompts"),
    [
        ("swap", "bursts", 4, 9),
        *(
            pytest.param(*each, 19, marks=pytest.mark.full)
            for each in [
                ("swap", "bursts", 4),
                ("auto", "overlapped", 16),
                ("swap", "overlapped", 16),
                ("recompute", "bursts", 8),
                ("recompute", "synchronous", 1),
            ]
        ),
    ],
)
def test_arrivals_and_aborts_change_no_answer_with_speculation(
    engines: Engines, shallow_folder: Path, mode: str, loop: str, block_size: int, num_prompts: int
):
    """Requests arrive and are aborted at random. They have priorities, beams, samples and common
    prefixes, and the pool is too small for all of them."""
    max_model_len = 128
    speculative = engines(
        shallow_folder,
        block_size=block_size,
        num_blocks=25 * 16 // block_size,
        max_model_len=max_model_len,
        scheduling_policy="priority",
        preemption_mode=mode,
        speculative_config=NGRAM,
        **LOOPS[loop],
    )
    plain = engines(shallow_folder, async_scheduling=False, max_model_len=max_model_len)
    prompts = [*PROMPTS, *REPEATING][-num_prompts:]
    kinds = [params(i) for i in range(len(prompts))]
    want = answers(plain.generate(prompts, kinds))
    rng, to_come, ended, aborted = random.Random(0), [*range(len(prompts))], {}, set()
    before = speculative.stats()
    while to_come or speculative.has_unfinished_requests:
        if to_come and rng.random() < 0.4:
            index = to_come.pop()
            speculative.add_request(
                prompts[index], kinds[index], request_id=str(index), priority=rng.randrange(3)
            )
        ended |= {int(o.request_id): answers([o])[0] for o in speculative.step() if o.finished}
        speculative.check_integrity()
        running = [i for i in range(len(prompts)) if i not in (*to_come, *ended, *aborted)]
        if running and rng.random() < 0.03:
            aborted.add(index := rng.choice(running))
            speculative.abort(str(index))
    after = speculative.stats()
    assert ended == {i: want[i] for i in range(len(prompts)) if i not in aborted}
    assert after.num_accepted_tokens > before.num_accepted_tokens
    assert after.num_preemptions > before.num_preemptions


def test_sequence_may_be_preempted_within_a_speculative_multi_step_decode(
    engines: Engines, shallow_folder: Path
):
    """A step preempts a sequence that earlier steps of the same multi-step decode compute."""
    options: dict[str, Any] = {"block_size": 4, "max_model_len": 120}
    tight: dict[str, Any] = {"num_blocks": 40, "preemption_mode": "recompute"}
    speculative = engines(
        shallow_folder, speculative_config=NGRAM, **LOOPS["bursts"], **options, **tight
    )
    plain = engines(shallow_folder, **options)
    kinds = [SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)] * 9
    before = speculative.stats().num_preemptions
    check_same(speculative, plain, [f"{REPEATING[1][:12]}{i}" for i in range(len(kinds))], kinds)
    assert speculative.stats().num_preemptions > before


def test_steps_with_a_grammar_have_no_drafts(engines: Engines, shallow_folder: Path):
    """If any row of a step has a grammar, no row of the step verifies drafts. Speculative decoding
    resumes when the request with the grammar has ended."""
    speculative = engines(shallow_folder, speculative_config=NGRAM)
    plain = engines(shallow_folder)
    spec = StructuredOutputs(regex="(ab)+c")
    kinds = [
        SamplingParams(temperature=0.0, max_tokens=12, structured_outputs=spec),
        SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True),
        SamplingParams(temperature=1.0, max_tokens=60, ignore_eos=True, seed=3),
    ]
    launched: list[StepPlan] = []

    def note(plans: Sequence[StepPlan]) -> None:
        launched.extend(plans)

    with speculative.record_steps(note):
        check_same(speculative, plain, REPEATING, kinds)
    constrained = {
        plan.num_drafts
        for plan in launched
        if any(not row.sequence.request.takes_drafts for row in plan.scheduled)
    }
    assert constrained == {0}


def test_prefixes_with_accepted_tokens_are_cached(engines: Engines, shallow_folder: Path):
    """In the next turn of a conversation, all full blocks of the answer come from the cache,
    including those with accepted drafts."""
    speculative = engines(shallow_folder, speculative_config=NGRAM)
    plain = engines(shallow_folder)
    kind = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    cached = []
    for engine in (speculative, plain):
        engine.reset_prefix_cache()
        first = engine.generate(REPEATING[1], kind)[0]
        turn = [*first.prompt_token_ids, *first.outputs[0].token_ids, 7, 8, 9]
        second = engine.generate({"prompt_token_ids": turn}, kind)[0]
        cached.append((second.num_cached_tokens, answers([second])))
    assert cached[0] == cached[1]
    assert cached[0][0] > 0


@pytest.mark.full
@pytest.mark.gpu2
def test_tensor_parallel_devices_accept_the_same_drafts(engines: Engines, shallow_folder: Path):
    options: dict[str, Any] = {"tensor_parallel_size": 2, "speculative_config": NGRAM}
    speculative, plain = engines(shallow_folder, **options), engines(shallow_folder)
    kinds = [SamplingParams(temperature=i, seed=i, max_tokens=40) for i in (0, 1, 0)]
    check_same(speculative, plain, REPEATING, kinds)


@pytest.mark.full
def test_repeated_context_gives_more_tokens_per_step(engines: Engines):
    """Each chat asks the same question again, so that the model repeats its answer."""
    speculative, plain = engines(speculative_config=NGRAM), engines()
    short = [e for e in sample_examples(11, 200) if 15 < len(e.completion) < 60]
    counting = [e for e in short if e.prompt.startswith(("Count", "Put"))][:4]
    assert counting
    before, kind = speculative.stats(), SamplingParams(temperature=0.0, max_tokens=80)
    for example in counting:
        question = {"role": "user", "content": example.prompt}
        answer = {"role": "assistant", "content": example.completion.strip()}
        chat = [question, answer, question]
        want = answers(plain.chat(chat, kind))
        assert answers(speculative.chat(chat, kind)) == want
    after = speculative.stats()
    num_steps = after.num_verify_steps - before.num_verify_steps
    num_tokens = after.num_generated_tokens - before.num_generated_tokens - len(counting)
    assert num_tokens / num_steps >= 1.7
    assert 0 < after.acceptance_rate <= 1
