"""Test decode and prefill attention on every backend against a float64 reference."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import (
    BF16,
    F8,
    F16,
    F32,
    Case,
    assert_close,
    build,
    edge_lens,
    on_backends,
    to_pool,
)

import pallas_kernels
from pallas_kernels import (
    FP8_PAIR_DTYPE,
    Backend,
    HeadNorms,
    LayerKV,
    paged_decode_attention,
    paged_prefill_attention,
    rope_decode_attention,
    tuning,
)
from pallas_kernels.attention import decode_triton, prefill_hopper, prefill_triton, widen_triton
from pallas_kernels.attention import tuning as attention_tuning
from pallas_kernels.attention.tuning import DecodeConfig, PrefillConfig, WideningConfig
from tests.covering import covering
from tests.reference import kernels as reference

HEADS = {"mha": (2, 2), "gqa": (6, 2), "mqa": (4, 1), "wide": (20, 1)}

# The cases have each dtype, each number of query heads per KV head, and each combination of sliding
# window and soft cap.
CASES = [
    Case(F32, 32, 8, HEADS["mha"]),
    Case(BF16, 64, 16, HEADS["gqa"]),
    Case(F16, 80, 32, HEADS["mqa"], soft_cap=2.0),
    Case(F32, 96, 16, HEADS["gqa"], sliding_window=9),
    Case(BF16, 128, 128, HEADS["mqa"], sliding_window=130, soft_cap=5.0),
    Case(F16, 256, 8, HEADS["mha"]),
    Case(F32, 128, 24, HEADS["wide"], sliding_window=1),
    Case(F16, 64, 16, HEADS["wide"]),
    Case(BF16, 80, 8, HEADS["mha"], sliding_window=16),
]
# The head sizes are smaller than the tile, or are not powers of two. Rotary embedding needs even
# head sizes.
NARROW = [
    Case(F32, 1, 8, HEADS["mqa"]),
    Case(BF16, 4, 8, HEADS["gqa"], sliding_window=9),
    Case(F32, 5, 8, HEADS["gqa"], sliding_window=3),
    Case(F32, 8, 16, HEADS["mha"], soft_cap=2.0),
    Case(BF16, 12, 16, HEADS["mqa"]),
    Case(BF16, 16, 8, HEADS["mha"]),
    Case(F16, 24, 8, HEADS["gqa"]),
    Case(F32, 40, 8, HEADS["mha"]),
]
# The block sizes are much smaller or larger than a key tile, or are not powers of two.
BLOCKS = [
    Case(F32, 32, 1, HEADS["gqa"], sliding_window=2),
    Case(BF16, 64, 4, HEADS["mqa"], soft_cap=3.0),
    Case(F32, 16, 7, HEADS["mha"]),
    Case(F16, 32, 256, HEADS["gqa"], sliding_window=200),
]
# FP8 pools. With these scales, a kernel that omits or swaps the scales gives another result.
SCALED = [
    Case(BF16, 64, 16, HEADS["gqa"], scales=(0.02, 0.3)),
    Case(F32, 80, 8, HEADS["mha"], scales=(1.0, 1.0)),
    Case(F16, 128, 32, HEADS["wide"], sliding_window=20, scales=(2.5, 0.05)),
    Case(BF16, 128, 16, HEADS["mqa"], soft_cap=3.0, scales=(0.01, 4.0)),
    Case(F32, 4, 1, HEADS["gqa"], scales=(0.5, 0.1)),
    Case(F16, 16, 8, HEADS["gqa"], scales=(0.2, 0.1)),
    Case(BF16, 24, 16, HEADS["mha"], scales=(0.5, 0.1)),
]
CASES += NARROW + BLOCKS
ROTATED = [case for case in CASES if case.head_size % 2 == 0]
CASES += SCALED
# More pairs of head size and block size, which are tested on a GPU only.
GPU_CASES = [
    Case(
        (F32, BF16, F16)[(h + b) % 3],
        head_size,
        block_size,
        tuple(HEADS.values())[(h + b // 2) % 4],
    )
    for h, head_size in enumerate((32, 64, 80, 96, 128, 256))
    for b, block_size in enumerate((1, 2, 4, 8, 16, 32, 64, 128, 256))
    if (h + b) % 2 == 0
]
GPU_CASES += [
    Case((BF16, F16, F32)[h % 3], head_size, 16, tuple(HEADS.values())[h % 4])
    for h, head_size in enumerate((2, 8, 16, 20, 24, 40, 72, 200))
]
# CPU tests that pytest runs without `--tier full`. Each key is the name of a case. Each value is a
# pair: the ops to test in interpret mode, and the ops to test with XLA. Interpret mode gets more
# cases: only interpret mode runs the kernels, whose tiles depend on the head size and block size.
DEFAULT_OPS = {
    "float16-H80-S32-4x1-cap2": ("decode, rope decode, prefill", "decode, rope decode, prefill"),
    "bfloat16-H128-S128-4x1-cap5-win130": ("decode, rope decode, prefill", ""),
    "float32-H128-S24-20x1-win1": ("decode, rope decode, prefill", ""),
    "float16-H256-S8-2x2": ("decode, rope decode, prefill", ""),
    "bfloat16-H64-S16-6x2": ("decode", ""),
    "float32-H96-S16-6x2-win9": ("rope decode", ""),
    "float32-H5-S8-6x2-win3": ("prefill", ""),
    "bfloat16-H12-S16-4x1": ("rope decode", ""),
    "float32-H32-S1-6x2-win2": ("decode, prefill", ""),
    "float32-H16-S7-2x2": ("", "decode, prefill"),
    "float16-H32-S256-6x2-win200": ("prefill", "decode, prefill"),
    "float16-H128-S32-20x1-win20-f8x2.5": ("decode, prefill", "decode, prefill"),
    "bfloat16-H128-S16-4x1-cap3-f8x0.01": ("decode, rope decode", ""),
    "float32-H4-S1-6x2-f8x0.5": ("prefill", ""),
    "bfloat16-H24-S16-2x2-f8x0.5": ("decode, rope decode, prefill", ""),
}
assert {*DEFAULT_OPS} <= {*map(str, CASES)}


def _params(op, cases=CASES, more=GPU_CASES):
    for case in cases:
        for backend, ops in zip(
            (Backend.INTERPRET, Backend.XLA), DEFAULT_OPS.get(str(case), ("", "")), strict=True
        ):
            marks = [] if op in ops.split(", ") else [pytest.mark.full]
            yield pytest.param(case, backend, id=f"{case}-{backend}", marks=marks)
        yield pytest.param(
            case, Backend.TRITON, id=f"{case}-{Backend.TRITON}", marks=pytest.mark.gpu
        )
    for case in more:
        yield pytest.param(case, Backend.TRITON, id=f"{case}-more", marks=pytest.mark.gpu)


def _filled(case, **changes):
    return dataclasses.replace(case, lens=edge_lens(case.block_size), padding=5, **changes)


def _check(op, case, function=None, **options):
    """Check the results of "decode" or "prefill" attention against the reference."""
    name, batch = f"paged_{op}_attention", build(case)
    arrays = batch.decode_arguments if op == "decode" else batch.prefill_arguments
    run = partial(function or getattr(pallas_kernels, name), **case.options, **options)
    got = jax.jit(run)(*arrays)
    plain = partial(getattr(reference, name), *arrays, **case.options)
    assert got.dtype == case.dtype
    assert_close(got, lambda dtype: plain(dtype=dtype), case.dtype)


@pytest.mark.parametrize(("case", "backend"), list(_params("decode")))
def test_decode_matches_reference(case, backend):
    _check("decode", _filled(case), backend=backend)


@pytest.mark.parametrize(("case", "backend"), list(_params("prefill")))
def test_prefill_matches_reference(case, backend):
    _check("prefill", _filled(case), backend=backend)


def _with_new_tokens(case, num_partials, with_norms):
    """Return arguments for `rope_decode_attention`: the positional arrays, and `norms`.

    The op must write the slot of each sequence's last token, so the pool holds NaN in this slot.
    `norms` is a `HeadNorms` if `with_norms` is true, else None.
    """
    batch, rng = build(case), np.random.default_rng(8)
    (num_heads, num_kv_heads), size = case.heads, case.head_size
    lens = np.asarray(batch.seq_lens)
    position = np.maximum(lens - 1, 0)
    block = np.asarray(batch.block_tables)[np.arange(len(lens)), position // case.block_size]
    block = np.where(lens > 0, block, 0)
    nothing = to_pool(jnp.full(size, jnp.nan), F8 if case.scales else case.dtype)
    kv = LayerKV(*(p.at[block, position % case.block_size].set(nothing) for p in batch.kv))
    shape = (num_partials, len(lens), num_heads + 2 * num_kv_heads, size)
    # The sum of the split-K partials of q, k and v has a standard deviation of 1.
    partials = rng.standard_normal(shape) / num_partials**0.5
    qkv = jnp.asarray(partials, case.dtype if num_partials == 1 else F32)
    turns = rng.uniform(-9, 9, (len(lens), size // 2)).astype(np.float32)
    q_weight, k_weight = (jnp.asarray(rng.standard_normal(size), case.dtype) for _ in range(2))
    norms = HeadNorms(q_weight, k_weight, 1e-3) if with_norms else None
    arrays = (qkv, kv, batch.block_tables, batch.seq_lens, (jnp.cos(turns), jnp.sin(turns)))
    return arrays, norms


def _assert_new_tokens(got, arrays, norms, case):
    """Check that outputs equal the reference and that only the slots of new tokens changed."""

    def plain(dtype):
        return reference.rope_decode_attention(*arrays, norms=norms, dtype=dtype, **case.options)

    out, pool = got
    assert_close(out, lambda dtype: plain(dtype)[0], case.dtype)
    for part, (new, old) in enumerate(zip(pool, arrays[1], strict=True)):
        want = np.asarray(plain(np.float64)[1][part])
        changed = (np.isfinite(want) & ~np.isfinite(np.asarray(old, np.float64))).all(axis=(2, 3))
        assert changed.sum() == np.count_nonzero(arrays[3])
        kept, before = (np.asarray(pool, np.float32)[~changed] for pool in (new, old))
        np.testing.assert_array_equal(kept, before)

        def stored(dtype, part=part, changed=changed):
            return np.asarray(plain(dtype)[1][part])[changed]

        assert_close(new[changed], stored, case.dtype)


@pytest.mark.parametrize(("case", "backend"), list(_params("rope decode", ROTATED)))
def test_rope_decode_matches_reference(case, backend):
    case = _filled(case)
    number = (case.head_size + case.block_size) // 8
    arrays, norms = _with_new_tokens(case, (1, 4, 2)[number % 3], number % 2 == 0)
    run = partial(
        rope_decode_attention, norms=norms, dtype=case.dtype, **case.options, backend=backend
    )
    got = jax.jit(run)(*arrays)
    assert got[0].dtype == case.dtype
    _assert_new_tokens(got, arrays, norms, case)


def _assert_near(got, want):
    """Check that FP8 numbers are equal, except that up to 2% may be adjacent FP8 numbers."""
    orders = []
    for array in (got, want):
        bits = reference.unpaired(array).view(np.uint8).astype(np.int32)
        orders.append(np.where(bits < 128, bits, 128 - bits))
    steps = np.abs(orders[0] - orders[1])
    assert steps.max() <= 1
    assert steps.mean() < 0.02


@pytest.mark.parametrize(("case", "backend"), list(_params("rope decode", SCALED, ())))
def test_rope_decode_over_a_float8_pool_matches_reference(case, backend):
    """Rope-decode attention must use the new key as stored in the FP8 pool, because later steps
    read the stored key.

    The test also runs the op with an unquantized pool. Keys and values in the unquantized pool,
    rounded to FP8, must equal the contents of the FP8 pool.
    """
    case = _filled(case)
    number_of_partials, with_norms = (1, 4)[case.soft_cap is None], case.sliding_window is None
    arrays, norms = _with_new_tokens(case, number_of_partials, with_norms)
    qkv, kv, *rest = arrays
    options = case.options | {"norms": norms, "dtype": case.dtype, "backend": backend}
    out, pool = jax.jit(partial(rope_decode_attention, **options))(*arrays)
    assert (out.dtype, pool.k.dtype) == (case.dtype, FP8_PAIR_DTYPE)

    shape = *kv.k.shape[:3], case.head_size
    wide = LayerKV(*(jnp.full(shape, jnp.nan, case.dtype) for _ in kv))
    run = partial(rope_decode_attention, **(options | {"scales": None}))
    _, wide = jax.jit(run)(qkv, wide, *rest)
    own = np.isfinite(np.asarray(wide.k, np.float32)).all(axis=(2, 3))
    assert own.sum() == np.count_nonzero(arrays[3])
    for new, old, made, scale in zip(pool, kv, wide, case.kv_scales, strict=True):
        _assert_near(np.asarray(new)[own], reference.float8(np.asarray(made)[own], scale))
        kept, before = (np.asarray(part).view(np.uint8)[~own] for part in (new, old))
        np.testing.assert_array_equal(kept, before)

    def plain(dtype):
        nowhere, empty = np.full(qkv.shape[1], -1), [np.zeros(shape)] * 2
        q, _ = reference.rope_write_kv(qkv, empty, nowhere, rest[2], norms, dtype=dtype)
        given = (q, pool, *rest[:2])
        return reference.paged_decode_attention(*given, dtype=dtype, **case.options)

    assert_close(out, plain, case.dtype)


@pytest.mark.parametrize(
    ("dtype", "backend"),
    on_backends([F32, BF16, F16], strength=0, keep=lambda *it: it == (BF16, Backend.INTERPRET)),
)
def test_every_float8_number_is_read_exactly(dtype, backend):
    numbers = np.arange(256, dtype=np.uint8).view(F8).reshape(1, 1, 2, 128)
    pool = to_pool(np.zeros((2, 16, 2, 128)), F8)
    kv = LayerKV(pool, pool.at[1, 0].set(to_pool(numbers, F8)[0, 0]))
    q, table, length = jnp.ones((1, 4, 128), dtype), *[jnp.ones(s, jnp.int32) for s in ((1, 1), 1)]
    options = {"scale": 1.0, "backend": backend, "scales": Case(scales=(1.0, 0.5)).kv_scales}
    wanted = np.repeat(numbers[0, 0].astype(np.float32) / 2, 2, axis=0)
    assert np.isnan(wanted).sum() == 4
    decoded = paged_decode_attention(q, kv, table, length, **options)
    starts = jnp.arange(2, dtype=jnp.int32)
    prefilled = paged_prefill_attention(q, kv, table, starts, length, **options)
    for got in (decoded, prefilled):
        np.testing.assert_array_equal(np.asarray(got[0], np.float32), wanted)


def test_attention_of_no_queries_is_empty(backend):
    kv = LayerKV(*(jnp.ones((3, 8, 1, 32), F32) for _ in range(2)))
    q, qkv, angle = (jnp.zeros(s, F32) for s in ((0, 2, 32), (1, 0, 4, 32), (0, 16)))
    tables, lens = jnp.zeros((2, 4), jnp.int32), jnp.zeros(2, jnp.int32)
    options = {"scale": 1.0, "backend": backend}
    out, pool = rope_decode_attention(qkv, kv, tables[:0], lens[:0], (angle, angle), **options)
    for result in (
        out,
        paged_decode_attention(q, kv, tables[:0], lens[:0], **options),
        paged_prefill_attention(q, kv, tables, jnp.zeros(3, jnp.int32), lens, **options),
    ):
        assert result.shape == q.shape
    np.testing.assert_array_equal(pool.k, kv.k)


# Each pair is (number of tokens, number of new tokens) of a sequence. A decode row has one new
# token. A batch starts with decode rows. Prompt chunks follow, with one more decode row among the
# chunks. The last two sequences are padding. In large batches, the decode kernel computes the
# decode rows at the start.
DECODE_ROWS = ((1, 1), (300, 1), (16, 1), (2, 1), (17, 1), (130, 1), (33, 1))
CHUNKS = ((90, 12), (5, 5), (60, 1), (70, 70), (0, 0), (0, 0))
BATCHES = {
    "few": DECODE_ROWS + CHUNKS,
    "many": 5 * DECODE_ROWS + CHUNKS,
    "without chunks": 2 * DECODE_ROWS,
}
CHANGES = {
    "plain": {},
    "window and cap": {"sliding_window": 20, "soft_cap": 3.0},
    "wide": {"dtype": BF16, "head_size": 128},
    "float8": {"dtype": BF16, "scales": (0.02, 0.3)},
}
INTERPRETED = ("few", 0, "float8"), ("without chunks", 40, "window and cap")
BY_XLA = ("many", 40, "wide")


@pytest.mark.parametrize(
    ("lens", "padding", "changes", "backend"),
    on_backends(
        BATCHES,
        [0, 40],
        CHANGES,
        strength=0,
        keep=lambda *it: it[:3] in INTERPRETED if it[3] is Backend.INTERPRET else it[:3] == BY_XLA,
    ),
)
def test_prefill_with_decode_rows_matches_reference(lens, padding, changes, backend):
    options: dict[str, Any] = {"dtype": F32, "head_size": 32} | CHANGES[changes]
    _check("prefill", Case(**options, lens=BATCHES[lens], padding=padding), backend=backend)


# The sequences have several key tiles, and several chunks of keys in xla.py.
LONG = ((300, 1), (0, 0), (7, 7), (260, 70), (0, 0))


@pytest.mark.parametrize("window", [None, pytest.param(100, marks=pytest.mark.full)])
def test_prefill_of_long_sequences_matches_reference(backend, window):
    case = Case(F32, 32, 16, (4, 2), LONG, sliding_window=window, padding=50)
    _check("prefill", case, backend=backend)


@pytest.mark.parametrize(
    ("op", "backend"),
    on_backends(
        ["decode", "rope decode", "prefill"], strength=0, keep=lambda op, _: op != "rope decode"
    ),
)
def test_window_that_begins_at_the_end_of_a_tile_matches_reference(op, backend):
    window = 3
    ends = [(keys + window - 1, 1) for keys in (128, 256, 384)]
    case = Case(F32, 32, 16, (4, 2), (*ends, (128 + window + 4, 6)), sliding_window=window)
    if op == "rope decode":
        arrays, norms = _with_new_tokens(case, 1, False)
        run = partial(rope_decode_attention, **case.options, backend=backend)
        _assert_new_tokens(jax.jit(run)(*arrays), arrays, norms, case)
    else:
        _check(op, case, backend=backend)


_check_split_decode = partial(_check, "decode", function=decode_triton.paged_decode_attention)


@pytest.mark.parametrize(
    ("splits", "window", "programs_and_percent"),
    covering(
        [1, 2, 3, 16],
        [None, 40],
        [(6, None), (528, 30), (528, 100), (528, 150)],
        strength=0,
        keep=lambda *it: it in ((16, 40, (6, None)), (3, None, (528, 30)), (2, 40, (528, 150))),
    ),
)
def test_decode_with_any_number_of_splits_matches_reference(
    splits, window, programs_and_percent, interpret
):
    """The cases have more splits than key tiles, splits of different sizes, and empty splits.

    `programs_and_percent` has the values of `DecodeConfig.target_programs` and
    `DecodeConfig.split_percent_of_mean`.
    """
    case = Case(F32, 32, 16, (4, 2), LONG, sliding_window=window)
    programs, percent = programs_and_percent
    config = DecodeConfig(32, splits, target_programs=programs, split_percent_of_mean=percent)
    _check_split_decode(case, config=config, interpret=interpret)


@pytest.mark.parametrize(
    ("splits", "window"),
    covering([1, 2, 3, 16], [None, 40], strength=0, keep=lambda *it: it == (3, 40)),
)
def test_nan_in_one_sequence_with_split_keys_changes_no_other_sequence(splits, window, interpret):
    case = Case(F32, 32, 16, (4, 2), LONG, sliding_window=window)
    options = {"config": DecodeConfig(32, splits), "interpret": interpret}
    _check_split_decode(case, **options)
    q, *arrays = build(case).decode_arguments
    run = jax.jit(partial(decode_triton.paged_decode_attention, **case.options, **options))
    got = run(q, *arrays)
    # With `into`, the op writes only the rows of sequences that have keys.
    target = jnp.full_like(jnp.concatenate([q] * 2), jnp.nan)
    merged = np.asarray(run(jnp.concatenate([q] * 2), *arrays, into=target))
    has_keys = np.asarray(arrays[-1]) > 0
    np.testing.assert_array_equal(merged[: len(q)][has_keys], got[has_keys])
    assert np.isnan(merged[len(q) :]).all()
    assert np.isnan(merged[: len(q)][~has_keys]).all()
    # NaN in one sequence changes no other sequence.
    ruined = run(q.at[0].set(jnp.nan), *arrays)
    np.testing.assert_array_equal(np.asarray(ruined)[1:], np.asarray(got)[1:])


@pytest.mark.parametrize("heads", [pytest.param((4, 1), marks=pytest.mark.full), (6, 1)])
def test_splits_of_many_query_heads_are_merged_correctly(heads, interpret):
    case = Case(F32, 128, 16, heads, (*LONG, (1000, 1), (530, 1)))
    config = DecodeConfig(tile_tokens=16, num_splits=64, target_programs=9999)
    _check_split_decode(case, config=config, interpret=interpret)


@pytest.mark.gpu
@pytest.mark.parametrize("op", [paged_decode_attention, rope_decode_attention])
@pytest.mark.parametrize(
    "lens",
    [
        (2048,),
        (2000, 5, 700, 1, 1030, 64, 65, 300),
        (*sorted(np.random.default_rng(0).integers(60, 1400, 42).tolist(), reverse=True), *[0] * 6),
    ],
    ids=len,
)
def test_attention_with_split_keys_is_deterministic(lens, op):
    batch = build(Case(BF16, 128, 16, (32, 8), tuple((n, min(n, 1)) for n in lens)))
    is_fused = op is rope_decode_attention
    shape = (1, len(lens), 32 + 2 * 8, 128) if is_fused else (len(lens), 32, 128)
    rng = np.random.default_rng(0)
    queries = [jnp.asarray(rng.standard_normal(shape), BF16) for _ in range(4)]
    angle = jnp.ones((len(lens), 64), F32)
    run = partial(op, scale=128**-0.5, backend=Backend.TRITON)

    @jax.jit
    def launch(queries, kv, tables, lens):
        outs = []
        for q in queries:
            if is_fused:
                out, kv = run(q, kv, tables, lens, (angle, angle))
            else:
                out = run(q, kv, tables, lens)
            outs.append(out.astype(F32))
        return jnp.stack(outs)

    arguments = queries, batch.kv, batch.block_tables, batch.seq_lens
    first = np.asarray(launch(*arguments))
    assert np.isfinite(first).all()
    for _ in range(50):
        np.testing.assert_array_equal(np.asarray(launch(*arguments)), first)


def test_decode_plan_limits_the_splits_of_a_single_sequence():
    """The sequence has fewer key tiles than `target_programs`, so every tile could be a split."""
    for group, num_tiles, num_splits in (
        (4, 1, 1), (4, 7, 7), (4, 16, 16), (4, 17, 9), (4, 32, 16), (4, 33, 17), (4, 64, 32),
        (2, 17, 17), (2, 32, 32), (2, 33, 17),
    ):  # fmt: skip
        spec = _spec(DecodeConfig(tile_tokens=32, num_splits=32), group)
        assert spec.splits_per_merge == 64 // group
        lens = jnp.asarray([32 * num_tiles], jnp.int32)
        plan = np.asarray(decode_triton.decode_plan(jnp.zeros((1, 128), jnp.int32), lens, spec))
        assert (plan[:, 5] > 0).sum() == plan[0, 5] == num_splits


def _spec(config, group):
    """Return a `DecodeSpec` with 8 KV heads of size 128, and block tables of 128 columns."""
    return decode_triton.DecodeSpec(
        num_heads=8 * group,
        num_kv_heads=8,
        head_size=128,
        block_size=16,
        table_width=128,
        scale=1.0,
        soft_cap=None,
        sliding_window=None,
        config=config,
        interpret=True,
    )


@pytest.mark.parametrize(
    ("percent", "splits"), covering([None, 50, 110, 150], [2, 8, 32], strength=1)
)
def test_decode_plan_covers_every_tile_once(percent, splits):
    """The batches have random lengths or equal lengths, followed by padding rows."""
    rng = np.random.default_rng(0)
    spec = _spec(DecodeConfig(tile_tokens=32, num_splits=splits, split_percent_of_mean=percent), 2)
    for turn in range(50):
        lens = rng.integers(0, 2000, 40) if turn % 5 else np.full(40, rng.integers(1, 2000))
        lens[rng.integers(1, 41) :] = 0
        tables = jnp.zeros((40, 128), jnp.int32)
        plan = np.asarray(decode_triton.decode_plan(tables, jnp.asarray(lens, jnp.int32), spec))
        covered = {sequence: [] for sequence in range(40)}
        for sequence, _, start, stop, split, count, *_ in plan[plan[:, 5] > 0]:
            assert split == len(covered[sequence]) // 2 < count <= splits
            covered[sequence] += [start, stop]
        # Longer sequences come first. Sequences of equal length keep their order. The splits of a
        # sequence are adjacent.
        order = np.argsort(-((lens + 31) // 32), kind="stable")
        counts = dict(plan[plan[:, 5] > 0][:, [0, 5]].tolist())
        wanted = [sequence for sequence in order for _ in range(counts[sequence])]
        assert plan[: len(wanted), 0].tolist() == wanted
        assert not plan[len(wanted) :, 5].any()
        for sequence, bounds in covered.items():
            # Each split begins at the key tile where the previous split ends.
            assert bounds[::2] == [0, *bounds[1:-1:2]]
            assert bounds[-1] == -(-lens[sequence] // 32)


@pytest.mark.parametrize(
    ("splits", "window_and_heads", "programs_and_percent"),
    covering(
        [1, 2, 16],
        [(None, (4, 2)), (40, (11, 1))],
        [(528, None), (6, None), (528, 100)],
        strength=1,
        keep=lambda *it: it == (16, (40, (11, 1)), (6, None)),
    ),
)
def test_rope_decode_with_any_number_of_splits_matches_reference(
    splits, window_and_heads, programs_and_percent, interpret
):
    """The last split of a sequence contains the new token, and sometimes only the new token.

    On a GPU the op runs twice. The kernel counts finished splits in device memory. The second run
    is correct only if the first run has reset these counters to 0.
    """
    window, heads = window_and_heads
    programs, percent = programs_and_percent
    lens = (*LONG, (33, 1), (64, 1), (65, 1), (1, 1))
    case = Case(F32, 32, 16, heads, lens, sliding_window=window)
    arrays, norms = _with_new_tokens(case, 1, True)
    config = DecodeConfig(32, splits, target_programs=programs, split_percent_of_mean=percent)
    run = partial(
        decode_triton.rope_decode_attention,
        norms=norms,
        dtype=F32,
        **case.options,
        config=config,
        interpret=interpret,
    )
    # NaN in one sequence changes no other sequence. Padding rows may hold anything.
    ruined, _ = jax.jit(run)(arrays[0].at[:, :2].set(jnp.nan), *arrays[1:])
    if interpret:
        got = jax.jit(run)(*arrays)
        _assert_new_tokens(got, arrays, norms, case)
        np.testing.assert_array_equal(ruined[1:], got[0][1:])
        return
    # Both launches use the same array of counters, because XLA merges equal constants. The first
    # launch must therefore reset the counters.
    first, second = jax.jit(lambda: (run(*arrays), run(*arrays)))()
    _assert_new_tokens(first, arrays, norms, case)
    np.testing.assert_array_equal(first[0], second[0])
    np.testing.assert_array_equal(ruined[1:], first[0][1:])


@pytest.mark.parametrize(
    ("rows", "keys"),
    [(128, 32), *(pytest.param(*it, marks=pytest.mark.full) for it in ((16, 16), (32, 64)))],
)
def test_prefill_with_any_tile_size_matches_reference(rows, keys, interpret):
    case = Case(F32, 32, 16, (6, 2), LONG, padding=1)
    config = PrefillConfig(tile_rows=rows, tile_tokens=keys, num_warps=4, num_stages=2)
    function = prefill_triton.paged_prefill_attention
    _check("prefill", case, function, config=config, interpret=interpret)


@pytest.mark.parametrize(
    ("block_size", "room"),
    covering([16, 24], [0, 9, 13, 64], strength=0, keep=lambda *it: it == (24, 13)),
)
def test_prefill_over_blocks_converted_from_float8_matches_reference(block_size, room, interpret):
    """At most `room` FP8 blocks are converted to bfloat16, sequence by sequence.

    Attention reads the converted blocks of a sequence if all blocks of the sequence are converted.
    For the other sequences, attention reads the FP8 blocks.
    """
    lens = ((0, 0), (33, 1), (65, 65), (129, 40), (16, 16), (100, 3), (0, 0))
    case = Case(BF16, 32, block_size, (6, 2), lens, padding=3, scales=(0.02, 0.3))
    arrays = build(case).prefill_arguments
    config = PrefillConfig(tile_rows=32, tile_tokens=32, num_warps=4, num_stages=2)
    options = {**case.options, "config": config, "interpret": interpret}

    @jax.jit
    def run(q, kv, tables, starts, lens):
        room_of = WideningConfig(max(room, 1), chunk=512, num_programs=3)
        wide = widen_triton.widen_blocks(
            kv, tables, starts, lens, dtype=q.dtype, config=room_of, interpret=interpret
        )
        out = prefill_triton.paged_prefill_attention(q, *wide[:4], **options)
        rest = (q, kv, tables, wide.remaining_start_loc, lens)
        return prefill_triton.paged_prefill_attention(*rest, into=out, **options), wide

    out, wide = run(*arrays)
    plain = partial(reference.paged_prefill_attention, *arrays, **case.options)
    assert_close(out, lambda dtype: plain(dtype=dtype), BF16)
    blocks = [-(-total // block_size) if new else 0 for total, new in lens]
    fitting = int((np.cumsum(blocks) <= max(room, 1)).sum())
    totals = [total for total, _ in lens]
    assert wide.seq_lens.tolist() == totals[:fitting] + [0] * (len(lens) - fitting)
    assert {0: 1, 9: 3, 13: 3, 64: 7}[room] <= fitting


LONGER = (*LONG, (515, 515), (1000, 133))
HOPPER_CASES = [
    Case(BF16, 128, 16, (8, 2), edge_lens(16) + LONGER, padding=5),
    Case(F16, 128, 8, (2, 2), edge_lens(8) + LONGER, padding=0),
    Case(BF16, 128, 128, (16, 2), edge_lens(128) + LONGER, padding=37),
    Case(BF16, 128, 256, (8, 2), edge_lens(256) + LONGER, padding=11),
    Case(BF16, 128, 32, (6, 2), edge_lens(32) + LONGER, padding=300),
    Case(F16, 128, 64, (20, 2), edge_lens(64) + LONGER, padding=1),
    *(
        Case(dtype, 128, 16, (2 * group, 2), edge_lens(16) + LONGER, padding=group)
        for group, dtype in ((2, BF16), (5, F16), (6, BF16), (7, BF16), (12, F16), (16, BF16))
    ),
    Case(BF16, 128, 16, (48, 1), edge_lens(16) + LONGER, padding=9),
    Case(BF16, 128, 16, (5, 1), (*LONGER, (1400, 1400)), padding=3),  # one head per tile
]
FP8_HOPPER_CASES = [
    Case(BF16, 128, 16, (8, 2), edge_lens(16) + LONGER, padding=5, scales=(0.02, 0.3)),
    Case(F16, 128, 64, (20, 2), edge_lens(64) + LONGER, padding=1, scales=(2.0, 0.1)),
    Case(BF16, 128, 256, (6, 2), edge_lens(256) + LONGER, padding=11, scales=(0.5, 4.0)),
]


@pytest.mark.parametrize("group", [*range(1, 18), 20, 24, 32, 48, 71, 128])
def test_prefill_tiles_have_few_unused_rows(group):
    """A tile holds rows of one or more query heads of a KV head, which has `group` query heads.

    Some rows are unused if the number of query heads per tile does not divide `group`. In a step of
    8,192 tokens, the unused rows are at most 7% of the used rows. In a smaller step, the unused
    rows may be up to 90% of the used rows, because more query heads per tile save tiles.
    """
    for num_tokens in (64, 512, 2048, 8192):
        members = prefill_hopper.choose_heads_per_tile(group, num_tokens)
        # The number of query heads per tile must divide the 128 rows of a tile.
        assert members in (1, 2, 4, 8, 16)
        idle = -(-group // members) * members / group - 1
        assert idle <= (0.07 if num_tokens == 8192 else 0.9)
        if group in (1, 2, 4, 8, 16):
            assert members == group
    assert [prefill_hopper.choose_heads_per_tile(6, n) for n in (64, 512, 8192)] == [8, 8, 2]
    assert [prefill_hopper.choose_heads_per_tile(7, n) for n in (64, 2048, 8192)] == [8, 8, 1]


@pytest.mark.gpu
@pytest.mark.parametrize("on_hopper", [True, False])
@pytest.mark.parametrize("case", HOPPER_CASES + FP8_HOPPER_CASES, ids=str)
def test_triton_and_hopper_prefill_match_reference(case, on_hopper, monkeypatch):
    monkeypatch.setattr(attention_tuning, "WIDENED_KV_BYTES", 2**20)
    if not on_hopper:
        monkeypatch.setattr(tuning, "HOPPER_GPUS", ())
    _check("prefill", case, backend=Backend.TRITON)


@pytest.mark.parametrize(
    ("dtype_and_heads", "last", "backend"),
    on_backends(
        [(BF16, (6, 1)), (F16, (2, 2))],
        [30.0, 0.1],
        strength=0,
        keep=lambda *it: it == ((BF16, (6, 1)), 30.0, Backend.INTERPRET),
    ),
)
def test_rising_and_falling_scores_match_reference(dtype_and_heads, last, backend):
    """The maximum score of a row rises or falls from key tile to key tile, or is almost constant.

    The keys grow or shrink with their position. Every third query is small, so its scores are too.
    """
    dtype, heads = dtype_and_heads
    case = Case(dtype, 128, 16, heads, ((700, 450), (300, 1), (5, 5), (260, 70)), padding=7)
    batch = build(case)
    factors = np.ones(batch.kv.k.shape[:2])
    for table, (length, _) in zip(np.asarray(batch.block_tables), case.lens, strict=True):
        position = np.arange(length)
        slots = table[position // case.block_size], position % case.block_size
        factors[slots] = np.geomspace(1.0, last, length)
    k = (batch.kv.k.astype(F32) * jnp.asarray(factors, F32)[:, :, None, None]).astype(dtype)
    sizes = jnp.where(jnp.arange(batch.q_prefill.shape[0]) % 3 == 0, 0.05, 1.0).astype(dtype)
    q = batch.q_prefill * sizes[:, None, None]
    arrays = (q, LayerKV(k, batch.kv.v), *batch[1:4])
    got = jax.jit(partial(paged_prefill_attention, **case.options, backend=backend))(*arrays)
    plain = partial(reference.paged_prefill_attention, *arrays, **case.options)
    assert_close(got, lambda dtype: plain(dtype=dtype), dtype)


def test_attention_output_of_a_batch_of_only_padding_is_zero(backend):
    case = Case(lens=((0, 0), (0, 0)), padding=9)
    batch = build(case)
    options = {**case.options, "backend": backend}
    decode = jax.jit(partial(paged_decode_attention, **options))(*batch.decode_arguments)
    prefill = jax.jit(partial(paged_prefill_attention, **options))(*batch.prefill_arguments)
    assert not np.asarray(decode).any()
    assert not np.asarray(prefill).any()


def test_xla_memory_does_not_grow_with_the_block_table():
    """A wider block table adds only the bytes of the table, because XLA gathers the same blocks."""
    case = Case(lens=((40, 1), (20, 1)))
    batch = build(case)
    run = jax.jit(partial(paged_decode_attention, **case.options, backend=Backend.XLA))

    def temporary_bytes(width):
        tables = jax.ShapeDtypeStruct((2, width), jnp.int32)
        compiled: Any = run.lower(batch.q_decode, batch.kv, tables, batch.seq_lens).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary_bytes(4096) - temporary_bytes(8) < 2 * 2 * 4096 * 4
