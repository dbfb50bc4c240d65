"""Accounts of the pool for people: who holds which block, and what the slots are used for.

All of it is counted afresh at each call, from the block tables; nothing is kept up to date
for it. A token's KV counts from the moment the step that writes it is planned.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from jpaged.core.block_pool import KVBlock
from jpaged.core.request import Sequence
from jpaged.observe.statistics import EngineStats

if TYPE_CHECKING:
    from jpaged.core.scheduler import Scheduler


class BlockState(StrEnum):
    """What a block is to the pool: always just one of these."""

    FREE = "free"
    USED = "used"  # held by a sequence or a pin
    CACHED = "cached"  # no sequence or pin holds it, its content kept until the block is needed


@dataclass(frozen=True, slots=True)
class BlockInfo:
    """One block, from `block_map`.

    Attributes:
        block_id: Its place in the pool.
        state: Free, used or cached.
        ref_cnt: Block tables and pins that hold it.
        num_filled_slots: Slots with the KV of a token that can still be read: of a used block
            and of a cached one, which is full; 0 of a free one.
        request_ids: Whose sequences hold it, each once; also requests that are over, as long as a
            step in flight may write there.
        is_pinned: Whether a pinned prefix holds it.
        content_hash: Of what the prefix cache knows it to hold; None if it does not know it.
    """

    block_id: int
    state: BlockState
    ref_cnt: int
    num_filled_slots: int
    request_ids: tuple[str, ...]
    is_pinned: bool
    content_hash: int | None


@dataclass(frozen=True, slots=True)
class SequenceInfo:
    """One sequence, from `block_tables`.

    Attributes:
        request_id: Whose it is.
        status: Of its request: "waiting", "running", "preempted", "swapped", or "finished" of one
            that only waits for a step in flight.
        index: Its place among the request's samples; 0 for beams.
        block_table: Its blocks, in order; none while it waits or is swapped out.
        image_table: While it is swapped out its blocks' places in its request's image in host
            memory, in order; shared ones have one place.
        num_prompt_tokens: Tokens it began with.
        num_computed_tokens: Tokens whose KV steps launched so far write.
        num_tokens: All its tokens, those still on the device counted.
    """

    request_id: str
    status: str
    index: int
    block_table: tuple[int, ...]
    image_table: tuple[int, ...]
    num_prompt_tokens: int
    num_computed_tokens: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """What the pool's slots are used for, from `memory_report`.

    The five kinds of slots are those of figure 2 of the PagedAttention paper, with what it had no
    need to tell apart, and add up to `num_slots`. A slot that several sequences share counts once.
    External fragmentation, the paper's third kind of waste, is none: all blocks are of one size,
    so each free one is of use to any sequence that needs a block.

    Attributes:
        block_size: Slots in a block.
        num_blocks: Blocks that can hold tokens: all but the null block.
        num_token_slots: Slots of used blocks that hold the KV of a token.
        num_reserved_slots: Empty slots of used blocks that a sequence may still fill, since its
            tokens may come to be so many. That is the paper's reservation, seen beforehand: a
            sequence that ends earlier than it must will not have filled them.
        num_fragmented_slots: Empty slots of used blocks that are never filled, the paper's internal
            fragmentation: they lie past the last token that a sequence can have, or what holds
            them is over and only waits for a step in flight.
        num_cached_slots: Slots of blocks that are free, but kept for their prefix until needed.
        num_free_slots: Slots of blocks that hold nothing.
        num_logical_blocks: Entries of all block tables: the blocks it would take not to share.
        num_physical_blocks: Blocks that block tables hold, each once.
        num_pinned_blocks: Blocks that pinned prefixes hold, whether a sequence does or not.
        num_host_blocks: Blocks of host memory for swapped-out groups.
        num_used_host_blocks: Those of them that hold one.
    """

    block_size: int
    num_blocks: int
    num_token_slots: int
    num_reserved_slots: int
    num_fragmented_slots: int
    num_cached_slots: int
    num_free_slots: int
    num_logical_blocks: int
    num_physical_blocks: int
    num_pinned_blocks: int
    num_host_blocks: int
    num_used_host_blocks: int

    @property
    def num_slots(self) -> int:
        """All slots of the pool but the null block's."""
        return self.num_blocks * self.block_size

    @property
    def num_used_slots(self) -> int:
        """Slots of blocks that sequences and pins hold."""
        return self.num_token_slots + self.num_waste_slots

    @property
    def num_waste_slots(self) -> int:
        """Slots of used blocks without a token: less than one block a sequence."""
        return self.num_reserved_slots + self.num_fragmented_slots

    @property
    def waste(self) -> float:
        """Share of the used slots without a token, 0 to 1."""
        return self.num_waste_slots / self.num_used_slots if self.num_used_slots else 0.0

    @property
    def shared_savings(self) -> float:
        """Blocks saved by sharing, of those it would take not to share, 0 to 1: figure 15 of the
        PagedAttention paper. Sharing between requests, by a common prefix, counts too."""
        if not self.num_logical_blocks:
            return 0.0
        return 1 - self.num_physical_blocks / self.num_logical_blocks


def block_map(scheduler: "Scheduler") -> dict[int, BlockInfo]:
    """Every block of the pool but the null block, by id and in its order. O(blocks)."""
    manager = scheduler.block_manager
    owners = _block_owners(scheduler)
    empty = _count_empty_slots(scheduler)
    pinned = manager.pins.holder_counts
    infos = {}
    for block in manager.pool.blocks[1:]:
        block_id, state = block.block_id, _block_state(block)
        filled = manager.block_size - empty.get(block_id, 0)
        infos[block_id] = BlockInfo(
            block_id,
            state,
            block.ref_cnt,
            0 if state is BlockState.FREE else filled,
            tuple(owners.get(block_id, ())),
            block_id in pinned,
            None if block.cache_entry is None else block.cache_entry.digest,
        )
    return infos


def block_tables(scheduler: "Scheduler") -> list[SequenceInfo]:
    """Every sequence that is unfinished or draining. O(entries of all block tables)."""
    return [
        SequenceInfo(
            sequence.request.request_id,
            sequence.request.status.value,
            sequence.index,
            tuple(sequence.block_table),
            tuple(sequence.host_block_table),
            sequence.num_prompt_tokens,
            sequence.num_computed_tokens,
            sequence.num_tokens,
        )
        for sequence in scheduler.sequences.by_id.values()
    ]


def memory_report(scheduler: "Scheduler") -> MemoryReport:
    """What the pool's slots are used for. O(entries of all block tables)."""
    manager, swap_space = scheduler.block_manager, scheduler.swap_space
    pool, size = manager.pool, manager.block_size
    tables = [sequence.block_table for sequence in scheduler.sequences.by_id.values()]
    num_waste, num_reserved = num_waste_slots(scheduler), _count_reserved_slots(scheduler)
    num_used = pool.num_usable_blocks - pool.num_free_blocks
    return MemoryReport(
        block_size=size,
        num_blocks=pool.num_usable_blocks,
        num_token_slots=num_used * size - num_waste,
        num_reserved_slots=num_reserved,
        num_fragmented_slots=num_waste - num_reserved,
        num_cached_slots=pool.num_cached_blocks * size,
        num_free_slots=(pool.num_free_blocks - pool.num_cached_blocks) * size,
        num_logical_blocks=sum(map(len, tables)),
        num_physical_blocks=len(set().union(*tables)),
        num_pinned_blocks=manager.pins.num_blocks,
        num_host_blocks=swap_space.policy.num_host_blocks,
        num_used_host_blocks=swap_space.num_used_host_blocks,
    )


def engine_stats(scheduler: "Scheduler", num_unqueued: int, counts: dict[str, Any]) -> EngineStats:
    """Return the state of the pool and of the queues. O(sequences). `num_unqueued` requests wait
    outside the scheduler. `counts` holds the other fields of `EngineStats` by name."""
    manager, swap_space = scheduler.block_manager, scheduler.swap_space
    pool, cache = manager.pool, manager.prefix_cache
    return EngineStats(
        **counts,
        block_size=manager.block_size,
        num_blocks=pool.num_usable_blocks,
        num_free_blocks=manager.num_free_blocks,
        num_waste_slots=num_waste_slots(scheduler),
        num_running=len(scheduler.running),
        num_running_seqs=scheduler.running.num_rows,
        num_waiting=len(scheduler.waiting) + num_unqueued,
        num_swapped=scheduler.num_swapped,
        prefix_cache_queries=0 if cache is None else cache.num_query_tokens,
        prefix_cache_hits=0 if cache is None else cache.num_hit_tokens,
        num_cached_blocks=pool.num_cached_blocks,
        num_pinned_blocks=manager.pins.num_blocks,
        num_host_blocks=swap_space.policy.num_host_blocks,
        num_used_host_blocks=swap_space.num_used_host_blocks,
    )


def num_waste_slots(scheduler: "Scheduler") -> int:
    """Slots of used blocks that no token fills, shared ones once. O(sequences)."""
    return sum(_count_empty_slots(scheduler).values())


def _iter_last_blocks(scheduler: "Scheduler") -> Iterator[tuple[Sequence, int, int]]:
    """Each sequence that holds blocks, the last of them, and how many of its slots are empty.

    Only last blocks have any, and all who share one agree: a fork has computed what its parent has,
    and to write there is to have a copy.
    """
    size = scheduler.block_manager.block_size
    for sequence in scheduler.sequences.by_id.values():
        if sequence.block_table:
            yield sequence, sequence.block_table[-1], -sequence.num_computed_tokens % size


def _count_empty_slots(scheduler: "Scheduler") -> dict[int, int]:
    return {block_id: empty for _, block_id, empty in _iter_last_blocks(scheduler)}


def _count_reserved_slots(scheduler: "Scheduler") -> int:
    """Empty slots that one at least of those who hold the block may fill."""
    reserved = Counter[int]()
    for sequence, block_id, empty in _iter_last_blocks(scheduler):
        if sequence.finish_reason is None:
            # The last token is never fed back, so it has no KV.
            num_future_tokens = sequence.request.max_num_tokens - 1 - sequence.num_computed_tokens
            reserved[block_id] = max(reserved[block_id], min(empty, num_future_tokens))
    return reserved.total()


def _block_owners(scheduler: "Scheduler") -> dict[int, dict[str, None]]:
    """The requests that hold each block, each once, in the order of arrival."""
    owners: dict[int, dict[str, None]] = {}
    for sequence in scheduler.sequences.by_id.values():
        for block_id in sequence.block_table:
            owners.setdefault(block_id, {})[sequence.request.request_id] = None
    return owners


def _block_state(block: KVBlock) -> BlockState:
    if block.ref_cnt:
        return BlockState.USED
    return BlockState.FREE if block.cache_entry is None else BlockState.CACHED
