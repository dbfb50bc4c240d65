"""All sequences that are unfinished or draining, and which of them have a device row."""

from collections import Counter
from collections.abc import Iterable
from itertools import chain

from jpaged.core.block_manager import BlockManager
from jpaged.core.plan import RowFork
from jpaged.core.request import Request, Sequence


class Roster:
    """Keeps a sequence from its arrival until the last step that holds it was read.

    Attributes:
        known: All sequences by id.
        draining: Those that are over, but whose blocks steps in flight may still write.
    """

    def __init__(self, manager: BlockManager):
        self.known: dict[int, Sequence] = {}
        self.draining: dict[int, Sequence] = {}
        self._manager = manager
        self._released: list[int] = []
        self._row_forks: dict[int, RowFork] = {}  # by the child's id

    def add(self, sequence: Sequence) -> None:
        """Take a sequence in."""
        self.known[sequence.seq_id] = sequence

    def of(self, request: Request) -> list[Sequence]:
        """All sequences of a request that have not given everything back."""
        return [sequence for sequence in self.known.values() if sequence.request is request]

    def fork_rows(self, forks: Iterable[RowFork]) -> None:
        """Let the children of parents that have rows have some too, with the next plan."""
        for parent, child in forks:
            if parent.is_placed:
                self._row_forks[child.seq_id] = parent, child
                child.is_placed = True

    def leave_row(self, sequence: Sequence) -> None:
        """The sequence leaves the batch, if it was ever planned in it.

        Children that no plan has forked from its row yet join like new ones, with whole tables.
        """
        for parent, child in list(self._row_forks.values()):
            if parent is sequence:
                del self._row_forks[child.seq_id]
                child.is_placed = False
        if self._row_forks.pop(sequence.seq_id, None) is None and sequence.is_placed:
            self._released.append(sequence.seq_id)
        sequence.is_placed = False

    def take_row_changes(self) -> tuple[tuple[int, ...], tuple[RowFork, ...]]:
        """Rows released and forked since the last call."""
        changes = tuple(self._released), tuple(self._row_forks.values())
        self._released.clear()
        self._row_forks.clear()
        return changes

    def let_go(self, sequence: Sequence) -> None:
        """The sequence is over; its blocks come back when no step in flight writes them.

        Again for one that was let go by halves.
        """
        self.leave_row(sequence)
        if sequence.image_table:
            sequence.image_table, sequence.num_computed_tokens = [], 0
        self.draining[sequence.seq_id] = sequence
        if not sequence.num_in_flight_steps:
            self.give_back(sequence)

    def give_back(self, sequence: Sequence) -> None:
        """Free a draining sequence's blocks and forget it; others are left alone."""
        if self.draining.pop(sequence.seq_id, None) is not None:
            self._manager.free(sequence)
            sequence.num_computed_tokens = 0
            del self.known[sequence.seq_id]

    def num_returning_blocks(self) -> int:
        """Blocks that only draining sequences hold."""
        tables = (sequence.block_table for sequence in self.draining.values())
        held, blocks = Counter(chain.from_iterable(tables)), self._manager.pool.blocks
        return sum(blocks[block_id].ref_cnt == count for block_id, count in held.items())
