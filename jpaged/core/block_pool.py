"""The pool of KV blocks: who is free, who is in use, and how often."""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from jpaged.errors import format_count

NULL_BLOCK_ID = 0


class IntegrityError(RuntimeError):
    """The account of blocks, sequences or requests does not add up: a bug, never bad input."""


class OutOfBlocksError(RuntimeError):
    """More blocks were asked for than are free; callers ask how many are free first."""


def require(condition: bool, message: str) -> None:
    """Raise IntegrityError with `message` unless `condition`."""
    if not condition:
        raise IntegrityError(message)


@dataclass(slots=True, eq=False)
class PrefixCacheEntry:
    """What a full block holds, as the prefix cache knows it; see there."""

    entry_id: int
    parent: int  # content_id of the block before it
    digest: int
    key: bytes  # parent, token ids and salt, spelled out
    blocks: dict[int, "KVBlock"] = field(default_factory=dict)  # all that hold it, oldest first

    @property
    def block(self) -> "KVBlock":
        """The block that serves it."""
        return next(iter(self.blocks.values()))


@dataclass(slots=True, eq=False)
class KVBlock:
    """One block's books. `cache_entry` is set while the prefix cache may serve its KV to others."""

    block_id: int
    ref_cnt: int = 0
    cache_entry: PrefixCacheEntry | None = None

    def __str__(self) -> str:
        return f"block {self.block_id} (ref_cnt={self.ref_cnt})"


def get_cache_entry(block: KVBlock) -> PrefixCacheEntry:
    """The content of a block that the prefix cache knows; IntegrityError if it does not."""
    if block.cache_entry is None:
        raise IntegrityError(f"{block} is not registered")
    return block.cache_entry


class BlockCounts(NamedTuple):
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
    keeps its content until it is handed out; `on_evict` is then told to forget it.

    Attributes:
        blocks: All of them, by id.
        free_block_queue: The free ones by id, the least recently used first. A prefix hit takes a
            block out of the middle.
        num_cached_blocks: Free blocks whose content may still serve a prefix hit.
        num_freed: Times a block lost its last reference, since the start.
        num_returns: Calls of `free`, after which others may be the only holders of a block.
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
        """Blocks that can be handed out: all but the null block."""
        return len(self.blocks) - 1

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be handed out now."""
        return len(self.free_block_queue)

    def allocate(self, num_blocks: int) -> list[int]:
        """Hand out the least recently used free blocks; OutOfBlocksError if too few are free."""
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
        """Add a reference to each block, taking it out of the free queue if it lies there."""
        for block_id in block_ids:
            block = self._get_usable_block(block_id)
            if block.ref_cnt == 0:
                if self.free_block_queue.pop(block_id, None) is None:
                    raise IntegrityError(f"block {block_id} is not in the free queue")
                self.num_cached_blocks -= block.cache_entry is not None
            block.ref_cnt += 1

    def free(self, block_ids: Iterable[int]) -> None:
        """Drop a reference to each block; those without any queue up in the order given."""
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

    def _get_usable_block(self, block_id: int) -> KVBlock:
        if not 0 < block_id < len(self.blocks):
            raise IntegrityError(f"block {block_id} is never handed out")
        return self.blocks[block_id]

    def block_counts(self) -> BlockCounts:
        """Count the blocks by looking at each (O(blocks): for reports and checks)."""
        cached = sum(block.cache_entry is not None for block in self.free_block_queue.values())
        used = sum(block.ref_cnt > 0 for block in self.blocks[1:])
        free = len(self.free_block_queue) - cached
        return BlockCounts(free, used, cached, self.num_usable_blocks)

    def check_integrity(self) -> None:
        """Prove that every block but the null block is either queued or referenced, not both."""
        queued = {block.block_id for block in self.free_block_queue.values()}
        require(queued == self.free_block_queue.keys(), "a block is queued under another's id")
        unused = {block.block_id for block in self.blocks[1:] if block.ref_cnt == 0}
        require(queued == unused, f"blocks free and used, or lost: {sorted(queued ^ unused)}")
        require(min(b.ref_cnt for b in self.blocks) == 0, "a reference count is negative")
        require(self.blocks[NULL_BLOCK_ID].ref_cnt == 0, "the null block was handed out")
        cached, counted = self.block_counts().cached, self.num_cached_blocks
        require(counted == cached, f"{cached} blocks cached, {counted} counted")
