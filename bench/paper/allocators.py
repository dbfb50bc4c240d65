"""The allocators that the PagedAttention paper compares with, each in the block manager's role.

Section 6.1: Orca reserves a contiguous range of slots for a request when it joins the batch, found
by a buddy allocator, and the range is as long as

    Orca (Max)     the model's longest sequence
    Orca (Pow2)    the prompt and the output's length, rounded up to a power of two
    Orca (Oracle)  the prompt and the output's true length

A FasterTransformer-like server reserves as Orca (Max) does, and admits no request until the whole
batch has ended; a request that ends earlier keeps its range until then.

Each is a `BlockManager`, so that scheduler, engine and kernels are the same for all: a range is a
run of consecutive block ids, and a block table holds as many of them as computed tokens fill. The
output's true length is the request's `max_tokens`: end tokens are ignored in these comparisons.

Nothing is shared in contiguous ranges: a request has one sequence, and samples or beams are
requests of their own. They have no prefix cache and no swapping.
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
    """Allocator of ranges of 1, 2, 4 ... blocks; a range starts at a multiple of its length.

    A range is split in halves until the half would be too short. A freed range is joined with its
    other half (its buddy) if both are free. Of the free ranges with the same length, the allocator
    takes the range with the lowest start.
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
        """Length of the longest range in an empty pool of `size` blocks."""
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
        """Whether a range of `length` blocks, rounded up to a power of two, is free."""
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
    """Memory that a request holds from joining the batch until it leaves.

    Attributes:
        sequence: The only sequence of the request.
        first_block: Id of the range's first block.
        num_blocks: Blocks that hold `num_slots`; the buddy allocator rounds them up.
        num_slots: Tokens that were reserved.
        has_ended: Whether the sequence has freed its blocks. The range stays reserved while other
            sequences use blocks in it.
    """

    sequence: Sequence
    first_block: int
    num_blocks: int
    num_slots: int
    has_ended: bool = False

    @property
    def num_rounded_blocks(self) -> int:
        """Number of blocks in the range."""
        return 1 << _order_of(self.num_blocks)


class OrcaMax(BlockManager):
    """Orca (Max): each request reserves `max_model_len` slots, even if it needs fewer slots."""

    def __init__(self, num_blocks: int, block_size: int, max_model_len: int):
        super().__init__(num_blocks, block_size)
        self.max_model_len = max_model_len
        self.ranges = BuddyAllocator(num_blocks - 1)
        self.reservations: dict[int, Reservation] = {}  # by the sequence's id
        most = self.num_blocks_for(max_model_len)
        if 1 << _order_of(most) > self.ranges.longest:
            raise ValueError(
                f"num_blocks={num_blocks} of {block_size} slots have no range of {most} blocks for "
                f"max_model_len={max_model_len}: raise num_blocks, or lower max_model_len"
            )

    def num_reserved_slots(self, request: Request) -> int:
        """Return the number of slots that a request reserves when it joins the batch."""
        return self.max_model_len

    def can_admit(self, first: Sequence, num_blocks: int) -> bool:
        """Return whether the request has a range, or a range for it is free."""
        if first.seq_id in self.reservations:
            return True
        return self.ranges.fits(self.num_blocks_for(self.num_reserved_slots(first.request)))

    def admit(self, first: Sequence, prefix: Collection[KVBlock] = ()) -> None:
        """Reserve the request's range.

        Raises:
            ValueError: the request has several sequences.
        """
        request = first.request
        if request.num_rows > 1 or prefix:
            raise ValueError(
                f"request {request.request_id!r} has {request.num_rows} sequences, and a "
                "contiguous allocator shares nothing: make each a request of its own"
            )
        num_slots = self.num_reserved_slots(request)
        num_blocks = self.num_blocks_for(num_slots)
        first_block = 1 + self.ranges.allocate(num_blocks)
        self.reservations[first.seq_id] = Reservation(first, first_block, num_blocks, num_slots)

    def append(self, sequence: Sequence, num_tokens: int) -> BlockChanges:
        """Return the next blocks of the sequence's range.

        Raises:
            OutOfBlocksError: the range is too short.
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
        """Free the sequence's blocks and its range."""
        super().free(sequence)
        if sequence.seq_id in self.reservations:
            self.release(sequence.seq_id)

    def release(self, seq_id: int) -> None:
        """Free the range of a sequence."""
        held = self.reservations.pop(seq_id)
        self.ranges.free(held.first_block - 1, held.num_blocks)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Raise ValueError: contiguous systems share no blocks."""
        raise ValueError("a contiguous allocator shares nothing between sequences")

    def assign_blocks(
        self, sequence: Sequence, block_table: list[int], prefix: Collection[KVBlock]
    ) -> None:
        """Raise ValueError: contiguous systems swap no blocks."""
        raise ValueError("a contiguous allocator gives ranges, not single blocks")

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Also check that ranges cover each block once and contain their block tables."""
        sequences = list(sequences)
        super().check_integrity(sequences)
        taken = [(r.first_block - 1, r.num_rounded_blocks) for r in self.reservations.values()]
        place = 0
        for start, length in sorted(taken + self.ranges.free_ranges()):
            require(start == place, f"ranges overlap, or one is lost, at block {place + 1}")
            require(start % length == 0, f"the range at block {start + 1} is not aligned")
            place += length
        require(place == self.ranges.size, f"ranges cover {place} of {self.ranges.size} blocks")
        for sequence in sequences:
            if sequence.block_table:
                held = self.reservations[sequence.seq_id]
                own = range(held.first_block, held.first_block + held.num_blocks)
                table = sequence.block_table
                is_own = table == list(own[: len(table)])
                require(is_own, f"sequence {sequence.seq_id} holds {table} outside {own}")
        holders = {s.seq_id for s in sequences if s.block_table}
        idle = {i for i, held in self.reservations.items() if not held.has_ended} - holders
        require(not idle, f"sequences {sorted(idle)} have ranges and no blocks")


class OrcaPow2(OrcaMax):
    """Orca (Pow2): a request reserves its prompt length and its rounded output length.

    The output length is rounded up to a power of two. The maximum reservation is `max_model_len`.
    """

    def num_reserved_slots(self, request: Request) -> int:
        """Return the prompt length plus the output length rounded up to a power of two."""
        prompt = request.sequences[0].num_prompt_tokens
        output = request.max_num_tokens - prompt
        return min(prompt + (1 << _order_of(output)), self.max_model_len)


class OrcaOracle(OrcaMax):
    """Orca (Oracle): a request reserves its prompt length plus its true output length."""

    def num_reserved_slots(self, request: Request) -> int:
        """Return the prompt length plus the true output length."""
        return request.max_num_tokens


class RequestLevel(OrcaMax):
    """A FasterTransformer-like server: it runs one batch of requests after another.

    When all requests of a batch have ended, the next batch takes as many waiting requests as
    reservations of `max_model_len` fit. Prompts may take several steps. The batch closes when all
    of its sequences decode. A request that ends keeps its range until the batch ends.
    """

    def can_admit(self, first: Sequence, num_blocks: int) -> bool:
        """Whether the batch is still open and has room."""
        if first.seq_id in self.reservations:
            return True
        is_closed = bool(self.reservations) and all(map(_has_begun, self.reservations.values()))
        return not is_closed and super().can_admit(first, num_blocks)

    def free(self, sequence: Sequence) -> None:
        """Free the blocks. Free all ranges when the last sequence of the batch has ended."""
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
    """Return the block manager of one of `SYSTEMS`; `num_blocks` counts the null block.

    Raises:
        ValueError: the system is unknown or has no prefix cache, or `max_model_len` tokens exceed
            the pool.
    """
    if system == "ours":
        cache = PrefixCache(block_size) if prefix_caching else None
        return BlockManager(num_blocks, block_size, cache)
    if system not in _RESERVING:
        raise ValueError(f"system {system!r} is unknown: give one of {', '.join(SYSTEMS)}")
    if prefix_caching:
        raise ValueError(f"system {system!r} has no prefix cache: leave prefix_caching off")
    return _RESERVING[system](num_blocks, block_size, max_model_len)


class TokenStates(NamedTuple):
    """Number of KV slots in each state of the paper's section 3.1. The sum is the number of slots.

    Attributes:
        tokens: Slots with the KV of a token.
        reserved: Empty slots that their requests will fill.
        internal: Held slots that are never filled: the reservation is too long, or the last block
            is partly empty.
        external: Slots that the buddy allocator adds to a reservation, and free slots in which a
            waiting request does not fit.
        free: Free slots while no request waits for memory.
    """

    tokens: int
    reserved: int
    internal: int
    external: int
    free: int


def token_states(manager: BlockManager, report: MemoryReport, *, is_full: bool) -> TokenStates:
    """Return the present use of the pool's slots.

    `report` comes from the scheduler. `is_full` is whether a request waits for memory.

    A sequence's last token is never fed back, so slots are reserved up to the token before it.
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
