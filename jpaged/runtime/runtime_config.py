"""`RuntimeConfig`: sizes and limits derived from the engine's options, the model and the device."""

import math
from dataclasses import dataclass
from functools import cached_property

from jpaged.config import LogprobsMode, SpeculativeConfig
from jpaged.runtime.buckets import Buckets, make_buckets
from pallas_kernels import Backend


@dataclass(frozen=True)
class RuntimeConfig:
    """Sizes and limits of the runtime. `jpaged.compile.sizing` sets all of them once.

    Attributes:
        block_size: Number of slots in a block (S).
        num_blocks: Number of blocks in the pool (P), including the null block.
        max_model_len: Maximum number of tokens in a sequence.
        max_num_seqs: Maximum number of sequences in a step.
        max_num_batched_tokens: Maximum number of tokens in a step.
        vocab_size: Width of the logits (V).
        backend: Implementation of the kernels.
        num_host_blocks: Number of blocks in host memory for swapping; 0 disables swapping.
        few_programs: Whether to compile fewer shapes and pad more, for devices that compile slowly.
        num_scheduler_steps: Number of steps in a burst; 1 for no bursts.
        has_peer_memory: Whether tensor-parallel devices all-reduce through each other's memory.
        speculation: Options of speculative decoding; None without speculative decoding.
        logprobs_mode: Kind of values in the scores of output tokens, such as log-probabilities or
            logits.
    """

    block_size: int
    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    vocab_size: int
    backend: Backend
    num_host_blocks: int = 0
    few_programs: bool = False
    num_scheduler_steps: int = 1
    has_peer_memory: bool = False
    speculation: SpeculativeConfig | None = None
    logprobs_mode: LogprobsMode = LogprobsMode.RAW_LOGPROBS

    @property
    def max_blocks_per_seq(self) -> int:
        """Number of entries in a block table (M)."""
        return math.ceil(self.max_model_len / self.block_size)

    @property
    def mask_width(self) -> int:
        """Number of 32-bit words in a token mask, which has one bit per token of the vocabulary."""
        return math.ceil(self.vocab_size / 32)

    @property
    def num_rows(self) -> int:
        """Number of rows (R) in the arrays on the device.

        Each running sequence has one row. The last row is for padding.
        """
        return self.max_num_seqs + 1

    @property
    def padding_row(self) -> int:
        """Index of the padding row in the arrays on the device.

        The padding in a batch reads and writes this row, so that no sequence's row changes. The
        block table of the padding row contains only the null block.
        """
        return self.max_num_seqs

    @cached_property
    def buckets(self) -> Buckets:
        """Shapes for which steps are compiled."""
        limits = self.max_num_seqs, self.max_num_batched_tokens
        return make_buckets(
            *limits,
            few_programs=self.few_programs,
            burst_steps=self.num_scheduler_steps,
            num_drafts=0 if self.speculation is None else self.speculation.num_padded_drafts,
        )
