"""Test that ops lower to the expected kernels for an H200, without a GPU.

Only `pytest -m gpu` finds register spills and kernels with too much shared memory.
"""

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice
from kernel_cases import A100, BF16, F8, F16, F32, H200, KERNEL_CALL, lower

from pallas_kernels import (
    Adjustments,
    Backend,
    HeadNorms,
    KVScales,
    LayerKV,
    add_rms_norm,
    block_scaled_expert_down_gemm,
    block_scaled_expert_gated_gemm,
    copy_blocks,
    expert_down_gemm,
    expert_gated_gemm,
    gated_gemm,
    gated_silu,
    greedy_scores,
    pack_fp8_pairs,
    paged_decode_attention,
    paged_prefill_attention,
    rope_decode_attention,
    rope_write_kv,
    route,
    scaled_expert_down_gemm,
    scaled_expert_gated_gemm,
    split_k_gemm,
    token_scores,
    truncation_mask,
    write_kv,
)
from pallas_kernels.experts.triton import MAX_SORTED_PAIRS
from tests.covering import covering

# If the number of SMs is unknown, GEMMs of few rows use XLA.
H200_OF_UNKNOWN_CORES = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
B, M, T, P, S, N, K = 144, 8, 96, 32, 16, 6, 2


def _kernels(function, *arguments, device=H200_OF_UNKNOWN_CORES):
    return re.findall(KERNEL_CALL, lower(function, *arguments, device=device))


def _floats(dtype, *shape) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def _ints(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _pool(dtype, *shape):
    packed = jax.eval_shape(lambda: pack_fp8_pairs(jnp.zeros(shape, F8)))
    return LayerKV(*(packed if dtype == F8 else _floats(dtype, *shape) for _ in range(2)))


def _operations(dtype, head_size, block_size=S, pool_dtype=None):
    """Return a dict that maps a name to an op and the shapes of its arguments."""
    decode_op, prefill_op, rope_decode_op = (
        partial(op, scale=0.1, backend=Backend.TRITON)
        for op in (paged_decode_attention, paged_prefill_attention, rope_decode_attention)
    )
    rope_op = partial(rope_write_kv, backend=Backend.TRITON)
    kv = _pool(pool_dtype or dtype, P, block_size, K, head_size)
    rows = _floats(dtype, T, K, head_size)
    extras = {"soft_cap": 3.0, "sliding_window": 20}
    tables, lens = _ints(B, M), _ints(B)
    decode = _floats(dtype, B, N, head_size), kv, tables, lens
    prefill = _floats(dtype, T, N, head_size), kv, tables, _ints(B + 1), lens
    mixed = prefill[0], kv, _ints(20, M), _ints(21), _ints(20)
    few = jax.ShapeDtypeStruct((2, N, head_size), dtype), kv, _ints(2, 64), _ints(2)
    qkv, angle = _floats(dtype, 1, T, N + 2 * K, head_size), _floats(F32, T, head_size // 2)
    weight, hidden = _floats(dtype, head_size), _floats(dtype, T, 3 * head_size)
    rope = qkv, kv, _ints(T), (angle, angle)
    angles = _floats(F32, B, head_size // 2)
    turn = _floats(F32, 2, head_size // 2)
    step = _floats(F32, 4, 2, N + 2 * K, head_size), kv, _ints(2, 64), _ints(2), (turn, turn)
    return {
        "norms, rope and split decode": (
            lambda w, *a: rope_decode_op(*a, norms=HeadNorms(w, w, 1e-6), dtype=dtype),
            (weight, *step),
        ),
        "rope and decode, cap, window": (
            partial(rope_decode_op, **extras),
            (_floats(dtype, 1, B, N + 2 * K, head_size), kv, tables, lens, (angles, angles)),
        ),
        "split decode": (decode_op, few),
        "decode": (decode_op, decode),
        "decode, cap, window": (partial(decode_op, **extras), decode),
        "prefill": (prefill_op, prefill),
        "prefill, cap, window": (partial(prefill_op, **extras), prefill),
        "mixed": (prefill_op, mixed),
        "write": (partial(write_kv, backend=Backend.TRITON), (kv, rows, rows, _ints(T))),
        "rope and write": (rope_op, rope),
        "write of fused rows": (partial(rope_op, angles=None), rope[:3]),
        "norms, rope and write": (
            lambda w, *a: rope_op(*a, norms=HeadNorms(w, w, 1e-6)),
            (weight, *rope),
        ),
        "add and norm": (
            partial(add_rms_norm, eps=1e-6, backend=Backend.TRITON),
            (hidden, _floats(F32, 4, T, 3 * head_size), _floats(dtype, 3 * head_size)),
        ),
        "gated": (
            partial(gated_silu, backend=Backend.TRITON),
            (_floats(dtype, T, 2, 9000 + head_size),),
        ),
        "copy": (partial(copy_blocks, backend=Backend.TRITON), ((kv, kv), _ints(4), _ints(4))),
    }


@pytest.mark.parametrize(
    ("dtype", "head_size"),
    covering(
        [F32, BF16, F16],
        [4, 24, 64, 128, 256],
        strength=0,
        keep=lambda *it: it in ((F32, 4), (BF16, 128), (F16, 24)),
    ),
)
def test_ops_over_a_float8_pool_lower_to_the_expected_kernels(dtype, head_size):
    operations = _operations(dtype, head_size, pool_dtype=F8)
    for name in ("add and norm", "gated"):
        del operations[name]
    for name, (function, arguments) in operations.items():
        expected = ["triton"] * (1 + (name == "mixed"))
        if head_size == 128 and dtype != F32 and name in ("prefill", "mixed"):
            expected = ["mosaic_gpu", "triton", *expected[1:]]
        assert sorted(_kernels(function, *arguments)) == expected, name


def test_fp8_prefill_with_too_many_blocks_to_convert_includes_the_triton_kernel():
    """The Hopper kernel reads FP8 blocks of the KV cache from a buffer of converted blocks. Block
    tables of 1,024 columns may list more blocks than the buffer holds."""
    kv = _pool(F8, P, S, 8, 128)
    run = partial(paged_prefill_attention, scale=0.1, backend=Backend.TRITON)
    for width, num_triton in ((29, 1), (1024, 2)):
        arguments = _floats(BF16, T, 32, 128), kv, _ints(8, width), _ints(9), _ints(8)
        assert sorted(_kernels(run, *arguments)) == ["mosaic_gpu"] + num_triton * ["triton"]


def test_fp8_scales_are_kernel_inputs_so_that_layers_share_a_compiled_kernel():
    kv = _pool(F8, P, S, K, 64)
    scales, q = KVScales(_floats(F32, 1), _floats(F32, 1)), _floats(BF16, B, N, 64)

    def run(q, kv, tables, lens, scales):
        options = {"scale": 0.1, "backend": Backend.TRITON, "scales": scales}
        return paged_decode_attention(q, kv, tables, lens, **options)

    text = lower(run, q, kv, _ints(B, M), _ints(B), scales, device=H200_OF_UNKNOWN_CORES)
    (call,) = [line for line in text.splitlines() if re.search(KERNEL_CALL, line)]
    assert call.count("tensor<1xf32>") == 2


# The list has head sizes below the 16 columns of a tensor-core tile, sizes that are no powers of
# two, and the largest size.
HEAD_SIZES = (2, 8, 12, 16, 24, 32, 40, 64, 80, 96, 128, 200, 256)
DTYPES = {"f32": F32, "bf16": BF16, "f16": F16}
LOWERED = {
    f"{name}-{size}": (dtype, size)
    for i, size in enumerate(HEAD_SIZES)
    for j, (name, dtype) in enumerate(DTYPES.items())
    if size in (8, 128) or (i + j) % 3 == 0
}
DEFAULT = ("f32-2", "f16-64", "bf16-128", "bf16-200")
assert {*DEFAULT} <= {*LOWERED}


@pytest.mark.parametrize(
    ("dtype", "head_size"),
    [
        pytest.param(*each, marks=[] if name in DEFAULT else pytest.mark.full)
        for name, each in LOWERED.items()
    ],
    ids=LOWERED,
)
def test_each_op_lowers_to_one_kernel(dtype, head_size):
    """Only prefill of a batch with many decode rows lowers to two kernels."""
    prefill = "mosaic_gpu" if head_size == 128 and dtype != F32 else "triton"
    expected = {"prefill": [prefill], "mixed": [prefill, "triton"]}
    for name, (function, arguments) in _operations(dtype, head_size).items():
        assert sorted(_kernels(function, *arguments)) == expected.get(name, ["triton"]), name


@pytest.mark.parametrize(
    "block_size",
    [7, 8, 256, *(pytest.param(n, marks=pytest.mark.full) for n in (1, 2, 4, 32, 64, 128))],
)
def test_ops_lower_for_every_block_size(block_size):
    """Blocks of fewer than 8 slots use the Triton prefill kernel; the others use the Hopper
    kernel."""
    operations = _operations(BF16, 128, block_size)
    names = "norms, rope and split decode", "decode", "prefill", "prefill, cap, window"
    for name in (*names, "norms, rope and write", "write", "copy"):
        function, arguments = operations[name]
        expected = "mosaic_gpu" if name == "prefill" and block_size >= 8 else "triton"
        assert _kernels(function, *arguments) == [expected], name


@pytest.mark.parametrize(
    ("heads", "block_size"),
    covering(
        [(1, 1), (6, 2), (12, 2), (32, 8), (16, 1), (40, 2), (32, 1)],
        [16, 8, 256],
        strength=0,
        keep=lambda *it: it in (((6, 2), 16), ((40, 2), 16)),
    ),
)
def test_hopper_prefill_lowers_for_head_groups_and_block_sizes(heads, block_size):
    kv = LayerKV(*(_floats(BF16, P, block_size, heads[1], 128) for _ in range(2)))
    arguments = _floats(BF16, T, heads[0], 128), kv, _ints(B, M), _ints(B + 1), _ints(B)
    run = partial(paged_prefill_attention, scale=0.1, backend=Backend.TRITON)
    assert _kernels(run, *arguments) == ["mosaic_gpu"]


@pytest.mark.parametrize(
    ("rows", "width"), [(8, 3072), (24, 3072), (64, 3072), (96, 3072), (192, 3072), (256, 6144)]
)
@pytest.mark.parametrize("function", [split_k_gemm, gated_gemm])
def test_hopper_kernel_computes_gemms_with_few_rows(function, rows, width):
    weight = (640, width) if function is split_k_gemm else (640, 2, width)
    run = partial(function, backend=Backend.TRITON)
    arguments = _floats(BF16, rows, 640), _floats(BF16, *weight)
    assert _kernels(run, *arguments) == []
    assert _kernels(run, *arguments, device=H200) == ["mosaic_gpu"]


@pytest.mark.parametrize(
    ("rows", "width", "kernel"),
    [
        (128, 14336, "gated_product_hopper"),
        *((*sizes, "gated_gemm_hopper") for sizes in ((256, 14336), (2048, 3072), (8192, 14336))),
    ],
)
def test_hopper_kernel_computes_gated_gemms_with_many_rows(rows, width, kernel):
    arguments = _floats(BF16, rows, 1024), _floats(BF16, 1024, 2, width)
    run = partial(gated_gemm, backend=Backend.TRITON)
    text = lower(run, *arguments)
    assert re.findall(KERNEL_CALL, text) == ["mosaic_gpu"]
    assert kernel in text
    assert "dot_general" not in text


@pytest.mark.parametrize(
    ("num_tokens", "case"),
    covering(
        [1, 300, 4096],
        [
            (BF16, H200, "mosaic_gpu"),
            (F16, H200, "mosaic_gpu"),
            (BF16, A100, "triton"),
            (F32, H200, "triton"),
        ],
        strength=0,
        keep=lambda tokens, case: (tokens, case[0]) in ((1, BF16), (4096, F16)),
    ),
)
def test_experts_lower_to_two_gemms_and_small_kernels(num_tokens, case):
    (dtype, device, gemm), num_experts, width, inner = case, 16, 256, 128
    arguments = (
        _floats(dtype, num_tokens, width),
        _floats(F32, num_tokens, num_experts),
        _floats(dtype, num_experts, width, 2 * inner),
        _floats(dtype, num_experts, inner, width),
    )

    def run(x, logits, gate_up, down):
        options: dict[str, Any] = {"backend": Backend.TRITON}
        options["batch_invariant"] = gemm == "mosaic_gpu"
        routing = route(logits, 4, **options)
        rows = expert_gated_gemm(x, gate_up, routing, **options)
        return expert_down_gemm(rows, down, routing, **options)

    text = lower(run, *arguments, device=device)
    # Three small kernels choose experts, list tiles and sum rows. If the GEMMs are Triton kernels,
    # a fourth small kernel gathers the rows of the first GEMM. One more small kernel sorts the
    # pairs (token, chosen expert). If there are more than `MAX_SORTED_PAIRS` pairs, XLA sorts the
    # pairs instead.
    few_pairs = num_tokens * 4 <= MAX_SORTED_PAIRS
    num_small = (3 if gemm == "mosaic_gpu" else 4) + few_pairs
    assert (re.search(r"stablehlo\.(sort|scatter|add|select|compare)", text) is None) == few_pairs
    assert sorted(re.findall(KERNEL_CALL, text)) == sorted([gemm] * 2 + ["triton"] * num_small)
    assert "stablehlo.dot_general" not in text


@pytest.mark.parametrize(
    ("num_tokens", "grouped", "case"),
    covering(
        [1, 4096],
        [False, True],
        [(H200, 256, 128, "mosaic_gpu"), (H200, 192, 96, "triton"), (A100, 256, 128, None)],
        strength=0,
        keep=lambda tokens, grouped, case: grouped and case[3] is not None and tokens == 1,
    ),
)
def test_fp8_experts_lower_to_two_gemms_and_small_kernels(num_tokens, grouped, case):
    (device, width, inner, kernel), num_experts = case, 16
    gemms: Any = scaled_expert_gated_gemm, scaled_expert_down_gemm
    if grouped:
        gemms = block_scaled_expert_gated_gemm, block_scaled_expert_down_gemm
    row_scales = ((2,), (1,)) if grouped else ((), ())
    scales = ((2, 2), (2, 1)) if grouped else ((2 * inner,), (width,))
    arguments = (
        _floats(F32, num_tokens, num_experts),
        [_floats(F8, num_tokens, width), _floats(F8, num_tokens * 4, inner)],
        [_floats(F8, num_experts, 2 * inner, width), _floats(F8, num_experts, width, inner)],
        [
            _floats(F32, num_tokens * count, *groups)
            for count, groups in zip((1, 4), row_scales, strict=True)
        ],
        [_floats(F32, num_experts, *shape) for shape in scales],
    )

    def run(logits, x, weights, row_scales, scales):
        options: dict[str, Any] = {"backend": Backend.TRITON, "dtype": BF16}
        routing = route(logits, 4, backend=Backend.TRITON)
        arguments = zip(x, weights, row_scales, scales, strict=True)
        return [
            gemm(*matrices, routing, **options)
            for gemm, matrices in zip(gemms, arguments, strict=True)
        ]

    text = lower(run, *arguments, device=device)
    # The small kernels choose experts, pack tiles and sum rows. One more small kernel sorts the
    # pairs (token, chosen expert). If there are more than `MAX_SORTED_PAIRS` pairs, XLA sorts the
    # pairs instead.
    few_pairs = num_tokens * 4 <= MAX_SORTED_PAIRS
    kernels = ["triton"] * (1 + few_pairs) + (
        [kernel, kernel, "triton", "triton"] if kernel else []
    )
    assert sorted(re.findall(KERNEL_CALL, text)) == sorted(kernels)
    assert ("stablehlo.dot_general" in text) == (kernel is None)


@pytest.mark.parametrize("width", [24, pytest.param(50257, marks=pytest.mark.full), 151936])
def test_min_p_top_k_and_top_p_lower_to_five_kernels(width):
    row = jax.ShapeDtypeStruct((B,), F32)

    def run(logits, temperature, min_p, top_p, top_k):
        rows = {"temperature": temperature, "min_p": min_p, "top_p": top_p, "top_k": top_k}
        return truncation_mask(logits, **rows, backend=Backend.TRITON)

    arguments = jax.ShapeDtypeStruct((B, width), F32), row, row, row, _ints(B)
    assert _kernels(run, *arguments) == ["triton"] * 5


@pytest.mark.parametrize("width", [24, pytest.param(50257, marks=pytest.mark.full), 151936])
def test_logprobs_of_given_or_greedy_tokens_lower_to_two_kernels(width):
    logits, wanted = _floats(F32, B, width), jax.ShapeDtypeStruct((B,), jnp.bool_)
    options = {"count": 20, "backend": Backend.TRITON}
    biases, penalties = _floats(F32, 9, width), _floats(F32, B, 3)
    state: Any = (_ints(9, width), biases, _ints(B), _ints(B), penalties)
    adjustments = Adjustments(*state)
    for op, second, reports_logits in (
        (token_scores, _ints(B), None),
        (token_scores, _ints(B), wanted),
        (greedy_scores, adjustments, None),
        (greedy_scores, None, wanted),
    ):

        def run(logits, second, wanted, reports_logits, op=op):
            return op(logits, second, wanted, reports_logits=reports_logits, **options)

        text = lower(run, logits, second, wanted, reports_logits)
        assert re.findall(KERNEL_CALL, text) == ["triton"] * 2
        assert "stablehlo.sort" not in text
