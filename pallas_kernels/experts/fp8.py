"""Expert GEMMs of FP8 matrices in plain XLA.

The GEMMs run the loop over tiles of xla.py. Each tile runs a product of `pallas_kernels.gemm.fp8`,
with the weight and the scales of one expert.
"""

from functools import partial

import jax.numpy as jnp

from pallas_kernels.experts.xla import expert_weight, gated_rows, sum_choices, take_rows
from pallas_kernels.gemm import fp8


def scaled_gated_gemm(x, weight, x_scale, weight_scale, routing, *, dtype, backend):
    """Run the public op `scaled_expert_gated_gemm` in plain XLA."""
    multiply = _tile_product(fp8.scaled_gemm, x, weight, x_scale, weight_scale, backend)
    return gated_rows(multiply, routing, weight.shape[1] // 2, dtype)


def scaled_down_gemm(x, weight, x_scale, weight_scale, routing, *, dtype, backend):
    """Run the public op `scaled_expert_down_gemm` in plain XLA."""
    multiply = _tile_product(fp8.scaled_gemm, x, weight, x_scale, weight_scale, backend)
    return sum_choices(multiply, routing, weight.shape[1], dtype)


def block_scaled_gated_gemm(x, weight, x_scale, weight_scale, routing, *, dtype, backend):
    """Run the public op `block_scaled_expert_gated_gemm` in plain XLA."""
    gemm = partial(fp8.block_scaled_gemm, rows_per_part=(weight.shape[1] // 2,) * 2)
    multiply = _tile_product(gemm, x, weight, x_scale, weight_scale, backend)
    return gated_rows(multiply, routing, weight.shape[1] // 2, dtype)


def block_scaled_down_gemm(x, weight, x_scale, weight_scale, routing, *, dtype, backend):
    """Run the public op `block_scaled_expert_down_gemm` in plain XLA."""
    gemm = partial(fp8.block_scaled_gemm, rows_per_part=(weight.shape[1],))
    multiply = _tile_product(gemm, x, weight, x_scale, weight_scale, backend)
    return sum_choices(multiply, routing, weight.shape[1], dtype)


def _tile_product(gemm, x, weight, x_scale, weight_scale, backend):
    """Return a function of an expert and of row indices that multiplies rows of x by the expert.

    Args:
        gemm: Function of rows, a weight and their scales that returns the product.
        x, weight: FP8 rows, and the FP8 weights of all experts.
        x_scale, weight_scale: Scales of the rows, and of the weights of all experts.
        backend: The backend of the public op.
    """

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
