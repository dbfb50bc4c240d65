"""Compare the logits of whole models with `transformers`, for prefill, decode and mixed steps."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from harness import MAX_TOKENS, NUM_TOKENS, Harness, PagedSequence
from hf_models import CASES, IN_FULL_TIER, ours, reference

TOLERANCE = 1e-4
LENGTHS = (31, 9, 24, 1)


def random_tokens(length: int, seed: int) -> list[int]:
    return np.random.RandomState(seed).randint(2, 97, length).tolist()


def reference_logits(case: str, tokens: list[int]) -> np.ndarray:
    with torch.no_grad():
        return reference(case)(torch.tensor([tokens])).logits[0].numpy()


def assert_close(case: str, tokens: list[int], got: np.ndarray) -> None:
    error = np.abs(got - reference_logits(case, tokens)).max()
    assert error <= TOLERANCE, f"{case}: logits differ by {error:.1e}"


def random_work(sequences: list[PagedSequence], random: np.random.RandomState):
    """Choose random work for one step, and return a list of pairs (sequence, number of tokens).

    The step computes that number of the sequence's next tokens. The number is often one.
    """
    budget, work = NUM_TOKENS, []
    for sequence in random.permutation(np.array(sequences, object)):
        most = min(sequence.remaining, budget)
        if most and (random.rand() < 0.8 or not work):
            work.append((sequence, 1 if random.rand() < 0.3 else random.randint(1, most + 1)))
            budget -= work[-1][1]
    return work


@pytest.mark.parametrize(
    "case",
    [pytest.param(it, marks=[pytest.mark.full] if it in IN_FULL_TIER else []) for it in CASES],
)
def test_logits_equal_transformers(case):
    """One test runs all checks of a model configuration, because each test must compile the two
    programs of the model."""
    check_prefill_then_decode(case)
    check_random_chunks_mixed_steps_and_recompute(case)
    check_greedy_generation_is_token_exact(case)


def check_prefill_then_decode(case):
    tokens = random_tokens(NUM_TOKENS + 4, seed=1)
    harness, sequence = Harness(ours(case)), PagedSequence(tokens)
    chunks = [harness.step([(sequence, n)])[0] for n in (NUM_TOKENS, 1, 1, 1, 1)]
    assert_close(case, tokens, np.concatenate(chunks))


def check_random_chunks_mixed_steps_and_recompute(case):
    random = np.random.RandomState(2)
    harness = Harness(ours(case), seed=2)
    sequences = [PagedSequence(random_tokens(n, seed=n)) for n in LENGTHS]
    logits: dict[int, list[np.ndarray]] = {id(sequence): [] for sequence in sequences}
    recomputes = 2
    while work := random_work(sequences, random):
        for (sequence, _), chunk in zip(work, harness.step(work), strict=True):
            logits[id(sequence)].append(chunk)
        if recomputes and random.rand() < 0.3:
            victim, recomputes = work[0][0], recomputes - 1
            harness.release(victim)
            logits[id(victim)].clear()
    for sequence in sequences:
        assert_close(case, sequence.tokens, np.concatenate(logits[id(sequence)]))


def greedy_reference(case: str, prompt: list[int], num_tokens: int) -> list[int]:
    with torch.no_grad():
        generate: Any = reference(case).generate
        output = generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=1,
        )
    return output[0, len(prompt) :].tolist()


def check_greedy_generation_is_token_exact(case):
    """Generate tokens for four prompts, computed in chunks, and recompute one sequence."""
    harness, num_tokens = Harness(ours(case), seed=3), 12
    prompts = [random_tokens(n, seed=10 + n) for n in (30, 7, 1, 12)]
    sequences = [PagedSequence(list(prompt)) for prompt in prompts]
    ends = [len(prompt) + num_tokens for prompt in prompts]
    assert max(ends) <= MAX_TOKENS
    preempted = False
    while work := [
        (sequence, min(sequence.remaining, 8))
        for sequence, end in zip(sequences, ends, strict=True)
        if len(sequence.tokens) < end
    ]:
        for (sequence, _), chunk in zip(work, harness.step(work), strict=True):
            if not sequence.remaining:
                sequence.tokens.append(int(chunk[-1].argmax()))
        if not preempted and len(sequences[1].tokens) == len(prompts[1]) + 5:
            harness.release(sequences[1])  # The following steps compute the whole sequence again.
            preempted = True
    assert preempted
    for prompt, sequence in zip(prompts, sequences, strict=True):
        got = sequence.tokens[len(prompt) :]
        assert got == greedy_reference(case, prompt, num_tokens)


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        ("gpt2", jnp.bfloat16),
        ("opt-350m", jnp.float16),
        ("llama3-biases", jnp.bfloat16),
        ("qwen3-biases", jnp.bfloat16),
    ],
)
def test_half_precision_logits_are_close_to_float32(case, dtype):
    tokens = random_tokens(NUM_TOKENS, seed=4)
    harness = Harness(ours(case, dtype), pool_dtype=dtype)
    (got,) = harness.step([(PagedSequence(tokens), NUM_TOKENS)])
    want = reference_logits(case, tokens)
    assert np.isfinite(got).all()
    assert np.abs(got - want).mean() < 0.03 * want.std()
