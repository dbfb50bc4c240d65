from dataclasses import replace
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from jpaged import config as config_module
from jpaged.compile.sizing import (
    CPU_DEFAULTS,
    PlatformDefaults,
    platform_defaults,
    resolve_limits,
    with_pool,
    with_swap,
)
from jpaged.config import PREEMPTION_MODES, QUANTIZATIONS, EngineConfig
from jpaged.core.swap import PreemptionMode
from jpaged.engine.startup import describe_memory
from jpaged.models.config import MAX_TENSOR_PARALLEL_SIZE
from jpaged.models.quantization import QUANTIZATION_METHODS
from jpaged.observe.statistics import MemoryAccount
from jpaged.runtime.runtime_config import RuntimeConfig
from pallas_kernels import Backend, checks


def resolved(
    num_blocks: int = 100, /, defaults: PlatformDefaults = CPU_DEFAULTS, **options
) -> RuntimeConfig:
    config, sizes = EngineConfig(**options), {"model_max_len": 1024, "vocab_size": 300}
    limits = resolve_limits(config, **sizes, backend=Backend.XLA, defaults=defaults)
    return with_pool(limits, num_blocks, config)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("dtype", "int8", "dtype='int8' is not supported; choose one of auto, float32"),
        ("load_format", "pt", "load_format='pt' is not supported"),
        (
            "logprobs_mode",
            "raw",
            "logprobs_mode='raw' is not .* of raw_logprobs, processed_logprob",
        ),
        ("kv_cache_dtype", "fp8_e5m2", "kv_cache_dtype='fp8_e5m2' is not .* of .*fp8, fp8_e4m3"),
        ("block_size", 0, "block_size=0 is out of range: .* an integer from 1 to 256; use 16"),
        ("block_size", 257, "block_size=257"),
        ("block_size", 16.0, "block_size=16.0"),
        ("block_size", True, "block_size=True"),
        ("num_blocks", 1, "num_blocks=1 is out of range: it must be an integer, 2 or more"),
        ("num_blocks", True, "num_blocks=True"),
        ("max_num_seqs", 0, "max_num_seqs=0 is out of range: it must be an integer"),
        ("max_num_seqs", 2049, r"max_num_seqs=2049 is out of range: .* at most 2048"),
        ("max_num_batched_tokens", 2**18 + 1, "max_num_batched_tokens=262145 .* at most 262144"),
        ("max_model_len", 1, "max_model_len=1 .* an integer, 2 or more"),
        ("max_num_batched_tokens", True, "max_num_batched_tokens=True"),
        ("num_scheduler_steps", 0, "num_scheduler_steps=0 is out of range"),
        ("num_scheduler_steps", 65, "num_scheduler_steps=65 .* at most 64"),
        ("kv_cache_memory_bytes", 0, "kv_cache_memory_bytes=0"),
        ("gpu_memory_utilization", 0.0, "gpu_memory_utilization=0.0 .* must be a number above 0"),
        ("gpu_memory_utilization", float("nan"), "gpu_memory_utilization=nan"),
        ("seed", -1, "seed=-1"),
        ("preemption_mode", "drop", "preemption_mode='drop' .* one of recompute, swap, auto"),
        ("scheduling_policy", "lifo", "scheduling_policy='lifo' .* one of fcfs, priority"),
        ("swap_space", -1, "swap_space=-1 .* must be a number of GiB, 0 or more"),
        ("swap_space", float("nan"), "swap_space=nan .* must be a number"),
        ("swap_space", "4", "swap_space='4' .* must be a number"),
        ("swap_space", True, "swap_space=True .* must be a number"),
        ("swap_space", 1e9, r"swap_space=.* more than this machine's \d+\.\d GiB of memory; lower"),
        ("swap_space", float("inf"), "swap_space=inf is out of range"),
    ],
)
def test_error_for_an_invalid_option_names_the_option(option: str, value: object, message: str):
    with pytest.raises((TypeError, ValueError), match=message):
        EngineConfig(**{option: value})  # pyright: ignore[reportArgumentType]


def test_limits_and_choices_in_config_equal_the_originals_in_other_modules():
    assert config_module.MAX_GPUS == MAX_TENSOR_PARALLEL_SIZE
    assert QUANTIZATIONS == QUANTIZATION_METHODS
    assert config_module.MAX_BLOCK_SIZE == checks.MAX_BLOCK_SIZE
    assert tuple(PreemptionMode) == PREEMPTION_MODES


@pytest.mark.parametrize("size", [1, 2, 7, 16, 256])
def test_every_block_size_of_the_kernels_is_accepted(size: int):
    assert EngineConfig(block_size=size).block_size == size


@pytest.mark.parametrize(
    "option", ["async_scheduling", "enable_prefix_caching", "skip_tokenizer_init", "verbose"]
)
def test_boolean_option_refuses_a_number(option: str):
    with pytest.raises(TypeError, match=f"{option}=1 must be True or False"):
        EngineConfig(**{option: 1})  # pyright: ignore[reportArgumentType]


def test_default_limits_depend_on_the_device():
    config = resolved()
    assert config.max_num_seqs == CPU_DEFAULTS.max_num_seqs
    assert config.max_num_batched_tokens == CPU_DEFAULTS.max_num_batched_tokens
    assert config.max_model_len == 1024
    assert config.max_blocks_per_seq == 64


@pytest.mark.parametrize(
    ("platform", "weights", "options", "expected"),
    [
        ("gpu", 1.2e9, {}, 4),
        ("gpu", 16e9, {}, 1),
        ("gpu", 16e9, {"num_scheduler_steps": 3}, 3),
        ("gpu", 1.2e9, {"num_scheduler_steps": 1}, 1),
        ("gpu", 1.2e9, {"async_scheduling": False}, 1),
        ("gpu", 1.2e9, {"num_scheduler_steps": 3, "async_scheduling": False}, 1),
        ("cpu", 1e6, {}, 1),
        ("cpu", 1e6, {"num_scheduler_steps": 3}, 3),
    ],
)
def test_small_models_on_a_gpu_use_multi_step_decode_by_default(
    platform: str, weights: float, options: dict, expected: int
):
    defaults = platform_defaults(SimpleNamespace(platform=platform), int(weights))
    assert resolved(defaults=defaults, **options).num_scheduler_steps == expected


@pytest.mark.parametrize(
    ("num_blocks", "options", "message"),
    [
        (11, {"max_model_len": 161}, "max_model_len=161 tokens do not fit .* to 160"),
        (1, {}, "no KV block fits in the memory left"),
        (100, {"max_model_len": 1025}, "max_model_len=1025 is more than the 1024 positions"),
        (
            100,
            {"max_num_batched_tokens": 8, "max_num_seqs": 16},
            "max_num_batched_tokens=8 is less than max_num_seqs=16",
        ),
    ],
    ids=str,
)
def test_contradicting_limits_are_refused(num_blocks: int, options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        resolved(num_blocks, **options)


def test_contradicting_options_are_refused_before_limits_are_known():
    with pytest.raises(ValueError, match="num_blocks or kv_cache_memory_bytes, not both"):
        EngineConfig(num_blocks=10, kv_cache_memory_bytes=10)
    with pytest.raises(ValueError, match="swap_space=0 provides no host memory"):
        EngineConfig(preemption_mode="swap", swap_space=0)


def test_unset_limits_fit_the_kv_pool_and_the_limits_that_the_user_sets():
    assert resolved(11).max_model_len == 160
    assert resolved(max_num_batched_tokens=8).max_num_seqs == 8
    assert resolved(max_num_seqs=1000).max_num_batched_tokens == 1000
    EngineConfig(preemption_mode="auto", swap_space=0)


@pytest.mark.parametrize(
    ("mode", "space", "expected"),
    [("recompute", 0.25, 0), ("swap", 0.25, 16), ("auto", 0.25, 16), ("swap", 0.5, 19)],
)
def test_number_of_host_blocks_is_limited_by_swap_space_and_pool(
    mode: str, space: float, expected: int
):
    config = EngineConfig(preemption_mode=mode, swap_space=space)
    assert with_swap(resolved(20), config, 16 * 2**20).num_host_blocks == expected


def test_swap_space_must_hold_a_block_if_preemption_mode_is_swap():
    config = EngineConfig(preemption_mode="swap", swap_space=1e-6)
    with pytest.raises(ValueError, match="swap_space=1e-06 GiB does not hold a block of 4,096"):
        with_swap(resolved(), config, 4096)
    config = EngineConfig(preemption_mode="auto", swap_space=1e-6)
    assert with_swap(resolved(), config, 4096).num_host_blocks == 0


def test_startup_memory_report_has_a_line_for_host_memory():
    account = MemoryAccount(weights=1, sampling=2, workspace=3, kv_cache=4, limit=20, swap=2**20)
    assert account.total == 10
    devices, dtype = [SimpleNamespace(device_kind="X")], jnp.dtype("float8_e4m3fn")
    lines = describe_memory(resolved(), account, devices, dtype)
    assert " tokens) in float8_e4m3fn, up to " in lines[-1]
    assert "host memory for swapped blocks: up to 1.0 MiB" in lines
    without = describe_memory(resolved(), replace(account, swap=0), devices, dtype)
    assert len(without) == len(lines) - 1


def test_default_swap_space_is_less_on_a_small_machine(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(config_module, "physical_memory_bytes", lambda: 2 * 2**30)
    assert EngineConfig(preemption_mode="swap").host_blocks(2**20) == 1024
    with pytest.raises(ValueError, match=r"swap_space=4 GiB is more than this machine's 2.0 GiB"):
        EngineConfig(swap_space=4)
