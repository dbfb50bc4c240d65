"""Test the fused layer: results, division of work over programs, and supported sizes."""

import re
from contextlib import nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import BF16, F16, F32, XLA_AND_TRITON, lower, on_device

from pallas_kernels import Backend, FusedLayerWeights, fused_layer, new_exchange_memory
from pallas_kernels import layer as layer_op
from pallas_kernels.layer import hopper
from pallas_kernels.layer.hopper import LayerSizes
from pallas_kernels.tuning import MAX_SHARED_BYTES
from tests.reference import kernels as reference

HAS_MUTABLE_ARGUMENTS = jax.__version_info__ >= (0, 11)
ROWS, EPS = 8, 1e-6
SMALL = LayerSizes(hidden=256, attention_output=128, inner=384, qkv=640)
ODD = LayerSizes(hidden=1024, attention_output=512, inner=2816, qkv=1536)
QWEN = LayerSizes(hidden=1024, attention_output=2048, inner=3072, qkv=4096)
WIDE = LayerSizes(hidden=1536, attention_output=1536, inner=8960, qkv=2048)


def layer(sizes, dtype, seed=0):
    """Return random activations and weights with the standard deviations of a real model."""
    rng = np.random.default_rng(seed)

    def normal(*shape, spread=1.0, mean=0.0):
        return jnp.asarray(rng.standard_normal(shape) * spread + mean, dtype)

    hidden, attention_output, inner, qkv = sizes
    weights = FusedLayerWeights(
        normal(attention_output, hidden, spread=attention_output**-0.5),
        normal(hidden, spread=0.1, mean=1),
        normal(hidden, 2, inner, spread=hidden**-0.5),
        normal(inner, hidden, spread=inner**-0.5),
        normal(hidden, spread=0.1, mean=1),
        normal(hidden, qkv, spread=hidden**-0.5),
    )
    return normal(ROWS, attention_output), normal(ROWS, hidden, spread=3), weights


def two_layers(attention_output, hidden, weights, num_rows, backend):
    """Run the fused op for two layers in sequence, and return the results of both layers.

    The programs of a kernel pass partial sums to each other through the array `exchange`. The
    second call gets the array that the first call returns.
    """
    exchange = new_exchange_memory(weights, num_tokens=ROWS, backend=backend)
    exchange = jnp.zeros(1, jnp.int32) if exchange is None else exchange
    run = partial(fused_layer, eps=EPS, backend=backend)
    first, qkv, exchange = run(attention_output, hidden, weights, num_rows, exchange)
    second, last_qkv, _ = run(attention_output, first, weights, num_rows, exchange)
    return [x.astype(F32) for x in (first, qkv.sum(0), second, last_qkv.sum(0))]


def error(got, want):
    return np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want)


@pytest.mark.parametrize("backend", XLA_AND_TRITON)
@pytest.mark.parametrize("num_rows", [1, 3, 8])
@pytest.mark.parametrize(
    "sizes", [pytest.param(SMALL, id="small"), pytest.param(ODD, id="odd", marks=pytest.mark.full)]
)
def test_fused_layer_is_as_accurate_as_separate_ops(sizes, num_rows, backend):
    """Compare bfloat16 results with float64, and check that repeated runs are equal."""
    attention_output, hidden, weights = layer(sizes, BF16)
    run = jax.jit(partial(two_layers, backend=backend))
    results = [run(attention_output, hidden, weights, jnp.int32(num_rows)) for _ in range(3)]
    one_by_one = jax.jit(partial(layer_op.run_unfused, eps=EPS))
    stream = hidden
    for i in (0, 2):
        want = reference.fused_layer(attention_output, stream, weights, eps=EPS)
        plain_stream, plain_qkv = one_by_one(attention_output, stream, weights)
        for j, plain in enumerate((plain_stream, plain_qkv.sum(0))):
            exact = want[j][:num_rows]
            allowed = 1.25 * error(plain.astype(F32)[:num_rows], exact) + 2e-4
            assert error(results[0][i + j][:num_rows], exact) <= allowed <= 0.01
            for other in results[1:]:
                np.testing.assert_array_equal(other[i + j][:num_rows], results[0][i + j][:num_rows])
        stream = jnp.where(jnp.arange(ROWS)[:, None] < num_rows, results[0][0], 0).astype(BF16)


@pytest.mark.parametrize("backend", XLA_AND_TRITON)
def test_fused_layer_rows_are_independent(backend):
    """A row with NaN or infinity changes no other row, and does not make the kernel hang."""
    attention_output, hidden, weights = layer(SMALL, BF16)
    run = jax.jit(partial(two_layers, backend=backend))
    clean = run(attention_output, hidden, weights, jnp.int32(ROWS))
    bad = attention_output.at[2].set(jnp.nan).at[5].set(jnp.inf)
    ruined = run(bad, hidden.at[2].set(-jnp.nan), weights, jnp.int32(ROWS))
    keep = np.asarray([0, 1, 3, 4, 6, 7])
    for got, want in zip(ruined, clean, strict=True):
        np.testing.assert_array_equal(got[keep], want[keep])
        assert np.isnan(np.asarray(got[2])).all()
        assert not np.isfinite(np.asarray(got[5])).all()
    jax.block_until_ready(run(attention_output, hidden, weights, jnp.int32(0)))  # only padding rows


@pytest.mark.parametrize("dtype", [F32, F16])
def test_layers_of_unsupported_dtypes_run_as_separate_ops(dtype):
    attention_output, hidden, weights = layer(SMALL, dtype)
    assert new_exchange_memory(weights, num_tokens=ROWS, backend=Backend.XLA) is None
    got = two_layers(attention_output, hidden, weights, jnp.int32(ROWS), Backend.XLA)
    want = reference.fused_layer(attention_output, hidden, weights, eps=EPS)
    for i in range(2):
        assert error(got[i], want[i]) < (1e-5 if dtype == F32 else 2e-3)


@pytest.mark.parametrize("num_programs", [78, 114, 132])
@pytest.mark.parametrize("sizes", [SMALL, ODD, QWEN, WIDE])
def test_fused_layer_work_is_split_over_all_programs(sizes, num_programs):
    """Exactly one program computes each work unit of a GEMM. The array through which programs
    exchange split-K partials has a place for each partial."""
    plan = hopper.LayerPlan(sizes, num_programs, num_stages=12)
    ends = [*plan.regions.values()][1:]
    assert plan.num_words == ends[-1]
    assert plan.num_words % 4 == 0
    for which, gemm in enumerate(plan.gemms):
        sides = 2 if which == 1 else 1
        regions, partials = set(), {block: set() for block in range(gemm.blocks)}
        most, chunks, segments = gemm.max_units, gemm.chunks, gemm.max_segments
        for unit in range(gemm.blocks * chunks):
            program, block = unit // most, unit // chunks
            segment = block - program * most // chunks
            assert program < num_programs
            assert segment < segments
            partials[block].add(program)
            regions.add((program * segments + segment) * sides)
        for block, programs in partials.items():
            first, last = gemm.first_program(block), gemm.last_program(block)
            assert programs == set(range(first, last + 1))
            assert len(programs) <= gemm.max_partials
        if which < 3:
            size = ends[which] - plan.regions[which]
            assert (max(regions) + sides) * ROWS * 64 <= size


@pytest.mark.parametrize("sizes", [SMALL, ODD, QWEN, WIDE])
@pytest.mark.parametrize("num_cores", [78, 132])
def test_each_sm_runs_only_one_program_of_the_fused_layer(sizes, num_cores):
    """A program takes more than half of the shared memory of an SM, so two programs do not fit."""
    plan = choose(sizes=sizes, num_cores=num_cores)
    assert plan is not None
    assert plan.num_programs == num_cores
    ring, rows = plan.num_stages * 2 * 64 * 64 * 2, plan.activation_columns * ROWS * 2
    barriers_and_alignment, sums = 2048, 3 * ROWS * 64 * 4  # three warpgroups store sums
    size = ring + rows + sums + barriers_and_alignment
    assert MAX_SHARED_BYTES / 2 < size <= MAX_SHARED_BYTES


def choose(**changes):
    facts = {"num_tokens": 8, "dtype": "bfloat16", "num_cores": 132, "device_kind": "NVIDIA H200"}
    facts |= {"sizes": QWEN} | changes
    return hopper.layer_plan(facts.pop("sizes"), **facts)


def test_layer_is_fused_only_for_8_bfloat16_rows_and_small_widths_on_hopper():
    assert choose() == hopper.LayerPlan(QWEN, 132, num_stages=12)
    for change in (
        {"num_tokens": 16},
        {"dtype": "float16"},
        {"num_cores": None},
        {"device_kind": "NVIDIA A100-SXM4-80GB"},
        {"sizes": SMALL._replace(inner=448)},
        {"sizes": LayerSizes(hidden=4096, attention_output=4096, inner=14336, qkv=6144)},
        # With this size, no shared memory is left for the pipeline.
        {"sizes": QWEN._replace(inner=2**18), "num_cores": 16},
    ):
        assert choose(**change) is None


@pytest.mark.parametrize("sizes", [SMALL, QWEN, WIDE], ids=["small", "qwen", "wide"])
def test_each_fused_layer_lowers_to_one_kernel(sizes):
    shapes = jax.eval_shape(lambda: layer_zeros(sizes))
    run = partial(two_layers, backend=Backend.TRITON)
    count = jax.ShapeDtypeStruct((), jnp.int32)
    text = lower(run, *shapes, count)
    calls = re.findall(r"custom_call @\S*mosaic_gpu", text)
    assert len(calls) == (2 if HAS_MUTABLE_ARGUMENTS else 0)
    assert len(re.findall("output_operand_alias<", text)) == len(calls)


def layer_zeros(sizes):
    hidden, attention_output, inner, qkv = sizes
    shapes = (attention_output, hidden), (hidden,), (hidden, 2, inner), (inner, hidden), (hidden,)
    weights = FusedLayerWeights(*(jnp.zeros(shape, BF16) for shape in (*shapes, (hidden, qkv))))
    return jnp.zeros((ROWS, attention_output), BF16), jnp.zeros((ROWS, hidden), BF16), weights


def test_fused_layer_errors_name_the_invalid_argument():
    attention_output, hidden, weights = layer_zeros(SMALL)
    exchange = jnp.zeros(1, jnp.int32)
    valid: Any = [attention_output, hidden, weights, jnp.int32(1), exchange, EPS]
    layer_op.check_fused_layer(*valid)
    for error, name, index, wrong in (
        (ValueError, "attention_output", 0, attention_output[:3]),
        (ValueError, r"weights\.down", 2, weights._replace(down=weights.down[:, :-1])),
        (TypeError, r"weights\.norm", 2, weights._replace(norm=weights.norm.astype(F32))),
        (TypeError, "num_rows", 3, jnp.float32(1)),
        (ValueError, "exchange", 4, exchange[None]),
        (ValueError, "eps", 5, -1.0),
    ):
        given = [*valid]
        given[index] = wrong
        with pytest.raises(error, match=name):
            layer_op.check_fused_layer(*given)


def test_fused_layer_refuses_a_workspace_of_the_wrong_size():
    arrays, foreign = layer_zeros(SMALL), jnp.zeros(5, jnp.int32)
    run = partial(fused_layer, eps=EPS, backend=Backend.TRITON)
    refusal = pytest.raises(ValueError, match="exchange has 5 words")
    with (
        on_device(),
        refusal if HAS_MUTABLE_ARGUMENTS else nullcontext(),
    ):
        jax.eval_shape(run, *arrays, jnp.int32(1), foreign)
