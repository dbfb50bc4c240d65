"""Where the kernels for Hopper GPUs run, and their launch parameters, as tuning.py for the others.

They see static facts only. None means that what runs on every GPU is the faster one there, or the
only one. Times on an H200: bench/NOTES.md.
"""

import dataclasses

from pallas_kernels import tuning
from pallas_kernels.types import LayerSizes

HOPPER_GPUS = ("H100", "H200", "H800", "H20")  # in the names of devices of compute capability 9.0
MAX_SHARED_BYTES = 227 * 1024  # of a program on such a GPU

# Of the weight, under way to a computer of a product where no SM is idle, before it is rounded to
# whole steps: with half as much more or a quarter less a product takes 2 to 7 % longer.
WEIGHT_BYTES_AHEAD = 60 * 1024

# Share of the SMs' time until the last tile is done that they spend on tiles of many rows. XLA,
# which has a choice of tiles, is the faster one with 0.73, and the slower one with 0.85.
MIN_SHARE_AT_WORK = 0.8


@dataclasses.dataclass(frozen=True)
class HopperPrefillConfig:
    """Of paged_prefill_hopper.py: keys a tile, tiles of keys in flight, programs (one an SM)."""

    tile_tokens: int = 128
    num_key_stages: int = 2
    num_value_stages: int = 2
    num_programs: int = 132


@dataclasses.dataclass(frozen=True)
class BetweenConfig:
    """Of between_hopper.py: programs (one an SM), places of the ring and copies under way, each a
    unit of 16 KiB."""

    num_programs: int
    num_stages: int
    num_in_flight: int


@dataclasses.dataclass(frozen=True)
class HopperProductConfig:
    """Of product_hopper.py: parts, rows a program, its computers (64 columns each), steps of the
    depth in flight (two at least)."""

    num_parts: int
    tile_rows: int
    num_computers: int
    num_stages: int


@dataclasses.dataclass(frozen=True)
class HopperGemmConfig:
    """Of gated_gemm_hopper.py: steps of the depth in flight (two or more), programs (one an SM)."""

    num_stages: int
    num_programs: int


def prefill_config(
    *,
    head_size: int,
    block_size: int,
    itemsize: int,
    plain: bool,
    device_kind: str = "",
) -> HopperPrefillConfig | None:
    """Where paged_prefill_hopper.py runs; None where the Triton kernel does.

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
    config = HopperPrefillConfig()
    fits = head_size == 128 and itemsize == 2
    tile = config.tile_tokens
    whole = block_size >= 8 and (tile % block_size == 0 or block_size % tile == 0)
    return config if _is_hopper(device_kind) and fits and whole and plain else None


def between_config(
    sizes: LayerSizes, *, num_tokens: int, dtype: str, num_cores: int | None, device_kind: str = ""
) -> BetweenConfig | None:
    """Where between_hopper.py runs; None where the ops it stands for do.

    Args:
        sizes: Widths of the layer.
        num_tokens: Rows of the step's bucket.
        dtype: Name of the activations' and weights' dtype.
        num_cores: SMs of the GPU; None where it is not known.
        device_kind: The GPU's name.
    """
    whole = all(size % 128 == 0 for size in sizes)
    # Readers sum the parts: with eight real rows that costs a wide model more than it saves.
    narrow = sizes.hidden < 2048
    if not (
        _is_hopper(device_kind) and whole and narrow and num_tokens == 8 and dtype == "bfloat16"
    ):
        return None
    if not num_cores:
        return None
    units = max(
        -(-sizes.hidden * sizes.attended // (num_cores * 8192)),
        -(-sizes.hidden * sizes.inner // (num_cores * 8192)),
        -(-sizes.hidden * sizes.qkv // (num_cores * 8192)),
    )
    room = MAX_SHARED_BYTES - 8192 - (units + 1) * 128 * 8 * 2
    stages = min(12, room // 16384 // 2 * 2)
    # Few copies at a time delay the programs' exchange less.
    return BetweenConfig(num_cores, stages, num_in_flight=3) if stages >= 4 else None


def product_config(
    *,
    num_tokens: int,
    depth: int,
    width: int,
    itemsize: int,
    num_factors: int = 1,
    num_cores: int | None,
    device_kind: str = "",
) -> HopperProductConfig | None:
    """Where product_hopper.py runs; None where XLA's products do. Times on an H200: bench/NOTES.md.

    Args:
        num_tokens: Rows.
        depth, width: Of the weight, or of each of two.
        itemsize: Bytes of an element.
        num_factors: 2 for a gated product, which cannot be in parts.
        num_cores: SMs of the GPU; None where it is not known.
        device_kind: The GPU's name.
    """
    # By a large weight XLA's products of more than 128 rows are as fast or faster in a step.
    large = depth * width * num_factors > 1 << 23
    few = 0 < num_tokens <= (128 if large else tuning.MAX_SPLIT_ROWS)
    if not (_is_hopper(device_kind) and num_cores and itemsize == 2 and few and depth and width):
        return None
    row_tiles = 1 if large else _row_tiles(num_tokens, width, num_cores)
    # Each program reads all of its rows, and without an SM of its own it waits for one.
    num_computers = 1 if row_tiles * width // 64 <= num_cores else 2
    if num_tokens % (8 * row_tiles) or depth % 64 or width % (64 * num_computers):
        return None
    column_tiles = width // (64 * num_computers)
    programs = row_tiles * column_tiles
    if programs > num_cores:
        return None
    parts = 1 if num_factors > 1 else _parts_by_cores(programs, depth, num_cores)
    tile_rows = num_tokens // row_tiles
    cores_a_tile = num_cores / (parts * column_tiles)  # of the weight, which row tiles share
    out_itemsize = itemsize if parts == 1 else 4
    stages = _product_stages(tile_rows, num_factors, num_computers, out_itemsize, cores_a_tile)
    return HopperProductConfig(parts, tile_rows, num_computers, stages)


def gated_gemm_config(
    *,
    num_tokens: int,
    depth: int,
    width: int,
    itemsize: int,
    num_cores: int | None,
    device_kind: str = "",
) -> HopperGemmConfig | None:
    """Where gated_gemm_hopper.py runs, of those gated products that `product_config` leaves; None
    where XLA's product and an activation do. Times on an H200: bench/NOTES.md.

    Args:
        num_tokens: Rows.
        depth, width: Of each of the two weights.
        itemsize: Bytes of an element.
        num_cores: SMs of the GPU; None where it is not known.
        device_kind: The GPU's name.
    """
    whole = num_tokens % 128 == 0 and depth % 64 == 0 and width % 128 == 0
    if not (_is_hopper(device_kind) and num_cores and itemsize == 2 and whole and depth):
        return None
    tiles = num_tokens * width // 128**2
    if tiles == 0 or tiles < MIN_SHARE_AT_WORK * num_cores * -(-tiles // num_cores):
        return None
    return HopperGemmConfig(num_stages=4, num_programs=num_cores)


def _is_hopper(device_kind):
    return any(name in device_kind for name in HOPPER_GPUS)


def _row_tiles(num_tokens, width, num_cores):
    """Two where a tile would have over 128 rows, and where SMs would have nothing to do: rows are
    cut before the depth is, for that leaves fewer parts to write and to sum."""
    return 2 if num_tokens > 128 or (num_tokens > 64 and 2 * width // 64 <= num_cores) else 1


def _parts_by_cores(programs, depth, num_cores):
    """Each SM has one program at most: a second one would have to wait."""
    parts = 1
    while 2 * parts * programs <= num_cores and depth % (2 * parts * tuning.MIN_PART_DEPTH) == 0:
        parts *= 2
    return parts


def _product_stages(tile_rows, num_factors, num_computers, out_itemsize, cores_a_tile):
    """Steps under way: as many as there is room for, and no more of the weight than is good."""
    step_weight, step_x = num_computers * num_factors * 64 * 64 * 2, tile_rows * 64 * 2
    room = MAX_SHARED_BYTES - num_computers * tile_rows * 64 * out_itemsize - 2048
    ahead = WEIGHT_BYTES_AHEAD * num_computers * cores_a_tile
    return min(round(ahead / step_weight), room // (step_weight + step_x))
