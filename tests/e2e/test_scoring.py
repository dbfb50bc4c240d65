"""Compare the scores of completions with `transformers` under several engine options."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from e2e_options import QUESTION, Engines, in_full_tier, run
from random_models import Logits

from jpaged import CompletionScore, Engine, SamplingParams
from jpaged.config import SpeculativeConfig
from jpaged.engine.loop import EngineLoop
from pallas_kernels.target_scores import xla

Pairs = list[tuple[list[int], list[int]]]


def make_pairs(count: int = 6, seed: int = 3) -> Pairs:
    """Return pairs of a prompt and a completion, with random lengths. Some pairs have more tokens
    than one step can compute."""
    rng = np.random.RandomState(seed)
    return [
        (rng.randint(2, 128, rng.randint(1, 90)).tolist(), rng.randint(2, 128, size).tolist())
        for size in [1, *rng.randint(1, 80, count - 1)]
    ]


def score(engine: Engine, pairs: Pairs) -> list[CompletionScore]:
    prompts, completions = zip(*pairs, strict=True)
    return engine.score_completions(list(prompts), list(completions), use_tqdm=False)


def check_scores(scores: list[CompletionScore], pairs: Pairs, logits: Logits) -> None:
    """Check scores of token ids against the log-softmax of `transformers`."""
    for found, (prompt, completion) in zip(scores, pairs, strict=True):
        rows = np.asarray(logits(prompt + completion), np.float64)[len(prompt) - 1 : -1]
        logprobs = rows - np.log(np.exp(rows).sum(axis=1, keepdims=True))
        expected = logprobs[np.arange(len(completion)), completion]
        assert found.token_ids == completion
        np.testing.assert_allclose(found.logprobs, expected, atol=1e-3)
        assert found.is_greedy == (rows.argmax(axis=1) == completion).tolist()
        assert found.cumulative_logprob == pytest.approx(expected.sum(), abs=1e-2)


@pytest.mark.parametrize(
    "options",
    [
        {"num_blocks": 24},
        {"async_scheduling": False, "enable_prefix_caching": False},
        *in_full_tier(
            {},
            {"num_blocks": 24, "preemption_mode": "swap", "swap_space": 0.001},
            {"num_scheduler_steps": 3},
            {"tensor_parallel_size": 2},
        ),
    ],
    ids=str,
)
def test_scores_equal_the_log_softmax_of_transformers(
    engines: Engines, qwen_folder: Path, qwen_logits: Logits, options: dict[str, Any]
):
    engine = engines(qwen_folder, skip_tokenizer_init=True, **options)
    pairs = make_pairs()
    # Add greedy completions, so that `is_greedy` is true for some tokens.
    greedy = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    for output in engine.generate([prompt for prompt, _ in pairs[:2]], greedy):
        pairs.append((list(output.prompt_token_ids), list(output.outputs[0].token_ids)))
    check_scores(score(engine, pairs), pairs, qwen_logits)


def test_tokens_in_every_slice_of_the_vocabulary_are_scored(
    monkeypatch: pytest.MonkeyPatch, new_engine: Engines, qwen_folder: Path, qwen_logits: Logits
):
    """The kernel computes the vocabulary of 128 in slices of 48, so the last slice is smaller."""
    monkeypatch.setattr(xla, "SLICE_TOKENS", 48)
    engine = new_engine(qwen_folder, skip_tokenizer_init=True, max_model_len=64)
    pairs = [([7, 8, 9], [0, 47, 48, 79, 80, 95, 96, 127, 1])]
    check_scores(score(engine, pairs), pairs, qwen_logits)


def test_completions_of_one_prompt_share_the_blocks_of_the_prompt(
    engines: Engines, qwen_folder: Path, qwen_logits: Logits
):
    """The last token of the prompt is always computed, so its block does not come from the cache,
    even if the block is full."""
    engine = engines(qwen_folder, skip_tokenizer_init=True)
    for length, num_cached in ((48, 32), (49, 48)):
        engine.reset_prefix_cache()
        prompt = make_pairs()[0][0][:1] * length
        completions = [[3, 4, 5], [6] * 20, [3, 4, 5]]
        scores = engine.score_completions(prompt, completions)
        assert [it.num_cached_tokens for it in scores] == [0, num_cached, num_cached]
        check_scores(scores, [(prompt, it) for it in completions], qwen_logits)
        again = engine.score_completions(prompt, completions)
        assert [it.num_cached_tokens for it in again] == [num_cached] * 3


def test_completions_share_prompts_that_together_exceed_the_pool(
    engines: Engines, qwen_folder: Path
):
    """There are 16 prompts of 4 blocks, and the pool has only 23 blocks. If all prompts ran
    together, they would evict each other's blocks."""
    engine = engines(qwen_folder, skip_tokenizer_init=True, num_blocks=24)
    engine.reset_prefix_cache()
    prompts = [[2 + i] * 49 for i in range(16) for _ in range(2)]
    scores = engine.score_completions(prompts, [[3, 4], [5]] * 16)
    assert [it.num_cached_tokens for it in scores] == [0, 48] * 16
    assert [it.token_ids for it in scores] == [[3, 4], [5]] * 16


def test_text_completion_with_an_unknown_token_is_refused(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
):
    engine = engines()
    assert engine.tokenizer is not None
    monkeypatch.setattr(type(engine.tokenizer), "encode", lambda *_, **__: [10**6])
    with pytest.raises(ValueError, match=r"completions\[0\].* token id 1000000 at position 0"):
        engine.score_completions([[5, 6]], ["a"])
    assert not engine.has_unfinished_requests


def test_scoring_changes_no_token_of_a_running_request(engines: Engines, qwen_folder: Path):
    engine = engines(qwen_folder, skip_tokenizer_init=True)
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=40, ignore_eos=True)
    prompt, pairs = [5, 6, 7], make_pairs(4)
    alone, scores = engine.generate([prompt], params)[0], score(engine, pairs)
    engine.add_request(prompt, params, request_id="a")
    for _ in range(3):
        engine.step()
    together = score(engine, pairs)
    assert run(engine)["a"].outputs[0].token_ids == alone.outputs[0].token_ids
    for one, other in zip(scores, together, strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)


@pytest.mark.parametrize("options", [{}, *in_full_tier({"async_scheduling": False})], ids=str)
def test_scores_of_texts_equal_prompt_logprobs(engines: Engines, options: dict[str, Any]):
    """Compare `score_completions` with `prompt_logprobs` in one engine, which also has speculative
    decoding and an FP8 KV cache."""
    ngram = SpeculativeConfig(method="ngram", num_speculative_tokens=3)
    engine = engines(speculative_config=ngram, kv_cache_dtype="fp8", **options)
    texts = [" 3, 4, 5", " four"]
    scores = engine.score_completions([QUESTION] * 2, texts)
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    whole: list[Any] = engine.generate([QUESTION + it for it in texts], params)
    for found, output in zip(scores, whole, strict=True):
        entries = output.prompt_logprobs[-len(found.token_ids) :]
        assert [*output.prompt_token_ids][-len(found.token_ids) :] == found.token_ids
        best = [entry[token] for entry, token in zip(entries, found.token_ids, strict=True)]
        np.testing.assert_allclose(found.logprobs, [it.logprob for it in best], atol=0.05)
        assert sum(it.rank == 1 for it in best) == sum(found.is_greedy)


@pytest.mark.parametrize(
    ("prompts", "completions", "message"),
    [
        ([[1, 2]], [[]], r"completions\[0\].* empty"),
        ([[1, 2]], [], "completions is empty"),
        ([[1, 2], [3]], [[4]], "completions has 1 entry for 2 prompts"),
        ([[1, 2]], [[4], [5]], "completions has 2 entries for 1 prompt"),
        ([[1, 2]], [[4, 10**6]], r"completions\[0\].* token id 1000000 at position 1"),
        ([[1, 2]], [[4, -1]], r"completions\[0\].* token id -1"),
        ([[1, 2]], [{"prompt": "a"}], r"completions\[0\] must be a string or a list"),
        ([[1, 2], [3] * 200], [[4], [5] * 56], "max_model_len"),
        ([[]], [[4]], r"prompts\[0\].* empty"),
        ("a", "", "completions is empty"),
    ],
)
def test_invalid_prompt_or_completion_is_refused_before_any_request_starts(
    engines: Engines, prompts: Any, completions: Any, message: str
):
    engine = engines()
    before = engine.stats()
    with pytest.raises((TypeError, ValueError), match=message):
        engine.score_completions(prompts, completions)
    after = engine.stats()
    assert (after.num_steps, after.num_prompt_tokens) == (
        before.num_steps,
        before.num_prompt_tokens,
    )
    assert not engine.has_unfinished_requests


def test_ctrl_c_aborts_all_scored_completions(engines: Engines, monkeypatch: pytest.MonkeyPatch):
    engine, steps, advance = engines(), [], EngineLoop.advance

    def interrupted(self: EngineLoop, goal: Any) -> Any:
        steps.append(goal)
        if len(steps) == 3:
            raise KeyboardInterrupt
        return advance(self, goal)

    with monkeypatch.context() as patch:
        patch.setattr(EngineLoop, "advance", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.score_completions([[5] * 150] * 3, [[6] * 90] * 3)
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    while engine.has_work:  # read the step in flight
        engine.step()
    assert engine.stats().num_free_blocks == stats.num_blocks
