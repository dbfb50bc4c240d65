"""The prefix cache: find blocks that already hold the KV of a sequence's first tokens.

The KV of a token depends on all tokens before it. A cache entry therefore stands for the tokens of
a full block and for the entry of the preceding block. An entry refers to its parent by the unique
`entry_id`, not by block id: a block id would become wrong when the block is evicted and reused.

A chained xxhash finds candidates. Each candidate is then compared in full (`PrefixCacheEntry.key`).
A hash collision is thus a miss, and no request reads the KV of another prompt.
"""

import secrets
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from struct import Struct

import xxhash

from jpaged.core.block_pool import BlockPool, KVBlock, PrefixCacheEntry, get_cache_entry, require

ROOT_ENTRY_ID = 0
"""Parent id of the entries for a sequence's first block."""

REGISTRATION_ENDED = sys.maxsize
"""Value of `Sequence.num_registered_blocks` that stops the registration of further blocks."""

HashFunction = Callable[[bytes], int]


class PrefixCache:
    """Index of full blocks by their tokens and prefix. The `BlockPool` decides when to evict.

    Args:
        block_size: Number of tokens per block.
        hash_function: Function from the key of an entry to its hash. None: xxh3_64 with a random
            seed, so that clients cannot prepare collisions.

    Attributes:
        num_query_tokens: Number of tokens of the sequences that looked up their prefix on joining
            the batch.
        num_hit_tokens: Number of tokens that these lookups found in the cache.
        num_clears: Number of times the cache was cleared.
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
        """Return the blocks of the longest cached prefix of `token_ids`, at most `max_blocks`."""
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
        """Return the entry for block `index` of `token_ids`, or None if it is not cached.

        Args:
            parent: `entry_id` for block `index - 1`; `ROOT_ENTRY_ID` for index 0.
            index: Index of the block in the sequence.
            token_ids: All tokens of the sequence.
            salt: Cache salt of the sequence.
        """
        at = index * self.block_size
        key = self._make_key(parent, token_ids[at : at + self.block_size], salt)
        cache_entry = self._index.get(self._hash_function(key))
        return cache_entry if cache_entry is not None and cache_entry.key == key else None

    def register(
        self, block: KVBlock, parent: int, token_ids: list[int], salt: str | None = None
    ) -> int | None:
        """Add a full block to the cache, so that other sequences can share the block.

        Args:
            block: Block in use that holds the KV of `token_ids`.
            parent: `entry_id` of the preceding block's entry.
            token_ids: Tokens of this block.
            salt: Cache salt of the sequence.

        Returns:
            `entry_id` of the block's entry, which may be an existing entry with the same tokens.
            None if an entry of other tokens has the same hash; then the block is not cached.
        """
        key = self._make_key(parent, token_ids, salt)
        # Another sequence that shares the block has registered it.
        if block.cache_entry is not None:
            require(block.cache_entry.key == key, f"{block} is registered with other tokens")
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
        """Remove a block from the cache before its content is overwritten.

        Raises:
            IntegrityError: The block is not in the cache.
        """
        cache_entry = get_cache_entry(block)
        del cache_entry.blocks[block.block_id]
        block.cache_entry = None
        if not cache_entry.blocks:
            del self._index[cache_entry.digest]

    def clear(self) -> None:
        """Remove all blocks and entries.

        New entries get new ids, so that they cannot have a removed entry as their parent.
        """
        for cache_entry in self._index.values():
            for block in cache_entry.blocks.values():
                block.cache_entry = None
            cache_entry.blocks.clear()
        self._index.clear()
        self.num_clears += 1

    def matches(self, block: KVBlock, token_ids: list[int], salt: str | None) -> bool:
        """Return whether `block` is registered with `token_ids` and `salt`."""
        cache_entry = block.cache_entry
        return cache_entry is not None and cache_entry.key == self._make_key(
            cache_entry.parent, token_ids, salt
        )

    def check_integrity(self, blocks: Iterable[KVBlock]) -> None:
        """Check that the index lists exactly the registered blocks, and that parents exist.

        Args:
            blocks: All blocks of the pool.

        Raises:
            IntegrityError: The index and the blocks disagree.
        """
        registered = {block.block_id for block in blocks if block.cache_entry is not None}
        known = {ROOT_ENTRY_ID, *(cache_entry.entry_id for cache_entry in self._index.values())}
        require(len(known) == len(self._index) + 1, "two cache entries have the same entry_id")
        indexed: set[int] = set()
        for digest, cache_entry in self._index.items():
            name = f"cache entry {cache_entry.entry_id}"
            require(
                cache_entry.digest == digest, f"{name} is indexed under the hash of another entry"
            )
            require(bool(cache_entry.blocks), f"{name} has no block")
            # Parents are created before their children, so a parent must have a smaller id than its
            # child. Comparing the ids also detects cycles.
            parent = cache_entry.parent
            is_after = parent in known and parent < cache_entry.entry_id
            require(is_after, f"{name} has parent {parent}, which is gone or newer")
            require(indexed.isdisjoint(cache_entry.blocks), "two cache entries list the same block")
            indexed |= cache_entry.blocks.keys()
            for block_id, block in cache_entry.blocks.items():
                is_consistent = block.cache_entry is cache_entry and block.block_id == block_id
                require(is_consistent, f"{name} lists block {block_id}, which has another entry")
        require(
            indexed == registered,
            f"blocks registered or indexed, but not both: {sorted(indexed ^ registered)}",
        )

    def _make_key(self, parent: int, token_ids: list[int], salt: str | None) -> bytes:
        """Return parent, tokens and salt as bytes. Numbers have a fixed width, so different inputs
        give different keys."""
        key = self._layout.pack(parent, *token_ids)
        return key if salt is None else key + salt.encode("utf-8", "surrogatepass")


class Pins:
    """Pinned prefixes. A pin holds a reference to each block of its prefix, so that no block of the
    prefix is evicted.

    Attributes:
        holder_counts: Number of pins that hold each block, by block id.
        num_created: Number of pins created so far.
    """

    def __init__(self, pool: BlockPool):
        self.holder_counts: Counter[int] = Counter()
        self._pool = pool
        self._block_ids_by_pin: dict[int, list[int]] = {}
        self.num_created = 0

    def __len__(self) -> int:
        return len(self._block_ids_by_pin)

    @property
    def num_blocks(self) -> int:
        """Number of pinned blocks. A block that several pins hold counts once."""
        return len(self.holder_counts)

    def num_pinned(self, blocks: Iterable[KVBlock]) -> int:
        """Return how many of `blocks` are pinned."""
        return sum(block.block_id in self.holder_counts for block in blocks)

    def pin(self, blocks: Iterable[KVBlock]) -> int:
        """Pin the blocks of a prefix, in order, and return the id of the pin."""
        block_ids = [block.block_id for block in blocks]
        self._pool.touch(block_ids)
        self.holder_counts.update(block_ids)
        self.num_created += 1
        self._block_ids_by_pin[self.num_created] = block_ids
        return self.num_created

    def unpin(self, pin_id: int) -> None:
        """Release the blocks of a pin, last block first.

        Raises:
            ValueError: No such pin exists.
        """
        if pin_id not in self._block_ids_by_pin:
            raise ValueError(
                f"pin {pin_id!r} does not exist: pass the id of a prefix that is still pinned"
            )
        block_ids = self._block_ids_by_pin.pop(pin_id)
        self.holder_counts -= Counter(block_ids)
        self._pool.free(reversed(block_ids))


def seeded_hash_function(seed: int) -> HashFunction:
    """Return xxh3_64 with `seed`, an integer from 0 to 2**64 - 1."""
    return lambda key: xxhash.xxh3_64_intdigest(key, seed=seed)
