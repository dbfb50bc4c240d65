"""Compare each part of a model with `transformers` on the inputs that it has there."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from harness import BLOCK_SIZE, TABLE_WIDTH, poisoned_pool
from hf_models import hf_config, ours, reference
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from jpaged.models.attention import AttentionInputs, inverse_frequencies, rope_angles
from jpaged.models.config import RopeConfig
from jpaged.models.linear import apply_activation
from pallas_kernels import Backend, LayerKV, rope_write_kv

NUM_TOKENS = 20
TOKENS = np.random.RandomState(0).randint(2, 97, NUM_TOKENS).astype(np.int32)
LAYERS = {"gpt2": "transformer.h", "opt": "model.decoder.layers"}
NAMES = {
    "gpt2": {"attention_norm": "ln_1", "mlp_norm": "ln_2", "mlp": "mlp"},
    "opt": {"attention_norm": "self_attn_layer_norm", "mlp_norm": "final_layer_norm"},
    "llama": {
        "attention_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
        "mlp": "mlp",
        "attention.q_norm": "self_attn.q_norm",
        "attention.k_norm": "self_attn.k_norm",
    },
}
NAMES["gemma3"] = NAMES["llama"] | {
    "attention_out_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
}
FINAL = {"gpt2": "transformer.ln_f", "opt": "model.decoder.final_layer_norm", "llama": "model.norm"}
FINAL["gemma3"] = FINAL["llama"]
CASES = ("gpt2", "opt", "opt-350m", "llama3-biases", "mistral-window", "qwen2", "qwen3-biases")
CASES += ("gemma3",)


def without_batch(x: torch.Tensor) -> np.ndarray:
    return (x if x.ndim == 2 else x.squeeze(0)).numpy()


def layer_prefix(case: str, layer: int) -> str:
    return f"{LAYERS.get(case.split('-')[0], 'model.layers')}.{layer}"


@pytest.fixture(scope="module", params=CASES)
def traced(request):
    """Return a case, jpaged's model, and inputs and outputs of every `transformers` module."""
    calls: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    model, handles = reference(request.param), []

    def record(name):
        def hook(_module, args, kwargs, output):
            value = args[0] if args else kwargs.get("hidden_states")
            output = output[0] if isinstance(output, tuple) else output
            if isinstance(value, torch.Tensor) and isinstance(output, torch.Tensor):
                calls[name] = (without_batch(value), without_batch(output))

        return hook

    for name, module in model.named_modules():
        handles.append(module.register_forward_hook(record(name), with_kwargs=True))
    with torch.no_grad():
        model(torch.tensor(TOKENS)[None], position_ids=torch.arange(NUM_TOKENS)[None])  # pyright: ignore
    for handle in handles:
        handle.remove()
    return SimpleNamespace(case=request.param, model=ours(request.param), calls=calls)


def assert_same(got, want):
    np.testing.assert_allclose(np.asarray(got), want, atol=2e-5, rtol=2e-5)


def family_of(case: str) -> str:
    family = case.split("-")[0]
    return family if family in NAMES else "llama"


def test_norms_and_feed_forward_equal_transformers(traced):
    family, num_compared = family_of(traced.case), 0
    for path, name in NAMES[family].items():
        call = traced.calls.get(f"{layer_prefix(traced.case, 1)}.{name}")
        if call is None:
            continue
        module = traced.model.layers[1]
        for part in path.split("."):
            module = getattr(module, part)
        rows = jnp.asarray(call[0])
        assert_same(module(rows, Backend.XLA)[0] if path == "mlp" else module(rows), call[1])
        num_compared += 1
    assert num_compared >= 2
    if traced.model.final_norm is not None:
        value, output = traced.calls[FINAL[family]]
        assert_same(traced.model.final_norm(jnp.asarray(value)), output)


def test_embedding_and_head_equal_transformers(traced):
    positions = jnp.arange(NUM_TOKENS, dtype=jnp.int32)
    hidden = traced.model.embed_tokens(jnp.asarray(TOKENS), positions)
    assert_same(hidden, traced.calls[layer_prefix(traced.case, 0)][0])
    value, logits = traced.calls["lm_head"]
    if traced.case == "opt-350m":  # the head's input is projected in jpaged's `logits`
        _, value = traced.calls[layer_prefix(traced.case, 1)]
    assert_same(traced.model.logits(jnp.asarray(value)), logits)


def test_decoder_layer_equals_transformers(traced):
    model, layer = traced.model, 1
    value, output = traced.calls[layer_prefix(traced.case, layer)]
    blocks, positions = np.arange(TABLE_WIDTH, 0, -1), np.arange(NUM_TOKENS)
    slots = blocks[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    attention = AttentionInputs(
        block_tables=jnp.asarray(blocks[None], jnp.int32),
        seq_lens=jnp.asarray([NUM_TOKENS], jnp.int32),
        slot_mapping=jnp.asarray(slots, jnp.int32),
        query_start_loc=jnp.asarray([0, NUM_TOKENS], jnp.int32),
        backend=Backend.XLA,
    )
    angles, rope = None, model.config.layers[layer].rope
    if rope is not None:
        angles = rope_angles(jnp.asarray(positions, jnp.int32), rope, model.config.head_size)
    kv = poisoned_pool(model, jnp.float32)[layer]
    hidden, update, _ = jax.jit(model.layers[layer])(
        jnp.asarray(value), None, kv, attention, angles
    )
    assert_same(hidden if update is None else hidden + update[0], output)


@pytest.mark.parametrize("case", ["llama", "llama3-biases", "llama-linear-mha"])
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
def test_rotation_at_large_positions_is_exact(theta):
    """A frequency error of one ulp is an angle error of 1e-2 after a hundred thousand tokens."""
    rope = {"rope_type": "default", "rope_theta": theta}
    config = LlamaConfig(hidden_size=1024, num_attention_heads=8, rope_parameters=rope)
    places = torch.tensor([8_191, 131_071])
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), places[None])
    ours_config = RopeConfig(theta, "default", 1.0, 1.0, 1.0, 8192)
    angles = rope_angles(jnp.asarray(places.numpy(), jnp.int32), ours_config, 128)
    for got, want in zip(angles, (cos, sin), strict=True):
        np.testing.assert_allclose(got, want[0, :, :64].numpy(), atol=2e-4)


def test_llama3_rope_scaling_equals_transformers():
    """The numbers of Llama 3.1 cover all three ranges of wavelengths."""
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
