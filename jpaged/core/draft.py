"""A step while it is being planned."""

from jpaged.core.block_manager import BlockChanges
from jpaged.core.plan import ScheduledSequence
from jpaged.core.request import Sequence


class StepDraft:
    """Collects a step's sequences until its budget of tokens is spent."""

    __slots__ = ("_chunks", "_rows", "block_copies", "budget", "has_preempted", "is_starved")

    def __init__(self, budget: int):
        self.budget = budget  # tokens left
        self._rows: list[ScheduledSequence] = []  # of one token
        self._chunks: list[ScheduledSequence] = []
        self.block_copies: list[tuple[int, int]] = []
        self.has_preempted = False
        self.is_starved = False  # someone waits for blocks that steps in flight still hold

    @property
    def scheduled(self) -> tuple[ScheduledSequence, ...]:
        """All that were placed, those with one token first."""
        return (*self._rows, *self._chunks)

    @property
    def is_empty(self) -> bool:
        """Whether nothing was placed."""
        return not (self._rows or self._chunks)

    def place(self, sequence: Sequence, num_tokens: int, changes: BlockChanges) -> None:
        """Give `sequence`, whose blocks are seen to, `num_tokens` of the step."""
        start = sequence.num_computed_tokens
        sequence.num_computed_tokens = end = start + num_tokens
        samples = end == len(sequence.token_ids) + sequence.num_pending_tokens
        if samples:
            sequence.num_pending_tokens += 1
        sequence.num_in_flight_steps += 1
        self.budget -= num_tokens
        if changes.copies:
            self.block_copies.extend(changes.copies)
        row = ScheduledSequence(sequence, start, num_tokens, samples, changes.updates)
        (self._rows if num_tokens == 1 else self._chunks).append(row)
