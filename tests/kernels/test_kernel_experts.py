"""Compare expert routing and expert GEMMs with slow reference implementations."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import BF16, F32, IMPLEMENTATIONS, TRITON_ON_GPU, on_backends

from pallas_kernels import Backend, Routing, expert_down_gemm, expert_gated_gemm, route
from pallas_kernels.experts import triton, tuning, xla
from pallas_kernels.tuning import MAX_SHARED_BYTES
from tests.reference import kernels as reference

NUM_EXPERTS, NUM_CHOICES = 6, 3
# Maps a dtype to (hidden size, width of an expert). Only the sizes for bfloat16 are multiples of
# the tiles of the Hopper kernels.
SIZES = {BF16: (128, 64), F32: (80, 48)}


def make_logits(kind: str, num_tokens: int) -> np.ndarray:
    logits = np.random.RandomState(1).randn(num_tokens, NUM_EXPERTS).astype(np.float32)
    if kind == "one expert is chosen by all tokens":
        logits[:, 4] = 9
    elif kind == "an expert is never chosen":
        logits[:, 2] = -9
    elif kind == "ties":
        logits = np.round(logits)
    return logits


def make_weights(dtype: Any) -> tuple[jax.Array, jax.Array]:
    random, (width, inner) = np.random.RandomState(2), SIZES[dtype]
    gate_up = random.randn(NUM_EXPERTS, width, 2 * inner) * width**-0.5
    down = random.randn(NUM_EXPERTS, inner, width) * inner**-0.5
    return jnp.asarray(gate_up, dtype), jnp.asarray(down, dtype)


def make_rows(num_tokens: int, dtype: Any) -> jax.Array:
    return jnp.asarray(np.random.RandomState(3).randn(num_tokens, SIZES[dtype][0]), dtype)


@partial(jax.jit, static_argnames="backend")
def run_experts(x, gate_up, down, routing, backend):
    inner = expert_gated_gemm(x, gate_up, routing, backend=backend)
    # The rows of padding tokens, and of experts on another device, are undefined. Set these rows to
    # NaN. The sums must not change.
    is_routed = jnp.arange(len(inner)) < routing.offsets[-1]
    inner = jnp.where(is_routed[:, None], inner, jnp.nan)
    return expert_down_gemm(inner, down, routing, backend=backend)


def check_routing(got: Routing, want: tuple[np.ndarray, ...]) -> None:
    np.testing.assert_allclose(got.weights, want[0], rtol=1e-5)
    for name, array, wanted in zip(Routing._fields[1:], got[1:], want[1:], strict=True):
        np.testing.assert_array_equal(array, wanted, err_msg=name)


CASES = [
    ("random", 1, None),
    ("random", 37, 33),
    ("one expert is chosen by all tokens", 37, None),
    ("an expert is never chosen", 37, 20),
    ("ties", 37, None),
    ("random", 9, 0),
    ("random", 300, 290),
]


def is_default(case, dtype, backend):
    """Return whether a test is in the default tier.

    The default tier tests each case with XLA, and two of the cases in interpret mode too.
    """
    index = CASES.index(case)
    return (dtype == BF16) == (index == 1) and (backend is Backend.XLA or index in (1, 2))


@pytest.mark.parametrize(
    ("case", "dtype", "backend"), on_backends(CASES, [F32, BF16], strength=0, keep=is_default)
)
def test_expert_routing_and_gemms_equal_the_reference(case, dtype, backend):
    kind, num_tokens, num_real = case
    logits, x = make_logits(kind, num_tokens), make_rows(num_tokens, dtype)
    gate_up, down = make_weights(dtype)
    options = {"normalize": True, "scale": 1.5}
    count = None if num_real is None else jnp.int32(num_real)
    routing = route(jnp.asarray(logits), NUM_CHOICES, num_tokens=count, backend=backend, **options)
    want = reference.route(logits, NUM_CHOICES, num_tokens=num_real, **options)
    check_routing(routing, want)
    got = np.asarray(run_experts(x, gate_up, down, routing, backend), np.float64)
    error = np.abs(got - reference.experts(x, gate_up, down, *want[:2])).max()
    assert error < (2e-5 if dtype == F32 else 0.06)


@pytest.mark.parametrize("backend", IMPLEMENTATIONS)
@pytest.mark.parametrize("softmax_first", [True, False])
@pytest.mark.parametrize("normalize", [True, False])
def test_routing_weights_follow_the_options(softmax_first, normalize, backend):
    logits = make_logits("random", 9)
    options = {"softmax_first": softmax_first, "normalize": normalize}
    got = route(jnp.asarray(logits), NUM_CHOICES, backend=backend, **options)
    check_routing(got, reference.route(logits, NUM_CHOICES, **options))


@pytest.mark.parametrize("interpret", [True, pytest.param(False, marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("shape", "num_experts", "chosen"),
    [
        # The kernel computes 17 integers: the sorted position of 1 pair (token, choice), and the
        # offsets of 16 experts. The first program computes 16 integers, the second only one.
        ((1, 1), 15, (0, 16)),
        ((1, 8), 128, (0, 128)),
        ((43, 3), 6, (0, 7)),
        pytest.param((43, 3), 6, (4, 5), marks=pytest.mark.full),  # All tokens choose expert 4.
        pytest.param((43, 3), 6, (6, 7), marks=pytest.mark.full),  # No token chooses an expert.
        # The kernel computes 64 integers: the sorted positions of 32 pairs (token, choice), and the
        # offsets of 32 experts. Each of four programs computes 16 integers.
        pytest.param((32, 1), 31, (30, 32), marks=pytest.mark.full),
        ((131, 8), 5, (0, 6)),  # Each program reads the 131 * 8 expert indices in three steps.
    ],
)
def test_expert_choices_of_all_tokens_are_sorted_by_expert_and_then_by_token(
    shape, num_experts, chosen, interpret
):
    """Each token chooses several random expert indices, from `chosen[0]` to `chosen[1]` - 1. The
    index `num_experts` stands for no expert."""
    experts = jnp.asarray(np.random.RandomState(4).randint(chosen[0], chosen[1], shape), jnp.int32)
    got = triton.sort_pairs(experts, num_experts=num_experts, interpret=interpret)
    for array, want in zip(got, xla.sort_by_expert(experts, num_experts)[1:], strict=True):
        np.testing.assert_array_equal(array, want)


@pytest.mark.parametrize("backend", [Backend.INTERPRET, TRITON_ON_GPU])
def test_expert_routing_is_the_same_with_the_sort_kernel_and_with_xlas_sort(backend, monkeypatch):
    logits = jnp.asarray(make_logits("ties", 11))
    bounds: dict[str, Any] = {"first_expert": 1, "num_local_experts": 3, "num_tokens": 9}
    want = reference.route(logits, NUM_CHOICES, **bounds)
    options = bounds | {name: jnp.int32(bounds[name]) for name in ("first_expert", "num_tokens")}
    for limit in (33, 32):  # 11 tokens choose 33 experts in total.
        monkeypatch.setattr(triton, "MAX_SORTED_PAIRS", limit)
        check_routing(route(logits, NUM_CHOICES, backend=backend, **options), want)


@pytest.mark.parametrize(
    "backend",
    [Backend.XLA, pytest.param(Backend.INTERPRET, marks=pytest.mark.full), TRITON_ON_GPU],
)
@pytest.mark.parametrize("dtype", [F32, pytest.param(BF16, marks=pytest.mark.full)])
def test_outputs_of_devices_with_some_experts_add_up_to_the_whole_output(dtype, backend):
    logits, x = make_logits("random", 21), make_rows(21, dtype)
    gate_up, down = make_weights(dtype)
    whole = route(jnp.asarray(logits), NUM_CHOICES, backend=backend)
    total = np.zeros(x.shape)
    for first in (0, 2, 4):
        options = {"first_expert": jnp.int32(first), "num_local_experts": 2}
        routing = route(jnp.asarray(logits), NUM_CHOICES, backend=backend, **options)
        part = slice(first, first + 2)
        check_routing(
            routing,
            reference.route(logits, NUM_CHOICES, first_expert=first, num_local_experts=2),
        )
        total += run_experts(x, gate_up[part], down[part], routing, backend).astype(F32)
    want = run_experts(x, gate_up, down, whole, backend).astype(F32)
    np.testing.assert_allclose(total, want, atol=2e-5 if dtype == F32 else 0.03)


@pytest.mark.parametrize("backend", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [F32, pytest.param(BF16, marks=pytest.mark.full)])
def test_nan_in_one_token_changes_no_other_row_of_expert_outputs(dtype, backend):
    logits, x = make_logits("random", 21), make_rows(21, dtype)
    gate_up, down = make_weights(dtype)
    clean = route(jnp.asarray(logits), NUM_CHOICES, backend=backend)
    logits[5] = np.nan
    broken = route(jnp.asarray(logits), NUM_CHOICES, backend=backend)
    rows = x.at[5].set(jnp.nan)
    want = np.array(run_experts(x, gate_up, down, clean, backend).astype(F32))
    want[5] = np.nan
    got = run_experts(rows, gate_up, down, broken, backend).astype(F32)
    np.testing.assert_allclose(got, want, atol=1e-6)


def test_expert_ops_refuse_invalid_arguments():
    logits, x = jnp.zeros((3, NUM_EXPERTS)), make_rows(3, F32)
    gate_up, down = make_weights(F32)
    options: dict[str, Any] = {"backend": Backend.XLA}
    with pytest.raises(ValueError, match=r"num_experts_per_token is 7; it must be from 1 to .* 6"):
        route(logits, 7, **options)
    with pytest.raises(ValueError, match="first_expert and num_local_experts: set both"):
        route(logits, 2, num_local_experts=2, **options)
    routing = route(logits, 2, **options)
    with pytest.raises(ValueError, match="weight has 95 columns: pass an even number"):
        expert_gated_gemm(x, gate_up[:, :, 1:], routing, **options)
    with pytest.raises(ValueError, match="activation is 'relu'; it must be silu"):
        expert_gated_gemm(x, gate_up, routing, activation="relu", **options)
    with pytest.raises(ValueError, match=r"routing\.offsets has shape"):
        expert_gated_gemm(x, gate_up[1:], routing, **options)
    with pytest.raises(ValueError, match="x has 3 rows; it must have 6: one row per token"):
        expert_down_gemm(x[:, : SIZES[F32][1]], down, routing, **options)
    with pytest.raises(ValueError, match="sort keys exceed 31 bits: pass fewer tokens"):
        jax.eval_shape(partial(route, num_experts_per_token=8, **options), jnp.zeros((2**21, 128)))


def test_expert_ops_of_no_tokens_return_no_rows():
    gate_up, down = make_weights(F32)
    options: dict[str, Any] = {"backend": Backend.XLA}
    routing = route(jnp.zeros((0, NUM_EXPERTS)), NUM_CHOICES, **options)
    inner = expert_gated_gemm(make_rows(0, F32), gate_up, routing, **options)
    width, inner_width = SIZES[F32]
    assert inner.shape == (0, inner_width)
    assert expert_down_gemm(inner, down, routing, **options).shape == (0, width)


def test_only_weights_of_chosen_experts_are_converted_to_float32():
    """On a CPU, XLA converts bfloat16 weights to float32, but only the weights of chosen
    experts."""
    count, width, inner = 64, 128, 128
    x, logits = (jax.ShapeDtypeStruct((4, n), dtype) for n, dtype in ((width, BF16), (count, F32)))
    gate_up = jax.ShapeDtypeStruct((count, width, 2 * inner), BF16)
    down = jax.ShapeDtypeStruct((count, inner, width), BF16)

    def run(x, logits, gate_up, down):
        routing = route(logits, 2, backend=Backend.XLA)
        return run_experts(x, gate_up, down, routing, Backend.XLA)

    compiled = jax.jit(run).lower(x, logits, gate_up, down).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < gate_up.size // 4


@pytest.mark.parametrize("tile_rows", [8, 16])
@pytest.mark.parametrize("counts", [[0] * 5, [3, 0, 40, 8, 0], [0, 0, 0, 0, 17], [16] * 5])
def test_tiles_cover_each_row_of_each_expert_once(counts, tile_rows):
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    num_rows = sum(counts) + 4
    options = {"num_rows": num_rows, "tile_rows": tile_rows, "interpret": True}
    packed = np.asarray(triton.expert_tiles(jnp.asarray(offsets), **options))
    tiles = packed[triton.HEADER_SIZE :].reshape(-1, triton.TILE_FIELDS)[: packed[0]]
    expected = [
        (expert, offsets[expert] + start, min(tile_rows, count - start))
        for expert, count in enumerate(counts)
        for start in range(0, count, tile_rows)
    ]
    assert [tuple(tile[:3]) for tile in tiles] == expected
    assert packed[0] <= triton.max_tiles(num_rows, len(counts), tile_rows)


@pytest.mark.parametrize(("depth", "width"), [(2048, 768), (192, 2048), (64, 64), (14336, 4096)])
@pytest.mark.parametrize("num_factors", [2, 1])
@pytest.mark.parametrize("grouped", [None, False, True])
def test_expert_gemm_tiles_divide_the_weight_evenly_and_fit_shared_memory(
    depth, width, num_factors, grouped
):
    """Test 2-byte dtypes (`grouped` is None), and FP8 with scales of rows or of groups."""
    itemsize, choose = 2, tuning.experts_config
    if grouped is not None:
        itemsize, choose = 1, partial(tuning.fp8_experts_config, grouped=grouped)
    for num_tokens in (1, 8, 64, 256, 1024, 65536):
        sizes = num_tokens, 8, 128, depth, width, itemsize, num_factors, 2
        config = choose(tuning.ExpertsProblem(*sizes, 132, "NVIDIA H200"))
        if depth * itemsize % 128:
            assert config is None
            continue
        assert config is not None
        columns = 64 * config.num_consumers * config.num_blocks
        assert width * num_factors % columns == 0
        stage = (columns + config.tile_rows) * 128
        out = 64 * config.num_consumers * config.tile_rows * 2
        assert config.num_stages >= 2
        assert config.num_stages * stage + out + 1024 <= MAX_SHARED_BYTES
