"""Compare generated tokens and log-probabilities with `transformers`, in both engine loops and with
too few blocks for all requests."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from e2e_options import Engines
from random_models import Logits, continue_greedily, load_logits
from safetensors.numpy import load_file, save_file

from jpaged import Engine, SamplingParams
from tests.covering import covering

TIGHT = 24
"""Number of blocks that is too small for all requests of a test together."""


def prompts(count: int = 12, longest: int = 100) -> list[list[int]]:
    rng = np.random.RandomState(1)
    return [rng.randint(2, 128, rng.randint(1, longest)).tolist() for _ in range(count)]


def greedy(max_tokens: int = 20, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **more)


def tokens(engine: Engine, given: list[list[int]], params: Any) -> list[list[int]]:
    return [list(o.outputs[0].token_ids) for o in engine.generate(given, params)]


@pytest.mark.parametrize(
    ("num_blocks", "async_scheduling"), covering([TIGHT, 129], [True, False], strength=1)
)
def test_greedy_tokens_equal_transformers(
    engines: Engines,
    qwen_folder: Path,
    qwen_logits: Logits,
    num_blocks: int,
    async_scheduling: bool,
):
    engine = engines(
        qwen_folder,
        skip_tokenizer_init=True,
        num_blocks=num_blocks,
        async_scheduling=async_scheduling,
    )
    before = engine.stats().num_preemptions
    given = prompts()
    got = tokens(engine, given, greedy())
    assert got == [continue_greedily(qwen_logits, prompt, 20) for prompt in given]
    # A step has at most 64 tokens, so longer prompts were computed in chunks.
    assert max(map(len, given)) > engine.runtime_config.max_num_batched_tokens
    assert (engine.stats().num_preemptions > before) == (num_blocks == TIGHT)


def test_untied_head_in_the_checkpoint_overrides_the_config(
    engines: Engines, qwen_folder: Path, tmp_path: Path
):
    shutil.copytree(qwen_folder, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    head = tensors["model.embed_tokens.weight"][::-1].copy()
    save_file(tensors | {"lm_head.weight": head}, file, metadata={"format": "pt"})
    with pytest.warns(UserWarning, match="the head is not tied"):
        engine = engines(tmp_path, skip_tokenizer_init=True)
    tied = engines(qwen_folder, skip_tokenizer_init=True)
    assert engine.memory_account.weights - tied.memory_account.weights == head.nbytes
    given, logits = prompts(4), load_logits(tmp_path)
    assert tokens(engine, given, greedy(8)) == [continue_greedily(logits, it, 8) for it in given]


def test_seeded_tokens_do_not_depend_on_batching_or_preemption(engines: Engines, qwen_folder: Path):
    roomy = engines(qwen_folder, skip_tokenizer_init=True)
    tight = engines(qwen_folder, skip_tokenizer_init=True, num_blocks=TIGHT)
    given = prompts()
    params = [
        SamplingParams(temperature=1.3, top_p=0.9, top_k=50, seed=i, max_tokens=20, ignore_eos=True)
        for i in range(len(given))
    ]
    alone = [tokens(roomy, [prompt], own)[0] for prompt, own in zip(given, params, strict=True)]
    assert tokens(roomy, given, params) == alone
    before = tight.stats().num_preemptions
    assert tokens(tight, given, params) == alone
    assert tight.stats().num_preemptions > before
    assert len({tuple(t) for t in alone}) == len(alone)


@pytest.mark.parametrize("num_blocks", [129, TIGHT])
def test_logprobs_and_ranks_equal_the_log_softmax_of_transformers(
    engines: Engines, qwen_folder: Path, qwen_logits: Logits, num_blocks: int
):
    engine = engines(qwen_folder, skip_tokenizer_init=True, num_blocks=num_blocks)
    given = prompts(6)
    params = greedy(5, logprobs=3, prompt_logprobs=2)
    outputs: list[Any] = engine.generate(given, params)
    for prompt, output in zip(given, outputs, strict=True):
        completion = output.outputs[0]
        sequence = prompt + list(completion.token_ids)
        scores = log_softmax(qwen_logits(sequence))
        assert len(completion.logprobs) == 5
        for i, candidates in enumerate(completion.logprobs):
            check_candidates(candidates, sequence[len(prompt) + i], scores[len(prompt) - 1 + i], 3)
        chosen = [
            c[t].logprob for c, t in zip(completion.logprobs, completion.token_ids, strict=True)
        ]
        assert completion.cumulative_logprob == pytest.approx(sum(chosen))
        assert len(output.prompt_logprobs) == len(prompt)
        assert output.prompt_logprobs[0] is None
        for i in range(1, len(prompt)):
            check_candidates(output.prompt_logprobs[i], prompt[i], scores[i - 1], 2)


def check_candidates(candidates: dict, token_id: int, scores: np.ndarray, count: int) -> None:
    assert next(iter(candidates)) == token_id
    best = np.argsort(-scores)[:count].tolist()
    assert set(candidates) == {token_id, *best}
    for token, found in candidates.items():
        assert found.logprob == pytest.approx(float(scores[token]), abs=1e-3)
        assert found.rank == int((scores > scores[token] + 1e-6).sum()) + 1


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def test_penalties_and_biases_follow_their_definition(
    engines: Engines, qwen_folder: Path, qwen_logits: Logits
):
    params = greedy(
        15,
        repetition_penalty=1.3,
        presence_penalty=0.5,
        frequency_penalty=0.7,
        logit_bias={7: 3.0, 9: -3.0},
    )
    given = prompts(6, longest=40)
    want = [adjusted_greedy(qwen_logits, prompt, params) for prompt in given]
    roomy = engines(qwen_folder, skip_tokenizer_init=True)
    tight = engines(qwen_folder, skip_tokenizer_init=True, num_blocks=TIGHT)
    assert tokens(roomy, given, params) == want
    assert tokens(tight, given, params) == want


def adjusted_greedy(logits: Any, prompt: list[int], params: SamplingParams) -> list[int]:
    sequence = list(prompt)
    for _ in range(params.max_tokens or 0):
        x = logits(sequence)[-1].astype(np.float64)
        for token, bias in (params.logit_bias or {}).items():
            x[token] += bias
        counts = np.bincount(sequence[len(prompt) :], minlength=len(x))
        seen = list(set(sequence))
        p = params.repetition_penalty
        x[seen] = np.where(x[seen] > 0, x[seen] / p, x[seen] * p)
        x -= params.presence_penalty * (counts > 0) + params.frequency_penalty * counts
        sequence.append(int(x.argmax()))
    return sequence[len(prompt) :]


def test_allowed_token_ids_restrict_the_answer(engines: Engines, qwen_folder: Path):
    engine = engines(qwen_folder, skip_tokenizer_init=True)
    params = SamplingParams(temperature=2.0, max_tokens=30, allowed_token_ids=[3, 50, 90])
    free = SamplingParams(temperature=2.0, max_tokens=30, ignore_eos=True)
    bound, unbound = tokens(engine, [[4, 5], [4, 5]], [params, free])
    assert set(bound) <= {3, 50, 90}
    assert not set(unbound) <= {3, 50, 90}
    # The restriction by `allowed_token_ids` does not apply to later requests in the same batch row.
    again = [greedy(10, logprobs=0)] * 8
    assert len({tuple(t) for t in tokens(engine, [[4, 5]] * 8, again)}) == 1


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_stop_token_ends_a_sequence_after_min_tokens(
    engines: Engines, qwen_folder: Path, async_scheduling: bool
):
    engine = engines(qwen_folder, skip_tokenizer_init=True, async_scheduling=async_scheduling)
    (full,) = tokens(engine, [[4, 5]], greedy(20))
    stop = full[4]
    first = full.index(stop)
    (output,) = engine.generate([4, 5], greedy(20, stop_token_ids=[stop]))
    assert list(output.outputs[0].token_ids) == full[: first + 1]
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", stop)
    (later,) = tokens(engine, [[4, 5]], greedy(20, stop_token_ids=[stop], min_tokens=10))
    assert stop not in later[:9]
    assert len(later) >= 10


def test_unbounded_sequence_ends_at_max_model_len(engines: Engines, qwen_folder: Path):
    engine = engines(qwen_folder, skip_tokenizer_init=True)
    prompt = prompts(1, 250)[0] + [3] * 100
    params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    (output,) = engine.generate([prompt], params)
    assert len(prompt) + len(output.outputs[0].token_ids) == 256
    assert output.outputs[0].finish_reason == "length"
