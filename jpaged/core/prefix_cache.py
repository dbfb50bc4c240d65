"""The prefix cache: finds the block that already holds the KV a sequence is about to compute.

The KV of a token depends on all tokens before it, so a full block's content is named by its token
ids and by the *content* of the block before it. Each content gets a number of its own the first
time it is registered, never given again; that number, not a block id, is what a following block
remembers. A block that was evicted and filled with something else thus vouches for no other block.

A chained xxhash finds candidates; every hit is then compared in full (`BlockContent.key`), so that
a collision is a miss and no request ever reads another prompt's KV.
"""

import secrets
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from struct import Struct

import xxhash

from jpaged.core.block_pool import BlockContent, BlockPool, KVBlock, registered_content, require

ROOT_CONTENT = 0
"""Stands for the parent of a sequence's first block."""

CHAIN_ENDED = sys.maxsize
"""As `Sequence.num_chained_blocks`: no further block of the sequence is registered."""

Digest = Callable[[bytes], int]


class PrefixCache:
    """An index of full blocks by content; the pool decides which of them live.

    `block_size` is the pool's. `digest` maps a key to its hash; None for xxh3_64 with a random seed
    of this process, so that no client can prepare collisions.

    Attributes:
        num_query_tokens: Tokens of sequences that asked for their prefix on joining the batch.
        num_hit_tokens: Those of them that were found.
        num_clears: Times all blocks were forgotten.
    """

    def __init__(self, block_size: int, digest: Digest | None = None):
        self.block_size = block_size
        self.num_query_tokens = self.num_hit_tokens = self.num_clears = 0
        self._digest = digest or seeded_digest(secrets.randbits(64))
        self._layout = Struct(f"<q{block_size}i")
        self._index: dict[int, BlockContent] = {}
        self._num_named = 0

    def find_chain(
        self, token_ids: list[int], max_blocks: int, salt: str | None = None
    ) -> list[KVBlock]:
        """The blocks that hold the longest known prefix, at most `max_blocks` of them."""
        chain: list[KVBlock] = []
        parent = ROOT_CONTENT
        for index in range(max_blocks):
            content = self.find_next(parent, index, token_ids, salt)
            if content is None:
                break
            chain.append(content.block)
            parent = content.content_id
        return chain

    def find_next(
        self, parent: int, index: int, token_ids: list[int], salt: str | None = None
    ) -> BlockContent | None:
        """The content of the `index`-th block of `token_ids`, if known, after content `parent`."""
        at = index * self.block_size
        key = self._key(parent, token_ids[at : at + self.block_size], salt)
        content = self._index.get(self._digest(key))
        return content if content is not None and content.key == key else None

    def register(
        self, block: KVBlock, parent: int, token_ids: list[int], salt: str | None = None
    ) -> int | None:
        """Let `block`, in use and filled with the KV of `token_ids` after `parent`, serve others.

        Returns its content's number, which the block of another sequence may have had before; None
        if another content has the hash already, which keeps it.
        """
        key = self._key(parent, token_ids, salt)
        if block.content is not None:  # by another sequence that shares it
            require(block.content.key == key, f"{block} is registered with other content")
            return block.content.content_id
        digest = self._digest(key)
        content = self._index.get(digest)
        if content is None:
            self._num_named += 1
            content = BlockContent(self._num_named, parent, digest, key)
            self._index[digest] = content
        elif content.key != key:
            return None
        content.blocks[block.block_id] = block
        block.content = content
        return content.content_id

    def forget(self, block: KVBlock) -> None:
        """`block` is about to hold something else; IntegrityError if it was not registered."""
        content = registered_content(block)
        del content.blocks[block.block_id]
        block.content = None
        if not content.blocks:
            del self._index[content.digest]

    def clear(self) -> None:
        """Forget every block. Numbers go on, so that no old chain finds its way back in."""
        for content in self._index.values():
            for block in content.blocks.values():
                block.content = None
            content.blocks.clear()
        self._index.clear()
        self.num_clears += 1

    def holds(self, block: KVBlock, token_ids: list[int], salt: str | None) -> bool:
        """Whether a registered block's content is that of `token_ids` and `salt`."""
        content = block.content
        return content is not None and content.key == self._key(content.parent, token_ids, salt)

    def check_integrity(self, blocks: Iterable[KVBlock]) -> None:
        """Prove that the index holds just the registered ones of `blocks`, each after a parent."""
        registered = {block.block_id for block in blocks if block.content is not None}
        known = {ROOT_CONTENT, *(content.content_id for content in self._index.values())}
        require(len(known) == len(self._index) + 1, "two contents have one number")
        indexed: set[int] = set()
        for digest, content in self._index.items():
            name = f"content {content.content_id}"
            require(content.digest == digest, f"{name} is indexed under another hash")
            require(bool(content.blocks), f"{name} is in no block")
            # Numbers rise along a chain, so that none can come back to itself.
            parent = content.parent
            is_after = parent in known and parent < content.content_id
            require(is_after, f"{name} follows content {parent}, which is gone or came later")
            require(indexed.isdisjoint(content.blocks), "a block has two contents")
            indexed |= content.blocks.keys()
            for block_id, block in content.blocks.items():
                is_there = block.content is content and block.block_id == block_id
                require(is_there, f"{name} is not what block {block_id} says it holds")
        require(indexed == registered, f"blocks wrongly indexed: {sorted(indexed ^ registered)}")

    def _key(self, parent: int, token_ids: list[int], salt: str | None) -> bytes:
        """The content itself, spelled out: the numbers have a fixed width, the salt follows."""
        key = self._layout.pack(parent, *token_ids)
        return key if salt is None else key + salt.encode("utf-8", "surrogatepass")


class Pins:
    """Holds a reference on each block of pinned prefixes, so that they are never evicted.

    Attributes:
        holders: How many pins hold each block, by block id.
        num_made: Pins made so far.
    """

    def __init__(self, pool: BlockPool):
        self.holders: Counter[int] = Counter()
        self._pool = pool
        self._blocks_of: dict[int, list[int]] = {}
        self.num_made = 0

    def __len__(self) -> int:
        """Pins held."""
        return len(self._blocks_of)

    @property
    def num_blocks(self) -> int:
        """Blocks that pins hold, each counted once."""
        return len(self.holders)

    def num_pinned(self, blocks: Iterable[KVBlock]) -> int:
        """How many of `blocks` a pin holds already."""
        return sum(block.block_id in self.holders for block in blocks)

    def pin(self, blocks: Iterable[KVBlock]) -> int:
        """Hold the blocks of a prefix, in order; returns the pin's number."""
        block_ids = [block.block_id for block in blocks]
        self._pool.touch(block_ids)
        self.holders.update(block_ids)
        self.num_made += 1
        self._blocks_of[self.num_made] = block_ids
        return self.num_made

    def unpin(self, pin_id: int) -> None:
        """Let the blocks go, tail first; ValueError if there is no such pin."""
        if pin_id not in self._blocks_of:
            raise ValueError(f"there is no pin {pin_id!r}: it was never made, or is unpinned")
        block_ids = self._blocks_of.pop(pin_id)
        self.holders -= Counter(block_ids)
        self._pool.free(reversed(block_ids))


def seeded_digest(seed: int) -> Digest:
    """xxh3_64 with a seed from 0 to 2**64 - 1."""
    return lambda key: xxhash.xxh3_64_intdigest(key, seed=seed)
