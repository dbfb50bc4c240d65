"""What it costs to preempt a group either way, from times measured at the start."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np


@dataclass(frozen=True, slots=True)
class PreemptionCosts:
    """Times of prefill steps and of transfers, each rising by size.

    Attributes:
        prefill_seconds: (tokens, seconds) of a step.
        swap_seconds: (blocks, seconds) of one way between device and host, of several chunks at the
            end, which overlap.

    Raises:
        ValueError: a list is empty, its sizes do not rise or are not positive, or a time is
            negative.
    """

    prefill_seconds: tuple[tuple[int, float], ...]
    swap_seconds: tuple[tuple[int, float], ...]

    def __post_init__(self):
        _check("prefill_seconds", self.prefill_seconds)
        _check("swap_seconds", self.swap_seconds)

    def recompute(self, num_tokens: int) -> float:
        """Seconds to compute so many tokens again."""
        return _cover(self.prefill_seconds, num_tokens)

    def swap(self, num_blocks: int) -> float:
        """Seconds to bring so many blocks to the host and back."""
        return 2 * _along(self.swap_seconds, num_blocks)


def _cover(times: tuple[tuple[int, float], ...], amount: int) -> float:
    """As many of the largest size as are full, and the smallest size that holds the rest."""
    largest, seconds = times[-1]
    whole, rest = divmod(amount, largest)
    last = next(s for size, s in times if size >= rest) if rest else 0.0
    return whole * seconds + last


def _along(times: tuple[tuple[int, float], ...], amount: int) -> float:
    """In proportion between two sizes, and past the largest as before it."""
    if not amount:
        return 0.0
    before, last = ((0, 0.0), *times)[-2:]
    if amount <= last[0]:
        sizes, seconds = zip(*times, strict=True)
        return float(np.interp(amount, sizes, seconds))
    slope = max(last[1] - before[1], 0.0) / (last[0] - before[0])
    return last[1] + (amount - last[0]) * slope


def _check(name: str, times: tuple[tuple[int, float], ...]) -> None:
    sizes = [0, *(size for size, _ in times)]
    rising = all(a < b for a, b in pairwise(sizes))
    if not times or not rising or not all(seconds >= 0 for _, seconds in times):
        raise ValueError(
            f"{name}={times!r} must list (size, seconds) by rising positive size, "
            "with no negative time"
        )
