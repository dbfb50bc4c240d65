"""What is asked of the engine: requests, their sequences, and when a sequence ends."""

from dataclasses import dataclass, field
from enum import StrEnum


class RequestStatus(StrEnum):
    """Where a request stands in the scheduler."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"  # back in the waiting queue, to be computed again from its first token
    FINISHED = "finished"


class FinishReason(StrEnum):
    """Why a request ended."""

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


@dataclass(slots=True, eq=False)
class Sequence:
    """One stream of tokens and the blocks that hold its keys and values.

    The host runs behind the device, so the counters speak of steps *launched*:
    `num_computed_tokens` tokens have their KV written by those steps, and `num_pending_tokens`
    of the sequence's tokens were sampled by them but not read by the host yet (in the overlapped
    loop 1 when a step is planned, 2 between planning a step and reading the one before it).

    `cache_salt` separates prefixes in the cache: only sequences of the same salt share KV. One that
    does not read the cache (it needs every position computed) still fills it.
    """

    seq_id: int
    token_ids: list[int]  # the prompt and the sampled tokens that the host has read
    num_prompt_tokens: int
    num_computed_tokens: int = 0
    num_pending_tokens: int = 0
    num_in_flight_steps: int = 0  # launched steps holding this sequence that are not read yet
    num_admitted_tokens: int = 0  # tokens known when it last joined the batch; see StepPlan
    block_table: list[int] = field(default_factory=list)
    cache_salt: str | None = None
    reads_prefix_cache: bool = True
    num_cached_tokens: int | None = None  # found in the cache when it first joined the batch
    num_chained_blocks: int = 0  # leading blocks whose content the cache knows
    chain_content: int = 0  # the number of the last one's content

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
    """One request: a group of sequences that is scheduled and preempted as a whole."""

    request_id: str
    sequences: list[Sequence]
    stop: StopCriteria
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    arrival: int = -1  # order of arrival, set by Scheduler.add
    max_num_tokens: int = 0  # prompt and outputs at most, set by Scheduler.add

    @classmethod
    def from_prompt(
        cls,
        request_id: str,
        prompt_token_ids: list[int],
        stop: StopCriteria,
        *,
        seq_id: int,
        cache_salt: str | None = None,
        reads_prefix_cache: bool = True,
    ) -> "Request":
        """A request of one sequence; `seq_id` must be unique among unfinished sequences."""
        sequence = Sequence(
            seq_id,
            list(prompt_token_ids),
            len(prompt_token_ids),
            cache_salt=cache_salt,
            reads_prefix_cache=reads_prefix_cache,
        )
        return cls(request_id, [sequence], stop)

    @property
    def is_finished(self) -> bool:
        """Whether the request has ended, for whatever reason."""
        return self.status is RequestStatus.FINISHED
