"""Truncation of sampling distributions: min-p, top-k and top-p.

The public op checks its arguments, then runs xla.py or triton.py, depending on the backend.
"""

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
    """Return a mask of the tokens that remain after min-p, top-k and top-p, in this order.

    The result is exact, and the op does not sort. If the least probable remaining token has ties,
    all tied tokens remain. The most probable token always remains. The mask of a row depends only
    on that row.

    Args:
        logits: Logits, finite or minus infinity. Each row has at least one finite logit.
        temperature: Positive temperatures. min-p and top-p use the probabilities after division of
            the logits by the temperature.
        min_p: Remove tokens less probable than `min_p` times the most probable token; 0 disables
            min-p.
        top_k: Keep the `top_k` most probable tokens; 0, or V and more, disables top-k.
        top_p: Keep the smallest set of most probable tokens that has at least the fraction `top_p`
            of the probability that min-p and top-k left; 1 disables top-p.
        backend: The implementation to run.

    Raises:
        ValueError: Shapes do not match.
        TypeError: A dtype is not supported.
    """
    check_truncation(logits, temperature, min_p, top_k, top_p)
    backend = Backend(backend)
    if not logits.size:
        return jnp.ones(logits.shape, jnp.bool_)
    highest = logits.max(axis=1, keepdims=True)
    relative = (logits - highest) / temperature[:, None]
    # If min_p is 0, log(min_p) is -inf, and all tokens pass.
    passes_min_p = relative >= jnp.log(min_p)[:, None]
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
    """Check the arguments of `truncation_mask`, which documents the errors."""
    sizes = checks.check_array("logits", logits, "[B, V]", jnp.float32)
    rows = {"temperature": temperature, "min_p": min_p, "top_p": top_p}
    for name, array in rows.items():
        checks.check_array(name, array, "[B]", jnp.float32, **sizes)
    checks.check_array("top_k", top_k, "[B]", jnp.int32, **sizes)
