"""Test that the decoder of the benchmarks, which has a contiguous KV cache, gives the greedy tokens
of `transformers` for every family."""

import numpy as np
import pytest
import torch
from hf_models import ours, reference

from bench.contiguous import BATCHINGS, Decoder
from bench.contiguous_steps import Model

NUM_REQUESTS, MAX_TOKENS = 11, 12
# Together, the two model configurations cover position embeddings, RoPE, biases, sliding windows
# and all norms.
CASES = ("opt-350m", "qwen3-biases")
MORE_CASES = ("gpt2", "llama3-biases", "mistral-window", "qwen2-layer-types")


@pytest.mark.parametrize(
    "case", [*CASES, *(pytest.param(case, marks=pytest.mark.full) for case in MORE_CASES)]
)
def test_greedy_tokens_with_a_contiguous_kv_cache_equal_transformers(case: str):
    rng, model = np.random.RandomState(3), Model(ours(case))
    prompts = [rng.randint(2, 97, n).tolist() for n in rng.randint(1, 60, NUM_REQUESTS)]
    most = rng.randint(1, MAX_TOKENS + 1, NUM_REQUESTS).tolist()
    sizes = {"num_slots": 8, "max_len": 128, "max_batched_tokens": 64, "launch_steps": (1,)}
    answers = [Decoder(model, batching, **sizes).generate(prompts, most) for batching in BATCHINGS]
    assert answers[0] == answers[1]
    for prompt, tokens, count in zip(prompts, answers[0], most, strict=True):
        assert len(tokens) == count
        with torch.no_grad():
            logits = reference(case)(torch.tensor([prompt + tokens])).logits[0].numpy()
        assert tokens == logits.argmax(-1)[len(prompt) - 1 : -1].tolist()


def test_decode_step_does_not_copy_the_contiguous_cache():
    model = Model(ours("qwen3"))
    text = model.program(8, 112, 4).as_text()
    k = model.empty(8, 112).layers[0][0]
    shape = f"f32[{','.join(map(str, k.shape))}]"
    assert shape in text
    assert f"{shape} copy(" not in text.replace("{3,2,1,0}", "")
