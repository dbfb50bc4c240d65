"""Reports on the KV pool for people: which request holds which block, and how the slots are used.

Each call computes its report from the block tables, so the engine does no extra work between calls.
A token's slot counts as filled as soon as the step that writes the token's KV is planned.
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
    """State of a block in the pool. Every block has exactly one state."""

    FREE = "free"
    USED = "used"  # a sequence or a prefix pinned by `Engine.pin_prefix` holds the block
    CACHED = "cached"  # free, but the prefix cache keeps the content until the block is reused


@dataclass(frozen=True, slots=True)
class BlockInfo:
    """One block of the pool, as `block_map` reports it.

    Attributes:
        block_id: Id of the block in the pool.
        state: State of the block: free, used or cached.
        ref_cnt: Number of references to the block, from block tables and from prefixes pinned by
            `Engine.pin_prefix`.
        num_filled_slots: Number of slots with the KV of a token. A cached block is completely
            filled. A free block has no filled slots.
        request_ids: Ids of the requests whose sequences hold the block, without duplicates. A
            finished request is listed while a step in flight may write to the block.
        is_pinned: Whether a pinned prefix holds the block.
        content_hash: Hash of the block's content in the prefix cache; None if the block is not in
            the prefix cache.
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
    """One sequence, as `block_tables` reports it.

    Attributes:
        request_id: Id of the request.
        status: Status of the request: "waiting", "running", "preempted" or "swapped"; "finished" if
            the request has ended and the sequence only waits for a step in flight.
        index: Index of the sequence among the samples of the request; 0 for beams.
        block_table: Block ids of the sequence in order; empty while it waits or is swapped out.
        image_table: While the sequence is swapped out, the indices of its blocks in the swap entry
            of the request. Shared blocks have the same index.
        num_prompt_tokens: Number of prompt tokens.
        num_computed_tokens: Number of tokens whose KV is written once all steps launched so far
            have run.
        num_tokens: Number of tokens, including sampled tokens that the host has not read yet.
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
    """Use of the pool's slots, as `memory_report` reports it.

    The report counts five kinds of slots: with tokens, reserved, fragmented, cached and free. The
    five numbers add up to `num_slots`. Figure 2 of the PagedAttention paper distinguishes fewer
    kinds of slots. A slot that several sequences share counts once. External fragmentation, the
    third kind of waste in the paper, does not occur: all blocks have the same size, so a sequence
    can use any free block.

    Attributes:
        block_size: Number of slots in a block.
        num_blocks: Number of blocks that can hold tokens: all except the null block.
        num_token_slots: Slots of used blocks that hold the KV of a token.
        num_reserved_slots: Empty slots of used blocks that a sequence may still fill. A sequence
            that ends before its maximum length leaves some of these slots empty.
        num_fragmented_slots: Empty slots of used blocks that are never filled, which the paper
            calls internal fragmentation. The slots lie after the last token that a sequence can
            have, or belong to a finished sequence that waits for a step in flight.
        num_cached_slots: Slots of free blocks that keep their content in the prefix cache.
        num_free_slots: Slots of free blocks without cached content.
        num_logical_blocks: Number of entries in all block tables. Without sharing, the sequences
            would need this number of blocks.
        num_physical_blocks: Number of different blocks in all block tables.
        num_pinned_blocks: Number of blocks that pinned prefixes hold.
        num_host_blocks: Number of blocks in host memory for swapped-out groups.
        num_used_host_blocks: Number of host blocks in use.
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
        """Number of slots in the pool, without the null block."""
        return self.num_blocks * self.block_size

    @property
    def num_used_slots(self) -> int:
        """Number of slots in used blocks.

        Sequences and prefixes pinned by `Engine.pin_prefix` hold the used blocks.
        """
        return self.num_token_slots + self.num_waste_slots

    @property
    def num_waste_slots(self) -> int:
        """Number of empty slots in used blocks."""
        return self.num_reserved_slots + self.num_fragmented_slots

    @property
    def waste(self) -> float:
        """Fraction of the slots in used blocks that hold no token, 0 to 1."""
        return self.num_waste_slots / self.num_used_slots if self.num_used_slots else 0.0

    @property
    def shared_savings(self) -> float:
        """Fraction of `num_logical_blocks` that sharing saves, 0 to 1.

        Figure 15 of the PagedAttention paper shows this fraction for sequences of one request.
        Here, blocks that different requests share because of a common prefix count too.
        """
        if not self.num_logical_blocks:
            return 0.0
        return 1 - self.num_physical_blocks / self.num_logical_blocks


def block_map(scheduler: "Scheduler") -> dict[int, BlockInfo]:
    """Return every block of the pool except the null block, by ascending block id. Takes time
    proportional to the number of blocks."""
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
    """Return every sequence that is unfinished or waits for a step in flight.

    Takes time proportional to the number of entries in all block tables.
    """
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
    """Return how the slots of the pool are used. Takes time proportional to the number of entries
    in all block tables."""
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
    """Return the state of the pool and of the queues. Takes time proportional to the number of
    sequences.

    Args:
        scheduler: Scheduler of the engine.
        num_unqueued: Number of requests that are not in the scheduler yet, because their grammars
            are being compiled.
        counts: Values of the remaining fields of `EngineStats`, by field name.
    """
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
        **_count_drafts(scheduler),
    )


def _count_drafts(scheduler: "Scheduler") -> dict[str, Any]:
    """Return the fields of `EngineStats` about speculative decoding."""
    speculation = scheduler.speculation
    if speculation is None:
        return {}
    return {
        "num_drafts": speculation.num_verified_rows,
        "num_draft_tokens": speculation.num_draft_tokens,
        "num_accepted_tokens": speculation.num_accepted_tokens,
        "num_verify_steps": speculation.num_verify_steps,
        "num_mixed_steps": speculation.num_mixed_steps,
    }


def num_waste_slots(scheduler: "Scheduler") -> int:
    """Return the number of empty slots in used blocks. Shared slots count once. Takes time
    proportional to the number of sequences."""
    return sum(_count_empty_slots(scheduler).values())


def _iter_partial_blocks(scheduler: "Scheduler") -> Iterator[tuple[Sequence, int, int]]:
    """Yield a tuple (sequence, block id, number of empty slots) for each block with empty slots.

    Without speculative decoding, only the last block of a sequence has empty slots. A block that
    several sequences share is yielded once per sequence, with the same number of empty slots each
    time: a sequence gets a copy of a shared block before it writes to the block.
    """
    size = scheduler.block_manager.block_size
    for sequence in scheduler.sequences.by_id.values():
        num_computed, table = sequence.num_computed_tokens, sequence.block_table
        for index in range(num_computed // size, len(table)):
            yield sequence, table[index], min((index + 1) * size - num_computed, size)


def _count_empty_slots(scheduler: "Scheduler") -> dict[int, int]:
    return {block_id: empty for _, block_id, empty in _iter_partial_blocks(scheduler)}


def _count_reserved_slots(scheduler: "Scheduler") -> int:
    """Return the number of empty slots that a sequence may still fill."""
    reserved = Counter[int]()
    # Number of empty slots that the loop has visited so far, by sequence id.
    num_before: dict[int, int] = {}
    for sequence, block_id, empty in _iter_partial_blocks(scheduler):
        if sequence.finish_reason is None:
            # Subtract 1, because the last token of a sequence is never an input of a step, and so
            # has no KV.
            num_future_tokens = sequence.request.max_num_tokens - 1 - sequence.num_computed_tokens
            num_future_tokens -= num_before.get(sequence.seq_id, 0)
            num_before[sequence.seq_id] = num_before.get(sequence.seq_id, 0) + empty
            reserved[block_id] = max(reserved[block_id], min(empty, max(num_future_tokens, 0)))
    return reserved.total()


def _block_owners(scheduler: "Scheduler") -> dict[int, dict[str, None]]:
    """Return the requests that hold each block. The result maps a block id to a dict whose keys are
    request ids in order of arrival."""
    owners: dict[int, dict[str, None]] = {}
    for sequence in scheduler.sequences.by_id.values():
        for block_id in sequence.block_table:
            owners.setdefault(block_id, {})[sequence.request.request_id] = None
    return owners


def _block_state(block: KVBlock) -> BlockState:
    if block.ref_cnt:
        return BlockState.USED
    return BlockState.FREE if block.cache_entry is None else BlockState.CACHED
