"""Test that a batch-invariant engine gives each request the same bits in any composition."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from e2e_options import Engines, in_full_tier

from jpaged import Engine, SamplingParams
from jpaged.config import SpeculativeConfig
from jpaged.engine.startup import check_batch_invariant
from jpaged.models.checkpoint import read_config
from jpaged.models.registry import read_model_config

NUM_REQUESTS = 12
COMMON: dict[str, Any] = {
    "batch_invariant": True,
    "skip_tokenizer_init": True,
    "max_num_seqs": 16,
    "num_blocks": 129,
}
RECOMPUTE = {
    "preemption_mode": "recompute",
    "num_blocks": 24,
    "max_num_batched_tokens": 24,
    "async_scheduling": False,
    "enable_prefix_caching": False,
}
SWAP = {
    "preemption_mode": "swap",
    "num_blocks": 24,
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
IN_DEFAULT_TIER = ("prefix hits", "recompute, chunks, synchronous", "swap, speculation")


def requests(vocab_size: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Return prompts, half of them with a common prefix, and greedy and seeded requests."""
    rng = np.random.default_rng(0)
    prefix = rng.integers(5, vocab_size, 40).tolist()
    prompts, params = [], []
    for index in range(NUM_REQUESTS):
        prompt = rng.integers(5, vocab_size, int(rng.integers(1, 70))).tolist()
        prompts.append(prefix + prompt if index % 2 else prompt)
        sampling = {"temperature": 0.9, "top_p": 0.9, "seed": index} if index % 3 == 0 else {}
        given = {"temperature": 0.0, "max_tokens": 16 + index, **sampling}
        params.append(SamplingParams(logprobs=2, ignore_eos=True, **given))
    return prompts, params


def bits(engine: Engine, prompts: list[list[int]], params: list[SamplingParams]) -> list:
    """Return the tokens and log-probabilities of each request; equal floats have equal bits."""
    outputs = [it.outputs[0] for it in engine.generate(prompts, params)]
    return [
        (it.token_ids, [{t: e.logprob for t, e in step.items()} for step in it.logprobs or ()])
        for it in outputs
    ]


def bits_alone(engine: Engine, prompts: list[list[int]], params: list[SamplingParams]) -> list:
    pairs = zip(prompts, params, strict=True)
    return [bits(engine, [prompt], [each])[0] for prompt, each in pairs]


@pytest.mark.parametrize(
    "name", [*IN_DEFAULT_TIER, *in_full_tier(*(set(COMPOSITIONS) - set(IN_DEFAULT_TIER)))]
)
def test_requests_have_the_bits_of_a_request_alone(
    engines: Engines, shallow_folder: Path, name: str
):
    options = COMPOSITIONS[name]
    base = {"dtype": options["dtype"]} if "dtype" in options else {}
    alone = engines(shallow_folder, **COMMON, enable_prefix_caching=False, **base)
    prompts, params = requests(alone.vocab_size)
    expected = bits_alone(alone, prompts, params)
    engine = engines(shallow_folder, **COMMON | options)
    before = engine.stats()
    for order in (np.arange(NUM_REQUESTS), np.random.default_rng(1).permutation(NUM_REQUESTS)):
        found = bits(engine, [prompts[i] for i in order], [params[i] for i in order])
        assert found == [expected[i] for i in order]
    stats = engine.stats()
    if "preemption_mode" in options:
        assert stats.num_preemptions > before.num_preemptions
    if options.get("enable_prefix_caching", True):
        assert stats.num_cached_tokens > before.num_cached_tokens


def test_scores_have_the_bits_of_the_generation(engines: Engines, shallow_folder: Path):
    alone = engines(shallow_folder, **COMMON, enable_prefix_caching=False)
    prompts, params = requests(alone.vocab_size)
    expected = bits_alone(alone, prompts, params)
    completions = [list(tokens) for tokens, _ in expected]
    found = alone.score_completions(prompts, completions)
    for score, (tokens, entries) in zip(found, expected, strict=True):
        sampled = [entry[token] for token, entry in zip(tokens, entries, strict=True)]
        assert list(score.logprobs) == sampled


@pytest.mark.gpu2
@pytest.mark.full
def test_tensor_parallel_devices_give_the_bits_of_a_request_alone(
    engines: Engines, shallow_folder: Path
):
    if jax.device_count() < 2:
        pytest.skip("needs 2 devices")
    engine = engines(shallow_folder, **COMMON, tensor_parallel_size=2, dtype="float32")
    prompts, params = requests(engine.vocab_size)
    assert bits(engine, prompts, params) == bits_alone(engine, prompts, params)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantization": "fp8"}, "does not support quantized weights: leave quantization unset"),
        ({"kv_cache_dtype": "fp8"}, "does not support a KV cache of another dtype"),
    ],
)
def test_quantized_engine_is_refused(
    new_engine: Engines, shallow_folder: Path, options: dict[str, Any], message: str
):
    with pytest.raises(ValueError, match=message):
        new_engine(shallow_folder, batch_invariant=True, **options)


@pytest.mark.parametrize(
    ("values", "kind", "dtype", "message"),
    [
        ({}, "NVIDIA H100 80GB HBM3", "bfloat16", None),
        ({}, "NVIDIA A100-SXM4-80GB", "bfloat16", "NVIDIA A100-SXM4-80GB: use a Hopper GPU"),
        ({}, "NVIDIA H200", "float32", "dtype float32: use dtype='bfloat16'"),
        ({"head_dim": 64}, "NVIDIA H200", "bfloat16", "head_size=64"),
        ({"intermediate_size": 96}, "NVIDIA H200", "bfloat16", "with sizes 256, 96 and 128"),
    ],
)
def test_gpu_without_kernels_is_refused(
    tmp_path: Path, values: dict[str, Any], kind: str, dtype: str, message: str | None
):
    from test_gpu import WIDE, save_config

    save_config(tmp_path, WIDE | values)
    model = read_model_config(read_config(tmp_path), None)
    device = SimpleNamespace(platform="gpu", device_kind=kind)
    arguments = model, 16, jnp.dtype(dtype), device
    if message is None:
        check_batch_invariant(*arguments)
        return
    with pytest.raises(ValueError, match=f"batch_invariant=True does not support .*{message}"):
        check_batch_invariant(*arguments)
