"""GEMMs of activation rows by a weight: split-K GEMMs, gated GEMMs (SwiGLU), and FP8 GEMMs.

The public ops check their arguments and choose an implementation for the backend and the shapes:

    split_k_gemm, gated_gemm            hopper.py on a Hopper GPU where it is faster, else xla.py
    batch_invariant_gemm,               hopper.py on a GPU, else xla.py
    batch_invariant_gated_gemm,
    batch_invariant_transposed_gemm
    gated_silu                          triton.py on a GPU where it is faster, else xla.py
    scaled_gemm, block_scaled_gemm,     fp8_hopper.py on a Hopper GPU where it is faster, else
    and their gated variants            fp8.py
    quantize_rows                       fp8_triton.py on a GPU with FP8 support, else fp8.py
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from pallas_kernels import checks
from pallas_kernels.gemm import fp8, fp8_hopper, fp8_triton, hopper, triton, tuning, xla
from pallas_kernels.gemm.xla import einsum as einsum
from pallas_kernels.gemm.xla import map_row_tiles as map_row_tiles
from pallas_kernels.gemm.xla import sum_partials as sum_partials
from pallas_kernels.tuning import device_kind, has_fp8, num_cores
from pallas_kernels.types import FP8, FP8_GROUP_SIZE, Backend

MAX_FEW_ROWS = 256  # With more rows than this, `batch_invariant_gemm` runs the many-rows kernel.
BATCH_INVARIANT_UNIT = 64
"""The sizes of weights of batch-invariant ops must be multiples of this number on a GPU."""


def split_k_gemm(
    x: Float[Array, "T C"], weight: Float[Array, "C D"], *, backend: Backend
) -> Float[Array, "partials T D"]:
    """Return x @ weight as split-K partials, whose sum is the product.

    With few rows and a narrow weight, a GEMM keeps all SMs busy only if several programs share the
    depth C. The op that consumes the result sums the partials, which saves a kernel for the sum.
    The shapes determine the number of partials. The GEMM accumulates in float32. A single partial
    has x's dtype; several partials are float32.

    Raises:
        ValueError: Shapes do not match.
        TypeError: Dtypes differ or are not bfloat16, float16 or float32.
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
    """Return silu(x @ weight[:, 0]) * (x @ weight[:, 1]) (SwiGLU: Shazeer 2020, arXiv:2002.05202).

    The GEMM accumulates in float32, the activation computes in float32, and the result has x's
    dtype. On Hopper GPUs, a single kernel computes GEMM and activation if that is faster. Otherwise
    XLA's GEMM rounds gate and up to x's dtype, and `gated_silu` then applies the activation.

    Raises:
        ValueError: Shapes do not match.
        TypeError: Dtypes differ or are not bfloat16, float16 or float32.
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


def batch_invariant_gemm(
    x: Float[Array, "T C"], weight: Float[Array, "C D"], *, backend: Backend
) -> Float[Array, "T D"]:
    """Return x @ weight so that a row's bits do not depend on the other rows or their number.

    On a GPU, one float32 accumulator adds the products over the whole depth C in order, for any
    number of rows. Some kernels compute x @ weight and others (weight.T @ x.T).T; the hardware adds
    in the same order for both.

    Args:
        x: Rows.
        weight: Weight, in the dtype of x.
        backend: The implementation to run. A GPU must be a Hopper GPU.

    Raises:
        ValueError: Shapes do not match, or the GPU has no kernel for them: C and D must be
            multiples of 64.
        TypeError: Dtypes differ or are not bfloat16, float16 or float32.
    """
    check_gemm(x, weight)
    backend = Backend(backend)
    if backend is not Backend.TRITON or not x.size:
        return xla.batch_invariant_gemm(x, weight, transposed=False, dtype=x.dtype)
    rows, gemm = _pad_rows(x, weight, backend)
    many = tuning.invariant_many_rows_config(gemm)
    if many is not None and gemm.num_tokens > MAX_FEW_ROWS:
        return hopper.many_rows_gemm(rows, weight, config=many)[: x.shape[0]]
    few = _invariant_few_rows_config(gemm, x.dtype)
    return hopper.split_k_gemm(rows, weight, config=few)[0, : x.shape[0]]


def batch_invariant_transposed_gemm(
    x: Float[Array, "T C"], weight: Float[Array, "D C"], *, backend: Backend
) -> Float32[Array, "T D"]:
    """Return x @ weight.T in float32 so that a row's bits do not depend on the other rows.

    See `batch_invariant_gemm` for the arguments and the errors.
    """
    check_gemm(x, weight.T)
    backend = Backend(backend)
    if backend is not Backend.TRITON or not x.size:
        return xla.batch_invariant_gemm(x, weight, transposed=True, dtype=jnp.float32)
    rows, gemm = _pad_rows(x, weight.T, backend)
    few = _invariant_few_rows_config(gemm, x.dtype)
    return hopper.transposed_gemm(rows, weight, dtype=jnp.float32, config=few)[: x.shape[0]]


def batch_invariant_gated_gemm(
    x: Float[Array, "T D"], weight: Float[Array, "D 2 F"], *, backend: Backend
) -> Float[Array, "T F"]:
    """Run `gated_gemm` so that a row's bits do not depend on the other rows or their number.

    See `batch_invariant_gemm` for the errors.
    """
    check_gated_gemm(x, weight)
    backend = Backend(backend)
    if backend is not Backend.TRITON or not x.size:
        flat = weight.reshape(weight.shape[0], -1)
        gate_up = xla.batch_invariant_gemm(x, flat, transposed=False, dtype=x.dtype)
        return xla.gated_silu(gate_up.reshape(x.shape[0], 2, -1))
    rows, gemm = _pad_rows(x, weight, backend)
    many = tuning.invariant_many_rows_config(gemm)
    if many is not None and gemm.num_tokens > MAX_FEW_ROWS:
        return hopper.many_rows_gated_gemm(rows, weight, config=many)[: x.shape[0]]
    few = _invariant_few_rows_config(gemm, x.dtype)
    return hopper.few_rows_gated_gemm(rows, weight, config=few)[: x.shape[0]]


def _pad_rows(x, weight, backend):
    """Pad x with zero rows, so that tiles of the Hopper kernels divide the rows evenly.

    Returns:
        The padded x, and the `GemmProblem` of the padded x and `weight`.
    """
    unit = next((size for most, size in ((64, 8), (128, 64)) if x.shape[0] <= most), 128)
    missing = -x.shape[0] % unit
    rows = jnp.pad(x, ((0, missing), (0, 0))) if missing else x
    return rows, _gemm_problem(rows, weight, backend)


def _invariant_few_rows_config(gemm, dtype):
    """Return the launch parameters of the few-rows kernel.

    Raises:
        ValueError: The GPU has no kernel for the GEMM.
    """
    config = tuning.invariant_few_rows_config(gemm)
    if config is None:
        raise ValueError(
            f"no batch-invariant kernel multiplies {dtype} by a weight of {gemm.depth} x "
            f"{gemm.width} on {gemm.device_kind or 'this GPU'}: use a Hopper GPU, a 2-byte dtype, "
            "and sizes that are multiples of 64"
        )
    return config


def gated_silu(gate_up: Float[Array, "T 2 F"], *, backend: Backend) -> Float[Array, "T F"]:
    """Return silu(gate) * up, where gate_up[:, 0] is gate and gate_up[:, 1] is up.

    The activation of SwiGLU (Shazeer 2020, arXiv:2002.05202) computes in float32; the result has
    the argument's dtype. On a GPU `tuning.gated_silu_config` chooses between XLA and Triton.

    Raises:
        ValueError: The shape is not [T, 2, F].
        TypeError: The dtype is not bfloat16, float16 or float32.
    """
    checks.check_array("gate_up", gate_up, "[T, 2, F]")
    backend = Backend(backend)
    config = tuning.gated_silu_config(num_tokens=gate_up.shape[0], size=gate_up.shape[2])
    if backend is Backend.XLA or not gate_up.size or config is None:
        return xla.gated_silu(gate_up)
    return triton.gated_silu(gate_up, config=config, interpret=backend is Backend.INTERPRET)


def to_fp8(x: Float[Array, "..."], scale: Float32[Array, "..."]) -> Float[Array, "..."]:
    """Return x / scale, clipped to [-`FP8_MAX`, `FP8_MAX`] and rounded to the nearest FP8 number.

    Args:
        x: Numbers, of any shape.
        scale: Positive scales, which broadcast with x: as many axes as x, or a scalar.
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
    """Quantize rows to FP8 (e4m3).

    By default each row or group has a scale that maps its largest absolute value to `FP8_MAX`.

    Args:
        x: Rows to quantize.
        static_scales: Calibrated scales. All rows are divided by the largest of these scales, and
            quotients above `FP8_MAX` are clipped. If None, the scales are computed from the rows.
        grouped: Whether each group of `FP8_GROUP_SIZE` numbers of a row has a scale; the last group
            may be smaller. Otherwise each row has one scale.
        reduce_max: Pass this function if tensor-parallel devices each hold a shard of every row. It
            takes the largest absolute values [T, groups] of this device's shard, and returns the
            largest of all shards. Plain XLA then quantizes on every backend.
        backend: The implementation to run.

    Returns:
        The rows in FP8, and the scales, which multiply the FP8 rows to give x approximately.

    Raises:
        ValueError: A shape is wrong, or `static_scales` is combined with `grouped` or `reduce_max`.
        TypeError: A dtype is not supported.
    """
    checks.check_array("x", x, "[T, C]")
    check_static_scales(static_scales, grouped=grouped)
    if static_scales is not None and reduce_max is not None:
        raise ValueError("static_scales and reduce_max are both set: omit reduce_max")
    backend = Backend(backend)
    interpret = backend is Backend.INTERPRET
    if reduce_max is not None or not x.size or not (interpret or has_fp8(backend)):
        return fp8.quantize_rows(x, static_scales, grouped=grouped, reduce_max=reduce_max)
    return fp8_triton.quantize_rows(x, static_scales, grouped=grouped, interpret=interpret)


def check_static_scales(static_scales, *, grouped):
    """Check the `static_scales` argument of `quantize_rows`, which documents the errors."""
    if static_scales is None:
        return
    checks.check_array("static_scales", static_scales, "[scales]", (jnp.float32,))
    if grouped:
        raise ValueError("static_scales apply to whole rows: omit static_scales or grouped")


def scaled_gemm(
    x: Float[Array, "T C"],
    weight: Float[Array, "D C"],
    x_scale: Float32[Array, "T"],
    weight_scale: Float32[Array, "D"],
    *,
    dtype: DTypeLike,
    backend: Backend,
) -> Float[Array, "partials T D"]:
    """Return the FP8 product (x * x_scale) @ (weight * weight_scale).T as split-K partials.

    Each row of x and each row of the weight has one scale. A single partial has dtype `dtype`;
    several partials are float32 (see `split_k_gemm`).

    Args:
        x, weight: Matrices in FP8 (e4m3). The weight is stored transposed, as in checkpoints, which
            is also the layout that tensor cores need for FP8.
        x_scale, weight_scale: Scales of the rows of x and of the rows of the weight.
        dtype: Dtype of the result. If XLA multiplies more than 256 rows on a GPU and `dtype` is
            bfloat16, the product is also rounded to bfloat16 before the scales are applied.
        backend: The implementation to run. On a GPU without FP8 support, the op first converts both
            matrices to bfloat16.

    Raises:
        ValueError: Shapes do not match.
        TypeError: A dtype is not supported: matrices are FP8, scales are float32.
    """
    check_scaled_gemm(x, weight, x_scale, weight_scale)
    backend, scales = Backend(backend), (x_scale, weight_scale)
    partials = _try_hopper_fp8_gemm(x, weight, scales, gated=False, dtype=dtype, backend=backend)
    if partials is not None:
        return partials
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
    """Return silu(gate) * up, where gate and up are the two halves of `scaled_gemm`'s product.

    The first D / 2 rows of the weight are the gate projection, the others the up projection. The
    activation computes in float32. See `scaled_gemm` for the arguments and errors; D is even.
    """
    check_scaled_gemm(x, weight, x_scale, weight_scale)
    _check_halves(weight)
    backend, scales = Backend(backend), (x_scale, weight_scale)
    partials = _try_hopper_fp8_gemm(x, weight, scales, gated=True, dtype=dtype, backend=backend)
    if partials is not None:
        return partials[0]
    rows = fp8.scaled_gemm(x, weight, *scales, dtype=dtype, backend=backend)
    # Use XLA's activation, because XLA fuses it with the scales. The Triton activation would need a
    # separate kernel for the scales.
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
    """Return x @ weight.T of block-scaled FP8 matrices as split-K partials.

    Each group of `FP8_GROUP_SIZE` numbers of a row of x has a scale. Each block of `FP8_GROUP_SIZE`
    rows by `FP8_GROUP_SIZE` columns of the weight has a scale too (DeepSeek-AI 2024,
    arXiv:2412.19437, section 3.3.2). A single partial has dtype `dtype`; several partials are
    float32 (see `split_k_gemm`).

    Args:
        x, weight: Matrices in FP8 (e4m3). The weight is stored transposed.
        x_scale, weight_scale: Scales of the groups of x and of the blocks of the weight. The last
            group of a row, and the last blocks of each part of the weight, may be smaller.
        rows_per_part: `weight` is a concatenation of weights (parts); this argument holds the
            number of rows of each part. A new block begins at the first row of each part.
        dtype: Dtype of the result.
        backend: The implementation to run.

    Raises:
        ValueError: Shapes do not match.
        TypeError: A dtype is not supported: matrices are FP8, scales are float32.
    """
    check_block_scaled_gemm(x, weight, x_scale, weight_scale, rows_per_part)
    backend, rows = Backend(backend), tuple(rows_per_part)
    scales, options = (x_scale, weight_scale), {"dtype": dtype, "backend": backend}
    partials = _try_hopper_fp8_gemm(x, weight, scales, gated=False, rows_per_part=rows, **options)
    if partials is not None:
        return partials
    return fp8.block_scaled_gemm(x, weight, *scales, rows, **options)[None]


def block_scaled_gated_gemm(
    x: Float[Array, "T C"],
    weight: Float[Array, "D C"],
    x_scale: Float32[Array, "T groups"],
    weight_scale: Float32[Array, "blocks groups"],
    *,
    dtype: DTypeLike,
    backend: Backend,
) -> Float[Array, "T F"]:
    """Return silu(gate) * up, where gate and up are the halves of `block_scaled_gemm`'s product.

    The first D / 2 rows of the weight are the gate projection, the others the up projection. The
    activation computes in float32. See `block_scaled_gemm` for the arguments and errors; D is even.
    """
    _check_halves(weight)
    rows = (weight.shape[0] // 2,) * 2
    check_block_scaled_gemm(x, weight, x_scale, weight_scale, rows)
    backend, scales = Backend(backend), (x_scale, weight_scale)
    options = {"dtype": dtype, "backend": backend}
    partials = _try_hopper_fp8_gemm(x, weight, scales, gated=True, rows_per_part=rows, **options)
    if partials is not None:
        return partials[0]
    gate_up = fp8.block_scaled_gemm(x, weight, *scales, rows, **options)
    return gated_silu(gate_up.reshape(x.shape[0], 2, -1), backend=backend)


def _try_hopper_fp8_gemm(x, weight, scales, *, gated, dtype, backend, rows_per_part=()):
    """Run the FP8 Hopper kernel; return None if it does not support the GEMM or XLA is faster.

    A block-scaled weight is a concatenation of weights. `rows_per_part` holds the number of rows of
    each of these weights. For a weight without block scales, `rows_per_part` is empty.
    """
    # A weight scale belongs to a block of at most `FP8_GROUP_SIZE` rows of the weight. The kernel
    # uses one scale for 64 or 128 adjacent outputs, so it needs blocks of `FP8_GROUP_SIZE` rows.
    is_whole = all(rows % FP8_GROUP_SIZE == 0 for rows in rows_per_part)
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
    few = tuning.few_fp8_rows_config(gemm, grouped=bool(rows_per_part))
    many = tuning.many_fp8_rows_config(gemm, grouped=bool(rows_per_part))
    options = {"gated": gated, "dtype": jnp.dtype(dtype)}
    if few is not None:
        return fp8_hopper.few_rows_gemm(x, weight, *scales, config=few, **options)
    if many is not None:
        return fp8_hopper.many_rows_gemm(x, weight, *scales, config=many, **options)[None]
    return None


def _gemm_problem(x: jax.Array, weight: jax.Array, backend: Backend) -> tuning.GemmProblem:
    """Describe the GEMM of x by a weight [D, F] or by a gated weight [D, 2, F]."""
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
    """Check the arguments of `scaled_gemm`, which documents the errors."""
    sizes = checks.check_array("x", x, "[T, C]", FP8)
    sizes = checks.check_array("weight", weight, "[D, C]", FP8, **sizes)
    checks.check_array("x_scale", x_scale, "[T]", jnp.float32, **sizes)
    checks.check_array("weight_scale", weight_scale, "[D]", jnp.float32, **sizes)


def _check_halves(weight):
    if weight.shape[0] % 2:
        raise ValueError(
            f"weight has {weight.shape[0]} rows: pass an even number of rows, half gate, half up"
        )


def check_block_scaled_gemm(x, weight, x_scale, weight_scale, rows_per_part):
    """Check the arguments of `block_scaled_gemm`, which documents the errors."""
    sizes = checks.check_array("x", x, "[T, C]", FP8)
    sizes = checks.check_array("weight", weight, "[D, C]", FP8, **sizes)
    if sum(rows_per_part) != sizes["D"]:
        raise ValueError(
            f"rows_per_part={tuple(rows_per_part)} must add up to {sizes['D']}, the number of rows "
            "of the weight"
        )
    sizes["blocks"] = sum(-(-rows // FP8_GROUP_SIZE) for rows in rows_per_part)
    sizes["groups"] = -(-sizes["C"] // FP8_GROUP_SIZE)
    checks.check_array("x_scale", x_scale, "[T, groups]", jnp.float32, **sizes)
    checks.check_array("weight_scale", weight_scale, "[blocks, groups]", jnp.float32, **sizes)


def check_gemm(x, weight):
    """Check the arguments of `split_k_gemm`, which documents the errors."""
    sizes = checks.check_array("x", x, "[T, C]")
    checks.check_array("weight", weight, "[C, D]", x.dtype, **sizes)


def check_gated_gemm(x, weight):
    """Check the arguments of `gated_gemm`, which documents the errors."""
    sizes = checks.check_array("x", x, "[T, D]")
    checks.check_array("weight", weight, "[D, 2, F]", x.dtype, **sizes)
