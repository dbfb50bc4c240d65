"""Quantization to FP8 (e4m3) and FP8 GEMMs in plain XLA.

GPUs of compute capability 8.9 or later multiply FP8 matrices. Other devices convert the matrices to
bfloat16 or float32 first, which is exact.
"""

import jax.numpy as jnp

from pallas_kernels.gemm.xla import einsum
from pallas_kernels.tuning import has_fp8
from pallas_kernels.types import FP8, FP8_GROUP_SIZE, FP8_MAX, FP8_MIN_ABSMAX, Backend

_CUBLASLT_ALIGNMENT = 16
"""The sides of a matrix must be multiples of this number for cuBLASLt's FP8 products."""

_MAX_FLOAT32_ROWS = 256
"""The maximum number of rows for which XLA's FP8 product on a GPU is stored in float32.

A larger product is stored in bfloat16 until the scales are applied, which halves the memory
traffic.
"""


def to_fp8(x, scale):
    """Run the public op `to_fp8` in plain XLA."""
    scaled = x.astype(jnp.float32) / scale
    # Clip by comparisons, which keep NaN. `minimum` and `maximum` may drop NaN on some backends.
    scaled = jnp.where(scaled > jnp.float32(FP8_MAX), jnp.float32(FP8_MAX), scaled)
    return jnp.where(scaled < jnp.float32(-FP8_MAX), jnp.float32(-FP8_MAX), scaled).astype(FP8)


def group_columns(x):
    """Reshape rows [T, C] to [T, groups, FP8_GROUP_SIZE], with zeros after the last column."""
    rows, depth = x.shape
    count = -(-depth // FP8_GROUP_SIZE)
    padded = jnp.pad(x, ((0, 0), (0, count * FP8_GROUP_SIZE - depth)))
    return padded.reshape(rows, count, FP8_GROUP_SIZE)


def quantize_rows(x, static_scales=None, *, grouped, reduce_max=None):
    """Run the public op `quantize_rows` in plain XLA."""
    if static_scales is not None:
        scale = jnp.max(static_scales)
        return to_fp8(x, scale), jnp.broadcast_to(scale, (x.shape[0], 1))
    grouped_rows = group_columns(x) if grouped else x[:, None]
    largest = jnp.max(jnp.abs(grouped_rows), axis=2).astype(jnp.float32)
    largest = largest if reduce_max is None else reduce_max(largest)
    scale = jnp.maximum(largest, jnp.float32(FP8_MIN_ABSMAX)) / jnp.float32(FP8_MAX)
    values = to_fp8(grouped_rows, scale[..., None])
    return values.reshape(x.shape[0], -1)[:, : x.shape[1]], scale


def scaled_gemm(x, weight, x_scale, weight_scale, *, dtype, backend):
    """Run the public op `scaled_gemm` in plain XLA; return the product, not partials.

    On a GPU with FP8 support, XLA calls cuBLASLt, which supports only one scale per matrix. The row
    and column scales are therefore applied to the product. The number of rows is padded to a
    multiple of 16, as cuBLASLt needs. If the depth or the width is not a multiple of 16, both
    matrices are converted to a wider dtype instead.
    """
    rows, sides, out = x.shape[0], (x.shape[1], weight.shape[0]), jnp.float32
    if not has_fp8(backend) or any(side % _CUBLASLT_ALIGNMENT for side in sides):
        x, weight = x.astype(_wide_dtype(backend)), weight.astype(_wide_dtype(backend))
    else:
        x = jnp.pad(x, ((0, -rows % _CUBLASLT_ALIGNMENT), (0, 0)))
        out = jnp.bfloat16 if rows > _MAX_FLOAT32_ROWS and dtype == jnp.bfloat16 else out
    product = einsum("tc,fc->tf", x, weight, out)[:rows].astype(jnp.float32)
    return (product * x_scale[:, None] * weight_scale[None]).astype(dtype)


def block_scaled_gemm(x, weight, x_scale, weight_scale, rows_per_part, *, dtype, backend):
    """Run the public op `block_scaled_gemm` in plain XLA; return the product, not partials.

    Both matrices are converted to a wider dtype and scaled before the product. On a GPU the wider
    dtype is bfloat16, so scaling rounds the matrices.
    """
    depth, row_scales, first = x.shape[1], [], 0
    for rows in rows_per_part:
        last = first + -(-rows // FP8_GROUP_SIZE)
        row_scales.append(jnp.repeat(weight_scale[first:last], FP8_GROUP_SIZE, axis=0)[:rows])
        first = last
    wide = _wide_dtype(backend)
    scaled = [
        (matrix.astype(jnp.float32) * jnp.repeat(scale, FP8_GROUP_SIZE, axis=1)[:, :depth]).astype(
            wide
        )
        for matrix, scale in ((x, x_scale), (weight, jnp.concatenate(row_scales)))
    ]
    return einsum("tc,fc->tf", *scaled, out=jnp.float32).astype(dtype)


def _wide_dtype(backend):
    """Return the dtype to which FP8 matrices are converted where the device or XLA cannot multiply
    FP8."""
    return jnp.float32 if backend is Backend.XLA else jnp.bfloat16
