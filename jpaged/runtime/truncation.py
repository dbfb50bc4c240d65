"""min-p, top-k and top-p without a sort.

Each filter keeps the tokens at or above some logit. That threshold is found by bisection, one bit
at a time, on integers that are in the order of the floats: exact, and 32 passes over the logits
where a sort of a large vocabulary costs more.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from jpaged.runtime.sampling_state import SamplingRows


def truncate(scaled: Float32[Array, "B V"], rows: SamplingRows) -> Float32[Array, "B V"]:
    """min-p, top-k and top-p: -inf for the tokens left out, the others as they are.

    Each filter is a threshold on the logit, found without a sort, so tokens as probable as the
    least probable one kept are kept too. top-p counts the probability that min-p and top-k left.
    """
    keys = _ordered_bits(scaled)
    relative = scaled - scaled.max(axis=1, keepdims=True)
    floor = _min_p_threshold(keys, relative, rows.min_p)
    floor = jnp.maximum(floor, _top_k_threshold(keys, rows.top_k))
    floor = jnp.maximum(floor, _top_p_threshold(keys, relative, floor, rows.top_p))
    return jnp.where(keys >= floor[:, None], scaled, -jnp.inf)


def _ordered_bits(x: Float32[Array, "B V"]) -> UInt32[Array, "B V"]:
    """Integers in the order of the floats: equal floats, -0.0 and 0.0 too, have equal ones."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0.0, 0.0, x), jnp.uint32)
    sign = jnp.uint32(0x80000000)
    return jnp.where(bits >= sign, ~bits, bits | sign)


def _largest(
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


def _min_p_threshold(
    keys: UInt32[Array, "B V"], relative: Float32[Array, "B V"], min_p: Float32[Array, "B"]
) -> UInt32[Array, "B"]:
    kept = relative >= jnp.log(min_p)[:, None]  # log(0) = -inf keeps all
    return jnp.where(kept, keys, jnp.uint32(0xFFFFFFFF)).min(axis=1)


def _top_k_threshold(keys: UInt32[Array, "B V"], top_k: Int32[Array, "B"]) -> UInt32[Array, "B"]:
    def holds(trial: UInt32[Array, "B"]) -> Bool[Array, "B"]:
        return (keys >= trial[:, None]).sum(axis=1, dtype=jnp.int32) >= top_k

    found = _largest(holds, keys[:, 0])
    return jnp.where(top_k > 0, found, jnp.uint32(0))


def _top_p_threshold(
    keys: UInt32[Array, "B V"],
    relative: Float32[Array, "B V"],
    floor: UInt32[Array, "B"],
    top_p: Float32[Array, "B"],
) -> UInt32[Array, "B"]:
    weights = jnp.where(keys >= floor[:, None], jnp.exp(relative), 0.0)
    wanted = top_p * _mass(weights)

    def holds(trial: UInt32[Array, "B"]) -> Bool[Array, "B"]:
        return _mass(jnp.where(keys >= trial[:, None], weights, 0.0)) >= wanted

    # The most probable token stays, though a tiny top_p be 0 in float32.
    found = jnp.minimum(_largest(holds, floor), keys.max(axis=1))
    return jnp.where(top_p < 1.0, found, jnp.uint32(0))


def _mass(weights: Float32[Array, "B V"]) -> Float32[Array, "B"]:
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
