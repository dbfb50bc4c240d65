"""Block tables: which blocks hold a sequence's keys and values."""

from collections import Counter
from collections.abc import Collection, Iterable
from typing import NamedTuple

from jpaged.core.block_pool import (
    NULL_BLOCK_ID,
    BlockPool,
    KVBlock,
    PrefixCacheEntry,
    get_cache_entry,
    require,
)
from jpaged.core.prefix_cache import REGISTRATION_ENDED, ROOT_ENTRY_ID, Pins, PrefixCache
from jpaged.core.request import Sequence


class BlockChanges(NamedTuple):
    """What an append did: block-table entries (index, block id), and blocks (source, destination)
    to copy on the device before anything is written."""

    updates: tuple[tuple[int, int], ...] = ()
    copies: tuple[tuple[int, int], ...] = ()


NO_CHANGES = BlockChanges()


class GroupFit(NamedTuple):
    """What a waiting group finds of its own in the pool, and what it takes besides.

    Attributes:
        hits: Lists of cached blocks: of a swapped-out group one for each live sequence, in their
            order; of another one for its first sequence alone, from which the others fork.
        num_needed_blocks: Free blocks it takes to compute all its tokens, the cached ones that are
            free counted.
    """

    hits: list[list[KVBlock]]
    num_needed_blocks: int


class BlockManager:
    """Gives sequences just the blocks that their computed tokens fill: under one block is waste.

    `num_blocks` counts the pool's blocks with the null block; `block_size` is slots (tokens) a
    block. Token `i` of a sequence lies in slot `i % block_size` of `block_table[i // block_size]`.
    All growth starts at `sequence.num_computed_tokens`, which the caller advances afterwards.

    With a `prefix_cache` of the same block size, full blocks are shared between sequences that
    begin with the same tokens; without one (None) nothing is kept.
    """

    def __init__(self, num_blocks: int, block_size: int, prefix_cache: PrefixCache | None = None):
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        if prefix_cache is not None and prefix_cache.block_size != block_size:
            raise ValueError(f"prefix_cache has block_size={prefix_cache.block_size}")
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self.pool = BlockPool(num_blocks, None if prefix_cache is None else prefix_cache.unregister)
        self.pins = Pins(self.pool)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be handed out now."""
        return self.pool.num_free_blocks

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    # A group is admitted once, and then its sequences append what each step computes. An allocator
    # that reserves memory at admission is a subclass that overrides these two, `append` and `free`:
    # see `bench/paper/allocators.py`.

    def can_admit(self, first: Sequence, num_blocks: int) -> bool:
        """Whether a waiting group fits. `first` is its first sequence; it needs `num_blocks` free
        blocks to compute the tokens it has, those that must stay free counted. After a no, a yes
        may come only when a block was freed: admission asks again then."""
        return num_blocks <= self.num_free_blocks

    def admit(self, first: Sequence, prefix: Collection[KVBlock] = ()) -> None:
        """Begin a group that fits: `first` is its first sequence, which has no blocks yet. It gets
        its cached `prefix`, as computed tokens."""
        self.assign_blocks(first, [block.block_id for block in prefix], prefix)
        first.num_computed_tokens = len(prefix) * self.block_size

    def assign_blocks(
        self, sequence: Sequence, block_table: list[int], prefix: Collection[KVBlock]
    ) -> None:
        """Let a sequence without blocks hold those of `block_table`, of which cached ones lead."""
        if sequence.block_table:
            raise ValueError(f"sequence {sequence.seq_id} has blocks already")
        self.pool.touch(block_table)
        sequence.block_table = block_table
        if prefix and sequence.num_registered_blocks != REGISTRATION_ENDED:
            *_, last = prefix
            sequence.num_registered_blocks = len(prefix)
            sequence.last_cache_entry_id = get_cache_entry(last).entry_id

    def num_new_blocks(self, sequence: Sequence, num_tokens: int) -> int:
        """Free blocks that appending `num_tokens` takes, a copy on write counted."""
        start, block_size = sequence.num_computed_tokens, self.block_size
        table = sequence.block_table
        grown = -(-(start + num_tokens) // block_size) - len(table)
        if start % block_size and self.pool.blocks[table[-1]].ref_cnt > 1:
            return grown + 1
        return grown

    def has_free_slot(self, sequence: Sequence) -> bool:
        """Whether the sequence's next token takes no free block, as `num_new_blocks` of one tells:
        its last block is partly filled, and no other sequence holds it."""
        if sequence.num_computed_tokens % self.block_size == 0:
            return False
        return self.pool.blocks[sequence.block_table[-1]].ref_cnt == 1

    def total_new_blocks(self, work: list[tuple[Sequence, int]]) -> int:
        """As `num_new_blocks`, of sequences and tokens that are appended one after the other: the
        last to write a block that only they share need not copy it."""
        if len(work) == 1:
            return self.num_new_blocks(*work[0])
        num_blocks, writers = 0, Counter[int]()
        for sequence, num_tokens in work:
            start, table = sequence.num_computed_tokens, sequence.block_table
            num_blocks += self.num_blocks_for(start + num_tokens) - len(table)
            if start % self.block_size:
                writers[table[-1]] += 1
        blocks = self.pool.blocks
        copies = (min(count, blocks[b].ref_cnt - 1) for b, count in writers.items())
        return num_blocks + sum(copies)

    def exclusive_blocks(self, sequences: Iterable[Sequence]) -> set[int]:
        """Blocks that become free if all of these sequences give theirs back."""
        held = Counter(block_id for sequence in sequences for block_id in sequence.block_table)
        return {b for b, count in held.items() if self.pool.blocks[b].ref_cnt == count}

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
        child.num_registered_blocks = parent.num_registered_blocks
        child.last_cache_entry_id = parent.last_cache_entry_id

    def trim(self, sequence: Sequence) -> None:
        """Give back blocks past those that computed tokens fill: of a step that was not made."""
        table, needed = sequence.block_table, self.num_blocks_for(sequence.num_computed_tokens)
        if len(table) > needed:
            self.pool.free(reversed(table[needed:]))
            sequence.block_table = table[:needed]  # another list: see `pool_changes.py`

    def free(self, sequence: Sequence) -> None:
        """Give the sequence's blocks back, tail first: of a sequence that stays cached, the tail
        is then evicted before the head, without which the tail is of no use."""
        self.pool.free(reversed(sequence.block_table))
        sequence.block_table = []
        sequence.num_registered_blocks, sequence.last_cache_entry_id = 0, ROOT_ENTRY_ID

    # ---- the prefix cache

    def find_prefix(self, sequence: Sequence, max_tokens: int | None = None) -> list[KVBlock]:
        """Blocks that hold the longest known prefix of the sequence, of `max_tokens` at most.

        By default one token at least is left out: a step must have something to compute, or there
        is nothing to sample from.
        """
        if self.prefix_cache is None or not sequence.reads_prefix_cache:
            return []
        tokens = sequence.token_ids
        most = (len(tokens) - 1 if max_tokens is None else max_tokens) // self.block_size
        return self.prefix_cache.find_longest_prefix(tokens, most, sequence.cache_salt)

    def num_pinned_prefix_blocks(self, sequence: Sequence) -> int:
        """Pinned blocks that the sequence holds, or is sure to find when it joins the batch: they
        are cached as long as they are pinned, and found before others of the same content."""
        if not (self.pins and sequence.reads_prefix_cache):
            return 0
        if sequence.block_table:
            return sum(block_id in self.pins.holder_counts for block_id in sequence.block_table)
        # What a swapped-out sequence has not computed yet, it will compute itself.
        # Of steps in flight the last tokens are not known yet.
        known = min(sequence.num_computed_tokens, len(sequence.token_ids))
        most = known if sequence.host_block_table else None
        return self.pins.num_pinned(self.find_prefix(sequence, most))

    def can_extend_prefix(
        self, cache_entries: list[PrefixCacheEntry], sequence: Sequence, max_tokens: int
    ) -> bool:
        """Whether the prefix of these contents, found earlier by `find_prefix`, is longer by now.
        Those evicted meanwhile are taken off the list's end."""
        cache, tokens = self.prefix_cache, sequence.token_ids
        if cache is None or not sequence.reads_prefix_cache:
            return False
        while cache_entries and not cache_entries[-1].blocks:
            cache_entries.pop()
        if (len(cache_entries) + 1) * self.block_size > max_tokens:
            return False
        parent = cache_entries[-1].entry_id if cache_entries else ROOT_ENTRY_ID
        return (
            cache.find_next_entry(parent, len(cache_entries), tokens, sequence.cache_salt)
            is not None
        )

    def register_full_blocks(self, sequence: Sequence, num_tokens: int) -> None:
        """Let others use the full blocks of the sequence's first `num_tokens` tokens, whose KV is
        computed. Tokens the host does not know are left out, and so is all of a sequence that lost
        its blocks meanwhile."""
        cache, size, table = self.prefix_cache, self.block_size, sequence.block_table
        if cache is None or not table:
            return
        tokens, blocks, salt = sequence.token_ids, self.pool.blocks, sequence.cache_salt
        first, end = sequence.num_registered_blocks, min(num_tokens, len(tokens)) // size
        for index in range(first, end):
            block_tokens = tokens[index * size : (index + 1) * size]
            content = cache.register(
                blocks[table[index]], sequence.last_cache_entry_id, block_tokens, salt
            )
            if content is None:
                sequence.num_registered_blocks = REGISTRATION_ENDED
                return
            sequence.num_registered_blocks, sequence.last_cache_entry_id = index + 1, content

    def reset_prefix_cache(self, sequences: Iterable[Sequence]) -> None:
        """Forget all cached content; `sequences`, all that hold blocks, add none of theirs.

        ValueError, with nothing changed, while a prefix is pinned.
        """
        if self.pins:
            raise ValueError(f"{len(self.pins)} prefixes are pinned: unpin them before the reset")
        if self.prefix_cache is not None:
            self.prefix_cache.clear()
            self.pool.num_cached_blocks = 0
        for sequence in sequences:
            if sequence.block_table or sequence.host_block_table:
                sequence.num_registered_blocks = REGISTRATION_ENDED

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Prove pool and tables sound; `sequences` must be all that may hold blocks."""
        self.pool.check_integrity()
        if self.prefix_cache is not None:
            self.prefix_cache.check_integrity(self.pool.blocks)
        holder_counts = Counter(self.pins.holder_counts)
        for sequence in sequences:
            self._check_table(sequence)
            holder_counts.update(sequence.block_table)
        counted = {b.block_id: b.ref_cnt for b in self.pool.blocks if b.ref_cnt}
        wrong = sorted({block_id for block_id, _ in counted.items() ^ holder_counts.items()})
        require(not wrong, f"blocks {wrong} are not held as often as they count")

    def _check_table(self, sequence: Sequence) -> None:
        table = sequence.block_table
        needed = self.num_blocks_for(sequence.num_computed_tokens)
        if sequence.host_block_table:
            require(not table, f"sequence {sequence.seq_id} is swapped out and holds {table}")
            needed -= len(sequence.host_block_table)
        is_sound = len(set(table)) == len(table) == needed and NULL_BLOCK_ID not in table
        require(is_sound, f"sequence {sequence.seq_id} needs {needed} blocks and holds {table}")
        cache, size = self.prefix_cache, self.block_size
        for index, block_id in enumerate(table):
            block_tokens = sequence.token_ids[index * size : (index + 1) * size]
            block = self.pool.blocks[block_id]
            salt = sequence.cache_salt
            is_own = (
                cache is None
                or block.cache_entry is None
                or cache.matches(block, block_tokens, salt)
            )
            require(is_own, f"sequence {sequence.seq_id} holds {block} of other content")
