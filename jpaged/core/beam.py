"""Beam search: which continuations of which beams go on, and which answers are complete."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np


class Continuation(NamedTuple):
    """One beam of the next step: the beam it continues, its new token and its score."""

    parent: int
    token_id: int
    score: float


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A complete answer; `is_ended` by an end token rather than by its length."""

    output_token_ids: tuple[int, ...]
    cumulative_logprob: float
    score: float
    is_ended: bool


class BeamSearch:
    """The state of one search."""

    def __init__(
        self,
        width: int,
        *,
        length_penalty: float = 1.0,
        early_stopping: bool | Literal["never"] = False,
        end_token_ids: frozenset[int] = frozenset(),
    ):
        self.width = width
        self.hypotheses: list[Hypothesis] = []

    def advance(
        self,
        outputs: list[list[int]],
        scores: list[float],
        token_ids: np.ndarray,
        logprobs: np.ndarray,
        *,
        max_tokens: int,
    ) -> list[Continuation]:
        """Take a step."""
        raise NotImplementedError
