"""From a configuration to an engine's parts: load, size the pool, compile, warm up."""

import gc
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jpaged.compile.compilation import Compilation, prepare_jax, with_usable_cache
from jpaged.config import EMBEDDED_MODEL, FP8_KV_CACHE, EngineConfig
from jpaged.core.block_manager import BlockManager
from jpaged.core.prefix_cache import PrefixCache
from jpaged.core.scheduler import Scheduler, SchedulerConfig
from jpaged.core.swap import PreemptionMode, PressurePolicy
from jpaged.engine.preprocessing import Preprocessor
from jpaged.errors import RequestError, counted
from jpaged.models.checkpoint import read_config, read_generation_config, resolve_checkpoint
from jpaged.models.config import FP8_DTYPE, ModelConfig, refuse_head_size
from jpaged.models.formats import Plain
from jpaged.models.loader import ModelPlan, plan_model
from jpaged.models.registry import read_model_config
from jpaged.models.sharding import make_mesh
from jpaged.observe.statistics import MemoryAccount
from jpaged.runtime.kv_cache import pool_dtype
from jpaged.runtime.model_runner import ModelRunner
from jpaged.runtime.programs import SplitModel
from jpaged.runtime.runtime_config import RuntimeConfig
from jpaged.runtime.timing import measure_costs
from jpaged.structured_outputs.mask_client import MaskProcess
from jpaged.text.tokenizer import Tokenizer
from pallas_kernels import select_backend, takes_fp8


class ProgressLog:
    """Tells on stderr what the start is doing, if asked to."""

    def __init__(self, verbose: bool):
        self._verbose = verbose

    def say(self, text: str) -> None:
        """One line."""
        if self._verbose:
            print(f"jpaged: {text}", file=sys.stderr, flush=True)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase of the start, and print its duration unless that rounds to 0.00 s."""
        start = time.monotonic()
        yield
        seconds = f"{time.monotonic() - start:.2f}"
        if float(seconds):
            self.say(f"{name} took {seconds} s")


@dataclass(frozen=True)
class EngineParts:
    """What an `Engine` is made of."""

    folder: Path  # the checkpoint's
    preprocessor: Preprocessor
    model_config: ModelConfig
    runtime_config: RuntimeConfig
    memory_account: MemoryAccount
    scheduler: Scheduler
    runner: ModelRunner


@contextmanager
def without_collections() -> Iterator[None]:
    """Hold the garbage collector while an engine starts, and let it have nothing to walk after.

    Tracing makes millions of objects that it would walk in vain. What earlier engines left, arrays
    on the device among it, is collected first. Unless the caller has switched the collector off,
    all else that is there then, modules above all, and what the start makes, tens of thousands of
    blocks among it, is taken out of its rounds: walking either takes a tenth of a second and more,
    in which no step is launched. An engine is in no cycle, so it is freed all the same.
    """
    gc.collect()
    enabled = gc.isenabled()
    if enabled:
        gc.freeze()
    gc.disable()
    try:
        yield
        if enabled:
            gc.collect()
            gc.freeze()
    finally:
        if enabled:
            gc.enable()


@without_collections()
def build_parts(config: EngineConfig) -> EngineParts:
    """Build everything an engine needs.

    Raises:
        ValueError: the model cannot be loaded, or does not fit the device as configured.
    """
    # Before the device starts, so that a wrong path fails quickly.
    folder = resolve_checkpoint(config.model or EMBEDDED_MODEL)
    log, config = ProgressLog(config.verbose), with_usable_cache(config)
    with log.phase("starting the device"):
        prepare_jax(config)
        mesh = make_mesh(jax.local_devices(), config.tensor_parallel_size)
        devices = jax.local_devices()[: config.tensor_parallel_size]
    plan, dtype = _plan_model(config, folder, devices[0], mesh)
    generation_config = read_generation_config(folder)
    with Compilation(config, folder, plan, dtype, devices, log.say) as compilation:
        with log.phase(f"loading {folder.name} as {describe_weights(plan.config, dtype)}"):
            split, tokenizer = _load(config, folder, plan)
        eos_token_ids = end_token_ids(plan.config, generation_config, tokenizer)
        with log.phase("sizing the pool"):
            runtime, account, shapes = compilation.sized()
        for line in describe_memory(runtime, account, devices, pool_dtype(plan.config, dtype)):
            log.say(line)
        with log.phase("waiting for programs"):
            programs = compilation.programs()
    with log.phase("warming up"):
        runner = ModelRunner(split, shapes, runtime, programs, eos_token_ids)
        runner.warm_up()
    for line in account.beside(devices[0].memory_stats() or {}):
        log.say(line)
    cache = PrefixCache(runtime.block_size) if config.enable_prefix_caching else None
    return EngineParts(
        folder=folder,
        preprocessor=Preprocessor(
            tokenizer,
            vocab_size=runtime.vocab_size,
            max_model_len=runtime.max_model_len,
            max_num_seqs=runtime.max_num_seqs,
            eos_token_ids=eos_token_ids,
            seed=config.seed,
            masks=None
            if tokenizer is None
            else MaskProcess(folder, runtime.vocab_size, eos_token_ids),
        ),
        model_config=plan.config,
        runtime_config=runtime,
        memory_account=account,
        scheduler=Scheduler(
            SchedulerConfig(
                runtime.max_num_seqs,
                runtime.max_num_batched_tokens,
                runtime.max_model_len,
                by_priority=config.scheduling_policy == "priority",
            ),
            BlockManager(runtime.num_blocks, runtime.block_size, cache),
            _choose_pressure(config, runtime, runner, log),
        ),
        runner=runner,
    )


def _plan_model(
    config: EngineConfig, folder: Path, device: Any, mesh: Mesh | None
) -> tuple[ModelPlan, jnp.dtype]:
    """The model, checked but not loaded, and the dtype of its weights."""
    model = read_model_config(read_config(folder), config.quantization)
    model.share(config.tensor_parallel_size)  # refused before anything is read
    most = select_backend(device.platform).max_head_size
    if most is not None and model.head_size > most:
        raise refuse_head_size(model.head_size, f"1 to {most}, on a GPU")
    dtype = resolve_dtype(config.dtype, model, device.platform)
    kv_cache_dtype = _resolve_kv_cache_dtype(config.kv_cache_dtype, dtype, device)
    if kv_cache_dtype == FP8_DTYPE and model.head_size % 4:
        supported = f"multiples of 4, with kv_cache_dtype={config.kv_cache_dtype!r}"
        raise refuse_head_size(model.head_size, supported)
    model = replace(model, kv_cache_dtype=kv_cache_dtype)
    asked = {"load_format": config.load_format, "seed": config.seed, "mesh": mesh}
    return plan_model(folder, model, dtype=dtype, **asked), dtype


def resolve_dtype(asked: str, model: ModelConfig, platform: str) -> jnp.dtype:
    """The weights' dtype on a platform; `asked` as of `EngineConfig.dtype`."""
    if asked != "auto":
        return jnp.dtype(asked)
    if platform == "cpu":  # where bfloat16 is emulated
        return jnp.dtype(jnp.float32)
    return jnp.dtype(model.checkpoint_dtype or "bfloat16")


def describe_weights(model: ModelConfig, dtype: jnp.dtype) -> str:
    """What the weights are kept in."""
    kept = model.quantization
    if kept is None or kept.format is Plain:
        return dtype.name
    return f"{dtype.name}, projections in {kept.format.name}"


def _resolve_kv_cache_dtype(asked: str, dtype: jnp.dtype, device: Any) -> str | None:
    """The pool's dtype; None if it is that of the weights."""
    if asked not in FP8_KV_CACHE:
        return None if asked in ("auto", dtype.name) else asked
    if not takes_fp8(device):
        raise RequestError(
            "kv_cache_dtype",
            (
                "needs a GPU of compute capability 8.9 or more (Ada, Hopper and later), and "
                f"{device.device_kind} has {device.compute_capability}; use kv_cache_dtype='auto'"
            ),
            value=repr(asked),
        )
    return FP8_DTYPE


def _load(
    config: EngineConfig, folder: Path, plan: ModelPlan
) -> tuple[SplitModel, Tokenizer | None]:
    """The weights and the tokenizer, read at the same time."""
    with ThreadPoolExecutor(1) as pool:
        needed = config.tokenizer_needed
        text = pool.submit(Tokenizer.from_folder, folder) if needed else None
        split = SplitModel.of(plan.load())
        jax.block_until_ready(split.leaves)
        return split, text.result() if text is not None else None


def end_token_ids(
    model: ModelConfig, generation_config: Mapping[str, Any], tokenizer: Tokenizer | None
) -> frozenset[int]:
    """End tokens of the model's config, its generation config and its tokenizer."""
    found: set[object] = set(model.eos_token_ids)
    listed = generation_config.get("eos_token_id")
    found.update(listed if isinstance(listed, list) else [listed])
    found.add(tokenizer.eos_token_id if tokenizer is not None else None)
    vocabulary = range(model.vocab_size)
    return frozenset(token for token in found if isinstance(token, int) and token in vocabulary)


def _choose_pressure(
    config: EngineConfig, runtime: RuntimeConfig, runner: ModelRunner, log: ProgressLog
) -> PressurePolicy:
    """How groups are preempted; what it costs is measured only where that decides."""
    mode = PreemptionMode(config.preemption_mode)
    if not runtime.num_host_blocks:
        return PressurePolicy()
    if mode is not PreemptionMode.AUTO:
        return PressurePolicy(mode, runtime.num_host_blocks)
    with log.phase("measuring the cost of preemption"):
        costs = measure_costs(runner, runtime)
    return PressurePolicy(mode, runtime.num_host_blocks, costs)


def describe_memory(
    runtime: RuntimeConfig, account: MemoryAccount, devices: Sequence[Any], dtype: jnp.dtype
) -> list[str]:
    """The memory account, of each device, and the pool, of `dtype`, in lines."""
    whose = f"each of {len(devices)} x " if len(devices) > 1 else ""
    num_blocks, block_size = runtime.num_blocks - 1, runtime.block_size
    capacity = counted(num_blocks * block_size, "token", form=",")
    swap = f"host memory for swapped blocks: up to {account.swap / 2**20:,.1f} MiB"
    return [
        f"memory of {whose}{devices[0].device_kind}:",
        *account.lines(),
        *([swap] if account.swap else []),
        f"KV pool of {counted(num_blocks, 'block', form=',')} of {counted(block_size, 'token')} "
        f"({capacity}) in {dtype.name}, up to {counted(runtime.max_num_seqs, 'sequence')} of up to "
        f"{counted(runtime.max_model_len, 'token', form=',')}, "
        f"{counted(runtime.max_num_batched_tokens, 'token', form=',')} a step",
    ]
