"""What a launched step leaves on its way to the host, and what the host reads of it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np

from jpaged.core.plan import ScheduledSequence, StepPlan
from jpaged.core.request import BeamCandidates, Request
from jpaged.runtime.peer_memory import wait_for_devices
from jpaged.runtime.programs import PROMPT_LOGPROBS_CHUNK
from jpaged.sampling_params import SamplingParams
from pallas_kernels import LOGPROB_COLUMN, NUM_TOKEN_COLUMNS, RANK_COLUMN, TOKEN_COLUMN

MAX_LAUNCHES_AHEAD = 16
"""Of many small programs in a row, so many are launched before an earlier one has ended where
devices share a model: one that hangs must not stop the thread in a launch, for which the runtime
has room only so often."""


@dataclass(frozen=True)
class TokenScores:
    """How likely some tokens were, and which ones were likeliest.

    Attributes:
        packed: int32 [C, W], as `pallas_kernels.token_scores` packs them.
    """

    packed: np.ndarray

    @property
    def logprobs(self) -> np.ndarray:
        """float32 [C], of the tokens themselves."""
        return self.packed[:, LOGPROB_COLUMN].view(np.float32)

    @property
    def ranks(self) -> np.ndarray:
        """int32 [C], 1 is the most likely."""
        return self.packed[:, RANK_COLUMN]

    @property
    def top_token_ids(self) -> np.ndarray:
        """int32 [C, L], the most likely tokens, best first."""
        return self.packed[:, NUM_TOKEN_COLUMNS::2]

    @property
    def top_logprobs(self) -> np.ndarray:
        """float32 [C, L]."""
        return self.packed[:, NUM_TOKEN_COLUMNS + 1 :: 2].view(np.float32)

    def packed_top(self, count: int) -> np.ndarray:
        """`packed` with so many likeliest tokens, or all there are; a copy."""
        return self.packed[:, : NUM_TOKEN_COLUMNS + 2 * count].copy()

    def row_bytes(self, index: int, count: int) -> bytes:
        """Row `index` of `packed_top(count)`."""
        width = self.packed.shape[1]
        start, size = index * width, min(NUM_TOKEN_COLUMNS + 2 * count, width)
        return self._bytes[4 * start : 4 * (start + size)]

    @cached_property
    def _bytes(self) -> bytes:
        return self.packed.tobytes()

    @cached_property
    def logprob_list(self) -> list[float]:
        """`logprobs`, as a list, to be read one by one."""
        return self.logprobs.tolist()


@dataclass(frozen=True)
class StepResult:
    """What the host reads of a finished step.

    Attributes:
        token_ids: int32 [len(plan.scheduled)], sampled.
        logprobs: One row a scheduled sequence, or None if no request in the step asked.
        prompt_logprobs: seq_id -> of the prompt tokens this step scored (those after the chunk's
            own positions), for sequences that asked.
    """

    token_ids: np.ndarray
    logprobs: TokenScores | None
    prompt_logprobs: dict[int, TokenScores]

    @property
    def candidates(self) -> BeamCandidates | None:
        """Each scheduled sequence's most probable tokens, for beam searches, as `logprobs`."""
        scores = self.logprobs
        return None if scores is None else BeamCandidates(scores.top_token_ids, scores.top_logprobs)


PromptScores = dict[int, tuple[int, list[jax.Array]]]
"""seq_id -> how many of its prompt tokens a step scores, and their scores by chunks."""


@dataclass(slots=True, eq=False)
class StepHandle:
    """A launched step whose results are on their way to the host.

    `sampled` has the step's tokens [B], or its scores [B, W], from which these are read then; it is
    None where nothing was scheduled: such a plan only moved blocks. The step has the plan's
    sequences in an order of its own; `row_indices[i]` is where `plan.scheduled[i]` is in it. The steps
    of a burst share one array; `burst_index` is the step's own there. `faults` are requests whose
    sampling could not be set up, and why: they are in the step, but their tokens mean nothing.
    `check_devices` is asked where a sequence has no token: it raises if that is the devices' fault. A step
    `is_tensor_parallel` by several devices is not waited for without end.
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
        """Wait for the tokens of the step's rows, in the device's order: int32 [rows]. For other
        threads, and for one device."""
        tokens = np.asarray(self.sampled)[self.burst_index]
        return tokens if tokens.ndim == 1 else tokens[:, TOKEN_COLUMN]

    def read(self) -> StepResult:
        """Wait for the step and give its results.

        Raises:
            RuntimeError: a device has lost another one, or hangs.
        """
        if self.sampled is None:
            return StepResult(np.zeros(0, np.int32), None, {})
        if self.is_tensor_parallel:
            wait_for_devices(self.sampled)
        tokens, scores = np.asarray(self.sampled)[self.burst_index][self.row_indices], None
        if tokens.ndim == 2:  # the scores [B, W]
            scores = TokenScores(tokens)
            tokens = np.ascontiguousarray(tokens[:, TOKEN_COLUMN])
        if self.check_devices is not None and (tokens < 0).any():
            self.check_devices()
        prompts = {
            seq_id: TokenScores(np.concatenate([np.asarray(chunk) for chunk in chunks])[:count])
            for seq_id, (count, chunks) in self.prompt_logprobs.items()
        }
        return StepResult(tokens, scores, prompts)


def score_prompts(
    scheduled: tuple[ScheduledSequence, ...],
    sampling: Callable[[Request], SamplingParams],
    score: Callable[..., dict[str, jax.Array]],
    wait: Callable[[Any], Any] | None = None,
) -> PromptScores:
    """Launch the scoring of the prompt tokens that a ragged step predicts: those right after its
    positions.

    Args:
        scheduled: The step's sequences in the order in which their tokens are flattened.
        sampling: Tells how a request is sampled; those with `prompt_logprobs` ask.
        score: Launches `prompt_logprobs_step` for the step's hidden states; called with `indices`
            and `targets`, int32 [PROMPT_LOGPROBS_CHUNK] each.
        wait: Waits for what several devices compute; None: there is one.
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
