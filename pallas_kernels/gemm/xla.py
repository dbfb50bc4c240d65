"""GEMMs and the gated activation in plain XLA."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float


def sum_partials(
    partials: Float[Array, "partials *axes"], dtype: DTypeLike
) -> Float[Array, "*axes"]:
    """The sum of split-K partials, added in float32."""
    one = partials.shape[0] == 1
    total = partials[0] if one else jnp.sum(partials.astype(jnp.float32), axis=0)
    return total.astype(dtype)


def einsum(
    subscripts: str,
    x: Float[Array, "..."],
    weight: Float[Array, "..."],
    out: DTypeLike | None = None,
) -> Float[Array, "..."]:
    """An einsum of activations and weights of one dtype, accumulated in float32; in `out` or x's
    dtype.

    float32 models keep full precision where a GPU would round the factors to TF32.
    """
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    out = x.dtype if out is None else out
    return jnp.einsum(subscripts, x, weight, precision=precision, preferred_element_type=out)


def split_k_gemm(x, weight, num_splits):
    """See the public entry of the same name."""
    if num_splits == 1:
        return einsum("tc,cd->td", x, weight)[None]
    x = x.reshape(x.shape[0], num_splits, -1)
    weight = weight.reshape(num_splits, -1, weight.shape[1])
    return jnp.einsum("tsc,scd->std", x, weight, preferred_element_type=jnp.float32)


def gate_up(x, weight):
    """Rows [T, 2, F] of a GEMM by weight [D, 2, F]."""
    return einsum("td,dcf->tcf", x, weight)


def gated_silu(gate_up):
    """See the public entry of the same name."""
    gate = jax.nn.silu(gate_up[:, 0].astype(jnp.float32))
    return (gate * gate_up[:, 1].astype(jnp.float32)).astype(gate_up.dtype)
