"""SiLU(gate) * up in Pallas Triton.

Grid (row, tile of columns). One program computes:

    out[row, columns] = gate / (1 + 2 ** (-gate * log2(e))) * up, in float32, rounded

The kernel computes exp by the fast exp2, which is inexact for subnormal results. The error does not
matter, because the kernel adds 1 to the result. An exact exp would take most of the kernel's
instructions.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.gemm.tuning import GatedSiluConfig


def gated_silu(gate_up, *, config: GatedSiluConfig, interpret: bool):
    """Run the public op `gated_silu` in Pallas Triton."""
    rows, _, size = gate_up.shape
    return pl.pallas_call(
        functools.partial(_kernel, tile=config.tile),
        out_shape=jax.ShapeDtypeStruct((rows, size), gate_up.dtype),
        grid=(rows, pl.cdiv(size, config.tile)),
        compiler_params=plgpu.CompilerParams(num_warps=config.num_warps, num_stages=1),
        interpret=interpret,
        name="gated_silu",
    )(gate_up)


def _kernel(gate_up_ref, out_ref, *, tile):
    size = out_ref.shape[1]
    columns = pl.program_id(1) * tile + jnp.arange(tile, dtype=jnp.int32)
    row = jnp.full_like(columns, pl.program_id(0))
    inside = columns < size if size % tile else None

    def load(half):
        ref = gate_up_ref.at[row, jnp.full_like(columns, half), columns]
        values = plgpu.load(ref, mask=inside, other=None if inside is None else 0)
        return values.astype(jnp.float32)

    # The computation needs the gate first. Load `up` before the gate, so that the load of `up` has
    # started when the computation waits for the gate.
    up, gate = load(1), load(0)
    power = jnp.exp2(gate * jnp.float32(-math.log2(math.e)))
    activated = gate / (jnp.float32(1) + power) * up
    plgpu.store(out_ref.at[row, columns], activated.astype(out_ref.dtype), mask=inside)
