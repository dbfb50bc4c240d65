"""Paged attention kernels for JAX: one public entry an op, the same on every back end."""

from pallas_kernels.api import (
    Backend,
    LayerKV,
    copy_blocks,
    paged_decode_attention,
    paged_prefill_attention,
    select_backend,
    write_kv,
)

__all__ = [
    "Backend",
    "LayerKV",
    "copy_blocks",
    "paged_decode_attention",
    "paged_prefill_attention",
    "select_backend",
    "write_kv",
]
