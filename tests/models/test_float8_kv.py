"""Test models with a float8 KV pool against a slow attention over rounded keys and values."""

from dataclasses import replace
from functools import cache
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
import pytest
from harness import NUM_TOKENS, Harness, PagedSequence
from hf_models import build, config_of, ours
from hf_models import reference as transformers_model

from jpaged.models.attention import AttentionInputs
from jpaged.models.config import LayerConfig
from jpaged.models.decoder import Decoder
from jpaged.models.norm import add_norm, norm_update
from pallas_kernels import Backend, sum_partials
from tests.covering import covering
from tests.reference import kernels as reference

CASES = ("gpt2", "opt-350m", "llama3-biases", "mistral-window", "qwen3-biases", "gemma3-scaled")
OF_ALL_OPTIONS = ("gpt2", "opt-350m", "qwen3-biases", "gemma3-scaled")
"""Cases of the default tier: learned positions, norms after a layer, head norms, windows."""

FAST = ("llama3-biases", "gemma3-scaled")
TOKENS = np.random.RandomState(5).randint(2, 97, NUM_TOKENS + 4).tolist()

# Maximum `distance` between two computations of the same logits. A different order of float32
# additions rounds a few values to another float8 number, which gives distances of up to 3e-5.
BOUND = 1e-4
# Maximum `distance` between logits with and without float8 keys and values. Rounding to float8
# changes a value by up to 1/16. The measured distances are 0.01 to 0.054.
ROUNDED = 0.08


@cache
def narrow(case: str, scales: tuple[float, float]) -> Decoder:
    """Return a model for the configuration `case`, with a float8 KV cache and with `scales` for
    keys and values."""
    config = replace(config_of(case), kv_cache_dtype="float8_e4m3fn")
    tensors = {name: it.numpy() for name, it in transformers_model(case).state_dict().items()}
    filled = {"k_scale": scales[0], "v_scale": scales[1]}
    return build(config, tensors, jnp.float32, filled)


def logits_of(model: Decoder, pool_dtype: Any = jnp.float8_e4m3fn) -> np.ndarray:
    """Return the logits of every token of a sequence. The model computes the prompt in two chunks,
    and the last four tokens in four decode steps."""
    harness, sequence = Harness(model, pool_dtype=pool_dtype), PagedSequence(TOKENS)
    chunks = [NUM_TOKENS - 9, 9, 1, 1, 1, 1]
    return np.concatenate([harness.step([(sequence, n)])[0] for n in chunks])


def slow_logits(model: Decoder, scales: tuple[float, float]) -> np.ndarray:
    """Return logits with a slow attention that reads keys and values rounded to float8."""

    def run_layers(layers, hidden, pool, attention, angles):
        update = None
        for layer, layer_angles in zip(layers, angles, strict=True):
            hidden, update = run(layer, hidden, update, attention.backend, layer_angles)
        return hidden, update, pool

    def run(layer, hidden, update, backend, angles):
        if "sum" in layer.norm_positions:
            update = attend(layer.attention, hidden, angles, backend, scales)
            hidden = layer.attention_norm(hidden + sum_partials(update, hidden.dtype))
            update = sum_partials(layer.mlp(hidden, backend), hidden.dtype)
            return layer.mlp_norm(hidden + update), None
        rows, hidden = add_norm(layer.attention_norm, hidden, update, backend)
        update = attend(layer.attention, rows, angles, backend, scales)
        update = norm_update(layer.attention_out_norm, update, hidden.dtype)
        rows, hidden = add_norm(layer.mlp_norm, hidden, update, backend)
        return hidden, norm_update(layer.mlp_out_norm, layer.mlp(rows, backend), hidden.dtype)

    nothing = jnp.zeros(1, jnp.int32)
    inputs = AttentionInputs(nothing[None], nothing, nothing, None, Backend.XLA)
    positions = jnp.arange(len(TOKENS), dtype=jnp.int32)
    hidden, _ = model(jnp.asarray(TOKENS, jnp.int32), positions, (), inputs, run_layers)
    return np.asarray(model.logits(hidden))


def attend(module, rows, angles, backend, scales):
    layer: LayerConfig = module.layer_config
    qkv = module.qkv(rows, backend)
    num_kv_heads = dict(module.qkv.projection.parts)["k"]
    num_tokens, size = qkv.shape[1], qkv.shape[3]
    empty = [np.zeros((1, num_tokens, num_kv_heads, size))] * 2
    slots, table = np.arange(num_tokens), np.zeros((1, 1), np.int32)
    norms, dtype = module.head_norms(), cast(Any, np.float32)
    q, pool = reference.rope_write_kv(qkv, empty, slots, angles, norms, dtype=dtype)
    out = reference.paged_prefill_attention(
        q,
        [reference.float8(part, scale) for part, scale in zip(pool, scales, strict=True)],
        table,
        [0, num_tokens],
        [num_tokens],
        scale=layer.scale,
        soft_cap=layer.soft_cap,
        sliding_window=layer.sliding_window,
        scales=scales,
        dtype=dtype,
    )
    return module.output(jnp.asarray(out, jnp.float32), backend)


def distance(one: np.ndarray, other: np.ndarray) -> float:
    """Return the mean absolute difference, divided by the standard deviation of `other`."""
    assert np.isfinite(one).all()
    return float(np.abs(one - other).mean() / other.std())


SCALES = (0.03, 0.4)


@pytest.mark.parametrize(
    ("case", "scales"),
    covering(
        CASES,
        [SCALES, (1.0, 1.0)],
        strength=0,
        keep=lambda case, scales: scales == SCALES and case in OF_ALL_OPTIONS,
    ),
)
def test_logits_with_a_float8_kv_cache_equal_logits_with_rounded_keys_and_values(
    case: str, scales: tuple[float, float]
):
    got = logits_of(narrow(case, scales))
    assert distance(got, slow_logits(ours(case), scales)) <= BOUND


FULL = [pytest.param(case, marks=pytest.mark.full) for case in CASES if case not in FAST]


@pytest.mark.parametrize("case", [*FAST, *FULL])
def test_float8_rounding_changes_logits_little(case: str):
    wide = logits_of(ours(case), jnp.float32)
    assert 10 * BOUND < distance(logits_of(narrow(case, (1.0, 1.0))), wide) <= ROUNDED


def test_too_small_kv_scale_saturates_keys_or_values():
    case, small = "llama3-biases", 2.0**-12
    wide = logits_of(ours(case), jnp.float32)
    for scales in ((small, 1.0), (1.0, small)):
        got = logits_of(narrow(case, scales))
        assert distance(got, wide) > ROUNDED
        assert distance(got, slow_logits(ours(case), scales)) <= BOUND
        assert distance(got, slow_logits(ours(case), (scales[1], scales[0]))) > 10 * BOUND
