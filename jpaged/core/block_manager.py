"""Block tables: allocate, share, copy and free the KV blocks of sequences."""

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
    """Changes of one block table that the device must apply.

    Attributes:
        updates: New entries of the block table, each (index, block id).
        copies: Blocks to copy before the step writes to the pool, each (source, destination).
    """

    updates: tuple[tuple[int, int], ...] = ()
    copies: tuple[tuple[int, int], ...] = ()


NO_CHANGES = BlockChanges()


class GroupFit(NamedTuple):
    """Cached blocks that a waiting group can share, and the number of free blocks that the group
    needs.

    Attributes:
        hits: Lists of cached prefix blocks. One list for each live sequence of a swapped-out group;
            for any other group, a single list for the first sequence.
        num_needed_blocks: Number of free blocks that the group takes to compute all its tokens. A
            cached block that the group will share counts only if the block is free now.
    """

    hits: list[list[KVBlock]]
    num_needed_blocks: int


class BlockManager:
    """Allocates to each sequence exactly the blocks that its computed tokens need.

    With speculative decoding, a sequence may hold more blocks. `reserve` adds blocks for drafts,
    and `trim` frees the blocks that turn out to be unused, for example after rejected drafts.

    Token `i` of a sequence lies in slot `i % block_size` of block `block_table[i // block_size]`.
    New tokens start at `sequence.num_computed_tokens`, which the caller advances after `append`.

    Args:
        num_blocks: Number of blocks in the pool, including the null block.
        block_size: Number of slots (tokens) per block.
        prefix_cache: Index of full blocks for sequences that begin with the same tokens. None: no
            prefixes are cached.

    Attributes:
        has_reservations: Whether sequences may hold more blocks than their computed tokens fill.
    """

    has_reservations = False

    def __init__(self, num_blocks: int, block_size: int, prefix_cache: PrefixCache | None = None):
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        if prefix_cache is not None and prefix_cache.block_size != block_size:
            raise ValueError(
                f"prefix_cache has block_size={prefix_cache.block_size}: "
                "create it with the block_size of the block manager"
            )
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self.pool = BlockPool(num_blocks, None if prefix_cache is None else prefix_cache.unregister)
        self.pins = Pins(self.pool)

    @property
    def num_free_blocks(self) -> int:
        """Number of blocks that can be allocated now."""
        return self.pool.num_free_blocks

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks needed to hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    # Subclasses in bench/paper/allocators.py override `can_admit`, `admit` and `append` to reserve
    # memory when a group is admitted.

    def can_admit(self, first: Sequence, num_blocks: int) -> bool:
        """Return whether a waiting group fits in the free blocks.

        A result of False must hold until a block is freed, because `Admission` caches it.

        Args:
            first: First sequence of the group.
            num_blocks: Number of blocks that must be free: the blocks that the group needs, and
                the spare blocks for running sequences.
        """
        return num_blocks <= self.num_free_blocks

    def admit(self, first: Sequence, prefix: Collection[KVBlock] = ()) -> None:
        """Put cached prefix blocks into the block table of a new group's first sequence.

        The tokens in these blocks then count as computed.

        Args:
            first: First sequence of the group, without blocks.
            prefix: Cached blocks of the sequence's first tokens.
        """
        self.assign_blocks(first, [block.block_id for block in prefix], prefix)
        first.num_computed_tokens = len(prefix) * self.block_size

    def assign_blocks(
        self, sequence: Sequence, block_table: list[int], prefix: Collection[KVBlock]
    ) -> None:
        """Set the block table of a sequence without blocks, and add a reference to each block.

        Args:
            sequence: Sequence without blocks.
            block_table: Block ids for the sequence's tokens.
            prefix: Cached blocks at the start of `block_table`.

        Raises:
            ValueError: The sequence already has blocks.
        """
        if sequence.block_table:
            raise ValueError(f"sequence {sequence.seq_id} already has blocks: free them first")
        self.pool.touch(block_table)
        sequence.block_table = block_table
        if prefix and sequence.num_registered_blocks != REGISTRATION_ENDED:
            *_, last = prefix
            sequence.num_registered_blocks = len(prefix)
            sequence.last_cache_entry_id = get_cache_entry(last).entry_id

    def num_new_blocks(self, sequence: Sequence, num_tokens: int) -> int:
        """Return the number of blocks that `append` would allocate, including a copy on write."""
        start, block_size = sequence.num_computed_tokens, self.block_size
        table = sequence.block_table
        grown = -(-(start + num_tokens) // block_size) - len(table)
        if grown < 0:
            # The sequence has blocks that `reserve` added for drafts. No other sequence shares its
            # partly filled block, so no copy on write is needed.
            return 0
        if start % block_size and self.pool.blocks[table[-1]].ref_cnt > 1:
            return grown + 1
        return grown

    def has_free_slot(self, sequence: Sequence) -> bool:
        """Return whether one token can be appended to the sequence without a new block.

        True if the sequence has a block for the token and no other sequence holds this block.
        """
        index, table = sequence.num_computed_tokens // self.block_size, sequence.block_table
        return index < len(table) and self.pool.blocks[table[index]].ref_cnt == 1

    def total_new_blocks(self, work: list[tuple[Sequence, int]]) -> int:
        """Return the number of blocks that several `append` calls would allocate together.

        If all holders of a partly filled block are in `work`, one of them needs no copy of the
        block.

        Args:
            work: (sequence, number of tokens to append) pairs.
        """
        if len(work) == 1:
            return self.num_new_blocks(*work[0])
        num_blocks, writers = 0, Counter[int]()
        for sequence, num_tokens in work:
            start, table = sequence.num_computed_tokens, sequence.block_table
            grown = self.num_blocks_for(start + num_tokens) - len(table)
            num_blocks += max(grown, 0)
            if start % self.block_size and grown >= 0:
                writers[table[-1]] += 1
        blocks = self.pool.blocks
        copies = (min(count, blocks[b].ref_cnt - 1) for b, count in writers.items())
        return num_blocks + sum(copies)

    def exclusive_blocks(self, sequences: Iterable[Sequence]) -> set[int]:
        """Return the ids of the blocks whose only holders are `sequences`."""
        held = Counter(block_id for sequence in sequences for block_id in sequence.block_table)
        return {b for b, count in held.items() if self.pool.blocks[b].ref_cnt == count}

    def append(self, sequence: Sequence, num_tokens: int) -> BlockChanges:
        """Give the sequence writable slots for its next `num_tokens` tokens.

        If other sequences share the sequence's partly filled last block, allocate a copy. In the
        sequence's block table, the copy replaces the shared block (copy on write).

        Raises:
            OutOfBlocksError: Too few blocks are free; no block has been allocated.
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

    def reserve(self, sequence: Sequence, num_tokens: int, max_new_blocks: int) -> BlockChanges:
        """Allocate blocks until the sequence has room for `num_tokens` tokens in total.

        Args:
            sequence: Sequence that shares no partly filled block.
            num_tokens: Number of tokens, including computed tokens.
            max_new_blocks: Maximum number of blocks to allocate, at most `num_free_blocks`.
        """
        table = sequence.block_table
        num_blocks = min(self.num_blocks_for(num_tokens) - len(table), max_new_blocks)
        if num_blocks <= 0:
            return NO_CHANGES
        first, fresh = len(table), self.pool.allocate(num_blocks)
        table += fresh
        return BlockChanges(tuple(enumerate(fresh, first)))

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let `child` share all blocks of `parent`, including a partly filled last block.

        Raises:
            ValueError: `child` already has blocks.
        """
        if child.block_table:
            raise ValueError(f"sequence {child.seq_id} already has blocks: free them first")
        self.pool.touch(parent.block_table)
        child.block_table = list(parent.block_table)
        child.num_registered_blocks = parent.num_registered_blocks
        child.last_cache_entry_id = parent.last_cache_entry_id

    def trim(self, sequence: Sequence) -> None:
        """Free the unused blocks at the end of a sequence's block table.

        A block is in use if it holds a computed token, or if a step in flight can write to it.
        Blocks become unused when the device rejects drafts, or when the scheduler removes the
        sequence from a step.
        """
        table = sequence.block_table
        needed = self.num_blocks_for(sequence.num_computed_tokens + sequence.num_pending_drafts)
        if len(table) > needed:
            self.pool.free_empty(reversed(table[needed:]))
            # Assign a new list instead of changing the old one: `pool_changes.py` compares the
            # identity of the list to detect removed blocks.
            sequence.block_table = table[:needed]

    def free(self, sequence: Sequence) -> None:
        """Free all blocks of the sequence, last block first.

        The pool evicts cached blocks in this order. A cached block is useless without the blocks
        before it, so the last block must go first.
        """
        if self.has_reservations:
            self.trim(sequence)
        self.pool.free(reversed(sequence.block_table))
        sequence.block_table = []
        sequence.num_registered_blocks, sequence.last_cache_entry_id = 0, ROOT_ENTRY_ID

    # ---- the prefix cache

    def find_prefix(self, sequence: Sequence, max_tokens: int | None = None) -> list[KVBlock]:
        """Return the blocks of the sequence's longest cached prefix.

        Args:
            sequence: Sequence whose tokens are looked up. If its `num_registered_blocks` is
                `REGISTRATION_ENDED`, the result is empty: old weights may have computed its KV.
            max_tokens: Maximum number of tokens of the prefix. None: all tokens except the last
                one, because a step must compute at least one token to sample from. In addition,
                `sequence.max_cached_tokens` limits the prefix.
        """
        tokens, limit = sequence.token_ids, sequence.max_cached_tokens
        most = len(tokens) - 1 if max_tokens is None else max_tokens
        most = (most if limit is None else min(most, limit)) // self.block_size
        is_ended = sequence.num_registered_blocks == REGISTRATION_ENDED
        if self.prefix_cache is None or not most or is_ended:
            return []
        return self.prefix_cache.find_longest_prefix(tokens, most, sequence.cache_salt)

    def num_pinned_prefix_blocks(self, sequence: Sequence) -> int:
        """Return how many blocks of the sequence's prefix are pinned.

        If the sequence holds blocks, count the pinned blocks in its block table. Otherwise, look up
        its longest cached prefix, and count the pinned blocks that the sequence would share.

        The sequence can rely on a pinned block until the block is unpinned: pinned blocks are never
        evicted. If several cached blocks hold the same tokens, a lookup returns the oldest one. A
        pin holds the blocks that a lookup returned, so the oldest one is the pinned one.
        """
        if not self.pins or sequence.max_cached_tokens == 0:
            return 0
        if sequence.block_table:
            limit, table = sequence.max_cached_tokens, sequence.block_table
            found = table if limit is None else table[: limit // self.block_size]
            return sum(block_id in self.pins.holder_counts for block_id in found)
        # For a swapped-out sequence, look up only computed tokens whose ids the host knows:
        # `SwapSpace.swap_in` shares cached blocks only for these tokens.
        known = min(sequence.num_computed_tokens, len(sequence.token_ids))
        most = known if sequence.host_block_table else None
        return self.pins.num_pinned(self.find_prefix(sequence, most))

    def can_extend_prefix(
        self, cache_entries: list[PrefixCacheEntry], sequence: Sequence, max_tokens: int
    ) -> bool:
        """Return whether the cache now holds a longer prefix than an earlier lookup found.

        Args:
            cache_entries: Cache entries of the earlier prefix. The method removes evicted entries
                from the end of this list.
            sequence: Sequence whose tokens are looked up.
            max_tokens: Maximum length of the prefix.
        """
        cache, tokens, limit = self.prefix_cache, sequence.token_ids, sequence.max_cached_tokens
        max_tokens = max_tokens if limit is None else min(max_tokens, limit)
        if cache is None:
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
        """Add the full blocks of the sequence's first `num_tokens` tokens to the prefix cache.

        The KV of these tokens must be computed. Tokens that the host has not read yet are left out.
        A sequence without blocks is ignored, since it may have been preempted in the meantime.
        """
        cache, size, table = self.prefix_cache, self.block_size, sequence.block_table
        if cache is None or not table:
            return
        tokens, blocks, salt = sequence.token_ids, self.pool.blocks, sequence.cache_salt
        first, end = sequence.num_registered_blocks, min(num_tokens, len(tokens)) // size
        for index in range(first, end):
            block_tokens = tokens[index * size : (index + 1) * size]
            cache_entry_id = cache.register(
                blocks[table[index]], sequence.last_cache_entry_id, block_tokens, salt
            )
            if cache_entry_id is None:
                sequence.num_registered_blocks = REGISTRATION_ENDED
                return
            sequence.num_registered_blocks, sequence.last_cache_entry_id = index + 1, cache_entry_id

    def reset_prefix_cache(self, sequences: Iterable[Sequence]) -> None:
        """Clear the prefix cache; see `end_sharing`.

        Raises:
            ValueError: A prefix is pinned; the cache is unchanged.
        """
        if self.pins:
            raise ValueError(f"{len(self.pins)} prefixes are pinned: unpin them first")
        self.end_sharing(sequences)

    def end_sharing(self, sequences: Iterable[Sequence]) -> None:
        """Clear the prefix cache, so that sequences that start later share no KV computed before.

        Pinned blocks stay allocated. A sequence that holds blocks, on the device or in host memory,
        uses the cache again only after it has freed these blocks.

        Args:
            sequences: All sequences that hold blocks.
        """
        if self.prefix_cache is not None:
            self.prefix_cache.clear()
            self.pool.num_cached_blocks = 0
        for sequence in sequences:
            if sequence.block_table or sequence.host_block_table:
                sequence.num_registered_blocks = REGISTRATION_ENDED

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Check that pool, prefix cache and block tables are consistent.

        Args:
            sequences: All sequences that may hold blocks.

        Raises:
            IntegrityError: An inconsistency was found.
        """
        self.pool.check_integrity()
        if self.prefix_cache is not None:
            self.prefix_cache.check_integrity(self.pool.blocks)
        holder_counts = Counter(self.pins.holder_counts)
        for sequence in sequences:
            self._check_table(sequence)
            holder_counts.update(sequence.block_table)
        counted = {b.block_id: b.ref_cnt for b in self.pool.blocks if b.ref_cnt}
        wrong = sorted({block_id for block_id, _ in counted.items() ^ holder_counts.items()})
        require(not wrong, f"the ref_cnt of blocks {wrong} differs from their number of holders")

    def _check_table(self, sequence: Sequence) -> None:
        table = sequence.block_table
        needed, num_held = self.num_blocks_for(sequence.num_computed_tokens), len(table)
        if sequence.host_block_table:
            require(not table, f"swapped-out sequence {sequence.seq_id} holds blocks {table}")
            num_held = len(sequence.host_block_table)
        has_enough = num_held == needed
        if self.has_reservations:
            # With speculative decoding, `num_computed_tokens` counts one token per step in flight.
            # The count may be too high: a step computes no token for a sequence whose blocks are
            # full. Therefore, `needed` is reliable only if no step is in flight.
            has_enough |= num_held > needed or sequence.num_in_flight_steps > 0
        is_sound = has_enough and len(set(table)) == len(table) and NULL_BLOCK_ID not in table
        require(
            is_sound, f"sequence {sequence.seq_id} needs {needed} distinct blocks, holds {table}"
        )
        cache, size = self.prefix_cache, self.block_size
        for index, block_id in enumerate(table):
            block_tokens = sequence.token_ids[index * size : (index + 1) * size]
            block = self.pool.blocks[block_id]
            salt = sequence.cache_salt
            has_same_tokens = (
                cache is None
                or block.cache_entry is None
                or cache.matches(block, block_tokens, salt)
            )
            require(
                has_same_tokens,
                f"sequence {sequence.seq_id} holds {block}, which is cached with other tokens",
            )
