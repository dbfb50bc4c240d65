"""Test that KV writes and block copies equal the references and update the pool in place."""

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import BF16, F8, F16, F32, XLA_AND_TRITON, on_backends, to_pool

from pallas_kernels import (
    FP8_PAIR_DTYPE,
    Backend,
    HeadNorms,
    KVScales,
    LayerKV,
    copy_blocks,
    rope_decode_attention,
    rope_write_kv,
    write_kv,
)
from tests.reference import kernels as reference

# (dtype, block size, KV heads, head size)
SHAPES = [(F32, 8, 2, 80), (BF16, 16, 3, 64), (F16, 128, 1, 256), (BF16, 24, 32, 128)]
SHAPES += [(F32, 8, 1, 1), (BF16, 8, 2, 5), (F16, 16, 3, 8), (BF16, 8, 2, 12), (F32, 8, 2, 24)]
SHAPES += [(F32, 1, 2, 5), (BF16, 4, 2, 64), (F16, 256, 2, 80), (F16, 1, 1, 1)]
COPIED = [*SHAPES, (F8, 16, 2, 64), (F8, 8, 3, 6), (F8, 1, 1, 2)]
# The default tier tests only these shapes in interpret mode. They include slots of one element, and
# sizes that are not powers of two. A program copies one chunk (see `MoveConfig`). Some blocks are
# one chunk, and other blocks are several chunks. The XLA code does not depend on the shape, so
# fewer shapes (`BY_XLA`) test it.
INTERPRETED = [SHAPES[i] for i in (0, 1, 4, 11, 12)]
BY_XLA = [SHAPES[i] for i in (0, 1, 2)]


def _is_default(shape, backend):
    if shape[0] == F8:
        return shape[3] == 6
    return shape in (INTERPRETED if backend is Backend.INTERPRET else BY_XLA)


def _pool(rng, dtype, *shape):
    return LayerKV(*(to_pool(rng.standard_normal(shape), dtype) for _ in range(2)))


@pytest.mark.parametrize(("shape", "backend"), on_backends(SHAPES, strength=0, keep=_is_default))
def test_write_kv_matches_reference(shape, backend):
    dtype, block_size, num_kv_heads, head_size = shape
    rng = np.random.default_rng(1)
    kv = _pool(rng, dtype, 5, block_size, num_kv_heads, head_size)
    k, v = _pool(rng, dtype, 6, num_kv_heads, head_size)
    last = 5 * block_size - 1
    slots = jnp.asarray([block_size, last, 0, -1, last + 1, 2 * block_size + 3], jnp.int32)
    want = reference.write_kv(kv, k, v, slots)
    got = jax.jit(lambda *arrays: write_kv(*arrays, backend=backend))(kv, k, v, slots)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(a), b)


def _bits(array):
    """Return the bits of float8_e4m3fn numbers. All NaNs count as 0x7F, and -0.0 as 0.0."""
    numbers = reference.unpaired(array)
    wide, bits = numbers.astype(np.float32), numbers.view(np.uint8)
    return np.where(np.isnan(wide), np.uint8(0x7F), np.where(wide == 0, np.uint8(0), bits))


@pytest.mark.parametrize(
    ("dtype_and_heads", "scales", "backend"),
    on_backends(
        [(BF16, (3, 24)), (F16, (3, 2)), (F32, (3, 6)), (BF16, (17, 128))],
        [None, (0.5, 4.0), (3.0, 0.07)],
        strength=1,
        keep=lambda _, scales, backend: backend is Backend.INTERPRET and scales == (3.0, 0.07),
    ),
)
def test_float8_pool_stores_values_divided_by_scales(dtype_and_heads, scales, backend):
    """A GPU's division may be wrong in the last bit, so the quotient may be rounded to an adjacent
    number."""
    dtype, heads = dtype_and_heads
    rng = np.random.default_rng(3)
    kv = _pool(rng, F8, 5, 8, *heads)
    k, v = (jnp.asarray(rng.standard_normal((4, *heads)) * 200, dtype) for _ in range(2))
    slots = jnp.asarray([8, 39, -1, 40], jnp.int32)
    given = scales and KVScales(*(jnp.full(1, scale, F32) for scale in scales))
    k_scale, v_scale = scales or (1.0, 1.0)
    narrow_k, narrow_v = reference.float8(k, k_scale), reference.float8(v, v_scale)
    want = reference.write_kv(kv, reference.paired(narrow_k), reference.paired(narrow_v), slots)
    got = jax.jit(lambda *a, scales: write_kv(*a, scales=scales, backend=backend))(
        kv, k, v, slots, scales=given
    )
    for a, b in zip(got, want, strict=True):
        assert a.dtype == FP8_PAIR_DTYPE
        differ = _bits(a) != _bits(b)
        assert not differ.any() or (backend is Backend.TRITON and differ.mean() < 0.01)


def _stored_by(op, values, scales, backend):
    """Store `values` [T, 1, H] as keys and as values with the op `op`, token t in slot t.

    Returns:
        The pool.
    """
    num_tokens, _, size = values.shape
    kv = LayerKV(*(to_pool(np.zeros((num_tokens, 1, 1, size)), F8) for _ in range(2)))
    scales = KVScales(*(jnp.full(1, scale, F32) for scale in scales))
    slots = jnp.arange(num_tokens, dtype=jnp.int32)
    if op == "write":
        return write_kv(kv, values, values, slots, scales=scales, backend=backend)
    qkv = jnp.concatenate([jnp.zeros_like(values), values, values], axis=1)[None]
    if op == "write of fused rows":
        return rope_write_kv(qkv, kv, slots, None, scales=scales, backend=backend)[1]
    angle = jnp.zeros((num_tokens, size // 2), F32)  # no rotation
    lens = jnp.ones(num_tokens, jnp.int32)
    options = {"scale": 1.0, "scales": scales, "backend": backend}
    angles = jnp.ones_like(angle), angle
    return rope_decode_attention(qkv, kv, slots[:, None], lens, angles, **options)[1]


@pytest.mark.parametrize(
    ("op", "scales", "backend"),
    on_backends(
        ["write", "write of fused rows", "rope and decode"],
        [(1.0, 1.0), (0.25, 2.0)],
        strength=1,
        keep=lambda _, scales, backend: backend is Backend.INTERPRET and scales == (0.25, 2.0),
    ),
)
def test_every_bfloat16_value_is_rounded_to_the_nearest_float8(op, scales, backend):
    """Values are rounded to nearest even and clipped to 448, and NaN is preserved."""
    every = np.arange(2**16, dtype=np.uint16).view(BF16)
    # RoPE adds sin(0) times the paired channel, which is NaN if that channel is not finite.
    if op == "rope and decode":
        every = np.where(np.isfinite(every.astype(np.float32)), every, BF16(0))
    values = jnp.asarray(every.reshape(256, 1, 256))
    run = jax.jit(lambda values: _stored_by(op, values, scales, backend))
    for part, scale in zip(run(values), scales, strict=True):
        with np.errstate(invalid="ignore", over="ignore"):
            want = reference.float8(every, scale).reshape(256, 256)
        np.testing.assert_array_equal(_bits(part).reshape(256, 256), _bits(want))


FLOAT8_DEFAULT = [((3, 24), True, Backend.INTERPRET), ((1, 4), False, Backend.INTERPRET)]
FLOAT8_DEFAULT += [((1, 128), True, Backend.XLA)]


@pytest.mark.parametrize(
    ("partials_and_size", "with_norms", "backend"),
    on_backends(
        [(1, 24), (3, 24), (1, 4), (1, 128)],
        [True, False],
        strength=0,
        keep=lambda *it: it in FLOAT8_DEFAULT,
    ),
)
def test_rotated_keys_are_written_to_a_float8_pool(partials_and_size, with_norms, backend):
    """The stored keys are the keys of a bfloat16 pool, rounded to FP8. The queries do not
    change."""
    num_partials, size = partials_and_size
    rng = np.random.default_rng(4)
    shape, slots = (num_partials, 5, 6 + 2 * 2, size), jnp.asarray([8, 39, -1, 40, 3], jnp.int32)
    qkv = jnp.asarray(rng.standard_normal(shape), BF16 if num_partials == 1 else F32)
    turns = jnp.asarray(rng.uniform(-9, 9, (5, size // 2)), F32)
    q_weight, k_weight = (jnp.asarray(rng.standard_normal(size), BF16) for _ in range(2))
    norms = HeadNorms(q_weight, k_weight, 1e-3)
    scales = KVScales(jnp.full(1, 0.03125, F32), jnp.full(1, 2.0, F32))
    options = {"norms": norms if with_norms else None, "dtype": BF16, "backend": backend}

    def run(dtype, **more):
        kv = LayerKV(*(to_pool(np.zeros((5, 8, 2, size)), dtype) for _ in range(2)))
        angles = jnp.cos(turns), jnp.sin(turns)
        write = partial(rope_write_kv, **options, **more)
        return jax.jit(write)(qkv, kv, slots, angles)

    (wide_q, wide), (q, narrow) = run(BF16), run(F8, scales=scales)
    np.testing.assert_array_equal(np.asarray(q, np.float32), np.asarray(wide_q, np.float32))
    for got, want, scale in zip(narrow, wide, scales, strict=True):
        np.testing.assert_array_equal(_bits(got), _bits(reference.float8(want, scale[0])))


@pytest.mark.parametrize(("shape", "backend"), on_backends(COPIED, strength=0, keep=_is_default))
def test_copy_blocks_matches_reference(shape, backend):
    dtype, block_size, num_kv_heads, head_size = shape
    rng = np.random.default_rng(2)
    shape = (6, block_size, num_kv_heads, head_size)
    pool = tuple(_pool(rng, dtype, *shape) for _ in range(3))
    src, dst = jnp.asarray([1, 1, 3, 0], jnp.int32), jnp.asarray([2, 4, 5, 0], jnp.int32)
    want = reference.copy_blocks(pool, src, dst)
    got = jax.jit(lambda *arrays: copy_blocks(*arrays, backend=backend))(pool, src, dst)
    jax.tree.map(np.testing.assert_array_equal, [tuple(layer) for layer in got], want)


def test_empty_writes_and_copies_change_nothing(backend):
    kv = LayerKV(jnp.ones((2, 8, 1, 32), F32), jnp.ones((2, 8, 1, 32), F32))
    none = jnp.zeros((0,), jnp.int32)
    rows = jnp.zeros((0, 1, 32), F32)
    assert write_kv(kv, rows, rows, none, backend=backend).k.shape == kv.k.shape
    assert copy_blocks((kv,), none, none, backend=backend)[0].v.shape == kv.v.shape


@pytest.mark.parametrize("backend", XLA_AND_TRITON)
@pytest.mark.parametrize("op", ["write", "copy"])
@pytest.mark.parametrize("dtype", [F32, F16, BF16, F8])
def test_kv_cache_pool_is_updated_in_place(op, dtype, backend):
    if backend is Backend.XLA and dtype is BF16:
        pytest.skip("XLA's CPU compiler has no scatter of this dtype; see kv_cache/xla.py")
    shape = (16, 16, 2, 64)
    kv = LayerKV(*(to_pool(np.zeros(shape), dtype) for _ in range(2)))
    indices = jnp.asarray([3, 18, 35], jnp.int32)
    if op == "write":
        rows = jnp.ones((3, 2, 64), BF16 if dtype is F8 else dtype)
        function, arguments = write_kv, (kv, rows, rows, indices)
    else:
        arguments = ((kv,), jnp.asarray([1, 2], jnp.int32), jnp.asarray([3, 4], jnp.int32))
        function = copy_blocks
    run = jax.jit(partial(function, backend=backend), donate_argnums=0)
    compiled: Any = run.lower(*arguments).compile()
    pool_copy = rf"\w+\[(16,16,2,{kv.k.shape[3]}|256,\d+|16,\d{{4}}|512,\d+)\]\S* copy"
    assert not re.search(pool_copy, compiled.as_text())
    assert compiled.memory_analysis().alias_size_in_bytes >= 2 * kv.k.nbytes
    assert compiled.memory_analysis().temp_size_in_bytes < kv.k.nbytes
