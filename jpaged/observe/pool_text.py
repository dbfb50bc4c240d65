"""The pool as text: a character a block, and what its slots are used for."""

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Protocol

from jpaged.errors import counted
from jpaged.observe.pool_report import BlockInfo, BlockState, MemoryReport
from jpaged.observe.statistics import EngineStats

WIDTH = 64
MAX_LINES = 16
LEGEND = ". free  o cached  + partly filled  # full  2-9 shared by so many, * by more  P pinned"

_MOST_TIME = 1 / 10  # of an answer's time, spent on pictures


class Accounts(Protocol):
    """What tells of a pool: an engine."""

    def memory_report(self) -> MemoryReport:
        """As `Engine.memory_report`."""
        ...

    def block_map(self) -> dict[int, BlockInfo]:
        """As `Engine.block_map`."""
        ...


class BusyPool:
    """Keeps the last look at an engine's pool while it had work.

    The report is of the last step seen. The picture costs some time for each block of the pool, so
    it is of the last step that took or gave back a block, or, of a large pool, of one not long
    before.

    Attributes:
        seconds: Time spent on looking so far.
    """

    def __init__(self, engine: Accounts):
        self.seconds = 0.0
        self._engine = engine
        self._report: MemoryReport | None = None
        self._blocks: dict[int, BlockInfo] = {}
        self._num_used_blocks = 0
        self._next_map = 0.0

    def see(self, stats: EngineStats) -> None:
        """Look, at a moment of which `stats` tell."""
        start = time.perf_counter()
        self._report = self._engine.memory_report()
        if stats.num_used_blocks != self._num_used_blocks and start >= self._next_map:
            self._blocks = self._engine.block_map()
            self._num_used_blocks = stats.num_used_blocks
            taken = time.perf_counter() - start
            self._next_map = start + taken / _MOST_TIME
        self.seconds += time.perf_counter() - start

    def lines(self) -> list[str]:
        """What was seen; nothing if the engine had no work."""
        if self._report is None:
            return []
        return [*describe(self._report), *draw(self._blocks, self._report.block_size)]


def describe(report: MemoryReport) -> list[str]:
    """The report, a line for each of its subjects."""
    num_blocks = report.num_physical_blocks
    serve = "serves" if num_blocks == 1 else "serve"
    lines = [
        f"slots     {report.num_token_slots:,} with tokens, "
        f"{report.num_reserved_slots:,} reserved, {report.num_fragmented_slots:,} never filled, "
        f"{report.num_cached_slots:,} cached, {report.num_free_slots:,} free",
        f"sharing   {counted(num_blocks, 'block', form=',')} {serve} as "
        f"{report.num_logical_blocks:,}: "
        f"{report.shared_savings:.1%} saved; {report.num_pinned_blocks:,} pinned",
    ]
    if report.num_host_blocks:
        whole = counted(report.num_host_blocks, "block", form=",")
        lines.append(f"host      {report.num_used_host_blocks:,} of {whole} used")
    return lines


def draw(blocks: Mapping[int, BlockInfo], block_size: int) -> list[str]:
    """A picture of the pool under a legend: `WIDTH` blocks a line, the first one's id before it.

    Lines on which all blocks are free are counted, not drawn. Of more than `MAX_LINES` lines the
    last sums up the rest of the pool.
    """
    infos = list(blocks.values())
    rows = [infos[at : at + WIDTH] for at in range(0, len(infos), WIDTH)]
    lines = [
        line
        for is_free, run in groupby(rows, _is_free)
        for line in _lines(is_free, run, block_size)
    ]
    if len(lines) > MAX_LINES:
        del lines[MAX_LINES - 1 :]
        rest = infos[sum(num_blocks for num_blocks, _ in lines) :]
        lines.append((len(rest), f"{'...':>9} {_summary(rest)}"))
    return [f"pool      {LEGEND}", *(text for _, text in lines)]


def _is_free(row: Iterable[BlockInfo]) -> bool:
    return all(info.state is BlockState.FREE for info in row)


def _lines(
    is_free: bool, rows: Iterable[list[BlockInfo]], block_size: int
) -> Iterator[tuple[int, str]]:
    """Of rows that are all free or all not: how many blocks each line tells of, and its text."""
    if is_free:
        num_blocks = sum(map(len, rows))
        yield num_blocks, f"{'...':>9} {num_blocks:,} free"
        return
    for row in rows:
        marks = "".join(_mark(info, block_size) for info in row)
        yield len(row), f"{row[0].block_id:>9} {marks}"


def _mark(info: BlockInfo, block_size: int) -> str:
    if info.state is not BlockState.USED:
        return "." if info.state is BlockState.FREE else "o"
    if info.is_pinned:
        return "P"
    if info.ref_cnt > 1:
        return str(info.ref_cnt) if info.ref_cnt < 10 else "*"
    return "#" if info.num_filled_slots == block_size else "+"


def _summary(infos: list[BlockInfo]) -> str:
    counts = Counter(info.state for info in infos)
    states = ", ".join(f"{counts[state]:,} {state}" for state in BlockState)
    return f"{len(infos):,} more: {states}"
