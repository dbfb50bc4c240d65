"""Compare the expert GEMMs of FP8 matrices with slow reference implementations."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import BF16, F8, F32, IMPLEMENTATIONS

from pallas_kernels import (
    FP8_GROUP_SIZE,
    Backend,
    Routing,
    block_scaled_expert_down_gemm,
    block_scaled_expert_gated_gemm,
    experts,
    route,
    scaled_expert_down_gemm,
    scaled_expert_gated_gemm,
)
from tests.reference import kernels as reference

NUM_EXPERTS, NUM_CHOICES = 4, 2
OPS = {
    "channel": (scaled_expert_gated_gemm, scaled_expert_down_gemm),
    "block": (block_scaled_expert_gated_gemm, block_scaled_expert_down_gemm),
}


def make_routing(num_tokens: int, num_real: int | None = None) -> Routing:
    logits = np.random.default_rng(1).standard_normal((num_tokens, NUM_EXPERTS))
    logits[:, 2] = -9  # this expert is never chosen
    count = None if num_real is None else jnp.int32(num_real)
    choose = partial(route, num_experts_per_token=NUM_CHOICES, backend=Backend.XLA)
    return jax.jit(choose)(jnp.asarray(logits, F32), num_tokens=count)


def num_blocks(size: int) -> int:
    return -(-size // FP8_GROUP_SIZE)


def random_fp8(rng: np.random.Generator, *shape: int) -> jax.Array:
    return jnp.asarray(rng.standard_normal(shape) * 60, F8)


def make_rows(kind: str, num_rows: int, width: int) -> tuple[jax.Array, jax.Array, np.ndarray]:
    """Return random FP8 rows, their scales, and the scales broadcast to the shape of the rows."""
    rng = np.random.default_rng(num_rows)
    groups = num_blocks(width) if kind == "block" else 1
    scale = rng.uniform(1e-3, 1e-2, (num_rows, groups)).astype(np.float32)
    wide = np.repeat(scale, FP8_GROUP_SIZE if kind == "block" else width, axis=1)[:, :width]
    return (
        random_fp8(rng, num_rows, width),
        jnp.asarray(scale if kind == "block" else scale[:, 0]),
        wide,
    )


def make_weights(
    kind: str, parts: int, size: int, depth: int
) -> tuple[jax.Array, jax.Array, np.ndarray]:
    """Return random FP8 weights of all experts, their scales, and the scales broadcast to the shape
    of the weights."""
    rng = np.random.default_rng(depth)
    weight = random_fp8(rng, NUM_EXPERTS, parts * size, depth)
    if kind == "channel":
        scale = rng.uniform(1e-3, 1e-2, (NUM_EXPERTS, parts * size)).astype(np.float32)
        return weight, jnp.asarray(scale), np.repeat(scale[:, :, None], depth, axis=2)
    shape = NUM_EXPERTS, parts, num_blocks(size), num_blocks(depth)
    scale = rng.uniform(1e-3, 1e-2, shape).astype(np.float32)
    wide = np.repeat(np.repeat(scale, FP8_GROUP_SIZE, axis=2), FP8_GROUP_SIZE, axis=3)
    wide = wide[:, :, :size, :depth].reshape(NUM_EXPERTS, parts * size, depth)
    return weight, jnp.asarray(scale.reshape(NUM_EXPERTS, -1, shape[3])), wide


def assert_close(got: jax.Array, want: np.ndarray, dtype: Any, backend: Backend) -> None:
    """Check that the error is at most the rounding to `dtype`, or the error of FP8 tensor cores."""
    allowed = 2e-3 if backend is Backend.TRITON else 0
    allowed = max(allowed, float(jnp.finfo(dtype).eps))
    error = np.abs(np.asarray(got, np.float64) - want).max()
    assert error <= max(allowed, 2e-6) * np.abs(want).max()


@pytest.mark.parametrize("backend", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("kind", "num_tokens", "num_real", "width", "inner", "dtype"),
    [
        ("channel", 37, 33, 40, 24, F32),
        ("block", 37, 33, 192, 160, F32),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in [
                ("channel", 1, None, 64, 48, BF16),
                ("channel", 9, 0, 128, 64, F32),
                ("channel", 130, 121, 256, 128, BF16),
                ("block", 130, 121, 128, 320, BF16),
                ("block", 1, None, 128, 256, BF16),
                ("block", 70, None, 40, 72, F32),
                ("block", 9, 0, 128, 128, F32),
            ]
        ),
    ],
)
def test_fp8_experts_equal_the_reference(
    kind, num_tokens, num_real, width, inner, dtype, backend: Backend
):
    gated, down = (jax.jit(partial(op, dtype=dtype, backend=backend)) for op in OPS[kind])
    routing = make_routing(num_tokens, num_real)
    weights, chosen, _, positions, offsets = map(np.asarray, routing)
    is_routed = chosen < NUM_EXPERTS
    x, x_scale, x_scales = make_rows(kind, num_tokens, width)
    weight, scale, scales = make_weights(kind, 2, inner, width)
    got = gated(x, weight, x_scale, scale, routing)
    want = reference.scaled_expert_gated_gemm(x, weight, x_scales, scales, chosen)
    assert (got.shape, got.dtype) == ((num_tokens * NUM_CHOICES, inner), dtype)
    if is_routed.any():
        assert_close(got[positions][is_routed], want[is_routed], dtype, backend)
    x, x_scale, x_scales = make_rows(kind, num_tokens * NUM_CHOICES, inner)
    # Padding tokens are routed to no expert, so their rows are undefined. Set the scales of these
    # rows to NaN. The result must not change.
    undefined = jnp.arange(len(x)) >= offsets[-1]
    x_scale = jnp.where(undefined.reshape(-1, *[1] * (x_scale.ndim - 1)), jnp.nan, x_scale)
    weight, scale, scales = make_weights(kind, 1, width, inner)
    got = down(x, weight, x_scale, scale, routing)
    pairs = np.asarray(x)[positions], weight, x_scales[positions], scales
    want = reference.scaled_expert_down_gemm(*pairs, weights, chosen)
    assert (got.shape, got.dtype) == ((num_tokens, width), dtype)
    assert_close(got, want, dtype, backend)


@pytest.mark.parametrize("kind", ["channel", pytest.param("block", marks=pytest.mark.full)])
def test_only_fp8_weights_of_chosen_experts_are_converted_to_float32(kind: str):
    """On a CPU, XLA computes FP8 products in float32. It must convert only the weights of chosen
    experts."""
    count, width, inner = 64, 128, 128
    gated, down = (partial(op, dtype=F32, backend=Backend.XLA) for op in OPS[kind])
    blocks = (2, 1), (1, 1)
    shapes = blocks if kind == "block" else ((2 * inner,), (width,))
    scales = [jax.ShapeDtypeStruct((count, *shape), F32) for shape in shapes]
    gate_up = jax.ShapeDtypeStruct((count, 2 * inner, width), F8)
    narrow = jax.ShapeDtypeStruct((count, width, inner), F8)
    groups = (1,) if kind == "block" else ()
    rows = [jax.ShapeDtypeStruct((n, width), F8) for n in (4, 8)]
    row_scales = [jax.ShapeDtypeStruct((n, *groups), F32) for n in (4, 8)]

    def run(logits, rows, row_scales, weights, scales):
        routing = route(logits, 2, backend=Backend.XLA)
        inner = gated(rows[0], weights[0], row_scales[0], scales[0], routing)
        return inner, down(rows[1], weights[1], row_scales[1], scales[1], routing)

    logits = jax.ShapeDtypeStruct((4, count), F32)
    arguments = logits, rows, row_scales, [gate_up, narrow], scales
    memory = jax.jit(run).lower(*arguments).compile().memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < gate_up.size // 2


WRONG_SCALES = {
    "channel": (r"x_scale has shape \(2,\)", r"weight_scale has shape \(4, 287\)"),
    "block": (r"x_scale has shape \(2, 2\)", r"weight_scale has shape \(4, 3, 2\)"),
}


@pytest.mark.parametrize("kind", ["channel", pytest.param("block", marks=pytest.mark.full)])
def test_fp8_expert_gemms_refuse_arguments_of_wrong_shape_or_dtype(kind: str):
    wrong_rows, wrong_scale = WRONG_SCALES[kind]
    routing, width, inner, grouped = make_routing(3), 160, 144, kind == "block"
    x, x_scale, _ = make_rows(kind, 3, width)
    weight, scale, _ = make_weights(kind, 2, inner, width)

    def check(x=x, weight=weight, x_scale=x_scale, scale=scale, activation="silu"):
        arguments = x, weight, x_scale, scale, routing, activation
        experts.check_fp8_gated_gemm(*arguments, grouped=grouped)

    check()
    with pytest.raises(ValueError, match=wrong_rows):
        check(x_scale=x_scale[1:])
    with pytest.raises(ValueError, match=wrong_scale):
        check(scale=scale[:, 1:])
    with pytest.raises(ValueError, match="weight has 287 rows: pass an even number"):
        check(weight=weight[:, 1:])
    with pytest.raises(ValueError, match="activation is 'relu'; it must be silu"):
        check(activation="relu")
    with pytest.raises(TypeError, match="weight has dtype float32"):
        check(weight=weight.astype(F32))
    with pytest.raises(TypeError, match="weight_scale has dtype bfloat16"):
        check(scale=scale.astype(BF16))
    with pytest.raises(ValueError, match=r"routing\.offsets has shape"):
        check(weight=weight[1:])
    x, x_scale, _ = make_rows(kind, 6, inner)
    weight, scale, _ = make_weights(kind, 1, width, inner)
    experts.check_fp8_down_gemm(x, weight, x_scale, scale, routing, grouped=grouped)
    with pytest.raises(ValueError, match="weight_scale has shape"):
        experts.check_fp8_down_gemm(x, weight, x_scale, scale[:, 1:], routing, grouped=grouped)
    with pytest.raises(ValueError, match="x has 5 rows; it must have 6: one row per token"):
        experts.check_fp8_down_gemm(x[1:], weight, x_scale, scale, routing, grouped=grouped)


@pytest.mark.full
@pytest.mark.parametrize("kind", OPS)
def test_fp8_expert_ops_of_no_tokens_return_no_rows(kind: str):
    options: dict[str, Any] = {"dtype": F32, "backend": Backend.XLA}
    (gated, down), routing = OPS[kind], make_routing(0)
    for op, parts, size, depth, shape in (
        (gated, 2, 144, 160, (0, 144)),
        (down, 1, 160, 144, (0, 160)),
    ):
        x, x_scale, _ = make_rows(kind, 0, depth)
        weight, scale, _ = make_weights(kind, parts, size, depth)
        assert op(x, weight, x_scale, scale, routing, **options).shape == shape
