"""Test the random router of the expert benchmark."""

import jax
import numpy as np

from bench.experts import router_logits
from pallas_kernels import Backend, route


def count_experts_with_tokens(skew: float) -> float:
    """Return how many of 128 experts get at least one token, if 64 tokens choose 8 experts each.

    The result is the mean over 10 random batches.
    """
    keys = jax.random.split(jax.random.key(0), 10)
    routings = [route(router_logits(key, 64, 128, skew), 8, backend=Backend.XLA) for key in keys]
    return float(np.mean([np.count_nonzero(np.diff(it.offsets)) for it in routings]))


def test_64_tokens_choose_97_percent_of_the_experts_of_a_uniform_router():
    assert count_experts_with_tokens(skew=0.0) >= 0.97 * 128


def test_skewed_router_chooses_experts_by_zipfs_law():
    assert count_experts_with_tokens(skew=1.5) < 0.7 * 128
    first = np.argmax(router_logits(jax.random.key(1), 20_000, 4, 1.0), axis=1)
    shares = np.bincount(first, minlength=4) / len(first)
    np.testing.assert_allclose(shares, [12 / 25, 6 / 25, 4 / 25, 3 / 25], atol=0.02)
