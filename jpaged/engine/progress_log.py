"""Words about the start, for those who asked for them."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Reporter:
    """Tells on stderr what the start is doing, if asked to."""

    def __init__(self, verbose: bool):
        self._verbose = verbose

    def say(self, text: str) -> None:
        """One line."""
        if self._verbose:
            print(f"jpaged: {text}", file=sys.stderr, flush=True)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase of the start."""
        start = time.monotonic()
        yield
        self.say(f"{name} took {time.monotonic() - start:.2f} s")
