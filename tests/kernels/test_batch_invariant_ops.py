"""Test that each result row of a batch-invariant op has the same bits for any other rows in the
batch."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import A100, BF16, F32, H200, TRITON_ON_GPU, lower

from pallas_kernels import (
    Backend,
    LayerKV,
    batch_invariant_gated_gemm,
    batch_invariant_gemm,
    batch_invariant_transposed_gemm,
    expert_down_gemm,
    expert_gated_gemm,
    map_row_tiles,
    paged_prefill_attention,
    rms_norm,
    route,
)
from pallas_kernels.gemm import tuning
from pallas_kernels.gemm.tuning import GemmProblem
from pallas_kernels.tuning import MAX_SHARED_BYTES
from tests.reference import kernels as reference

NUM_ROWS = (1, 8, 24, 64, 96, 200, 256, 384)
MOST_ROWS = 640
SIZES = [(1024, 256), (256, 4096), (320, 192)]
HEADS = [(4, 2), (7, 1), (32, 2)]


def _bits(x) -> np.ndarray:
    return np.asarray(x.astype(F32)).view(np.uint32)


def _check_rows(op, x):
    """Return `op(x)`. Check that `op` returns the same bits for a row if `x` has fewer rows."""
    whole = op(x)
    for count in NUM_ROWS:
        for first in (0, MOST_ROWS - count):
            found = op(x[first : first + count])
            np.testing.assert_array_equal(_bits(found), _bits(whole[first : first + count]))
    return whole


@pytest.mark.parametrize(
    ("backend", "depth", "width"),
    [
        (Backend.XLA, 320, 192),
        *[pytest.param(Backend.TRITON, *each, marks=pytest.mark.gpu) for each in SIZES],
    ],
)
@pytest.mark.parametrize("kind", ["plain", "transposed", "gated"])
def test_bits_of_a_gemm_row_do_not_depend_on_other_rows(backend, depth, width, kind):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((MOST_ROWS, depth)), BF16)
    weight = jnp.asarray(rng.standard_normal((depth, width)) * depth**-0.5, BF16)
    if kind == "gated":
        factors = jnp.stack([weight, weight[::-1]], axis=1)
        whole = _check_rows(
            jax.jit(partial(batch_invariant_gated_gemm, weight=factors, backend=backend)), x
        )
        exact = reference.gated_gemm(x, factors)
    elif kind == "transposed":
        table = weight.T
        whole = _check_rows(
            jax.jit(partial(batch_invariant_transposed_gemm, weight=table, backend=backend)), x
        )
        exact = np.asarray(x, np.float64) @ np.asarray(weight, np.float64)
    else:
        whole = _check_rows(
            jax.jit(partial(batch_invariant_gemm, weight=weight, backend=backend)), x
        )
        exact = np.asarray(x, np.float64) @ np.asarray(weight, np.float64)
    np.testing.assert_allclose(np.asarray(whole, np.float64), exact, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    "backend", [pytest.param(Backend.XLA, marks=pytest.mark.full), TRITON_ON_GPU]
)
def test_bits_of_expert_outputs_do_not_depend_on_other_tokens(backend):
    """The test uses several numbers of tokens, so that the tiles have 8 to 128 rows."""
    rng, num_experts, width, inner = np.random.default_rng(3), 6, 256, 192
    x = jnp.asarray(rng.standard_normal((MOST_ROWS, width)), BF16)
    logits = jnp.asarray(rng.standard_normal((MOST_ROWS, num_experts)), F32)
    shapes = (num_experts, width, 2 * inner), (num_experts, inner, width)
    gate_up, down = (
        jnp.asarray(rng.standard_normal(shape) * shape[1] ** -0.5, BF16) for shape in shapes
    )

    @jax.jit
    def run(x, logits):
        options: dict[str, Any] = {"backend": backend, "batch_invariant": True}
        routing = route(logits, 3, normalize=True, **options)
        rows = expert_gated_gemm(x, gate_up, routing, **options)
        return routing.weights, expert_down_gemm(rows, down, routing, **options)

    whole = run(x, logits)
    for count in NUM_ROWS:
        for first in (0, MOST_ROWS - count):
            part = slice(first, first + count)
            for found, each in zip(run(x[part], logits[part]), whole, strict=True):
                np.testing.assert_array_equal(_bits(found), _bits(each[part]))


@pytest.mark.parametrize(
    ("backend", "num_heads", "num_kv_heads"),
    [
        (Backend.XLA, 4, 2),
        *[pytest.param(Backend.TRITON, *each, marks=pytest.mark.gpu) for each in HEADS],
    ],
)
def test_bits_of_attention_do_not_depend_on_other_rows(backend, num_heads, num_kv_heads):
    """Compute whole prompts in one batch, then the same tokens in other batches, and compare bits.

    The other batches have chunks of at most 48 tokens, or 40 chunks of 1, 3 or 8 tokens.
    """
    rng, block_size, head_size = np.random.default_rng(1), 16, 128
    seq_lens = np.array([1, 5, 127, 129, 300])
    num_blocks = -(-seq_lens // block_size)
    order = rng.permutation(num_blocks.sum()) + 1
    tables = np.zeros((len(seq_lens), num_blocks.max()), np.int32)
    for table, ids in zip(tables, np.split(order, np.cumsum(num_blocks)[:-1]), strict=True):
        table[: len(ids)] = ids
    pool = (len(order) + 1, block_size, num_kv_heads, head_size)
    kv = LayerKV(*(jnp.asarray(rng.standard_normal(pool), BF16) for _ in range(2)))
    starts = np.concatenate([[0], np.cumsum(seq_lens)])
    q = jnp.asarray(2 * rng.standard_normal((starts[-1], num_heads, head_size)), BF16)

    @jax.jit
    def attend(q, tables, starts, seq_lens):
        options = {"scale": head_size**-0.5, "backend": backend, "batch_invariant": True}
        return paged_prefill_attention(q, kv, tables, starts, seq_lens, **options)

    def compute(chunks):
        """Compute the chunks (sequence, start, stop) as one batch.

        Returns:
            The results of the chunks' tokens, and the indices of these tokens in `q`.
        """
        rows = np.concatenate([np.arange(starts[s] + a, starts[s] + b) for s, a, b in chunks])
        own_starts = np.concatenate([[0], np.cumsum([b - a for _, a, b in chunks])])
        ends = np.array([b for _, _, b in chunks], np.int32)
        own_tables = tables[[s for s, _, _ in chunks]]
        return attend(q[rows], own_tables, own_starts.astype(np.int32), ends), rows

    whole, _ = compute([(s, 0, n) for s, n in enumerate(seq_lens)])
    chunked = [(s, a, min(a + 48, n)) for s, n in enumerate(seq_lens) for a in range(0, n, 48)]
    batches = [chunked[:3], chunked[3:]]
    for count in (1, 3, 8):
        long = rng.choice(np.flatnonzero(seq_lens >= count), 40)
        ends = [int(rng.integers(count, seq_lens[s] + 1)) for s in long]
        batches += [[(s, end - count, end) for s, end in zip(long, ends, strict=True)]]
    for chunks in batches:
        found, rows = compute(chunks)
        np.testing.assert_array_equal(_bits(found), _bits(whole[rows]))


@pytest.mark.parametrize("num_rows", NUM_ROWS)
def test_map_row_tiles_returns_every_row_once(num_rows):
    x = jnp.arange(num_rows * 3, dtype=F32).reshape(num_rows, 3)
    doubled, total = map_row_tiles(lambda a, b: (2 * a, b.sum(axis=1)), x, x)
    np.testing.assert_array_equal(doubled, 2 * x)
    np.testing.assert_array_equal(total, x.sum(axis=1))


@pytest.mark.parametrize("num_rows", [1, 8, 9, 24])
def test_sum_with_the_result_of_map_row_tiles_has_equal_bits_for_few_and_many_rows(num_rows):
    """XLA must not fuse the addition with `map_row_tiles`, which loops over tiles of rows. With
    only one tile, XLA could remove the loop."""
    rng = np.random.default_rng(2)
    x, hidden, weight = (
        jnp.asarray(rng.standard_normal(s), F32) for s in ((40, 48), (40, 48), (48,))
    )

    @jax.jit
    def add(hidden, x):
        return hidden + map_row_tiles(partial(rms_norm, weight=weight, eps=1e-6), x)

    # tests/conftest.py sets this option for speed, and XLA then fuses fewer operations. Users do
    # not set it, so reset it here.
    jax.config.update("jax_disable_most_optimizations", False)
    few, whole = add(hidden[:num_rows], x[:num_rows]), add(hidden, x)
    np.testing.assert_array_equal(_bits(few), _bits(whole[:num_rows]))


@pytest.mark.parametrize(("depth", "width"), [(1024, 4096), (2048, 1024), (14336, 4096), (64, 64)])
@pytest.mark.parametrize("num_factors", [1, 2])
def test_batch_invariant_gemm_has_launch_parameters_for_every_number_of_rows(
    depth, width, num_factors
):
    for rows in (8, 16, 48, 64, 128, 192, 256, 384, 8192):
        gemm = GemmProblem(rows, depth, width, 2, num_factors, 132, "NVIDIA H200")
        few = tuning.invariant_few_rows_config(gemm)
        assert few is not None
        assert rows % few.tile_rows == width % (64 * few.num_consumers) == 0
        stage = few.num_consumers * num_factors * 64 * 128 + few.tile_rows * 128
        assert few.num_stages * stage <= MAX_SHARED_BYTES


@pytest.mark.parametrize(("rows", "kernel"), [(8, "product_hopper"), (2048, "gemm_hopper")])
def test_batch_invariant_gemm_uses_another_hopper_kernel_for_many_rows(rows, kernel):
    x, weight = (jax.ShapeDtypeStruct(s, BF16) for s in ((rows, 128), (128, 256)))
    text = lower(partial(batch_invariant_gemm, backend=Backend.TRITON), x, weight)
    assert kernel in text


def test_gpu_without_a_batch_invariant_kernel_raises_an_error():
    x, weight = (jax.ShapeDtypeStruct(s, BF16) for s in ((8, 128), (128, 96)))
    message = "no batch-invariant kernel multiplies bfloat16 by a weight of 128 x 96 on NVIDIA H200"
    with pytest.raises(ValueError, match=message):
        lower(partial(batch_invariant_gemm, backend=Backend.TRITON), x, weight, device=H200)
    square = jax.ShapeDtypeStruct((128, 128), BF16)
    with pytest.raises(ValueError, match="on NVIDIA A100: use a Hopper GPU"):
        lower(partial(batch_invariant_gemm, backend=Backend.TRITON), x, square, device=A100)


@pytest.mark.parametrize(
    ("device", "inner", "message"),
    [
        (H200, 96, "multiplies bfloat16 rows by expert weights of 128 x 96 on NVIDIA H200"),
        (A100, 64, "on NVIDIA A100: use a Hopper GPU"),
    ],
)
def test_gpu_without_a_batch_invariant_expert_kernel_raises_an_error(device, inner, message):
    def run(x, logits, weight):
        options: dict[str, Any] = {"backend": Backend.TRITON, "batch_invariant": True}
        return expert_gated_gemm(x, weight, route(logits, 2, **options), **options)

    x, weight = (jax.ShapeDtypeStruct(s, BF16) for s in ((8, 128), (4, 128, 2 * inner)))
    with pytest.raises(ValueError, match=message):
        lower(run, x, jax.ShapeDtypeStruct((8, 4), F32), weight, device=device)
