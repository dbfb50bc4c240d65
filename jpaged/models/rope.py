"""The angles of the rotary position embedding (Su et al. 2021, arXiv:2104.09864), in float32.

`pallas_kernels.rope_write_kv` turns queries and keys by them.
"""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

from jpaged.models.config import RopeConfig

# Cosine and sine of each position's rotation, one a pair of channels (half = H / 2).
RopeAngles = tuple[Float32[Array, "T half"], Float32[Array, "T half"]]


def inverse_frequencies(rope: RopeConfig, head_size: int) -> np.ndarray:
    """Radians a position for each pair of channels, float32 `[H / 2]`, on the host.

    "linear" divides positions by the factor; "llama3" divides the slow frequencies only, with a
    ramp between (Llama 3.1's long-context recipe).
    """
    exponents = np.arange(0, head_size, 2, dtype=np.float32) / np.float32(head_size)
    # numpy's float32 power is an ulp off where torch's is not, and the error grows with position.
    powers = np.float64(rope.theta) ** exponents.astype(np.float64)
    frequencies = np.float32(1) / powers.astype(np.float32)
    if rope.rope_type == "linear":
        return frequencies / np.float32(rope.factor)
    if rope.rope_type == "llama3":
        return _llama3(frequencies, rope)
    return frequencies


def _llama3(frequencies: np.ndarray, rope: RopeConfig) -> np.ndarray:
    """Wavelengths over `original / low` slow down by the factor, under `original / high` stay."""
    low, high = np.float32(rope.low_freq_factor), np.float32(rope.high_freq_factor)
    turns = np.float32(rope.original_max_position_embeddings / (2 * math.pi)) * frequencies
    kept = np.clip((turns - low) / (high - low), np.float32(0), np.float32(1))
    return (np.float32(1) - kept) * frequencies / np.float32(rope.factor) + kept * frequencies


def rope_angles(positions: Int32[Array, "T"], rope: RopeConfig, head_size: int) -> RopeAngles:
    """The rotations of the given positions."""
    frequencies = jnp.asarray(inverse_frequencies(rope, head_size))
    angles = positions.astype(jnp.float32)[:, None] * frequencies[None, :]
    return jnp.cos(angles), jnp.sin(angles)
