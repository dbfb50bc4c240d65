"""Device ops of paged attention for JAX, with the same public functions on every backend.

The ops are pure functions: they take all arrays as arguments and return all results. Each folder
holds related ops. The folder's `__init__.py` checks the arguments and chooses an implementation:
plain XLA, Pallas Triton, or Pallas Mosaic GPU for Hopper GPUs. The folder's `tuning.py`, if it
exists, chooses the launch parameters.
"""

from pallas_kernels.all_reduce import (
    device_sum,
    device_sum_norm,
    exchange_word_counts,
    make_exchange_header,
    nan_if_peer_lost,
)
from pallas_kernels.attention import (
    paged_decode_attention,
    paged_prefill_attention,
    paged_verify_attention,
    rope_decode_attention,
)
from pallas_kernels.experts import Routing, expert_down_gemm, expert_gated_gemm, route
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
from pallas_kernels.layer import fused_layer, new_exchange_memory
from pallas_kernels.norm import add_rms_norm, add_rms_norm_to_fp8, rms_norm
from pallas_kernels.scores import (
    KEPT_MASS_COLUMN,
    LOGPROB_COLUMN,
    NUM_TOKEN_COLUMNS,
    RANK_COLUMN,
    TOKEN_COLUMN,
    Adjustments,
    adjust_logits,
    first_maximum,
    greedy_scores,
    token_scores,
)
from pallas_kernels.target_scores import TargetScores, target_scores
from pallas_kernels.truncation import truncation_mask
from pallas_kernels.types import (
    FP8,
    FP8_GROUP_SIZE,
    FP8_MAX,
    FP8_MIN_ABSMAX,
    FP8_PAIR_DTYPE,
    Backend,
    FusedLayerWeights,
    HeadNorms,
    KVScales,
    LayerKV,
    pack_fp8_pairs,
    select_backend,
    supports_fp8,
    supports_kernels,
    unpack_fp8_pairs,
)

__all__ = [
    "FP8",
    "FP8_GROUP_SIZE",
    "FP8_MAX",
    "FP8_MIN_ABSMAX",
    "FP8_PAIR_DTYPE",
    "KEPT_MASS_COLUMN",
    "LOGPROB_COLUMN",
    "NUM_TOKEN_COLUMNS",
    "RANK_COLUMN",
    "TOKEN_COLUMN",
    "Adjustments",
    "Backend",
    "FusedLayerWeights",
    "HeadNorms",
    "KVScales",
    "LayerKV",
    "Routing",
    "TargetScores",
    "add_rms_norm",
    "add_rms_norm_to_fp8",
    "adjust_logits",
    "block_scaled_gated_gemm",
    "block_scaled_gemm",
    "copy_blocks",
    "device_sum",
    "device_sum_norm",
    "einsum",
    "exchange_word_counts",
    "expert_down_gemm",
    "expert_gated_gemm",
    "first_maximum",
    "fused_layer",
    "gated_gemm",
    "gated_silu",
    "greedy_scores",
    "make_exchange_header",
    "nan_if_peer_lost",
    "new_exchange_memory",
    "pack_fp8_pairs",
    "paged_decode_attention",
    "paged_prefill_attention",
    "paged_verify_attention",
    "quantize_rows",
    "rms_norm",
    "rope_decode_attention",
    "rope_write_kv",
    "route",
    "scaled_gated_gemm",
    "scaled_gemm",
    "select_backend",
    "split_k_gemm",
    "sum_partials",
    "supports_fp8",
    "supports_kernels",
    "target_scores",
    "to_fp8",
    "token_scores",
    "truncation_mask",
    "unpack_fp8_pairs",
    "write_kv",
]
