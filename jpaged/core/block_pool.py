"""The pool of KV blocks: free blocks, reference counts and cached content."""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from jpaged.errors import format_count

NULL_BLOCK_ID = 0


class IntegrityError(RuntimeError):
    """The state of blocks, sequences or requests is inconsistent because of a bug in jpaged."""


class OutOfBlocksError(RuntimeError):
    """More blocks were requested than are free. Callers check `num_free_blocks` first."""


def require(condition: bool, message: str) -> None:
    """Raise IntegrityError with `message` if `condition` is false."""
    if not condition:
        raise IntegrityError(message)


@dataclass(slots=True, eq=False)
class PrefixCacheEntry:
    """Entry of the prefix cache for the tokens of one full block and all tokens before them.

    Attributes:
        entry_id: Unique id, which is never reused.
        parent: `entry_id` of the preceding block's entry; `ROOT_ENTRY_ID` for a first block.
        digest: Hash of `key`.
        key: Parent, token ids and salt as bytes.
        blocks: Blocks that hold these tokens, by block id, oldest first.
    """

    entry_id: int
    parent: int
    digest: int
    key: bytes
    blocks: dict[int, "KVBlock"] = field(default_factory=dict)

    @property
    def block(self) -> "KVBlock":
        """Block that a cache hit returns: the oldest of `blocks`."""
        return next(iter(self.blocks.values()))


@dataclass(slots=True, eq=False)
class KVBlock:
    """State of one block of the pool.

    Attributes:
        block_id: Index of the block in the pool.
        ref_cnt: Number of block tables and pins that hold the block.
        cache_entry: Entry of the prefix cache that lists the block; None if no entry does.
    """

    block_id: int
    ref_cnt: int = 0
    cache_entry: PrefixCacheEntry | None = None

    def __str__(self) -> str:
        return f"block {self.block_id} (ref_cnt={self.ref_cnt})"


def get_cache_entry(block: KVBlock) -> PrefixCacheEntry:
    """Return the prefix-cache entry of a block.

    Raises:
        IntegrityError: The block is not in the prefix cache.
    """
    if block.cache_entry is None:
        raise IntegrityError(f"{block} is not registered")
    return block.cache_entry


class BlockCounts(NamedTuple):
    """Numbers of blocks in the pool, without the null block.

    Attributes:
        free: Number of free blocks that are not cached.
        used: Number of blocks that a block table or a pin holds.
        cached: Number of free blocks that the prefix cache can still return.
        total: Number of all blocks: `free + used + cached`.
    """

    free: int
    used: int
    cached: int
    total: int


class BlockPool:
    """Pool of reference-counted blocks. `allocate`, `touch` and `free` take O(1) per block.

    Block 0 is the null block, which padding reads and writes. The pool never allocates block 0. A
    free block keeps its content until it is allocated again.

    Args:
        num_blocks: Number of blocks, including the null block.
        on_evict: Function that the pool calls with each cached block that it allocates again.

    Attributes:
        blocks: All blocks; the index is the block id.
        free_block_queue: Free blocks by id, least recently used first. A dictionary, because a
            cache hit removes a block from the middle.
        num_cached_blocks: Number of free blocks that the prefix cache can still return.
        num_blocks_freed: Number of times that a block lost its last reference.
        num_free_calls: Number of calls of `free`.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[KVBlock], None] | None = None):
        if num_blocks < 2:
            raise ValueError(
                f"num_blocks must be at least 2 (block 0 is the null block), got {num_blocks}"
            )
        self.blocks = [KVBlock(block_id) for block_id in range(num_blocks)]
        self.free_block_queue = OrderedDict((b.block_id, b) for b in self.blocks[1:])
        self.num_cached_blocks = self.num_blocks_freed = self.num_free_calls = 0
        self._on_evict = on_evict

    @property
    def num_usable_blocks(self) -> int:
        """Number of all blocks except the null block."""
        return len(self.blocks) - 1

    @property
    def num_free_blocks(self) -> int:
        """Number of blocks that can be allocated now, including cached blocks."""
        return len(self.free_block_queue)

    def allocate(self, num_blocks: int) -> list[int]:
        """Allocate the least recently used free blocks, and return their ids.

        Raises:
            OutOfBlocksError: Too few blocks are free; no block has been allocated.
        """
        if num_blocks > self.num_free_blocks:
            wanted = format_count(num_blocks, "block")
            raise OutOfBlocksError(f"{wanted} wanted, {self.num_free_blocks} free")
        block_ids = []
        for _ in range(num_blocks):
            block_id, block = self.free_block_queue.popitem(last=False)
            block.ref_cnt = 1
            if block.cache_entry is not None and self._on_evict is not None:
                self.num_cached_blocks -= 1
                self._on_evict(block)
            block_ids.append(block_id)
        return block_ids

    def touch(self, block_ids: Iterable[int]) -> None:
        """Add a reference to each block, and remove free blocks from the free queue."""
        for block_id in block_ids:
            block = self._get_usable_block(block_id)
            if block.ref_cnt == 0:
                if self.free_block_queue.pop(block_id, None) is None:
                    raise IntegrityError(f"block {block_id} is not in the free queue")
                self.num_cached_blocks -= block.cache_entry is not None
            block.ref_cnt += 1

    def free(self, block_ids: Iterable[int]) -> None:
        """Drop a reference to each block, and append unreferenced blocks to the free queue."""
        self.num_free_calls += 1
        for block_id in block_ids:
            block = self._get_usable_block(block_id)
            if block.ref_cnt == 0:
                raise IntegrityError(f"block {block_id} is freed twice")
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                self.free_block_queue[block_id] = block
                self.num_cached_blocks += block.cache_entry is not None
                self.num_blocks_freed += 1

    def free_empty(self, block_ids: Iterable[int]) -> None:
        """Drop a reference to each block, and put unreferenced blocks first in the free queue.

        The blocks contain no tokens, so they are the first to allocate again: cached blocks stay
        cached longer.
        """
        for block_id in block_ids:
            self.free((block_id,))
            if block_id in self.free_block_queue:
                self.free_block_queue.move_to_end(block_id, last=False)

    def _get_usable_block(self, block_id: int) -> KVBlock:
        if not 0 < block_id < len(self.blocks):
            raise IntegrityError(
                f"block {block_id} cannot be held: it is the null block or not in the pool"
            )
        return self.blocks[block_id]

    def block_counts(self) -> BlockCounts:
        """Count the blocks in O(number of blocks), for reports and checks."""
        cached = sum(block.cache_entry is not None for block in self.free_block_queue.values())
        used = sum(block.ref_cnt > 0 for block in self.blocks[1:])
        free = len(self.free_block_queue) - cached
        return BlockCounts(free, used, cached, self.num_usable_blocks)

    def check_integrity(self) -> None:
        """Check that each block except the null block is either free or referenced.

        Raises:
            IntegrityError: The free queue, the reference counts and the number of cached blocks
                disagree.
        """
        queued = {block.block_id for block in self.free_block_queue.values()}
        require(
            queued == self.free_block_queue.keys(),
            "a free block is queued under the id of another block",
        )
        unused = {block.block_id for block in self.blocks[1:] if block.ref_cnt == 0}
        require(
            queued == unused, f"blocks both free and used, or neither: {sorted(queued ^ unused)}"
        )
        require(min(b.ref_cnt for b in self.blocks) == 0, "a reference count is negative")
        require(self.blocks[NULL_BLOCK_ID].ref_cnt == 0, "the null block has a reference")
        cached, counted = self.block_counts().cached, self.num_cached_blocks
        require(
            counted == cached, f"{cached} free blocks are cached, but num_cached_blocks={counted}"
        )
