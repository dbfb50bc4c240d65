"""Read the results of launched steps on the host."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np

from jpaged.core.plan import NO_TOKEN, ScheduledSequence, StepPlan
from jpaged.core.request import BeamCandidates, Request
from jpaged.runtime.peer_memory import wait_for_devices
from jpaged.sampling_params import SamplingParams
from pallas_kernels import (
    KEPT_MASS_COLUMN,
    LOGPROB_COLUMN,
    NUM_TOKEN_COLUMNS,
    RANK_COLUMN,
    TOKEN_COLUMN,
)

MAX_LAUNCHES_AHEAD = 16
"""Maximum number of small programs in the launch queue of tensor-parallel devices. The queue of
XLA's runtime is limited: if a device hangs, a launch into a full queue would block the thread
without a time limit."""


@dataclass(frozen=True)
class TokenScores:
    """Log-probabilities and ranks of C tokens, and the most probable tokens at each position.

    If the engine's `logprobs_mode` reports logits, `logprobs` and `top_logprobs` hold logits.
    Prompt tokens, and requests with `best_of` or `beam_width`, have log-probabilities in every
    mode.

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
        """Return a copy of `packed` with only the `count` most probable tokens per position."""
        return self.packed[:, : NUM_TOKEN_COLUMNS + 2 * count].copy()

    def row_bytes(self, index: int, count: int) -> bytes:
        """Return row `index` of `packed_top(count)` as a `bytes` object."""
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
class TargetLogprobs:
    """Log-probabilities of C prompt tokens.

    This class has neither ranks nor top tokens; `TokenScores` has both.

    Attributes:
        packed: float32 [C, 2], the result of `score_targets_step`. Column 0 has the prompt token's
            log-probability. Column 1 is 1 if no token is more probable than the prompt token.
    """

    packed: np.ndarray

    @property
    def logprobs(self) -> np.ndarray:
        """Log-probability of each scored token, float32 [C]."""
        return self.packed[:, 0]

    @property
    def is_greedy(self) -> np.ndarray:
        """Whether no token is more probable than the scored token, bool [C]."""
        return self.packed[:, 1] != 0


@dataclass(frozen=True)
class StepResult:
    """Results of a finished step.

    Attributes:
        token_ids: Sampled token of each scheduled sequence, int32 [len(plan.scheduled)]. A verify
            step has several per sequence: int32 [len(plan.scheduled), 1 + plan.num_drafts], as
            `Scheduler.update` takes them.
        logprobs: Scores of the sampled tokens, one row per scheduled sequence; None if no request
            in the step asked for log-probabilities.
        prompt_logprobs: Scores of prompt tokens by sequence id, for sequences with a
            `first_scored_position`. `TokenScores` if the request asked for `prompt_logprobs`.
        draft_logprobs: Scores of a verify step: entry `i` holds the scores of the tokens sampled
            after draft `i`. `logprobs` then holds the scores of the tokens before the first draft.
    """

    token_ids: np.ndarray
    logprobs: TokenScores | None
    prompt_logprobs: dict[int, TokenScores | TargetLogprobs]
    draft_logprobs: tuple[TokenScores, ...] = ()

    @property
    def candidates(self) -> BeamCandidates | None:
        """Most probable tokens of each scheduled sequence, for beam searches; None if `logprobs` is
        None."""
        scores = self.logprobs
        return None if scores is None else BeamCandidates(scores.top_token_ids, scores.top_logprobs)


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Scores of a step's prompt tokens, on their way to the host.

    Attributes:
        program: Name of the step that computed the scores: "prompt_logprobs" or "score_targets".
        arrays: One array of scores per launch. Only the last array has padding rows, at its end.
        slices: Rows of each sequence in the concatenated arrays, by sequence id.
    """

    program: str
    arrays: list[jax.Array]
    slices: dict[int, slice]

    def read(self) -> Iterator[tuple[int, TokenScores | TargetLogprobs]]:
        """Wait for the scores, and return an iterator over pairs (sequence id, scores)."""
        kind = TokenScores if self.program == "prompt_logprobs" else TargetLogprobs
        packed = np.concatenate([np.asarray(array) for array in self.arrays])
        return ((seq_id, kind(packed[rows])) for seq_id, rows in self.slices.items())


def scored_positions(item: ScheduledSequence) -> range:
    """Return the positions of the prompt tokens that a step scores for a scheduled sequence.

    A token is scored in the step that computes the preceding token.
    """
    sequence, start = item.sequence, item.start
    if sequence.first_scored_position is None:
        return range(0)
    end = min(start + item.num_scheduled_tokens + 1, sequence.num_prompt_tokens)
    return range(max(start + 1, sequence.first_scored_position), end)


@dataclass(slots=True, eq=False)
class StepHandle:
    """A launched step whose results are on their way to the host.

    Attributes:
        plan: The plan that the step computes.
        sampled: Sampled tokens [B], or scores [B, W] that contain the tokens; None if the plan
            schedules no sequence. All steps of a burst share one array, with the steps as its first
            axis.
        prompt_scores: Scores of prompt tokens.
        row_indices: Index of the step's row that computed each sequence of `plan.scheduled`.
        burst_index: Index of the step in its burst; () for a step outside a burst.
        faults: Requests whose sampling could not be set up, and the errors. The step computes these
            requests, but their tokens are meaningless.
        check_devices: Function that raises an error if a device has failed. `read` calls the
            function if a row has no token.
        is_tensor_parallel: Whether several devices compute the step. If so, `read` waits with a
            time limit.
    """

    plan: StepPlan
    sampled: Any  # jax.Array
    prompt_scores: tuple[PromptScores, ...]
    row_indices: np.ndarray
    burst_index: tuple[int, ...] = ()
    faults: tuple[tuple[Request, Exception], ...] = ()
    check_devices: Callable[[], None] | None = None
    is_tensor_parallel: bool = False

    def read_row_tokens(self) -> np.ndarray:
        """Wait for the step, and return the sampled token of each row, int32 [rows].

        The tokens are in the order of the device's rows, not in the order of `plan.scheduled`. The
        method may run in a thread other than the engine loop's.

        Call the method only if one device computes the step. If one of several devices fails, the
        others wait for it forever, and unlike `read`, this method has no time limit.
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
        if self.plan.num_drafts and tokens.ndim == 3:  # packed scores [B, 1 + num_drafts, W]
            columns = np.ascontiguousarray(tokens.transpose(1, 0, 2))
            scores, *others = map(TokenScores, columns)
            tokens, draft_scores = tokens[:, :, TOKEN_COLUMN], tuple(others)
        elif not self.plan.num_drafts and tokens.ndim == 2:  # packed scores [B, W]
            scores = TokenScores(tokens)
            tokens = np.ascontiguousarray(tokens[:, TOKEN_COLUMN])
        if self.check_devices is not None and (tokens == NO_TOKEN).any():
            self.check_devices()
        prompts = dict(itertools.chain(*(each.read() for each in self.prompt_scores)))
        return StepResult(tokens, scores, prompts, draft_scores)


def score_prompts(
    scheduled: tuple[ScheduledSequence, ...],
    sampling: Callable[[Request], SamplingParams],
    launch: Callable[[str, np.ndarray, np.ndarray], jax.Array],
    num_rows: int,
    wait: Callable[[Any], Any] | None = None,
) -> tuple[PromptScores, ...]:
    """Launch the scoring of the prompt tokens of a prefill step.

    The tokens of all sequences are scored together, `num_rows` tokens per launch.

    Args:
        scheduled: The step's sequences, in the order in which their tokens are flattened.
        sampling: Function that returns the sampling parameters of a request.
        launch: Function that launches a scoring step. Its arguments are the name of the scoring
            step, indices of hidden states of the prefill step, and the token that follows each
            hidden state. Indices and tokens are int32 [num_rows].
        num_rows: Number of tokens per launch.
        wait: Function that waits for arrays on several devices; None for one device.
    """
    found: dict[str, tuple[list[np.ndarray], list[int], dict[int, slice]]] = {}
    offset = 0
    for item in scheduled:
        if positions := scored_positions(item):
            is_ranked = sampling(item.sequence.request).prompt_logprobs is not None
            name = "prompt_logprobs" if is_ranked else "score_targets"
            indices, targets, slices = found.setdefault(name, ([], [], {}))
            slices[item.sequence.seq_id] = slice(len(targets), len(targets) + len(positions))
            first = offset + positions.start - 1 - item.start
            indices.append(np.arange(first, first + len(positions)))
            targets += item.sequence.token_ids[positions.start : positions.stop]
        offset += item.num_scheduled_tokens
    scores, launched = [], list[jax.Array]()
    for name, (indices, targets, slices) in found.items():
        inputs = np.zeros((2, -(-len(targets) // num_rows) * num_rows), np.int32)
        inputs[:, : len(targets)] = np.concatenate(indices), targets
        num_before = len(launched)
        for start in range(0, inputs.shape[1], num_rows):
            # Each array of scores takes two launches (`gather_hidden`, then the scoring step), so
            # wait when half of `MAX_LAUNCHES_AHEAD` arrays are in flight.
            if wait is not None and len(launched) >= MAX_LAUNCHES_AHEAD // 2:
                wait(launched[-MAX_LAUNCHES_AHEAD // 2])
            launched.append(launch(name, *inputs[:, start : start + num_rows]))
            launched[-1].copy_to_host_async()
        scores.append(PromptScores(name, launched[num_before:], slices))
    return tuple(scores)
