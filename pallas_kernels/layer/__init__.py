"""All between two attentions of a small decode step, in one launch."""

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
    """What `fused_layer` of a step's first layer takes as its exchange memory.

    None where the op gains nothing over those it stands for, or cannot run as one: on other devices
    than Hopper GPUs, before JAX 0.11, in other dtypes than bfloat16, for another number of rows
    than 8, for a stream 2,048 wide or wider, or for widths that are not multiples of 128.
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
    """From one layer's attention to the next one's, for the few rows of a small decode step.

    hidden + attended @ output, RMSNorm, silu(gate) * up, its sum with the stream after down,
    the next RMSNorm, the next layer's fused projection; SiLU and norms in float32.

    Args:
        attended: what the layer's heads have attended to, side by side.
        hidden: the residual stream before the layer.
        weights: of the layer, and the next one's norm and projection.
        num_rows: rows that matter, the first ones; the results' other rows may hold anything.
        exchange: from `new_exchange_memory` or the step's op before this one; used up.
        eps: of both norms, under the root.
        backend: which implementation runs.

    Returns:
        The stream after the layer; the next layer's queries, keys and values as split-K
        partials; the exchange memory for the step's next op of the same sizes and rows.
        Deterministic.

    Raises:
        ValueError: shapes that do not fit.
        TypeError: dtypes that differ or are not bfloat16, float16 or float32.
    """
    check_fused_layer(attention_output, hidden, weights, num_rows, exchange, eps)
    plan = _plan(weights, hidden.shape[0], Backend(backend))
    if plan is None:
        return *run_unfused(attention_output, hidden, weights, eps=eps), exchange
    if exchange.shape != (plan.num_words,):
        raise ValueError(
            f"exchange has {exchange.shape[0]} words, this layer needs {plan.num_words}: "
            "make it with new_exchange_memory, with this layer's weights and rows"
        )
    return hopper.fused_layer(
        attention_output, hidden, weights, num_rows, exchange, eps=eps, plan=plan
    )


def _plan(weights, num_tokens, backend):
    """The Hopper kernel's plan, or None."""
    if jax.__version_info__ < (0, 11):  # whose Mosaic GPU kernels have no mutable arguments
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
    """A layer's weights that fit each other and the rows."""
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
    """The same in plain XLA; returns the stream and the next layer's qkv, not split."""
    options = {"eps": eps, "backend": Backend.XLA}
    update = split_k_gemm(attention_output, weights.output, 1)
    rows, hidden = add_rms_norm(hidden, update, weights.norm, **options)
    inner = gated_silu(gate_up(rows, weights.gate_up))
    update = split_k_gemm(inner, weights.down, 1)
    rows, hidden = add_rms_norm(hidden, update, weights.next_norm, **options)
    return hidden, split_k_gemm(rows, weights.next_qkv, 1)
