"""Fused layer: everything between the attentions of two layers, for a small decode step.

The public op checks its arguments and runs the Hopper kernel in one launch (hopper.py), or the
equivalent ops in plain XLA.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels import checks
from pallas_kernels.gemm.xla import gate_up, gated_silu, split_k_gemm
from pallas_kernels.hopper_ops import EMPTY_WORD
from pallas_kernels.layer import hopper
from pallas_kernels.norm import add_rms_norm
from pallas_kernels.tuning import device_kind, num_cores
from pallas_kernels.types import Backend, FusedLayerWeights


def new_exchange_memory(
    weights: FusedLayerWeights, *, num_tokens: int, backend: Backend
) -> Int32[Array, "W"] | None:
    """Return an array for the argument `exchange` of the first `fused_layer` of a step, or None.

    The programs of the fused kernel pass split-K partials to each other through the array (the
    exchange memory). None means that the kernel cannot run, or is not faster than the separate ops.
    The kernel needs a Hopper GPU, JAX 0.11 or later, bfloat16 and exactly 8 rows. The residual
    stream must have fewer than 2,048 columns, and all widths must be multiples of 128.
    """
    plan = _plan(weights, num_tokens, Backend(backend))
    if plan is None:
        return None
    return jnp.full((plan.num_words,), EMPTY_WORD, jnp.int32)


def fused_layer(
    attention_output: Float[Array, "T C"],
    hidden: Float[Array, "T D"],
    weights: FusedLayerWeights,
    num_rows: Int32[Array, ""],
    exchange: Int32[Array, "W"],
    *,
    eps: float,
    backend: Backend,
) -> tuple[Float[Array, "T D"], Float[Array, "partials T Q"], Int32[Array, "W"]]:
    """Compute everything between the attention of one layer and the attention of the next.

    The op is for the few rows of a small decode step and is deterministic. SiLU and norms compute
    in float32:

        hidden += attention_output @ output
        inner = silu(gate) * up, where gate and up are projections of RMSNorm(hidden)
        hidden += inner @ down
        qkv = RMSNorm(hidden) @ next_qkv

    Args:
        attention_output: Attention outputs of the layer's heads, concatenated.
        hidden: Residual stream before the layer.
        weights: Weights of the layer, and the next layer's norm and fused projection.
        num_rows: Number of valid rows; these come first. Other rows of the results may hold
            anything.
        exchange: Exchange memory, from `new_exchange_memory` or from the previous `fused_layer` of
            the step. It cannot be used again after this call.
        eps: Epsilon of both norms.
        backend: The implementation to run.

    Returns:
        The residual stream after the layer; the next layer's queries, keys and values as split-K
        partials; and the exchange memory for the step's next `fused_layer` of the same sizes.

    Raises:
        ValueError: Shapes do not fit.
        TypeError: Dtypes differ or are not bfloat16, float16 or float32.
    """
    check_fused_layer(attention_output, hidden, weights, num_rows, exchange, eps)
    plan = _plan(weights, hidden.shape[0], Backend(backend))
    if plan is None:
        return *run_unfused(attention_output, hidden, weights, eps=eps), exchange
    if exchange.shape != (plan.num_words,):
        raise ValueError(
            f"exchange has {exchange.shape[0]} words, but this layer needs {plan.num_words}: "
            "create it with new_exchange_memory from this layer's weights and number of rows"
        )
    return hopper.fused_layer(
        attention_output, hidden, weights, num_rows, exchange, eps=eps, plan=plan
    )


def _plan(weights, num_tokens, backend):
    """Return the `LayerPlan` of the Hopper kernel, or None if the separate ops run instead."""
    # In JAX before 0.11, Mosaic GPU kernels cannot have mutable arguments.
    if jax.__version_info__ < (0, 11):
        return None
    (attention_output, hidden), inner = weights.output.shape, weights.down.shape[0]
    return hopper.layer_plan(
        hopper.LayerSizes(hidden, attention_output, inner, weights.next_qkv.shape[1]),
        num_tokens=num_tokens,
        dtype=weights.output.dtype.name,
        num_cores=num_cores(backend),
        device_kind=device_kind(backend),
    )


def check_fused_layer(attention_output, hidden, weights, num_rows, exchange, eps):
    """Check the shapes and dtypes of the arguments of `fused_layer`, which documents the errors."""
    sizes = checks.check_array("hidden", hidden, "[T, D]")
    sizes |= checks.check_array(
        "attention_output", attention_output, "[T, C]", hidden.dtype, **sizes
    )
    axes = ("[C, D]", "[D]", "[D, 2, F]", "[F, D]", "[D]", "[D, Q]")
    for name, weight, axis in zip(weights._fields, weights, axes, strict=True):
        sizes |= checks.check_array(f"weights.{name}", weight, axis, hidden.dtype, **sizes)
    checks.check_array("num_rows", num_rows, "[]", jnp.int32)
    checks.check_array("exchange", exchange, "[W]", jnp.int32)
    checks.check_eps("eps", eps)


def run_unfused(attention_output, hidden, weights, *, eps):
    """Run the fused layer as separate ops in plain XLA.

    Returns:
        The residual stream; and the next layer's queries, keys and values [1, T, Q], as split-K
        partials with a single partial.
    """
    options = {"eps": eps, "backend": Backend.XLA}
    update = split_k_gemm(attention_output, weights.output, 1)
    rows, hidden = add_rms_norm(hidden, update, weights.norm, **options)
    inner = gated_silu(gate_up(rows, weights.gate_up))
    update = split_k_gemm(inner, weights.down, 1)
    rows, hidden = add_rms_norm(hidden, update, weights.next_norm, **options)
    return hidden, split_k_gemm(rows, weights.next_qkv, 1)
