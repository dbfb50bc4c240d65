"""Qwen2 / Qwen2.5 (arXiv:2407.10671, arXiv:2412.15115) and Qwen3 (arXiv:2505.09388): LLaMA's frame
with biases on q, k and v (Qwen2), or with an RMSNorm on each query and key head (Qwen3).
"""

from jax.typing import DTypeLike

from jpaged.models.config import ModelConfig
from jpaged.models.layers import Attention, RMSNorm
from jpaged.models.llama import Llama
from jpaged.models.weights import WeightRule
from pallas_kernels import HeadNorms


class Qwen2(Llama):
    """Qwen2 and Qwen2.5; the biases are in the config."""


class Qwen3Attention(Attention):
    """Attention whose query and key heads are normalized before they are rotated."""

    def __init__(self, config: ModelConfig, layer: int, *, dtype: DTypeLike):
        super().__init__(config, layer, dtype=dtype)
        self.q_norm = RMSNorm(config.head_size, config.norm_eps, dtype=dtype)
        self.k_norm = RMSNorm(config.head_size, config.norm_eps, dtype=dtype)

    def head_norms(self) -> HeadNorms:
        """One weight for all query heads and one for all key heads."""
        return HeadNorms(self.q_norm.weight[...], self.k_norm.weight[...], self.q_norm.eps)


class Qwen3(Llama):
    """Qwen3, dense."""

    attention_class = Qwen3Attention

    @staticmethod
    def weight_rules(config: ModelConfig) -> tuple[WeightRule, ...]:
        """LLaMA's, and the norms of the heads."""
        pattern = r"(?:model\.)?layers\.(\d+)\.self_attn\.([qk])_norm\.weight"
        norms = WeightRule(pattern, r"layers.\1.attention.\2_norm.weight")
        return (*Llama.weight_rules(config), norms)
