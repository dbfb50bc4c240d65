"""Test models with various head sizes against `transformers`: small, odd, and not powers of two."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from e2e_options import Engines

from jpaged import SamplingParams

HEADS: dict[str, dict[str, Any]] = {
    "gpt2": {"num_attention_heads": 4},
    "llama": {"num_attention_heads": 4, "num_key_value_heads": 4},
    "qwen2": {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "qwen3": {"num_attention_heads": 6, "num_key_value_heads": 2},
    "gemma3_text": {
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 20,
    },
}
ON_ANY_DEVICE = [("llama", 4), ("gpt2", 5), ("gpt2", 8), ("qwen3", 12), ("qwen2", 16)]
USUAL = (8, 16)
"""Those that other tests have engines of too."""
ON_A_GPU = [("llama", 24), ("qwen3", 40), ("qwen2", 80), ("llama", 96), ("gpt2", 200)]
ON_A_GPU += [("gemma3_text", 256)]
LENGTHS = (1, 3, 15, 16, 17, 40, 90)
NUM_TOKENS = 16


def checkpoint(folder: Path, family: str, head_size: int) -> Callable[[list[int]], list[int]]:
    """Writes a random checkpoint; gives what continues a prompt greedily."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    heads = HEADS[family]
    values: dict[str, Any] = {
        "vocab_size": 128,
        "hidden_size": heads["num_attention_heads"] * head_size,
        "num_hidden_layers": 2,
        "max_position_embeddings": 256,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    if family != "gpt2":
        values["intermediate_size"] = 48
    if family in ("qwen3", "gemma3_text"):  # whose heads need not have the model's width
        values |= {"hidden_size": 64, "head_dim": head_size}
    torch.manual_seed(head_size)
    config = transformers.AutoConfig.for_model(family, **values, **heads)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 1.5 * parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)

    def greedy(prompt: list[int]) -> list[int]:
        token_ids = list(prompt)
        with torch.no_grad():
            for _ in range(NUM_TOKENS):
                token_ids.append(int(model(torch.tensor([token_ids])).logits[0, -1].argmax()))
        return token_ids[len(prompt) :]

    return greedy


@pytest.mark.parametrize(
    ("family", "head_size", "on_gpu"),
    [
        *(
            pytest.param(*case, False, marks=[pytest.mark.full] if case[1] in USUAL else [])
            for case in ON_ANY_DEVICE
        ),
        *(pytest.param(*case, True, marks=pytest.mark.gpu) for case in ON_ANY_DEVICE + ON_A_GPU),
    ],
)
def test_greedy_tokens_equal_transformers_for_each_head_size(
    engines: Engines, tmp_path: Path, family: str, head_size: int, on_gpu: bool
):
    if on_gpu != (jax.default_backend() == "gpu"):
        pytest.skip("of the other device")
    continued = checkpoint(tmp_path, family, head_size)
    # Bursts call the kernels that single steps do.
    options = {"skip_tokenizer_init": True, "dtype": "float32", "num_scheduler_steps": 1}
    engine = engines(tmp_path, **options)
    rng = np.random.default_rng(head_size)
    prompts = [rng.integers(2, 128, n).tolist() for n in LENGTHS]
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    outputs = engine.generate(prompts, params)
    assert [o.outputs[0].token_ids for o in outputs] == [continued(p) for p in prompts]
