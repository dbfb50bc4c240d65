"""Random checkpoints, and their logits computed by `transformers`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

DEFAULTS = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
Logits = Callable[[list[int]], np.ndarray]


def random_model(family: str, *, seed: int = 0, std: float | None = None, **values: Any) -> Any:
    """Return a random `transformers` model. Its logits are so far apart that rounding does not
    change which token has the largest logit.

    Args:
        family: The `model_type` of the config.
        seed: Seed of the weights.
        std: Standard deviation of the weights; None to choose it by the width of each tensor.
        values: Other values of the config, in addition to `DEFAULTS`.
    """
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(family, **DEFAULTS | values)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, std or 1.5 * parameter.shape[-1] ** -0.5)
    return model


def logits_of(model: Any) -> Logits:
    """Return a function that takes token ids and returns the logits at each position."""
    torch = pytest.importorskip("torch")

    def logits(token_ids: list[int]) -> np.ndarray:
        with torch.no_grad():
            return model(torch.tensor([token_ids])).logits[0].numpy()

    return logits


def load_logits(folder: Path) -> Logits:
    """Return a function that computes the logits of a saved Qwen3 checkpoint, in float32."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    return logits_of(transformers.Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32))


def continue_greedily(logits: Logits, prompt: list[int], num_tokens: int) -> list[int]:
    sequence = list(prompt)
    for _ in range(num_tokens):
        sequence.append(int(logits(sequence)[-1].argmax()))
    return sequence[len(prompt) :]
