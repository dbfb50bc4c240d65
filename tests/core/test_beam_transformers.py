"""Test that beam search gives the answers and scores of transformers."""

import functools
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
from covering import covering

from jpaged.core.beam import BeamSearch

# The tests import torch and transformers in functions, because the imports take seconds.
pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")

VOCAB = 40
END_IDS = (3, 17)
PROMPTS = [[first, 5] for first in range(6)]
LENGTH_PENALTIES = (-1.0, 0.0, 0.6, 1.0, 2.0)
EARLY_STOPPING = (False, True, "never")
NUM_ENDS = (0, 1, 2)
MAX_TOKENS = (2, 20)

Answers = Sequence[tuple[list[int], float | None]]


@pytest.fixture(autouse=True)
def torch_thread() -> Iterator[None]:
    """Run PyTorch with one thread: several threads are slow on a busy CPU."""
    import torch

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@functools.cache
def tables():
    """Return random logits for each position and previous token, [positions, V, V]. The logits
    depend on the position, because otherwise two orders of the same token pairs would have equal
    scores.
    """
    import torch

    size = (2 + max(MAX_TOKENS), VOCAB, VOCAB)
    logits = 1.5 * torch.randn(size, generator=torch.Generator().manual_seed(7))
    logits[:, :, END_IDS] += 0.8
    return logits


def logits_after(tokens):
    """Return float32 logits [B, V] after the tokens, an int tensor [B, length]."""
    return tables()[tokens.shape[1], tokens[:, -1]] + tables()[0, tokens[:, -2]]


def logprobs_after(tokens: list[list[int]]) -> np.ndarray:
    import torch

    return logits_after(torch.tensor(tokens)).log_softmax(dim=-1).numpy()


@functools.cache
def table_model() -> Any:
    """Return a transformers model that looks up its logits in `tables`, without rounding errors."""
    import torch

    transformers: Any = import_module("transformers")

    class TableModel(transformers.PreTrainedModel, transformers.GenerationMixin):
        config_class = transformers.PretrainedConfig
        main_input_name = "input_ids"

        def __init__(self, config):
            super().__init__(config)
            self.unused = torch.nn.Parameter(torch.zeros(1))
            self.post_init()

        def forward(self, input_ids, attention_mask=None, return_dict=True, **_):
            return transformers.modeling_outputs.CausalLMOutput(
                logits=logits_after(input_ids)[:, None]
            )

    config = transformers.PretrainedConfig(vocab_size=VOCAB, num_hidden_layers=0)
    return TableModel(config).eval()


def answers_of_transformers(
    prompts: list[list[int]], width: int, max_tokens: int, ends, **options
) -> list[Answers]:
    """Return the answers of `transformers` to each prompt, best first. Greedy search gives no
    scores: they are None."""
    import torch

    result = table_model().generate(
        torch.tensor(prompts),
        attention_mask=torch.ones(len(prompts), 2, dtype=torch.long),
        num_beams=width,
        num_return_sequences=width,
        do_sample=False,
        max_new_tokens=max_tokens,
        eos_token_id=list(ends) or None,
        pad_token_id=0,
        use_cache=False,
        return_dict_in_generate=True,
        output_scores=True,
        **(options if width > 1 else {}),
    )
    rows = result.sequences[:, 2:].tolist()
    if width == 1:
        return [[(until_end(row, ends), None)] for row in rows]
    lengths = (result.beam_indices >= 0).sum(dim=1).tolist()
    scores = result.sequences_scores.tolist()
    answers = [(row[:length], s) for row, length, s in zip(rows, lengths, scores, strict=True)]
    return [answers[i : i + width] for i in range(0, len(answers), width)]


def until_end(row: list[int], ends) -> list[int]:
    stop = next((i for i, token in enumerate(row) if token in ends), len(row))
    return row[: stop + 1]


def best_candidates(rows: np.ndarray, num: int) -> tuple[np.ndarray, np.ndarray]:
    order = np.argsort(-rows, axis=1, kind="stable")[:, :num]
    return order, np.take_along_axis(rows, order, axis=1)


def run_search(search: BeamSearch, prompt: list[int], max_tokens: int) -> int:
    """Run a search to its end, and return the number of steps."""
    outputs, scores = [[]], [0.0]
    for step in itertools.count(1):
        rows = logprobs_after([[*prompt, *output] for output in outputs])
        best = best_candidates(rows, search.num_candidates)
        beams = search.advance(outputs, scores, *best, max_tokens=max_tokens)
        if not beams:
            return step
        outputs = [[*outputs[beam.parent], beam.token_id] for beam in beams]
        scores = [beam.score for beam in beams]
    raise AssertionError


def our_answers(
    prompt: list[int], width: int, max_tokens: int, ends, seen: Counter, **options
) -> Answers:
    search = BeamSearch(width, end_token_ids=frozenset(ends), **options)
    steps = run_search(search, prompt, max_tokens)
    lengths = [len(answer.output_token_ids) for answer in search.hypotheses]
    seen["searches"] += 1
    seen["stopped before full length"] += steps < max_tokens
    seen["went on after an answer"] += min(lengths) < steps
    seen["ended inside"] += any(answer.is_ended for answer in search.hypotheses)
    seen["of several lengths"] += len(set(lengths)) > 1
    for answer in search.hypotheses:
        assert answer.is_ended == (answer.output_token_ids[-1] in ends)
    return [(list(answer.output_token_ids), answer.score) for answer in search.hypotheses]


def assert_same(ours: Answers, theirs: Answers) -> None:
    assert [tokens for tokens, _ in ours] == [tokens for tokens, _ in theirs]
    for (_, our_score), (_, their_score) in zip(ours, theirs, strict=True):
        if their_score is not None:
            assert our_score == pytest.approx(their_score, rel=1e-5, abs=1e-5)


def compare(prompts: list[list[int]], width: int, max_tokens: int, ends, seen: Counter, **options):
    theirs = answers_of_transformers(prompts, width, max_tokens, ends, **options)
    assert len(theirs) == len(prompts)
    for prompt, expected in zip(prompts, theirs, strict=True):
        assert len(expected) == width
        assert_same(our_answers(prompt, width, max_tokens, ends, seen, **options), expected)


def all_options():
    """Yield all combinations of options and end tokens."""
    for penalty, stopping, num_ends in itertools.product(
        LENGTH_PENALTIES, EARLY_STOPPING, NUM_ENDS
    ):
        yield {"length_penalty": penalty, "early_stopping": stopping}, END_IDS[:num_ends]


@pytest.mark.parametrize(
    ("width", "max_tokens"),
    covering(
        [1, 2, 3, 4, 5, 6],
        MAX_TOKENS,
        strength=1,
        keep=lambda width, max_tokens: (max_tokens == 20) == (width % 2 == 1),
    ),
)
def test_beam_search_answers_and_scores_equal_those_of_transformers(width: int, max_tokens: int):
    seen = Counter()
    for options, ends in all_options():
        compare(PROMPTS, width, max_tokens, ends, seen, **options)
    assert seen["searches"] == 45 * len(PROMPTS)
    # A third of the searches have no end token, so they cannot end before the maximum length.
    assert seen["ended inside"] > seen["searches"] / 2
    if width > 1:
        assert seen["went on after an answer"] > seen["searches"] / 3
        assert seen["of several lengths"] > seen["searches"] / 3
    if max_tokens > 2:
        assert seen["searches"] / 3 < seen["stopped before full length"] < seen["searches"]


@pytest.mark.parametrize("width", [2, 5])
def test_beam_search_of_single_prompts_gives_the_same_answers_as_transformers(width: int):
    seen = Counter()
    for number, (options, ends) in enumerate(all_options()):
        compare([[number % VOCAB, 7]], width, 9, ends, seen, **options)
    assert seen["went on after an answer"] > seen["searches"] / 3


def test_early_stopping_rules_give_different_answers():
    def answers(stopping: bool | str) -> list[Answers]:
        options = {"length_penalty": 2.0, "early_stopping": stopping}
        return [our_answers(p, 3, 20, END_IDS, Counter(), **options) for p in PROMPTS]

    assert answers(True) != answers(False) != answers("never") != answers(True)
