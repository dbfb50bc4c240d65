"""Paged attention kernels for JAX: one public entry an op, the same on every back end."""

from pallas_kernels.api import (
    Backend,
    HeadNorms,
    LayerKV,
    LayerWeights,
    add_rms_norm,
    between_attentions,
    copy_blocks,
    new_exchange,
    paged_decode_attention,
    paged_prefill_attention,
    product_parts,
    rms_norm,
    rope_write_kv,
    select_backend,
    sum_parts,
    write_kv,
)

__all__ = [
    "Backend",
    "HeadNorms",
    "LayerKV",
    "LayerWeights",
    "add_rms_norm",
    "between_attentions",
    "copy_blocks",
    "new_exchange",
    "paged_decode_attention",
    "paged_prefill_attention",
    "product_parts",
    "rms_norm",
    "rope_write_kv",
    "select_backend",
    "sum_parts",
    "write_kv",
]
