"""GEMMs and the gated activation in plain XLA."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

TILE_ROWS = 8  # rows per tile of `map_row_tiles`


def map_row_tiles(function: Callable[..., Any], *arrays: jax.Array) -> Any:
    """Call `function` on tiles of `TILE_ROWS` rows, one after another, and join the results.

    The order in which XLA adds the numbers of a sum may depend on the number of rows. In tiles,
    `function` always gets the same shapes, so a row's bits do not depend on the number of rows. The
    loop has at least two steps, because XLA would fuse a single step with the surrounding code,
    which changes the rounding.

    Args:
        function: A function whose result row i depends only on row i of the arguments.
        arrays: Arguments with the same number of rows.
    """
    num_rows = arrays[0].shape[0]
    missing = max(2 * TILE_ROWS - num_rows, -num_rows % TILE_ROWS)

    def split(array: jax.Array) -> jax.Array:
        padded = jnp.pad(array, ((0, missing), *((0, 0),) * (array.ndim - 1)))
        return padded.reshape(-1, TILE_ROWS, *array.shape[1:])

    results = lax.map(lambda tiles: function(*tiles), tuple(map(split, arrays)))
    return jax.tree.map(lambda it: it.reshape(-1, *it.shape[2:])[:num_rows], results)


def sum_partials(
    partials: Float[Array, "partials *axes"], dtype: DTypeLike
) -> Float[Array, "*axes"]:
    """Add split-K partials in float32, and return the sum in dtype `dtype`."""
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


def batch_invariant_gemm(x, weight, *, transposed, dtype):
    """Run the public op `batch_invariant_gemm` in plain XLA."""
    subscripts = "tc,dc->td" if transposed else "tc,cd->td"
    return map_row_tiles(lambda tile: einsum(subscripts, tile, weight, out=dtype), x)


def gate_up(x, weight):
    """Return the gate and up projections [T, 2, F] of rows [T, D] by a weight [D, 2, F]."""
    return einsum("td,dcf->tcf", x, weight)


def gated_silu(gate_up):
    """Run the public op `gated_silu` in plain XLA."""
    gate = jax.nn.silu(gate_up[:, 0].astype(jnp.float32))
    return (gate * gate_up[:, 1].astype(jnp.float32)).astype(gate_up.dtype)
