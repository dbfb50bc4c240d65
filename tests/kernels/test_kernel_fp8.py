"""Numbers in FP8: how others become such numbers, and their products."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh
from kernel_cases import BF16, F16, F32, IMPLEMENTATIONS, require

from pallas_kernels import (
    FP8,
    FP8_GROUP,
    Backend,
    block_scaled_gemm,
    gemm,
    quantize_rows,
    scaled_gemm,
    to_fp8,
)
from tests.reference import kernels as reference

EVERY = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
NUMBERS = np.unique(EVERY[np.isfinite(EVERY.astype(np.float32))].astype(np.float32))


def test_every_number_of_fp8_is_itself():
    got = jax.jit(to_fp8)(jnp.asarray(NUMBERS), jnp.float32(1))
    assert got.dtype == FP8
    np.testing.assert_array_equal(np.asarray(got, np.float32), NUMBERS)


@pytest.mark.parametrize("scale", [1.0, 0.37])
def test_what_lies_between_two_becomes_the_nearest(scale: float):
    """Halfway between two too, where the even one is taken, and a little more and less."""
    halves = ((NUMBERS[1:] + NUMBERS[:-1]) / 2).astype(np.float32)
    x = np.concatenate([halves * np.float32(end) for end in (1 - 1e-6, 1 + 1e-6)])
    x = np.concatenate([halves, x]) if scale == 1 else x * np.float32(scale)
    got = jax.jit(to_fp8)(jnp.asarray(x), jnp.float32(scale))
    np.testing.assert_array_equal(np.asarray(got, np.float64), reference.to_fp8(x, scale))


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_what_is_beyond_the_largest_becomes_the_largest(dtype):
    x = jnp.asarray([448.0, 464.0, 465.0, 480.0, 1e4, -1e4, np.inf, -np.inf, np.nan], dtype)
    got = np.asarray(jax.jit(to_fp8)(x, jnp.float32(1)), np.float32)
    np.testing.assert_array_equal(got, [448] * 5 + [-448, 448, -448, np.nan])


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize(("grouped", "depth"), [(False, 96), (True, 256), (True, 192), (True, 40)])
def test_rows_have_the_largest_number_where_theirs_is(dtype, grouped: bool, depth: int):
    x = np.random.default_rng(0).standard_normal((5, depth)) * [[1.0], [1e-3], [300], [0], [1e-7]]
    x = jnp.asarray(x, dtype)
    values, scale = jax.jit(partial(quantize_rows, grouped=grouped))(x)
    group = FP8_GROUP if grouped else depth
    assert scale.shape == (5, -(-depth // group))
    for first in range(0, depth, group):
        own = np.asarray(x[:, first : first + group], np.float32)
        own_scale = np.asarray(scale)[:, first // group]
        largest = np.abs(own).max(1)
        np.testing.assert_allclose(own_scale[:3], largest[:3] / 448, rtol=2e-7)
        assert np.isfinite(own_scale).all()
        assert (own_scale >= np.finfo(np.float32).tiny).all()
        got = np.asarray(values[:, first : first + group], np.float64)
        np.testing.assert_array_equal(got, reference.to_fp8(own, own_scale[:, None]))
        np.testing.assert_array_equal(np.abs(got).max(1) == 448, largest > 0)


def test_a_row_that_several_devices_have_is_scaled_by_all_of_it():
    x = jnp.asarray([[1.0, -2.0], [2.0, 0.5]])
    values, scale = quantize_rows(x, across=lambda largest: jnp.maximum(largest, jnp.float32(4)))
    np.testing.assert_allclose(scale, np.full((2, 1), 4 / 448), rtol=2e-7)
    np.testing.assert_array_equal(np.asarray(values, np.float32), np.asarray(x) * 112)


def _numbers(rng: np.random.Generator, *shape: int) -> jax.Array:
    return jnp.asarray(rng.standard_normal(shape) * 60, FP8)


def _scales(rng: np.random.Generator, *shape: int) -> jax.Array:
    return jnp.asarray(rng.uniform(1e-3, 1e-2, shape), F32)


def _assert_gemm(got, exact, factors, dtype) -> None:
    """Rounded once to `dtype`, after sums in float32 of products of factors of that precision."""
    allowed = float(jnp.finfo(dtype).eps) + 4 * float(jnp.finfo(factors).eps)
    assert np.abs(np.asarray(got, np.float64) - exact).max() <= allowed * np.abs(exact).max()


@pytest.mark.parametrize("backend", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(
    ("rows", "depth", "width"), [(1, 64, 48), (16, 192, 256), (13, 33, 7), (96, 256, 128)]
)
def test_scaled_gemm(rows: int, depth: int, width: int, dtype, backend: Backend):
    require(backend)
    rng = np.random.default_rng(rows)
    x, weight = _numbers(rng, rows, depth), _numbers(rng, width, depth)
    scales = _scales(rng, rows), _scales(rng, width)
    run = jax.jit(partial(scaled_gemm, dtype=dtype, backend=backend))
    got = run(x, weight, *scales)
    assert (got.shape, got.dtype) == ((rows, width), dtype)
    exact = reference.scaled_gemm(x, weight, *(np.asarray(it)[:, None] for it in scales))
    _assert_gemm(got, exact, F32, dtype)


@pytest.mark.parametrize("backend", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(
    ("rows", "depth", "parts"),
    [(1, 128, [128]), (16, 256, [128, 256, 128]), (13, 192, [192, 64, 64]), (8, 40, [7])],
)
def test_block_scaled_gemm(rows: int, depth: int, parts: list[int], dtype, backend: Backend):
    """Blocks begin anew in each part, and the last ones may be smaller."""
    require(backend)
    rng = np.random.default_rng(rows)
    groups = -(-depth // FP8_GROUP)
    blocks = [-(-part // FP8_GROUP) for part in parts]
    x, weight = _numbers(rng, rows, depth), _numbers(rng, sum(parts), depth)
    x_scale, weight_scale = _scales(rng, rows, groups), _scales(rng, sum(blocks), groups)
    run = jax.jit(partial(block_scaled_gemm, rows_of_parts=parts, dtype=dtype, backend=backend))
    got = run(x, weight, x_scale, weight_scale)
    assert (got.shape, got.dtype) == ((rows, sum(parts)), dtype)
    group_of = np.arange(depth) // FP8_GROUP
    starts = np.cumsum([0, *blocks])
    block_of = np.concatenate(
        [start + np.arange(part) // FP8_GROUP for start, part in zip(starts, parts, strict=False)]
    )
    scales = np.asarray(x_scale)[:, group_of], np.asarray(weight_scale)[block_of][:, group_of]
    exact = reference.scaled_gemm(x, weight, *scales)
    _assert_gemm(got, exact, F32 if backend is Backend.XLA else BF16, dtype)


@pytest.mark.parametrize(
    ("kind", "depth", "is_direct"),
    [("NVIDIA H200", 64, True), ("NVIDIA H200", 72, False), ("NVIDIA A100", 64, False)],
)
def test_gpus_that_can_multiply_numbers_as_they_are(kind: str, depth: int, is_direct: bool):
    """cuBLASLt does where sides are multiples of 16; elsewhere they are widened first."""
    device = AbstractDevice(device_kind=kind, num_cores=None, platform="gpu")
    x, weight = (jax.ShapeDtypeStruct((n, depth), FP8) for n in (32, 48))
    scales = (jax.ShapeDtypeStruct((n,), F32) for n in (32, 48))
    run = jax.jit(partial(scaled_gemm, dtype=BF16, backend=Backend.TRITON))
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        text = run.trace(x, weight, *scales).lower(lowering_platforms=("cuda",)).as_text()
    (dot,) = re.findall(r"stablehlo.dot_general .*", text)
    assert ("f8E4M3FN" in dot) == is_direct
    assert ("bf16" in dot) != is_direct


ROWS, WEIGHT = jnp.zeros((4, 128), FP8), jnp.zeros((8, 128), FP8)
ONES = jnp.ones(4), jnp.ones(8)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((ROWS.astype(F32), WEIGHT, *ONES), TypeError, "x has dtype float32; .* float8_e4m3fn"),
        ((ROWS, WEIGHT.astype(BF16), *ONES), TypeError, "weight has dtype bfloat16"),
        ((ROWS, WEIGHT.T, *ONES), ValueError, r"weight has shape \(128, 8\)"),
        ((ROWS, WEIGHT, jnp.ones(3), ONES[1]), ValueError, r"x_scale has shape \(3,\)"),
        ((ROWS, WEIGHT, ONES[0], jnp.ones(4)), ValueError, r"weight_scale has shape \(4,\)"),
        ((ROWS, WEIGHT, ONES[0], ONES[1].astype(BF16)), TypeError, "weight_scale has dtype"),
    ],
)
def test_scales_and_factors_that_do_not_fit(arguments, error: type, words: str):
    with pytest.raises(error, match=words):
        gemm.check_scaled(*arguments)


@pytest.mark.parametrize(
    ("x_scale", "weight_scale", "parts", "words"),
    [
        ((4, 1), (1, 1), [9], r"rows_of_parts=\(9,\) must add up to the weight's 8 rows"),
        ((4, 2), (1, 1), [8], r"x_scale has shape \(4, 2\)"),
        ((4, 1), (1, 1), [4, 4], r"weight_scale has shape \(1, 1\); .* blocks = 2"),
    ],
)
def test_blocks_that_do_not_fit(x_scale, weight_scale, parts, words: str):
    with pytest.raises(ValueError, match=words):
        gemm.check_block_scaled(ROWS, WEIGHT, jnp.ones(x_scale), jnp.ones(weight_scale), parts)
