"""Block tables: which blocks hold a sequence's keys and values."""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from jpaged.core.block_pool import NULL_BLOCK_ID, BlockPool
from jpaged.core.errors import require
from jpaged.core.request import Sequence


class BlockChanges(NamedTuple):
    """What an append did: block-table entries (index, block id), and blocks (source, destination)
    to copy on the device before anything is written."""

    updates: tuple[tuple[int, int], ...] = ()
    copies: tuple[tuple[int, int], ...] = ()


NO_CHANGES = BlockChanges()


class BlockManager:
    """Gives sequences just the blocks that their computed tokens fill: under one block is waste.

    `num_blocks` counts the pool's blocks with the null block; `block_size` is slots (tokens) a
    block. Token `i` of a sequence lies in slot `i % block_size` of `block_table[i // block_size]`.
    All growth starts at `sequence.num_computed_tokens`, which the caller advances afterwards.
    """

    def __init__(self, num_blocks: int, block_size: int):
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be handed out now."""
        return self.pool.num_free_blocks

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def can_allocate(self, num_tokens: int, num_spare_blocks: int = 0) -> bool:
        """Whether a new sequence of `num_tokens` fits and leaves `num_spare_blocks` free."""
        return self.num_blocks_for(num_tokens) + num_spare_blocks <= self.num_free_blocks

    def allocate(self, sequence: Sequence, num_tokens: int) -> BlockChanges:
        """Give a sequence without blocks those of its first `num_tokens` tokens."""
        if sequence.block_table:
            raise ValueError(f"sequence {sequence.seq_id} has blocks already: append to it")
        return self.append(sequence, num_tokens)

    def num_new_blocks(self, sequence: Sequence, num_tokens: int) -> int:
        """Free blocks that appending `num_tokens` takes, a copy on write counted."""
        start, block_size = sequence.num_computed_tokens, self.block_size
        table = sequence.block_table
        grown = -(-(start + num_tokens) // block_size) - len(table)
        if start % block_size and self.pool.blocks[table[-1]].ref_cnt > 1:
            return grown + 1
        return grown

    def can_append(self, sequence: Sequence, num_tokens: int) -> bool:
        """Whether `num_tokens` more tokens fit."""
        return self.num_new_blocks(sequence, num_tokens) <= self.num_free_blocks

    def append(self, sequence: Sequence, num_tokens: int) -> BlockChanges:
        """Give the sequence writable slots for its next `num_tokens` tokens.

        A partly filled last block that others hold too is replaced by a fresh one, to be copied
        from it (copy on write). OutOfBlocksError, with nothing changed, if too few are free.
        """
        num_blocks = self.num_new_blocks(sequence, num_tokens)
        if num_blocks == 0:
            return NO_CHANGES
        table, fresh = sequence.block_table, self.pool.allocate(num_blocks)
        grown = -(-(sequence.num_computed_tokens + num_tokens) // self.block_size) - len(table)
        first, copies = len(table), ()
        if num_blocks > grown:
            first, copies = first - 1, ((table[-1], fresh[0]),)
            self.pool.free(table[-1:])
        table[first:] = fresh
        return BlockChanges(tuple(enumerate(fresh, first)), copies)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let `child` share all of the parent's blocks, the partly filled last one too."""
        if child.block_table:
            raise ValueError(f"sequence {child.seq_id} has blocks already")
        self.pool.touch(parent.block_table)
        child.block_table = list(parent.block_table)

    def free(self, sequence: Sequence) -> None:
        """Give the sequence's blocks back, tail first: of a sequence that stays cached, the tail
        is then evicted before the head, without which the tail is of no use."""
        self.pool.free(reversed(sequence.block_table))
        sequence.block_table = []

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Prove pool and tables sound; `sequences` must be all that may hold blocks."""
        self.pool.check_integrity()
        holders: Counter[int] = Counter()
        for sequence in sequences:
            self._check_table(sequence)
            holders.update(sequence.block_table)
        counted = {b.block_id: b.ref_cnt for b in self.pool.blocks if b.ref_cnt}
        wrong = sorted({block_id for block_id, _ in counted.items() ^ holders.items()})
        require(not wrong, f"blocks {wrong} are not held as often as they count")

    def _check_table(self, sequence: Sequence) -> None:
        table = sequence.block_table
        needed = self.num_blocks_for(sequence.num_computed_tokens)
        is_sound = len(set(table)) == len(table) == needed and NULL_BLOCK_ID not in table
        require(is_sound, f"sequence {sequence.seq_id} needs {needed} blocks and holds {table}")
