"""Show on stderr how many of a figure's simulations are done, and the estimated remaining time."""

import sys
import time

from tqdm import tqdm

FIRST_LINE_S = 10.0
"""Seconds between the first and the second progress line, if stderr is not a terminal."""

GROWTH = 1.5
"""Factor between the times of two successive progress lines."""


class Progress:
    """Context manager that shows how many of `total` jobs are done.

    On a terminal, it shows a bar. Otherwise it prints lines, at growing intervals. For a single
    job, it shows nothing.

    Args:
        what: Name of the jobs.
        total: Number of jobs.
    """

    def __init__(self, what: str, total: int):
        self._what, self._total = what, total
        self._start, self._due = time.monotonic(), 0.0
        disable = None if total > 1 else True  # With None, tqdm shows the bar only on a terminal.
        self._bar = tqdm(total=total, desc=what, smoothing=0, file=sys.stderr, disable=disable)
        self.show(0)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def show(self, num_done: int) -> None:
        """Show that `num_done` jobs are done. Call this about every second."""
        if not self._bar.disable:
            self._bar.n = num_done
            self._bar.refresh()
            return
        seconds = time.monotonic() - self._start
        if self._total < 2 or seconds < self._due:
            return
        self._due = max(FIRST_LINE_S, GROWTH * seconds)
        left = seconds * (self._total - num_done) / num_done if num_done else None
        estimate = "no estimate yet" if left is None else f"about {left:.0f} s left"
        line = f"{self._what}: {num_done} of {self._total} after {seconds:.0f} s, {estimate}"
        print(line, file=sys.stderr, flush=True)
