"""Test engines whose experts are in FP8: devices, random weights and memory."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from e2e_options import Engines, token_ids

from jpaged import SamplingParams
from tests import fp8_experts as made

pytestmark = pytest.mark.full

OPTIONS: dict[str, Any] = {"skip_tokenizer_init": True, "max_num_seqs": 4, "dtype": "float32"}
OPTIONS |= {"max_num_batched_tokens": 16, "max_model_len": 64}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that takes a key of `fp8_experts.CONFIGS`, writes a checkpoint of this
    kind, and returns its folder."""

    @cache
    def folder(kind: str) -> Path:
        made.write_checkpoint(path := tmp_path_factory.mktemp(kind), kind)
        return path

    return folder


def options_of(kind: str) -> dict[str, Any]:
    return OPTIONS | ({"quantization": "fp8"} if kind == "loaded" else {})


@pytest.mark.gpu2
@pytest.mark.parametrize("by_expert", [False, True])
@pytest.mark.parametrize("kind", ["channel", "block"])
def test_fp8_experts_on_two_devices_give_the_same_tokens_as_on_one_device(
    engines: Engines, folders: Callable[[str], Path], kind: str, by_expert: bool
):
    if jax.device_count() < 2:
        pytest.skip("needs 2 devices")
    if jax.default_backend() != "cpu":
        pytest.skip("sums on a GPU differ enough to be rounded to another FP8 number")
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, 96, n).tolist() for n in (1, 5, 17, 33)]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, detokenize=False)
    options = {"tensor_parallel_size": 2, "enable_expert_parallel": by_expert}
    one, two = (
        engines(folders(kind), **options_of(kind), **more).generate(prompts, params)
        for more in ({}, options)
    )
    assert token_ids(two) == token_ids(one)


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize("kind", made.CONFIGS)
def test_engine_with_fp8_experts_generates_tokens_and_reports_the_size_of_the_weights(
    engines: Engines, folders: Callable[[str], Path], kind: str, load_format: str
):
    engine = engines(folders(kind), load_format=load_format, **options_of(kind))
    params = SamplingParams(max_tokens=4, ignore_eos=True, detokenize=False)
    (output,) = engine.generate([[5, 6, 7]], params)
    assert len(output.outputs[0].token_ids) == 4
    fields = made.FIELDS | (made.WIDE if kind == "block" else {})
    width, experts = fields["hidden_size"], fields["num_experts"]
    inner, dense = fields["moe_intermediate_size"], fields["intermediate_size"]
    head, num_heads, vocab = fields["head_dim"], fields["num_attention_heads"], fields["vocab_size"]
    heads = num_heads * head
    projections = 2 * [(3 * heads, width), (width, heads)] + [(2 * dense, width), (width, dense)]
    projections += experts * [(2 * inner, width), (width, inner)]
    scales = sum(n * m // 128**2 if kind == "block" else n for n, m in projections)
    norms = 5 * width + 2 * 2 * head
    wide = experts * width + norms + 2 * vocab * width
    narrow = sum(n * m for n, m in projections)
    assert engine.memory_account.weights == narrow + 4 * (scales + wide)


def test_error_suggests_expert_parallelism_if_fp8_scale_blocks_cannot_be_sharded(
    engines: Engines, tmp_path: Path
):
    made.write_checkpoint(tmp_path, "block", moe_intermediate_size=128)
    options = OPTIONS | {"tensor_parallel_size": 2}
    wrong = "moe_intermediate_size=128 of an expert, whose weights have one scale per 128 rows"
    with pytest.raises(ValueError, match=f"{wrong}; use 1, or set enable_expert_parallel"):
        engines(tmp_path, **options)
    engines(tmp_path, enable_expert_parallel=True, **options)
