"""What a launched step leaves on its way to the host, and what the host reads of it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import jax
import numpy as np

from jpaged.core.plan import ScheduledSequence, StepPlan
from jpaged.core.request import Candidates, Request
from jpaged.runtime.programs import PROMPT_LOGPROBS_CHUNK
from jpaged.runtime.sampler import Sampled
from jpaged.sampling_params import SamplingParams
from pallas_kernels import NUM_FACTS


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
        return self.packed[:, 1].view(np.float32)

    @property
    def ranks(self) -> np.ndarray:
        """int32 [C], 1 is the most likely."""
        return self.packed[:, 2]

    @property
    def top_token_ids(self) -> np.ndarray:
        """int32 [C, L], the most likely tokens, best first."""
        return self.packed[:, NUM_FACTS::2]

    @property
    def top_logprobs(self) -> np.ndarray:
        """float32 [C, L]."""
        return self.packed[:, NUM_FACTS + 1 :: 2].view(np.float32)

    def first(self, count: int) -> np.ndarray:
        """`packed` with so many likeliest tokens, or all there are; a copy."""
        return self.packed[:, : NUM_FACTS + 2 * count].copy()

    def row_bytes(self, index: int, count: int) -> bytes:
        """Row `index` of `first(count)`."""
        width = self.packed.shape[1]
        start, size = index * width, min(NUM_FACTS + 2 * count, width)
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
    def candidates(self) -> Candidates | None:
        """Each scheduled sequence's most probable tokens, for beam searches, as `logprobs`."""
        scores = self.logprobs
        return None if scores is None else Candidates(scores.top_token_ids, scores.top_logprobs)


@dataclass(frozen=True)
class StepHandle:
    """A launched step whose results are on their way to the host.

    `sampled` is None where nothing was scheduled: such a plan only moved blocks. Where it has
    scores, the tokens are read from these. The step has the plan's sequences in an order of its
    own; `places[i]` is where `plan.scheduled[i]` is in it. The steps of a burst share one array;
    `index` is the step's own there. `faults` are requests whose sampling could not be set up, and
    why: they are in the step, but their tokens mean nothing.
    """

    plan: StepPlan
    sampled: Sampled | None
    prompt_logprobs: dict[int, list[jax.Array]]
    places: np.ndarray
    index: tuple[int, ...] = ()
    faults: tuple[tuple[Request, Exception], ...] = ()

    def read(self) -> StepResult:
        """Wait for the step and give its results."""
        if self.sampled is None:
            return StepResult(np.zeros(0, np.int32), None, {})
        if self.sampled.scores is None:
            tokens, scores = np.asarray(self.sampled.token_ids)[self.index][self.places], None
        else:
            scores = TokenScores(np.asarray(self.sampled.scores)[self.index][self.places])
            tokens = np.ascontiguousarray(scores.packed[:, 0])
        return StepResult(
            tokens, scores, self._read_prompt_logprobs() if self.prompt_logprobs else {}
        )

    def _read_prompt_logprobs(self) -> dict[int, TokenScores]:
        wanted = {}
        for seq_id, chunks in self.prompt_logprobs.items():
            count = num_scored_prompt_tokens(self._scheduled(seq_id))
            whole = np.concatenate([np.asarray(chunk) for chunk in chunks])
            wanted[seq_id] = TokenScores(whole[:count])
        return wanted

    def _scheduled(self, seq_id: int) -> ScheduledSequence:
        return next(s for s in self.plan.scheduled if s.sequence.seq_id == seq_id)


def num_scored_prompt_tokens(item: ScheduledSequence) -> int:
    """How many prompt tokens a scheduled chunk predicts: those right after its positions."""
    end = min(item.start + item.num_scheduled_tokens, item.sequence.num_prompt_tokens - 1)
    return max(end - item.start, 0)


Score = Callable[..., jax.Array]
"""`jpaged.runtime.steps.prompt_logprobs_step` of the step's hidden states."""


def score_prompts(
    scheduled: tuple[ScheduledSequence, ...],
    sampling: Callable[[Request], SamplingParams],
    score: Score,
) -> dict[int, list[jax.Array]]:
    """Launch the scoring of a ragged step's prompt tokens.

    Args:
        scheduled: The step's sequences in the order in which their tokens are flattened.
        sampling: Tells how a request is sampled; those with `prompt_logprobs` ask.
        score: Called with `indices` and `targets`, int32 [PROMPT_LOGPROBS_CHUNK] each.

    Returns:
        seq_id -> what `score` gave for its chunks.
    """
    scored, offset = {}, 0
    for item in scheduled:
        wanted = sampling(item.sequence.request).prompt_logprobs is not None
        count = num_scored_prompt_tokens(item) if wanted else 0
        if count:
            scored[item.sequence.seq_id] = _score_chunks(item, offset, count, score)
        offset += item.num_scheduled_tokens
    return scored


def _score_chunks(
    item: ScheduledSequence, offset: int, count: int, score: Score
) -> list[jax.Array]:
    chunks, size = [], PROMPT_LOGPROBS_CHUNK
    for at in range(0, count, size):
        n = min(size, count - at)
        indices, targets = np.zeros(size, np.int32), np.zeros(size, np.int32)
        indices[:n] = np.arange(offset + at, offset + at + n)
        first = item.start + at + 1
        targets[:n] = item.sequence.token_ids[first : first + n]
        chunks.append(score(indices=indices, targets=targets))
    return chunks
