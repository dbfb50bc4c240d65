"""A step while it is being planned."""

from jpaged.core.block_manager import BlockChanges
from jpaged.core.plan import Goal, ScheduledSequence, make_tuple
from jpaged.core.request import Request, Sequence


class StepDraft:
    """Collects a step's sequences until its budget of tokens is spent."""

    __slots__ = (
        "_limit",
        "block_copies",
        "budget",
        "goal",
        "has_preempted",
        "is_starved",
        "joined",
        "scheduled",
    )

    def __init__(self, budget: int, goal: Goal):
        self._limit = self.budget = budget  # of tokens, and how many are left of it
        self.goal = goal
        self.scheduled: list[ScheduledSequence] = []
        self.joined: set[Sequence] = set()  # those that get a device row with this step
        self.block_copies: list[tuple[int, int]] = []
        self.has_preempted = False
        self.is_starved = False  # someone waits for blocks that steps in flight still hold

    @property
    def has_prompts(self) -> bool:
        """Whether a sequence computes more than one token."""
        return self._limit - self.budget > len(self.scheduled)

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
        self.scheduled.append(row)

    def place_next(self, sequence: Sequence) -> None:
        """`place` for the one token that a sequence has left to compute, in a slot it has."""
        start = sequence.num_computed_tokens
        sequence.num_computed_tokens = start + 1
        sequence.num_pending_tokens += 1
        sequence.num_in_flight_steps += 1
        self.budget -= 1
        self.scheduled.append(make_tuple(ScheduledSequence, (sequence, start, 1, True, ())))

    def drop(self, request: Request) -> None:
        """Take a request's sequences out again; the request is to end at once."""
        for row in self.scheduled:
            if row.sequence.request is request:
                row.sequence.num_computed_tokens = row.start
                row.sequence.num_in_flight_steps -= 1
                row.sequence.num_pending_tokens -= row.samples
        self.scheduled = [row for row in self.scheduled if row.sequence.request is not request]
        for sequence in request.live:
            if sequence in self.joined:
                sequence.is_placed = False
