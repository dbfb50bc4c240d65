"""Make random calls of the scheduler's functions fail."""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest


class InjectedError(Exception):
    pass


class FaultSite(NamedTuple):
    """A function whose calls fail at random, before or after the function has run."""

    owner: Any
    name: str
    rate: float = 0.01


class Injector:
    """Makes calls fail while `on` is true.

    Attributes:
        happened: Number of faults by function name.
        on: Whether calls may fail now.
    """

    def __init__(self, happened: Counter[str], on: bool = True):
        self.happened, self.on = happened, on
        self._pick = random.Random(0)

    @contextmanager
    def faults(self, seed: int, sites: list[FaultSite]) -> Iterator[None]:
        """While the context is active, let calls of the functions in `sites` fail at random, with
        the rate of each site."""
        self._pick = random.Random(seed)
        with pytest.MonkeyPatch.context() as patch:
            for site in sites:
                target = getattr(site.owner, site.name)
                patch.setattr(site.owner, site.name, self._failing(site, target))
            yield

    @contextmanager
    def spared(self, owner: Any, name: str) -> Iterator[None]:
        """Decorate a function, so that no fault is injected while it runs."""
        target = getattr(owner, name)

        def wrapper(*args: Any, **options: Any) -> Any:
            was_on, self.on = self.on, False
            target(*args, **options)
            self.on = was_on

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, wrapper)
            yield

    def _failing(self, site: FaultSite, target: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **options: Any) -> Any:
            if not self.on or self._pick.random() >= site.rate:
                return target(*args, **options)
            if self._pick.random() < 0.5:
                target(*args, **options)
            self.happened[site.name] += 1
            raise InjectedError(site.name)

        return wrapper
