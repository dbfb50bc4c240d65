"""Reports of what has changed in the KV pool since the previous report, for a dashboard that
updates often.

Unlike the functions in `pool_report.py`, these reports do not examine the whole pool. The first
call of `PoolWatch.look` takes time proportional to the number of blocks. Each later call takes time
proportional to the number of changed blocks and of sequences that hold blocks. The pool does not
record its changes, so a watch looks for changed blocks in three places: at both ends of the queue
of free blocks, in changed block tables, and in prefixes that were pinned or unpinned.
"""

from dataclasses import dataclass, field, replace
from itertools import islice
from struct import unpack_from
from typing import NamedTuple
from weakref import WeakSet

from jpaged.core.block_pool import KVBlock
from jpaged.core.plan import StepPlan
from jpaged.core.request import Sequence
from jpaged.core.scheduler import Scheduler

CACHED = -1
"""Count of a free block whose content is still in the prefix cache."""


class ChangedBlocks(NamedTuple):
    """Changed blocks, as lists of equal length. The lists are compact, because the first call of
    `look` may return 100,000 blocks.

    Attributes:
        block_ids: Ids of the blocks, in increasing order.
        counts: Number of references to each block, from block tables and from prefixes pinned by
            `Engine.pin_prefix`; 0 if the block is free, and `CACHED` if the free block keeps cached
            content.
        content_hashes: Low 32 bits of the hash of each block's content in the prefix cache; 0 if
            the block is not in the prefix cache.
    """

    block_ids: list[int]
    counts: list[int]
    content_hashes: list[int]


class TableChange(NamedTuple):
    """A sequence that is new, or whose block table, status or number of host blocks changed.

    Attributes:
        seq_id: Id of the sequence.
        request_id: Id of the request.
        index: Index of the sequence among the samples of the request; 0 for beams.
        status: Status of the request, or "finished" if the sequence has finished and waits for a
            step in flight.
        num_prompt_tokens: Number of prompt tokens.
        num_computed_tokens: Number of tokens whose KV is written once all steps planned so far have
            run.
        num_kept: Number of leading entries of the block table that did not change.
        new_blocks: Block ids that follow the unchanged entries.
        num_host_blocks: Number of the sequence's blocks in host memory while it is swapped out.
    """

    seq_id: int
    request_id: str
    index: int
    status: str
    num_prompt_tokens: int
    num_computed_tokens: int
    num_kept: int
    new_blocks: tuple[int, ...]
    num_host_blocks: int


@dataclass(frozen=True, slots=True)
class PoolChanges:
    """Changes of the pool since the previous call of `look`.

    Attributes:
        blocks: Changed blocks. The first call returns all blocks that are not free.
        tables: New and changed sequences that hold blocks on the device or in host memory. A
            sequence is not listed if only its number of computed tokens has changed.
        grown: Number of computed tokens by sequence id, for sequences in which nothing else has
            changed.
        gone: Ids of sequences that have stopped holding blocks.
        swap_entries: Request id and number of blocks of each swap entry in host memory; None if
            unchanged.
        pinned: Ids of all pinned blocks; None if unchanged.
        tokens: Token ids of blocks, by block id. Tokens that the host has not read yet are missing.
        copies: Source block id by target block id, for blocks that were copied on write.
    """

    blocks: ChangedBlocks = field(default_factory=lambda: ChangedBlocks([], [], []))
    tables: list[TableChange] = field(default_factory=list)
    grown: dict[int, int] = field(default_factory=dict)
    gone: list[int] = field(default_factory=list)
    swap_entries: list[tuple[str, int]] | None = None
    pinned: list[int] | None = None
    tokens: dict[int, list[int]] = field(default_factory=dict)
    copies: dict[int, int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        lists = (self.blocks.block_ids, self.tables, self.grown, self.gone, self.tokens)
        return any(lists) or self.swap_entries is not None or self.pinned is not None


@dataclass(slots=True)
class _SequenceSnapshot:
    """State of a sequence at the previous call of `look`."""

    sequence: Sequence
    # The list itself, not a copy: the block manager creates a new list when it removes blocks.
    table: list[int]
    num_blocks: int = 0
    last_block: int = 0
    num_registered: int = 0
    num_computed: int = 0
    num_read: int = 0  # number of computed tokens whose ids the host has read
    status: str = ""
    num_host_blocks: int = 0


class PoolWatch:
    """Reports the changes of a scheduler's pool between two calls of `look`.

    Args:
        scheduler: Scheduler whose blocks and sequences are watched.
        num_token_blocks: Maximum number of blocks whose tokens one call of `look` returns; 0 for
            none. Later calls return the tokens of the remaining blocks.
        watches: Weak set to which the constructor adds this `PoolWatch`. The owner of the set must
            call the method `note` of each `PoolWatch` in the set for every launched step. `close`
            removes this `PoolWatch` from the set.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        num_token_blocks: int = 0,
        watches: "WeakSet[PoolWatch] | None" = None,
    ):
        self._scheduler = scheduler
        self._pool = scheduler.block_manager.pool
        self._num_token_blocks = num_token_blocks
        self._watches = WeakSet[PoolWatch]() if watches is None else watches
        self._watches.add(self)
        self._snapshots: dict[int, _SequenceSnapshot] = {}
        num_blocks = len(self._pool.blocks)
        # Reference count and content hash of each block, as the previous call of `look` found them.
        self._counts, self._hashes = [0] * num_blocks, [0] * num_blocks
        # Counters of the pool at the previous call of `look`. Initially 0, so that the first call
        # checks every block that was ever freed.
        self._num_freed = self._num_clears = 0
        self._pin_counts = 0, 0
        self._pinned: list[int] = []
        self._swap_entries: list[tuple[str, int]] = []
        self._copies: dict[int, int] = {}
        # Blocks whose tokens `look` has not returned yet. Maps a block id to a sequence and the
        # block's index in the sequence's block table, or to None if the prefix cache has the
        # tokens.
        self._unreported_blocks: dict[int, tuple[Sequence, int] | None] = {}

    def close(self) -> None:
        """Stop watching the pool. Calling `close` again does nothing."""
        self._watches.discard(self)

    def note(self, plan: StepPlan) -> None:
        """Record which blocks a step copies, because the pool does not record copies."""
        self._copies.update((target, source) for source, target in plan.block_copies)

    def look(self) -> PoolChanges:
        """Return the changes since the previous call. The first call returns the whole state."""
        maybe_changed = self._find_freed_blocks()
        changes = PoolChanges(
            swap_entries=self._diff_swap_entries(), pinned=self._diff_pins(maybe_changed)
        )
        self._diff_sequences(changes, maybe_changed)
        copies, self._copies = self._copies, {}
        changes = replace(changes, blocks=self._diff_blocks(maybe_changed), copies=copies)
        self._report_tokens(changes)
        return changes

    def _find_freed_blocks(self) -> set[int]:
        """Return the blocks that were freed after the previous call of `look` and are still free.

        Return all blocks if the prefix cache was cleared.
        """
        pool, cache = self._pool, self._scheduler.block_manager.prefix_cache
        num_blocks_freed, self._num_freed = (
            pool.num_blocks_freed - self._num_freed,
            pool.num_blocks_freed,
        )
        num_clears = 0 if cache is None else cache.num_clears
        if num_clears != self._num_clears:
            self._num_clears = num_clears
            return set(range(1, len(pool.blocks)))
        # The pool appends freed blocks to the free queue, but puts freed blocks without content
        # first.
        queue = pool.free_block_queue
        return {*islice(reversed(queue), num_blocks_freed), *islice(queue, num_blocks_freed)}

    def _diff_pins(self, maybe_changed: set[int]) -> list[int] | None:
        pins = self._scheduler.block_manager.pins
        pin_counts = pins.num_created, len(pins)
        if pin_counts == self._pin_counts:
            return None
        self._pin_counts = pin_counts
        before, self._pinned = self._pinned, sorted(pins.holder_counts)
        maybe_changed.update(before, self._pinned)
        return None if self._pinned == before else self._pinned

    def _diff_sequences(self, changes: PoolChanges, maybe_changed: set[int]) -> None:
        for seq_id, snapshot in list(self._snapshots.items()):
            if not _has_blocks(snapshot.sequence):
                del self._snapshots[seq_id]
                changes.gone.append(seq_id)
                maybe_changed.update(snapshot.table, (snapshot.last_block,))
        for sequence in self._scheduler.sequences.by_id.values():
            if _has_blocks(sequence):
                self._diff_sequence(sequence, changes, maybe_changed)

    def _diff_sequence(
        self, sequence: Sequence, changes: PoolChanges, maybe_changed: set[int]
    ) -> None:
        snapshot = self._snapshots.get(sequence.seq_id)
        if snapshot is None:
            snapshot = self._snapshots[sequence.seq_id] = _SequenceSnapshot(
                sequence, sequence.block_table
            )
        table, num_computed = sequence.block_table, sequence.num_computed_tokens
        status = "finished" if sequence.finish_reason else str(sequence.request.status)
        num_host_blocks = len(sequence.host_block_table)
        num_kept = _count_unchanged_entries(snapshot, table)
        is_same_table = num_kept == snapshot.num_blocks == len(table)
        if not is_same_table or (status, num_host_blocks) != (
            snapshot.status,
            snapshot.num_host_blocks,
        ):
            changes.tables.append(_make_table_change(sequence, status, num_kept))
        elif num_computed != snapshot.num_computed:
            changes.grown[sequence.seq_id] = num_computed
        if not is_same_table:
            maybe_changed.update(
                snapshot.table[num_kept:], (snapshot.last_block,), table[num_kept:]
            )
        if sequence.num_registered_blocks != snapshot.num_registered:
            maybe_changed.update(table[snapshot.num_registered : sequence.num_registered_blocks])
        if self._num_token_blocks:
            self._collect_unreported(snapshot, sequence, num_kept)
        snapshot.table, snapshot.num_blocks = table, len(table)
        snapshot.last_block = table[-1] if table else 0
        snapshot.num_registered = sequence.num_registered_blocks
        snapshot.num_computed, snapshot.status = num_computed, status
        snapshot.num_host_blocks = num_host_blocks

    def _diff_blocks(self, maybe_changed: set[int]) -> ChangedBlocks:
        counts, hashes = self._counts, self._hashes
        changed: list[int] = []
        for block_id in sorted(maybe_changed):
            block = self._pool.blocks[block_id]
            cache_entry, count, content_hash = block.cache_entry, block.ref_cnt, 0
            if cache_entry is not None:
                count, content_hash = count or CACHED, cache_entry.digest & 0xFFFFFFFF
            if count != counts[block_id] or content_hash != hashes[block_id]:
                counts[block_id], hashes[block_id] = count, content_hash
                changed.append(block_id)
                if cache_entry is not None and self._num_token_blocks:
                    self._unreported_blocks[block_id] = None
        return ChangedBlocks(changed, [counts[i] for i in changed], [hashes[i] for i in changed])

    def _collect_unreported(
        self, snapshot: _SequenceSnapshot, sequence: Sequence, num_kept: int
    ) -> None:
        size = self._scheduler.block_manager.block_size
        num_read = min(sequence.num_computed_tokens, len(sequence.token_ids))
        has_more = num_read != snapshot.num_read
        first = min(num_kept, snapshot.num_read // size) if has_more else num_kept
        for index in range(first, min(-(-num_read // size), len(sequence.block_table))):
            self._unreported_blocks[sequence.block_table[index]] = sequence, index
        snapshot.num_read = num_read

    def _report_tokens(self, changes: PoolChanges) -> None:
        for _ in range(min(self._num_token_blocks, len(self._unreported_blocks))):
            block_id, table_position = self._unreported_blocks.popitem()
            if tokens := self._block_tokens(self._pool.blocks[block_id], table_position):
                changes.tokens[block_id] = tokens

    def _block_tokens(
        self, block: KVBlock, table_position: tuple[Sequence, int] | None
    ) -> list[int]:
        size = self._scheduler.block_manager.block_size
        # The key of a prefix-cache entry consists of the id of the parent's entry (8 bytes), then
        # the token ids of the block.
        if block.cache_entry is not None:
            return list(unpack_from(f"<{size}i", block.cache_entry.key, 8))
        if table_position is None:
            return []
        sequence, index = table_position
        if sequence.block_table[index : index + 1] != [block.block_id]:
            return []
        return sequence.token_ids[index * size : sequence.num_computed_tokens][:size]

    def _diff_swap_entries(self) -> list[tuple[str, int]] | None:
        swap_entries: list[tuple[str, int]] = []
        if self._scheduler.swap_space.num_used_host_blocks:
            waiting = self._scheduler.waiting
            swap_entries = [
                (r.request_id, r.swap_entry.num_blocks) for r in waiting if r.swap_entry is not None
            ]
        if swap_entries == self._swap_entries:
            return None
        self._swap_entries = swap_entries
        return swap_entries


def _has_blocks(sequence: Sequence) -> bool:
    return bool(sequence.block_table or sequence.host_block_table)


def _count_unchanged_entries(snapshot: _SequenceSnapshot, table: list[int]) -> int:
    """Return how many leading entries of a block table are unchanged since the last call of `look`.

    If a block table is still the same list object, only two changes are possible: entries were
    appended, or a copy on write replaced the last entry. For any other change, the block manager
    creates a new list.
    """
    num_blocks = snapshot.num_blocks
    if table is not snapshot.table or not num_blocks:
        return 0
    return num_blocks if table[num_blocks - 1] == snapshot.last_block else num_blocks - 1


def _make_table_change(sequence: Sequence, status: str, num_kept: int) -> TableChange:
    return TableChange(
        sequence.seq_id,
        sequence.request.request_id,
        sequence.index,
        status,
        sequence.num_prompt_tokens,
        sequence.num_computed_tokens,
        num_kept,
        tuple(sequence.block_table[num_kept:]),
        len(sequence.host_block_table),
    )
