"""Startup of an engine: load the model, size the pool, compile the programs and warm up."""

import gc
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from jpaged.compile.compilation import Compilation, prepare_jax, with_usable_cache
from jpaged.config import EMBEDDED_MODEL, FP8_KV_CACHE_DTYPES, EngineConfig
from jpaged.core.block_manager import BlockManager
from jpaged.core.prefix_cache import PrefixCache
from jpaged.core.scheduler import Scheduler, SchedulerConfig
from jpaged.core.speculation import Speculation
from jpaged.core.swap import PreemptionMode, PreemptionPolicy
from jpaged.engine.preprocessing import Preprocessor
from jpaged.errors import RequestError, format_count
from jpaged.models.checkpoint import read_config, read_generation_config, resolve_checkpoint
from jpaged.models.config import FP8_DTYPE, ModelConfig
from jpaged.models.config_fields import head_size_error
from jpaged.models.formats import UnquantizedFormat
from jpaged.models.jax_model import JaxModel, JaxModelPlan, JaxParameters, plan_jax_model
from jpaged.models.linear import is_silu
from jpaged.models.live_weights import ModelParameters
from jpaged.models.registry import read_model_config
from jpaged.models.sharding import make_mesh
from jpaged.models.sizes import ModelSizes
from jpaged.models.weight_plan import ModelPlan, plan_model
from jpaged.observe.statistics import MemoryAccount
from jpaged.runtime.kv_cache import pool_dtype
from jpaged.runtime.model_runner import ModelRunner
from jpaged.runtime.preemption_timing import measure_preemption_costs
from jpaged.runtime.programs import SplitModel
from jpaged.runtime.runtime_config import RuntimeConfig
from jpaged.runtime.verify_costs import verify_costs
from jpaged.structured_outputs.mask_client import MaskWorkerClient
from jpaged.text.tokenizer import Tokenizer
from pallas_kernels import (
    BATCH_INVARIANT_UNIT,
    select_backend,
    supports_fp8,
    supports_kernels,
)
from pallas_kernels.attention.tuning import runs_hopper_prefill
from pallas_kernels.tuning import is_hopper


class ProgressLog:
    """Prints the progress of the startup to stderr if `verbose` is set."""

    def __init__(self, verbose: bool):
        self._verbose = verbose

    def print_line(self, text: str) -> None:
        """Print one line of text to stderr, after the prefix "jpaged: "."""
        if self._verbose:
            print(f"jpaged: {text}", file=sys.stderr, flush=True)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the duration of a phase of the startup, and print the duration unless it rounds
        to 0.00 s."""
        start = time.monotonic()
        yield
        seconds = f"{time.monotonic() - start:.2f}"
        if float(seconds):
            self.print_line(f"{name} took {seconds} s")


@dataclass(frozen=True)
class EngineParts:
    """The parts of an `Engine`, such as scheduler and model runner."""

    folder: Path | None  # folder of the model's checkpoint; None for a user's model
    preprocessor: Preprocessor
    model_config: ModelSizes
    runtime_config: RuntimeConfig
    memory_account: MemoryAccount
    scheduler: Scheduler
    runner: ModelRunner
    parameters: ModelParameters | JaxParameters  # checks and writes new weights
    tokenizer_folder: Path | None = None  # None for token ids only


@contextmanager
def pause_garbage_collection() -> Iterator[None]:
    """Disable garbage collection while an engine starts, and freeze the objects in memory.

    Tracing creates millions of objects, and collections during tracing would free nothing. A
    collection before the start frees the arrays of earlier engines on the device.

    Before and after the start, all existing objects are frozen (`gc.freeze`), unless the caller has
    disabled garbage collection. Otherwise, each collection would examine all modules and the pool's
    blocks. A collection would then block the engine for a tenth of a second or more. An engine has
    no reference cycles, so a frozen engine is still freed.
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


@pause_garbage_collection()
def build_parts(config: EngineConfig) -> EngineParts:
    """Build all parts of an engine for a checkpoint.

    Raises:
        ValueError: The model cannot be loaded, or does not fit on the device with this
            configuration.
    """
    # Check the path before JAX starts the device, so that a wrong path fails quickly.
    folder = resolve_checkpoint(config.model or EMBEDDED_MODEL)
    log, config = ProgressLog(config.verbose), with_usable_cache(config)
    with log.phase("starting the device"):
        prepare_jax(config)
        mesh = make_mesh(jax.local_devices(), config.tensor_parallel_size)
        devices = jax.local_devices()[: config.tensor_parallel_size]
    plan, dtype = _plan_model(config, folder, devices[0], mesh)
    return _assemble_parts(
        config,
        PlannedModel(
            plan,
            dtype,
            devices,
            folder,
            tokenizer_folder=folder if config.tokenizer_needed else None,
            generation_config=read_generation_config(folder),
            description=f"{folder.name} as {describe_weights(plan.config, dtype)}",
        ),
        log,
    )


def build_jax_model_parts(
    config: EngineConfig, model: JaxModel, params: Any, tokenizer: Path | None
) -> EngineParts:
    """Build all parts of an engine for a user's model.

    The function changes neither JAX's settings nor the garbage collector, because the process may
    belong to a training program.

    Args:
        config: Options of the engine.
        model: The model.
        params: Parameters of the model, a pytree of arrays on the first local device, or on a mesh
            of local devices in which only one axis is longer than 1.
        tokenizer: Folder of a tokenizer; None for token ids only (see `resolve_tokenizer`).

    Raises:
        TypeError, ValueError: The model, a parameter or an option is invalid.
    """
    check_jax_model_options(config)
    _check_mesh(jax.sharding.get_abstract_mesh())
    invariant = config.batch_invariant
    if invariant and config.kv_cache_dtype != "auto":
        raise _unsupported_cache_error(config.kv_cache_dtype)
    plan = plan_jax_model(model, params, jax.local_devices()[0], batch_invariant=invariant)
    device, *_ = devices = plan.devices
    _check_device_options(config, len(devices))
    check_device(device, plan.config.head_size)
    requested, kv_dtype = config.kv_cache_dtype, jnp.dtype(plan.config.kv_cache_dtype)
    plan = plan.with_kv_cache_dtype(
        _choose_kv_cache_dtype(requested, plan.config, kv_dtype, device)
    )
    return _assemble_parts(
        with_usable_cache(config),
        PlannedModel(
            plan,
            plan.dtype,
            devices,
            tokenizer_folder=tokenizer,
            description="params" if tokenizer is None else "the tokenizer",
        ),
        ProgressLog(config.verbose),
    )


def _check_mesh(mesh: AbstractMesh) -> None:
    """Raise ValueError if the caller has set a mesh of several devices with `jax.set_mesh`.

    JAX would compile the engine's programs for that mesh. After the engine is created, the caller
    may set such a mesh.
    """
    if mesh.size > 1:
        raise ValueError(
            f"jax.set_mesh has set a mesh of {mesh.size} devices, but an engine of a JaxModel uses "
            "the mesh of params: create the engine while jax.set_mesh sets no mesh"
        )


def _check_device_options(config: EngineConfig, num_devices: int) -> None:
    """Check that the options fit the number of devices that hold the parameters.

    Raises:
        ValueError: `tensor_parallel_size` is neither 1 nor `num_devices`, or compile workers are
            requested for several devices.
    """
    requested = config.tensor_parallel_size
    if requested not in (1, num_devices):
        raise ValueError(
            f"tensor_parallel_size={requested} is not the number of devices of params, "
            f"{num_devices}: omit it, because a JaxModel runs on the mesh of params"
        )
    if num_devices > 1 and config.num_compile_workers:
        raise ValueError(
            f"num_compile_workers={config.num_compile_workers} does not apply to params on "
            f"{num_devices} devices: omit it, because workers of a JaxModel compile for one device"
        )


def resolve_tokenizer(tokenizer: Any) -> tuple[Path | None, bool]:
    """Return the folder of a tokenizer, and whether the caller must delete the folder later.

    A tokenizer object of the transformers library is saved in a new folder, because other processes
    load the tokenizer too.

    Args:
        tokenizer: A folder, a tokenizer object of transformers, or None.

    Raises:
        TypeError, ValueError: `tokenizer` has another type, or the folder does not exist.
    """
    if tokenizer is None:
        return None, False
    if callable(getattr(tokenizer, "save_pretrained", None)):
        folder = Path(tempfile.mkdtemp(prefix="jpaged-tokenizer-"))
        try:
            tokenizer.save_pretrained(str(folder))
        except BaseException:  # includes KeyboardInterrupt
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return folder, True
    if not isinstance(tokenizer, (str, Path)):
        raise TypeError(
            f"tokenizer is a {type(tokenizer).__name__}: pass a tokenizer of transformers, the "
            "folder that tokenizer.save_pretrained(folder) has written, or None"
        )
    if not Path(tokenizer).is_dir():
        raise ValueError(
            f"tokenizer={str(tokenizer)!r} is not a folder: pass the tokenizer's folder"
        )
    return Path(tokenizer), False


_JAX_MODEL_REMEDIES = {
    "dtype": "cast params, because the model computes in their dtype",
    "quantization": "omit it, because only forward knows the model's products",
    "load_format": "omit it, because params holds the weights",
    "enable_expert_parallel": "omit it, because the sharding of params splits the experts",
    "skip_tokenizer_init": "omit it, and pass tokenizer=None",
    "gpu_memory_utilization": "omit it, because kv_cache_memory_bytes sets the size of the pool",
}
"""Options that must keep their default values with a `JaxModel`. The text says what to do
instead."""


def check_jax_model_options(config: EngineConfig) -> None:
    """Check that an engine for a user's model supports the options.

    Raises:
        ValueError: An option does not apply, or the size of the pool is missing.
    """
    defaults = {each.name: each.default for each in fields(EngineConfig)}
    for name, remedy in _JAX_MODEL_REMEDIES.items():
        value = getattr(config, name)
        if value != defaults[name] and value:  # num_compile_workers=0 is allowed
            raise ValueError(f"{name}={value!r} does not apply to a JaxModel: {remedy}")
    if config.num_blocks is None and config.kv_cache_memory_bytes is None:
        raise ValueError(
            "a JaxModel needs the size of the pool, because the engine shares the device with "
            "other code: pass kv_cache_memory_bytes or num_blocks"
        )


@dataclass(frozen=True)
class PlannedModel:
    """A model that has been checked but not loaded, and what is needed to build an engine for it.

    Attributes:
        plan: Plan of the model.
        dtype: Dtype of the weights, or of the hidden states of a user's model.
        devices: Devices of the engine.
        folder: Folder of the checkpoint; None for a user's model.
        tokenizer_folder: Folder of the tokenizer; None for no tokenizer.
        generation_config: Content of the checkpoint's generation_config.json.
        description: Text for the log that names what is loaded.
    """

    plan: ModelPlan | JaxModelPlan
    dtype: jnp.dtype
    devices: Sequence[Any]
    folder: Path | None = None
    tokenizer_folder: Path | None = None
    generation_config: Mapping[str, Any] = field(default_factory=dict)
    description: str = ""


def _assemble_parts(config: EngineConfig, model: PlannedModel, log: ProgressLog) -> EngineParts:
    """Load the model, size the pool, compile the programs, and return the engine's parts."""
    plan, dtype, devices = model.plan, model.dtype, model.devices
    with Compilation(config, model.folder, plan, dtype, devices, log.print_line) as compilation:
        with log.phase(f"loading {model.description}"):
            split, tokenizer = _load(plan, model.tokenizer_folder)
        eos_token_ids = end_token_ids(plan.config, model.generation_config, tokenizer)
        with log.phase("sizing the pool"):
            runtime, account, shapes = compilation.wait_for_sizes()
        for line in describe_memory(runtime, account, devices, pool_dtype(plan.config, dtype)):
            log.print_line(line)
        with log.phase("waiting for programs"):
            programs = compilation.programs()
    with log.phase("warming up"):
        runner = ModelRunner(split, shapes, runtime, programs, eos_token_ids)
        runner.warm_up()
    for line in account.device_memory_lines(devices[0].memory_stats() or {}):
        log.print_line(line)
    cache = PrefixCache(runtime.block_size) if config.enable_prefix_caching else None
    return EngineParts(
        folder=model.folder,
        tokenizer_folder=model.tokenizer_folder,
        preprocessor=Preprocessor(
            tokenizer,
            vocab_size=runtime.vocab_size,
            max_model_len=runtime.max_model_len,
            max_num_seqs=runtime.max_num_seqs,
            eos_token_ids=eos_token_ids,
            seed=config.seed,
            mask_client=None
            if model.tokenizer_folder is None
            else MaskWorkerClient(model.tokenizer_folder, runtime.vocab_size, eos_token_ids),
            logprobs_mode=config.logprobs_mode,
        ),
        model_config=plan.config,
        runtime_config=runtime,
        memory_account=account,
        scheduler=Scheduler(
            SchedulerConfig(
                runtime.max_num_seqs,
                runtime.max_num_batched_tokens,
                runtime.max_model_len,
                has_priorities=config.scheduling_policy == "priority",
            ),
            BlockManager(runtime.num_blocks, runtime.block_size, cache),
            _choose_preemption(config, runtime, runner, log),
            _make_speculation(runtime),
        ),
        runner=runner,
        parameters=plan.parameters
        if isinstance(plan, JaxModelPlan)
        else ModelParameters(plan, devices),
    )


def _plan_model(
    config: EngineConfig, folder: Path, device: Any, mesh: Mesh | None
) -> tuple[ModelPlan, jnp.dtype]:
    """Return the checked plan for loading the model, and the dtype of the weights."""
    model = read_model_config(read_config(folder), config.quantization)
    if config.enable_expert_parallel and model.experts is None:
        raise ValueError(
            f"enable_expert_parallel is set, but model_type={model.model_type!r} has no experts: "
            "omit the option"
        )
    model = replace(model, enable_expert_parallel=config.enable_expert_parallel)
    # If the devices cannot split the model, fail before weights are read.
    model.shard(config.tensor_parallel_size)
    check_device(device, model.head_size)
    dtype = resolve_dtype(config.dtype, model, device.platform)
    kv_cache_dtype = _choose_kv_cache_dtype(config.kv_cache_dtype, model, dtype, device)
    model = replace(model, kv_cache_dtype=kv_cache_dtype, batch_invariant=config.batch_invariant)
    if config.batch_invariant:
        shard = model.shard(config.tensor_parallel_size)
        check_batch_invariant(shard, config.block_size, dtype, device)
    requested = {"load_format": config.load_format, "seed": config.seed, "mesh": mesh}
    return plan_model(folder, model, dtype=dtype, **requested), dtype


def check_device(device: Any, head_size: int) -> None:
    """Check that the kernels run on a device, and that they support a head size on the device.

    Raises:
        ValueError: The device or the head size is not supported.
    """
    if not supports_kernels(device):
        raise ValueError(
            f"{device.device_kind} has compute capability {device.compute_capability}, but the "
            "kernels need 8.0 or later: use another GPU, or JAX_PLATFORMS=cpu for small models"
        )
    max_head_size = select_backend(device.platform).max_head_size
    if max_head_size is not None and head_size > max_head_size:
        raise head_size_error(head_size, f"1 to {max_head_size} on a GPU, any size on a CPU")


def check_batch_invariant(
    model: ModelConfig, block_size: int, dtype: jnp.dtype, device: Any
) -> None:
    """Check that a device can compute a model so that results have the same bits in any batch.

    Args:
        model: Configuration of the device's shard of the model.
        block_size: Number of tokens in a block.
        dtype: Dtype of the weights.
        device: One of the engine's devices.

    Raises:
        ValueError: The model, its dtypes or the device is not supported.
    """
    quantization, cache_dtype = model.quantization, model.kv_cache_dtype
    is_quantized = quantization is not None and quantization.format is not UnquantizedFormat
    unquantized = "use an unquantized checkpoint, and leave quantization unset"
    if cache_dtype is not None:
        raise _unsupported_cache_error(cache_dtype)
    found: list[tuple[bool, str, str]] = [(is_quantized, "quantized weights", unquantized)]
    if device.platform != "cpu":
        found += _gpu_batch_invariant_checks(model, block_size, dtype, device.device_kind)
    for is_wrong, what, remedy in found:
        if is_wrong:
            raise ValueError(f"batch_invariant=True does not support {what}: {remedy}")


def _unsupported_cache_error(cache_dtype: str) -> ValueError:
    return ValueError(
        f"batch_invariant=True does not support a KV cache of {cache_dtype}: leave kv_cache_dtype "
        "unset"
    )


def _gpu_batch_invariant_checks(
    model: ModelConfig, block_size: int, dtype: jnp.dtype, device_kind: str
) -> list[tuple[bool, str, str]]:
    """Return the results of all checks that `batch_invariant` requires on a GPU.

    Each result is a tuple: whether the check failed, what the GPU does not support, and a remedy.
    """
    windows = [it.sliding_window for it in model.layers if it.sliding_window is not None]
    caps = [it.soft_cap for it in model.layers if it.soft_cap is not None]
    has_prefill = runs_hopper_prefill(
        head_size=128,
        block_size=block_size,
        itemsize=2,
        is_plain_causal=True,
        device_kind=device_kind,
    )
    experts = model.experts
    sizes = {
        "hidden_size": model.hidden_size,
        "vocab_size": model.num_embedding_rows,
        "num_attention_heads * head_dim": model.num_heads * model.head_size,
    }
    if any(layer.experts is None for layer in model.layers):
        sizes["intermediate_size"] = model.intermediate_size
    if experts is not None:
        sizes[experts.width_field] = experts.intermediate_size
    if model.tensor_parallel_size > 1:
        other = f"use a tensor_parallel_size other than {model.tensor_parallel_size}"
    else:
        other = "use another model, or a CPU"
    model_type = f"model_type={model.model_type!r}"
    return [
        (not is_hopper(device_kind), device_kind, "use a Hopper GPU or a CPU"),
        (dtype.itemsize != 2, f"dtype={dtype.name!r} on a GPU", "use dtype='bfloat16'"),
        (
            not has_prefill,
            f"block_size={block_size} on a GPU",
            "use a power of two from 8 to 256",
        ),
        (
            model.head_size != 128,
            f"head_dim={model.head_size} on a GPU",
            "use a model with 128, or a CPU",
        ),
        (bool(windows), f"sliding_window={windows[:1]} on a GPU", "use another model, or a CPU"),
        (bool(caps), f"soft caps {caps[:1]} on a GPU", "use another model, or a CPU"),
        (
            model.norm_type != "rms" or model.norm_positions != ("before",),
            f"the norms of {model_type} on a GPU",
            "use a model with RMSNorm before each block, or a CPU",
        ),
        (
            not (model.is_gated and is_silu(model.activation)),
            f"the activation {model.activation!r} on a GPU",
            "use a model with SwiGLU, or a CPU",
        ),
        *(
            (
                size % BATCH_INVARIANT_UNIT != 0,
                f"{name}={size} per device on a GPU, no multiple of {BATCH_INVARIANT_UNIT}",
                other,
            )
            for name, size in sizes.items()
        ),
    ]


def resolve_dtype(requested: str, model: ModelConfig, platform: str) -> jnp.dtype:
    """Return the dtype in which the weights are loaded on a platform.

    Args:
        requested: Value of the option `EngineConfig.dtype`.
        model: Configuration of the model.
        platform: Platform of the device in JAX, such as "cpu" or "gpu".
    """
    if requested != "auto":
        return jnp.dtype(requested)
    if platform == "cpu":  # CPUs emulate bfloat16, which is slow
        return jnp.dtype(jnp.float32)
    return jnp.dtype(model.checkpoint_dtype or "bfloat16")


def describe_weights(model: ModelConfig, dtype: jnp.dtype) -> str:
    """Return the dtype of the weights and the quantization format of the projections as text."""
    quantization = model.quantization
    if quantization is None or quantization.format is UnquantizedFormat:
        return dtype.name
    return f"{dtype.name}, projections in {quantization.format.name}"


def _choose_kv_cache_dtype(
    requested: str, model: ModelSizes, dtype: jnp.dtype, device: Any
) -> str | None:
    """Return the dtype of the KV pool; None if it equals the dtype of the weights."""
    if requested in FP8_KV_CACHE_DTYPES and model.head_size % 4:
        raise head_size_error(model.head_size, f"multiples of 4, with kv_cache_dtype={requested!r}")
    if requested not in FP8_KV_CACHE_DTYPES:
        return None if requested in ("auto", dtype.name) else requested
    if not supports_fp8(device):
        raise RequestError(
            "kv_cache_dtype",
            (
                "needs a GPU of compute capability 8.9 or more (Ada, Hopper and later), but "
                f"{device.device_kind} has {device.compute_capability}; use kv_cache_dtype='auto'"
            ),
            value=repr(requested),
        )
    return FP8_DTYPE


def _load(
    plan: ModelPlan | JaxModelPlan, tokenizer_folder: Path | None
) -> tuple[SplitModel, Tokenizer | None]:
    """Load the weights and the tokenizer concurrently, and return both."""
    with ThreadPoolExecutor(1) as pool:
        tokenizer_future = None
        if tokenizer_folder is not None:
            tokenizer_future = pool.submit(Tokenizer.from_folder, tokenizer_folder)
        split = SplitModel.of(plan.load())
        jax.block_until_ready(split.leaves)
        return split, tokenizer_future.result() if tokenizer_future is not None else None


def end_token_ids(
    model: ModelSizes, generation_config: Mapping[str, Any], tokenizer: Tokenizer | None
) -> frozenset[int]:
    """Return the end tokens from the model config, the generation config and the tokenizer."""
    token_ids: set[object] = set(model.eos_token_ids)
    listed = generation_config.get("eos_token_id")
    token_ids.update(listed if isinstance(listed, list) else [listed])
    token_ids.add(tokenizer.eos_token_id if tokenizer is not None else None)
    vocabulary = range(model.vocab_size)
    return frozenset(token for token in token_ids if isinstance(token, int) and token in vocabulary)


def _choose_preemption(
    config: EngineConfig, runtime: RuntimeConfig, runner: ModelRunner, log: ProgressLog
) -> PreemptionPolicy:
    """Choose whether preempted requests are recomputed or swapped. Measure the costs of both only
    if `preemption_mode` is "auto"."""
    mode = PreemptionMode(config.preemption_mode)
    if not runtime.num_host_blocks:
        return PreemptionPolicy()
    if mode is not PreemptionMode.AUTO:
        return PreemptionPolicy(mode, runtime.num_host_blocks)
    with log.phase("measuring the cost of preemption"):
        costs = measure_preemption_costs(runner, runtime)
    return PreemptionPolicy(mode, runtime.num_host_blocks, costs)


def _make_speculation(runtime: RuntimeConfig) -> Speculation | None:
    if runtime.speculation is None:
        return None
    num_drafts = runtime.speculation.num_padded_drafts
    return Speculation(num_drafts, verify_costs(runtime, num_drafts))


def describe_memory(
    runtime: RuntimeConfig, account: MemoryAccount, devices: Sequence[Any], dtype: jnp.dtype
) -> list[str]:
    """Return log lines about the memory of each device and the size of the pool.

    Args:
        runtime: Resolved configuration of the engine.
        account: Memory use of one device.
        devices: Tensor-parallel devices.
        dtype: Dtype of the pool.
    """
    devices_prefix = f"each of {len(devices)} x " if len(devices) > 1 else ""
    num_blocks, block_size = runtime.num_blocks - 1, runtime.block_size
    capacity = format_count(num_blocks * block_size, "token", number_format=",")
    swap = f"host memory for swapped blocks: up to {account.swap / 2**20:,.1f} MiB"
    return [
        f"memory of {devices_prefix}{devices[0].device_kind}:",
        *account.lines(),
        *([swap] if account.swap else []),
        f"KV pool of {format_count(num_blocks, 'block', number_format=',')} of "
        f"{format_count(block_size, 'token')} ({capacity}) in {dtype.name}, up to "
        f"{format_count(runtime.max_num_seqs, 'sequence')} of up to "
        f"{format_count(runtime.max_model_len, 'token', number_format=',')}, "
        f"{format_count(runtime.max_num_batched_tokens, 'token', number_format=',')} per step",
    ]
