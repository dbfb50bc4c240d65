"""Test decode steps with fused layers: one kernel computes all operations between two attention
layers."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from jpaged.models.attention import AttentionInputs
from jpaged.models.decoder import Decoder
from jpaged.models.registry import read_model_config
from jpaged.runtime import fused_layers
from pallas_kernels import Backend, LayerKV

H200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
ROWS, BLOCK_SIZE, NUM_BLOCKS = 8, 8, 25
SHAPE = {"vocab_size": 97, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
SHAPE |= {"max_position_embeddings": 128, "hidden_act": "silu", "torch_dtype": "float32"}


def make_model(family, dtype=jnp.float32, **changes):
    config = read_model_config(SHAPE | {"model_type": family} | changes)
    model = nnx.eval_shape(lambda: Decoder(config, dtype=dtype))
    definition, state = nnx.split(model)
    rng = np.random.default_rng(0)

    def draw(leaf):
        return jnp.asarray(rng.standard_normal(leaf.shape) * 0.1, leaf.dtype)

    return definition, jax.tree.map(draw, state), config


def step(definition, state, pool, backend=Backend.XLA):
    """Return the hidden states of a decode step of three sequences with 3, 9 and 17 tokens. The
    other rows are padding."""
    lens = jnp.asarray([3, 9, 17] + [0] * (ROWS - 3), jnp.int32)
    tables = jnp.arange(1, 1 + 3 * ROWS, dtype=jnp.int32).reshape(ROWS, 3)
    positions = jnp.maximum(lens - 1, 0)
    blocks = jnp.take_along_axis(tables, (positions // BLOCK_SIZE)[:, None], axis=1)[:, 0]
    slots = jnp.where(lens > 0, blocks * BLOCK_SIZE + positions % BLOCK_SIZE, 0)
    attention = AttentionInputs(tables, lens, slots, None, backend)
    tokens = jnp.arange(5, 5 + ROWS, dtype=jnp.int32)
    run = fused_layers.run_layers_fused
    return nnx.merge(definition, state)(tokens, positions, pool, attention, run)


def make_pool(config, dtype=jnp.float32):
    shape = (NUM_BLOCKS, BLOCK_SIZE, config.num_kv_heads, config.head_size)
    rng = np.random.default_rng(1)
    draw = lambda: jnp.asarray(rng.standard_normal(shape), dtype)  # noqa: E731
    return tuple(LayerKV(draw(), draw()) for _ in range(config.num_layers))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_fused_layers_give_the_results_of_separate_layers(family, monkeypatch):
    definition, state, config = make_model(family)
    pool, calls = make_pool(config), []
    want, want_pool = jax.jit(partial(step, definition))(state, pool)
    original = fused_layers.fused_layer

    def counted(*arguments, **options):
        calls.append(options["backend"])
        return original(*arguments, **options)

    monkeypatch.setattr(
        fused_layers, "new_exchange_memory", lambda *_, **__: jnp.zeros(1, jnp.int32)
    )
    monkeypatch.setattr(fused_layers, "fused_layer", counted)
    got, got_pool = jax.jit(partial(step, definition))(state, pool)
    assert calls
    np.testing.assert_allclose(got[:3], want[:3], rtol=1e-4, atol=1e-5)
    for a, b in zip(jax.tree.leaves(got_pool), jax.tree.leaves(want_pool), strict=True):
        np.testing.assert_allclose(a[1:], b[1:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "changes", "linked"),
    [
        ("llama", {}, True),
        ("qwen3", {}, True),
        ("qwen2", {}, False),  # biases of q, k and v
        ("llama", {"hidden_act": "gelu"}, False),
        ("llama", {"mlp_bias": True}, False),
        ("llama", {"attention_bias": True}, False),
        ("gemma3_text", {"hidden_activation": "silu"}, False),  # norms after attention and MLP
    ],
)
def test_only_supported_layers_are_fused(family, changes, linked):
    definition, state, _ = make_model(family, **changes)
    first, second = nnx.merge(definition, state).layers[:2]
    assert (fused_layers.fused_layer_weights(first, second) is not None) == linked


def test_fused_layers_launch_one_kernel_between_attentions():
    definition, state, config = make_model("qwen3", jnp.bfloat16)
    pool = make_pool(config, jnp.bfloat16)
    run = jax.jit(partial(step, definition, backend=Backend.TRITON))
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=H200)):
        text = run.trace(state, pool).lower(lowering_platforms=("cuda",)).as_text()
    # Fused layers need JAX 0.11, because the kernel has mutable arguments.
    num_links = config.num_layers - 1 if jax.__version_info__ >= (0, 11) else 0
    assert text.count("call @_run_fused_layer") == num_links
    assert text.count("call @_run_layer") == (0 if num_links else config.num_layers)
    # A layer that is not fused launches four GEMMs. JAX lowers equal layers once.
    assert text.count("custom_call @mosaic_gpu") == num_links + 4
    assert "stablehlo.dot_general" not in text
