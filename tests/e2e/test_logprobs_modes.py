"""Compare the values that each `logprobs_mode` reports with values computed in numpy from the
logits of `transformers`."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from e2e_options import LOOPS, QUESTION, SINGLE_STEP_LOOPS, Engines
from random_models import Logits, load_logits

from jpaged import CompletionOutput, Engine, Logprob, SamplingParams, StructuredOutputs
from jpaged.config import LogprobsMode
from tests.covering import covering
from tests.reference.kernels import token_scores, truncation_mask

NUM_TOP = 20
CHOICES = ["yes", "yellow", "no"]
GREEDY: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "top_k": 3, "min_p": 0.5},
    "greedy adjusted": {"temperature": 0.0, "repetition_penalty": 1.4, "logit_bias": {40: 3.0}},
}
RANDOM: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.6},
    "truncated": {"temperature": 1.7, "top_k": 30, "top_p": 0.9, "min_p": 0.02},
    "adjusted": {
        "top_p": 0.7,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "logit_bias": {40: 4.0, 41: -100.0},
        "min_tokens": 3,
    },
    "allowed": {"temperature": 3.0, "top_k": 2, "allowed_token_ids": [50, 51, 60, 70]},
}
GRAMMAR = {"structured_outputs": StructuredOutputs(choice=CHOICES), "temperature": 2.0, "top_k": 1}


@pytest.fixture(scope="session")
def logits(shallow_folder: Path) -> Logits:
    return load_logits(shallow_folder)


def with_mode(engines: Engines, folder: Path, mode: str, **options: Any) -> Engine:
    return engines(folder, dtype="float32", logprobs_mode=mode, **options)


def params(index: int, fields: dict[str, Any]) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 8, "seed": index, "logprobs": NUM_TOP, **fields})


def adjust(row: np.ndarray, sampling: SamplingParams, prompt: list[int], output: list[int]) -> None:
    """Apply biases, forbidden tokens and penalties to a row of logits, in place."""
    for token, bias in (sampling.logit_bias or {}).items():
        row[token] += bias
    if sampling.allowed_token_ids is not None:
        row[[i for i in range(len(row)) if i not in sampling.allowed_token_ids]] = -np.inf
    if len(output) < sampling.min_tokens:
        row[[256, 258]] = -np.inf  # the model's end-of-sequence tokens
    for token in {*prompt, *output}:
        row[token] *= (
            sampling.repetition_penalty if row[token] <= 0 else 1 / sampling.repetition_penalty
        )
    for token in set(output):
        row[token] -= sampling.presence_penalty + sampling.frequency_penalty * output.count(token)


def expected_row(
    row: np.ndarray, sampling: SamplingParams, prompt: list[int], output: list[int], mode: str
) -> tuple[np.ndarray, float]:
    """Return the row of logits for a `logprobs_mode`, and the probability mass of the tokens that
    top-k, top-p and min-p keep. The "logits" modes report this row, the "logprobs" modes its
    log-softmax.

    Args:
        row: Logits of the model, after the mask of a grammar.
        sampling: Sampling parameters of the request.
        prompt: Tokens of the prompt.
        output: Tokens of the answer so far.
        mode: The `logprobs_mode`.
    """
    processed, mass = row.astype(np.float64), 1.0
    adjust(processed, sampling, prompt, output)
    if sampling.temperature:
        limits = {"min_p": sampling.min_p, "top_k": sampling.top_k, "top_p": sampling.top_p}
        columns: dict[str, Any] = {name: [value] for name, value in limits.items()}
        (kept,) = truncation_mask(processed[None], temperature=[sampling.temperature], **columns)
        processed /= sampling.temperature
        weights = np.exp(processed - processed.max())
        mass = float(weights[kept].sum() / weights.sum())
        processed[~kept] = -np.inf
    return (processed if mode.startswith("processed") else row.astype(np.float64)), mass


def check_entry(
    entry: dict[int, Logprob], token: int, row: np.ndarray, mass: float, mode: str
) -> None:
    """Check the values of one output token against the logits that the mode reports."""
    reports_logits = [mode.endswith("logits")]
    ((value, rank, top, values),) = token_scores(
        row[None], [token], NUM_TOP, reports_logits=reports_logits
    )
    assert next(iter(entry)) == token
    assert entry[token].logprob == pytest.approx(value, abs=1e-3)
    assert entry[token].rank == rank
    assert entry[token].kept_mass == pytest.approx(mass, abs=1e-5)
    expected = {int(i): it for i, it in zip(top, values, strict=True) if it != -np.inf}
    others = {i: it for i, it in entry.items() if i in expected}
    assert {i: it.logprob for i, it in others.items()} == pytest.approx(expected, abs=1e-3)
    assert {*entry} == {token, *expected}
    assert all(it.kept_mass is None for i, it in entry.items() if i != token)


def check_answer(
    answer: CompletionOutput, own: SamplingParams, prompt: list[int], logits: Logits, mode: str
) -> None:
    output = list(answer.token_ids)
    rows = logits([*prompt, *output])[len(prompt) - 1 :]
    assert answer.logprobs is not None
    for i, (token, entry) in enumerate(zip(output, answer.logprobs, strict=True)):
        row, mass = expected_row(rows[i], own, prompt, output[:i], mode)
        check_entry(entry, token, row, mass, mode)
    total = sum(entry[token].logprob for token, entry in zip(output, answer.logprobs, strict=True))
    assert answer.cumulative_logprob == pytest.approx(total, rel=1e-5)


@pytest.mark.parametrize(
    ("mode", "loop"),
    covering(
        [mode.value for mode in LogprobsMode],
        LOOPS,
        strength=0,
        keep=lambda mode, loop: (
            (mode, loop) in {("processed_logprobs", "bursts"), ("raw_logits", "overlapped")}
        ),
    ),
)
def test_reported_values_equal_numpy(
    engines: Engines, shallow_folder: Path, logits: Logits, mode: str, loop: str
):
    """Greedy requests also run in a batch of their own, because such a batch uses other compiled
    programs than a batch with random sampling."""
    engine = with_mode(engines, shallow_folder, mode, **LOOPS[loop])
    assert engine.tokenizer is not None
    prompt = engine.tokenizer.encode(QUESTION)
    for kinds in (GREEDY, {**GREEDY, **RANDOM}):
        given = [params(i, fields) for i, fields in enumerate(kinds.values())]
        outputs = engine.generate([prompt] * len(given), given)
        for own, output in zip(given, outputs, strict=True):
            check_answer(output.outputs[0], own, prompt, logits, mode)


def first_entries(answer: CompletionOutput) -> list[Logprob]:
    """Return the `Logprob` of each sampled token."""
    return [next(iter(entry.values())) for entry in answer.logprobs or ()]


@pytest.mark.parametrize(
    ("mode", "loop"),
    covering(
        [mode.value for mode in LogprobsMode],
        SINGLE_STEP_LOOPS,
        strength=0,
        keep=lambda mode, loop: (mode, loop) == ("processed_logprobs", "overlapped"),
    ),
)
def test_grammar_mask_applies_before_every_logprobs_mode(
    engines: Engines, shallow_folder: Path, logits: Logits, mode: str, loop: str
):
    engine = with_mode(engines, shallow_folder, mode, **LOOPS[loop])
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    prompt = tokenizer.encode(QUESTION)
    for own in (params(0, GRAMMAR), params(0, GRAMMAR | {"temperature": 0.0, "top_k": 0})):
        (answer,) = engine.generate(prompt, own)[0].outputs
        row, text = logits(prompt)[-1].copy(), answer.text
        words = [tokenizer.decode([i], skip_special_tokens=False) for i in range(len(row))]
        row[[not w or not any(it.startswith(w) for it in CHOICES) for w in words]] = -np.inf
        assert 1 < np.isfinite(row).sum() < 6
        assert text in CHOICES
        reported, mass = expected_row(row, own, prompt, [], mode)
        assert answer.logprobs is not None
        check_entry(answer.logprobs[0], answer.token_ids[0], reported, mass, mode)
        assert (mass < 1) == bool(own.temperature)


def test_processed_logprob_is_the_log_softmax_minus_the_log_of_the_kept_mass(
    engines: Engines, shallow_folder: Path, logits: Logits
):
    """A training program can compute the reported log-probability from its own logits and
    `kept_mass`, the probability mass of the tokens that truncation keeps."""
    engine = with_mode(engines, shallow_folder, "processed_logprobs", num_scheduler_steps=3)
    assert engine.tokenizer is not None
    prompt, own = engine.tokenizer.encode(QUESTION), params(5, RANDOM["truncated"])
    (answer,) = engine.generate(prompt, own)[0].outputs
    rows = logits([*prompt, *answer.token_ids]).astype(np.float64)[len(prompt) - 1 :]
    entries = first_entries(answer)
    for token, row, entry in zip(answer.token_ids, rows, entries, strict=False):
        scaled = row / own.temperature
        log_softmax = scaled[token] - scaled.max() - np.log(np.exp(scaled - scaled.max()).sum())
        assert entry.kept_mass is not None
        assert entry.logprob == pytest.approx(log_softmax - math.log(entry.kept_mass), abs=1e-3)
    assert len({entry.kept_mass for entry in entries}) > 1


def test_prompt_logprobs_are_raw_even_if_logprobs_mode_returns_logits(
    engines: Engines, shallow_folder: Path, logits: Logits
):
    engine = with_mode(engines, shallow_folder, "raw_logits")
    assert engine.tokenizer is not None
    prompt = engine.tokenizer.encode(QUESTION)
    (output,) = engine.generate(prompt, SamplingParams(max_tokens=1, prompt_logprobs=0))
    expected = token_scores(logits(prompt)[:-1], prompt[1:], 1)
    assert output.prompt_logprobs is not None
    for token, entry, (value, rank, *_) in zip(
        prompt[1:], output.prompt_logprobs[1:], expected, strict=True
    ):
        assert entry is not None
        assert entry[token].logprob == pytest.approx(value, abs=1e-3)
        assert (entry[token].rank, entry[token].kept_mass) == (rank, None)


@pytest.mark.parametrize(
    "mode",
    [
        "raw_logits",
        *(
            pytest.param(mode, marks=pytest.mark.full)
            for mode in ("processed_logprobs", "processed_logits")
        ),
    ],
)
def test_every_logprobs_mode_ranks_beams_and_samples_by_raw_logprobs(
    engines: Engines, shallow_folder: Path, mode: str
):
    engine, plain = (with_mode(engines, shallow_folder, it) for it in (mode, "raw_logprobs"))
    for temperature in (0.0, 1.0):
        search = SamplingParams(temperature=temperature, beam_width=3, n=3, max_tokens=6)
        found, want = (it.generate(QUESTION, search)[0].outputs for it in (engine, plain))
        assert [it.token_ids for it in found] == [it.token_ids for it in want]
        assert [it.score for it in found] == pytest.approx([it.score for it in want], abs=1e-4)
    best = SamplingParams(n=2, best_of=4, seed=1, max_tokens=6)
    found, want = (it.generate(QUESTION, best)[0].outputs for it in (engine, plain))
    assert [it.token_ids for it in found] == [it.token_ids for it in want]
    totals = [it.cumulative_logprob for it in want]
    assert [it.cumulative_logprob for it in found] == pytest.approx(totals, abs=1e-4)
