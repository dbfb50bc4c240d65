"""Gemma 3's text, from a checkpoint that takes images, through the engine: local layers with a
window shorter than a block and a global one, prompts in chunks, prefixes from the cache."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from e2e_options import Engines

from jpaged import SamplingParams

NUM_TOKENS = 24
TEXT = {
    "vocab_size": 128,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "query_pre_attn_scalar": 12,
    "max_position_embeddings": 256,
    "sliding_window": 11,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A random checkpoint and transformers' model of it."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    vision = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 16, "patch_size": 8}
    config = transformers.Gemma3Config(
        text_config=TEXT, vision_config=vision, mm_tokens_per_image=4, eos_token_id=[1, 2]
    )
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.2)
    folder = tmp_path_factory.mktemp("gemma3")
    model.save_pretrained(folder)

    def greedy(prompt: list[int]) -> list[int]:
        token_ids = list(prompt)
        with torch.no_grad():
            for _ in range(NUM_TOKENS):
                token_ids.append(int(model(torch.tensor([token_ids])).logits[0, -1].argmax()))
        return token_ids[len(prompt) :]

    return folder, greedy


def test_gemma3_tokens_equal_transformers_also_after_a_cached_prefix(
    engines: Engines, gemma: tuple[Path, Any]
):
    folder, greedy = gemma
    engine = engines(folder, skip_tokenizer_init=True, dtype="float32")
    rng = np.random.default_rng(0)
    shared = rng.integers(3, 128, 80).tolist()  # more than a step's budget
    prompts = [shared + rng.integers(3, 128, n).tolist() for n in (1, 20)]
    prompts += [rng.integers(3, 128, n).tolist() for n in (1, 11, 12, 17)]
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    expected = [greedy(prompt) for prompt in prompts]
    first = engine.generate(prompts, params)
    assert [output.outputs[0].token_ids for output in first] == expected
    second = engine.generate(prompts, params)
    assert [output.outputs[0].token_ids for output in second] == expected
    assert [output.num_cached_tokens for output in second[:2]] == [80, 96]
