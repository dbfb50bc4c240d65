"""What passes between the scheduler and the loop: a goal in, step plans out, tokens back."""

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from jpaged.core.block_manager import BlockChanges
from jpaged.core.request import FinishReason, Request, Sequence


class SchedulingGoal(Enum):
    """What steps are to favour."""

    LATENCY = auto()
    """Every token soon, and every arriving request in a step soon."""

    THROUGHPUT = auto()
    """The end of the last request soon: no request arrives, and no token is read, before it."""


NO_TOKEN = -1
"""As a sampled token: the row's logits had no finite maximum."""

make_tuple = tuple.__new__
"""Makes a named tuple of all its fields in half the time that calling its class takes: for those
made by the hundred each step."""

RowFork = tuple[Sequence, Sequence]
"""(parent, child): the child's device row starts as a copy of the parent's."""


class SwapOut(NamedTuple):
    """Blocks to copy to host memory: block `block_ids[i]` becomes entry `i` of a new image."""

    swap_entry_id: int
    block_ids: tuple[int, ...]


class SwapIn(NamedTuple):
    """An image's entries to copy back, each (entry, block id); what is left of it is dropped."""

    swap_entry_id: int
    copies: tuple[tuple[int, int], ...]


class ScheduledSequence(NamedTuple):
    """One sequence's share of a step.

    The step computes the tokens at positions `start` to `start + num_scheduled_tokens - 1`. Where
    `sequence.token_ids` does not reach that far, the last of them is still on the device: it is
    the token that the sequence's previous step sampled.
    """

    sequence: Sequence
    start: int  # num_computed_tokens before this step
    num_scheduled_tokens: int
    is_sampled: bool  # the step reaches the sequence's last token, so the token it samples counts
    block_updates: tuple[tuple[int, int], ...] = ()
    """(index in the block table, block id) for each entry that is new since the sequence's last
    scheduled step: the whole table when it joins the batch."""


@dataclass(frozen=True)
class StepPlan:
    """One step of the device.

    The runner applies its parts in this order, and the device runs them in the order of launch:

    1. `released_seq_ids`: rows of sequences that left the batch (finished, aborted, pruned, preempted)
       since the last plan, each reported once a stay. A preempted sequence that comes back is in
       `released_seq_ids` of this plan or an earlier one, and joins like a new one, with its whole table.
    2. `row_forks`: the child gets a row, and in it a copy of the block table that the parent's row
       has now.
    3. `dropped_swap_entry_ids`: images of requests that ended while they were out.
    4. `swap_outs`: read before anything is written, since other sequences may get these blocks.
    5. `block_copies` (source, destination): before the step's writes.
    6. The step, unless `scheduled` is empty.
    7. `swap_ins`: no sequence of this step needs them, so they travel while it runs.

    `failed` are the requests for which planning failed, and the errors; they have ended. A plan may
    hold nothing else.

    `num_tokens` is the step's tokens. `is_decode` tells that the step needs nothing from the host
    but a token and at most one block-table entry a row. A row that joins the batch brings its
    whole table, so that even a one-token prompt, or a last chunk of one token, is no decode row.
    """

    step_id: int
    scheduled: tuple[ScheduledSequence, ...]
    released_seq_ids: tuple[int, ...] = ()
    preempted_request_ids: tuple[str, ...] = ()  # ids of requests preempted since the last plan
    block_copies: tuple[tuple[int, int], ...] = ()
    row_forks: tuple[RowFork, ...] = ()
    dropped_swap_entry_ids: tuple[int, ...] = ()
    swap_outs: tuple[SwapOut, ...] = ()
    swap_ins: tuple[SwapIn, ...] = ()
    failed: tuple[tuple[Request, Exception], ...] = ()
    num_tokens: int = field(init=False)
    is_decode: bool = field(init=False)

    def __post_init__(self):
        # Settled now: later steps move the sequences' counters.
        scheduled = self.scheduled
        object.__setattr__(self, "num_tokens", sum([s.num_scheduled_tokens for s in scheduled]))
        decode = len(scheduled) == self.num_tokens and all(map(_is_decode_row, scheduled))
        object.__setattr__(self, "is_decode", decode)

    @property
    def num_new_tokens(self) -> int:
        """Prompt tokens (after a preemption all tokens) that the step computes, and those that it
        samples. O(sequences) where some have more than a token."""
        if self.is_decode:  # each computes the token sampled last, and samples the next
            return self.num_tokens
        joined = (s for s in self.scheduled if s.start < s.sequence.num_admitted_tokens)
        return self.num_tokens + sum(s.is_sampled for s in joined)

    @property
    def has_block_moves(self) -> bool:
        """Whether it copies blocks, or swaps or drops images."""
        return bool(
            self.block_copies or self.dropped_swap_entry_ids or self.swap_outs or self.swap_ins
        )


def _is_decode_row(row: ScheduledSequence) -> bool:
    return row.start >= row.sequence.num_admitted_tokens and len(row.block_updates) <= 1


class EmittedToken(NamedTuple):
    """A sampled token that the host has read, and why its sequence ended if it did."""

    sequence: Sequence
    request: Request
    token_id: int
    finish_reason: FinishReason | None


class StepUpdate(NamedTuple):
    """What reading a step brought: tokens of samples, beam searches that took a step, and requests
    that ended with an error over it."""

    emitted_tokens: list[EmittedToken]
    advanced_beam_requests: list[Request]
    failed: list[tuple[Request, Exception]]


@dataclass(slots=True, eq=False)
class PlanBuilder:
    """Collects a step's sequences until its budget of tokens is spent."""

    max_num_tokens: int
    goal: SchedulingGoal
    token_budget: int = field(init=False)  # tokens left
    scheduled: list[ScheduledSequence] = field(default_factory=list)
    joined_sequences: set[Sequence] = field(
        default_factory=set
    )  # those that get a row with this step
    block_copies: list[tuple[int, int]] = field(default_factory=list)
    has_preempted: bool = False
    is_waiting_for_blocks: bool = (
        False  # a request waits for blocks that steps in flight still hold
    )
    planning_errors: dict[Request, Exception] = field(
        default_factory=dict
    )  # of planning, the first each

    def __post_init__(self):
        self.token_budget = self.max_num_tokens

    @property
    def has_prompts(self) -> bool:
        """Whether a sequence computes more than one token."""
        return self.max_num_tokens - self.token_budget > len(self.scheduled)

    def add_sequence(self, sequence: Sequence, num_tokens: int, changes: BlockChanges) -> None:
        """Give `sequence`, which has blocks for them, `num_tokens` of the step."""
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
        """Take a request's sequences out again; the request is to end at once."""
        for row in self.scheduled:
            if row.sequence.request is request:
                row.sequence.num_computed_tokens = row.start
                row.sequence.num_in_flight_steps -= 1
                row.sequence.num_pending_tokens -= row.is_sampled
        self.scheduled = [row for row in self.scheduled if row.sequence.request is not request]
        for sequence in request.live_sequences:
            if sequence in self.joined_sequences:
                sequence.has_row = False
