"""Text about the KV pool: a drawing with one character per block, and lines about the use of the
slots."""

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Protocol

from jpaged.errors import format_count
from jpaged.observe.pool_report import BlockInfo, BlockState, MemoryReport
from jpaged.observe.statistics import EngineStats

BLOCKS_PER_LINE = 64
MAX_LINES = 16
LEGEND = ". free  o cached  + partly filled  # full  2-9 holders, * 10 or more  P pinned"

_MAX_TIME_FRACTION = 1 / 10
"""Maximum fraction of the total time that `BusyPoolSampler` spends on reading the state of every
block."""


class PoolReporter(Protocol):
    """An object that reports on a pool, such as an `Engine`."""

    def memory_report(self) -> MemoryReport:
        """Return the use of the pool's slots, as `Engine.memory_report` does."""
        ...

    def block_map(self) -> dict[int, BlockInfo]:
        """Return the state of every block, as `Engine.block_map` does."""
        ...


class BusyPoolSampler:
    """Keeps the latest memory report and block map of a busy engine.

    A block map contains the state of every block. Getting a block map takes time proportional to
    the size of the pool. Each call of `record` gets a memory report from the engine. `record` gets
    a block map only if the number of used blocks has changed, and less often for a large pool.

    Attributes:
        seconds_spent: Total time in seconds that `record` has taken.
    """

    def __init__(self, engine: PoolReporter):
        self.seconds_spent = 0.0
        self._engine = engine
        self._report: MemoryReport | None = None
        self._blocks: dict[int, BlockInfo] = {}
        self._num_used_blocks = 0
        self._next_map_time = 0.0

    def record(self, stats: EngineStats) -> None:
        """Keep a snapshot of the pool's state. `stats` are the engine's current statistics."""
        start = time.perf_counter()
        self._report = self._engine.memory_report()
        if stats.num_used_blocks != self._num_used_blocks and start >= self._next_map_time:
            self._blocks = self._engine.block_map()
            self._num_used_blocks = stats.num_used_blocks
            elapsed = time.perf_counter() - start
            self._next_map_time = start + elapsed / _MAX_TIME_FRACTION
        self.seconds_spent += time.perf_counter() - start

    def format_lines(self) -> list[str]:
        """Return the latest memory report and a drawing of all blocks as lines of text. Before the
        first call of `record`, return an empty list."""
        if self._report is None:
            return []
        return [*describe_report(self._report), *draw_blocks(self._blocks, self._report.block_size)]


def describe_report(report: MemoryReport) -> list[str]:
    """Return lines of text about the slots, about the blocks saved by sharing, and about the host
    memory for swapped KV."""
    lines = [
        f"slots     {report.num_token_slots:,} with tokens, "
        f"{report.num_reserved_slots:,} reserved, {report.num_fragmented_slots:,} never filled, "
        f"{report.num_cached_slots:,} cached, {report.num_free_slots:,} free",
        f"sharing   {format_count(report.num_physical_blocks, 'block', number_format=',')} instead "
        f"of {report.num_logical_blocks:,}: "
        f"{report.shared_savings:.1%} saved; {report.num_pinned_blocks:,} pinned",
    ]
    if report.num_host_blocks:
        whole = format_count(report.num_host_blocks, "block", number_format=",")
        lines.append(f"host      {report.num_used_host_blocks:,} of {whole} used")
    return lines


def draw_blocks(blocks: Mapping[int, BlockInfo], block_size: int) -> list[str]:
    """Return a drawing of the pool: a legend, then lines with one character per block.

    Each line begins with the id of its first block and shows `BLOCKS_PER_LINE` blocks. Consecutive
    lines that show only free blocks are replaced by one line with the number of these blocks. After
    `MAX_LINES` lines, the last line summarises the rest of the pool.
    """
    infos = list(blocks.values())
    rows = [infos[at : at + BLOCKS_PER_LINE] for at in range(0, len(infos), BLOCKS_PER_LINE)]
    lines = [
        line
        for is_free, run in groupby(rows, _is_free)
        for line in _format_rows(is_free, run, block_size)
    ]
    if len(lines) > MAX_LINES:
        del lines[MAX_LINES - 1 :]
        rest = infos[sum(num_blocks for num_blocks, _ in lines) :]
        lines.append((len(rest), f"{'...':>9} {_summarize_blocks(rest)}"))
    return [f"pool      {LEGEND}", *(text for _, text in lines)]


def _is_free(row: Iterable[BlockInfo]) -> bool:
    return all(info.state is BlockState.FREE for info in row)


def _format_rows(
    is_free: bool, rows: Iterable[list[BlockInfo]], block_size: int
) -> Iterator[tuple[int, str]]:
    """Yield the lines that draw blocks of the pool, each as (number of blocks in the line, text).

    Args:
        is_free: Whether all blocks are free. If true, yield a single line with the number of
            blocks instead of one line per row.
        rows: Blocks to draw, at most `BLOCKS_PER_LINE` in each row.
        block_size: Number of slots in a block.
    """
    if is_free:
        num_blocks = sum(map(len, rows))
        yield num_blocks, f"{'...':>9} {num_blocks:,} free"
        return
    for row in rows:
        marks = "".join(_block_mark(info, block_size) for info in row)
        yield len(row), f"{row[0].block_id:>9} {marks}"


def _block_mark(info: BlockInfo, block_size: int) -> str:
    if info.state is not BlockState.USED:
        return "." if info.state is BlockState.FREE else "o"
    if info.is_pinned:
        return "P"
    if info.ref_cnt > 1:
        return str(info.ref_cnt) if info.ref_cnt < 10 else "*"
    return "#" if info.num_filled_slots == block_size else "+"


def _summarize_blocks(infos: list[BlockInfo]) -> str:
    counts = Counter(info.state for info in infos)
    states = ", ".join(f"{counts[state]:,} {state}" for state in BlockState)
    return f"{len(infos):,} more: {states}"
