"""From a configuration to an engine's parts: load, size the pool, compile, warm up."""

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jpaged.compile.builder import ProgramBuilder, Programs
from jpaged.compile.gemm_autotuning import Record, make_compiler, offer_recorded_products
from jpaged.compile.jax_setup import (
    prepare_jax,
    program_store,
    with_usable_cache,
    without_collections,
)
from jpaged.compile.recipes import SplitModel, recipes
from jpaged.compile.shared_calls import SharedCalls
from jpaged.compile.sizing import Sized, Sizing, step_buckets
from jpaged.compile.thread_settings import ThreadSettings
from jpaged.compile.workers import CompilePool, make_orders
from jpaged.config import EMBEDDED_MODEL, EngineConfig
from jpaged.core.block_manager import BlockManager
from jpaged.core.prefix_cache import PrefixCache
from jpaged.core.scheduler import Scheduler, SchedulerConfig
from jpaged.core.swap import PreemptionMode, PressurePolicy
from jpaged.engine.preprocessing import Intake
from jpaged.engine.progress_log import Reporter
from jpaged.models.checkpoint import read_config, read_generation_config, resolve_checkpoint
from jpaged.models.config import ModelConfig
from jpaged.models.config_fields import refuse_head_size
from jpaged.models.loader import ModelPlan, plan_model
from jpaged.runtime.kv_cache import MemoryAccount
from jpaged.runtime.model_runner import ModelRunner
from jpaged.runtime.runtime_config import RuntimeConfig
from jpaged.runtime.timing import measure_costs
from jpaged.text.tokenizer import Tokenizer
from pallas_kernels import Backend, select_backend


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
    reporter, config = Reporter(config.verbose), with_usable_cache(config)
    start = _prepare(config, reporter)
    loaded, sized, programs = _load_beside_programs(config, start, reporter)
    runtime = sized.runtime
    with reporter.phase("warming up"):
        buckets = step_buckets(runtime)
        runner = ModelRunner(loaded.split, sized.shapes, runtime, buckets, programs, loaded.eos)
        runner.warm_up()
    for line in sized.account.beside(start.device.memory_stats() or {}):
        reporter.say(line)
    pressure = _choose_pressure(config, runtime, runner, reporter)
    return EngineParts(
        folder=start.folder,
        intake=_make_intake(config, runtime, loaded.tokenizer, loaded.eos),
        model_config=start.plan.config,
        runtime_config=runtime,
        memory_account=sized.account,
        scheduler=_make_scheduler(config, runtime, pressure),
        runner=runner,
    )


class _Loaded(NamedTuple):
    """What the checkpoint brings."""

    split: SplitModel
    tokenizer: Tokenizer | None
    eos: frozenset[int]


@dataclass(frozen=True)
class _Start:
    """What an engine's start has before the model is loaded, and how it goes on without it."""

    folder: Path
    plan: ModelPlan
    generation_config: dict[str, Any]
    dtype: jnp.dtype
    device: Any
    draft: SplitModel  # shapes in its parameters' places
    sizing: Sizing
    shared: SharedCalls
    builder: ProgramBuilder
    pool: CompilePool
    progress: Callable[[int, int], None]

    def size(self) -> Sized:
        """Settle the numbers; where that needs a compilation, workers begin meanwhile."""
        return self.sizing.fit(self.sizing.workspace(self.builder, self.shared, self.pool.start))

    def add_programs(self, sized: Future[Sized]) -> None:
        """Have every program built, when the numbers are settled."""
        runtime, _, shapes = sized.result()
        needed = recipes(self.draft, shapes, runtime, step_buckets(runtime), self.shared)
        self.builder.add(self.pool.compiled(needed, runtime, self.progress))


def _prepare(config: EngineConfig, reporter: Reporter) -> _Start:
    with reporter.phase("starting the device"):
        prepare_jax(config)
        device = jax.local_devices()[0]
        record = offer_recorded_products(device)
    folder = resolve_checkpoint(config.model or EMBEDDED_MODEL)
    model_config = ModelConfig.from_hf(read_config(folder))
    backend = select_backend(device.platform)
    _check_head_size(model_config, backend)
    dtype = _resolve_dtype(config.dtype, model_config, device.platform)
    asked = {"load_format": config.load_format, "seed": config.seed}
    plan = plan_model(folder, model_config, dtype=dtype, **asked)
    model_config, model = plan.config, plan.shapes
    draft, progress = SplitModel.of(model), _Progress(reporter)
    store = program_store(config.compilation_cache_dir, model_config, model, device)
    sizing = Sizing(config, model_config, draft, dtype, device)
    recorded = nothing_to_measure(record, device, draft, sizing)
    compiler = make_compiler(model, backend, recorded=recorded)
    tied = model_config.tie_word_embeddings
    orders = make_orders(config, folder, dtype, device, store, recorded=recorded, tied=tied)
    return _Start(
        folder=folder,
        plan=plan,
        generation_config=read_generation_config(folder),
        dtype=dtype,
        device=device,
        draft=draft,
        sizing=sizing,
        shared=SharedCalls(backend),
        builder=ProgramBuilder(os.cpu_count() or 1, store, progress, compiler),
        pool=CompilePool(orders, store, reporter.say, verbose=config.verbose),
        progress=progress,
    )


def _check_head_size(model: ModelConfig, backend: Backend) -> None:
    most = backend.max_head_size
    if most is not None and model.head_size > most:
        raise refuse_head_size(model.head_size, f"1 to {most}, on a GPU")


def nothing_to_measure(record: Record, device: Any, draft: SplitModel, sizing: Sizing) -> bool:
    """Whether XLA would measure nothing of the products of steps."""
    return device.platform == "cpu" or record.has(draft.leaves, sizing.step_rows)


def _load_beside_programs(
    config: EngineConfig, start: _Start, reporter: Reporter
) -> tuple[_Loaded, Sized, Programs]:
    """Load the model; size the pool and build the programs meanwhile."""
    with ThreadPoolExecutor(3) as beside, start.pool, start.builder as builder:
        run = ThreadSettings().run
        sizing = beside.submit(run, start.size)
        adding = beside.submit(run, start.add_programs, sizing)
        with reporter.phase(f"loading {start.folder.name} as {start.dtype.name}"):
            loaded = _load(config, start, beside)
        with reporter.phase("sizing the pool"):
            sized = sizing.result()
        for line in _describe(sized.runtime, sized.account, start.device):
            reporter.say(line)
        with reporter.phase("compiling"):
            adding.result()
            return loaded, sized, builder.programs()


def _load(config: EngineConfig, start: _Start, beside: ThreadPoolExecutor) -> _Loaded:
    folder, needed = start.folder, config.tokenizer_needed
    text = beside.submit(Tokenizer.from_folder, folder) if needed else None
    split = SplitModel.of(start.plan.load())
    jax.block_until_ready(split.leaves)
    tokenizer = text.result() if text is not None else None
    return _Loaded(split, tokenizer, _eos_token_ids(start, tokenizer))


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


def _eos_token_ids(start: _Start, tokenizer: Tokenizer | None) -> frozenset[int]:
    """End tokens of the model's config, its generation config and its tokenizer."""
    found: set[object] = set(start.plan.config.eos_token_ids)
    listed = start.generation_config.get("eos_token_id")
    found.update(listed if isinstance(listed, list) else [listed])
    found.add(tokenizer.eos_token_id if tokenizer is not None else None)
    vocabulary = range(start.plan.config.vocab_size)
    return frozenset(token for token in found if isinstance(token, int) and token in vocabulary)
