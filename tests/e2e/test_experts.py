"""Test that mixture-of-experts models work with every feature of the engine."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from e2e_options import (
    LOOPS,
    Engines,
    answers,
    check_small_pool_changes_no_answer,
    make_workload,
    run,
)
from random_models import Logits, continue_greedily, logits_of, random_model

from jpaged import SamplingParams
from jpaged.config import SpeculativeConfig

VOCAB_SIZE = 96
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
    "mlp_only_layers": [0],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
NGRAM = SpeculativeConfig(method="ngram", num_speculative_tokens=2, prompt_lookup_max=3)
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.9, "n": 2},
    {"beam_width": 3, "n": 3},
    {"temperature": 0.0, "logprobs": 2, "repetition_penalty": 1.2},
]
OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "max_model_len": 128,
    "max_num_batched_tokens": 32,
    "block_size": 8,
    "dtype": "float32",
}

TIGHT: dict[str, Any] = {"num_blocks": 21, "preemption_mode": "swap", "swap_space": 0.001}
TIGHT |= {"speculative_config": NGRAM}
"""Options of an engine with a small KV cache, which swaps blocks and verifies drafts."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Logits]:
    """Return a random checkpoint with one dense and one mixture-of-experts layer, and a function
    that computes its logits."""
    model, folder = random_model("qwen3_moe", seed=5, **SIZES), tmp_path_factory.mktemp("moe")
    model.save_pretrained(folder)
    return folder, logits_of(model)


@pytest.mark.parametrize(
    ("loop", "options"),
    [
        ("overlapped", TIGHT),
        pytest.param("bursts", {}, marks=pytest.mark.full),
        pytest.param("synchronous", {}, marks=pytest.mark.full),
    ],
)
def test_greedy_tokens_equal_transformers(
    engines: Engines, saved: tuple[Path, Logits], loop: str, options: dict[str, Any]
):
    folder, logits = saved
    random = np.random.default_rng(0)
    prompts = [random.integers(2, VOCAB_SIZE, n).tolist() for n in (1, 40, 7)]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    engine = engines(folder, **OPTIONS, **LOOPS[loop], **options)
    want = [continue_greedily(logits, prompt, 12) for prompt in prompts]
    for _ in range(2):  # the second run finds prefixes in the cache
        outputs = engine.generate(prompts, params)
        assert [list(output.outputs[0].token_ids) for output in outputs] == want


@pytest.mark.full
def test_small_kv_cache_changes_no_answer(engines: Engines, saved: tuple[Path, Logits]):
    prompts, params = make_workload(KINDS, 6, VOCAB_SIZE, max_tokens=16, ignore_eos=True)
    roomy = engines(saved[0], num_blocks=400, enable_prefix_caching=False, **OPTIONS)
    tight = engines(saved[0], **TIGHT, **OPTIONS)
    check_small_pool_changes_no_answer(roomy, tight, prompts, params)
    assert tight.stats().num_swapped_in_blocks > 0


def test_engine_with_random_weights_generates_tokens_and_reports_the_size_of_the_weights(
    engines: Engines, saved: tuple[Path, Logits]
):
    engine = engines(saved[0], load_format="dummy", **OPTIONS)
    (output,) = engine.generate([[5, 6, 7]], SamplingParams(max_tokens=4, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 4
    width, heads, kv = 64, 64, 32
    attention = width * (heads + 2 * kv) + heads * width + 2 * 16
    experts = 8 * width + 8 * 3 * width * 24
    dense = 3 * width * 48
    norms = 5 * width
    tables = 2 * VOCAB_SIZE * width
    num_weights = 2 * attention + experts + dense + norms + tables
    assert engine.memory_account.weights == 4 * num_weights


def test_nan_activations_of_one_request_end_only_that_request(
    engines: Engines, saved: tuple[Path, Logits], tmp_path: Path
):
    """The embedding of token 95 is NaN, so the router logits of rows with this token are NaN
    too."""
    model = random_model("qwen3_moe", seed=5, **SIZES)
    model.model.embed_tokens.weight.data[95] = float("nan")
    model.save_pretrained(tmp_path)
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    engine, healthy = engines(tmp_path, **OPTIONS), [[3, 4, 5], [9]]
    alone = [answers(engine.generate([prompt], params))[0] for prompt in healthy]
    for index, prompt in enumerate([healthy[0], [7, 95, 8], healthy[1]]):
        engine.add_request(prompt, params, request_id=str(index))
    last = run(engine)
    assert last["1"].outputs[0].finish_reason == "error"
    assert answers([last["0"], last["2"]]) == alone
