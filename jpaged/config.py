"""What the caller asks of an engine, checked: `EngineConfig`."""

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from jpaged.errors import RequestError, RequestTypeError
from jpaged.options import Options, choice, integer, number, option, switch

EMBEDDED_MODEL = Path(__file__).parent / "assets" / "tiny"
"""The folder of the small trained model that ships with the package."""

DEFAULT_COMPILATION_CACHE = "~/.cache/jpaged/compiled"
"""Where compiled programs are kept unless the caller says otherwise."""

MAX_BLOCK_SIZE = 256
"""As `pallas_kernels.checks` has it, which imports JAX."""

MAX_SCHEDULER_STEPS = 64

MAX_GPUS = 8
"""As `jpaged.models.config` has it: those of one host."""

MAX_NUM_SEQS = 2048
"""Above 256 each 64 sequences are a batch size more, with a decode program and a sampler for each
sampling level to compile at a first start: some 200 programs at 2,048, and thousands at 100,000."""

MAX_BATCHED_TOKENS = 2**18
"""As many as the longest prompts have; a step's temporaries grow with them."""

DTYPES = ("auto", "float32", "bfloat16", "float16")
QUANTIZATIONS = ("compressed-tensors", "fp8", "modelopt")
"""As `jpaged.models.quantization` has them, which imports JAX."""

FP8_KV_CACHE_DTYPES = ("fp8", "fp8_e4m3")
KV_CACHE_DTYPES = ("auto", *DTYPES[1:], *FP8_KV_CACHE_DTYPES)
LOAD_FORMATS = ("auto", "safetensors", "dummy")
SCHEDULING_POLICIES = ("fcfs", "priority")
PREEMPTION_MODES = ("recompute", "swap", "auto")

_MODEL_GROUP, _CACHE_GROUP, _STEPS_GROUP = "the model", "the paged KV cache", "the steps"
_COMPILED_SIZES_NOTE = "a start compiles steps of every size up to it"
_SEQS_REQUIREMENT = (
    f"an integer, at most {MAX_NUM_SEQS}, for {_COMPILED_SIZES_NOTE}; more requests wait their turn"
)
_TOKENS_REQUIREMENT = f"an integer, at most {MAX_BATCHED_TOKENS}, for {_COMPILED_SIZES_NOTE}; longer prompts go in chunks"
_BURST_REQUIREMENT = (
    f"an integer, at most {MAX_SCHEDULER_STEPS}: a new request waits for that many, and twice"
)


class LoopMode(StrEnum):
    """How host and device take turns (docs/decisions/0002)."""

    OVERLAPPED = "overlapped"
    SYNCHRONOUS = "synchronous"


@dataclass(frozen=True)
class EngineConfig(Options):
    """What the caller asks of an `Engine`; names and meanings are vLLM's.

    None means: let the engine choose from the model and the device.

    Attributes:
        model: A local folder, a Hugging Face hub id, or None for the embedded model.
        dtype: Of weights and activations; "auto" keeps what config.json names, bfloat16 if it
            names none (float32 on CPU).
        quantization: "fp8" brings the weights of the projections to FP8 (e4m3) as they are loaded.
            None: they are as the checkpoint has them. A checkpoint in FP8 is taken as it is; then
            this may also name its method, "fp8", "compressed-tensors" or "modelopt".
        kv_cache_dtype: Of the KV cache; "auto" is that of the weights. "fp8" and "fp8_e4m3" store
            keys and values in 8 bits, divided by a scale of each layer's keys and of its values (1
            where the checkpoint has none): twice as many blocks as in bfloat16 fit, and decode
            attention reads half the bytes. A GPU needs compute capability 8.9 for it.
        block_size: Token slots in a KV block, 1 to 256. Powers of two from 8 on have the fastest
            attention of prompts.
        num_blocks: KV blocks in the pool (the null block included), instead of sizing it.
        kv_cache_memory_bytes: Bytes of the pool on each device, instead of sizing it.
        gpu_memory_utilization: Share of the device's memory the engine may use in all.
        max_model_len: Most tokens (prompt and output) of a sequence.
        max_num_seqs: Most sequences in a step; 2,048 at most.
        max_num_batched_tokens: Most tokens in a step; 262,144 at most. A longer prompt is prefilled
            in chunks.
        enable_prefix_caching: Keep full blocks of freed sequences, and share them, in use or not,
            with requests that begin with the same tokens.
        preemption_mode: What becomes of a request's KV when others need its blocks: "recompute"
            drops it, "swap" keeps it in host memory if it has room, "auto" does what is faster.
        swap_space: GiB of host memory for swapped KV, of all devices; no more than the pool's size
            is used. None is 4, or half of the machine's memory (a container's limit is not known)
            where that is less. "auto" recomputes if there is no room for a block.
        scheduling_policy: "fcfs" serves in the order of arrival, "priority" the smallest number
            first: others wait as long as such requests come.
        load_format: "auto" or "safetensors" read the checkpoint; "dummy" makes random weights.
        tensor_parallel_size: Devices of this process that share the model: each has a part of the
            weights, of the KV of every token and of every step's work. It divides the model's
            attention heads and the width of its feed-forward, and is a divisor or a multiple of
            its KV heads.
        skip_tokenizer_init: Token ids in, token ids out; no tokenizer is loaded.
        seed: Seeds random weights, and requests that bring no seed.
        async_scheduling: Launch a step before the tokens of the one before are read (the overlapped
            loop).
        num_scheduler_steps: Decode steps launched as one program while at most 32 sequences run,
            none wait, none searches beams and none that draws at random needs penalties, biases or
            log-probabilities; in `generate`, where no request can arrive, also while more run or
            others wait. In the overlapped loop only. A short step then does not wait for the host,
            and tokens come in bursts. None is 4 on a GPU for models of up to 5 GB on each, and else
            1, which is never.
        compilation_cache_dir: Where compiled programs are kept, which makes a second start fast;
            None for nowhere. Others who can write there can run code in this process. It is JAX's
            persistent compilation cache too, unless one was set before, by JAX's own configuration
            or an earlier engine.
        num_compile_workers: Processes that compile in addition to the engine's own at a start that
            has much to compile; 0 for none. None is, on a GPU, one for two processors, 16 at most,
            as far as the device has 1 GiB for each besides the engine's share (1.75 with a model
            whose XLA measurements do not ship); else 0. They need `compilation_cache_dir`.
        verbose: Show loading, memory account and compilation on stderr.

    Raises:
        TypeError, ValueError: a value is not what it may be; the message names it and the remedy.
    """

    model: str | Path | None = option(
        None,
        metavar="FOLDER_OR_ID",
        help="a folder, or a hub id such as Qwen/Qwen3-0.6B; unset: the model that is built in",
        group=_MODEL_GROUP,
    )
    dtype: str = choice("auto", DTYPES, help="dtype of weights and activations", group=_MODEL_GROUP)
    quantization: str | None = choice(
        None,
        QUANTIZATIONS,
        help="fp8: bring the projections' weights to FP8; unset: as the checkpoint has them",
        group=_MODEL_GROUP,
    )
    kv_cache_dtype: str = choice(
        "auto",
        KV_CACHE_DTYPES,
        help="dtype of keys and values; auto: that of the weights; fp8, or fp8_e4m3, takes half of "
        "bfloat16's memory",
        group=_CACHE_GROUP,
    )
    block_size: int = integer(
        16,
        low=1,
        high=MAX_BLOCK_SIZE,
        requirement=f"an integer from 1 to {MAX_BLOCK_SIZE}; use 16",
        help=f"tokens in a KV block, 1 to {MAX_BLOCK_SIZE}",
        group=_CACHE_GROUP,
    )
    num_blocks: int | None = integer(
        None,
        low=2,
        requirement="an integer, 2 or more (block 0 is the null block and holds no tokens)",
        help="KV blocks in the pool; unset: what fits",
        group=_CACHE_GROUP,
    )
    kv_cache_memory_bytes: int | None = integer(
        None,
        low=1,
        unit="bytes",
        metavar="BYTES",
        help="bytes of the pool on each device, such as 800M or 20G; unset: what fits",
        group=_CACHE_GROUP,
    )
    gpu_memory_utilization: float = number(
        0.9,
        "above 0 and at most 1; use 0.9",
        above=0.0,
        high=1.0,
        metavar="F",
        help="share of the device's memory that the engine may use in all",
        group=_CACHE_GROUP,
    )
    max_model_len: int | None = integer(
        None,
        low=2,  # a token of the prompt, and one of the answer
        help="most tokens of prompt and answer; unset: what model and pool have",
        group=_MODEL_GROUP,
    )
    max_num_seqs: int | None = integer(
        None,
        low=1,
        high=MAX_NUM_SEQS,
        requirement=_SEQS_REQUIREMENT,
        help="most sequences in a step",
        group=_STEPS_GROUP,
    )
    max_num_batched_tokens: int | None = integer(
        None,
        low=1,
        high=MAX_BATCHED_TOKENS,
        requirement=_TOKENS_REQUIREMENT,
        help="most tokens in a step",
        group=_STEPS_GROUP,
    )
    enable_prefix_caching: bool = switch(
        True, help="share the KV of common prefixes", group=_CACHE_GROUP
    )
    preemption_mode: str = choice(
        "recompute",
        PREEMPTION_MODES,
        help="what becomes of KV that must make room",
        group=_CACHE_GROUP,
    )
    swap_space: float | None = number(
        None,
        "of GiB, 0 or more; use 4",
        low=0.0,
        metavar="GIB",
        help="host memory for swapped KV; unset: 4, or half of the machine's if that is less",
        group=_CACHE_GROUP,
    )
    scheduling_policy: str = choice(
        "fcfs",
        SCHEDULING_POLICIES,
        help="who is served first: in order of arrival, or of priority, lower numbers first",
        group=_STEPS_GROUP,
    )
    load_format: str = choice(
        "auto", LOAD_FORMATS, help="dummy makes random weights", group=_MODEL_GROUP
    )
    tensor_parallel_size: int = integer(
        1,
        low=1,
        high=MAX_GPUS,
        requirement=f"an integer from 1 to {MAX_GPUS}, and no more than there are devices",
        help="devices that share the model, its KV cache and every step",
        group=_MODEL_GROUP,
    )
    skip_tokenizer_init: bool = switch(False)
    seed: int = integer(
        0,
        low=0,
        high=2**63 - 1,
        requirement="an integer from 0 to 2**63 - 1",
        help="seed of requests that bring none, and of random weights",
        group=_MODEL_GROUP,
    )
    async_scheduling: bool = switch(
        True,
        flags=("--async-scheduling", "--overlap"),
        help="launch a step before the tokens of the one before are read",
        group=_STEPS_GROUP,
    )
    num_scheduler_steps: int | None = integer(
        None,
        low=1,
        high=MAX_SCHEDULER_STEPS,
        requirement=_BURST_REQUIREMENT,
        help="decode steps in one launch while few requests run; 1: never; "
        "unset: 4 on a GPU for small models",
        group=_STEPS_GROUP,
    )
    compilation_cache_dir: str | Path | None = option(
        DEFAULT_COMPILATION_CACHE,
        metavar="FOLDER",
        help="where compiled programs are kept",
        group=_STEPS_GROUP,
    )
    num_compile_workers: int | None = integer(
        None,
        low=0,
        help="processes that compile beside the engine's at a first start; 0: none; "
        "unset: what suits the machine",
        group=_STEPS_GROUP,
    )
    verbose: bool = switch(False)

    def __post_init__(self):
        super().__post_init__()
        if self.num_blocks is not None and self.kv_cache_memory_bytes is not None:
            raise ValueError("give num_blocks or kv_cache_memory_bytes, not both")
        self._check_swap_space()

    def _check_swap_space(self) -> None:
        """Raise ValueError for more GiB than the machine has, or too few for the mode."""
        if self.swap_space is None:
            return
        memory_gib = physical_memory_bytes() / 2**30
        if self.swap_space > memory_gib:
            raise RequestError(
                "swap_space",
                f"GiB is more than this machine's {memory_gib:.1f} GiB of memory; lower it",
                value=f"{self.swap_space}",
            )
        if self.preemption_mode == "swap" and not self.swap_space:
            raise RequestError(
                "swap_space",
                (
                    "leaves preemption_mode='swap' no memory to swap to; give some GiB, or use "
                    "preemption_mode='recompute'"
                ),
                value=f"{self.swap_space}",
            )

    @classmethod
    def from_options(cls, model: str | Path | None, options: Mapping[str, Any]) -> "EngineConfig":
        """The configuration of `Engine(model, **options)`.

        Raises:
            TypeError, ValueError: an option is unknown or out of range.
        """
        if not isinstance(model, (str, Path, type(None))):
            raise RequestTypeError(
                "model",
                "must be a folder, a hub id, or None for the embedded one",
                value=repr(model),
            )
        known = [f.name for f in fields(cls) if f.name != "model"]
        for name in options:
            if name not in known:
                similar_names = difflib.get_close_matches(name, known, 1)
                hint = (
                    f"did you mean {similar_names[0]!r}?"
                    if similar_names
                    else f"known are {', '.join(known)}"
                )
                raise ValueError(f"unknown engine option {name!r}; {hint}")
        return cls(model=model, **options)

    @property
    def loop_mode(self) -> LoopMode:
        """Which of the two loops the engine runs."""
        return LoopMode.OVERLAPPED if self.async_scheduling else LoopMode.SYNCHRONOUS

    def host_blocks(self, bytes_per_block: int) -> int:
        """Blocks that fit in `swap_space`; 0 if `preemption_mode` never swaps."""
        if self.preemption_mode == "recompute":
            return 0
        default = min(4.0, physical_memory_bytes() / 2**31)
        swap_space = default if self.swap_space is None else self.swap_space
        return int(swap_space * 2**30) // bytes_per_block

    @property
    def tokenizer_needed(self) -> bool:
        """Whether text goes in and out."""
        return not self.skip_tokenizer_init


def physical_memory_bytes() -> int:
    """The memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
