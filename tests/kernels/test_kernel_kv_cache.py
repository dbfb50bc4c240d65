"""KV write and block copy: bit for bit what the references give, in place."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import BF16, F16, F32, IMPLEMENTATIONS, require

from pallas_kernels import Backend, LayerKV, copy_blocks, write_kv
from tests.reference import kernels as reference

SHAPES = [(F32, 8, 2, 80), (BF16, 16, 3, 64), (F16, 128, 1, 256), (BF16, 24, 32, 128)]
SHAPES += [(F32, 8, 1, 1), (BF16, 8, 2, 5), (F16, 16, 3, 8), (BF16, 8, 2, 12), (F32, 8, 2, 24)]
SHAPES += [(F32, 1, 2, 5), (BF16, 4, 2, 64), (F16, 256, 2, 80), (F16, 1, 1, 1)]


def _pool(rng, dtype, *shape):
    return LayerKV(*(jnp.asarray(rng.standard_normal(shape), dtype) for _ in range(2)))


@pytest.mark.parametrize("backend", IMPLEMENTATIONS)
@pytest.mark.parametrize(("dtype", "block_size", "num_kv_heads", "head_size"), SHAPES)
def test_write_kv(dtype, block_size, num_kv_heads, head_size, backend):
    require(backend)
    rng = np.random.default_rng(1)
    kv = _pool(rng, dtype, 5, block_size, num_kv_heads, head_size)
    k, v = _pool(rng, dtype, 6, num_kv_heads, head_size)
    last = 5 * block_size - 1
    slots = jnp.asarray([block_size, last, 0, -1, last + 1, 2 * block_size + 3], jnp.int32)
    want = reference.write_kv(kv, k, v, slots)
    got = jax.jit(lambda *arrays: write_kv(*arrays, backend=backend))(kv, k, v, slots)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(a), b)


@pytest.mark.parametrize("backend", IMPLEMENTATIONS)
@pytest.mark.parametrize(("dtype", "block_size", "num_kv_heads", "head_size"), SHAPES)
def test_copy_blocks(dtype, block_size, num_kv_heads, head_size, backend):
    require(backend)
    rng = np.random.default_rng(2)
    shape = (6, block_size, num_kv_heads, head_size)
    pool = tuple(_pool(rng, dtype, *shape) for _ in range(3))
    src, dst = jnp.asarray([1, 1, 3, 0], jnp.int32), jnp.asarray([2, 4, 5, 0], jnp.int32)
    want = reference.copy_blocks(pool, src, dst)
    got = jax.jit(lambda *arrays: copy_blocks(*arrays, backend=backend))(pool, src, dst)
    jax.tree.map(np.testing.assert_array_equal, [tuple(layer) for layer in got], want)


@pytest.mark.parametrize("backend", IMPLEMENTATIONS)
def test_nothing_to_move(backend):
    kv = LayerKV(jnp.ones((2, 8, 1, 32), F32), jnp.ones((2, 8, 1, 32), F32))
    none = jnp.zeros((0,), jnp.int32)
    rows = jnp.zeros((0, 1, 32), F32)
    assert write_kv(kv, rows, rows, none, backend=backend).k.shape == kv.k.shape
    assert copy_blocks((kv,), none, none, backend=backend)[0].v.shape == kv.v.shape


@pytest.mark.parametrize("backend", [IMPLEMENTATIONS[0], IMPLEMENTATIONS[2]])
@pytest.mark.parametrize("op", ["write", "copy"])
@pytest.mark.parametrize("dtype", [F32, F16, BF16])
def test_pool_is_updated_in_place(op, dtype, backend):
    """With the pool donated, the optimised program holds no copy of it, nor an allocation."""
    require(backend)
    if backend is Backend.XLA and dtype is BF16:
        pytest.skip("XLA's CPU compiler has no bfloat16 scatter; see kv_cache/xla.py")
    shape = (16, 16, 2, 64)
    kv = LayerKV(*(jnp.zeros(shape, dtype) for _ in range(2)))
    indices = jnp.asarray([3, 18, 35], jnp.int32)
    if op == "write":
        rows = jnp.ones((3, 2, 64), dtype)
        run = jax.jit(lambda *arrays: write_kv(*arrays, backend=backend), donate_argnums=0)
        arguments = (kv, rows, rows, indices)
    else:
        run = jax.jit(lambda *arrays: copy_blocks(*arrays, backend=backend), donate_argnums=0)
        arguments = ((kv,), jnp.asarray([1, 2], jnp.int32), jnp.asarray([3, 4], jnp.int32))
    compiled: Any = run.lower(*arguments).compile()
    pool_copy = r"f\d+\[(16,16,2,64|256,128|16,2048|512,64)\]\S* copy"
    assert not re.search(pool_copy, compiled.as_text())
    assert compiled.memory_analysis().alias_size_in_bytes >= 2 * kv.k.nbytes
    assert compiled.memory_analysis().temp_size_in_bytes < kv.k.nbytes
