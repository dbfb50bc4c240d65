"""Test that all block sizes from 1 to 256 give the same answers."""

import random
from pathlib import Path
from typing import Any

import pytest
from e2e_options import Engines, token_ids

from jpaged import SamplingParams

NUM_SLOTS = {1: 420, 2: 420, 256: 1024}
"""Number of slots in a pool that is too small for all requests together, by block size."""

SHAPE: dict[str, Any] = {"max_model_len": 320, "max_num_seqs": 8, "skip_tokenizer_init": True}


def workload() -> tuple[list[list[int]], list[SamplingParams]]:
    """Return prompts that share a prefix, and sampling parameters. Some sequences end before token
    256, and others grow past it."""
    rng = random.Random(0)
    prefix = [rng.randrange(5, 120) for _ in range(290)]
    greedy: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
    samples: dict[str, Any] = {"temperature": 0.9, "seed": 1, "n": 2, "ignore_eos": True}
    beams: dict[str, Any] = {"beam_width": 2, "n": 2}
    lengths = {290: greedy, 270: greedy, 250: samples, 245: greedy, 33: beams, 248: greedy}
    prompts = [[*prefix[:length], 5 + i] for i, length in enumerate(lengths)]
    return prompts, [SamplingParams(max_tokens=20, **kind) for kind in lengths.values()]


@pytest.mark.full
@pytest.mark.parametrize("block_size", [1, 2, 256])
def test_tokens_do_not_depend_on_the_block_size(
    engines: Engines, qwen_folder: Path, block_size: int
):
    prompts, params = workload()
    roomy = engines(qwen_folder, num_blocks=160, **SHAPE, enable_prefix_caching=False)
    expected = token_ids(roomy.generate(prompts, params))
    options = {**SHAPE, "block_size": block_size, "preemption_mode": "swap", "swap_space": 0.05}
    tight = engines(qwen_folder, num_blocks=NUM_SLOTS[block_size] // block_size + 1, **options)
    assert token_ids(tight.generate(prompts, params)) == expected
    stats = tight.stats()
    assert stats.num_swapped_in_blocks > 0
    assert stats.num_cached_tokens >= 256
    assert (stats.num_block_copies > 0) == (block_size > 1)  # blocks of one token are never partial
