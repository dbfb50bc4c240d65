"""Rebuild the state of a block pool from the changes that a pool watch reports."""

from jpaged import PoolChanges
from jpaged.observe.pool_changes import TableChange


class PoolReplica:
    """State of a block pool, rebuilt from successive `PoolChanges`.

    Attributes:
        counts, hashes: Reference count and hash by block id, for each block that has changed.
        tables: Block table by sequence id.
        computed: Number of computed tokens by sequence id.
        sequences: Last `TableChange` by sequence id.
        swap_entries: Request id and number of blocks of each swap entry.
        pinned: Ids of all pinned blocks.
        tokens: Token ids by block id.
    """

    def __init__(self):
        self.counts: dict[int, int] = {}
        self.hashes: dict[int, int] = {}
        self.tables: dict[int, list[int]] = {}
        self.sequences: dict[int, TableChange] = {}
        self.computed: dict[int, int] = {}
        self.swap_entries: list[tuple[str, int]] = []
        self.pinned: list[int] = []
        self.tokens: dict[int, list[int]] = {}

    def take(self, changes: PoolChanges) -> None:
        block_ids, counts, hashes = changes.blocks
        assert block_ids == sorted(set(block_ids))
        self.counts.update(zip(block_ids, counts, strict=True))
        self.hashes.update(zip(block_ids, hashes, strict=True))
        for seq_id in changes.gone:
            del self.tables[seq_id], self.computed[seq_id], self.sequences[seq_id]
        for change in changes.tables:
            kept = self.tables.get(change.seq_id, [])[: change.num_kept]
            assert len(kept) == change.num_kept
            self.tables[change.seq_id] = [*kept, *change.new_blocks]
            self.sequences[change.seq_id] = change
            self.computed[change.seq_id] = change.num_computed_tokens
        self.computed.update(changes.grown)
        self.swap_entries = (
            self.swap_entries if changes.swap_entries is None else changes.swap_entries
        )
        self.pinned = self.pinned if changes.pinned is None else changes.pinned
        self.tokens.update(changes.tokens)

    @property
    def num_used_blocks(self) -> int:
        return sum(count > 0 for count in self.counts.values())
