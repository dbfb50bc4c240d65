"""What a launched step leaves on its way to the host, and what the host reads of it."""

from dataclasses import dataclass

import jax
import numpy as np

from jpaged.core.plan import ScheduledSequence, StepPlan
from jpaged.core.request import Candidates
from jpaged.runtime.sampler import Sampled


@dataclass(frozen=True)
class TokenScores:
    """Log-probabilities of some tokens of one sequence and of their best alternatives.

    Attributes:
        logprobs: float32 [C], of the tokens themselves.
        ranks: int32 [C], 1 is the most likely.
        top_token_ids: int32 [C, L], the most likely tokens, best first.
        top_logprobs: float32 [C, L].
    """

    logprobs: np.ndarray
    ranks: np.ndarray
    top_token_ids: np.ndarray
    top_logprobs: np.ndarray


@dataclass(frozen=True)
class StepResult:
    """What the host reads of a finished step.

    Attributes:
        token_ids: int32 [len(plan.scheduled)], sampled.
        logprobs: One row a scheduled sequence, or None if nobody in the step asked.
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

    `sampled` is None where nothing was scheduled: such a plan only moved blocks. The step has the
    plan's sequences in an order of its own; `places[i]` is where `plan.scheduled[i]` is in it. The
    steps of a burst share one array of tokens; `index` is the step's own there.
    """

    plan: StepPlan
    sampled: Sampled | None
    prompt_logprobs: dict[int, list[tuple[jax.Array, ...]]]
    places: np.ndarray
    index: tuple[int, ...] = ()

    def read(self) -> StepResult:
        """Wait for the step and give its results."""
        if self.sampled is None:
            return StepResult(np.zeros(0, np.int32), None, {})
        tokens = np.asarray(self.sampled.token_ids)[self.index][self.places]
        scores = self.sampled[1:]
        asked = scores[0] is not None
        logprobs = TokenScores(*(np.asarray(a)[self.places] for a in scores)) if asked else None
        return StepResult(tokens, logprobs, self._read_prompt_logprobs())

    def _read_prompt_logprobs(self) -> dict[int, TokenScores]:
        wanted = {}
        for seq_id, chunks in self.prompt_logprobs.items():
            count = num_scored_prompt_tokens(self._scheduled(seq_id))
            columns = zip(*chunks, strict=True)
            whole = (np.concatenate([np.asarray(c) for c in col])[:count] for col in columns)
            wanted[seq_id] = TokenScores(*whole)
        return wanted

    def _scheduled(self, seq_id: int) -> ScheduledSequence:
        return next(s for s in self.plan.scheduled if s.sequence.seq_id == seq_id)


def num_scored_prompt_tokens(item: ScheduledSequence) -> int:
    """How many prompt tokens a scheduled chunk predicts: those right after its positions."""
    end = min(item.start + item.num_scheduled_tokens, item.sequence.num_prompt_tokens - 1)
    return max(end - item.start, 0)
