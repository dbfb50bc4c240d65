"""How much of the device is for what: weights, sampling, a step's workspace, the pool."""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import jax.numpy as jnp

from jpaged.compile.builder import ProgramBuilder, largest_step_recipes
from jpaged.compile.recipes import SharedCalls, recipes_without_pool
from jpaged.config import EngineConfig, physical_memory_bytes
from jpaged.models.config import ModelConfig
from jpaged.observe.statistics import MemoryAccount
from jpaged.runtime.buckets import step_buckets
from jpaged.runtime.kv_cache import MAX_BLOCKS, block_bytes, fit_blocks, tree_bytes
from jpaged.runtime.programs import Shapes, SplitModel
from jpaged.runtime.runtime_config import (
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
from jpaged.runtime.swap import staging_bytes
from pallas_kernels import select_backend

_DRAFT_BLOCKS = 2
"""Blocks of the pool with which the largest step's workspace is measured; they do not enter it."""

_SMALL_ARRAYS = 256 * 2**20
"""Bytes for what no program's account has: steps' inputs, results on their way to the host, the
places for these with their guards (`jpaged.runtime.allocation_guard`), and the allocator's gaps."""

_STEPS_IN_FLIGHT = 2
"""Large steps whose workspaces can exist at once: the one that runs and the one launched behind it.
Steps that a burst would have may be more; they decode, and their logits are counted."""


class Sized(NamedTuple):
    """Every number settled."""

    runtime: RuntimeConfig
    account: MemoryAccount
    shapes: Shapes


class Sizing:
    """Settles every number of an engine, and accounts for the device's memory.

    To be made before the weights are on the device: what it holds then is others'.

    Args:
        config: The caller's wishes.
        model: The model's configuration.
        split: The model, or its shapes.
        dtype: Of weights and pool.
        device: What the engine runs on.

    Raises:
        ValueError: the numbers asked for do not go together, or the weights alone do not fit.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: ModelConfig,
        split: SplitModel,
        dtype: jnp.dtype,
        device: Any,
    ):
        self._config, self._model, self._split, self._dtype = config, model, split, dtype
        self._limit = _memory_limit(device)
        self._weights = tree_bytes(split.leaves)
        self._check_weights()
        limits = resolve_limits(
            config,
            model_max_len=model.max_position_embeddings,
            vocab_size=model.vocab_size,
            backend=select_backend(device.platform),
            defaults=platform_defaults(device, self._weights),
        )
        self._per_block = block_bytes(model, limits.block_size, dtype)
        # Until the pool's size is known, only swap_space bounds the blocks in host memory.
        self._limits = replace(limits, num_host_blocks=config.host_blocks(self._per_block))

    @property
    def step_rows(self) -> set[int]:
        """Rows that the products of steps have."""
        buckets = step_buckets(self._limits)
        return {*buckets.decode_seqs, *buckets.prefill_tokens}

    def workspace(
        self,
        builder: ProgramBuilder,
        shared: SharedCalls,
        begin_elsewhere: Callable[[RuntimeConfig], bool],
    ) -> int:
        """Bytes of the largest step's temporaries; 0 where they are not worth a compilation.

        If it has to be compiled, programs that have no part in the pool are begun meanwhile: by
        `begin_elsewhere` unless it says no, else by the builder. `shared` is as of `recipes`.
        """
        if self._limit is None:  # a CPU step's
            return 0
        limits = self._limits
        step = self._split, self._draft_shapes, limits, step_buckets(limits), shared

        def meanwhile() -> None:
            if not begin_elsewhere(limits):
                builder.add(recipes_without_pool(*step), behind=True)

        return builder.workspace(largest_step_recipes(*step), meanwhile)

    def fit(self, workspace: int) -> Sized:
        """The numbers, the memory, and the shapes of what lives on the device.

        Raises:
            ValueError: the engine as configured does not fit.
        """
        config = self._config
        account = self._account_without_pool(workspace)
        num_blocks = _choose_num_blocks(config, self._limits, account, self._per_block)
        runtime = with_pool(self._limits, num_blocks, config)
        runtime = with_swap(runtime, config, self._per_block)
        account = replace(
            account,
            kv_cache=num_blocks * self._per_block,
            swap=runtime.num_host_blocks * self._per_block,
        )
        if account.total > self._most:
            raise ValueError(
                f"the engine as configured does not fit in {self._whose} memory "
                f"({self._most / 2**20:,.1f} MiB):\n"
                + "\n".join(account.lines())
                + "\nlower num_blocks, kv_cache_memory_bytes, max_num_batched_tokens or "
                "max_num_seqs, or raise gpu_memory_utilization"
            )
        shapes = Shapes.of(self._split, self._model, runtime, self._dtype)
        return Sized(runtime, account, shapes)

    @property
    def _most(self) -> int:
        """Bytes that there are: of a CPU all of the machine's."""
        return physical_memory_bytes() if self._limit is None else self._limit

    @property
    def _whose(self) -> str:
        return "this machine's" if self._limit is None else "the device's"

    def _check_weights(self) -> None:
        """Before a byte of them is there."""
        if self._weights > self._most:
            raise ValueError(
                f"the model's weights take {self._weights / 2**30:,.1f} GiB as {self._dtype.name}, "
                f"and {self._whose} memory is {self._most / 2**30:,.1f} GiB: take a smaller model "
                f"or dtype; config.json says {self._model.sizes}"
            )

    @cached_property
    def _draft_shapes(self) -> Shapes:
        limits = replace(self._limits, num_blocks=_DRAFT_BLOCKS)
        return Shapes.of(self._split, self._model, limits, self._dtype)

    def _account_without_pool(self, one_step: int) -> MemoryAccount:
        shapes, workspace = self._draft_shapes, 0
        if self._limit is not None:
            large = max(one_step, _burst_logits_bytes(self._limits))
            workspace = _STEPS_IN_FLIGHT * large + _SMALL_ARRAYS
            workspace += staging_bytes(shapes.kv.pool, self._limits.num_host_blocks)
        sampling = tree_bytes((shapes.sampling, shapes.last_tokens, shapes.kv.block_tables))
        return MemoryAccount(self._weights, sampling, workspace, 0, self._limit)


def _burst_logits_bytes(limits: RuntimeConfig) -> int:
    """Of the steps that would be one burst, launched one by one."""
    rows = limits.num_scheduler_steps * max(step_buckets(limits).burst_seqs, default=0)
    return rows * limits.vocab_size * jnp.dtype(jnp.float32).itemsize


def platform_defaults(device: Any, weights: int) -> PlatformDefaults:
    """What `None` stands for with `weights` bytes of them."""
    if device.platform == "cpu":
        return CPU_DEFAULTS
    if weights > BURST_WEIGHT_BYTES:  # the device is busy for longer than the host: no bursts
        return replace(GPU_DEFAULTS, num_scheduler_steps=1)
    return GPU_DEFAULTS


def _memory_limit(device: Any) -> int | None:
    """Bytes for this engine: what JAX has reserved less what others hold."""
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        return None
    return stats["bytes_limit"] - stats["bytes_in_use"]


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
