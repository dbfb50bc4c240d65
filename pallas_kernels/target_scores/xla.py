"""Scores of given tokens in plain XLA, by a loop over slices of the vocabulary."""

import jax.numpy as jnp
from jax import lax

from pallas_kernels.gemm.xla import einsum

SLICE_TOKENS = 8192
"""Number of tokens of the vocabulary per slice."""


def target_scores(x, table, targets, *, soft_cap):
    """Run the public op `target_scores` in plain XLA; return the fields of its result."""
    rows, width = x.shape[0], table.shape[0]
    size = min(SLICE_TOKENS, width)

    def fold(carry, index):
        largest, total, target = carry
        # All slices have the same size, so the last slice starts earlier and overlaps with the
        # slice before it. Mask the tokens that both slices contain.
        first = jnp.minimum(index * size, width - size)
        logits = einsum(
            "rd,vd->rv", x, lax.dynamic_slice_in_dim(table, first, size), out=jnp.float32
        )
        if soft_cap is not None:
            logits = jnp.tanh(logits / jnp.float32(soft_cap)) * jnp.float32(soft_cap)
        tokens = first + jnp.arange(size, dtype=jnp.int32)[None]
        is_new = tokens >= index * size
        logits = jnp.where(is_new, logits, -jnp.inf)
        highest = jnp.maximum(largest, logits.max(axis=1))
        # If all logits of a row are -inf, subtract 0 instead: -inf - -inf would be NaN.
        base = jnp.where(highest == -jnp.inf, 0.0, highest)
        total = total * jnp.exp(largest - base) + jnp.exp(logits - base[:, None]).sum(axis=1)
        is_target = (tokens == targets[:, None]) & is_new
        target += jnp.where(is_target, logits, 0.0).sum(axis=1)
        return (highest, total, target), None

    zeros = jnp.zeros(rows, jnp.float32)
    begin = jnp.full(rows, -jnp.inf, jnp.float32), zeros, zeros
    slices = jnp.arange(-(-width // size), dtype=jnp.int32)
    return lax.scan(fold, begin, slices)[0]
