"""Trace and lower the equal layers of a program once."""

from collections.abc import Callable
from inspect import Parameter, signature
from typing import ParamSpec, TypeVar, cast

import jax

P = ParamSpec("P")
T = TypeVar("T")


def trace_once(function: Callable[P, T]) -> Callable[P, T]:
    """Put a function under `jax.jit`, so that the layers of a program share its trace.

    A program calls the function once per layer. Without `jax.jit`, JAX would trace and lower the
    function in each call. With `jax.jit`, JAX does so once for all calls with the same shapes and
    static arguments: the lowered program has one private function, and all these calls refer to it.
    XLA inlines the calls, so they cost no time on the device.

    Args:
        function: Function at module level. Positional arguments are trees of arrays.
            Keyword-only arguments are static, so they must be hashable.
    """
    parameters = signature(function).parameters.values()
    static = [it.name for it in parameters if it.kind is Parameter.KEYWORD_ONLY]
    return cast(Callable[P, T], jax.jit(function, static_argnames=static))
