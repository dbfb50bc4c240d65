"""What an engine says of its memory and its queues."""

from jpaged.engine.loop import EngineLoop
from jpaged.engine.loop_counts import engine_stats
from jpaged.observe.pool_changes import PoolWatch
from jpaged.observe.pool_report import (
    BlockInfo,
    MemoryReport,
    SequenceInfo,
    block_map,
    block_tables,
    memory_report,
)
from jpaged.observe.statistics import EngineStats


class EngineAccounts:
    """The part of `Engine` that only looks."""

    _loop: EngineLoop

    def stats(self) -> EngineStats:
        """The pool and the queues now, and counts since the start."""
        return engine_stats(self._loop.scheduler, self._loop.counts)

    def block_map(self) -> dict[int, BlockInfo]:
        """Every block of the pool now, by id: its state, who holds it, what it has. O(blocks)."""
        return block_map(self._loop.scheduler)

    def block_tables(self) -> list[SequenceInfo]:
        """Every sequence now, with its block table. O(held blocks)."""
        return block_tables(self._loop.scheduler)

    def watch_pool(self, num_token_blocks: int = 0) -> PoolWatch:
        """Begin to watch the pool: `look` tells each time what changed. O(changes) a look.

        Args:
            num_token_blocks: For how many blocks at most a look tells their tokens.
        """
        return PoolWatch(self._loop.scheduler, num_token_blocks)

    def memory_report(self) -> MemoryReport:
        """What the pool's slots are used for now, and what sharing saves. O(held blocks)."""
        return memory_report(self._loop.scheduler)

    def check_integrity(self) -> None:
        """Prove the block census; raises `IntegrityError` if a block is lost or shared wrongly."""
        self._loop.scheduler.check_integrity()
