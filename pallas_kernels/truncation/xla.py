"""Top-k and top-p in plain XLA, without a sort.

Each keeps the tokens at or above some logit. That threshold is found by bisection, one bit at a
time, on integers that are in the order of the floats: exact, and 32 passes over the logits where a
sort of a large vocabulary costs more.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32, UInt32

_NEGATIVE_INFINITY = np.uint32(0xFF800000)


def truncation_threshold(
    logits: Float32[Array, "B V"],
    weights: Float32[Array, "B V"],
    top_k: Int32[Array, "B"],
    top_p: Float32[Array, "B"],
) -> Float32[Array, "B"]:
    """The least logit that top-k and top-p keep; minus infinity where neither is on.

    Args:
        logits: the order of the tokens.
        weights: their probabilities relative to the top one's; 0 for those that min-p leaves out.
        top_k: 0 is off.
        top_p: 1 is off.
    """
    keys = _ordered_bits(logits)
    floor = _top_k_threshold(keys, top_k)
    left = jnp.where(keys >= floor[:, None], weights, 0.0)
    return _from_bits(jnp.maximum(floor, _top_p_threshold(keys, left, top_p)))


def _ordered_bits(x: Float32[Array, "B V"]) -> UInt32[Array, "B V"]:
    """Integers in the order of the floats: equal floats, -0.0 and 0.0 too, have equal ones."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0.0, 0.0, x), jnp.uint32)
    sign = jnp.uint32(0x80000000)
    return jnp.where(bits >= sign, ~bits, bits | sign)


def _from_bits(keys: UInt32[Array, "B"]) -> Float32[Array, "B"]:
    """The floats of `_ordered_bits`; minus infinity for what lies below all."""
    sign = jnp.uint32(0x80000000)
    bits = jnp.where(keys >= sign, keys ^ sign, ~jnp.maximum(keys, ~_NEGATIVE_INFINITY))
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _largest_threshold(
    holds: Callable[[UInt32[Array, "B"]], Bool[Array, "B"]], like: UInt32[Array, "B"]
) -> UInt32[Array, "B"]:
    """The largest threshold at which `holds`, one bit at a time from the top.

    `holds` is true at 0 and, once false, stays so. 32 rounds whatever the values: a count known
    to the compiler, so that a GPU runs them without asking the host.
    """

    def narrow(step: Int32[Array, ""], found: UInt32[Array, "B"]) -> UInt32[Array, "B"]:
        trial = found | (jnp.uint32(0x80000000) >> step.astype(jnp.uint32))
        return jnp.where(holds(trial), trial, found)

    return jax.lax.fori_loop(0, 32, narrow, jnp.zeros_like(like))


def _top_k_threshold(keys: UInt32[Array, "B V"], top_k: Int32[Array, "B"]) -> UInt32[Array, "B"]:
    def holds(trial: UInt32[Array, "B"]) -> Bool[Array, "B"]:
        return (keys >= trial[:, None]).sum(axis=1, dtype=jnp.int32) >= top_k

    found = _largest_threshold(holds, keys[:, 0])
    return jnp.where(top_k > 0, found, jnp.uint32(0))


def _top_p_threshold(
    keys: UInt32[Array, "B V"], weights: Float32[Array, "B V"], top_p: Float32[Array, "B"]
) -> UInt32[Array, "B"]:
    wanted = top_p * _exact_sum(weights)

    def holds(trial: UInt32[Array, "B"]) -> Bool[Array, "B"]:
        return _exact_sum(jnp.where(keys >= trial[:, None], weights, 0.0)) >= wanted

    # The most probable token stays, though a tiny top_p be 0 in float32.
    found = jnp.minimum(_largest_threshold(holds, keys[:, 0]), keys.max(axis=1))
    return jnp.where(top_p < 1.0, found, jnp.uint32(0))


def _exact_sum(weights: Float32[Array, "B V"]) -> Float32[Array, "B"]:
    """Each row's sum of weights in [0, 1], the same to the last bit in whatever order it is taken.

    A sum of floats depends on how the compiler splits it, hence on B, and a token at top-p's edge
    would come and go with the batch. So the sum is one of fixed-point digits, each so small that
    V of them fit in 32 bits, and 36 bits of fraction or more in all.
    """
    bits = 32 - weights.shape[1].bit_length()
    total, rest = jnp.zeros_like(weights[:, 0]), weights
    for digit in range(1, -(-36 // bits) + 1):
        rest = rest * 2.0**bits
        whole = jnp.floor(rest)
        rest = rest - whole
        summed = whole.astype(jnp.uint32).sum(axis=1, dtype=jnp.uint32)
        total = total + summed.astype(jnp.float32) * 2.0 ** (-bits * digit)
    return total
