"""Expert GEMMs of FP8 matrices in plain XLA.

The GEMMs run the loop over tiles of xla.py. Each tile runs a product of `pallas_kernels.gemm.fp8`,
with the weight and the scales of one expert.
"""

from functools import partial

import jax.numpy as jnp

from pallas_kernels.experts.xla import expert_weight, gated_rows, sum_choices, take_rows
from pallas_kernels.gemm import fp8


def gated_gemm(x, weight, x_scale, weight_scale, routing, *, dtype, backend):
    """Run `scaled_expert_gated_gemm`, or `block_scaled_expert_gated_gemm`, in plain XLA."""
    width = weight.shape[1] // 2
    multiply = _tile_product(x, weight, x_scale, weight_scale, (width, width), backend)
    return gated_rows(multiply, routing, width, dtype)


def down_gemm(x, weight, x_scale, weight_scale, routing, *, dtype, backend):
    """Run `scaled_expert_down_gemm`, or `block_scaled_expert_down_gemm`, in plain XLA."""
    width = weight.shape[1]
    multiply = _tile_product(x, weight, x_scale, weight_scale, (width,), backend)
    return sum_choices(multiply, routing, width, dtype)


def _tile_product(x, weight, x_scale, weight_scale, rows_per_part, backend):
    """Return a function `multiply(expert, rows)` that multiplies rows of x by an expert's weight.

    Args:
        x: FP8 rows.
        weight: FP8 weights of all experts.
        x_scale: Scales [rows], or [rows, groups] if each group of 128 columns has a scale.
        weight_scale: Scales of the weights of all experts: one per block if `x_scale` has groups,
            else one per weight row.
        rows_per_part: Number of weight rows of each projection of an expert: gate and up, or down.
        backend: The backend of the public op.
    """
    gemm = fp8.scaled_gemm
    if x_scale.ndim == 2:
        gemm = partial(fp8.block_scaled_gemm, rows_per_part=rows_per_part)

    def multiply(expert, rows):
        return gemm(
            take_rows(x, rows),
            expert_weight(weight, expert),
            take_rows(x_scale, rows),
            weight_scale[expert],
            dtype=jnp.float32,
            backend=backend,
        )

    return multiply
