"""`EngineConfig`: the options of an engine, checked when the config is created."""

import argparse
import difflib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from jpaged.errors import RequestError, RequestTypeError
from jpaged.options import Options, choice, integer, number, option, switch

EMBEDDED_MODEL = Path(__file__).parent / "assets" / "tiny"
"""Folder of the bundled model: a small trained model that ships with the package."""

DEFAULT_COMPILATION_CACHE = "~/.cache/jpaged/compiled"
"""Default folder of compiled programs."""

MAX_BLOCK_SIZE = 256
"""Maximum block size: a copy of `MAX_BLOCK_SIZE` in `pallas_kernels.checks`, which imports JAX."""

MAX_SCHEDULER_STEPS = 64
"""Maximum number of decode steps in one launch."""

MAX_GPUS = 8
"""Maximum number of devices that one engine uses, all on one host."""

MAX_NUM_SEQS = 2048
"""Maximum number of sequences in a step. The limit bounds the first startup, which compiles
programs for every batch size. Above 256, every multiple of 64 is a batch size: 2,048 needs some 200
programs, and 100,000 would need thousands."""

MAX_BATCHED_TOKENS = 2**18
"""Maximum number of tokens in a step. The device memory for a step's temporary arrays grows with
the number of tokens."""

DTYPES = ("auto", "float32", "bfloat16", "float16")
QUANTIZATIONS = ("compressed-tensors", "fp8", "modelopt")
"""Quantization methods: a copy from `jpaged.models.quantization`, which imports JAX."""

FP8_KV_CACHE_DTYPES = ("fp8", "fp8_e4m3")
KV_CACHE_DTYPES = ("auto", *DTYPES[1:], *FP8_KV_CACHE_DTYPES)
LOAD_FORMATS = ("auto", "safetensors", "dummy")
SCHEDULING_POLICIES = ("fcfs", "priority")
PREEMPTION_MODES = ("recompute", "swap", "auto")

_MODEL_GROUP, _CACHE_GROUP, _STEPS_GROUP = "the model", "the paged KV cache", "the steps"
_COMPILED_SIZES_NOTE = "because startup compiles steps of every size up to it"
_SEQS_REQUIREMENT = (
    f"an integer, at most {MAX_NUM_SEQS}, {_COMPILED_SIZES_NOTE}; further requests wait"
)
_TOKENS_REQUIREMENT = (
    f"an integer, at most {MAX_BATCHED_TOKENS}, {_COMPILED_SIZES_NOTE}; longer prompts are "
    "computed in chunks"
)
_BURST_REQUIREMENT = (
    f"an integer, at most {MAX_SCHEDULER_STEPS}; a new request may wait for twice as many steps"
)


SPECULATIVE_METHODS = ("ngram",)
MAX_SPECULATIVE_TOKENS = 7
"""Maximum number of drafts per sequence in a step."""

MAX_PROMPT_LOOKUP = 16
"""Maximum number of tokens that the "ngram" method looks up."""


@dataclass(frozen=True)
class SpeculativeConfig(Options):
    """Options of speculative decoding, with the names and meanings of vLLM's `speculative_config`.

    Attributes:
        method: "ngram" looks up the last tokens of a sequence earlier in the sequence (prompt
            lookup), and proposes the tokens that followed.
        num_speculative_tokens: Maximum number of drafts per sequence in a step, 1 to 7. Steps are
            compiled for 1, 3 or 7 drafts, so 2 is as slow as 3, and 4 is as slow as 7.
        prompt_lookup_max: Maximum number of tokens to look up.
        prompt_lookup_min: Minimum number of tokens to look up.

    Raises:
        TypeError, ValueError: A value is invalid. The message names the field.
    """

    method: str = choice("ngram", SPECULATIVE_METHODS)
    num_speculative_tokens: int = integer(
        3,
        low=1,
        high=MAX_SPECULATIVE_TOKENS,
        requirement=f"an integer from 1 to {MAX_SPECULATIVE_TOKENS}",
    )
    prompt_lookup_max: int = integer(
        4, low=1, high=MAX_PROMPT_LOOKUP, requirement=f"an integer from 1 to {MAX_PROMPT_LOOKUP}"
    )
    prompt_lookup_min: int = integer(
        1, low=1, high=MAX_PROMPT_LOOKUP, requirement=f"an integer from 1 to {MAX_PROMPT_LOOKUP}"
    )

    @property
    def num_padded_drafts(self) -> int:
        """Number of drafts per sequence for which steps are compiled: 1, 3 or 7.

        A step computes the last token and the drafts of each sequence: 2, 4 or 8 tokens.
        """
        return next(k for k in (1, 3, 7) if k >= self.num_speculative_tokens)

    @classmethod
    def from_mapping(cls, fields_by_name: object) -> "SpeculativeConfig":
        """Return the config with the given fields, such as `{"method": "ngram"}`.

        A value that is a config already is returned as it is.

        Raises:
            TypeError, ValueError: The value is not a mapping, or a field is unknown or invalid. The
                message names the field.
        """
        if isinstance(fields_by_name, cls):
            return fields_by_name
        if not isinstance(fields_by_name, Mapping):
            raise RequestTypeError(
                "speculative_config",
                'must be a dict such as {"method": "ngram", "num_speculative_tokens": 3}',
                value=repr(fields_by_name),
            )
        known = [f.name for f in fields(cls)]
        for name in fields_by_name:
            if name not in known:
                raise RequestError(
                    f"speculative_config.{name}",
                    "is not supported",
                    remedy=f"the supported fields are {', '.join(known)}",
                )
        try:
            return cls(**fields_by_name)
        except RequestError as error:
            names = {name: f"speculative_config.{name}" for name in known}
            raise error.with_renamed_fields(names) from None

    def __post_init__(self):
        super().__post_init__()
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise RequestError(
                "prompt_lookup_min",
                f"is above prompt_lookup_max={self.prompt_lookup_max}; lower the value",
                value=f"{self.prompt_lookup_min}",
            )


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None


class LoopMode(StrEnum):
    """Whether the host prepares a step while the device runs another (docs/decisions/0002).

    Attributes:
        OVERLAPPED: The engine launches a step before it reads the tokens of the previous step.
        SYNCHRONOUS: The engine reads the tokens of a step before it launches the next step.
    """

    OVERLAPPED = "overlapped"
    SYNCHRONOUS = "synchronous"


class LogprobsMode(StrEnum):
    """Values that an engine reports for output tokens, with vLLM's names.

    Attributes:
        RAW_LOGPROBS: Log-probabilities before biases, penalties, temperature and truncation.
        PROCESSED_LOGPROBS: Log-probabilities of the distribution that tokens are drawn from.
        RAW_LOGITS: As `RAW_LOGPROBS`, but logits.
        PROCESSED_LOGITS: As `PROCESSED_LOGPROBS`, but logits.
    """

    RAW_LOGPROBS = "raw_logprobs"
    PROCESSED_LOGPROBS = "processed_logprobs"
    RAW_LOGITS = "raw_logits"
    PROCESSED_LOGITS = "processed_logits"


@dataclass(frozen=True)
class EngineConfig(Options):
    """Options of an `Engine`, with the names and meanings of vLLM's engine arguments.

    Unless stated otherwise, None lets the engine choose a value from the model and the device.

    Attributes:
        model: Local folder or Hugging Face hub id of the model; None for the bundled model.
        dtype: Dtype of weights and activations. "auto" uses the dtype in config.json, or bfloat16
            (float32 on a CPU) if config.json has none.
        quantization: "fp8" quantizes the weights of the projections to FP8 (e4m3) while they are
            loaded. None keeps the weights of the checkpoint. For an FP8 checkpoint, the value may
            also be the checkpoint's method: "fp8", "compressed-tensors" or "modelopt".
        kv_cache_dtype: Dtype of the KV cache. "auto" uses the dtype of the weights. "fp8" and
            "fp8_e4m3" store 8-bit keys and values, so that the pool holds twice as many blocks as
            with bfloat16. Each layer divides its keys and its values by a scale from the
            checkpoint, or by 1. A GPU needs compute capability 8.9 or higher for FP8.
        block_size: Number of slots in a KV block, 1 to 256. Prefill attention is fastest with a
            power of two from 8 on.
        num_blocks: Number of KV blocks in the pool, including the null block. None: the engine
            chooses the number.
        kv_cache_memory_bytes: Bytes of the pool on each device; an alternative to `num_blocks`.
        gpu_memory_utilization: Fraction of the device's memory that the engine may use in total.
        max_model_len: Maximum number of tokens of a sequence, prompt and output together.
        max_num_seqs: Maximum number of sequences in a step, up to 2,048.
        max_num_batched_tokens: Maximum number of tokens in a step, up to 262,144. Longer prompts
            are prefilled in chunks.
        enable_prefix_caching: Share full KV blocks between requests that begin with the same
            tokens. Blocks stay cached after their sequence ends, until the pool needs the space.
        preemption_mode: How a request is preempted if the pool is full. "recompute" drops the
            request's KV, "swap" copies the KV to host memory if there is space, and "auto" uses the
            faster method.
        swap_space: GiB of host memory for the swapped KV of all devices together. The engine uses
            at most the size of the pool. None is 4, or half of the machine's memory if that is
            less. The limit of a container is not taken into account. If not even one block fits,
            "auto" recomputes.
        scheduling_policy: "fcfs" serves requests in order of arrival. "priority" serves the lowest
            priority number first; a higher number waits while requests with lower numbers arrive.
        load_format: "auto" and "safetensors" read the checkpoint; "dummy" creates random weights.
        tensor_parallel_size: Number of tensor-parallel devices. Each device holds a shard of the
            weights and of every token's KV. The number must divide the model's attention heads and
            its feed-forward width, and must be a divisor or a multiple of its KV heads.
        enable_expert_parallel: Place whole experts on the tensor-parallel devices, instead of a
            shard of the width of every expert. The number of devices must divide the number of
            experts. Other weights are split as without the option.
        skip_tokenizer_init: Load no tokenizer. Prompts and outputs are token ids only.
        seed: Seed of random weights, and of requests that specify no seed.
        logprobs_mode: Values that `SamplingParams.logprobs` returns. "raw_logprobs" are
            log-probabilities of the model's logits. "processed_logprobs" are log-probabilities
            after biases, penalties, temperature, top-k, top-p and min-p; a greedy request has no
            temperature and no truncation. "raw_logits" and "processed_logits" are the logits at
            these two points. A grammar's mask comes first in every mode. Prompt tokens
            always have raw log-probabilities. A beam search ranks its beams by raw
            log-probabilities. `best_of` ranks by log-probabilities, in the processed modes by
            processed ones.
        batch_invariant: Compute the same bits for a request alone and in any batch.
            docs/reproducibility.md lists the supported models and GPUs.
        async_scheduling: Launch each step before the tokens of the previous step are read (the
            overlapped loop).
        num_scheduler_steps: Number of decode steps in a burst, which is launched as one program.
            Small models become faster, because the device does not wait for the host between the
            steps. A burst needs the overlapped loop, at most 32 running sequences, no waiting
            request and no beam search. Randomly sampled rows must not need penalties, biases or
            log-probabilities. `Engine.generate` also uses bursts for more sequences and while
            requests wait, because no new request can arrive. 1 disables bursts. None is 4 on a GPU
            if the weights are at most 5 GB per device, and 1 otherwise.
        speculative_config: Fields of `SpeculativeConfig`, as a dict. Steps then verify drafts of
            the next tokens if verifying is faster. The tokens are the same as without drafts. None:
            no speculative decoding.
        compilation_cache_dir: Folder in which compiled programs are stored, so that later startups
            are fast; None stores nothing. Everyone who can write to the folder can run code in this
            process. The folder is also JAX's persistent compilation cache, unless JAX's
            configuration or an earlier engine has set another folder.
        num_compile_workers: Number of processes that compile concurrently with the engine's process
            if a startup has many programs to compile; 0 for none. The processes need
            `compilation_cache_dir`. None is 0 on a CPU. On a GPU, None is half the number of
            processors, at most 16. Little free device memory lowers the number: each process needs
            1 GiB, or 1.75 GiB if jpaged ships no XLA measurements for the model.
        verbose: Report loading, memory use and compilation on stderr.

    Raises:
        TypeError, ValueError: A value is invalid. The message names the option and the remedy.
    """

    model: str | Path | None = option(
        None,
        metavar="FOLDER_OR_ID",
        help="folder, or hub id such as Qwen/Qwen3-0.6B; unset: the bundled small model",
        group=_MODEL_GROUP,
    )
    dtype: str = choice("auto", DTYPES, help="dtype of weights and activations", group=_MODEL_GROUP)
    quantization: str | None = choice(
        None,
        QUANTIZATIONS,
        help="fp8: quantize the projections' weights to FP8; unset: keep the checkpoint's weights",
        group=_MODEL_GROUP,
    )
    kv_cache_dtype: str = choice(
        "auto",
        KV_CACHE_DTYPES,
        help="dtype of keys and values; auto: the dtype of the weights; fp8 and fp8_e4m3 need half "
        "the memory of bfloat16",
        group=_CACHE_GROUP,
    )
    block_size: int = integer(
        16,
        low=1,
        high=MAX_BLOCK_SIZE,
        requirement=f"an integer from 1 to {MAX_BLOCK_SIZE}; use 16",
        help=f"number of tokens in a KV block, 1 to {MAX_BLOCK_SIZE}",
        group=_CACHE_GROUP,
    )
    num_blocks: int | None = integer(
        None,
        low=2,
        requirement="an integer, 2 or more (block 0 is the null block and holds no tokens)",
        help="number of KV blocks in the pool; unset: as many as fit",
        group=_CACHE_GROUP,
    )
    kv_cache_memory_bytes: int | None = integer(
        None,
        low=1,
        unit="bytes",
        metavar="BYTES",
        help="size of the pool on each device, such as 800M or 20G; unset: as much as fits",
        group=_CACHE_GROUP,
    )
    gpu_memory_utilization: float = number(
        0.9,
        "above 0 and at most 1; use 0.9",
        above=0.0,
        high=1.0,
        metavar="F",
        help="fraction of the device's memory that the engine may use in total",
        group=_CACHE_GROUP,
    )
    max_model_len: int | None = integer(
        None,
        low=2,  # a sequence has at least one prompt token and one output token
        help="maximum number of tokens in prompt and answer; unset: limit of model and pool",
        group=_MODEL_GROUP,
    )
    max_num_seqs: int | None = integer(
        None,
        low=1,
        high=MAX_NUM_SEQS,
        requirement=_SEQS_REQUIREMENT,
        help="maximum number of sequences in a step",
        group=_STEPS_GROUP,
    )
    max_num_batched_tokens: int | None = integer(
        None,
        low=1,
        high=MAX_BATCHED_TOKENS,
        requirement=_TOKENS_REQUIREMENT,
        help="maximum number of tokens in a step",
        group=_STEPS_GROUP,
    )
    enable_prefix_caching: bool = switch(
        True, help="share the KV of common prefixes between requests", group=_CACHE_GROUP
    )
    preemption_mode: str = choice(
        "recompute",
        PREEMPTION_MODES,
        help="how to preempt a request if the pool is full; auto: the faster way",
        group=_CACHE_GROUP,
    )
    swap_space: float | None = number(
        None,
        "of GiB, 0 or more; use 4",
        low=0.0,
        metavar="GIB",
        help="host memory for swapped KV; unset: 4, but at most half of the machine's memory",
        group=_CACHE_GROUP,
    )
    scheduling_policy: str = choice(
        "fcfs",
        SCHEDULING_POLICIES,
        help="order of requests: by arrival, or by priority with lower numbers first",
        group=_STEPS_GROUP,
    )
    load_format: str = choice(
        "auto", LOAD_FORMATS, help="dummy: create random weights", group=_MODEL_GROUP
    )
    tensor_parallel_size: int = integer(
        1,
        low=1,
        high=MAX_GPUS,
        requirement=f"an integer from 1 to {MAX_GPUS}, and at most the number of devices",
        help="number of devices that each hold a shard of the weights and of the KV cache",
        group=_MODEL_GROUP,
    )
    enable_expert_parallel: bool = switch(
        False,
        help="place whole experts on the devices, instead of a shard of every expert",
        group=_MODEL_GROUP,
    )
    skip_tokenizer_init: bool = switch(False)
    seed: int = integer(
        0,
        low=0,
        high=2**63 - 1,
        requirement="an integer from 0 to 2**63 - 1",
        help="seed of random weights, and of requests that specify no seed",
        group=_MODEL_GROUP,
    )
    logprobs_mode: str = choice(
        "raw_logprobs",
        tuple(mode.value for mode in LogprobsMode),
        help="values reported for output tokens; processed: after biases, penalties, temperature "
        "and truncation",
        group=_MODEL_GROUP,
    )
    batch_invariant: bool = switch(
        False,
        help="compute the same bits for a request alone and in any batch",
        group=_STEPS_GROUP,
    )
    async_scheduling: bool = switch(
        True,
        flags=("--async-scheduling", "--overlap"),
        help="launch each step before the tokens of the previous step are read",
        group=_STEPS_GROUP,
    )
    num_scheduler_steps: int | None = integer(
        None,
        low=1,
        high=MAX_SCHEDULER_STEPS,
        requirement=_BURST_REQUIREMENT,
        help="number of decode steps in one launch while few requests run; unset: 4 for a small "
        "model on a GPU, else 1",
        group=_STEPS_GROUP,
    )
    speculative_config: Mapping[str, Any] | SpeculativeConfig | None = option(
        None,
        parse=_parse_json,
        metavar="JSON",
        help='speculative decoding, such as {"method": "ngram", "num_speculative_tokens": 3}; '
        "unset: none",
        group=_STEPS_GROUP,
    )
    compilation_cache_dir: str | Path | None = option(
        DEFAULT_COMPILATION_CACHE,
        metavar="FOLDER",
        help="folder in which compiled programs are stored",
        group=_STEPS_GROUP,
    )
    num_compile_workers: int | None = integer(
        None,
        low=0,
        help="number of extra processes that compile during the first startup; unset: chosen for "
        "the machine",
        group=_STEPS_GROUP,
    )
    verbose: bool = switch(False)

    def __post_init__(self):
        super().__post_init__()
        if self.num_blocks is not None and self.kv_cache_memory_bytes is not None:
            raise ValueError(
                "num_blocks and kv_cache_memory_bytes are both set: pass "
                "num_blocks or kv_cache_memory_bytes, not both"
            )
        self._check_swap_space()
        _ = self.speculation  # check the fields

    def _check_swap_space(self) -> None:
        """Raise RequestError if `swap_space` exceeds the machine's memory, or is 0 in swap mode."""
        if self.swap_space is None:
            return
        memory_gib = physical_memory_bytes() / 2**30
        if self.swap_space > memory_gib:
            raise RequestError(
                "swap_space",
                f"GiB is more than this machine's {memory_gib:.1f} GiB of memory; lower the value",
                value=f"{self.swap_space}",
            )
        if self.preemption_mode == "swap" and not self.swap_space:
            raise RequestError(
                "swap_space",
                (
                    "provides no host memory, but preemption_mode='swap' needs host memory; pass a "
                    "larger value, or use preemption_mode='recompute'"
                ),
                value=f"{self.swap_space}",
            )

    @classmethod
    def from_options(cls, model: str | Path | None, options: Mapping[str, Any]) -> "EngineConfig":
        """Return the config of `Engine(model, **options)`.

        Raises:
            TypeError, ValueError: An option is unknown or has an invalid value.
        """
        if not isinstance(model, (str, Path, type(None))):
            raise RequestTypeError(
                "model",
                "must be a folder, a hub id, a JaxModel, or None for the bundled model",
                value=repr(model),
            )
        known = [f.name for f in fields(cls) if f.name != "model"]
        for name in options:
            if name not in known:
                similar_names = difflib.get_close_matches(name, known, 1)
                hint = (
                    f"did you mean {similar_names[0]!r}?"
                    if similar_names
                    else f"use one of {', '.join(known)}"
                )
                raise ValueError(f"unknown engine option {name!r}; {hint}")
        return cls(model=model, **options)

    @property
    def loop_mode(self) -> LoopMode:
        """Loop that the engine runs: overlapped or synchronous."""
        return LoopMode.OVERLAPPED if self.async_scheduling else LoopMode.SYNCHRONOUS

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """Checked options of speculative decoding; None without speculative decoding."""
        if self.speculative_config is None:
            return None
        return SpeculativeConfig.from_mapping(self.speculative_config)

    def host_blocks(self, bytes_per_block: int) -> int:
        """Return the number of blocks that fit in `swap_space`; 0 if requests are never swapped."""
        if self.preemption_mode == "recompute":
            return 0
        default = min(4.0, physical_memory_bytes() / 2**31)
        swap_space = default if self.swap_space is None else self.swap_space
        return int(swap_space * 2**30) // bytes_per_block

    @property
    def tokenizer_needed(self) -> bool:
        """Whether the engine loads a tokenizer, so that prompts and outputs can be text."""
        return not self.skip_tokenizer_init


def physical_memory_bytes() -> int:
    """Return the size of this machine's physical memory in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
