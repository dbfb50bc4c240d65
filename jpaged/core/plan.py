"""Types that the scheduler and the engine loop exchange: goals, step plans and step results."""

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from jpaged.core.block_manager import BlockChanges
from jpaged.core.request import FinishReason, Request, Sequence


class SchedulingGoal(Enum):
    """Quantity that the scheduler optimizes."""

    LATENCY = auto()
    """Short time to each token: running requests decode in each step, and new ones join early."""

    THROUGHPUT = auto()
    """Short total time for a fixed set of requests, whose outputs are needed only at the end."""


NO_TOKEN = -1
"""Sampled token id of a row whose logits have no finite maximum. It ends the request."""

REJECTED, NO_DRAFT = -2, -3
"""Token ids of positions of a step that return no token: the draft before the position was
rejected, or there was no draft. A row whose first position is `NO_DRAFT` returns no token at all in
this step.
"""

make_tuple = tuple.__new__
"""Create a named tuple from its class and all its fields.

This is faster than calling the class, for tuples that a step creates by the hundred.
"""

RowFork = tuple[Sequence, Sequence]
"""(parent, child) sequences. The child gets a row of the device's batch state, which starts as a
copy of the parent's row."""


class SwapOut(NamedTuple):
    """Blocks to copy to a new swap entry in host memory.

    Attributes:
        swap_entry_id: Id of the new swap entry.
        block_ids: Blocks to copy; `block_ids[i]` becomes block `i` of the swap entry.
    """

    swap_entry_id: int
    block_ids: tuple[int, ...]


class SwapIn(NamedTuple):
    """Blocks to copy from a swap entry to the device. The entry is dropped afterwards.

    Attributes:
        swap_entry_id: Id of the swap entry.
        copies: Copies, each (block index in the swap entry, destination block id).
    """

    swap_entry_id: int
    copies: tuple[tuple[int, int], ...]


class ScheduledSequence(NamedTuple):
    """Tokens that one step computes for one sequence.

    The last computed token may be missing from `sequence.token_ids`. In that case, the previous
    step of the sequence samples this token, and the device has it.

    Attributes:
        sequence: The sequence.
        start: Position of the first computed token. While steps that verify drafts are in flight,
            only the device knows the position; `start` counts one token per step in flight.
        num_scheduled_tokens: Number of computed tokens.
        is_sampled: Whether the step samples the sequence's next token. False if the step does not
            reach the last token of the sequence.
        block_updates: New block-table entries since the sequence's previous step, each (index,
            block id). The whole block table if the sequence joins the batch.
    """

    sequence: Sequence
    start: int
    num_scheduled_tokens: int
    is_sampled: bool
    block_updates: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class StepPlan:
    """Plan of one step on the device.

    The model runner applies the parts of a plan in this order:

    1. `released_seq_ids`: free the device rows of these sequences.
    2. `row_forks`: give each child a row, with a copy of the parent row's block table.
    3. `dropped_swap_entry_ids`: drop these swap entries.
    4. `swap_outs`: copy blocks to host memory before other sequences write to these blocks.
    5. `block_copies`: copy blocks before the step writes to the pool.
    6. `scheduled`: launch the step, unless no sequence is scheduled.
    7. `swap_ins`: copy blocks to the device while the step runs, since this step does not need
       them.

    Attributes:
        step_id: Index of the step.
        scheduled: Sequences that the step computes, one per batch row.
        released_seq_ids: Sequences that left the batch since the last plan. A preempted sequence is
            released before it joins again with its whole block table.
        preempted_request_ids: Requests that were preempted since the last plan.
        block_copies: Blocks to copy, each (source, destination).
        row_forks: Device rows to copy from a parent to a child sequence.
        dropped_swap_entry_ids: Swap entries of requests that ended while they were swapped out.
        swap_outs: Blocks to copy to host memory.
        swap_ins: Blocks to copy to the device.
        failed: Requests that ended because planning failed for them, and the errors.
        num_drafts: Maximum number of drafts that the step verifies per row; 0 for a plain step.
        limits: With speculative decoding, the number of tokens for which each scheduled sequence
            has slots. The device writes no token beyond the limit, and a sequence with more tokens
            than its limit returns none. Empty without speculative decoding.
        num_tokens: Number of tokens that the step computes.
        is_decode: Whether each row computes one token and needs at most one new block-table entry.
            True for a verify step, in which a row may need several entries. False if a row joins
            the batch, even with one token: its whole block table is new.
    """

    step_id: int
    scheduled: tuple[ScheduledSequence, ...]
    released_seq_ids: tuple[int, ...] = ()
    preempted_request_ids: tuple[str, ...] = ()
    block_copies: tuple[tuple[int, int], ...] = ()
    row_forks: tuple[RowFork, ...] = ()
    dropped_swap_entry_ids: tuple[int, ...] = ()
    swap_outs: tuple[SwapOut, ...] = ()
    swap_ins: tuple[SwapIn, ...] = ()
    failed: tuple[tuple[Request, Exception], ...] = ()
    num_drafts: int = 0
    limits: tuple[int, ...] = ()
    num_tokens: int = field(init=False)
    is_decode: bool = field(init=False)

    def __post_init__(self):
        # Compute these fields when the plan is made, because later plans change the sequences'
        # numbers of tokens.
        scheduled = self.scheduled
        object.__setattr__(self, "num_tokens", sum([s.num_scheduled_tokens for s in scheduled]))
        decode = len(scheduled) == self.num_tokens and all(map(_is_decode_row, scheduled))
        object.__setattr__(self, "is_decode", decode or self.num_drafts > 0)

    @property
    def num_new_tokens(self) -> int:
        """Number of prompt tokens that the step computes, plus the number of tokens it samples.

        After a preemption, recomputed output tokens count as prompt tokens.
        """
        if self.is_decode:  # each row of a decode step samples one token
            return self.num_tokens
        joined = (s for s in self.scheduled if s.start < s.sequence.num_admitted_tokens)
        return self.num_tokens + sum(s.is_sampled for s in joined)

    @property
    def has_block_moves(self) -> bool:
        """Whether the plan contains copies of blocks, or drops swap entries."""
        return bool(
            self.block_copies or self.dropped_swap_entry_ids or self.swap_outs or self.swap_ins
        )


def _is_decode_row(row: ScheduledSequence) -> bool:
    return row.start >= row.sequence.num_admitted_tokens and len(row.block_updates) <= 1


class EmittedToken(NamedTuple):
    """Sampled token that the host has read.

    Attributes:
        sequence: Sequence of the token.
        request: Request of the sequence.
        token_id: The token.
        finish_reason: Set if the token ends the sequence.
    """

    sequence: Sequence
    request: Request
    token_id: int
    finish_reason: FinishReason | None


class StepUpdate(NamedTuple):
    """Result of `Scheduler.update`: how the sampled tokens of one step changed the requests.

    Attributes:
        emitted_tokens: Sampled tokens of sequences that are not beams.
        advanced_beam_requests: Requests whose beams were extended by one token, or whose beam
            search ended.
        failed: Requests that ended with an error, each with the error.
    """

    emitted_tokens: list[EmittedToken]
    advanced_beam_requests: list[Request]
    failed: list[tuple[Request, Exception]]


@dataclass(slots=True, eq=False)
class PlanBuilder:
    """Builder of a `StepPlan`: collects the sequences of one step until the token budget is spent.

    Attributes:
        max_num_tokens: Token budget of the whole step.
        goal: Quantity that the scheduler optimizes.
        token_budget: Number of tokens that can still be scheduled.
        scheduled: Sequences scheduled so far.
        joined_sequences: Sequences that join the batch and get a device row in this step.
        block_copies: Blocks to copy before the step, each (source, destination).
        has_preempted: Whether a request was preempted for lack of blocks.
        is_waiting_for_blocks: Whether a request waits for blocks that steps in flight still use.
        planning_errors: First error of each request for which planning failed.
    """

    max_num_tokens: int
    goal: SchedulingGoal
    token_budget: int = field(init=False)
    scheduled: list[ScheduledSequence] = field(default_factory=list)
    joined_sequences: set[Sequence] = field(default_factory=set)
    block_copies: list[tuple[int, int]] = field(default_factory=list)
    has_preempted: bool = False
    is_waiting_for_blocks: bool = False
    planning_errors: dict[Request, Exception] = field(default_factory=dict)

    def __post_init__(self):
        self.token_budget = self.max_num_tokens

    @property
    def has_prompts(self) -> bool:
        """Whether any sequence computes more than one token in this step."""
        return self.max_num_tokens - self.token_budget > len(self.scheduled)

    def add_sequence(self, sequence: Sequence, num_tokens: int, changes: BlockChanges) -> None:
        """Schedule `num_tokens` tokens of `sequence`, which must have the blocks for them.

        Args:
            sequence: Sequence to schedule.
            num_tokens: Number of tokens to compute.
            changes: Changes of the sequence's block table since its previous step.
        """
        start = sequence.num_computed_tokens
        sequence.num_computed_tokens = end = start + num_tokens
        is_sampled = end == len(sequence.token_ids) + sequence.num_pending_tokens
        if is_sampled:
            sequence.num_pending_tokens += 1
        sequence.num_in_flight_steps += 1
        self.token_budget -= num_tokens
        if changes.copies:
            self.block_copies.extend(changes.copies)
        row = ScheduledSequence(sequence, start, num_tokens, is_sampled, changes.updates)
        self.scheduled.append(row)

    def remove_request(self, request: Request) -> None:
        """Remove a request's sequences from the step. The caller then ends the request."""
        for row in self.scheduled:
            if row.sequence.request is request:
                row.sequence.num_computed_tokens = row.start
                row.sequence.num_in_flight_steps -= 1
                row.sequence.num_pending_tokens -= row.is_sampled
        self.scheduled = [row for row in self.scheduled if row.sequence.request is not request]
        for sequence in request.live_sequences:
            if sequence in self.joined_sequences:
                sequence.has_row = False
