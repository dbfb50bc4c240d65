"""GEMMs and the gated activation in plain XLA."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float


def sum_partials(
    partials: Float[Array, "partials *axes"], dtype: DTypeLike
) -> Float[Array, "*axes"]:
    """Return the sum of split-K partials in dtype `dtype`, added in float32."""
    one = partials.shape[0] == 1
    total = partials[0] if one else jnp.sum(partials.astype(jnp.float32), axis=0)
    return total.astype(dtype)


def einsum(
    subscripts: str,
    x: Float[Array, "..."],
    weight: Float[Array, "..."],
    out: DTypeLike | None = None,
) -> Float[Array, "..."]:
    """Return an einsum of activations and weights of one dtype, accumulated in float32.

    The result has dtype `out`, by default x's dtype. float32 factors use full precision, since a
    GPU would round the factors to TF32 by default.
    """
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    out = x.dtype if out is None else out
    return jnp.einsum(subscripts, x, weight, precision=precision, preferred_element_type=out)


def split_k_gemm(x, weight, num_splits):
    """Return x @ weight as `num_splits` split-K partials, computed in plain XLA."""
    if num_splits == 1:
        return einsum("tc,cd->td", x, weight)[None]
    x = x.reshape(x.shape[0], num_splits, -1)
    weight = weight.reshape(num_splits, -1, weight.shape[1])
    return jnp.einsum("tsc,scd->std", x, weight, preferred_element_type=jnp.float32)


def gate_up(x, weight):
    """Return the gate and up projections [T, 2, F] of rows [T, D] by a weight [D, 2, F]."""
    return einsum("td,dcf->tcf", x, weight)


def gated_silu(gate_up):
    """Run the public op `gated_silu` in plain XLA."""
    gate = jax.nn.silu(gate_up[:, 0].astype(jnp.float32))
    return (gate * gate_up[:, 1].astype(jnp.float32)).astype(gate_up.dtype)
