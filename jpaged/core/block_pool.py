"""The pool of KV blocks: who is free, who is in use, and how often."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

NULL_BLOCK_ID = 0


class IntegrityError(RuntimeError):
    """The account of blocks, sequences or requests does not add up: a bug, never bad input."""


class OutOfBlocksError(RuntimeError):
    """More blocks were asked for than are free; callers ask how many are free first."""


def require(holds: bool, message: str) -> None:
    """Raise IntegrityError with `message` unless `holds`."""
    if not holds:
        raise IntegrityError(message)


@dataclass(slots=True, eq=False)
class BlockContent:
    """What a full block holds, as the prefix cache knows it; see there."""

    content_id: int
    parent: int  # content_id of the block before it
    digest: int
    key: bytes  # parent, token ids and salt, spelled out
    blocks: dict[int, "KVBlock"] = field(default_factory=dict)  # all that hold it, oldest first

    @property
    def block(self) -> "KVBlock":
        """The block that serves it."""
        return next(iter(self.blocks.values()))


class KVBlock:
    """One block's books: its reference count, its place in the free queue, its content.

    `content` is set while the prefix cache may serve the block's KV to others.
    """

    __slots__ = ("block_id", "content", "next_free", "prev_free", "ref_cnt")

    def __init__(self, block_id: int):
        self.block_id = block_id
        self.ref_cnt = 0
        self.content: BlockContent | None = None
        self.prev_free: KVBlock | None = None
        self.next_free: KVBlock | None = None

    def __repr__(self) -> str:
        return f"KVBlock({self.block_id}, ref_cnt={self.ref_cnt})"


def registered_content(block: KVBlock) -> BlockContent:
    """The content of a block that the prefix cache knows; IntegrityError if it does not."""
    if block.content is None:
        raise IntegrityError(f"{block} is not registered")
    return block.content


class FreeBlockQueue:
    """Free blocks from the least to the most recently used: a doubly linked list.

    The links lie in the blocks themselves, so that taking a block out of the middle (a prefix hit
    on a freed block) costs no search and no memory. A sentinel closes the ring: no end is special.
    """

    def __init__(self, blocks: Iterable[KVBlock]):
        self.num_blocks = 0
        self._end = end = KVBlock(-1)
        end.prev_free = end.next_free = end
        for block in blocks:
            self.append(block)

    def append(self, block: KVBlock) -> None:
        """Put a block at the tail, to be taken last."""
        end = self._end
        last = end.prev_free
        block.prev_free, block.next_free = last, end
        last.next_free = end.prev_free = block  # pyright: ignore[reportOptionalMemberAccess]
        self.num_blocks += 1

    def remove(self, block: KVBlock) -> None:
        """Take a block out of wherever it stands; IntegrityError if it stands nowhere."""
        before, after = block.prev_free, block.next_free
        if before is None or after is None:
            raise IntegrityError(f"block {block.block_id} is not in the free queue")
        before.next_free, after.prev_free = after, before
        block.prev_free = block.next_free = None
        self.num_blocks -= 1

    def popleft(self) -> KVBlock:
        """Take the least recently used block; OutOfBlocksError if there is none."""
        block = self._end.next_free
        if block is None or block is self._end:
            raise OutOfBlocksError("the free block queue is empty")
        self.remove(block)
        return block

    def __iter__(self) -> Iterator[KVBlock]:
        block = self._end.next_free
        while block is not None and block is not self._end:
            yield block
            block = block.next_free

    def __reversed__(self) -> Iterator[KVBlock]:
        block = self._end.prev_free
        while block is not None and block is not self._end:
            yield block
            block = block.prev_free

    def check_integrity(self, limit: int) -> None:
        """Prove that the links, both ways, hold `num_blocks` <= `limit` distinct blocks."""
        forward = [block.block_id for block in islice(self, limit + 1)]
        backward = [block.block_id for block in islice(reversed(self), limit + 1)]
        require(len(set(forward)) == len(forward), "a block is queued twice")
        require(forward == backward[::-1], "the free queue's links disagree")
        require(len(forward) == self.num_blocks, f"{len(forward)} blocks queued, not counted so")


class BlockCensus(NamedTuple):
    """Where the pool's blocks are, the null block left out; the first three add up to the last.

    `cached` blocks are free ones whose content may still serve a prefix hit.
    """

    free: int
    used: int
    cached: int
    total: int


class BlockPool:
    """`num_blocks` blocks with reference counts; allocate, touch and free cost O(1) a block.

    Block 0 is the null block: padding reads and writes it, so it is never handed out. A free block
    keeps its content until it is handed out; `evict` is then told to forget it.

    Attributes:
        num_cached_blocks: Free blocks whose content may still serve a prefix hit.
        num_freed: Times a block lost its last reference, since the start.
    """

    def __init__(self, num_blocks: int, evict: Callable[[KVBlock], None] | None = None):
        if num_blocks < 2:
            raise ValueError(
                f"num_blocks must be at least 2 (block 0 is the null block), got {num_blocks}"
            )
        self.blocks = [KVBlock(block_id) for block_id in range(num_blocks)]
        self.free_block_queue = FreeBlockQueue(self.blocks[1:])
        self.num_cached_blocks = self.num_freed = 0
        self._evict = evict

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that can be handed out: all but the null block."""
        return len(self.blocks) - 1

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be handed out now."""
        return self.free_block_queue.num_blocks

    def allocate(self, num_blocks: int) -> list[int]:
        """Hand out the least recently used free blocks; OutOfBlocksError if too few are free."""
        if num_blocks > self.num_free_blocks:
            raise OutOfBlocksError(f"{num_blocks} blocks wanted, {self.num_free_blocks} free")
        taken = [self.free_block_queue.popleft() for _ in range(num_blocks)]
        for block in taken:
            block.ref_cnt = 1
            if block.content is not None and self._evict is not None:
                self.num_cached_blocks -= 1
                self._evict(block)
        return [block.block_id for block in taken]

    def touch(self, block_ids: Iterable[int]) -> None:
        """Add a reference to each block, taking it out of the free queue if it lies there."""
        for block_id in block_ids:
            block = self._handed_out(block_id)
            if block.ref_cnt == 0:
                self.free_block_queue.remove(block)
                self.num_cached_blocks -= block.content is not None
            block.ref_cnt += 1

    def free(self, block_ids: Iterable[int]) -> None:
        """Drop a reference to each block; those without any queue up in the order given."""
        for block_id in block_ids:
            block = self._handed_out(block_id)
            if block.ref_cnt == 0:
                raise IntegrityError(f"block {block_id} is freed twice")
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                self.free_block_queue.append(block)
                self.num_cached_blocks += block.content is not None
                self.num_freed += 1

    def _handed_out(self, block_id: int) -> KVBlock:
        if not 0 < block_id < len(self.blocks):
            raise IntegrityError(f"block {block_id} is never handed out")
        return self.blocks[block_id]

    def census(self) -> BlockCensus:
        """Count the blocks by looking at each (O(blocks): for reports and checks)."""
        cached = sum(block.content is not None for block in self.free_block_queue)
        used = sum(block.ref_cnt > 0 for block in self.blocks[1:])
        free = self.free_block_queue.num_blocks - cached
        return BlockCensus(free, used, cached, self.num_usable_blocks)

    def check_integrity(self) -> None:
        """Prove that every block but the null block is either queued or referenced, not both."""
        self.free_block_queue.check_integrity(self.num_usable_blocks)
        queued = {block.block_id for block in self.free_block_queue}
        unused = {block.block_id for block in self.blocks[1:] if block.ref_cnt == 0}
        require(queued == unused, f"blocks free and used, or lost: {sorted(queued ^ unused)}")
        require(min(b.ref_cnt for b in self.blocks) == 0, "a reference count is negative")
        require(self.blocks[NULL_BLOCK_ID].ref_cnt == 0, "the null block was handed out")
        census = self.census()
        require(census.free + census.used + census.cached == census.total, f"{census} is off")
        counted = self.num_cached_blocks
        require(counted == census.cached, f"{census.cached} blocks cached, {counted} counted")
