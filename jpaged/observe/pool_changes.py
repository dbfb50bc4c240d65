"""A watch on the pool: what changed since the last look, for a picture that keeps up.

`pool_report.py` counts the whole pool when asked. A watch costs O(blocks) once, at its first look;
after that a look costs O(changed blocks + sequences that hold blocks). The pool does not know of
it: a block that changed is found where it is now, at the free queue's tail or in a block table or
pin that changed or went.
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
"""As a block's count: free, its content kept until the block is needed."""


class ChangedBlocks(NamedTuple):
    """Blocks that changed, in columns: a first look may be at a hundred thousand.

    Attributes:
        block_ids: Which, rising.
        counts: Block tables and pins that hold each: 0 if it is free, `CACHED` if its content is
            kept.
        content_hashes: Of each, 32 bits of what the prefix cache knows it to hold; 0 if it does
            not know it.
    """

    block_ids: list[int]
    counts: list[int]
    content_hashes: list[int]


class TableChange(NamedTuple):
    """A sequence whose block table, status or image changed, or that is new.

    Attributes:
        seq_id: Which.
        request_id: Whose.
        index: Its place among the request's samples; 0 for beams.
        status: Of its request, or "finished" if it is over and waits for a step in flight.
        num_prompt_tokens: Of its tokens, those that were given.
        num_computed_tokens: Those of its tokens whose KV is planned to be in its blocks.
        num_kept: Leading entries of its block table that are as they were at the last look.
        new_blocks: The entries after them.
        num_host_blocks: Entries of its image in host memory, while it is swapped out.
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
    """What changed since the last look.

    Attributes:
        blocks: Blocks that changed; at the first look all that are not free.
        tables: Sequences that hold blocks or an image, and are new or changed in more than length.
        grown: Of the others, by id: the tokens computed, where there are more.
        gone: Ids of sequences that hold nothing any more.
        images: Host memory, if it changed: for each group in it its request's id and blocks.
        pinned: All pinned blocks, if they changed.
        tokens: By block id, the tokens it holds, as far as the host has read them.
        copies: By block id, of which block it was made a copy, since a holder was to write that.
    """

    blocks: ChangedBlocks = field(default_factory=lambda: ChangedBlocks([], [], []))
    tables: list[TableChange] = field(default_factory=list)
    grown: dict[int, int] = field(default_factory=dict)
    gone: list[int] = field(default_factory=list)
    images: list[tuple[str, int]] | None = None
    pinned: list[int] | None = None
    tokens: dict[int, list[int]] = field(default_factory=dict)
    copies: dict[int, int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        lists = (self.blocks.block_ids, self.tables, self.grown, self.gone, self.tokens)
        return any(lists) or self.images is not None or self.pinned is not None


@dataclass(slots=True)
class _SequenceSnapshot:
    """A sequence as it was at the last look."""

    sequence: Sequence
    table: list[int]  # the list itself, and what it was like
    num_blocks: int = 0
    last_block: int = 0
    num_chained: int = 0
    num_computed: int = 0
    num_read: int = 0  # of the computed tokens, those that the host knew
    status: str = ""
    num_host_blocks: int = 0


class PoolWatch:
    """Looks at a scheduler's pool again and again, and tells what changed in between.

    Args:
        scheduler: Its blocks and sequences are watched.
        num_token_blocks: For how many blocks at most one look tells their tokens (others wait for
            the next looks); 0 never tells any.
        watches: Where the watch is until `close`, or until nothing else refers to it: all of these
            are to `note` launched steps.
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
        self._known: dict[int, _SequenceSnapshot] = {}
        num_blocks = len(self._pool.blocks)
        self._counts, self._hashes = [0] * num_blocks, [0] * num_blocks  # of each block, as told
        self._num_freed = self._num_clears = 0  # all that was ever freed may differ at first
        self._pin_counts = 0, 0
        self._pinned: list[int] = []
        self._swap_entries: list[tuple[str, int]] = []
        self._copies: dict[int, int] = {}
        # Blocks whose tokens are to be told, and where they are known if not by content.
        self._unreported_blocks: dict[int, tuple[Sequence, int] | None] = {}

    def close(self) -> None:
        """Watch no longer; a second time is no error."""
        self._watches.discard(self)

    def note(self, plan: StepPlan) -> None:
        """Take down which blocks a step copies: that alone cannot be seen afterwards."""
        self._copies.update((target, source) for source, target in plan.block_copies)

    def look(self) -> PoolChanges:
        """What changed since the last look; at the first, all there is."""
        maybe_changed = self._find_freed_blocks()
        changes = PoolChanges(
            images=self._diff_swap_entries(), pinned=self._diff_pins(maybe_changed)
        )
        self._diff_sequences(changes, maybe_changed)
        copies, self._copies = self._copies, {}
        changes = replace(changes, blocks=self._diff_blocks(maybe_changed), copies=copies)
        self._report_tokens(changes)
        return changes

    def _find_freed_blocks(self) -> set[int]:
        """Blocks that were freed since the last look and still are. All blocks, where the prefix
        cache was cleared."""
        pool, cache = self._pool, self._scheduler.block_manager.prefix_cache
        num_blocks_freed, self._num_freed = (
            pool.num_blocks_freed - self._num_freed,
            pool.num_blocks_freed,
        )
        num_clears = 0 if cache is None else cache.num_clears
        if num_clears != self._num_clears:
            self._num_clears = num_clears
            return set(range(1, len(pool.blocks)))
        return set(islice(reversed(pool.free_block_queue), num_blocks_freed))

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
        for seq_id, known in list(self._known.items()):
            if not _has_blocks(known.sequence):
                del self._known[seq_id]
                changes.gone.append(seq_id)
                maybe_changed.update(known.table, (known.last_block,))
        for sequence in self._scheduler.sequences.by_id.values():
            if _has_blocks(sequence):
                self._diff_sequence(sequence, changes, maybe_changed)

    def _diff_sequence(
        self, sequence: Sequence, changes: PoolChanges, maybe_changed: set[int]
    ) -> None:
        known = self._known.get(sequence.seq_id)
        if known is None:
            known = self._known[sequence.seq_id] = _SequenceSnapshot(sequence, sequence.block_table)
        table, num_computed = sequence.block_table, sequence.num_computed_tokens
        status = "finished" if sequence.finish_reason else str(sequence.request.status)
        num_host_blocks = len(sequence.host_block_table)
        num_kept = _count_unchanged_entries(known, table)
        is_same_table = num_kept == known.num_blocks == len(table)
        if not is_same_table or (status, num_host_blocks) != (known.status, known.num_host_blocks):
            changes.tables.append(_make_table_change(sequence, status, num_kept))
        elif num_computed != known.num_computed:
            changes.grown[sequence.seq_id] = num_computed
        if not is_same_table:
            maybe_changed.update(known.table[num_kept:], (known.last_block,), table[num_kept:])
        if sequence.num_registered_blocks != known.num_chained:
            maybe_changed.update(table[known.num_chained : sequence.num_registered_blocks])
        if self._num_token_blocks:
            self._collect_unreported(known, sequence, num_kept)
        known.table, known.num_blocks = table, len(table)
        known.last_block = table[-1] if table else 0
        known.num_chained = sequence.num_registered_blocks
        known.num_computed, known.status = num_computed, status
        known.num_host_blocks = num_host_blocks

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
        self, known: _SequenceSnapshot, sequence: Sequence, num_kept: int
    ) -> None:
        size = self._scheduler.block_manager.block_size
        num_read = min(sequence.num_computed_tokens, len(sequence.token_ids))
        has_more = num_read != known.num_read
        first = min(num_kept, known.num_read // size) if has_more else num_kept
        for index in range(first, min(-(-num_read // size), len(sequence.block_table))):
            self._unreported_blocks[sequence.block_table[index]] = sequence, index
        known.num_read = num_read

    def _report_tokens(self, changes: PoolChanges) -> None:
        for _ in range(min(self._num_token_blocks, len(self._unreported_blocks))):
            block_id, table_position = self._unreported_blocks.popitem()
            if tokens := self._block_tokens(self._pool.blocks[block_id], table_position):
                changes.tokens[block_id] = tokens

    def _block_tokens(
        self, block: KVBlock, table_position: tuple[Sequence, int] | None
    ) -> list[int]:
        size = self._scheduler.block_manager.block_size
        if block.cache_entry is not None:  # whose key spells them out, after its parent's number
            return list(unpack_from(f"<{size}i", block.cache_entry.key, 8))
        if table_position is None:
            return []
        sequence, index = table_position
        if sequence.block_table[index : index + 1] != [block.block_id]:
            return []
        return sequence.token_ids[index * size : sequence.num_computed_tokens][:size]

    def _diff_swap_entries(self) -> list[tuple[str, int]] | None:
        images: list[tuple[str, int]] = []
        if self._scheduler.swap_space.num_used_host_blocks:
            waiting = self._scheduler.waiting
            images = [
                (r.request_id, r.swap_entry.num_blocks) for r in waiting if r.swap_entry is not None
            ]
        if images == self._swap_entries:
            return None
        self._swap_entries = images
        return images


def _has_blocks(sequence: Sequence) -> bool:
    return bool(sequence.block_table or sequence.host_block_table)


def _count_unchanged_entries(known: _SequenceSnapshot, table: list[int]) -> int:
    """Leading entries that did not change.

    A table that stays the same list only grows, and only its last entry is ever replaced (copy on
    write); whatever else happens to it, the block manager makes another list of it.
    """
    num_blocks = known.num_blocks
    if table is not known.table or not num_blocks:
        return 0
    return num_blocks if table[num_blocks - 1] == known.last_block else num_blocks - 1


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
