import pytest

from jpaged.config import (
    CPU_DEFAULTS,
    EngineConfig,
    RuntimeConfig,
    resolve_limits,
    with_pool,
)
from pallas_kernels import Backend


def resolved(num_blocks: int = 100, **options) -> RuntimeConfig:
    config = EngineConfig(**options)
    limits = resolve_limits(
        config,
        model_max_len=1024,
        vocab_size=300,
        backend=Backend.XLA,
        defaults=CPU_DEFAULTS,
    )
    return with_pool(limits, num_blocks, config)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("dtype", "int8", "dtype='int8' is not supported; choose one of auto, float32"),
        ("load_format", "pt", "load_format='pt' is not supported"),
        ("block_size", 12, "block_size=12 is not a multiple of 8 from 8 to 128"),
        ("block_size", 256, "block_size=256"),
        ("num_blocks", 1, "num_blocks=1 must be an integer of at least 2"),
        ("num_blocks", True, "num_blocks=True"),
        ("max_num_seqs", 0, "max_num_seqs=0 must be an integer of at least 1"),
        ("max_model_len", 1, "max_model_len=1 must be an integer of at least 2"),
        ("max_num_batched_tokens", True, "max_num_batched_tokens=True"),
        ("kv_cache_memory_bytes", 0, "kv_cache_memory_bytes=0"),
        ("gpu_memory_utilization", 0.0, "gpu_memory_utilization=0.0 must be above 0"),
        ("gpu_memory_utilization", float("nan"), "gpu_memory_utilization=nan"),
        ("seed", -1, "seed=-1"),
    ],
)
def test_a_bad_option_is_refused_by_name(option: str, value: object, message: str):
    with pytest.raises(ValueError, match=message):
        EngineConfig(**{option: value})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "option", ["async_scheduling", "enable_prefix_caching", "skip_tokenizer_init", "verbose"]
)
def test_a_switch_is_true_or_false(option: str):
    with pytest.raises(TypeError, match=f"{option}=1 must be True or False"):
        EngineConfig(**{option: 1})  # pyright: ignore[reportArgumentType]


def test_the_pool_is_given_one_way_only():
    with pytest.raises(ValueError, match="num_blocks or kv_cache_memory_bytes, not both"):
        EngineConfig(num_blocks=10, kv_cache_memory_bytes=10)


def test_none_stands_for_the_devices_defaults():
    config = resolved()
    assert config.max_num_seqs == CPU_DEFAULTS.max_num_seqs
    assert config.max_num_batched_tokens == CPU_DEFAULTS.max_num_batched_tokens
    assert config.max_model_len == 1024
    assert config.max_blocks_per_seq == 64


def test_the_longest_sequence_always_fits_the_pool():
    assert resolved(11).max_model_len == 160
    with pytest.raises(ValueError, match=r"max_model_len=161 tokens do not fit .* to 160"):
        resolved(11, max_model_len=161)


def test_a_pool_of_no_blocks_is_an_error():
    with pytest.raises(ValueError, match="no KV block fits in the memory left"):
        resolved(1)


def test_more_positions_than_the_model_has_are_refused():
    with pytest.raises(ValueError, match="max_model_len=1025 is more than the 1024 positions"):
        resolved(max_model_len=1025)


def test_a_step_has_room_for_a_token_of_every_sequence():
    with pytest.raises(ValueError, match="max_num_batched_tokens=8 is less than max_num_seqs=16"):
        resolved(max_num_batched_tokens=8, max_num_seqs=16)
    assert resolved(max_num_batched_tokens=8).max_num_seqs == 8
    assert resolved(max_num_seqs=1000).max_num_batched_tokens == 1000
