"""Test quantization to FP8 and GEMMs of FP8 factors."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice
from kernel_cases import BF16, F16, F32, KERNEL_CALL, lower, on_backends, with_dtypes

from pallas_kernels import (
    FP8,
    FP8_GROUP_SIZE,
    Backend,
    add_rms_norm,
    add_rms_norm_to_fp8,
    block_scaled_gated_gemm,
    block_scaled_gemm,
    gemm,
    quantize_rows,
    scaled_gated_gemm,
    scaled_gemm,
    to_fp8,
)
from pallas_kernels.gemm import fp8_hopper
from pallas_kernels.gemm.tuning import FewRowsConfig, ManyFP8RowsConfig
from pallas_kernels.tuning import is_hopper
from tests.covering import covering
from tests.reference import kernels as reference

NUMBERS = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
NUMBERS = np.unique(NUMBERS[np.isfinite(NUMBERS)])


@pytest.mark.parametrize("scale", [1.0, 0.37])
def test_values_are_rounded_to_the_nearest_fp8_number(scale: float):
    """Test FP8 numbers, midpoints of two numbers (rounded to even) and values near midpoints."""
    halves = ((NUMBERS[1:] + NUMBERS[:-1]) / 2).astype(np.float32)
    x = np.concatenate([halves * np.float32(end) for end in (1 - 1e-6, 1 + 1e-6)])
    x = np.concatenate([NUMBERS, halves, x]) if scale == 1 else x * np.float32(scale)
    got = jax.jit(to_fp8)(jnp.asarray(x), jnp.float32(scale))
    assert got.dtype == FP8
    np.testing.assert_array_equal(np.asarray(got, np.float64), reference.to_fp8(x, scale))


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_numbers_beyond_the_largest_fp8_number_are_clipped(dtype):
    x = jnp.asarray([448.0, 464.0, 465.0, 480.0, 1e4, -1e4, np.inf, -np.inf, np.nan], dtype)
    got = np.asarray(jax.jit(to_fp8)(x, jnp.float32(1)), np.float32)
    np.testing.assert_array_equal(got, [448] * 5 + [-448, 448, -448, np.nan])


@pytest.mark.parametrize(
    ("grouped_and_depth", "dtype", "backend"),
    with_dtypes(
        [(False, 96), (False, 5000), (True, 256), (True, 192), (True, 40), (True, 4224)],
        [F32, BF16, F16],
    ),
)
def test_quantized_row_reaches_the_largest_fp8_number(grouped_and_depth, dtype, backend: Backend):
    """A GPU's division may be wrong in the last bit.

    A number halfway between two FP8 numbers may then be rounded to either of the two.
    """
    grouped, depth = grouped_and_depth
    x = np.random.default_rng(0).standard_normal((5, depth)) * [[1.0], [1e-3], [300], [0], [1e-7]]
    x = jnp.asarray(x, dtype)
    values, scale = jax.jit(partial(quantize_rows, grouped=grouped, backend=backend))(x)
    group = FP8_GROUP_SIZE if grouped else depth
    assert scale.shape == (5, -(-depth // group))
    for first in range(0, depth, group):
        given = np.asarray(x[:, first : first + group], np.float32)
        group_scale = np.asarray(scale)[:, first // group]
        largest = np.abs(given).max(1)
        np.testing.assert_allclose(group_scale[:3], largest[:3] / 448, rtol=4e-7)
        assert np.isfinite(group_scale).all()
        assert (group_scale >= np.finfo(np.float32).tiny).all()
        got = np.asarray(values[:, first : first + group], np.float64)
        wanted = reference.to_fp8(given, group_scale[:, None])
        if backend is Backend.TRITON:
            assert np.mean(got != wanted) <= 0.01
            np.testing.assert_allclose(got, wanted, rtol=0.13)
        else:
            np.testing.assert_array_equal(got, wanted)
        np.testing.assert_array_equal(np.abs(got).max(1) == 448, largest > 0)


@pytest.mark.parametrize(
    ("case", "dtype", "backend"),
    with_dtypes(
        [(False, 96, 1), (True, 96, 2), (False, 4224, 2), (True, 4224, 1), (True, 1024, 4)],
        [F32, BF16, F16],
        num_by_xla=1,
    ),
)
def test_fused_norm_and_quantization_equals_the_separate_ops(case, dtype, backend: Backend):
    grouped, width, partials = case
    rng = np.random.default_rng(0)
    hidden, weight = (jnp.asarray(rng.standard_normal(n), dtype) for n in ((5, width), width))
    update = rng.standard_normal((partials, 5, width))
    arguments = hidden, jnp.asarray(update, dtype if partials == 1 else F32), weight
    options = {"eps": 1e-3, "backend": backend}
    rows, total = jax.jit(partial(add_rms_norm, **options))(*arguments)
    wanted = jax.jit(partial(quantize_rows, grouped=grouped, backend=backend))(rows)
    fused = jax.jit(partial(add_rms_norm_to_fp8, grouped=grouped, **options))
    values, scale, fused_total = fused(*arguments)
    np.testing.assert_allclose(fused_total, total, rtol=float(jnp.finfo(dtype).eps))
    # On a GPU, the two kernels may use FMA differently, so some numbers are rounded differently.
    on_gpu = backend is Backend.TRITON
    np.testing.assert_allclose(scale, wanted[1], rtol=0.01 if on_gpu else 2e-7)
    same = np.asarray(values, np.float32) == np.asarray(wanted[0], np.float32)
    assert np.mean(same) >= (0.9 if on_gpu else 1.0)


@pytest.mark.parametrize(("width", "dtype", "backend"), with_dtypes([96, 4224], [F32, BF16]))
def test_quantization_uses_the_largest_of_several_static_scales(
    width: int, dtype, backend: Backend
):
    """Test `quantize_rows` and `add_rms_norm_to_fp8` with the scales 0.002, 0.004 and 0.001.

    Both ops divide all rows by 0.004, and clip quotients above 448, the maximum of FP8.
    """
    rng, given = np.random.default_rng(0), jnp.asarray([0.002, 0.004, 0.001], F32)
    hidden, update, weight = (
        jnp.asarray(rng.standard_normal(shape), dtype)
        for shape in ((5, width), (1, 5, width), width)
    )
    options = {"eps": 1e-3, "backend": backend}
    rows, _ = jax.jit(partial(add_rms_norm, **options))(hidden, update, weight)
    fused_norm = jax.jit(partial(add_rms_norm_to_fp8, grouped=False, **options))
    alone = jax.jit(partial(quantize_rows, backend=backend))(rows, given)
    fused = fused_norm(hidden, update, weight, given)[:2]
    wanted = reference.to_fp8(np.asarray(rows, np.float32), np.float32(0.004))
    assert np.abs(wanted).max() == 448
    for values, scale in (alone, fused):
        np.testing.assert_array_equal(scale, np.full((5, 1), 0.004, np.float32))
        same = np.asarray(values, np.float64) == wanted
        # A GPU's division may be wrong in the last bit.
        assert np.mean(same) >= (0.9 if backend is Backend.TRITON else 1.0)


def test_quantization_refuses_static_scales_for_groups_or_for_sharded_rows():
    x, given = jnp.ones((2, 256)), jnp.ones(1)
    with pytest.raises(ValueError, match=r"static_scales apply to whole rows: .* or grouped"):
        quantize_rows(x, given, grouped=True, backend=Backend.XLA)
    with pytest.raises(ValueError, match="static_scales and reduce_max are both set: omit"):
        quantize_rows(x, given, reduce_max=lambda largest: largest, backend=Backend.XLA)
    with pytest.raises(TypeError, match="static_scales"):
        quantize_rows(x, given.astype(BF16), backend=Backend.XLA)


def test_sharded_row_is_scaled_by_the_maximum_of_all_shards():
    x, reduce_max = jnp.asarray([[1.0, -2.0], [2.0, 0.5]]), partial(jnp.maximum, jnp.float32(4))
    values, scale = quantize_rows(x, reduce_max=reduce_max, backend=Backend.XLA)
    np.testing.assert_allclose(scale, np.full((2, 1), 4 / 448), rtol=2e-7)
    np.testing.assert_array_equal(np.asarray(values, np.float32), np.asarray(x) * 112)


def _random_fp8(rng: np.random.Generator, *shape: int) -> jax.Array:
    return jnp.asarray(rng.standard_normal(shape) * 60, FP8)


def _random_scales(rng: np.random.Generator, *shape: int) -> jax.Array:
    return jnp.asarray(rng.uniform(1e-3, 1e-2, shape), F32)


def _assert_gemm(got, exact, factors, dtype) -> None:
    """Check that the error is at most one rounding to `dtype` plus the rounding of float32 sums."""
    allowed = float(jnp.finfo(dtype).eps) + max(4 * float(jnp.finfo(factors).eps), 2e-6)
    assert np.abs(np.asarray(got, np.float64) - exact).max() <= allowed * np.abs(exact).max()


def _channel_case(rows: int, depth: int, width: int):
    """Return random arguments of `scaled_gemm`, and the exact product."""
    rng = np.random.default_rng(rows)
    x, weight = _random_fp8(rng, rows, depth), _random_fp8(rng, width, depth)
    scales = _random_scales(rng, rows), _random_scales(rng, width)
    exact = reference.scaled_gemm(x, weight, *(np.asarray(it)[:, None] for it in scales))
    return (x, weight, *scales), exact


def _block_case(rows: int, depth: int, parts: list[int]):
    """Return random arguments of `block_scaled_gemm`, and the exact product."""
    rng = np.random.default_rng(rows)
    groups = -(-depth // FP8_GROUP_SIZE)
    blocks = [-(-part // FP8_GROUP_SIZE) for part in parts]
    x, weight = _random_fp8(rng, rows, depth), _random_fp8(rng, sum(parts), depth)
    x_scale = _random_scales(rng, rows, groups)
    weight_scale = _random_scales(rng, sum(blocks), groups)
    group_of, starts = np.arange(depth) // FP8_GROUP_SIZE, np.cumsum([0, *blocks[:-1]])
    parts_and_starts = zip(parts, starts, strict=True)
    block_of = np.concatenate([np.arange(n) // FP8_GROUP_SIZE + at for n, at in parts_and_starts])
    scales = np.asarray(x_scale)[:, group_of], np.asarray(weight_scale)[block_of][:, group_of]
    return (x, weight, x_scale, weight_scale), reference.scaled_gemm(x, weight, *scales)


def _gated(columns):
    """Return silu(gate) * up; the first half of the columns is gate, the second half is up."""
    return reference.gated_silu(columns.reshape(columns.shape[0], 2, -1))


# (rows, depth, width) of GEMMs with one scale per output column.
CHANNEL_SHAPES = [(1, 64, 48), (16, 192, 256), (13, 33, 7), (96, 256, 128), (64, 1024, 384)]
CHANNEL_SHAPES += [(512, 512, 4096)]
# (rows, depth, widths of the concatenated weights) of GEMMs with one scale per block of a weight.
BLOCK_SHAPES = [(1, 128, [128]), (16, 256, [128, 256, 128]), (13, 192, [192, 64, 64])]
BLOCK_SHAPES += [(8, 40, [7]), (512, 512, [1024, 1024])]


@pytest.mark.parametrize(
    ("shape", "dtype", "backend"),
    with_dtypes(CHANNEL_SHAPES, [F32, BF16]) + with_dtypes(BLOCK_SHAPES, [F32, BF16]),
)
def test_scaled_gemm_matches_reference(shape, dtype, backend: Backend):
    width = shape[2]
    if isinstance(width, int):
        op, (arguments, exact) = scaled_gemm, _channel_case(*shape)
    else:
        op = partial(block_scaled_gemm, rows_per_part=width)
        arguments, exact = _block_case(*shape)
    got = jax.jit(partial(op, dtype=dtype, backend=backend))(*arguments)
    assert got.shape[1:] == (shape[0], np.sum(width))
    assert got.dtype == (dtype if got.shape[0] == 1 else F32)
    _assert_gemm(got.astype(F32).sum(0), exact, _multiplied_dtype(backend), dtype)


@pytest.mark.parametrize(
    ("shape", "grouped", "dtype", "backend"),
    on_backends([(3, 128, 40), (16, 384, 128), (512, 256, 512)], [False, True], [F32, BF16]),
)
def test_gated_fp8_gemm_applies_the_activation(shape, grouped, dtype, backend):
    rows, depth, half = shape
    case = _block_case(rows, depth, [half] * 2) if grouped else _channel_case(rows, depth, 2 * half)
    arguments, exact = case
    op = block_scaled_gated_gemm if grouped else scaled_gated_gemm
    got = jax.jit(partial(op, dtype=dtype, backend=backend))(*arguments)
    assert (got.shape, got.dtype) == ((rows, half), dtype)
    # If product and activation are separate kernels, the product is rounded in between.
    factors = _multiplied_dtype(backend) if dtype == F32 else BF16
    _assert_gemm(got, _gated(exact), factors, dtype)


def _multiplied_dtype(backend):
    """Return the dtype to which a backend converts FP8 blocks before it multiplies them."""
    return F32 if backend is Backend.XLA else BF16


# (rows, depth, configuration) of GEMMs. A configuration has: splits of the depth, rows per tile,
# consumer warpgroups, pipeline stages, scale groups per stage.
FEW = [
    (8, 512, FewRowsConfig(2, 8, 1, 3)),
    (8, 1280, FewRowsConfig(1, 8, 2, 3)),
    (64, 256, FewRowsConfig(1, 32, 1, 8)),
    (48, 384, FewRowsConfig(1, 24, 2, 2)),
    (16, 1024, FewRowsConfig(2, 16, 2, 3, 2)),
    (8, 2048, FewRowsConfig(1, 8, 1, 2, 4)),
    (96, 512, FewRowsConfig(1, 96, 2, 2, 2)),
    # In the next cases, some tiles cover half a scale block. For some splits, the first scale is
    # unaligned, or an aligned copy of the scales would end past the array.
    (64, 512, FewRowsConfig(1, 64, 3, 2)),
    (8, 1152, FewRowsConfig(3, 8, 4, 2)),
    (16, 1792, FewRowsConfig(2, 8, 3, 4)),
    (40, 640, FewRowsConfig(1, 40, 1, 2)),
]
# This GEMM has too many block scales for a single copy.
DEEP = (8, 33_024, FewRowsConfig(1, 8, 1, 2, 6))


@pytest.fixture
def interpreted(monkeypatch):
    """Run kernels in interpret mode, without race detection.

    JAX 0.12 interprets only accumulators that start at zero. The fixture therefore patches
    `continue_accumulation` to add the initial values after the products. Race detection remembers
    only the last arrival at a barrier. If two warpgroups read the same scales, race detection would
    therefore report a false race with the first reader.
    """
    if jax.__version_info__ < (0, 12):
        pytest.skip("JAX before 0.12 does not interpret kernels with such barriers")

    def continue_accumulation(multiply, sums):
        def run(*accumulators):
            multiply(accumulators)
            return [accumulator[...] for accumulator in accumulators]

        added = pl.run_scoped(run, *[plgpu.ACC(total.shape, F32) for total in sums])
        return [total + part for total, part in zip(sums, added, strict=True)]

    monkeypatch.setattr(fp8_hopper, "continue_accumulation", continue_accumulation)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):  # type: ignore
        yield


def _is_default(case, grouped, gated):
    """Return whether the default tier (pytest without `--tier full`) tests a combination.

    For each case, the default tier tests one combination of `grouped` and `gated`.
    """
    index = FEW.index(case)
    return grouped == (index >= 4 or index % 2 == 0) and gated == (index in (1, 3, 5, 7))


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("case", "grouped", "gated"),
    [
        *covering(FEW, [False, True], [False, True], strength=1, keep=_is_default),
        (DEEP, True, False),
    ],
)
def test_hopper_fp8_gemm_of_few_rows_matches_reference(case, grouped, gated):
    rows, depth, config = case
    _check_few_rows(rows, depth, config, grouped, gated)


@pytest.mark.gpu
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(("rows", "depth", "config"), [*FEW, DEEP])
def test_hopper_fp8_gemm_of_few_rows_matches_reference_on_a_gpu(
    rows, depth, config, grouped, gated
):
    kind = jax.devices()[0].device_kind
    if not is_hopper(kind):
        pytest.skip(f"{kind} is not a Hopper GPU")
    _check_few_rows(rows, depth, config, grouped, gated)


def _check_few_rows(rows, depth, config, grouped, gated):
    if gated and config.num_splits > 1:
        pytest.skip("a gated GEMM is not split")
    # The width is a multiple of the scale block and of the tile.
    width = 256 * (1 if config.num_consumers <= 2 else config.num_consumers)
    case = _block_case(rows, depth, [width]) if grouped else _channel_case(rows, depth, width)
    arguments, exact = case
    got = fp8_hopper.few_rows_gemm(*arguments, gated=gated, dtype=jnp.dtype(BF16), config=config)
    assert (got.shape[0], got.dtype) == (config.num_splits, BF16 if config.num_splits == 1 else F32)
    _assert_gemm(got.astype(F32).sum(0), _gated(exact) if gated else exact, F32, BF16)


# In some cases, a program has no tile; in other cases, it has several tiles. In some cases, a tile
# takes more steps than the pipeline has stages; in other cases, fewer.
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("rows_depth_and_config", "grouped", "gated"),
    covering(
        [
            (128, 128, ManyFP8RowsConfig(2, 5, 1)),
            (256, 640, ManyFP8RowsConfig(3, 1, 1)),
            (256, 384, ManyFP8RowsConfig(4, 3, 2)),
            (128, 384, ManyFP8RowsConfig(2, 2, 2)),
        ],
        [False, True],
        [False, True],
    ),
)
def test_hopper_fp8_gemm_of_many_rows_matches_reference(rows_depth_and_config, grouped, gated):
    rows, depth, config = rows_depth_and_config
    case = _block_case(rows, depth, [512]) if grouped else _channel_case(rows, depth, 512)
    arguments, exact = case
    got = fp8_hopper.many_rows_gemm(*arguments, gated=gated, dtype=jnp.dtype(BF16), config=config)
    _assert_gemm(got, _gated(exact) if gated else exact, F32, BF16)


@pytest.mark.usefixtures("interpreted")
def test_hopper_fp8_gemm_uses_the_scale_of_each_group():
    x_scale = np.ones((128, 8), np.float32)
    x_scale[0] = [1e-30, 1e-30, 1, 1e-30, 1e-10, 1e10, 1e-30, 1e-3]
    x_scale[1] = [1e12, 1, 1e-12, 1e-24, 1e-30, 1e-30, 1e-30, 1e-30]
    x_scale[2], x_scale[3] = 1e-33, [1, 1e-33, 1e-33, 1e-33, 1e-33, 1, 1e-33, 1]
    x, weight = np.ones((2, 128, 1024), np.float32)
    x[3, 128:640] = 0
    w_scale = np.full((1, 8), 0.5, np.float32)
    arguments = jnp.asarray(x, FP8), jnp.asarray(weight, FP8), x_scale, w_scale
    config = ManyFP8RowsConfig(2, 1, 1)
    got = fp8_hopper.many_rows_gemm(*arguments, gated=False, dtype=jnp.dtype(BF16), config=config)
    of_groups = x.reshape(128, 8, 128)[:, :, 0] * x_scale
    exact = 64 * of_groups.astype(np.float64).sum(1)
    rows = np.asarray(got, np.float64)
    np.testing.assert_allclose(rows, np.repeat(exact[:, None], 128, 1), rtol=0.01, atol=1e-26)


# (width, depth) of all projections of Qwen3-0.6B and Llama-3.1-8B.
WIDTHS = [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)]
WIDTHS += [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)]
GATED = (6144, 1024), (28672, 4096)


@pytest.mark.parametrize("dtype", [BF16, pytest.param(F16, marks=pytest.mark.full)])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(
    "rows", [8, 256, *(pytest.param(n, marks=pytest.mark.full) for n in (24, 64, 128, 8192))]
)
def test_fp8_gemms_lower_to_hopper_kernels(rows: int, grouped: bool, dtype):
    for width, depth in WIDTHS:
        gated, kind = (width, depth) in GATED, {"dtype": dtype, "backend": Backend.TRITON}
        if grouped:
            one_part = partial(block_scaled_gemm, rows_per_part=[width])
            op = block_scaled_gated_gemm if gated else one_part
            sizes = (rows, depth // 128), (width // 128, depth // 128)
        else:
            op, sizes = scaled_gated_gemm if gated else scaled_gemm, ((rows,), (width,))
        x, weight = (jax.ShapeDtypeStruct((n, depth), FP8) for n in (rows, width))
        scales = (jax.ShapeDtypeStruct(size, F32) for size in sizes)
        found = re.findall(KERNEL_CALL, lower(partial(op, **kind), x, weight, *scales))
        assert found == ["mosaic_gpu"] or (not grouped and rows >= 256), (width, depth)


@pytest.mark.parametrize(
    ("depth", "grouped", "dtype"),
    covering([40, 192, 1024, 3072, 4096, 14336], [False, True], [F32, BF16, F16], strength=1),
)
def test_quantization_lowers_to_one_kernel_with_and_without_a_norm(depth, grouped, dtype):
    run = partial(quantize_rows, grouped=grouped, backend=Backend.TRITON)
    rows, partials = (jax.ShapeDtypeStruct((*n, 24, depth), dtype) for n in ((), (1,)))
    norm = partial(add_rms_norm_to_fp8, eps=1e-6, grouped=grouped, backend=Backend.TRITON)
    weight = jax.ShapeDtypeStruct((depth,), dtype)
    texts = [lower(run, rows), lower(norm, rows, partials, weight)]
    if not grouped:
        given = jax.ShapeDtypeStruct((3,), F32)
        texts += [lower(run, rows, given), lower(norm, rows, partials, weight, given)]
    assert [re.findall(KERNEL_CALL, text) for text in texts] == [["triton"]] * len(texts)


@pytest.mark.parametrize(
    ("kind", "depth", "is_direct"),
    [("NVIDIA H200", 64, True), ("NVIDIA H200", 72, False), ("NVIDIA A100", 64, False)],
)
@pytest.mark.parametrize("rows", [1, pytest.param(8, marks=pytest.mark.full), 32, 300])
def test_fp8_gemms_of_cublas_need_a_recent_gpu_and_aligned_sizes(rows, kind, depth, is_direct):
    """On a recent GPU, cuBLASLt multiplies FP8 matrices if both dimensions of the weight are
    multiples of 16. For cuBLASLt, the op pads the number of rows of `x` to a multiple of 16.

    For a weight of another size, or on an older GPU, the op converts both matrices to bfloat16
    before the GEMM.
    """
    device = AbstractDevice(device_kind=kind, num_cores=None, platform="gpu")
    x, weight = (jax.ShapeDtypeStruct((n, depth), FP8) for n in (rows, 48))
    scales = (jax.ShapeDtypeStruct((n,), F32) for n in (rows, 48))
    run = partial(scaled_gemm, dtype=BF16, backend=Backend.TRITON)
    text = lower(run, x, weight, *scales, device=device)
    (dot,) = re.findall(r"stablehlo.dot_general .*", text)
    assert ("f8E4M3FN" in dot) == is_direct
    assert ("bf16>, tensor" in dot) != is_direct
    assert (f"tensor<{-(-rows // 16) * 16}x{depth}xf8E4M3FN>" in dot) == is_direct


ROWS, WEIGHT = jnp.zeros((4, 128), FP8), jnp.zeros((8, 128), FP8)
ONES = jnp.ones(4), jnp.ones(8)


def test_gated_weight_with_an_odd_number_of_rows_raises_an_error():
    with pytest.raises(ValueError, match="weight has 7 rows: pass an even number of rows"):
        scaled_gated_gemm(ROWS, WEIGHT[:7], ONES[0], ONES[1][:7], dtype=BF16, backend=Backend.XLA)


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
def test_scaled_gemm_rejects_arguments_of_a_wrong_shape_or_dtype(
    arguments, error: type, words: str
):
    with pytest.raises(error, match=words):
        gemm.check_scaled_gemm(*arguments)


@pytest.mark.parametrize(
    ("x_scale", "weight_scale", "parts", "words"),
    [
        ((4, 1), (1, 1), [9], r"rows_per_part=\(9,\) must add up to 8, the number of rows"),
        ((4, 2), (1, 1), [8], r"x_scale has shape \(4, 2\)"),
        ((4, 1), (1, 1), [4, 4], r"weight_scale has shape \(1, 1\); .* blocks = 2"),
    ],
)
def test_block_scaled_gemm_rejects_scales_of_a_wrong_shape(
    x_scale, weight_scale, parts, words: str
):
    with pytest.raises(ValueError, match=words):
        gemm.check_block_scaled_gemm(ROWS, WEIGHT, jnp.ones(x_scale), jnp.ones(weight_scale), parts)
