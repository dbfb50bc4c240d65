"""Which device row each running sequence has, and what the host keeps of it."""

from typing import NamedTuple

import numpy as np

from jpaged.core.plan import ScheduledSequence
from jpaged.runtime.sampler import SamplerLevel, required_level
from jpaged.runtime.sampling_state import PADDING_PARAMS, ROW_WIDTH, encode_row
from jpaged.sampling_params import SamplingParams


class RowSampling(NamedTuple):
    """How a row is sampled: its parameters, int32 [W], and what they need of a step."""

    encoded: np.ndarray
    level: SamplerLevel

    @classmethod
    def of(cls, params: SamplingParams, seed: int) -> "RowSampling":
        """Of one of a request's samples.

        Args:
            params: How the request is sampled.
            seed: The sample's own, which `params` tells only for the first.
        """
        return cls(encode_row(params, seed), required_level(params))


UNWANTED = RowSampling(PADDING_PARAMS, SamplerLevel.GREEDY)
"""Of a sequence that is in a step, but of which nothing is wanted any more."""


class RowTable:
    """Device rows handed to running sequences; the last row is for padding and never handed out.

    Sampling parameters lie in one array by row, so that a step gathers them without a loop.
    """

    def __init__(self, num_rows: int):
        self.sampling = np.zeros((num_rows, ROW_WIDTH), np.int32)
        self._levels = np.zeros(num_rows, np.int32)
        self._free = list(range(num_rows - 2, -1, -1))
        self._row_of: dict[int, int] = {}
        self.sampling[-1] = PADDING_PARAMS

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._row_of

    def assign(self, seq_id: int, sampling: RowSampling) -> int:
        """Give a sequence that enters the batch a row.

        Raises:
            ValueError: it has a row already.
        """
        if seq_id in self._row_of:
            raise ValueError(f"sequence {seq_id} has device row {self._row_of[seq_id]} already")
        row = self._row_of[seq_id] = self._free.pop()
        self.sampling[row], self._levels[row] = sampling
        return row

    def row(self, seq_id: int) -> int:
        """The row of a sequence that has one."""
        return self._row_of[seq_id]

    def release(self, seq_id: int) -> None:
        """Take the row of a sequence that left the batch."""
        self._free.append(self._row_of.pop(seq_id))

    def rows(self, scheduled: tuple[ScheduledSequence, ...]) -> np.ndarray:
        """Each scheduled sequence's row, int32."""
        of = self._row_of
        return np.fromiter((of[s.sequence.seq_id] for s in scheduled), np.int32, len(scheduled))

    def level(self, rows: np.ndarray) -> SamplerLevel:
        """What serves all of `rows`."""
        return SamplerLevel(int(np.bitwise_or.reduce(self._levels[rows])))
