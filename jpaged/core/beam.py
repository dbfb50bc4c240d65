"""Beam search: which continuations of which beams go on, and which answers are complete.

The search is that of Hugging Face transformers' `generate(num_beams=width, do_sample=False)`, to
the same answers and scores: sums and length penalties are float32, as there, for a search that
rounds otherwise may rank two close beams the other way round.
"""

import math
import numbers
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Literal, NamedTuple

import numpy as np

_FLOAT32 = np.finfo(np.float32)


class Continuation(NamedTuple):
    """One beam of the next step: the beam it continues, its new token and its score."""

    parent: int
    token_id: int
    score: float


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A complete answer; `is_ended` by an end token rather than by its length.

    `cumulative_logprob` is the sum of its tokens' log-probabilities, the end token's counted, and
    `score` that sum divided by the number of these tokens to the power of the length penalty.
    """

    output_token_ids: tuple[int, ...]
    cumulative_logprob: float
    score: float
    is_ended: bool


@dataclass(eq=False)
class BeamSearch:
    """The state of one search for the `width` best answers.

    `early_stopping` says when a search that has `width` complete answers is over: at once (True);
    when the best beam, scored at its present length, is no better than the worst of them (False);
    or likewise, but with a beam scored at the length that suits it best ("never"): at `max_tokens`
    if `length_penalty` is positive, for that raises the scores of long answers. A search of width
    1 is greedy search, as in transformers, and is over at its first end token.

    `hypotheses` are the complete answers so far, best first, `width` at most. At the end there are
    fewer only if the vocabulary (of finite log-probabilities) was too small for more; transformers
    fills the list with made-up answers of score -1e9 then.

    Raises ValueError for a width below 1, a length_penalty that is not finite, and any other
    early_stopping.
    """

    width: int
    _: KW_ONLY
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    end_token_ids: frozenset[int] = frozenset()
    hypotheses: list[Hypothesis] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self):
        width, penalty = self.width, self.length_penalty
        if not isinstance(width, numbers.Integral) or isinstance(width, bool) or width < 1:
            raise ValueError(f"width={width!r} must be an integer of at least 1")
        if not isinstance(penalty, numbers.Real) or not math.isfinite(penalty):
            raise ValueError(f"length_penalty={penalty!r} must be a finite number")
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise ValueError(
                f'early_stopping={self.early_stopping!r} must be True, False or "never"'
            )
        # They may be numbers of numpy, and a set that its owner changes.
        self.width, self.length_penalty = int(width), float(penalty)
        self.end_token_ids = frozenset(self.end_token_ids)

    @property
    def num_candidates(self) -> int:
        """The next tokens that each beam must bring (a smaller vocabulary brings all it has).

        They are enough for an exact search. A step asks for the `width` best continuations, of
        which a beam has `width` at most, and for the `width` best that end nothing; of these too
        a beam has `width` at most, and only the end tokens can come between them.
        """
        return self.width + len(self.end_token_ids)

    def advance(
        self,
        outputs: Sequence[Sequence[int]],
        scores: Sequence[float],
        token_ids: np.ndarray,
        logprobs: np.ndarray,
        *,
        max_tokens: int,
    ) -> list[Continuation]:
        """Take a step: the beams of the next one, best first, or [] when the search is over.

        Beam i has the output tokens `outputs[i]`, all beams equally many, of summed
        log-probabilities `scores[i]`. Its likeliest next tokens, best first, are
        `token_ids[i]` (int [k, L]) with `logprobs[i]` (float32 [k, L]); L is `num_candidates` at
        least, or the whole vocabulary. The first step has one beam: no output, score 0. A token
        whose log-probability is not finite is no candidate. Of equal scores the earlier beam's
        comes first, then the earlier candidate's.

        An answer is complete with an end token or with `max_tokens` tokens, but an end token
        counts only among the `width` best continuations of its step; `hypotheses` has the best.

        Raises ValueError if the beams are not of one number and one length.
        """
        _check_beams(outputs, scores, token_ids, logprobs)
        ranked = _rank_continuations(scores, token_ids, logprobs)
        length = len(outputs[0]) + 1
        is_full_length = length >= max_tokens
        self._collect(outputs, ranked[: self.width], length, is_full_length)
        if is_full_length:
            return []
        beams = [each for each in ranked if each.token_id not in self.end_token_ids][: self.width]
        return beams if beams and self._can_improve(beams[0], length, max_tokens) else []

    def _collect(
        self,
        outputs: Sequence[Sequence[int]],
        best: list[Continuation],
        length: int,
        is_full_length: bool,
    ) -> None:
        """Enter those of the `best` continuations that are complete among the hypotheses."""
        for parent, token_id, logprob in best:
            is_ended = token_id in self.end_token_ids
            if is_ended or is_full_length:
                tokens = (*outputs[parent], token_id)
                score = self._score(logprob, length)
                self.hypotheses.append(Hypothesis(tokens, logprob, score, is_ended))
        # The sort is stable: of equal scores the older answer stays.
        self.hypotheses.sort(key=lambda each: -each.score)
        del self.hypotheses[self.width :]

    def _can_improve(self, best: Continuation, length: int, max_tokens: int) -> bool:
        """Whether the beams, of which `best` leads, may still change the hypotheses."""
        if len(self.hypotheses) < self.width:
            return True
        # Of width 1 the answer in hand is the greedy one: no other is looked for.
        if self.early_stopping is True or self.width == 1:
            return False
        looks_ahead = self.early_stopping == "never" and self.length_penalty > 0
        best_possible_score = self._score(best.score, max_tokens if looks_ahead else length)
        return best_possible_score > self.hypotheses[-1].score

    def _score(self, logprob: float, length: int) -> float:
        """The score of an answer, or of a beam as if it were one; float32 arithmetic."""
        with np.errstate(over="ignore", under="ignore"):
            divisor = np.float64(length) ** self.length_penalty
            # An extreme penalty must not end a serving loop: no infinity, no division by zero.
            divisor = np.float32(np.clip(divisor, _FLOAT32.tiny, _FLOAT32.max))
            return float(np.float32(logprob) / divisor)


def _rank_continuations(
    scores: Sequence[float], token_ids: np.ndarray, logprobs: np.ndarray
) -> list[Continuation]:
    """All continuations, best first."""
    totals = np.asarray(scores, np.float32)[:, None] + np.asarray(logprobs, np.float32)
    order = np.argsort(-totals, axis=None, kind="stable")
    order = order[np.isfinite(totals.ravel()[order])]
    parents = order // totals.shape[1]
    columns = (parents, np.ravel(token_ids)[order], totals.ravel()[order])
    return list(map(Continuation, *(column.tolist() for column in columns)))


def _check_beams(
    outputs: Sequence[Sequence[int]],
    scores: Sequence[float],
    token_ids: np.ndarray,
    logprobs: np.ndarray,
) -> None:
    shape = np.shape(token_ids)
    if np.shape(logprobs) != shape or len(shape) != 2:
        raise ValueError(
            f"token_ids of shape {shape} and logprobs of shape {np.shape(logprobs)} must have "
            "one shape [beams, candidates]"
        )
    if not len(outputs) == len(scores) == shape[0] > 0:
        raise ValueError(
            f"outputs ({len(outputs)} beams), scores ({len(scores)}) and token_ids ({shape[0]}) "
            "must be of the same beams, at least one"
        )
    lengths = {len(output) for output in outputs}
    if len(lengths) > 1:
        raise ValueError(f"outputs must be equally long, got lengths {sorted(lengths)}")
