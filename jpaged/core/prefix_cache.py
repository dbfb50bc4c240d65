"""The prefix cache: finds the block that already holds the KV a sequence is about to compute.

The KV of a token depends on all tokens before it, so a full block's content is named by its token
ids and by the *content* of the block before it. Each content gets a number of its own the first
time it is registered, never given again; that number, not a block id, is what a following block
remembers. A block that was evicted and filled with something else thus vouches for no other block.

A chained xxhash finds candidates; every hit is then compared in full (`PrefixCacheEntry.key`), so that
a collision is a miss and no request ever reads another prompt's KV.
"""

import secrets
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from struct import Struct

import xxhash

from jpaged.core.block_pool import BlockPool, KVBlock, PrefixCacheEntry, get_cache_entry, require

ROOT_ENTRY_ID = 0
"""Stands for the parent of a sequence's first block."""

REGISTRATION_ENDED = sys.maxsize
"""As `Sequence.num_registered_blocks`: no further block of the sequence is registered."""

HashFunction = Callable[[bytes], int]


class PrefixCache:
    """An index of full blocks by content; the pool decides which of them live.

    `block_size` is the pool's. `hash_function` maps a key to its hash; None for xxh3_64 with a random seed
    of this process, so that no client can prepare collisions.

    Attributes:
        num_query_tokens: Tokens of sequences that asked for their prefix on joining the batch.
        num_hit_tokens: Those of them that were found.
        num_clears: Times all blocks were forgotten.
    """

    def __init__(self, block_size: int, hash_function: HashFunction | None = None):
        self.block_size = block_size
        self.num_query_tokens = self.num_hit_tokens = self.num_clears = 0
        self._hash_function = hash_function or seeded_hash_function(secrets.randbits(64))
        self._layout = Struct(f"<q{block_size}i")
        self._index: dict[int, PrefixCacheEntry] = {}
        self._last_entry_id = 0

    def find_longest_prefix(
        self, token_ids: list[int], max_blocks: int, salt: str | None = None
    ) -> list[KVBlock]:
        """The blocks that hold the longest known prefix, at most `max_blocks` of them."""
        chain: list[KVBlock] = []
        parent = ROOT_ENTRY_ID
        for index in range(max_blocks):
            cache_entry = self.find_next_entry(parent, index, token_ids, salt)
            if cache_entry is None:
                break
            chain.append(cache_entry.block)
            parent = cache_entry.entry_id
        return chain

    def find_next_entry(
        self, parent: int, index: int, token_ids: list[int], salt: str | None = None
    ) -> PrefixCacheEntry | None:
        """The content of the `index`-th block of `token_ids`, if known, after content `parent`."""
        at = index * self.block_size
        key = self._make_key(parent, token_ids[at : at + self.block_size], salt)
        cache_entry = self._index.get(self._hash_function(key))
        return cache_entry if cache_entry is not None and cache_entry.key == key else None

    def register(
        self, block: KVBlock, parent: int, token_ids: list[int], salt: str | None = None
    ) -> int | None:
        """Let `block`, in use and filled with the KV of `token_ids` after `parent`, serve others.

        Returns its content's number, which the block of another sequence may have had before; None
        if another content has the hash already, which keeps it.
        """
        key = self._make_key(parent, token_ids, salt)
        if block.cache_entry is not None:  # by another sequence that shares it
            require(block.cache_entry.key == key, f"{block} is registered with other content")
            return block.cache_entry.entry_id
        digest = self._hash_function(key)
        cache_entry = self._index.get(digest)
        if cache_entry is None:
            self._last_entry_id += 1
            cache_entry = PrefixCacheEntry(self._last_entry_id, parent, digest, key)
            self._index[digest] = cache_entry
        elif cache_entry.key != key:
            return None
        cache_entry.blocks[block.block_id] = block
        block.cache_entry = cache_entry
        return cache_entry.entry_id

    def unregister(self, block: KVBlock) -> None:
        """`block` is about to hold something else; IntegrityError if it was not registered."""
        cache_entry = get_cache_entry(block)
        del cache_entry.blocks[block.block_id]
        block.cache_entry = None
        if not cache_entry.blocks:
            del self._index[cache_entry.digest]

    def clear(self) -> None:
        """Forget every block. Numbers go on, so that no old chain finds its way back in."""
        for cache_entry in self._index.values():
            for block in cache_entry.blocks.values():
                block.cache_entry = None
            cache_entry.blocks.clear()
        self._index.clear()
        self.num_clears += 1

    def matches(self, block: KVBlock, token_ids: list[int], salt: str | None) -> bool:
        """Whether a registered block's content is that of `token_ids` and `salt`."""
        cache_entry = block.cache_entry
        return cache_entry is not None and cache_entry.key == self._make_key(
            cache_entry.parent, token_ids, salt
        )

    def check_integrity(self, blocks: Iterable[KVBlock]) -> None:
        """Prove that the index holds just the registered ones of `blocks`, each after a parent."""
        registered = {block.block_id for block in blocks if block.cache_entry is not None}
        known = {ROOT_ENTRY_ID, *(cache_entry.entry_id for cache_entry in self._index.values())}
        require(len(known) == len(self._index) + 1, "two contents have one number")
        indexed: set[int] = set()
        for digest, cache_entry in self._index.items():
            name = f"content {cache_entry.entry_id}"
            require(cache_entry.digest == digest, f"{name} is indexed under another hash")
            require(bool(cache_entry.blocks), f"{name} is in no block")
            # Numbers rise along a chain, so that none can come back to itself.
            parent = cache_entry.parent
            is_after = parent in known and parent < cache_entry.entry_id
            require(is_after, f"{name} follows content {parent}, which is gone or came later")
            require(indexed.isdisjoint(cache_entry.blocks), "a block has two contents")
            indexed |= cache_entry.blocks.keys()
            for block_id, block in cache_entry.blocks.items():
                is_there = block.cache_entry is cache_entry and block.block_id == block_id
                require(is_there, f"{name} is not what block {block_id} says it holds")
        require(indexed == registered, f"blocks wrongly indexed: {sorted(indexed ^ registered)}")

    def _make_key(self, parent: int, token_ids: list[int], salt: str | None) -> bytes:
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
        self.holder_counts: Counter[int] = Counter()
        self._pool = pool
        self._block_ids_by_pin: dict[int, list[int]] = {}
        self.num_created = 0

    def __len__(self) -> int:
        """Pins held."""
        return len(self._block_ids_by_pin)

    @property
    def num_blocks(self) -> int:
        """Blocks that pins hold, each counted once."""
        return len(self.holder_counts)

    def num_pinned(self, blocks: Iterable[KVBlock]) -> int:
        """How many of `blocks` a pin holds already."""
        return sum(block.block_id in self.holder_counts for block in blocks)

    def pin(self, blocks: Iterable[KVBlock]) -> int:
        """Hold the blocks of a prefix, in order; returns the pin's number."""
        block_ids = [block.block_id for block in blocks]
        self._pool.touch(block_ids)
        self.holder_counts.update(block_ids)
        self.num_created += 1
        self._block_ids_by_pin[self.num_created] = block_ids
        return self.num_created

    def unpin(self, pin_id: int) -> None:
        """Let the blocks go, tail first; ValueError if there is no such pin."""
        if pin_id not in self._block_ids_by_pin:
            raise ValueError(f"there is no pin {pin_id!r}: it was never made, or is unpinned")
        block_ids = self._block_ids_by_pin.pop(pin_id)
        self.holder_counts -= Counter(block_ids)
        self._pool.free(reversed(block_ids))


def seeded_hash_function(seed: int) -> HashFunction:
    """xxh3_64 with a seed from 0 to 2**64 - 1."""
    return lambda key: xxhash.xxh3_64_intdigest(key, seed=seed)
