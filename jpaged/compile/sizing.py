"""Choose an engine's sizes and limits, and decide how much device memory each purpose gets."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jpaged.compile.builder import ProgramBuilder
from jpaged.compile.recipes import Recipes, SharedCalls
from jpaged.config import EngineConfig, LogprobsMode, LoopMode, physical_memory_bytes
from jpaged.core.swap import PreemptionMode
from jpaged.errors import format_count
from jpaged.models.config import ModelConfig
from jpaged.models.sharding import per_device_bytes
from jpaged.models.sizes import ModelSizes
from jpaged.observe.statistics import MemoryAccount
from jpaged.runtime.kv_cache import block_bytes
from jpaged.runtime.peer_memory import can_use_peer_memory
from jpaged.runtime.programs import (
    MAX_SCORED_LOGITS_ROWS,
    MAX_VERIFY_LOGITS_ROWS,
    DeviceShapes,
    SplitModel,
    num_scored_rows,
)
from jpaged.runtime.runtime_config import RuntimeConfig
from jpaged.runtime.step_programs import PLAN_PROGRAMS
from jpaged.runtime.swap import staging_bytes
from pallas_kernels import Backend, select_backend

_MINIMAL_POOL_BLOCKS = 2
"""Number of blocks in the pool for which the largest step is compiled to measure its workspace. The
workspace does not depend on the size of the pool."""

_SMALL_ARRAY_BYTES = 256 * 2**20
"""Number of bytes reserved for arrays that XLA's memory analysis of a program does not include:
inputs of steps, results in transfer to the host, the buffers of `jpaged.runtime.allocation_guard`,
the exchange memory of `jpaged.runtime.peer_memory`, and gaps between allocations."""

_STEPS_IN_FLIGHT = 2
"""Maximum number of large steps whose workspaces exist at the same time: the running step and the
next launched step. The decode steps of a burst may also be launched one by one, so more decode
steps may be in flight. `_burst_logits_bytes` counts the logits of these steps."""

POOL_BLOCK_MULTIPLE = 64
"""If the engine chooses the size of the pool, it rounds the number of blocks down to a multiple of
this number. Starts with nearly equal free memory then have the same size, and can reuse compiled
programs."""

MAX_BLOCKS = 2**18
"""Maximum number of blocks in a pool whose size the engine chooses. Without a limit, a tiny model
would get more blocks than the host can manage."""


@dataclass(frozen=True)
class PlatformDefaults:
    """Default values of engine options on one kind of device. A default applies if the option is
    None.

    Attributes:
        max_num_seqs: Maximum number of sequences in a step.
        max_num_batched_tokens: Maximum number of tokens in a step.
        max_model_len: Maximum number of tokens in a sequence.
        few_programs: Whether to compile programs for fewer input shapes. Steps then pad their
            inputs more.
        num_scheduler_steps: Number of steps in a burst; 1 for no bursts.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    few_programs: bool = False
    num_scheduler_steps: int = 1


MAX_BURST_WEIGHT_BYTES = 5 * 10**9
"""Maximum number of bytes of weights per device for which bursts are on by default. An H200 reads
about this number of bytes (at 4 TB/s) in the 1.3 ms that the host takes to launch a step. With more
weights, a step takes the device longer than the host, so bursts do not help."""

# The host takes about 1.3 ms to launch a step. The device may run a step of a small model in only
# 0.7 ms. Bursts of steps keep the device busy.
GPU_DEFAULTS = PlatformDefaults(256, 8192, 32768, num_scheduler_steps=4)
# A CPU machine has few cores to compile programs, and other processes need its memory. Matrix
# products on a CPU gain little from more than 64 rows, so one prefill bucket is enough.
CPU_DEFAULTS = PlatformDefaults(16, 64, 4096, few_programs=True)
CPU_KV_CACHE_BYTES = 256 * 2**20


class SizingResult(NamedTuple):
    """Sizes of an engine.

    Attributes:
        runtime: Sizes and limits of the runtime.
        account: Memory of each device by purpose.
        shapes: Shapes of the arrays that live on the device.
    """

    runtime: RuntimeConfig
    account: MemoryAccount
    shapes: DeviceShapes


class Sizing:
    """Chooses an engine's sizes and limits, and computes how much device memory each purpose needs.

    Create this object before the weights are loaded. Device memory that is in use at that time
    counts as memory of other programs, except for the arrays in `split`.

    Args:
        config: Options of the engine.
        model: Configuration of the whole model.
        split: The model, split into its definition and its parameters. The parameters may be shapes
            instead of arrays.
        dtype: Dtype of the weights, and of the pool if the model sets no other dtype.
        devices: Devices of the engine.

    Raises:
        ValueError: Options contradict each other, or the weights alone exceed the device memory.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: ModelSizes,
        split: SplitModel,
        dtype: jnp.dtype,
        devices: Sequence[Any],
    ):
        self._config, self._split, self._dtype = config, split, dtype
        device = devices[0]
        self._model, self._num_devices = model.shard(len(devices)), len(devices)
        self._weight_bytes = per_device_bytes(split.leaves)
        # The parameters of a user's model are on the device already. Count them as weights, not as
        # memory of other programs.
        loaded = per_device_bytes([it for it in split.leaves if isinstance(it, jax.Array)])
        limits = [limit + loaded for it in devices if (limit := _memory_limit(it)) is not None]
        self._device_limit = min(limits, default=None)
        # Raise the error before weights are loaded, which takes long.
        if self._weight_bytes > self._max_bytes:
            can_split = self._device_limit is not None and isinstance(model, ModelConfig)
            more = ", or more devices (tensor_parallel_size)" if can_split else ""
            raise ValueError(
                f"the model's weights take {self._weight_bytes / 2**30:,.1f} GiB"
                f"{self._per_device_text} as {dtype.name}, but {self._memory_owner} memory is "
                f"{self._max_bytes / 2**30:,.1f} GiB: use a smaller model or dtype{more}; "
                f"{model.size_summary}"
            )
        limits = resolve_limits(
            config,
            model_max_len=model.max_position_embeddings,
            vocab_size=model.vocab_size,
            backend=select_backend(device.platform),
            defaults=platform_defaults(device, self._weight_bytes),
        )
        # Only programs of the built-in model families use kernels that all-reduce through peer
        # memory. Programs of a user's `JaxModel` use XLA's all-reduce, which needs no peer memory.
        uses_peers = isinstance(model, ModelConfig) and not model.batch_invariant
        has_peers = uses_peers and can_use_peer_memory(devices, dtype)
        limits = replace(limits, has_peer_memory=has_peers)
        self._block_bytes = block_bytes(self._model, limits.block_size, dtype)
        # This number of blocks in host memory is preliminary. It becomes lower if the KV pool,
        # whose size is not known yet, has fewer blocks.
        self._limits = replace(limits, num_host_blocks=config.host_blocks(self._host_block_bytes))

    @property
    def _host_block_bytes(self) -> int:
        """Number of bytes of host memory for one swapped block, summed over all devices."""
        return self._num_devices * self._block_bytes

    @property
    def gemm_row_counts(self) -> set[int]:
        """Row counts of the matrix products in the engine's programs."""
        limits, shapes = self._limits, self._minimal_pool_shapes
        keys = [(step, key) for step in PLAN_PROGRAMS for key in step.keys(limits, shapes)]
        return {step.sizes(limits, key)["num_tokens"] for step, key in keys}

    def workspace(
        self,
        builder: ProgramBuilder,
        shared_calls: SharedCalls,
        start_workers: Callable[[RuntimeConfig], bool],
    ) -> int:
        """Return the number of bytes that the largest step needs for temporaries and new outputs; 0
        on a CPU.

        If the number is not stored yet, this method compiles the step. It also starts to compile
        the programs that do not depend on the size of the KV pool.

        Args:
            builder: Builder that compiles the step.
            shared_calls: Object that calls functions which several programs share.
            start_workers: Function that starts compile workers, and returns whether any worker
                runs. If no worker runs, the builder compiles the programs that do not depend on the
                size of the KV pool.
        """
        if self._device_limit is None:  # on a CPU, no memory is reserved for the workspace
            return 0
        recipes = Recipes(self._split, self._minimal_pool_shapes, self._limits, shared_calls)

        def while_compiling() -> None:
            if not start_workers(self._limits):
                builder.add(recipes.without_pool())

        return builder.workspace(recipes.largest_step(), while_compiling)

    def fit(self, workspace: int) -> SizingResult:
        """Choose the sizes of the KV pool and of the swap space, and return all sizes of the
        engine.

        Args:
            workspace: Number of bytes that `workspace` returned.

        Raises:
            ValueError: The configured engine does not fit in memory.
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
                f"the configured engine does not fit in {self._memory_owner} memory "
                f"({self._max_bytes / 2**20:,.1f} MiB):\n"
                + "\n".join(account.lines())
                + "\nlower num_blocks, kv_cache_memory_bytes, max_num_batched_tokens or "
                "max_num_seqs, or raise gpu_memory_utilization"
            )
        shapes = DeviceShapes.of(self._model, runtime, self._dtype, self._split.mesh)
        return SizingResult(runtime, account, shapes)

    @property
    def _max_bytes(self) -> int:
        """Maximum number of bytes that the engine may use per device. Virtual devices of a CPU
        share the memory of the machine."""
        return (
            physical_memory_bytes() // self._num_devices
            if self._device_limit is None
            else self._device_limit
        )

    @property
    def _memory_owner(self) -> str:
        if self._device_limit is not None:
            return "the device's"
        return (
            "this machine's" if self._num_devices == 1 else "each device's share of this machine's"
        )

    @property
    def _per_device_text(self) -> str:
        return "" if self._num_devices == 1 else f" on each of {self._num_devices} devices"

    @cached_property
    def _minimal_pool_shapes(self) -> DeviceShapes:
        limits = replace(self._limits, num_blocks=_MINIMAL_POOL_BLOCKS)
        return DeviceShapes.of(self._model, limits, self._dtype, self._split.mesh)

    def _account_without_pool(self, step_bytes: int) -> MemoryAccount:
        shapes, workspace = self._minimal_pool_shapes, 0
        if self._device_limit is not None:
            large = max(step_bytes, self._burst_logits_bytes(), self._verify_logits_bytes())
            large += self._scoring_bytes()
            workspace = _STEPS_IN_FLIGHT * large + _SMALL_ARRAY_BYTES
            workspace += staging_bytes(shapes.kv.pool, self._limits.num_host_blocks)
        row_state = shapes.sampling, shapes.last_tokens, shapes.kv.block_tables, shapes.row_tokens
        sampling = per_device_bytes(row_state)
        return MemoryAccount(self._weight_bytes, sampling, workspace, 0, self._device_limit)

    def _burst_logits_bytes(self) -> int:
        """Return the number of bytes of the logits of all steps of a burst. If the host launches
        the steps of a burst one by one, the logits of all steps are in memory at the same time."""
        limits = self._limits
        rows = limits.num_scheduler_steps * max(limits.buckets.burst_batch_sizes, default=0)
        return rows * limits.vocab_size * jnp.dtype(jnp.float32).itemsize

    def _verify_logits_bytes(self) -> int:
        """Return the number of bytes of a verify step's logits and the arrays computed from them.

        Sampling computes three arrays of the same size: the scaled logits, the noise and the mask.
        """
        sizes = self._limits.buckets.verify_batch_sizes
        rows = max(MAX_VERIFY_LOGITS_ROWS, *sizes) if sizes else 0
        return 4 * rows * self._limits.vocab_size * jnp.dtype(jnp.float32).itemsize

    def _scoring_bytes(self) -> int:
        """Return the number of bytes that a device needs to compute log-probabilities of prompt
        tokens.

        The arrays are the hidden states of the scored tokens and the logits of
        `prompt_logprobs_step`. If devices exchange logits, each device has two copies of the
        logits. The results of the prefill step are not included.
        """
        limits, shapes = self._limits, self._minimal_pool_shapes
        num_rows = num_scored_rows(limits, limits.buckets.prefill_token_sizes[-1])
        copies = 1 + shapes.is_vocab_sharded
        width = limits.vocab_size // (self._num_devices if shapes.is_vocab_sharded else 1)
        logits = copies * min(num_rows, MAX_SCORED_LOGITS_ROWS) * width * 4
        return logits + num_rows * shapes.hidden.shape[0] * shapes.hidden.dtype.itemsize

    def _choose_num_blocks(self, account: MemoryAccount) -> int:
        config, limits = self._config, self._limits
        if config.num_blocks is not None:
            return config.num_blocks
        if config.kv_cache_memory_bytes is not None:
            return self._fit_blocks(config.kv_cache_memory_bytes)
        if account.limit is not None:
            return min(self._fit_blocks(account.limit - account.total), MAX_BLOCKS)
        # On a CPU, other programs share the memory. Allocate at most the blocks that `max_num_seqs`
        # sequences can use.
        useful = limits.max_num_seqs * limits.max_blocks_per_seq + 1
        return min(self._fit_blocks(CPU_KV_CACHE_BYTES), useful)

    def _fit_blocks(self, available: int) -> int:
        """Return the number of blocks that fit in `available` bytes. If the number is above
        `POOL_BLOCK_MULTIPLE`, round it down to a multiple of `POOL_BLOCK_MULTIPLE`."""
        blocks = max(available, 0) // self._block_bytes
        return (
            blocks // POOL_BLOCK_MULTIPLE * POOL_BLOCK_MULTIPLE
            if blocks > POOL_BLOCK_MULTIPLE
            else blocks
        )


def platform_defaults(device: Any, weight_bytes: int) -> PlatformDefaults:
    """Return the default values of options for a device with `weight_bytes` bytes of weights."""
    if device.platform == "cpu":
        return CPU_DEFAULTS
    if weight_bytes > MAX_BURST_WEIGHT_BYTES:
        return replace(GPU_DEFAULTS, num_scheduler_steps=1)
    return GPU_DEFAULTS


def _memory_limit(device: Any) -> int | None:
    """Return how many more bytes JAX can allocate on a device: JAX's memory limit minus the bytes
    that are in use. Return None if the device has no memory limit."""
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
    """Return the sizes and limits of the runtime without the size of the KV pool: `num_blocks` and
    `num_host_blocks` are 0.

    Args:
        config: Options of the engine.
        model_max_len: Number of positions that the model supports.
        vocab_size: Width of the logits.
        backend: Implementation of the kernels.
        defaults: Values for the options that are None.

    Raises:
        ValueError: Options contradict each other or the model.
    """
    if config.max_model_len is not None and config.max_model_len > model_max_len:
        raise ValueError(
            f"max_model_len={config.max_model_len} is more than the {model_max_len} positions of "
            f"the model: pass at most {model_max_len}"
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
            "must have room for one token of every sequence; raise max_num_batched_tokens or lower "
            "max_num_seqs"
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
        speculation=config.speculation,
        logprobs_mode=LogprobsMode(config.logprobs_mode),
    )


def with_pool(limits: RuntimeConfig, num_blocks: int, config: EngineConfig) -> RuntimeConfig:
    """Return `limits` with the size of the KV pool set, and with a lower `max_model_len` if
    necessary.

    A sequence of `max_model_len` tokens must fit in the empty pool. Otherwise the sequence could
    never run.

    Args:
        limits: Result of `resolve_limits`.
        num_blocks: Number of blocks in the pool, including the null block.
        config: Options of the engine. If its `max_model_len` is set and does not fit, the function
            raises an error instead of lowering the limit.

    Raises:
        ValueError: The pool has no usable block, or a sequence with the `max_model_len` of `config`
            does not fit in the pool.
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
            f"({format_count(capacity, 'token')}): lower max_model_len to {capacity}, or raise "
            "num_blocks, kv_cache_memory_bytes or gpu_memory_utilization"
        )
    max_model_len = min(limits.max_model_len, capacity)
    return replace(limits, num_blocks=num_blocks, max_model_len=max_model_len)


def with_swap(runtime: RuntimeConfig, config: EngineConfig, bytes_per_block: int) -> RuntimeConfig:
    """Return `runtime` with `num_host_blocks` set to the number of blocks that fit in `swap_space`.
    The number is at most the number of blocks in the KV pool.

    Args:
        runtime: Sizes and limits of the runtime, including the size of the pool.
        config: Options of the engine.
        bytes_per_block: Number of bytes of host memory per block.

    Raises:
        ValueError: `preemption_mode` is "swap", but `swap_space` holds no block.
    """
    num_host_blocks = min(config.host_blocks(bytes_per_block), runtime.num_blocks - 1)
    if not num_host_blocks and config.preemption_mode == PreemptionMode.SWAP:
        raise ValueError(
            f"swap_space={config.swap_space!r} GiB does not hold a block of {bytes_per_block:,} "
            "bytes: raise swap_space, or pass preemption_mode='recompute'"
        )
    return replace(runtime, num_host_blocks=num_host_blocks)
