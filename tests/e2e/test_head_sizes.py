"""Compare models with unusual head sizes with `transformers`: small sizes, odd sizes, and sizes
that are no powers of two."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from e2e_options import Engines, token_ids
from random_models import continue_greedily, logits_of, random_model

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
"""Head sizes that models of other tests have too."""
ON_A_GPU = [("llama", 24), ("qwen3", 40), ("qwen2", 80), ("llama", 96), ("gpt2", 200)]
ON_A_GPU += [("gemma3_text", 256)]
LENGTHS = (1, 3, 15, 16, 17, 40, 90)
NUM_TOKENS = 16


def model_of(family: str, head_size: int) -> Any:
    """Return a random `transformers` model."""
    heads = HEADS[family]
    values: dict[str, Any] = {
        "vocab_size": 128,
        "hidden_size": heads["num_attention_heads"] * head_size,
    }
    if family != "gpt2":
        values["intermediate_size"] = 48
    if family in ("qwen3", "gemma3_text"):  # width and head size are independent
        values |= {"hidden_size": 64, "head_dim": head_size}
    return random_model(family, seed=head_size, **values, **heads)


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
        pytest.skip("has parameters for another device")
    model = model_of(family, head_size)
    model.save_pretrained(tmp_path)
    # Multi-step decode programs call the same kernels as single steps.
    options = {"skip_tokenizer_init": True, "dtype": "float32", "num_scheduler_steps": 1}
    engine = engines(tmp_path, **options)
    rng = np.random.default_rng(head_size)
    prompts = [rng.integers(2, 128, n).tolist() for n in LENGTHS]
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    expected = [[continue_greedily(logits_of(model), it, NUM_TOKENS)] for it in prompts]
    assert token_ids(engine.generate(prompts, params)) == expected
