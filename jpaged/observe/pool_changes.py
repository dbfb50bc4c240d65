"""A watch on the pool: what changed since somebody looked last, for a picture that keeps up.

`pool_report.py` counts the whole pool when asked. A watch costs O(blocks) once, at its first look;
then the pool notes down which blocks change, and a look costs O(changed blocks + sequences that
hold blocks). While nobody watches, noting is a loop over an empty list.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from struct import unpack_from
from typing import NamedTuple

from jpaged.core.block_pool import BlockContent, KVBlock
from jpaged.core.request import Sequence as TokenSequence
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

    block_ids: Sequence[int] = ()
    counts: Sequence[int] = ()
    content_hashes: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class TableChange:
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

    blocks: ChangedBlocks = field(default_factory=ChangedBlocks)
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
class _Known:
    """A sequence as it was at the last look."""

    sequence: TokenSequence
    table: list[int]  # the list itself, and what it was like
    num_blocks: int = 0
    last_block: int = 0
    num_computed: int = 0
    num_read: int = 0  # of the computed tokens, those that the host knew
    status: str = ""
    num_host_blocks: int = 0


class PoolWatch:
    """Looks at a scheduler's pool again and again, and tells what changed in between.

    Args:
        scheduler: Its blocks and sequences are watched until `close`.
        num_token_blocks: For how many blocks at most one look tells their tokens (others wait for
            the next looks); 0 never tells any.
    """

    def __init__(self, scheduler: Scheduler, num_token_blocks: int = 0):
        self._scheduler = scheduler
        self._pool = scheduler.block_manager.pool
        self._num_token_blocks = num_token_blocks
        self._known: dict[int, _Known] = {}
        self._images: list[tuple[str, int]] = []
        self._pinned: list[int] = []
        # Blocks whose tokens are to be told, and where they are known if not by content.
        self._untold: dict[int, tuple[TokenSequence, int] | None] = {}
        # At first all that are not free have changed.
        self._changed = {b.block_id for b in self._pool.blocks if b.ref_cnt or b.content}
        self._copies: dict[int, int] = {}
        self._pool.journals.append(self._changed)
        self._pool.copy_journals.append(self._copies)

    def close(self) -> None:
        """Watch no longer; a second time is no error."""
        journals = self._pool.journals
        journals[:] = [journal for journal in journals if journal is not self._changed]
        copies = self._pool.copy_journals
        copies[:] = [journal for journal in copies if journal is not self._copies]

    def look(self) -> PoolChanges:
        """What changed since the last look; at the first, all there is."""
        changes = PoolChanges(
            self._changed_blocks(), images=self._new_images(), pinned=self._new_pins()
        )
        changes.copies.update(self._copies)
        self._copies.clear()
        self._look_at_sequences(changes)
        self._tell_tokens(changes)
        return changes

    def _changed_blocks(self) -> ChangedBlocks:
        block_ids = sorted(self._changed)
        self._changed.clear()
        blocks = [self._pool.blocks[block_id] for block_id in block_ids]
        if self._num_token_blocks:
            self._untold.update((b.block_id, None) for b in blocks if b.content is not None)
        counts = [block.ref_cnt or CACHED * (block.content is not None) for block in blocks]
        contents = (block.content for block in blocks)
        hashes = [0 if content is None else content.digest & 0xFFFFFFFF for content in contents]
        return ChangedBlocks(block_ids, counts, hashes)

    def _look_at_sequences(self, changes: PoolChanges) -> None:
        for seq_id, known in list(self._known.items()):
            if not _holds(known.sequence):
                del self._known[seq_id]
                changes.gone.append(seq_id)
        for seq_id, sequence in self._scheduler.sequences.known.items():
            if _holds(sequence):
                self._look_at_sequence(changes, seq_id, sequence)

    def _look_at_sequence(self, changes: PoolChanges, seq_id: int, sequence: TokenSequence) -> None:
        known = self._known.get(seq_id)
        if known is None:
            known = self._known[seq_id] = _Known(sequence, sequence.block_table)
        table, num_computed = sequence.block_table, sequence.num_computed_tokens
        status = "finished" if sequence.finish_reason else str(sequence.request.status)
        num_host_blocks = len(sequence.image_table)
        num_kept = _num_kept(known, table)
        is_same_table = num_kept == known.num_blocks == len(table)
        if not is_same_table or (status, num_host_blocks) != (known.status, known.num_host_blocks):
            changes.tables.append(_change(sequence, status, num_kept))
        elif num_computed != known.num_computed:
            changes.grown[seq_id] = num_computed
        if self._num_token_blocks:
            self._note_tokens(known, sequence, num_kept)
        known.table, known.num_blocks = table, len(table)
        known.last_block = table[-1] if table else 0
        known.num_computed, known.status = num_computed, status
        known.num_host_blocks = num_host_blocks

    def _note_tokens(self, known: _Known, sequence: TokenSequence, num_kept: int) -> None:
        size = self._scheduler.block_manager.block_size
        num_read = min(sequence.num_computed_tokens, len(sequence.token_ids))
        has_more = num_read != known.num_read
        first = min(num_kept, known.num_read // size) if has_more else num_kept
        for index in range(first, min(-(-num_read // size), len(sequence.block_table))):
            self._untold[sequence.block_table[index]] = sequence, index
        known.num_read = num_read

    def _tell_tokens(self, changes: PoolChanges) -> None:
        for _ in range(min(self._num_token_blocks, len(self._untold))):
            block_id, place = self._untold.popitem()
            tokens = self._tokens_of(self._pool.blocks[block_id], place)
            if tokens:
                changes.tokens[block_id] = tokens

    def _tokens_of(self, block: KVBlock, place: tuple[TokenSequence, int] | None) -> list[int]:
        size = self._scheduler.block_manager.block_size
        if block.content is not None:
            return _content_tokens(block.content, size)
        if place is not None:
            sequence, index = place
            if sequence.block_table[index : index + 1] == [block.block_id]:
                end = min(sequence.num_computed_tokens, (index + 1) * size)
                return sequence.token_ids[index * size : end]
        return []

    def _new_images(self) -> list[tuple[str, int]] | None:
        images = list(self._held_images())
        if images == self._images:
            return None
        self._images = images
        return images

    def _held_images(self) -> Iterator[tuple[str, int]]:
        if self._scheduler.swap_space.num_used_blocks:
            for request in self._scheduler.waiting:
                if request.image is not None:
                    yield request.request_id, request.image.num_blocks

    def _new_pins(self) -> list[int] | None:
        holders = self._scheduler.block_manager.pins.holders
        if not holders and not self._pinned:
            return None
        pinned = sorted(holders)
        if pinned == self._pinned:
            return None
        self._pinned = pinned
        return pinned


def _holds(sequence: TokenSequence) -> bool:
    return bool(sequence.block_table or sequence.image_table)


def _num_kept(known: _Known, table: list[int]) -> int:
    """Leading entries that did not change.

    A table that stays the same list only grows, and only its last entry is ever replaced (copy on
    write); whatever else happens to it, the block manager makes another list of it.
    """
    num_blocks = known.num_blocks
    if table is not known.table or not num_blocks:
        return 0
    return num_blocks if table[num_blocks - 1] == known.last_block else num_blocks - 1


def _change(sequence: TokenSequence, status: str, num_kept: int) -> TableChange:
    return TableChange(
        sequence.seq_id,
        sequence.request.request_id,
        sequence.index,
        status,
        sequence.num_prompt_tokens,
        sequence.num_computed_tokens,
        num_kept,
        tuple(sequence.block_table[num_kept:]),
        len(sequence.image_table),
    )


def _content_tokens(content: BlockContent, block_size: int) -> list[int]:
    """The token ids that a content's key spells out, after its parent's number."""
    return list(unpack_from(f"<{block_size}i", content.key, 8))
