"""Paged attention kernels for JAX: one public entry an op, the same on every back end."""

from pallas_kernels.api import (
    Backend,
    HeadNorms,
    LayerKV,
    add_rms_norm,
    copy_blocks,
    paged_decode_attention,
    paged_prefill_attention,
    product_parts,
    rms_norm,
    rope_write_kv,
    select_backend,
    sum_parts,
    truncation_mask,
    write_kv,
)

__all__ = [
    "Backend",
    "HeadNorms",
    "LayerKV",
    "add_rms_norm",
    "copy_blocks",
    "paged_decode_attention",
    "paged_prefill_attention",
    "product_parts",
    "rms_norm",
    "rope_write_kv",
    "select_backend",
    "sum_parts",
    "truncation_mask",
    "write_kv",
]
