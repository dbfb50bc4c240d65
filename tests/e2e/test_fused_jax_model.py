"""Test that a user's JAX model with fused operations computes the same as a model in plain JAX."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from e2e_options import LOOPS
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh
from test_batch_invariance import (
    COMMON,
    COMPOSITIONS,
    check_bits,
    check_scores,
    optimized_programs,  # noqa: F401  # a fixture
)
from test_jax_model import (
    GREEDY,
    PREFIX,
    PROMPTS,
    VOCAB_SIZE,
    DenseStep,
    greedy_tokens,
    make_engine,
    tokens,
    user_settings,
)

from examples import fused_jax_llama, plain_jax_llama
from jpaged import JaxModel
from jpaged.models.jax_model import plan_jax_model
from jpaged.models.model_ops import ModelOps
from jpaged.models.model_step import LayerHeads
from jpaged.models.model_trace import TracedStep
from pallas_kernels import Backend

WIDTH, HEAD_SIZES, KV_HEADS, NUM_HEADS = 32, (8, 16), (2, 2), (4, 2)


class DenseOps(DenseStep):
    """Implement the fused operations in plain JAX, for the tokens of one sequence, without a KV
    cache."""

    def project(self, x: Any, weight: Any) -> Any:
        return jnp.tensordot(x, weight, x.ndim - 1)

    def gated_project(self, x: Any, weight: Any) -> Any:
        return jax.nn.silu(x @ weight[:, 0]) * (x @ weight[:, 1])

    def project_vocabulary(self, hidden: Any, table: Any) -> Any:
        return hidden @ table.T

    def rms_norm(self, x: Any, weight: Any, *, eps: float) -> Any:
        return x / jnp.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight

    def add_rms_norm(self, hidden: Any, update: Any, weight: Any, *, eps: float) -> Any:
        total = hidden if update is None else hidden + update
        return self.rms_norm(total, weight, eps=eps), total

    def rope_attend(self, layer: int, qkv: Any, angles: Any, *, norms: Any = None, **options: Any):
        ends = qkv.shape[1] - 2 * KV_HEADS[layer], qkv.shape[1] - KV_HEADS[layer]
        q, k, v = jnp.split(qkv, ends, axis=1)
        if norms is not None:
            q, k = (
                self.rms_norm(it, w, eps=norms[2]) for it, w in zip((q, k), norms, strict=False)
            )
        if angles is not None:
            cos, sin = (it[:, None] for it in angles)
            halves = [jnp.split(it, 2, axis=-1) for it in (q, k)]
            q, k = (
                jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1) for a, b in halves
            )
        return self.attend(layer, q, k, v, **options)

    def experts(
        self, x: Any, router: Any, gate_up: Any, down: Any, *, num_experts_per_token: int, **_: Any
    ) -> Any:
        probabilities = jax.nn.softmax(x @ router.T, axis=-1)
        chosen, indices = jax.lax.top_k(probabilities, num_experts_per_token)
        weights = jnp.zeros_like(probabilities)
        weights = weights.at[jnp.arange(len(x))[:, None], indices].set(
            chosen / chosen.sum(axis=-1, keepdims=True)
        )
        each = [self.gated_project(x, gate_up[e]) @ down[e] for e in range(len(down))]
        return jnp.einsum("te,etd->td", weights, jnp.stack(each))


def fused_forward(params: Any, tokens: Any, positions: Any, step: Any) -> Any:
    """Compute two layers with different numbers of heads. The second layer normalizes queries and
    keys per head, and has experts."""
    x, update = params["embed"][tokens], None
    for i, p in enumerate(params["layers"]):
        angle = positions[:, None] / 100 ** (jnp.arange(0, HEAD_SIZES[i], 2) / HEAD_SIZES[i])
        h, x = step.add_rms_norm(x, update, p["norm"], eps=1e-5)
        options: Any = {"window": 9, "soft_cap": 2.0} if i == 0 else {"norms": (*p["heads"], 1e-5)}
        angles = jnp.cos(angle), jnp.sin(angle)
        out = step.rope_attend(i, step.project(h, p["qkv"]), angles, **options)
        h, x = step.add_rms_norm(x, step.project(out, p["out"]), p["norm"], eps=1e-5)
        if i == 0:
            update = step.project(step.gated_project(h, p["gate_up"]), p["down"])
        else:
            options = {"num_experts_per_token": 2, "normalize": True}
            update = step.experts(h, p["router"], p["gate_up"], p["down"], **options)
    return step.add_rms_norm(x, update, params["norm"], eps=1e-5)[0]


def fused_logits(params: Any, hidden: Any, step: Any) -> Any:
    return step.project_vocabulary(step.rms_norm(hidden, params["norm"], eps=1e-5), params["embed"])


FUSED = JaxModel(
    fused_forward,
    fused_logits,
    num_layers=2,
    num_kv_heads=KV_HEADS,
    head_size=HEAD_SIZES,
    vocab_size=VOCAB_SIZE,
    max_positions=128,
)


@cache
def fused_params() -> dict[str, Any]:
    rng = np.random.default_rng(0)

    def make(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape) / 4, jnp.float32)

    layers = []
    for heads, kv_heads, size in zip(NUM_HEADS, KV_HEADS, HEAD_SIZES, strict=True):
        qkv, out = make(WIDTH, heads + 2 * kv_heads, size), make(heads, size, WIDTH)
        layers.append({"norm": 1 + make(WIDTH), "qkv": qkv, "out": out})
    layers[0] |= {"gate_up": make(WIDTH, 2, 48), "down": make(48, WIDTH)}
    layers[1] |= {"heads": (1 + make(16), 1 + make(16)), "router": make(4, WIDTH)}
    layers[1] |= {"gate_up": make(4, WIDTH, 2, 24), "down": make(4, 24, WIDTH)}
    return {"embed": 4 * make(VOCAB_SIZE, WIDTH), "norm": 1 + make(WIDTH), "layers": layers}


def dense_model(model: JaxModel) -> JaxModel:
    """Return `model` with plain JAX operations instead of the fused operations. The function
    `logits` of the returned model has no parameter `step`, because `greedy_tokens` passes none."""
    forward, logits = model.forward, model.logits
    return replace(
        model,
        forward=lambda params, tokens, positions, _: forward(params, tokens, positions, DenseOps()),
        logits=lambda params, hidden: logits(params, hidden, step=DenseOps()),
    )


@pytest.mark.parametrize(
    ("loop", "options"),
    [
        ("overlapped", {}),
        pytest.param(
            "synchronous",
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 1}},
            marks=pytest.mark.full,
        ),
    ],
)
def test_fused_operations_compute_what_plain_jax_computes(loop: str, options: dict[str, Any]):
    engine, dense = make_engine(FUSED, fused_params(), **LOOPS[loop], **options), dense_model(FUSED)
    want = [greedy_tokens(dense, fused_params(), prompt) for prompt in PROMPTS]
    assert tokens(engine.generate(PROMPTS, GREEDY)) == want
    if not options:
        return
    (score,) = engine.score_completions([PREFIX], [[4, 5, 6]])
    rows = jnp.asarray([*PREFIX, 4, 5, 6], jnp.int32)
    with user_settings():
        hidden = dense.forward(fused_params(), rows, jnp.arange(len(rows)), None)
        logprobs = jax.nn.log_softmax(dense.logits(fused_params(), hidden))
    expected = logprobs[len(PREFIX) - 1 + np.arange(3), jnp.asarray([4, 5, 6])]
    np.testing.assert_allclose(score.logprobs, expected, atol=1e-4)


@pytest.mark.full
def test_fused_jax_llama_generates_the_same_tokens_as_plain_jax_llama(shallow_folder: Path):
    prompt = [*range(3, 40)]
    answers, scores = [], []
    for example in (plain_jax_llama, fused_jax_llama):
        engine = make_engine(*example.load(shallow_folder))
        answers.append(tokens(engine.generate([prompt, prompt[:9]], GREEDY)))
        scores += [it.logprobs for it in engine.score_completions([prompt], [[5, 6, 7]])]
    assert answers[0] == answers[1]
    np.testing.assert_allclose(scores[0], scores[1], atol=1e-4)


def test_sum_of_partial_products_equals_the_matrix_product():
    ops, x = ModelOps(Backend.XLA), jnp.arange(12.0).reshape(2, 6)
    weight = jnp.arange(24.0).reshape(6, 4)
    product = ops.project(x, weight)
    np.testing.assert_allclose(product.sum(), x @ weight, rtol=1e-6)
    heads = ops.project(x.reshape(2, 2, 3), weight.reshape(2, 3, 2, 2))
    np.testing.assert_allclose(heads.sum().reshape(2, 4), x @ weight, rtol=1e-6)


def changed(change: Callable[[Any], Any]) -> JaxModel:
    """Return the fused model with a `forward` that calls `change(step)` before the layers."""

    def forward(params: Any, tokens: Any, positions: Any, step: Any) -> Any:
        change(step)
        return fused_forward(params, tokens, positions, step)

    return replace(FUSED, forward=forward)


ROWS, HALF = jnp.zeros((8, WIDTH)), jnp.zeros((8, 4))
QKV, HEAD = jnp.zeros((8, 8, 8)), jnp.ones(8)


def wrong_experts(gate_up: tuple[int, ...] = (4, WIDTH, 2, 16), width: int = WIDTH) -> Any:
    arrays = jnp.zeros((4, WIDTH)), jnp.zeros(gate_up), jnp.zeros((4, 16, width))
    return lambda step: step.experts(ROWS, *arrays, num_experts_per_token=2)


FAULTS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "inputs": (
        lambda step: step.project(ROWS, jnp.zeros((31, 4))),
        r"project: weight has shape \[31, 4\], but must be .* inputs = \[32\]",
    ),
    "dtype": (
        lambda step: step.project(ROWS, jnp.zeros((32, 4), jnp.bfloat16)),
        "weight.*bfloat16.*float32",
    ),
    "epsilon": (
        lambda step: step.rms_norm(ROWS, ROWS[0], eps=-1.0),
        "rms_norm: eps=-1.0: pass a positive number",
    ),
    "heads": (
        lambda step: step.rope_attend(0, jnp.zeros((8, 5, 8)), None),
        r"layer 0: qkv has shape \[8, 5, 8\], but must be \[T, N \+ 2 K, H\] = \[8, N \+ 4, 8\]",
    ),
    "angles": (
        lambda step: step.rope_attend(0, jnp.zeros((8, 8, 8)), (HALF, HALF[:, :3])),
        r"layer 0: angles has .* and float32\[8, 3\], but must be two arrays float32\[T, H / 2\]",
    ),
    "norm": (
        lambda step: step.rms_norm(ROWS, HEAD[:1], eps=1e-5),
        r"rms_norm: the weight of the norm has shape \[1\], but must have shape \[32\]",
    ),
    "norm of heads": (
        lambda step: step.rope_attend(0, QKV, None, norms=(HEAD, HEAD[:1], 1e-5)),
        r"layer 0: the weight of the norm has shape \[1\], but must have shape \[8\]",
    ),
    "gate and up": (
        wrong_experts(gate_up=(4, WIDTH, 16, 2)),
        r"experts: gate_up has shape \[4, 32, 16, 2\], but must be \[E, D, 2, F\]",
    ),
    "width of experts": (
        wrong_experts(width=1),
        r"experts: down has shape \[4, 16, 1\], but must be \[E, F, D\] = \[4, 16, 32\]",
    ),
    "twice": (
        lambda step: step.rope_attend(0, jnp.zeros((8, 8, 8)), None),
        "rope_attend was called twice for layer 0",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_wrong_call_of_a_fused_operation_is_refused(name: str):
    change, message = FAULTS[name]
    with pytest.raises((TypeError, ValueError), match=message):
        make_engine(changed(change), fused_params())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"angles": (HALF,)}, r"layer 0: angles has float32\[8, 4\], but must be two arrays"),
        ({"angles": None, "window": 9.0}, r"layer 0: window=9\.0: pass an int, or None"),
        ({"angles": None, "norms": (HEAD, HEAD)}, "layer 0: norms has 2 entries: pass the weights"),
        ({"angles": None, "norms": (HEAD, HEAD, None)}, "layer 0: eps=None: pass a positive numb"),
    ],
)
def test_error_names_the_invalid_argument(options: dict[str, Any], message: str):
    # Call the function without its beartype decorator, which would reject the arguments before the
    # checks of the function run.
    unchecked = inspect.unwrap(TracedStep.rope_attend)
    with pytest.raises((TypeError, ValueError), match=message):
        unchecked(TracedStep([LayerHeads(2, 8)], 8), 0, QKV, **options)


# The batch-invariant mode


@pytest.mark.full
@pytest.mark.usefixtures("optimized_programs")
@pytest.mark.parametrize("name", ["prefix hits", "recompute, chunks, synchronous"])
def test_logprobs_of_a_model_with_fused_operations_have_the_same_bits_in_any_batch(
    shallow_folder: Path, name: str
):
    model, params = fused_jax_llama.load(shallow_folder)
    common: dict[str, Any] = {**COMMON, "max_model_len": None}
    del common["skip_tokenizer_init"]
    alone = make_engine(model, params, **common, enable_prefix_caching=False)
    engine = make_engine(model, params, **common | COMPOSITIONS[name])
    check_bits(alone, engine)
    check_scores(alone)


def changed_logits(logits: Callable[[Any, Any], Any]) -> JaxModel:
    return replace(FUSED, logits=lambda params, hidden: logits(params, hidden))


SUMS: dict[str, tuple[JaxModel, str]] = {
    "product": (
        changed_logits(lambda params, hidden: hidden @ params["embed"].T),
        r"logits calls dot_general at .*test_fused_jax_model.py:\d+, .* use step.project, ",
    ),
    "sum in a jitted function": (
        changed(lambda step: jax.jit(jnp.mean)(step.rms_norm(ROWS, ROWS[0], eps=1.0))),
        "forward calls reduce_sum at .*test_fused_jax_model.py.* use an operation of step, such as",
    ),
    "sum in a loop": (
        changed(lambda step: jax.lax.map(lambda row: jnp.cumsum(row), ROWS)),
        "forward calls cumsum at .*test_fused_jax_model.py",
    ),
    "call of a library": (
        changed(lambda step: jax.ffi.ffi_call("other", ROWS)(ROWS)),
        "forward calls ffi_call at",
    ),
}


@pytest.mark.parametrize("name", SUMS)
def test_batch_invariant_engine_refuses_models_with_plain_jax_reductions(name: str):
    model, message = SUMS[name]
    with pytest.raises(ValueError, match=message):
        make_engine(model, fused_params(), batch_invariant=True)


def test_batch_invariant_engine_accepts_models_that_sum_integers_in_plain_jax():
    model = changed(lambda step: jnp.cumsum(jnp.arange(8)).sum())
    device = jax.local_devices()[0]
    with user_settings():
        plan = plan_jax_model(model, fused_params(), device, batch_invariant=True)
    assert plan.config.batch_invariant
    with pytest.raises(ValueError, match="batch_invariant=True does not support a KV cache of fp8"):
        make_engine(FUSED, fused_params(), batch_invariant=True, kv_cache_dtype="fp8")


def test_batch_invariant_step_accepts_any_number_of_experts_on_a_gpu():
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    step = TracedStep((), 8, Backend.TRITON, batch_invariant=True)
    shapes = (8, 64), (6, 64), (6, 64, 2, 64), (6, 64, 64)
    arrays = [jax.ShapeDtypeStruct(it, jnp.bfloat16) for it in shapes]
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        out = jax.eval_shape(partial(step.experts, num_experts_per_token=2), *arrays)
    assert out.shape == shapes[0]
