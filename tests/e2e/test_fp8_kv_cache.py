"""Keys and values in 8 bits: whatever shares or moves their blocks changes no token."""

import random
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from e2e_options import ANSWER, GREEDY, LOOPS, MOSTLY_OVERLAPPED, QUESTION, Engines

from jpaged import SamplingParams

FP8: dict[str, Any] = {"kv_cache_dtype": "fp8"}
SHAPE: dict[str, Any] = {"max_model_len": 128, "block_size": 8}
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0, "ignore_eos": True},
    {"temperature": 0.9, "seed": 1, "n": 3, "ignore_eos": True},
    {"beam_width": 3, "n": 2},
    {"temperature": 0.0, "logprobs": 2, "repetition_penalty": 1.1, "ignore_eos": True},
]
FEW = 30
"""Blocks, too few for all requests at once."""


def workload(count: int = 10) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts that begin alike, of all kinds of requests."""
    rng = random.Random(0)
    text = [rng.randrange(5, 96) for _ in range(60)]
    prompts = [[*text[: 20 + 2 * index], 5 + index] for index in range(count)]
    asked = (KINDS[index % len(KINDS)] for index in range(count))
    return prompts, [SamplingParams(max_tokens=40, **kind) for kind in asked]


def answers(outputs: Any) -> list[list[list[int]]]:
    return [[list(completion.token_ids) for completion in each.outputs] for each in outputs]


@pytest.mark.parametrize("loop", MOSTLY_OVERLAPPED)
def test_fp8_cache_gives_the_answers_of_a_wide_cache(engines: Engines, loop: str):
    engine = engines(**FP8, **LOOPS[loop])
    assert engine.generate(QUESTION, GREEDY)[0].outputs[0].text == ANSWER


@pytest.mark.parametrize(
    ("mode", "loop"),
    [
        pytest.param("swap", "overlapped", marks=pytest.mark.full),
        pytest.param("recompute", "synchronous", marks=pytest.mark.full),
        pytest.param("recompute", "overlapped", marks=pytest.mark.soak),
        pytest.param("auto", "overlapped", marks=pytest.mark.soak),
        pytest.param("auto", "synchronous", marks=pytest.mark.soak),
        pytest.param("swap", "synchronous", marks=pytest.mark.soak),
    ],
)
def test_pressure_and_sharing_change_no_token(
    engines: Engines, folder_of_8_heads: Path, mode: str, loop: str
):
    """With shared prefixes, forks, copies on write and preemption, in a pool that is too small; the
    fixture counts the blocks afterwards."""
    prompts, params = workload()
    shape = {**FP8, **SHAPE, "skip_tokenizer_init": True}
    roomy = engines(folder_of_8_heads, num_blocks=400, **shape, enable_prefix_caching=False)
    expected = answers(roomy.generate(prompts, params))
    options = {"preemption_mode": mode, "swap_space": 0.05, **LOOPS[loop]}
    tight = engines(folder_of_8_heads, num_blocks=FEW, **shape, **options)
    before = tight.stats()
    for _ in range(2):  # the second time prefixes are cached
        assert answers(tight.generate(prompts, params)) == expected
    stats = tight.stats()
    assert stats.num_preemptions > before.num_preemptions
    assert stats.num_cached_tokens > before.num_cached_tokens
    assert stats.num_block_copies > before.num_block_copies
    if mode == "swap":
        assert stats.num_swapped_in_blocks > before.num_swapped_in_blocks


@pytest.mark.parametrize(
    ("dtype", "kv_cache_dtype", "ratio"),
    [
        ("float32", "fp8", 4),
        ("bfloat16", "fp8_e4m3", 2),
        pytest.param("float16", "fp8", 2, marks=pytest.mark.soak),
        pytest.param("float32", "bfloat16", 2, marks=pytest.mark.full),
        pytest.param("float32", "auto", 1, marks=pytest.mark.full),
    ],
)
def test_fp8_pool_has_twice_the_blocks(
    engines: Engines, folder_of_8_heads: Path, dtype: str, kv_cache_dtype: str, ratio: int
):
    size = 2**18
    shape: dict[str, Any] = {"num_blocks": None, "kv_cache_memory_bytes": size, "dtype": dtype}
    shape |= {"max_model_len": 64, "max_num_seqs": 4, "skip_tokenizer_init": True}
    wide = engines(folder_of_8_heads, **shape).stats().num_blocks + 1
    engine = engines(folder_of_8_heads, **shape, kv_cache_dtype=kv_cache_dtype)
    assert engine.stats().num_blocks + 1 == ratio * wide
    assert engine.memory_account.kv_cache == size
    assert engine.generate([3, 4, 5], SamplingParams(temperature=0.0, max_tokens=4))


def test_prompt_logprobs_are_close_to_those_of_a_wide_cache(engines: Engines):
    text = "Count from 1 to 30\n" + ", ".join(map(str, range(1, 31)))
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    found = []
    for options in ({}, FP8):
        (output,) = engines(**options, enable_prefix_caching=False).generate([text], params)
        places = [place for place in output.prompt_logprobs or () if place]
        found.append(np.array([entry.logprob for place in places for entry in place.values()]))
    difference = np.abs(found[0] - found[1]).mean()
    assert 0 < difference < 0.05


@pytest.mark.gpu2
@pytest.mark.parametrize("count", [4, pytest.param(2, marks=pytest.mark.full)])
def test_tensor_parallel_fp8_cache_gives_the_tokens_of_one_device(
    engines: Engines, folder_of_8_heads: Path, count: int
):
    if count > jax.device_count():
        pytest.skip(f"needs {count} devices")
    prompts, params = workload(8)
    options = {**FP8, **SHAPE, "skip_tokenizer_init": True, "dtype": "float32"}
    alone = engines(folder_of_8_heads, num_blocks=400, **options)
    several = engines(
        folder_of_8_heads,
        num_blocks=FEW,
        tensor_parallel_size=count,
        preemption_mode="swap",
        swap_space=0.05,
        **options,
    )
    expected = answers(alone.generate(prompts, params))
    assert answers(several.generate(prompts, params)) == expected
    assert several.stats().num_swapped_in_blocks > 0


@pytest.fixture(scope="module")
def folder_of_8_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 checkpoint of 8 heads and 2 KV heads, without scales and a tokenizer."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    config = transformers.Qwen3Config(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        eos_token_id=1,
    )
    model = transformers.Qwen3ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 1.5 * parameter.shape[-1] ** -0.5)
    folder = tmp_path_factory.mktemp("qwen3_8_heads")
    model.save_pretrained(folder)
    return folder
