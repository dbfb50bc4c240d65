"""Frozen configurations: what the user asks for, and what the engine computes from it.

`EngineConfig` is what the caller wrote, checked. `RuntimeConfig` is everything derived from it, the
model and the device, computed once by `resolve` and never changed afterwards.
"""

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from jpaged.core.swap import PreemptionMode
from jpaged.option_checks import (
    check_choice,
    check_count,
    check_flag,
    check_pool,
    check_swap_space,
    check_utilization,
    is_int,
)
from pallas_kernels import Backend

EMBEDDED_MODEL = Path(__file__).parent / "assets" / "tiny"
"""The folder of the small trained model that ships with the package."""

COMPILATION_CACHE = "~/.cache/jpaged/compiled"
"""Where compiled programs are kept unless the caller says otherwise."""

DTYPES = ("auto", "float32", "bfloat16", "float16")
LOAD_FORMATS = ("auto", "safetensors", "dummy")
SCHEDULING_POLICIES = ("fcfs", "priority")


class LoopMode(StrEnum):
    """How host and device take turns (docs/decisions/0002)."""

    OVERLAPPED = "overlapped"
    SYNCHRONOUS = "synchronous"


@dataclass(frozen=True)
class EngineConfig:
    """What the caller asks of an `Engine`; names and meanings are vLLM's.

    None means: let the engine choose from the model and the device.

    Attributes:
        model: A local folder, a Hugging Face hub id, or None for the embedded model.
        dtype: Of weights and KV cache; "auto" keeps the checkpoint's (float32 on CPU).
        block_size: Token slots in a KV block.
        num_blocks: KV blocks in the pool (the null block included), instead of sizing it.
        kv_cache_memory_bytes: Bytes of the pool, instead of sizing it.
        gpu_memory_utilization: Share of the device's memory the engine may use in all.
        max_model_len: Most tokens (prompt and output) of a sequence.
        max_num_seqs: Most sequences in a step.
        max_num_batched_tokens: Most tokens in a step; a longer prompt is prefilled in chunks.
        enable_prefix_caching: Keep full blocks of freed sequences, and share them, in use or not,
            with requests that begin with the same tokens.
        preemption_mode: What becomes of a request's KV when others need its blocks: "recompute"
            drops it, "swap" keeps it in host memory if it has room, "auto" does what is faster.
        swap_space: GiB of host memory for swapped KV; no more than the pool's size is used.
        scheduling_policy: "fcfs" serves in the order of arrival, "priority" lower priorities first.
        load_format: "auto" or "safetensors" read the checkpoint; "dummy" makes random weights.
        skip_tokenizer_init: Token ids in, token ids out; no tokenizer is loaded.
        seed: Of the dummy weights and of requests that bring no seed.
        async_scheduling: Let the host run one step behind the device (the overlapped loop).
        compilation_cache_dir: JAX's persistent compilation cache, which makes a second start fast;
            None for none. It is JAX's setting for the whole process: one set before, by JAX's own
            configuration or an earlier engine, stays.
        verbose: Show loading, memory account and compilation on stderr.

    Raises:
        ValueError: a value is out of its range; the message names it and the remedy.
    """

    model: str | Path | None = None
    dtype: str = "auto"
    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    enable_prefix_caching: bool = True
    preemption_mode: str = "recompute"
    swap_space: float = 4.0
    scheduling_policy: str = "fcfs"
    load_format: str = "auto"
    skip_tokenizer_init: bool = False
    seed: int = 0
    async_scheduling: bool = True
    compilation_cache_dir: str | Path | None = COMPILATION_CACHE
    verbose: bool = False

    def __post_init__(self):
        check_choice("dtype", self.dtype, DTYPES)
        check_choice("load_format", self.load_format, LOAD_FORMATS)
        check_choice("preemption_mode", self.preemption_mode, tuple(PreemptionMode))
        check_choice("scheduling_policy", self.scheduling_policy, SCHEDULING_POLICIES)
        for name in ("max_num_seqs", "max_num_batched_tokens", "kv_cache_memory_bytes"):
            check_count(name, getattr(self, name), 1)
        check_count("max_model_len", self.max_model_len, 2)  # a prompt token and an output token
        flags = ("async_scheduling", "enable_prefix_caching", "skip_tokenizer_init", "verbose")
        for name in flags:
            check_flag(name, getattr(self, name))
        check_pool(self.block_size, self.num_blocks, self.kv_cache_memory_bytes)
        check_utilization(self.gpu_memory_utilization)
        check_swap_space(self.swap_space, self.preemption_mode)
        if not is_int(self.seed) or not 0 <= self.seed < 2**63:
            raise ValueError(f"seed={self.seed!r} must be an integer from 0 to 2**63 - 1")

    @classmethod
    def from_options(cls, model: str | Path | None, options: Mapping[str, Any]) -> "EngineConfig":
        """The configuration of `Engine(model, **options)`.

        Raises:
            TypeError, ValueError: an option is unknown or out of range.
        """
        if not isinstance(model, (str, Path, type(None))):
            raise TypeError(
                f"model={model!r} must be a folder, a hub id, or None for the embedded one"
            )
        known = [f.name for f in fields(cls) if f.name != "model"]
        for name in options:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
                raise ValueError(f"unknown engine option {name!r}; {hint}")
        return cls(model=model, **options)

    @property
    def loop_mode(self) -> LoopMode:
        """Which of the two loops the engine runs."""
        return LoopMode.OVERLAPPED if self.async_scheduling else LoopMode.SYNCHRONOUS

    def host_blocks(self, bytes_per_block: int) -> int:
        """Blocks that fit in `swap_space`; 0 if `preemption_mode` never swaps."""
        if self.preemption_mode == PreemptionMode.RECOMPUTE:
            return 0
        return int(self.swap_space * 2**30) // bytes_per_block

    @property
    def tokenizer_needed(self) -> bool:
        """Whether text goes in and out."""
        return not self.skip_tokenizer_init


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
    """

    block_size: int
    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    vocab_size: int
    backend: Backend
    num_host_blocks: int = 0

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


GPU_DEFAULTS = PlatformDefaults(256, 8192, 32768)
# A CPU compiles each bucket on few cores, and has no memory of its own to fill: keep both small.
CPU_DEFAULTS = PlatformDefaults(16, 512, 4096)
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


def _resolve_model_len(asked: int | None, model_max_len: int, defaults: PlatformDefaults) -> int:
    if asked is None:
        return min(model_max_len, defaults.max_model_len)
    if asked > model_max_len:
        raise ValueError(
            f"max_model_len={asked} is more than the {model_max_len} positions of the model; "
            f"give at most {model_max_len}"
        )
    return asked
