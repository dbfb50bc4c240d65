"""Rebuild the state of the block pool from the changes that a `PoolWatch` reports, and compare it
with the pool."""

from weakref import WeakSet

import pytest
from core_driver import driver_of, make_request, make_scheduler
from core_swapped import SWAP
from covering import num_examples
from hypothesis import settings
from hypothesis.stateful import invariant
from pool_replica import PoolReplica
from test_random_groups import Tally, Work
from test_scheduler_machine import MACHINE_SETTINGS, SchedulerMachine

from jpaged.core.scheduler import Scheduler
from jpaged.observe.pool_changes import CACHED, PoolChanges, PoolWatch
from jpaged.observe.pool_report import BlockState, block_map


class Replica(PoolReplica):
    """Apply the changes that a `PoolWatch` reports to a copy of the pool's state, and compare the
    copy with the pool."""

    def __init__(self, scheduler: Scheduler, num_token_blocks: int = 10**6):
        super().__init__()
        self.scheduler = scheduler
        self.watch = PoolWatch(scheduler, num_token_blocks)

    def update(self) -> PoolChanges:
        changes = self.watch.look()
        self.take(changes)
        return changes

    def check(self) -> None:
        self._check_blocks()
        self._check_sequences()
        self._check_tokens()
        assert not self.watch.look(), "changes without a step"

    def _check_blocks(self) -> None:
        infos = block_map(self.scheduler)
        for block_id, info in infos.items():
            count = CACHED if info.state is BlockState.CACHED else info.ref_cnt
            assert self.counts.get(block_id, 0) == count
            known_hash = 0 if info.content_hash is None else info.content_hash % 2**32
            assert self.hashes.get(block_id, 0) == known_hash
        assert self.pinned == [block_id for block_id, info in infos.items() if info.is_pinned]
        assert (
            sum(n for _, n in self.swap_entries) == self.scheduler.swap_space.num_used_host_blocks
        )

    def _check_sequences(self) -> None:
        holders = {
            seq_id: sequence
            for seq_id, sequence in self.scheduler.sequences.by_id.items()
            if sequence.block_table or sequence.host_block_table
        }
        assert self.tables == {i: sequence.block_table for i, sequence in holders.items()}
        assert self.computed == {i: s.num_computed_tokens for i, s in holders.items()}
        for seq_id, sequence in holders.items():
            seen = self.sequences[seq_id]
            assert (seen.request_id, seen.index) == (sequence.request.request_id, sequence.index)
            assert seen.num_host_blocks == len(sequence.host_block_table)
            status = "finished" if sequence.finish_reason else sequence.request.status
            assert seen.status == status

    def _check_tokens(self) -> None:
        size = self.scheduler.block_manager.block_size
        for sequence in self.scheduler.sequences.by_id.values():
            known = sequence.token_ids[: sequence.num_computed_tokens]
            for index, block_id in enumerate(sequence.block_table):
                expected = known[index * size : (index + 1) * size]
                assert self.tokens.get(block_id, [])[: len(expected)] == expected


def test_pool_watch_reports_all_changes_by_a_request():
    driver = driver_of(make_request("1", 6, max_tokens=4), num_blocks=6, digest="xxh3")
    replica = Replica(driver.scheduler)
    assert not replica.update()
    driver.step()
    changes = replica.update()
    [table] = changes.tables
    assert (table.request_id, table.num_kept, table.new_blocks) == ("1", 0, (1, 2))
    assert (table.status, table.num_prompt_tokens, table.num_computed_tokens) == ("running", 6, 6)
    assert changes.blocks[:2] == ([1, 2], [1, 1])
    driver.step()
    changes = replica.update()
    assert (changes.tables, changes.grown) == ([], {1: 7})
    driver.run()
    changes = replica.update()
    assert changes.gone == [1]
    # Block 3 was allocated and freed between two updates, so it is not reported.
    assert changes.blocks[:2] == ([1, 2], [CACHED, CACHED])
    replica.check()


def test_pool_watch_reports_copy_on_write():
    driver = driver_of(make_request("1", 6, max_tokens=9, n=2), num_blocks=9)
    replica = Replica(driver.scheduler)
    kept, copies = [], {}
    while driver.scheduler.has_unfinished_requests:
        if plan := driver.step():
            replica.watch.note(plan)
        changes = replica.update()
        kept += [(t.num_kept, len(t.new_blocks)) for t in changes.tables]
        copies |= changes.copies
    # One block table keeps its first block, and a copy replaces its second block.
    assert (1, 1) in kept
    assert copies == {3: 2}
    replica.check()


def test_pool_watch_reports_a_block_table_that_shrinks_and_grows_again():
    driver = driver_of(make_request("1", 12, max_tokens=9), num_blocks=9)
    manager, replica = driver.scheduler.block_manager, Replica(driver.scheduler)
    driver.step()
    replica.update()
    [sequence] = driver.scheduler.sequences.by_id.values()
    sequence.num_computed_tokens = 3  # pretend that the step computed only 3 tokens
    manager.trim(sequence)
    manager.pool.allocate(2)  # another sequence takes the blocks
    manager.append(sequence, 9)
    sequence.num_computed_tokens = 12
    replica.update()
    replica.check()
    assert replica.tables[1] == sequence.block_table == [1, 4, 5]


def test_pool_watch_reports_the_tokens_of_a_few_blocks_per_call():
    driver = driver_of(make_request("1", 12, max_tokens=2), num_blocks=9, digest="xxh3")
    driver.step()
    watch = PoolWatch(driver.scheduler, num_token_blocks=2)
    tokens = [watch.look().tokens for _ in range(3)]
    assert [len(blocks) for blocks in tokens] == [2, 1, 0]
    merged = tokens[0] | tokens[1]
    assert [*merged[1], *merged[2], *merged[3]] == [(1 + i) % 11 for i in range(12)]
    assert not PoolWatch(driver.scheduler).look().tokens


def test_closed_or_deleted_pool_watch_leaves_the_set_of_watches():
    watches = WeakSet[PoolWatch]()
    first, second, third = (PoolWatch(make_scheduler(), watches=watches) for _ in range(3))
    first.close()
    first.close()
    assert set(watches) == {second, third}
    del second
    assert set(watches) == {third}
    third.close()
    assert set(watches) == set()


def test_pool_watch_reports_a_pinned_block_with_new_content():
    """The test unpins, evicts and pins a block between two updates, so that only the content of the
    block has changed."""
    driver = driver_of(make_request("1", 5, max_tokens=1), num_blocks=3, digest="xxh3")
    manager, replica = driver.scheduler.block_manager, Replica(driver.scheduler)
    driver.run()
    pin = manager.pins.pin([manager.pool.blocks[1]])
    replica.update()
    manager.pins.unpin(pin)
    before = replica.hashes[1]
    for name in "23":
        driver.add(make_request(name, 5, max_tokens=1))
        driver.run()
    manager.pins.pin([manager.pool.blocks[1]])
    replica.update()
    replica.check()
    assert 0 != replica.hashes[1] != before


@pytest.mark.parametrize("seed", range(40))
def test_pool_copy_updated_with_reported_changes_matches_the_pool(seed: int):
    work = Work(seed, Tally())
    replica = Replica(work.driver.scheduler)
    step = work.step

    def watched_step() -> None:
        step()
        if work.random.random() < 0.5:
            for each in (replica, Replica(work.driver.scheduler)):
                each.update()
                each.check()

    work.step = watched_step
    work.run()
    replica.update()
    replica.check()


def test_pool_watch_reports_how_many_host_blocks_a_swapped_out_request_holds():
    requests = (make_request(name, 8, max_tokens=12) for name in "12")
    driver = driver_of(*requests, num_blocks=7, pressure=SWAP)
    replica = Replica(driver.scheduler)
    while not driver.scheduler.num_swapped:
        driver.step()
    replica.update()
    assert replica.swap_entries == [("2", driver.scheduler.swap_space.num_used_host_blocks)]
    assert replica.sequences[2].status == "swapped"
    driver.run()
    replica.update()
    assert not replica.swap_entries
    replica.check()


class WatchedMachine(SchedulerMachine):
    """Run random requests, and keep two copies (`Replica`) of the pool's state. Update one copy
    after each step, and the other copy after every third step."""

    replicas: tuple[Replica, ...] = ()
    num_steps = 0

    @invariant()
    def replicas_agree(self):
        if not self.replicas:
            self.replicas = Replica(self.driver.scheduler), Replica(self.driver.scheduler)
        self.num_steps += 1
        for replica, every in zip(self.replicas, (1, 3), strict=True):
            if self.num_steps % every == 0:
                replica.update()
                replica.check()


TestWatch = WatchedMachine.TestCase
TestWatch.settings = settings(MACHINE_SETTINGS, max_examples=num_examples(60))
