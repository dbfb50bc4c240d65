"""`RuntimeConfig`: every number derived from the caller's wishes, the model and the device."""

import math
from dataclasses import dataclass
from functools import cached_property

from jpaged.runtime.buckets import Buckets, make_buckets
from pallas_kernels import Backend


@dataclass(frozen=True)
class RuntimeConfig:
    """What runs: every number the runtime needs, all set once (`jpaged.compile.sizing`).

    Attributes:
        block_size: Slots a block (S).
        num_blocks: Blocks in the pool (P), the null block included.
        max_model_len: Most tokens of a sequence.
        max_num_seqs: Most sequences in a step.
        max_num_batched_tokens: Most tokens in a step.
        vocab_size: Width of the logits (V).
        backend: Which implementation of the kernels runs.
        num_host_blocks: Blocks of host memory to swap to; 0 where nothing is swapped.
        few_programs: Compile fewer shapes, and pad more: for devices that compile slowly.
        num_scheduler_steps: Steps of a burst; 1 for none.
        peer_memory: Devices that share the model sum through each other's memory.
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

    @property
    def max_blocks_per_seq(self) -> int:
        """Width of a block table (M)."""
        return math.ceil(self.max_model_len / self.block_size)

    @property
    def mask_width(self) -> int:
        """32-bit words with a bit for each token of the vocabulary."""
        return math.ceil(self.vocab_size / 32)

    @property
    def num_rows(self) -> int:
        """Rows of per-sequence device state (R): one each, and a last one for padding."""
        return self.max_num_seqs + 1

    @property
    def padding_row(self) -> int:
        """The row that padded batch entries use; its block table is all null block."""
        return self.max_num_seqs

    @cached_property
    def buckets(self) -> Buckets:
        """The shapes of its steps."""
        limits = self.max_num_seqs, self.max_num_batched_tokens
        return make_buckets(
            *limits, few_programs=self.few_programs, burst_steps=self.num_scheduler_steps
        )
