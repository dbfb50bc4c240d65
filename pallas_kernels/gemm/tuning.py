"""Choice of the GEMM implementation, the number of splits and the launch parameters.

The functions depend only on shapes, dtypes and the device. A function that returns a config returns
None if the specialized kernel cannot run or is not the fastest. docs/kernels/gemm.md lists times.
"""

import dataclasses
import math
from typing import NamedTuple

from pallas_kernels.tuning import MAX_SHARED_BYTES, is_hopper

# A GEMM with more than `MAX_SPLIT_ROWS` rows has enough tiles to keep the GPU busy, so split-K
# partials would cost more than they save.
MAX_SPLIT_ROWS = 256
MIN_SPLIT_DEPTH = 128
# With a weight of this width, each of the 132 SMs of a large GPU computes a tile of 128 columns.
MIN_UNSPLIT_WIDTH = 132 * 128

# If every SM has a program, a program prefetches about this many bytes of the weight per consumer
# warpgroup; the number is rounded to whole stages. With 50 % more or 25 % less, a GEMM is 2 to 7 %
# slower.
PREFETCHED_WEIGHT_BYTES = 60 * 1024

# A copy of float32 scales must begin and end at a multiple of 16 bytes, which are
# `SCALE_COPY_ALIGNMENT` scales.
SCALE_COPY_ALIGNMENT = 4

# The many-rows kernels run only if their tiles keep the SMs busy for at least this fraction of the
# time. Below this fraction, XLA may be faster, because XLA has more tile sizes. In measurements,
# XLA was faster at a fraction of 0.73, and slower at 0.85.
MIN_SM_UTILIZATION = 0.8


class GemmProblem(NamedTuple):
    """The shapes and the device of a GEMM by one weight [depth, width], or by two: gate and up.

    Attributes:
        num_tokens: Number of rows of x.
        depth, width: Shape of the weight, or of each of the two weights.
        itemsize: Number of bytes per element of x.
        num_factors: Number of weights: 1, or 2 for a gated GEMM. A gated GEMM is never split.
        num_cores: Number of SMs of the GPU; None if unknown.
        device_kind: Name of the GPU.
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
    """Launch parameters of triton.py.

    Attributes:
        tile: Number of columns per program.
        num_warps: Number of warps per program.
    """

    tile: int
    num_warps: int


@dataclasses.dataclass(frozen=True)
class FewRowsConfig:
    """Launch parameters of the few-rows kernels of hopper.py and fp8_hopper.py.

    Attributes:
        num_splits: Number of parts into which the K dimension is split (split-K).
        tile_rows: Number of rows per program.
        num_consumers: Number of consumer warpgroups per program, each for 64 columns.
        num_stages: Number of pipeline stages, at least 2.
        num_groups: Size of a pipeline stage along K, in units of 128 bytes; always 1 in hopper.py.
    """

    num_splits: int
    tile_rows: int
    num_consumers: int
    num_stages: int
    num_groups: int = 1


@dataclasses.dataclass(frozen=True)
class ManyRowsConfig:
    """Launch parameters of the many-rows kernel of hopper.py.

    Attributes:
        num_stages: Number of pipeline stages, at least 2.
        num_programs: Number of programs, one per SM.
    """

    num_stages: int
    num_programs: int


@dataclasses.dataclass(frozen=True)
class ManyFP8RowsConfig:
    """Launch parameters of the many-rows kernel of fp8_hopper.py.

    Attributes:
        num_stages: Number of pipeline stages, at least 2.
        num_programs: Number of programs, one per SM.
        num_factors: Number of blocks of 128 columns per tile; always 2 in a gated GEMM.
    """

    num_stages: int
    num_programs: int
    num_factors: int = 2


def gated_silu_config(*, num_tokens: int, size: int) -> GatedSiluConfig | None:
    """Return the launch parameters of the Triton activation, or None if XLA's kernel is faster.

    XLA splits the GEMM before the activation if that GEMM is narrow and has few rows. XLA's
    activation kernel then also sums the partials, while a Triton activation would need another
    kernel for the sum. In all other cases the Triton kernel runs, with eight elements per thread to
    use the memory bandwidth. For small inputs, four elements per thread are faster.

    Args:
        num_tokens: Number of rows.
        size: Number of gate columns per row.
    """
    if 2 * size < MIN_UNSPLIT_WIDTH and num_tokens <= MAX_SPLIT_ROWS:
        return None
    return GatedSiluConfig(1024, num_warps=8 if num_tokens * size <= 1 << 20 else 4)


def num_splits(gemm: GemmProblem) -> int:
    """Return into how many splits XLA's GEMM divides the depth.

    A narrow weight gives too few tiles to keep the memory busy unless the depth is split. These
    numbers of splits were the fastest in whole decode steps on an H200. A float32 GEMM is never
    split, so that its results are reproducible.
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
    """Return the launch parameters of hopper.py's few-rows kernel, or None to use XLA's GEMM."""
    # With a large weight and more than 128 rows, a whole step with XLA's GEMM is at least as
    # fast as a step with the few-rows kernel.
    large = gemm.depth * gemm.width * gemm.num_factors > 1 << 23
    if gemm.itemsize != 2 or gemm.num_tokens > (128 if large else MAX_SPLIT_ROWS):
        return None
    return _choose_few_rows_config(gemm, may_split_rows=not large)


def many_rows_config(gemm: GemmProblem) -> ManyRowsConfig | None:
    """Return the launch parameters of hopper.py's gated many-rows kernel, or None.

    None means that XLA's GEMM and a separate activation run. Callers try `few_rows_config` first.
    """
    num_tokens, depth, width, itemsize, _, num_cores, device_kind = gemm
    whole = num_tokens % 128 == 0 and depth % 64 == 0 and width % 128 == 0
    if not (is_hopper(device_kind) and num_cores and itemsize == 2 and whole and depth):
        return None
    tiles = num_tokens * width // 128**2
    if tiles == 0 or tiles < MIN_SM_UTILIZATION * num_cores * -(-tiles // num_cores):
        return None
    return ManyRowsConfig(num_stages=4, num_programs=num_cores)


def invariant_few_rows_config(gemm: GemmProblem) -> FewRowsConfig | None:
    """Return launch parameters of hopper.py's few-rows kernel without split-K, or None.

    None means that the kernel cannot run. The kernel needs a multiple of 8 rows. Above 64 rows, the
    kernel needs a multiple of 64 rows.
    """
    num_tokens, depth, width, itemsize, num_factors, num_cores, device_kind = gemm
    is_whole = num_tokens % min(num_tokens, 64) == num_tokens % 8 == depth % 64 == width % 64 == 0
    if not (is_hopper(device_kind) and num_cores and itemsize == 2 and is_whole and depth):
        return None
    tile_rows = min(num_tokens, 128)
    # Tiles of fewer rows read the weight more often, but occupy more SMs.
    if num_tokens % 128 or num_tokens // 128 * width // 64 < num_cores // 2:
        tile_rows = min(num_tokens, 64)
    programs = num_tokens // tile_rows * width // 64
    num_consumers = 2 if programs > num_cores and width % 128 == 0 else 1
    stage_weight = num_consumers * num_factors * 64 * 128
    room = MAX_SHARED_BYTES - num_consumers * tile_rows * 64 * 4 - 2048
    # With fewer programs than SMs, each program prefetches more bytes.
    cores_per_program = min(2.0, max(1.0, num_cores * num_consumers / programs))
    stages = round(PREFETCHED_WEIGHT_BYTES * num_consumers * cores_per_program / stage_weight)
    stages = min(stages, room // (stage_weight + tile_rows * 128))
    return FewRowsConfig(1, tile_rows, num_consumers, stages) if stages >= 2 else None


def invariant_many_rows_config(gemm: GemmProblem) -> ManyRowsConfig | None:
    """Return the launch parameters of hopper.py's many-rows kernel, or None if it cannot run.

    Unlike `many_rows_config`, return parameters also if XLA's GEMM is faster.
    """
    num_tokens, depth, width, itemsize, num_factors, num_cores, device_kind = gemm
    columns = 128 if num_factors == 2 else 256
    whole = num_tokens % 128 == 0 and depth % 64 == 0 and width % columns == 0
    if not (is_hopper(device_kind) and num_cores and itemsize == 2 and whole and depth):
        return None
    return ManyRowsConfig(num_stages=4, num_programs=num_cores)


def few_fp8_rows_config(gemm: GemmProblem, *, grouped: bool) -> FewRowsConfig | None:
    """Return the launch parameters of fp8_hopper.py's few-rows kernel, or None to use XLA.

    The kernel runs only if each SM gets at most one program. With `grouped` (block scales), the
    kernel also runs with more programs if the number of rows is not a multiple of 128. XLA would
    first convert the weight to a wider dtype, and the many-rows kernel needs a multiple of 128.
    """
    if gemm.num_tokens > MAX_SPLIT_ROWS:
        return None
    return _choose_few_rows_config(
        gemm, may_exceed_cores=grouped and gemm.num_tokens % 128 != 0, grouped=grouped
    )


def few_rows_scale_shapes(config: FewRowsConfig, depth: int, num_factors: int):
    """Return the shapes of the scales in shared memory of the block-scaled few-rows kernel.

    A group is 128 numbers along the depth that share a scale. A program processes a part of the
    depth (a split), and copies the scales of all groups in that part. The size of a copy must be a
    multiple of 128 bytes, with at most 256 numbers per axis. The copies may therefore include
    scales of groups after the part. If the part does not begin at a multiple of
    `SCALE_COPY_ALIGNMENT` groups, the copies also include scales of groups before the part.

    Returns:
        The shape [groups, rows] of the row scales of one stage, and the shape
        [factors, blocks, parts, groups] of all weight scales of a program.
    """
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
    """Return the launch parameters of fp8_hopper.py's many-rows kernel, or None to use XLA.

    Callers try `few_fp8_rows_config` first. With `grouped` (block scales), the kernel runs for all
    supported shapes, since XLA has no block-scaled product. Otherwise the kernel runs if its tiles
    keep the SMs busy.

    A tile is 128 or 256 columns wide. The choice assumes that a wide tile takes 1.85 times as long
    as a narrow tile. With wide tiles, more SMs may be idle in the last round.
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
    """Return the launch parameters of a few-rows kernel, or None if the kernel cannot run.

    A pipeline stage covers 128 or 256 bytes of the depth.

    Args:
        gemm: Shapes and device of the GEMM.
        may_split_rows: Whether to split more than 64 rows into two tiles if SMs would be idle. The
            kernel then splits the depth less often, so it has fewer partials to write and to sum.
        may_exceed_cores: Whether there may be more programs than SMs.
        grouped: Whether shared memory also holds block scales.
    """
    num_tokens, depth, width, itemsize, num_factors, num_cores, device_kind = gemm
    if not (is_hopper(device_kind) and num_cores and num_tokens and depth and width):
        return None
    idle = may_split_rows and num_tokens > 64 and 2 * width // 64 <= num_cores
    # A tile has at most 128 rows.
    row_tiles = 2 if num_tokens > 128 or idle else 1
    # With more programs than SMs, some programs would wait for a free SM. Two consumers per program
    # halve the number of programs.
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
    # With fewer weight tiles than SMs, each program prefetches more bytes of the weight. Programs
    # for different rows read the same weight tiles, so `row_tiles` has no effect.
    cores_per_tile = max(1, num_cores / (splits * column_tiles))
    # With block scales, stages with two groups are faster than stages with one group.
    is_paired = grouped and num_factors == 1 and tile_rows <= 64 and depth // splits % 256 == 0
    num_groups = 1 + is_paired
    # A program should prefetch `ahead` bytes of the weight, and needs enough stages to hold them.
    # Shared memory limits the number of stages.
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
    """Return the number of splits: the largest power of two that gives at most one program per SM.

    A second program on an SM would have to wait. The depth of a split must be a multiple of
    `MIN_SPLIT_DEPTH`.
    """
    splits = 1
    while 2 * splits * programs <= num_cores and depth % (2 * splits * MIN_SPLIT_DEPTH) == 0:
        splits *= 2
    return splits
