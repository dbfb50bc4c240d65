"""Prefixes that somebody wants kept: references that no request holds."""

from collections import Counter
from collections.abc import Iterable

from jpaged.core.block_pool import BlockPool, KVBlock


class Pins:
    """Holds a reference on each block of pinned prefixes, so that they are never evicted."""

    def __init__(self, pool: BlockPool):
        self._pool = pool
        self._blocks_of: dict[int, list[int]] = {}
        self._holders: Counter[int] = Counter()
        self._num_made = 0

    def __len__(self) -> int:
        """Pins held."""
        return len(self._blocks_of)

    @property
    def num_blocks(self) -> int:
        """Blocks that pins hold, each counted once."""
        return len(self._holders)

    @property
    def holders(self) -> Counter[int]:
        """How many pins hold each block, by block id."""
        return self._holders

    def num_pinned(self, blocks: Iterable[KVBlock]) -> int:
        """How many of `blocks` a pin holds already."""
        return sum(block.block_id in self._holders for block in blocks)

    def pin(self, blocks: Iterable[KVBlock]) -> int:
        """Hold the blocks of a prefix, in order; returns the pin's number."""
        block_ids = [block.block_id for block in blocks]
        self._pool.touch(block_ids)
        self._holders.update(block_ids)
        self._num_made += 1
        self._blocks_of[self._num_made] = block_ids
        return self._num_made

    def unpin(self, pin_id: int) -> None:
        """Let the blocks go, tail first; ValueError if there is no such pin."""
        if pin_id not in self._blocks_of:
            raise ValueError(f"there is no pin {pin_id!r}: it was never made, or is unpinned")
        block_ids = self._blocks_of.pop(pin_id)
        self._holders -= Counter(block_ids)
        self._pool.free(reversed(block_ids))
