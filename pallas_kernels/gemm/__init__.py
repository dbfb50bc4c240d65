"""GEMMs of a step's rows by a weight: split along the depth, or gated, with the activation."""

import jax
from jaxtyping import Array, Float

from pallas_kernels import checks
from pallas_kernels.gemm import hopper, triton, tuning, xla
from pallas_kernels.gemm.xla import sum_partials as sum_partials
from pallas_kernels.tuning import device_kind, num_cores
from pallas_kernels.types import Backend


def split_k_gemm(
    x: Float[Array, "T C"], weight: Float[Array, "C D"], *, backend: Backend
) -> Float[Array, "partials T D"]:
    """x @ weight as split-K partials, whose sum it is: as many as the shapes read fastest with.

    Few rows by a narrow weight use the whole chip only with C split over programs. The op that
    takes the result next sums the partials, where XLA would sum them in a kernel of its own. One
    partial is of x's dtype; several are float32. Accumulates in float32.

    Raises:
        ValueError: shapes that do not fit.
        TypeError: dtypes that differ or are not bfloat16, float16 or float32.
    """
    check_gemm(x, weight)
    backend = Backend(backend)
    if backend is Backend.XLA:
        return xla.split_k_gemm(x, weight, 1)
    gemm = _gemm(x, weight, backend)
    config = tuning.few_rows_config(gemm)
    if config is not None:
        return hopper.split_k_gemm(x, weight, config=config)
    return xla.split_k_gemm(x, weight, tuning.num_splits(gemm))


def gated_gemm(
    x: Float[Array, "T D"], weight: Float[Array, "D 2 F"], *, backend: Backend
) -> Float[Array, "T F"]:
    """silu(x @ weight[:, 0]) * (x @ weight[:, 1]), the activation in float32 (SwiGLU: Shazeer 2020,
    arXiv:2002.05202). Accumulates in float32; x's dtype out.

    On Hopper GPUs one kernel, where it is faster than XLA's GEMM and `gated_silu` of that, which
    rounds the GEMM's rows in between.

    Raises:
        ValueError: shapes that do not fit.
        TypeError: dtypes that differ or are not bfloat16, float16 or float32.
    """
    check_gated_gemm(x, weight)
    backend = Backend(backend)
    gemm = _gemm(x, weight, backend)
    few, many = tuning.few_rows_config(gemm), tuning.many_rows_config(gemm)
    if few is not None:
        return hopper.gated_gemm_of_few(x, weight, config=few)
    if many is not None:
        return hopper.gated_gemm_of_many(x, weight, config=many)
    return gated_silu(xla.gate_up(x, weight), backend=backend)


def gated_silu(gate_up: Float[Array, "T 2 F"], *, backend: Backend) -> Float[Array, "T F"]:
    """silu(gate) * up of rows that hold gate and up, in float32 and then rounded (SwiGLU: Shazeer
    2020, arXiv:2002.05202). Plain XLA where that is faster: see `tuning.gated_config`.

    Raises:
        ValueError: a shape other than [T, 2, F].
        TypeError: a dtype other than bfloat16, float16 or float32.
    """
    checks.check_array("gate_up", gate_up, "[T, 2, F]")
    backend = Backend(backend)
    config = tuning.gated_config(num_tokens=gate_up.shape[0], size=gate_up.shape[2])
    if backend is Backend.XLA or not gate_up.size or config is None:
        return xla.gated_silu(gate_up)
    return triton.gated_silu(gate_up, config=config, interpret=backend is Backend.INTERPRET)


def _gemm(x: jax.Array, weight: jax.Array, backend: Backend) -> tuning.Gemm:
    """By a weight [D, F], or by a gated one [D, 2, F]."""
    return tuning.Gemm(
        num_tokens=x.shape[0],
        depth=x.shape[1],
        width=weight.shape[-1],
        itemsize=x.dtype.itemsize,
        num_factors=weight.ndim - 1,
        num_cores=num_cores(backend),
        device_kind=device_kind(backend),
    )


def check_gemm(x, weight):
    """Two matrices of one dtype that can be multiplied."""
    sizes = checks.check_array("x", x, "[T, C]")
    checks.check_array("weight", weight, "[C, D]", x.dtype, **sizes)


def check_gated_gemm(x, weight):
    """A row's depth is the weight's, which has two factors."""
    sizes = checks.check_array("x", x, "[T, D]")
    checks.check_array("weight", weight, "[D, 2, F]", x.dtype, **sizes)
