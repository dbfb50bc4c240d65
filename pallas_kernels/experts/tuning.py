"""Launch parameters of the expert GEMMs, which depend on shapes, dtypes and the device."""

import dataclasses
from typing import NamedTuple

from pallas_kernels.tuning import MAX_SHARED_BYTES, is_hopper

_TILE = 64  # number of columns per block
_STAGE_BYTES = 128  # A pipeline stage holds this many bytes of each row and column.
_MIN_TILE_ROWS = 8
_MAX_TILE_ROWS = 128
# Maximum number of rows per tile if FP8 rows have one scale per quantization group (128 consecutive
# numbers of a row). A larger tile would need too many registers for sums, products and scales.
_MAX_GROUPED_TILE_ROWS = 64
_BARRIER_BYTES = 2048
# The pipeline stages of a program take about `_PREFETCHED_BYTES` of shared memory. With twice as
# many bytes, the gated kernel was 0 to 3 % slower for few rows on an H100.
_PREFETCHED_BYTES = 104 * 1024
_MIN_STAGES = 4  # A program has at least `_MIN_STAGES` stages if they fit in shared memory.


class ExpertsProblem(NamedTuple):
    """Shapes and device of a GEMM that multiplies sorted rows by the weights of their experts.

    Attributes:
        num_tokens: Number of tokens.
        num_choices: Number of experts that each token chooses.
        num_experts: Number of experts.
        depth, width: Shape of one weight of an expert. In a gated GEMM, an expert has two weights,
            gate and up.
        itemsize: Number of bytes per element of the rows and weights.
        num_factors: Number of weights per expert: 2 for a gated GEMM, else 1.
        out_itemsize: Number of bytes per element of the result.
        num_cores: Number of SMs of the GPU; None if unknown.
        device_kind: Name of the GPU.
    """

    num_tokens: int
    num_choices: int
    num_experts: int
    depth: int
    width: int
    itemsize: int
    num_factors: int
    out_itemsize: int
    num_cores: int | None = None
    device_kind: str = ""

    @property
    def num_rows(self) -> int:
        """Number of pairs (token, choice), which are the rows of the GEMM."""
        return self.num_tokens * self.num_choices


@dataclasses.dataclass(frozen=True)
class ExpertsConfig:
    """Launch parameters of the GEMM kernel in hopper.py.

    Attributes:
        tile_rows: Maximum number of rows per tile: a multiple of 8, at most 128.
        num_consumers: Number of consumer warpgroups per program.
        num_blocks: Number of blocks of 64 columns that a consumer computes: 2 in a gated GEMM (gate
            and up), else 1 or 2.
        num_stages: Number of pipeline stages, at least 2.
        num_programs: Number of programs, one per SM.
    """

    tile_rows: int
    num_consumers: int
    num_blocks: int
    num_stages: int
    num_programs: int


def tile_rows(num_rows: int, num_experts: int, max_rows: int = _MAX_TILE_ROWS) -> int:
    """Return the maximum number of rows per tile: a power of two from 8 to `max_rows`.

    Below `max_rows`, the result is at least 1.5 times the mean number of rows of an expert. Most
    experts then have a single tile, so most weights are read once.
    """
    rows = _MIN_TILE_ROWS
    while rows < max_rows and 2 * rows * num_experts < 3 * num_rows:
        rows *= 2
    return rows


def triton_tile_rows(gemm: ExpertsProblem) -> int:
    """Return the maximum number of rows per tile of triton.py, whose GEMM needs at least 16."""
    return min(64, max(16, tile_rows(gemm.num_rows, gemm.num_experts)))


def experts_config(gemm: ExpertsProblem) -> ExpertsConfig | None:
    """Return the launch parameters of hopper.py, or None if the kernel cannot run."""
    return _choose_config(gemm, _MAX_TILE_ROWS) if gemm.itemsize == 2 else None


def fp8_experts_config(gemm: ExpertsProblem, *, grouped: bool) -> ExpertsConfig | None:
    """Return the launch parameters of fp8_hopper.py, or None if the kernel cannot run.

    If `grouped` is true, there is one scale per group of 128 columns of a row of x, and one
    scale per block of 128 x 128 of a weight. Otherwise there is one scale per row.
    """
    return _choose_config(gemm, _MAX_GROUPED_TILE_ROWS if grouped else _MAX_TILE_ROWS)


def _choose_config(gemm: ExpertsProblem, max_rows: int) -> ExpertsConfig | None:
    """Return the launch parameters of a Hopper kernel, or None if the kernel cannot run.

    With few rows per expert, the speed depends on the number of weight bytes in flight. With many
    rows, the speed depends on the number of products per loaded tile. Two consumer warpgroups that
    compute two blocks of 64 columns each give the most products per tile.

    The array x of a gated GEMM must be smaller than 2 GiB.
    """
    if not (is_hopper(gemm.device_kind) and gemm.num_cores and gemm.num_rows):
        return None
    # The gated kernel computes addresses in x as 32-bit numbers. In the down kernel, the
    # Tensor Memory Accelerator (TMA) computes the addresses.
    fits = gemm.num_factors == 1 or gemm.num_tokens * gemm.depth * gemm.itemsize < 1 << 31
    if gemm.depth * gemm.itemsize % _STAGE_BYTES or gemm.width % _TILE or not fits:
        return None
    rows = tile_rows(gemm.num_rows, gemm.num_experts, max_rows)
    shapes = [(1, gemm.num_factors)]
    if rows == max_rows:
        shapes = [(2, 2), (2, 1)] if gemm.num_factors == 1 else [(2, 2)]
        shapes.append((1, gemm.num_factors))
    num_consumers, num_blocks = next(
        (consumers, blocks)
        for consumers, blocks in shapes
        if gemm.width % (_TILE * consumers * blocks // gemm.num_factors) == 0
    )
    stages = num_stages(gemm, rows, num_consumers, num_blocks)
    return ExpertsConfig(rows, num_consumers, num_blocks, stages, gemm.num_cores)


def num_stages(gemm: ExpertsProblem, rows: int, num_consumers: int, num_blocks: int) -> int:
    """Return the number of pipeline stages that fit in `_PREFETCHED_BYTES` bytes.

    If fewer than `_MIN_STAGES` stages fit in these bytes, return `_MIN_STAGES` instead. The result
    is at most the number of stages that fit in shared memory.
    """
    out_bytes = num_consumers * rows * _TILE * gemm.out_itemsize
    stage_bytes = (num_consumers * num_blocks * _TILE + rows) * _STAGE_BYTES
    fitting = (MAX_SHARED_BYTES - out_bytes - _BARRIER_BYTES) // stage_bytes
    return min(fitting, max(_MIN_STAGES, _PREFETCHED_BYTES // stage_bytes))
