"""Top-k and top-p in plain XLA, without a sort.

Top-k and top-p each keep the tokens at or above a threshold. Bisection finds the threshold exactly,
one bit at a time, on integers that order like the floats. The 32 passes over the logits cost less
than a sort of a large vocabulary.
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
    """Return the lowest logit that top-k and top-p keep in each row.

    The threshold is minus infinity in rows without top-k and top-p.

    Args:
        logits: Logits, which determine the order of the tokens.
        weights: Probability of each token divided by the largest; 0 for tokens that min-p removes.
        top_k: Number of tokens to keep; 0 disables top-k.
        top_p: Probability to keep; 1 disables top-p.
    """
    keys = _ordered_bits(logits)
    floor = _top_k_threshold(keys, top_k)
    left = jnp.where(keys >= floor[:, None], weights, 0.0)
    return _from_bits(jnp.maximum(floor, _top_p_threshold(keys, left, top_p)))


def _ordered_bits(x: Float32[Array, "B V"]) -> UInt32[Array, "B V"]:
    """Return uint32 keys in the order of the floats; -0.0 and 0.0 have the same key."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0.0, 0.0, x), jnp.uint32)
    sign = jnp.uint32(0x80000000)
    return jnp.where(bits >= sign, ~bits, bits | sign)


def _from_bits(keys: UInt32[Array, "B"]) -> Float32[Array, "B"]:
    """Convert keys of `_ordered_bits` back to floats; keys below all floats give minus infinity."""
    sign = jnp.uint32(0x80000000)
    bits = jnp.where(keys >= sign, keys ^ sign, ~jnp.maximum(keys, ~_NEGATIVE_INFINITY))
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _largest_threshold(
    holds: Callable[[UInt32[Array, "B"]], Bool[Array, "B"]], like: UInt32[Array, "B"]
) -> UInt32[Array, "B"]:
    """Return the largest key for which `holds` is true, found one bit at a time from the top.

    `holds` must be true for the key 0. If `holds` is false for a key, it must be false for all
    larger keys. The search always takes 32 rounds: with a fixed number, a GPU runs the loop without
    a round trip to the host.
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

    # Always keep the most probable token, even if a tiny `top_p` rounds to 0 in float32.
    found = jnp.minimum(_largest_threshold(holds, keys[:, 0]), keys.max(axis=1))
    return jnp.where(top_p < 1.0, found, jnp.uint32(0))


def _exact_sum(weights: Float32[Array, "B V"]) -> Float32[Array, "B"]:
    """Return the sum of each row's weights, with bits that do not depend on the order of addition.

    Each weight must be from 0 to 1.

    The order in which XLA adds floats depends on the compiler and on the batch size B. With a float
    sum, a token at the threshold of top-p could be kept in one batch and removed in another. This
    function therefore splits each weight into fixed-point digits, and sums the digits as integers.
    A digit is so small that the sum of V digits fits in 32 bits. The digits of a weight have at
    least 36 bits together.
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
