"""Test that wrong arguments of the ops raise errors that name the argument and its value."""

from functools import partial

import jax.numpy as jnp
import pytest
from kernel_cases import BF16, F8, F32, to_pool

from pallas_kernels import (
    Backend,
    HeadNorms,
    KVScales,
    LayerKV,
    attention,
    checks,
    gemm,
    kv_cache,
    norm,
    paged_decode_attention,
    select_backend,
)


def _ints(*shape):
    return jnp.zeros(shape, jnp.int32)


def _pool(num_blocks=4, block_size=16, num_kv_heads=2, head_size=64, dtype=F32):
    pool = to_pool(jnp.zeros((num_blocks, block_size, num_kv_heads, head_size)), dtype)
    return LayerKV(pool, pool)


def _check_attention(q=None, kv=None, tables=None, lens=None, backend=Backend.TRITON, **options):
    attention.check_attention(
        jnp.zeros((3, 4, 64), F32) if q is None else q,
        kv or _pool(),
        _ints(3, 5) if tables is None else tables,
        _ints(3) if lens is None else lens,
        backend,
        **{"scale": 0.1, "soft_cap": None, "sliding_window": None, **options},
    )


VALUE_ERRORS = {
    "head size 0": {"kv": _pool(head_size=0)},
    r"head size 264 \(kv.k.shape\[3\]\) must be from 1 to 256": {"kv": _pool(head_size=264)},
    r"block size 0 \(kv.k.shape\[1\]\) must be from 1 to 256": {"kv": _pool(block_size=0)},
    "block size 257": {"kv": _pool(block_size=257)},
    "head size 32 and the pool 64": {"q": jnp.zeros((3, 4, 32), F32)},
    "5 query heads": {"q": jnp.zeros((3, 5, 64), F32)},
    r"q has shape \(3, 64\)": {"q": jnp.zeros((3, 64), F32)},
    r"kv.k has shape \(4, 16, 64\)": {"kv": LayerKV(jnp.zeros((4, 16, 64)), jnp.zeros((4, 16)))},
    r"kv.v has shape \(5,": {"kv": LayerKV(_pool().k, _pool(5).k)},
    r"block_tables has shape \(3,\)": {"tables": _ints(3)},
    r"seq_lens has shape \(2,\)": {"lens": _ints(2)},
    "block_tables is empty, but q has 3 rows": {"tables": _ints(0, 5), "lens": _ints(0)},
    "scale is 0": {"scale": 0.0},
    "scale is nan": {"scale": float("nan")},
    "soft_cap is -1": {"soft_cap": -1.0},
    "soft_cap is inf": {"soft_cap": float("inf")},
    "sliding_window is 0": {"sliding_window": 0},
}
TYPE_ERRORS = {
    "kv.k has dtype int8": {"kv": _pool(dtype=jnp.int8)},
    "kv.v has dtype bfloat16": {"kv": LayerKV(_pool().k, _pool(dtype=BF16).k)},
    "q has dtype bfloat16": {"q": jnp.zeros((3, 4, 64), BF16)},
    "seq_lens has dtype int8": {"lens": jnp.zeros((3,), jnp.int8)},
    "q has dtype float8_e4m3fn": {"q": jnp.zeros((3, 4, 64), F8), "kv": _pool(dtype=F8)},
    "kv.k has dtype float8_e4m3fn: pack the pool with `pack_fp8_pairs`": {
        "kv": LayerKV(jnp.zeros((4, 16, 2, 64), F8), _pool().v)
    },
}


@pytest.mark.parametrize("message", VALUE_ERRORS | TYPE_ERRORS)
def test_attention_refuses_invalid_arguments(message):
    error = ValueError if message in VALUE_ERRORS else TypeError
    with pytest.raises(error, match=message):
        _check_attention(**(VALUE_ERRORS | TYPE_ERRORS)[message])


def test_xla_attention_accepts_any_head_size():
    for size in (1, 5, 12, 520):
        _check_attention(jnp.zeros((3, 4, size), F32), _pool(head_size=size), backend=Backend.XLA)


def test_attention_over_a_float8_pool_accepts_queries_of_wider_dtypes():
    for dtype in (F32, BF16, jnp.float16):
        _check_attention(jnp.zeros((3, 4, 64), dtype), _pool(dtype=F8))


def test_scales_need_a_float8_pool():
    one, resolve = jnp.ones(1, F32), checks.resolve_pool_scales
    assert resolve(_pool(), None) is None
    assert resolve(_pool(dtype=F8), None) == (1, 1)
    assert resolve(_pool(dtype=F8), KVScales(one, 2 * one)) == (1, 2)
    with pytest.raises(ValueError, match="the pool has dtype bfloat16: omit scales or use an FP8"):
        resolve(_pool(dtype=BF16), KVScales(one, one))
    with pytest.raises(ValueError, match=r"scales\.v has shape \(2,\); it must be \[1\]"):
        resolve(_pool(dtype=F8), KVScales(one, jnp.ones(2, F32)))
    with pytest.raises(TypeError, match=r"scales\.k has dtype bfloat16"):
        resolve(_pool(dtype=F8), KVScales(one.astype(BF16), one))


def test_attention_refuses_arrays_for_another_number_of_sequences():
    with pytest.raises(ValueError, match="6 rows for 3 block tables"):
        attention.check_decode(jnp.zeros((6, 4, 64)), _ints(3, 5))
    with pytest.raises(ValueError, match=r"query_start_loc has shape \(3,\); .* with B \+ 1 = 4"):
        attention.check_prefill(_ints(3), _ints(3))


def test_write_kv_refuses_rows_that_do_not_fit_the_pool():
    rows = jnp.zeros((3, 2, 64), F32)
    kv_cache.check_write(_pool(), rows, rows, _ints(3))
    with pytest.raises(ValueError, match="k has shape"):
        kv_cache.check_write(_pool(), rows[:2], rows, _ints(3))
    with pytest.raises(ValueError, match="v has shape"):
        kv_cache.check_write(_pool(), rows, rows[:, :1], _ints(3))
    with pytest.raises(TypeError, match="v has dtype bfloat16"):
        kv_cache.check_write(_pool(), rows, rows.astype(BF16), _ints(3))
    kv_cache.check_write(_pool(dtype=F8), rows.astype(BF16), rows.astype(BF16), _ints(3))
    with pytest.raises(TypeError, match="k has dtype float8_e4m3fn; it must be bfloat16 or"):
        kv_cache.check_write(_pool(dtype=F8), rows.astype(F8), rows, _ints(3))


def test_rope_write_kv_refuses_heads_that_do_not_fit_the_pool():
    angle, slots = jnp.zeros((3, 32), F32), _ints(3)

    def check(qkv, dtype=F32, angles=(angle, angle), norms=None, kv=None):
        kv_cache.check_rope_write(qkv, kv or _pool(), slots, angles, norms, jnp.dtype(dtype))

    good = jnp.zeros((1, 3, 8, 64), F32)
    check(good)
    check(good, dtype=BF16)
    with pytest.raises(ValueError, match="qkv has 7 heads"):
        check(good[:, :, :7])
    with pytest.raises(ValueError, match=r"head size 5 .* must be even"):
        check(good[..., :5], kv=_pool(head_size=5))
    with pytest.raises(ValueError, match=r"head size 6 .* must be a multiple of 4: .* of FP8"):
        check(good[..., :6], kv=_pool(head_size=6, dtype=F8))
    with pytest.raises(ValueError, match="head size 32 and the pool 64"):
        check(good[..., :32])
    with pytest.raises(ValueError, match=r"angles\[1\] has shape \(2, 32\)"):
        check(good, angles=(angle, angle[:2]))
    with pytest.raises(TypeError, match="qkv has dtype bfloat16; it must be float32"):
        check(good.astype(BF16))
    with pytest.raises(ValueError, match=r"norms\.eps is -1"):
        check(good, norms=HeadNorms(jnp.ones(64, F32), jnp.ones(64, F32), -1.0))


def test_rope_decode_requires_one_token_per_sequence():
    angle, qkv = jnp.zeros((3, 32), F32), jnp.zeros((1, 3, 8, 64), F32)
    tables, lens = _ints(3, 5), _ints(3)

    def check(qkv=qkv, lens=lens, window=None):
        arrays = (qkv, _pool(), tables, lens, (angle[: qkv.shape[1]],) * 2, None)
        scalars = {"scale": 0.1, "soft_cap": None, "sliding_window": window}
        attention.check_rope_decode(*arrays, qkv.dtype, Backend.TRITON, **scalars)

    check()
    with pytest.raises(ValueError, match=r"seq_lens has shape \(3,\); it must be \[B\] with B = 2"):
        check(qkv=qkv[:, :2])
    with pytest.raises(ValueError, match=r"seq_lens has shape \(2,\); it must be \[B\] with B = 3"):
        check(lens=lens[:2])
    with pytest.raises(ValueError, match="qkv has 7 heads"):
        check(qkv=qkv[:, :, :7])
    with pytest.raises(ValueError, match="sliding_window is 0"):
        check(window=0)


def test_norms_and_gemms_require_matching_shapes():
    rows, weight = jnp.zeros((3, 64), F32), jnp.zeros(64, F32)
    norm.check_add_norm(rows, rows[None], weight, 1e-6)
    with pytest.raises(ValueError, match="update has shape"):
        norm.check_add_norm(rows, rows[None, :2], weight, 1e-6)
    half = rows.astype(BF16)
    norm.check_add_norm(half, half[None], weight, 1e-6)
    with pytest.raises(TypeError, match=r"weight has dtype float16.* or float32"):
        norm.check_add_norm(half, half[None], weight.astype(jnp.float16), 1e-6)
    with pytest.raises(ValueError, match="no partial sums"):
        norm.check_add_norm(rows, rows[None][:0], weight, 1e-6)
    with pytest.raises(ValueError, match="eps is nan"):
        norm.check_add_norm(rows, rows[None], weight, float("nan"))
    with pytest.raises(ValueError, match="weight has shape"):
        gemm.check_gemm(rows, jnp.zeros((32, 8), F32))


def test_array_check_names_the_wrong_shape_or_dtype():
    check = partial(checks.check_array, "gate_up", axes="[T, 2, F]")
    assert check(jnp.zeros((3, 2, 64), BF16)) == {"T": 3, "2": 2, "F": 64}
    with pytest.raises(ValueError, match=r"shape \(3, 1, 64\); it must be \[T, 2, F\]"):
        check(jnp.zeros((3, 1, 64), BF16))
    with pytest.raises(ValueError, match=r"gate_up has shape \(3, 64\)"):
        check(jnp.zeros((3, 64), BF16))
    with pytest.raises(TypeError, match="int32; it must be bfloat16 or float16 or float32: "):
        check(_ints(3, 2, 64))


def test_gated_gemm_refuses_a_weight_that_does_not_fit_the_rows():
    rows = jnp.zeros((3, 64), BF16)
    gemm.check_gated_gemm(rows, jnp.zeros((64, 2, 8), BF16))
    with pytest.raises(ValueError, match=r"weight has shape \(64, 16\)"):
        gemm.check_gated_gemm(rows, jnp.zeros((64, 16), BF16))
    with pytest.raises(ValueError, match=r"shape \(32, 2, 8\); it must be \[D, 2, F\] with D = 64"):
        gemm.check_gated_gemm(rows, jnp.zeros((32, 2, 8), BF16))
    with pytest.raises(TypeError, match="weight has dtype float32"):
        gemm.check_gated_gemm(rows, jnp.zeros((64, 2, 8), F32))


def test_copy_blocks_refuses_unequal_layers_and_unequal_numbers_of_sources_and_targets():
    with pytest.raises(ValueError, match="no layers"):
        kv_cache.check_copy((), _ints(1), _ints(1))
    with pytest.raises(ValueError, match=r"pool\[1\].k has shape"):
        kv_cache.check_copy((_pool(), _pool(5)), _ints(1), _ints(1))
    with pytest.raises(TypeError, match=r"pool\[1\].k has dtype"):
        kv_cache.check_copy((_pool(), _pool(dtype=BF16)), _ints(1), _ints(1))
    with pytest.raises(ValueError, match="dst has shape"):
        kv_cache.check_copy((_pool(),), _ints(1), _ints(2))


def test_decode_attention_refuses_invalid_scale_arguments():
    arguments, ones = (jnp.zeros((3, 4, 64), F32), _pool(), _ints(3, 5), _ints(3)), jnp.ones(1, F32)
    run = partial(paged_decode_attention, *arguments, backend=Backend.XLA)
    with pytest.raises(ValueError, match="scale is -1"):
        run(scale=-1.0)
    with pytest.raises(ValueError, match="scales is set but the pool has dtype float32"):
        run(scale=1.0, scales=KVScales(ones, ones))


def test_backend_is_triton_on_gpus_and_xla_on_other_platforms():
    assert select_backend("gpu") is select_backend("cuda") is Backend.TRITON
    assert select_backend("cpu") is select_backend("tpu") is Backend.XLA
