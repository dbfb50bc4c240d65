"""Paged attention kernels for JAX: one public entry an op, the same on every back end.

All arrays are arguments and all results are returned. Each op is a folder: its entry, which checks
the arguments and chooses the implementation, plain XLA, Pallas Triton, Pallas Mosaic GPU for Hopper
GPUs, and what their launch parameters are chosen by. Nothing outside this package knows which
implementation runs.
"""

from pallas_kernels.all_reduce import (
    device_sum,
    device_sum_norm,
    exchange_header,
    exchange_words,
    lost_peers,
)
from pallas_kernels.attention import (
    paged_decode_attention,
    paged_prefill_attention,
    rope_decode_attention,
)
from pallas_kernels.gemm import (
    block_scaled_gated_gemm,
    block_scaled_gemm,
    einsum,
    gated_gemm,
    gated_silu,
    quantize_rows,
    scaled_gated_gemm,
    scaled_gemm,
    split_k_gemm,
    sum_partials,
    to_fp8,
)
from pallas_kernels.kv_cache import copy_blocks, rope_write_kv, write_kv
from pallas_kernels.layer import fused_layer, new_exchange
from pallas_kernels.norm import add_rms_norm, add_rms_norm_to_fp8, rms_norm
from pallas_kernels.scores import (
    LOGPROB_COLUMN,
    NUM_FACTS,
    RANK_COLUMN,
    TOKEN_COLUMN,
    Adjustments,
    adjusted_logits,
    first_maximum,
    greedy_scores,
    token_scores,
)
from pallas_kernels.truncation import truncation_mask
from pallas_kernels.types import (
    FP8,
    FP8_GROUP,
    FP8_LEAST,
    FP8_MAX,
    FP8_PAIR,
    Backend,
    HeadNorms,
    KVScales,
    LayerKV,
    LayerWeights,
    fp8_numbers,
    fp8_pairs,
    select_backend,
    takes_fp8,
)

__all__ = [
    "FP8",
    "FP8_GROUP",
    "FP8_LEAST",
    "FP8_MAX",
    "FP8_PAIR",
    "LOGPROB_COLUMN",
    "NUM_FACTS",
    "RANK_COLUMN",
    "TOKEN_COLUMN",
    "Adjustments",
    "Backend",
    "HeadNorms",
    "KVScales",
    "LayerKV",
    "LayerWeights",
    "add_rms_norm",
    "add_rms_norm_to_fp8",
    "adjusted_logits",
    "block_scaled_gated_gemm",
    "block_scaled_gemm",
    "copy_blocks",
    "device_sum",
    "device_sum_norm",
    "einsum",
    "exchange_header",
    "exchange_words",
    "first_maximum",
    "fp8_numbers",
    "fp8_pairs",
    "fused_layer",
    "gated_gemm",
    "gated_silu",
    "greedy_scores",
    "lost_peers",
    "new_exchange",
    "paged_decode_attention",
    "paged_prefill_attention",
    "quantize_rows",
    "rms_norm",
    "rope_decode_attention",
    "rope_write_kv",
    "scaled_gated_gemm",
    "scaled_gemm",
    "select_backend",
    "split_k_gemm",
    "sum_partials",
    "takes_fp8",
    "to_fp8",
    "token_scores",
    "truncation_mask",
    "write_kv",
]
