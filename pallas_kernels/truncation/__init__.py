"""The tokens that min-p, top-k and top-p keep."""

import math

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from pallas_kernels import checks
from pallas_kernels.truncation import triton, xla
from pallas_kernels.types import Backend


def truncation_mask(
    logits: Float32[Array, "B V"],
    *,
    temperature: Float32[Array, "B"],
    min_p: Float32[Array, "B"],
    top_k: Int32[Array, "B"],
    top_p: Float32[Array, "B"],
    backend: Backend,
) -> Bool[Array, "B V"]:
    """The tokens that min-p, top-k and top-p, in this order, keep.

    Exact and without a sort. Tokens as probable as the least probable one kept are kept too, and
    the most probable one always is. What a row keeps depends on no other row.

    Args:
        logits: finite or minus infinity; one of each row is finite.
        temperature: positive; the logits are divided by it, for min-p and top-p to count with.
        min_p: leave out tokens less probable than this share of the most probable one; 0 is off.
        top_k: keep so many; 0, or V and more, is off.
        top_p: keep the fewest most probable tokens that have this share of the probability that
            min-p and top-k left; 1 is off.
        backend: which implementation runs.

    Raises:
        ValueError: shapes that do not fit.
        TypeError: dtypes other than float32, and int32 of top_k.
    """
    check_truncation(logits, temperature, min_p, top_k, top_p)
    backend = Backend(backend)
    if not logits.size:
        return jnp.ones(logits.shape, jnp.bool_)
    highest = logits.max(axis=1, keepdims=True)
    relative = (logits - highest) / temperature[:, None]
    passes_min_p = relative >= jnp.log(min_p)[:, None]  # log(0) = -inf keeps all
    top_k = jnp.where(top_k < logits.shape[1], top_k, 0)
    if backend is Backend.XLA:
        weights = jnp.where(passes_min_p, jnp.exp(relative), 0.0)
        threshold = xla.truncation_threshold(logits, weights, top_k, top_p)
    else:
        log2_e = math.log2(math.e)
        threshold = triton.truncation_threshold(
            logits,
            jnp.stack([highest[:, 0], log2_e / temperature, jnp.log2(min_p), top_p], axis=1),
            top_k,
            interpret=backend is Backend.INTERPRET,
        )
    return passes_min_p & (logits >= threshold[:, None])


def check_truncation(logits, temperature, min_p, top_k, top_p):
    """A matrix of logits, and a number a row."""
    sizes = checks.check_array("logits", logits, "[B, V]", jnp.float32)
    rows = {"temperature": temperature, "min_p": min_p, "top_p": top_p}
    for name, array in rows.items():
        checks.check_array(name, array, "[B]", jnp.float32, **sizes)
    checks.check_array("top_k", top_k, "[B]", jnp.int32, **sizes)
