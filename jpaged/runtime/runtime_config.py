"""What runs: every number derived from the caller's wishes, the model and the device.

Computed once, by `resolve_limits`, `with_pool` and `with_swap` in turn, and never changed after.
"""

import math
from dataclasses import dataclass, replace

from jpaged.config import EngineConfig, LoopMode
from jpaged.core.swap import PreemptionMode
from pallas_kernels import Backend


@dataclass(frozen=True)
class RuntimeConfig:
    """What runs: every number the runtime needs, all set.

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

    @property
    def max_blocks_per_seq(self) -> int:
        """Width of a block table (M)."""
        return math.ceil(self.max_model_len / self.block_size)

    @property
    def num_rows(self) -> int:
        """Rows of per-sequence device state (R): one each, and a last one for padding."""
        return self.max_num_seqs + 1

    @property
    def padding_row(self) -> int:
        """The row that padded batch entries use; its block table is all null block."""
        return self.max_num_seqs


@dataclass(frozen=True)
class PlatformDefaults:
    """What `None` stands for on a kind of device."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    few_programs: bool = False
    num_scheduler_steps: int = 1


BURST_WEIGHT_BYTES = 5 * 10**9
"""Of the weights that an H200 reads, at 4 TB/s, in the 1.3 ms that its host takes to launch a step:
larger models have no bursts unless they are asked for."""

# The host takes about 1.3 ms to launch a step, and a small model's device as little as 0.7.
GPU_DEFAULTS = PlatformDefaults(256, 8192, 32768, num_scheduler_steps=4)
# A CPU compiles each bucket on few cores, and has no memory of its own to fill: keep both small.
# Its matrix products gain little from more than 64 rows, so that one bucket of prefill is enough.
CPU_DEFAULTS = PlatformDefaults(16, 64, 4096, few_programs=True)
CPU_KV_CACHE_BYTES = 256 * 2**20


def resolve_limits(
    config: EngineConfig,
    *,
    model_max_len: int,
    vocab_size: int,
    backend: Backend,
    defaults: PlatformDefaults,
) -> RuntimeConfig:
    """Settle every number but the pool's size, which is left at 0.

    Args:
        config: The caller's wishes.
        model_max_len: Positions the model knows.
        vocab_size: Width of the logits.
        backend: The kernels' implementation.
        defaults: What None stands for on this device.

    Raises:
        ValueError: the wishes contradict each other or the model.
    """
    asked_budget = config.max_num_batched_tokens or defaults.max_num_seqs
    max_num_seqs = config.max_num_seqs or min(defaults.max_num_seqs, asked_budget)
    budget = config.max_num_batched_tokens or max(defaults.max_num_batched_tokens, max_num_seqs)
    if budget < max_num_seqs:
        raise ValueError(
            f"max_num_batched_tokens={budget} is less than max_num_seqs={max_num_seqs}: a step "
            "must have room for one token of every sequence; raise the first or lower the second"
        )
    return RuntimeConfig(
        block_size=config.block_size,
        num_blocks=0,
        max_model_len=_resolve_model_len(config.max_model_len, model_max_len, defaults),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        vocab_size=vocab_size,
        backend=backend,
        few_programs=defaults.few_programs,
        num_scheduler_steps=_resolve_burst(config, defaults),
    )


def with_pool(limits: RuntimeConfig, num_blocks: int, config: EngineConfig) -> RuntimeConfig:
    """Settle the pool's size: a sequence of `max_model_len` must fit alone, or it might never run.

    Args:
        limits: From `resolve_limits`.
        num_blocks: Blocks of the pool, the null block included.
        config: The caller's wishes; a `max_model_len` asked for is not shortened silently.

    Raises:
        ValueError: the pool is too small.
    """
    capacity = (num_blocks - 1) * limits.block_size
    if capacity < 1:
        raise ValueError(
            "no KV block fits in the memory left: raise gpu_memory_utilization or "
            "kv_cache_memory_bytes, or lower max_num_batched_tokens or max_num_seqs"
        )
    if config.max_model_len is not None and config.max_model_len > capacity:
        raise ValueError(
            f"max_model_len={config.max_model_len} tokens do not fit in the KV pool of "
            f"{num_blocks - 1} blocks of {limits.block_size} ({capacity} tokens); lower "
            f"max_model_len to {capacity} or give the pool more (num_blocks, "
            "kv_cache_memory_bytes, gpu_memory_utilization)"
        )
    max_model_len = min(limits.max_model_len, capacity)
    return replace(limits, num_blocks=num_blocks, max_model_len=max_model_len)


def with_swap(runtime: RuntimeConfig, config: EngineConfig, bytes_per_block: int) -> RuntimeConfig:
    """Settle how many blocks host memory holds: what fits, and no more than the pool has.

    Raises:
        ValueError: not one fits, and the caller asked for swap.
    """
    num_host_blocks = min(config.host_blocks(bytes_per_block), runtime.num_blocks - 1)
    if not num_host_blocks and config.preemption_mode == PreemptionMode.SWAP:
        raise ValueError(
            f"swap_space={config.swap_space!r} GiB does not hold a block of {bytes_per_block:,} "
            "bytes; give more, or use preemption_mode='recompute'"
        )
    return replace(runtime, num_host_blocks=num_host_blocks)


def _resolve_burst(config: EngineConfig, defaults: PlatformDefaults) -> int:
    if config.loop_mode is LoopMode.SYNCHRONOUS:
        return 1
    return config.num_scheduler_steps or defaults.num_scheduler_steps


def _resolve_model_len(asked: int | None, model_max_len: int, defaults: PlatformDefaults) -> int:
    if asked is None:
        return min(model_max_len, defaults.max_model_len)
    if asked > model_max_len:
        raise ValueError(
            f"max_model_len={asked} is more than the {model_max_len} positions of the model; "
            f"give at most {model_max_len}"
        )
    return asked
