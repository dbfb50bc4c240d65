"""Test which block ids the block manager assigns, copies and frees."""

import pytest
from core_plans import queue_of

from jpaged.core.block_manager import NO_CHANGES, BlockChanges, BlockManager
from jpaged.core.block_pool import IntegrityError, OutOfBlocksError, get_cache_entry
from jpaged.core.prefix_cache import PrefixCache
from jpaged.core.request import Sequence


def make(seq_id: int = 0) -> Sequence:
    return Sequence(seq_id, [1], 1)


def grow(manager: BlockManager, sequence: Sequence, num_tokens: int) -> BlockChanges:
    """Append tokens to a sequence, and mark these tokens as computed."""
    changes = manager.append(sequence, num_tokens)
    sequence.num_computed_tokens += num_tokens
    return changes


def test_append_allocates_a_block_at_each_block_boundary():
    manager, sequence = BlockManager(6, 4), make()
    grow(manager, sequence, 3)
    assert grow(manager, sequence, 1) is NO_CHANGES
    assert sequence.block_table == [1]
    assert grow(manager, sequence, 1) == BlockChanges(((1, 2),), ())
    assert grow(manager, sequence, 8) == BlockChanges(((2, 3), (3, 4)), ())
    assert sequence.block_table == [1, 2, 3, 4]
    manager.check_integrity([sequence])


def test_append_without_enough_free_blocks_changes_nothing():
    manager, sequence = BlockManager(3, 4), make()
    grow(manager, sequence, 6)
    assert manager.num_new_blocks(sequence, 2) == 0 == manager.num_free_blocks
    with pytest.raises(OutOfBlocksError):
        manager.append(sequence, 3)
    manager.check_integrity([sequence])


def test_last_block_of_a_freed_sequence_is_reused_before_its_first_block():
    manager, sequence, other = BlockManager(6, 4), make(0), make(1)
    grow(manager, sequence, 12)
    grow(manager, other, 1)
    manager.free(sequence)
    assert sequence.block_table == []
    assert queue_of(manager) == [5, 3, 2, 1]
    # Block 5 was never used, so the pool allocates it first. The freed blocks follow, the last
    # block of the sequence first. A cached prefix thus loses its end before its beginning.
    assert manager.pool.allocate(3) == [5, 3, 2]


def test_fork_shares_every_block():
    manager, parent, child = BlockManager(6, 4), make(0), make(1)
    grow(manager, parent, 6)
    manager.fork(parent, child)
    child.num_computed_tokens = 6
    assert child.block_table == [1, 2]
    assert child.block_table is not parent.block_table
    assert [block.ref_cnt for block in manager.pool.blocks] == [0, 2, 2, 0, 0, 0]
    manager.check_integrity([parent, child])


def test_append_to_a_shared_partly_filled_block_copies_it_on_write():
    manager, parent, child = BlockManager(8, 4), make(0), make(1)
    grow(manager, parent, 6)
    manager.fork(parent, child)
    child.num_computed_tokens = 6
    assert manager.num_new_blocks(child, 1) == 1
    assert grow(manager, child, 1) == BlockChanges(((1, 3),), ((2, 3),))
    assert (parent.block_table, child.block_table) == ([1, 2], [1, 3])
    # Now only the parent holds block 2, so the parent writes to the block without copying it.
    assert grow(manager, parent, 1) is NO_CHANGES
    manager.check_integrity([parent, child])


def test_admit_and_fork_refuse_a_sequence_that_already_has_blocks():
    manager, sequence = BlockManager(8, 4), make()
    grow(manager, sequence, 1)
    with pytest.raises(ValueError, match="already has blocks"):
        manager.admit(sequence)
    with pytest.raises(ValueError, match="already has blocks"):
        manager.fork(make(1), sequence)


def test_block_size_must_be_positive():
    with pytest.raises(ValueError, match="block_size must be at least 1, got 0"):
        BlockManager(8, 0)


@pytest.mark.parametrize("table", [[], [1, 1], [1, 0], [1, 2, 3], [1, 3]])
def test_check_integrity_finds_wrong_block_tables(table: list[int]):
    manager, sequence = BlockManager(8, 4), make()
    grow(manager, sequence, 5)
    sequence.block_table = table
    with pytest.raises(IntegrityError):
        manager.check_integrity([sequence])


def test_check_integrity_finds_a_wrong_reference_count():
    manager, sequence = BlockManager(8, 4), make()
    grow(manager, sequence, 5)
    with pytest.raises(IntegrityError, match="differs from their number of holders"):
        manager.check_integrity([])


def test_cached_prefix_can_be_extended_after_an_evicted_block_is_computed_again():
    manager, sequence = BlockManager(8, 2, PrefixCache(2)), Sequence(0, [1, 2, 3, 4, 5, 6], 6)
    grow(manager, sequence, 4)
    manager.register_full_blocks(sequence, 4)
    contents = [get_cache_entry(block) for block in manager.find_prefix(sequence)]
    assert len(contents) == 2
    assert not manager.can_extend_prefix(contents, sequence, 6)
    manager.free(sequence)
    sequence.num_computed_tokens = 0
    taken = manager.pool.allocate(6)  # this overwrites all cached blocks except the first
    assert not manager.can_extend_prefix(contents, sequence, 6)
    assert len(contents) == 1
    manager.pool.free(taken)
    again = make(1)
    again.token_ids = [1, 2, 3, 4]
    manager.admit(again, manager.find_prefix(again))
    again.num_computed_tokens = 2
    grow(manager, again, 2)
    manager.register_full_blocks(again, 4)
    assert manager.can_extend_prefix(contents, sequence, 6)
    assert not manager.can_extend_prefix(contents, sequence, 3)  # the maximum number of tokens
