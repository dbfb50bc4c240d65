"""Test engines with FP8 weights: answers, memory and tensor-parallel devices."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from e2e_options import (
    ANSWER,
    LOOPS,
    MOSTLY_OVERLAPPED,
    QUESTION,
    Engines,
    generate_text,
    scores,
    token_ids,
)

from jpaged import Engine, SamplingParams

WORDS = ["Say hello", "Count from 1 to 20", "Sort the letters of banana", QUESTION]


@pytest.mark.parametrize("loop", MOSTLY_OVERLAPPED)
def test_bundled_model_answers_correctly_with_fp8_weights(engines: Engines, loop: str):
    assert generate_text(engines(quantization="fp8", **LOOPS[loop])) == ANSWER


def test_fp8_weights_take_a_quarter_of_the_memory(engines: Engines):
    """Only projections have FP8 weights: embeddings and norms stay in float32."""
    wide, narrow = engines().memory_account.weights, engines(quantization="fp8").memory_account
    assert 0.25 * wide < narrow.weights < 0.3 * wide


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"quantization": "awq"}, "quantization='awq' is not supported; choose one of comp"),
        ({"quantization": "modelopt"}, "quantization='modelopt', but config.json has no"),
    ],
)
def test_unsupported_quantization_is_refused(options: dict[str, Any], words: str):
    with pytest.raises(ValueError, match=words):
        Engine(**options)


@pytest.mark.full
@pytest.mark.gpu2
def test_fp8_model_on_two_devices_gives_the_same_tokens_as_on_one_device(
    engines: Engines, shallow_folder: Path
):
    if jax.device_count() < 2:
        pytest.skip("needs 2 devices")
    if jax.default_backend() != "cpu":
        pytest.skip("sums on a GPU differ enough to be rounded to another FP8 number")
    params = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
    options = {"quantization": "fp8", "dtype": "float32"}
    one, two = (
        engines(shallow_folder, tensor_parallel_size=n, **options).generate(WORDS, params)
        for n in (1, 2)
    )
    assert token_ids(two) == token_ids(one)


@pytest.mark.gpu2
@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tensor_parallelism_changes_logprobs_less_than_fp8_quantization(
    engines: Engines, shallow_folder: Path, dtype: str
):
    """Two devices may round a value to another FP8 number than one device. Neighboring FP8 numbers
    differ by up to 12.5 %."""
    if jax.device_count() < 2:
        pytest.skip("needs 2 devices")
    prompts = [f"Count from {n} to {n + 20}. {QUESTION}" for n in range(8)]
    options: dict[str, Any] = {"dtype": dtype, "enable_prefix_caching": False}
    wide = scores(engines(shallow_folder, **options), prompts)
    options["quantization"] = "fp8"
    alone, both = (
        scores(engines(shallow_folder, tensor_parallel_size=count, **options), prompts)
        for count in (1, 2)
    )
    assert len(alone) > 200
    assert np.abs(both - alone).mean() < np.abs(wide - alone).mean()


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    """Return a function that saves a random FP8 checkpoint. Each block of 128 x 128 weights has one
    scale, as in Qwen3-FP8."""

    def make() -> Path:
        torch = pytest.importorskip("torch")
        transformers = pytest.importorskip("transformers")
        from safetensors.torch import load_file, save_file

        folder = tmp_path_factory.mktemp("blocks")
        config = transformers.Qwen3Config(
            vocab_size=97, hidden_size=256, intermediate_size=512, num_hidden_layers=2,
            num_attention_heads=8, num_key_value_heads=2, head_dim=128, eos_token_id=1,
            max_position_embeddings=128, bos_token_id=0,
        )  # fmt: skip
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
        kept = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
        model.config.quantization_config = {**kept, "activation_scheme": "dynamic"}
        model.save_pretrained(folder)
        tensors = load_file(folder / "model.safetensors")
        for name in [name for name in tensors if name.endswith("proj.weight")]:
            rows, columns = (size // 128 for size in tensors[name].shape)
            wide = (tensors[name] * 60).reshape(rows, 128, columns, 128)
            scale = wide.abs().amax((1, 3)) / 448
            narrow = (wide / scale[:, None, :, None]).reshape(rows * 128, -1)
            tensors[name] = narrow.to(torch.float8_e4m3fn)
            tensors[name + "_scale_inv"] = scale
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    return make


@pytest.mark.gpu2
@pytest.mark.full
@pytest.mark.parametrize("count", [2, 4])
def test_fp8_block_scales_are_sharded_like_the_weights(engines: Engines, blocks, count: int):
    if jax.device_count() < count:
        pytest.skip(f"needs {count} devices")
    folder, rng = blocks(), np.random.default_rng(0)
    prompts = [rng.integers(2, 96, n).tolist() for n in (1, 5, 17, 33)]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, detokenize=False)
    options: dict[str, Any] = {"skip_tokenizer_init": True, "max_num_seqs": 4, "dtype": "float32"}
    options |= {"max_num_batched_tokens": 16, "max_model_len": 64}
    one, several = (
        engines(folder, tensor_parallel_size=n, **options).generate(prompts, params)
        for n in (1, count)
    )
    assert token_ids(several) == token_ids(one)
