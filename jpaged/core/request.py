"""What is asked of the engine: requests, their sequences, and when a sequence ends."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from jpaged.core.beam import BeamSearch
from jpaged.errors import format_count


class NoTokenError(ArithmeticError):
    """No token could be sampled for a request that has so many output tokens."""

    def __init__(self, num_output_tokens: int):
        super().__init__(
            f"no token can be sampled after {format_count(num_output_tokens, 'output token')}: the "
            "model's logits are NaN or infinite, or the sampling parameters forbid every token"
        )


class RequestStatus(StrEnum):
    """Where a request stands in the scheduler."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"  # back in the waiting queue, to be computed again from its first token
    SWAPPED = "swapped"  # back in the waiting queue, its KV in host memory
    FINISHED = "finished"


class FinishReason(StrEnum):
    """Why a sequence ended, and its request with the last of them."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class StopCriteria:
    """When a sequence ends, in token terms (stop strings are the detokenizer's business).

    `max_tokens` and `min_tokens` count output tokens. A stop token is part of the output, and ends
    the sequence unless that leaves fewer than `min_tokens` outputs, the stop token included.
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
    """The likeliest next tokens, best first: after one sequence [L], or each of a step's [n, L]."""

    token_ids: np.ndarray
    logprobs: np.ndarray


@dataclass(slots=True, eq=False)
class SwapEntry:
    """A request's blocks in host memory: `num_blocks` of them, each once however often shared."""

    swap_entry_id: int
    num_blocks: int


@dataclass(slots=True, eq=False)
class Sequence:
    """One stream of tokens and the blocks that hold its keys and values.

    The host runs behind the device, so the counters speak of steps *launched*:
    `num_computed_tokens` tokens have their KV written by those steps, and `num_pending_tokens`
    of the sequence's tokens were sampled by them but not read by the host yet (in the overlapped
    loop 1 when a step is planned, 2 between planning a step and reading the one before it, with
    bursts as many times that as a burst has steps).

    `cache_salt` separates prefixes in the cache: only sequences of the same salt share KV. One that
    does not read the cache (it needs every position computed) still fills it.
    """

    seq_id: int
    token_ids: list[int]  # the prompt and the sampled tokens that the host has read
    num_prompt_tokens: int
    request: "Request" = None  # pyright: ignore[reportAssignmentType]  (whose it is: set by Request)
    index: int = 0  # its place among the request's samples; 0 for beams
    seed: int = 0  # of the noise that its tokens are drawn with
    finish_reason: FinishReason | None = None
    num_computed_tokens: int = 0
    num_pending_tokens: int = 0
    num_in_flight_steps: int = 0  # launched steps holding this sequence that are not read yet
    num_admitted_tokens: int = 0  # tokens known when it last joined the batch; see StepPlan
    has_row: bool = False  # it has a device row: planned since it joined, or forked from such
    block_table: list[int] = field(default_factory=list)
    host_block_table: list[int] = field(default_factory=list)  # while swapped out; see core/swap.py
    cache_salt: str | None = None
    reads_prefix_cache: bool = True
    num_cached_tokens: int | None = None  # found in the cache when it first joined the batch
    num_registered_blocks: int = 0  # leading blocks whose content the cache knows
    last_cache_entry_id: int = 0  # the number of the last one's content
    score: float = 0.0  # of a beam: its outputs' log probabilities, summed
    candidates: BeamCandidates | None = (
        None  # of a beam: its next tokens, until all beams have theirs
    )

    @property
    def num_tokens(self) -> int:
        """All tokens, those still on the device counted."""
        return len(self.token_ids) + self.num_pending_tokens

    @property
    def num_output_tokens(self) -> int:
        """Sampled tokens that the host has read."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """The sampled tokens that the host has read (a copy)."""
        return self.token_ids[self.num_prompt_tokens :]


@dataclass(slots=True, eq=False)
class Request:
    """One request: a group of sequences that is scheduled, preempted and swapped as a whole.

    `sequences` are its samples, finished ones too, or the beams of the moment; `live_sequences` are those of
    them that have not ended. While `num_common_prefix_tokens` is not 0, the first live sequence alone
    computes so many tokens, which all have in common; then the others fork from it.
    """

    request_id: str
    sequences: list[Sequence]
    stop_criteria: StopCriteria
    seq_id_counter: Iterator[int]  # where new beams get their ids
    beam: BeamSearch | None = None
    priority: int = 0  # lower goes first, where the scheduler looks at it
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    arrival_index: int = -1  # order of arrival, set by Scheduler.add
    max_num_tokens: int = 0  # prompt and outputs at most of each sequence, set by Scheduler.add
    num_common_prefix_tokens: int = 0
    swap_entry: SwapEntry | None = None  # while swapped out
    live_sequences: list[Sequence] = field(init=False)

    def __post_init__(self):
        self.live_sequences = list(self.sequences)
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
        reads_prefix_cache: bool = True,
    ) -> "Request":
        """A request of `num_samples` sequences, or one from which beams will fork.

        `seq_id_counter` gives ids that are unique among unfinished sequences. Each sample draws from a
        seed of its own, so that sample i equals the only one of a request whose `seed`, a 64-bit
        integer, is i higher.
        """
        sequences = [
            Sequence(
                next(seq_id_counter),
                list(prompt_token_ids),
                len(prompt_token_ids),
                index=index,
                seed=(seed + index) % 2**64,
                cache_salt=cache_salt,
                reads_prefix_cache=reads_prefix_cache,
            )
            for index in range(num_samples)
        ]
        return cls(request_id, sequences, stop_criteria, seq_id_counter, beam, priority)

    def end_unqueued(self, reason: FinishReason) -> None:
        """End it before the scheduler ever had it."""
        self.status, self.finish_reason, self.live_sequences = RequestStatus.FINISHED, reason, []
        for sequence in self.sequences:
            sequence.finish_reason = reason

    @property
    def sort_key(self) -> tuple[int, int]:
        """Its place in line: the lowest is served first and preempted last."""
        return self.priority, self.arrival_index

    @property
    def num_rows(self) -> int:
        """Sequences it may have in a step."""
        return self.beam.width if self.beam is not None else len(self.live_sequences)

    @property
    def is_fully_read(self) -> bool:
        """Whether the host knows all its tokens, and no step in flight computes any."""
        return not any(s.num_pending_tokens or s.num_in_flight_steps for s in self.live_sequences)

    @property
    def is_finished(self) -> bool:
        """Whether the request has ended, for whatever reason."""
        return self.status is RequestStatus.FINISHED
