"""Compare the sequences and scores of beam search with `transformers`."""

import functools
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from e2e_options import ANSWER, GREEDY, QUESTION, Engines, generate_text

from jpaged import Engine, SamplingParams
from tests.covering import covering

pytest.importorskip("transformers")
torch = pytest.importorskip("torch")


EOS, VOCAB_SIZE, MAX_TOKENS = 1, 97, 14
WIDTHS = range(1, 7)
IN_DEFAULT_TIER = {("qwen3", 3), ("gpt2", 6)}
"""Pairs (model, beam width) that the default tier tests."""

LIMITS = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "max_model_len": 64,
    "skip_tokenizer_init": True,
}
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": EOS,
}
_GATED = {"intermediate_size": 48, "num_key_value_heads": 1}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": _COMMON | {"tie_word_embeddings": False},
    "llama": _COMMON | _GATED | {"tie_word_embeddings": False},
    "qwen3": _COMMON | _GATED | {"head_dim": 32, "tie_word_embeddings": False},
}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"length_penalty": 2.0},
    {"length_penalty": 0.0, "early_stopping": True},
    {"length_penalty": -1.0, "early_stopping": "never"},
    {"length_penalty": 0.7, "early_stopping": "never"},
    {"early_stopping": True},
]


@functools.cache
def reference_model(name: str) -> Any:
    """Return a random `transformers` model that often generates the end token before
    `MAX_TOKENS`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(name, **MODELS[name])
    torch.manual_seed(len(name))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 1.2 * parameter.shape[-1] ** -0.5)
        head = model.get_output_embeddings().weight
        # Make the end token likely where tokens 10 to 15 are likely.
        head[EOS] = 0.5 * head[10:16].sum(0)
    return model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    def save(name: str) -> Path:
        folder = tmp_path_factory.getbasetemp() / f"beams-{name}"
        if not folder.exists():
            reference_model(name).save_pretrained(folder)
        return folder

    return functools.cache(save)


def prompts(count: int = 4, longest: int = 40) -> list[list[int]]:
    rng = np.random.RandomState(count)
    return [rng.randint(2, VOCAB_SIZE, rng.randint(1, longest)).tolist() for _ in range(count)]


def expected(
    name: str, prompt: list[int], width: int, **options: Any
) -> tuple[list[list[int]], list[float]]:
    """Run beam search with `transformers`. Return the `width` best answers without padding, and
    their scores."""
    with torch.no_grad():
        found = reference_model(name).generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=MAX_TOKENS,
            pad_token_id=VOCAB_SIZE - 1,
            output_scores=True,
            return_dict_in_generate=True,
            **options,
        )
    answers = [row[len(prompt) :].tolist() for row in found.sequences]
    answers = [it[: it.index(EOS) + 1] if EOS in it else it for it in answers]
    scores = [] if found.get("sequences_scores") is None else found.sequences_scores.tolist()
    return answers, scores


def check_against_transformers(
    engine: Engine, name: str, given: list[list[int]], width: int, options: dict[str, Any]
) -> int:
    """Check that the engine's answers equal those of `transformers`. Return the number of answers
    shorter than `MAX_TOKENS`."""
    num_ended = 0
    found = engine.beam_search(given, beam_width=width, max_tokens=MAX_TOKENS, **options)
    for prompt, output in zip(given, found, strict=True):
        answers, scores = expected(name, prompt, width, **(options if width > 1 else {}))
        assert [list(o.token_ids) for o in output.outputs] == answers
        assert [o.index for o in output.outputs] == list(range(width))
        if width > 1:
            assert [o.score for o in output.outputs] == pytest.approx(scores, abs=1e-4, rel=2e-6)
        for answer in output.outputs:
            is_ended = answer.token_ids[-1] == EOS
            assert answer.finish_reason == ("stop" if is_ended else "length")
            assert answer.stop_reason is None
            num_ended += len(answer.token_ids) < MAX_TOKENS
    return num_ended


@pytest.mark.parametrize(
    ("name", "width"),
    [
        pytest.param(*each, marks=[] if each in IN_DEFAULT_TIER else [pytest.mark.full])
        for each in itertools.product(MODELS, WIDTHS)
    ],
)
def test_beam_search_answers_and_scores_equal_transformers(
    engines: Engines, folders: Any, name: str, width: int
):
    engine = engines(folders(name), **LIMITS)
    num_ended = sum(
        check_against_transformers(engine, name, prompts(), width, options) for options in OPTIONS
    )
    assert num_ended or width == 1


@pytest.mark.parametrize(
    ("mode", "async_scheduling"), covering(["swap", "recompute"], [True, False], strength=1)
)
def test_preempted_beam_searches_equal_transformers(
    engines: Engines, folders: Any, mode: str, async_scheduling: bool
):
    options = {**LIMITS, "num_blocks": 14, "block_size": 8, "preemption_mode": mode}
    engine = engines(folders("qwen3"), **options, async_scheduling=async_scheduling)
    before = engine.stats()
    check_against_transformers(engine, "qwen3", prompts(8, 30), 3, {})
    after = engine.stats()
    assert after.num_preemptions > before.num_preemptions
    assert (after.num_swapped_out_blocks > 0) == (mode == "swap")
    assert (after.num_swapped_in_blocks > 0) == (mode == "swap")
    assert after.num_used_host_blocks == after.num_swapped == 0


def test_beams_continue_after_end_tokens_with_ignore_eos(engines: Engines, folders: Any):
    engine = engines(folders("llama"), **LIMITS)
    (output,) = engine.beam_search(
        prompts(1), beam_width=4, max_tokens=MAX_TOKENS, ignore_eos=True, n=2
    )
    assert [len(o.token_ids) for o in output.outputs] == [MAX_TOKENS] * 2
    assert [o.finish_reason for o in output.outputs] == ["length"] * 2
    for answer in output.outputs:
        total = answer.cumulative_logprob or 0.0
        assert answer.score == pytest.approx(total / MAX_TOKENS, abs=1e-6)
        assert answer.logprobs is None


def test_stop_token_ends_a_beam_and_is_reported(engines: Engines, folders: Any):
    engine = engines(folders("llama"), **LIMITS)
    stops = list(range(30, 40))
    params = SamplingParams(
        n=3, beam_width=3, max_tokens=MAX_TOKENS, ignore_eos=True, stop_token_ids=stops
    )
    ended = []
    for output in engine.generate(prompts(), params):
        for answer in output.outputs:
            assert not set(answer.token_ids[:-1]) & set(stops)
            is_ended = answer.token_ids[-1] in stops
            assert answer.stop_reason == (answer.token_ids[-1] if is_ended else None)
            ended.append(is_ended)
    assert any(ended)


def test_beam_search_ends_at_max_model_len(engines: Engines, folders: Any):
    engine = engines(folders("gpt2"), **LIMITS)
    prompt = prompts(1)[0] + [5] * 40
    (output,) = engine.beam_search([prompt[:60]], beam_width=2, max_tokens=50, ignore_eos=True)
    assert [len(o.token_ids) for o in output.outputs] == [4, 4]


def test_beam_search_with_the_bundled_model_ranks_the_right_answer_first(engines: Engines):
    engine = engines()
    (output,) = engine.beam_search(QUESTION, beam_width=4, max_tokens=40)
    best = output.outputs[0]
    assert best.text == ANSWER
    assert (best.finish_reason, best.stop_reason) == ("stop", None)
    scores = [o.score or 0.0 for o in output.outputs]
    assert scores == sorted(scores, reverse=True)
    for answer in output.outputs:
        assert answer.score == pytest.approx(
            (answer.cumulative_logprob or 0.0) / len(answer.token_ids), rel=1e-5
        )
    (greedy,) = engine.generate(QUESTION, GREEDY)
    assert best.token_ids == greedy.outputs[0].token_ids


def test_skip_special_tokens_applies_to_beam_search_answers(engines: Engines):
    engine = engines()
    params = SamplingParams(beam_width=2, max_tokens=40, include_stop_str_in_output=True)
    clean = generate_text(engine, params)
    whole = generate_text(engine, replace(params, skip_special_tokens=False))
    assert whole.startswith(clean)
    assert len(whole) > len(clean)


def test_step_returns_a_beam_search_only_at_its_end(engines: Engines):
    engine = engines()
    engine.add_request(QUESTION, SamplingParams(beam_width=3, n=2, max_tokens=40))
    outputs = []
    while engine.has_unfinished_requests:
        outputs += engine.step()
    (output,) = outputs
    assert output.finished
    assert len(output.outputs) == 2
    times = output.metrics
    assert times is not None
    assert times.arrival_time <= (times.first_token_time or 0.0) <= (times.finished_time or 0.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beam_width": 0}, "beam_width=0"),
        ({"beam_width": "3"}, "beam_width='3'"),
        ({"beam_width": None}, "beam_width is None"),
        ({"beam_width": 2, "n": 3}, "n=3 is more than beam_width=2"),
        ({"beam_width": 2, "early_stopping": "maybe"}, "early_stopping='maybe'"),
        ({"beam_width": 2, "length_penalty": float("nan")}, "length_penalty=nan"),
    ],
    ids=str,
)
def test_error_names_the_invalid_beam_search_option(
    engines: Engines, options: dict[str, Any], message: str
):
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        engines().beam_search(QUESTION, **options)
