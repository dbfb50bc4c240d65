"""Speculative decoding in the scheduler: choose which steps verify drafts, and count the drafts.

A verify step computes the last token and up to `num_drafts` drafts of each row. The device accepts
a draft if it equals the sampled token. A row therefore receives between 1 and 1 + `num_drafts`
tokens. The choice depends on counts and not on a clock, so that runs are reproducible.
"""

from collections.abc import Sequence as SequenceOf
from itertools import pairwise

import numpy as np

from jpaged.core.plan import NO_DRAFT

WINDOW_ROWS = 64
"""Number of rows after which the counts of the acceptance rate are halved, so that older verify
steps count less."""

NUM_TRIAL_STEPS = 4
"""Number of verify steps of a trial. Their acceptance rate decides whether to keep verifying
drafts."""

MIN_PLAIN_STEPS, MAX_PLAIN_STEPS = 64, 512
"""Number of plain steps between two trials. The number doubles after each trial without success, up
to the maximum. A trial without any accepted draft then takes less than 3 % of the time."""


class Speculation:
    """Chooses whether the next decode step verifies drafts, and counts the drafts.

    Args:
        num_drafts: Maximum number of drafts per row in a verify step.
        costs: Pairs (number of rows, cost), in ascending order. A cost is the time of a verify step
            of at most that many rows, divided by the time of a step without drafts. Batches with
            more rows than the last pair never verify drafts.

    Attributes:
        num_drafts: Maximum number of drafts per row in a verify step.
        num_verified_rows: Number of rows of verify steps with at least one draft.
        num_draft_tokens: Number of drafts that verify steps computed.
        num_accepted_tokens: Number of accepted drafts.
        num_verify_steps: Number of verify steps that the scheduler has planned.
        num_mixed_steps: Number of steps whose decode rows had no drafts because other rows
            computed prompts.
    """

    def __init__(self, num_drafts: int, costs: SequenceOf[tuple[int, float]]):
        if num_drafts < 1:
            raise ValueError(f"num_drafts must be at least 1, got {num_drafts}")
        if any(a[0] >= b[0] for a, b in pairwise(costs)):
            raise ValueError(
                f"costs={costs!r} must list pairs (number of rows, cost) "
                "with rising numbers of rows"
            )
        self.num_drafts = num_drafts
        self.num_verified_rows = self.num_draft_tokens = self.num_accepted_tokens = 0
        self.num_verify_steps = self.num_mixed_steps = 0
        self._costs = tuple(costs)
        # Numbers of verify steps, rows and tokens since the last trial began. A trial is a series
        # of verify steps that measures how many drafts are accepted.
        self._num_read_steps = self._num_rows = self._num_tokens = 0
        self._num_plain_steps, self._max_plain_steps = 0, MIN_PLAIN_STEPS

    def choose_num_drafts(self, num_rows: int) -> int:
        """Return the number of drafts per row for the next decode step; 0 for a plain step.

        Args:
            num_rows: Number of rows of the step.
        """
        cost = next((cost for rows, cost in self._costs if num_rows <= rows), None)
        if cost is None:
            return 0
        if self._num_read_steps < NUM_TRIAL_STEPS or self._num_tokens > cost * self._num_rows:
            if self._num_read_steps >= NUM_TRIAL_STEPS:
                self._max_plain_steps = MIN_PLAIN_STEPS
            self.num_verify_steps += 1
            self._num_plain_steps = 0
            return self.num_drafts
        self._num_plain_steps += 1
        if self._num_plain_steps >= self._max_plain_steps:
            self._max_plain_steps = min(2 * self._max_plain_steps, MAX_PLAIN_STEPS)
            self._num_read_steps = self._num_rows = self._num_tokens = 0
        return 0

    def record(self, token_ids: np.ndarray) -> None:
        """Count the tokens and drafts of a verify step.

        Args:
            token_ids: int [rows, 1 + k]; see `Scheduler.update`.
        """
        num_proposed = (token_ids[:, 1:] != NO_DRAFT).sum(axis=1)
        num_tokens = (token_ids >= 0).sum(axis=1)
        is_alive = num_tokens > 0
        self.num_verified_rows += int((num_proposed > 0).sum())
        self.num_draft_tokens += int(num_proposed.sum())
        self.num_accepted_tokens += int((num_tokens - is_alive).sum())
        self._num_read_steps += 1
        self._num_rows += int(is_alive.sum())
        self._num_tokens += int(num_tokens.sum())
        if self._num_rows > WINDOW_ROWS:
            self._num_rows //= 2
            self._num_tokens //= 2
