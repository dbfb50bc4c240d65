"""The KV cache's arrays on the device."""

from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Int32

from jpaged.models.config import ModelConfig
from pallas_kernels import FP8, FP8_PAIR_DTYPE, LayerKV

HEADS_AXIS = 2
"""Of the pool's arrays (see `LayerKV`): along it devices share them."""


class KVState(NamedTuple):
    """What the forward programs own and update in place."""

    pool: tuple[LayerKV, ...]
    block_tables: Int32[Array, "R M"]


def pool_dtype(model: ModelConfig, dtype: DTypeLike) -> jnp.dtype:
    """The pool's dtype, of a model whose weights have `dtype`."""
    return jnp.dtype(model.kv_cache_dtype or dtype)


def block_bytes(model: ModelConfig, block_size: int, dtype: DTypeLike) -> int:
    """Bytes of one block: K and V of `block_size` tokens in all layers; on each of the devices that
    share the model, whose weights have `dtype`."""
    per_token = 2 * model.num_layers * model.num_kv_heads * model.head_size
    return per_token * block_size * pool_dtype(model, dtype).itemsize


def make_pool(
    model: ModelConfig, num_blocks: int, block_size: int, dtype: DTypeLike
) -> tuple[LayerKV, ...]:
    """An empty pool for weights of `dtype`: a `LayerKV` a layer."""
    dtype, columns = pool_dtype(model, dtype), model.head_size
    if dtype == FP8:
        dtype, columns = FP8_PAIR_DTYPE, columns // 2
    shape = (num_blocks, block_size, model.num_kv_heads, columns)
    return tuple(
        LayerKV(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(model.num_layers)
    )
