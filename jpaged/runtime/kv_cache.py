"""Shapes and arrays of the KV cache on the device."""

from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Int32

from jpaged.models.sizes import ModelSizes
from pallas_kernels import FP8, FP8_PAIR_DTYPE, LayerKV

HEADS_AXIS = 2
"""Axis of the KV heads in the pool's arrays (see `LayerKV`). Tensor-parallel devices split the pool
along this axis."""


class KVState(NamedTuple):
    """The KV pool, and the block tables of the running sequences, one row per sequence.

    Step programs update both in place.
    """

    pool: tuple[LayerKV, ...]
    block_tables: Int32[Array, "R M"]


def pool_dtype(model: ModelSizes, dtype: DTypeLike) -> jnp.dtype:
    """Return the dtype of the pool for a model whose weights have the dtype `dtype`."""
    return jnp.dtype(model.kv_cache_dtype or dtype)


def block_bytes(model: ModelSizes, block_size: int, dtype: DTypeLike) -> int:
    """Return the size of one block in bytes, on each device: K and V of all layers.

    Args:
        model: Sizes of the model. With several devices, sizes of one device's shard.
        block_size: Number of slots in a block.
        dtype: Dtype of the weights.
    """
    per_token = 2 * model.num_layers * model.num_kv_heads * model.head_size
    return per_token * block_size * pool_dtype(model, dtype).itemsize


def make_pool(
    model: ModelSizes, num_blocks: int, block_size: int, dtype: DTypeLike
) -> tuple[LayerKV, ...]:
    """Return an empty pool, with one `LayerKV` per layer. `dtype` is the dtype of the weights."""
    dtype, columns = pool_dtype(model, dtype), model.head_size
    if dtype == FP8:
        dtype, columns = FP8_PAIR_DTYPE, columns // 2
    shape = (num_blocks, block_size, model.num_kv_heads, columns)
    return tuple(
        LayerKV(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(model.num_layers)
    )
