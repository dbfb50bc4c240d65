"""Beam search: rank the continuations of beams, and collect complete answers.

Answers and scores equal those of `generate(num_beams=width, do_sample=False)` in Hugging Face
transformers. Sums and length penalties are float32 as in transformers, because other rounding
could swap two beams with close scores.
"""

import math
import numbers
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Literal, NamedTuple

import numpy as np

_FLOAT32 = np.finfo(np.float32)


class Continuation(NamedTuple):
    """A beam extended by one token.

    Attributes:
        parent: Index of the extended beam.
        token_id: Token that extends the beam.
        score: Sum of the log-probabilities of all output tokens.
    """

    parent: int
    token_id: int
    score: float


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A complete answer of a beam search.

    Attributes:
        output_token_ids: Output tokens, including the end token if the answer has one.
        cumulative_logprob: Sum of the log-probabilities of all output tokens.
        score: `cumulative_logprob / len(output_token_ids) ** length_penalty`.
        is_ended: Whether the last token is an end token.
    """

    output_token_ids: tuple[int, ...]
    cumulative_logprob: float
    score: float
    is_ended: bool


@dataclass(eq=False)
class BeamSearch:
    """State of a beam search for the `width` best answers.

    Attributes:
        width: Number of beams, and maximum number of answers. A width of 1 is greedy search, which
            stops at the first end token.
        length_penalty: Exponent of the length in `Hypothesis.score`.
        early_stopping: When a search with `width` complete answers stops. True: immediately. False:
            when no beam, scored at its current length, beats the worst answer. "never": as False,
            but beams are scored at length `max_tokens` if `length_penalty` is positive.
        end_token_ids: Tokens that complete an answer.
        hypotheses: Complete answers so far, best first. A finished search has fewer than `width`
            only if too few tokens had finite log-probabilities. In that case, transformers adds
            placeholder answers with a score of -1e9.

    Raises:
        ValueError: `width` is below 1, `length_penalty` is not finite, or `early_stopping` is none
            of the listed values.
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
        # Convert NumPy numbers to Python numbers. Copy the set, because the caller may change the
        # original later.
        self.width, self.length_penalty = int(width), float(penalty)
        self.end_token_ids = frozenset(self.end_token_ids)

    @property
    def num_candidates(self) -> int:
        """Number of most probable next tokens per beam that `advance` needs as candidates.

        A step needs the `width` best continuations that do not end with an end token. All of them
        may extend the same beam, and every end token may be more probable than they are.
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
        """Take one step of the search, and add complete answers to `hypotheses`.

        An answer is complete when it has `max_tokens` tokens or ends with an end token. An end
        token completes an answer only if it is among the step's `width` best continuations. Between
        equal scores, the earlier beam ranks first, then the earlier candidate.

        Args:
            outputs: Output tokens of each of the k beams, equally long. The first step has one beam
                without output tokens.
            scores: Sum of the output tokens' log-probabilities for each beam.
            token_ids: int [k, L]; most probable next tokens of each beam, best first. L is at least
                `num_candidates`, or the size of a smaller vocabulary.
            logprobs: float32 [k, L]; log-probabilities of `token_ids`. Tokens with a value that is
                not finite are ignored.
            max_tokens: Maximum number of output tokens.

        Returns:
            Beams of the next step, best first; an empty list when the search is over.

        Raises:
            ValueError: The arguments have different numbers of beams, or `outputs` differ in
                length.
        """
        _check_beams(outputs, scores, token_ids, logprobs)
        ranked = _rank_continuations(scores, token_ids, logprobs)
        length = len(outputs[0]) + 1
        is_full_length = length >= max_tokens
        self._add_complete_answers(outputs, ranked[: self.width], length, is_full_length)
        if is_full_length:
            return []
        beams = [each for each in ranked if each.token_id not in self.end_token_ids][: self.width]
        return beams if beams and self._can_improve(beams[0], length, max_tokens) else []

    def _add_complete_answers(
        self,
        outputs: Sequence[Sequence[int]],
        best: list[Continuation],
        length: int,
        is_full_length: bool,
    ) -> None:
        for parent, token_id, logprob in best:
            is_ended = token_id in self.end_token_ids
            if is_ended or is_full_length:
                tokens = (*outputs[parent], token_id)
                score = self._score(logprob, length)
                self.hypotheses.append(Hypothesis(tokens, logprob, score, is_ended))
        # The sort is stable: if two answers have equal scores, the older answer ranks first.
        self.hypotheses.sort(key=lambda each: -each.score)
        del self.hypotheses[self.width :]

    def _can_improve(self, best: Continuation, length: int, max_tokens: int) -> bool:
        """Return whether any beam may still become better than the worst complete answer."""
        if len(self.hypotheses) < self.width:
            return True
        # With a width of 1, the first complete answer is the result of greedy search.
        if self.early_stopping is True or self.width == 1:
            return False
        looks_ahead = self.early_stopping == "never" and self.length_penalty > 0
        best_possible_score = self._score(best.score, max_tokens if looks_ahead else length)
        return best_possible_score > self.hypotheses[-1].score

    def _score(self, logprob: float, length: int) -> float:
        """Return `logprob / length ** length_penalty`, rounded as in transformers."""
        with np.errstate(over="ignore", under="ignore"):
            divisor = np.float64(length) ** self.length_penalty
            # Clip the divisor, which would become 0 or infinite with an extreme length_penalty.
            divisor = np.float32(np.clip(divisor, _FLOAT32.tiny, _FLOAT32.max))
            return float(np.float32(logprob) / divisor)


def _rank_continuations(
    scores: Sequence[float], token_ids: np.ndarray, logprobs: np.ndarray
) -> list[Continuation]:
    """Return all continuations with a finite score, best first."""
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
            "the same shape [beams, candidates]"
        )
    if not len(outputs) == len(scores) == shape[0] > 0:
        raise ValueError(
            f"outputs ({len(outputs)} beams), scores ({len(scores)}) and token_ids ({shape[0]}) "
            "must have the same number of beams, at least one"
        )
    lengths = {len(output) for output in outputs}
    if len(lengths) > 1:
        raise ValueError(f"outputs must be equally long, got lengths {sorted(lengths)}")
