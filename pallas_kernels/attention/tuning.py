"""Launch parameters of attention: a heuristic, overridden by the device's table."""

import dataclasses

from jax.experimental import pallas as pl

from pallas_kernels import tuning
from pallas_kernels.tuning import is_hopper

SMALL_BATCH = 8  # rows that mostly stand for fewer sequences
REFERENCE_NUM_CORES = 132  # SMs of the GPU that the numbers were found on
HOPPER_KEY_TILE = 128  # keys a tile of prefill_hopper.py
WIDENED_KV_BYTES = (
    2**28
)  # that a step has for widened keys and values of its prompts' earlier tokens


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """Of decode_triton.py: keys a tile, most splits of a sequence, warps, pipeline stages, and the
    programs that the splits in use should come to.

    Where there are sequences enough, `split_percent_of_mean` of their mean length is what a split should
    have, in place of an even share of `target_programs`: only the longer ones are split.
    """

    tile_tokens: int
    num_splits: int
    num_warps: int = 4
    num_stages: int = 2
    target_programs: int = 4 * REFERENCE_NUM_CORES
    split_percent_of_mean: int | None = None


@dataclasses.dataclass(frozen=True)
class PrefillConfig:
    """Of prefill_triton.py: query rows (tokens x group) and keys a tile, warps, pipeline stages."""

    tile_rows: int
    tile_tokens: int
    num_warps: int
    num_stages: int


@dataclasses.dataclass(frozen=True)
class WideningConfig:
    """Of widen_triton.py: blocks that there is room for, elements of one that a program converts
    at a time, programs, warps."""

    max_blocks: int
    chunk: int = 4096
    num_programs: int = 8 * REFERENCE_NUM_CORES
    num_warps: int = 4


def decode_config(
    *,
    batch: int,
    num_kv_heads: int,
    head_size: int,
    itemsize: int,
    max_context: int,
    device_kind: str = "",
) -> DecodeConfig:
    """For `batch` sequences of at most `max_context` tokens, over a pool of `itemsize` bytes."""
    tile = _key_tile(head_size, itemsize)
    # About two programs an SM keep the memory busy; a split should have a tile of its own to read.
    # The smallest bucket may hold a lone sequence; splits that it does not use cost little.
    rows = 1 if batch <= SMALL_BATCH else batch
    wanted = pl.next_power_of_2(-(-2 * REFERENCE_NUM_CORES // (rows * num_kv_heads)))
    programs, many = batch * num_kv_heads, wanted == 1
    if (
        many and programs > 12 * REFERENCE_NUM_CORES
    ):  # an SM has more at once if their tiles are small
        tile = min(tile, 32 if itemsize > 1 else 64)  # as many bytes, in FP8
    # A long sequence among short ones may have more splits than all could have.
    splits = max(1, min(max(wanted, 8), 32, -(-max_context // tile)))
    config = DecodeConfig(
        tile,
        splits,
        # Of many programs the warps have less to wait for.
        num_warps=2 if itemsize <= 2 and (many or splits == 1) else 4,
        split_percent_of_mean=(110 if programs <= 4 * REFERENCE_NUM_CORES else 150)
        if many
        else None,
    )
    return tuning.apply_tuned_config("decode", head_size, itemsize, device_kind, config)


def should_split_decode_rows(*, num_tokens: int, batch: int) -> bool:
    """Whether a ragged batch launches decode attention as well, for its one-token sequences.

    One of them fills a tile of its own in prefill attention, and reads its keys at half the speed.
    In the smallest bucket a launch more costs as much as it saves.
    """
    return SMALL_BATCH < batch <= num_tokens


def prefill_config(
    *,
    num_tokens: int,
    batch: int,
    group: int,
    head_size: int,
    itemsize: int,
    device_kind: str = "",
) -> PrefillConfig:
    """For `num_tokens` query tokens of `batch` sequences, `group` query heads a KV head.

    Two warp groups of 128 rows each are the fastest on long sequences, as far as registers hold
    the float32 output; short sequences waste less of a small tile.
    """
    group_rows = pl.next_power_of_2(group)
    key_tile = _key_tile(head_size, itemsize)
    row_bytes = pl.next_power_of_2(head_size) * itemsize
    if num_tokens // batch * group_rows < 2048 or row_bytes > 512 or itemsize > 2:
        config = PrefillConfig(max(64, group_rows), min(32, key_tile), num_warps=4, num_stages=2)
    else:
        rows = max(256 if row_bytes <= 256 else 128, group_rows)
        config = PrefillConfig(rows, key_tile, num_warps=8, num_stages=2)
    return tuning.apply_tuned_config("prefill", head_size, itemsize, device_kind, config)


def widening_config(
    *, num_tokens: int, block_size: int, num_kv_heads: int, head_size: int, itemsize: int
) -> WideningConfig:
    """For a step of `num_tokens`, its queries of `itemsize` bytes.

    The room depends on nothing of the batch or the pool, so that steps that differ in these have
    the same kernels, and a step's workspace is known before the pool's size is. It has two blocks
    for each that new tokens fill, at least.
    """
    block_bytes = 2 * block_size * num_kv_heads * head_size * itemsize
    return WideningConfig(max(WIDENED_KV_BYTES // block_bytes, 2 * -(-num_tokens // block_size)))


def _key_tile(head_size, itemsize):
    """Keys a tile: 16 KiB of keys, from 16 to 64; more spills or starves the pipeline."""
    return max(16, min(64, 16384 // (pl.next_power_of_2(head_size) * itemsize)))


def runs_hopper_prefill(
    *, head_size: int, block_size: int, itemsize: int, is_plain_causal: bool, device_kind: str = ""
) -> bool:
    """Whether prefill_hopper.py runs; else the Triton kernel does.

    Its copies are of whole blocks, or of a block's part of a tile where the block is longer, and of
    8 rows at least, which is a tile of shared memory. The Triton kernel loads the keys of a tile by
    their rows, so it takes blocks of any size.

    Args:
        head_size: Elements of a head.
        block_size: Tokens of a block.
        itemsize: Bytes of an element.
        plain: Neither a soft cap nor a sliding window.
        device_kind: The GPU's name.
    """
    whole = block_size >= 8 and (
        HOPPER_KEY_TILE % block_size == 0 or block_size % HOPPER_KEY_TILE == 0
    )
    return (
        is_hopper(device_kind) and head_size == 128 and itemsize == 2 and whole and is_plain_causal
    )
