"""The KV pool's arrays and the account of the device's memory."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jpaged.models.config import ModelConfig
from pallas_kernels import LayerKV

# Pools of nearly equal free memory get the same shape, so the persistent compilation cache hits.
POOL_GRANULE = 64


def block_bytes(model: ModelConfig, block_size: int, dtype: DTypeLike) -> int:
    """Bytes of one block: K and V of `block_size` tokens in all layers."""
    per_token = 2 * model.num_layers * model.num_kv_heads * model.head_size
    return per_token * block_size * jnp.dtype(dtype).itemsize


MAX_BLOCKS = 2**18
"""Most blocks of a pool sized to the device: of a tiny model more would fit than a host can use."""


def fit_blocks(available: int, bytes_per_block: int) -> int:
    """How many blocks fit in `available` bytes, rounded down to whole granules if there are any."""
    blocks = max(available, 0) // bytes_per_block
    return blocks // POOL_GRANULE * POOL_GRANULE if blocks > POOL_GRANULE else blocks


def make_pool(
    model: ModelConfig, num_blocks: int, block_size: int, dtype: DTypeLike
) -> tuple[LayerKV, ...]:
    """An empty pool, one pair of arrays [P, S, K, H] a layer."""
    shape = (num_blocks, block_size, model.num_kv_heads, model.head_size)
    return tuple(
        LayerKV(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(model.num_layers)
    )


def tree_bytes(tree) -> int:
    """Bytes of all arrays (or shapes) of a pytree."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
