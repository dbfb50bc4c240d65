"""Test which block ids a block manager finds in its prefix cache."""

import pytest
from core_driver import DIGESTS
from core_plans import queue_of

from jpaged.core.block_manager import BlockManager
from jpaged.core.block_pool import BlockCounts, IntegrityError
from jpaged.core.prefix_cache import REGISTRATION_ENDED, ROOT_ENTRY_ID, PrefixCache
from jpaged.core.request import Sequence

LETTERS = list(range(100))


def make_manager(num_blocks: int = 11, digest: str = "xxh3") -> BlockManager:
    return BlockManager(num_blocks, 4, PrefixCache(4, DIGESTS[digest]))


def join(
    manager: BlockManager,
    token_ids: list[int],
    salt: str | None = None,
    *,
    seq_id: int = 0,
    is_read: bool = True,
) -> Sequence:
    """Admit a sequence with its cached prefix, and compute the other tokens.

    If `is_read` is true, also add the full blocks of the sequence to the prefix cache.
    """
    sequence = Sequence(seq_id, list(token_ids), len(token_ids), cache_salt=salt)
    prefix = manager.find_prefix(sequence)
    num_tokens = len(token_ids) - len(prefix) * manager.block_size
    manager.admit(sequence, prefix)
    manager.append(sequence, num_tokens)
    sequence.num_computed_tokens = len(token_ids)
    if is_read:
        manager.register_full_blocks(sequence, len(token_ids))
    return sequence


def hits(manager: BlockManager, token_ids: list[int], salt: str | None = None) -> list[int]:
    found = manager.find_prefix(Sequence(99, token_ids, len(token_ids), cache_salt=salt))
    return [block.block_id for block in found]


def free(manager: BlockManager, *sequences: Sequence) -> None:
    for sequence in sequences:
        manager.free(sequence)
        sequence.num_computed_tokens = 0
    manager.check_integrity([])


def test_freed_full_blocks_are_found_by_a_lookup():
    manager = make_manager()
    first = join(manager, LETTERS[:10])
    assert first.block_table == [1, 2, 3]
    free(manager, first)
    assert queue_of(manager) == [4, 5, 6, 7, 8, 9, 10, 3, 2, 1]
    assert manager.pool.block_counts() == BlockCounts(free=8, used=0, cached=2, total=10)
    second = join(manager, LETTERS[:12])
    assert second.block_table == [1, 2, 4]
    assert second.num_registered_blocks == 3
    assert queue_of(manager) == [5, 6, 7, 8, 9, 10, 3]
    assert manager.pool.block_counts() == BlockCounts(free=7, used=3, cached=0, total=10)
    manager.check_integrity([second])


def test_cached_prefix_ends_where_the_tokens_differ():
    manager = make_manager()
    free(manager, join(manager, LETTERS[:12]))
    assert hits(manager, [*LETTERS[:8], 99, 99, 99, 99, 12]) == [1, 2]
    assert hits(manager, [*LETTERS[:3], 99, *LETTERS[4:12]]) == []
    assert hits(manager, LETTERS[4:12]) == []  # the same tokens at other positions are no hit


def test_different_salts_share_no_blocks():
    manager = make_manager()
    free(manager, join(manager, LETTERS[:8], "a"))
    assert hits(manager, LETTERS[:9], "a") == [1, 2]
    assert hits(manager, LETTERS[:9], "b") == hits(manager, LETTERS[:9]) == []
    free(manager, join(manager, LETTERS[:8]))
    assert hits(manager, LETTERS[:9]) == [3, 4]
    assert hits(manager, LETTERS[:9], "a") == [1, 2]
    assert hits(manager, LETTERS[:9], "\ud800") == []


def test_hash_collision_is_a_miss():
    manager = make_manager(digest="constant")
    first = join(manager, LETTERS[:8])
    # The second block has the same hash as the first block, so it cannot be registered.
    assert first.num_registered_blocks == REGISTRATION_ENDED
    other = join(manager, LETTERS[50:58], seq_id=1)
    assert other.block_table == [3, 4]
    manager.check_integrity([first, other])
    assert hits(manager, LETTERS[:9]) == [1]
    assert hits(manager, LETTERS[50:59]) == []
    free(manager, other, first)
    assert hits(manager, LETTERS[:9]) == [1]


def test_blocks_after_an_evicted_parent_are_not_found():
    manager = make_manager(4)
    child = join(manager, LETTERS[:8])
    # A sequence frees its last block first, but this test frees block 1 before block 2.
    manager.pool.free([1])
    child.block_table = [2]
    manager.pool.free_block_queue.move_to_end(1)
    other = Sequence(1, LETTERS[50:58], 8)
    manager.append(other, 8)
    assert other.block_table == [3, 1]
    other.num_computed_tokens = 8
    manager.register_full_blocks(other, 8)
    assert hits(manager, [*LETTERS[54:58], *LETTERS[4:9]]) == []
    assert hits(manager, LETTERS[:9]) == []
    with pytest.raises(IntegrityError, match="which is gone or newer"):
        manager.prefix_cache.check_integrity(manager.pool.blocks)  # pyright: ignore


def test_cache_hit_returns_the_oldest_block_with_the_same_tokens():
    manager = make_manager(6)
    first, second = (join(manager, LETTERS[:8], seq_id=i, is_read=False) for i in range(2))
    for sequence in (first, second):
        manager.register_full_blocks(sequence, 8)
    assert hits(manager, LETTERS[:9]) == [1, 2]
    manager.free(first)
    taken = join(manager, LETTERS[50:62], seq_id=2, is_read=False)
    assert taken.block_table == [5, 2, 1]
    assert hits(manager, LETTERS[:9]) == [3, 4]
    manager.check_integrity([second, taken])


def test_tokens_that_the_host_has_not_read_from_the_device_are_not_cached():
    manager = make_manager()
    sequence = join(manager, LETTERS[:12], is_read=False)
    manager.register_full_blocks(sequence, 7)
    assert hits(manager, LETTERS[:13]) == [1]
    del sequence.token_ids[10:]  # the host has not read the last two tokens yet
    manager.register_full_blocks(sequence, 12)
    assert hits(manager, LETTERS[:13]) == [1, 2]
    manager.free(sequence)
    manager.register_full_blocks(sequence, 12)  # without blocks
    assert hits(manager, LETTERS[:13]) == [1, 2]


def test_running_sequences_add_no_blocks_to_the_prefix_cache_after_a_reset():
    manager = make_manager()
    free(manager, join(manager, LETTERS[:8]))
    running = join(manager, LETTERS[50:58], seq_id=1)
    manager.reset_prefix_cache([running])
    assert hits(manager, LETTERS[:9]) == hits(manager, LETTERS[50:59]) == []
    assert manager.pool.block_counts() == BlockCounts(free=8, used=2, cached=0, total=10)
    running.token_ids += LETTERS[58:62]
    manager.append(running, 4)
    running.num_computed_tokens += 4
    manager.register_full_blocks(running, 12)
    assert hits(manager, LETTERS[50:63]) == []
    manager.check_integrity([running])
    free(manager, running)
    free(manager, join(manager, LETTERS[50:58]))
    assert len(hits(manager, LETTERS[50:59])) == 2


def test_pinned_blocks_are_never_evicted():
    manager = make_manager(5)
    free(manager, join(manager, LETTERS[:8]))
    prefix = manager.find_prefix(Sequence(1, LETTERS[:9], 9))
    pin, again = manager.pins.pin(prefix), manager.pins.pin(prefix[:1])
    assert (manager.pins.num_blocks, manager.pins.num_pinned(prefix)) == (2, 2)
    assert manager.pool.block_counts() == BlockCounts(free=2, used=2, cached=0, total=4)
    assert manager.num_free_blocks == 2
    taken = join(manager, LETTERS[50:58], seq_id=1)
    assert taken.block_table == [3, 4]
    assert hits(manager, LETTERS[:9]) == [1, 2]
    with pytest.raises(ValueError, match="2 prefixes are pinned: unpin them"):
        manager.reset_prefix_cache([taken])
    manager.check_integrity([taken])
    manager.pins.unpin(pin)
    manager.check_integrity([taken])
    assert queue_of(manager) == [2]
    manager.pins.unpin(again)
    assert queue_of(manager) == [2, 1]
    with pytest.raises(ValueError, match=f"pin {pin} does not exist"):
        manager.pins.unpin(pin)
    free(manager, taken)


def test_two_prefix_caches_hash_the_same_tokens_differently():
    digests = set()
    for cache in (PrefixCache(4), PrefixCache(4)):
        manager = BlockManager(5, 4, cache)
        join(manager, LETTERS[:4])
        content = cache.find_next_entry(ROOT_ENTRY_ID, 0, LETTERS[:4])
        assert content is not None
        digests.add(content.digest)
    assert len(digests) == 2


def test_prefix_cache_of_another_block_size_is_refused():
    with pytest.raises(ValueError, match="prefix_cache has block_size=8"):
        BlockManager(5, 4, PrefixCache(8))


def test_check_integrity_names_the_sequences_that_hold_a_wrong_block():
    manager = make_manager()
    sequence = join(manager, LETTERS[:9])
    sequence.token_ids[0] = 99
    with pytest.raises(IntegrityError, match=r"holds block 1 \(ref_cnt=1\), which is cached with"):
        manager.check_integrity([sequence])


@pytest.mark.parametrize(
    "damage",
    [
        "sequence.token_ids[0] = 99",
        "sequence.cache_salt = 'other'",
        "one.cache_entry = None",
        "one.cache_entry, two.cache_entry = two.cache_entry, one.cache_entry",
        "one.cache_entry.parent = one.cache_entry.entry_id",
        "one.cache_entry.digest += 1",
        "one.cache_entry.entry_id = two.cache_entry.entry_id",
        "manager.pool.num_cached_blocks += 1",
    ],
)
def test_check_integrity_finds_a_damaged_prefix_cache(damage: str):
    manager = make_manager()
    sequence = join(manager, LETTERS[:12])
    manager.check_integrity([sequence])
    one, two = manager.pool.blocks[1:3]
    exec(damage, {"manager": manager, "sequence": sequence, "one": one, "two": two})
    with pytest.raises(IntegrityError):
        manager.check_integrity([sequence])


def test_register_and_unregister_refuse_wrong_blocks():
    manager = make_manager()
    join(manager, LETTERS[:4])
    cache = manager.prefix_cache
    assert cache is not None
    with pytest.raises(IntegrityError, match=r"block 2 \(ref_cnt=0\) is not registered"):
        cache.unregister(manager.pool.blocks[2])
    assert cache.register(manager.pool.blocks[1], 0, LETTERS[:4]) == 1
    with pytest.raises(IntegrityError, match=r"block 1 \(ref_cnt=1\) is registered with other"):
        cache.register(manager.pool.blocks[1], 0, LETTERS[1:5])
