"""Products of numbers in eight bits (e4m3) in plain XLA, and the way to such numbers.

A GPU of compute capability 8.9 or more multiplies them as they are. Elsewhere they are widened,
which rounds nothing: bfloat16 and float32 have every number of e4m3.
"""

import jax.numpy as jnp
from jax import lax

from pallas_kernels.tuning import has_fp8
from pallas_kernels.types import FP8, FP8_GROUP, FP8_MAX, Backend

_MULTIPLE = 16
"""Of a matrix's sides, for cuBLASLt's products of such numbers."""


def to_fp8(x, scale):
    """See the public entry of the same name."""
    scaled = x.astype(jnp.float32) / scale
    # By comparison: what a minimum and a maximum make of NaN depends on the back end.
    scaled = jnp.where(scaled > jnp.float32(FP8_MAX), jnp.float32(FP8_MAX), scaled)
    return jnp.where(scaled < jnp.float32(-FP8_MAX), jnp.float32(-FP8_MAX), scaled).astype(FP8)


def groups(x):
    """Rows [T, C] as [T, ceil(C / FP8_GROUP), FP8_GROUP], with zeros at the end."""
    rows, depth = x.shape
    count = -(-depth // FP8_GROUP)
    padded = jnp.pad(x, ((0, 0), (0, count * FP8_GROUP - depth)))
    return padded.reshape(rows, count, FP8_GROUP)


def scaled_gemm(x, weight, x_scale, weight_scale, *, dtype, backend):
    """See the public entry of the same name."""
    sides = *x.shape, weight.shape[0]
    if not has_fp8(backend) or any(side % _MULTIPLE for side in sides):
        x, weight = x.astype(_wide(backend)), weight.astype(_wide(backend))
    return (_dot(x, weight) * x_scale[:, None] * weight_scale[None]).astype(dtype)


def block_scaled_gemm(x, weight, x_scale, weight_scale, rows_of_parts, *, dtype, backend):
    """See the public entry of the same name; widened and scaled before the product, which on a GPU
    rounds both to bfloat16."""
    depth, of_rows, first = x.shape[1], [], 0
    for rows in rows_of_parts:
        last = first + -(-rows // FP8_GROUP)
        of_rows.append(jnp.repeat(weight_scale[first:last], FP8_GROUP, axis=0)[:rows])
        first = last
    wide = _wide(backend)
    scaled = [
        (it.astype(jnp.float32) * jnp.repeat(scale, FP8_GROUP, axis=1)[:, :depth]).astype(wide)
        for it, scale in ((x, x_scale), (weight, jnp.concatenate(of_rows)))
    ]
    return _dot(*scaled).astype(dtype)


def _wide(backend):
    """In which all numbers of e4m3 are multiplied where they are not multiplied as they are."""
    return jnp.float32 if backend is Backend.XLA else jnp.bfloat16


def _dot(x, weight):
    """x @ weight.T in float32; float32 factors are not rounded to TF32."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    axes = (((1,), (1,)), ((), ()))
    return lax.dot_general(x, weight, axes, precision, preferred_element_type=jnp.float32)
