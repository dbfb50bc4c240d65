"""JAX's settings of one thread, for the threads that work for it.

`with jax.default_matmul_precision(...)` and its like hold in the thread that enters them alone.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, ParamSpec, TypeVar

import jax

P = ParamSpec("P")
T = TypeVar("T")


class ThreadSettings:
    """The settings of the thread that makes this, as far as JAX lets a thread have its own."""

    def __init__(self):
        self._values = _own_settings()

    def run(self, work: Callable[P, T], *args: P.args, **keywords: P.kwargs) -> T:
        """Call `work` under these settings, in whatever thread."""
        present = _own_settings()
        with ExitStack() as stack:
            for name, value in self._values.items():
                if value is not present[name] and value != present[name]:
                    stack.enter_context(_manager(name)(value))
            return work(*args, **keywords)


def _own_settings() -> Mapping[str, Any]:
    names = [name for name in jax.config.values if _manager(name) is not None]
    return {name: getattr(jax.config, name) for name in names}


def _manager(name: str) -> Any:
    """What sets it for a block of code, if there is such a thing."""
    return getattr(jax, name.removeprefix("jax_"), None)
