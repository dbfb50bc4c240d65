"""Read the results of launched steps on the host."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np

from jpaged.core.plan import NO_TOKEN, ScheduledSequence, StepPlan
from jpaged.core.request import BeamCandidates, Request
from jpaged.runtime.peer_memory import wait_for_devices
from jpaged.runtime.programs import PROMPT_LOGPROBS_CHUNK
from jpaged.sampling_params import SamplingParams
from pallas_kernels import (
    KEPT_MASS_COLUMN,
    LOGPROB_COLUMN,
    NUM_TOKEN_COLUMNS,
    RANK_COLUMN,
    TOKEN_COLUMN,
)

MAX_LAUNCHES_AHEAD = 16
"""Maximum number of small programs that are launched before an earlier one has ended, with
tensor-parallel devices. The runtime's launch queue is limited: if a device hangs, a launch into a
full queue would block the thread without a time limit."""


@dataclass(frozen=True)
class TokenScores:
    """Log-probabilities and ranks of C tokens, and the most probable tokens at each position.

    With an engine option `logprobs_mode` of logits, the log-probabilities are logits, except in
    requests that rank their answers.

    Attributes:
        packed: int32 [C, W], as packed by `pallas_kernels.token_scores`.
    """

    packed: np.ndarray

    @property
    def logprobs(self) -> np.ndarray:
        """Log-probability of each scored token, float32 [C]."""
        return self.packed[:, LOGPROB_COLUMN].view(np.float32)

    @property
    def ranks(self) -> np.ndarray:
        """Rank of each scored token, int32 [C]; 1 is the most probable token."""
        return self.packed[:, RANK_COLUMN]

    @property
    def kept_masses(self) -> np.ndarray:
        """Probability mass that truncation kept at each position, float32 [C]."""
        return self.packed[:, KEPT_MASS_COLUMN].view(np.float32)

    @property
    def top_token_ids(self) -> np.ndarray:
        """The L most probable tokens at each position, int32 [C, L], most probable first."""
        return self.packed[:, NUM_TOKEN_COLUMNS::2]

    @property
    def top_logprobs(self) -> np.ndarray:
        """Log-probability of each of `top_token_ids`, float32 [C, L]."""
        return self.packed[:, NUM_TOKEN_COLUMNS + 1 :: 2].view(np.float32)

    def packed_top(self, count: int) -> np.ndarray:
        """Return a copy of `packed` with at most `count` most probable tokens per position."""
        return self.packed[:, : NUM_TOKEN_COLUMNS + 2 * count].copy()

    def row_bytes(self, index: int, count: int) -> bytes:
        """Return the bytes of row `index` of `packed_top(count)`."""
        width = self.packed.shape[1]
        start, size = index * width, min(NUM_TOKEN_COLUMNS + 2 * count, width)
        return self._bytes[4 * start : 4 * (start + size)]

    @cached_property
    def _bytes(self) -> bytes:
        return self.packed.tobytes()

    @cached_property
    def logprob_list(self) -> list[float]:
        """`logprobs` as a list, for fast access to single values."""
        return self.logprobs.tolist()


@dataclass(frozen=True)
class StepResult:
    """Results of a finished step.

    Attributes:
        token_ids: Sampled token of each scheduled sequence, int32 [len(plan.scheduled)]. Of a
            verify step, int32 [len(plan.scheduled), 1 + plan.num_drafts]; see `Scheduler.update`.
        logprobs: Scores of the sampled tokens, one row per scheduled sequence; None if no request
            in the step asked for log-probabilities.
        prompt_logprobs: Scores of prompt tokens by sequence id, for requests that asked for them. A
            step scores the prompt token after each position that it computes.
        draft_logprobs: As `logprobs`, for the tokens after each draft of a verify step.
    """

    token_ids: np.ndarray
    logprobs: TokenScores | None
    prompt_logprobs: dict[int, TokenScores]
    draft_logprobs: tuple[TokenScores, ...] = ()

    @property
    def candidates(self) -> BeamCandidates | None:
        """Most probable tokens of each scheduled sequence, for beam searches; None if `logprobs` is
        None."""
        scores = self.logprobs
        return None if scores is None else BeamCandidates(scores.top_token_ids, scores.top_logprobs)


PromptScores = dict[int, tuple[int, list[jax.Array]]]
"""Scores of prompt tokens by sequence id: the number of scored tokens, and the arrays of scores,
one per chunk."""


@dataclass(slots=True, eq=False)
class StepHandle:
    """A launched step whose results are on their way to the host.

    Attributes:
        plan: The plan that the step computes.
        sampled: Sampled tokens [B], or scores [B, W] that contain the tokens; None if the plan
            schedules no sequence. All steps of a burst share one array, with the steps as its first
            axis.
        prompt_logprobs: Scores of prompt tokens.
        row_indices: Index of the step's row for each sequence of `plan.scheduled`.
        burst_index: Index of the step in its burst; () for a step outside a burst.
        faults: Requests whose sampling could not be set up, and the errors. The step computes these
            requests, but their tokens are meaningless.
        check_devices: Function that raises if a device failed. It is called if a sequence has no
            token.
        is_tensor_parallel: Whether several devices compute the step. If so, `read` waits with a
            time limit.
    """

    plan: StepPlan
    sampled: Any  # jax.Array
    prompt_logprobs: PromptScores
    row_indices: np.ndarray
    burst_index: tuple[int, ...] = ()
    faults: tuple[tuple[Request, Exception], ...] = ()
    check_devices: Callable[[], None] | None = None
    is_tensor_parallel: bool = False

    def read_row_tokens(self) -> np.ndarray:
        """Wait for the tokens of all rows, and return them in the order of the step's rows: int32
        [rows].

        The method may run in another thread than the engine loop. It supports only a single device,
        because the wait has no time limit.
        """
        tokens = np.asarray(self.sampled)[self.burst_index]
        return tokens if tokens.ndim == 1 else tokens[:, TOKEN_COLUMN]

    def read(self) -> StepResult:
        """Wait for the step, and return its results.

        Raises:
            RuntimeError: A device received no data from another device, or hangs.
        """
        if self.sampled is None:
            return StepResult(np.zeros(0, np.int32), None, {})
        if self.is_tensor_parallel:
            wait_for_devices(self.sampled)
        tokens, scores = np.asarray(self.sampled)[self.burst_index][self.row_indices], None
        draft_scores: tuple[TokenScores, ...] = ()
        if self.plan.num_drafts and tokens.ndim == 3:  # the scores [B, 1 + num_drafts, W]
            columns = np.ascontiguousarray(tokens.transpose(1, 0, 2))
            scores, *others = map(TokenScores, columns)
            tokens, draft_scores = tokens[:, :, TOKEN_COLUMN], tuple(others)
        elif not self.plan.num_drafts and tokens.ndim == 2:  # the scores [B, W]
            scores = TokenScores(tokens)
            tokens = np.ascontiguousarray(tokens[:, TOKEN_COLUMN])
        if self.check_devices is not None and (tokens == NO_TOKEN).any():
            self.check_devices()
        prompts = {
            seq_id: TokenScores(np.concatenate([np.asarray(chunk) for chunk in chunks])[:count])
            for seq_id, (count, chunks) in self.prompt_logprobs.items()
        }
        return StepResult(tokens, scores, prompts, draft_scores)


def score_prompts(
    scheduled: tuple[ScheduledSequence, ...],
    sampling: Callable[[Request], SamplingParams],
    score: Callable[..., dict[str, jax.Array]],
    wait: Callable[[Any], Any] | None = None,
) -> PromptScores:
    """Launch the scoring of prompt tokens in a prefill step.

    The step scores the prompt token after each position that it computes.

    Args:
        scheduled: The step's sequences, in the order in which their tokens are flattened.
        sampling: Function that returns the sampling parameters of a request. Only requests with
            `prompt_logprobs` are scored.
        score: Function that launches `prompt_logprobs_step` for the step's hidden states. The
            arguments are `indices` and `targets`, int32 [PROMPT_LOGPROBS_CHUNK] each.
        wait: Function that waits for arrays on several devices; None for one device.
    """
    scored, offset, size = {}, 0, PROMPT_LOGPROBS_CHUNK
    launched: list[jax.Array] = []
    for sequence, start, num_tokens, *_ in scheduled:
        wanted = sampling(sequence.request).prompt_logprobs is not None
        count = min(num_tokens, sequence.num_prompt_tokens - 1 - start)
        if wanted and count > 0:
            indices, targets = np.zeros((2, -(-count // size) * size), np.int32)
            indices[:count] = np.arange(offset, offset + count)
            targets[:count] = sequence.token_ids[start + 1 : start + 1 + count]
            first = len(launched)
            for i, t in zip(indices.reshape(-1, size), targets.reshape(-1, size), strict=True):
                if wait is not None and len(launched) >= MAX_LAUNCHES_AHEAD:
                    wait(launched[-MAX_LAUNCHES_AHEAD])
                launched.append(score(indices=i, targets=t)["scores"])
            scored[sequence.seq_id] = count, launched[first:]
        offset += num_tokens
    return scored
