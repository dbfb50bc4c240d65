"""The KV pool's arrays and the account of the device's memory."""

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jpaged.models.config import ModelConfig
from pallas_kernels import LayerKV

# Pools of nearly equal free memory get the same shape, so the persistent compilation cache hits.
POOL_GRANULE = 64


@dataclass(frozen=True)
class MemoryAccount:
    """Where the device's memory goes, in bytes.

    Attributes:
        weights: The model's parameters.
        sampling: Token counts, biases and block tables of the running sequences.
        workspace: Temporaries and outputs of the largest step, as compiled, and blocks on their
            way between the pool and host memory.
        kv_cache: The pool.
        limit: What the engine may use in all; None where nothing limits it (CPU).
        swap: Of host memory, pinned, for swapped blocks: no part of the total.
    """

    weights: int
    sampling: int
    workspace: int
    kv_cache: int
    limit: int | None
    swap: int = 0

    @property
    def total(self) -> int:
        """The sum of the parts."""
        return self.weights + self.sampling + self.workspace + self.kv_cache

    @property
    def resident(self) -> int:
        """What is there between steps too: all but the workspace."""
        return self.total - self.workspace

    def lines(self) -> list[str]:
        """The account as text, one part a line."""
        parts = [
            ("weights", self.weights),
            ("sampling state", self.sampling),
            ("step workspace", self.workspace),
            ("KV cache", self.kv_cache),
            ("total", self.total),
        ]
        if self.limit is not None:
            parts.append(("limit", self.limit))
        return [f"  {name:<15} {size / 2**20:>11,.1f} MiB" for name, size in parts]

    def beside(self, stats: Mapping[str, int]) -> list[str]:
        """What the device itself says once all is there (`jax.Device.memory_stats`), if it does."""
        names = "bytes_in_use", "peak_bytes_in_use", "bytes_limit"
        if not all(name in stats for name in names):
            return []
        in_use, peak, limit = (f"{stats[name] / 2**20:,.1f} MiB" for name in names)
        own = f"{self.resident / 2**20:,.1f}"
        return [f"the device has {in_use} in use (the account {own}), had {peak}, of {limit}"]


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
