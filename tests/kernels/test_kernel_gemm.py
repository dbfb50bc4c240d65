"""Test the GEMM kernels for Hopper in interpret mode; test_kernel_rows.py tests them on a GPU."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from kernel_cases import BF16, F32

from pallas_kernels.gemm import hopper
from pallas_kernels.gemm.tuning import FewRowsConfig, ManyRowsConfig
from tests.reference import kernels as reference

# (rows, depth, configuration) of GEMMs. A configuration has: splits of the depth, rows per tile,
# consumer warpgroups, pipeline stages. The number of steps of a tile is between 1 and about three
# times the number of stages.
CASES = [
    (8, 512, FewRowsConfig(2, 8, 1, 3)),
    (8, 640, FewRowsConfig(1, 8, 2, 3)),
    (16, 192, FewRowsConfig(1, 16, 2, 2)),
    (64, 256, FewRowsConfig(4, 64, 1, 8)),
    (24, 192, FewRowsConfig(1, 24, 1, 2)),
    (96, 320, FewRowsConfig(1, 96, 1, 3)),
    (192, 128, FewRowsConfig(1, 96, 2, 8)),
    (256, 256, FewRowsConfig(2, 128, 2, 2)),
]


@pytest.fixture
def races_raise():
    """Run kernels in interpret mode, and raise if a kernel has a race on shared memory.

    Race detection misses some races. For example, it does not notice a loader that overwrites a
    pipeline stage before all consumers have read the stage.

    The fixture needs JAX 0.12. JAX 0.11 requires that a kernel waits for every phase of a barrier,
    but the loader of these kernels does not wait for the consumers to read the last stages.
    """
    if jax.__version_info__ < (0, 12):
        pytest.skip("JAX before 0.12 does not interpret kernels with such barriers")
    params = plgpu.InterpretGPUParams(detect_races=True)  # type: ignore
    with plgpu.force_gpu_interpret_mode(params):  # type: ignore
        yield


@pytest.mark.usefixtures("races_raise")
@pytest.mark.parametrize(("rows", "depth", "config"), CASES)
def test_split_k_partials_match_reference(rows, depth, config):
    rng = np.random.default_rng(0)
    x, weight = (jnp.asarray(rng.standard_normal(s), BF16) for s in ((rows, depth), (depth, 256)))
    partials = hopper.split_k_gemm(x, weight, config=config)
    assert partials.dtype == (BF16 if config.num_splits == 1 else F32)
    x_splits = np.asarray(x, np.float64).reshape(rows, config.num_splits, -1)
    weight_splits = np.asarray(weight, np.float64).reshape(config.num_splits, -1, 256)
    exact = np.einsum("rpd,pdw->prw", x_splits, weight_splits)
    tolerance = float(jnp.finfo(partials.dtype).eps) * 64
    np.testing.assert_allclose(np.asarray(partials, np.float64), exact, rtol=0.01, atol=tolerance)


@pytest.mark.usefixtures("races_raise")
@pytest.mark.parametrize(
    ("rows", "depth", "config"), [case for case in CASES if case[2].num_splits == 1]
)
def test_gated_gemm_applies_the_activation(rows, depth, config):
    x, weight = _gated_case(rows, depth, 256)
    _assert_gated(hopper.few_rows_gated_gemm(x, weight, config=config), x, weight)


# In some cases, a program has no tile; in other cases, it has several tiles. In some cases, a tile
# takes more steps than the pipeline has stages; in other cases, fewer.
@pytest.mark.usefixtures("races_raise")
@pytest.mark.parametrize(
    ("rows", "depth", "width", "stages", "programs"),
    [(128, 64, 128, 2, 1), (256, 320, 384, 3, 4), (1280, 64, 256, 4, 3), (384, 192, 256, 4, 8)],
)
def test_hopper_gated_gemm_of_many_rows_matches_reference(rows, depth, width, stages, programs):
    x, weight = _gated_case(rows, depth, width)
    out = hopper.many_rows_gated_gemm(x, weight, config=ManyRowsConfig(stages, programs))
    _assert_gated(out, x, weight)


@pytest.mark.usefixtures("races_raise")
@pytest.mark.parametrize(
    "run",
    [
        partial(hopper.few_rows_gated_gemm, config=FewRowsConfig(1, 128, 2, 2)),
        partial(hopper.many_rows_gated_gemm, config=ManyRowsConfig(2, 1)),
    ],
    ids=["few_rows", "many_rows"],
)
def test_gated_gemm_of_a_very_negative_gate_is_zero(run):
    """The intermediate results exp(-gate) and gate * up are infinite."""
    x = jnp.zeros((128, 64), BF16).at[:, 0].set(1)
    weight = jnp.zeros((64, 2, 128), BF16).at[0].set(jnp.asarray([[-1e20], [1e20]], BF16))
    np.testing.assert_array_equal(run(x, weight).astype(F32), 0)


def _gated_case(rows, depth, width):
    rng = np.random.default_rng(1)
    x, weight = (
        jnp.asarray(rng.standard_normal(s), BF16) for s in ((rows, depth), (depth, 2, width))
    )
    return x, weight * jnp.asarray(depth**-0.5, BF16)


def _assert_gated(out, x, weight):
    exact = reference.gated_gemm(x, weight)
    np.testing.assert_allclose(np.asarray(out, np.float64), exact, rtol=0.01, atol=0.01)


def test_pipeline_of_one_stage_raises_an_error():
    x, weight = jnp.zeros((8, 128), BF16), jnp.zeros((128, 64), BF16)
    with pytest.raises(ValueError, match="num_stages is 1: pass at least 2"):
        hopper.split_k_gemm(x, weight, config=FewRowsConfig(1, 8, 1, 1))
    x, weight = jnp.zeros((128, 128), BF16), jnp.zeros((128, 2, 128), BF16)
    with pytest.raises(ValueError, match="num_stages is 1: pass at least 2"):
        hopper.many_rows_gated_gemm(x, weight, config=ManyRowsConfig(1, 1))


@pytest.mark.parametrize(
    ("sizes", "config"),
    [
        ((8, 128, 96), FewRowsConfig(1, 8, 1, 2)),
        ((8, 96, 64), FewRowsConfig(1, 8, 1, 2)),
        ((12, 128, 64), FewRowsConfig(1, 8, 1, 2)),
        ((8, 192, 64), FewRowsConfig(2, 8, 1, 2)),
        ((8, 128, 192), FewRowsConfig(1, 8, 2, 2)),
    ],
)
def test_few_rows_gemm_refuses_sizes_that_are_not_multiples_of_the_tile(sizes, config):
    rows, depth, width = sizes
    x, weight = jnp.zeros((rows, depth), BF16), jnp.zeros((depth, width), BF16)
    tile = config.tile_rows, 64 * config.num_splits, 64 * config.num_consumers
    with pytest.raises(ValueError, match=re.escape(f"{sizes}; they must be multiples of {tile}")):
        hopper.split_k_gemm(x, weight, config=config)


@pytest.mark.parametrize("sizes", [(64, 64, 128), (128, 96, 128), (128, 64, 64)])
def test_many_rows_gemm_refuses_sizes_that_are_not_multiples_of_the_tile(sizes):
    rows, depth, width = sizes
    x, weight = jnp.zeros((rows, depth), BF16), jnp.zeros((depth, 2, width), BF16)
    message = re.escape(f"{sizes}; they must be multiples of (128, 64, 128)")
    with pytest.raises(ValueError, match=message):
        hopper.many_rows_gated_gemm(x, weight, config=ManyRowsConfig(2, 1))
