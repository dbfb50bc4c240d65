"""Test the GEMMs of a layer and the ops between them: rope, KV write, norms and activation."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import BF16, F16, F32, assert_close, on_backends, with_dtypes

from pallas_kernels import (
    Backend,
    HeadNorms,
    LayerKV,
    add_rms_norm,
    gated_gemm,
    gated_silu,
    rms_norm,
    rope_decode_attention,
    rope_write_kv,
    split_k_gemm,
    sum_partials,
)
from tests.reference import kernels as reference

# (dtype, block size, (query heads, KV heads), head size, whether the model has head norms)
SHAPES = [(F32, 8, (4, 2), 32, True), (BF16, 16, (6, 3), 64, False), (F16, 16, (5, 1), 80, True)]
SHAPES += [(BF16, 24, (2, 2), 96, True), (F32, 16, (16, 8), 128, False)]
SHAPES += [(BF16, 32, (32, 8), 128, True), (F16, 8, (3, 3), 256, False)]
SHAPES += [(BF16, 8, (8, 8), 256, True), (F32, 8, (20, 1), 80, False), (F32, 8, (2, 2), 2, True)]
SHAPES += [(F32, 8, (4, 2), 4, False), (BF16, 16, (6, 2), 8, True), (BF16, 8, (2, 1), 12, True)]
SHAPES += [(F16, 8, (4, 4), 24, False), (F32, 16, (6, 2), 40, True), (F32, 2, (4, 2), 32, True)]
SHAPES += [(BF16, 256, (4, 1), 64, False)]
# Without `--tier full`, pytest runs only these shapes in interpret mode. The shapes cover each
# dtype and each kind of head size, with and without norms. The number of KV heads is odd, or a
# power of two, or larger than a tile.
INTERPRETED = [SHAPES[i] for i in (1, 2, 5, 9, 12)]
BY_XLA = [SHAPES[i] for i in (2, 4)]
EPS = 1e-3
NUM_BLOCKS = 5


def _with_dtypes(*shapes):
    """Return each combination of shape, dtype and backend as test parameters.

    Without `--tier full`, pytest runs only some of the combinations. XLA then runs with the first
    two shapes only, because the XLA code does not depend on the shape.
    """
    return with_dtypes(shapes, [F32, BF16, F16], num_by_xla=2)


def _case(dtype, block_size, heads, head_size, with_norms, pool_dtype):
    rng = np.random.default_rng(3)
    num_heads, num_kv_heads = heads

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    last = NUM_BLOCKS * block_size - 1
    slots = jnp.asarray([block_size, last, 0, -1, last + 1, 2 * block_size + 3], jnp.int32)
    turns = rng.uniform(-9, 9, (len(slots), head_size // 2)).astype(np.float32)
    pool = jnp.full((NUM_BLOCKS, block_size, num_kv_heads, head_size), jnp.nan, pool_dtype)
    norms = HeadNorms(normal(head_size), normal(head_size), EPS) if with_norms else None
    qkv = normal(1, len(slots), num_heads + 2 * num_kv_heads, head_size)
    angles = jnp.cos(turns), jnp.sin(turns)
    return (qkv, LayerKV(pool, pool), slots, angles), norms


def _is_default(shape, backend):
    return shape in (INTERPRETED if backend is Backend.INTERPRET else BY_XLA)


@pytest.mark.parametrize(("shape", "backend"), on_backends(SHAPES, strength=0, keep=_is_default))
def test_rope_write_kv_matches_reference(shape, backend):
    dtype, block_size, heads, head_size, norms = shape
    arrays, norms = _case(dtype, block_size, heads, head_size, norms, dtype)
    run = jax.jit(partial(rope_write_kv, norms=norms, backend=backend))
    q, pool = run(*arrays)
    assert q.dtype == dtype

    def plain(dtype):
        return reference.rope_write_kv(*arrays, norms, dtype=dtype)

    assert_close(q, lambda dtype: plain(dtype)[0], dtype)
    written = np.isfinite(plain(np.float64)[1][0])
    for part, got in enumerate(pool):
        assert got.dtype == dtype
        # The op writes only the slots of the tokens; all other slots still hold NaN.
        np.testing.assert_array_equal(np.isfinite(np.asarray(got, np.float32)), written)
        rows = written.reshape(-1, *written.shape[2:]).all(axis=(1, 2))

        def stored(values, rows=rows, shape=written.shape):
            return np.asarray(values).reshape(-1, *shape[2:])[rows]

        assert_close(stored(got), lambda dtype, i=part: stored(plain(dtype)[1][i]), dtype)
    values = arrays[0][0, :, -heads[1] :]
    for token in (0, 1, 2, 5):
        block, offset = divmod(int(arrays[2][token]), block_size)
        np.testing.assert_array_equal(pool.v[block, offset], values[token])


@pytest.mark.parametrize(
    ("shape", "backend"),
    on_backends(
        SHAPES[:7],
        strength=0,
        keep=lambda shape, backend: (
            shape == (SHAPES[1] if backend is Backend.INTERPRET else SHAPES[2])
        ),
    ),
)
def test_rope_write_kv_without_rotation_matches_reference(shape, backend):
    dtype, block_size, heads, head_size, norms = shape
    (qkv, kv, slots, _), norms = _case(dtype, block_size, heads, head_size, norms, dtype)
    run = jax.jit(partial(rope_write_kv, norms=norms, dtype=dtype, backend=backend))
    halves = jnp.concatenate([qkv.astype(F32) / 2] * 2)

    def plain(dtype):
        return reference.rope_write_kv(qkv, kv, slots, None, norms, dtype=dtype)

    want, stored = plain(np.float64)
    for given in (qkv, halves):
        q, pool = run(given, kv, slots, None)
        assert_close(q, lambda dtype: plain(dtype)[0], dtype)
        if norms is None:
            np.testing.assert_array_equal(np.asarray(q, np.float64), want)
            np.testing.assert_array_equal(np.asarray(pool.k, np.float64), stored[0])
        np.testing.assert_array_equal(np.asarray(pool.v, np.float64), stored[1])


def test_rope_write_kv_rounds_keys_and_values_to_the_narrower_of_input_and_pool_dtype(backend):
    """In the first case, the queries, keys and values are float32 and the pool is bfloat16. In the
    second case, they are bfloat16 and the pool is float32: the keys and values are rounded to
    bfloat16 before they are stored."""
    arrays, norms = _case(F32, 8, (4, 2), 32, True, F32)
    run = jax.jit(partial(rope_write_kv, norms=norms, backend=backend))
    q, exact = run(*arrays)
    narrow = LayerKV(*(part.astype(BF16) for part in arrays[1]))
    same_q, rounded = run(arrays[0], narrow, *arrays[2:])
    np.testing.assert_array_equal(same_q, q)
    for got, want in zip(rounded, exact, strict=True):
        np.testing.assert_array_equal(got.astype(F32), want.astype(BF16).astype(F32))
    arrays, norms = _case(BF16, 8, (4, 2), 32, True, F32)
    for part in jax.jit(partial(rope_write_kv, norms=norms, backend=backend))(*arrays)[1]:
        np.testing.assert_array_equal(part, part.astype(BF16).astype(F32))


def test_rows_of_rope_write_kv_are_independent(backend):
    """NaN in a token's row changes only the query, the key and the value of this token."""
    arrays, norms = _case(BF16, 8, (6, 2), 64, True, BF16)
    run = jax.jit(partial(rope_write_kv, norms=norms, backend=backend))
    q, pool = run(*arrays)
    ruined_q, ruined = run(arrays[0].at[:, 2].set(jnp.nan), *arrays[1:])
    keep = np.asarray([0, 1, 3, 4, 5])
    np.testing.assert_array_equal(ruined_q[keep], q[keep])
    np.testing.assert_array_equal(ruined.k[1:].astype(F32), pool.k[1:].astype(F32))
    assert np.isnan(np.asarray(ruined.k[0, 0], np.float32)).all()


@pytest.mark.parametrize(
    ("shape", "dtype", "backend"), _with_dtypes((1, 64), (5, 96), (8, 1024), (3, 5120), (2, 8192))
)
def test_add_rms_norm_matches_reference(shape, dtype, backend):
    rows, size = shape
    rng = np.random.default_rng(4)
    hidden, update = (jnp.asarray(rng.standard_normal((rows, size)), dtype) for _ in range(2))
    hidden = hidden.at[-1].multiply(jnp.asarray(2, dtype))
    weight = jnp.asarray(rng.standard_normal(size), dtype)
    run = jax.jit(partial(add_rms_norm, eps=EPS, backend=backend))
    normed, total = run(hidden, update[None], weight)
    assert normed.dtype == total.dtype == dtype
    np.testing.assert_array_equal(total, hidden + update)
    want = rms_norm(total, weight, eps=EPS)
    zero = jnp.zeros_like(total)[None]

    def plain(dtype):
        return reference.add_rms_norm(total, zero, weight, eps=EPS, dtype=dtype)[0][:, None]

    assert_close(np.asarray(normed)[:, None], plain, dtype)
    assert_close(np.asarray(want)[:, None], plain, dtype)


@pytest.mark.parametrize(
    "backend", on_backends(strength=0, keep=lambda backend: backend is Backend.INTERPRET)
)
def test_norm_weights_can_be_float32(backend):
    (qkv, pool, slots, angles), _ = _case(BF16, 16, (6, 2), 64, False, BF16)
    lens = jnp.asarray([16, 3, 0, 1, 9, 31], jnp.int32)
    tables = jnp.asarray([[1, 0], [2, 0], [0, 0], [3, 0], [4, 0], [0, 1]], jnp.int32)
    zeros = LayerKV(*(jnp.zeros_like(part) for part in pool))
    rows = qkv[0].reshape(len(slots), -1)
    rng = np.random.default_rng(6)
    scales = jnp.asarray(1 + rng.uniform(-0.01, 0.01, (3, rows.shape[1])), F32)

    def results(scales, backend):
        norms = HeadNorms(scales[0, :64], scales[1, :64], EPS)
        normed, _ = add_rms_norm(rows, rows[None], scales[2], eps=EPS, backend=backend)
        q, stored = rope_write_kv(qkv, zeros, slots, angles, norms=norms, backend=backend)
        options = {"norms": norms, "scale": 0.1, "backend": backend}
        _, decoded = rope_decode_attention(qkv, zeros, tables, lens, angles, **options)
        return normed, q, stored.k, decoded.k

    # By default, XLA skips the rounding between a head's norm and its rotation.
    options = {"xla_allow_excess_precision": False}
    program = jax.jit(results, static_argnums=1, compiler_options=options)

    def run(scales, backend):
        return [it.astype(F32) for it in program(scales, backend)]

    rounded = run(scales.astype(BF16).astype(F32), Backend.XLA)
    for got, want, other in zip(
        run(scales, backend), run(scales, Backend.XLA), rounded, strict=True
    ):
        live = want != 0
        assert np.mean(got[live] != want[live]) < 0.02
        assert np.mean(other[live] != want[live]) > 0.1


@pytest.mark.parametrize(
    ("shape", "dtype", "backend"), _with_dtypes((2, 8704), (1, 9000), (300, 1024), (80, 14336))
)
def test_gated_silu_matches_reference(shape, dtype, backend):
    rows, size = shape
    values = np.random.default_rng(7).standard_normal((rows, 2, size))
    # The gates become so large that exp(-gate) is much larger or smaller than 1.
    values[:, 0] *= np.linspace(1, 30, size)
    gate_up = jnp.asarray(values, dtype)
    out = jax.jit(partial(gated_silu, backend=backend))(gate_up)
    assert out.dtype == dtype

    def plain(dtype):
        return reference.gated_silu(gate_up, dtype=dtype)[:, None]

    assert_close(np.asarray(out)[:, None], plain, dtype)


def test_gated_silu_of_large_gates_does_not_overflow(backend):
    """A large negative gate gives 0, a large positive gate gives gate * up. NaN stays NaN."""
    gates = jnp.tile(jnp.asarray([-1e4, -200, 0, 200, 1e4, jnp.inf, jnp.nan], BF16), 1300)
    gate_up = jnp.stack([gates, jnp.full_like(gates, 2)])[None]
    out = jax.jit(partial(gated_silu, backend=backend))(gate_up)[0]
    want = jnp.maximum(gates, 0) * jnp.asarray(2, BF16)
    np.testing.assert_array_equal(out.astype(F32), want.astype(F32))


def test_float32_partials_are_summed_and_rounded_before_use(backend):
    rng = np.random.default_rng(5)
    arrays, norms = _case(BF16, 8, (6, 2), 64, True, BF16)
    partials = jnp.asarray(rng.standard_normal((4, *arrays[0].shape[1:])), F32)
    whole = sum_partials(partials, BF16)
    rope = jax.jit(partial(rope_write_kv, norms=norms, dtype=BF16, backend=backend))
    got, want = rope(partials, *arrays[1:]), rope(whole[None], *arrays[1:])
    norm = jax.jit(partial(add_rms_norm, eps=EPS, backend=backend))
    hidden, weight = partials[0, :, 0].astype(BF16), jnp.linspace(-1, 1, 64, dtype=BF16)
    got += norm(hidden, partials[:, :, 1], weight)
    want += norm(hidden, whole[None, :, 1], weight)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype == BF16
        np.testing.assert_allclose(a.astype(F32), b.astype(F32), rtol=0.03, atol=0.02)


# Shapes of GEMMs: (rows of x, columns of x, columns of the weight). The Hopper kernel supports all
# shapes except the last two. The supported shapes need one or two tiles of rows, and programs of 64
# or 128 columns. Some programs run more steps than their pipeline has stages.
GEMMS = [(24, 192, 128), (8, 1024, 64), (64, 2048, 256), (96, 1024, 192), (192, 320, 64)]
GEMMS += [(256, 1024, 1024), (256, 576, 4352), (40, 100, 24), (300, 512, 8)]


def _inputs(seed, x_shape, weight_shape, dtype):
    rng = np.random.default_rng(seed)
    x, weight = (jnp.asarray(rng.standard_normal(s), dtype) for s in (x_shape, weight_shape))
    return x, weight * jnp.asarray(x_shape[1] ** -0.5, dtype)


def _assert_gemm(got, exact, depth, dtype):
    """Check that the error is at most one rounding to `dtype` plus the rounding of float32 sums."""
    allowed = 8 * float(jnp.finfo(dtype).eps) + 4 * depth**0.5 * float(jnp.finfo(F32).eps)
    assert np.abs(np.asarray(got, np.float64) - exact).max() <= allowed * np.abs(exact).max()


@pytest.mark.parametrize(("shape", "dtype", "backend"), _with_dtypes(*GEMMS))
def test_split_k_gemm_matches_reference(shape, dtype, backend):
    """The sum of the partials equals the product, whether or not the K dimension is split."""
    rows, depth, width = shape
    x, weight = _inputs(6, (rows, depth), (depth, width), dtype)
    partials = jax.jit(partial(split_k_gemm, backend=backend))(x, weight)
    assert partials.dtype == (dtype if len(partials) == 1 else F32)
    assert len(partials) == 1 or (backend is not Backend.XLA and dtype != F32)
    # In interpret mode the op runs XLA's GEMM, but splits the K dimension as on a GPU.
    if backend is Backend.INTERPRET and dtype != F32:
        assert len(partials) == {8: 4, 64: 8, 300: 1}.get(rows, len(partials))
    exact = np.asarray(x, np.float64) @ np.asarray(weight, np.float64)
    _assert_gemm(sum_partials(partials, F32), exact, depth, partials.dtype)


@pytest.mark.parametrize(("shape", "dtype", "backend"), _with_dtypes(*GEMMS))
def test_gated_gemm_matches_reference(shape, dtype, backend):
    rows, depth, width = shape
    x, weight = _inputs(8, (rows, depth), (depth, 2, width), dtype)
    out = jax.jit(partial(gated_gemm, backend=backend))(x, weight)
    assert (out.shape, out.dtype) == ((rows, width), dtype)
    _assert_gemm(out, reference.gated_gemm(x, weight), depth, dtype)


@pytest.mark.parametrize("rows", [8, pytest.param(2048, marks=pytest.mark.gpu)])
def test_gated_gemm_of_a_very_negative_gate_is_zero(rows, backend):
    """The intermediate results exp(-gate) and gate * up are infinite."""
    x = jnp.zeros((rows, 64), BF16).at[:, 0].set(1)
    weight = jnp.zeros((64, 2, 3072), BF16).at[0].set(jnp.asarray([[-1e20], [1e20]], BF16))
    out = jax.jit(partial(gated_gemm, backend=backend))(x, weight)
    np.testing.assert_array_equal(out.astype(F32), 0)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [8, 64, 96, 128])
def test_split_k_gemm_with_a_large_weight_matches_reference(rows):
    """Each program computes all rows, and takes more steps than its pipeline has stages."""
    x, weight = _inputs(10, (rows, 2304), (2304, 4224), BF16)
    partials = jax.jit(partial(split_k_gemm, backend=Backend.TRITON))(x, weight)
    exact = np.asarray(x, np.float64) @ np.asarray(weight, np.float64)
    _assert_gemm(sum_partials(partials, F32), exact, 2304, partials.dtype)


# On a GPU with 132 SMs, a program of the few-rows kernel computes 128 columns. A program of the
# many-rows kernel computes two or three tiles. GPUs with fewer SMs use XLA's GEMM.
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "depth", "width", "dtype"),
    [
        *((rows, 1280, 16640, BF16) for rows in (8, 64, 128)),
        *((rows, 1088, 14336, dtype) for rows in (256, 384) for dtype in (BF16, F16)),
        *((2048, 1088, 3072, dtype) for dtype in (BF16, F16)),
    ],
)
def test_gated_gemm_with_a_large_weight_matches_reference(rows, depth, width, dtype):
    x, weight = _inputs(11, (rows, depth), (depth, 2, width), dtype)
    out = jax.jit(partial(gated_gemm, backend=Backend.TRITON))(x, weight)
    _assert_gemm(out, reference.gated_gemm(x, weight), depth, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [8, 64, 256, 2048])
def test_gemms_are_deterministic(rows):
    """Repeated runs have equal bits, whatever ran on the GPU before."""
    x, weight = _inputs(9, (rows, 1024), (1024, 2, 3072), BF16)

    @jax.jit
    def run(x, weight):
        gated = gated_gemm(x, weight, backend=Backend.TRITON)
        return gated, split_k_gemm(gated[:, :1024], weight[:, 0], backend=Backend.TRITON)

    first = jax.tree.map(np.asarray, run(x, weight))
    _assert_gemm(first[0], reference.gated_gemm(x, weight), 1024, BF16)
    for turn in range(50):
        run(x * jnp.asarray(turn, BF16), weight)
        for one, other in zip(first, run(x, weight), strict=True):
            np.testing.assert_array_equal(one, np.asarray(other))


def test_row_ops_and_gemms_accept_zero_rows(backend):
    arrays, norms = _case(F32, 8, (4, 2), 32, True, F32)
    qkv, kv, slots, angles = arrays
    none = angles[0][:0], angles[1][:0]
    q, pool = rope_write_kv(qkv[:, :0], kv, slots[:0], none, norms=norms, backend=backend)
    assert q.shape == (0, 4, 32)
    assert pool.k.shape == kv.k.shape
    rows = jnp.zeros((0, 64), F32)
    normed, total = add_rms_norm(rows, rows[None], jnp.ones(64, F32), eps=EPS, backend=backend)
    assert normed.shape == total.shape == (0, 64)
    assert gated_silu(jnp.zeros((0, 2, 64), F32), backend=backend).shape == (0, 64)
    weight = jnp.zeros((64, 2, 128), F32)
    assert gated_gemm(rows, weight, backend=backend).shape == (0, 128)
    assert split_k_gemm(rows, weight[:, 0], backend=backend).shape[1:] == (0, 128)
