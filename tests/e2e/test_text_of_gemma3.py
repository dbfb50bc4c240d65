"""Generate text with a multimodal Gemma 3 checkpoint, and compare the tokens with
`transformers`."""

from pathlib import Path

import numpy as np
from e2e_options import Engines, token_ids
from random_models import continue_greedily, logits_of, random_model

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
    "sliding_window": 11,  # shorter than a block
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}


def test_gemma3_tokens_equal_transformers_also_after_a_cached_prefix(
    engines: Engines, tmp_path: Path
):
    vision = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 16, "patch_size": 8}
    configs = {"text_config": TEXT, "vision_config": vision}
    model = random_model("gemma3", std=0.2, mm_tokens_per_image=4, eos_token_id=[1, 2], **configs)
    model.save_pretrained(tmp_path)
    engine = engines(tmp_path, skip_tokenizer_init=True, dtype="float32")
    rng = np.random.default_rng(0)
    # This prefix has more tokens than a step, so the engine computes the prefix in chunks.
    shared = rng.integers(3, 128, 80).tolist()
    prompts = [shared + rng.integers(3, 128, n).tolist() for n in (1, 20)]
    prompts += [rng.integers(3, 128, n).tolist() for n in (1, 11, 12, 17)]
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    expected = [[continue_greedily(logits_of(model), it, NUM_TOKENS)] for it in prompts]
    assert token_ids(engine.generate(prompts, params)) == expected
    second = engine.generate(prompts, params)
    assert token_ids(second) == expected
    assert [output.num_cached_tokens for output in second[:2]] == [80, 96]
