"""GEMMs of a step's rows by a weight: split along the depth, gated, with the activation, or of
numbers in FP8.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from pallas_kernels import checks
from pallas_kernels.gemm import fp8, fp8_hopper, fp8_triton, hopper, triton, tuning, xla
from pallas_kernels.gemm.xla import einsum as einsum
from pallas_kernels.gemm.xla import sum_partials as sum_partials
from pallas_kernels.tuning import device_kind, has_fp8, num_cores
from pallas_kernels.types import FP8, FP8_GROUP_SIZE, Backend


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
    gemm = _gemm_problem(x, weight, backend)
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
    gemm = _gemm_problem(x, weight, backend)
    few, many = tuning.few_rows_config(gemm), tuning.many_rows_config(gemm)
    if few is not None:
        return hopper.few_rows_gated_gemm(x, weight, config=few)
    if many is not None:
        return hopper.many_rows_gated_gemm(x, weight, config=many)
    return gated_silu(xla.gate_up(x, weight), backend=backend)


def gated_silu(gate_up: Float[Array, "T 2 F"], *, backend: Backend) -> Float[Array, "T F"]:
    """silu(gate) * up of rows that hold gate and up, in float32 and then rounded (SwiGLU: Shazeer
    2020, arXiv:2002.05202). Plain XLA where that is faster: see `tuning.gated_silu_config`.

    Raises:
        ValueError: a shape other than [T, 2, F].
        TypeError: a dtype other than bfloat16, float16 or float32.
    """
    checks.check_array("gate_up", gate_up, "[T, 2, F]")
    backend = Backend(backend)
    config = tuning.gated_silu_config(num_tokens=gate_up.shape[0], size=gate_up.shape[2])
    if backend is Backend.XLA or not gate_up.size or config is None:
        return xla.gated_silu(gate_up)
    return triton.gated_silu(gate_up, config=config, interpret=backend is Backend.INTERPRET)


def to_fp8(x: Float[Array, "..."], scale: Float32[Array, "..."]) -> Float[Array, "..."]:
    """x / scale, rounded to the nearest number of e4m3; what is beyond the largest becomes that.

    Args:
        x: of any shape.
        scale: positive; as many axes as x, or none.
    """
    return fp8.to_fp8(x, scale)


def quantize_rows(
    x: Float[Array, "T C"],
    static_scales: Float32[Array, "scales"] | None = None,
    *,
    grouped: bool = False,
    reduce_max: Callable[[jax.Array], jax.Array] | None = None,
    backend: Backend,
) -> tuple[Float[Array, "T C"], Float32[Array, "T groups"]]:
    """Rows in e4m3 and their scales, by which the largest number of each becomes the largest there.

    Args:
        x: the rows.
        given: scales that were found before: all rows have the largest of them, and what is beyond
            the numbers of e4m3 then is cut off. None: each has its own.
        grouped: a scale for each `FP8_GROUP_SIZE` numbers of a row, the last ones perhaps fewer; else
            one for each row.
        across: of the largest absolute values [T, groups] of what this device has of the rows,
            those of the whole rows; plain XLA's then.
        backend: which implementation runs.

    Raises:
        ValueError: a shape other than [T, C] or [scales]; `static_scales` with `grouped` or `reduce_max`.
        TypeError: a dtype other than bfloat16, float16 or float32; other scales than float32.
    """
    checks.check_array("x", x, "[T, C]")
    check_static_scales(static_scales, grouped=grouped)
    if static_scales is not None and reduce_max is not None:
        raise ValueError("static_scales and reduce_max are both given: leave out reduce_max")
    backend = Backend(backend)
    interpret = backend is Backend.INTERPRET
    if reduce_max is not None or not x.size or not (interpret or has_fp8(backend)):
        return fp8.quantize_rows(x, static_scales, grouped=grouped, reduce_max=reduce_max)
    return fp8_triton.quantize_rows(x, static_scales, grouped=grouped, interpret=interpret)


def check_static_scales(static_scales, *, grouped):
    """Scales of all rows, if any: `quantize_rows` has the errors."""
    if static_scales is None:
        return
    checks.check_array("static_scales", static_scales, "[scales]", (jnp.float32,))
    if grouped:
        raise ValueError("static_scales are scales of whole rows: leave out grouped")


def scaled_gemm(
    x: Float[Array, "T C"],
    weight: Float[Array, "D C"],
    x_scale: Float32[Array, "T"],
    weight_scale: Float32[Array, "D"],
    *,
    dtype: DTypeLike,
    backend: Backend,
) -> Float[Array, "partials T D"]:
    """x @ weight.T of numbers in FP8, times the scale of the row and that of the column, as split-K
    partials (see `split_k_gemm`): one of `dtype`, or several in float32.

    Args:
        x, weight: in e4m3; the weight lies as GPUs multiply it, and as checkpoints have it.
        x_scale, weight_scale: of each row of x, and of the weight.
        dtype: of the result. XLA's product of many rows on a GPU is rounded to it before it is
            multiplied by the scales as well, if it is bfloat16.
        backend: on a GPU that has no such product, both are widened first.

    Raises:
        ValueError: shapes that do not fit.
        TypeError: other dtypes.
    """
    check_scaled_gemm(x, weight, x_scale, weight_scale)
    backend, scales = Backend(backend), (x_scale, weight_scale)
    own = _try_hopper_fp8_gemm(x, weight, scales, gated=False, dtype=dtype, backend=backend)
    if own is not None:
        return own
    return fp8.scaled_gemm(x, weight, *scales, dtype=dtype, backend=backend)[None]


def scaled_gated_gemm(
    x: Float[Array, "T C"],
    weight: Float[Array, "D C"],
    x_scale: Float32[Array, "T"],
    weight_scale: Float32[Array, "D"],
    *,
    dtype: DTypeLike,
    backend: Backend,
) -> Float[Array, "T F"]:
    """silu(gate) * up of `scaled_gemm`'s columns, the first half of which are the gate's; the
    activation in float32. Arguments and errors are those of `scaled_gemm`; D is even."""
    check_scaled_gemm(x, weight, x_scale, weight_scale)
    _check_halves(weight)
    backend, scales = Backend(backend), (x_scale, weight_scale)
    own = _try_hopper_fp8_gemm(x, weight, scales, gated=True, dtype=dtype, backend=backend)
    if own is not None:
        return own[0]
    rows = fp8.scaled_gemm(x, weight, *scales, dtype=dtype, backend=backend)
    # XLA's activation, which has the scales in its kernel: before ours they would be one more.
    return xla.gated_silu(rows.reshape(x.shape[0], 2, -1))


def block_scaled_gemm(
    x: Float[Array, "T C"],
    weight: Float[Array, "D C"],
    x_scale: Float32[Array, "T groups"],
    weight_scale: Float32[Array, "blocks groups"],
    rows_per_part: Sequence[int],
    *,
    dtype: DTypeLike,
    backend: Backend,
) -> Float[Array, "partials T D"]:
    """x @ weight.T of numbers in FP8 with a scale for each `FP8_GROUP_SIZE` numbers of a row of x, and
    for each block of `FP8_GROUP_SIZE` rows and columns of the weight (DeepSeek-AI 2024,
    arXiv:2412.19437, 3.3.2), as split-K partials: one of `dtype`, or several in float32.

    Args:
        x, weight: in e4m3.
        x_scale, weight_scale: of the groups and blocks; the last ones may be smaller.
        rows_per_part: rows of each weight of which this one is made; blocks begin anew in each.
        dtype: of the result.
        backend: which implementation runs.

    Raises:
        ValueError: shapes that do not fit.
        TypeError: other dtypes.
    """
    check_block_scaled_gemm(x, weight, x_scale, weight_scale, rows_per_part)
    backend, rows = Backend(backend), tuple(rows_per_part)
    scales, options = (x_scale, weight_scale), {"dtype": dtype, "backend": backend}
    own = _try_hopper_fp8_gemm(x, weight, scales, gated=False, parts=rows, **options)
    return fp8.block_scaled_gemm(x, weight, *scales, rows, **options)[None] if own is None else own


def block_scaled_gated_gemm(
    x: Float[Array, "T C"],
    weight: Float[Array, "D C"],
    x_scale: Float32[Array, "T groups"],
    weight_scale: Float32[Array, "blocks groups"],
    *,
    dtype: DTypeLike,
    backend: Backend,
) -> Float[Array, "T F"]:
    """silu(gate) * up of `block_scaled_gemm`'s columns by a weight of two halves, the gate's and
    up's; the activation in float32. Arguments and errors are those of `block_scaled_gemm`."""
    _check_halves(weight)
    rows = (weight.shape[0] // 2,) * 2
    check_block_scaled_gemm(x, weight, x_scale, weight_scale, rows)
    backend, scales = Backend(backend), (x_scale, weight_scale)
    options = {"dtype": dtype, "backend": backend}
    own = _try_hopper_fp8_gemm(x, weight, scales, gated=True, parts=rows, **options)
    if own is not None:
        return own[0]
    gate_up = fp8.block_scaled_gemm(x, weight, *scales, rows, **options)
    return gated_silu(gate_up.reshape(x.shape[0], 2, -1), backend=backend)


def _try_hopper_fp8_gemm(x, weight, scales, *, gated, dtype, backend, parts=()):
    """The partials of a kernel for Hopper GPUs, where there is one for these sizes; else None."""
    is_whole = all(
        part % FP8_GROUP_SIZE == 0 for part in parts
    )  # a tile's outputs are of one block
    if not is_whole or jnp.dtype(dtype).itemsize != 2:
        return None
    gemm = tuning.GemmProblem(
        num_tokens=x.shape[0],
        depth=x.shape[1],
        width=weight.shape[0] // (1 + gated),
        itemsize=x.dtype.itemsize,
        num_factors=1 + gated,
        num_cores=num_cores(backend),
        device_kind=device_kind(backend),
    )
    few = tuning.few_fp8_rows_config(gemm, grouped=bool(parts))
    many = tuning.many_fp8_rows_config(gemm, grouped=bool(parts))
    options = {"gated": gated, "dtype": jnp.dtype(dtype)}
    if few is not None:
        return fp8_hopper.few_rows_gemm(x, weight, *scales, config=few, **options)
    if many is not None:
        return fp8_hopper.many_rows_gemm(x, weight, *scales, config=many, **options)[None]
    return None


def _gemm_problem(x: jax.Array, weight: jax.Array, backend: Backend) -> tuning.GemmProblem:
    """By a weight [D, F], or by a gated one [D, 2, F]."""
    return tuning.GemmProblem(
        num_tokens=x.shape[0],
        depth=x.shape[1],
        width=weight.shape[-1],
        itemsize=x.dtype.itemsize,
        num_factors=weight.ndim - 1,
        num_cores=num_cores(backend),
        device_kind=device_kind(backend),
    )


def check_scaled_gemm(x, weight, x_scale, weight_scale):
    """Two matrices in e4m3, the second one transposed, and a scale for each of their rows."""
    sizes = checks.check_array("x", x, "[T, C]", FP8)
    sizes = checks.check_array("weight", weight, "[D, C]", FP8, **sizes)
    checks.check_array("x_scale", x_scale, "[T]", jnp.float32, **sizes)
    checks.check_array("weight_scale", weight_scale, "[D]", jnp.float32, **sizes)


def _check_halves(weight):
    """A weight of a gate and of what it opens for."""
    if weight.shape[0] % 2:
        raise ValueError(
            f"weight has {weight.shape[0]} rows; they must be the gate's and as many of up"
        )


def check_block_scaled_gemm(x, weight, x_scale, weight_scale, rows_per_part):
    """The same with a scale for each group and block."""
    sizes = checks.check_array("x", x, "[T, C]", FP8)
    sizes = checks.check_array("weight", weight, "[D, C]", FP8, **sizes)
    if sum(rows_per_part) != sizes["D"]:
        raise ValueError(
            f"rows_per_part={tuple(rows_per_part)} must add up to the weight's {sizes['D']} rows"
        )
    sizes["blocks"] = sum(-(-rows // FP8_GROUP_SIZE) for rows in rows_per_part)
    sizes["groups"] = -(-sizes["C"] // FP8_GROUP_SIZE)
    checks.check_array("x_scale", x_scale, "[T, groups]", jnp.float32, **sizes)
    checks.check_array("weight_scale", weight_scale, "[blocks, groups]", jnp.float32, **sizes)


def check_gemm(x, weight):
    """Two matrices of one dtype that can be multiplied."""
    sizes = checks.check_array("x", x, "[T, C]")
    checks.check_array("weight", weight, "[C, D]", x.dtype, **sizes)


def check_gated_gemm(x, weight):
    """A row's depth is the weight's, which has two factors."""
    sizes = checks.check_array("x", x, "[T, D]")
    checks.check_array("weight", weight, "[D, 2, F]", x.dtype, **sizes)
