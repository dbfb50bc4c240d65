"""Requests, their sequences, and the conditions that end a sequence."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from jpaged.core.beam import BeamSearch
from jpaged.errors import format_count


class NoTokenError(ArithmeticError):
    """The next token of a request could not be sampled after `num_output_tokens` output tokens."""

    def __init__(self, num_output_tokens: int):
        super().__init__(
            f"no token can be sampled after {format_count(num_output_tokens, 'output token')}: the "
            "model's logits are NaN or infinite, or the sampling parameters forbid every token"
        )


class RequestStatus(StrEnum):
    """State of a request in the scheduler."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"  # preempted: the request waits again, and its KV must be recomputed
    SWAPPED = "swapped"  # preempted: the request waits again, and its KV is in host memory
    FINISHED = "finished"


class FinishReason(StrEnum):
    """Reason why a sequence ended. A request gets the reason of the sequence that ended last."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class StopCriteria:
    """Conditions on tokens that end a sequence. (Stop strings are checked by the detokenizer.)

    Attributes:
        max_tokens: Maximum number of output tokens.
        min_tokens: Minimum number of output tokens, including the stop token. Before that, a stop
            token does not end the sequence.
        stop_token_ids: Tokens that end the sequence. The output includes the stop token.
    """

    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()

    def __post_init__(self):
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise ValueError(
                f"min_tokens must lie between 0 and max_tokens={self.max_tokens}, "
                f"got {self.min_tokens}"
            )


class BeamCandidates(NamedTuple):
    """Most probable next tokens, best first.

    Attributes:
        token_ids: int [L] for one sequence, or [n, L] for the n rows of a step.
        logprobs: float32 log-probabilities of `token_ids`, with the same shape.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray


@dataclass(slots=True, eq=False)
class SwapEntry:
    """Blocks of a swapped-out request in host memory.

    Attributes:
        swap_entry_id: Unique id.
        num_blocks: Number of blocks. A block that several sequences share is stored once.
    """

    swap_entry_id: int
    num_blocks: int


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens of one sequence, and the blocks that hold their keys and values.

    The host reads sampled tokens later than the device computes them. A step is in flight if it is
    planned or launched, but the host has not read the step's sampled tokens yet.
    `num_computed_tokens` also counts the tokens of steps in flight.

    Attributes:
        seq_id: Id that is unique among unfinished sequences.
        token_ids: Prompt tokens, then the sampled tokens that the host has read.
        num_prompt_tokens: Number of prompt tokens.
        request: Request of the sequence; set by `Request`.
        index: Index among the request's samples; 0 for beams.
        seed: Seed of the sampling noise.
        finish_reason: Reason why the sequence ended; None before that.
        num_computed_tokens: Number of tokens whose KV is computed, including steps in flight. With
            speculative decoding, one token counts per step in flight. The number is corrected when
            the host reads the step's sampled tokens.
        num_pending_tokens: Number of tokens that steps in flight sample, without accepted drafts.
        num_pending_drafts: Maximum number of drafts that steps in flight may accept. 0 without
            speculative decoding.
        num_in_flight_steps: Number of steps in flight that compute the sequence.
        num_admitted_tokens: Number of tokens in `token_ids` when the sequence last joined the
            batch. Steps that start at a later position are decode steps.
        has_row: Whether the sequence has a row in the device's batch state, or gets a row with the
            next plan.
        block_table: Ids of the sequence's blocks, in the order of its tokens.
        host_block_table: While swapped out: index in the swap entry for each block.
        cache_salt: Sequences share cached prefixes only if their salts are equal.
        first_scored_position: Position of the first prompt token whose log-probability is returned;
            None if no prompt token is scored. To score the token at position p, a step must compute
            the token at position p - 1. So only tokens before position p - 1 may be cached.
        num_cached_tokens: Number of cached tokens when the sequence first joined the batch; None
            before that.
        num_registered_blocks: Number of leading blocks that are in the prefix cache, or
            `REGISTRATION_ENDED`.
        last_cache_entry_id: `entry_id` of the last registered block; 0 without one.
        score: For beams: sum of the log-probabilities of the output tokens.
        candidates: For beams: next tokens to choose from, until the beam search takes its step.
    """

    seq_id: int
    token_ids: list[int]
    num_prompt_tokens: int
    request: "Request" = None  # pyright: ignore[reportAssignmentType]
    index: int = 0
    seed: int = 0
    finish_reason: FinishReason | None = None
    num_computed_tokens: int = 0
    num_pending_tokens: int = 0
    num_pending_drafts: int = 0
    num_in_flight_steps: int = 0
    num_admitted_tokens: int = 0
    has_row: bool = False
    block_table: list[int] = field(default_factory=list)
    host_block_table: list[int] = field(default_factory=list)
    cache_salt: str | None = None
    first_scored_position: int | None = None
    num_cached_tokens: int | None = None
    num_registered_blocks: int = 0
    last_cache_entry_id: int = 0
    score: float = 0.0
    candidates: BeamCandidates | None = None

    @property
    def num_tokens(self) -> int:
        """Number of tokens, including sampled tokens that the host has not read yet."""
        return len(self.token_ids) + self.num_pending_tokens

    @property
    def max_cached_tokens(self) -> int | None:
        """Maximum number of leading tokens that the prefix cache may provide; None for no limit."""
        return None if self.first_scored_position is None else self.first_scored_position - 1

    @property
    def num_output_tokens(self) -> int:
        """Number of sampled tokens that the host has read."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """Copy of the sampled tokens that the host has read."""
        return self.token_ids[self.num_prompt_tokens :]


@dataclass(slots=True, eq=False)
class Request:
    """A group of sequences that is scheduled, preempted and swapped as a whole.

    Attributes:
        request_id: Id that is unique among unfinished requests.
        sequences: All samples, including ended ones; for a beam search, the current beams.
        stop_criteria: Token conditions that end a sequence.
        seq_id_counter: Iterator over ids for new beams.
        beam: State of the beam search; None if the request samples.
        priority: Requests with a lower value are served first if the scheduler has priorities.
        status: State of the request in the scheduler.
        finish_reason: Reason why the request ended; None before that.
        arrival_index: Number of requests added before; set by `Scheduler.add`.
        max_num_tokens: Maximum number of tokens of each sequence, prompt and outputs together; set
            by `Scheduler.check`.
        num_common_prefix_tokens: Number of leading tokens that the first live sequence computes for
            all, before the others fork from it. 0 if there is nothing to fork.
        swap_entry: Blocks in host memory while the request is swapped out.
        takes_drafts: Whether steps with the request may verify drafts. False for a beam search and
            for a request with a grammar.
        live_sequences: Sequences that have not ended.
    """

    request_id: str
    sequences: list[Sequence]
    stop_criteria: StopCriteria
    seq_id_counter: Iterator[int]
    beam: BeamSearch | None = None
    priority: int = 0
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    arrival_index: int = -1
    max_num_tokens: int = 0
    num_common_prefix_tokens: int = 0
    swap_entry: SwapEntry | None = None
    takes_drafts: bool = field(init=False)
    live_sequences: list[Sequence] = field(init=False)

    def __post_init__(self):
        self.live_sequences = list(self.sequences)
        self.takes_drafts = self.beam is None
        for sequence in self.sequences:
            sequence.request = self

    @classmethod
    def from_prompt(
        cls,
        request_id: str,
        prompt_token_ids: list[int],
        stop_criteria: StopCriteria,
        *,
        seq_id_counter: Iterator[int],
        num_samples: int = 1,
        seed: int = 0,
        beam: BeamSearch | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        first_scored_position: int | None = None,
    ) -> "Request":
        """Create a request with `num_samples` samples, or with one sequence from which beams fork.

        Sample `i` has the seed `seed + i` (mod 2**64). Each sample thus equals the output of a
        request with one sample and that seed.

        Args:
            request_id: Id that is unique among unfinished requests.
            prompt_token_ids: Tokens of the prompt.
            stop_criteria: Token conditions that end a sequence.
            seq_id_counter: Iterator over ids that are unique among unfinished sequences.
            num_samples: Number of samples; 1 for a beam search.
            seed: 64-bit seed of the first sample.
            beam: State of a beam search; None to sample.
            priority: See `Request.priority`.
            cache_salt: See `Sequence.cache_salt`.
            first_scored_position: See `Sequence.first_scored_position`.
        """
        sequences = [
            Sequence(
                next(seq_id_counter),
                list(prompt_token_ids),
                len(prompt_token_ids),
                index=index,
                seed=(seed + index) % 2**64,
                cache_salt=cache_salt,
                first_scored_position=first_scored_position,
            )
            for index in range(num_samples)
        ]
        return cls(request_id, sequences, stop_criteria, seq_id_counter, beam, priority)

    def end_unqueued(self, reason: FinishReason) -> None:
        """End a request that was never added to a scheduler."""
        self.status, self.finish_reason, self.live_sequences = RequestStatus.FINISHED, reason, []
        for sequence in self.sequences:
            sequence.finish_reason = reason

    @property
    def sort_key(self) -> tuple[int, int]:
        """Sort key of queues. Requests with a low key are served first and preempted last."""
        return self.priority, self.arrival_index

    @property
    def num_rows(self) -> int:
        """Maximum number of sequences that the request has in one step."""
        return self.beam.width if self.beam is not None else len(self.live_sequences)

    @property
    def is_fully_read(self) -> bool:
        """Whether the host has read the results of all planned steps of the request."""
        return not any(s.num_pending_tokens or s.num_in_flight_steps for s in self.live_sequences)

    @property
    def is_finished(self) -> bool:
        """Whether the request has ended, for any reason."""
        return self.status is RequestStatus.FINISHED
