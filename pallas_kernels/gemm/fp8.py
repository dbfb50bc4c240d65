"""Products of numbers in eight bits (e4m3) in plain XLA, and the way to such numbers.

A GPU of compute capability 8.9 or more multiplies them as they are. Elsewhere they are widened,
which rounds nothing: bfloat16 and float32 have every number of e4m3.
"""

import jax.numpy as jnp

from pallas_kernels.gemm.xla import einsum
from pallas_kernels.tuning import has_fp8
from pallas_kernels.types import FP8, FP8_GROUP_SIZE, FP8_MAX, FP8_MIN_ABSMAX, Backend

_CUBLASLT_ALIGNMENT = 16
"""Of a matrix's sides, for cuBLASLt's products of such numbers."""

_MAX_FLOAT32_ROWS = 256
"""With more, XLA's product on a GPU is kept in bfloat16 until it is multiplied by the scales: in
float32 it would take twice the memory's time."""


def to_fp8(x, scale):
    """See the public entry of the same name."""
    scaled = x.astype(jnp.float32) / scale
    # By comparison: what a minimum and a maximum make of NaN depends on the back end.
    scaled = jnp.where(scaled > jnp.float32(FP8_MAX), jnp.float32(FP8_MAX), scaled)
    return jnp.where(scaled < jnp.float32(-FP8_MAX), jnp.float32(-FP8_MAX), scaled).astype(FP8)


def group_columns(x):
    """Rows [T, C] as [T, ceil(C / FP8_GROUP), FP8_GROUP], with zeros at the end."""
    rows, depth = x.shape
    count = -(-depth // FP8_GROUP_SIZE)
    padded = jnp.pad(x, ((0, 0), (0, count * FP8_GROUP_SIZE - depth)))
    return padded.reshape(rows, count, FP8_GROUP_SIZE)


def quantize_rows(x, static_scales=None, *, grouped, reduce_max=None):
    """See the public entry of the same name."""
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
    """See the public entry of the same name; one partial.

    XLA makes a product of two operands in FP8 cuBLASLt's as it is, with both of its scales 1: those
    are numbers, where ours are vectors, which multiply what comes out in the kernel that reads it.
    Rows are padded to what cuBLASLt takes; other sides that it does not take are widened.
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
    """See the public entry of the same name; widened and scaled before the product, which on a GPU
    rounds both to bfloat16."""
    depth, row_scales, first = x.shape[1], [], 0
    for rows in rows_per_part:
        last = first + -(-rows // FP8_GROUP_SIZE)
        row_scales.append(jnp.repeat(weight_scale[first:last], FP8_GROUP_SIZE, axis=0)[:rows])
        first = last
    wide = _wide_dtype(backend)
    scaled = [
        (it.astype(jnp.float32) * jnp.repeat(scale, FP8_GROUP_SIZE, axis=1)[:, :depth]).astype(wide)
        for it, scale in ((x, x_scale), (weight, jnp.concatenate(row_scales)))
    ]
    return einsum("tc,fc->tf", *scaled, out=jnp.float32).astype(dtype)


def _wide_dtype(backend):
    """In which all numbers of e4m3 are multiplied where they are not multiplied as they are."""
    return jnp.float32 if backend is Backend.XLA else jnp.bfloat16
