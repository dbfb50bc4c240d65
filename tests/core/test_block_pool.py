"""Test which block ids the block pool allocates and frees."""

import pytest

from jpaged.core.block_pool import BlockCounts, BlockPool, IntegrityError, OutOfBlocksError


def queue_of(pool: BlockPool) -> list[int]:
    pool.check_integrity()
    return list(pool.free_block_queue)


def test_blocks_are_allocated_in_order_without_the_null_block():
    pool = BlockPool(5)
    assert pool.allocate(2) == [1, 2]
    assert pool.allocate(2) == [3, 4]
    assert queue_of(pool) == []
    assert pool.block_counts() == BlockCounts(free=0, used=4, cached=0, total=4)


def test_freed_blocks_are_allocated_last():
    pool = BlockPool(6)
    pool.allocate(3)
    pool.free([2, 1])
    assert queue_of(pool) == [4, 5, 2, 1]
    assert pool.allocate(3) == [4, 5, 2]


def test_block_is_free_only_after_its_last_reference_is_dropped():
    pool = BlockPool(4)
    pool.allocate(1)
    pool.touch([1])
    pool.free([1])
    assert queue_of(pool) == [2, 3]
    pool.free([1])
    assert queue_of(pool) == [2, 3, 1]


def test_allocating_more_blocks_than_are_free_raises_and_changes_nothing():
    pool = BlockPool(4)
    pool.allocate(1)
    with pytest.raises(OutOfBlocksError, match="3 blocks wanted, 2 free"):
        pool.allocate(3)
    assert queue_of(pool) == [2, 3]
    pool.allocate(2)
    with pytest.raises(OutOfBlocksError, match="1 block wanted, 0 free"):
        pool.allocate(1)


@pytest.mark.parametrize("block_id", [0, -1, 4])
def test_null_block_and_unknown_blocks_cannot_be_freed_or_touched(block_id: int):
    pool = BlockPool(4)
    with pytest.raises(IntegrityError, match="is the null block or not in"):
        pool.free([block_id])
    with pytest.raises(IntegrityError, match="is the null block or not in"):
        pool.touch([block_id])


def test_block_pool_raises_if_a_block_is_freed_twice_or_missing_from_the_free_queue():
    pool = BlockPool(4)
    pool.allocate(1)
    pool.free([1])
    with pytest.raises(IntegrityError, match="block 1 is freed twice"):
        pool.free([1])
    del pool.free_block_queue[3]
    with pytest.raises(IntegrityError, match="block 3 is not in the free queue"):
        pool.touch([3])


def test_pool_of_only_the_null_block_is_refused():
    with pytest.raises(ValueError, match="num_blocks must be at least 2"):
        BlockPool(1)


@pytest.mark.parametrize(
    "damage",
    [
        "pool.blocks[3].ref_cnt = 1",
        "pool.blocks[1].ref_cnt = -1",
        "pool.blocks[0].ref_cnt = 1",
        "del pool.free_block_queue[3]",
        "pool.free_block_queue[0] = pool.blocks[0]",
        "pool.free_block_queue[3] = pool.blocks[2]",
        "pool.num_cached_blocks += 1",
    ],
)
def test_check_integrity_finds_a_damaged_block_pool(damage: str):
    pool = BlockPool(6)
    pool.allocate(1)
    pool.check_integrity()
    exec(damage, {"pool": pool})
    with pytest.raises(IntegrityError):
        pool.check_integrity()
