"""Compare RoPE and activations with `transformers`; test_parity.py compares whole models."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hf_models import hf_config, ours
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from jpaged.models.attention import inverse_frequencies, rope_angles
from jpaged.models.config import RopeConfig
from jpaged.models.linear import apply_activation
from pallas_kernels import Backend, LayerKV, rope_write_kv


def assert_same(got, want):
    np.testing.assert_allclose(np.asarray(got), want, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(
    "case",
    ["llama", "llama3-biases", "llama-linear-mha", "llama-yarn", "mistral-yarn", "qwen3-yarn"],
)
def test_rope_frequencies_and_rotation_equal_transformers(case):
    their_config: Any = hf_config(case)
    rotary = LlamaRotaryEmbedding(their_config)
    config = ours(case).config
    rope = config.layers[0].rope
    assert rope is not None
    got = inverse_frequencies(rope, config.head_size)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, np.asarray(rotary.inv_freq), rtol=6e-7)

    positions = torch.tensor([0, 1, 2, 63, 100])
    x = torch.randn(1, 3, len(positions), config.head_size)
    cos, sin = rotary(x, positions[None])
    want, _ = apply_rotary_pos_emb(x, x, cos, sin)
    angles = rope_angles(jnp.asarray(positions.numpy(), jnp.int32), rope, config.head_size)
    heads = jnp.asarray(x[0].transpose(0, 1))
    nowhere = jnp.full((len(positions),), -1, jnp.int32)
    kv = LayerKV(*(jnp.zeros((1, 8, 1, config.head_size), jnp.float32) for _ in range(2)))
    qkv = jnp.concatenate([heads, heads[:, :2]], axis=1)
    got, _ = rope_write_kv(qkv[None], kv, nowhere, angles, backend=Backend.XLA)
    assert_same(got, want[0].transpose(0, 1))


@pytest.mark.parametrize("theta", [1e4, 5e5, 1e6])
def test_rope_angles_at_large_positions_equal_transformers(theta):
    """If a frequency is wrong by one ulp, the angle at position 100,000 is wrong by 0.01."""
    rope = {"rope_type": "default", "rope_theta": theta}
    config = LlamaConfig(hidden_size=1024, num_attention_heads=8, rope_parameters=rope)
    places = torch.tensor([8_191, 131_071])
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), places[None])
    ours_config = RopeConfig(theta, "default", 1.0, 1.0, 1.0, 8192)
    angles = rope_angles(jnp.asarray(places.numpy(), jnp.int32), ours_config, 128)
    for got, want in zip(angles, (cos, sin), strict=True):
        np.testing.assert_allclose(got, want[0, :, :64].numpy(), atol=2e-4)


def test_llama3_rope_scaling_equals_transformers():
    """Compare with the parameters of Llama 3.1, which reach all three branches of the formula."""
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    config = LlamaConfig(hidden_size=1024, num_attention_heads=8, rope_parameters=rope)
    theirs = LlamaRotaryEmbedding(config).inv_freq
    got = inverse_frequencies(RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 8192), 128)
    np.testing.assert_allclose(got, np.asarray(theirs), rtol=6e-7)


@pytest.mark.parametrize(
    "name", ["relu", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "silu", "swish"]
)
def test_activations_equal_transformers(name):
    x = np.linspace(-6, 6, 101, dtype=np.float32)
    assert_same(apply_activation(name, jnp.asarray(x)), ACT2FN[name](torch.tensor(x)).numpy())
