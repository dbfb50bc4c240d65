"""Test attention of several last tokens per sequence against the reference."""

import dataclasses
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import BF16, F8, F32, Case, assert_close, build, lower, to_pool

from pallas_kernels import Backend, LayerKV, paged_verify_attention
from pallas_kernels.attention import tuning
from tests.reference import kernels as reference

CASES = [
    (Case(head_size=64, heads=(4, 2)), 4),
    (Case(BF16, head_size=128, heads=(8, 2)), 8),
    (Case(head_size=32, block_size=8, heads=(6, 2), soft_cap=2.0, sliding_window=21), 2),
    (Case(BF16, head_size=64, heads=(4, 4), sliding_window=5), 8),
    (Case(head_size=24, block_size=1, heads=(3, 1)), 4),
    (Case(BF16, head_size=64, heads=(4, 2), scales=(0.5, 2.0)), 4),
]
GPU_CASES = [
    (Case(BF16, head_size=128, heads=(32, 8)), 2),
    (Case(BF16, head_size=128, heads=(32, 8), scales=(0.25, 0.5)), 8),
    (Case(BF16, head_size=256, heads=(4, 1), soft_cap=5.0, sliding_window=64), 8),
    (Case(F32, head_size=80, heads=(6, 3)), 4),
]


def verify_lens(block_size, num_queries):
    """Return `Case.lens` for sequences that end near the end of a block or of a tile.

    One of the sequences is a padding row.
    """
    totals = (num_queries, num_queries + 1, 2 * block_size + num_queries, 0, 140, 300)
    return tuple((total, min(num_queries, total)) for total in totals)


def check(case, num_queries, backend, more_lens=()):
    lens = verify_lens(case.block_size, num_queries) + more_lens
    batch = build(dataclasses.replace(case, lens=lens))
    lens = np.asarray(batch.seq_lens)
    shape = (len(lens), num_queries, case.heads[0], case.head_size)
    q = jnp.asarray(np.random.default_rng(3).standard_normal(shape), case.dtype)
    arrays = (q, batch.kv, batch.block_tables, batch.seq_lens)
    got = jax.jit(partial(paged_verify_attention, **case.options, backend=backend))(*arrays)
    rows = np.asarray(q)[lens > 0].reshape(-1, *shape[2:])
    starts = np.concatenate([[0], np.cumsum(np.where(lens > 0, num_queries, 0))])

    def plain(dtype):
        out = np.zeros(shape, dtype)
        out[lens > 0] = reference.paged_prefill_attention(
            jnp.asarray(rows, case.dtype), *arrays[1:3], starts, lens, dtype=dtype, **case.options
        ).reshape(-1, *shape[1:])
        return out.reshape(-1, *shape[2:])

    assert got.dtype == case.dtype
    assert_close(got.reshape(-1, *shape[2:]), plain, case.dtype)


@pytest.mark.parametrize(("case", "num_queries"), CASES, ids=str)
def test_verify_attention_matches_reference(case, num_queries, backend):
    check(case, num_queries, backend)


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "num_queries"), GPU_CASES, ids=str)
def test_verify_attention_matches_reference_on_a_gpu(case, num_queries):
    check(case, num_queries, Backend.TRITON, ((3000, num_queries),) * 3)


@pytest.mark.parametrize("num_splits", [1, 3, 8])
def test_verify_attention_with_any_number_of_splits_matches_reference(num_splits, monkeypatch):
    config = tuning.DecodeConfig(16, num_splits, target_programs=24)
    monkeypatch.setattr(tuning, "decode_config", lambda **_: config)
    check(Case(head_size=32, heads=(4, 2)), 4, Backend.INTERPRET)


@pytest.mark.parametrize("dtype", [BF16, F32, F8])
def test_verify_attention_lowers_to_one_kernel(dtype):
    q = jax.ShapeDtypeStruct((8, 4, 4, 64), F32 if dtype == F32 else BF16)
    pool = to_pool(np.zeros((9, 16, 2, 64)), dtype)
    tables, lens = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((8, 8), (8,)))
    run = partial(paged_verify_attention, scale=0.1, backend=Backend.TRITON)
    text = lower(run, q, LayerKV(pool, pool), tables, lens)
    assert len(re.findall(r"custom_call @\S*triton", text)) == 1


@pytest.mark.parametrize("num_queries", [3, 16])
def test_unsupported_number_of_verify_queries_raises_an_error(num_queries):
    batch = build(Case(lens=((20, 1),)))
    q = jnp.zeros((1, num_queries, 4, 64))
    arrays = (q, batch.kv, batch.block_tables, batch.seq_lens)
    with pytest.raises(ValueError, match=f"q has {num_queries} queries per sequence"):
        paged_verify_attention(*arrays, scale=1.0, backend=Backend.XLA)
