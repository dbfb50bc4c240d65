"""Test that with `batch_invariant`, the log-probabilities of a request have the same bits for any
other requests in the batch."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from e2e_options import Engines, in_full_tier
from random_models import random_model
from test_gpu import MEDIUM, WIDE, save_config

from jpaged import Engine, SamplingParams
from jpaged.config import SpeculativeConfig
from jpaged.engine.startup import check_batch_invariant
from jpaged.models.checkpoint import read_config
from jpaged.models.registry import read_model_config

SPARSE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 192,
    "norm_topk_prob": True,
}
NUM_REQUESTS = 9  # more than the smallest batch size of a decode step, which is 8
COMMON: dict[str, Any] = {
    "batch_invariant": True,
    "skip_tokenizer_init": True,
    "max_num_seqs": 16,
    "num_blocks": 129,
}
RECOMPUTE = {
    "preemption_mode": "recompute",
    "num_blocks": 17,
    "max_num_batched_tokens": 24,
    "async_scheduling": False,
    "enable_prefix_caching": False,
}
SWAP = {
    "preemption_mode": "swap",
    "num_blocks": 17,
    "swap_space": 0.001,
    "speculative_config": SpeculativeConfig(num_speculative_tokens=3),
}
COMPOSITIONS: dict[str, dict[str, Any]] = {
    "prefix hits": {},
    "recompute, chunks, synchronous": RECOMPUTE,
    "swap, speculation": SWAP,
    "bursts": {"num_scheduler_steps": 4},
    "recompute, speculation": RECOMPUTE | {"speculative_config": SWAP["speculative_config"]},
    "bfloat16": {"dtype": "bfloat16"},
}
IN_DEFAULT_TIER = ("recompute, chunks, synchronous", "swap, speculation")
IN_FULL_TIER = [name for name in COMPOSITIONS if name not in IN_DEFAULT_TIER]


def requests(vocab_size: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Return prompts and sampling parameters. Half of the prompts share a prefix; a third of the
    requests are seeded, and the others are greedy."""
    rng = np.random.default_rng(0)
    prefix = rng.integers(5, vocab_size, 40).tolist()
    prompts, params = [], []
    for index in range(NUM_REQUESTS):
        prompt = rng.integers(5, vocab_size, int(rng.integers(1, 70))).tolist()
        prompts.append(prefix + prompt if index % 2 else prompt)
        sampling = {"temperature": 0.9, "top_p": 0.9, "seed": index} if index % 3 == 0 else {}
        given = {"temperature": 0.0, "max_tokens": 12 + index, **sampling}
        params.append(SamplingParams(logprobs=2, ignore_eos=True, **given))
    return prompts, params


def bits(engine: Engine, prompts: list[list[int]], params: list[SamplingParams]) -> list:
    """Return the tokens and log-probabilities of each request. Log-probabilities are equal only if
    all bits are equal."""
    outputs = [it.outputs[0] for it in engine.generate(prompts, params)]
    return [
        (it.token_ids, [{t: e.logprob for t, e in step.items()} for step in it.logprobs or ()])
        for it in outputs
    ]


def bits_alone(engine: Engine, prompts: list[list[int]], params: list[SamplingParams]) -> list:
    pairs = zip(prompts, params, strict=True)
    return [bits(engine, [prompt], [each])[0] for prompt, each in pairs]


@pytest.fixture(autouse=True)
def optimized_programs() -> None:
    """Enable XLA's optimizations, as in normal use. The other tests run without these
    optimizations."""
    jax.config.update("jax_disable_most_optimizations", False)


def check_bits(alone: Engine, engine: Engine) -> None:
    """Run the requests as batches, in two orders, on `engine`, and one by one on `alone`. Check
    that all tokens and log-probabilities have the same bits."""
    prompts, params = requests(alone.vocab_size)
    expected = bits_alone(alone, prompts, params)
    for order in (np.arange(NUM_REQUESTS), np.random.default_rng(1).permutation(NUM_REQUESTS)):
        found = bits(engine, [prompts[i] for i in order], [params[i] for i in order])
        assert found == [expected[i] for i in order]


def check_scores(engine: Engine) -> None:
    """Generate tokens, then score them as completions. Check that the log-probabilities have the
    same bits."""
    prompts, params = requests(engine.vocab_size)
    expected = bits_alone(engine, prompts, params)
    scores = engine.score_completions(prompts, [list(tokens) for tokens, _ in expected])
    for score, (tokens, entries) in zip(scores, expected, strict=True):
        sampled = [entry[token] for token, entry in zip(tokens, entries, strict=True)]
        assert list(score.logprobs) == sampled
        assert score.is_greedy == [
            logprob == max(entry.values()) for logprob, entry in zip(sampled, entries, strict=True)
        ]


@pytest.mark.parametrize("name", [*IN_DEFAULT_TIER, *in_full_tier(*IN_FULL_TIER)])
def test_batched_requests_have_the_same_bits_as_single_requests(
    engines: Engines, shallow_folder: Path, name: str
):
    options = COMPOSITIONS[name]
    base = {"dtype": options["dtype"]} if "dtype" in options else {}
    alone = engines(shallow_folder, **COMMON, enable_prefix_caching=False, **base)
    engine = engines(shallow_folder, **COMMON | options)
    before = engine.stats()
    check_bits(alone, engine)
    stats = engine.stats()
    if "preemption_mode" in options:
        assert stats.num_preemptions > before.num_preemptions
    if options.get("enable_prefix_caching", True):
        assert stats.num_cached_tokens > before.num_cached_tokens


def test_completion_scores_have_the_same_bits_as_generated_logprobs(
    engines: Engines, shallow_folder: Path
):
    check_scores(engines(shallow_folder, **COMMON, enable_prefix_caching=False))


FAMILIES: dict[str, dict[str, Any]] = {
    "gemma3_text": {"head_dim": 16, "sliding_window": 20},
    "qwen3_moe": {
        "head_dim": 16,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
    },
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "gpt2": {},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32, "do_layer_norm_before": False},
    "qwen2": {"num_key_value_heads": 2},
}


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_every_kind_of_layer_gives_a_batch_the_same_bits_as_single_requests(
    engines: Engines, tmp_path: Path, family: str
):
    values = {"vocab_size": 96, "max_position_embeddings": 256, "num_attention_heads": 4}
    random_model(family, seed=1, **values | FAMILIES[family]).save_pretrained(tmp_path)
    engine = engines(tmp_path, **COMMON, dtype="float32")
    check_bits(engine, engine)
    check_scores(engine)


@pytest.mark.gpu2
@pytest.mark.full
def test_tensor_parallel_devices_give_a_batch_the_same_bits_as_single_requests(
    engines: Engines, shallow_folder: Path, tmp_path: Path
):
    if jax.device_count() < 2:
        pytest.skip("needs 2 devices")
    options = COMMON | {"tensor_parallel_size": 2}
    if jax.default_backend() == "gpu":
        save_config(tmp_path, WIDE)
        engine = engines(tmp_path, **options, load_format="dummy")
    else:
        engine = engines(shallow_folder, **options, dtype="float32")
    check_bits(engine, engine)


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("name", [name for name in COMPOSITIONS if name != "bfloat16"])
def test_gpu_gives_a_batch_the_same_bits_as_single_requests(
    engines: Engines, tmp_path: Path, name: str
):
    save_config(tmp_path, MEDIUM)
    options = COMMON | {"load_format": "dummy"}
    alone = engines(tmp_path, **options, enable_prefix_caching=False)
    check_bits(alone, engines(tmp_path, **options | COMPOSITIONS[name]))
    check_scores(alone)


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs an NVIDIA GPU")
def test_mixture_of_experts_results_on_a_gpu_have_the_same_bits_alone_and_in_a_batch(
    engines: Engines, tmp_path: Path
):
    save_config(tmp_path, WIDE | SPARSE)
    engine = engines(tmp_path, **COMMON, load_format="dummy")
    check_bits(engine, engine)
    check_scores(engine)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"quantization": "fp8"},
            "does not support quantized weights: use an unquantized checkpoint",
        ),
        ({"kv_cache_dtype": "fp8"}, "does not support a KV cache of float8_e4m3fn: leave"),
    ],
)
def test_batch_invariant_engine_refuses_quantization(
    new_engine: Engines, shallow_folder: Path, options: dict[str, Any], message: str
):
    with pytest.raises(ValueError, match=message):
        new_engine(shallow_folder, batch_invariant=True, **options)


@pytest.mark.parametrize(
    ("values", "kind", "dtype", "message"),
    [
        ({}, "NVIDIA H100 80GB HBM3", "bfloat16", None),
        ({}, "NVIDIA A100-SXM4-80GB", "bfloat16", "NVIDIA A100-SXM4-80GB: use a Hopper GPU"),
        ({}, "NVIDIA H200", "float32", "dtype='float32' on a GPU: use dtype='bfloat16'"),
        ({"head_dim": 64}, "NVIDIA H200", "bfloat16", "head_dim=64 on a GPU"),
        ({"intermediate_size": 96}, "NVIDIA H200", "bfloat16", "intermediate_size=96 per device"),
        (SPARSE | {"intermediate_size": 96}, "NVIDIA H200", "bfloat16", None),
        (
            SPARSE | {"moe_intermediate_size": 96},
            "NVIDIA H200",
            "bfloat16",
            "moe_intermediate_size=96 per device",
        ),
    ],
)
def test_batch_invariant_engine_refuses_a_gpu_or_model_that_the_gpu_kernels_do_not_support(
    tmp_path: Path, values: dict[str, Any], kind: str, dtype: str, message: str | None
):
    save_config(tmp_path, WIDE | values)
    model = read_model_config(read_config(tmp_path), None)
    device = SimpleNamespace(platform="gpu", device_kind=kind)
    arguments = model, 16, jnp.dtype(dtype), device
    if message is None:
        check_batch_invariant(*arguments)
        return
    with pytest.raises(ValueError, match=f"batch_invariant=True does not support .*{message}"):
        check_batch_invariant(*arguments)
