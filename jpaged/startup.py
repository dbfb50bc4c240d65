"""From a configuration to an engine's parts: load, size the pool, compile, warm up."""

import json
import os
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp

from jpaged.compile_pool import CompilePool, make_orders
from jpaged.config import EMBEDDED_MODEL, EngineConfig
from jpaged.core.block_manager import BlockManager
from jpaged.core.prefix_cache import PrefixCache
from jpaged.core.scheduler import Scheduler, SchedulerConfig
from jpaged.core.swap import PreemptionMode, PressurePolicy
from jpaged.intake import Intake
from jpaged.jax_setup import prepare_jax, program_store, without_collections
from jpaged.models.config import ModelConfig
from jpaged.models.loader import load_model, model_shapes, read_config, resolve_checkpoint
from jpaged.recorded_products import offer_recorded_products
from jpaged.reporter import Reporter
from jpaged.runtime.kv_cache import MemoryAccount
from jpaged.runtime.model_runner import ModelRunner
from jpaged.runtime.programs import ProgramBuilder
from jpaged.runtime.recipes import Shapes, SplitModel, recipes
from jpaged.runtime.shared_calls import SharedCalls
from jpaged.runtime.thread_settings import ThreadSettings
from jpaged.runtime.timing import measure_costs
from jpaged.runtime_config import RuntimeConfig
from jpaged.sizing import Sizing, step_buckets
from jpaged.tokenizer import Tokenizer
from pallas_kernels import select_backend


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
        record = offer_recorded_products(device)
    folder = resolve_checkpoint(config.model or EMBEDDED_MODEL)
    model_config = ModelConfig.from_hf(read_config(folder))
    dtype = _resolve_dtype(config.dtype, model_config, device.platform)
    draft = model_shapes(model_config, dtype)
    store = program_store(config.compilation_cache_dir, model_config, draft, device)
    draft_split = SplitModel.of(draft)
    sizing = Sizing(config, model_config, draft_split, dtype, device)
    shared, progress = SharedCalls(select_backend(device.platform)), _Progress(reporter)
    builder = ProgramBuilder(os.cpu_count() or 1, store, progress)
    measured = record.has(draft_split.leaves, sizing.step_rows)
    orders = make_orders(config, folder, dtype, device, store, measured=measured)
    pool = CompilePool(orders, store, reporter.say, verbose=config.verbose)

    def size() -> tuple[RuntimeConfig, MemoryAccount, Shapes]:
        return sizing.fit(sizing.workspace(builder, shared, pool.start))

    def begin_programs(sized: Future[tuple[RuntimeConfig, MemoryAccount, Shapes]]) -> None:
        runtime, _, shapes = sized.result()
        needed = recipes(draft_split, shapes, runtime, step_buckets(runtime), shared)
        builder.add(pool.compiled(needed, runtime, progress))

    with ThreadPoolExecutor(3) as beside, pool, builder:
        run = ThreadSettings().run
        sized = beside.submit(run, size)
        # What has to be measured waits until the device does nothing else.
        begun = beside.submit(run, begin_programs, sized) if measured else None
        with reporter.phase(f"loading {folder.name} as {dtype.name}"):
            text = beside.submit(Tokenizer.from_folder, folder) if config.tokenizer_needed else None
            split = _load(config, folder, model_config, dtype)
            tokenizer = text.result() if text is not None else None
        eos = _eos_token_ids(folder, model_config, tokenizer)
        with reporter.phase("sizing the pool"):
            runtime, account, shapes = sized.result()
        for line in _describe(runtime, account, device):
            reporter.say(line)
        with reporter.phase("compiling"):
            begun.result() if begun is not None else begin_programs(sized)
            programs = builder.programs()
    with reporter.phase("warming up"):
        runner = ModelRunner(split, shapes, runtime, step_buckets(runtime), programs, eos)
        runner.warm_up()
    for line in account.beside(device.memory_stats() or {}):
        reporter.say(line)
    pressure = _choose_pressure(config, runtime, runner, reporter)
    return EngineParts(
        folder=folder,
        intake=_make_intake(config, runtime, tokenizer, eos),
        model_config=model_config,
        runtime_config=runtime,
        memory_account=account,
        scheduler=_make_scheduler(config, runtime, pressure),
        runner=runner,
    )


def _load(
    config: EngineConfig, folder: Path, model_config: ModelConfig, dtype: jnp.dtype
) -> SplitModel:
    options = {"dtype": dtype, "load_format": config.load_format, "seed": config.seed}
    split = SplitModel.of(load_model(folder, model_config, **options))
    jax.block_until_ready(split.leaves)
    return split


def _resolve_dtype(asked: str, model: ModelConfig, platform: str) -> jnp.dtype:
    if asked != "auto":
        return jnp.dtype(asked)
    if platform == "cpu":  # where bfloat16 is emulated
        return jnp.dtype(jnp.float32)
    return jnp.dtype(model.checkpoint_dtype or "bfloat16")


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
        costs = measure_costs(runner, runtime, step_buckets(runtime))
    return PressurePolicy(mode, runtime.num_host_blocks, costs)


def _make_intake(
    config: EngineConfig,
    runtime: RuntimeConfig,
    tokenizer: Tokenizer | None,
    eos_token_ids: frozenset[int],
) -> Intake:
    return Intake(
        tokenizer,
        vocab_size=runtime.vocab_size,
        max_model_len=runtime.max_model_len,
        max_num_seqs=runtime.max_num_seqs,
        eos_token_ids=eos_token_ids,
        seed=config.seed,
    )


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


class _Progress:
    """Tells how many programs are compiled, now and then, and never less than before."""

    def __init__(self, reporter: Reporter):
        self._reporter, self._told = reporter, 0

    def __call__(self, done: int, total: int) -> None:
        if done > self._told and (done == total or done % 10 == 0):
            self._told = done
            self._reporter.say(f"compiled {done} of {total} programs")


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
