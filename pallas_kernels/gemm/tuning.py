"""Which GEMM runs where, in how many splits, and with which launch parameters.

They see static facts only. None means that what runs on every GPU is the faster one there, or the
only one. Times on an H200: docs/kernels/gemm.md.
"""

import dataclasses
import math
from typing import NamedTuple

from pallas_kernels.tuning import MAX_SHARED_BYTES, is_hopper

MAX_SPLIT_ROWS = 256  # above, a GEMM has tiles enough, and its partials cost more than they save
MIN_SPLIT_DEPTH = 128
MIN_UNSPLIT_WIDTH = 132 * 128  # columns that give each SM of a large GPU a tile of 128

# Of the weight, under way to a consumer warpgroup where no SM is idle, before it is rounded to
# whole stages: with half as much more or a quarter less a GEMM takes 2 to 7 % longer.
PREFETCHED_WEIGHT_BYTES = 60 * 1024

SCALE_COPY_ALIGNMENT = (
    4  # a copy of one row of scales begins at a multiple of 16 bytes, and ends at one
)

# Share of the SMs' time until the last tile is done that they spend on tiles of many rows. XLA,
# which has a choice of tiles, is the faster one with 0.73, and the slower one with 0.85.
MIN_SM_UTILIZATION = 0.8


class GemmProblem(NamedTuple):
    """A GEMM of `num_tokens` rows by a weight [depth, width], or by two of them (gate and up).

    Attributes:
        num_tokens: Rows.
        depth, width: Of the weight, or of each of two.
        itemsize: Bytes of an element.
        num_factors: 2 for a gated GEMM, which is never split.
        num_cores: SMs of the GPU; None where it is not known.
        device_kind: The GPU's name.
    """

    num_tokens: int
    depth: int
    width: int
    itemsize: int
    num_factors: int = 1
    num_cores: int | None = None
    device_kind: str = ""


@dataclasses.dataclass(frozen=True)
class GatedSiluConfig:
    """Of triton.py: columns a program, warps."""

    tile: int
    num_warps: int


@dataclasses.dataclass(frozen=True)
class FewRowsConfig:
    """Of hopper.py's and fp8_hopper.py's GEMM of few rows: splits of the depth, rows a program, its
    consumer warpgroups (64 columns each), pipeline stages (two at least), and of a stage groups of
    128 bytes of the depth (hopper.py: always one)."""

    num_splits: int
    tile_rows: int
    num_consumers: int
    num_stages: int
    num_groups: int = 1


@dataclasses.dataclass(frozen=True)
class ManyRowsConfig:
    """Of hopper.py's gated GEMM of many rows: pipeline stages (two at least), programs (one an
    SM)."""

    num_stages: int
    num_programs: int


@dataclasses.dataclass(frozen=True)
class ManyFP8RowsConfig:
    """Of fp8_hopper.py's GEMM of many rows: pipeline stages (two at least), programs (one an SM),
    blocks of 128 columns a tile (gated: always two)."""

    num_stages: int
    num_programs: int
    num_factors: int = 2


def gated_silu_config(*, num_tokens: int, size: int) -> GatedSiluConfig | None:
    """For rows of `size` gates; None where XLA's own kernel is the better one.

    XLA splits a narrow GEMM of few rows, and sums its partials where it computes the activation;
    before another kernel it would do so in one more. Else threads of eight elements keep the memory
    busy, and twice the threads of four are sooner done where there are few.
    """
    if 2 * size < MIN_UNSPLIT_WIDTH and num_tokens <= MAX_SPLIT_ROWS:
        return None
    return GatedSiluConfig(1024, num_warps=8 if num_tokens * size <= 1 << 20 else 4)


def num_splits(gemm: GemmProblem) -> int:
    """Splits of the depth of XLA's GEMM.

    A narrow weight gives too few tiles to keep the memory busy unless its depth is split as well.
    The numbers are the fastest in whole decode steps on an H200.
    Float32 is not split: what is computed in it is meant to be reproducible.
    """
    num_tokens, depth, width = gemm[:3]
    if num_tokens > MAX_SPLIT_ROWS or gemm.itemsize > 2 or width > 8192:
        return 1
    deep = depth >= 2048
    if num_tokens <= 16:
        by_width = 4, 8 if deep else 4, 2 if deep else 1
    elif num_tokens <= 64:
        by_width = 8, 8 if deep else 4, 2 if deep else 1
    elif num_tokens <= 128:
        by_width = 4, 1 if deep else 2, 1
    else:
        by_width = 4, 2 if deep else 1, 2 if deep else 1
    splits = by_width[0 if width <= 2048 else 1 if width <= 4096 else 2]
    while splits > 1 and depth % (splits * MIN_SPLIT_DEPTH):
        splits //= 2
    return splits


def few_rows_config(gemm: GemmProblem) -> FewRowsConfig | None:
    """Where hopper.py's GEMM of few rows runs; None where XLA's does."""
    # By a large weight XLA's GEMMs of more than 128 rows are as fast or faster in a step.
    large = gemm.depth * gemm.width * gemm.num_factors > 1 << 23
    if gemm.itemsize != 2 or gemm.num_tokens > (128 if large else MAX_SPLIT_ROWS):
        return None
    return _choose_few_rows_config(gemm, may_split_rows=not large)


def many_rows_config(gemm: GemmProblem) -> ManyRowsConfig | None:
    """Where hopper.py's gated GEMM of many rows runs, of those that `few_rows_config` leaves; None
    where XLA's GEMM and an activation do."""
    num_tokens, depth, width, itemsize, _, num_cores, device_kind = gemm
    whole = num_tokens % 128 == 0 and depth % 64 == 0 and width % 128 == 0
    if not (is_hopper(device_kind) and num_cores and itemsize == 2 and whole and depth):
        return None
    tiles = num_tokens * width // 128**2
    if tiles == 0 or tiles < MIN_SM_UTILIZATION * num_cores * -(-tiles // num_cores):
        return None
    return ManyRowsConfig(num_stages=4, num_programs=num_cores)


def few_fp8_rows_config(gemm: GemmProblem, *, grouped: bool) -> FewRowsConfig | None:
    """Where fp8_hopper.py's GEMM of few rows runs: as hopper.py's. Not for more programs than the
    GPU has SMs, unless scales are of blocks, for which XLA has no products: it widens the weight
    first."""
    if gemm.num_tokens > MAX_SPLIT_ROWS:
        return None
    return _choose_few_rows_config(
        gemm, may_exceed_cores=grouped and gemm.num_tokens % 128 != 0, grouped=grouped
    )


def few_rows_scale_shapes(config: FewRowsConfig, depth: int, num_factors: int):
    """Scales of blocks in shared memory: of a stage's rows [groups, rows]; and all that a program
    has of the weight's, [factors, blocks, parts, groups]. Both are filled in copies of whole 128
    bytes, of 256 numbers a side at most, so there are more groups than needed; some of those before
    a split's, where it does not begin at a multiple of `SCALE_COPY_ALIGNMENT`."""
    unit, split_groups = 32 // math.gcd(32, config.tile_rows), depth // (config.num_splits * 128)
    before = (
        SCALE_COPY_ALIGNMENT - 1
        if split_groups % SCALE_COPY_ALIGNMENT and config.num_splits > 1
        else 0
    )
    groups = -(-(before + split_groups) // 32) * 32
    parts = -(-groups // 256)
    block_scales_shape = num_factors, -(-config.num_consumers // 2), parts, min(groups, 256)
    return (-(-config.num_groups // unit) * unit, config.tile_rows), block_scales_shape


def many_fp8_rows_config(gemm: GemmProblem, *, grouped: bool) -> ManyFP8RowsConfig | None:
    """Where fp8_hopper.py's GEMM of many rows runs, of those that `few_fp8_rows_config` leaves.

    XLA has no products with scales of blocks, so there it runs wherever it can. Else where its
    tiles keep the SMs busy; XLA's products are followed by a kernel that multiplies by the scales.
    Tiles are one or two blocks of columns wide: two take 1.85 times as long as one (an estimate;
    of 8,192 rows one reached 1,212, two 1,321 TFLOP/s), and may leave SMs without one.
    """
    num_tokens, depth, width, _, num_factors, num_cores, device_kind = gemm
    whole = num_tokens % 128 == 0 and depth % 128 == 0 and width % 128 == 0
    if not (is_hopper(device_kind) and num_cores and whole and num_tokens and depth and width):
        return None
    blocks = num_tokens * width * num_factors // 128**2
    num_rounds = {count: -(-blocks // (count * num_cores)) for count in (1, 2)}
    can_be_wide = num_factors == 2 or width % 256 == 0
    wide = can_be_wide and (num_factors == 2 or 1.85 * num_rounds[2] <= num_rounds[1])
    tiles = blocks // (1 + wide)
    if not grouped and tiles < MIN_SM_UTILIZATION * num_cores * num_rounds[1 + wide]:
        return None
    return ManyFP8RowsConfig(4, num_cores, 1 + wide)


def _choose_few_rows_config(
    gemm: GemmProblem,
    *,
    may_split_rows: bool = False,
    may_exceed_cores: bool = False,
    grouped: bool = False,
) -> FewRowsConfig | None:
    """The launch of a GEMM of few rows, with stages of 128 bytes of the depth.

    Args:
        gemm: Of what its kernel takes.
        cuts_rows: Cut the rows in two also where SMs would have nothing to do: before the depth is,
            for that leaves fewer partials to write and to sum.
        may_wait: Take more programs than there are SMs.
        grouped: Scales of blocks are in shared memory as well.
    """
    num_tokens, depth, width, itemsize, num_factors, num_cores, device_kind = gemm
    if not (is_hopper(device_kind) and num_cores and num_tokens and depth and width):
        return None
    idle = may_split_rows and num_tokens > 64 and 2 * width // 64 <= num_cores
    row_tiles = 2 if num_tokens > 128 or idle else 1  # of up to 128 rows
    # Each program reads all of its rows, and without an SM of its own it waits for one.
    num_consumers = 1 if row_tiles * width // 64 <= num_cores else 2
    is_whole = depth % (128 // itemsize) == 0 and width % (64 * num_consumers) == 0
    if num_tokens % (8 * row_tiles) or not is_whole:
        return None
    column_tiles = width // (64 * num_consumers)
    programs = row_tiles * column_tiles
    if programs > num_cores and not may_exceed_cores:
        return None
    splits = 1 if num_factors > 1 else _splits_by_cores(programs, depth, num_cores)
    tile_rows = num_tokens // row_tiles
    cores_per_tile = max(
        1, num_cores / (splits * column_tiles)
    )  # of the weight; row tiles share it
    # With scales of blocks, two groups a stage: qkv's product by 64 rows takes 10.3 us for 12.1.
    is_paired = grouped and num_factors == 1 and tile_rows <= 64 and depth // splits % 256 == 0
    num_groups = 1 + is_paired
    # As many stages as there is room for, and no more of the weight under way than is good.
    stage_weight = num_groups * num_consumers * num_factors * 64 * 128
    stage_x = num_groups * tile_rows * 128
    room = MAX_SHARED_BYTES - num_consumers * tile_rows * 64 * (2 if splits == 1 else 4) - 2048
    ahead = PREFETCHED_WEIGHT_BYTES * num_consumers * cores_per_tile
    stages = round(ahead / stage_weight)
    config = FewRowsConfig(splits, tile_rows, num_consumers, stages, num_groups)
    if grouped:
        row_scales_shape, block_scales_shape = few_rows_scale_shapes(config, depth, num_factors)
        stage_x, room = (
            stage_x + 4 * math.prod(row_scales_shape),
            room - 4 * math.prod(block_scales_shape),
        )
    stages = min(config.num_stages, room // (stage_weight + stage_x))
    return dataclasses.replace(config, num_stages=stages) if stages >= 2 else None


def _splits_by_cores(programs, depth, num_cores):
    """Each SM has one program at most: a second one would have to wait."""
    splits = 1
    while 2 * splits * programs <= num_cores and depth % (2 * splits * MIN_SPLIT_DEPTH) == 0:
        splits *= 2
    return splits
