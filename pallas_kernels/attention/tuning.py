"""Launch parameters of the attention kernels: heuristics, overridden by the device's tuned table.

The functions depend only on sizes, dtypes, and the name of the GPU.
"""

import dataclasses

from jax.experimental import pallas as pl

from pallas_kernels import tuning
from pallas_kernels.tuning import is_hopper

# The smallest bucket has `SMALL_BATCH` batch rows, and often holds fewer sequences.
SMALL_BATCH = 8
# The heuristics were tuned on a GPU with `REFERENCE_NUM_CORES` SMs.
REFERENCE_NUM_CORES = 132
# A key tile of prefill_hopper.py has `HOPPER_KEY_TILE` keys.
HOPPER_KEY_TILE = 128
# widen_triton.py converts keys and values from FP8 into a buffer of about `WIDENED_KV_BYTES` bytes.
# In a step with many new tokens, the buffer is larger.
WIDENED_KV_BYTES = 2**28


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """Launch parameters of decode_triton.py.

    Attributes:
        tile_tokens: Keys per tile.
        num_splits: Maximum number of splits of a sequence.
        num_warps: Warps per program.
        num_stages: Pipeline stages of the loads.
        target_programs: Number of programs over which a small batch is divided evenly.
        split_percent_of_mean: Length of a split in percent of the mean sequence length, for batches
            that fill the GPU: only longer sequences are split. If it is None, `target_programs`
            determines the splits.
    """

    tile_tokens: int
    num_splits: int
    num_warps: int = 4
    num_stages: int = 2
    target_programs: int = 4 * REFERENCE_NUM_CORES
    split_percent_of_mean: int | None = None


@dataclasses.dataclass(frozen=True)
class PrefillConfig:
    """Launch parameters of prefill_triton.py.

    Attributes:
        tile_rows: Query rows per tile: tokens times query heads of a KV head.
        tile_tokens: Keys per tile.
        num_warps: Warps per program.
        num_stages: Pipeline stages of the loads.
    """

    tile_rows: int
    tile_tokens: int
    num_warps: int
    num_stages: int


@dataclasses.dataclass(frozen=True)
class WideningConfig:
    """Launch parameters of widen_triton.py.

    Attributes:
        max_blocks: Maximum number of blocks that a step converts.
        chunk: Elements of a block that a program converts at a time.
        num_programs: Number of programs.
        num_warps: Warps per program.
    """

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
    """Return the launch parameters of decode attention.

    Args:
        batch: Number of rows of the batch.
        num_kv_heads: Number of KV heads.
        head_size: Elements of a head.
        itemsize: Bytes of an element of the pool.
        max_context: Maximum number of tokens of a sequence.
        device_kind: Name of the GPU, for its tuned table.
    """
    tile = _key_tile(head_size, itemsize)
    # About two programs per SM saturate the memory bandwidth. A batch of the smallest bucket may
    # have a single sequence, so choose as many splits as one sequence needs. Splits without keys
    # cost little time.
    rows = 1 if batch <= SMALL_BATCH else batch
    wanted = pl.next_power_of_2(-(-2 * REFERENCE_NUM_CORES // (rows * num_kv_heads)))
    programs, fills_gpu = batch * num_kv_heads, wanted == 1
    if fills_gpu and programs > 12 * REFERENCE_NUM_CORES:
        # With smaller tiles, more programs fit on an SM. 64 FP8 keys have as many bytes as 32
        # bfloat16 keys.
        tile = min(tile, 32 if itemsize > 1 else 64)
    # Allow at least 8 splits per sequence, so that a long sequence in a batch of short sequences is
    # divided among several programs.
    splits = max(1, min(max(wanted, 8), 32, -(-max_context // tile)))
    config = DecodeConfig(
        tile,
        splits,
        # If many programs share an SM, they hide the latency of each other's loads, so two warps
        # per program are enough.
        num_warps=2 if itemsize <= 2 and (fills_gpu or splits == 1) else 4,
        split_percent_of_mean=(110 if programs <= 4 * REFERENCE_NUM_CORES else 150)
        if fills_gpu
        else None,
    )
    return tuning.apply_tuned_config("decode", head_size, itemsize, device_kind, config)


def should_split_decode_rows(*, num_tokens: int, batch: int) -> bool:
    """Return whether the leading one-token sequences of a ragged batch use the decode kernel.

    The prefill kernel computes a whole tile for each one-token sequence, and reads the keys at half
    the speed of the decode kernel. In a batch of at most `SMALL_BATCH` rows, the second launch
    costs as much time as it saves.
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
    """Return the launch parameters of prefill_triton.py.

    With long sequences, a tile has 256 rows and 8 warps if registers can hold the float32 output.
    With short sequences, tiles are small, because small tiles waste fewer rows.

    Args:
        num_tokens: Number of query tokens in the batch.
        batch: Number of sequences.
        group: Number of query heads per KV head.
        head_size: Elements of a head.
        itemsize: Bytes of an element of the queries.
        device_kind: Name of the GPU, for its tuned table.
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
    """Return the launch parameters of widen_triton.py, which converts FP8 blocks of the KV pool.

    The kernel writes the converted blocks to a buffer. The buffer has room for at least twice as
    many blocks as the new tokens fill. The buffer size does not depend on the batch size, so steps
    of different batch sizes share compiled kernels. The buffer size must not depend on the pool
    size either. The engine first determines the memory of a step, including this buffer, and gives
    the remaining memory to the pool.

    Args:
        num_tokens: Number of new tokens in the step.
        block_size: Tokens of a block.
        num_kv_heads: Number of KV heads.
        head_size: Elements of a head.
        itemsize: Bytes of an element of the queries, hence of the converted blocks.
    """
    block_bytes = 2 * block_size * num_kv_heads * head_size * itemsize
    return WideningConfig(max(WIDENED_KV_BYTES // block_bytes, 2 * -(-num_tokens // block_size)))


def _key_tile(head_size, itemsize):
    """Return the number of keys per tile: as many as fit in 16 KiB, but at least 16, at most 64.

    Larger tiles spill registers or leave too few loads in flight.
    """
    return max(16, min(64, 16384 // (pl.next_power_of_2(head_size) * itemsize)))


def runs_hopper_prefill(
    *, head_size: int, block_size: int, itemsize: int, is_plain_causal: bool, device_kind: str = ""
) -> bool:
    """Return whether prefill_hopper.py computes the attention; otherwise prefill_triton.py does.

    The Hopper kernel copies whole blocks, or the part of a long block that a key tile covers. A
    copy has at least 8 rows, the height of a shared-memory tile. The Triton kernel gathers single
    rows, so it takes blocks of any size.

    Args:
        head_size: Elements of a head.
        block_size: Tokens of a block.
        itemsize: Bytes of an element of the queries.
        is_plain_causal: Whether soft cap and sliding window are both None.
        device_kind: Name of the GPU.
    """
    whole = block_size >= 8 and (
        HOPPER_KEY_TILE % block_size == 0 or block_size % HOPPER_KEY_TILE == 0
    )
    return (
        is_hopper(device_kind) and head_size == 128 and itemsize == 2 and whole and is_plain_causal
    )
