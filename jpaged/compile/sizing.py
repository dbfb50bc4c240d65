"""How much of the device is for what: weights, sampling, a step's workspace, the pool."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax.numpy as jnp

from jpaged.compile.builder import ProgramBuilder
from jpaged.compile.recipes import Recipes, SharedCalls
from jpaged.config import EngineConfig, LoopMode, physical_memory_bytes
from jpaged.core.swap import PreemptionMode
from jpaged.errors import format_count
from jpaged.models.config import ModelConfig
from jpaged.models.sharding import per_device_bytes
from jpaged.observe.statistics import MemoryAccount
from jpaged.runtime.kv_cache import block_bytes
from jpaged.runtime.peer_memory import can_use_peer_memory
from jpaged.runtime.programs import DeviceShapes, SplitModel
from jpaged.runtime.runtime_config import RuntimeConfig
from jpaged.runtime.steps import PLAN_PROGRAMS
from jpaged.runtime.swap import staging_bytes
from pallas_kernels import Backend, select_backend

_DRAFT_BLOCKS = 2
"""Blocks of the pool with which the largest step's workspace is measured; they do not enter it."""

_SMALL_ARRAY_BYTES = 256 * 2**20
"""Bytes for what no program's account has: steps' inputs, results on their way to the host, the
places for these with their guards (`jpaged.runtime.allocation_guard`), 8 MiB through which devices
sum (`jpaged.runtime.peer_memory`), and the allocator's gaps."""

_STEPS_IN_FLIGHT = 2
"""Large steps whose workspaces can exist at once: the one that runs and the one launched behind it.
Steps that a burst would have may be more; they decode, and their logits are counted."""

POOL_BLOCK_MULTIPLE = 64
"""Blocks by which pools sized to the device differ, so that nearly equal free memory finds the same
compiled programs."""

MAX_BLOCKS = 2**18
"""Most blocks of a pool sized to the device: of a tiny model more would fit than a host can use."""


@dataclass(frozen=True)
class PlatformDefaults:
    """What `None` stands for on a kind of device."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    few_programs: bool = False
    num_scheduler_steps: int = 1


MAX_BURST_WEIGHT_BYTES = 5 * 10**9
"""Of the weights that an H200 reads, at 4 TB/s, in the 1.3 ms that its host takes to launch a step:
larger models have no bursts unless they are asked for."""

# The host takes about 1.3 ms to launch a step, and a small model's device as little as 0.7.
GPU_DEFAULTS = PlatformDefaults(256, 8192, 32768, num_scheduler_steps=4)
# A CPU compiles each bucket on few cores, and has no memory of its own to fill: keep both small.
# Its matrix products gain little from more than 64 rows, so that one bucket of prefill is enough.
CPU_DEFAULTS = PlatformDefaults(16, 64, 4096, few_programs=True)
CPU_KV_CACHE_BYTES = 256 * 2**20


class SizingResult(NamedTuple):
    """Every number settled."""

    runtime: RuntimeConfig
    account: MemoryAccount
    shapes: DeviceShapes


class Sizing:
    """Settles every number of an engine, and accounts for the device's memory.

    To be made before the weights are on the device: what it holds then is others'.

    Args:
        config: The caller's wishes.
        model: The model's configuration.
        split: The model, or its shapes.
        dtype: Of the weights, and of the pool unless the model has another.
        devices: What the engine runs on.

    Raises:
        ValueError: the numbers asked for do not go together, or the weights alone do not fit.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: ModelConfig,
        split: SplitModel,
        dtype: jnp.dtype,
        devices: Sequence[Any],
    ):
        self._config, self._split, self._dtype = config, split, dtype
        device = devices[0]
        self._model, self._num_devices = model.shard(len(devices)), len(devices)
        limits = [limit for it in devices if (limit := _memory_limit(it)) is not None]
        self._device_limit = min(limits, default=None)
        self._weight_bytes = per_device_bytes(split.leaves)
        if self._weight_bytes > self._max_bytes:  # before a byte of them is there
            more = "" if self._device_limit is None else ", or more devices (tensor_parallel_size)"
            raise ValueError(
                f"the model's weights take {self._weight_bytes / 2**30:,.1f} GiB{self._per_device_text} as "
                f"{dtype.name}, and {self._memory_owner} memory is {self._max_bytes / 2**30:,.1f} GiB: take a "
                f"smaller model or dtype{more}; config.json says {model.size_summary}"
            )
        limits = resolve_limits(
            config,
            model_max_len=model.max_position_embeddings,
            vocab_size=model.vocab_size,
            backend=select_backend(device.platform),
            defaults=platform_defaults(device, self._weight_bytes),
        )
        limits = replace(limits, has_peer_memory=can_use_peer_memory(devices, dtype))
        self._block_bytes = block_bytes(self._model, limits.block_size, dtype)
        # Until the pool's size is known, only swap_space bounds the blocks in host memory.
        self._limits = replace(limits, num_host_blocks=config.host_blocks(self._host_block_bytes))

    @property
    def _host_block_bytes(self) -> int:
        """Bytes of host memory that a block takes: what all devices have of it."""
        return self._num_devices * self._block_bytes

    @property
    def gemm_row_counts(self) -> set[int]:
        """Rows that the products of steps have."""
        limits, shapes = self._limits, self._draft_shapes
        keys = [(step, key) for step in PLAN_PROGRAMS for key in step.keys(limits, shapes)]
        return {step.sizes(limits, key)["num_tokens"] for step, key in keys}

    def workspace(
        self,
        builder: ProgramBuilder,
        shared_calls: SharedCalls,
        start_workers: Callable[[RuntimeConfig], bool],
    ) -> int:
        """Bytes of the largest step's temporaries; 0 where they are not worth a compilation.

        If it has to be compiled, programs that have no part in the pool are begun meanwhile: by
        `start_workers` unless it says no, else by the builder. `shared_calls` is as of `Recipes`.
        """
        if self._device_limit is None:  # a CPU step's
            return 0
        recipes = Recipes(self._split, self._draft_shapes, self._limits, shared_calls)

        def while_compiling() -> None:
            if not start_workers(self._limits):
                builder.add(recipes.without_pool())

        return builder.workspace(recipes.largest_step(), while_compiling)

    def fit(self, workspace: int) -> SizingResult:
        """The numbers, the memory, and the shapes of what lives on the device.

        Raises:
            ValueError: the engine as configured does not fit.
        """
        config = self._config
        account = self._account_without_pool(workspace)
        num_blocks = self._choose_num_blocks(account)
        runtime = with_pool(self._limits, num_blocks, config)
        runtime = with_swap(runtime, config, self._host_block_bytes)
        account = replace(
            account,
            kv_cache=num_blocks * self._block_bytes,
            swap=runtime.num_host_blocks * self._host_block_bytes,
        )
        if account.total > self._max_bytes:
            raise ValueError(
                f"the engine as configured does not fit in {self._memory_owner} memory "
                f"({self._max_bytes / 2**20:,.1f} MiB):\n"
                + "\n".join(account.lines())
                + "\nlower num_blocks, kv_cache_memory_bytes, max_num_batched_tokens or "
                "max_num_seqs, or raise gpu_memory_utilization"
            )
        shapes = DeviceShapes.of(self._model, runtime, self._dtype, self._split.mesh)
        return SizingResult(runtime, account, shapes)

    @property
    def _max_bytes(self) -> int:
        """Bytes that each device may have; virtual ones of a CPU have the machine's together."""
        return (
            physical_memory_bytes() // self._num_devices
            if self._device_limit is None
            else self._device_limit
        )

    @property
    def _memory_owner(self) -> str:
        if self._device_limit is not None:
            return "the device's"
        return "this machine's" if self._num_devices == 1 else "each one's part of this machine's"

    @property
    def _per_device_text(self) -> str:
        return "" if self._num_devices == 1 else f" on each of {self._num_devices} devices"

    @cached_property
    def _draft_shapes(self) -> DeviceShapes:
        limits = replace(self._limits, num_blocks=_DRAFT_BLOCKS)
        return DeviceShapes.of(self._model, limits, self._dtype, self._split.mesh)

    def _account_without_pool(self, step_bytes: int) -> MemoryAccount:
        shapes, workspace = self._draft_shapes, 0
        if self._device_limit is not None:
            large = max(step_bytes, self._burst_logits_bytes())
            workspace = _STEPS_IN_FLIGHT * large + _SMALL_ARRAY_BYTES
            workspace += staging_bytes(shapes.kv.pool, self._limits.num_host_blocks)
        sampling = per_device_bytes((shapes.sampling, shapes.last_tokens, shapes.kv.block_tables))
        return MemoryAccount(self._weight_bytes, sampling, workspace, 0, self._device_limit)

    def _burst_logits_bytes(self) -> int:
        """Of the steps that would be one burst, launched one by one."""
        limits = self._limits
        rows = limits.num_scheduler_steps * max(limits.buckets.burst_batch_sizes, default=0)
        return rows * limits.vocab_size * jnp.dtype(jnp.float32).itemsize

    def _choose_num_blocks(self, account: MemoryAccount) -> int:
        """As many blocks as asked for, or as fit."""
        config, limits = self._config, self._limits
        if config.num_blocks is not None:
            return config.num_blocks
        if config.kv_cache_memory_bytes is not None:
            return self._fit_blocks(config.kv_cache_memory_bytes)
        if account.limit is not None:
            return min(self._fit_blocks(account.limit - account.total), MAX_BLOCKS)
        # Memory that belongs to everybody: no more than the sequences can use.
        useful = limits.max_num_seqs * limits.max_blocks_per_seq + 1
        return min(self._fit_blocks(CPU_KV_CACHE_BYTES), useful)

    def _fit_blocks(self, available: int) -> int:
        """How many fit in so many bytes, rounded down to whole granules if there are any."""
        blocks = max(available, 0) // self._block_bytes
        return (
            blocks // POOL_BLOCK_MULTIPLE * POOL_BLOCK_MULTIPLE
            if blocks > POOL_BLOCK_MULTIPLE
            else blocks
        )


def platform_defaults(device: Any, weight_bytes: int) -> PlatformDefaults:
    """What `None` stands for with `weight_bytes` bytes of them."""
    if device.platform == "cpu":
        return CPU_DEFAULTS
    if (
        weight_bytes > MAX_BURST_WEIGHT_BYTES
    ):  # the device is busy for longer than the host: no bursts
        return replace(GPU_DEFAULTS, num_scheduler_steps=1)
    return GPU_DEFAULTS


def _memory_limit(device: Any) -> int | None:
    """Bytes for this engine: what JAX has reserved less what others hold."""
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        return None
    return stats["bytes_limit"] - stats["bytes_in_use"]


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
    if config.max_model_len is not None and config.max_model_len > model_max_len:
        raise ValueError(
            f"max_model_len={config.max_model_len} is more than the {model_max_len} positions of "
            f"the model; give at most {model_max_len}"
        )
    burst = config.num_scheduler_steps or defaults.num_scheduler_steps
    if config.loop_mode is LoopMode.SYNCHRONOUS:
        burst = 1
    requested_budget = config.max_num_batched_tokens or defaults.max_num_seqs
    max_num_seqs = config.max_num_seqs or min(defaults.max_num_seqs, requested_budget)
    budget = config.max_num_batched_tokens or max(defaults.max_num_batched_tokens, max_num_seqs)
    if budget < max_num_seqs:
        raise ValueError(
            f"max_num_batched_tokens={budget} is less than max_num_seqs={max_num_seqs}: a step "
            "must have room for one token of every sequence; raise the first or lower the second"
        )
    return RuntimeConfig(
        block_size=config.block_size,
        num_blocks=0,
        max_model_len=config.max_model_len or min(model_max_len, defaults.max_model_len),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        vocab_size=vocab_size,
        backend=backend,
        few_programs=defaults.few_programs,
        num_scheduler_steps=burst,
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
            f"{format_count(num_blocks - 1, 'block')} of {limits.block_size} "
            f"({format_count(capacity, 'token')}); lower "
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
