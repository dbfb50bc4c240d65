"""Test the FP8 KV cache: sharing, preemption, pool size and tensor-parallel devices."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from e2e_options import (
    ANSWER,
    LOOPS,
    MOSTLY_OVERLAPPED,
    Engines,
    check_small_pool_changes_no_answer,
    generate_text,
    make_workload,
    scores,
    token_ids,
)
from random_models import random_model

from jpaged import SamplingParams

FP8: dict[str, Any] = {"kv_cache_dtype": "fp8"}
SHAPE: dict[str, Any] = {**FP8, "max_model_len": 128, "block_size": 8, "skip_tokenizer_init": True}
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0, "ignore_eos": True},
    {"temperature": 0.9, "seed": 1, "n": 3, "ignore_eos": True},
    {"beam_width": 3, "n": 2},
    {"temperature": 0.0, "logprobs": 2, "repetition_penalty": 1.1, "ignore_eos": True},
]
FEW = 30
"""Number of blocks that is too small for all requests together."""


def workload(count: int = 10) -> tuple[list[list[int]], list[SamplingParams]]:
    return make_workload(KINDS, count, 96, max_tokens=40)


@pytest.mark.parametrize("loop", MOSTLY_OVERLAPPED)
def test_bundled_model_answers_correctly_with_an_fp8_kv_cache(engines: Engines, loop: str):
    assert generate_text(engines(**FP8, **LOOPS[loop])) == ANSWER


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
def test_sharing_blocks_and_preemption_do_not_change_tokens_with_an_fp8_kv_cache(
    engines: Engines, folder_of_8_heads: Path, mode: str, loop: str
):
    roomy = engines(folder_of_8_heads, num_blocks=400, **SHAPE, enable_prefix_caching=False)
    options = {"preemption_mode": mode, "swap_space": 0.05, **LOOPS[loop]}
    tight = engines(folder_of_8_heads, num_blocks=FEW, **SHAPE, **options)
    num_swapped = tight.stats().num_swapped_in_blocks
    check_small_pool_changes_no_answer(roomy, tight, *workload())
    if mode == "swap":
        assert tight.stats().num_swapped_in_blocks > num_swapped


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
def test_kv_cache_dtype_with_fewer_bytes_gives_proportionally_more_blocks(
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


def test_fp8_cache_gives_prompt_logprobs_close_to_an_unquantized_cache(engines: Engines):
    prompt = "Count from 1 to 30\n" + ", ".join(map(str, range(1, 31)))
    wide, fp8 = (
        scores(engines(**options, enable_prefix_caching=False), [prompt]) for options in ({}, FP8)
    )
    assert 0 < np.abs(fp8 - wide).mean() < 0.05


@pytest.mark.gpu2
@pytest.mark.full
@pytest.mark.parametrize("count", [2, 4])
def test_tensor_parallel_fp8_kv_cache_gives_the_same_tokens_as_one_device(
    engines: Engines, folder_of_8_heads: Path, count: int
):
    if count > jax.device_count():
        pytest.skip(f"needs {count} devices")
    prompts, params = make_workload(KINDS[:2], 8, 96, max_tokens=40)
    options = {**SHAPE, "dtype": "float32"}
    alone = engines(folder_of_8_heads, num_blocks=400, **options)
    expected = token_ids(alone.generate(prompts, params))
    options |= {"num_blocks": FEW, "preemption_mode": "swap", "swap_space": 0.05}
    several = engines(folder_of_8_heads, tensor_parallel_size=count, **options)
    assert token_ids(several.generate(prompts, params)) == expected
    assert several.stats().num_swapped_in_blocks > 0


@pytest.fixture(scope="module")
def folder_of_8_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a random Qwen3 checkpoint with 8 query heads and 2 KV heads, without scales and without
    a tokenizer."""
    model = random_model(
        "qwen3",
        seed=3,
        vocab_size=96,
        intermediate_size=48,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=8,
    )
    folder = tmp_path_factory.mktemp("qwen3_8_heads")
    model.save_pretrained(folder)
    return folder
