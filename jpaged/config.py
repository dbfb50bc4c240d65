"""What the caller asks of an engine, checked: `EngineConfig`."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from jpaged.core.swap import PreemptionMode
from jpaged.option_checks import (
    check_choice,
    check_count,
    check_flag,
    check_most,
    check_pool,
    check_swap_space,
    check_utilization,
    default_swap_space,
    is_int,
)

EMBEDDED_MODEL = Path(__file__).parent / "assets" / "tiny"
"""The folder of the small trained model that ships with the package."""

COMPILATION_CACHE = "~/.cache/jpaged/compiled"
"""Where compiled programs are kept unless the caller says otherwise."""

MAX_SCHEDULER_STEPS = 64

MAX_NUM_SEQS = 2048
"""Above 256 each 64 sequences are a batch size more, with a decode program and a sampler for each
sampling level to compile at a first start: some 200 programs at 2,048, and thousands at 100,000."""

MAX_BATCHED_TOKENS = 2**18
"""As many as the longest prompts have; a step's temporaries grow with them."""

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
        block_size: Token slots in a KV block, 1 to 256. Powers of two from 8 on have the fastest
            attention of prompts.
        num_blocks: KV blocks in the pool (the null block included), instead of sizing it.
        kv_cache_memory_bytes: Bytes of the pool, instead of sizing it.
        gpu_memory_utilization: Share of the device's memory the engine may use in all.
        max_model_len: Most tokens (prompt and output) of a sequence.
        max_num_seqs: Most sequences in a step; 2,048 at most.
        max_num_batched_tokens: Most tokens in a step; 262,144 at most. A longer prompt is prefilled
            in chunks.
        enable_prefix_caching: Keep full blocks of freed sequences, and share them, in use or not,
            with requests that begin with the same tokens.
        preemption_mode: What becomes of a request's KV when others need its blocks: "recompute"
            drops it, "swap" keeps it in host memory if it has room, "auto" does what is faster.
        swap_space: GiB of host memory for swapped KV; no more than the pool's size is used. None is
            4, or half of the machine's memory (a container's limit is not known) where that is
            less. "auto" recomputes if there is no room for a block.
        scheduling_policy: "fcfs" serves in the order of arrival, "priority" the smallest number
            first: others wait as long as such requests come.
        load_format: "auto" or "safetensors" read the checkpoint; "dummy" makes random weights.
        skip_tokenizer_init: Token ids in, token ids out; no tokenizer is loaded.
        seed: Of the dummy weights and of requests that bring no seed.
        async_scheduling: Let the host run one step behind the device (the overlapped loop).
        num_scheduler_steps: Decode steps launched as one program while at most 32 sequences run,
            none wait and none needs penalties, biases, log-probabilities or beams; in `generate`,
            where nobody can arrive, also while more run or others wait. In the overlapped loop
            only. A short step then does not wait for the host, and tokens come in bursts. None is 4
            on a GPU for models of up to 5 GB, and else 1, which is never.
        compilation_cache_dir: Where compiled programs are kept, which makes a second start fast;
            None for nowhere. Whoever can write there can run code in this process. It is JAX's
            persistent compilation cache too, unless one was set before, by JAX's own configuration
            or an earlier engine.
        num_compile_workers: Processes that compile beside the engine's own at a start that has much
            to compile; 0 for none. None is, on a GPU, one for two processors, 8 at most, as far as
            the device has 1 GiB for each beside the engine's share (1.5 GiB with a model whose XLA
            measurements do not ship); else 0. They need `compilation_cache_dir`.
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
    swap_space: float | None = None
    scheduling_policy: str = "fcfs"
    load_format: str = "auto"
    skip_tokenizer_init: bool = False
    seed: int = 0
    async_scheduling: bool = True
    num_scheduler_steps: int | None = None
    compilation_cache_dir: str | Path | None = COMPILATION_CACHE
    num_compile_workers: int | None = None
    verbose: bool = False

    def __post_init__(self):
        check_choice("dtype", self.dtype, DTYPES)
        check_choice("load_format", self.load_format, LOAD_FORMATS)
        check_choice("preemption_mode", self.preemption_mode, tuple(PreemptionMode))
        check_choice("scheduling_policy", self.scheduling_policy, SCHEDULING_POLICIES)
        counts = ("max_num_seqs", "max_num_batched_tokens", "kv_cache_memory_bytes")
        for name in (*counts, "num_scheduler_steps"):
            check_count(name, getattr(self, name), 1)
        if (self.num_scheduler_steps or 1) > MAX_SCHEDULER_STEPS:
            raise ValueError(
                f"num_scheduler_steps={self.num_scheduler_steps} is more than "
                f"{MAX_SCHEDULER_STEPS}: whoever arrives would wait for that many steps, and twice"
            )
        check_most("max_num_seqs", self.max_num_seqs, MAX_NUM_SEQS, "more requests wait their turn")
        remedy = "longer prompts are prefilled in chunks"
        check_most(
            "max_num_batched_tokens", self.max_num_batched_tokens, MAX_BATCHED_TOKENS, remedy
        )
        check_count("num_compile_workers", self.num_compile_workers, 0)
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
        swap_space = default_swap_space() if self.swap_space is None else self.swap_space
        return int(swap_space * 2**30) // bytes_per_block

    @property
    def tokenizer_needed(self) -> bool:
        """Whether text goes in and out."""
        return not self.skip_tokenizer_init
