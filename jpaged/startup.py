"""From a configuration to an engine's parts: load, measure, size the pool, compile, warm up."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp

from jpaged.config import EMBEDDED_MODEL, EngineConfig
from jpaged.core.block_manager import BlockManager
from jpaged.core.prefix_cache import PrefixCache
from jpaged.core.scheduler import Scheduler, SchedulerConfig
from jpaged.core.swap import PreemptionMode, PressurePolicy
from jpaged.intake import Intake
from jpaged.jax_setup import (
    offer_recorded_products,
    prepare_jax,
    program_store,
    without_collections,
)
from jpaged.models.config import ModelConfig
from jpaged.models.loader import load_model, read_config, resolve_checkpoint
from jpaged.reporter import Reporter
from jpaged.runtime.buckets import Buckets, make_buckets
from jpaged.runtime.kv_cache import (
    MAX_BLOCKS,
    MemoryAccount,
    block_bytes,
    fit_blocks,
    tree_bytes,
)
from jpaged.runtime.model_runner import ModelRunner
from jpaged.runtime.programs import ProgramBuilder, largest_step_workspace
from jpaged.runtime.recipes import Shapes, SplitModel, recipes
from jpaged.runtime.swap import staging_bytes
from jpaged.runtime.timing import measure_costs
from jpaged.runtime_config import (
    BURST_WEIGHT_BYTES,
    CPU_DEFAULTS,
    CPU_KV_CACHE_BYTES,
    GPU_DEFAULTS,
    PlatformDefaults,
    RuntimeConfig,
    resolve_limits,
    with_pool,
    with_swap,
)
from jpaged.tokenizer import Tokenizer
from pallas_kernels import select_backend

_DRAFT_BLOCKS = 2
"""Blocks of the pool with which the largest step's workspace is measured; they do not enter it."""

_SMALL_ARRAYS = 256 * 2**20
"""Bytes for what no program's account has: steps' inputs, results on their way to the host, and the
allocator's gaps between these."""

_STEPS_IN_FLIGHT = 2
"""Large steps whose workspaces can exist at once: the one that runs and the one launched behind it.
Steps that a burst would have may be more; theirs count as small arrays."""


@dataclass(frozen=True)
class EngineParts:
    """What an `Engine` is made of."""

    folder: Path  # the checkpoint's
    intake: Intake
    model_config: ModelConfig
    runtime_config: RuntimeConfig
    memory_account: MemoryAccount
    scheduler: Scheduler
    runner: ModelRunner


def build_parts(config: EngineConfig) -> EngineParts:
    """Build everything an engine needs.

    Raises:
        ValueError: the model cannot be loaded, or does not fit the device as configured.
    """
    with without_collections():
        return _build_parts(config)


def _build_parts(config: EngineConfig) -> EngineParts:
    reporter = Reporter(config.verbose)
    with reporter.phase("starting the device"):
        prepare_jax(config)
        device = jax.local_devices()[0]
        offer_recorded_products(device)
    folder = resolve_checkpoint(config.model or EMBEDDED_MODEL)
    model_config = ModelConfig.from_hf(read_config(folder))
    dtype = _resolve_dtype(config.dtype, model_config, device.platform)
    loading = reporter.phase(f"loading {folder.name} as {dtype.name}")
    with loading, ThreadPoolExecutor(1) as beside:
        text = beside.submit(Tokenizer.from_folder, folder) if config.tokenizer_needed else None
        model = load_model(
            folder, model_config, dtype=dtype, load_format=config.load_format, seed=config.seed
        )
        split = SplitModel.of(model)
        jax.block_until_ready(split.leaves)
        tokenizer = text.result() if text is not None else None
    store = program_store(config, model_config, model, device)
    eos = _eos_token_ids(folder, model_config, tokenizer)
    with ProgramBuilder(os.cpu_count() or 1, store, partial(_report_compiled, reporter)) as builder:
        with reporter.phase("sizing the pool"):
            fitted = _fit_to_device(config, model_config, split, dtype, device, builder)
        runtime, account, shapes = fitted
        for line in _describe(runtime, account, device):
            reporter.say(line)
        runner = _make_runner(split, shapes, runtime, eos, builder, reporter)
    for line in account.beside(device.memory_stats() or {}):
        reporter.say(line)
    pressure = _choose_pressure(config, runtime, runner, reporter)
    return EngineParts(
        folder=folder,
        intake=Intake(
            tokenizer,
            vocab_size=runtime.vocab_size,
            max_model_len=runtime.max_model_len,
            max_num_seqs=runtime.max_num_seqs,
            eos_token_ids=eos,
            seed=config.seed,
        ),
        model_config=model_config,
        runtime_config=runtime,
        memory_account=account,
        scheduler=_make_scheduler(config, runtime, pressure),
        runner=runner,
    )


def _resolve_dtype(asked: str, model: ModelConfig, platform: str) -> jnp.dtype:
    if asked != "auto":
        return jnp.dtype(asked)
    if platform == "cpu":  # where bfloat16 is emulated
        return jnp.dtype(jnp.float32)
    return jnp.dtype(model.checkpoint_dtype or "bfloat16")


def _fit_to_device(
    config: EngineConfig,
    model: ModelConfig,
    split: SplitModel,
    dtype: jnp.dtype,
    device,
    builder: ProgramBuilder,
) -> tuple[RuntimeConfig, MemoryAccount, Shapes]:
    """Settle every number, and account for the memory."""
    limits = resolve_limits(
        config,
        model_max_len=model.max_position_embeddings,
        vocab_size=model.vocab_size,
        backend=select_backend(device.platform),
        defaults=_defaults(device, tree_bytes(split.leaves)),
    )
    per_block = block_bytes(model, limits.block_size, dtype)
    # Until the pool's size is known, only swap_space bounds the blocks in host memory.
    limits = replace(limits, num_host_blocks=config.host_blocks(per_block))
    account = _account_without_pool(limits, model, split, dtype, device, builder)
    num_blocks = _choose_num_blocks(config, limits, account, per_block)
    runtime = with_swap(with_pool(limits, num_blocks, config), config, per_block)
    account = replace(
        account, kv_cache=num_blocks * per_block, swap=runtime.num_host_blocks * per_block
    )
    if account.limit is not None and account.total > account.limit:
        raise ValueError(
            "the engine as configured does not fit in the device's memory:\n"
            + "\n".join(account.lines())
            + "\nlower num_blocks, kv_cache_memory_bytes, max_num_batched_tokens or max_num_seqs, "
            "or raise gpu_memory_utilization"
        )
    return runtime, account, Shapes.of(split, model, runtime, dtype)


def _defaults(device, weights: int) -> PlatformDefaults:
    if device.platform == "cpu":
        return CPU_DEFAULTS
    if weights > BURST_WEIGHT_BYTES:  # the device is busy for longer than the host: no bursts
        return replace(GPU_DEFAULTS, num_scheduler_steps=1)
    return GPU_DEFAULTS


def _account_without_pool(
    limits: RuntimeConfig,
    model: ModelConfig,
    split: SplitModel,
    dtype: jnp.dtype,
    device,
    builder: ProgramBuilder,
) -> MemoryAccount:
    shapes = Shapes.of(split, model, replace(limits, num_blocks=_DRAFT_BLOCKS), dtype)
    weights, workspace = tree_bytes(split.leaves), 0
    limit = _memory_limit(device, weights)
    if limit is not None:  # a CPU step's workspace is not worth a compilation
        one_step = largest_step_workspace(builder, split, shapes, limits, _buckets(limits))
        workspace = _STEPS_IN_FLIGHT * one_step + _SMALL_ARRAYS
        workspace += staging_bytes(shapes.kv.pool, limits.num_host_blocks)
    sampling = tree_bytes((shapes.sampling, shapes.last_tokens, shapes.kv.block_tables))
    return MemoryAccount(weights, sampling, workspace, 0, limit)


def _memory_limit(device, weights: int) -> int | None:
    """Bytes for this engine, its weights included: what JAX has reserved less what others hold."""
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        return None
    held_by_others = max(stats["bytes_in_use"] - weights, 0)
    return stats["bytes_limit"] - held_by_others


def _choose_num_blocks(
    config: EngineConfig, limits: RuntimeConfig, account: MemoryAccount, per_block: int
) -> int:
    """As many blocks as asked for, or as fit."""
    if config.num_blocks is not None:
        return config.num_blocks
    if config.kv_cache_memory_bytes is not None:
        return fit_blocks(config.kv_cache_memory_bytes, per_block)
    if account.limit is not None:
        return min(fit_blocks(account.limit - account.total, per_block), MAX_BLOCKS)
    # Memory that belongs to everybody: no more than the sequences can use.
    useful = limits.max_num_seqs * limits.max_blocks_per_seq + 1
    return min(fit_blocks(CPU_KV_CACHE_BYTES, per_block), useful)


def _buckets(runtime: RuntimeConfig) -> Buckets:
    few = runtime.few_programs
    return make_buckets(runtime.max_num_seqs, runtime.max_num_batched_tokens, few=few)


def _choose_pressure(
    config: EngineConfig, runtime: RuntimeConfig, runner: ModelRunner, reporter: Reporter
) -> PressurePolicy:
    """How groups are preempted; what it costs is measured only where that decides."""
    mode = PreemptionMode(config.preemption_mode)
    if not runtime.num_host_blocks:
        return PressurePolicy()
    if mode is not PreemptionMode.AUTO:
        return PressurePolicy(mode, runtime.num_host_blocks)
    with reporter.phase("measuring the cost of preemption"):
        costs = measure_costs(runner, runtime, _buckets(runtime))
    return PressurePolicy(mode, runtime.num_host_blocks, costs)


def _make_scheduler(
    config: EngineConfig, runtime: RuntimeConfig, pressure: PressurePolicy
) -> Scheduler:
    limits = SchedulerConfig(
        runtime.max_num_seqs,
        runtime.max_num_batched_tokens,
        runtime.max_model_len,
        by_priority=config.scheduling_policy == "priority",
    )
    cache = PrefixCache(runtime.block_size) if config.enable_prefix_caching else None
    manager = BlockManager(runtime.num_blocks, runtime.block_size, cache)
    return Scheduler(limits, manager, pressure)


def _make_runner(
    split: SplitModel,
    shapes: Shapes,
    runtime: RuntimeConfig,
    eos_token_ids: frozenset[int],
    builder: ProgramBuilder,
    reporter: Reporter,
) -> ModelRunner:
    buckets = _buckets(runtime)
    with reporter.phase("compiling"):
        builder.add(recipes(split, shapes, runtime, buckets))
        programs = builder.programs()
    with reporter.phase("warming up"):
        runner = ModelRunner(split, shapes, runtime, buckets, programs, eos_token_ids)
        runner.warm_up()
    return runner


def _report_compiled(reporter: Reporter, done: int, total: int) -> None:
    if done == total or done % 10 == 0:
        reporter.say(f"compiled {done} of {total} programs")


def _describe(runtime: RuntimeConfig, account: MemoryAccount, device) -> list[str]:
    capacity = (runtime.num_blocks - 1) * runtime.block_size
    swap = f"host memory for swapped blocks: up to {account.swap / 2**20:,.1f} MiB"
    return [
        f"memory of {device.device_kind}:",
        *account.lines(),
        *([swap] if account.swap else []),
        f"KV pool of {runtime.num_blocks - 1:,} blocks of {runtime.block_size} tokens "
        f"({capacity:,} tokens), up to {runtime.max_num_seqs} sequences of up to "
        f"{runtime.max_model_len:,} tokens, {runtime.max_num_batched_tokens:,} tokens a step",
    ]


def _eos_token_ids(folder: Path, model: ModelConfig, tokenizer: Tokenizer | None) -> frozenset[int]:
    """End tokens of the model's config, its generation config and its tokenizer."""
    found: set[object] = set(model.eos_token_ids)
    path = folder / "generation_config.json"
    if path.is_file():
        listed = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        found.update(listed if isinstance(listed, list) else [listed])
    found.add(tokenizer.eos_token_id if tokenizer is not None else None)
    return frozenset(token for token in found if isinstance(token, int))
