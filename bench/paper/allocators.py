"""Block managers that allocate KV memory as the systems in the PagedAttention paper do.

Section 6.1: when a request joins the batch, Orca reserves a contiguous range of slots for it. A
buddy allocator finds the range. The length of the range is

    Orca (Max)     the maximum length of a sequence of the model
    Orca (Pow2)    the length of the prompt, plus the output length rounded up to a power of two
    Orca (Oracle)  the length of the prompt, plus the true length of the output

A FasterTransformer-like server reserves the same range as Orca (Max). It admits requests only when
the whole batch has ended; a request that ends earlier keeps its range until then.

Each class is a `BlockManager`, so that scheduler, engine and kernels are the same for all systems.
A range consists of consecutive block ids, and a block table holds as many of these ids as the
computed tokens fill. The true length of an output is the request's `max_tokens`, because these
comparisons ignore end tokens.

Contiguous ranges cannot share blocks. A request therefore has one sequence, and each sample or beam
is a separate request. There is no prefix cache and no swapping.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from jpaged.core.block_manager import NO_CHANGES, BlockChanges, BlockManager
from jpaged.core.block_pool import KVBlock, OutOfBlocksError, require
from jpaged.core.prefix_cache import PrefixCache
from jpaged.core.request import Request, Sequence
from jpaged.observe.pool_report import MemoryReport


class BuddyAllocator:
    """Allocator of ranges of 1, 2, 4, 8, ... blocks. A range starts at a multiple of its length.

    `allocate` takes the shortest free range that fits the request. If several ranges have this
    length, `allocate` takes the range with the lowest start. It splits the range in halves until
    the next half would be too short. `free` joins the two halves of a range if both are free.
    """

    def __init__(self, size: int):
        if size < 1:
            raise ValueError(f"size must be at least 1, got {size}")
        self.size = size
        self._free: list[set[int]] = [set() for _ in range(size.bit_length())]
        start = 0
        for order in reversed(range(size.bit_length())):
            if size >> order & 1:
                self._free[order].add(start)
                start += 1 << order

    @property
    def longest(self) -> int:
        """Number of blocks in the longest range of consecutive blocks, if all blocks are free."""
        return 1 << (self.size.bit_length() - 1)

    @property
    def num_free(self) -> int:
        """Number of free blocks."""
        return sum(len(starts) << order for order, starts in enumerate(self._free))

    def free_ranges(self) -> list[tuple[int, int]]:
        """Return the free ranges as pairs (start, length), sorted by start."""
        return sorted(
            (start, 1 << order) for order, starts in enumerate(self._free) for start in starts
        )

    def fits(self, length: int) -> bool:
        """Return whether a range of `length` blocks, rounded up to a power of two, is free."""
        return any(self._free[_order_of(length) :])

    def allocate(self, length: int) -> int:
        """Allocate a range of `length` blocks, rounded up to a power of two, and return its start.

        Raises:
            OutOfBlocksError: no range is long enough.
        """
        order = _order_of(length)
        found = next((o for o in range(order, len(self._free)) if self._free[o]), None)
        if found is None:
            raise OutOfBlocksError(f"no free range of {length} blocks in a pool of {self.size}")
        start = min(self._free[found])
        self._free[found].remove(start)
        for half in reversed(range(order, found)):
            self._free[half].add(start + (1 << half))
        return start

    def free(self, start: int, length: int) -> None:
        """Free the range at `start` that `allocate(length)` returned."""
        order = _order_of(length)
        while order + 1 < len(self._free):
            buddy = start ^ (1 << order)
            if buddy not in self._free[order]:
                break
            self._free[order].remove(buddy)
            start, order = min(start, buddy), order + 1
        self._free[order].add(start)


def _order_of(length: int) -> int:
    return (length - 1).bit_length()


@dataclass(slots=True)
class Reservation:
    """The range of blocks that a request holds while it is part of the batch.

    Attributes:
        sequence: The only sequence of the request.
        first_block: Id of the first block of the range.
        num_blocks: Number of blocks for `num_slots`. The buddy allocator rounds the number up.
        num_slots: Number of tokens for which memory is reserved.
        has_ended: Whether the sequence has ended. `RequestLevel` keeps the range until all
            sequences of the batch have ended.
    """

    sequence: Sequence
    first_block: int
    num_blocks: int
    num_slots: int
    has_ended: bool = False

    @property
    def num_rounded_blocks(self) -> int:
        """Number of blocks in the range, after the buddy allocator has rounded it up."""
        return 1 << _order_of(self.num_blocks)


class OrcaMax(BlockManager):
    """Orca (Max): each request reserves `max_model_len` slots, even if it needs fewer slots."""

    def __init__(self, num_blocks: int, block_size: int, max_model_len: int):
        super().__init__(num_blocks, block_size)
        self.max_model_len = max_model_len
        self.ranges = BuddyAllocator(num_blocks - 1)
        self.reservations: dict[int, Reservation] = {}  # maps sequence ids to reservations
        most = self.num_blocks_for(max_model_len)
        if 1 << _order_of(most) > self.ranges.longest:
            raise ValueError(
                f"max_model_len={max_model_len} needs {1 << _order_of(most)} contiguous blocks of "
                f"{block_size} slots, but with num_blocks={num_blocks}, at most "
                f"{self.ranges.longest} are contiguous: raise num_blocks, or lower max_model_len"
            )

    def num_reserved_slots(self, request: Request) -> int:
        """Return the number of slots that a request reserves when it joins the batch."""
        return self.max_model_len

    def can_admit(self, first: Sequence, num_blocks: int) -> bool:
        """Return whether the request already has a reservation, or enough contiguous blocks are
        free."""
        if first.seq_id in self.reservations:
            return True
        return self.ranges.fits(self.num_blocks_for(self.num_reserved_slots(first.request)))

    def admit(self, first: Sequence, prefix: Collection[KVBlock] = ()) -> None:
        """Reserve a contiguous range of blocks for the request.

        Raises:
            ValueError: the request has several sequences.
        """
        request = first.request
        if request.num_rows > 1 or prefix:
            raise ValueError(
                f"request {request.request_id!r} has {request.num_rows} sequences or a cached "
                "prefix, but contiguous ranges cannot share blocks: make each sequence a request"
            )
        num_slots = self.num_reserved_slots(request)
        num_blocks = self.num_blocks_for(num_slots)
        first_block = 1 + self.ranges.allocate(num_blocks)
        self.reservations[first.seq_id] = Reservation(first, first_block, num_blocks, num_slots)

    def append(self, sequence: Sequence, num_tokens: int) -> BlockChanges:
        """Add reserved blocks to the sequence's block table, so that `num_tokens` more tokens fit.

        Raises:
            OutOfBlocksError: the reservation of the sequence has too few blocks.
        """
        held, table = self.reservations[sequence.seq_id], sequence.block_table
        end = self.num_blocks_for(sequence.num_computed_tokens + num_tokens)
        if end > held.num_blocks:
            raise OutOfBlocksError(f"{end} blocks needed, but only {held.num_blocks} reserved")
        first = len(table)
        if end == first:
            return NO_CHANGES
        fresh = list(range(held.first_block + first, held.first_block + end))
        self.pool.touch(fresh)
        table += fresh
        return BlockChanges(tuple(enumerate(fresh, first)))

    def free(self, sequence: Sequence) -> None:
        """Free the blocks of a sequence, and the blocks that are reserved for the sequence."""
        super().free(sequence)
        if sequence.seq_id in self.reservations:
            self.release(sequence.seq_id)

    def release(self, seq_id: int) -> None:
        """Free the contiguous range of blocks that is reserved for a sequence."""
        held = self.reservations.pop(seq_id)
        self.ranges.free(held.first_block - 1, held.num_blocks)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Raise ValueError, because contiguous ranges cannot share blocks."""
        raise ValueError("contiguous ranges cannot share blocks between sequences")

    def assign_blocks(
        self, sequence: Sequence, block_table: list[int], prefix: Collection[KVBlock]
    ) -> None:
        """Raise ValueError, because contiguous systems do not swap blocks."""
        raise ValueError("contiguous systems do not swap: set preemption to recompute")

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Check that the free and reserved ranges cover each block exactly once, and that each
        range contains the blocks of its block table."""
        sequences = list(sequences)
        super().check_integrity(sequences)
        taken = [(r.first_block - 1, r.num_rounded_blocks) for r in self.reservations.values()]
        place = 0
        for start, length in sorted(taken + self.ranges.free_ranges()):
            require(start == place, f"ranges overlap or have a gap at block {place + 1}")
            require(start % length == 0, f"the range at block {start + 1} is not aligned")
            place += length
        require(place == self.ranges.size, f"ranges cover {place} of {self.ranges.size} blocks")
        for sequence in sequences:
            if sequence.block_table:
                held = self.reservations[sequence.seq_id]
                own = range(held.first_block, held.first_block + held.num_blocks)
                table = sequence.block_table
                is_own = table == list(own[: len(table)])
                require(is_own, f"sequence {sequence.seq_id} has blocks {table} outside {own}")
        holders = {s.seq_id for s in sequences if s.block_table}
        idle = {i for i, held in self.reservations.items() if not held.has_ended} - holders
        require(not idle, f"sequences {sorted(idle)} have a range but no blocks")


class OrcaPow2(OrcaMax):
    """Orca (Pow2): a request reserves slots for its prompt and for its rounded output length.

    The output length is rounded up to a power of two. A request reserves at most `max_model_len`
    slots.
    """

    def num_reserved_slots(self, request: Request) -> int:
        """Round the output length up to a power of two. Return the sum of the prompt length and the
        rounded output length, at most `max_model_len`."""
        prompt = request.sequences[0].num_prompt_tokens
        output = request.max_num_tokens - prompt
        return min(prompt + (1 << _order_of(output)), self.max_model_len)


class OrcaOracle(OrcaMax):
    """Orca (Oracle): a request reserves slots for its prompt and for its true output length."""

    def num_reserved_slots(self, request: Request) -> int:
        """Return the prompt length plus the true output length."""
        return request.max_num_tokens


class RequestLevel(OrcaMax):
    """A FasterTransformer-like server: it runs one batch of requests after another.

    When all requests of a batch have ended, the next batch admits waiting requests while ranges of
    `max_model_len` slots are free. The prompts of a batch may take several steps. When all
    sequences of the batch decode, no more requests join. A request that ends keeps its range until
    the batch ends.
    """

    def can_admit(self, first: Sequence, num_blocks: int) -> bool:
        """Return whether the request may join the batch, or has already joined it.

        It may join while the batch accepts requests and `max_model_len` contiguous slots are free.
        """
        if first.seq_id in self.reservations:
            return True
        is_closed = bool(self.reservations) and all(map(_has_begun, self.reservations.values()))
        return not is_closed and super().can_admit(first, num_blocks)

    def free(self, sequence: Sequence) -> None:
        """Free the sequence's blocks. If it is the last sequence of the batch, free all ranges."""
        BlockManager.free(self, sequence)
        if sequence.seq_id in self.reservations:
            self.reservations[sequence.seq_id].has_ended = True
        if all(held.has_ended for held in self.reservations.values()):
            for seq_id in list(self.reservations):
                self.release(seq_id)


def _has_begun(held: Reservation) -> bool:
    sequence = held.sequence
    return held.has_ended or sequence.num_computed_tokens > sequence.num_prompt_tokens


SYSTEMS = ("fastertransformer", "orca_max", "orca_pow2", "orca_oracle", "ours")
_RESERVING: dict[str, type[OrcaMax]] = {
    "fastertransformer": RequestLevel,
    "orca_max": OrcaMax,
    "orca_pow2": OrcaPow2,
    "orca_oracle": OrcaOracle,
}


def make_manager(
    system: str, num_blocks: int, block_size: int, max_model_len: int, *, prefix_caching: bool
) -> BlockManager:
    """Return the block manager of one of `SYSTEMS`; `num_blocks` includes the null block.

    Raises:
        ValueError: the system is unknown or has no prefix cache, or `max_model_len` tokens exceed
            the pool.
    """
    if system == "ours":
        cache = PrefixCache(block_size) if prefix_caching else None
        return BlockManager(num_blocks, block_size, cache)
    if system not in _RESERVING:
        raise ValueError(f"system {system!r} is unknown: pass one of {', '.join(SYSTEMS)}")
    if prefix_caching:
        raise ValueError(f"system {system!r} has no prefix cache: leave prefix_caching off")
    return _RESERVING[system](num_blocks, block_size, max_model_len)


class TokenStates(NamedTuple):
    """Number of KV slots in each state, as section 3.1 of the paper defines the states.

    Attributes:
        tokens: Slots with the KV of a token.
        reserved: Empty slots that a request holds and will fill.
        internal: Held slots that are never filled, because the reservation is too long, or because
            the last block is partly empty.
        external: Slots that the buddy allocator adds when it rounds a range up. While a request
            waits for memory, all free slots are also external.
        free: Free slots while no request waits for memory.
    """

    tokens: int
    reserved: int
    internal: int
    external: int
    free: int


def token_states(manager: BlockManager, report: MemoryReport, *, is_full: bool) -> TokenStates:
    """Return how many slots of the pool are in each state now.

    `report` comes from the scheduler. `is_full` is whether a request waits for memory.

    The KV of a sequence's last token is never computed, so that token needs no slot.
    """
    if not isinstance(manager, OrcaMax):
        unused = report.num_free_slots + report.num_cached_slots
        states = report.num_token_slots, report.num_reserved_slots, report.num_fragmented_slots
        return TokenStates(*states, *((unused, 0) if is_full else (0, unused)))
    tokens = reserved = internal = external = 0
    for held in manager.reservations.values():
        sequence = held.sequence
        if held.has_ended or sequence.finish_reason is not None:
            computed = needed = 0
        else:
            computed = sequence.num_computed_tokens
            needed = sequence.request.max_num_tokens - 1
        tokens += computed
        reserved += needed - computed
        internal += held.num_slots - needed
        external += held.num_rounded_blocks * manager.block_size - held.num_slots
    unused = manager.ranges.num_free * manager.block_size
    if is_full:
        return TokenStates(tokens, reserved, internal, external + unused, 0)
    return TokenStates(tokens, reserved, internal, external, unused)
